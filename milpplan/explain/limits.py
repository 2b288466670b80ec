"""Limits of a plan: memory by stage, the pipeline's bubble, exposed communication, and rules."""

from __future__ import annotations

from typing import Final

import numpy as np

from milpplan.explain.divisibility import rule_effects
from milpplan.explain.records import Exposed, Limits
from milpplan.problem.plan import Layout, Plan
from milpplan.problem.problem import Problem
from milpplan.simulation.network.domains import group_place
from milpplan.simulation.report import StepReport

REPLICAS: Final = ("zero_exposed", "param_gather_exposed", "grad_reduce_exposed")
GROUPED: Final = ("tp_exposed", "cp_exposed", "ep_exposed", *REPLICAS)
"""Parts of the step that are communication of a group."""


def limits(problem: Problem, plan: Plan, report: StepReport, best_s: float) -> Limits:
    """Determine the limits of a plan; ``best_s`` is the step of the best known plan, which rules are compared
    with."""
    layout = plan.layout
    return Limits(
        headroom_bytes=tuple(stage.usable_memory_bytes - stage.memory.peak_bytes for stage in report.stages),
        bubble_share=report.breakdown_s["bubble"] / report.step_time_s,
        num_micro_batches=layout.num_micro_batches,
        exposed=tuple(
            Exposed(
                part=name,
                seconds=report.breakdown_s[name],
                share=report.breakdown_s[name] / report.step_time_s,
                num_ranks=group_shape(layout, name)[0],
                tier=tier(problem, *group_shape(layout, name)),
            )
            for name in sorted(GROUPED, key=lambda part: -report.breakdown_s[part])
            if report.breakdown_s[name] > 0
        ),
        rules=rule_effects(problem, best_s) if np.isfinite(best_s) else (),
    )


def group_shape(layout: Layout, part: str) -> tuple[int, int]:
    """Return (ranks, stride) of the group that communicates in a part of the step.

    Ranks are ordered tp, cp, dp, pp from the inside, and etp, ep for the experts. Shards and replicas are those of
    the dense layers.
    """
    if part in REPLICAS:
        return layout.cp * layout.dp, layout.tp
    shapes = {
        "tp_exposed": (layout.tp, 1),
        "cp_exposed": (layout.cp, layout.tp),
        "ep_exposed": (layout.ep, layout.etp),
    }
    return shapes[part]


def tier(problem: Problem, num_ranks: int, stride: int) -> str:
    """Return the slowest tier that a group of ranks uses, on the first node type where it leaves the domain."""
    for hardware in problem.node_types:
        place = group_place(hardware, num_ranks, stride)
        if hardware.pods is not None and place.beyond is not None and place.beyond.pods > 1:
            return hardware.pods.name
        if int(place.members) < num_ranks:
            return hardware.scale_out.name
    return problem.hardware.scale_up.name
