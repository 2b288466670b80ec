"""Replicas of different make in the words of a plan."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from milpplan import PlanResult, load_hardware, load_model, plan_overview, solve
from milpplan.explain import Missing
from milpplan.problem import Job, NodeGroup, Problem, Space
from milpplan.reports.chrome_trace import trace_events
from milpplan.reports.documents import plan_document
from milpplan.reports.html.charts import timeline_data
from milpplan.reports.html.plan_page import plan_page, stage_table
from milpplan.reports.words.plan_words import plan_sentences


@cache
def solved(types: int = 2) -> PlanResult:
    """Llama-3 8B on eight GPUs of each type."""
    others = tuple(NodeGroup(hardware=load_hardware(name), num_gpus=8) for name in ("dgx-h100", "dgx-b200"))
    fixed: dict[str, Any] = {"sequence_parallel": (True,), "zero_stage": (1,), "overlap_param_gather": (True,)}
    problem = Problem(
        model=load_model("llama3-8b"),
        hardware=load_hardware("dgx-a100-80"),
        job=Job(num_gpus=8 * types, global_batch_size=32 * types, sequence_length=4096),
        other_hardware=others[: types - 1],
        space=Space(mixing=("replicas",), pp=(2,), vpp=(1,), tp=(2,), cp=(1,), micro_batch_size=(1,), **fixed),
    )
    return solve(problem)


def test_words_say_what_each_type_does() -> None:
    """The sentences about a plan name the replicas of each type and their share, and a notebook shows them."""
    result = solved()
    problem = result.problem
    assert result.plan is not None
    assert result.report is not None
    slow, fast = result.plan.layout.replica_micro_batches
    words = " ".join(plan_sentences(problem, result.plan, result.report))
    assert f"2 replicas on dgx-a100-80 with {slow} micro-batches each" in words
    assert f"2 replicas on dgx-h100 with {fast} micro-batches each" in words
    assert f"{slow} or {fast} micro-batches of 1 sequence" in words
    assert "The replicas are heterogeneous: 2 replicas on" in result._repr_html_()


@pytest.mark.long
def test_page_and_trace_have_a_row_group_for_each_make() -> None:
    """The page of a plan of three makes has the stages of each, in the table, the bars and the time line, traffic
    between the types, and every launcher's refusal; the trace has a process for each, and the file all plans."""
    result = solved(3)
    assert result.plan is not None
    overview = plan_overview(result.problem, result.plan, time_limit_s=0.0)
    page, shares = plan_page(overview), result.plan.layout.replica_micro_batches
    assert len(shares) == 3
    names = [f"stage {stage} on {one.name}" for one in result.problem.node_types for stage in range(2)]
    assert all(page.count(name) >= 2 for name in names)
    assert "One replica of each make" in page
    rows = timeline_data(overview.lanes)["rows"]
    assert [row["rank"] for row in rows] == ["0:0", "0:1", "1:0", "1:1", "2:0", "2:1"]
    assert {row[0] for row in stage_table(overview).rows} == {row["rank"] for row in rows}
    assert all(tab.refusal is not None and "different make" in tab.refusal.seen for tab in overview.exports)
    assert not isinstance(overview.traffic, Missing)
    assert len(overview.traffic.blocks) == 3
    events = list(trace_events(overview.lanes))
    processes = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert [name.split(" (")[0] for name in processes] == names
    forwards = {event["pid"] for event in events if event["name"] == f"forward {max(shares) - 1}"}
    busiest = shares.index(max(shares))
    assert forwards == {2 * busiest, 2 * busiest + 1}
    document = plan_document(result.plan, result.report)
    assert [stage.node_type for stage in document.other_stages[::2]] == ["dgx-h100", "dgx-b200"]
    assert document.restored("file") == result.plan
