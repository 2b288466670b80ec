"""The command line in a process of its own: imports, pipes, locales, signals."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import milpplan
from milpplan.reports.document import ResultDocument

PROGRAM = [sys.executable, "-c", "from milpplan.cli import main; main()"]
SOLVE = ["solve", "llama3-8b", "dgx-h100", "--gpus", "16", "--global-batch", "32", "--space", "uniform"]


def program(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """The program in a process of its own."""
    return subprocess.run([*PROGRAM, *words], capture_output=True, text=True, timeout=60, **options)


def test_the_version_and_quick_answers_need_no_solver() -> None:
    """--version prints the version; neither --help nor list imports OR-tools."""
    assert program("--version").stdout == f"milpplan {milpplan.__version__}\n"
    script = (
        "import sys\nfrom milpplan.cli import main\ntry:\n    main()\nexcept SystemExit:\n    pass\n"
        "print([name for name in ('ortools', 'pulp', 'scipy', 'pandas') if name in sys.modules])"
    )
    for words in (["--help"], ["list", "models"]):
        ended = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, timeout=60)
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


def test_output_survives_a_terminal_that_knows_only_ascii() -> None:
    """With an ASCII locale the tables are drawn in ASCII instead of failing."""
    ended = program(*SOLVE, env={"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"})
    assert ended.returncode == 0
    assert ended.stdout.isascii()


INTERRUPTED = """
import sys, time
from contextlib import contextmanager
from milpplan.cli import main, solving

@contextmanager
def waiting(objective):
    def callback(progress):
        if progress.incumbent is not None:
            print("ready", file=sys.stderr, flush=True)
            time.sleep(30)
    yield callback

solving.shown_progress = waiting
main()
"""


def test_ctrl_c_prints_the_best_plan_so_far(tmp_path: Path) -> None:
    """SIGINT in the middle of the search: exit code 4, the plan with its proved gap, the file written."""
    out = tmp_path / "plan.json"
    words = [*SOLVE, "--gap", "0", "--json", "--out", str(out)]
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=20)
    assert process.returncode == 4
    assert "Traceback" not in stderr
    document = ResultDocument.model_validate_json(stdout, strict=True)
    assert document.status == "feasible"
    assert document.plan is not None
    assert document.gap is not None
    assert 0 < document.gap < 1
    assert out.read_text() == stdout
