"""The first screen of ``solve``, its sections of help, and ``solve-lengths``."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from milpplan.cli import outcome
from milpplan.cli.app import COMMANDS, app, load_command
from milpplan.cli.command import MOVED
from milpplan.optimize import PlanResult, SolveOptions
from milpplan.optimize import solve as optimizer
from milpplan.optimize.solve import solve
from milpplan.problem import Problem
from tests.amounts import long_but
from tests.cli.test_cli import refused, run

LINES = 25
"""Maximum of the first screen."""
H100 = "dgx-h100 --gpus 16 --global-batch 32 --space uniform"
FREE = "llama3-8b dgx-h100 --gpus 16 --global-batch 16 --fix pp=4,tp=2"
SOLVES = {
    "dense": f"llama3-8b {H100}",
    "pipeline": f"llama3-8b {H100} --fix tp=2,pp=4,vpp=2",
    "a launcher and a price": f"llama3-8b {H100} --target megatron --tokens 1e12 --price-per-gpu-hour 2.5",
    "experts": "mixtral-8x7b dgx-h100 --gpus 64 --global-batch 128 --space uniform",
    "two node types": "llama2-7b dgx-a100-80:8+dgx-h100:8 --global-batch 32 --space uniform --fix tp=4",
    "forward only": f"llama3-8b {H100} --inference",
    "on the host": "llama2-7b rtx4090 --gpus 2 --global-batch 8 --seq-len 2048 --space uniform --allow offload",
    "two kinds of hardware": "llama3-8b dgx-h100,dgx-a100-80 --gpus 8 --global-batch 16 --space uniform",
    "proved to the last nanosecond": f"{FREE} --gap 0",
    "not proved": FREE,
}
OFTEN = ("dense", "pipeline", "two node types", "two kinds of hardware", "not proved")
"""What is tried without the long tests."""
FIRST = ("--gpus", "--global-batch", "--seq-len", "--precision", "--target", "--space", "--fix", "--time-limit")
"""Options that people need first, before ``--out`` and ``--verbose``."""


@cache
def dense(*more: str) -> Result:
    """Solve the dense model, once with each choice of other options."""
    return run("solve", *shlex.split(SOLVES["dense"]), *more)


def timeless(value: Any) -> Any:
    """A document without what a clock says; the certificate is signed with it."""
    if isinstance(value, dict):
        clocks = ("wall_time_s", "cpu_time_s", "log", "certificate")
        return {name: timeless(part) for name, part in value.items() if name not in clocks}
    return [timeless(part) for part in value] if isinstance(value, list) else value


def unproved(problem: Problem, options: SolveOptions) -> PlanResult:
    """The best plan as if the search had stopped early, whatever the speed of this machine."""
    found = solve(problem, options)
    bound_s = 0.9876 * (found.lower_bound_s or 0.0)
    return replace(found, status="feasible", gap=0.0124, lower_bound_s=bound_s, objective_bound=bound_s)


@pytest.mark.parametrize("name", long_but(OFTEN, SOLVES))
def test_the_first_screen_fits_a_terminal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 25 lines of 80 columns; whatever is called optimal is so for a cost model and a space."""
    monkeypatch.setattr(outcome, "WIDTH", 80)
    if name == "not proved":
        monkeypatch.setattr(optimizer, "solve", unproved)
    done = run("solve", *shlex.split(SOLVES[name]))
    assert done.exit_code in (0, 4), done.output
    lines = done.stdout.splitlines()
    assert len(lines) <= LINES, done.stdout
    assert max(map(len, lines)) <= 80
    words = " ".join(done.stdout.split())
    assert "cost model milpplan" in words
    assert "space " in words
    if "kinds" not in name:
        heads = [line[:10].strip() for line in lines if not line.startswith(" ")]
        expected = ["plan", "in words", "step", "memory", "proof", "doubt", "next"]
        assert [head for head in heads if head in expected] == expected
        assert ("proof optimal within" in words) == (done.exit_code == 0)


@pytest.mark.long
def test_what_the_screen_says_next_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its commands run as they stand once the plan is written."""
    monkeypatch.chdir(tmp_path)
    done = run("solve", *shlex.split(SOLVES["dense"]), "--target", "megatron", "--out", "my plan.json")
    commands = re.findall(r"^ +milpplan (.*)$|^next +milpplan (.*)$", done.stdout, re.MULTILINE)
    words = [shlex.split(first or second) for first, second in commands]
    assert [one[0] for one in words] == ["export", "report"]
    for one in words:
        assert run(*one, *(("--time-limit", "1") if one[0] == "report" else ())).exit_code == 0
    assert Path("report.html").is_file()
    assert list(Path("launch").iterdir())


def test_without_a_launcher_the_screen_says_how_to_get_a_plan_for_one() -> None:
    """A plan of the whole space may be none that a launcher can run: the screen names no export of it."""
    done = run("solve", *shlex.split(SOLVES["on the host"]))
    assert "--target megatron (or another launcher)" in " ".join(done.stdout.split())
    assert "milpplan export" not in done.stdout


@pytest.mark.long
def test_verbose_adds_and_changes_nothing() -> None:
    """The first screen, then stages, time, memory, evidence and the search; the document is the same."""
    short, long = (dense(*more).stdout for more in ((), ("--verbose",)))
    above = short.partition("next ")[0]
    assert long.startswith(above)
    for words in ("Stages", "Time (mean of the stages)", "Memory (stage 0", "evidence ", "layouts ", "solver "):
        assert words in long
        assert words not in short
    documents = [json.loads(dense("--json", *more).stdout) for more in ((), ("--verbose",))]
    assert timeless(documents[0]) == timeless(documents[1])


def test_progress_goes_to_a_file_on_request() -> None:
    """Lines on stderr that start with a plan before any bound; nothing without the option, and the same answer."""
    silent, told = dense(), dense("--progress")
    assert silent.stderr == ""
    assert told.stdout == silent.stdout
    lines = told.stderr.splitlines()
    assert re.fullmatch(r" +[0-9.]+ s  best [0-9.]+ m?s  bound -  gap -  open layouts -", lines[0])
    assert re.search(r"best [0-9.]+ m?s  bound [0-9.]+ m?s  gap [0-9.e-]+  open layouts 0$", lines[-1])


def test_help_lists_what_people_need_first() -> None:
    """The first section of options has the ten; the options of lengths have moved to their own command."""
    text = CliRunner().invoke(app, ["solve", "--help"], terminal_width=100).stdout
    first = text.partition("\nOptions:\n")[2].partition("\n\n")[0]
    assert re.findall(r"^  (--[a-z-]+)", first, re.MULTILINE) == [*FIRST, "--out", "--verbose"]
    for section in ("Model and job", "Plans to choose from", "Objective, deadline and cost", "Search and proof"):
        assert f"\n{section}:\n" in text
    assert "--lengths" not in text
    assert "solve-lengths" in text
    several = CliRunner().invoke(app, ["solve-lengths", "--help"], terminal_width=100).stdout
    moved = [one for one in load_command("solve").params if getattr(one, "rich_help_panel", "") == MOVED["solve"]]
    assert len(moved) == 13
    assert all(name in several for one in moved for name in (*one.opts, *one.secondary_opts))


def test_the_help_of_the_program_has_sections() -> None:
    """Every command stands in one of them, by its name."""
    text = run("--help").stdout
    for section, names in COMMANDS.items():
        part = text.partition(f"\n{section}:\n")[2].partition("\n\n")[0]
        assert [line.split()[0] for line in part.splitlines() if line[2:3].strip()] == list(names)


LENGTHS = ("llama3-8b", "dgx-h100", "--gpus", "8", "--fix", "tp=2,pp=1", "--gap", "0.1")


@pytest.mark.long
def test_lengths_have_a_command_of_their_own(tmp_path: Path) -> None:
    """It answers as ``solve --lengths`` does, which goes on working and names the new command."""
    path = tmp_path / "lengths.txt"
    path.write_text("300\n700\n1500\n" * 8 + "9000\n", encoding="utf-8")
    words = (*LENGTHS, "--lengths", str(path), "--max-strategies", "1", "--turns-only", "--json")
    new, old = run("solve-lengths", *words), run("solve", *words)
    assert timeless(json.loads(new.stdout)) == timeless(json.loads(old.stdout))
    assert new.stderr == ""
    assert old.stderr.splitlines() == [
        "`milpplan solve --lengths` is now `milpplan solve-lengths`, with the same options."
    ]
    assert "Expected --lengths FILE" in refused(run("solve-lengths", *LENGTHS))
    assert run("solve-lengths", *words, "--target", "megatron").exit_code == 2
