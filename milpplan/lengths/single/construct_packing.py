"""Packings of a pipeline that follow its best real loads.

A pipeline's first micro-batches should be short and grow, its last ones shrink: how is what the program of
``unequal`` says for real loads. Around a long sequence, which cannot be divided, it is another shape. So every
replica gets its longest sequence, the best place for it and the best number of micro-batches, and then the others,
the longest first, each where most is missing. Or only some replicas get one of the longest, and the other
long ones as well: the rest have more and shorter micro-batches, with shorter ends. Heuristic: what comes of it is
timed exactly, and improved.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from milpplan.groups.bounds.last_stage import best_loads
from milpplan.groups.bounds.micro_batch_ranges import Window
from milpplan.groups.bounds.path_mixtures import StageLoads
from milpplan.lengths.bounds.work_bounds import PipelineWorkBound
from milpplan.lengths.cost_tables import Load
from milpplan.simulation.layout_columns import FloatArray, IntArray

# Numbers of micro-batches that are tried before those next to the best.
_NUMBERS = (2, 4, 7, 11, 16, 22, 30, 42)
# Where the longest sequence stands while the number is sought, as a share of it.
_PLACE = 0.35
# Ways to give the longest sequences to some of the replicas.
_HELD = 8
# What a replica's time grows by with its load.
_SLOPE = 1.03


@dataclass(frozen=True, slots=True)
class _Shape:
    """About what a replica takes, ns, with micro-batches of these ``loads`` [v], around the one at ``place``."""

    time_ns: float
    loads: FloatArray
    place: int


@dataclass(frozen=True, slots=True)
class _Shapes:
    """Shapes of a pipeline's replicas with typical sequences."""

    stages: StageLoads
    num_stages: int
    deadline: float

    @property
    def late(self) -> bool:
        """Whether no further shape is tried but where there is none."""
        return time.perf_counter() > self.deadline

    def of(self, number: int, place: int, load: float, least: float) -> _Shape | None:
        """So many micro-batches, that at ``place`` with at least so much; None where they do not hold the load."""
        if not 0 <= place < number:
            return None
        window = Window((place, place), (number - 1 - place, number - 1 - place))
        found = best_loads(self.stages, self.num_stages, window, load, least)
        return None if found is None else _Shape(*found, place)

    def best(self, load: float, least: float) -> _Shape | None:
        """The best number of micro-batches, then the best place."""
        numbers = [number for number in _NUMBERS if number * self.stages.most[:1].sum() >= load]
        found = self._least(lambda number: self.of(number, int(_PLACE * number), load, least), numbers)
        if found is None or least == 0.0:
            return found
        number = len(found.loads)
        return self._least(lambda place: self.of(number, place, load, least), [found.place])

    def _least(self, at: Callable[[int], _Shape | None], tried: list[int]) -> _Shape | None:
        """The least of some numbers, and of those around it; of those that the deadline leaves."""
        known: dict[int, _Shape | None] = {}

        def time_ns(number: int) -> float:
            one = known[number]
            return np.inf if one is None else one.time_ns

        for number in tried:
            if not (self.late and any(known.values())):
                known[number] = at(number)
        step = 2
        while step and known and not self.late:
            best = min(known, key=time_ns)
            for number in (best - step, best + step):
                if number not in known:
                    known[number] = at(number) if number >= 0 else None
            step = step if min(known, key=time_ns) != best else step // 2
        return known[min(known, key=time_ns)] if known else None


def shaped(
    loads: PipelineWorkBound, load: Load, most_grains: int, deadline: float = float("inf")
) -> list[tuple[IntArray, ...]]:
    """Replicas [v, n] of all sequences, with the longest ones on one, two ... or all of them; nothing where
    the shapes do not hold the sequences. Shapes are tried until the ``deadline`` (of ``perf_counter``)."""
    shapes = _Shapes(_typical(loads.stages), loads.num_stages, deadline)
    items = np.repeat(np.arange(len(load.lengths)), load.counts)[::-1]
    number = loads.num_replicas
    free = shapes.best(loads.total_load, 0.0)
    if free is None:
        return []
    # Shorter sequences than the largest load leave the shape as it is.
    longest = [float(shapes.stages.last[one]) for one in items[:number]]
    longest = [least if least > free.loads.max() else 0.0 for least in longest]
    longest += [0.0] * (number - len(longest))
    known = {least: shapes.best(loads.total_load, least) for least in {0.0, *longest}}
    ways = {tuple(longest[:held] + [0.0] * (number - held)) for held in _held(number)}
    found = []
    for way in sorted(ways):
        first = [one for one in (known[least] for least in way) if one is not None]
        if len(first) == number:
            found.append(
                _filled(_balanced(shapes, first, way, loads.total_load), shapes.stages.last, load, items, most_grains)
            )
    return [one for one in found if one is not None]


def _held(number: int) -> list[int]:
    """How many of so many replicas have one of the longest: one, up to all in a few equal steps."""
    steps = min(number, _HELD)
    return [1, *(-(-number * (one + 1) // steps) for one in range(steps))]


def _balanced(shapes: _Shapes, first: list[_Shape], longest: tuple[float, ...], full: float) -> list[FloatArray]:
    """Loads of shapes that take about as long: one with a longer sequence takes longer for its load, and gets
    less."""
    times = np.array([one.time_ns for one in first])
    parts = (full - (times - times.mean()) / _SLOPE).clip(longest)
    again: dict[tuple[float, float], FloatArray] = {}
    for one, part, least in zip(first, parts.tolist(), longest, strict=True):
        if (part, least) not in again:
            # Programs as large as this one may take half a second.
            anew = None if shapes.late else shapes.of(len(one.loads), one.place, part, least)
            again[part, least] = one.loads * (part / full) if anew is None else anew.loads
    return [again[key] for key in zip(parts.tolist(), longest, strict=True)]


def _typical(stages: StageLoads) -> StageLoads:
    """With the shares of a typical sequence for all."""
    if not len(stages.mixes):
        return stages
    forward, backward = stages.mixes.mean(axis=0).tolist()
    return replace(stages, shares=(forward, backward), mixes=np.zeros((0, 2)))


def _filled(
    shapes: list[FloatArray], each: FloatArray, load: Load, items: IntArray, most_grains: int
) -> tuple[IntArray, ...] | None:
    """Sequences, the longest first, each where most is missing and tokens fit."""
    grains = load.lengths // load.token_quantum
    missing = np.concatenate(shapes)
    room = np.full(len(missing), most_grains)
    packed = np.zeros((len(missing), len(grains)), dtype=np.int64)
    for k in items.tolist():
        fits = np.flatnonzero(room >= grains[k])
        if not len(fits):
            return None
        place = int(fits[missing[fits].argmax()])
        packed[place, k] += 1
        missing[place] -= each[k]
        room[place] -= grains[k]
    return tuple(part[part.any(axis=1)] for part in np.split(packed, np.cumsum([len(one) for one in shapes])[:-1]))
