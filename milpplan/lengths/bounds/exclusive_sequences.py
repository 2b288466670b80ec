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
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np

from milpplan.lengths.bounds.work_bounds import LinearBounds
from milpplan.lengths.candidates import SizedCandidate
from milpplan.lengths.cost_tables import Tables, hull_below, line_of
from milpplan.simulation.layout_columns import FloatArray, IntArray

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
