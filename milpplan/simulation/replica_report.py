"""Replicas of different make in the simulation of a step: what makes such a layout impossible, and the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from milpplan.errors import IllegalPlanError
from milpplan.problem.plan import Layout, Plan
from milpplan.problem.problem import Problem
from milpplan.simulation.layers.flops import mfu
from milpplan.simulation.report import StageReport, StepReport
from milpplan.units import NS_PER_S


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
