"""Gaps of plans as a self-contained HTML page: figures, tables, and the whole JSON document."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from milpplan.explain.judge.records import Change, GapReport, SpaceGap
from milpplan.problem.plan import Plan
from milpplan.reports.documents.certificate import certificate_sentence
from milpplan.reports.documents.document import REASON_WORDS, document_text
from milpplan.reports.documents.gap_document import (
    GapDocument,
    Judged,
    PlanGapDocument,
    SpaceGapDocument,
)
from milpplan.reports.html.charts import Part, stacked_bar
from milpplan.reports.html.page_data import shown_ranks
from milpplan.reports.html.page_template import rendered, script_json
from milpplan.reports.html.step_charts import (
    counted_rows,
    fates_chart,
    memory_rows,
    memory_width,
    search_chart,
    time_bar,
    time_colour,
    time_names,
)
from milpplan.reports.text.gap_text import (
    EFFORTS,
    space_row,
    spending_text,
    verdict,
)
from milpplan.reports.words.plan_words import MEMORY_PARTS, TIME_PARTS, cluster_text, layout_text
from milpplan.reports.words.proof_words import cost_model_text
from milpplan.simulation.report import StepReport
from milpplan.units import counted, gib_text, percent_text, seconds_text

NEAR_FRACTION: Final = 0.05
"""Distance from the fastest plan up to which plans are listed."""
MAX_STAGES: Final = 16
"""Maximum number of stages with a bar of memory."""
Simulated = tuple[str, Plan, StepReport]
"""Plan with its name and its simulation."""


def gap_page(document: GapDocument, judged: Sequence[Judged]) -> str:
    """Write the whole page.

    Raises:
        InvalidInputError: jinja2 is not installed.
    """
    return rendered(
        "gap_page.html",
        title=judged[0].name if len(judged) == 1 else f"Gaps of {counted(len(judged), 'plan')}",
        summary=[_summary(entry) for entry in judged],
        failed=document.failed,
        plans=[_plan(entry, said) for entry, said in zip(judged, document.plans, strict=True)],
        memory_keys=[(colour, label) for colour, (label, _) in enumerate(MEMORY_PARTS.values())],
        near_text=percent_text(NEAR_FRACTION, 0),
        document_html=script_json(json.loads(document_text(document))),
    )


def _summary(entry: Judged) -> tuple[str, ...]:
    gap = entry.gap
    memory = gib_text(gap.report.peak_memory_bytes)
    return (
        entry.name,
        seconds_text(gap.report.step_time_s),
        memory if gap.report.fits else f"{memory}: does not fit",
        f"{gap.spending.gpu_hours:,.0f}",
        "; ".join(f"{space.name}: {verdict(gap, space)}" for space in gap.spaces),
    )


def _plan(entry: Judged, said: PlanGapDocument) -> dict[str, Any]:
    """Collect everything that the page shows about a plan."""
    gap = entry.gap
    fits = "" if gap.report.fits else "; it does not fit in memory, so the step is only what it would be"
    cluster, step = (
        cluster_text(gap.problem, gap.plan.layout.num_gpus),
        seconds_text(gap.report.step_time_s),
    )
    simulated = _simulated(gap)
    reports = [report for _, _, report in simulated]
    longest, width = max(report.step_time_s for report in reports), memory_width(reports)
    return {
        "name": entry.name,
        "layout": layout_text(gap.plan),
        "headline": f"{gap.problem.model.name} on {cluster}: {step} a step{fits}",
        "verdicts": [f"Gap to {space.name}: {verdict(gap, space)}." for space in gap.spaces],
        "cost": f"Cost: {spending_text(gap)}.",
        "ends_html": _ends(gap),
        "best": [space_row(gap, space) for space in gap.spaces],
        "changes": [_change_row(change) for change in gap.changes],
        "chain": [_change_row(change) for change in gap.chain],
        "times_html": counted_rows(
            (name, time_bar(report.breakdown_s, longest), seconds_text(report.step_time_s))
            for name, _, report in simulated
        ),
        "time_heads": [name for name, _, _ in simulated],
        "time_rows": [
            (
                time_colour(part),
                TIME_PARTS[part][0],
                [seconds_text(report.breakdown_s[part]) for report in reports],
            )
            for part in time_names(reports)
        ],
        "memory": [_memory(*simulated_plan, width) for simulated_plan in simulated],
        "spaces": [_space(gap, space, own) for space, own in zip(gap.spaces, said.spaces, strict=True)],
        "near": _near_rows(gap),
        "near_text": _near_text(gap, said.spaces[-1]),
        "flags": ", ".join((*entry.unknown_flags, *entry.ignored_flags)),
    }


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


def _memory(name: str, plan: Plan, report: StepReport, width: float) -> dict[str, str]:
    """Draw the memory bars of a plan's stages."""
    shown = [(_stage_name(plan, report, number), number) for number in shown_ranks(len(report.stages), MAX_STAGES)]
    return {
        "name": name,
        "peak": gib_text(report.peak_memory_bytes),
        "limit": gib_text(report.usable_memory_bytes),
        "bars_html": memory_rows(report, shown, width),
    }


def _stage_name(plan: Plan, report: StepReport, number: int) -> str:
    """Write ``stage 3``; with heterogeneous replicas also its nodes."""
    stage = f"stage {number % plan.layout.pp}"
    return f"{stage} on {report.stages[number].node_type}" if plan.layout.replica_micro_batches else stage


def _change_row(change: Change) -> tuple[str, ...]:
    return (
        change.words,
        seconds_text(change.step_time_s),
        gib_text(change.peak_memory_bytes),
        percent_text(change.saved),
        "-" if change.closed is None else percent_text(change.closed, 0),
        EFFORTS[change.effort],
    )


def _space(gap: GapReport, space: SpaceGap, said: SpaceGapDocument) -> dict[str, Any]:
    """Collect the proof of a space: the search over time, the outcome of its layouts, and the certificate."""
    layouts, certificate = said.layouts, said.certificate
    refused = (
        ""
        if layouts is None
        else ", ".join(
            f"{name.replace('_', ' ')} ({count:,})"
            for name, count in sorted(layouts.rejected.items(), key=lambda item: -item[1])[:5]
        )
    )
    words = ""
    if layouts is not None:
        fates = ", ".join(
            f"{layouts.fates[fate]:,} {REASON_WORDS[fate]}" for fate in REASON_WORDS if layouts.fates[fate]
        )
        words = (
            f"{counted(layouts.enumerated, 'partial layout was', 'partial layouts were')} listed, "
            f"{counted(layouts.legal, 'layout is', 'layouts are')} legal: {fates}. "
            f"Rules refused the others, most of them by {refused or 'none'}."
        )
    sealed = (
        ""
        if certificate is None
        else f"{certificate_sentence(certificate)} milpplan certify proves what solve writes for the same space."
    )
    return {
        "name": space.name,
        "text": f"Cost model {cost_model_text(gap.problem)}; {said.space}; {said.status.replace('_', ' ')}.",
        "progress_html": search_chart(
            [(line.wall_time_s, line.incumbent_s, line.bound_s) for line in said.log],
            " s",
            gap.report.step_time_s,
        ),
        "layouts": words,
        "fates_html": ""
        if layouts is None or space.best_s is None
        else fates_chart(layouts.rejected, layouts.fates, layouts.bounds),
        "certificate": sealed,
    }


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
