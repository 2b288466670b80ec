"""Packed steps of single strategies, and how their packings are improved.

The first packing of a strategy is improved with more effort if the strategy may become the best. A pipeline has
several starts (``packing_local_search``): whether two of the longest sequences share a replica matters, and the
best start shows only after a little improvement. So every start gets some effort, and the best ones get more.
"""

from __future__ import annotations

import time

import numpy as np

from milpplan.lengths.baselines import bucketed_step
from milpplan.lengths.single.packing_local_search import packings_by_shape
from milpplan.lengths.steps import Step
from milpplan.lengths.strategy_tables import Effort, Packed, StrategyTables
from milpplan.simulation.layout_columns import IntArray

MAX_EFFORT_RATIO = 3.0
"""Maximum ratio of the time of maximum effort to the time of more effort."""

# Starts longer than the shortest by the first share get no effort; those longer by the second share after little
# effort get no more.
_FAR, _FARTHER = 0.06, 0.01

# Number of strategies that are improved, and the relative excess over the best step from which a strategy is not:
# of one stage, of a pipeline.
_MOST_POLISHED, HOPELESS, _HOPELESS_PIPELINE = 3, 0.01, 0.04
# Seconds of a first packing, and of starts from load shapes, as programs of deep pipelines are slow.
_PACK_S, _SHAPE_S = 1.0, 1.0


class Incumbents:
    """Packings by strategy and the ``best`` step of one; ``pack_time_s``: seconds of the last packing with more
    effort."""

    def __init__(self, pool: StrategyTables) -> None:
        self.pool = pool
        self.best: Step | None = None
        self.packed: dict[int, Packed] = {}
        # Improved with more effort (0), or with maximum effort: the step's time after that.
        self.polished: dict[int, int] = {}
        # Other starts of pipelines.
        self.starts: dict[int, list[Packed]] = {}
        # Strategies whose starts were improved.
        self.starts_improved: set[int] = set()
        self.pack_time_s = 0.0

    def take(self, step: Step, pack_time_s: float, *, rough: bool = False) -> None:
        """Take over a step from elsewhere; its packing was improved with more effort in ``pack_time_s`` seconds
        unless it is ``rough``."""
        home, packed = step.home, step.packed[step.home]
        self.best = (
            step if self.best is None else min(self.best, step, key=lambda candidate_step: candidate_step.time_ns)
        )
        if home not in self.packed or packed.time_ns <= self.packed[home].time_ns:
            self.packed[home] = packed
            if not rough:
                self.polished.setdefault(home, 0)
        self.pack_time_s = max(self.pack_time_s, pack_time_s)

    def pack(self, member: int) -> None:
        """Pack a strategy if its bound is below the incumbent."""
        bound_ns = self.pool.step_bound_ns(member, shared_memory=False)
        if not np.isfinite(bound_ns) or (self.best is not None and bound_ns >= self.best.time_ns):
            return
        begin = time.perf_counter()
        packed = self.pool.pack(member, self.pool.load.counts, self._grains(member), begin + _PACK_S)
        if packed is not None:
            self.starts[member] = self._shaped(member)
            self.packed[member] = min([packed, *self.starts[member][:1]], key=_time_ns)
            self._take(member)

    def bucket(self, deadline: float) -> None:
        """Try plain buckets under one strategy, pipelines included."""
        if not self.pool.load.rules.padded:
            bucketed = bucketed_step(self.pool, float("inf") if self.best is None else self.best.time_ns, deadline)
            if bucketed is not None:
                self._keep(self.single_step(*bucketed))

    def step(self, member: int) -> Step:
        """Return the step of a packed strategy."""
        return self.single_step(member, self.packed[member])

    def single_step(self, member: int, packed: Packed) -> Step:
        """Return the step of one strategy with a packing."""
        total = packed.time_ns + self.pool.reduce_ns(member) + self.pool.finish_ns(member)
        return Step(member, (member,), {member: packed}, total)

    def shortest(self) -> list[int]:
        """Return the packed strategies with the shortest steps."""
        return sorted(self.packed, key=lambda member: self.step(member).time_ns)[:_MOST_POLISHED]

    def is_rough(self, member: int, below_ns: float = np.inf) -> bool:
        """Return whether more effort on a strategy was not spent yet and may make it the best one below
        ``below_ns``."""
        if member in self.polished or self.best is None:
            return False
        max_excess = HOPELESS if self.pool.num_stages(member) == 1 else _HOPELESS_PIPELINE
        return self.step(member).time_ns <= min(below_ns, self.best.time_ns) * (1.0 + max_excess)

    def is_finished(self, member: int) -> bool:
        """Return whether maximum effort no longer improves a strategy."""
        return member not in self.packed or self.polished.get(member) == self.step(member).time_ns

    def improve(self, member: int, *, maximum: bool) -> None:
        """Improve a strategy with more effort, or with maximum effort; a pipeline from its best start."""
        if not maximum:
            self._choose(member)
        begin = time.perf_counter()
        effort = Effort.MOST if maximum else Effort.MORE
        self.packed[member] = self.pool.polish(member, self.packed[member], self._grains(member), effort)
        self._take(member)
        self.pack_time_s = (time.perf_counter() - begin) / (MAX_EFFORT_RATIO if maximum else 1.0)
        self.polished[member] = self.step(member).time_ns if maximum else 0

    def restart(self, member: int) -> bool:
        """Improve all starts of a pipeline a little, or the next one with more effort; return whether there was
        one."""
        if member not in self.packed:
            # The step has plain buckets.
            self.pack(member)
            return member in self.packed
        if self._choose(member):
            return True
        starts = self.starts[member]
        if not starts or starts[0].time_ns > self.packed[member].time_ns * (1.0 + _FARTHER):
            return False
        begin = time.perf_counter()
        self._begin(member, self.pool.polish(member, starts.pop(0), self._grains(member)))
        self.pack_time_s = time.perf_counter() - begin
        return True

    def _choose(self, member: int) -> bool:
        """Improve all starts of a pipeline a little, once; return whether there were any."""
        if member not in self.starts:
            # The worker process packed it.
            self.starts[member] = self._shaped(member)
        if member in self.starts_improved:
            return False
        self.starts_improved.add(member)
        starts = self.starts[member]
        shortest = min([self.packed[member], *starts], key=_time_ns).time_ns
        promising = [start for start in starts if start.time_ns <= shortest * (1.0 + _FAR)]
        capacity = self._grains(member)
        starts = sorted(
            (self.pool.polish(member, start, capacity, Effort.LITTLE) for start in promising), key=_time_ns
        )
        if starts:
            self._begin(member, starts.pop(0))
        self.starts[member] = starts
        return bool(promising)

    def offer(self, member: int, replicas: tuple[IntArray, ...]) -> None:
        """Offer a packing from elsewhere; it is kept if it is shorter."""
        packed = self.pool.time_packing(member, replicas, self._grains(member))
        if member not in self.packed:
            self.packed[member] = packed
            self._take(member)
        self._begin(member, packed)

    def _begin(self, member: int, packed: Packed) -> None:
        """Keep another packing of a strategy if it is shorter."""
        if packed.time_ns < self.packed[member].time_ns:
            self.packed[member] = packed
            self._take(member)

    def _take(self, member: int) -> None:
        """Update the incumbent by the step of a packed strategy."""
        self._keep(self.step(member))

    def _keep(self, step: Step) -> None:
        """Keep a step if it is shorter than the incumbent."""
        if self.best is None or step.time_ns < self.best.time_ns:
            self.best = step

    def _shaped(self, home: int) -> list[Packed]:
        """Return packings of a pipeline from the load shapes of its best bounds, the shortest first."""
        pool, capacity = self.pool, self._grains(home)
        if pool.num_stages(home) == 1 or pool.load.rules.padded:
            return []
        end = time.perf_counter() + _SHAPE_S
        packings = packings_by_shape(pool.work_bound(home, shared_memory=False), pool.load, capacity, end)
        return sorted((pool.time_packing(home, replicas, capacity) for replicas in packings), key=_time_ns)

    def _grains(self, member: int) -> int:
        return self.pool.max_quanta(member, shared_memory=False)


def _time_ns(packed: Packed) -> int:
    return packed.time_ns
