"""Refusals of an export for the rules of a target that a layout breaks."""

from __future__ import annotations

import numpy as np

from milpplan.launchers.capabilities import Capability
from milpplan.launchers.records import Refusal
from milpplan.problem.plan import SCHEDULES, Layout
from milpplan.problem.problem import Problem

NUMBERS = (
    *("tp", "cp", "ep", "etp", "pp", "dp", "vpp", "micro_batch_size", "global_batch_size", "num_micro_batches"),
    *("sequence_parallel", "zero_stage", "overlap_grad_reduce", "overlap_param_gather"),
)


def rule_refusals(capability: Capability, problem: Problem, layout: Layout) -> list[Refusal]:
    """Refuse a layout whose fields are supported but whose combination breaks a rule of the target."""
    columns = {name: np.array([int(getattr(layout, name))]) for name in NUMBERS}
    columns["schedule"] = np.array([SCHEDULES.index(layout.schedule)])
    return [
        Refusal(rule.why) for rule in capability.rules.values() if not bool(rule.keeps(problem, columns).all())
    ]
