"""Uniform plans priced many at once in a search: nothing of the answer or the certificate changes."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from milpplan import PlanResult, simulate, solve
from milpplan.optimize import uniform_steps
from milpplan.optimize.layouts import layout_space
from milpplan.optimize.search import Search
from milpplan.optimize.uniform import uniform_plan
from milpplan.optimize.uniform_steps import StepsAhead
from milpplan.specs.problem import Problem
from tests.amounts import first
from tests.optimize.problems import random_problem


def certificate(result: PlanResult) -> tuple[object, ...]:
    """All that a search says, but for its times."""
    assert result.layouts is not None
    bounds, fates = result.layouts.bounds, result.layouts.fates
    return result.plan, result.status, result.gap, bounds.tolist(), fates.tolist(), result.work.simulations


@pytest.mark.parametrize("seed", first(2, range(5)))
def test_a_search_in_bulk_is_the_search_one_by_one(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan, gap, bound and fate of every layout and the number of simulations are the same, whatever the number
    of plans priced together."""
    problem = random_problem(seed, kind="uniform")
    monkeypatch.setattr(Search, "_in_bulk", False)
    alone = certificate(solve(problem))
    monkeypatch.undo()
    assert certificate(solve(problem)) == alone
    monkeypatch.setattr(uniform_steps, "MOST", 2)
    assert certificate(solve(problem)) == alone


def check_steps(problem: Problem, hopeful: int) -> None:
    """Every place has the step that ``simulate`` says, None where the plan does not fit."""
    space = layout_space(problem)
    modes = problem.recompute_modes
    count = min(12, len(space))
    pairs = list(product(np.linspace(0, len(space) - 1, count).astype(np.int64), range(len(modes))))
    np.random.default_rng(1).shuffle(pairs)
    rows, places = np.array(pairs, dtype=np.int64).T
    ahead = StepsAhead(problem, space, rows, places, size=3)
    for place, (row, mode) in enumerate(zip(rows.tolist(), places.tolist(), strict=True)):
        report = simulate(problem, uniform_plan(problem, space.at(row), modes[mode]))
        assert ahead.at(place, hopeful) == (report.step_time_ns if report.fits else None)
    assert len(ahead.priced) == len(rows)


def test_steps_ahead_are_those_of_the_simulator() -> None:
    """In any order of layouts and modes; and where no place is likely to be asked for, one by one."""
    problem = random_problem(3, kind="uniform")
    check_steps(problem, hopeful=10**6)
    check_steps(problem, hopeful=0)
