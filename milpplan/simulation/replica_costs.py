"""Heterogeneous data-parallel replicas: every replica is on one node type and has its own share of the batch.

The replicas hold the same layers in the same stages, so the gradients of a stage are reduced across all replicas.
Each replica runs its own pipeline, on the hardware of its type and with its own number of micro-batches. Replicas
communicate only before the first forward (gathers) and after the last backward of a stage (reductions, norm,
update). No path through a step leads from the pipeline of a type into the pipeline of another type. So the step
time is the maximum of the step times of the node types, each simulated alone, with shared communication at the
speed of the slowest type. These are the *views* of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from milpplan.errors import IllegalPlanError
from milpplan.problem import HardwareSpec, Layout, Plan, Problem, Recompute, shares_of
from milpplan.simulation.layers import mfu
from milpplan.simulation.layout_columns import LayoutColumns, ascending, column_value, constant
from milpplan.simulation.layout_costs import CostTable, LayoutCosts, layout_costs, step_overhead_ns
from milpplan.simulation.report import StageReport, StepReport
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


def replicas_by_type(problem: Problem, layout: Layout) -> tuple[int, ...]:
    """Count the replicas on each node type (exact for legal layouts)."""
    return tuple(gpus // (layout.num_gpus // layout.dp) for gpus in problem.node_gpus)


def check_replicas(problem: Problem, layout: Layout) -> None:
    """Check the rules of heterogeneous replicas beyond those of each view.

    Raises:
        IllegalPlanError: the layout cannot run, or the cost model does not cover it.
    """
    types, block = len(problem.node_types), layout.num_gpus // layout.dp
    shares, gpus = layout.replica_micro_batches, problem.node_gpus
    counts = replicas_by_type(problem, layout)
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
