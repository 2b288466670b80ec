"""Costs in a cluster of several node types: every pipeline rank has the constants of its own type.

All accelerators of a rank are of the same type, so tensor, context, expert and data parallel groups stay inside a
type. Two sorts of communication cross types: transfers between neighbouring stages, and the collectives of all
ranks (the norm of the gradients, and the exchange of a tied embedding). Both run at the speed of the slowest type.

**Heterogeneous replicas**: every data-parallel replica is on one node type and has its own share of the batch. The
replicas hold the same layers in the same stages, so the gradients of a stage are reduced across all replicas.
Each replica runs its own pipeline, on the hardware of its type and with its own number of micro-batches. Replicas
communicate only before the first forward (gathers) and after the last backward of a stage (reductions, norm,
update). No path through a step leads from the pipeline of a type into the pipeline of another type. So the step
time is the maximum of the step times of the node types, each simulated alone, with shared communication at the
speed of the slowest type. These are the *views* of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt

from milpplan.errors import IllegalPlanError
from milpplan.problem import HardwareSpec, Layout, Plan, Problem, Recompute, shares_of
from milpplan.problem.plan import NodeOrder
from milpplan.simulation.layers import mfu
from milpplan.simulation.layout_columns import (
    BoolArray,
    IntArray,
    LayoutColumns,
    ascending,
    column_value,
    constant,
)
from milpplan.simulation.layout_costs import (
    CostTable,
    LayoutCosts,
    capacities_bytes,
    crossing_transfer_ns,
    layout_costs,
    step_overhead_ns,
)
from milpplan.simulation.step_report import StageReport, StepReport
from milpplan.units import NS_PER_S

SHARED = ("gather_ns", "reduce_ns", "optimizer_ns")
"""Constants of shared work, which take a maximum over the node types, piece by piece. This is an upper bound for
updates, because different types may be the slowest for different pieces."""


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """A step as the replicas on one node type see it.

    Problem and layout have this node type only. The number of replicas is that of all types, and every replica has
    the share of this type, so the batch differs from the job's.
    """

    problem: Problem
    layout: Layout
    costs: LayoutCosts


@dataclass(frozen=True, slots=True)
class ReplicaCosts:
    """Constants of a layout with heterogeneous replicas."""

    views: tuple[ReplicaView, ...]
    """By node type."""


@dataclass(frozen=True)
class ReplicaTable:
    """Constants of many layouts with heterogeneous replicas, on every node type."""

    problem: Problem
    columns: LayoutColumns
    tables: tuple[CostTable, ...]

    def take(self, rows: npt.NDArray[np.integer]) -> ReplicaTable:
        """Select layouts."""
        return ReplicaTable(
            self.problem, self.columns.take(rows), tuple(table.take(rows) for table in self.tables)
        )

    def at(self, row: int) -> ReplicaCosts:
        """Select one layout."""
        layout = self.columns.at(row)
        views = [view_of(self.problem, layout, node_type) for node_type in range(len(self.tables))]
        return ReplicaCosts(
            tuple(
                ReplicaView(problem, view_layout, table.at(row))
                for (problem, view_layout), table in zip(views, self.tables, strict=True)
            )
        )


def on_one_type(problem: Problem, node_type: int) -> Problem:
    """Replace the cluster by a cluster with a single node type."""
    return problem.model_copy(update={"hardware": problem.node_types[node_type], "other_hardware": ()})


def view_of(problem: Problem, layout: Layout, node_type: int) -> tuple[Problem, Layout]:
    """Build the problem and the layout of the view of one node type."""
    share = layout.replica_micro_batches[node_type]
    batch = share * layout.dp * layout.micro_batch_size
    job = problem.job.model_copy(update={"num_gpus": layout.num_gpus, "global_batch_size": batch})
    alone = on_one_type(problem, node_type).model_copy(update={"job": job})
    return alone, layout.model_copy(update={"global_batch_size": batch, "replica_micro_batches": ()})


def view_plans(problem: Problem, plan: Plan) -> list[tuple[Problem, Plan]]:
    """Build the problem and the plan of the view of every node type."""
    views = [view_of(problem, plan.layout, node_type) for node_type in range(len(problem.node_types))]
    return [
        (view_problem, plan.of_replicas(node_type, layout))
        for node_type, (view_problem, layout) in enumerate(views)
    ]


def joined_plan(layout: Layout, plans: tuple[Plan, ...]) -> Plan:
    """Join the plans of the views into the plan of the whole cluster."""
    first, *others = plans
    other: tuple[Recompute, ...] = tuple(stage.recompute for plan in others for stage in plan.virtual_stages)
    return Plan(layout=layout, virtual_stages=first.virtual_stages, other_recompute=other)


def view_columns(columns: LayoutColumns, node_type: int) -> LayoutColumns:
    """Build the layouts of the views of one node type."""
    shares = np.array([shares_of(code)[node_type] for code in ascending(columns.replica_micro_batches).tolist()])
    _, index = np.unique(columns.replica_micro_batches, return_inverse=True)
    batch = shares[index] * columns.dp * columns.micro_batch_size
    no_shares = np.asarray(constant(column_value("replica_micro_batches", ()), len(columns)), dtype=np.int64)
    return replace(columns, global_batch_size=batch, replica_micro_batches=no_shares)


def replica_table(problem: Problem, columns: LayoutColumns) -> ReplicaTable:
    """Compute the constants of layouts with heterogeneous replicas, on every node type."""
    types = range(len(problem.node_types))
    alone = [layout_costs(on_one_type(problem, node_type), columns) for node_type in types]
    apart = [across(problem, node_type) for node_type in types]
    meeting = [
        own if hardware == problem.node_types[node_type] else _costs_with(problem, node_type, hardware, columns)
        for node_type, (own, hardware) in enumerate(zip(alone, apart, strict=True))
    ]
    shared = {name: np.maximum.reduce([getattr(table.distinct, name) for table in meeting]) for name in SHARED}
    norms = [
        table.distinct.barrier_ns - step_overhead_ns(on_one_type(problem, node_type))
        for node_type, table in enumerate(meeting)
    ]
    shared["barrier_ns"] = np.maximum.reduce(norms) + step_overhead_ns(problem)
    tables = tuple(CostTable(replace(table.distinct, **shared), table.place) for table in alone)
    return ReplicaTable(problem, columns, tables)


def costs_of_replicas(problem: Problem, layout: Layout) -> ReplicaCosts:
    """Compute the constants of one layout with heterogeneous replicas."""
    return replica_table(problem, LayoutColumns.of([layout])).at(0)


def _costs_with(problem: Problem, node_type: int, hardware: HardwareSpec, columns: LayoutColumns) -> CostTable:
    """Compute the constants of layouts on one node type whose hardware is replaced."""
    return layout_costs(on_one_type(problem, node_type).model_copy(update={"hardware": hardware}), columns)


def across(problem: Problem, node_type: int) -> HardwareSpec:
    """Describe a node type to a group with ranks on all node types.

    The accelerators of each type fill their own domains, so no domain holds the whole group. Where a type does not
    fill whole domains, the domains are smaller than the real ones: an upper bound.
    """
    hardware, gpus = problem.node_types[node_type], problem.node_gpus
    scale_up = hardware.scale_up
    domain = int(np.gcd.reduce([scale_up.num_gpus, *gpus]))
    if domain == scale_up.num_gpus and not scale_up.segments:
        return hardware
    segments = tuple(sorted({int(np.gcd.reduce([segment, *gpus])) for segment in scale_up.segments or ()}))
    smaller = scale_up.model_copy(update={"num_gpus": domain, "segments": segments})
    return hardware.model_copy(update={"scale_up": smaller})


def check_replicas(problem: Problem, layout: Layout) -> None:
    """Check the rules of heterogeneous replicas beyond those of each view.

    Raises:
        IllegalPlanError: the layout cannot run, or the cost model does not cover it.
    """
    types, block = len(problem.node_types), layout.num_gpus // layout.dp
    shares, gpus = layout.replica_micro_batches, problem.node_gpus
    counts = tuple(gpus // (layout.num_gpus // layout.dp) for gpus in problem.node_gpus)
    batch = layout.micro_batch_size * sum(count * share for count, share in zip(counts, shares, strict=False))
    rules = [
        (
            types == len(shares),
            f"{len(shares)} shares of the batch for {types} node types",
            "replicas of different make are on at least two node types, each with a share",
        ),
        (
            all(count % block == 0 for count in gpus),
            f"replicas of {block} GPUs",
            f"the GPUs of every node type ({', '.join(map(str, gpus))}) are whole replicas",
        ),
        (
            batch == layout.global_batch_size,
            f"replica_micro_batches={list(shares)}, {batch} sequences",
            f"the shares of {' and '.join(map(str, counts))} replicas are the batch of {layout.global_batch_size}",
        ),
        (
            layout.rank_order.endswith("dp"),
            f"rank_order={layout.rank_order}",
            "with replicas of different make the GPUs of a replica are neighbours (dp comes last)",
        ),
        (
            layout.zero_stage <= 1,
            f"zero_stage={layout.zero_stage}",
            "replicas with different numbers of micro-batches meet once a step (ZeRO 0 or 1)",
        ),
        (
            layout.dp_replicate == 1,
            f"dp_replicate={layout.dp_replicate}",
            "replicas of different make shard states over all replicas (dp_replicate 1)",
        ),
        (
            (layout.tp * layout.cp) % (layout.ep * layout.etp) == 0,
            f"ep={layout.ep} x etp={layout.etp}",
            "every replica holds all experts (ep x etp divides tp x cp): replicas exchange no tokens",
        ),
        (not layout.offloads, "something offloaded", "replicas of different make offload nothing"),
        (not problem.inference, "a job of inference", "replicas of different make are planned for training"),
    ]
    for legal, seen, expected in rules:
        if not legal:
            raise IllegalPlanError(f"The layout has {seen}.", f"Expected: {expected}.", "Change the layout.")


def joined_report(problem: Problem, plan: Plan, views: Sequence[StepReport]) -> StepReport:
    """Join the reports of the views into the report of a step.

    The stages of a replica on the first node type come first, then those on the next type. A type that is done
    early waits for the slowest type, and the wait is part of its bubble. Means are over all accelerators.
    """
    layout, slowest = plan.layout, max(views, key=lambda view: view.step_time_ns)
    step_ns = slowest.step_time_ns
    step_s = step_ns / NS_PER_S
    tokens_per_s = layout.global_batch_size * problem.job.sequence_length / step_s
    stages: list[StageReport] = []
    for view in views:
        wait_s = (step_ns - view.step_time_ns) / NS_PER_S
        for stage in view.stages:
            breakdown_s = stage.breakdown_s | {"bubble": stage.breakdown_s["bubble"] + wait_s}
            stages.append(replace(stage, breakdown_s=breakdown_s))
    tightest = min(views, key=lambda view: view.memory_margin_bytes)
    weights = [gpus / (layout.num_gpus * layout.pp) for gpus in problem.node_gpus for _ in range(layout.pp)]

    def mean(name: str, part: str) -> float:
        """Average a part of the reports over all accelerators."""
        values = [getattr(stage, part)[name] for stage in stages]
        return float(sum(weight * value for weight, value in zip(weights, values, strict=True)))

    return replace(
        tightest,
        step_time_s=step_s,
        step_time_ns=step_ns,
        tokens_per_s=tokens_per_s,
        mfu=mfu(problem, tokens_per_s, layout.num_gpus),
        fits=all(view.fits for view in views),
        breakdown_s={name: mean(name, "breakdown_s") for name in slowest.breakdown_s},
        hidden_s={name: mean(name, "hidden_s") for name in slowest.hidden_s},
        stages=tuple(stages),
    )


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
    """Compute the constants of one layout whose replicas are alike (else ``costs_of_replicas``)."""
    assert not layout.replica_micro_batches, "the caller takes the views apart"
    return (_pipelines if problem.other_hardware else layout_costs)(problem, LayoutColumns.of([layout])).at(0)
