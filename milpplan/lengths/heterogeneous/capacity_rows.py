"""Capacity of a replica of a heterogeneous step within a time, as rows of a program.

Every bound of a replica's time by its sequences, ``constant + sum_l w_l x_l <= T``, is a row, divided by T -
constant. So are prices of micro-batch contents of strategies of one stage (``sequence_duals``), and for pipelines
``sum_l u_l x_l <= h^-1(T)`` with concave bounds h of their work u (``work_bounds.PipelineWorkBound``,
``pipeline_capacity``), also by class of the longest sequence. No sequence runs where its latency exceeds T.
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
    """Maximum work of a replica: sequences add ``sequence_loads`` [n], and one of the ``bounds`` holds."""

    sequence_loads: FloatArray
    bounds: tuple[PathBound, ...]

    @staticmethod
    def of_loads(work_bound: PipelineWorkBound) -> list[CapacityRow]:
        """Return the rows of all bounds of a pipeline with its own memory."""
        sequence_loads = work_bound.sequence_loads * work_bound.num_replicas
        return [
            CapacityRow(sequence_loads, tuple(count_range.bound for count_range in bound.ranges))
            for bound in work_bound.bounds
        ]

    def max_load(self, time_ns: float) -> float:
        """Return the maximum work within a time."""
        return max((bound.within(time_ns) for bound in self.bounds), default=float("inf"))


@dataclass(frozen=True, eq=False)
class ReplicaClass:
    """Replicas of one member of a pool, perhaps with a range of their longest sequence."""

    pool: StrategyTables
    member: int
    num_gpus: int
    """GPUs of each replica."""
    max_replicas: int
    """Maximum number in a step with others."""
    fixed_cost_ns: int
    """Reduction and finish."""
    linear_bounds: LinearBounds
    """Bounds of one replica."""
    latency_ns: FloatArray
    """Minimum time of a sequence of each length, [n]."""
    longest_range: tuple[int, int] | None = None
    """First length index of their longest sequence, and the index after the last, if they are a class."""
    capacity_rows: tuple[CapacityRow, ...] = ()
    """Capacities of pipelines."""
    prices: tuple[FloatArray, ...] = ()
    """Prices [n] ns: the contents of a replica of one stage are worth at most its time."""

    @staticmethod
    def of(pool: StrategyTables, member: int, *, shared_memory: bool = False) -> ReplicaClass:
        """Build the class with cheap bounds, with its own memory or with memory shared with other strategies in
        turn."""
        candidate, quanta = pool.members[member], pool.max_quanta(member, shared_memory=shared_memory)
        num_replicas, bounds = (
            candidate.candidate.layout.dp,
            pool.linear_bounds(member, shared_memory=shared_memory),
        )
        linear_bounds = LinearBounds(bounds.shares * num_replicas, bounds.constants)
        fixed_cost_ns = pool.reduce_ns(member) + pool.finish_ns(member)
        latency_ns = latencies(pool.tables[member], candidate, quanta)
        return ReplicaClass(
            pool, member, replica_gpus(pool, member), num_replicas - 1, fixed_cost_ns, linear_bounds, latency_ns
        )

    @cached_property
    def fits(self) -> BoolArray:
        """Lengths that fit into a micro-batch, [n]."""
        return np.asarray(np.isfinite(self.linear_bounds.shares[0]) & np.isfinite(self.latency_ns))

    def can_hold(self, time_ns: float) -> BoolArray:
        """Return the lengths that a replica can hold within a time, [n]."""
        possible = self.fits & (self.latency_ns <= time_ns)
        if self.longest_range is not None:
            possible &= np.arange(len(possible)) < self.longest_range[1]
        return possible

    def rows(self, time_ns: float) -> FloatArray:
        """Return ``rows @ x <= 1`` for the sequences of a replica within a time, [i, n].

        Entries of lengths that it cannot hold are meaningless. Without rows it holds nothing.
        """
        capacity_rows = [*self.capacity_rows]
        if self.pool.num_stages(self.member) > 1 and self.pool.has_own_memory_bound(self.member):
            capacity_rows += CapacityRow.of_loads(self.pool.best_own_memory_bound(self.member))
        shares = [*self.linear_bounds.shares, *self.prices, *(row.sequence_loads for row in capacity_rows)]
        limits = [*(time_ns - self.linear_bounds.constants), *([time_ns] * len(self.prices))]
        limits += [row.max_load(time_ns) for row in capacity_rows]
        if min(limits) <= 0.0:
            return np.zeros((0, len(self.latency_ns)))
        kept = [(share, limit) for share, limit in zip(shares, limits, strict=True) if np.isfinite(limit)]
        return np.array([np.where(self.fits, share, 0.0) / limit for share, limit in kept])
