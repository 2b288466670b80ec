"""Plan as plotly figures for notebooks: time, memory, timeline, search and traffic."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from milpplan.communication.records import Bandwidth, TrafficReport
from milpplan.errors import InvalidInputError
from milpplan.optimize import PlanResult
from milpplan.reports.answers import NAMES
from milpplan.reports.answers.traffic import OVERHEADS
from milpplan.reports.html.charts import (
    MAX_ITEMS,
    domain_edges,
    envelope,
    gpus_per_row,
    row_of_gpu,
    row_word,
    shown_ranks,
)
from milpplan.reports.words.plan_words import MEMORY_PARTS, TIME_PARTS
from milpplan.simulation import FloatArray, StepReport
from milpplan.simulation.pipeline.lanes import SLICE_KINDS, StepLanes
from milpplan.units import GIB, NS_PER_S, bytes_text, counted, percent_text

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


HEIGHT: Final = 760
DECADES: Final = 5
"""Powers of ten that the colours of a heat map distinguish."""
COMMUNICATION_COLOURS: Final = {"exposed": "#d62728", "hidden": "#9ecae1"}


def require_plotly() -> Any:
    """Import plotly's figures.

    Raises:
        InvalidInputError: plotly is not installed.
    """
    try:
        import plotly.graph_objects as figures
    except ImportError as error:
        raise InvalidInputError(
            f"The figures need {error.name}, which is not installed.",
            "Expected plotly.",
            "Install it: pip install -e '.[report]'.",
        ) from error
    return figures


def traffic_figures(report: TrafficReport) -> list[Any]:
    """Draw heat map, timeline, links, overheads and bandwidth."""
    return [_heat_map(report), _time_line(report), _links(report), _overheads(report), _bandwidth(report)]


def _heat_map(report: TrafficReport) -> Any:
    """Draw bytes from row to column in logarithmic colours, with a button for every parallelism."""
    figures = require_plotly()
    rows, word = row_of_gpu(report), row_word(report)
    places = int(rows.max()) + 1
    shown = {"all": report.all_pairs} | {NAMES[name]: pairs for name, pairs in report.pairs.items()}
    shown = {name: pairs for name, pairs in shown.items() if len(pairs.sender)}
    matrices = {name: pairs.matrix(places, rows) for name, pairs in shown.items()}
    figure = figures.Figure()
    for number, (name, matrix) in enumerate(matrices.items()):
        figure.add_trace(_heat(figures, name, matrix, word, visible=number == 0))
    buttons = [
        {
            "label": name,
            "method": "update",
            "args": [{"visible": [other == name for other in matrices]}, {"title.text": _heat_title(name, word)}],
        }
        for name in matrices
    ]
    figure.update_layout(
        title={"text": _heat_title("all", word), "y": 0.98},
        height=HEIGHT,
        width=HEIGHT + 140,
        margin={"t": 110},
        xaxis={"title": f"receiving {word}", "constrain": "domain", "showgrid": False, "zeroline": False},
        yaxis={
            "title": f"sending {word}",
            "autorange": "reversed",
            "scaleanchor": "x",
            "constrain": "domain",
            "showgrid": False,
            "zeroline": False,
        },
        updatemenus=[{"buttons": buttons, "x": 0, "xanchor": "left", "y": 1.09, "yanchor": "top"}],
    )
    if gpus_per_row(report) == 1:
        _domain_lines(figure, report)
    return figure


def _heat_title(name: str, word: str) -> str:
    return f"Bytes a step from {word} to {word}: {name}"


def _heat(figures: Any, name: str, matrix: FloatArray, word: str, *, visible: bool) -> Any:
    """Draw a heat map; pairs without traffic stay empty."""
    powers = np.where(matrix > 0, np.log10(np.maximum(matrix, 1.0)), np.nan)
    high = np.ceil(np.nanmax(powers))
    # The norm of the gradients, a few bytes, would take all contrast from the rest.
    low = min(high - 1, max(np.floor(np.nanmin(powers)), high - DECADES))
    ticks = np.arange(low, high + 1)
    labels = [bytes_text(10.0**tick) for tick in ticks]
    labels[0] += " or less" if np.nanmin(powers) < low else ""
    return figures.Heatmap(
        z=powers,
        customdata=matrix,
        name=name,
        visible=visible,
        zmin=low,
        zmax=high,
        colorscale="Viridis",
        colorbar={
            "tickvals": ticks.tolist(),
            "ticktext": labels,
            "title": "bytes",
        },
        hovertemplate=f"{word} %{{y}} to {word} %{{x}}: %{{customdata:.4s}}B<extra>{name}</extra>",
    )


def _domain_lines(figure: Any, report: TrafficReport) -> None:
    """Draw lines at the edges of the fast domains."""
    lines = []
    for edge in domain_edges(report):
        style = {"type": "line", "line": {"color": "rgba(120,120,120,0.5)", "width": 1}}
        lines.append(style | {"x0": edge - 0.5, "x1": edge - 0.5, "y0": -0.5, "y1": report.num_gpus - 0.5})
        lines.append(style | {"y0": edge - 0.5, "y1": edge - 0.5, "x0": -0.5, "x1": report.num_gpus - 0.5})
    figure.update_layout(shapes=lines)


def _time_line(report: TrafficReport) -> Any:
    """Draw the rate of all GPUs together by tier."""
    figures = require_plotly()
    edges = report.timeline.edges_s
    length = edges[1] - edges[0]
    figure = figures.Figure()
    for name, values in (
        ("inside domains", report.timeline.inside_bytes),
        ("between domains", report.timeline.between_bytes),
    ):
        figure.add_trace(
            figures.Scatter(x=edges[:-1], y=values / length, name=name, line={"shape": "hv"}, fill="tozeroy")
        )
    figure.update_layout(
        title="Traffic over one step, all GPUs together",
        xaxis={"title": "time", "ticksuffix": " s"},
        yaxis={"title": "bytes a second", "exponentformat": "SI", "ticksuffix": "B/s", "rangemode": "tozero"},
    )
    return figure


def _links(report: TrafficReport) -> Any:
    """Draw bytes out of and into every node's network, and out of every GPU where there are few."""
    figures = require_plotly()
    figure = figures.Figure()
    for name, values in (
        ("out to the network", report.node_links.out_between),
        ("in from the network", report.node_links.in_between),
    ):
        figure.add_trace(figures.Bar(y=values, name=name))
    figure.update_layout(
        title="Bytes a step over the network, by node",
        xaxis={"title": "node"},
        yaxis={"title": "bytes a step", "exponentformat": "SI", "ticksuffix": "B", "rangemode": "tozero"},
        bargap=0.1,
    )
    return figure


def _overheads(report: TrafficReport) -> Any:
    """Draw exposed and hidden communication as shares of the step."""
    figures = require_plotly()
    step = report.step_time_s
    parts = {
        kind: [100 * values.get(f"{name}_{kind}", 0.0) / step for name in OVERHEADS]
        for kind, values in (("exposed", report.exposed_s), ("hidden", report.hidden_s))
    }
    figure = figures.Figure(
        [
            figures.Bar(x=list(OVERHEADS), y=values, name=kind, marker={"color": COMMUNICATION_COLOURS[kind]})
            for kind, values in parts.items()
        ]
    )
    busy = float(np.mean([use.busy_fraction for use in report.utilisation]))
    figure.update_layout(
        title=f"Communication beside the step (GPUs are busy {percent_text(busy)} of it)",
        xaxis={"title": "communication"},
        yaxis={"title": "share of the step", "ticksuffix": " %"},
        barmode="stack",
    )
    return figure


def _bandwidth(report: TrafficReport) -> Any:
    """Draw bus bandwidth over message size: a line for every group, and a button for every operation."""
    figures = require_plotly()
    figure, of_trace = figures.Figure(), []
    lines: dict[tuple[str, str, int, int, str], list[Bandwidth]] = {}
    for row in report.bandwidths:
        lines.setdefault((row.operation, row.nodes, row.num_gpus, row.stride, row.tier), []).append(row)
    several = len(report.blocks) > 1
    for (operation, nodes, num_gpus, _, tier), rows in lines.items():
        where = rows[0].where + (f", {nodes}" if several else "")
        figure.add_trace(
            figures.Scatter(
                x=[row.message_bytes for row in rows],
                y=[row.bus_bandwidth_bytes_per_s for row in rows],
                name=f"{counted(num_gpus, 'GPU')}, {where}",
                visible=operation == "all_reduce",
                line={"dash": "solid" if tier == "inside" else "dot"},
            )
        )
        of_trace.append(operation)
    shown = {name: [trace == name for trace in of_trace] for name in dict.fromkeys(of_trace)}
    buttons = [
        {"label": name.replace("_", "-"), "method": "update", "args": [{"visible": visible}]}
        for name, visible in shown.items()
    ]
    figure.update_layout(
        title={"text": "Effective (bus) bandwidth per GPU, from the cost model", "y": 0.97},
        margin={"t": 110},
        height=560,
        xaxis={"title": "message", "type": "log", "exponentformat": "SI", "ticksuffix": "B"},
        yaxis={"title": "bytes a second", "type": "log", "exponentformat": "SI", "ticksuffix": "B/s"},
        updatemenus=[{"buttons": buttons, "x": 0, "xanchor": "left", "y": 1.14, "yanchor": "top"}],
    )
    return figure
