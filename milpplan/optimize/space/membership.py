"""Membership of a plan in a problem's space."""

from __future__ import annotations

from milpplan.optimize.bounds.uniform_plans import uniform_plan
from milpplan.optimize.space.layer_splits import even_splits, layer_bounds
from milpplan.optimize.space.recompute_parts import recomputes_as_declared
from milpplan.problem.plan import Plan
from milpplan.problem.problem import Problem


def in_space(problem: Problem, plan: Plan) -> bool:
    """Return True if a plan's stages are in the space; its layout is not checked."""
    if plan.virtual_stages[-1].layers[1] != problem.model.num_layers:
        return False
    modes = problem.recompute_modes
    if problem.space.kind == "uniform":
        return any(plan == uniform_plan(problem, plan.layout, mode) for mode in modes)
    bounds, other = layer_bounds(problem, plan.layout), plan.other_recompute
    if any((part.full and "full" not in modes) or (part.selective and "selective" not in modes) for part in other):
        return False
    if "none" not in modes and any(
        part.full + part.selective < stage.num_layers
        for part, stage in zip(other, plan.virtual_stages, strict=False)
    ):
        return False
    splits = even_splits(problem, plan.layout)
    if splits is not None and tuple(stage.num_layers for stage in plan.virtual_stages) not in splits:
        return False
    sizes = [stage.num_layers for stage in plan.virtual_stages]
    within_bounds = all(low <= size <= high for size, (low, high) in zip(sizes, bounds, strict=True))
    return within_bounds and recomputes_as_declared(problem, plan)
