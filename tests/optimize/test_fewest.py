"""The fewest accelerators: the number that is named does, every refused one has no plan, the rest is open."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from milpplan import Plan, PlanResult, Problem, simulate, solve
from milpplan.optimize import FewestSearch, SolveOptions, on_gpus
from milpplan.optimize import solve as planner
from milpplan.problem import Range
from milpplan.reports.answers import FewestDocument
from tests.amounts import long_but
from tests.cli.test_cli import run
from tests.optimize.problems import random_problem

COUNTS = Range(minimum=1, maximum=8)


def problem_of(seed: int, kind: str = "free") -> Problem:
    """A random small problem, to be trained on one to eight accelerators."""
    problem = random_problem(seed, kind, global_batch_size=8)
    job = problem.job.model_copy(
        update={"num_gpus": COUNTS, "objective": "num_gpus", "deadline_s": None, "training_tokens": None}
    )
    space = problem.space.model_copy(update=dict.fromkeys(("tp", "cp", "pp", "dp", "ep", "etp")))
    hardware = problem.hardware
    return problem.model_copy(update={"job": job, "space": space, "hardware": hardware})


@pytest.mark.parametrize("kind", ["uniform", "free"])
@pytest.mark.parametrize("seed", long_but((2,), range(60)))
def test_the_fewest_is_what_solving_each_number_says(seed: int, kind: str) -> None:
    """By a solve of every number; without a limit nothing is open."""
    problem = problem_of(seed, kind)
    alone = {count: solve(on_gpus(problem, count)).status for count in COUNTS.values}
    found = solve(problem)
    expected = next((count for count, status in alone.items() if status == "optimal"), None)
    assert found.status == ("infeasible" if expected is None else "optimal")
    assert found.objective == expected
    assert found.details["open_counts"] == ()
    assert all(alone[count] == "infeasible" for count in found.details["refused"])
    if expected is not None:
        assert found.report is not None
        assert found.plan is not None
        assert found.report.fits
        assert found.step_time_s == pytest.approx(solve(on_gpus(problem, expected)).step_time_s, rel=2e-4)


def stopping(
    asked: list[int], at: int, own: Problem, options: SolveOptions, known: Sequence[Plan] = ()
) -> PlanResult:
    """A solve that is interrupted where it is number ``at``."""
    asked[0] += 1
    if asked[0] == at:
        raise KeyboardInterrupt
    return planner.solve_from(own, options, known)


@pytest.mark.parametrize("seed", long_but((2,), range(40)))
def test_an_interrupt_at_any_solve_leaves_what_is_known(seed: int) -> None:
    """At the n-th solve, for every n: the number named does, the refused ones have no plan, and no bound is above
    the fewest."""
    problem = problem_of(seed)
    whole = solve(problem)
    for at in range(2, 12):
        asked = [0]

        found = FewestSearch(problem, SolveOptions(), partial(stopping, asked, at)).run(COUNTS.values)
        if asked[0] < at:
            assert (found.status, found.objective) == (whole.status, whole.objective)
            break
        assert found.message == "Interrupted."
        assert found.status != "optimal" or found.objective == whole.objective
        if found.plan is not None:
            assert whole.objective is not None
            assert found.objective is not None
            assert found.objective_bound is not None
            assert found.objective_bound <= whole.objective <= found.objective
            assert simulate(on_gpus(problem, int(found.objective)), found.plan).fits
        elif found.objective_bound is not None and whole.objective is not None:
            assert found.objective_bound <= whole.objective
        assert whole.objective not in found.details["refused"]


@pytest.mark.parametrize("kind", ["uniform", "free"])
def test_numbers_that_no_time_was_left_to_try_are_not_refuted(kind: str) -> None:
    """The first number has no plan, and the time is over: the next one is open, whatever larger ones there are."""

    def patient(own: Problem, options: SolveOptions, known: Sequence[Plan]) -> PlanResult:
        return planner.solve_from(own, replace(options, time_limit_s=None), known)

    problems = (problem_of(seed, kind) for seed in range(40))
    problem = next(one for one in problems if (solve(one).objective or 0.0) > 2)
    found = FewestSearch(problem, SolveOptions(time_limit_s=1e-9), patient).run(COUNTS.values)
    assert found.status == "no_solution_found"
    assert max(found.details["open_counts"]) == max(found.details["refused"], default=0) + 1
    assert found.objective_bound == min(found.details["open_counts"]) <= (solve(problem).objective or 0.0)
    assert found.layouts is None


def test_what_no_time_was_left_for_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number that equal stages do with is named, with the smaller ones of which nothing is proved; so in the
    document, on the screen and by the exit code."""

    def interrupted(own: Problem, options: SolveOptions, known: Any = ()) -> PlanResult:
        if own.space.kind == "free" and not known:
            raise KeyboardInterrupt
        return planner.solve_from(own, options, known)

    monkeypatch.setattr(planner, "FewestSearch", lambda one, options, _: FewestSearch(one, options, interrupted))
    words = ["min-gpus", "llama2-7b", "dgx-a100-80", "--global-batch", "16", "--gpus", "1:8", "--fix", "cp=1"]
    done, shown = run(*words, "--json"), run(*words)
    assert (done.exit_code, shown.exit_code) == (4, 4)
    document = FewestDocument.model_validate(json.loads(done.stdout))
    assert document.num_gpus == 2
    assert (document.open, document.refused) == ((1,), ())
    assert document.result.status == "feasible"
    assert (document.result.objective.value, document.result.objective.bound) == (2.0, 1.0)
    assert shown.stdout.startswith("fits on 2 GPUs; 1 open, of the numbers asked for")
