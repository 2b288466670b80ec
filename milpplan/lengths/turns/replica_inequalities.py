"""Inequalities on what the replicas of one strategy hold in a step of several strategies.

The bound of a pipeline with all sequences (``longest_sequence_branching``) says little of a pipeline that leaves
some to others. So here are limits on what its replicas hold within a time, by class of their longest sequence, as
rows of a program (``capacity_rows``): each dual vector of the sequences gives one row per class. Replicas with a
longer longest sequence than those of a class hold all longer sequences of the group, and are at least as many as
these sequences need (``min_replicas``), if it is known which the group holds.

If a program assigns more to the replicas than they can hold but no row shows it, the windows of the classes in use
are refined. If that no longer helps, all are asked together for dual values that make the assignment most
infeasible (``restricted_master``): rows that cut it off. The inequalities hold for every set with this pipeline.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from milpplan.lengths.bounds.configuration_bound import ConfigurationBound
from milpplan.lengths.bounds.longest_sequence_branching import LongestSequenceBranching, ReplicaClassBound
from milpplan.lengths.heterogeneous.capacity_rows import CapacityRow, ReplicaClass
from milpplan.lengths.heterogeneous.count_program import UsedKind
from milpplan.lengths.side_by_side.sequence_duals import replica_prices
from milpplan.lengths.strategy_tables import StrategyTables
from milpplan.simulation.layout_columns import FloatArray

# An assignment is cut off if some dual vector limits the replicas to less than this share of it.
_CUT = 1.0 - 1e-3
# Windows are refined until the limit is below the assignment by this share.
_FURTHER = 0.01
# Share of all sequences that is added to an assignment before its dual values are sought; seconds per search,
# maximum number of searches, and the relative difference of times from which an equal assignment is new.
_ALL, _ASK_S, _ASKED, _OTHER = 0.02, 1.5, 24, 0.01
# Number of replicas of a class that is ignored.
_FEW = 0.02
# Maximum number of dual vectors of a strategy of one stage.
_PRICES = 4


@dataclass(frozen=True, eq=False)
class _ClassCapacity(CapacityRow):
    """Limit on the work of a replica of one class, by one dual vector."""

    class_bound: ReplicaClassBound
    class_index: int

    def max_load(self, time_ns: float) -> float:
        return self.class_bound.max_load(self.class_index, time_ns)


class ReplicaInequalities:
    """Inequalities of a strategy's groups with shared memory, in steps of at most ``time_ns``."""

    def __init__(self, pool: StrategyTables, member: int, time_ns: float) -> None:
        self.pool, self.member, self.time_ns = pool, member, time_ns
        self.num_replicas = pool.members[member].candidate.layout.dp
        self.kind = ReplicaClass.of(pool, member, shared_memory=True)
        # For pipelines, once bounds of all replicas together do not suffice.
        self.branching: LongestSequenceBranching | None = None
        self._asked: list[tuple[bytes, float]] = []

    def replica_classes(self, time_ns: float) -> list[UsedKind]:
        """Return every class of replicas that holds something within a time, with its inequalities."""
        classes = [self.kind]
        if self.branching is not None:
            classes = []
            for index, lengths in enumerate(self.branching.classes):
                rooms = tuple(
                    _ClassCapacity(bound.duals.sequence_loads, (), bound, index)
                    for bound in self.branching.class_bounds
                )
                classes.append(replace(self.kind, longest_range=lengths, capacity_rows=rooms))
        used = []
        for replica_class in classes:
            holds = replica_class.can_hold(time_ns)
            if holds.any() and len(rows := replica_class.rows(time_ns)):
                used.append(UsedKind(replica_class, holds, rows).strengthened)
        return used

    def min_replicas(self, first: int, time_ns: float) -> int:
        """Return the minimum number of replicas for all sequences of length index ``first`` and longer."""
        if self.branching is None:
            return 0
        num_sequences = int(self.pool.load.counts[first:].sum())
        return self.branching.min_replicas.min_replicas(num_sequences, time_ns)

    def learn(self, time_ns: float, parts: list[tuple[ReplicaClass, float, FloatArray]], deadline: float) -> bool:
        """Derive inequalities that cut off an assignment; return whether it is cut off now.

        Args:
            time_ns: time of the replicas.
            parts: class, number of its replicas and the sequences [n] that they hold together.
            deadline: of ``perf_counter``.
        """
        if self.pool.num_stages(self.member) == 1:
            return self._price(parts)
        if self.branching is None:
            self.branching = self._led()
            return True
        branching = self.branching
        if any(replica_class.longest_range is None for replica_class, _, _ in parts):
            # The program is older than the branching.
            return True
        assignment = np.zeros(len(branching.classes))
        counts = np.zeros(len(self.pool.load.counts))
        for replica_class, number, held in parts:
            index = branching.classes.index(replica_class.longest_range or (0, 0))
            assignment[index] = number if number > _FEW else 0.0
            counts += held
        if not assignment.any():
            return False
        while time.perf_counter() < deadline:
            shares = [
                self._share(class_bound, assignment, counts, time_ns) for class_bound in branching.class_bounds
            ]
            best = int(np.argmin(shares))
            tightest, share = branching.class_bounds[best], shares[best]
            if share <= 1.0 - _FURTHER:
                return True
            if branching.refine_class(
                tightest,
                assignment,
                time_ns,
                (share - 1.0 + _FURTHER) * float(tightest.duals.sequence_loads @ counts),
            ):
                continue
            key = np.rint(assignment).tobytes()
            differences = [
                abs(class_bound / time_ns - 1.0) for earlier, class_bound in self._asked if earlier == key
            ]
            if len(self._asked) < _ASKED and share > _CUT and min(differences, default=1.0) > _OTHER:
                self._asked.append((key, time_ns))
                wanted = counts + _ALL * self.pool.load.counts
                if branching.add_duals(tightest, assignment, wanted, time_ns, _ASK_S):
                    return self._share(branching.class_bounds[-1], assignment, counts, time_ns) <= _CUT
            return share <= _CUT
        return False

    def _led(self) -> LongestSequenceBranching:
        """Return the branching on the longest sequence of each replica."""
        pricing = self.pool.micro_batch_pricing(self.member, shared_memory=True)
        if pricing.items.fits[-1]:
            work_bound = self.pool.work_bound_with_longest(self.member, np.inf)
        else:
            work_bound = replace(self.pool.best_own_memory_bound(self.member), classes=())
        configuration_bound = ConfigurationBound(work_bound, pricing)
        configuration_bound.branch_on_large(self.time_ns, work_bound.total_load)
        return LongestSequenceBranching(configuration_bound, self.time_ns)

    def _price(self, parts: list[tuple[ReplicaClass, float, FloatArray]]) -> bool:
        """Add dual values that are highest for what replicas of one stage hold, a few times."""
        if not parts or len(self.kind.prices) == _PRICES:
            return False
        wanted = parts[0][2] + _ALL * self.pool.load.counts
        fitting = np.where(self.kind.can_hold(self.time_ns), wanted, 0.0)
        prices = replica_prices(self.pool, self.member, fitting, self.time_ns, np.inf)
        self.kind = replace(self.kind, prices=(*self.kind.prices, prices))
        return True

    def _share(
        self, class_bound: ReplicaClassBound, assignment: FloatArray, held: FloatArray, time_ns: float
    ) -> float:
        """Return the maximum work of an assignment's replicas, as a share of what they hold together."""
        indices = np.flatnonzero(assignment).tolist()
        max_load = sum(
            float(assignment[index]) * max(0.0, class_bound.max_load(index, time_ns)) for index in indices
        )
        return max_load / float(class_bound.duals.sequence_loads @ held)
