"""The methods of a result: documents, tables, launch files, pages."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from milpplan import Job, PlanResult, Problem, Space, explain_plan, gap, load_hardware, load_model, solve
from milpplan.errors import IllegalPlanError, InvalidInputError, UnknownNameError
from tests.small import small_problem


@pytest.fixture(scope="module")
def result() -> PlanResult:
    """Solve a small real problem."""
    job = Job(num_gpus=16, global_batch_size=32, sequence_length=8192)
    model, hardware = load_model("llama3-8b"), load_hardware("dgx-h100")
    space = Space(kind="uniform", pp=(2,), recompute=("none",))
    return solve(Problem(model=model, hardware=hardware, job=job, space=space))


@pytest.fixture(scope="module")
def infeasible() -> PlanResult:
    """Solve a problem without a plan."""
    return solve(small_problem(memory_gib=4))


def test_the_text_of_a_result_is_short(result: PlanResult, infeasible: PlanResult) -> None:
    """It has three lines with status, step, gap and layout; without a plan one."""
    lines = repr(result).splitlines()
    assert len(lines) == 3
    assert "optimal, llama3-8b on 16 x dgx-h100, space uniform" in lines[0]
    assert f"{result.step_time_s:.6g} s a step" in lines[1]
    assert "pp=2" in lines[2]
    assert repr(infeasible).startswith("PlanResult: infeasible")
    assert len(repr(infeasible).splitlines()) == 1


def test_the_texts_of_an_explanation_a_gap_and_a_record_are_short(result: PlanResult) -> None:
    """They name model, cluster and layout in three lines; the record of the search counts layouts in one."""
    assert result.plan is not None
    assert result.layouts is not None
    explained = explain_plan(result.problem, result.plan, time_limit_s=1.0)
    judged = gap(result.problem, result.plan, changes=False)
    for answer in (explained, judged):
        lines = repr(answer).splitlines()
        assert lines[0] == f"{type(answer).__name__}: llama3-8b on 16 x dgx-h100"
        assert "the best plan saves 0 to " in lines[1]
        assert lines[2:] == [repr(result).splitlines()[2]]
    record = repr(result.layouts)
    assert record.startswith(f"PruneRecord: {len(result.layouts.space):,} layouts: ")
    assert "\n" not in record


def test_the_dictionary_is_the_document(result: PlanResult, infeasible: PlanResult) -> None:
    """It holds the step, the bound and the plan, and is plain JSON."""
    document = result.to_dict()
    assert document["step_time_s"] == result.step_time_s
    assert document["lower_bound_s"] == result.lower_bound_s
    assert json.loads(json.dumps(document)) == document
    assert infeasible.to_dict()["plan"] is None


def test_an_export_is_that_of_the_command(result: PlanResult, infeasible: PlanResult, tmp_path: Path) -> None:
    """All files are there, the first starts the run; wrong names and plans are refused and write nothing."""
    files = result.export("megatron", tmp_path / "launch")
    assert [file.name for file in files] == ["megatron.sh", "megatron.sbatch"]
    assert "--pipeline-model-parallel-size" in files[0].read_text()
    with pytest.raises(UnknownNameError, match="Did you mean megatron"):
        result.export("megatrn", tmp_path / "other")
    with pytest.raises(IllegalPlanError):
        result.export("accelerate", tmp_path / "other")
    with pytest.raises(InvalidInputError, match="no plan"):
        infeasible.export("megatron", tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.long
def test_a_page_is_written(result: PlanResult, tmp_path: Path) -> None:
    """It is one file about this plan, with its proof."""
    page = result.write_report(tmp_path / "page.html", time_limit_s=1).read_text()
    assert "llama3-8b" in page
    assert "Optimal within" in page


def test_a_data_frame_has_a_row_for_each_rank(result: PlanResult, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its columns are the numbers of a rank, nested ones by their path; without pandas it is refused."""
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(InvalidInputError, match="pandas"):
        result.to_dataframe()
    given: list[list[dict[str, Any]]] = []

    def frame(rows: list[dict[str, Any]]) -> SimpleNamespace:
        given.append(rows)
        return SimpleNamespace(set_index=lambda name: name)

    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=frame))
    assert result.to_dataframe() == "rank"
    assert [row["rank"] for row in given[0]] == [0, 1]
    assert result.report is not None
    assert max(row["memory_bytes"] for row in given[0]) == result.report.peak_memory_bytes
    assert "breakdown.compute" in given[0][0]
