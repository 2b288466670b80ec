"""Plan as plotly figures for notebooks: time, memory, timeline and search. ``traffic_figures`` has the
traffic's."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from milpplan.errors import InvalidInputError
from milpplan.optimize.result import PlanResult
from milpplan.reports.html.charts import envelope
from milpplan.reports.html.page_data import MAX_ITEMS, shown_ranks
from milpplan.reports.notebook.traffic_figures import require_plotly
from milpplan.reports.words.plan_words import MEMORY_PARTS, TIME_PARTS
from milpplan.simulation.pipeline.lanes import SLICE_KINDS, StepLanes
from milpplan.simulation.report import StepReport
from milpplan.units import GIB, NS_PER_S, counted

COLOURS: Final = {
    "forward": "#2f77b4",
    "backward": "#e0762b",
    "weight gradients": "#2e9e6f",
    "norm": "#8a8f98",
    "optimizer": "#b5566a",
}
"""Colours of work items, as on the page."""


def time_figure(report: StepReport) -> Any:
    """Draw the parts of the step time, which add up to it, in a bar for every stage."""
    figures = require_plotly()
    stages = [f"stage {rank}" for rank in range(len(report.stages))]
    figure = figures.Figure()
    for name, (label, _) in TIME_PARTS.items():
        seconds = [stage.breakdown_s[name] for stage in report.stages]
        if any(seconds):
            figure.add_trace(figures.Bar(x=stages, y=seconds, name=label))
    figure.update_layout(barmode="stack", title="Where the time of a step goes")
    figure.update_yaxes(title="seconds")
    return figure


def memory_parts_figure(report: StepReport) -> Any:
    """Draw the peak of every stage by part, and the usable memory."""
    figures = require_plotly()
    stages = [f"stage {rank}" for rank in range(len(report.stages))]
    figure = figures.Figure()
    for name, (label, _) in MEMORY_PARTS.items():
        sizes = [getattr(stage.memory, name) / GIB for stage in report.stages]
        if any(sizes):
            figure.add_trace(figures.Bar(x=stages, y=sizes, name=label))
    usable = [stage.usable_memory_bytes / GIB for stage in report.stages]
    line = {"color": "#c62828", "dash": "dash"}
    figure.add_trace(figures.Scatter(x=stages, y=usable, name="usable", mode="lines+markers", line=line))
    figure.update_layout(barmode="stack", title="Memory of a GPU at its peak")
    figure.update_yaxes(title="GiB", rangemode="tozero")
    return figure


def memory_figure(lanes: StepLanes) -> Any:
    """Draw the memory of a GPU of every stage over the step, and the usable memory."""
    figures = require_plotly()
    end = lanes.step_time_ns / NS_PER_S
    figure = figures.Figure()
    for rank in lanes.ranks:
        total = rank.memory.total_bytes.astype(np.float64)
        places, values = envelope(rank.memory.time_s, total, end, 2000)
        figure.add_trace(
            figures.Scatter(
                x=[*places.tolist(), end],
                y=[*(values / GIB).tolist(), float(values[-1]) / GIB],
                name=rank.name,
                line={"shape": "hv"},
            )
        )
    for limit in sorted({rank.usable_memory_bytes for rank in lanes.ranks}):
        figure.add_hline(y=limit / GIB, line={"color": "#c62828", "dash": "dash"}, annotation_text="usable")
    figure.update_layout(title="Memory of a GPU over one step")
    figure.update_xaxes(title="time", ticksuffix=" s")
    figure.update_yaxes(title="GiB", rangemode="tozero")
    return figure


def timeline_figure(lanes: StepLanes) -> Any:
    """Draw the work of every stage over time; of too many stages a selection from first to last.

    Raises:
        InvalidInputError: more work items than a notebook draws.
    """
    figures = require_plotly()
    ranks = [lanes.ranks[rank] for rank in shown_ranks(len(lanes.ranks))]
    works = [(rank.name, lane) for rank in ranks if (lane := rank.lane("compute")) is not None]
    count = sum(len(lane) for _, lane in works)
    if count > MAX_ITEMS:
        raise InvalidInputError(
            f"The time line has {count:,} work items on {counted(len(works), 'stage')}.",
            f"Expected at most {MAX_ITEMS:,}, which is what a notebook draws.",
            "Write the page (milpplan report), which shortens the steady part, or a trace (--trace).",
        )
    figure = figures.Figure()
    for kind, name in enumerate(SLICE_KINDS):
        chosen = [(rank, lane, lane.kind == kind) for rank, lane in works]
        names = [name for name, _, own in chosen for _ in range(int(own.sum()))]
        if not names:
            continue
        start, end, batch, stage = (
            np.concatenate([getattr(lane, part)[own] for _, lane, own in chosen])
            for part in ("start_ns", "end_ns", "micro_batch", "stage")
        )
        figure.add_trace(
            figures.Bar(
                orientation="h",
                y=names,
                base=start / NS_PER_S,
                x=(end - start) / NS_PER_S,
                name=name,
                marker={"color": COLOURS[name], "line": {"width": 0.5, "color": "white"}},
                customdata=np.stack([batch, stage], axis=1),
                hovertemplate="%{y}: %{x:.4s}s from %{base:.4s}s<br>micro-batch %{customdata[0]}, "
                "virtual stage %{customdata[1]}<extra>" + name + "</extra>",
            )
        )
    figure.update_layout(barmode="overlay", title="One step of the pipeline", height=140 + 34 * len(works))
    figure.update_yaxes(autorange="reversed", categoryorder="array", categoryarray=[name for name, _ in works])
    figure.update_xaxes(title="time", ticksuffix=" s")
    return figure


def search_figure(result: PlanResult) -> Any:
    """Draw the best plan and the proved bound over the search."""
    figures = require_plotly()
    figure = figures.Figure()
    times = [line.wall_time_s for line in result.log]
    for name, values, colour in (
        ("best plan so far", [line.incumbent for line in result.log], "#e0762b"),
        ("proved: no plan is below", [line.bound for line in result.log], "#2f77b4"),
    ):
        figure.add_trace(
            figures.Scatter(
                x=times, y=values, name=name, line={"shape": "hv", "color": colour}, mode="lines+markers"
            )
        )
    figure.update_layout(title="Best plan and proved bound over the search")
    figure.update_xaxes(title="search time", ticksuffix=" s")
    figure.update_yaxes(title="GPU-hours" if result.objective_name == "gpu_hours" else "seconds a step")
    return figure
