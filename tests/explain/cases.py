"""Small problems with their optima by trying every plan: what answers are held to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from milpplan import Plan, Problem
from milpplan.explain import Interval
from milpplan.optimize.space.enumerate_layouts import layout_space
from tests.optimize.brute_force import brute_force, num_plans
from tests.optimize.problems import random_problem

SLACK = 1e-9
MOST_PLANS = 1_500
"""So few that trying all of them again after every change takes no time."""


def feasible(seeds: Iterable[int], kind: str = "free") -> Iterator[tuple[Problem, Plan, float]]:
    """Random problems that have a plan, with the best one and its seconds a step."""
    for seed in seeds:
        problem = random_problem(seed, kind)
        columns = layout_space(problem).columns
        if num_plans(problem, [columns.at(row) for row in range(len(columns))]) > MOST_PLANS:
            continue
        best = brute_force(problem)
        if best is not None:
            yield problem, best.plan, best.step_time_ns / 1e9


def truth_s(problem: Problem, batch: int) -> float:
    """Seconds of the best plan of a problem for ``batch`` sequences, by trying every plan; infinite without
    one."""
    best = brute_force(problem)
    if best is None:
        return math.inf
    return best.step_time_ns / 1e9 * batch / best.plan.layout.global_batch_size


def holds(interval: Interval, value: float) -> bool:
    """Whether an interval contains a value, up to rounding."""
    slack = SLACK * max(1.0, abs(value)) if math.isfinite(value) else 0.0
    return interval.low - slack <= value <= interval.high + slack
