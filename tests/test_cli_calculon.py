"""``--calculon`` on the command line: both commands, what it refuses, and files that someone broke."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from milpplan.cli.app import app
from milpplan.presets.calculon import calculon_run, read_calculon
from milpplan.reports.document import ResultDocument, SimulationDocument
from tests.test_cli_fuzz import FUZZ, broken, ends_well

DATA = Path(__file__).parent / "data" / "calculon"
PATHS = tuple(DATA / f"{name}.json" for name in ("model", "execution", "system"))
FILES = ["--calculon", *map(str, PATHS)]


def test_simulate_takes_the_three_files() -> None:
    """One document, with the same step as the library's; what differs is told on stderr."""
    from milpplan import simulate

    result = CliRunner().invoke(app, ["simulate", *FILES, "--json"])
    assert result.exit_code == 0, result.stderr
    document = SimulationDocument.model_validate_json(result.stdout)
    assert document.step_time_s == simulate(*calculon_run(read_calculon(*PATHS))).step_time_s
    assert "ZeRO stage 1" in result.stderr


def test_solve_proves_the_best_plan_of_the_files_system() -> None:
    """Processors and batch are the execution's; the proved plan is no slower than the execution itself."""
    from milpplan import simulate

    words = ["solve", *FILES, "--space", "uniform", "--gap", "1e-3", "--json"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.stderr
    document = ResultDocument.model_validate_json(result.stdout)
    assert document.problem.job.num_gpus == 32
    assert document.problem.job.global_batch_size == 64
    assert document.step_time_s is not None
    assert document.step_time_s <= simulate(*calculon_run(read_calculon(*PATHS))).step_time_s


def test_processors_and_batch_can_be_given() -> None:
    """--gpus and --global-batch take the place of the file's; --schedule and --fix narrow the space as ever."""
    words = ["solve", *FILES, "--space", "uniform", "--gpus", "8", "--global-batch", "16", "--json"]
    words += ["--schedule", "zb-h1,1f1b"]
    document = ResultDocument.model_validate_json(CliRunner().invoke(app, [*words, "--fix", "tp=8"]).stdout)
    assert (document.problem.job.num_gpus, document.problem.job.global_batch_size) == (8, 16)
    assert document.problem.space.schedule == ("1f1b", "zb-h1")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["simulate"], "PLAN.json is missing"),
        (["simulate", "plan.json", *FILES], "together with a plan file"),
        (["solve", "llama3-8b", *FILES], "together with MODEL"),
        (["solve", *FILES, "--seq-len", "8"], "together with --seq-len"),
        (["solve", *FILES, "--precision", "fp8"], "together with --precision"),
        (["solve", "llama3-8b", "dgx-h100"], "--gpus and --global-batch are missing"),
        (["simulate", "--calculon", "a.json", "b.json", "c.json"], "a.json does not exist"),
        (["simulate", "--calculon", *map(str, reversed(PATHS))], "system.json"),
    ],
)
def test_refusals(words: list[str], expected: str) -> None:
    """Exit code 2, and a message that names what is wrong."""
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert expected in result.stderr.replace("\n", " ")


@settings(FUZZ, max_examples=40)
@given(st.data())
def test_broken_files_never_crash(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Whatever is done to one of the files, the command ends with a message."""
    which = data.draw(st.integers(0, 2))
    path = tmp_path_factory.mktemp("fuzz") / "broken.json"
    path.write_text(data.draw(st.composite(broken)(json.loads(PATHS[which].read_text()))))
    words = [str(path if index == which else good) for index, good in enumerate(PATHS)]
    ends_well("simulate", "--calculon", *words)
