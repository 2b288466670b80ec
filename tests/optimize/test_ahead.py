"""Worker processes answer ahead of time: the same answers with any number of them, and ends of all kinds."""

from __future__ import annotations

import pickle
import random
import threading
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

from milpplan import Problem, solve, solve_robust
from milpplan.errors import SolverError, UnavailableError
from milpplan.optimize import PlanResult
from milpplan.optimize.milp import Program
from milpplan.optimize.search import layout_tasks
from milpplan.optimize.search.layout_tasks import AheadDecider, AheadInit, Question
from milpplan.parallel import WorkerProcess
from tests.amounts import first, long_but
from tests.optimize.mixed_problems import mixed_problem, switched_problem
from tests.optimize.problems import random_problem
from tests.optimize.test_crew import facts, is_alive
from tests.optimize.test_robust import random_scenarios

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1")
answered: list[int] = []
"""The rows of the answers of all processes inside this process."""


class Inside:
    """A worker process inside this process: everything that is sent is pickled."""

    def __init__(self, init: AheadInit, some_answered: threading.Event) -> None:
        self.worker = pickle.loads(pickle.dumps(init)).worker(threading.Event())
        self.some_answered, self.answers = some_answered, list[bytes]()

    def send(self, question: Question) -> None:
        answered.append(question.task.row)
        self.answers.append(pickle.dumps(self.worker.reply(pickle.loads(pickle.dumps(question)))))
        self.some_answered.set()

    @property
    def answered(self) -> bool:
        return bool(self.answers)

    def answer(self, until: None, cancelled: None) -> Any:
        return pickle.loads(self.answers.pop(0))

    def stop(self) -> None:
        """Nothing to end."""

    close = stop


class Failing(Inside):
    """A worker process that dies, or has an error, at one of its first answers."""

    def __init__(self, init: AheadInit, some_answered: threading.Event) -> None:
        super().__init__(init, some_answered)
        self.lives = random.Random(len(answered)).randrange(3)

    def answer(self, until: None, cancelled: None) -> Any:
        self.lives -= 1
        if self.lives < 0:
            raise random.Random(len(answered)).choice((UnavailableError("It died."), SolverError("It failed.")))
        return super().answer(until, cancelled)


EARLY = {"AHEAD_WORK_S": 0.0, "MIN_FOLLOWING": 1, "WorkerProcess": Inside}


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Processes inside this one take part from the first layout on."""
    for name, value in EARLY.items():
        monkeypatch.setattr(layout_tasks, name, value)
    return monkeypatch


def small(seed: int) -> Problem:
    """A random small problem of four kinds: all schedules, switches, two node types, solved in parts."""
    kinds = {1: switched_problem, 2: mixed_problem}
    problem = kinds[seed % 4](seed) if seed % 4 in kinds else random_problem(seed, schedules=SCHEDULES)
    counts = ("alike", "block")[seed % 8 // 4] if seed % 4 == 3 else "any"
    changed = {"interleaved_layers": "even", "recompute_counts": counts}
    return problem.model_copy(update={"space": problem.space.model_copy(update=changed)})


def all_facts(result: PlanResult) -> tuple[object, ...]:
    """Everything of a result but its times and its incumbents' times."""
    return (*facts(result), result.runners_up, result.fastest, [entry.incumbent for entry in result.log][-1:])


@pytest.mark.parametrize("seed", long_but((1,), range(200)))
@pytest.mark.parametrize("process", first(1, (Inside, Failing)))
def test_any_number_of_processes_gives_the_same_answer(
    process: object, seed: int, early: pytest.MonkeyPatch
) -> None:
    """Plan, bounds of all layouts, counts of work and programs, with one, two and three; also where they fail."""
    early.setattr(layout_tasks, "WorkerProcess", process)
    answers, programs = [], []
    for workers in (1, 2, 3):
        stated: list[Program] = []
        result = solve(small(seed), workers=workers, gap=0, any_chunks=False, on_program=stated.append)
        answers.append(all_facts(result))
        programs.append([(program.name, program.num_rows, program.num_variables) for program in stated])
    assert answers[0] == answers[1] == answers[2]
    assert programs[0] == programs[1] == programs[2]


def test_a_guess_after_the_answer_of_its_chain_can_be_asked() -> None:
    """A layout that is guessed once the layout before it in its chain has an answer takes the paths of that
    answer: nothing else would give it any, and the search would wait for it."""
    decider = AheadDecider(Any, SimpleNamespace(known_paths={}), {}, 1)  # type: ignore[arg-type]
    before = decider._add(Any, 1, 1, "chain")  # type: ignore[arg-type]
    assert before.ready
    assert not decider._add(Any, 1, 1, "chain").ready  # type: ignore[arg-type]
    decider.guesses.pop()
    before.state, before.answer = "answered", SimpleNamespace(paths={"key": []})  # type: ignore[assignment]
    later = decider._add(Any, 1, 1, "chain")  # type: ignore[arg-type]
    assert later.ready
    assert later.paths == {"key": []}


@pytest.mark.long
@pytest.mark.parametrize("seed", long_but((1,), range(20)))
def test_scenarios_too(seed: int, early: pytest.MonkeyPatch) -> None:
    """The plan of the least worst-case regret, with one process and with three."""
    problem = random_problem(seed, schedules=SCHEDULES)
    answers = [solve_robust(problem, random_scenarios(seed), gap=1e-5, workers=workers) for workers in (1, 3)]
    assert all_facts(answers[0]) == all_facts(answers[1])


@pytest.fixture(scope="module")
def shared() -> Problem:
    """A problem with a plan for which a process is started, whatever the clock says."""
    started: list[AheadInit] = []

    class Noted(Inside):
        def __init__(self, init: AheadInit, some_answered: threading.Event) -> None:
            super().__init__(init, some_answered)
            started.append(init)

    with pytest.MonkeyPatch.context() as patch:
        for name, value in (EARLY | {"WorkerProcess": Noted}).items():
            patch.setattr(layout_tasks, name, value)
        for seed in range(40, 200, 4):
            started.clear()
            result = solve(small(seed), workers=2, gap=0, any_chunks=False)
            if result.plan is not None and started and result.work.relaxations > 15:
                return small(seed)
    raise AssertionError("no seed gives one")


@pytest.fixture
def pids(early: pytest.MonkeyPatch) -> list[int]:
    """The processes that are really started."""
    started: list[int] = []

    def start(init: AheadInit, some_answered: threading.Event) -> WorkerProcess:
        process = WorkerProcess(init, some_answered)
        started.append(process.process.pid)
        return process

    early.setattr(layout_tasks, "WorkerProcess", start)
    return started


@cache
def whole_answer(problem: Problem) -> PlanResult:
    """The answer of one process."""
    return solve(problem, workers=1, gap=0, any_chunks=False)


def test_real_processes_answer_and_end(shared: Problem, pids: list[int]) -> None:
    """The answer of one process, and none is left."""
    together = solve(shared, workers=3, gap=0, any_chunks=False)
    assert all_facts(whole_answer(shared)) == all_facts(together)
    assert pids
    assert not any(map(is_alive, pids))


@pytest.mark.parametrize("how", long_but(("cancelled", "time limit"), ("cancelled", "callback", "time limit")))
def test_stopping_ends_the_processes(how: str, shared: Problem, pids: list[int]) -> None:
    """Cancelled, interrupted by a callback or out of time once a process works: the best plan so far with its
    bound, and no process left."""
    whole = whole_answer(shared)
    assert whole.objective is not None
    limit: dict[str, Any] = {"time limit": {"time_limit_s": 0.05}, "cancelled": {"cancelled": lambda: bool(pids)}}

    def interrupt(progress: object) -> None:
        if pids:
            raise KeyboardInterrupt

    stopped = solve(shared, workers=2, gap=0, any_chunks=False, **limit.get(how, {"callback": interrupt}))
    assert stopped.objective is None or stopped.objective >= whole.objective
    assert stopped.objective_bound is None or stopped.objective_bound <= whole.objective * (1 + 1e-12)
    if how == "cancelled":
        assert (stopped.message, len(pids)) == ("Interrupted.", 1)
    assert not any(map(is_alive, pids))


def test_processes_that_are_killed_change_nothing(shared: Problem, early: pytest.MonkeyPatch) -> None:
    """The same answer, and a cause that is said is how they died."""

    def dead(init: AheadInit, some_answered: threading.Event) -> WorkerProcess:
        process = WorkerProcess(init, some_answered)
        process.process.kill()
        return process

    early.setattr(layout_tasks, "WorkerProcess", dead)
    together = solve(shared, workers=3, gap=0, any_chunks=False)
    assert all_facts(whole_answer(shared)) == all_facts(together)
    # A solve that is over sooner does not notice it.
    assert all("died (signal 9" in cause for cause in together.details["unavailable"])


def test_small_problems_start_no_process(shared: Problem, pids: list[int], early: pytest.MonkeyPatch) -> None:
    """What takes less work than ``AHEAD_WORK_S`` starts none, nor does one worker."""
    solve(shared, workers=1, any_chunks=False)
    early.setattr(layout_tasks, "AHEAD_WORK_S", 1e3)
    solve(shared, workers=2, any_chunks=False)
    assert not pids
