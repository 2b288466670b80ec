"""Bounds of a group of one stage that must hold the longest sequences, each of them whole.

Sequences that fit under only one strategy of a set run under it. Linear bounds (``work_bounds``) divide such
sequences: evenly over the replicas, with the last tiles of a full micro-batch, while a real micro-batch of few
long sequences is far from that. Here the m longest sequences H are assigned to the D replicas in every way, H_r to
replica r; the others may be divided.

**One replica** that holds H and other sequences y. Per phase and case of ``work_bounds`` (the ring hidden, or
exposed) its micro-batches take B(T_i) + slope (S_i + O_i) with B the base, S the attention and O the last tiles of
the longest, and B(T) >= c + a T up to the capacity (``cost_tables.line_of``). Together its micro-batches take at
least

    f(T_H) + slope (S_H + O_H) + a T_y + slope S_y,    f(T) = a T + min(min over T' >= T of (B(T') - a T'), n c)

with n = max(2, T_H / capacity rounded up): either one micro-batch holds all, or n and more do. O_H: of the longest
sequence, and of every one with which those so far need one micro-batch more, as some micro-batch has none longer
than it. The time of a replica is affine in y; without y, the highest of all lines is g(H).

**All replicas.** D Z is at least the sum of the first, and Z at least the largest g, so with any theta in [0, 1]

    Z >= min over assignments of (theta max_r g(H_r) + (1 - theta) / D sum_r (f + slope (S + O))(H_r))
         + (1 - theta) / D sum over y of (a T_y + slope S_y),

a linear bound of the group, like those of ``work_bounds``. A small theta keeps all long ones from one replica,
which would have fewer last tiles in all. Assignments are listed up to the order of the replicas; if there are too
many, only the longest sequences are whole, and the others are y.

**Configuration programs** (``ExclusiveProgram``) of a pipeline of one replica that must hold the longest
sequences: all of them are in configuration LPs (``configuration_columns``) of windows around the longest. The dual
of such a program is a mixture of paths and a price for every sequence, which prove

    time >= sum_m min_x (weights of m on the mixture . times of x - prices . x) + prices . held

for any sequences that are held. Exclusive sequences may have any price. The others may be elsewhere, at some cost:
with prices of at most that, the bound of all of them together is one of this group and of what it leaves to
others. They are *loose*: by quanta of a few kinds, each with the minimum attention of its sequences.

Windows cover all numbers of micro-batches around the longest, each with its own prices. For n_k others for which a
window has the price p_k, and another one a higher price q_k, p_k x_k >= q_k x_k - (q_k - p_k) n_k: so the highest
prices hold for all windows, with the lowest bound of all n.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from milpplan.lengths.bounds import Window, best_mixture
from milpplan.lengths.bounds.configuration_columns import (
    Columns,
    ConfigurationLP,
    PriceBound,
    Start,
    optimise_prices,
)
from milpplan.lengths.bounds.long_sequence import halved
from milpplan.lengths.bounds.micro_batch_pricing import MicroBatchPricing, PinnedItem
from milpplan.lengths.bounds.work_bounds import LinearBounds, PipelineWorkBound
from milpplan.lengths.candidates import SizedCandidate
from milpplan.lengths.cost_tables import Tables, hull_below, line_of
from milpplan.lengths.deadline import Deadline
from milpplan.simulation import FloatArray, IntArray

# Maximum number of assignments and of whole sequences.
_MAX_ASSIGNMENTS, MAX_WHOLE = 35_000, 24
# Shares of the capacity at which lines are highest; weights theta of the slowest replica.
_LOADS = (1.0, 0.25)
_THETAS = (1.0, 0.1)
# Shares of the other sequences for which the highest bound is kept.
_PARTS = (0.0, 0.02, 0.1, 0.3, 1.0)
# Factor that covers the rounding of float sums.
_SAFETY = 1.0 - 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class _Assignments:
    """Assignments [w] of sequences to replicas."""

    quanta: IntArray
    """Quanta of each replica, [w, D]."""
    attention: FloatArray
    """Attention in ns, [2, w, D] by phase."""
    once: FloatArray
    """Last tiles in ns, [2, w, D] by phase."""
    used: IntArray
    """Number of replicas in use, [w]."""

    @staticmethod
    def none(num_replicas: int) -> _Assignments:
        """Return the empty assignment."""
        return _Assignments(
            np.zeros((1, num_replicas), np.int64),
            np.zeros((2, 1, num_replicas)),
            np.zeros((2, 1, num_replicas)),
            np.zeros(1, np.int64),
        )

    def with_one(self, quanta: int, attention: FloatArray, once: FloatArray, max_quanta: int) -> _Assignments:
        """Add a sequence, no longer than those so far, to every replica in use or to the first empty one.

        ``attention`` and ``once`` [2] are its own.
        """
        size = self.quanta.shape[1]
        rows, replicas = np.nonzero(np.arange(size) <= self.used[:, None])
        row_numbers = np.arange(len(rows))
        total, cores, tiles = self.quanta[rows], self.attention[:, rows], self.once[:, rows]
        num_before = -(-total[row_numbers, replicas] // max_quanta)
        total[row_numbers, replicas] += quanta
        added = -(-total[row_numbers, replicas] // max_quanta) - num_before
        cores[:, row_numbers, replicas] += attention[:, None]
        tiles[:, row_numbers, replicas] += once[:, None] * added
        return _Assignments(total, cores, tiles, np.maximum(self.used[rows], replicas + 1))


@dataclass(frozen=True, slots=True, eq=False)
class AffinePhase:
    """Line below one phase in one case: ``constant`` + ``slope`` T + ``factor`` times the attention for T
    quanta."""

    factor: float
    constant: float
    slope: float
    above: FloatArray
    """Minimum over micro-batches of at least T quanta of their time less ``slope`` T, [G + 1]."""

    def at(self, quanta: IntArray) -> FloatArray:
        """Return f of the module, [...] ns; 0 for no quanta."""
        # A table is faster, as many assignments hold as much.
        table_quanta = np.arange(int(quanta.max(initial=0)) + 1)
        capacity = len(self.above) - 1
        number = np.maximum(2, -(-table_quanta // capacity))
        single_batch = np.where(table_quanta <= capacity, self.above[np.minimum(table_quanta, capacity)], np.inf)
        table = self.slope * table_quanta + np.minimum(single_batch, number * self.constant)
        table[0] = 0.0
        return np.asarray(table[quanta])


def lines(tables: Tables, stage: int, phase: int, max_quanta: int) -> tuple[list[AffinePhase], list[FloatArray]]:
    """Return the lines of a phase on a stage, and for each the minimum times of micro-batches by their minimum
    quanta, [G + 1]."""
    phases, min_times = [], []
    for factor, base in zip(tables.slopes, tables.values([stage], phase, max_quanta), strict=True):
        hull = hull_below(base)
        rising = np.minimum.accumulate(base[::-1])[::-1]
        quanta = np.arange(1, max_quanta + 1)
        for constant, slope in dict.fromkeys(line_of(hull, max(1.0, at * max_quanta)) for at in _LOADS):
            above = np.minimum.accumulate((base - slope * quanta)[::-1])[::-1]
            phases.append(AffinePhase(factor, constant, slope, np.append(above[:1], above)))
            min_times.append(np.append(rising[:1], rising))
    return phases, min_times


def highest(
    phases: list[AffinePhase], min_times: list[FloatArray], quanta: IntArray, cores: FloatArray
) -> FloatArray:
    """Return g of the module in one phase, [...] ns; ``cores`` is the attention with last tiles."""
    highest_ns = np.zeros(quanta.shape)
    table_quanta = np.arange(int(quanta.max(initial=0)) + 1)
    for factor in {line.factor for line in phases}:
        indices = [index for index, line in enumerate(phases) if line.factor == factor]
        capacity = len(min_times[indices[0]]) - 1
        number = np.maximum(2, -(-table_quanta // capacity))
        several_batches = np.max(
            [
                phases[single_batch].constant * number + phases[single_batch].slope * table_quanta
                for single_batch in indices
            ],
            axis=0,
        )
        single_batch = np.where(
            table_quanta <= capacity, min_times[indices[0]][np.minimum(table_quanta, capacity)], np.inf
        )
        table = np.minimum(single_batch, several_batches)
        table[0] = 0.0
        highest_ns = np.maximum(highest_ns, table[quanta] + factor * cores)
    return highest_ns


def max_exclusive(strategy: SizedCandidate) -> int:
    """Return the maximum number of sequences whose assignments to a strategy's replicas can be listed; 0 for
    pipelines."""
    layout = strategy.candidate.layout
    if layout.pp > 1:
        return 0
    # Number of assignments by the number of replicas in use.
    num_by_used, num_sequences = np.eye(1, layout.dp)[0], 1
    while num_sequences < MAX_WHOLE:
        num_by_used = num_by_used * np.arange(1, layout.dp + 1) + np.append(0.0, num_by_used[:-1])
        if num_by_used.sum() > _MAX_ASSIGNMENTS:
            break
        num_sequences += 1
    return num_sequences


def exclusive_bounds(tables: Tables, strategy: SizedCandidate, max_quanta: int, number: int) -> LinearBounds:
    """Return bounds of groups that hold the ``number`` longest sequences of the workload.

    Args:
        tables: cost tables of a strategy of one stage.
        strategy: the strategy.
        max_quanta: capacity of a micro-batch, at least the longest sequence.
        number: at most ``max_exclusive``.
    """
    load, size = tables.load, strategy.candidate.layout.dp
    quanta = load.lengths // load.token_quantum
    kernels = np.stack([tables.kernels([0], phase) for phase in (0, 1)])
    phases = [lines(tables, 0, phase, max_quanta) for phase in (0, 1)]
    assignments, counts = _Assignments.none(size), np.zeros(len(quanta))
    for length in longest(tables, number):
        assignments = assignments.with_one(
            int(quanta[length]), kernels[:, 0, length], kernels[:, 1, length], max_quanta
        )
        counts[length] += 1.0
    shares, constants = _rows(assignments, phases, kernels[:, 0], quanta, counts)
    return _kept_bounds(shares, constants, counts, tables, max_quanta)


def longest(tables: Tables, number: int) -> list[int]:
    """Return the length indices of the ``number`` longest sequences of the workload, the longest first."""
    counts = tables.load.counts
    lengths: list[int] = np.repeat(np.arange(len(counts)), counts)[::-1][:number].tolist()
    return lengths


def _kept_bounds(
    shares: FloatArray, constants: FloatArray, held: FloatArray, tables: Tables, max_quanta: int
) -> LinearBounds:
    """Return the first bound, and those that are highest for ``held`` [n] sequences with some share of the
    others."""
    load = tables.load
    totals = np.array([shares @ (held + share * (load.counts - held)) + constants for share in _PARTS])
    kept = sorted({0, *totals.argmax(axis=1).tolist()})
    table = shares[kept] * _SAFETY
    table[:, load.lengths > max_quanta * load.token_quantum] = np.inf
    return LinearBounds(table, constants[kept] * _SAFETY)


def _rows(
    assignments: _Assignments,
    phases: list[tuple[list[AffinePhase], list[FloatArray]]],
    attention: FloatArray,
    quanta: IntArray,
    held: FloatArray,
) -> tuple[FloatArray, FloatArray]:
    """Return shares [t, n] and constants [t] of groups that hold ``held`` [n] in one of the assignments, the first
    without shares."""
    size = assignments.quanta.shape[1]
    cores = assignments.attention + assignments.once
    replicas = [highest(*phases[phase], assignments.quanta, cores[phase]) for phase in (0, 1)]
    slowest_ns = (replicas[0] + replicas[1]).max(axis=1)
    sums = [
        [(line.at(assignments.quanta) + line.factor * cores[phase]).sum(axis=1) for line in phases[phase][0]]
        for phase in (0, 1)
    ]
    rows = []
    for theta in _THETAS:
        pairs = product(range(len(sums[0])), range(len(sums[1]))) if theta < 1.0 else [(0, 0)]
        for ahead, back in pairs:
            weight = (1.0 - theta) / size
            chosen = phases[0][0][ahead], phases[1][0][back]
            constant = float((theta * slowest_ns + weight * (sums[0][ahead] + sums[1][back])).min())
            shares = weight * sum(
                line.slope * quanta + line.factor * attention[phase] for phase, line in enumerate(chosen)
            )
            rows.append((np.asarray(shares), constant - float(shares @ held)))
    return np.array([share for share, _ in rows]), np.array([constant for _, constant in rows])


# Number of micro-batches, ahead or behind, from which windows are open.
_OPEN = 8
# Upper ends of the kinds of loose sequences, as shares of the longest.
_LENGTH_SHARES = (0.1, 0.2, 0.4, 0.7, 1.0)
# Number of stage mixes in programs of divisible loads.
_MIXES = 2


@dataclass(frozen=True, eq=False)
class _Node:
    """A window with its bound, the start of its program, and the columns of its last one."""

    configuration: ConfigurationLP
    bound: PriceBound
    start: Start
    solved: bool = False
    """True if its program was solved."""
    columns: Columns | None = None
    """Columns, perhaps for other prices."""


class ExclusiveProgram:
    """Bounds of groups that hold all sequences from length index ``first`` on, while others cost ``other_costs``
    [n] elsewhere, ns."""

    def __init__(
        self, work_bound: PipelineWorkBound, pricing: MicroBatchPricing, first: int, other_costs: FloatArray
    ) -> None:
        """Start with windows of divisible loads.

        Args:
            work_bound: work bound of a pipeline of one replica with shared memory, which holds the longest
                sequence.
            pricing: pricing problem of its micro-batches.
            first: first exclusive length index.
            other_costs: costs elsewhere, [n] ns.
        """
        self.work_bound, self.items, self.first = work_bound, pricing.items, first
        sizes = pricing.items.sizes
        ends = np.array(_LENGTH_SHARES) * int(sizes[:first].max(initial=1))
        self.kinds = np.unique(np.searchsorted(ends, sizes[:first]), return_inverse=True)[1]
        num_kinds = int(self.kinds.max(initial=-1)) + 1
        ns_per_quantum = work_bound.stages.last[:first] / sizes[:first]
        is_of_kind = [self.kinds == kind for kind in range(num_kinds)]
        self.pricing = pricing.with_loose_quanta(self.kinds)
        self.needed = self.pricing.items.counts.astype(np.float64)
        self.last = np.append([ns_per_quantum[kind].min() for kind in is_of_kind], work_bound.stages.last[first:])
        self.columns: Columns | None = None
        self.other_costs, self.max_prices = self._worth(other_costs)
        self.nodes = [self._piece(window) for window in _windows()]

    def _worth(self, other_costs: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return the costs of others elsewhere, and the maximum prices per quantum of every kind; exclusive
        sequences may have any price."""
        other_costs = other_costs[: self.first]
        cost_per_quantum = other_costs / self.items.sizes[: self.first]
        max_prices = [cost_per_quantum[self.kinds == kind].max() for kind in range(self.pricing.items.num_loose)]
        return other_costs, np.append(max_prices, np.full(len(self.needed) - len(max_prices), np.inf))

    def with_other_costs(self, other_costs: FloatArray) -> ExclusiveProgram:
        """Return the program for other costs elsewhere.

        Its bounds stay valid, as lower prices leave a window no less. Programs begin with the last solutions.
        """
        if np.array_equal(other_costs[: self.first], self.other_costs):
            return self
        program = copy(self)
        program.other_costs, program.max_prices = self._worth(other_costs)
        program.nodes = [replace(node, solved=False) for node in self.nodes]
        return program

    @property
    def bound_ns(self) -> float:
        """Minimum time of a group if everything that it does not hold costs its price elsewhere."""
        return min(self._value(node.bound) for node in self.nodes)

    @property
    def bounds(self) -> LinearBounds:
        """Linear bound by the other sequences that a group holds."""
        shares = np.max([self._shares(node.bound) for node in self.nodes], axis=0)
        # A lower price is the highest one less a constant for all sequences.
        constant = self.bound_ns - float(shares @ self.items.counts[: self.first])
        shares = np.append(shares, np.zeros(len(self.items.sizes) - self.first))
        return LinearBounds(shares[None] * _SAFETY, np.array([constant - abs(constant) * (1.0 - _SAFETY)]))

    def _shares(self, bound: PriceBound) -> FloatArray:
        """Return the minimum times of others by a bound, at most their costs elsewhere, ns."""
        return np.minimum(bound.prices[self.kinds] * self.items.sizes[: self.first], self.other_costs)

    def _value(self, bound: PriceBound) -> float:
        """Return the value of a bound if everything that a group does not hold costs its price elsewhere, ns."""
        num_loose = self.pricing.items.num_loose
        exclusive_ns = float(bound.prices[num_loose:] @ self.needed[num_loose:])
        return bound.constant + exclusive_ns + float(self._shares(bound) @ self.items.counts[: self.first])

    def run(self, cutoff_ns: float, deadline: Deadline) -> bool:
        """Refine the windows of the lowest value until all reach the cutoff, or the ``deadline``; return whether
        more can be gained."""
        while not deadline.passed:
            lowest = min(self.nodes, key=lambda node: self._value(node.bound))
            if self._value(lowest.bound) >= cutoff_ns:
                return False
            windows = halved(lowest.configuration.window) if lowest.solved else (lowest.configuration.window,)
            if not windows:
                return False
            self.nodes.remove(lowest)
            if lowest.solved:
                self.nodes += [replace(self._piece(window), bound=lowest.bound) for window in windows]
            else:
                self.nodes.append(self._solved(lowest, cutoff_ns, deadline))
        return True

    def _solved(self, node: _Node, cutoff_ns: float, deadline: Deadline) -> _Node:
        """Return the node with the bound of its program."""
        solution = optimise_prices(
            node.configuration,
            self.needed,
            self.max_prices,
            replace(node.start, prices=np.minimum(node.start.prices, self.max_prices)),
            node.columns or self.columns,
            float(self.last @ self.needed),
            self._value,
            cutoff_ns,
            deadline,
            near=node.columns is not None,
        )
        if solution is None:
            return replace(node, solved=True)
        bound, start, self.columns = solution
        best_bound = max(bound, node.bound, key=self._value)
        return replace(node, bound=best_bound, start=start, solved=True, columns=self.columns)

    def _piece(self, window: Window) -> _Node:
        """Return a window with the bound of divisible loads."""
        work_bound, load = self.work_bound, float(self.last @ self.needed)
        configuration = ConfigurationLP(
            self.pricing, self.last, self.last, work_bound.num_stages, window, PinnedItem(len(self.last) - 1)
        )
        stages = work_bound.stages.with_kinds(_MIXES)
        mixture = best_mixture(stages, work_bound.num_stages, window, load, float(self.last[-1]))
        prices = np.minimum(self.last, self.max_prices)
        bound, rows = configuration.prove_price_bound(mixture, prices)
        return _Node(configuration, bound, Start(mixture, prices, rows))


def _windows() -> list[Window]:
    """Return windows that cover all numbers."""
    inside, beyond = ((0, _OPEN - 1), False), ((_OPEN, _OPEN), True)
    sides = (inside, beyond)
    return [Window(ahead[0], behind[0], (ahead[1], behind[1])) for ahead in sides for behind in sides]
