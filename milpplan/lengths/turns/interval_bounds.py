"""What is known of pipelines beside other strategies, in intervals of their loads, and how more comes to be known.

A set's pipelines are cut into intervals of the load that they hold, where a concave function is near its chord
(``work.Loads``), and these by the longest sequence. More and more is known of them: wide intervals (*coarse*),
narrow ones with what micro-batches hold at most (*none*), told apart by whether they hold the longest sequence
(*longest*), or by classes of their longest (*all*). Where the bound of a set rests on some interval, ``fill``
looks at whole sequences near that load (``filled``). What is known of the same strategy *alone*, in its measure
of the load, is most where a group holds nearly everything: a group beside others is no shorter for having less
memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Literal

import numpy as np

from milpplan.lengths.bounds.configuration_bound import ConfigurationBound
from milpplan.lengths.bounds.work_bounds import DEEP, LengthClass, LinearBounds, PipelineWorkBound
from milpplan.lengths.strategy_tables import StrategyTables
from milpplan.simulation.layout_columns import FloatArray

INTERVALS = np.array([0.0, 0.1, 0.2, 0.3, 0.4, 0.6, 1.0])
"""Ends of wide intervals, as shares of the whole workload's load."""
_NARROW = np.unique(np.concatenate([np.linspace(0.0, 0.5, 21), np.linspace(0.5, 1.0, 6)]))
# What whole sequences may add near a load.
_RISE = 0.015

# Ends of intervals of what is known of strategies alone.
_ALONE = np.array([0.0, 0.1, 0.25, 0.4, 0.6, 0.8, 0.9, 0.97, 1.0])

# What is nearly everything.
_NEARLY = 0.8

Kind = Literal["coarse", "none", "longest", "all", "alone"]
"""What is known of a pipeline."""


class IntervalBounds:
    """Bounds of parts of ``members`` of the pool, of which ``plain`` linear bounds are known."""

    def __init__(self, pool: StrategyTables, members: Sequence[int], plain: Sequence[LinearBounds]) -> None:
        self.pool, self.members, self.linear_bounds = pool, members, plain
        self.cache: dict[tuple[int, Kind], list[list[LinearBounds]]] = {}
        # By place: what is known of strategies alone, and of the whole workload.
        self.own_memory: dict[int, tuple[PipelineWorkBound, float]] = {}
        # By place: with what the longest sequence adds beside others.
        self.with_longest: dict[int, PipelineWorkBound] = {}
        # By place and number of the interval.
        self.configuration_bounds: dict[tuple[int, int], ConfigurationBound] = {}

    def of(self, place: int, kind: Kind) -> list[list[LinearBounds]]:
        """A pipeline's bounds in intervals of its load: for each all groups, then those of each class; nothing
        where it is no pipeline."""
        if self.pool.num_stages(self.members[place]) == 1:
            return []
        kind = self._kind(place, kind)
        key = (place, kind)
        if key not in self.cache:
            loads, plain = self._loads(place, kind), self.linear_bounds[place]
            pairs = list(pairwise(_edges(kind).tolist()))
            kinds: list[LengthClass | None] = [None, *loads.classes]
            beside = self._beside(place, kinds) if kind == "alone" else None
            self.cache[key] = [
                [
                    loads.chords_between(plain if beside is None else beside(number, *pair), *pair, one)
                    for number, one in enumerate(kinds)
                ]
                for pair in pairs
            ]
        return self.cache[key]

    def ends(self, place: int, kind: Kind) -> tuple[FloatArray, FloatArray]:
        """What a sequence adds to the load of a pipeline, [n], and the ends of its intervals as loads."""
        kind = self._kind(place, kind)
        # All that is known beside others has one measure.
        loads = self.own_memory[place][0] if kind == "alone" else self.pool.work_bound(self.members[place], beside=True)
        return loads.sequence_loads, _edges(kind) * loads.total_load

    def _kind(self, place: int, kind: Kind) -> Kind:
        """What there is of a pipeline of that."""
        if kind == "longest" and not self._able(place):
            return "none"
        return "coarse" if kind == "alone" and not self._renew(place) else kind

    def bounds_near(self, place: int, counts: FloatArray) -> LinearBounds:
        """Bounds of groups that hold about as much as so many sequences of every length [n]."""
        intervals = self.of(place, "none")
        if not intervals:
            return self.linear_bounds[place]
        loads = self._loads(place, "none")
        number = int(np.searchsorted(_NARROW, float(loads.sequence_loads @ counts) / loads.total_load)) - 1
        return intervals[min(max(number, 0), len(intervals) - 1)][0]

    def _beside(
        self, place: int, kinds: Sequence[LengthClass | None]
    ) -> Callable[[int, float, float], LinearBounds]:
        """What is known of a pipeline beside others, for the number of one of ``kinds`` and between two shares of
        its load in the measure of what is known of it alone: that is high for large ones only."""
        plain, alone = self.linear_bounds[place], self.own_memory[place][0]
        beside = self.with_longest.get(place, self._loads(place, "coarse"))
        same: list[LengthClass | None] = [None, *beside.classes]
        if len(same) < len(kinds):
            same = [None] * len(kinds)
        fits = np.isfinite(plain.shares[0])
        # Both count about the same of every sequence.
        times = (beside.sequence_loads / alone.sequence_loads)[fits] * alone.total_load / beside.total_load
        least, most = min(1.0, float(times.min())), max(1.0, float(times.max()))
        return lambda number, low, high: beside.chords_between(plain, low * least, min(1.0, high * most), same[number])

    def own_memory_bound_ns(self, place: int) -> float:
        """What the whole workload takes under a pipeline alone at least, by what is known by now, ns."""
        return self.own_memory[place][1] if self._renew(place) else 0.0

    def add_own_memory_bounds(self, places: Iterable[int]) -> bool:
        """Know these pipelines alone, but for the deepest: beside others programs are of their last stages, of all
        they are dear. Whether that is new of one."""
        members = [self.members[place] for place in places]
        new = [one for one in members if not self.pool.has_own_memory_bound(one) and self.pool.num_stages(one) <= DEEP]
        for member in new:
            self.pool.best_own_memory_bound(member)
        return bool(new)

    def add_longest(self, place: int) -> bool:
        """Know what the longest sequence adds to a strategy alone, if it may hold that; whether that is new."""
        pool, member = self.pool, self.members[place]
        dear = not self._renew(place) or not np.isfinite(pool.latency_bound_ns(member, beside=True))
        if dear or pool.best_own_memory_bound(member).classes:
            return False
        pool.work_bound_with_longest(member, np.inf)
        return True

    def _renew(self, place: int) -> bool:
        """Take over what is known of a strategy alone; False where that is nothing."""
        member = self.members[place]
        if not self.pool.has_own_memory_bound(member):
            return False
        loads = self.pool.best_own_memory_bound(member)
        if place not in self.own_memory or self.own_memory[place][0] is not loads:
            self.own_memory[place] = loads, loads.workload_bound_ns
            self.cache.pop((place, "alone"), None)
        return True

    def _able(self, place: int) -> bool:
        """Whether it may hold the longest sequence, and its programs are not too dear."""
        pool, member = self.pool, self.members[place]
        return bool(np.isfinite(pool.latency_bound_ns(member, beside=True))) and pool.num_stages(member) < DEEP

    def _loads(self, place: int, kind: Kind) -> PipelineWorkBound:
        pool, member = self.pool, self.members[place]
        if kind == "coarse":
            return pool.work_bound(member, beside=True)
        if kind == "alone":
            found = self.own_memory[place][0]
            rest = LengthClass(0, len(found.sequence_loads) - 1)
            return replace(found, classes=(rest, *found.classes) if found.classes else ())
        found = pool.fine_work_bound(member) if kind == "none" else pool.work_bound_by_class(member, only_longest=kind == "longest")
        if kind == "longest":
            self.with_longest[place] = found
            self.cache.pop((place, "alone"), None)
        filled = [one.bound for (other, _), one in self.configuration_bounds.items() if other == place]
        return replace(found, bounds=(*found.bounds, *filled))

    def sharpen_interval(self, place: int, interval: int, deadline: float) -> bool:
        """Look at whole sequences near the load of a narrow interval, until the ``deadline``; whether there was
        anything to do."""
        pool, member = self.pool, self.members[place]
        load = float(_NARROW[interval : interval + 2].mean()) * self._loads(place, "none").total_load
        key = (place, interval)
        if key not in self.configuration_bounds:
            self.configuration_bounds[key] = ConfigurationBound.for_load(
                pool.fine_work_bound(member), pool.micro_batch_pricing(member, beside=True), load
            )
        one = self.configuration_bounds[key]
        if one.done:
            return False
        one.sharpen(load, _RISE, deadline)
        for kind in ("none", "longest", "all"):
            self.cache.pop((place, kind), None)
        return True

    def nearly_all(self, intervals: dict[int, int]) -> list[int]:
        """Places of the pipelines that hold nearly everything, or may, in these intervals of *alone*."""
        edges = {place: _ALONE if self._renew(place) else INTERVALS for place in intervals}
        return [place for place, number in intervals.items() if edges[place][number + 1] > _NEARLY]


def _edges(kind: Kind) -> FloatArray:
    """Ends of the intervals of a kind, as shares of the whole workload's load."""
    return {"coarse": INTERVALS, "alone": _ALONE}.get(kind, _NARROW)
