"""The files of a sweep: the table, the plans, and one HTML page of figures that needs no network.

**Figures**: their data as plain numbers, drawn with plotly (scaling, Pareto front, sensitivity).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np

from milpplan.errors import InvalidInputError
from milpplan.problem import Problem
from milpplan.reports import write_whole
from milpplan.reports.documents.plan_file import PlanFile
from milpplan.studies.cell_table import WHAT_IF, Row, Value, column_types, csv_text, parquet_bytes, what_if_words
from milpplan.studies.grid import GRID_AXES, Cell, Study
from milpplan.studies.store import PLANS, Sweep
from milpplan.units import GIB, count_text, counted, gib_text, percent_text, seconds_text
from milpplan.version import __version__

SIZES: Final = ("num_gpus", "global_batch_size")
VARIANT_AXES: Final = ("hardware",)
"""Axes whose values are lines of the scaling figure, like the what-ifs; other axes are chosen from a menu."""
HOURS_PER_DAY: Final = 24.0


def coordinates(table: Sequence[Row]) -> tuple[str, ...]:
    """Return the columns that identify the cell of a row."""
    what_ifs = [name for name in (table[0] if table else ()) if name.startswith(WHAT_IF)]
    return (*GRID_AXES, *what_ifs, *SIZES)


def varied(table: Sequence[Row]) -> tuple[str, ...]:
    """Return the coordinates with more than one value."""
    return tuple(name for name in coordinates(table) if len({row[name] for row in table}) > 1)


def label(row: Row, names: Iterable[str]) -> str:
    """Write the values of some coordinates in words; numbers get a unit."""
    plain = ("model", "hardware", "precision", "attention_kernel")
    words = []
    for name in names:
        value = row[name]
        if name in plain:
            words.append(str(value))
        elif name in SIZES or name == "sequence_length":
            unit = {"num_gpus": "GPUs", "global_batch_size": "sequences a step"}.get(name, "tokens a sequence")
            words.append(f"{value:,} {unit}")
        else:
            words.append(f"{name.removeprefix(WHAT_IF).replace('_', ' ')}: {value}")
    return ", ".join(words)


def number(row: Row, name: str) -> float:
    """Return a measure of a row that has it."""
    value = row[name]
    assert isinstance(value, int | float)
    return float(value)


def throughput(row: Row) -> float:
    """Return tokens per second and GPU; 0 without a plan."""
    return 0.0 if row["tokens_per_s"] is None else number(row, "tokens_per_s") / number(row, "num_gpus")


def days_per_trillion(row: Row) -> float:
    """Return the days of training on 10^12 tokens."""
    return number(row, "gpu_hours_per_trillion_tokens") / number(row, "num_gpus") / HOURS_PER_DAY


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the scaling figure: rows by ascending number of GPUs, all of one job on one hardware."""

    menu: str
    name: str
    rows: tuple[Row, ...]

    @property
    def efficiency(self) -> tuple[float, ...]:
        """Tokens per second and GPU over those of the smallest number of GPUs with a plan."""
        first = throughput(self.rows[0])
        return tuple(throughput(row) / first for row in self.rows)


def scaling_lines(study: Study, table: Sequence[Row]) -> list[Line]:
    """Build the lines of all rows with a plan, by menu entry and variant; unchanged hardware first."""
    names = [name for name in varied(table) if name != "num_gpus"]
    several = [name for name in names if name in VARIANT_AXES]
    of_menu = [name for name in names if name not in several and not name.startswith(WHAT_IF)]
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in table:
        if row["tokens_per_s"] is not None:
            changes = what_if_words(study, row)
            plain = label(row, several or ([] if changes else ["hardware"]))
            name = ", ".join(part for part in (plain, changes) if part)
            groups.setdefault((label(row, of_menu), name), []).append(row)
    lines = [
        Line(menu, name, tuple(sorted(rows, key=lambda row: number(row, "num_gpus"))))
        for (menu, name), rows in groups.items()
    ]
    return sorted(lines, key=lambda line: len(what_if_words(study, line.rows[0])) > 0)


def front(points: Sequence[tuple[float, ...]]) -> list[int]:
    """Return indices of the undominated points.

    A point dominates another if it is at most as large everywhere and smaller somewhere.
    """
    values = np.array(points, dtype=np.float64)
    kept: list[int] = []
    for i in sorted(range(len(points)), key=lambda i: points[i]):
        # A dominating point comes earlier in this order.
        others = values[kept]
        dominated = (others <= values[i]).all(axis=1) & (others < values[i]).any(axis=1) if kept else np.zeros(0)
        if not dominated.any():
            kept.append(i)
    return sorted(kept)


@dataclass(frozen=True, slots=True)
class Effect:
    """Effect of one value of an axis on tokens per second and GPU, against the axis's first value, all else equal.

    ``least``, ``middle`` and ``most`` are relative changes over the ``compared`` pairs in which both have a plan;
    ``lost`` pairs have a plan with the first value only, ``gained`` pairs with this one only.
    """

    axis: str
    value: str
    first: str
    least: float
    middle: float
    most: float
    compared: int
    lost: int
    gained: int


def effects(table: Sequence[Row]) -> list[Effect]:
    """List the effects of every value of every varied axis but the model, in the order of the table."""
    result = []
    for axis in varied(table):
        if axis != "model":
            result += _effects(table, axis)
    return result


def _effects(table: Sequence[Row], axis: str) -> list[Effect]:
    """List the effects of the values of one axis."""
    others = [name for name in coordinates(table) if name != axis]
    groups: dict[tuple[Value, ...], dict[Value, Row]] = {}
    for row in table:
        groups.setdefault(tuple(row[name] for name in others), {})[row[axis]] = row
    values = list(dict.fromkeys(row[axis] for row in table))
    return [_effect(axis, value, values[0], list(groups.values())) for value in values[1:]]


def _effect(axis: str, value: Value, first: Value, groups: list[dict[Value, Row]]) -> Effect:
    """Compare two values of an axis over all pairs of cells."""
    pairs = [
        (throughput(group[first]), throughput(group[value])) for group in groups if {first, value} <= set(group)
    ]
    changes = [after / before - 1.0 for before, after in pairs if before and after]
    low, middle, high = (min(changes), median(changes), max(changes)) if changes else (0.0, 0.0, 0.0)
    lost = sum(bool(before) and not after for before, after in pairs)
    gained = sum(bool(after) and not before for before, after in pairs)
    return Effect(axis, str(value), str(first), low, middle, high, len(changes), lost, gained)


COLOURS: Final = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#8c564b", "#7f7f7f", "#bcbd22",
)  # fmt: skip
"""Colours of Okabe and Ito (2008), which the colour-blind can distinguish, and three more."""
SYMBOLS: Final = (
    "circle",
    "square",
    "diamond",
    "triangle-up",
    "triangle-down",
    "cross",
    "x",
    "star",
    "hexagon",
    "pentagon",
)
DASHES: Final = ("solid", "dash", "dot", "dashdot", "longdash")
PERCENT: Final = "~%"
"""Format of percentages with as few digits as the ticks need."""
MAX_SHOWN: Final = 10
"""Number of lines shown at first; a click in the legend shows the others."""
MAX_MENU: Final = 200
MAX_BARS: Final = 60
FONT: Final = {"family": "system-ui, sans-serif", "size": 13}


def scaling_figure(study: Study, table: Sequence[Row]) -> Any:
    """Draw tokens per second against GPUs, with proportional growth for comparison, and efficiency beside it."""
    from plotly.subplots import make_subplots

    lines = scaling_lines(study, table)
    menus = list(dict.fromkeys(line.menu for line in lines))[:MAX_MENU]
    names = list(dict.fromkeys(line.name for line in lines))
    figure = make_subplots(
        cols=2,
        horizontal_spacing=0.1,
        subplot_titles=("Throughput (dotted: in proportion to GPUs)", "Throughput per GPU, of the fewest GPUs'"),
    )
    owners: list[str] = []
    for line in lines:
        if line.menu in menus:
            shown = line.menu == menus[0]
            traces = _line_traces(study, line, names.index(line.name), shown)
            for column, trace in traces:
                figure.add_trace(trace, row=1, col=column)
            owners += [line.menu] * len(traces)
    counts = sorted({row["num_gpus"] for line in lines for row in line.rows}, key=lambda count: count or 0)
    ticks = {"tickvals": counts, "ticktext": [f"{count:,}" for count in counts]}
    figure.update_xaxes(title="GPUs", type="log", **ticks)
    figure.update_yaxes(title="tokens a second", type="log", dtick="D2", tickformat="~s", col=1)
    figure.update_yaxes(title="efficiency", tickformat=PERCENT, col=2)
    figure.update_layout(legend={"orientation": "h", "y": -0.22, "yanchor": "top", "x": 0})
    figure = _finished(figure, menus, owners, 520 + 12 * len(names))
    figure.update_layout(margin={"b": 110 + 12 * len(names)})
    return figure


def _line_traces(study: Study, line: Line, index: int, shown: bool) -> list[tuple[int, Any]]:
    """Build the traces of one line, each with its column."""
    import plotly.graph_objects as go

    gpus = [number(row, "num_gpus") for row in line.rows]
    colour, dash = COLOURS[index % len(COLOURS)], DASHES[index // len(COLOURS) % len(DASHES)]
    visible = "legendonly" if index >= MAX_SHOWN else True
    hover = [_hover(study, row) for row in line.rows]
    common: dict[str, Any] = {
        "x": gpus,
        "mode": "lines+markers",
        "name": line.name,
        "legendgroup": str(index),
        "line": {"color": colour, "dash": dash},
        "marker": {"symbol": SYMBOLS[index % len(SYMBOLS)], "size": 8},
        "hovertext": hover,
        "hoverinfo": "text",
        "visible": visible if shown else False,
    }
    ideal = [throughput(line.rows[0]) * count for count in gpus]
    return [
        (1, go.Scatter(**common, y=[number(row, "tokens_per_s") for row in line.rows])),
        (
            1,
            go.Scatter(
                x=gpus,
                y=ideal,
                mode="lines",
                line={"color": colour, "width": 1, "dash": "dot"},
                opacity=0.6,
                legendgroup=str(index),
                showlegend=False,
                hoverinfo="skip",
                visible=visible if shown else False,
            ),
        ),
        (2, go.Scatter(**common, y=line.efficiency, showlegend=False)),
    ]


def pareto_figure(study: Study, table: Sequence[Row]) -> Any:
    """Draw days against cost, with peak memory as colour; the front is joined, undominated points outlined."""
    import plotly.graph_objects as go

    with_plan = [row for row in table if row["tokens_per_s"] is not None]
    priced = all(row["cost_per_trillion_tokens"] is not None for row in with_plan)
    cost = "cost_per_trillion_tokens" if priced else "gpu_hours_per_trillion_tokens"
    of_menu = [name for name in varied(table) if name in ("model", "sequence_length")]
    groups: dict[str, list[Row]] = {}
    for row in with_plan:
        groups.setdefault(label(row, of_menu), []).append(row)
    figure, owners, menus = go.Figure(), [], list(groups)[:MAX_MENU]
    hardware_names = list(dict.fromkeys(str(row["hardware"]) for row in with_plan))
    for menu in menus:
        traces = _pareto_traces(study, groups[menu], cost, hardware_names, menu == menus[0])
        figure.add_traces(traces)
        owners += [menu] * len(traces)
    bar = {"title": {"text": "peak memory<br>of a GPU, GiB"}, "len": 0.75, "y": 0.35}
    figure.update_layout(coloraxis={"colorscale": "Viridis", "reversescale": True, "colorbar": bar})
    figure.update_xaxes(title="days of training on a trillion tokens", type="log", tickformat="~g")
    unit = f"cost, {study.currency}" if priced else "GPU-hours"
    figure.update_yaxes(title=f"{unit}, for a trillion tokens", type="log", tickformat="~s")
    return _finished(figure, menus, owners, 560)


def _pareto_traces(study: Study, rows: list[Row], cost: str, hardware_names: list[str], shown: bool) -> list[Any]:
    """Build the traces of one menu entry."""
    import plotly.graph_objects as go

    points = [(days_per_trillion(row), number(row, cost)) for row in rows]
    peaks = [number(row, "peak_memory_bytes") / GIB for row in rows]
    front_indices = sorted(front(points), key=lambda i: points[i])
    undominated = set(front([(*point, peak) for point, peak in zip(points, peaks, strict=True)]))
    traces = [
        go.Scatter(
            x=[points[i][0] for i in front_indices],
            y=[points[i][1] for i in front_indices],
            mode="lines",
            line={"color": "#d55e00", "width": 2, "shape": "hv"},
            name="nothing is faster and cheaper",
            hoverinfo="skip",
            visible=shown,
        )
    ]
    for index, hardware in enumerate(hardware_names):
        indices = [i for i, row in enumerate(rows) if row["hardware"] == hardware]
        edges = [2 if i in undominated else 0 for i in indices]
        marker = {
            "symbol": SYMBOLS[index % len(SYMBOLS)],
            "size": 10,
            "color": [peaks[i] for i in indices],
            "coloraxis": "coloraxis",
            "line": {"color": "black", "width": edges},
            "opacity": [1.0 if i in undominated else 0.55 for i in indices],
        }
        traces.append(
            go.Scatter(
                x=[points[i][0] for i in indices],
                y=[points[i][1] for i in indices],
                mode="markers",
                marker=marker,
                name=hardware,
                hovertext=[_hover(study, rows[i]) for i in indices],
                hoverinfo="text",
                visible=shown,
            )
        )
    return traces


def sensitivity_figure(table: Sequence[Row]) -> Any:
    """Draw the median change of throughput per GPU by each value of each axis, with whiskers."""
    import plotly.graph_objects as go

    models = list(dict.fromkeys(str(row["model"]) for row in table))
    figure, owners = go.Figure(), []
    max_bars = 1
    for model in models:
        bars = effects([row for row in table if row["model"] == model])[:MAX_BARS]
        max_bars = max(max_bars, len(bars))
        figure.add_trace(_bars(bars, model == models[0]))
        owners.append(model)
    figure.add_vline(x=0, line={"color": "#444", "width": 1})
    figure.update_xaxes(title="change of tokens a second and GPU", tickformat=f"+{PERCENT}", zeroline=False)
    figure.update_yaxes(autorange="reversed", automargin=True, title=None)
    figure.update_layout(showlegend=False)
    return _finished(figure, models, owners, 190 + 30 * max_bars)


def _bars(bars: list[Effect], shown: bool) -> Any:
    """Build the bars of one model."""
    import plotly.graph_objects as go

    names = [_axis_words(bar) for bar in bars]
    up = [bar.most - bar.middle for bar in bars]
    down = [bar.middle - bar.least for bar in bars]
    return go.Bar(
        orientation="h",
        y=names,
        x=[bar.middle for bar in bars],
        error_x={"type": "data", "array": up, "arrayminus": down, "symmetric": False, "color": "#444"},
        marker={"color": [COLOURS[0] if bar.middle >= 0 else COLOURS[1] for bar in bars]},
        customdata=[_pairs_words(bar) for bar in bars],
        hovertemplate="%{y}<br>%{customdata}<extra></extra>",
        visible=shown,
    )


def _axis_words(bar: Effect) -> str:
    """Name a bar by its axis and values."""
    axis = {"num_gpus": "GPUs", "global_batch_size": "batch"}.get(bar.axis, bar.axis.removeprefix(WHAT_IF))
    fits = f" ({bar.lost} no longer fit)" if bar.lost else f" ({bar.gained} fit only so)" if bar.gained else ""
    change = f"<b>{100 * bar.middle:+.1f} %</b>" if bar.compared else "no pair fits"
    return f"{axis.replace('_', ' ')}: {bar.value} instead of {bar.first}{fits}  {change}"


def _pairs_words(bar: Effect) -> str:
    """Describe the compared pairs of a bar."""
    if not bar.compared:
        return "no pair of cells in which both have a plan"
    lowest, middle, highest = (f"{100 * change:+.1f} %" for change in (bar.least, bar.middle, bar.most))
    words = f"median {middle}, from {lowest} to {highest}, over {bar.compared} pairs of cells"
    return f"{words}; {bar.lost} pairs lose their plan, {bar.gained} gain one"


def _hover(study: Study, row: Row) -> str:
    """Build the hover text of a cell."""
    degrees = [f"{name}={row[f'layout.{name}']}" for name in ("tp", "cp", "ep", "pp", "dp", "vpp")]
    names = ("model", "hardware", "num_gpus", "global_batch_size")
    words = ", ".join(part for part in (label(row, names), what_if_words(study, row)) if part)
    return "<br>".join(
        (
            f"<b>cell {row['cell']}</b>: {words}",
            f"{seconds_text(number(row, 'step_time_s'))} a step ({row['status']}), "
            f"{count_text(number(row, 'tokens_per_s'))} tokens/s, MFU {percent_text(number(row, 'mfu'))}",
            f"peak {gib_text(number(row, 'peak_memory_bytes'))}",
            f"{' '.join(degrees)}, ZeRO {row['layout.zero_stage']}",
        )
    )


def _finished(figure: Any, menus: list[str], owners: list[str], height: int) -> Any:
    """Set fonts and margins, and add a menu if there is a choice."""
    figure.update_layout(
        template="plotly_white",
        font=FONT,
        height=height,
        margin={"l": 70, "r": 30, "t": 70, "b": 60},
        hovermode="closest",
    )
    if len(menus) > 1:
        # A menu entry shows its own lines as the first entry shows its lines at the start.
        visibility = [_at_the_start(trace) for trace in figure.data]
        buttons = [
            {
                "label": menu,
                "method": "restyle",
                "args": [
                    "visible",
                    [
                        visible if owner == menu else False
                        for visible, owner in zip(visibility, owners, strict=True)
                    ],
                ],
            }
            for menu in menus
        ]
        menu_position = {"x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom", "pad": {"b": 28}}
        figure.update_layout(updatemenus=[{"buttons": buttons, **menu_position}], margin={"t": 110})
    return figure


def _at_the_start(trace: Any) -> Any:
    """Return the visibility of a trace when its menu entry is chosen."""
    group = trace.legendgroup
    return "legendonly" if group is not None and int(group) >= MAX_SHOWN else True


STYLE: Final = (
    "body{font-family:system-ui,sans-serif;max-width:1100px;margin:2em auto;padding:0 1em;color:#222}"
    "h2{margin-top:2em}p{line-height:1.45;max-width:52em}"
)
NOTES: Final = {
    "scaling": (
        "Scaling",
        "Each line is one job on more and more GPUs, with the best plan for each number of them. Dotted: "
        "throughput in proportion to GPUs. Efficiency is throughput per GPU over that of the line's smallest "
        "number of GPUs; more GPUs leave more memory to each, so it can exceed 100 %. A number of GPUs without a "
        "point has no plan that fits in memory. Names of lines tell which what-ifs are not in their first case; a "
        "click on a name hides or shows its line.",
    ),
    "pareto": (
        "Time, cost and memory",
        "Each point is one cell of the study with its best plan: left is faster, low is cheaper, colour is "
        "memory. Outlined points are beaten by no other in time, cost and peak memory together; the line joins "
        "those that none beats in time and cost. Batch sizes are compared as if they trained equally well: they "
        "may not.",
    ),
    "sensitivity": (
        "Sensitivity",
        "Each bar changes one thing and keeps all others: the median change of throughput per GPU over all pairs "
        "of cells that differ in it alone, each with its own best plan; whiskers reach from the least to the "
        "greatest change. Pairs in which only one side has a plan that fits are counted beside the name.",
    ),
}


def page(study: Study, table: Sequence[Row]) -> str:
    """Build the page.

    Raises:
        InvalidInputError: plotly is not installed.
    """
    try:
        import plotly  # noqa: F401
    except ImportError as error:
        raise InvalidInputError(
            "report.html needs plotly, which is not installed.",
            "Expected the Python package plotly; results.csv has the numbers.",
            "Install it with pip install -e '.[report]' and run the same command: nothing is solved again.",
        ) from error
    from milpplan.studies.results import pareto_figure, scaling_figure, sensitivity_figure

    parts = [_head(study, table)]
    if any(row["tokens_per_s"] is not None for row in table):
        figures = {
            "scaling": scaling_figure(study, table),
            "pareto": pareto_figure(study, table),
            "sensitivity": sensitivity_figure(table),
        }
        for i, (name, figure) in enumerate(figures.items()):
            title, note = NOTES[name]
            # The first figure includes the library for all.
            drawn = figure.to_html(full_html=False, include_plotlyjs=not i, div_id=name)
            parts.append(f"<h2>{title}</h2>\n<p>{note}</p>\n{drawn}")
    else:
        parts.append("<p>No cell has a plan: there is nothing to draw. The table says why for each.</p>")
    return "\n".join([*parts, "</body></html>\n"])


def _head(study: Study, table: Sequence[Row]) -> str:
    """Build the head of the page: title and counts of the statuses."""
    counts = Counter(str(row["status"]).replace("_", " ") for row in table)
    summary = ", ".join(f"{number:,} {status}" for status, number in sorted(counts.items()))
    name = escape(study.name)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}</title>'
        f"<style>{STYLE}</style></head><body>\n<h1>{name}</h1>\n"
        f"<p>{counted(len(table), 'cell')}: {summary}. <b>Optimal</b>: no plan of the declared space is "
        f"faster by more "
        f"than {study.solve.gap:g} (relative) under the cost model of milpplan {__version__}. <b>Infeasible</b>: "
        "proved that no plan fits. All numbers, and the plan of every cell, are in the files beside this page.</p>"
    )


TABLE: Final = "results.csv"
PARQUET: Final = "results.parquet"
PAGE: Final = "report.html"


def write_results(sweep: Sweep, directory: Path, table: list[Row]) -> tuple[list[Path], list[InvalidInputError]]:
    """Write all result files. Returns the paths written, and the errors for files whose package is missing."""
    types = column_types(sweep.study)
    contents: dict[str, Callable[[], str | bytes]] = {
        TABLE: lambda: csv_text(table, types),
        PARQUET: lambda: parquet_bytes(table, types),
        PAGE: lambda: page(sweep.study, table),
    }
    written, missing = [], []
    for name, content in contents.items():
        try:
            data = content()
        except InvalidInputError as error:
            # An older file would contradict the new table.
            (directory / name).unlink(missing_ok=True)
            missing.append(error)
            continue
        write_whole(directory / name, data)
        written.append(directory / name)
    return [*written, write_plans(sweep, directory / PLANS)], missing


def write_plans(sweep: Sweep, directory: Path) -> Path:
    """Write one plan file for every cell with a plan, for ``milpplan simulate``; delete other plan files."""
    directory.mkdir(exist_ok=True)
    digits = len(str(len(sweep.cells)))
    names = set()
    for cell in sweep.cells:
        outcome = sweep.outcome(cell)
        if outcome is None or outcome.plan is None or cell.problem is None:
            continue
        file = PlanFile(plan=outcome.plan, problem=_named(sweep, cell, cell.problem))
        path = directory / f"cell-{cell.number:0{digits}}.json"
        names.add(path.name)
        text = json.dumps(file.model_dump(mode="json")) + "\n"
        if not path.is_file() or path.read_bytes() != text.encode():
            write_whole(path, text)
    for path in directory.glob("cell-*.json"):
        if path.name not in names:
            path.unlink()
    return directory


def _named(sweep: Sweep, cell: Cell, problem: Problem) -> Problem:
    """Rename the changed hardware after its changes, so that it is not mistaken for the real hardware."""
    changes = [
        f"{axis.name}: {cell.words[axis.name]}"
        for axis, cases in ((axis, axis.all_cases) for axis in sweep.study.what_if)
        if any(case.name == cell.words[axis.name] and case.changes_something for case in cases)
    ]
    if not changes:
        return problem
    name = f"{problem.hardware.name} ({'; '.join(changes)})"[:200]
    return problem.model_copy(update={"hardware": problem.hardware.model_copy(update={"name": name})})
