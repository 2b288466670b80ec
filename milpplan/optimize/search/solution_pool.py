"""The fastest plans that a search has seen."""

from __future__ import annotations

from milpplan.problem.plan import Plan

KEPT_PLANS = 16
"""Plans that are kept beside the incumbent, for questions about runners-up."""


def with_plan(offered: list[tuple[float, Plan]], value: float, plan: Plan) -> list[tuple[float, Plan]]:
    """The list with a plan in its place, where it is among the fastest and the fastest of its layout."""
    if len(offered) >= KEPT_PLANS and value >= offered[-1][0]:
        return offered
    same = next((place for place, (_, other) in enumerate(offered) if other.layout == plan.layout), None)
    if same is not None and offered[same][0] <= value:
        return offered
    kept = [entry for place, entry in enumerate(offered) if place != same]
    return sorted([*kept, (value, plan)], key=lambda entry: entry[0])[:KEPT_PLANS]
