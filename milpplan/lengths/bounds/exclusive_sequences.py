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

**Pipelines.** Beside the micro-batch with the longest sequence, ``L``, others cannot all be as long, and whole
sequences cannot be cut to fill the idle time that it leaves. Of 1F1B the last two stages count, which form such a
pipeline themselves: stage 0 and stage 1 here, with F and B of the first and W the forward and backward of the
last. Around L = micro-batch j,

    stage 0:  ... F_j-1, B_j-2, F_j, B_j-1, F_j+1, B_j, F_j+2, B_j+1, ...      stage 1:  ... W_j-1, W_j, W_j+1, ...

Whole sequences are in one of six positions: *up*, micro-batches before j - 1; *close*, j - 1; with L; *after*, j +
1; *beyond* that; or *elsewhere*, in other replicas. Before W_j begins, and after it ends, at least pass

    ahead:  F(up) + F(close) + W(close),  W(up) + W(close),  F(up) + B(up) + F(close) + F(L),  W(up) + F(L)
    behind: B(L) + B(after) + F(beyond) + B(beyond),  W(after) + B(after) + B(beyond),  W(after) + W(beyond)

with every sum over all sequences in the position, and a transfer where L goes over the link. So every assignment
of the m longest sequences to positions takes the highest path ahead, W(L), and the highest path behind; the
minimum over all assignments is one bound (or, if that is more, what the others do elsewhere). To a fixed mixture
of paths a further sequence y adds at least its minimum over the positions: bounds that are affine in all other
sequences, as above.

**Configuration programs** (``ExclusiveProgram``) of a pipeline of one replica that must hold the longest
sequences. Above, the longest few are assigned to positions in every way; here all of them are in configuration LPs
(``configuration_columns``) of windows around the longest. The dual of such a program is a mixture of paths and a
price for every sequence, which prove

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
from functools import lru_cache
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
MOST_IN_ONE_PIPELINE, MOST_IN_PIPELINES = 7, 6
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
    """Return the maximum number of sequences whose assignments to a strategy's replicas, or to the positions of a
    pipeline, can be listed."""
    layout = strategy.candidate.layout
    if layout.pp > 1:
        return MOST_IN_ONE_PIPELINE if layout.dp == 1 else MOST_IN_PIPELINES
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
    return kept_bounds(shares, constants, counts, tables, max_quanta)


def longest(tables: Tables, number: int) -> list[int]:
    """Return the length indices of the ``number`` longest sequences of the workload, the longest first."""
    counts = tables.load.counts
    lengths: list[int] = np.repeat(np.arange(len(counts)), counts)[::-1][:number].tolist()
    return lengths


def kept_bounds(
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


_UP, _CLOSE, _WITH, _AFTER, _BEYOND, _ELSEWHERE = range(6)
# Stage and phase of every kind of work: F, B, and the two of W.
_KINDS = ((0, 0), (0, 1), (1, 0), (1, 1))
_F, _B, _W = (0,), (1,), (2, 3)
# Weights of the paths through stage 0 in a mixture, ahead and behind; weights of the highest time.
_MIXTURES = (0.0, 0.5, 1.0)
_PIPELINE_THETAS = (0.0, 0.5)


def _path(*work: tuple[int, tuple[int, ...]]) -> FloatArray:
    """Return whether a path has work of each kind in each position, [4, 6]."""
    is_on_path = np.zeros((len(_KINDS), _ELSEWHERE + 1))
    for position, kinds in work:
        is_on_path[list(kinds), position] = 1.0
    return is_on_path


# Each path with its number of transfers.
_AHEAD = (
    (_path((_UP, _F), (_CLOSE, _F), (_CLOSE, _W)), 0),
    (_path((_UP, _W), (_CLOSE, _W)), 0),
    (_path((_UP, _F), (_UP, _B), (_CLOSE, _F), (_WITH, _F)), 1),
    (_path((_UP, _W), (_WITH, _F)), 1),
)
_BEHIND = (
    (_path((_WITH, _B), (_AFTER, _B), (_BEYOND, _F), (_BEYOND, _B)), 1),
    (_path((_AFTER, _W), (_AFTER, _B), (_BEYOND, _B)), 0),
    (_path((_AFTER, _W), (_BEYOND, _W)), 0),
)
_LAST, _REST = _path((_WITH, _W)), _path((_ELSEWHERE, _W))


@dataclass(frozen=True, slots=True, eq=False)
class _Stages:
    """The last two stages."""

    lines: list[tuple[list[AffinePhase], list[FloatArray]]]
    """Lines and minimum times of each kind (``exclusive_sequences.lines``)."""
    kernels: list[FloatArray]
    """Attention per sequence and last tiles of each kind, [2, n] ns."""
    transfer: float
    """Minimum transfer of a micro-batch with the longest sequence, ns."""

    @staticmethod
    def of(tables: Tables, max_quanta: int) -> _Stages:
        last = tables.candidate.layout.pp - 1
        stages = [(last - 1 + stage, phase) for stage, phase in _KINDS]
        index = int(tables.load.lengths[-1]) // tables.load.token_quantum - 1
        return _Stages(
            [lines(tables, stage, phase, max_quanta) for stage, phase in stages],
            [tables.kernels([stage], phase) for stage, phase in stages],
            float(tables.bare.transfer[index:max_quanta].min()),
        )

    def line(self, kind: int, case: int) -> AffinePhase:
        """Return the line of a kind with the ring exposed (0) or hidden (1)."""
        return self.lines[kind][0][0 if case == 0 else -1]


@dataclass(frozen=True, slots=True, eq=False)
class _Placed:
    """Assignments [w] of sequences to positions."""

    quanta: IntArray
    """Quanta, [positions, w]."""
    cores: FloatArray
    """Attention of every kind with last tiles, [4, positions, w] ns."""

    @staticmethod
    def of(
        stages: _Stages, sequence_quanta: IntArray, whole: list[int], num_positions: int, max_quanta: int
    ) -> _Placed:
        """List the assignments with the first sequence in L, except those in which one of the three middle
        micro-batches exceeds the capacity."""
        is_at, first = _assignments(len(whole), num_positions)
        quanta = is_at @ sequence_quanta[whole].astype(np.float64)
        fits = (quanta[:, _CLOSE : _AFTER + 1] <= max_quanta).all(axis=1)
        # One matrix product sums over the sequences of all assignments.
        both = np.concatenate([is_at[fits], first[fits]], axis=2)
        cores = [(both @ np.concatenate(kernel[:, whole])).T for kernel in stages.kernels]
        return _Placed(quanta[fits].T.astype(np.int64), np.array(cores))


@lru_cache(maxsize=16)
def _assignments(number: int, num_positions: int) -> tuple[FloatArray, FloatArray]:
    """Return whether each position has each sequence, the first one in L, [w, positions, number]; and whether it
    is the longest there."""
    assignments = np.array(list(product(range(num_positions), repeat=number - 1)), dtype=np.int64)
    assignments = np.concatenate(
        [np.full((len(assignments), 1), _WITH), assignments.reshape(len(assignments), number - 1)], axis=1
    )
    is_at = assignments[:, None, :] == np.arange(num_positions)[:, None]
    first = is_at & (np.cumsum(is_at, axis=2) == 1)
    return is_at.astype(np.float64), first.astype(np.float64)


def exclusive_pipeline_bounds(
    tables: Tables, strategy: SizedCandidate, max_quanta: int, number: int
) -> LinearBounds:
    """Return bounds of groups that hold the ``number`` longest sequences of the workload.

    Args:
        tables: cost tables of a pipeline.
        strategy: the strategy.
        max_quanta: capacity of a micro-batch, at least the longest sequence.
        number: at most ``exclusive_sequences.max_exclusive``.
    """
    load, num_replicas = tables.load, strategy.candidate.layout.dp
    quanta, whole = load.lengths // load.token_quantum, longest(tables, number)
    stages = _Stages.of(tables, max_quanta)
    placed = _Placed.of(stages, quanta, whole, 5 if num_replicas == 1 else 6, max_quanta)
    counts = np.bincount(whole, minlength=len(quanta)).astype(np.float64)
    highest_ns = _longest_ns(stages, placed, num_replicas)
    rows = [(np.zeros(len(quanta)), float(highest_ns.min()))]
    values = [
        [_values(stages, placed, case, position) for position in range(len(placed.quanta))] for case in (0, 1)
    ]
    each_ns = [_each_ns(stages, quanta, case) for case in (0, 1)]
    for case_of_others in (0, 1):
        # The attention of the longest sequence hides its ring.
        cases = [1 if position == _WITH else case_of_others for position in range(len(placed.quanta))]
        held_ns = np.array([values[case][position] for position, case in enumerate(cases)]).swapaxes(0, 1)
        added_ns = np.array([each_ns[case] for case in cases]).swapaxes(0, 1)
        for ahead, behind in product(_MIXTURES, repeat=2):
            path, links = _mixture(ahead, behind, len(cases))
            sums = np.tensordot(path, held_ns, 2) + links * stages.transfer
            shares = (path[..., None] * added_ns).sum(axis=0).min(axis=0)
            for theta in _PIPELINE_THETAS:
                weight = (1.0 - theta) / num_replicas
                constant = float((theta * highest_ns + weight * sums).min())
                rows.append((weight * shares, constant - weight * float(shares @ counts)))
    shares, constants = (np.array(weight) for weight in zip(*rows, strict=True))
    return kept_bounds(shares, constants, counts, tables, max_quanta)


def _mixture(ahead: float, behind: float, num_positions: int) -> tuple[FloatArray, float]:
    """Return the mixture of paths [4, positions] with these weights of stage 0, and its number of transfers;
    sequences elsewhere count with their work."""
    (work, _), (around, links) = _AHEAD[1], _AHEAD[2]
    (back, behind_links), (behind_work, _) = _BEHIND[0], _BEHIND[2]
    path = (1.0 - ahead) * work + ahead * around + _LAST + (1.0 - behind) * behind_work + behind * back + _REST
    return path[:, :num_positions], ahead * links + behind * behind_links


def _longest_ns(stages: _Stages, placed: _Placed, num_replicas: int) -> FloatArray:
    """Return the minimum time of the group for every assignment, [w] ns."""
    times = np.array(
        [highest(*stages.lines[kind], placed.quanta, placed.cores[kind]) for kind in range(len(_KINDS))]
    )
    num_positions = times.shape[1]
    sides = [
        np.max(
            [np.tensordot(path[:, :num_positions], times, 2) + links * stages.transfer for path, links in side],
            axis=0,
        )
        for side in (_AHEAD, _BEHIND)
    ]
    group_ns = sides[0] + np.tensordot(_LAST[:, :num_positions], times, 2) + sides[1]
    if num_replicas > 1:
        group_ns = np.maximum(group_ns, np.tensordot(_REST, times, 2) / (num_replicas - 1))
    return np.asarray(group_ns)


def _values(stages: _Stages, placed: _Placed, case: int, position: int) -> FloatArray:
    """Return the minimum time of a position's sequences by kind, under one line each, [4, w] ns."""
    return np.array(
        [
            line.at(placed.quanta[position]) + line.factor * placed.cores[kind, position]
            for kind in range(len(_KINDS))
            for line in [stages.line(kind, case)]
        ]
    )


def _each_ns(stages: _Stages, quanta: IntArray, case: int) -> FloatArray:
    """Return the time that every sequence adds by kind, under one line each, [4, n] ns."""
    return np.array(
        [
            line.slope * quanta + line.factor * stages.kernels[kind][0]
            for kind in range(len(_KINDS))
            for line in [stages.line(kind, case)]
        ]
    )


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
