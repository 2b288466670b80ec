"""HTML, without a script, that a notebook shows: the blocks of an answer in a style of their own."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import TYPE_CHECKING, Final

from milpplan.optimize import PlanResult
from milpplan.problem import Plan
from milpplan.reports.blocks import Block, Drawing, Items, Paragraph, Table
from milpplan.reports.html.charts import (
    colour_keys,
    memory_rows,
    memory_width,
    time_bar,
    time_colour,
    time_names,
)
from milpplan.reports.html.page_template import blocks_html
from milpplan.reports.words.plan_words import MEMORY_PARTS, TIME_PARTS, cluster_text, layout_text, plan_sentences
from milpplan.simulation import StepReport
from milpplan.units import gap_text, gib_text, percent_text, rate_text, seconds_text

if TYPE_CHECKING:
    from milpplan.explain import Fewest

COLOURS: Final = (
    *("#2f77b4", "#9a6bb3", "#e0762b", "#caa11c", "#2e9e6f", "#c9d1d9"),
    *("#b5566a", "#4ab3c9", "#8a8f98", "#c62828"),
)
_RULES: Final = "".join(f".milpplan .c{number}{{background:{colour}}}" for number, colour in enumerate(COLOURS))
STYLE: Final = (
    "<style>.milpplan .bar{position:relative;display:flex;height:1.2em;max-width:40em;margin:.3em 0;"
    "background:rgba(128,128,128,.15);border-radius:4px;overflow:hidden}.milpplan .piece{height:100%}"
    ".milpplan .mark{position:absolute;top:0;bottom:0;width:2px;background:#c62828}"
    ".milpplan i{display:inline-block;width:.8em;height:.8em;border-radius:3px;margin-right:.4em}"
    ".milpplan .key{margin-right:1em}.milpplan td,.milpplan th{text-align:right;vertical-align:top;"
    "padding:.15em .9em .15em 0}.milpplan td:first-child,"
    ".milpplan th:first-child,.milpplan .text{text-align:left}.milpplan .green{color:#2e9e6f}"
    f".milpplan .yellow{{color:#b08800}}.milpplan .red{{color:#c62828}}{_RULES}</style>"
)


def notebook_html(blocks: Iterable[Block]) -> str:
    """Convert blocks to HTML with its style."""
    return f'<div class="milpplan">{STYLE}{blocks_html(blocks)}</div>'


def result_blocks(result: PlanResult) -> list[Block]:
    """Show status, gap, the plan in words, and the parts of time and memory."""
    status = result.status.replace("_", " ")
    if result.plan is None or result.report is None:
        return [Paragraph(f"{result.problem.model.name}: {status}", "bold"), Paragraph(result.message)]
    cluster = cluster_text(result.problem, result.plan.layout.num_gpus)
    head = f"{result.problem.model.name} on {cluster}: {status}, {seconds_text(result.report.step_time_s)} a step"
    gap = "" if result.gap is None else f", gap {gap_text(result.gap)}"
    words = Items(tuple(plan_sentences(result.problem, result.plan, result.report)))
    return [Paragraph(f"{head}{gap}", "bold"), words, *_parts(result.report)]


def step_blocks(report: StepReport) -> list[Block]:
    """Show step time, throughput, and the parts of time and memory."""
    head = (
        f"{seconds_text(report.step_time_s)} a step, {rate_text(report.tokens_per_s)} tokens/s, MFU "
        f"{percent_text(report.mfu)}, peak {gib_text(report.peak_memory_bytes)} of "
        f"{gib_text(report.usable_memory_bytes)}: {report.memory_verdict.replace('_', ' ')}"
    )
    return [Paragraph(head, "bold"), *_parts(report)]


def plan_blocks(plan: Plan) -> list[Block]:
    """Show the degrees, and the contents of every pipeline rank; equal neighbours share a row."""
    contents = []
    for rank, own in enumerate(plan.layout.rank_stages):
        stages = [plan.virtual_stages[j] for j in own]
        layers = ", ".join(str(stage.num_layers) for stage in stages)
        full, selective = (sum(getattr(s.recompute, mode) for s in stages) for mode in ("full", "selective"))
        contents.append((rank, (layers, str(full), str(selective))))
    rows = []
    for cells, same in groupby(contents, key=lambda row: row[1]):
        ranks = [rank for rank, _ in same]
        rows.append((str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}", *cells))
    table = Table("", ("stage", "layers", "full recompute", "selective"), rows)
    return [Paragraph(layout_text(plan), "bold"), table]


def fewest_blocks(fewest: Fewest) -> list[Block]:
    """Show the minimum number of accelerators, the reason why fewer do not suffice, and the plan."""
    from milpplan.reports.answers.hardware_choice import fewest_headline

    return [fewest_headline(fewest), *result_blocks(fewest.result)]


def _parts(report: StepReport) -> list[Block]:
    """Draw the parts of time and memory with their sizes."""
    time = {name: report.breakdown_s[name] for name in time_names([report])}
    words = ((time_colour(name), f"{TIME_PARTS[name][0]} {seconds_text(time[name])}") for name in time)
    fullest = report.tightest_stage
    sizes = [getattr(report.stages[fullest].memory, name) for name in MEMORY_PARTS]
    labels = (label for label, _ in MEMORY_PARTS.values())
    parts = enumerate(zip(labels, sizes, strict=True))
    keys = ((colour, f"{label} {gib_text(size)}") for colour, (label, size) in parts if size)
    bars = memory_rows(report, [("", fullest)], memory_width([report]))
    return [
        Drawing(time_bar(time, report.step_time_s) + colour_keys(words), "", "time (mean of the stages)"),
        Drawing(bars + colour_keys(keys), "", f"memory (stage {fullest}, the fullest; the mark is the limit)"),
    ]
