"""Steps of one strategy that were packed, and how they are packed better.

What is packed first is improved with more care where it may become the best. Pipelines have several packings to
begin with (``shaping``): whether two of the longest sequences share a replica, or each has its own, makes a step
up to 2 % shorter, and which way is best shows only after a little care. So each gets that, and the best ones more.
"""

from __future__ import annotations

import time

import numpy as np

from milpplan.lengths.baselines import bucketed_step
from milpplan.lengths.single.construct_packing import shaped
from milpplan.lengths.steps import Step
from milpplan.lengths.strategy_tables import Effort, Packed, StrategyTables
from milpplan.simulation.layout_columns import IntArray

MOST_TIMES = 3.0
"""How many times as long most care takes as more care, at most."""

# Starts that are longer than the shortest by the first part get no care, those that are after a little care by the
# second no more.
_FAR, _FARTHER = 0.06, 0.01

# Strategies whose packings are improved for longer, where it may matter; not those that are longer than the best
# by this part, which is more than that gains: of a pipeline, of others.
_MOST_POLISHED, HOPELESS, _HOPELESS_PIPELINE = 3, 0.01, 0.04
# Seconds after which nothing else is tried in a first packing, and by shapes of real loads: programs of deep
# pipelines with many micro-batches take half a second each.
_PACK_S, _SHAPE_S = 1.0, 1.0


class Incumbents:
    """``packed`` by strategy, and the ``best`` step of one; ``took_s``: seconds of the last packing with more
    care."""

    def __init__(self, pool: StrategyTables) -> None:
        self.pool = pool
        self.best: Step | None = None
        self.packed: dict[int, Packed] = {}
        # Improved with more care (0), or with most: the step's time after that.
        self.polished: dict[int, int] = {}
        # Other packings of pipelines that may be improved.
        self.starts: dict[int, list[Packed]] = {}
        # Those whose starts got a little care.
        self.starts_improved: set[int] = set()
        self.pack_time_s = 0.0

    def take(self, step: Step, took_s: float, *, rough: bool = False) -> None:
        """A step of one strategy that was found elsewhere, where packing with more care takes so many seconds;
        it was packed so, unless it is ``rough``."""
        home, packed = step.home, step.packed[step.home]
        self.best = step if self.best is None else min(self.best, step, key=lambda one: one.time_ns)
        if home not in self.packed or packed.time_ns <= self.packed[home].time_ns:
            self.packed[home] = packed
            if not rough:
                self.polished.setdefault(home, 0)
        self.pack_time_s = max(self.pack_time_s, took_s)

    def pack(self, member: int) -> None:
        """The step of one strategy, if its least time leaves room."""
        least_ns = self.pool.step_bound_ns(member, beside=False)
        if not np.isfinite(least_ns) or (self.best is not None and least_ns >= self.best.time_ns):
            return
        begin = time.perf_counter()
        packed = self.pool.pack(member, self.pool.load.counts, self._grains(member), begin + _PACK_S)
        if packed is not None:
            self.starts[member] = self._shaped(member)
            self.packed[member] = min([packed, *self.starts[member][:1]], key=_time_ns)
            self._take(member)

    def bucket(self, deadline: float) -> None:
        """The step of plain buckets under one strategy, if it is shorter: pipelines, too, for little."""
        if not self.pool.load.rules.padded:
            found = bucketed_step(self.pool, float("inf") if self.best is None else self.best.time_ns, deadline)
            if found is not None:
                self._keep(self.single_step(*found))

    def step(self, member: int) -> Step:
        """That of a packed strategy."""
        return self.single_step(member, self.packed[member])

    def single_step(self, member: int, packed: Packed) -> Step:
        """That of one strategy packed so."""
        total = packed.time_ns + self.pool.reduce_ns(member) + self.pool.finish_ns(member)
        return Step(member, (member,), {member: packed}, total)

    def shortest(self) -> list[int]:
        """A few of the packed strategies."""
        return sorted(self.packed, key=lambda one: self.step(one).time_ns)[:_MOST_POLISHED]

    def is_rough(self, member: int, below_ns: float = np.inf) -> bool:
        """Whether a strategy was not packed with more care, which may make it the best one, and shorter than
        ``below_ns``."""
        if member in self.polished or self.best is None:
            return False
        gains = HOPELESS if self.pool.num_stages(member) == 1 else _HOPELESS_PIPELINE
        return self.step(member).time_ns <= min(below_ns, self.best.time_ns) * (1.0 + gains)

    def is_finished(self, member: int) -> bool:
        """Whether most care has left a strategy as it was, and so will."""
        return member not in self.packed or self.polished.get(member) == self.step(member).time_ns

    def improve(self, member: int, *, most: bool) -> None:
        """A strategy packed with more care, or with most; a pipeline from the start that is best for that."""
        if not most:
            self._choose(member)
        begin = time.perf_counter()
        care = Effort.MOST if most else Effort.MORE
        self.packed[member] = self.pool.polish(member, self.packed[member], self._grains(member), care)
        self._take(member)
        self.pack_time_s = (time.perf_counter() - begin) / (MOST_TIMES if most else 1.0)
        self.polished[member] = self.step(member).time_ns if most else 0

    def restart(self, member: int) -> bool:
        """A pipeline packed from all starts with a little care, or from the next one with more; whether there was
        one."""
        if member not in self.packed:
            # Its step is that of plain buckets.
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
        """A little care for all starts of a pipeline, once; whether there were any."""
        if member not in self.starts:
            # It was packed elsewhere.
            self.starts[member] = self._shaped(member)
        if member in self.starts_improved:
            return False
        self.starts_improved.add(member)
        starts = self.starts[member]
        shortest = min([self.packed[member], *starts], key=_time_ns).time_ns
        near = [one for one in starts if one.time_ns <= shortest * (1.0 + _FAR)]
        grains = self._grains(member)
        starts = sorted((self.pool.polish(member, one, grains, Effort.LITTLE) for one in near), key=_time_ns)
        if starts:
            self._begin(member, starts.pop(0))
        self.starts[member] = starts
        return bool(near)

    def offer(self, member: int, replicas: tuple[IntArray, ...]) -> None:
        """A packing of a strategy that was found otherwise, if it is shorter."""
        packed = self.pool.time_packing(member, replicas, self._grains(member))
        if member not in self.packed:
            self.packed[member] = packed
            self._take(member)
        self._begin(member, packed)

    def _begin(self, member: int, packed: Packed) -> None:
        """Another packing of a strategy, if it is shorter."""
        if packed.time_ns < self.packed[member].time_ns:
            self.packed[member] = packed
            self._take(member)

    def _take(self, member: int) -> None:
        """The step of a packed strategy, if it is the shortest."""
        self._keep(self.step(member))

    def _keep(self, step: Step) -> None:
        """A step, if it is the shortest."""
        if self.best is None or step.time_ns < self.best.time_ns:
            self.best = step

    def _shaped(self, home: int) -> list[Packed]:
        """Packings of a pipeline by the shapes of its best real loads, the shortest first."""
        pool, grains = self.pool, self._grains(home)
        if pool.num_stages(home) == 1 or pool.load.rules.padded:
            return []
        end = time.perf_counter() + _SHAPE_S
        ways = shaped(pool.work_bound(home, beside=False), pool.load, grains, end)
        return sorted((pool.time_packing(home, replicas, grains) for replicas in ways), key=_time_ns)

    def _grains(self, member: int) -> int:
        return self.pool.max_quanta(member, beside=False)


def _time_ns(packed: Packed) -> int:
    return packed.time_ns
