"""Solver of a layout whose virtual stages share one recompute setting: in parts with a fixed setting."""

from __future__ import annotations

from milpplan.optimize.layout.layout_outcome import LayoutOutcome
from milpplan.optimize.layout.layout_solver import AIM, LayoutSolver
from milpplan.optimize.layout.stage_options import LayoutContext
from milpplan.optimize.search.prune_reasons import Fate
from milpplan.optimize.space.layer_splits import even_splits
from milpplan.optimize.space.recompute_parts import PartKey, part_key, part_settings
from milpplan.problem.plan import Layout

PartBounds = dict[tuple[Layout, PartKey], int]
"""Proved bounds of the parts of layouts, in nanoseconds."""


def resolve_in_parts(
    solver: LayoutSolver,
    part_bounds: PartBounds,
    context: LayoutContext,
    cutoff_ns: int,
    bound_ns: int,
    effort: int,
) -> LayoutOutcome:
    """Resolve a layout of a space in parts; see ``LayoutSolver.resolve``.

    Without effort the relaxation over all counts is enough: its bound holds for every part, and its rounded plans
    are in the space.
    """
    if not effort:
        if even_splits(context.problem, context.layout) is None and context.layout.vpp > 1:
            return LayoutOutcome(bound_ns, "open")
        return solver.resolve(context, cutoff_ns, bound_ns, 0)
    best: LayoutOutcome | None = None
    fates: set[Fate] = set()
    min_bound = 2**62
    for part in part_settings(context):
        key = (context.layout, part_key(part))
        proved = max(part_bounds.get(key, 0), bound_ns)
        if proved > cutoff_ns:
            min_bound = min(min_bound, proved)
            fates.add("relaxed")
            continue
        outcome = solver.resolve(part, cutoff_ns, proved, effort)
        part_bounds[key] = max(proved, outcome.bound_ns)
        min_bound = min(min_bound, part_bounds[key])
        fates.add(outcome.fate)
        if outcome.step_time_ns is not None:
            best = outcome
            step = outcome.step_time_ns
            cutoff_ns = min(cutoff_ns, int(step * (1.0 - AIM * solver.options.gap)), step - 1)
    fate: Fate = next((name for name in ("open", "solved", "relaxed") if name in fates), "bounded")
    if best is None:
        return LayoutOutcome(min_bound, fate)
    assert best.step_time_ns is not None
    return LayoutOutcome(min(min_bound, best.step_time_ns), fate, best.plan, best.step_time_ns)
