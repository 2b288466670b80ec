"""What a group of pipelines takes at least where the longest sequences are in it for sure, each of them whole.

``forced`` for pipelines: beside the micro-batch with the longest sequence, ``L``, others cannot all be as long,
and whole sequences cannot be cut as they would have to be to fill what it leaves idle. Of 1F1B the last two stages
count, which are such a pipeline themselves: stage 0 and stage 1 here, with F and B of the first and W the forward
and backward of the last. Around L = micro-batch j,

    stage 0:  ... F_j-1, B_j-2, F_j, B_j-1, F_j+1, B_j, F_j+2, B_j+1, ...      stage 1:  ... W_j-1, W_j, W_j+1, ...

Whole sequences are in one of five places: *up*, micro-batches before j - 1; *close*, j - 1; with L; *after*,
j + 1; *beyond* that; or *elsewhere*, in other replicas. Before W_j begins, and after it ends, at least pass

    ahead:  F(up) + F(close) + W(close),  W(up) + W(close),  F(up) + B(up) + F(close) + F(L),  W(up) + F(L)
    behind: B(L) + B(after) + F(beyond) + B(beyond),  W(after) + B(after) + B(beyond),  W(after) + W(beyond)

with every sum over all that is in the place, and a transfer where L goes over the link. So for every way to put
the m longest sequences into places: the highest ahead, W(L), and the highest behind; the least of them over all
ways is one bound (or, if that is more, what the others do elsewhere). To a mixture of paths, the same in all ways,
a further sequence y adds at least its least over the places: bounds that are affine in all other sequences, as in
``forced``.
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
# Parts of the paths of stage 0 in a mixture with those of stage 1, ahead and behind; weights of the whole time.
_MIXTURES = (0.0, 0.5, 1.0)
_THETAS = (0.0, 0.5)


def _path(*parts: tuple[int, tuple[int, ...]]) -> FloatArray:
    """Whether a path has work of each kind in each place, [4, 6]."""
    found = np.zeros((len(_KINDS), _ELSEWHERE + 1))
    for place, kinds in parts:
        found[list(kinds), place] = 1.0
    return found


# With how many transfers.
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
    """The last two stages: lines of each kind and what micro-batches take at least (``forced.lines``), kernels
    [2 (sequence, once), n] of each, and the least transfer of what holds the longest sequence, ns."""

    lines: list[tuple[list[AffinePhase], list[FloatArray]]]
    kernels: list[FloatArray]
    transfer: float

    @staticmethod
    def of(tables: Tables, max_quanta: int) -> _Stages:
        last = tables.candidate.layout.pp - 1
        stages = [(last - 1 + stage, phase) for stage, phase in _KINDS]
        place = int(tables.load.lengths[-1]) // tables.load.token_quantum - 1
        return _Stages(
            [lines(tables, stage, phase, max_quanta) for stage, phase in stages],
            [tables.kernels([stage], phase) for stage, phase in stages],
            float(tables.bare.transfer[place:max_quanta].min()),
        )

    def line(self, kind: int, way: int) -> AffinePhase:
        """The ring exposed (0) or hidden (1)."""
        return self.lines[kind][0][0 if way == 0 else -1]


@dataclass(frozen=True, slots=True, eq=False)
class _Placed:
    """Ways [w] to put sequences into places: ``grains`` [places, w], ``cores`` [4, places, w] the attention of
    every kind with last tiles, ns."""

    grains: IntArray
    cores: FloatArray

    @staticmethod
    def of(stages: _Stages, each: IntArray, whole: list[int], places: int, max_quanta: int) -> _Placed:
        """The first sequence with L, the others anywhere; without ways in which one of the three in the middle
        would hold too much."""
        held, first = _ways(len(whole), places)
        grains = held @ each[whole].astype(np.float64)
        fits = (grains[:, _CLOSE : _AFTER + 1] <= max_quanta).all(axis=1)
        # Sums over the sequences of all ways at once.
        both = np.concatenate([held[fits], first[fits]], axis=2)
        cores = [(both @ np.concatenate(kernel[:, whole])).T for kernel in stages.kernels]
        return _Placed(grains[fits].T.astype(np.int64), np.array(cores))


@lru_cache(maxsize=16)
def _ways(number: int, places: int) -> tuple[FloatArray, FloatArray]:
    """Whether a place has each sequence, the first one with L, in each way [w, places, number]; and whether it is
    the first that is there, the longest."""
    ways = np.array(list(product(range(places), repeat=number - 1)), dtype=np.int64)
    ways = np.concatenate([np.full((len(ways), 1), _WITH), ways.reshape(len(ways), number - 1)], axis=1)
    held = ways[:, None, :] == np.arange(places)[:, None]
    first = held & (np.cumsum(held, axis=2) == 1)
    return held.astype(np.float64), first.astype(np.float64)


def exclusive_pipeline_bounds(tables: Tables, one: SizedCandidate, max_quanta: int, number: int) -> LinearBounds:
    """Bounds of groups that hold the ``number`` longest sequences of the workload, at most ``forced.most_whole``;
    of a pipeline whose micro-batches hold up to ``most_grains``, and the longest sequence."""
    load, replicas = tables.load, one.candidate.layout.dp
    each, whole = load.lengths // load.token_quantum, longest(tables, number)
    stages = _Stages.of(tables, max_quanta)
    placed = _Placed.of(stages, each, whole, 5 if replicas == 1 else 6, max_quanta)
    held = np.bincount(whole, minlength=len(each)).astype(np.float64)
    top = _longest_ns(stages, placed, replicas)
    rows = [(np.zeros(len(each)), float(top.min()))]
    values = [[_values(stages, placed, way, place) for place in range(len(placed.grains))] for way in (0, 1)]
    each_ns = [_each_ns(stages, each, way) for way in (0, 1)]
    for other in (0, 1):
        # Attention of the longest hides its ring.
        ways = [1 if place == _WITH else other for place in range(len(placed.grains))]
        held_ns = np.array([values[way][place] for place, way in enumerate(ways)]).swapaxes(0, 1)
        more_ns = np.array([each_ns[way] for way in ways]).swapaxes(0, 1)
        for ahead, behind in product(_MIXTURES, repeat=2):
            path, links = _mixture(ahead, behind, len(ways))
            sums = np.tensordot(path, held_ns, 2) + links * stages.transfer
            shares = (path[..., None] * more_ns).sum(axis=0).min(axis=0)
            for theta in _THETAS:
                part = (1.0 - theta) / replicas
                constant = float((theta * top + part * sums).min())
                rows.append((part * shares, constant - part * float(shares @ held)))
    shares, constants = (np.array(part) for part in zip(*rows, strict=True))
    return kept_bounds(shares, constants, held, tables, max_quanta)


def _mixture(ahead: float, behind: float, places: int) -> tuple[FloatArray, float]:
    """Paths [4, places] through both stages with these parts of stage 0, and transfers; what is elsewhere counts
    for its work."""
    (work, _), (around, links) = _AHEAD[1], _AHEAD[2]
    (back, more), (behind_work, _) = _BEHIND[0], _BEHIND[2]
    path = (1.0 - ahead) * work + ahead * around + _LAST + (1.0 - behind) * behind_work + behind * back + _REST
    return path[:, :places], ahead * links + behind * more


def _longest_ns(stages: _Stages, placed: _Placed, replicas: int) -> FloatArray:
    """What the group takes at least for every way, [w] ns."""
    most = np.array(
        [highest(*stages.lines[kind], placed.grains, placed.cores[kind]) for kind in range(len(_KINDS))]
    )
    places = most.shape[1]
    sides = [
        np.max([np.tensordot(path[:, :places], most, 2) + links * stages.transfer for path, links in side], axis=0)
        for side in (_AHEAD, _BEHIND)
    ]
    found = sides[0] + np.tensordot(_LAST[:, :places], most, 2) + sides[1]
    if replicas > 1:
        found = np.maximum(found, np.tensordot(_REST, most, 2) / (replicas - 1))
    return np.asarray(found)


def _values(stages: _Stages, placed: _Placed, way: int, place: int) -> FloatArray:
    """What is held in a place takes at least under one line for every kind, [4, w] ns."""
    return np.array(
        [
            line.at(placed.grains[place]) + line.factor * placed.cores[kind, place]
            for kind in range(len(_KINDS))
            for line in [stages.line(kind, way)]
        ]
    )


def _each_ns(stages: _Stages, each: IntArray, way: int) -> FloatArray:
    """What every sequence adds to that, [4, n] ns."""
    return np.array(
        [
            line.slope * each + line.factor * stages.kernels[kind][0]
            for kind in range(len(_KINDS))
            for line in [stages.line(kind, way)]
        ]
    )
