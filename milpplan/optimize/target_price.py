"""Cost of the restriction to a launcher's plans, from a solve of the problem without the restriction."""

from __future__ import annotations

from dataclasses import replace

from milpplan.optimize.result import PlanResult, SolveOptions, TargetPrice
from milpplan.optimize.solve import solve
from milpplan.problem.problem import Problem

__all__ = ["TargetPrice", "target_price"]


def target_price(
    result: PlanResult, whole: Problem, options: SolveOptions, limit_s: float | None
) -> TargetPrice | None:
    """Return the cost of a restriction as the interval that both proofs leave; None without a plan or a bound.

    Args:
        result: result in the restricted space.
        whole: the problem without the restriction.
        options: options of its solve, which starts from the restricted plan.
        limit_s: time limit of its solve; an open gap widens the interval.
    """
    if result.plan is None or result.objective is None or result.objective_bound is None:
        return None
    asked = replace(options, time_limit_s=limit_s, warm_start=result.plan, any_chunks=False)
    best = solve(whole, asked)
    if best.plan is None or best.objective is None or best.objective_bound is None:
        return None
    # The restricted plan is in the whole space, even where the search stopped before it evaluated the plan.
    value, plan = min((best.objective, best.plan), (result.objective, result.plan), key=lambda entry: entry[0])
    whole_space = whole.space, plan, value, best.objective_bound
    return TargetPrice.between(
        result.objective, result.objective_bound, whole_space, options.gap, best.wall_time_s
    )
