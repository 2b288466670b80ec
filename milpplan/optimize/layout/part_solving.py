"""One layout whose virtual stages recompute alike: first all counts, which bound its parts, then part by part."""

from __future__ import annotations

from milpplan.optimize.layout.layout_outcome import LayoutOutcome
from milpplan.optimize.layout.layout_solver import AIM, LayoutSolver
from milpplan.optimize.layout.stage_options import LayoutContext
from milpplan.optimize.search.prune_reasons import Fate
from milpplan.optimize.space.layer_splits import even_splits
from milpplan.optimize.space.recompute_parts import PartKey, part_key, part_settings
from milpplan.problem.plan import Layout

PartBounds = dict[tuple[Layout, PartKey], int]
"""What is proved of the parts of layouts, in nanoseconds."""


def resolve_in_parts(
    solver: LayoutSolver, known: PartBounds, context: LayoutContext, cutoff_ns: int, bound_ns: int, effort: int
) -> LayoutOutcome:
    """``LayoutSolver.resolve`` of a space in parts. Without effort the relaxation of all counts is enough: its
    bound holds for every part, and its rounded plans are of the space."""
    if not effort:
        if even_splits(context.problem, context.layout) is None and context.layout.vpp > 1:
            return LayoutOutcome(bound_ns, "open")
        return solver.resolve(context, cutoff_ns, bound_ns, 0)
    best: LayoutOutcome | None = None
    fates: set[Fate] = set()
    least = 2**62
    for part in part_settings(context):
        place = (context.layout, part_key(part))
        proved = max(known.get(place, 0), bound_ns)
        if proved > cutoff_ns:
            least = min(least, proved)
            fates.add("relaxed")
            continue
        found = solver.resolve(part, cutoff_ns, proved, effort)
        known[place] = max(proved, found.bound_ns)
        least = min(least, known[place])
        fates.add(found.fate)
        if found.step_time_ns is not None:
            best = found
            step = found.step_time_ns
            cutoff_ns = min(cutoff_ns, int(step * (1.0 - AIM * solver.options.gap)), step - 1)
    fate: Fate = next((name for name in ("open", "solved", "relaxed") if name in fates), "bounded")
    if best is None:
        return LayoutOutcome(least, fate)
    assert best.step_time_ns is not None
    return LayoutOutcome(min(least, best.step_time_ns), fate, best.plan, best.step_time_ns)
