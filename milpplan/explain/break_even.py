"""Break-even values of the doubts about a plan: how far each doubt may go before another plan overtakes.

A doubt is a scenario (``problem.scenarios``): its constants move on a line from their nominal values to those of
the scenario. Along this line the plan is compared with others, and bisection finds a share of the line from which
on another plan is better by more than the tolerance. The answer holds among the compared plans only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from milpplan.explain.records import BreakEven, BreakEvens
from milpplan.optimize import DEFAULT_GAP, objective_weights
from milpplan.optimize.context import Deadline
from milpplan.optimize.layout.stage_options import fitting_step_ns
from milpplan.optimize.solve import solve
from milpplan.problem import Plan, Problem, Scenario, default_scenarios, in_scenario, scenario_of
from milpplan.problem.overlay import constant_of, constant_values
from milpplan.simulation import LayoutColumns, cluster_costs

BISECTIONS: Final = 8
"""Halvings of the interval that holds a break-even."""
SAMPLES: Final = 4
"""Number of points of the line that are compared before the bisection: the first at which another plan is better
bounds the interval."""


def break_evens(
    problem: Problem,
    plan: Plan,
    kept: Sequence[Plan],
    tolerance: float = DEFAULT_GAP,
    deadline: Deadline | None = None,
    *,
    uniform: bool = True,
) -> BreakEvens:
    """Find the break-even values of the doubts about a plan.

    Args:
        problem: the nominal problem.
        plan: the plan; it fits.
        kept: other plans to compare with.
        tolerance: relative advantage from which on another plan counts as better.
        deadline: doubts that are not reached before it are left out.
        uniform: compare with the best uniform plans at the ends of the doubts, too.

    Returns:
        The break-evens among the compared plans.
    """
    limit = deadline or Deadline(None)
    ends = list(default_scenarios(problem))
    ends = [end for end in ends if not any(_is_on_the_way(problem, end, other) for other in ends)]
    rivals, reached = list(dict.fromkeys(other for other in kept if other != plan)), list[Scenario]()
    num_kept = len(rivals)
    for end in ends:
        if limit.passed:
            break
        if uniform:
            rivals += [best for best in _best_uniform(problem, end, limit) if best not in (plan, *rivals)]
        reached.append(end)
    plans = [plan, *rivals]
    return BreakEvens(tuple(_break_even(problem, end, plans, tolerance) for end in reached), len(rivals), num_kept)


def _is_on_the_way(problem: Problem, scenario: Scenario, other: Scenario) -> bool:
    """Return True if a scenario lies on the line to another one: equal constants, and not as far."""
    ends = [_ends(problem, entry) for entry in (scenario, other)]
    shares = [
        (ends[0][name][1] - start) / (end - start) if end != start else 1.0
        for name, (start, end) in ends[1].items()
        if name in ends[0]
    ]
    alike = ends[0].keys() == ends[1].keys() and bool(shares)
    return alike and max(shares) < 1.0 and max(shares) - min(shares) < 1e-9


def _ends(problem: Problem, scenario: Scenario) -> dict[str, tuple[float, float]]:
    """Return nominal value and value at the end of every constant of a scenario; efficiencies are factors."""
    factors, others = constant_values(scenario.constants)
    ends = {name: (1.0, factor) for name, factor in factors.items()}
    for name, value in others.items():
        if isinstance(value, float):
            ends[name] = constant_of(problem.hardware, name), value
    return ends


def _best_uniform(problem: Problem, end: Scenario, limit: Deadline) -> list[Plan]:
    """Return the best plan of the uniform space at the end of a doubt, and those that its search kept."""
    space = problem.space.model_copy(update={"kind": "uniform"})
    there = in_scenario(problem, end).model_copy(update={"space": space})
    result = solve(there, simplest=False, any_chunks=False, time_limit_s=limit.left_s())
    return [plan for plan in (result.plan, *result.runners_up) if plan is not None]


def _break_even(problem: Problem, end: Scenario, plans: Sequence[Plan], tolerance: float) -> BreakEven:
    """Find the break-even of the first plan among plans."""
    columns = LayoutColumns.of([plan.layout for plan in plans])
    weights = objective_weights(problem, columns)[0]
    ends = _ends(problem, end)

    def values_at(share: float) -> dict[str, float]:
        return {name: start + share * (stop - start) for name, (start, stop) in ends.items()}

    def rival_at(share: float) -> int | None:
        """Return the best plan's index where it is better than the first plan by more than the tolerance."""
        there = in_scenario(problem, scenario_of(end.name, end.reason, **values_at(share)))
        costs = cluster_costs(there, columns)
        steps = [fitting_step_ns(there, one, costs.at(row)) for row, one in enumerate(plans)]
        objective = np.array([np.inf if step is None else float(step) for step in steps]) * weights
        best = int(objective.argmin())
        return best if objective[best] < objective[0] * (1.0 - tolerance) else None

    low = 0.0
    for high in np.linspace(0.0, 1.0, SAMPLES + 1)[1:].tolist():
        rival = rival_at(high)
        if rival is not None:
            break
        low = high
    else:
        return BreakEven(end, values_at(1.0), None)
    for _ in range(BISECTIONS):
        middle = 0.5 * (low + high)
        found = rival_at(middle)
        low, high, rival = (middle, high, rival) if found is None else (low, middle, found)
    return BreakEven(end, values_at(low), plans[rival])
