"""What programs that call milpplan rely on: threads, processes, the same answer twice, a log, a way to stop."""

from __future__ import annotations

import logging
import multiprocessing
import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

import milpplan
from milpplan import PlanResult, Problem
from milpplan.graph import GraphProgress, StrategyGraph
from milpplan.optimize import Progress
from milpplan.optimize.layout import LayoutContext, LayoutOutcome, LayoutSolver
from milpplan.optimize.milp import Limits, Program
from milpplan.optimize.milp.backends import AUTO, BACKENDS, backend
from milpplan.optimize.milp.solver_self_test import hard_program
from tests.amounts import long_but
from tests.optimize.problems import random_problem
from tests.small import small_problem

FREE = {"kind": "free"}


def problems() -> list[Problem]:
    """Two jobs with different best plans."""
    return [small_problem(space=FREE), small_problem(num_gpus=8, global_batch_size=16, space=FREE)]


def facts(result: PlanResult) -> tuple[object, ...]:
    """Everything of a result but its times: the plan, what is proved, and what became of every layout."""
    layouts = result.layouts
    assert layouts is not None
    counts = replace(result.work, versions="")
    return (
        result.status, result.plan, result.report, result.objective, result.objective_bound, result.rejected,
        layouts.fates.tobytes(), layouts.bounds.tobytes(), counts, result.runners_up,
    )  # fmt: skip


def graph(seed: int) -> StrategyGraph:
    """A ring of strategies with two limits, some of it left to a backend."""
    rng = np.random.default_rng(seed)
    memory = [rng.random((4, 2)) for _ in range(9)]
    pairs = [(i, (i + 1) % 9) for i in range(9)]
    limits = 0.45 * sum(m.max(axis=0) for m in memory) + 0.55 * sum(m.min(axis=0) for m in memory)
    return StrategyGraph(
        [rng.random(4) for _ in range(9)], {pair: rng.random((4, 4)) for pair in pairs}, memory, limits
    )


def answers(seed: int) -> tuple[object, ...]:
    """Everything of a graph's answer but its time."""
    found = graph(seed).solve()
    assert found.choice is not None
    return (
        found.status, found.choice.tolist(), found.objective, found.lower_bound, found.method, found.proof,
        found.memory, found.backend,
    )  # fmt: skip


@pytest.mark.parametrize("times", long_but((1,), (1, 2)))
def test_threads_get_what_one_gets(times: int) -> None:
    """Two solves at the same time, and two graphs, are those of one after the other, to the last bit: nothing is
    shared, and an answer with a seed is the same every time."""
    alone = [facts(milpplan.solve(problem)) for problem in problems()]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda problem: facts(milpplan.solve(problem)), problems() * times))
        graphs = list(pool.map(answers, [1, 2, 1, 2]))
    assert together == alone * times
    assert graphs == [answers(1), answers(2)] * 2
    assert alone[0] != alone[1]


@pytest.mark.long
def test_processes_take_problems_and_give_results() -> None:
    """Problems and results cross to another process and back, with the same answer as here."""
    problem = problems()[0]
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        there = pool.submit(milpplan.solve, problem).result()
        chosen = pool.submit(answers, 1).result()
    assert facts(there) == facts(milpplan.solve(problem))
    assert chosen == answers(1)
    assert pickle.loads(pickle.dumps(problem)) == problem
    simulated = milpplan.simulate(problem, there.plan)
    assert pickle.loads(pickle.dumps(simulated)) == simulated


def test_a_callback_stops_a_solve_with_what_it_has() -> None:
    """``KeyboardInterrupt`` raised in it ends the solve: the best plan so far, and a bound that holds."""
    problem = problems()[1]
    whole = milpplan.solve(problem)
    assert whole.objective is not None
    told: list[Progress] = []

    def impatient(progress: Progress) -> None:
        told.append(progress)
        if progress.incumbent is not None:
            raise KeyboardInterrupt

    stopped = milpplan.solve(problem, callback=impatient)
    assert told
    assert stopped.message == "Interrupted."
    assert stopped.plan is not None
    assert stopped.objective is not None
    assert stopped.objective >= whole.objective
    assert stopped.objective_bound is None or stopped.objective_bound <= whole.objective * (1 + 1e-12)


def cancelled_by_us(solve: Callable[..., Any]) -> Any:
    """The answer of a solve in a thread of its own, which this one cancels once it has something."""
    known, cancel = threading.Event(), threading.Event()

    def wait(progress: Progress | GraphProgress) -> None:
        has = progress.incumbent if isinstance(progress, Progress) else progress.objective
        if has is not None:
            known.set()
            assert cancel.wait(60)

    with ThreadPoolExecutor(1) as pool:
        there = pool.submit(solve, callback=wait, cancelled=cancel.is_set)
        assert known.wait(60)
        cancel.set()
        return there.result()


def test_another_thread_cancels_a_solve() -> None:
    """The answer is what is known by then, with a bound that holds."""
    problem = problems()[1]
    whole = milpplan.solve(problem)
    assert whole.objective is not None
    stopped = cancelled_by_us(partial(milpplan.solve, problem))
    assert stopped.message == "Interrupted."
    assert stopped.objective >= whole.objective
    assert stopped.objective_bound is None or stopped.objective_bound <= whole.objective * (1 + 1e-12)


def test_another_thread_cancels_a_graph() -> None:
    """The same of a strategy graph."""
    best = graph(1).solve()
    assert best.objective is not None
    stopped = cancelled_by_us(graph(1).solve)
    assert "interrupted" in stopped.method
    assert stopped.objective >= best.objective
    assert stopped.lower_bound is None or stopped.lower_bound <= best.objective


@pytest.mark.parametrize("name", BACKENDS)
def test_a_running_backend_heeds_a_cancellation(name: str) -> None:
    """A program of minutes ends at once; no process of CBC stays."""
    asked = []

    def cancelled() -> bool:
        asked.append(time.perf_counter())
        return len(asked) > 2

    # Nothing stops HiGHS itself: its thread ends at its limit.
    with pytest.raises(KeyboardInterrupt):
        backend(name).solve(hard_program(), Limits(time_limit_s=2, cancelled=cancelled))
    assert len(asked) == 3


def taken(problem: Problem, name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[object, ...]:
    """How a backend solves a problem: the layouts that are looked at, with their cutoffs and bounds, the integer
    programs that bounds rest on, and the answer."""
    way: list[object] = []
    resolve = LayoutSolver.resolve

    def noted(
        self: LayoutSolver, setting: LayoutContext, cutoff: int, bound: int, effort: int = 1, slack: float = 0.0
    ) -> LayoutOutcome:
        way.append((setting.layout, cutoff, bound, effort, slack))
        return resolve(self, setting, cutoff, bound, effort, slack)

    def program(one: Program) -> None:
        rows = one.rows
        way.append((one.name, one.upper.tolist(), rows.coefficients.tolist(), rows.upper.tolist()))

    with monkeypatch.context() as watched:
        watched.setattr(LayoutSolver, "resolve", noted)
        result = milpplan.solve(problem, backend=name, seed=7, gap=1e-4, on_program=program)
    return facts(result), way


@pytest.mark.parametrize("name", long_but(("cpsat",), (AUTO, *BACKENDS)))
def test_the_same_seed_takes_the_same_way(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the same layouts in the same order, the same programs, the same plan and bound, to the last bit."""
    problem = random_problem(14)
    first, second = (taken(problem, name, monkeypatch) for _ in range(2))
    assert first == second
    way = first[1]
    assert isinstance(way, list)
    assert any(isinstance(entry[0], str) for entry in way)
    assert len(way) > 3


@pytest.mark.parametrize("name", long_but((AUTO,), (AUTO, *BACKENDS)))
def test_the_same_seed_takes_the_same_way_through_a_graph(name: str) -> None:
    """Twice the same choices and bounds in the same order, the same answer."""
    found = []
    for _ in range(2):
        told: list[tuple[float | None, float | None]] = []
        done = graph(3).solve(
            name, seed=7, callback=lambda p, told=told: told.append((p.objective, p.lower_bound))
        )
        assert done.choice is not None
        found.append((told, done.choice.tolist(), done.lower_bound, done.method, done.backend))
    assert found[0] == found[1]
    assert found[0][4] is not None


def test_the_log_is_quiet_until_it_is_asked(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nothing is printed; with the level DEBUG every line of the search is a record of ``milpplan``."""
    problem = problems()[0]
    milpplan.solve(problem)
    answers(1)
    assert capfd.readouterr() == ("", "")
    with caplog.at_level(logging.DEBUG, "milpplan"):
        result = milpplan.solve(problem)
        answers(1)
    lines = [record for record in caplog.records if record.name == "milpplan.search"]
    assert len(lines) >= len(result.log)
    assert any(record.name == "milpplan.graph" for record in caplog.records)
