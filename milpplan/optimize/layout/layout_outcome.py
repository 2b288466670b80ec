"""Outcome of resolving one layout against a cutoff."""

from __future__ import annotations

from dataclasses import dataclass

from milpplan.optimize.layout.cutting_planes import LayoutState
from milpplan.optimize.search.prune_reasons import Fate
from milpplan.problem.plan import Plan


@dataclass(frozen=True, slots=True)
class LayoutOutcome:
    """Outcome of one layout: proved lower bound (ns), pruning reason, and the best plan at or below the cutoff
    with its exact step time, if one was found."""

    bound_ns: int
    fate: Fate
    plan: Plan | None = None
    step_time_ns: int | None = None

    @staticmethod
    def of(state: LayoutState, fate: Fate) -> LayoutOutcome:
        """Make the outcome of a state. A layout that is not open has no plan left at or below its cutoff."""
        if fate != "open":
            state.bound_ns = max(state.bound_ns, state.cutoff_ns + 1)
        if state.best is None:
            return LayoutOutcome(state.bound_ns, fate)
        step, plan = state.best
        return LayoutOutcome(min(state.bound_ns, step), "open" if fate == "open" else "solved", plan, step)
