"""Traffic of a plan as a self-contained HTML page: matrix, timeline, links and bandwidth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from milpplan.communication.records import Bandwidth, TrafficReport
from milpplan.reports.answers.traffic import cluster_words, overheads_s, parallelism_table
from milpplan.reports.blocks import Drawing
from milpplan.reports.html.charts import (
    MAX_ROWS,
    Line,
    Part,
    colour_keys,
    counted_rows,
    line_chart,
    matrix_data,
    round_levels,
    stacked_bar,
    time_ticks,
)
from milpplan.reports.html.page_template import Section, answer_page, asset
from milpplan.simulation import FloatArray
from milpplan.units import bytes_text, counted, percent_text, seconds_text

ROOM: Final = 1.05
"""Height of a chart, as a multiple of its largest value."""
MAX_TICKS: Final = 4
OVERHEAD_COLOURS: Final = {"exposed": 9, "hidden": 5}
"""Colours of exposed and hidden communication."""


def traffic_page(report: TrafficReport, title: str) -> str:
    """Write the whole page.

    Raises:
        InvalidInputError: jinja2 is not installed.
    """
    summary = (
        f"{bytes_text(sum(report.wire_bytes.values()))} a step of {seconds_text(report.step_time_s)} on "
        f"{cluster_words(report)}; {report.algorithm} algorithms."
    )
    busy = percent_text(float(np.mean([use.busy_fraction for use in report.utilisation])))
    table = parallelism_table(report)
    sections = (
        Section("Who sends to whom", "", [Drawing(asset("matrix.html")), table])
        if table.rows
        else Section("Who sends to whom", "Nobody sends anything."),
        Section(
            "Over the step",
            "Bytes a second of all GPUs together. Messages of a work item are spread evenly over it, so that "
            "peaks inside one are not seen.",
            [_over_step(report)],
        ),
        Section(
            "The network of every node",
            "Bytes a step that leave and enter each node, in the order of the nodes.",
            [_links(report)],
        ),
        Section(
            "Communication beside the step",
            "Each as a share of the step: what adds to it, and what compute hides. GPUs are busy "
            f"{busy} of the step.",
            [_overheads(report)],
        ),
        Section(
            "Effective bandwidth",
            "Bus bandwidth of a collective for each GPU, from the cost model. Both scales are logarithmic; dashed "
            "groups reach over domains.",
            _bandwidths(report),
        ),
    )
    data = ("matrix-data", matrix_data(report, MAX_ROWS) if table.rows else None)
    script = asset("page.js") + asset("matrix.js")
    return answer_page("Traffic of one step", title, summary, sections, data, script)


def _over_step(report: TrafficReport) -> Drawing:
    """Draw the rate of all GPUs together by tier."""
    edges = report.timeline.edges_s
    length, end = float(edges[1] - edges[0]), float(edges[-1])
    tiers = (report.timeline.inside_bytes / length, report.timeline.between_bytes / length)
    names = ("inside domains", "between domains")
    lines = [
        Line(name, edges[:-1], values, colour)
        for colour, (name, values) in enumerate(zip(names, tiers, strict=True))
    ]
    return _from_zero(lines, end, time_ticks(end), "Bytes a second over the step", a_second=True)


def _links(report: TrafficReport) -> Drawing:
    """Draw bytes out of and into the network of every node."""
    links, places = report.node_links, np.arange(len(report.node_links.out_between), dtype=np.float64)
    lines = [
        Line("out to the network", places, links.out_between, 0),
        Line("in from the network", places, links.in_between, 2, dashed=True),
    ]
    ticks = [(level, f"{level:,.0f}") for level in round_levels(0.0, len(places), 8) if level == round(level)]
    return _from_zero(lines, float(len(places)), ticks, "Bytes a step over the network, by node")


def _from_zero(
    lines: Sequence[Line], end: float, ticks: list[tuple[float, str]], label: str, *, a_second: bool = False
) -> Drawing:
    """Draw non-negative lines with levels in bytes, or in bytes per second."""
    high = ROOM * max(float(line.values.max(initial=0.0)) for line in lines) or 1.0
    levels = [(level, bytes_text(level) + ("/s" if a_second else "")) for level in round_levels(0.0, high)]
    return Drawing(line_chart(lines, end, ticks, levels, 0.0, high, label))


def _overheads(report: TrafficReport) -> Drawing:
    """Draw exposed and hidden communication as shares of the step."""
    times = overheads_s(report)
    whole = max([report.step_time_s, *(sum(both) for both in times.values())])
    bars = []
    for name, both in times.items():
        texts = [percent_text(seconds / report.step_time_s) for seconds in both]
        parts = [
            Part(word, seconds, text, colour)
            for (word, colour), seconds, text in zip(OVERHEAD_COLOURS.items(), both, texts, strict=True)
        ]
        bars.append((name.replace("_", " "), stacked_bar(parts, whole), " + ".join(texts)))
    return Drawing(counted_rows(bars) + colour_keys((colour, word) for word, colour in OVERHEAD_COLOURS.items()))


def _bandwidths(report: TrafficReport) -> list[Drawing]:
    """Draw bus bandwidth over message size: a chart for every operation and a line for every group."""
    groups: dict[str, dict[str, list[Bandwidth]]] = {}
    for row in report.bandwidths:
        of_type = f", {row.nodes}" if len(report.blocks) > 1 else ""
        lines = groups.setdefault(row.operation.replace("_", "-"), {})
        lines.setdefault(f"{counted(row.num_gpus, 'GPU')}, {row.where}{of_type}", []).append(row)
    return [Drawing(_bandwidth_chart(name, lines), name) for name, lines in groups.items()]


def _bandwidth_chart(operation: str, groups: dict[str, list[Bandwidth]]) -> str:
    """Draw an operation, with both scales logarithmic."""
    messages = sorted({row.message_bytes for rows in groups.values() for row in rows})
    first, end = float(np.log10(messages[0])), float(np.log10(messages[-1] / messages[0]))
    lines = [
        Line(
            name,
            _logs([row.message_bytes for row in rows]) - first,
            _logs([row.bus_bandwidth_bytes_per_s for row in rows]),
            colour,
            dashed=rows[0].tier == "between",
            sloped=True,
        )
        for colour, (name, rows) in enumerate(groups.items())
    ]
    low = float(np.floor(min(line.values.min() for line in lines)))
    high = float(np.ceil(max(line.values.max() for line in lines)))
    levels = [(power, f"{bytes_text(10.0**power)}/s") for power in np.arange(low, high + 1).tolist()]
    # Few levels, and none at the right edge, where the text would not fit.
    some = messages[: -1 : -(-len(messages) // MAX_TICKS)]
    ticks = [(float(np.log10(size)) - first, bytes_text(size)) for size in some]
    return line_chart(lines, end, ticks, levels, low, high, f"Bus bandwidth of {operation}")


def _logs(values: list[float]) -> FloatArray:
    """Compute decimal logarithms."""
    return np.log10(np.array(values, dtype=np.float64))
