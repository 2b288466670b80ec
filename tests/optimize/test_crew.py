"""Several processes decide layouts: the same answers, ends of all kinds, and nobody left behind."""

from __future__ import annotations

import os
import pickle
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from milpplan import PlanResult, Problem, solve
from milpplan.errors import InvalidInputError, UnavailableError
from milpplan.optimize import Counters, SolveOptions
from milpplan.optimize.search import branch_phase
from milpplan.optimize.search.branch_phase import Begun, Worker, WorkerInit, moves
from milpplan.parallel import WorkerProcess
from tests.amounts import first, long_but
from tests.optimize.brute_force import brute_force
from tests.optimize.problems import random_problem

PROVED = 1e-4
"""See ``test_optimality``."""
SOON = {"ALONE_S": 0.0, "STARTING_S": 0.01, "ROUND_S": 0.01, "DEALT": 2}
"""Others take part from the first layout on, in many rounds."""


class Inside:
    """What ``WorkerProcess`` is, in this process: everything that is sent is pickled."""

    def __init__(self, hello: WorkerInit) -> None:
        self.worker = Worker.of(pickle.loads(pickle.dumps(hello)), threading.Event())
        self.answers: list[bytes] = []

    def send(self, message: Any) -> None:
        self.answers.append(pickle.dumps(self.worker.reply(pickle.loads(pickle.dumps(message)))))

    def answer(self, until: float | None, cancelled: Callable[[], bool] | None) -> Any:
        return pickle.loads(self.answers.pop(0))

    def stop(self) -> None:
        """Nothing to end."""

    close = stop


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Rounds begin at once and are short."""
    for name, value in SOON.items():
        monkeypatch.setattr(branch_phase, name, value)
    return monkeypatch


def any_problem(seed: int) -> Problem:
    """A random small problem over chunks of any size."""
    problem = random_problem(seed, schedules=("1f1b", "interleaved"))
    return problem.model_copy(update={"space": problem.space.model_copy(update={"interleaved_layers": "any"})})


def facts(result: PlanResult) -> tuple[object, ...]:
    """Everything of a result but its times."""
    assert result.layouts is not None
    return (
        result.status, result.plan, result.objective, result.objective_bound, result.gap,
        result.layouts.fates.tobytes(), result.layouts.bounds.tobytes(), replace(result.work, versions=""),
    )  # fmt: skip


def process_of(told: list[int]) -> Callable[[object], WorkerProcess]:
    """Starts worker processes and tells their numbers."""

    def started(hello: object) -> WorkerProcess:
        process = WorkerProcess(hello)
        told.append(process.process.pid)
        return process

    return started


def is_alive(pid: int) -> bool:
    """Whether there is such a process, one that has not been waited for included."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def gone_soon(pid: int) -> bool:
    """Whether a process ends within 10 seconds."""
    until = time.monotonic() + 10
    while is_alive(pid) and time.monotonic() < until:
        time.sleep(0.05)
    return not is_alive(pid)


@pytest.fixture(scope="module")
def branched() -> Problem:
    """A problem that takes the others several rounds."""
    rounds: list[int] = []

    class Counted(Inside):
        def answer(self, until: float | None, cancelled: Callable[[], bool] | None) -> Any:
            found = super().answer(until, cancelled)
            rounds.append(len(found.results))
            return found

    with pytest.MonkeyPatch.context() as patch:
        for name, value in (*SOON.items(), ("WorkerProcess", Counted)):
            patch.setattr(branch_phase, name, value)
        for seed in range(9, 200):
            rounds.clear()
            problem = any_problem(seed)
            solve(problem, workers=2)
            if sum(number > 0 for number in rounds) > 2:
                return problem
    raise AssertionError("no seed gives one")


@pytest.fixture(scope="module")
def alone(branched: Problem) -> PlanResult:
    """What one process answers to it."""
    return solve(branched, workers=1)


@pytest.mark.parametrize("seed", long_but((3,), range(150)))
@pytest.mark.parametrize("workers", first(1, (2, 3)))
def test_workers_find_what_one_finds(seed: int, workers: int, soon: pytest.MonkeyPatch) -> None:
    """Status, objective within the gap, and a bound below the brute force's best, with any number of processes."""
    soon.setattr(branch_phase, "WorkerProcess", Inside)
    problem = any_problem(seed)
    alone, together = solve(problem, workers=1, gap=0), solve(problem, workers=workers, gap=0)
    best = brute_force(problem)
    assert (together.status, together.objective) == (alone.status, alone.objective)
    assert (together.status == "infeasible") == (best is None)
    if best is not None:
        assert together.report is not None
        assert together.gap is not None
        assert together.report.step_time_ns == best.step_time_ns
        assert together.gap <= PROVED


@pytest.mark.long
def test_the_same_answer_every_time(branched: Problem, alone: PlanResult, soon: pytest.MonkeyPatch) -> None:
    """Real processes, twice: everything but times is the same, and none of them is left."""
    told: list[int] = []
    soon.setattr(branch_phase, "WorkerProcess", process_of(told))
    results = [solve(branched, workers=3) for _ in range(2)]
    assert facts(results[0]) == facts(results[1])
    assert len(told) > 1
    assert not any(is_alive(pid) for pid in told)
    assert (results[0].status, results[0].gap) == ("optimal", pytest.approx(alone.gap, abs=1e-4))
    assert results[0].objective == pytest.approx(alone.objective, rel=1e-4)


def test_small_jobs_start_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is decided in less than ``ALONE_S`` of work needs no second process."""
    told: list[int] = []
    monkeypatch.setattr(branch_phase, "WorkerProcess", process_of(told))
    assert solve(any_problem(0), workers=2).status == "optimal"
    assert not told


@pytest.mark.long
def test_stopping_ends_the_others(branched: Problem, alone: PlanResult, soon: pytest.MonkeyPatch) -> None:
    """Cancelled by somebody, and interrupted by a callback, once a process works: the best plan so far with its
    bound, and no process left."""
    told: list[int] = []
    soon.setattr(branch_phase, "WorkerProcess", process_of(told))
    assert alone.objective is not None

    def interrupt(progress: object) -> None:
        if told:
            raise KeyboardInterrupt

    for how in ({"cancelled": lambda: bool(told)}, {"callback": interrupt}):
        told.clear()
        soon.setattr(branch_phase, "ROUND_S", 1e9 if "cancelled" in how else 0.01)
        stopped = solve(branched, workers=2, **how)
        assert (stopped.message, len(told)) == ("Interrupted.", 1)
        assert stopped.objective is None or stopped.objective >= alone.objective
        assert stopped.objective_bound is None or stopped.objective_bound <= alone.objective * (1 + 1e-12)
        assert not is_alive(told[0])


def test_a_process_that_dies_is_gone_on_without(
    branched: Problem, alone: PlanResult, soon: pytest.MonkeyPatch
) -> None:
    """All of them killed as soon as they are started: the same answer, and it is said how they died."""

    def dead(hello: object) -> WorkerProcess:
        process = WorkerProcess(hello)
        process.process.kill()
        return process

    soon.setattr(branch_phase, "WorkerProcess", dead)
    found = solve(branched, workers=3)
    assert (found.status, found.objective) == (alone.status, pytest.approx(alone.objective, rel=1e-4))
    (cause,) = found.details["unavailable"]
    assert re.search(r"A process that worked .* died \(signal 9; .* out of memory", cause)


@pytest.mark.parametrize("seed", first(1, range(40)))
def test_processes_that_die_at_any_answer_lose_nothing(seed: int, soon: pytest.MonkeyPatch) -> None:
    """At a random answer of every process: what it was deciding is decided by the others, proved as by one."""
    problem, rng = any_problem(seed), random.Random(seed)

    class Mortal(Inside):
        def __init__(self, hello: WorkerInit) -> None:
            super().__init__(hello)
            self.lives = rng.randrange(4)

        def answer(self, until: float | None, cancelled: Callable[[], bool] | None) -> Any:
            found = super().answer(until, cancelled)
            self.lives -= 1
            if self.lives < 0:
                raise UnavailableError("It died.")
            return found

        def close(self, *, at_once: bool = False) -> None:
            """Nothing to end."""

    soon.setattr(branch_phase, "WorkerProcess", Mortal)
    found, best = solve(problem, workers=3, gap=0), brute_force(problem)
    assert (found.status == "infeasible") == (best is None)
    if best is not None:
        assert found.report is not None
        assert found.gap is not None
        assert found.report.step_time_ns == best.step_time_ns
        assert found.gap <= PROVED


def test_no_process_can_be_started(branched: Problem, alone: PlanResult, soon: pytest.MonkeyPatch) -> None:
    """One process does it all then, and says why."""

    def refused(hello: object) -> WorkerProcess:
        raise OSError(11, "Resource temporarily unavailable")

    soon.setattr(branch_phase, "WorkerProcess", refused)
    found = solve(branched, workers=3)
    assert (found.status, found.objective) == (alone.status, alone.objective)
    assert "Resource temporarily unavailable" in found.details["unavailable"][0]


def test_an_error_there_is_an_error_here() -> None:
    """What is raised in a process is raised where its answer is awaited, with the place where it happened."""
    process = WorkerProcess("no hello")
    try:
        with pytest.raises(AttributeError) as raised:
            process.answer(None, None)
        assert "In a worker process" in raised.value.__notes__[0]
    finally:
        process.close()
    assert process.process.returncode == 0


@pytest.mark.long
def test_time_passes_without_an_answer(branched: Problem) -> None:
    """None at the given time, not an error; and a process that was asked nothing ends at once."""
    process = WorkerProcess(WorkerInit(branched, SolveOptions(), 0.0, wants_programs=False))
    assert process.answer(time.monotonic(), None) is None
    process.close()
    assert process.process.returncode is not None


SCRIPT = """
import os, time
from milpplan.optimize.search import branch_phase
from milpplan.parallel import WorkerProcess
from milpplan import solve
from tests.optimize.test_crew import SOON, any_problem
for name, value in SOON.items():
    setattr(branch_phase, name, value)
def started(hello):
    process = WorkerProcess(hello)
    print(process.process.pid, flush=True)
    if {killed}:
        os.kill(os.getpid(), 9)
    return process
branch_phase.WorkerProcess = started
print(solve(any_problem({seed}), workers=2).status)
"""


@pytest.mark.long
@pytest.mark.parametrize("killed", long_but((True,), (False, True)))
def test_scripts_need_no_guard_and_leave_nobody(branched: Problem, killed: bool, tmp_path: Path) -> None:
    """A script without ``if __name__ == "__main__"`` runs once and gets its answer. If it is killed, the process
    that it has started ends too."""
    seed = next(seed for seed in range(200) if any_problem(seed) == branched)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(killed=killed, seed=seed))
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=300, env=environment
    )
    pid, *rest = done.stdout.split()
    assert (done.returncode, rest) == ((-signal.SIGKILL, []) if killed else (0, ["optimal"]))
    assert done.stderr == ""
    assert gone_soon(int(pid))


def test_begun_layouts_go_where_none_are() -> None:
    """The one with fewest nodes behind it, to each process that has none; nobody gives its only one."""
    three: list[Begun] = [(9, (1.0, 0, 5)), (2, (1.5, 1, 6)), (4, (1.2, 2, 7))]
    assert moves([three, []]) == [(0, 1, (1.5, 1, 6))]
    assert moves([[], three, []]) == [(1, 0, (1.5, 1, 6)), (1, 2, (1.2, 2, 7))]
    assert moves([three, three[:1]]) == moves([three[:1], []]) == []


def test_counters_add_up() -> None:
    """What another process has done since it counted last."""
    ours, before, now = Counters(relaxations=5), Counters(relaxations=2, paths=1), Counters(relaxations=9, paths=4)
    ours.add(now, before)
    assert ours == Counters(relaxations=12, paths=3)


def test_number_of_workers() -> None:
    """At least this one; by default the usable CPUs, a few at most."""
    with pytest.raises(InvalidInputError, match="workers=0"):
        solve(any_problem(0), workers=0)
    assert 1 <= branch_phase.num_workers(SolveOptions()) <= branch_phase.MOST_WORKERS
    assert branch_phase.num_workers(SolveOptions(workers=7)) == 7
