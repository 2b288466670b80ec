"""Bounds of pipelines with shared memory, in intervals of their work, and how they are sharpened.

A set's pipelines are cut into intervals of the work that they hold, where a concave function is near its chord
(``work_bounds.PipelineWorkBound``), and these into classes of the longest sequence. The levels of bounds, from
cheap to strong: wide intervals (*coarse*), narrow intervals with the capacity of micro-batches (*none*), with or
without the longest sequence of all (*longest*), by classes of the longest sequence (*all*). ``sharpen_interval``
adds whole sequences near the work on which a set's bound rests (``configuration_bound``). Bounds of the strategy
with the memory to itself (*alone*), in its own measure of work, are strongest if a group holds nearly everything;
with shared memory no group is shorter.
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
"""Ends of wide intervals, as shares of the whole workload's work."""
_NARROW = np.unique(np.concatenate([np.linspace(0.0, 0.5, 21), np.linspace(0.5, 1.0, 6)]))
# Relative rise of the bound that whole sequences aim at.
_RISE = 0.015

# Ends of intervals of own-memory bounds.
_ALONE = np.array([0.0, 0.1, 0.25, 0.4, 0.6, 0.8, 0.9, 0.97, 1.0])

# Share of the work from which a strategy holds nearly everything.
_NEARLY = 0.8

Kind = Literal["coarse", "none", "longest", "all", "alone"]
"""Level of a pipeline's bounds."""


class IntervalBounds:
    """Bounds in intervals of work of ``members`` of the pool, beyond their ``linear_bounds``; a strategy is given
    by its index."""

    def __init__(self, pool: StrategyTables, members: Sequence[int], plain: Sequence[LinearBounds]) -> None:
        self.pool, self.members, self.linear_bounds = pool, members, plain
        self.cache: dict[tuple[int, Kind], list[list[LinearBounds]]] = {}
        # By strategy: own-memory bound, and its value for the whole workload in ns.
        self.own_memory: dict[int, tuple[PipelineWorkBound, float]] = {}
        # By strategy: shared-memory bound with the term of the longest sequence.
        self.with_longest: dict[int, PipelineWorkBound] = {}
        # By strategy and index of the interval.
        self.configuration_bounds: dict[tuple[int, int], ConfigurationBound] = {}

    def of(self, strategy: int, level: Kind) -> list[list[LinearBounds]]:
        """Return a pipeline's bounds in intervals of its work: for each the bounds of all groups, then of each
        class; empty for one stage."""
        if self.pool.num_stages(self.members[strategy]) == 1:
            return []
        level = self._available_level(strategy, level)
        key = (strategy, level)
        if key not in self.cache:
            work_bound, linear = self._work_bound(strategy, level), self.linear_bounds[strategy]
            intervals = list(pairwise(_edges(level).tolist()))
            classes: list[LengthClass | None] = [None, *work_bound.classes]
            shared_bounds = self._shared_bounds(strategy, classes) if level == "alone" else None
            self.cache[key] = [
                [
                    work_bound.chords_between(
                        linear if shared_bounds is None else shared_bounds(class_index, *pair), *pair, length_class
                    )
                    for class_index, length_class in enumerate(classes)
                ]
                for pair in intervals
            ]
        return self.cache[key]

    def ends(self, strategy: int, level: Kind) -> tuple[FloatArray, FloatArray]:
        """Return the work that a sequence adds [n], and the ends of a pipeline's intervals in that unit."""
        level = self._available_level(strategy, level)
        # All shared-memory bounds use one measure of work.
        work_bound = (
            self.own_memory[strategy][0]
            if level == "alone"
            else self.pool.work_bound(self.members[strategy], shared_memory=True)
        )
        return work_bound.sequence_loads, _edges(level) * work_bound.total_load

    def _available_level(self, strategy: int, level: Kind) -> Kind:
        """Return the strongest available level that is at most ``kind``."""
        if level == "longest" and not self._can_hold_longest(strategy):
            return "none"
        return "coarse" if level == "alone" and not self._renew(strategy) else level

    def bounds_near(self, strategy: int, counts: FloatArray) -> LinearBounds:
        """Return bounds of groups that hold about ``counts`` [n] sequences."""
        intervals = self.of(strategy, "none")
        if not intervals:
            return self.linear_bounds[strategy]
        work_bound = self._work_bound(strategy, "none")
        index = (
            int(np.searchsorted(_NARROW, float(work_bound.sequence_loads @ counts) / work_bound.total_load)) - 1
        )
        return intervals[min(max(index, 0), len(intervals) - 1)][0]

    def _shared_bounds(
        self, strategy: int, classes: Sequence[LengthClass | None]
    ) -> Callable[[int, float, float], LinearBounds]:
        """Return a function that gives a pipeline's shared-memory bounds, by the index of a class and two shares
        of the work.

        The shares are in the measure of the own-memory bound, which is tight for large shares only.
        """
        linear, own = self.linear_bounds[strategy], self.own_memory[strategy][0]
        shared = self.with_longest.get(strategy, self._work_bound(strategy, "coarse"))
        shared_classes: list[LengthClass | None] = [None, *shared.classes]
        if len(shared_classes) < len(classes):
            shared_classes = [None] * len(classes)
        fits = np.isfinite(linear.shares[0])
        # Both measures weigh every sequence about equally.
        ratios = (shared.sequence_loads / own.sequence_loads)[fits] * own.total_load / shared.total_load
        min_ratio, max_ratio = min(1.0, float(ratios.min())), max(1.0, float(ratios.max()))
        return lambda class_index, low, high: shared.chords_between(
            linear, low * min_ratio, min(1.0, high * max_ratio), shared_classes[class_index]
        )

    def own_memory_bound_ns(self, strategy: int) -> float:
        """Return the own-memory bound of the whole workload in ns; 0 if there is none."""
        return self.own_memory[strategy][1] if self._renew(strategy) else 0.0

    def add_own_memory_bounds(self, strategies: Iterable[int]) -> bool:
        """Compute the missing own-memory bounds of pipelines; return whether there was any.

        The deepest pipelines are left out: their programs have all stages here, but only the last ones with shared
        memory.
        """
        members = [self.members[strategy] for strategy in strategies]
        new = [
            member
            for member in members
            if not self.pool.has_own_memory_bound(member) and self.pool.num_stages(member) <= DEEP
        ]
        for member in new:
            self.pool.best_own_memory_bound(member)
        return bool(new)

    def add_longest(self, strategy: int) -> bool:
        """Add the term of the longest sequence to an own-memory bound; return whether that is new."""
        pool, member = self.pool, self.members[strategy]
        is_unavailable = not self._renew(strategy) or not np.isfinite(
            pool.latency_bound_ns(member, shared_memory=True)
        )
        if is_unavailable or pool.best_own_memory_bound(member).classes:
            return False
        pool.work_bound_with_longest(member, np.inf)
        return True

    def _renew(self, strategy: int) -> bool:
        """Take over the current own-memory bound; return whether there is any."""
        member = self.members[strategy]
        if not self.pool.has_own_memory_bound(member):
            return False
        bound = self.pool.best_own_memory_bound(member)
        if strategy not in self.own_memory or self.own_memory[strategy][0] is not bound:
            self.own_memory[strategy] = bound, bound.workload_bound_ns
            self.cache.pop((strategy, "alone"), None)
        return True

    def _can_hold_longest(self, strategy: int) -> bool:
        """Return whether a strategy may hold the longest sequence and its programs are affordable."""
        pool, member = self.pool, self.members[strategy]
        return (
            bool(np.isfinite(pool.latency_bound_ns(member, shared_memory=True))) and pool.num_stages(member) < DEEP
        )

    def _work_bound(self, strategy: int, level: Kind) -> PipelineWorkBound:
        """Return the work bound of a level."""
        pool, member = self.pool, self.members[strategy]
        if level == "coarse":
            return pool.work_bound(member, shared_memory=True)
        if level == "alone":
            bound = self.own_memory[strategy][0]
            all_lengths = LengthClass(0, len(bound.sequence_loads) - 1)
            return replace(bound, classes=(all_lengths, *bound.classes) if bound.classes else ())
        bound = (
            pool.fine_work_bound(member)
            if level == "none"
            else pool.work_bound_by_class(member, only_longest=level == "longest")
        )
        if level == "longest":
            self.with_longest[strategy] = bound
            self.cache.pop((strategy, "alone"), None)
        sharpened = [
            configuration.bound
            for (owner, _), configuration in self.configuration_bounds.items()
            if owner == strategy
        ]
        return replace(bound, bounds=(*bound.bounds, *sharpened))

    def sharpen_interval(self, strategy: int, interval: int, deadline: float) -> bool:
        """Sharpen a narrow interval by whole sequences near its middle, until the ``deadline``; return whether
        there was work."""
        pool, member = self.pool, self.members[strategy]
        load = float(_NARROW[interval : interval + 2].mean()) * self._work_bound(strategy, "none").total_load
        key = (strategy, interval)
        if key not in self.configuration_bounds:
            self.configuration_bounds[key] = ConfigurationBound.for_load(
                pool.fine_work_bound(member), pool.micro_batch_pricing(member, shared_memory=True), load
            )
        configuration = self.configuration_bounds[key]
        if configuration.done:
            return False
        configuration.sharpen(load, _RISE, deadline)
        for level in ("none", "longest", "all"):
            self.cache.pop((strategy, level), None)
        return True

    def nearly_all(self, intervals: dict[int, int]) -> list[int]:
        """Return the strategies that hold nearly everything in these intervals of the level *alone*."""
        edges = {strategy: _ALONE if self._renew(strategy) else INTERVALS for strategy in intervals}
        return [strategy for strategy, index in intervals.items() if edges[strategy][index + 1] > _NEARLY]


def _edges(level: Kind) -> FloatArray:
    """Return the ends of a level's intervals, as shares of the whole workload's work."""
    return {"coarse": INTERVALS, "alone": _ALONE}.get(level, _NARROW)
