"""The declared space of a proof, in words."""

from __future__ import annotations

from milpplan.specs.plan import RANK_ORDERS
from milpplan.specs.problem import Problem, Space


def space_text(problem: Problem) -> str:
    """Kind of the space and everything that narrows it, e.g. ``space free (interleaved layers even; tp 8)``."""
    space, default = problem.space, Space()
    narrowed = []
    if space.kind == "free":
        narrowed.append(f"interleaved layers {problem.interleaved_layers}")
    if space.vpp is None and space.vpp_values != default.vpp_values:
        narrowed.append(f"vpp {space.vpp_values}")
    for name in Space.model_fields:
        if name in ("kind", "interleaved_layers", "vpp_values"):
            continue
        value = getattr(space, name)
        if name == "rank_order" and set(value) == set(RANK_ORDERS):
            narrowed.append("any rank_order")
        elif value is not None and value != getattr(default, name):
            narrowed.append(f"{name} {', '.join(str(item) for item in value)}")
    return f"space {space.kind} ({'; '.join(narrowed)})" if narrowed else f"space {space.kind}"
