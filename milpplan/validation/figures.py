"""Predicted against measured as SVG files: a point a run, logarithmic axes, a line where both are equal."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Final

from milpplan.errors import InvalidInputError
from milpplan.reports.files import write_whole
from milpplan.reports.terminal import printable
from milpplan.specs.reading import shown
from milpplan.units import gib_text, seconds_text
from milpplan.validation.comparison import Comparison, Validation

SIZE: Final = 640
MARGIN: Final = 80
LEGEND: Final = 260
COLOURS: Final = (
    "#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf",
)  # fmt: skip
Point = tuple[str, str, float, float]
"""Source, id, measured, predicted."""


def write_figures(validation: Validation, directory: Path) -> list[Path]:
    """Write ``step_time_GENERATION.svg`` for every generation and ``memory.svg``; returns what was written.

    Raises:
        InvalidInputError: the directory cannot be made or written to.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInputError(
            f"{shown(str(directory))} cannot be made: {error}.", "Expected a directory.", "Give another path."
        ) from error
    written = []
    by_generation: dict[str, list[Point]] = defaultdict(list)
    for one in validation.comparisons:
        if one.scored and one.step is not None:
            point = (one.run.group, one.run.id, one.step.step_time_s, one.report.step_time_s)
            by_generation[one.generation].append(point)
    for generation, points in sorted(by_generation.items()):
        name = "".join(char if char.isalnum() else "_" for char in generation.lower())
        text = scatter(points, f"Step time, {generation}", seconds_text)
        written.append(_written(directory / f"step_time_{name}.svg", text))
    memory = [found for one in validation.comparisons if (found := _memory_point(one)) is not None]
    if memory:
        written.append(_written(directory / "memory.svg", scatter(memory, "Peak memory", gib_text)))
    return written


def _memory_point(one: Comparison) -> Point | None:
    if one.memory is None or "old_pp_engine" in one.run.flags:
        return None
    return one.run.group, one.run.id, one.memory.peak_bytes, one.predicted_memory_bytes


def _written(path: Path, text: str) -> Path:
    write_whole(path, text)
    return path


def scatter(points: Sequence[Point], title: str, words: object) -> str:
    """An SVG of positive (measured, predicted) pairs; ``words`` turns a value into a label."""
    assert callable(words)
    values = [value for point in points for value in point[2:]]
    low, high = math.log10(min(values)), math.log10(max(values))
    low, high = low - 0.05, high + 0.05
    span = SIZE - 2 * MARGIN

    def place(value: float) -> float:
        return span * (math.log10(value) - low) / (high - low)

    groups = sorted({point[0] for point in points})
    colours = {group: COLOURS[index % len(COLOURS)] for index, group in enumerate(groups)}
    parts = [_frame(title), _diagonals(low, high, span)]
    for exponent in range(math.ceil(low), math.floor(high) + 1):
        at, label = place(10.0**exponent), escape(str(words(10.0**exponent)))
        parts.append(
            f'<text x="{MARGIN + at:.1f}" y="{SIZE - MARGIN + 18}" text-anchor="middle">{label}</text>'
            f'<text x="{MARGIN - 6}" y="{SIZE - MARGIN - at + 4:.1f}" text-anchor="end">{label}</text>'
        )
    for group, name, measured, predicted in points:
        x, y = MARGIN + place(measured), SIZE - MARGIN - place(predicted)
        told = escape(printable(f"{name}: measured {words(measured)}, predicted {words(predicted)}"))
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colours[group]}" fill-opacity="0.6">'
            f"<title>{told}</title></circle>"
        )
    for index, group in enumerate(groups):
        y = MARGIN + 18 * index
        parts.append(
            f'<circle cx="{SIZE - MARGIN + 20}" cy="{y}" r="4" fill="{colours[group]}"/>'
            f'<text x="{SIZE - MARGIN + 30}" y="{y + 4}">{escape(printable(group))}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


def _frame(title: str) -> str:
    span = SIZE - 2 * MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{SIZE + LEGEND}" height="{SIZE}" '
        'font-family="sans-serif" font-size="12">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n'
        f'<text x="{MARGIN}" y="{MARGIN - 20}" font-size="16">{escape(printable(title))}</text>\n'
        f'<rect x="{MARGIN}" y="{MARGIN}" width="{span}" height="{span}" fill="none" stroke="#888"/>\n'
        f'<text x="{SIZE / 2:.0f}" y="{SIZE - MARGIN + 42}" text-anchor="middle">measured</text>\n'
        f'<text transform="translate(16 {SIZE / 2:.0f}) rotate(-90)" text-anchor="middle">predicted</text>'
    )


def _diagonals(low: float, high: float, span: float) -> str:
    """Equality, and 10 per cent to either side."""
    lines = []
    for factor, dash in ((1.0, "none"), (1.1, "4 4"), (1 / 1.1, "4 4")):
        shift = span * math.log10(factor) / (high - low)
        first, last = max(0.0, -shift), span - max(0.0, shift)
        lines.append(
            f'<line x1="{MARGIN + first:.1f}" y1="{SIZE - MARGIN - first - shift:.1f}" '
            f'x2="{MARGIN + last:.1f}" y2="{SIZE - MARGIN - last - shift:.1f}" stroke="#888" '
            f'stroke-dasharray="{dash}"/>'
        )
    return "\n".join(lines)
