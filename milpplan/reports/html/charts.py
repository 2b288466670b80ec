"""Charts as HTML and inline SVG, without a script: bars, and step lines.

A drawing fills the given width; texts are HTML beside it, so that they keep their size on a phone. Colours are
classes (``c0`` to ``c9``) that the page's style defines for light and dark mode.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from milpplan.simulation.layout_columns import FloatArray

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
