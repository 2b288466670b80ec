"""Predicted against measured values as SVG files: a point per run, logarithmic axes, and a line of equality."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Final

from milpplan.reports import write_whole
from milpplan.reports.files import make_directory
from milpplan.units import GIB, gib_text, percent_text, printable, seconds_text, times_text
from milpplan.validation.comparison import Comparison, Validation
from milpplan.validation.ranking import competitions

SIZE: Final = 640
MARGIN: Final = 96
"""Margin in pixels. The widest labels, such as 100.0 GiB, take 70 pixels and the name of the axis 16."""
LEGEND: Final = 322
LINE: Final = 18
"""Height of a legend row in pixels."""
CHARACTER: Final = 8
"""Width of a character in pixels, rounded up, so that axis labels at this distance do not touch."""
MANTISSAS: Final = (tuple(tenth / 10 for tenth in range(10, 100)), tuple(half / 2 for half in range(2, 20)),
    tuple(map(float, range(1, 10))), (1.0, 2.0, 5.0), (1.0, 3.0), (1.0,))  # fmt: skip
"""Positions of labels within a decade, from the densest choice to the sparsest."""
LONGEST: Final = 32
"""Maximum number of characters of a source's name in the legend."""
NEAR: Final = 0.1
"""Relative error of the dashed lines."""
COLOURS: Final = (
    "#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf",
)  # fmt: skip
MARKS: Final = ("M-1 0a1 1 0 1 0 2 0a1 1 0 1 0 -2 0Z", "M-.9-.9H.9V.9H-.9Z", "M0-1.2L1.2 0L0 1.2L-1.2 0Z")
"""Circle, square and diamond with a radius of about 1; each is used for as many sources as there are colours."""
Point = tuple[str, str, float, float]
"""Source, id, measured value, predicted value."""


def write_figures(validation: Validation, directory: Path) -> list[Path]:
    """Write ``step_time_GENERATION.svg`` for every generation, ``sweeps.svg`` and ``memory.svg``, where there are
    runs.

    Returns:
        The paths of the written files.

    Raises:
        InvalidInputError: the directory cannot be made or written to.
    """
    make_directory(directory, "--plot")
    figures: dict[str, str] = {}
    by_generation: dict[str, list[Point]] = defaultdict(list)
    for comparison in validation.comparisons:
        if comparison.scored and comparison.step is not None:
            point = (
                comparison.run.group,
                comparison.run.id,
                comparison.step.step_time_s,
                comparison.report.step_time_s,
            )
            by_generation[comparison.generation].append(point)
    for generation, points in sorted(by_generation.items()):
        name = "".join(char if char.isalnum() else "_" for char in generation.lower())
        figures[f"step_time_{name}.svg"] = scatter(points, f"Step time, {generation}", seconds_text, unit=1.0)
    order = [point for members in competitions(validation.comparisons) for point in _order_points(members)]
    if order:
        figures["sweeps.svg"] = scatter(order, "Step time over the fastest of its sweep", times_text, unit=1.0)
    memory = [point for comparison in validation.comparisons for point in _memory_points(comparison)]
    if memory:
        figures["memory.svg"] = scatter(memory, "Peak memory", gib_text, unit=GIB)
    for name, text in figures.items():
        write_whole(directory / name, text)
    return [directory / name for name in figures]


def _order_points(members: Sequence[Comparison]) -> list[Point]:
    """Make a point per finished run of a sweep: step times relative to the minimum measured and predicted ones."""
    times = [
        (comparison.run, comparison.step.step_time_s, comparison.report.step_time_s)
        for comparison in members
        if comparison.step is not None
    ]
    measured, predicted = min(took for _, took, _ in times), min(time_s for _, _, time_s in times)
    return [(run.group, run.id, took / measured, time_s / predicted) for run, took, time_s in times]


def _memory_points(comparison: Comparison) -> list[Point]:
    """Make a point per group of ranks and kind of memory; the name of a source with several kinds includes the
    kind."""
    if "old_pp_engine" in comparison.run.flags:
        return []
    several = len({measure.kind for measure in comparison.memories}) > 1
    return [
        (
            f"{comparison.run.group}, {measure.kind}" if several else comparison.run.group,
            comparison.run.id if measure.stage is None else f"{comparison.run.id}, stage {measure.stage}",
            measure.peak_bytes,
            comparison.predicted_peak(measure),
        )
        for measure in comparison.memories
    ]


def scatter(points: Sequence[Point], title: str, words: Callable[[float], str], *, unit: float) -> str:
    """Draw an SVG of positive (measured, predicted) pairs.

    Args:
        points: the pairs, with source and id.
        title: of the figure.
        words: turns a value into a label.
        unit: the axes are labelled at round numbers of this unit.
    """
    values = [value for point in points for value in point[2:]]
    low, high = math.log10(min(values)) - 0.05, math.log10(max(values)) + 0.05
    span = SIZE - 2 * MARGIN

    def place(value: float) -> float:
        return span * (math.log10(value) - low) / (high - low)

    groups = sorted({point[0] for point in points})
    marks = {group: _mark(index) for index, group in enumerate(groups)}
    parts = [_frame(title, len(groups)), _diagonals(low, high, span)]
    for value in _labelled(low, high, span, unit, words):
        at, label = place(value), escape(words(value))
        x, y = MARGIN + at, SIZE - MARGIN - at
        parts.append(
            f'<path d="M{x:.1f} {SIZE - MARGIN}v5M{MARGIN} {y:.1f}h-5" stroke="#888"/>'
            f'<text x="{x:.1f}" y="{SIZE - MARGIN + 18}" text-anchor="middle">{label}</text>'
            f'<text x="{MARGIN - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
        )
    for group, name, measured, predicted in points:
        x, y = MARGIN + place(measured), SIZE - MARGIN - place(predicted)
        told = escape(printable(f"{name}: measured {words(measured)}, predicted {words(predicted)}"))
        parts.append(
            f'<path transform="translate({x:.1f} {y:.1f}) scale(2.5)" {marks[group]} fill-opacity="0.6">'
            f"<title>{told}</title></path>"
        )
    return "\n".join([*parts, _legend(marks), "</svg>", ""])


def _labelled(low: float, high: float, span: float, unit: float, words: Callable[[float], str]) -> list[float]:
    """List round numbers of ``unit`` between 10**low and 10**high whose labels fit on ``span`` pixels."""
    decades = range(math.floor(low - math.log10(unit)), math.ceil(high - math.log10(unit)) + 1)
    labels: list[float] = []
    for mantissas in MANTISSAS:
        values = [unit * mantissa * 10.0**decade for decade in decades for mantissa in mantissas]
        labels = [value for value in values if low <= math.log10(value) <= high]
        gaps = [span * math.log10(after / before) / (high - low) for before, after in pairwise(labels)]
        if min(gaps, default=math.inf) >= CHARACTER * max((len(words(value)) for value in labels), default=0):
            break
    return labels


def _mark(index: int) -> str:
    """Return shape and colour of a source, as attributes of a path."""
    shape = MARKS[index // len(COLOURS) % len(MARKS)]
    return f'd="{shape}" fill="{COLOURS[index % len(COLOURS)]}"'


def _legend(marks: Mapping[str, str]) -> str:
    """Draw a row per source and explain the lines; names too long for the figure end in an ellipsis."""
    x, rows = SIZE - MARGIN + 52, []
    for index, (group, mark) in enumerate(marks.items()):
        y, name = MARGIN + LINE * index, printable(group)
        name = name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}\N{HORIZONTAL ELLIPSIS}"
        rows.append(
            f'<path transform="translate({x} {y}) scale(4)" {mark}/>'
            f'<text x="{x + 14}" y="{y + 4}">{escape(name)}</text>'
        )
    for index, (dash, name) in enumerate((("none", "equal"), ("4 4", f"{percent_text(NEAR, 0)} more or less"))):
        y = MARGIN + LINE * (len(marks) + 1 + index)
        rows.append(
            f'<path d="M{x - 8} {y}h16" stroke="#888" stroke-dasharray="{dash}"/>'
            f'<text x="{x + 14}" y="{y + 4}">{name}</text>'
        )
    return "\n".join(rows)


def _frame(title: str, num_groups: int) -> str:
    """Draw title, frame and names of the axes, on a page high enough for the legend."""
    span = SIZE - 2 * MARGIN
    height = max(SIZE, MARGIN + LINE * (num_groups + 4))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{SIZE + LEGEND - MARGIN}" height="{height}" '
        'font-family="sans-serif" font-size="12">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n'
        f'<text x="{MARGIN}" y="{MARGIN - 20}" font-size="16">{escape(printable(title))}</text>\n'
        f'<rect x="{MARGIN}" y="{MARGIN}" width="{span}" height="{span}" fill="none" stroke="#888"/>\n'
        f'<text x="{SIZE / 2:.0f}" y="{SIZE - MARGIN + 42}" text-anchor="middle">measured</text>\n'
        f'<text transform="translate(16 {SIZE / 2:.0f}) rotate(-90)" text-anchor="middle">predicted</text>'
    )


def _diagonals(low: float, high: float, span: float) -> str:
    """Draw the line of equality, and lines at the error ``NEAR`` on either side."""
    lines = []
    for factor, dash in ((1.0, "none"), (1 + NEAR, "4 4"), (1 - NEAR, "4 4")):
        shift = span * math.log10(factor) / (high - low)
        first, last = max(0.0, -shift), span - max(0.0, shift)
        lines.append(
            f'<line x1="{MARGIN + first:.1f}" y1="{SIZE - MARGIN - first - shift:.1f}" '
            f'x2="{MARGIN + last:.1f}" y2="{SIZE - MARGIN - last - shift:.1f}" stroke="#888" '
            f'stroke-dasharray="{dash}"/>'
        )
    return "\n".join(lines)
