"""How the time of a proof grows with the GPUs, the layers and the switches that a solve decides on.

    python -m benchmarks.growth [--series NAME ...] [--save FILE.json] [--write]

gpus       Llama-3 70B on 64 to 131,072 GPUs of dgx-h100, a sequence a GPU (at least 128), to 1e-4
layers     Llama-3 8B with 32 to 512 layers on 256 GPUs, batch 256, to 1e-4
switches   DeepSeek-V3 on 2,048 GPUs, batch 15,360: all schedules, then the switches of ``--allow``, each beside
           those before it, to 1e-3

Every solve is a process of its own in the free space (``benchmarks.commands``), stopped after 60 CPU seconds; they
include the start of Python. Quick solves count with the median of three.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Final

from benchmarks.commands import Command, Run, measure_all, median_cpu_s, outcome_text
from benchmarks.tables import markdown_table, measured_on, replace_section
from milpplan import load_model
from milpplan.reports.files import write_whole
from milpplan.units import gib_text, seconds_text

RESULTS: Final = Path(__file__).with_name("results")
GPUS: Final = tuple(2**power for power in range(6, 18))
LAYERS: Final = (32, 48, 64, 96, 128, 256, 512)
SWITCHES: Final = ("offload", "tp-overlap", "scatter-gather", "kept-gathered", "placement")
TOLERANCES: Final = {"gpus": 1e-4, "layers": 1e-4, "switches": 1e-3}


@dataclass(frozen=True, slots=True)
class Axis:
    """The horizontal axis of a series: its title, its logarithm or even steps, and the marks that get a label."""

    title: str
    note: str
    logarithmic: bool
    labels: Mapping[float, str]


@dataclass(frozen=True, slots=True)
class Point:
    """One solve of a series: position on the axis, median CPU seconds, legal layouts, and the last run."""

    position: float
    cpu_s: float
    run: Run


AXES: Final = {
    "gpus": Axis(
        "GPUs",
        "Llama-3 70B",
        True,
        {64: "64", 1024: "1,024", 16384: "16,384", 131072: "131,072"},
    ),
    "layers": Axis(
        "layers",
        "Llama-3 8B made deeper, 256 GPUs",
        True,
        {layers: f"{layers}" for layers in (32, 64, 128, 256, 512)},
    ),
    "switches": Axis(
        "decided on as well, each beside those before it",
        "DeepSeek-V3, 2,048 GPUs",
        False,
        dict(enumerate(("default", "schedules", *SWITCHES))),
    ),
}


def commands(series: str, folder: Path) -> dict[float, Command]:
    """List the solves of a series.

    Args:
        folder: For the files of models that the package does not ship.

    Returns:
        The commands by position on the axis.
    """
    gap = TOLERANCES[series]
    if series == "gpus":
        return {
            gpus: Command(f"{gpus:,}", f"llama3-70b dgx-h100 --gpus {gpus} --global-batch {max(128, gpus)}", gap)
            for gpus in GPUS
        }
    if series == "layers":
        return {
            layers: Command(
                f"{layers}", f"{deeper_model(layers, folder)} dgx-h100 --gpus 256 --global-batch 256", gap
            )
            for layers in LAYERS
        }
    found, arguments = {}, "deepseek-v3 dgx-h100 --gpus 2048 --global-batch 15360"
    for index, switch in enumerate(("default", "schedules", *SWITCHES)):
        arguments += {"default": "", "schedules": " --schedule all"}.get(switch, f" --allow {switch}")
        found[float(index)] = Command(switch if index < 1 else f"+ {switch}", arguments, gap)
    return found


def deeper_model(layers: int, folder: Path) -> Path:
    """Write Llama-3 8B with another number of layers."""
    model = load_model("llama3-8b")
    (run,) = model.layers
    deeper = model.model_copy(
        update={"name": f"llama3-8b, {layers} layers", "layers": (run.model_copy(update={"count": layers}),)}
    )
    path = folder / f"layers-{layers}.json"
    write_whole(path, deeper.model_dump_json())
    return path


def growth_table(series: str, named: Mapping[float, Command], points: Sequence[Point]) -> str:
    """Build the table of a series."""
    first = {"gpus": "GPUs", "layers": "layers", "switches": "decided on as well"}[series]
    rows = [
        (
            named[point.position].text,
            f"{point.run.legal:,}",
            seconds_text(point.cpu_s),
            outcome_text([point.run]),
            "-" if point.run.step_time_s is None else seconds_text(point.run.step_time_s),
            gib_text(point.run.peak_bytes),
        )
        for point in points
    ]
    return markdown_table((first, "legal layouts", "CPU", "gap", "step", "memory"), rows)


WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 270, 220, 58, 66, 92
"""Pixels of a panel, and of what is left of it and right of it, above it and under it."""
TIME_COLOUR, COUNT_COLOUR = "#1f77b4", "#b35900"
SECONDS: Final = (0.5, 1, 2, 5, 10, 20, 50, 100, 200)
COUNTS: Final = tuple(10**power for power in range(3, 13))


def growth_figure(found: Mapping[str, Sequence[Point]]) -> str:
    """Draw a panel for each series: CPU seconds on the left axis, legal layouts on the right one."""
    every = [point for points in found.values() for point in points]
    times = _axis_limits([point.cpu_s for point in every], SECONDS)
    counts = _axis_limits([point.run.legal for point in every], COUNTS)
    pitch = WIDTH + 2 * LEFT
    wide, high = pitch * len(found), TOP + HEIGHT + BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" height="{high}" '
        'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>'
    ]
    keys = (
        (TIME_COLOUR, "", "CPU seconds of the solve, start of Python included (hollow: not proved)"),
        (COUNT_COLOUR, "4 3", "legal layouts of the space"),
    )
    for index, (colour, dashes, text) in enumerate(keys):
        x = LEFT + 520 * index
        parts.append(f'<path d="M{x} 18h26" stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes}"/>')
        parts.append(f'<text x="{x + 32}" y="22">{text}</text>')
    for index, (series, points) in enumerate(found.items()):
        parts.append(f'<g transform="translate({index * pitch + LEFT},{TOP})">')
        parts += [
            *_panel_axes(AXES[series], times, counts),
            *_panel_lines(AXES[series], points, times, counts),
        ]
        parts.append("</g>")
    return "\n".join([*parts, "</svg>", ""])


Limits = tuple[float, float]


def _axis_limits(values: Sequence[float], ticks: Sequence[float]) -> Limits:
    """Return the ticks that enclose all values."""
    low = max((tick for tick in ticks if tick <= min(values)), default=ticks[0])
    return low, min((tick for tick in ticks if tick >= max(values)), default=ticks[-1])


def _x(axis: Axis, position: float) -> float:
    first, last = min(axis.labels), max(axis.labels)
    if axis.logarithmic:
        first, last, position = math.log(first), math.log(last), math.log(position)
    return 10 + (WIDTH - 20) * (position - first) / max(last - first, 1e-9)


def _y(value: float, limits: Limits) -> float:
    low, high = limits
    return HEIGHT * (math.log(high) - math.log(value)) / (math.log(high) - math.log(low))


def _count_label(count: float) -> str:
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:g}{letter}"
    return f"{count:g}"


def _panel_axes(axis: Axis, times: Limits, counts: Limits) -> list[str]:
    """Draw the frame, the title, and the ticks of the three axes with their labels."""
    parts = [
        f'<text x="{WIDTH / 2}" y="-10" text-anchor="middle" font-weight="bold">{escape(axis.note)}</text>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#444"/>',
        f'<text transform="translate(-36,{HEIGHT / 2}) rotate(-90)" text-anchor="middle" '
        f'fill="{TIME_COLOUR}">CPU s</text>',
        f'<text transform="translate({WIDTH + 44},{HEIGHT / 2}) rotate(-90)" text-anchor="middle" '
        f'fill="{COUNT_COLOUR}">legal layouts</text>',
    ]
    for tick in SECONDS:
        if times[0] <= tick <= times[1]:
            y = _y(tick, times)
            parts.append(f'<path d="M0 {y:.1f}H{WIDTH}" stroke="#e2e2e2"/>')
            parts.append(f'<text x="-6" y="{y + 4:.1f}" text-anchor="end" fill="{TIME_COLOUR}">{tick:g}</text>')
    for tick in COUNTS:
        if counts[0] <= tick <= counts[1]:
            y = _y(tick, counts)
            parts.append(f'<path d="M{WIDTH - 4} {y:.1f}h4" stroke="{COUNT_COLOUR}"/>')
            parts.append(
                f'<text x="{WIDTH + 5}" y="{y + 4:.1f}" fill="{COUNT_COLOUR}">{_count_label(tick)}</text>'
            )
    for position, label in axis.labels.items():
        x = _x(axis, position)
        parts.append(f'<path d="M{x:.1f} {HEIGHT}v-4" stroke="#444"/>')
        if axis.logarithmic:
            parts.append(f'<text x="{x:.1f}" y="{HEIGHT + 15}" text-anchor="middle">{label}</text>')
        else:
            parts.append(
                f'<text transform="translate({x + 4:.1f},{HEIGHT + 13}) rotate(-35)" text-anchor="end">'
                f"{label}</text>"
            )
    title_y = HEIGHT + (36 if axis.logarithmic else 84)
    parts.append(f'<text x="{WIDTH / 2}" y="{title_y}" text-anchor="middle">{escape(axis.title)}</text>')
    return parts


def _panel_lines(axis: Axis, points: Sequence[Point], times: Limits, counts: Limits) -> list[str]:
    """Draw the line of the times with a circle a solve, hollow without a proof, and the line of the counts."""
    at = [(_x(axis, point.position), _y(point.cpu_s, times)) for point in points]
    layouts = [
        f"{_x(axis, point.position):.1f},{_y(point.run.legal, counts):.1f}" for point in points if point.run.legal
    ]
    parts = [
        f'<polyline points="{" ".join(layouts)}" fill="none" stroke="{COUNT_COLOUR}" stroke-width="1.6" '
        'stroke-dasharray="4 3"/>',
        f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in at)}" fill="none" stroke="{TIME_COLOUR}" '
        'stroke-width="2"/>',
    ]
    for (x, y), point in zip(at, points, strict=True):
        fill = TIME_COLOUR if point.run.status == "optimal" else "white"
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.4" fill="{fill}" stroke="{TIME_COLOUR}"/>')
    return parts


def measured(series: str, save: Path | None, folder: Path) -> tuple[dict[float, Command], list[Point]]:
    """Run the solves of a series that ``save`` does not hold.

    Returns:
        The commands by position, and the points in the order of the positions.
    """
    named = commands(series, folder)
    by_name = {f"{series} {position:g}": command for position, command in named.items()}
    runs = measure_all(by_name, {"now": sys.executable}, save)
    points = [
        Point(position, median_cpu_s(runs[name]["now"]), runs[name]["now"][-1])
        for position, name in zip(named, by_name, strict=True)
    ]
    return named, points


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Growth of proofs with GPUs, layers and switches.")
    parser.add_argument("--series", nargs="+", choices=AXES, default=list(AXES), help="these series (all)")
    parser.add_argument("--save", type=Path, help="keep the runs here, and do not repeat those that it holds")
    parser.add_argument("--write", action="store_true", help="write the tables to growth.md, and growth.svg")
    options = parser.parse_args(arguments)
    tables, found = [], {}
    with tempfile.TemporaryDirectory() as folder:
        for series in options.series:
            named, points = measured(series, options.save, Path(folder))
            tables.append(f"{AXES[series].note}:\n\n{growth_table(series, named, points)}")
            found[series] = points
    text = "\n\n".join([*tables, ", ".join(f"{name} {value}" for name, value in measured_on().items())])
    print(text)
    if options.write:
        replace_section(RESULTS / "growth.md", "growth", text)
        write_whole(RESULTS / "growth.svg", growth_figure(found))


if __name__ == "__main__":
    main()
