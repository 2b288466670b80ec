"""A solve that is stopped: a first plan before any bound, and at every moment the best plan so far with a bound
that holds."""

from __future__ import annotations

import errno
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import milpplan.optimize
from milpplan import PlanResult, Problem, simulate, solve
from milpplan.errors import UnavailableError
from milpplan.optimize import DEFAULT_GAP, Budget, Progress, SolveContext, SolveOptions
from milpplan.optimize import solve as planner
from milpplan.optimize.milp import Limits, cbc
from milpplan.optimize.milp.backends import backend
from milpplan.optimize.milp.solver_self_test import random_program
from milpplan.optimize.solve import first_plan
from milpplan.optimize.space import in_space
from milpplan.optimize.space import layout_space as rule_filter
from milpplan.optimize.space.enumerate_layouts import layout_space
from tests.amounts import first, long_but
from tests.optimize.mixed_problems import mixed_problem, switched_problem
from tests.optimize.problems import random_problem
from tests.optimize.replica_problems import replica_problem

SPACES = ("uniform", "free", "any", "mixed", "mixed uniform", "switched", "replicas")
TOLERANCE = 1e-9


def problem_of(space: str, seed: int) -> Problem:
    """A random small problem of a kind of space."""
    if space == "uniform":
        return random_problem(seed, "uniform")
    if space in ("free", "any"):
        problem = random_problem(seed)
        layers: Any = {"free": "even", "any": "any"}[space]
        return problem.model_copy(
            update={"space": problem.space.model_copy(update={"interleaved_layers": layers})}
        )
    if space == "replicas":
        return replica_problem(seed)
    if space == "switched":
        return switched_problem(seed)
    return mixed_problem(seed, "uniform" if space == "mixed uniform" else "free")


@pytest.mark.long
@pytest.mark.parametrize("few", first(1, (3, 40)))
def test_the_first_plan_is_one_of_the_space(few: int) -> None:
    """It fits, its layout is listed, its stages are the space's; and nearly every problem with a plan has one."""
    found = feasible = 0
    for space, seed in product(SPACES, range(few)):
        problem = problem_of(space, seed)
        options = SolveOptions()
        plan = first_plan(problem, SolveContext(options, backend("auto"), [], None))
        if plan is None:
            feasible += solve(problem, any_chunks=False).plan is not None
            continue
        found, feasible = found + 1, feasible + 1
        assert simulate(problem, plan).fits
        assert in_space(problem, plan)
        assert layout_space(problem).find(plan.layout) is not None
    assert found >= 0.7 * feasible


def fail_after_first_plan(patch: pytest.MonkeyPatch, event: str, failing: Callable[..., Any]) -> None:
    """Replace a function of the solve once the first plan is found: the search for it uses the function, too."""
    own = planner.first_plan

    def planned(*args: Any) -> Any:
        plan = own(*args)
        patch.setattr(planner, event, failing)
        return plan

    patch.setattr(planner, "first_plan", planned)


@pytest.mark.parametrize("event", first(1, ("layout_space", "Search")))
def test_an_interrupt_of_the_set_up_keeps_the_first_plan(event: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the layouts are listed and bounded: a plan that fits, and nothing said to be proved."""

    def interrupted(*args: object, **options: object) -> Any:
        raise KeyboardInterrupt

    plans = 0
    for space in SPACES:
        problem = problem_of(space, 1)
        with monkeypatch.context() as patch:
            fail_after_first_plan(patch, event, interrupted)
            stopped = solve(problem)
        assert stopped.message == "Interrupted."
        assert (stopped.objective_bound, stopped.lower_bound_s, stopped.gap) == (None, None, None)
        assert stopped.status == ("no_solution_found" if stopped.plan is None else "feasible")
        if stopped.plan is not None:
            plans += 1
            assert stopped.report is not None
            assert stopped.report.fits
            assert stopped.objective is not None
            whole = solve(problem)
            assert whole.objective is not None
            assert stopped.objective >= whole.objective * (1 - TOLERANCE)
    assert plans > len(SPACES) / 2


def test_a_time_limit_ends_the_listing_of_a_large_space(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first plan is the answer, and nothing is said to be proved."""
    own = planner.first_plan

    def planned(problem: Problem, context: SolveContext) -> Any:
        return own(problem, replace(context, deadline=None))

    monkeypatch.setattr(planner, "first_plan", planned)
    monkeypatch.setattr(rule_filter, "SMALL_TABLE", 0)
    stopped = solve(problem_of("free", 1), time_limit_s=1e-9)
    assert (stopped.status, stopped.message) == ("feasible", "")
    assert (stopped.objective_bound, stopped.gap, stopped.layouts) == (None, None, None)
    assert stopped.report is not None
    assert stopped.report.fits


def test_memory_that_runs_out_keeps_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an interrupt does; without a plan it is an error."""

    def too_much(*args: object, **options: object) -> Any:
        raise MemoryError

    fail_after_first_plan(monkeypatch, "layout_space", too_much)
    problem = problem_of("free", 1)
    stopped = solve(problem)
    assert stopped.plan is not None
    assert "Memory" in stopped.message
    monkeypatch.setattr(planner, "first_plan", lambda *args: None)
    with pytest.raises(MemoryError):
        solve(problem)


FOLDER = str(Path(milpplan.optimize.__file__).parent)
WATCHED = ("best_first.py", "closed_layouts.py", "branch_phase.py", "layout_tasks.py")
IN_SOLVE = ("first_plan", "_parts", "_narrowed", "decide_layouts")
"""Functions of ``solve.py`` that the search runs."""


@contextmanager
def lines_counted(at: int | None) -> Iterator[list[int]]:
    """Counts the lines that a search runs, and sends the signal of Ctrl-C before line ``at``."""
    count = [0]

    def local(frame: FrameType, event: str, arg: object) -> Any:
        if event == "line":
            count[0] += 1
            if count[0] == at:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return local

    def watch(frame: FrameType, event: str, arg: object) -> Any:
        name = frame.f_code.co_filename
        in_search = name.endswith(WATCHED) or (name.endswith("solve.py") and frame.f_code.co_name in IN_SOLVE)
        return local if name.startswith(FOLDER) and in_search else None

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        yield count
    finally:
        sys.settrace(before)


def check_stopped(stopped: PlanResult, whole: PlanResult) -> None:
    """What a stopped solve says is true of the problem, whose answer is known."""
    assert stopped.status in ("feasible", "no_solution_found", "optimal", "infeasible")
    if whole.status == "infeasible":
        assert stopped.plan is None
    else:
        assert stopped.status != "infeasible"
        assert whole.objective is not None
        if stopped.objective_bound is not None:
            assert stopped.objective_bound <= whole.objective * (1 + TOLERANCE)
        if stopped.objective is not None:
            assert stopped.objective >= (whole.objective_bound or 0.0) * (1 - TOLERANCE)
    if stopped.layouts is not None:
        if stopped.message:
            assert stopped.log[-1].open_layouts == stopped.layouts.count("open")
        counted = sum(
            stopped.layouts.count(fate) for fate in ("open", "does_not_fit", "bounded", "relaxed", "solved")
        )
        assert counted == len(stopped.layouts.space)


@pytest.mark.parametrize("space", long_but(("uniform", "free", "mixed"), SPACES))
@pytest.mark.parametrize("seed", first(1, range(1, 25)))
def test_an_interrupt_before_any_line_leaves_what_is_true(space: str, seed: int) -> None:
    """Between two lines of the search, wherever: the bound holds, the plan fits, no layout is lost."""
    problem, rng = problem_of(space, seed), random.Random(seed)
    options = SolveOptions(workers=1, any_chunks=False)
    with lines_counted(None) as lines:
        whole = solve(problem, options)
    for at in sorted(rng.sample(range(1, lines[0] + 1), min(4, lines[0]))):
        with lines_counted(at) as reached:
            stopped = solve(problem, options)
        # How often the progress is told depends on the clock, and a few lines on that.
        assert (stopped.message == "Interrupted.") == (reached[0] >= at)
        check_stopped(stopped, whole)


@pytest.mark.parametrize("space", long_but(("uniform", "free", "mixed"), SPACES))
@pytest.mark.parametrize("seed", first(1, range(1, 25)))
def test_progress_and_result_count_the_same_open_layouts(space: str, seed: int) -> None:
    """Interrupted by the callback at each of its calls: the last line told and the result agree; the plan of that
    line is in the result."""
    problem = problem_of(space, seed)
    whole = solve(problem, workers=1)
    for number in range(1, 5):
        told: list[Progress] = []

        def callback(progress: Progress, told: list[Progress] = told, number: int = number) -> None:
            told.append(progress)
            if len(told) == number:
                raise KeyboardInterrupt

        stopped = solve(problem, workers=1, callback=callback)
        check_stopped(stopped, whole)
        if len(told) < number:
            break
        if told[-1].open_layouts is None:
            # The first plans come before the layouts are counted.
            assert told[-1].bound is None
            assert stopped.plan is not None
            continue
        assert stopped.layouts is not None
        assert told[-1].open_layouts == stopped.layouts.count("open")
        assert stopped.log[-1].open_layouts == stopped.layouts.count("open")
        if told[-1].incumbent is not None:
            assert stopped.objective is not None


@pytest.mark.parametrize("space", long_but([one for one in SPACES if one != "switched"], SPACES))
def test_an_incumbent_is_told_before_any_bound(space: str) -> None:
    """Where a quick first plan exists, the first progress has its step time, which the answer does not exceed."""
    for seed in range(1, 20):
        told: list[Progress] = []
        answer = solve(problem_of(space, seed), workers=1, callback=told.append)
        start = told[0] if told else None
        if answer.step_time_s is not None and start is not None and start.bound is None:
            assert start.open_layouts is None
            assert start.incumbent is not None
            assert start.incumbent >= answer.step_time_s * (1 - DEFAULT_GAP)
            return
    raise AssertionError("no problem has a first plan")


def test_the_search_looks_at_so_many_layouts_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded: the others stay in their groups, and are open where these prove too little."""
    problem = problem_of("free", 3)
    whole = solve(problem)
    monkeypatch.setattr(planner, "SolveContext", partial(SolveContext, budget=Budget(layouts=0)))
    few = solve(problem)
    assert few.layouts is not None
    assert len(few.layouts.rows) == 0
    assert few.layouts.count("open") > 0
    assert few.details["num_unexplored"] > whole.details["num_unexplored"] == 0
    check_stopped(few, whole)


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/tmp")


@pytest.mark.long
@pytest.mark.parametrize("backend_name", long_but(("cbc",), ("auto", "cbc")))
def test_a_full_temporary_folder_costs_no_plan(backend_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """CBC writes files there: others go on without it, as witness and as backend, and the cause is named."""

    def full(*args: object, **options: object) -> Any:
        raise FULL

    named = 0
    for seed in range(3, 7):
        problem = problem_of("free", seed)
        whole = solve(problem, gap=0.0)
        with monkeypatch.context() as patch:
            patch.setattr(cbc.tempfile, "TemporaryDirectory", full)
            found = solve(problem, gap=0.0, backend=backend_name)
        check_stopped(found, whole)
        assert (found.plan is None) == (whole.plan is None)
        if found.details["unavailable"]:
            named += 1
            assert "CBC could not run: No space left" in found.details["unavailable"][0]
            assert "TMPDIR" in found.details["unavailable"][0]
    assert named > 0


def test_answers_that_a_full_disk_has_cut_off_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """CBC is unavailable then, whatever is left of its files."""
    programs = map(random_program, range(20))
    program = next(one for one in programs if backend("cbc").solve(one, Limits()).status == "optimal")
    for whole, length in product((Path.read_bytes, Path.read_text), (0, 3, 12)):

        def cut(path: Path, *, length: int = length, read: Any = whole, **options: Any) -> Any:
            return read(path, **options)[:length]

        with monkeypatch.context() as patch:
            patch.setattr(Path, whole.__name__, cut)
            with pytest.raises(UnavailableError, match="cut off"):
                backend("cbc").solve(program, Limits())
