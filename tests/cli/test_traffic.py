"""``milpplan traffic`` and ``--allow placement``: results, files and refusals."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from milpplan import Layout, Problem, traffic
from milpplan.cli import arguments
from milpplan.cli.app import app
from milpplan.problem import RANK_ORDERS
from milpplan.reports.documents import PlanFile, document_text, plan_document
from tests.simulation.cases import even_plan
from tests.small import small_problem

JOB = {
    "gpus": "16",
    "global_batch": "32",
    "seq_len": None,
    "precision": "bf16",
    "attention": "flash",
    "grad_dtype": "fp32",
    "objective": "step_time_per_token",
    "deadline_hours": None,
    "tokens": None,
    "kind": "training",
}


def run(*words: str) -> Result:
    """The program, in this process."""
    return CliRunner().invoke(app, list(words))


def layout_of(problem: Problem) -> Layout:
    """All GPUs as replicas."""
    gpus, batch = problem.job.num_gpus_values[0], problem.job.global_batch_values[0]
    return Layout(dp=gpus, global_batch_size=batch, zero_stage=1)


@pytest.fixture
def plan_path(tmp_path: Path) -> Path:
    """A plan of the small problem."""
    problem = small_problem()
    plan = even_plan(problem, layout_of(problem))
    path = tmp_path / "plan.json"
    path.write_text(document_text(PlanFile(plan=plan_document(plan), problem=problem)))
    return path


def test_json_is_one_document_and_the_file_the_same(plan_path: Path, tmp_path: Path) -> None:
    """``--json`` prints what ``--out`` writes, and both are the library's report."""
    out = tmp_path / "traffic.json"
    result = run("traffic", str(plan_path), "--json", "--out", str(out), "--algorithm", "tree")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == out.read_text()
    problem = small_problem()
    expected = traffic(problem, even_plan(problem, layout_of(problem)), "tree")
    assert json.loads(result.stdout)["wire_bytes"] == expected.wire_bytes


def test_tables_and_the_page(plan_path: Path, tmp_path: Path) -> None:
    """Tables go to standard output, the page to its file."""
    page = tmp_path / "traffic.html"
    result = run("traffic", str(plan_path), "--html", str(page))
    assert result.exit_code == 0, result.stderr
    assert "gradient reduction" in result.stdout
    assert page.read_text().startswith("<!DOCTYPE html>")


def test_without_jinja_the_page_is_refused_before_the_work(
    plan_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message says what to install, nothing is printed and nothing written."""
    monkeypatch.setitem(sys.modules, "jinja2", None)
    page = tmp_path / "traffic.html"
    result = run("traffic", str(plan_path), "--html", str(page))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert ".[report]" in result.stderr
    assert not page.exists()


def test_unknown_words_are_refused(plan_path: Path) -> None:
    """An algorithm or an extension that does not exist is named, with those that do."""
    star = run("traffic", str(plan_path), "--algorithm", "star")
    assert star.exit_code == 2
    assert "ring, tree, hierarchical" in star.stderr
    words = ("solve", "llama3-8b", "dgx-h100", "--gpus", "8", "--global-batch", "8")
    solve = run(*words, "--allow", "places")
    assert solve.exit_code == 2
    assert "placement" in solve.stderr
    order = run(
        "solve", "llama3-8b", "dgx-h100", "--gpus", "8", "--global-batch", "8", "--fix", "rank_order=tp-dp"
    )
    assert order.exit_code == 2
    assert "tp-cp-dp-pp" in order.stderr


def test_placement_is_opened_and_fixed() -> None:
    """``--allow placement`` opens every order, ``--fix rank_order`` takes one of them; by default there is one."""
    words = ("llama3-8b", "dgx-h100", JOB, "free")
    assert arguments.problem_of(*words, []).space.rank_order == ("tp-cp-dp-pp",)
    assert arguments.problem_of(*words, [], ["placement"]).space.rank_order == RANK_ORDERS
    fixed = arguments.problem_of(*words, ["rank_order=tp-cp-pp-dp"], ["placement"])
    assert fixed.space.rank_order == ("tp-cp-pp-dp",)


def test_another_order_is_printed_and_kept_in_the_file(tmp_path: Path) -> None:
    """The layout names its order where it is not the usual one, and the plan file keeps it."""
    out = tmp_path / "plan.json"
    fix = ("--fix", "rank_order=tp-cp-pp-dp", "--fix", "pp=2", "--fix", "tp=2")
    job = ("--gpus", "16", "--global-batch", "32", "--space", "uniform")
    result = run("solve", "llama3-8b", "dgx-h100", *job, *fix, "--out", str(out))
    assert result.exit_code == 0, result.stderr
    assert "order=tp-cp-pp-dp" in result.stdout
    assert json.loads(out.read_text())["plan"]["layout"]["rank_order"] == "tp-cp-pp-dp"
    again = run("simulate", str(out))
    assert "order=tp-cp-pp-dp" in again.stdout
