"""The command line in a process of its own: imports, pipes, locales, signals."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import milpplan
from milpplan.library import HOMES
from milpplan.reports.documents import ResultDocument
from tests.amounts import first, long_but

PROGRAM = [sys.executable, "-c", "from milpplan.cli import main; main()"]
SOLVE = ["solve", "llama3-8b", "dgx-h100", "--gpus", "16", "--global-batch", "32", "--space", "uniform"]


def program(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """The program in a process of its own."""
    return subprocess.run([*PROGRAM, *words], capture_output=True, text=True, timeout=300, **options)


def test_the_version_and_quick_answers_need_no_solver() -> None:
    """--version prints the version; neither --help nor list imports OR-tools."""
    assert program("--version").stdout == f"milpplan {milpplan.__version__}\n"
    script = (
        "import sys\nfrom milpplan.cli import main\ntry:\n    main()\nexcept SystemExit:\n    pass\n"
        "print([name for name in ('ortools', 'pulp', 'scipy', 'pandas') if name in sys.modules])"
    )
    for words in (["--help"], ["list", "models"]):
        ended = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, timeout=300)
        assert ended.stdout.splitlines()[-1] == "[]"


def test_a_reader_that_leaves_is_not_an_error() -> None:
    """`milpplan schema | head -c 1` is silent."""
    with subprocess.Popen(
        [*PROGRAM, "schema", "result"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0


@pytest.mark.long
def test_output_survives_a_terminal_that_knows_only_ascii() -> None:
    """With an ASCII locale the tables are drawn in ASCII instead of failing."""
    ended = program(*SOLVE, env={"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"})
    assert ended.returncode == 0
    assert ended.stdout.isascii()


@pytest.mark.parametrize("words", first(1, (["--version"], [*SOLVE, "--json"])))
def test_standard_output_that_takes_nothing(words: list[str], tmp_path: Path) -> None:
    """Closed: nothing to say. A full disk: the result is lost, so the program says so and exits with 2; a plan
    file that was asked for is written all the same."""
    closed = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *PROGRAM, *words], stderr=subprocess.PIPE, text=True, timeout=300
    )
    assert (closed.returncode, closed.stderr) == (0, "")
    out = tmp_path / "plan.json"
    asked = ["--out", str(out)] if "--json" in words else []
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [*PROGRAM, *words, *asked], stdout=full, stderr=subprocess.PIPE, text=True, timeout=300
        )
    assert ended.returncode == 2
    assert "error: The result cannot be written to standard output: No space left" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert out.exists() == bool(asked)


def test_the_library_is_imported_when_it_is_asked_for() -> None:
    """The entry point is there before NumPy is, so that Ctrl-C has a meaning while the rest is imported; every
    public name is found, and others are not."""
    script = "import sys\nimport milpplan.cli\nprint('numpy' in sys.modules, 'pydantic' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert ended.stdout == "False False\n"
    names = milpplan.__all__
    assert {"Job", "solve", "simulate", "__version__"} <= set(names)
    for home, held in HOMES.items():
        assert all(getattr(milpplan, name) is getattr(import_module(home), name) for name in held)
    assert set(names) <= set(dir(milpplan))
    with pytest.raises(AttributeError, match="nothing_such"):
        milpplan.nothing_such  # type: ignore[attr-defined] # noqa: B018


STARTED = """
import sys, time, types
from milpplan.cli import interrupts, main

def told(leave_at_once=interrupts.leave_at_once):
    leave_at_once()
    print("started", file=sys.stderr, flush=True)

interrupts.leave_at_once = told
# Canaries that take long without a solver: importing protobuf swallows a Ctrl-C now and then.
doctor = types.ModuleType("milpplan.optimize.milp.solver_self_test")
doctor.SelfTestResult, doctor.run_canaries = object, lambda: time.sleep(30)
sys.modules["milpplan.optimize.milp.solver_self_test"] = doctor
main()
"""


@pytest.mark.parametrize("seconds", long_but((0.0, 0.1, 0.2), (0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8)))
def test_ctrl_c_at_any_moment_is_a_message(seconds: float) -> None:
    """SIGINT while the program still imports, or later: exit code 5 and one line, never a traceback."""
    with subprocess.Popen(
        [sys.executable, "-c", STARTED, "doctor"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell starts what it puts in the background with SIGINT ignored, and that is inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "started\n"
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=300)
    talk = [line for line in stderr.splitlines() if not line.startswith("Running the canary programs")]
    assert (process.returncode, stdout, talk) == (5, "", ["Interrupted before anything was found."])


def test_a_program_that_ignores_ctrl_c_goes_on_ignoring_it() -> None:
    """What a shell has put in the background is not ended by Ctrl-C in the foreground."""
    with subprocess.Popen(
        [sys.executable, "-c", STARTED, "--version"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "started\n"
        process.send_signal(signal.SIGINT)
        stdout, _ = process.communicate(timeout=300)
    assert (process.returncode, stdout) == (0, f"milpplan {milpplan.__version__}\n")


INTERRUPTED = """
import sys, time
from contextlib import contextmanager
from milpplan.cli import main
from milpplan.cli.commands import solve

@contextmanager
def waiting(*_):
    def callback(progress):
        if progress.incumbent is not None and progress.bound is not None:
            print("ready", file=sys.stderr, flush=True)
            time.sleep(30)
    yield callback

solve.shown_progress = waiting
main()
"""


@pytest.mark.parametrize("sent", first(1, (signal.SIGINT, signal.SIGTERM)))
def test_ctrl_c_prints_the_best_plan_so_far(sent: signal.Signals, tmp_path: Path) -> None:
    """SIGINT or SIGTERM in the middle of the search: exit code 4, the plan with its gap, the file written."""
    out = tmp_path / "plan.json"
    words = [*SOLVE[:-1], "free", "--gap", "0", "--json", "--out", str(out)]
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "ready\n"
        process.send_signal(sent)
        stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 4
    assert "Traceback" not in stderr
    document = ResultDocument.model_validate_json(stdout, strict=True)
    assert document.status == "feasible"
    assert document.plan is not None
    assert document.gap is not None
    assert 0 < document.gap < 1
    assert out.read_text() == stdout


BACKGROUND = """
import sys
from contextlib import contextmanager
from milpplan.cli import main
from milpplan.cli.commands import solve

@contextmanager
def waiting(*_):
    def callback(progress):
        if progress.incumbent is not None and progress.bound is not None:
            print("ready", file=sys.stderr, flush=True)
            sys.stdin.readline()
    yield callback

solve.shown_progress = waiting
main()
"""


@pytest.mark.long
def test_what_a_script_has_put_in_the_background_keeps_its_plan() -> None:
    """SIGINT is ignored there and stays so; SIGTERM, which comes twice from `timeout`, is decided by itself."""
    words = [*SOLVE[:-1], "free", "--gap", "0", "--json"]
    with subprocess.Popen(
        [sys.executable, "-c", BACKGROUND, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        for _ in range(2):
            process.send_signal(signal.SIGTERM)
        stdout, stderr = process.communicate("\n" * 1000, timeout=300)
    assert process.returncode == 4, stderr
    document = ResultDocument.model_validate_json(stdout, strict=True)
    assert document.plan is not None
    assert document.gap is not None


SECOND = """
import os, signal, sys
from milpplan.cli import main
from milpplan.cli import solving

tell = solving.solve_blocks

def interrupted(*args, **options):
    # While the result is written.
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGTERM):
        signal.raise_signal(one)
    return tell(*args, **options)

solving.solve_blocks = interrupted
main()
"""


def test_signals_while_a_result_is_printed_do_not_lose_it() -> None:
    """The plan and its exit code come all the same."""
    words = [*SOLVE[:-1], "uniform", "--time-limit", "1000"]
    done = subprocess.run(
        [sys.executable, "-c", SECOND, *words],
        capture_output=True,
        text=True,
        timeout=100,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert done.returncode == 0, done.stderr
    assert "optimal within" in done.stdout


STUCK = """
import signal, sys, time
from milpplan.cli import interrupts, main
from milpplan.optimize import solve

def stuck(*args, **options):
    # The alarm of the time limit comes where nobody looks at the clock.
    signal.raise_signal(signal.SIGALRM)
    raise AssertionError

first_plan = solve.first_plan

def planned(*args):
    # The search for a first plan lists layouts, too: only the list of the whole space is stuck.
    plan = stuck() if "{name}" == "first_plan" else first_plan(*args)
    solve.layout_space = stuck
    return plan

solve.first_plan = planned
main()
"""


@pytest.mark.parametrize(("name", "code"), first(1, [("first_plan", 5), ("layout_space", 4)]))
def test_the_time_limit_ends_what_does_not_look_at_the_clock(name: str, code: int) -> None:
    """As Ctrl-C does: with the first plan, if it is there."""
    words = [*SOLVE[:-1], "uniform", "--time-limit", "1000", "--json"]
    done = subprocess.run(
        [sys.executable, "-c", STUCK.replace("{name}", name), *words], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == code, done.stderr
    document = ResultDocument.model_validate_json(done.stdout, strict=True)
    assert (document.plan is not None, document.gap, document.lower_bound_s) == (code == 4, None, None)


LOADING = """
import sys, time
from milpplan.cli import main
from milpplan.cli.commands import solve_lengths

def slow():
    print("loading", file=sys.stderr, flush=True)
    time.sleep(30)

solve_lengths.load_solvers = slow
main()
"""


@pytest.mark.parametrize("sent", first(1, (signal.SIGINT, signal.SIGTERM)))
def test_ctrl_c_while_solvers_are_imported_ends_the_program(sent: signal.Signals, tmp_path: Path) -> None:
    """An import could lose it, and the search go on: exit code 5 and one line at once."""
    path = tmp_path / "lengths.txt"
    path.write_text("500\n900\n")
    words = ["solve", "llama2-7b", "dgx-h100", "--gpus", "8", "--lengths", str(path)]
    with subprocess.Popen(
        [sys.executable, "-c", LOADING, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "loading\n"
        process.send_signal(sent)
        stdout, stderr = process.communicate(timeout=300)
    assert (process.returncode, stdout, stderr) == (5, "", "Interrupted before anything was found.\n")


LEFT = """
import random, sys, threading, time, types
from ortools.sat.python import cp_model
from milpplan.cli import app, main
from milpplan.optimize.milp.solution import run_interruptibly

model, draw = cp_model.CpModel(), random.Random(1)
numbers = [model.new_int_var(0, 1000, "") for _ in range(400)]
for _ in range(300):
    chosen = draw.sample(numbers, 40)
    model.add(sum(draw.randint(1, 999) * one for one in chosen) >= draw.randint(100_000, 2_000_000))
model.minimize(sum(draw.randint(1, 99) * one for one in numbers))
solver = cp_model.CpSolver()
solver.parameters.max_time_in_seconds, solver.parameters.num_workers = 1.0, 1

def run():
    try:
        run_interruptibly(lambda: solver.solve(model), lambda: None, grace_s=0.0, cancelled=lambda: True)
    except KeyboardInterrupt:
        print("the best plan so far", threading.active_count())
    sys.exit(4)

class Winding:
    # Python takes as long as the solver to wind up.
    def __del__(self, sleep=time.sleep):
        sleep(2.0)

sys.modules["winding"] = types.ModuleType("winding")
sys.modules["winding"].up = Winding()
app.app = run
main()
"""


def test_a_solver_that_cannot_be_stopped_does_not_abort_the_program() -> None:
    """One that comes back from C++ while Python winds up would: the result is out, so the program leaves."""
    ended = subprocess.run([sys.executable, "-c", LEFT], capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stdout, ended.stderr) == (4, "the best plan so far 2\n", "")


INSIDE_NUMPY = """
import signal, sys
import numpy as np
from numpy._core import _internal
from milpplan.cli import interrupts

def promoted(one, other, promote=_internal._promote_fields):
    signal.raise_signal(signal.SIGINT)
    return promote(one, other)

promoted.__globals__["__name__"] = "numpy._core._internal"
_internal._promote_fields = promoted
ours = {"__name__": "ours", "np": np}
exec("def rows():\\n for _ in range(3): np.unique(np.array([[1, 2], [3, 4], [1, 2]]), axis=0)", ours)

interrupts.leave_at_once()
try:
    with interrupts.raised():
        ours["rows"]()
except KeyboardInterrupt:
    print("heard", sys.gettrace())
"""


def test_an_interrupt_inside_numpy_is_not_replaced_by_an_error() -> None:
    """NumPy's C code makes a TypeError of what is raised in its Python code: Ctrl-C comes through nevertheless."""
    ended = subprocess.run([sys.executable, "-c", INSIDE_NUMPY], capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "heard None\n", "")
