"""Costs in a cluster of several node types: every pipeline rank has the constants of its own type.

All accelerators of a rank are of the same type, so tensor, context, expert and data parallel groups stay inside a
type. Two sorts of communication cross types: transfers between neighbouring stages, and the collectives of all
ranks (the norm of the gradients, and the exchange of a tied embedding). Both run at the speed of the slowest type.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt

from milpplan.problem import Layout, Problem
from milpplan.problem.plan import NodeOrder
from milpplan.simulation.layout_columns import BoolArray, IntArray, LayoutColumns
from milpplan.simulation.layout_costs import (
    CostTable,
    LayoutCosts,
    capacities_bytes,
    crossing_transfer_ns,
    layout_costs,
    step_overhead_ns,
)
from milpplan.simulation.replica_costs import ReplicaCosts, ReplicaTable, replica_table


class RankCosts(Protocol):
    """Constants of a layout, rank by rank: ``LayoutCosts`` if all ranks are alike, else ``MixedCosts``."""

    @property
    def transfer_ns(self) -> IntArray:
        """Shortest transfer from a virtual stage to the next."""

    @property
    def barrier_ns(self) -> IntArray:
        """Norm of the gradients over all ranks."""

    @property
    def offloads(self) -> bool:
        """True if a rank holds states or activations on the host."""

    def of_rank(self, rank: int) -> LayoutCosts:
        """Return the constants of a pipeline rank."""

    def type_of(self, rank: int) -> int:
        """Return the node type of a pipeline rank."""

    def crossing_ns(self, stage: int) -> int:
        """Return the time beyond ``transfer_ns`` of a transfer from a virtual stage to the next."""


@dataclass(frozen=True, slots=True)
class MixedCosts:
    """``RankCosts`` in a cluster of several node types."""

    by_type: tuple[LayoutCosts, ...]
    rank_types: tuple[int, ...]
    """[P] node type of every rank."""
    crossings_ns: tuple[int, ...]
    """[J] time beyond ``transfer_ns`` of a transfer from a virtual stage to the next, 0 for the last stage."""
    transfer_ns: IntArray
    barrier_ns: IntArray

    @property
    def offloads(self) -> bool:
        """True if a rank holds states or activations on the host."""
        return any(costs.offloads for costs in self.by_type)

    def of_rank(self, rank: int) -> LayoutCosts:
        """Return the constants of a pipeline rank."""
        return self.by_type[self.rank_types[rank]]

    def type_of(self, rank: int) -> int:
        """Return the node type of a pipeline rank."""
        return self.rank_types[rank]

    def crossing_ns(self, stage: int) -> int:
        """Return the time beyond ``transfer_ns`` of a transfer from a virtual stage to the next."""
        return self.crossings_ns[stage]


@dataclass(frozen=True)
class MixedTable:
    """Constants of many layouts on every node type."""

    problem: Problem
    columns: LayoutColumns
    tables: tuple[CostTable, ...]
    """By node type."""
    crossing_ns: IntArray
    """[n] transfer between stages on two node types."""

    def take(self, rows: npt.NDArray[np.integer]) -> MixedTable:
        """Select layouts."""
        tables = tuple(table.take(rows) for table in self.tables)
        return MixedTable(self.problem, self.columns.take(rows), tables, self.crossing_ns[rows])

    def at(self, row: int) -> MixedCosts:
        """Select one layout."""
        layout = self.columns.at(row)
        by_type = tuple(table.at(row) for table in self.tables)
        types = rank_types(self.problem, layout)
        borders = _border_transfers_ns(layout, by_type, types, int(self.crossing_ns[row]))
        shortest = min(borders, default=0)
        extra = (*(border - shortest for border in borders), 0)
        # Inference: subtract the transfers of the backwards (``layout_costs._barrier_ns``), here border by border.
        inference = np.asarray(step_overhead_ns(self.problem) - sum(borders))
        barrier = inference if self.problem.inference else by_type[0].barrier_ns
        return MixedCosts(by_type, types, extra, np.asarray(shortest), barrier)

    @cached_property
    def best(self) -> CostTable:
        """Constants of an ideal cluster: no rank of any type is faster or needs fewer bytes.

        The step of a plan is a longest path and its memory a sum, and neither falls when a duration or a size
        grows. So a lower bound for all plans of the ideal cluster is a lower bound for all plans of the mixed
        cluster. In an inference job the barrier subtracts the longest transfers, and paths hold the shortest
        transfers.
        """
        by_type = [table.distinct for table in self.tables]
        values = {}
        for field in fields(LayoutCosts):
            if field.name != "parts":
                best = np.maximum if field.name.startswith("dropped") else np.minimum
                values[field.name] = best.reduce([getattr(costs, field.name) for costs in by_type])
        return CostTable(LayoutCosts(by_type[0].parts, **values), self.tables[0].place)


def _border_transfers_ns(
    layout: Layout, by_type: tuple[LayoutCosts, ...], types: tuple[int, ...], crossing_ns: int
) -> list[int]:
    """Time the transfers between virtual stages, [J - 1]; ``crossing_ns`` where the node type changes."""
    ranks = [layout.rank_of(stage) for stage in range(layout.num_virtual_stages)]
    borders = []
    for before, after in pairwise(ranks):
        same = types[before] == types[after]
        borders.append(int(by_type[types[before]].transfer_ns) if same else crossing_ns)
    return borders


def rank_types(problem: Problem, layout: Layout) -> tuple[int, ...]:
    """List the node type of every pipeline rank of a layout, [P]."""
    return types_of_ranks(problem, layout.node_order, layout.pp)


def types_of_ranks(problem: Problem, order: NodeOrder, num_ranks: int) -> tuple[int, ...]:
    """List the node type of every pipeline rank, [P]: a block of ranks for each type, in the given order.

    The GPUs of a type fill its block.
    """
    if not problem.other_hardware:
        return (0,) * num_ranks
    gpus, total = problem.node_gpus, sum(problem.node_gpus)
    return tuple(node_type for node_type in order for _ in range(num_ranks * gpus[node_type] // total))


def rank_capacities(problem: Problem, layout: Layout) -> tuple[int, ...]:
    """List the bytes that a GPU of every pipeline rank may fill, [P]."""
    capacities = capacities_bytes(problem)
    return tuple(capacities[node_type] for node_type in rank_types(problem, layout))


@dataclass(frozen=True)
class ClusterTable:
    """Constants of many layouts, with separate tables for layouts with equal and with heterogeneous replicas."""

    pipelines: MixedTable
    """Layouts whose replicas are all alike."""
    replicas: ReplicaTable
    """Layouts with heterogeneous replicas."""
    different: BoolArray
    """[n] True for heterogeneous replicas; both tables keep the order of the layouts."""

    @cached_property
    def place(self) -> IntArray:
        """Row of every layout in its own table, [n]."""
        return np.where(self.different, np.cumsum(self.different), np.cumsum(~self.different)) - 1

    def take(self, rows: npt.NDArray[np.integer]) -> ClusterTable:
        """Select layouts."""
        different, index = self.different[rows], self.place[rows]
        pipelines, replicas = self.pipelines.take(index[~different]), self.replicas.take(index[different])
        return ClusterTable(pipelines, replicas, different)

    def at(self, row: int) -> MixedCosts | ReplicaCosts:
        """Select one layout."""
        table = self.replicas if self.different[row] else self.pipelines
        return table.at(int(self.place[row]))


AnyTable = CostTable | MixedTable | ReplicaTable | ClusterTable
"""Constants of many layouts of any cluster."""


def cluster_costs(problem: Problem, columns: LayoutColumns) -> AnyTable:
    """Compute the constants of many layouts on every node type of the problem's cluster."""
    if not problem.other_hardware:
        return layout_costs(problem, columns)
    if not columns.any_of("replica_micro_batches"):
        return _pipelines(problem, columns)
    different = columns.replica_micro_batches > 0
    replicas = replica_table(problem, columns.take(different))
    return ClusterTable(_pipelines(problem, columns.take(~different)), replicas, different)


def _pipelines(problem: Problem, columns: LayoutColumns) -> MixedTable:
    """Compute the constants of layouts whose replicas are all alike."""
    types = range(len(problem.node_types))
    tables = tuple(layout_costs(problem.on_type(node_type), columns) for node_type in types)
    return MixedTable(problem, columns, tables, crossing_transfer_ns(problem, columns))


def costs_of(problem: Problem, layout: Layout) -> RankCosts:
    """Compute the constants of one layout whose replicas are alike (else ``replica_costs.costs_of_replicas``)."""
    assert not layout.replica_micro_batches, "the caller takes the views apart"
    return (_pipelines if problem.other_hardware else layout_costs)(problem, LayoutColumns.of([layout])).at(0)
