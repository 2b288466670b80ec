"""Documents: plans survive the file, and what is printed is what the schema says."""

from __future__ import annotations

import json
import os
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from milpplan import Job, Layout, Plan, Range, Recompute, VirtualStage, simulate, solve
from milpplan.errors import InfeasibleError, InvalidInputError
from milpplan.reports import terminal_text, write_whole
from milpplan.reports.answers import solve_blocks
from milpplan.reports.documents import (
    PlanDocument,
    PlanFile,
    ResultDocument,
    SimulationDocument,
    document_text,
    layouts_document,
    plan_document,
    read_plan,
    result_document,
    simulation_document,
)
from milpplan.units import tolerance_text
from tests.refusals import in_three_parts
from tests.simulation.cases import even_plan, problem_of
from tests.small import small_problem

ISSUE_KEYS = {
    *("schema_version", "status", "step_time_s", "lower_bound_s", "gap", "tokens_per_s", "mfu"),
    *("peak_memory_bytes", "wall_time_s", "plan", "breakdown", "layouts", "solver", "problem", "objective"),
}


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any well-formed plan, legal or not."""
    pp, vpp = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    held = draw(st.lists(st.integers(0, 5), min_size=pp * vpp, max_size=pp * vpp))
    stages, first = [], 0
    for count in held:
        full = draw(st.integers(0, count))
        selective = draw(st.integers(0, count - full))
        recompute = Recompute(full=full, selective=selective)
        stages.append(VirtualStage(layers=(first, first + count), recompute=recompute))
        first += count
    layout = Layout(
        pp=pp,
        vpp=vpp,
        tp=draw(st.integers(1, 8)),
        global_batch_size=draw(st.integers(1, 10**6)),
        sequence_parallel=draw(st.booleans()),
        zero_stage=draw(st.integers(0, 3)),
        schedule=draw(st.sampled_from(["gpipe", "1f1b", "interleaved"])),
    )
    return Plan(layout=layout, virtual_stages=tuple(stages))


@given(plan=plans())
def test_a_plan_survives_its_document(plan: Plan) -> None:
    """plan -> JSON -> plan is the identity, uneven and virtual stages included."""
    text = document_text(plan_document(plan))
    assert PlanDocument.model_validate_json(text, strict=True).restored("file") == plan


def solved(**changes: Any) -> tuple[ResultDocument, Plan]:
    result = solve(small_problem(**changes))
    assert result.plan is not None
    return result_document(result, 1e-3), result.plan


def test_a_result_is_a_plan_file(tmp_path: Path) -> None:
    """What --out writes gives back the problem and the plan, to the last bit."""
    document, plan = solved()
    path = tmp_path / "plan.json"
    write_whole(path, document_text(document))
    assert read_plan(path) == (small_problem(), plan)
    assert PlanFile(problem=document.problem, plan=document.plan).plan.restored("") == plan


def test_a_simulation_is_a_plan_file(tmp_path: Path) -> None:
    """What simulate --json prints can be simulated again."""
    document, plan = solved()
    simulation = simulation_document(document.problem, plan, simulate(document.problem, plan))
    path = tmp_path / "plan.json"
    path.write_text(document_text(simulation))
    assert read_plan(path) == (document.problem, plan)
    assert SimulationDocument.model_validate_json(path.read_text(), strict=True) == simulation
    assert simulation.memory_margin_bytes == simulation.usable_memory_bytes - simulation.peak_memory_bytes
    reserves = simulation.context_bytes + simulation.fragmentation_bytes
    assert simulation.usable_memory_bytes + reserves == document.problem.hardware.accelerator.memory_bytes


def test_the_document_has_the_promised_fields() -> None:
    """Every field of the specification is there, and the text is the record."""
    document, plan = solved(space={"pp": (2,)})
    data = json.loads(document_text(document))
    assert set(data) >= ISSUE_KEYS
    assert ResultDocument.model_validate_json(document_text(document), strict=True) == document
    assert set(data) == set(ResultDocument.model_json_schema()["properties"])
    assert len(data["plan"]["stages"]) == plan.layout.pp == 2
    assert sum(data["breakdown"].values()) == pytest.approx(data["step_time_s"])
    for stage in data["plan"]["stages"]:
        parts = stage["memory"]
        assert sum(size for name, size in parts.items() if name != "peak_bytes") == stage["memory_bytes"]
    assert data["memory_margin_bytes"] == data["usable_memory_bytes"] - data["peak_memory_bytes"]
    assert data["memory_verdict"] in ("safe", "tight")
    layouts = data["layouts"]
    decided = sum(layouts[fate] for fate in ("does_not_fit", "bounded", "relaxed", "solved", "open"))
    assert decided == layouts["legal"]
    pruned = layouts["legal"] - layouts["solved"] - layouts["open"]
    assert layouts["pruned_fraction"] == pytest.approx(pruned / layouts["legal"])
    assert 0 < layouts["pruned_fraction"] < 1
    assert "within 1e-3" in data["proof"]
    assert "space uniform" in data["proof"]


def test_what_is_pruned_of_a_range_of_batches() -> None:
    """With the batch as a decision the fraction is over the layouts of all batches, and the terminal says it."""
    batches = Range(minimum=8, maximum=32, step=8)
    job = Job(num_gpus=4, global_batch_size=batches, sequence_length=2048)
    result = solve(small_problem().model_copy(update={"job": job}))
    layouts = layouts_document(result)
    assert result.layouts is not None
    assert len(set(result.layouts.space.columns.global_batch_size.tolist())) == 4
    assert layouts.legal == len(result.layouts.space)
    assert layouts.pruned_fraction == pytest.approx(1 - (layouts.solved + layouts.open) / layouts.legal)
    console = Console(file=StringIO(), width=100)
    console.print(terminal_text(solve_blocks(result, 1e-3, verbose=True)))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert layouts.solved > 0
    assert f"of the legal layouts, with proof: all but {layouts.solved + layouts.open:,}" in text
    assert "pruned    100.000 %" not in text


def test_nothing_is_pruned_where_nothing_is_legal() -> None:
    """Without a legal layout there is no fraction."""
    result = solve(small_problem(space={"tp": (3,)}))
    assert result.status == "infeasible"
    assert layouts_document(result).pruned_fraction is None


def test_virtual_stages_are_lists() -> None:
    """With vpp > 1 rank s lists virtual stages s, s + pp, ...; with vpp = 1 it has one pair."""
    stages = tuple(VirtualStage(layers=(j, j + 1)) for j in range(4))
    layout = {"pp": 2, "vpp": 2, "global_batch_size": 4, "schedule": "interleaved"}
    document = plan_document(Plan(layout=Layout(**layout), virtual_stages=stages))
    assert [stage.layers for stage in document.stages] == [((0, 1), (2, 3)), ((1, 2), (3, 4))]
    plain = Plan(layout=Layout(pp=4, global_batch_size=4), virtual_stages=stages)
    assert plan_document(plain).stages[3].layers == (3, 4)


def test_no_plan_is_null_with_the_reason() -> None:
    """Without a plan its fields are null and the explanation is in the document."""
    result = solve(small_problem(num_gpus=1, memory_gib=8))
    document = result_document(result, 1e-3, InfeasibleError("a", "b", "c"))
    data = json.loads(document_text(document))
    assert data["status"] == "infeasible"
    assert data["infeasible"] == {"seen": "a", "expected": "b", "do": "c"}
    assert {data[name] for name in ("step_time_s", "plan", "gap", "mfu", "lower_bound_s")} == {None}


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        ({"layers": [0, 3]}, "virtual stages"),
        ({"layers": [[0, 1], [3, 2]]}, "first, last"),
        ({"layers": [[0, 1], [1, 2]], "recompute": [{"full": 1}]}, "recompute entries"),
        ({"layers": [[0, 1], [1, 2]], "recompute": {"full": 1}}, "recompute entries"),
        ({"layers": [[0, 1], [2, 3]]}, "expected 1"),
    ],
)
def test_stages_that_do_not_fit_are_named(stage: dict[str, Any], words: str) -> None:
    """A wrong number of virtual stages, gaps and half-given recomputation are refused."""
    layout = {"pp": 1, "vpp": 2, "global_batch_size": 4}
    document = PlanDocument.model_validate({"layout": layout, "stages": [stage]})
    with pytest.raises(InvalidInputError, match=words):
        document.restored("plan.json")


def test_a_file_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If writing fails, the old file is untouched and nothing else is left behind."""
    path = tmp_path / "plan.json"
    write_whole(path, "old")

    def broken(*args: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(InvalidInputError, match="disk full"):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    """Writing through a symbolic link changes the file it points to."""
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_whole(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "text"


@pytest.mark.parametrize("name", ["", "missing/plan.json", "bad\0name"])
def test_unwritable_paths_are_explained(name: str, tmp_path: Path) -> None:
    """A directory, a missing directory and a name no system has get a message in three parts."""
    with pytest.raises(InvalidInputError) as caught:
        write_whole(tmp_path / name, "text")
    in_three_parts(caught.value)


@pytest.mark.parametrize(("value", "text"), [(1e-4, "1e-4"), (0.01, "0.01"), (0.0, "0"), (2.5e-5, "2.5e-5")])
def test_tolerances_read_well(value: float, text: str) -> None:
    """Small ones in scientific notation without padding."""
    assert tolerance_text(value) == text


def test_answers_hold_numbers_beyond_the_limits_of_inputs() -> None:
    """A plan whose weights alone are 8e16 bytes is simulated: it does not fit, and the document says how much."""
    problem = problem_of("llama3-8b", "dgx-h100")
    run = problem.model.layers[0]
    wide = run.model_copy(update={"mlp": run.mlp.model_copy(update={"intermediate_size": 10**11})})
    problem = problem.model_copy(update={"model": problem.model.model_copy(update={"layers": (wide,)})})
    plan = even_plan(problem, Layout(tp=1, pp=1, dp=1, global_batch_size=1))
    document = simulation_document(problem, plan, simulate(problem, plan))
    assert document.peak_memory_bytes > 10**15
    assert type(document).model_validate_json(document_text(document)) == document
