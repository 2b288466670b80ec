"""``milpplan report``: files, refusals, and what of a file is believed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from milpplan import Layout
from milpplan.cli.app import app
from milpplan.reports.documents import PlanFile, document_text, plan_document, sealed
from milpplan.units import seconds_text
from tests.reports.pages import document
from tests.simulation.cases import even_plan
from tests.small import small_problem


def run(*words: str | Path) -> Result:
    """The program, in this process."""
    return CliRunner().invoke(app, ["report", *map(str, words), "--time-limit", "0"])


@pytest.fixture
def plan_path(tmp_path: Path) -> Path:
    """A bare plan."""
    problem = small_problem()
    plan = even_plan(problem, Layout(dp=4, global_batch_size=8, zero_stage=1))
    path = tmp_path / "plan.json"
    path.write_text(document_text(PlanFile(plan=plan_document(plan), problem=problem)))
    return path


@pytest.fixture
def result_path(tmp_path: Path) -> Path:
    """A solve's result."""
    path = tmp_path / "result.json"
    path.write_text(document_text(document()))
    return path


def test_page_and_trace_are_written(result_path: Path, tmp_path: Path) -> None:
    """Both files appear, standard output stays free, and the page has the proof of the file."""
    page, trace = tmp_path / "page.html", tmp_path / "trace.json"
    done = run(result_path, "-o", page, "--trace", trace)
    assert done.exit_code == 0, done.stderr
    assert done.stdout == ""
    assert "What is proved" in page.read_text()
    assert document().proof in page.read_text()
    step = document().step_time_s
    assert step is not None
    assert json.loads(trace.read_text())["otherData"]["step_time_ns"] == round(step * 1e9)


def test_a_trace_needs_no_template_engine(
    plan_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without jinja2 the page is refused before anything is written, and a trace is not."""
    monkeypatch.setitem(sys.modules, "jinja2", None)
    page, trace = tmp_path / "page.html", tmp_path / "trace.json"
    refused = run(plan_path, "-o", page, "--trace", trace)
    assert refused.exit_code == 2
    assert ".[report]" in refused.stderr
    assert not page.exists()
    assert not trace.exists()
    assert run(plan_path, "--trace", trace).exit_code == 0
    assert trace.exists()


def test_a_bare_plan_claims_nothing(plan_path: Path, tmp_path: Path) -> None:
    """A plan without its search has a page without a proof."""
    page = tmp_path / "page.html"
    assert run(plan_path, "-o", page).exit_code == 0
    assert "nothing is claimed here" in page.read_text()


def test_a_changed_result_is_refused(result_path: Path, tmp_path: Path) -> None:
    """A bound that somebody has improved is not shown: the file is refused, and nothing is written."""
    data = json.loads(result_path.read_text())
    data["lower_bound_s"] = data["step_time_s"]
    result_path.write_text(json.dumps(data))
    page = tmp_path / "page.html"
    done = run(result_path, "-o", page)
    assert done.exit_code == 2
    assert "not as it was written" in done.stderr
    assert not page.exists()


def test_the_proof_of_another_version_is_left_out(result_path: Path, tmp_path: Path) -> None:
    """A result of another cost model or version, or one that says another step time, has a page that says so and
    shows no proof."""
    certificate, step = document().certificate, document().step_time_s
    assert certificate is not None
    assert step is not None
    old = document().model_copy(
        update={"certificate": certificate.model_copy(update={"cost_model": "milpplan 0.0.1"})}
    )
    slower = document().model_copy(update={"step_time_s": 2 * step})
    page = tmp_path / "page.html"
    first = document().model_copy(update={"milpplan_version": "0.0.1", "lower_bound_s": 0.0})
    for changed, words in (
        (old, "the cost model milpplan 0.0.1"),
        (slower, f"The file says {seconds_text(2 * step)}"),
        (first, "was written by milpplan"),
    ):
        result_path.write_text(document_text(sealed(changed)))
        assert run(result_path, "-o", page).exit_code == 0
        assert words in page.read_text()
        assert document().proof not in page.read_text()


def test_mistakes_are_named(plan_path: Path, tmp_path: Path) -> None:
    """Nothing to write, one file for both, the plan itself, a directory that is not there, a time that makes no
    sense: each is refused, and the plan stays."""
    before = plan_path.read_text()
    page = tmp_path / "page.html"
    for words, said in (
        ([plan_path], "nothing to write"),
        ([plan_path, "-o", page, "--trace", page], "both"),
        ([plan_path, "-o", plan_path], "it is read"),
        ([plan_path, "-o", page, "--trace", tmp_path / "no" / "trace.json"], "no directory"),
        ([tmp_path / "none.json", "-o", page], "none.json"),
    ):
        done = run(*words)
        assert done.exit_code == 2, said
        assert said in done.stderr.replace("There is ", "")
        assert not page.exists()
    done = CliRunner().invoke(app, ["report", str(plan_path), "-o", str(page), "--time-limit", "-1"])
    assert done.exit_code == 2
    assert "--time-limit" in done.stderr
    assert plan_path.read_text() == before
