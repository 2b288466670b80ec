"""Plans of a space beyond their layouts: membership, and the parts in which all virtual stages share one recompute
setting (``Space.recompute_counts``).

For a launcher with one recompute setting for the whole run, the search takes setting by setting. In a part the
counts of a virtual stage follow from its layers, so everything that holds for free counts holds for the part, with
smaller menus. The layout's bound is the minimum over its parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from milpplan.optimize.bounds.uniform_plans import uniform_plan
from milpplan.optimize.layout.stage_options import LayoutContext
from milpplan.optimize.space.layer_splits import even_splits, layer_bounds
from milpplan.problem.plan import Plan, Recompute
from milpplan.problem.problem import Problem

PartKey = tuple[tuple[str, ...], int | None]
"""Recompute modes of a part, and the number of first layers that it recomputes."""


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


def in_parts(problem: Problem) -> bool:
    """Return True if the recompute settings of a space are searched one by one."""
    return problem.space.kind == "free" and problem.space.recompute_counts != "any" and not _one_mode(problem)


def _one_mode(problem: Problem) -> bool:
    return len(problem.recompute_modes) == 1


def part_key(context: LayoutContext) -> PartKey:
    """Return the key of a part of a layout."""
    return context.problem.recompute_modes, context.first_full


def part_settings(context: LayoutContext) -> Iterator[LayoutContext]:
    """Yield the parts of a layout: all layers of one mode, then, where the space has blocks, the first n layers of
    every virtual stage fully recomputed."""
    modes = context.problem.recompute_modes
    for mode in modes:
        yield replace(context, problem=_with_modes(context.problem, mode))
    if context.problem.space.recompute_counts == "block" and {"none", "full"} <= set(modes):
        blocks = _with_modes(context.problem, "none", "full")
        # A block as long as the longest stage is all layers.
        for number in range(1, max(high for _, high in context.layer_bounds)):
            yield replace(context, problem=blocks, first_full=number)


def _with_modes(problem: Problem, *modes: str) -> Problem:
    space = problem.space.model_copy(update={"recompute": modes, "recompute_counts": "any"})
    return problem.model_copy(update={"space": space})


def recomputes_as_declared(problem: Problem, plan: Plan) -> bool:
    """Return True if the space allows the recompute counts of a plan."""
    counts, modes = problem.space.recompute_counts, problem.recompute_modes
    recompute = [stage.recompute for stage in plan.virtual_stages]
    sizes = [stage.num_layers for stage in plan.virtual_stages]
    plain = [size - part.full - part.selective for size, part in zip(sizes, recompute, strict=True)]
    used = {
        "none": sum(plain),
        "selective": sum(r.selective for r in recompute),
        "full": sum(r.full for r in recompute),
    }
    if any(number and mode not in modes for mode, number in used.items()):
        return False
    if counts == "any" or sum(number > 0 for number in used.values()) <= 1:
        return True
    block = max(part.full for part in recompute)
    return counts == "block" and recompute == [Recompute(full=min(block, size)) for size in sizes]
