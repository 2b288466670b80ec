"""What it costs to run a launcher's plans only: the same problem without the restriction, solved for bounds."""

from __future__ import annotations

from dataclasses import replace

from milpplan.optimize.result import PlanResult, SolveOptions, TargetPrice
from milpplan.optimize.solve import solve
from milpplan.problem.problem import Problem

__all__ = ["TargetPrice", "target_price"]


def target_price(
    result: PlanResult, whole: Problem, options: SolveOptions, limit_s: float | None
) -> TargetPrice | None:
    """The price of a restriction, as an interval that both proofs leave; None without a plan or a bound.

    Args:
        result: what was found in the restricted space.
        whole: the problem without the restriction.
        options: how to solve it; the restricted plan is where it starts.
        limit_s: seconds for it. What is not proved then widens the interval.
    """
    if result.plan is None or result.objective is None or result.objective_bound is None:
        return None
    asked = replace(options, time_limit_s=limit_s, warm_start=result.plan, any_chunks=False)
    best = solve(whole, asked)
    if best.plan is None or best.objective is None or best.objective_bound is None:
        return None
    # The restricted plan is one of the whole space: a search that was stopped before it saw it knows it as well.
    value, plan = min((best.objective, best.plan), (result.objective, result.plan), key=lambda known: known[0])
    known = whole.space, plan, value, best.objective_bound
    return TargetPrice.between(result.objective, result.objective_bound, known, options.gap, best.wall_time_s)
