"""The figures of a gap's page, drawn with plotly."""

from __future__ import annotations

import math
from typing import Any, Final

from milpplan.insight.gap_records import GapReport
from milpplan.optimize.fates import FATES
from milpplan.reports.fates_chart import REFUSED
from milpplan.reports.gap_document import LayoutFatesDocument, SpaceGapDocument
from milpplan.reports.layout_fates import WORDS
from milpplan.reports.traffic_page import require_plotly
from milpplan.units import GIB, seconds_text

COLOURS: Final = {
    "does_not_fit": "#999999",
    "bounded": "#56b4e9",
    "relaxed": "#0072b2",
    "solved": "#009e73",
    "open": "#d55e00",
}
"""Fates of layouts; colours of Okabe and Ito (2008), which the colour-blind can tell apart."""
REFUSED_COLOUR: Final = "#e69f00"
"""Of layouts that a rule refused."""
HEIGHT: Final = 380


def ends_figure(told: GapReport) -> Any:
    """The plan's step beside bound and best of every space."""
    go, _, _ = require_plotly()
    names, values, colours, texts = ["this plan"], [told.report.step_time_s], ["#d55e00"], []
    texts.append(seconds_text(told.report.step_time_s))
    for space in told.spaces:
        for word, value, colour in (("best known", space.best_s, "#009e73"), ("bound", space.bound_s, "#0072b2")):
            if value is not None:
                names.append(f"{space.name}: {word}")
                values.append(value)
                colours.append(colour)
                texts.append(seconds_text(value))
    bars = go.Bar(x=values, y=names, orientation="h", marker_color=colours, text=texts, hoverinfo="text")
    figure = go.Figure(bars)
    figure.update_yaxes(autorange="reversed", automargin=True)
    return _finished(figure, "Step time: no plan is left of a bound", "seconds", 120 + 44 * len(names))


def times_figure(told: GapReport) -> Any:
    """The breakdown of the step, of the plan and of the best known ones."""
    go, _, _ = require_plotly()
    figure = go.Figure()
    reports = _reports(told)
    parts = [name for name in reports[0][1].breakdown_s if any(report.breakdown_s[name] for _, report in reports)]
    for part in parts:
        figure.add_trace(
            go.Bar(
                name=part.replace("_", " "),
                x=[report.breakdown_s[part] for _, report in reports],
                y=[name for name, _ in reports],
                orientation="h",
            )
        )
    figure.update_layout(barmode="stack")
    figure.update_yaxes(autorange="reversed", automargin=True)
    return _finished(
        figure, "Mean of the stages; the parts add up to the step", "seconds", 230 + 44 * len(reports)
    )


def _reports(told: GapReport) -> list[tuple[str, Any]]:
    """The plan and, where it is another one, the best known plan of every space, with their simulations."""
    found = [("this plan", told.report)]
    return found + [
        (f"best of {space.name}", space.result.report)
        for space in told.spaces
        if space.result.report is not None and space.best == space.result.plan and space.best != told.plan
    ]


def memory_figure(told: GapReport) -> Any:
    """The peak of every stage against what it can hold."""
    go, _, _ = require_plotly()
    figure = go.Figure()
    for name, report in _reports(told):
        peaks = [stage.memory.peak_bytes / GIB for stage in report.stages]
        figure.add_trace(go.Bar(name=name, x=list(range(len(peaks))), y=peaks))
    usable = told.report.usable_memory_bytes / GIB
    figure.add_hline(
        y=usable, line_dash="dash", line_color="#d55e00", annotation_text=f"usable: {usable:,.1f} GiB"
    )
    figure.update_layout(barmode="group")
    figure.update_yaxes(title="GiB")
    figure.update_xaxes(tick0=0, dtick=1 + len(told.report.stages) // 16)
    return _finished(figure, "Peak memory of a GPU", "pipeline stage", HEIGHT)


def progress_figure(told: GapReport, said: SpaceGapDocument) -> Any:
    """Bound and incumbent while the search ran, and the judged plan as a line."""
    go, _, _ = require_plotly()
    figure = go.Figure()
    for name, field, colour in (
        ("best plan known", "incumbent_s", "#009e73"),
        ("proved bound", "bound_s", "#0072b2"),
    ):
        lines = [(line.wall_time_s, getattr(line, field)) for line in said.log]
        known = [(when, value) for when, value in lines if value is not None]
        figure.add_trace(
            go.Scatter(
                name=name,
                x=[when for when, _ in known],
                y=[value for _, value in known],
                mode="lines+markers",
                line={"color": colour, "shape": "hv"},
            )
        )
    figure.add_hline(
        y=told.report.step_time_s, line_dash="dash", line_color="#d55e00", annotation_text="this plan"
    )
    figure.update_yaxes(title="step, seconds")
    return _finished(figure, "Bound and best plan while the search ran", "seconds of the search", HEIGHT)


def fates_figure(said: SpaceGapDocument) -> Any:
    """Layouts by how long they take at least, against the fastest plan known, and by what decided them."""
    go, _, _ = require_plotly()
    assert said.layouts is not None
    figure = go.Figure()
    parts = _fates_by_row(said.layouts)
    names = [REFUSED, "too large for memory", *(one.words for one in said.layouts.bounds)]
    totals = [sum(counts) for counts in zip(*(row for _, row in parts.values()), strict=True)]
    longest = math.log10(1 + max([1, *totals]))
    for what, (colour, counts) in parts.items():
        # The length of a whole bar is the logarithm of its number; its parts share it as their numbers do.
        lengths = [
            math.log10(1 + total) / longest * count / total if total else 0.0
            for count, total in zip(counts, totals, strict=True)
        ]
        words = [f"{what}: {count:,}" for count in counts]
        figure.add_trace(
            go.Bar(
                name=what, x=lengths, y=names, orientation="h", marker_color=colour,
                customdata=words, hovertemplate="%{customdata}<extra></extra>",
            )
        )  # fmt: skip
    for name, total in zip(names, totals, strict=True):
        length = math.log10(1 + total) / longest
        figure.add_annotation(x=length, y=name, text=f"{total:,}", showarrow=False, xanchor="left", xshift=6)
    assert set(COLOURS) == set(FATES)
    figure.update_layout(barmode="stack")
    figure.update_xaxes(range=[0.0, 1.15], showticklabels=False)
    figure.update_yaxes(autorange="reversed", automargin=True)
    title = "Every layout: refused, too large, or how much longer than the best plan known it takes at least"
    return _finished(figure, title, "number of layouts (lengths are logarithms)", 170 + 30 * len(names))


def _fates_by_row(layouts: LayoutFatesDocument) -> dict[str, tuple[str, list[int]]]:
    """What became of layouts, with its colour and its number in every row: refused by rules, too large for memory,
    and the classes of bounds."""
    none = [0] * len(layouts.bounds)
    parts = {REFUSED: (REFUSED_COLOUR, [sum(layouts.rejected.values()), 0, *none])}
    for fate, colour in COLOURS.items():
        lost = layouts.fates[fate] if fate == "does_not_fit" else 0
        parts[WORDS[fate]] = (colour, [0, lost, *(one.fates[fate] for one in layouts.bounds)])
    return parts


def _finished(figure: Any, title: str, across: str, height: int) -> Any:
    figure.update_layout(
        title={"text": title, "font": {"size": 15}},
        height=height,
        margin={"l": 60, "r": 20, "t": 50, "b": 50},
        legend={"orientation": "h", "y": -0.28},
        template="plotly_white",
    )
    figure.update_xaxes(title=across)
    return figure
