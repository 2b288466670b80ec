"""HTML, without a script, that a notebook shows for a result, a plan, a simulated step, and other answers.

Answers without a picture are shown as the text of the command line, with its colours.
"""

from __future__ import annotations

from html import escape
from itertools import groupby
from typing import TYPE_CHECKING

from milpplan.optimize.result import PlanResult
from milpplan.problem.plan import Plan
from milpplan.reports.html.charts import Part, stacked_bar
from milpplan.reports.html.page_template import blocks_html
from milpplan.reports.words.plan_words import MEMORY_PARTS, TIME_PARTS, cluster_text, layout_text, plan_sentences
from milpplan.simulation.report import StepReport
from milpplan.units import counted, gap_text, gib_text, percent_text, rate_text, seconds_text

if TYPE_CHECKING:
    from milpplan.communication.records import TrafficReport
    from milpplan.explain.hardware_choice import Choice, Fewest
    from milpplan.explain.judge.records import GapReport
    from milpplan.explain.records import Explanation
    from milpplan.lengths.records import LengthsResult

COLOURS = (
    *("#2f77b4", "#9a6bb3", "#e0762b", "#caa11c", "#2e9e6f", "#c9d1d9"),
    *("#b5566a", "#4ab3c9", "#8a8f98", "#c62828"),
)
_RULES = "".join(f".milpplan .c{number}{{background:{colour}}}" for number, colour in enumerate(COLOURS))
STYLE = (
    "<style>.milpplan .bar{position:relative;display:flex;height:1.2em;max-width:40em;margin:.3em 0;"
    "background:rgba(128,128,128,.15);border-radius:4px;overflow:hidden}.milpplan .piece{height:100%}"
    ".milpplan .mark{position:absolute;top:0;bottom:0;width:2px;background:#c62828}"
    ".milpplan i{display:inline-block;width:.8em;height:.8em;border-radius:3px;margin-right:.4em}"
    f".milpplan td,.milpplan th{{text-align:left}}{_RULES}</style>"
)


def result_html(result: PlanResult) -> str:
    """Show status, gap, the plan in words, and the parts of time and memory."""
    status = result.status.replace("_", " ")
    title = f"{result.problem.model.name}: {status}"
    if result.plan is None or result.report is None:
        return _framed(f"<b>{escape(title)}</b> {escape(result.message)}")
    cluster = cluster_text(result.problem, result.plan.layout.num_gpus)
    head = f"{result.problem.model.name} on {cluster}: {status}, {seconds_text(result.report.step_time_s)} a step"
    if result.gap is not None:
        head += f", gap {gap_text(result.gap)}"
    words = "".join(
        f"<li>{escape(sentence)}</li>" for sentence in plan_sentences(result.problem, result.plan, result.report)
    )
    return _framed(f"<b>{escape(head)}</b><ul>{words}</ul>{_step(result.report)}")


def step_html(report: StepReport) -> str:
    """Show step time, throughput, and the parts of time and memory."""
    head = (
        f"{seconds_text(report.step_time_s)} a step, {rate_text(report.tokens_per_s)} tokens/s, MFU "
        f"{percent_text(report.mfu)}, peak {gib_text(report.peak_memory_bytes)} of "
        f"{gib_text(report.usable_memory_bytes)}: {report.memory_verdict.replace('_', ' ')}"
    )
    return _framed(f"<b>{escape(head)}</b>{_step(report)}")


def plan_html(plan: Plan) -> str:
    """Show the degrees, and the contents of every pipeline rank; equal neighbours share a row."""
    rows = []
    for rank, own in enumerate(plan.layout.rank_stages):
        stages = [plan.virtual_stages[j] for j in own]
        spans = ", ".join(str(stage.num_layers) for stage in stages)
        full, selective = (sum(getattr(s.recompute, mode) for s in stages) for mode in ("full", "selective"))
        rows.append((rank, (spans, str(full), str(selective))))
    lines = []
    for cells, same in groupby(rows, key=lambda row: row[1]):
        ranks = [rank for rank, _ in same]
        name = str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"
        lines.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in (name, *cells)) + "</tr>")
    head = "".join(f"<th>{name}</th>" for name in ("stage", "layers", "full recompute", "selective"))
    return _framed(f"<b>{escape(layout_text(plan))}</b><table><tr>{head}</tr>{''.join(lines)}</table>")


def _step(report: StepReport) -> str:
    """Draw two bars with their keys."""
    time = [
        Part(label, seconds, seconds_text(seconds), number)
        for number, (name, (label, _)) in enumerate(TIME_PARTS.items())
        if (seconds := report.breakdown_s[name])
    ]
    memory = report.stages[report.tightest_stage].memory
    sizes = [
        Part(label, size, gib_text(size), number)
        for number, (name, (label, _)) in enumerate(MEMORY_PARTS.items())
        if (size := getattr(memory, name))
    ]
    usable = report.usable_memory_bytes
    whole = 1.04 * max(usable, report.peak_memory_bytes)
    return (
        f"<div>time (mean of the stages)</div>{stacked_bar(time, report.step_time_s)}{_keys(time)}"
        f"<div>memory (stage {report.tightest_stage}, the fullest; the mark is the limit)</div>"
        f"{stacked_bar(sizes, whole, usable)}{_keys(sizes)}"
    )


def _keys(parts: list[Part]) -> str:
    keys = (
        f'<span><i class="c{part.colour % len(COLOURS)}"></i>{escape(part.name)} {escape(part.text)}</span>'
        for part in parts
    )
    return f"<div>{' &nbsp; '.join(keys)}</div>"


def _framed(inside: str) -> str:
    return f'<div class="milpplan">{STYLE}{inside}</div>'


def gap_html(report: GapReport) -> str:
    """Show the gap of a plan."""
    from milpplan.reports.answers.gap import Judged, gap_blocks

    return _framed(blocks_html(gap_blocks(Judged("plan", report))))


def explanation_html(explanation: Explanation) -> str:
    """Show the limits of a plan, and the value of changes."""
    from milpplan.reports.answers.explain import explanation_blocks

    return _framed(blocks_html(explanation_blocks(explanation)))


def lengths_html(result: LengthsResult) -> str:
    """Show a step of several lengths."""
    from milpplan.reports.answers.lengths import lengths_blocks

    return _framed(blocks_html(lengths_blocks(result)))


def traffic_html(report: TrafficReport) -> str:
    """Show the traffic of a plan."""
    from milpplan.reports.answers.traffic import traffic_blocks

    return _framed(blocks_html(traffic_blocks(report)))


def choice_html(choice: Choice) -> str:
    """Show candidates in order."""
    from milpplan.reports.answers.hardware_choice import choice_blocks

    return _framed(blocks_html(choice_blocks(choice)))


def fewest_html(fewest: Fewest) -> str:
    """Show the minimum number of accelerators, the reason why fewer do not suffice, and the plan."""
    number = "no number with a plan was found" if fewest.num_gpus is None else f"{counted(fewest.num_gpus, 'GPU')}"
    lack = f" (proved: no plan on up to {fewest.refused[-1]:,}). {fewest.why}" if fewest.refused else ""
    return f"<p><b>Fewest: {escape(number)}</b>{escape(lack)}</p>{result_html(fewest.result)}"
