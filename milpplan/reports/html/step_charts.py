"""Charts of a step and of a search that several pages share: time, memory, course, and pruned layouts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Final

import numpy as np

from milpplan.reports.documents.document import REASON_WORDS, BoundClassDocument
from milpplan.reports.html.charts import Line, Part, distinct_texts, line_chart, round_levels, stacked_bar
from milpplan.reports.words.plan_words import MEMORY_PARTS, TIME_PARTS
from milpplan.simulation.report import StepReport
from milpplan.units import gib_text, seconds_text

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
