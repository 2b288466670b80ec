"""Costs of data-parallel replicas of different make: every replica on one node type, with a share of its own.

The replicas hold the same layers in the same stages, so the gradients of a stage meet across all of them. Each
replica runs its pipeline by itself, on the hardware of its type and with its own number of micro-batches; what it
shares with the others comes before the first forward (gathers) or after the last backward of a stage (reductions,
norm, update). No path through a step leads from the pipeline of one type into that of another. So the step is the
longest of the steps of the types, each taken alone, where what is shared takes as long as on the slowest type: the
*views*.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from milpplan.errors import IllegalPlanError
from milpplan.problem.hardware import HardwareSpec
from milpplan.problem.plan import Layout, Plan, Recompute, shares_of
from milpplan.problem.problem import Problem
from milpplan.simulation.layers.parameters import mfu
from milpplan.simulation.layout_columns import LayoutColumns, ascending, column_value, constant
from milpplan.simulation.layout_costs import CostTable, LayoutCosts, layout_costs, step_overhead_ns
from milpplan.simulation.report import StageReport, StepReport
from milpplan.units import NS_PER_S

SHARED = ("gather_ns", "reduce_ns", "optimizer_ns")
"""What all replicas do together, or wait for: as long as on the slowest type, part by part (upper for updates: one
type may be slower with one part and the other with another)."""


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """A step as the replicas on one node type see it: a problem and a layout of this type alone, with as many
    replicas as there are of all types and a batch of which each has the share of this type's."""

    problem: Problem
    layout: Layout
    costs: LayoutCosts


@dataclass(frozen=True, slots=True)
class ReplicaCosts:
    """Constants of one layout with replicas of different make, by node type."""

    views: tuple[ReplicaView, ...]


@dataclass(frozen=True)
class ReplicaTable:
    """Constants of many such layouts on every node type."""

    problem: Problem
    columns: LayoutColumns
    tables: tuple[CostTable, ...]

    def take(self, rows: npt.NDArray[np.integer]) -> ReplicaTable:
        """The chosen layouts."""
        return ReplicaTable(
            self.problem, self.columns.take(rows), tuple(table.take(rows) for table in self.tables)
        )

    def at(self, row: int) -> ReplicaCosts:
        """One layout."""
        layout = self.columns.at(row)
        views = [view_of(self.problem, layout, node_type) for node_type in range(len(self.tables))]
        return ReplicaCosts(
            tuple(
                ReplicaView(problem, own, table.at(row))
                for (problem, own), table in zip(views, self.tables, strict=True)
            )
        )


def on_one_type(problem: Problem, node_type: int) -> Problem:
    """The problem with all accelerators of one type."""
    return problem.model_copy(update={"hardware": problem.node_types[node_type], "other_hardware": ()})


def view_of(problem: Problem, layout: Layout, node_type: int) -> tuple[Problem, Layout]:
    """Problem and layout of the view of one node type."""
    share = layout.replica_micro_batches[node_type]
    batch = share * layout.dp * layout.micro_batch_size
    job = problem.job.model_copy(update={"num_gpus": layout.num_gpus, "global_batch_size": batch})
    alone = on_one_type(problem, node_type).model_copy(update={"job": job})
    return alone, layout.model_copy(update={"global_batch_size": batch, "replica_micro_batches": ()})


def view_plans(problem: Problem, plan: Plan) -> list[tuple[Problem, Plan]]:
    """Problem and plan of the view of every node type."""
    views = [view_of(problem, plan.layout, node_type) for node_type in range(len(problem.node_types))]
    return [(own, plan.of_replicas(node_type, layout)) for node_type, (own, layout) in enumerate(views)]


def joined_plan(layout: Layout, plans: tuple[Plan, ...]) -> Plan:
    """The plan whose views these are."""
    first, *others = plans
    other: tuple[Recompute, ...] = tuple(stage.recompute for own in others for stage in own.virtual_stages)
    return Plan(layout=layout, virtual_stages=first.virtual_stages, other_recompute=other)


def view_columns(columns: LayoutColumns, node_type: int) -> LayoutColumns:
    """The layouts of the views of one node type."""
    shares = np.array([shares_of(code)[node_type] for code in ascending(columns.replica_micro_batches).tolist()])
    _, place = np.unique(columns.replica_micro_batches, return_inverse=True)
    batch = shares[place] * columns.dp * columns.micro_batch_size
    none = np.asarray(constant(column_value("replica_micro_batches", ()), len(columns)), dtype=np.int64)
    return replace(columns, global_batch_size=batch, replica_micro_batches=none)


def replica_table(problem: Problem, columns: LayoutColumns) -> ReplicaTable:
    """Constants of layouts with replicas of different make, on every node type."""
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
    """Constants of one layout with replicas of different make."""
    return replica_table(problem, LayoutColumns.of([layout])).at(0)


def _costs_with(problem: Problem, node_type: int, hardware: HardwareSpec, columns: LayoutColumns) -> CostTable:
    """Constants on one node type with other hardware in its place."""
    return layout_costs(on_one_type(problem, node_type).model_copy(update={"hardware": hardware}), columns)


def across(problem: Problem, node_type: int) -> HardwareSpec:
    """A node type as a group sees it that has ranks on all types: its accelerators of each type fill domains of
    their own, so that none holds the whole group (smaller domains than there are where a type does not fill whole
    ones: upper)."""
    hardware, gpus = problem.node_types[node_type], problem.node_gpus
    scale_up = hardware.scale_up
    domain = int(np.gcd.reduce([scale_up.num_gpus, *gpus]))
    if domain == scale_up.num_gpus and not scale_up.segments:
        return hardware
    segments = tuple(sorted({int(np.gcd.reduce([segment, *gpus])) for segment in scale_up.segments or ()}))
    smaller = scale_up.model_copy(update={"num_gpus": domain, "segments": segments})
    return hardware.model_copy(update={"scale_up": smaller})


def replicas_by_type(problem: Problem, layout: Layout) -> tuple[int, ...]:
    """Replicas on each node type (whole only for a legal layout)."""
    return tuple(gpus // (layout.num_gpus // layout.dp) for gpus in problem.node_gpus)


def check_replicas(problem: Problem, layout: Layout) -> None:
    """What replicas of different make demand besides what each of them does by itself.

    Raises:
        IllegalPlanError: what cannot run, or is not priced.
    """
    types, block = len(problem.node_types), layout.num_gpus // layout.dp
    shares, gpus = layout.replica_micro_batches, problem.node_gpus
    held = replicas_by_type(problem, layout)
    batch = layout.micro_batch_size * sum(number * share for number, share in zip(held, shares, strict=False))
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
            f"the shares of {' and '.join(map(str, held))} replicas are the batch of {layout.global_batch_size}",
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
    """The report of a step from those of its views: the stages of a replica of the first type, then those of the
    next. The types that are done first wait for the last, which is part of their bubble; means are over all
    accelerators."""
    layout, slowest = plan.layout, max(views, key=lambda view: view.step_time_ns)
    step_ns = slowest.step_time_ns
    step_s = step_ns / NS_PER_S
    rate = layout.global_batch_size * problem.job.sequence_length / step_s
    stages: list[StageReport] = []
    for view in views:
        waits = (step_ns - view.step_time_ns) / NS_PER_S
        for stage in view.stages:
            own = stage.breakdown_s | {"bubble": stage.breakdown_s["bubble"] + waits}
            stages.append(replace(stage, breakdown_s=own))
    tightest = min(views, key=lambda view: view.memory_margin_bytes)
    weights = [gpus / (layout.num_gpus * layout.pp) for gpus in problem.node_gpus for _ in range(layout.pp)]

    def mean(name: str, part: str) -> float:
        values = [getattr(stage, part)[name] for stage in stages]
        return float(sum(weight * value for weight, value in zip(weights, values, strict=True)))

    return replace(
        tightest,
        step_time_s=step_s,
        step_time_ns=step_ns,
        tokens_per_s=rate,
        mfu=mfu(problem, rate, layout.num_gpus),
        fits=all(view.fits for view in views),
        breakdown_s={name: mean(name, "breakdown_s") for name in slowest.breakdown_s},
        hidden_s={name: mean(name, "hidden_s") for name in slowest.hidden_s},
        stages=tuple(stages),
    )
