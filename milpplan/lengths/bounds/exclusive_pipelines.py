"""Bounds of a group of pipelines that must hold the longest sequences, each of them whole.

This is ``exclusive_sequences`` for pipelines: beside the micro-batch with the longest sequence, ``L``, others
cannot all be as long, and whole sequences cannot be cut to fill the idle time that it leaves. Of 1F1B the last two
stages count, which form such a pipeline themselves: stage 0 and stage 1 here, with F and B of the first and W the
forward and backward of the last. Around L = micro-batch j,

    stage 0:  ... F_j-1, B_j-2, F_j, B_j-1, F_j+1, B_j, F_j+2, B_j+1, ...      stage 1:  ... W_j-1, W_j, W_j+1, ...

Whole sequences are in one of six positions: *up*, micro-batches before j - 1; *close*, j - 1; with L; *after*, j +
1; *beyond* that; or *elsewhere*, in other replicas. Before W_j begins, and after it ends, at least pass

    ahead:  F(up) + F(close) + W(close),  W(up) + W(close),  F(up) + B(up) + F(close) + F(L),  W(up) + F(L)
    behind: B(L) + B(after) + F(beyond) + B(beyond),  W(after) + B(after) + B(beyond),  W(after) + W(beyond)

with every sum over all sequences in the position, and a transfer where L goes over the link. So every assignment
of the m longest sequences to positions takes the highest path ahead, W(L), and the highest path behind; the
minimum over all assignments is one bound (or, if that is more, what the others do elsewhere). To a fixed mixture
of paths a further sequence y adds at least its minimum over the positions: bounds that are affine in all other
sequences, as in ``exclusive_sequences``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import numpy as np

from milpplan.lengths.bounds.exclusive_sequences import AffinePhase, highest, kept_bounds, lines, longest
from milpplan.lengths.bounds.work_bounds import LinearBounds
from milpplan.lengths.candidates import SizedCandidate
from milpplan.lengths.cost_tables import Tables
from milpplan.simulation.layout_columns import FloatArray, IntArray

_UP, _CLOSE, _WITH, _AFTER, _BEYOND, _ELSEWHERE = range(6)
# Stage and phase of every kind of work: F, B, and the two of W.
_KINDS = ((0, 0), (0, 1), (1, 0), (1, 1))
_F, _B, _W = (0,), (1,), (2, 3)
# Weights of the paths through stage 0 in a mixture, ahead and behind; weights of the highest time.
_MIXTURES = (0.0, 0.5, 1.0)
_THETAS = (0.0, 0.5)


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
            for theta in _THETAS:
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
