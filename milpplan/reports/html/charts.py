"""Charts as HTML and inline SVG, without a script: bars, step lines, and the charts of a step and of a search.

A drawing fills the given width; texts are HTML beside it, so that they keep their size on a phone. Colours are
classes (``c0`` to ``c9``) that the page's style defines for light and dark mode.

Data for the page's script are short lists of numbers: the timeline and the communication matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Final

import numpy as np

from milpplan.communication.records import Pairs, TrafficReport
from milpplan.reports.answers import NAMES
from milpplan.reports.documents.document import REASON_WORDS, BoundClassDocument
from milpplan.reports.words.plan_words import MEMORY_PARTS, TIME_PARTS
from milpplan.simulation import BoolArray, FloatArray, IntArray, StepReport
from milpplan.simulation.pipeline.lanes import SLICE_KINDS, Lane, RankLanes, StepLanes
from milpplan.units import counted, gib_text, seconds_text

MAX_ROWS: Final = 256
"""Maximum number of rows of a heat map; beyond it a row is a node, or several."""


def nodes_per_row(report: TrafficReport, max_rows: int = MAX_ROWS) -> int:
    """Return the nodes in a row of the heat map; 0 where a row is a GPU."""
    if report.num_gpus <= max_rows:
        return 0
    # A row holds nodes of one type, so every type may leave a row half empty.
    nodes = sum(-(-block.num_gpus // block.gpus_per_node) for block in report.blocks)
    return -(-nodes // max(1, max_rows - len(report.blocks) + 1))


def gpus_per_row(report: TrafficReport, max_rows: int = MAX_ROWS) -> int:
    """Return the GPUs in a row: one, or the minimum number of whole nodes that keeps the map at ``max_rows``
    rows."""
    return max(1, nodes_per_row(report, max_rows) * report.gpus_per_node)


def row_word(report: TrafficReport, max_rows: int = MAX_ROWS) -> str:
    """Name the unit of a row of the heat map."""
    nodes = nodes_per_row(report, max_rows)
    return "GPU" if not nodes else "node" if nodes == 1 else f"group of {counted(nodes, 'node')}"


def row_of_gpu(report: TrafficReport, max_rows: int = MAX_ROWS) -> IntArray:
    """Return the row of every GPU, [GPUs]."""
    each, rows, first = nodes_per_row(report, max_rows), [], 0
    for block in report.blocks:
        own = np.arange(block.num_gpus) // (each * block.gpus_per_node if each else 1)
        rows.append(own + first)
        first += int(own[-1]) + 1
    return np.concatenate(rows)


def domain_edges(report: TrafficReport) -> list[int]:
    """List the GPUs at which a fast domain begins, without the first."""
    starts = [
        first
        for block in report.blocks
        for first in range(block.first_gpu, block.first_gpu + block.num_gpus, block.gpus_per_domain)
    ]
    return starts[1:]


MAX_RANKS: Final = 24
"""Maximum number of rows of the timeline; of more ranks a selection from first to last is shown."""
MAX_ITEMS: Final = 40_000
"""Maximum number of slices of the timeline. Beyond it the first and last slices of every row are shown, and the
steady part between them as a single slice."""
UNITS: Final = 4_000_000
"""Units of the timeline's clock per step; nanoseconds where the step has fewer."""
MAX_MATRIX_ROWS: Final = 128
"""Maximum number of rows of the matrix."""
STEADY: Final = len(SLICE_KINDS)
"""Kind of the slice that stands for the steady part."""


def shown_ranks(num_ranks: int, max_ranks: int = MAX_RANKS) -> list[int]:
    """Select all ranks, or ``max_ranks`` ranks at even distances from first to last."""
    if num_ranks <= max_ranks:
        return list(range(num_ranks))
    return sorted(set(np.linspace(0, num_ranks - 1, max_ranks).round().astype(int).tolist()))


def timeline_data(lanes: StepLanes) -> dict[str, Any]:
    """Make the rows of the timeline.

    Every row has a list of slices of the compute lane, five numbers each (units since the end of the previous
    slice, units, kind, chunk, micro-batch or -1), and bars of its collectives (start, units, kind).
    """
    unit = max(1, lanes.step_time_ns // UNITS)
    ranks = [lanes.ranks[rank] for rank in shown_ranks(len(lanes.ranks))]
    budget = max(64, MAX_ITEMS // len(ranks))
    rows = [_row(rank, budget, unit) for rank in ranks]
    return {
        "step_ns": lanes.step_time_ns,
        "unit_ns": unit,
        "kinds": [*SLICE_KINDS, "steady"],
        "rows": rows,
        "num_ranks": len(lanes.ranks),
        "shortened": any(row["steady"] for row in rows),
    }


def _row(rank: RankLanes, budget: int, unit: int) -> dict[str, Any]:
    work = rank.lane("compute")
    slices: list[int] = []
    steady = 0
    if work is not None:
        slices, steady = _slices(work, rank, budget, unit)
    bars: list[int] = []
    for lane in (rank.lane("parameter gather"), rank.lane("gradient reduction")):
        if lane is not None:
            starts, ends = lane.start_ns // unit, lane.end_ns // unit
            bars += np.stack([starts, ends - starts, lane.kind], axis=1).ravel().tolist()
    layers = sum(rank.num_layers)
    return {
        "rank": rank.label,
        "name": rank.name,
        "layers": layers,
        "slices": slices,
        "steady": steady,
        "bars": bars,
    }


def _slices(work: Lane, rank: RankLanes, budget: int, unit: int) -> tuple[list[int], int]:
    """Return the numbers of the slices, and the number of slices that the steady part replaces."""
    keep: BoolArray = np.ones(len(work), dtype=np.bool_)
    hidden = max(0, len(work) - budget)
    if hidden:
        keep[budget // 2 : budget // 2 + hidden] = False
    chunk_of = {stage: chunk for chunk, stage in enumerate(rank.virtual_stages)}
    chunks = np.array([chunk_of.get(stage, -1) for stage in work.stage.tolist()], dtype=np.int64)
    columns = [work.start_ns // unit, work.end_ns // unit, work.kind, chunks, work.micro_batch]
    if hidden:
        first, last = budget // 2, budget // 2 + hidden
        whole = [columns[0][first], columns[1][last - 1], STEADY, -1, hidden]
        columns = [
            np.concatenate([column[:first], [value], column[last:]])
            for column, value in zip(columns, whole, strict=True)
        ]
    return _by_gaps(columns), hidden


def _by_gaps(columns: list[IntArray]) -> list[int]:
    start, end = columns[0], columns[1]
    gaps = start - np.concatenate([[0], end[:-1]])
    numbers: list[int] = np.stack([gaps, end - start, *columns[2:]], axis=1).ravel().tolist()
    return numbers


def matrix_data(report: TrafficReport, max_rows: int = MAX_MATRIX_ROWS) -> dict[str, Any]:
    """Make the matrix of bytes between at most ``max_rows`` rows of GPUs.

    Every parallelism that sends has cells (distance from the previous cell, index of the value) and values of four
    digits.
    """
    rows = row_of_gpu(report, max_rows)
    places, each = int(rows.max()) + 1, gpus_per_row(report, max_rows)
    wide = report.gpus_per_domain >= 2 * each
    shown = {"all together": report.all_pairs} | {NAMES[name]: pairs for name, pairs in report.pairs.items()}
    return {
        "places": places,
        "each": each,
        "word": row_word(report, max_rows),
        "edges": [int(rows[edge]) for edge in domain_edges(report)] if wide else [],
        "maps": {
            name: _cells(pairs, places, rows) | {"total": float(pairs.total_bytes)}
            for name, pairs in shown.items()
            if len(pairs.sender)
        },
    }


def _cells(pairs: Pairs, places: int, rows: IntArray) -> dict[str, Any]:
    flat = pairs.matrix(places, rows).ravel()
    cells = np.flatnonzero(flat > 0)
    powers = 10.0 ** (3 - np.floor(np.log10(flat[cells])))
    rounded = np.round(flat[cells] * powers) / powers
    values, numbers = np.unique(rounded, return_inverse=True)
    steps = np.diff(cells, prepend=0)
    return {
        "cells": np.stack([steps, numbers], axis=1).ravel().tolist(),
        "values": [float(f"{value:.4g}") for value in values.tolist()],
    }


NUM_COLOURS = 10
MAX_DIGITS = 17
"""Maximum number of digits; no float has more."""
BINS = 500
"""Maximum number of positions of a line; more are not visible."""


@dataclass(frozen=True, slots=True)
class Part:
    """Part of a bar: a name, its size, the size as text, and a colour."""

    name: str
    size: float
    text: str
    colour: int


@dataclass(frozen=True, slots=True, eq=False)
class Line:
    """Line of values, each held until the next position, or joined by straight lines if ``sloped``: arrays [n],
    with non-descending positions."""

    name: str
    places: FloatArray
    values: FloatArray
    colour: int
    dashed: bool = False
    sloped: bool = False


def stacked_bar(parts: Sequence[Part], whole: float, limit: float | None = None) -> str:
    """Draw parts one after another; ``whole`` is the full width, ``limit`` a mark on it."""
    pieces = [
        f'<span class="piece c{part.colour % NUM_COLOURS}" style="width:{_percent(part.size, whole)}" '
        f'title="{escape(part.name)}: {escape(part.text)}"></span>'
        for part in parts
        if part.size > 0
    ]
    mark = "" if limit is None else f'<span class="mark" style="left:{_percent(limit, whole)}"></span>'
    return f'<div class="bar">{"".join(pieces)}{mark}</div>'


def line_chart(
    lines: Sequence[Line],
    end: float,
    ticks: Sequence[tuple[float, str]],
    levels: Sequence[tuple[float, str]],
    low: float,
    high: float,
    label: str,
    note: str = "",
) -> str:
    """Draw step lines from position 0 to ``end`` and from ``low`` to ``high``, with a key for each line.

    Args:
        lines: the lines.
        end: right end of the chart.
        ticks: positions with their texts.
        levels: values with their texts.
        low: lower end of the chart.
        high: upper end of the chart.
        label: description of the chart.
        note: text beside the keys about values that are not drawn.
    """
    paths = "".join(
        f'<path class="line l{line.colour % NUM_COLOURS}{" dashed" if line.dashed else ""}" '
        f'd="{_path(line, end, low, high)}"><title>{escape(line.name)}</title></path>'
        for line in lines
    )
    rules = "".join(
        f'<line class="rule" x1="0" x2="1000" y1="{_y(value, low, high):.1f}" y2="{_y(value, low, high):.1f}"/>'
        for value, _ in levels
    )
    beside = "".join(
        f'<span class="level" style="top:{_y(value, low, high) / 10:.2f}%">{escape(text)}</span>'
        for value, text in levels
    )
    below = "".join(
        f'<span class="tick" style="left:{_percent(position, end)}">{escape(text)}</span>'
        for position, text in ticks
    )
    keys = "".join(f'<span class="key">{_swatch(line)}{escape(line.name)}</span>' for line in lines)
    keys += f'<span class="key">({escape(note)})</span>' if note else ""
    return (
        f'<div class="chart"><div class="plot" role="img" aria-label="{escape(label)}">'
        f'<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" aria-hidden="true">{rules}{paths}</svg>'
        f'{beside}</div><div class="ticks">{below}</div></div><div class="keys">{keys}</div>'
    )


def _swatch(line: Line) -> str:
    colour = line.colour % NUM_COLOURS
    if not line.dashed:
        return f'<i class="c{colour}"></i>'
    return f'<svg viewBox="0 0 24 8" aria-hidden="true"><path class="line l{colour} dashed" d="M0 4H24"/></svg>'


def distinct_texts(values: Sequence[float], write: Callable[[float, int], str], digits: int) -> list[str]:
    """Write values with a given number of digits, or with more where they would look alike.

    Args:
        values: Different numbers, such as the positions of ticks.
        write: A number and digits to a text.
        digits: The minimum number of digits.
    """
    texts = [write(value, digits) for value in values]
    while len(set(texts)) < len(set(values)) and digits < MAX_DIGITS:
        digits += 1
        texts = [write(value, digits) for value in values]
    return texts


def envelope(
    places: FloatArray, values: FloatArray, end: float, bins: int = BINS
) -> tuple[FloatArray, FloatArray]:
    """Reduce a step line to at most ``bins`` positions, each with the maximum up to the next, so that peaks
    remain."""
    if len(places) <= bins or end <= 0:
        return places, values
    edges = np.linspace(0.0, end, bins + 1)[:-1]
    before = np.maximum(np.searchsorted(places, edges, side="right") - 1, 0)
    after = np.append(before[1:], len(places) - 1)
    largest = np.array(
        [values[first : last + 1].max() for first, last in zip(before.tolist(), after.tolist(), strict=True)]
    )
    return edges, largest


def round_levels(low: float, high: float, max_levels: int = 5) -> list[float]:
    """Choose at most ``max_levels`` round values from ``low`` to ``high``: steps of 1, 2 or 5 times a power of
    ten."""
    if not high > low:
        return [low]
    rough = (high - low) / max_levels
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    first = math.ceil(low / step - 1e-9)
    return [step * number for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _path(line: Line, end: float, low: float, high: float) -> str:
    """Draw a path to the end of the chart: horizontal and vertical steps, or straight lines."""
    points: list[str] = []
    for place, value in zip(line.places.tolist(), line.values.tolist(), strict=True):
        x, y = 1000 * place / end if end > 0 else 0.0, _y(value, low, high)
        on = f"L{x:.1f} {y:.1f}" if line.sloped else f"H{x:.1f}V{y:.1f}"
        points.append(on if points else f"M{x:.1f} {y:.1f}")
    return "".join(points if line.sloped else [*points, "H1000"])


def _y(value: float, low: float, high: float) -> float:
    return 1000.0 * (1.0 - (value - low) / (high - low)) if high > low else 500.0


def _percent(part: float, whole: float) -> str:
    share = 100.0 * part / whole if whole > 0 else 0.0
    return f"{min(100.0, max(0.0, share)):.3f}%"


MEMORY_ROOM: Final = 1.04
"""Width of a memory bar, as a multiple of the largest limit or peak."""
LATEST_START: Final = 0.8
"""Share of the search time after which a first plan is too late for a chart of its course."""
Moment = tuple[float, float | None, float | None]
"""Moment of a search: seconds since its start, best plan so far, proved bound."""


def named_rows(bars: Iterable[tuple[str, str]]) -> str:
    """Stack drawn bars, each with its name."""
    return "".join(f'<div class="row"><span>{escape(name)}</span>{drawn}</div>' for name, drawn in bars)


def counted_rows(bars: Iterable[tuple[str, str, str]]) -> str:
    """Stack drawn bars, each between a longer name and its number."""
    rows = (
        f'<div class="row"><span>{escape(name)}</span>{drawn}<span class="number">{escape(number)}</span></div>'
        for name, drawn, number in bars
    )
    return f'<div class="rows counted">{"".join(rows)}</div>'


def colour_keys(keys: Iterable[tuple[int, str]]) -> str:
    """Write the words of colours."""
    words = "".join(f'<span class="key"><i class="c{colour}"></i>{escape(word)}</span>' for colour, word in keys)
    return f'<div class="keys">{words}</div>'


def time_names(reports: Iterable[StepReport]) -> list[str]:
    """List the parts of the step that any of the stages has, in the order of ``TIME_PARTS``, which gives a part
    the same colour on every page."""
    used = {
        name
        for report in reports
        for seconds in (report.breakdown_s, *(stage.breakdown_s for stage in report.stages))
        for name, value in seconds.items()
        if value > 0
    }
    return [name for name in TIME_PARTS if name in used]


def time_colour(name: str) -> int:
    """Choose the colour of a part: compute, bubble and large messages have their own, small parts share one."""
    order = ("compute", "recompute", "tp_exposed", "cp_exposed", "ep_exposed", "bubble", "optimizer")
    if name in order:
        return order.index(name)
    return 7 if name in ("param_gather_exposed", "grad_reduce_exposed", "zero_exposed") else 8


def time_bar(seconds: Mapping[str, float], whole: float) -> str:
    """Draw the parts of a step, or of a stage, on a bar of ``whole`` seconds."""
    parts = [
        Part(TIME_PARTS[name][0], seconds[name], seconds_text(seconds[name]), time_colour(name))
        for name in TIME_PARTS
        if name in seconds
    ]
    return stacked_bar(parts, whole)


def memory_width(reports: Iterable[StepReport]) -> float:
    """Compute the bytes of a whole memory bar that fits all stages of the reports."""
    sizes = [
        size
        for report in reports
        for stage in report.stages
        for size in (stage.usable_memory_bytes, stage.memory.peak_bytes)
    ]
    return MEMORY_ROOM * max(sizes)


def memory_rows(report: StepReport, named: Iterable[tuple[str, int]], whole: float) -> str:
    """Draw the peak of some stages, by name and number, by part, with a mark at the limit."""
    bars = []
    for name, number in named:
        stage = report.stages[number]
        parts = [
            Part(label, getattr(stage.memory, field), gib_text(getattr(stage.memory, field)), colour)
            for colour, (field, (label, _)) in enumerate(MEMORY_PARTS.items())
        ]
        bars.append((name, stacked_bar(parts, whole, stage.usable_memory_bytes)))
    return named_rows(bars)


def time_ticks(end: float) -> list[tuple[float, str]]:
    """Choose positions on a time axis from 0 to ``end`` seconds."""
    return [(position, seconds_text(position) if position else "0") for position in round_levels(0.0, end, 4)]


def search_chart(log: Sequence[Moment], unit: str, judged: float | None = None) -> str:
    """Draw incumbent and bound over the search, beside the value of the judged plan; empty where there is nothing
    to see.

    ``unit`` follows the numbers.
    """
    moments = [(time, best, bound) for time, best, bound in log if best is not None and bound is not None]
    if len(moments) < 2 or moments[0][0] > LATEST_START * moments[-1][0]:
        return ""
    places, bests, bounds = np.array(moments, dtype=np.float64).T
    end = float(places[-1]) or 1.0
    lines = [Line("best plan so far", places, bests, 2), Line("proved: no plan is below", places, bounds, 0)]
    if judged is not None:
        lines.append(Line("this plan", np.zeros(1), np.array([judged]), 9, dashed=True))
    lowest = min(float(line.values.min()) for line in lines)
    highest = max(float(line.values.max()) for line in lines)
    room = 0.08 * (highest - lowest) or 0.01 * highest
    low, high = lowest - room, highest + room
    places_of = round_levels(low, high)
    texts = distinct_texts(places_of, lambda level, digits: f"{level:,.{digits}g}{unit}", 6)
    levels = list(zip(places_of, texts, strict=True))
    label = "Best plan and proved bound over the search"
    return line_chart(lines, end, time_ticks(end), levels, low, high, label)


REASON_COLOURS: Final = {"does_not_fit": 8, "bounded": 0, "relaxed": 7, "solved": 4, "open": 2}
REFUSED_ROW: Final = "refused by a rule"


def fates_chart(
    rejected: Mapping[str, int], fates: Mapping[str, int], bounds: Sequence[BoundClassDocument]
) -> str:
    """Draw rows of layouts: refused by rules, too large, and by bound; empty without a best plan to compare with.

    ``rejected`` counts layouts by rule, ``fates`` by prune reason. Lengths are logarithms of the counts, shared by
    the reasons inside.
    """
    if not bounds:
        return ""
    lost = (REASON_WORDS["does_not_fit"], fates["does_not_fit"], REASON_COLOURS["does_not_fit"])
    rows = [
        (REFUSED_ROW, [(REFUSED_ROW, sum(rejected.values()), 5)]),
        ("too large for memory", [lost]),
        *(
            (
                bound_class.words,
                [(REASON_WORDS[fate], bound_class.fates[fate], colour) for fate, colour in REASON_COLOURS.items()],
            )
            for bound_class in bounds
        ),
    ]
    totals = [sum(count for _, count, _ in parts) for _, parts in rows]
    longest = math.log10(1 + max([1, *totals]))
    drawn = counted_rows(_prune_row(name, parts, longest) for name, parts in rows)
    return drawn + colour_keys(
        (colour, REASON_WORDS[fate]) for fate, colour in REASON_COLOURS.items() if fates[fate]
    )


def _prune_row(name: str, parts: list[tuple[str, int, int]], longest: float) -> tuple[str, str, str]:
    total = sum(count for _, count, _ in parts)
    length = math.log10(1 + total)
    pieces = [
        Part(what, length * count / total, f"{count:,}", colour) for what, count, colour in parts if count > 0
    ]
    return name, stacked_bar(pieces, longest), f"{total:,}"
