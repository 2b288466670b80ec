"""What all commands do beside their work: examples in the help; inputs stay, outputs are checked first."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import milpplan
from milpplan import Layout
from milpplan.cli.app import COMMANDS as LISTED
from milpplan.cli.app import app, load_command
from milpplan.cli.command import wrapped
from milpplan.reports.documents import PlanFile, document_text, plan_document
from tests.amounts import long_but
from tests.simulation.cases import even_plan
from tests.small import small_problem

COMMANDS = {name: load_command(name) for names in LISTED.values() for name in names}
LAUNCH = ("--from", "megatron", "--hardware", "dgx-h100")
SOLVE = ("solve", "llama3-8b", "dgx-h100", "--gpus", "8", "--global-batch", "8", "--space", "uniform")
OVER = (
    ("export", "in.json", "--to", "megatron", "-o", "in.json"),
    ("import", "in.json", *LAUNCH, "-o", "./in.json"),
    ("report", "in.json", "-o", "in.json", "--time-limit", "0"),
    ("report", "in.json", "--trace", "in.json"),
    ("traffic", "in.json", "--out", "in.json"),
    ("traffic", "in.json", "--html", "in.json"),
    ("switch", "other.json", "in.json", "--out", "in.json"),
    ("gap", "other.json", "in.json", "--out", "in.json"),
    ("gap", "in.json", "--report", "in.json"),
    ("calibrate", "in.json", "--hardware", "dgx-h100", "--out", "in.json"),
    ("profile", "--hardware", "dgx-h100", "--from", "in.json", "--out", "in.json"),
    ("sweep", "in.json", "--out", "in.json"),
    ("solve", "--job", "job.toml", "--out", "job.toml"),
    ("solve", "in.json", "dgx-h100", "--gpus", "8", "--global-batch", "8", "--out", "in.json"),
    ("min-gpus", "llama3-8b", "in.json", "--global-batch", "8", "--out", "in.json"),
)
WRITERS = (
    ("export", "in.json", "--to", "megatron", "-o"),
    ("import", "in.json", *LAUNCH, "-o"),
    ("report", "in.json", "-o"),
    ("report", "in.json", "--trace"),
    ("traffic", "in.json", "--out"),
    ("traffic", "in.json", "--html"),
    ("switch", "in.json", "other.json", "--out"),
    ("gap", "in.json", "--out"),
    ("gap", "in.json", "--report"),
    ("calibrate", "in.json", "--hardware", "dgx-h100", "--out"),
    ("profile", "--hardware", "dgx-h100", "--from", "in.json", "--out"),
    ("profile", "--hardware", "dgx-h100", "--out", "new.toml", "--raw"),
    (*SOLVE, "--out"),
    ("min-gpus", "llama3-8b", "dgx-h100", "--global-batch", "8", "--out"),
    ("init", "--force"),
)


def run(*words: str) -> Result:
    """The program, in this process."""
    return CliRunner().invoke(app, list(words))


def refused(done: Result) -> str:
    """The message of a refusal in three parts."""
    assert done.exit_code == 2, done.output
    assert len(done.stderr.splitlines()) == 3, done.stderr
    return done.stderr


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with two files of a plan and a job."""
    monkeypatch.chdir(tmp_path)
    for name in ("in.json", "other.json"):
        (tmp_path / name).write_text(plan_text())
    (tmp_path / "job.toml").write_text('model = "llama3-8b"\nhardware = "dgx-h100"\n')
    return tmp_path


@cache
def plan_text() -> str:
    """A plan file."""
    problem = small_problem()
    plan = even_plan(problem, Layout(dp=4, global_batch_size=8, zero_stage=1))
    return document_text(PlanFile(plan=plan_document(plan), problem=problem))


@pytest.mark.parametrize("name", COMMANDS)
def test_the_program_lists_the_first_sentence_of_every_help(name: str) -> None:
    """The table, which ``milpplan --help`` prints without importing the command, says what the command says."""
    line = next(names[name] for names in LISTED.values() if name in names)
    assert COMMANDS[name].get_short_help_str(10_000) == line


def test_the_program_imports_only_the_command_that_runs() -> None:
    """Its help and the completion of names import none; another command's module stays away."""
    code = (
        "import sys; from typer.testing import CliRunner; from milpplan.cli.app import app\n"
        "CliRunner().invoke(app, {words})\n"
        "print(*sorted(name for name in sys.modules if name.startswith('milpplan.cli.commands.')))"
    )
    for words, expected in ((["--help"], ""), (["list", "models"], "milpplan.cli.commands.list_names")):
        done = subprocess.run([sys.executable, "-c", code.format(words=words)], capture_output=True, text=True)
        assert done.stdout.strip() == expected, done.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", list(COMMANDS)),
        ("ex", ["explain", "export"]),
        ("solve --ta", ["--target", "--target-version"]),
        ("solve llama3-8", ["llama3-8b"]),
    ],
)
def test_names_are_completed(words: str, expected: list[str]) -> None:
    """Commands, their options, and models by name."""
    asked = {"_MILPPLAN_COMPLETE": "complete_bash", "COMP_WORDS": f"milpplan {words}"}
    asked["COMP_CWORD"] = str(len(words.split()) or 1)
    done = CliRunner().invoke(app, [], prog_name="milpplan", env=asked)
    assert done.stdout.split() == expected


def test_every_command_has_examples() -> None:
    """No command is without; its help shows each as it is."""
    for name, command in COMMANDS.items():
        assert command.examples
        shown = run(name, "--help").stdout
        joined = " ".join(shown.replace("\\\n", " ").split())
        for meaning, words in command.examples:
            assert f"# {meaning}" in shown
            assert f"milpplan {name} {words}".rstrip() in joined


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_examples_are_words_that_the_command_takes(name: str) -> None:
    """Its own parser reads every argument, option and number of them."""
    for _, words in COMMANDS[name].examples:
        context = COMMANDS[name].make_context(name, shlex.split(words.partition(" > ")[0]))
        assert not context.args


def test_examples_fit_narrow_terminals() -> None:
    """At 60 columns lines are continued as a shell reads it, and options stay beside their values."""
    for name, command in COMMANDS.items():
        for _, words in command.examples:
            lines = wrapped(f"milpplan {name} {words}".rstrip(), 58)
            assert max(map(len, lines)) <= 58
            pasted = "\n".join(lines).replace("\\\n", "")
            assert shlex.split(pasted) == shlex.split(f"milpplan {name} {words}")
            assert not any(line.split()[-2].startswith("-") for line in lines[:-1])


@pytest.mark.parametrize("words", OVER, ids=lambda words: f"{words[0]} {words[-2]}")
def test_no_command_writes_over_what_it_reads(words: tuple[str, ...], folder: Path) -> None:
    """An output that is one of the inputs is refused, also under another name for it, and the input stays."""
    before = {path: path.read_bytes() for path in folder.iterdir()}
    assert "it is read" in refused(run(*words))
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_a_better_plan_may_replace_its_start(folder: Path) -> None:
    """``--warm-start`` and ``--out`` may be one file: the result is of the same kind and no worse."""
    steps = []
    for more in ((), ("--warm-start", "own.json")):
        assert run(*SOLVE, *more, "--out", "own.json").exit_code == 0
        steps.append(json.loads((folder / "own.json").read_text())["step_time_s"])
    assert steps[1] <= steps[0]


@pytest.mark.parametrize(
    "place", long_but(("none/file.json",), ("none/file.json", "folder.json", "in.json/file.json"))
)
@pytest.mark.parametrize("words", WRITERS, ids=lambda words: f"{words[0]} {words[-1]}")
def test_nothing_is_computed_for_a_place_that_cannot_be_written(
    words: tuple[str, ...], place: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory that is not there, a directory in the file's place, a file in the directory's place: refused in
    three parts before any work, and nothing appears."""
    (folder / "folder.json").mkdir()
    if words[0] == "export" and place == "folder.json":
        place = "none/folder"
    before = sorted(folder.rglob("*"))
    message = refused(run(*words, place))
    assert "cannot be written" in message or "cannot be made" in message
    assert sorted(folder.rglob("*")) == before


def test_directories_of_results_are_checked_first(folder: Path) -> None:
    """Figures and studies go into directories: a file in its place is refused before any run is simulated."""
    assert "cannot be made" in refused(run("validate", "--plot", "in.json"))
    (folder / "study.toml").write_text(Path(milpplan.__file__).parents[1].joinpath(
        "examples/studies/llama3-70b-which-gpu.toml").read_text())  # fmt: skip
    assert "cannot be made" in refused(run("sweep", "study.toml", "--out", "in.json"))
    assert "leave the option out to print" in refused(run("export", "in.json", "--to", "megatron", "-o", "-"))
