"""How both costs grow with the number of processors: GPT-3 175B on 64 to 16,384, a sequence a processor and at
least 512."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks import calculon_space
from benchmarks.calculon_complete import Solved, solved
from benchmarks.calculon_full import whole_space
from benchmarks.calculon_side import Checkout, Tree, search_problem
from benchmarks.calculon_space import Cost
from benchmarks.tables import markdown_table
from milpplan.units import gap_text, seconds_text

GROWTH = (64, 256, 1024, 4096, 16384)
MODEL = "gpt3-175B"
REPEATS = 3


@dataclass(frozen=True, slots=True)
class Grown:
    """One number of processors: the proof (of ``REPEATS`` the one with the median of CPU seconds), and Calculon's
    whole space."""

    procs: int
    ours: Solved
    theirs: Cost


def grown(checkout: Checkout, system: Tree, procs: int, sample: int) -> Grown:
    """Both costs."""
    model, batch = checkout.files("models")[MODEL], max(512, procs)
    problem = search_problem(model, system, procs, batch, whole_space())
    runs = sorted((solved(problem)[0] for _ in range(REPEATS)), key=lambda one: one.cpu_s)
    cost = calculon_space.cost(checkout, model, system, procs, batch, sample)
    return Grown(procs, runs[REPEATS // 2], cost)


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Exponent of the growth with the processors: least squares of the logarithms."""
    x, y = (np.log([point[axis] for point in points]) for axis in (0, 1))
    return float(np.polyfit(x, y, 1)[0])


def growth_table(all_: Sequence[Grown]) -> str:
    """Seconds by processors, and the exponents of their growth."""
    rows = [
        (
            f"{one.procs:,}",
            f"{one.ours.status}, gap {gap_text(one.ours.gap or 0.0)}",
            f"{one.ours.legal:,}",
            seconds_text(one.ours.wall_s),
            seconds_text(one.ours.cpu_s),
            f"{one.theirs.executions:,}",
            f"{one.theirs.number[0]:,}",
            f"{one.theirs.cpu_s / 3600:.1f} ± {one.theirs.standard_error_s / 3600:.1f} h",
            f"{one.theirs.cpu_s / one.ours.cpu_s:,.0f}",
        )
        for one in all_
    ]
    series = (
        [(g.procs, g.ours.legal) for g in all_],
        [(g.procs, g.ours.cpu_s) for g in all_],
        [(g.procs, g.theirs.executions) for g in all_],
        [(g.procs, g.theirs.number[0]) for g in all_],
        [(g.procs, g.theirs.cpu_s) for g in all_],
    )
    legal, ours, executions, estimated, theirs = (f"{slope(points):+.3f}" for points in series)
    rows.append(("exponent", "", legal, "", ours, executions, estimated, theirs, ""))
    header = (
        "processors",
        "milpplan",
        "legal layouts",
        "wall",
        "CPU",
        "Calculon's executions",
        "of them estimated",
    )
    return markdown_table((*header, "CPU, extrapolated", "ratio of CPU"), rows)


def growth_figure(all_: Sequence[Grown]) -> str:
    """Both growths as an SVG with logarithmic axes; bars are two standard errors each way."""
    theirs = [(g.procs, g.theirs.cpu_s, 2 * g.theirs.standard_error_s) for g in all_]
    series = {
        "Calculon, extrapolated to its whole space (CPU)": theirs,
        "milpplan, to the proof (CPU)": [(g.procs, g.ours.cpu_s, 0.0) for g in all_],
    }
    values = [point[1] for points in series.values() for point in points]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    first, last = math.log2(min(g.procs for g in all_)), math.log2(max(g.procs for g in all_))

    def place(procs: float, seconds: float) -> tuple[float, float]:
        x = 80 + 460 * (math.log2(procs) - first) / max(1.0, last - first)
        return x, 340 - 300 * (math.log10(seconds) - low) / (high - low)

    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="620" height="420" font-family="sans-serif"',
        'font-size="12">',
        '<rect width="100%" height="100%" fill="white"/><path d="M80 40V340H560" fill="none" stroke="#888"/>',
        '<text x="320" y="395" text-anchor="middle">processors (GPT-3 175B, A100)</text>',
    ]
    for power in range(low, high + 1):
        y = place(all_[0].procs, 10.0**power)[1]
        label = seconds_text(10.0**power)
        parts.append(f'<path d="M75 {y:.1f}h485" stroke="#ddd"/><text x="70" y="{y + 4:.1f}" text-anchor="end">')
        parts.append(f"{label}</text>")
    for one in all_:
        x = place(one.procs, 10.0**low)[0]
        parts.append(f'<text x="{x:.1f}" y="360" text-anchor="middle">{one.procs:,}</text>')
    for (name, points), colour in zip(series.items(), ("#d62728", "#1f77b4"), strict=True):
        at = [place(procs, seconds) for procs, seconds, _ in points]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for (x, y), (procs, seconds, error) in zip(at, points, strict=True):
            top, bottom = (place(procs, seconds + sign * error)[1] for sign in (1, -1))
            parts.append(f'<path d="M{x:.1f} {top:.1f}V{bottom:.1f}" stroke="{colour}" stroke-width="4"/>')
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>')
        parts.append(f'<text x="90" y="{min(y for _, y in at) - 12:.1f}" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])
