"""The canaries: all sing here, and a broken solver silences one."""

import errno
import subprocess
import sys
from dataclasses import replace

import pytest

from milpplan.errors import InvalidInputError, SolverError
from milpplan.optimize.milp import Limits, Program, ProgramBuilder, Solution, cbc, solver_self_test
from milpplan.optimize.milp.cbc import CbcBackend
from milpplan.optimize.milp.solver_self_test import brute_force, run_canaries
from tests.amounts import first, long_but


@pytest.mark.long
@pytest.mark.parametrize("num_programs", long_but((2,), (2, solver_self_test.NUM_RANDOM_PROGRAMS)))
def test_all_canaries_pass(num_programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the pinned solvers every check passes, and every result explains itself."""
    monkeypatch.setattr(solver_self_test, "NUM_RANDOM_PROGRAMS", num_programs)
    results = run_canaries()
    assert [(r.name, r.expected, r.seen) for r in results if not r.passed] == []
    assert all(r.meaning for r in results)
    assert len({r.name for r in results}) == len(results) >= 10


def test_ctrl_c_still_reaches_python_after_the_canaries() -> None:
    """CP-SAT, asked for the published program, leaves Ctrl-C to Python; its own handler would end the program
    without a word the next time."""
    script = (
        "import signal, time\n"
        "from milpplan.optimize.milp import solver_self_test\n"
        "solver_self_test._cpsat_published()\n"
        "try:\n    signal.raise_signal(signal.SIGINT)\n    time.sleep(10)\n"
        "except KeyboardInterrupt:\n    print('heard')\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stdout) == (0, "heard\n")


def test_a_wrong_solver_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CBC that answers one too much fails its random programs."""
    honest = CbcBackend.solve

    def solve(self: CbcBackend, program: Program, limits: Limits) -> Solution:
        solution = honest(self, program, limits)
        return solution if solution.objective is None else replace(solution, objective=solution.objective + 1)

    monkeypatch.setattr(solver_self_test, "NUM_RANDOM_PROGRAMS", 4)
    monkeypatch.setattr(CbcBackend, "solve", solve)
    result = solver_self_test._random_programs("cbc")()
    assert not result.passed
    assert "instead of" in result.seen


@pytest.mark.long
@pytest.mark.parametrize(
    "error", first(1, [OSError(errno.ENOSPC, "No space left on device", "/tmp"), MemoryError()])
)
def test_a_solver_without_room_is_not_wrong(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full temporary folder or memory that is short costs CBC its canaries, with the cause; no answer is called
    wrong, and the others are asked all the same."""

    def full(*args: object, **options: object) -> object:
        raise error

    monkeypatch.setattr(solver_self_test, "NUM_RANDOM_PROGRAMS", 2)
    monkeypatch.setattr(cbc.tempfile, "TemporaryDirectory", full)
    failed = {result.name: result for result in run_canaries() if not result.passed}
    assert set(failed) == {"cbc: available"}
    assert not failed["cbc: available"].answered
    assert "CBC could not run: " in failed["cbc: available"].seen


def test_a_solver_that_comes_to_no_end_in_time_is_not_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """An overloaded machine leaves a canary without an answer, which is not a wrong one."""
    monkeypatch.setattr(solver_self_test, "random_program", lambda _: solver_self_test.hard_program())
    monkeypatch.setattr(solver_self_test, "brute_force", lambda _: 1)
    monkeypatch.setattr(solver_self_test, "CANARY_S", 0.2)
    result = solver_self_test._guarded("cbc: random programs", solver_self_test._random_programs("cbc"))
    assert not result.passed
    assert not result.answered
    assert "No answer to market_split within 0.2 s" in result.seen


@pytest.mark.long
def test_an_answer_that_the_exact_check_refutes_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A solver whose values break a row has given a wrong answer."""

    def refuted(*args: object) -> Solution:
        raise SolverError("its answer breaks a row")

    monkeypatch.setattr(solver_self_test, "NUM_RANDOM_PROGRAMS", 2)
    monkeypatch.setattr(CbcBackend, "solve", refuted)
    result = next(result for result in run_canaries() if result.name == "cbc: available")
    assert not result.passed
    assert result.answered


def test_brute_force_on_a_program_solved_by_hand() -> None:
    """min 3a + 4b with 2a + 3b >= 7, a, b in 0..3 is 10, at a=2, b=1."""
    builder = ProgramBuilder()
    pair = builder.add_variables(("a", "b"), 3)
    builder.add_row("cover", pair, (2, 3), lower=7)
    builder.minimize(pair, (3, 4))
    assert brute_force(builder.build()) == 10


def test_brute_force_refuses_large_programs() -> None:
    """It says so instead of running for hours."""
    with pytest.raises(InvalidInputError, match="too many points"):
        brute_force(solver_self_test.hard_program())
