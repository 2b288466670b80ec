"""What no step of unlike replicas undercuts.

A step of time S leaves its replicas S less what follows them once, reduction and finish, which is as long as the
slowest strategy in use makes it. So strategies are taken in *levels* of that: in a step of a level some replica is
of one of its strategies and none of a higher one, so every replica has S less the least of the level, or less what
its own strategy takes. If the program (``unlike_program``) leaves less than the workload for every level, no step
is as short. What was excluded of a level stays so for shorter steps, whatever is learned.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from milpplan.lengths.heterogeneous.capacity_rows import ReplicaClass
from milpplan.lengths.heterogeneous.count_program import Shared, UsedKind, solved
from milpplan.lengths.heterogeneous.replicas import heterogeneous_members
from milpplan.lengths.strategy_tables import StrategyTables
from milpplan.optimize.milp.backends import AUTO

# What sums of floats may add.
_SAFETY = 1.0 - 1e-6
# Strategies of a level differ by this part of a step at most.
_LEVEL = 0.003


@dataclass(eq=False)
class HeterogeneousBound:
    """All kinds of replicas of a pool; ``excluded``: by level, given by its least time, the longest steps of which
    it is known that there is none."""

    pool: StrategyTables
    backend: str
    classes: list[ReplicaClass]
    excluded: dict[float, float] = field(default_factory=dict)
    levels: list[float] = field(default_factory=list)

    @staticmethod
    def of(pool: StrategyTables, backend: str) -> HeterogeneousBound:
        """One kind for every member."""
        return HeterogeneousBound(
            pool, backend, [ReplicaClass.of(pool, member) for member in heterogeneous_members(pool)]
        )

    def relax(self, step_ns: float, seconds: float, *, whole: bool = True, some: int | None = None) -> Shared:
        """What steps of so long leave, by programs that end after so many seconds together; numbers of replicas,
        and of long sequences, are ``whole`` or not. Only steps with ``some`` replicas of a member, if it is given.
        """
        best, end = Shared(0.0), time.perf_counter() + seconds
        for least, most in self._levels(step_ns):
            if step_ns <= self.excluded.get(least, 0.0):
                continue
            found = self._level(step_ns, (least, most), end - time.perf_counter(), whole, some)
            if found.excludes and some is None:
                self.excluded[least] = step_ns
            best = max(best, found, key=lambda one: one.share)
        return best

    def _levels(self, step_ns: float) -> list[tuple[float, float]]:
        """The least and the most that follows the replicas, of every level, made once."""
        if not self.levels:
            for once in sorted({float(kind.fixed_cost_ns) for kind in self.classes}):
                if not self.levels or once > self.levels[-1] + _LEVEL * step_ns:
                    self.levels.append(once)
        ends = [*self.levels[1:], float("inf")]
        return list(zip(self.levels, ends, strict=True))

    def _level(
        self, step_ns: float, level: tuple[float, float], seconds: float, whole: bool, some: int | None
    ) -> Shared:
        """One level: what follows is at least the first and below the second."""
        used = []
        for kind in self.classes:
            time_ns = step_ns / _SAFETY - max(level[0], kind.fixed_cost_ns)
            holds = kind.can_hold(time_ns)
            if kind.fixed_cost_ns < level[1] and holds.any() and len(rows := kind.rows(time_ns)):
                used.append(UsedKind(kind, holds, rows).strengthened)
        needed = [lambda kind: kind.once_ns >= level[0]]
        if some is not None:
            needed.append(lambda kind: kind.member == some)
        # What is not whole is no program for CP-SAT.
        backend = AUTO if self.backend == "cpsat" and not whole else self.backend
        return solved(self.pool, used, (backend, seconds), whole, needed)
