"""Checks of plans that come from files, and of the numbers that are computed from them."""

from __future__ import annotations

import numpy as np

from milpplan.cli.arguments import check_size
from milpplan.errors import IllegalPlanError
from milpplan.optimize.space.enumerate_layouts import broken_rules
from milpplan.problem import Plan, Problem
from milpplan.simulation.simulator import check_plan

MAX_WORK_ITEMS = 33_554_432
"""Maximum of virtual stages x micro-batches of a plan file that is simulated (a few GiB)."""


def check_plan_of_file(problem: Problem, plan: Plan) -> None:
    """Check that a plan belongs to the problem, breaks no rule, and is of a size that can be simulated."""
    check_size(problem.job)
    check_plan(problem, plan)
    layout = plan.layout
    items = layout.num_virtual_stages * layout.num_micro_batches
    if items > MAX_WORK_ITEMS:
        raise IllegalPlanError(
            f"The plan has {items:,} work items a pipeline (virtual stages x micro-batches).",
            f"Expected at most {MAX_WORK_ITEMS:,}.",
            "Use larger micro-batches or more replicas.",
        )
    broken = broken_rules(problem, layout)
    if broken:
        raise IllegalPlanError(
            f"The layout breaks {'the rule' if len(broken) == 1 else 'the rules'} {', '.join(broken)}.",
            "Expected a layout that keeps every rule of the frameworks.",
            "Change the degrees and switches that the rule names.",
        )


def within_range() -> np.errstate:
    """Raise where a number leaves the range of floats or 64-bit integers, instead of computing on."""
    return np.errstate(over="raise", invalid="raise", divide="raise")
