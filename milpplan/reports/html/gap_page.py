"""Gaps of plans as a self-contained HTML page: figures, tables, and the whole JSON document."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Final

from milpplan.explain.judge.records import GapReport, SpaceGap
from milpplan.problem import Plan
from milpplan.reports.answers import GapDocument, Judged
from milpplan.reports.answers.gap import (
    LayoutFatesDocument,
    PlanGapDocument,
    SpaceGapDocument,
    chain_table,
    changes_table,
    spaces_table,
    spending_text,
    verdict,
)
from milpplan.reports.answers.step import would_be_headline
from milpplan.reports.blocks import Block, Drawing, Items, Paragraph, Table
from milpplan.reports.documents.certificate import certificate_sentence
from milpplan.reports.documents.document import REASON_WORDS, document_text
from milpplan.reports.html.charts import (
    Part,
    colour_keys,
    counted_rows,
    fates_chart,
    memory_rows,
    memory_width,
    search_chart,
    shown_ranks,
    stacked_bar,
    time_bar,
    time_colour,
    time_names,
)
from milpplan.reports.html.page_template import Section, answer_page
from milpplan.reports.words.plan_words import MEMORY_PARTS, TIME_PARTS, cost_model_text, layout_text
from milpplan.simulation import StepReport
from milpplan.units import counted, gib_text, percent_text, seconds_text

NEAR_FRACTION: Final = 0.05
"""Distance from the fastest plan up to which plans are listed."""
SHOWN_RULES: Final = 5
MAX_STAGES: Final = 16
"""Maximum number of stages with a bar of memory."""
Simulated = tuple[str, Plan, StepReport]
"""Plan with its name and its simulation."""


def gap_page(document: GapDocument, judged: Sequence[Judged]) -> str:
    """Write the whole page.

    Raises:
        InvalidInputError: jinja2 is not installed.
    """
    several = len(judged) > 1
    sections = [_all_plans(document, judged)] if several or document.failed else []
    for entry, said in zip(judged, document.plans, strict=True):
        sections += _plan(entry, said, entry.name if several else "")
    return answer_page(
        "Optimality gap",
        f"Gaps of {counted(len(judged), 'plan')}" if len(judged) != 1 else judged[0].name,
        "A gap says how much of a plan's step the best plan of a space saves. Its lower end is a plan that was "
        "simulated, its upper end a lower bound: proved, no plan of the space saves more. All of it speaks about "
        "the cost model.",
        sections,
        ("gap-document", json.loads(document_text(document))),
    )


def _all_plans(document: GapDocument, judged: Sequence[Judged]) -> Section:
    rows = []
    for entry in judged:
        gap = entry.gap
        memory = gib_text(gap.report.peak_memory_bytes)
        fits = memory if gap.report.fits else f"{memory}: does not fit"
        verdicts = "; ".join(f"{space.name}: {verdict(gap, space)}" for space in gap.spaces)
        step, hours = seconds_text(gap.report.step_time_s), f"{gap.spending.gpu_hours:,.0f}"
        rows.append((entry.name, step, fits, hours, verdicts))
    table = Table("", ("plan", "step", "memory", "GPU-hours a run", "gap"), rows, words=(0, -1))
    failed = [
        Paragraph(lost.name, "bold").extended(f" was not judged: {lost.seen} {lost.expected} {lost.do}", "default")
        for lost in document.failed
    ]
    return Section("All plans", "", [table, *failed])


def _plan(entry: Judged, said: PlanGapDocument, title: str) -> Iterator[Section]:
    """Show everything about a plan."""
    gap, changes = entry.gap, changes_table(entry.gap)
    yield Section(title, layout_text(gap.plan), list(_summary(entry)))
    if changes.rows:
        text = "Each change by itself, simulated; everything else stays as it is."
        yield Section("What closes the gap", text, [table for table in (changes, chain_table(gap)) if table.rows])
    else:
        yield Section("What closes the gap", "No single change makes the plan faster.")
    simulated = _simulated(gap)
    yield Section("Where the time goes", "Mean of the stages; the parts add up to the step.", _times(simulated))
    text = "The peak of a GPU by part; the mark on every bar is what can be used."
    yield Section("Memory of every stage", text, _memory(simulated))
    for space, own in zip(gap.spaces, said.spaces, strict=True):
        yield _proof(gap, space, own)
    columns = ("step", "slower", "memory", "layout")
    near = Table("", columns, _near_rows(gap), words=(0, -1))
    within = f"Plans within {percent_text(NEAR_FRACTION, 0)} of the fastest"
    yield Section(within, _near_text(gap, said.spaces[-1]), [near])


def _summary(entry: Judged) -> Iterator[Block]:
    gap = entry.gap
    yield would_be_headline(gap.problem, gap.plan, gap.report)
    flags = ", ".join((*entry.unknown_flags, *entry.ignored_flags))
    yield Items(
        (
            *(f"Gap to {space.name}: {verdict(gap, space)}." for space in gap.spaces),
            f"Cost: {spending_text(gap)}.",
            *([f"Not priced, by the file: {flags}"] if flags else []),
        )
    )
    yield Drawing(_ends(gap), "Step times: no plan is left of a bound")
    yield spaces_table(gap)


def _times(simulated: Sequence[Simulated]) -> list[Block]:
    """Show the parts of every plan's step."""
    reports = [report for _, _, report in simulated]
    longest, parts = max(report.step_time_s for report in reports), time_names(reports)
    bars = counted_rows(
        (name, time_bar(report.breakdown_s, longest), seconds_text(report.step_time_s))
        for name, _, report in simulated
    )
    keys = colour_keys((time_colour(part), TIME_PARTS[part][0]) for part in parts)
    rows = [
        (TIME_PARTS[part][0], *(seconds_text(report.breakdown_s[part]) for report in reports)) for part in parts
    ]
    return [Drawing(bars + keys), Table("", ("part", *(name for name, _, _ in simulated)), rows)]


def _simulated(gap: GapReport) -> list[Simulated]:
    """List the plan and the best known plan of every space where it differs, with their simulations."""
    plans = [("this plan", gap.plan, gap.report)]
    for space in gap.spaces:
        result = space.result
        if result.plan is None or result.report is None or space.best != result.plan:
            continue
        if all(plan != result.plan for _, plan, _ in plans):
            plans.append((f"best of {space.name}", result.plan, result.report))
    return plans


def _ends(gap: GapReport) -> str:
    """Write the distances of the plan's step from best and bound of every space."""
    ends = [("this plan", gap.report.step_time_s, 2)]
    for space in gap.spaces:
        for word, value, colour in (("best known", space.best_s, 4), ("bound", space.bound_s, 0)):
            if value is not None:
                ends.append((f"{space.name}: {word}", value, colour))
    whole = max(value for _, value, _ in ends)
    return counted_rows(
        (name, stacked_bar([Part(name, value, seconds_text(value), colour)], whole), seconds_text(value))
        for name, value, colour in ends
    )


def _memory(simulated: Sequence[Simulated]) -> list[Block]:
    """Draw the memory bars of every plan's stages."""
    width = memory_width(report for _, _, report in simulated)
    blocks: list[Block] = []
    for name, plan, report in simulated:
        shown = shown_ranks(len(report.stages), MAX_STAGES)
        bars = memory_rows(report, [(_stage_name(plan, report, number), number) for number in shown], width)
        peak, limit = gib_text(report.peak_memory_bytes), gib_text(report.usable_memory_bytes)
        blocks.append(Drawing(f'<div class="rows">{bars}</div>', f"{name}: {peak} of {limit}"))
    keys = colour_keys((colour, label) for colour, (label, _) in enumerate(MEMORY_PARTS.values()))
    return [*blocks, Drawing(keys)]


def _stage_name(plan: Plan, report: StepReport, number: int) -> str:
    """Write ``stage 3``; with heterogeneous replicas also its nodes."""
    stage = f"stage {number % plan.layout.pp}"
    return f"{stage} on {report.stages[number].node_type}" if plan.layout.replica_micro_batches else stage


def _proof(gap: GapReport, space: SpaceGap, said: SpaceGapDocument) -> Section:
    """Show the proof of a space: the search over time, the outcome of its layouts, and the certificate."""
    blocks: list[Block] = []
    log = [(line.wall_time_s, line.incumbent_s, line.bound_s) for line in said.log]
    progress = search_chart(log, " s", gap.report.step_time_s)
    if progress:
        blocks.append(Drawing(progress, "Bound and best plan while the search ran"))
    layouts, certificate = said.layouts, said.certificate
    if layouts is not None:
        chart = "" if space.best_s is None else fates_chart(layouts.rejected, layouts.fates, layouts.bounds)
        blocks.append(Drawing(chart, "Every layout", _layouts_text(layouts)))
    if certificate is not None:
        again = "milpplan certify proves what solve writes for the same space."
        blocks.append(Paragraph(f"{certificate_sentence(certificate)} {again}"))
    text = f"Cost model {cost_model_text(gap.problem)}; {said.space}; {said.status.replace('_', ' ')}."
    return Section(f"The proof for {space.name}", text, blocks)


def _layouts_text(layouts: LayoutFatesDocument) -> str:
    """Describe the outcome of the layouts, and the bars below."""
    refusals = sorted(layouts.rejected.items(), key=lambda item: -item[1])[:SHOWN_RULES]
    refused = ", ".join(f"{name.replace('_', ' ')} ({count:,})" for name, count in refusals)
    fates = ", ".join(
        f"{layouts.fates[fate]:,} {words}" for fate, words in REASON_WORDS.items() if layouts.fates[fate]
    )
    return (
        f"{counted(layouts.enumerated, 'partial layout was', 'partial layouts were')} listed, "
        f"{counted(layouts.legal, 'layout is', 'layouts are')} legal: {fates}. Rules refused the others, most of "
        f"them by {refused or 'none'}. How much longer than the best plan known a layout takes at least, and what "
        "decided it; the length of a bar is the logarithm of its number."
    )


def _near_rows(gap: GapReport) -> list[tuple[str, ...]]:
    """List plans of the search within ``NEAR_FRACTION`` of the fastest."""
    fastest = min((near.step_time_s for near in gap.near), default=0.0)
    close = [near for near in gap.near if near.step_time_s <= (1.0 + NEAR_FRACTION) * fastest]
    return [
        (
            seconds_text(near.step_time_s),
            percent_text(near.step_time_s / fastest - 1.0, 2),
            gib_text(near.peak_memory_bytes),
            " ".join(
                f"{name}={value}" for name, value in near.plan.layout.model_dump(exclude_defaults=True).items()
            ),
        )
        for near in close
    ]


def _near_text(gap: GapReport, whole: SpaceGapDocument) -> str:
    """Describe the plans that the list leaves out, as far as proved."""
    if whole.layouts is None or not gap.near:
        return "The search kept no plans."
    beyond = sum(
        sum(bound_class.fates.values())
        for bound_class in whole.layouts.bounds
        if bound_class.low >= 1.0 + NEAR_FRACTION
    )
    lost = whole.layouts.fates["does_not_fit"]
    rest = max(0, whole.layouts.legal - beyond - lost)
    return (
        f"The fastest plans that the search simulated, one a layout. Of "
        f"{counted(whole.layouts.legal, 'legal layout')} "
        f"{lost:,} are proved not to fit and {beyond:,} proved to be further away; of the other {rest:,} "
        "the search stopped looking once they could not be faster than the best, so some may be as close."
    )
