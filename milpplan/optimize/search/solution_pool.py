"""Solution pool: the fastest plans that a search has simulated."""

from __future__ import annotations

from milpplan.problem.plan import Plan

KEPT_PLANS = 16
"""Capacity of the pool."""


def with_plan(offered: list[tuple[float, Plan]], value: float, plan: Plan) -> list[tuple[float, Plan]]:
    """Return the pool, sorted by objective, with a plan added.

    The plan is added only if it is among the ``KEPT_PLANS`` best, and the best of its layout.
    """
    if len(offered) >= KEPT_PLANS and value >= offered[-1][0]:
        return offered
    same = next((index for index, (_, other) in enumerate(offered) if other.layout == plan.layout), None)
    if same is not None and offered[same][0] <= value:
        return offered
    kept = [entry for index, entry in enumerate(offered) if index != same]
    return sorted([*kept, (value, plan)], key=lambda entry: entry[0])[:KEPT_PLANS]
