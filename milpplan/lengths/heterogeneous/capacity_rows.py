"""What one replica of a step of unlike replicas holds at most within a time, as rows of a program.

Whatever is proved of the time of a replica by the sequences that it holds, ``constant + sum_l w_l x_l <= T``, is
one, divided by T - constant; so are prices of what micro-batches hold under strategies of one stage
(``team_prices``), and of pipelines ``sum_l u_l x_l <= h^-1(T)`` with concave bounds h of their load u
(``work.Loads``, ``unlike_pipelines``), of replicas told apart by their longest sequence, too. No sequence runs
where its passage alone takes longer than T.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from milpplan.groups.bounds.linear_bounds import PathBound
from milpplan.lengths.bounds.work_bounds import LinearBounds, PipelineWorkBound, latencies
from milpplan.lengths.heterogeneous.replicas import replica_gpus
from milpplan.lengths.strategy_tables import StrategyTables
from milpplan.simulation.layout_columns import BoolArray, FloatArray


@dataclass(frozen=True, eq=False)
class CapacityRow:
    """What a replica does at most: sequences add ``each`` [n] to its load, and one of the ``bounds`` holds."""

    sequence_loads: FloatArray
    bounds: tuple[PathBound, ...]

    @staticmethod
    def of_loads(loads: PipelineWorkBound) -> list[CapacityRow]:
        """Those of all bounds of a pipeline alone."""
        each = loads.sequence_loads * loads.num_replicas
        return [CapacityRow(each, tuple(one.bound for one in bound.ranges)) for bound in loads.bounds]

    def max_load(self, time_ns: float) -> float:
        """The most load for a time."""
        return max((one.within(time_ns) for one in self.bounds), default=float("inf"))


@dataclass(frozen=True, eq=False)
class ReplicaClass:
    """Replicas of one member of a pool: ``num_gpus`` of each, at most ``most`` of them in a step with others;
    ``once_ns``, what follows; ``works``, bounds of one replica; ``serial`` [n] ns, what a sequence takes at least.
    ``leaders``: from which length to which (exclusive) their longest sequence is, where that is told apart.
    ``rooms``: what is known of pipelines; ``prices`` [n] ns: what a replica of one stage holds is worth no more
    than its time."""

    pool: StrategyTables
    member: int
    num_gpus: int
    max_replicas: int
    fixed_cost_ns: int
    linear_bounds: LinearBounds
    latency_ns: FloatArray
    longest_range: tuple[int, int] | None = None
    capacity_rows: tuple[CapacityRow, ...] = ()
    prices: tuple[FloatArray, ...] = ()

    @staticmethod
    def of(pool: StrategyTables, member: int, *, shared_memory: bool = False) -> ReplicaClass:
        """With what is cheap to prove; ``beside`` other strategies in turn."""
        one, grains = pool.members[member], pool.max_quanta(member, shared_memory=shared_memory)
        number, bounds = one.candidate.layout.dp, pool.linear_bounds(member, shared_memory=shared_memory)
        works = LinearBounds(bounds.shares * number, bounds.constants)
        once_ns = pool.reduce_ns(member) + pool.finish_ns(member)
        serial = latencies(pool.tables[member], one, grains)
        return ReplicaClass(pool, member, replica_gpus(pool, member), number - 1, once_ns, works, serial)

    @cached_property
    def fits(self) -> BoolArray:
        """Lengths that a micro-batch holds, [n]."""
        return np.asarray(np.isfinite(self.linear_bounds.shares[0]) & np.isfinite(self.latency_ns))

    def can_hold(self, time_ns: float) -> BoolArray:
        """Lengths that it holds within a time, [n]."""
        found = self.fits & (self.latency_ns <= time_ns)
        if self.longest_range is not None:
            found &= np.arange(len(found)) < self.longest_range[1]
        return found

    def rows(self, time_ns: float) -> FloatArray:
        """``rows @ x <= 1`` for whatever a replica holds within a time, [i, n]; shares of lengths that it does not
        hold mean nothing. No rows where it holds nothing."""
        known = [*self.capacity_rows]
        if self.pool.num_stages(self.member) > 1 and self.pool.has_own_memory_bound(self.member):
            known += CapacityRow.of_loads(self.pool.best_own_memory_bound(self.member))
        shares = [*self.linear_bounds.shares, *self.prices, *(room.sequence_loads for room in known)]
        limits = [*(time_ns - self.linear_bounds.constants), *([time_ns] * len(self.prices))]
        limits += [room.max_load(time_ns) for room in known]
        if min(limits) <= 0.0:
            return np.zeros((0, len(self.latency_ns)))
        kept = [(share, limit) for share, limit in zip(shares, limits, strict=True) if np.isfinite(limit)]
        return np.array([np.where(self.fits, share, 0.0) / limit for share, limit in kept])
