"""The answer as one program on the command line: ``solve --method program``, ``program`` and ``certify``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.amounts import first
from tests.cli.test_cli import SOLVE, refused, run

WORDS = SOLVE[1:]


@pytest.mark.parametrize("backend", first(1, ("cpsat", "cbc", "highs")))
def test_solve_compares_with_the_program(backend: str) -> None:
    """The line says which solver proved the whole program, and that its optimum is the search's answer."""
    result = run(*SOLVE, "--method", "program", "--backend", backend)
    assert result.exit_code == 0, result.output
    line = " ".join(result.stdout[result.stdout.index("program   ") :].split())
    assert f"; {backend} in " in line
    assert line.endswith("equal to the search's answer")


def test_json_stays_one_document() -> None:
    """With --json the line is talk, and the document that of the search."""
    result = run(*SOLVE, "--method", "program", "--json")
    assert json.loads(result.stdout)["status"] == "optimal"
    assert "equal to the search's answer" in result.stderr


@pytest.mark.parametrize("ending", [".mps", ".lp"])
def test_program_is_written(ending: str, tmp_path: Path) -> None:
    """The file has rows and variables with names that a person can read, and a list of changed names."""
    path = tmp_path / f"plan{ending}"
    result = run("program", *WORDS, "-o", str(path))
    assert result.exit_code == 0, result.output
    text = path.read_text()
    assert "one_layout" in text
    assert "tp_8" in text
    names = json.loads((tmp_path / f"plan{ending}.names.json").read_text())
    assert names["variables"]["tp_8"] == "[tp=8]"
    assert "equal to the search's answer" in " ".join(result.stdout.split())


def test_certify_states_the_result_as_a_program(tmp_path: Path) -> None:
    """A second proof may be stated whole: its optimum is a check like the others, and its file is written."""
    result, path = tmp_path / "result.json", tmp_path / "plan.mps"
    assert run(*SOLVE, "--out", str(result)).exit_code == 0
    answer = run("certify", str(result), "--program", str(path))
    assert answer.exit_code == 0, answer.output
    assert "the answer as one integer program             ok" in answer.stdout
    assert "one_layout" in path.read_text()
    assert ".mps or .lp" in refused(run("certify", str(result), "--program", str(tmp_path / "plan")))


def test_full_program_is_written(tmp_path: Path) -> None:
    """Small problems have a form that rests on no bound; larger ones are refused by their number of layouts."""
    path = tmp_path / "plan.mps"
    words = [
        "llama3-8b",
        "dgx-h100",
        "--gpus",
        "8",
        "--global-batch",
        "8",
        "--fix",
        "tp=8",
        "--fix",
        "zero_stage=0",
    ]
    result = run("program", *words, "--full", "-o", str(path))
    assert result.exit_code == 0, result.output
    assert "one_item_per_stage" in path.read_text()
    assert "legal layouts" in refused(run("program", *WORDS[:6], "--full", "-o", str(path)))


def test_mistakes_are_refused(tmp_path: Path) -> None:
    """No file, another ending, another method, several clusters, another objective: refused before any search."""
    assert "--out is missing" in refused(run("program", *WORDS))
    assert ".mps or .lp" in refused(run("program", *WORDS, "-o", str(tmp_path / "plan.txt")))
    assert "Did you mean program" in refused(run(*SOLVE, "--method", "programme"))
    words = ["llama3-8b", "dgx-h100,dgx-b200", "--gpus", "8", "--global-batch", "8", "--method", "program"]
    assert "several kinds of hardware" in refused(run("solve", *words))


def test_nothing_is_written_without_a_plan(tmp_path: Path) -> None:
    """An infeasible problem has no program."""
    path = tmp_path / "plan.mps"
    words = ["llama3-70b", "dgx-h100", "--gpus", "8", "--global-batch", "8", "--space", "uniform", "-o", str(path)]
    result = run("program", *words)
    assert result.exit_code == 3
    assert "no program" in result.stderr
    assert not path.exists()
