"""``milpplan switch``: results, files and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from milpplan import Links, Problem, plan_switch
from milpplan.cli.app import app
from milpplan.problem import Job
from milpplan.reports.documents import PlanFile, document_text, plan_document
from tests.cli.test_fuzz import FUZZ, changed, ends_well, plan_tree
from tests.small import small_problem
from tests.switching.cases import plan_of


def run(*words: object) -> Result:
    """The program, in this process."""
    return CliRunner().invoke(app, [str(word) for word in words])


def write(path: Path, problem: Problem, **degrees: Any) -> Path:
    """A plan file."""
    batch = problem.job.global_batch_values[0]
    plan = plan_of(problem.model, None, **{"global_batch_size": batch, **degrees})
    path.write_text(document_text(PlanFile(plan=plan_document(plan), problem=problem)))
    return path


@pytest.fixture
def paths(tmp_path: Path) -> tuple[Path, Path]:
    """Two plans of the small problem."""
    problem = small_problem()
    before = write(tmp_path / "from.json", problem, tp=2, pp=2)
    return before, write(tmp_path / "to.json", problem, dp=4, zero_stage=1)


def test_json_is_the_library_and_the_file_the_same(paths: tuple[Path, Path], tmp_path: Path) -> None:
    """``--json`` prints what ``--out`` writes: for each state what ``plan_switch`` says."""
    out = tmp_path / "switch.json"
    result = run("switch", *paths, "--json", "--out", out, "--senders", "exact")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == out.read_text()
    document = json.loads(result.stdout)
    problem = small_problem()
    plans = plan_of(problem.model, None, tp=2, pp=2), plan_of(problem.model, None, dp=4, zero_stage=1)
    links = Links.of(problem.hardware, 4)
    assert list(document["switches"]) == ["parameters", "gradients", "optimizer"]
    for what, found in document["switches"].items():
        expected = plan_switch(problem.model, *plans, links, what, "exact")
        assert found == expected.to_dict()
        assert sum(found["messages"]["bytes"]) == found["bytes"] == expected.total_bytes
    assert document["from"]["tp"] == 2
    assert document["to"]["dp"] == 4


def test_tables(paths: tuple[Path, Path]) -> None:
    """What moves, how long, and memory, for people."""
    result = run("switch", *paths)
    assert result.exit_code == 0, result.stderr
    for words in ("tp=2 pp=2 zero=0 to dp=4 zero=1", "What moves", "How long", "Fullest GPU", "optimizer states"):
        assert words in result.stdout


def test_plain_bandwidths(paths: tuple[Path, Path]) -> None:
    """Rates of the option stand for those of the hardware, without latencies: links are busy for bytes / rate."""
    result = run("switch", *paths, "--json", "--bandwidths", "1e9,1e12")
    found = json.loads(result.stdout)["switches"]["parameters"]
    assert found["time_s"] == found["inside_s"] == pytest.approx(max(map(max, found["received_bytes"])) / 1e9)


def test_forwards_alone_have_parameters_only(tmp_path: Path) -> None:
    """Plans of inference have no gradients and no optimizer states to move."""
    problem = small_problem(kind="inference")
    found = [
        write(tmp_path / f"{name}.json", problem, schedule="gpipe", **degrees)
        for name, degrees in (("a", {"tp": 4}), ("b", {"dp": 4}))
    ]
    result = run("switch", *found, "--json")
    assert result.exit_code == 0, result.stderr
    assert list(json.loads(result.stdout)["switches"]) == ["parameters"]


def test_plans_that_do_not_belong_together_are_refused(paths: tuple[Path, Path], tmp_path: Path) -> None:
    """Other models, other numbers of GPUs, other gradients, unknown senders: a message and exit code 2."""
    problem = small_problem()
    larger = write(tmp_path / "larger.json", small_problem(num_gpus=8), dp=8)
    other = problem.model_copy(update={"model": problem.model.model_copy(update={"vocab_size": 64000})})
    half = problem.model_copy(
        update={"job": Job.model_validate(problem.job.model_dump() | {"grad_dtype": "bf16"})}
    )
    cases = (
        ((paths[0], larger), "4 and 8 GPUs"),
        ((paths[0], write(tmp_path / "other.json", other, dp=4)), "different model"),
        ((paths[0], write(tmp_path / "half.json", half, dp=4)), "job.grad_dtype"),
        ((paths[0], tmp_path / "none.json"), "none.json"),
        ((*paths, "--senders", "fast"), "nearest, exact, relay"),
        ((*paths, "--bandwidths", "200e9"), "not two numbers"),
        ((*paths, "--bandwidths", "200e9,nan"), "between_bytes_per_s"),
    )
    for words, message in cases:
        result = run("switch", *words)
        assert result.exit_code == 2
        assert message in result.stderr
        assert result.stdout == ""


@given(st.data())
@settings(FUZZ, max_examples=30)
def test_broken_plan_files(tmp_path: Path, data: st.DataObject) -> None:
    """Whatever was done to a plan file, the command ends with a message."""
    files = tmp_path / "broken.json", tmp_path / "whole.json"
    files[0].write_text(data.draw(st.composite(changed)(plan_tree())))
    files[1].write_text(json.dumps(plan_tree()))
    first, second = (data.draw(st.sampled_from(files)) for _ in range(2))
    ends_well("switch", str(first), str(second), "--json")
