"""Lower bound of all steps of heterogeneous replicas.

A step of time S leaves its replicas S less their fixed cost, reduction and finish, which is that of the slowest
strategy in use. So strategies are divided into *levels* of the fixed cost: in a step of a level some replica has
one of its strategies and none a higher one, so every replica has S less the minimum of the level, or less its own
fixed cost. If the program (``count_program``) leaves less than the workload for every level, there is no such
step. What was excluded for a level stays excluded for shorter steps.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from milpplan.lengths.heterogeneous.capacity_rows import ReplicaClass
from milpplan.lengths.heterogeneous.count_program import Shared, UsedKind, solved
from milpplan.lengths.heterogeneous.replicas import heterogeneous_members
from milpplan.lengths.strategy_tables import StrategyTables
from milpplan.optimize.milp.backends import AUTO

# Factor that covers the rounding of float sums.
_SAFETY = 1.0 - 1e-6
# Maximum difference of the fixed costs of a level, as a share of the step.
_LEVEL = 0.003


@dataclass(eq=False)
class HeterogeneousBound:
    """All classes of replicas of a pool, and the excluded steps."""

    pool: StrategyTables
    backend: str
    classes: list[ReplicaClass]
    excluded: dict[float, float] = field(default_factory=dict)
    """By level, given by its minimum fixed cost: the longest step that is excluded."""
    levels: list[float] = field(default_factory=list)
    """Minimum fixed cost of every level."""

    @staticmethod
    def of(pool: StrategyTables, backend: str) -> HeterogeneousBound:
        """Start with one class for every member."""
        return HeterogeneousBound(
            pool, backend, [ReplicaClass.of(pool, member) for member in heterogeneous_members(pool)]
        )

    def relax(self, step_ns: float, seconds: float, *, whole: bool = True, some: int | None = None) -> Shared:
        """Return what steps of ``step_ns`` can do at most.

        Args:
            step_ns: time of the step.
            seconds: time limit of all programs together.
            whole: whether numbers of replicas and of long sequences are integers.
            some: a member of which some replica is used; None: any.
        """
        loosest, end = Shared(0.0), time.perf_counter() + seconds
        for level_min, level_end in self._levels(step_ns):
            if step_ns <= self.excluded.get(level_min, 0.0):
                continue
            relaxed = self._level(step_ns, (level_min, level_end), end - time.perf_counter(), whole, some)
            if relaxed.excludes and some is None:
                self.excluded[level_min] = step_ns
            loosest = max(loosest, relaxed, key=lambda candidate: candidate.share)
        return loosest

    def _levels(self, step_ns: float) -> list[tuple[float, float]]:
        """Return the minimum fixed cost and the end of every level, computed once."""
        if not self.levels:
            for fixed_cost in sorted({float(replica_class.fixed_cost_ns) for replica_class in self.classes}):
                if not self.levels or fixed_cost > self.levels[-1] + _LEVEL * step_ns:
                    self.levels.append(fixed_cost)
        ends = [*self.levels[1:], float("inf")]
        return list(zip(self.levels, ends, strict=True))

    def _level(
        self, step_ns: float, level: tuple[float, float], seconds: float, whole: bool, some: int | None
    ) -> Shared:
        """Solve the program of one level, whose fixed costs are at least the first value and below the second."""
        used = []
        for replica_class in self.classes:
            time_ns = step_ns / _SAFETY - max(level[0], replica_class.fixed_cost_ns)
            holds = replica_class.can_hold(time_ns)
            if replica_class.fixed_cost_ns < level[1] and holds.any() and len(rows := replica_class.rows(time_ns)):
                used.append(UsedKind(replica_class, holds, rows).strengthened)
        needed = [lambda replica_class: replica_class.fixed_cost_ns >= level[0]]
        if some is not None:
            needed.append(lambda replica_class: replica_class.member == some)
        # CP-SAT cannot solve linear relaxations.
        backend = AUTO if self.backend == "cpsat" and not whole else self.backend
        return solved(self.pool, used, (backend, seconds), whole, needed)
