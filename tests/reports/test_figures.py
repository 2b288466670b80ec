"""A plan as plotly figures and in a notebook: the same numbers, and HTML without a script."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import milpplan
from milpplan import (
    Plan,
    PlanResult,
    SolveOptions,
    StepReport,
    TrafficReport,
    simulate,
    solve,
    solve_lengths,
    step_lanes,
)
from milpplan.errors import InvalidInputError
from milpplan.explain import Candidate, Choice, Explanation, Fewest, choose, fewest_gpus
from milpplan.lengths import LengthsResult, workload_of
from milpplan.library import DRAWN
from milpplan.reports.notebook import figures
from milpplan.reports.notebook.html import notebook_html, result_blocks
from milpplan.simulation import BREAKDOWN
from milpplan.units import GIB, seconds_text
from tests.reports.pages import piped, solved
from tests.reports.test_plan_page import Reader
from tests.small import small_problem


def test_parts_of_the_time_stack_up_to_the_step() -> None:
    """The bars of every stage add up to the step time."""
    report = simulate(*piped())
    stacked = np.sum([trace.y for trace in figures.time_figure(report).data], axis=0)
    assert stacked == pytest.approx(report.step_time_s)
    assert len(figures.time_figure(report).data) <= len(BREAKDOWN)


def test_memory_reaches_its_peak() -> None:
    """The parts of a stage's bar add up to its peak, and its line over time reaches it."""
    problem, plan = piped()
    report, lanes = simulate(problem, plan), step_lanes(problem, plan)
    *parts, usable = figures.memory_parts_figure(report).data
    peaks = [stage.memory.peak_bytes / GIB for stage in report.stages]
    assert np.sum([part.y for part in parts], axis=0) == pytest.approx(peaks)
    assert usable.y[0] == report.usable_memory_bytes / GIB
    lines = figures.memory_figure(lanes).data
    assert [max(line.y) for line in lines] == pytest.approx(peaks)


def test_the_time_line_holds_every_work_item(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bar for every slice, from its start on; too many are refused with what to do."""
    problem, plan = piped("zb-v", num_micro_batches=4)
    lanes = step_lanes(problem, plan)
    drawn = figures.timeline_figure(lanes).data
    works = [rank.lane("compute") for rank in lanes.ranks]
    assert sum(len(trace.base) for trace in drawn) == sum(len(work) for work in works if work is not None)
    last = max(float(np.max(np.asarray(trace.base) + np.asarray(trace.x))) for trace in drawn)
    assert last == pytest.approx(lanes.step_time_ns / 1e9)
    monkeypatch.setattr(figures, "MAX_ITEMS", 10)
    with pytest.raises(InvalidInputError, match="milpplan report"):
        figures.timeline_figure(lanes)


def test_the_search_ends_with_bound_and_plan() -> None:
    """The two lines end where the result says."""
    result = solved()
    best, bound = figures.search_figure(result).data
    assert best.y[-1] == pytest.approx(result.step_time_s)
    assert bound.y[-1] == pytest.approx(result.lower_bound_s)


def test_without_plotly_the_figures_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says what to install."""
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    with pytest.raises(InvalidInputError, match=r"\.\[report\]"):
        figures.time_figure(simulate(*piped()))


def test_a_notebook_shows_results_without_a_script() -> None:
    """Results, steps and plans have HTML that is well-formed and holds the step time, and no script."""
    result = solved()
    report, plan = result.report, result.plan
    assert isinstance(report, StepReport)
    assert isinstance(plan, Plan)
    for shown in (result, report, plan):
        html = shown._repr_html_()  # type: ignore[union-attr]
        read = Reader(html)
        assert read.open == []
        assert "script" not in {tag for tag, _ in read.attributes}
        assert isinstance(shown, Plan) or seconds_text(report.step_time_s) in read.text


def test_a_result_without_a_plan_says_so() -> None:
    """An infeasible problem's result has its status, and nothing to draw."""
    result = solve(small_problem(memory_gib=4.0))
    assert isinstance(result, PlanResult)
    assert "small: infeasible" in Reader(notebook_html(result_blocks(result))).text


def test_a_notebook_shows_every_kind_of_answer() -> None:
    """Gaps, explanations, steps of several lengths, traffic, candidates and the fewest GPUs have well-formed HTML
    without a script."""
    problem, plan = small_problem(), solve(small_problem()).plan
    assert plan is not None
    options = SolveOptions(time_limit_s=5.0)
    two = [Candidate(name, problem) for name in ("one", "other")]
    roomy = small_problem(memory_gib=40)
    answers = {
        milpplan.GapReport: milpplan.gap(problem, plan, time_limit_s=1.0, changes=False),
        Explanation: milpplan.explain_plan(problem, plan, time_limit_s=0.5),
        LengthsResult: solve_lengths(roomy, workload_of([200, 400, 900], 128), 128, 1, 0.1, 2.0),
        TrafficReport: milpplan.traffic(problem, plan),
        Choice: choose(two, options),
        Fewest: fewest_gpus(problem, options, widen=False),
    }
    drawn = {kind for kinds in DRAWN.values() for kind in kinds}
    assert {kind.__name__ for kind in answers} | {"PlanResult", "Plan", "StepReport"} == drawn
    for kind, answer in answers.items():
        html = answer._repr_html_()  # type: ignore[attr-defined]
        read = Reader(html)
        assert isinstance(answer, kind)
        assert read.open == []
        assert "script" not in {tag for tag, _ in read.attributes}
        assert len(read.text) > 200, kind
