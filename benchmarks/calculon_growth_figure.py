"""The growth of both costs as small panels of one SVG, each cost relative to that on the fewest processors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from milpplan.units import seconds_text

Line = Sequence[tuple[int, float, float]]
"""Processors, seconds and their standard error."""
WIDTH, HEIGHT, ACROSS = 250, 190, 4
COLOURS = ("#1f77b4", "#d62728")
NAMES = ("milpplan, to the proof", "Calculon, extrapolated to its whole space")
TICKS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)


def growth_figure(series: Mapping[str, tuple[Line, Line]]) -> str:
    """A panel for each series: our line and Calculon's; bars are two standard errors each way."""
    down = math.ceil(len(series) / ACROSS)
    wide, high = ACROSS * WIDTH + 20, down * HEIGHT + 60
    values = [point[1] / line[0][1] for pair in series.values() for line in pair for point in line]
    low, top = min([0.5, *values]) / 1.15, max([2.0, *values]) * 1.15
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" height="{high}"',
        'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        '<text x="20" y="20">CPU seconds relative to those on 64 processors (in the corner: seconds on 64)</text>',
    ]
    for index, (name, colour) in enumerate(zip(NAMES, COLOURS, strict=True)):
        parts.append(f'<path d="M{20 + 190 * index} 38h20" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{45 + 190 * index}" y="42">{name}</text>')
    for index, (name, pair) in enumerate(series.items()):
        corner = (20 + WIDTH * (index % ACROSS), 55 + HEIGHT * (index // ACROSS))
        parts += _panel(name, pair, corner, (low, top))
    return "\n".join([*parts, "</svg>", ""])


def _panel(name: str, pair: tuple[Line, Line], corner: tuple[int, int], limits: tuple[float, float]) -> list[str]:
    """Axes and both lines of one series."""
    left, top = corner[0] + 30, corner[1] + 18
    wide, high = WIDTH - 50, HEIGHT - 55
    procs = [point[0] for point in pair[0]]
    first, last = math.log2(procs[0]), math.log2(procs[-1])
    low, most = (math.log2(value) for value in limits)

    def place(number: float, relative: float) -> tuple[float, float]:
        x = left + wide * (math.log2(number) - first) / max(1.0, last - first)
        return x, top + high * (most - math.log2(max(relative, 1e-9))) / (most - low)

    parts = [f'<text x="{left}" y="{corner[1] + 10}" font-weight="bold">{name}</text>']
    for tick in TICKS:
        if limits[0] <= tick <= limits[1]:
            y = place(procs[0], tick)[1]
            parts.append(f'<path d="M{left} {y:.1f}h{wide}" stroke="{"#999" if tick == 1 else "#e4e4e4"}"/>')
            parts.append(f'<text x="{left - 4}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for number in procs:
        x = place(number, 1.0)[0]
        parts.append(
            f'<text x="{x:.1f}" y="{top + high + 13}" text-anchor="middle" font-size="9">{number:,}</text>'
        )
    for index, (line, colour) in enumerate(zip(pair, COLOURS, strict=True)):
        start = line[0][1]
        at = [place(number, seconds / start) for number, seconds, _ in line]
        way = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
        parts.append(f'<polyline points="{way}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        for number, seconds, error in line:
            (x, up), (_, down) = (place(number, (seconds + 2 * sign * error) / start) for sign in (1, -1))
            parts.append(f'<path d="M{x:.1f} {up:.1f}V{down:.1f}" stroke="{colour}" stroke-width="3"/>')
        corner_y = top + high - 6 - 13 * (1 - index)
        parts.append(f'<text x="{left + 5}" y="{corner_y}" fill="{colour}">{seconds_text(start)}</text>')
    return parts
