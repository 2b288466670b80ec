"""Uniform plans priced many at once in a search: nothing of the answer or the certificate changes."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from milpplan import PlanResult, simulate, solve
from milpplan.optimize.bounds import uniform_plan
from milpplan.optimize.search import best_first
from milpplan.optimize.search.best_first import KnownTables, Search
from milpplan.optimize.space.enumerate_layouts import layout_space
from milpplan.simulation.layout_costs import layout_costs
from tests.amounts import first
from tests.optimize.problems import random_problem


def certificate(result: PlanResult) -> tuple[object, ...]:
    """All that a search says, but for its times; a bound is a hair (1e-12) below the step that it is equal to."""
    assert result.layouts is not None
    bounds, fates = result.layouts.bounds, result.layouts.fates
    gap = None if result.gap is None else round(result.gap, 10)
    return result.plan, result.status, gap, bounds.tolist(), fates.tolist(), result.work.simulations


@pytest.mark.parametrize("seed", first(1, range(5)))
def test_a_search_in_bulk_is_the_search_one_by_one(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan, gap, bound and fate of every layout and the number of simulations are the same, whatever the number
    of plans priced together."""
    problem = random_problem(seed, kind="uniform")
    monkeypatch.setattr(Search, "_simulates_in_batches", False)
    alone = certificate(solve(problem))
    monkeypatch.undo()
    assert certificate(solve(problem)) == alone
    monkeypatch.setattr(best_first, "FIRST_BATCH", 1)
    monkeypatch.setattr(best_first, "MAX_BATCH", 2)
    assert certificate(solve(problem)) == alone


def test_known_steps_are_those_of_the_simulator() -> None:
    """Whatever tables the constants come from, in any order of layouts and modes; infinite where a plan does not
    fit."""
    problem = random_problem(3, kind="uniform")
    space, modes, known = layout_space(problem), problem.recompute_modes, KnownTables(problem)
    for rows in np.array_split(np.random.default_rng(2).permutation(len(space)), 3):
        known.add(rows, layout_costs(problem, space.take(rows)))
    count = min(12, len(space))
    pairs = list(product(np.linspace(0, len(space) - 1, count).astype(np.int64), range(len(modes))))
    np.random.default_rng(1).shuffle(pairs)
    rows, places = np.array(pairs, dtype=np.int64).T
    steps = known.steps_ns(space, rows, places)
    for row, mode, step in zip(rows.tolist(), places.tolist(), steps.tolist(), strict=True):
        report = simulate(problem, uniform_plan(problem, space.at(row), modes[mode]))
        assert step == (report.step_time_ns if report.fits else np.inf)
        assert step == known.steps_ns(space, np.array([row]), np.array([mode]))[0]
