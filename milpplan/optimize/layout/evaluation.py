"""Exact step time of a plan with known cost constants, and the contexts in which its layout is decided."""

from __future__ import annotations

from milpplan.optimize.layout.stage_options import LayoutContext
from milpplan.problem.plan import Layout, Plan
from milpplan.problem.problem import Problem
from milpplan.simulation.layout_costs import usable_memory_bytes
from milpplan.simulation.mixed_costs import RankCosts
from milpplan.simulation.replica_costs import ReplicaCosts
from milpplan.simulation.simulator import fits_in_memory, rank_memory, step_times_ns
from milpplan.simulation.stages import durations, plan_stages


def fitting_step_ns(problem: Problem, plan: Plan, costs: RankCosts | ReplicaCosts) -> int | None:
    """Return the exact step time in ns; None where the plan does not fit. Heterogeneous replicas: the slowest
    replica's step."""
    if isinstance(costs, ReplicaCosts):
        views = enumerate(costs.views)
        steps = [fitting_step_ns(v.problem, plan.of_replicas(t, v.layout), v.costs) for t, v in views]
        fitting_steps = [step for step in steps if step is not None]
        return max(fitting_steps) if len(fitting_steps) == len(steps) else None
    stages = plan_stages(costs, problem.model.layer_kinds, plan)
    if not fits_in_memory(problem, plan.layout, rank_memory(plan.layout, costs, stages)):
        return None
    return int(step_times_ns(plan.layout, costs, durations(stages)))


def settings_of(problem: Problem, layout: Layout, costs: RankCosts | ReplicaCosts) -> tuple[LayoutContext, ...]:
    """Return the contexts of a layout: one, or one per view for heterogeneous replicas."""
    if isinstance(costs, ReplicaCosts):
        return tuple(
            context for view in costs.views for context in settings_of(view.problem, view.layout, view.costs)
        )
    return (LayoutContext.of(problem, layout, costs, usable_memory_bytes(problem)),)
