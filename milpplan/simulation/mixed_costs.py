"""Costs in a cluster of several node types: every pipeline rank has the constants of its own type.

All accelerators of a rank are of one type, so tensor, context, expert and data parallel groups stay inside a type.
Two things pass between types: transfers from a stage to the next, and what all ranks do together (the norm of the
gradients, and the exchange of a tied embedding), which take as long as the slowest type makes them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt

from milpplan.problem.plan import Layout, NodeOrder
from milpplan.problem.problem import Problem
from milpplan.simulation.layout_columns import BoolArray, IntArray, LayoutColumns
from milpplan.simulation.layout_costs import (
    CostTable,
    LayoutCosts,
    crossing_transfer_ns,
    layout_costs,
    step_overhead_ns,
)
from milpplan.simulation.replica_costs import ReplicaCosts, ReplicaTable, replica_table


class RankCosts(Protocol):
    """Constants of one layout, rank by rank: ``LayoutCosts`` where all ranks are alike, else ``MixedCosts``."""

    @property
    def transfer_ns(self) -> IntArray:
        """Shortest transfer from a virtual stage to the next."""

    @property
    def barrier_ns(self) -> IntArray:
        """The norm of the gradients over all ranks."""

    @property
    def offloads(self) -> bool:
        """Whether anything lies on the host."""

    def of_rank(self, rank: int) -> LayoutCosts:
        """Constants of a pipeline rank."""

    def type_of(self, rank: int) -> int:
        """Node type of a pipeline rank."""

    def crossing_ns(self, stage: int) -> int:
        """What a transfer between a virtual stage and the next takes beyond ``transfer_ns``."""


@dataclass(frozen=True, slots=True)
class MixedCosts:
    """``RankCosts`` of several types: constants by type, the type of every rank [P], and what a transfer between
    every virtual stage and the next takes beyond the shortest [J] (0 after the last)."""

    by_type: tuple[LayoutCosts, ...]
    rank_types: tuple[int, ...]
    crossings_ns: tuple[int, ...]
    transfer_ns: IntArray
    barrier_ns: IntArray

    @property
    def offloads(self) -> bool:
        """Whether anything lies on the host."""
        return any(costs.offloads for costs in self.by_type)

    def of_rank(self, rank: int) -> LayoutCosts:
        """Constants of a pipeline rank."""
        return self.by_type[self.rank_types[rank]]

    def type_of(self, rank: int) -> int:
        """Node type of a pipeline rank."""
        return self.rank_types[rank]

    def crossing_ns(self, stage: int) -> int:
        """What a transfer between a virtual stage and the next takes beyond ``transfer_ns``."""
        return self.crossings_ns[stage]


@dataclass(frozen=True)
class MixedTable:
    """Constants of many layouts on every node type, and transfers between types [n]."""

    problem: Problem
    columns: LayoutColumns
    tables: tuple[CostTable, ...]
    crossing_ns: IntArray

    def take(self, rows: npt.NDArray[np.integer]) -> MixedTable:
        """The chosen layouts."""
        tables = tuple(table.take(rows) for table in self.tables)
        return MixedTable(self.problem, self.columns.take(rows), tables, self.crossing_ns[rows])

    def at(self, row: int) -> MixedCosts:
        """One layout."""
        layout = self.columns.at(row)
        by_type = tuple(table.at(row) for table in self.tables)
        types = rank_types(self.problem, layout)
        borders = _border_transfers_ns(layout, by_type, types, int(self.crossing_ns[row]))
        shortest = min(borders, default=0)
        extra = (*(border - shortest for border in borders), 0)
        # Forwards alone: the way back is taken off again (``layout_costs``), here border by border.
        inference = np.asarray(step_overhead_ns(self.problem) - sum(borders))
        barrier = inference if self.problem.inference else by_type[0].barrier_ns
        return MixedCosts(by_type, types, extra, np.asarray(shortest), barrier)

    @cached_property
    def best(self) -> CostTable:
        """Constants of a cluster with the best of every type: no rank of any type is faster or needs fewer bytes.

        A plan's step is a longest path and its memory a sum, and neither falls when a duration or a size grows. So
        what bounds all plans of this cluster from below bounds all plans of the mixed one. Of forwards alone the
        barrier takes off the longest transfers, and paths hold the shortest.
        """
        parts = [table.distinct for table in self.tables]
        values = {}
        for part in fields(LayoutCosts):
            if part.name != "parts":
                least = np.maximum if part.name.startswith("dropped") else np.minimum
                values[part.name] = least.reduce([getattr(costs, part.name) for costs in parts])
        return CostTable(LayoutCosts(parts[0].parts, **values), self.tables[0].place)


def _border_transfers_ns(
    layout: Layout, by_type: tuple[LayoutCosts, ...], types: tuple[int, ...], crossing_ns: int
) -> list[int]:
    """Transfer between every virtual stage and the next, [J - 1]: inside a type its own, else the crossing."""
    ranks = [layout.rank_of(stage) for stage in range(layout.num_virtual_stages)]
    borders = []
    for before, after in pairwise(ranks):
        same = types[before] == types[after]
        borders.append(int(by_type[types[before]].transfer_ns) if same else crossing_ns)
    return borders


def rank_types(problem: Problem, layout: Layout) -> tuple[int, ...]:
    """Node type of every pipeline rank, [P]: blocks in the layout's order, each as long as its GPUs fill ranks."""
    return types_of_ranks(problem, layout.node_order, layout.pp)


def types_of_ranks(problem: Problem, order: NodeOrder, num_ranks: int) -> tuple[int, ...]:
    """The same by the order of the types and the number of ranks."""
    if not problem.other_hardware:
        return (0,) * num_ranks
    gpus, total = problem.node_gpus, sum(problem.node_gpus)
    return tuple(node_type for node_type in order for _ in range(num_ranks * gpus[node_type] // total))


def rank_capacities(problem: Problem, layout: Layout) -> tuple[int, ...]:
    """Bytes that every pipeline rank's GPUs may fill, [P]."""
    types = problem.node_types
    return tuple(types[node_type].usable_bytes for node_type in rank_types(problem, layout))


@dataclass(frozen=True)
class ClusterTable:
    """Constants of many layouts, some with replicas of different make: one table of those, one of the others."""

    pipelines: MixedTable
    replicas: ReplicaTable
    different: BoolArray
    """Which layouts have replicas of different make, [n]; both tables keep their order."""

    @cached_property
    def place(self) -> IntArray:
        """The row of every layout in its own table, [n]."""
        return np.where(self.different, np.cumsum(self.different), np.cumsum(~self.different)) - 1

    def take(self, rows: npt.NDArray[np.integer]) -> ClusterTable:
        """The chosen layouts."""
        different, place = self.different[rows], self.place[rows]
        pipelines, replicas = self.pipelines.take(place[~different]), self.replicas.take(place[different])
        return ClusterTable(pipelines, replicas, different)

    def at(self, row: int) -> MixedCosts | ReplicaCosts:
        """One layout."""
        table = self.replicas if self.different[row] else self.pipelines
        return table.at(int(self.place[row]))


AnyTable = CostTable | MixedTable | ReplicaTable | ClusterTable
"""Constants of many layouts of any cluster."""


def cluster_costs(problem: Problem, columns: LayoutColumns) -> AnyTable:
    """Constants of every layout on every node type of the problem's cluster."""
    if not problem.other_hardware:
        return layout_costs(problem, columns)
    if not columns.any_of("replica_micro_batches"):
        return _pipelines(problem, columns)
    different = columns.replica_micro_batches > 0
    replicas = replica_table(problem, columns.take(different))
    return ClusterTable(_pipelines(problem, columns.take(~different)), replicas, different)


def _pipelines(problem: Problem, columns: LayoutColumns) -> MixedTable:
    """Constants of layouts with all replicas alike."""
    types = range(len(problem.node_types))
    tables = tuple(layout_costs(problem.on_type(node_type), columns) for node_type in types)
    return MixedTable(problem, columns, tables, crossing_transfer_ns(problem, columns))


def costs_of(problem: Problem, layout: Layout) -> RankCosts:
    """Constants of one layout whose replicas are alike (else ``replica_costs.costs_of_replicas``)."""
    assert not layout.replica_micro_batches, "the caller takes the views apart"
    return (_pipelines if problem.other_hardware else layout_costs)(problem, LayoutColumns.of([layout])).at(0)
