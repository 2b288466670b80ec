"""``milpplan init``, ``solve --job`` and what a shell completes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from milpplan.cli.app import app
from tests.cli.test_cli import refused, run


def initialised(path: Path, answers: list[str], *words: str) -> Result:
    """``init`` with these answers."""
    return CliRunner().invoke(app, ["init", str(path), *words], input="\n".join(answers) + "\n")


def test_answers_become_a_solve(tmp_path: Path) -> None:
    """A wrong name is asked again; empty answers take the defaults; the command line goes before the file."""
    path = tmp_path / "job.toml"
    asked = initialised(path, ["llama3-8", "llama3-8b", "dgx-h100", "16", "0", "64", "", "", "1e12", "2.5"])
    assert asked.exit_code == 0, asked.output
    assert "Did you mean llama3-8b" in asked.stderr
    first = json.loads(run("solve", "--job", str(path), "--space", "uniform", "--json").stdout)
    assert first["problem"]["model"]["name"] == "llama3-8b"
    assert first["problem"]["job"]["sequence_length"] == 8192
    assert first["run"]["price_per_gpu_hour"] == 2.5
    second = run("solve", "llama2-7b", "--job", str(path), "--space", "uniform", "--gpus", "8", "--json")
    problem = json.loads(second.stdout)["problem"]
    assert (problem["model"]["name"], problem["job"]["num_gpus"]) == ("llama2-7b", 8)


def test_nothing_is_replaced_and_nothing_half_written(tmp_path: Path) -> None:
    """A file that exists stays without --force; answers that end too early write none."""
    path = tmp_path / "job.toml"
    ended = initialised(path, ["llama3-8b"])
    assert ended.exit_code == 2
    assert not path.exists()
    path.write_text("mine")
    kept = initialised(path, ["llama3-8b", "dgx-h100", "", "", "", "", ""])
    assert kept.exit_code == 2
    assert path.read_text() == "mine"
    assert initialised(path, ["llama3-8b", "dgx-h100", "", "", "", "", ""], "--force").exit_code == 0
    assert 'gpus = "64"' in path.read_text()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('gpu = "16"', "no argument or option"),
        ('json = "yes"\nmodle = 1', "no argument or option"),
        ("gpus = [16]", "Expected one value"),
        ('fix = "tp=8"', "Expected a list"),
        ("[gpus]\nnumber = 16", "Expected one value"),
        ("gpus = ", "TOML"),
        ('fix = ["tp=0"]\nmodel = "llama3-8b"\nhardware = "dgx-h100"\ngpus = 8\nglobal-batch = 8', "tp"),
    ],
)
def test_files_that_make_no_sense_are_refused(tmp_path: Path, text: str, told: str) -> None:
    """Unknown names, wrong shapes, broken syntax and values that no option takes."""
    path = tmp_path / "job.toml"
    path.write_text(text)
    assert told in refused(run("solve", "--job", str(path)))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("milpplan solve llama3-4", "llama3-405b"),
        ("milpplan solve llama3-8b dgx-h100,gb2", "dgx-h100,gb200-nvl72"),
    ],
)
def test_a_shell_completes_names(words: str, expected: str) -> None:
    """What bash asks for after Tab."""
    asked = {"_MILPPLAN_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    code = "import sys, milpplan.cli; sys.argv = ['milpplan']; milpplan.cli.main()"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | asked, capture_output=True, text=True, check=False
    )
    assert expected in done.stdout.split()
