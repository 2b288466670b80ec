"""Best plan so far against evaluations, as one SVG: a panel a problem, a line a tuner, with its quartiles."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

import numpy as np

from benchmarks.tuner_search import TunerRun
from milpplan.simulation.layout_columns import FloatArray
from milpplan.units import percent_text

Panel = tuple[str, float, Mapping[str, Sequence[TunerRun]]]
"""Title, optimal step time in seconds, and the runs of every tuner."""

WIDTH, HEIGHT, LEFT, TOP, GAP = 250, 190, 64, 30, 34
"""Pixels of a panel, of what is left of it and above it, and under it."""
COLOURS = ("#7f7f7f", "#1f77b4", "#2ca02c", "#d62728", "#9467bd")
LOWEST, HIGHEST = 1e-3, 2.0
"""Step time above the optimum, relative: the ends of the logarithmic axis; the lower one is the target."""
TICKS = (0.001, 0.01, 0.1, 1.0)
POINTS = 120


def figure(panels: Sequence[Panel], columns: int = 2) -> str:
    """The panels in rows of ``columns``, and a legend below."""
    names = list(dict.fromkeys(name for _, _, runs in panels for name in runs))
    columns = max(1, min(columns, len(panels)))
    rows = -(-len(panels) // columns)
    width = columns * (LEFT + WIDTH) + 20
    height = rows * (TOP + HEIGHT + GAP) + 60
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="11"><rect width="{width}" height="{height}" fill="white"/>'
    ]
    for index, panel in enumerate(panels):
        row, column = divmod(index, columns)
        parts.append(
            f'<g transform="translate({column * (LEFT + WIDTH) + LEFT},{row * (TOP + HEIGHT + GAP) + TOP})">'
        )
        parts += [*_axes(panel), *_lines(panel, names), "</g>"]
    parts += [_legend(names, LEFT, height - 28), "</svg>\n"]
    return "\n".join(parts)


def _most(panel: Panel) -> int:
    return max((2, *(run.evaluations for runs in panel[2].values() for run in runs)))


def _axes(panel: Panel) -> list[str]:
    """Frame, title, lines and labels of both logarithmic axes."""
    parts = [
        f'<text x="{WIDTH / 2}" y="-8" text-anchor="middle" font-weight="bold">{escape(panel[0])}</text>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#444"/>',
        f'<text x="{WIDTH / 2}" y="{HEIGHT + 27}" text-anchor="middle">evaluations</text>',
        f'<text transform="translate(-46,{HEIGHT / 2}) rotate(-90)" text-anchor="middle">above the optimum</text>',
    ]
    for level in TICKS:
        y = _y(level)
        parts.append(f'<path d="M0 {y:.1f}H{WIDTH}" stroke="#ddd"/>')
        label = percent_text(level, 1 if level < LOWEST * 10 else 0)
        parts.append(f'<text x="-5" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    most = _most(panel)
    for power in range(int(math.log10(most)) + 1):
        x = _x(10**power, most)
        parts.append(f'<path d="M{x:.1f} 0V{HEIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT + 14}" text-anchor="middle">{10**power:,}</text>')
    return parts


def _lines(panel: Panel, names: Sequence[str]) -> list[str]:
    """A band between the quartiles and a line for the median of each tuner, as far as its longest run goes."""
    _, best_s, by_tuner = panel
    parts, most = [], _most(panel)
    for name, runs in by_tuner.items():
        colour = COLOURS[names.index(name) % len(COLOURS)]
        longest = max(2, max(run.evaluations for run in runs))
        counts = np.unique(np.round(np.geomspace(1, longest, POINTS)))
        low, middle, high = quartiles(runs, best_s, counts)
        xs = [_x(count, most) for count in counts]
        there = [(x, _y(a), _y(b)) for x, a, b in zip(xs, low, high, strict=True)]
        ring = [(x, top) for x, _, top in there] + [(x, bottom) for x, bottom, _ in reversed(there)]
        parts.append(f'<path d="{_path(ring)}Z" fill="{colour}" opacity="0.15"/>')
        line = [(x, _y(value)) for x, value in zip(xs, middle, strict=True)]
        parts.append(f'<path d="{_path(line)}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
    return parts


def quartiles(runs: Sequence[TunerRun], best_s: float, counts: FloatArray) -> FloatArray:
    """Step time above the optimum, relative, [3, counts]: lower quartile, median, upper quartile of the best plan
    after so many evaluations; infinite where nothing fitted yet."""
    left = np.array([[run.best_s(float(count)) / best_s - 1 for count in counts] for run in runs])
    return np.asarray(np.quantile(left, [0.25, 0.5, 0.75], axis=0, method="inverted_cdf"))


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _x(count: float, most: int) -> float:
    return WIDTH * math.log(count) / math.log(most)


def _y(left: float) -> float:
    inside = min(max(left, LOWEST), HIGHEST)
    return HEIGHT * (math.log(HIGHEST) - math.log(inside)) / (math.log(HIGHEST) - math.log(LOWEST))


def _legend(names: Sequence[str], x: float, y: float) -> str:
    parts = []
    for index, name in enumerate(names):
        colour = COLOURS[index % len(COLOURS)]
        parts.append(f'<path d="M{x:.0f} {y}h18" stroke="{colour}" stroke-width="3"/>')
        parts.append(f'<text x="{x + 23:.0f}" y="{y + 4}">{escape(name)}</text>')
        x += 36 + 6 * len(name)
    return "\n".join(parts)
