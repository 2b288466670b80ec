"""Plan as an HTML page: description, parts of time and memory, timeline, matrix, proof, rivals, launch files.

The page fetches nothing, because it contains its own style and script.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from milpplan.explain import Missing, NearBest
from milpplan.explain.records import Overview
from milpplan.reports.answers.traffic import parallelism_table
from milpplan.reports.blocks import Table
from milpplan.reports.documents.certificate import certificate_sentence
from milpplan.reports.html.charts import (
    Line,
    Part,
    envelope,
    fates_chart,
    line_chart,
    matrix_data,
    memory_rows,
    memory_width,
    named_rows,
    round_levels,
    search_chart,
    shown_ranks,
    stacked_bar,
    time_bar,
    time_colour,
    time_names,
    time_ticks,
    timeline_data,
)
from milpplan.reports.html.page_template import asset, blocks_html, rendered, script_json
from milpplan.reports.words.plan_words import (
    HIDDEN_PARTS,
    MEMORY_PARTS,
    TIME_PARTS,
    difference_text,
    layout_text,
    plan_sentences,
)
from milpplan.reports.words.result_words import (
    break_even_table,
    evidence_sentence,
    fastest_text,
    regret_table,
    target_price_text,
)
from milpplan.units import (
    GIB,
    SECONDS_PER_HOUR,
    TRILLION,
    gap_text,
    gib_text,
    lower_bound_text,
    percent_text,
    rate_text,
    seconds_text,
    signed_percent_text,
)

if TYPE_CHECKING:
    from milpplan.reports.documents.document import ResultDocument


Values = dict[str, Any]
"""Values of a section of the template."""
LINE_COLOURS: Final = (0, 1, 2, 3, 4, 6, 7, 8)
"""Colours of stages in the chart of memory over time, without the grey that has too little contrast."""
SHOWN_STAGES: Final = 2 * len(LINE_COLOURS)
"""Maximum number of stages in the charts of memory: each colour solid, then dashed."""
SHOWN_PLANS: Final = 20
SHOWN_RULES: Final = 5
HOURS_A_DAY: Final = 24
VERDICTS: Final = {"safe": "fits safely", "tight": "fits tightly", "does_not_fit": "does not fit"}


def tiles(overview: Overview, result: ResultDocument | None) -> list[tuple[str, str, str]]:
    """Make the headline: (name, value, meaning)."""
    report = overview.report
    tiles_shown = [
        ("one step", seconds_text(report.step_time_s), f"{rate_text(report.tokens_per_s)} tokens a second"),
        ("MFU", percent_text(report.mfu), "of the GPUs' peak is useful work"),
        (
            "memory of the fullest GPU",
            gib_text(report.peak_memory_bytes),
            f"of {gib_text(report.usable_memory_bytes)}: {VERDICTS[report.memory_verdict]}",
        ),
    ]
    if not overview.problem.inference:
        days = TRILLION / report.tokens_per_s / SECONDS_PER_HOUR / HOURS_A_DAY
        tiles_shown.append(("a trillion tokens", f"{days:,.3g} days", "at this speed, without failures"))
    if result is not None and result.gap is not None:
        word = {"optimal": "proved best", "feasible": "best found"}.get(result.status, result.status)
        away = f"at most {percent_text(result.gap, 3)} from the best plan of the space"
        tiles_shown.append(("proof", word, away if result.gap else "no plan of the space is faster"))
    return tiles_shown


def stage_table(overview: Overview) -> Table:
    """Show layers, recomputation, peak and idle time of every stage; equal neighbours share a row."""
    contents = [(rank.label, _held(overview, number)) for number, rank in enumerate(overview.lanes.ranks)]
    rows = []
    for cells, same in groupby(contents, key=lambda row: row[1]):
        labels = [label for label, _ in same]
        rows.append((labels[0] if len(labels) == 1 else f"{labels[0]} to {labels[-1]}", *cells))
    return Table("", ("stage", "layers", "full recompute", "selective", "peak memory", "idle"), rows)


def _held(overview: Overview, number: int) -> tuple[str, ...]:
    """Make the cells of a stage."""
    layout = overview.plan.layout
    plan = overview.plan
    node_type, rank = divmod(number, layout.pp)
    if layout.replica_micro_batches:
        plan = plan.of_replicas(node_type, layout.model_copy(update={"replica_micro_batches": ()}))
    stages = [plan.virtual_stages[j] for j in layout.rank_stages[rank]]
    recomputed = [sum(getattr(stage.recompute, mode) for stage in stages) for mode in ("full", "selective")]
    layers = sum(stage.num_layers for stage in stages)
    pieces = _runs([stage.num_layers for stage in stages])
    stage = overview.report.stages[number]
    return (
        f"{layers}" if len(stages) == 1 else f"{layers} (pieces of {pieces})",
        *(str(count) for count in recomputed),
        gib_text(stage.memory.peak_bytes),
        seconds_text(stage.breakdown_s["bubble"]),
    )


def _runs(counts: list[int]) -> str:
    """Write 3, 3, 3, 2 as ``3 x3, 2``."""
    runs = [(count, len(list(same))) for count, same in groupby(counts)]
    return ", ".join(f"{count} x{times}" if times > 1 else str(count) for count, times in runs)


def time_section(overview: Overview) -> Values:
    """Draw the parts of the step time: a bar of the mean, and a bar of every stage."""
    report = overview.report
    step = report.step_time_s
    names = time_names([report])
    hidden = [
        (HIDDEN_PARTS[name], seconds_text(seconds)) for name, seconds in report.hidden_s.items() if seconds > 0
    ]
    return {
        "step": seconds_text(step),
        "bar_html": time_bar(report.breakdown_s, step),
        "rows": [
            (
                time_colour(name),
                *TIME_PARTS[name],
                seconds_text(report.breakdown_s[name]),
                percent_text(report.breakdown_s[name] / step),
            )
            for name in names
        ],
        "hidden": hidden,
        "stages_html": named_rows(
            (_name(overview, rank), time_bar(report.stages[rank].breakdown_s, step)) for rank in _ranks(overview)
        ),
    }


def _ranks(overview: Overview) -> list[int]:
    return shown_ranks(len(overview.report.stages), SHOWN_STAGES)


def _name(overview: Overview, rank: int) -> str:
    """Write ``stage 3``, with heterogeneous replicas also its nodes."""
    return overview.lanes.ranks[rank].name


def memory_section(overview: Overview) -> Values:
    """Draw the peak by stage and part against the limit, and memory over time."""
    report = overview.report
    whole = memory_width([report])
    fullest = report.stages[report.tightest_stage].memory
    return {
        "stages_html": memory_rows(report, [(_name(overview, rank), rank) for rank in _ranks(overview)], whole),
        "rows": [
            (colour, *MEMORY_PARTS[name], gib_text(getattr(fullest, name)))
            for colour, name in enumerate(MEMORY_PARTS)
            if getattr(fullest, name)
        ],
        "fullest": _name(overview, report.tightest_stage),
        "peak": gib_text(report.peak_memory_bytes),
        "limit": gib_text(report.usable_memory_bytes),
        "reserve": gib_text(report.context_bytes + report.fragmentation_bytes),
        "chart_html": _memory_chart(overview, whole),
    }


def _memory_chart(overview: Overview, high: float) -> str:
    """Draw the memory of the stages over the step and the limit; of too many stages a selection with the
    fullest."""
    lanes, report = overview.lanes, overview.report
    end = report.step_time_s
    ranks = shown_ranks(len(lanes.ranks), SHOWN_STAGES)
    if report.tightest_stage not in ranks:
        ranks[len(ranks) // 2] = report.tightest_stage
    lines = []
    for index, rank in enumerate(ranks):
        repeated, colour = divmod(index, len(LINE_COLOURS))
        memory = lanes.ranks[rank].memory
        places, values = envelope(memory.time_s, memory.total_bytes.astype(np.float64), end)
        lines.append(Line(_name(overview, rank), places, values, LINE_COLOURS[colour], dashed=bool(repeated)))
    for limit in sorted({lanes.ranks[rank].usable_memory_bytes for rank in ranks}):
        held = np.array([float(limit)])
        lines.append(Line(f"limit {gib_text(limit)}", np.zeros(1), held, 9, dashed=True))
    levels = [(level * GIB, f"{level:g} GiB") for level in round_levels(0.0, high / GIB)]
    label = f"Memory of a GPU of each stage over the step, at most {gib_text(report.peak_memory_bytes)}"
    some = (
        ""
        if len(ranks) == len(lanes.ranks)
        else f"{len(ranks)} of {len(lanes.ranks)} stages, the fullest among them"
    )
    return line_chart(lines, end, time_ticks(end), levels, 0.0, high, label, some)


def search_section(result: ResultDocument | None) -> Values:
    """Draw bound and incumbent over time, with the proof; empty where the file holds no search."""
    if result is None or result.objective.value is None:
        return {}
    layouts = result.layouts
    outcomes = {
        "do not fit in memory": layouts.does_not_fit,
        "excluded by a bound": layouts.bounded,
        "excluded by a relaxation": layouts.relaxed,
        "solved": layouts.solved,
        "left open": layouts.open,
    }
    counts = [(what, f"{count:,}") for what, count in outcomes.items() if count]
    priced = None if result.target is None else result.target.price
    return {
        "proof": result.proof,
        "fastest": _fastest(result),
        "price": None if priced is None else target_price_text(result.problem, priced),
        "evidence": None if result.evidence is None else evidence_sentence(result.evidence),
        "gap": gap_text(result.gap or 0.0),
        "bound": None if result.lower_bound_s is None else lower_bound_text(result.lower_bound_s),
        "seconds": seconds_text(result.wall_time_s),
        "legal": f"{layouts.legal:,}",
        "enumerated": f"{layouts.enumerated:,}",
        "regret_html": _regret(result),
        "counts_html": blocks_html([Table("", ("what became of the layouts", "number"), counts)]),
        "chart_html": search_chart(
            [(line.wall_time_s, line.incumbent, line.bound) for line in result.log],
            "" if result.objective.name == "gpu_hours" else " s",
        ),
        "refused": _most_refused(layouts.rejected),
        "fates_html": fates_chart(layouts.rejected, layouts.model_dump(), layouts.bounds),
        "certificate": None if result.certificate is None else certificate_sentence(result.certificate),
    }


def _regret(result: ResultDocument) -> str:
    """Compare a robust plan with the best plans of all scenarios."""
    return "" if result.regret is None else blocks_html([regret_table(result.regret.scenarios)])


def _fastest(result: ResultDocument) -> str | None:
    """Describe the fastest plan found; None where it is the plan of the page."""
    if result.fastest is None or result.plan is None:
        return None
    return fastest_text(result.problem, result.plan.layout, result.fastest)


def _most_refused(rejected: dict[str, int]) -> list[tuple[str, str]]:
    """List the rules that refused most."""
    refusals = sorted(((count, name) for name, count in rejected.items() if count), reverse=True)
    return [(name.replace("_", " "), f"{count:,}") for count, name in refusals[:SHOWN_RULES]]


def near_section(overview: Overview) -> Values:
    """List other layouts within a per cent."""
    near = overview.near
    if isinstance(near, Missing):
        return {"missing": near}
    rows = [
        (
            seconds_text(plan.step_time_s),
            signed_percent_text(plan.excess, 2),
            gib_text(plan.peak_memory_bytes),
            difference_text(plan.plan, overview.plan),
        )
        for plan in near.plans[:SHOWN_PLANS]
    ]
    return {
        "within": percent_text(near.within, 0),
        "rows": rows,
        "more": max(0, len(near.plans) - SHOWN_PLANS),
        "summary": _near_summary(near),
        "break_even_html": _break_even(overview),
    }


def _break_even(overview: Overview) -> str:
    """Show how far each doubt may go before another plan is better."""
    found = overview.break_even
    if found is None or not found.doubts:
        return ""
    return blocks_html([break_even_table(overview.plan, found)])


def _near_summary(near: NearBest) -> str:
    """Describe the number of other layouts, and the proof about the rest."""
    count, undecided = len(near.plans), near.most_layouts - len(near.plans)
    within, legal = (
        percent_text(near.within, 0),
        f"{near.legal_layouts:,} legal layout{'s' if near.legal_layouts != 1 else ''}",
    )
    if not count and not undecided:
        return f"No other of the {legal} has a plan within {within} of this one: proved."
    rest = (
        f"{undecided:,} more were not decided in the time given (--time-limit 60 gives more)"
        if undecided
        else "all others are proved to be further away"
    )
    if not count:
        return f"No other layout within {within} was found; of the {legal}, {rest}."
    return (
        f"{count:,} other layout{'s do' if count > 1 else ' does'} nearly as well, with the best plan found for "
        f"{'each' if count > 1 else 'it'}; take it if it suits you better. Of the {legal}, {rest}."
    )


def rule_section(overview: Overview) -> Values:
    """Show the plan beside that of the published rule of thumb."""
    rule = overview.rule
    if isinstance(rule, Missing):
        return {"missing": rule}
    own, other = overview.report.step_time_s, rule.report.step_time_s
    longest = max(own, other)
    saved = 1.0 - own / other
    verdict = (
        f"This plan takes {percent_text(saved)} less time than the rule of thumb's."
        if saved > 0
        else f"The rule of thumb's plan takes {percent_text(1.0 - other / own)} less time than this one: it is "
        "not in the space that was searched for this plan, or the search was stopped before it."
        if saved < 0
        else "The rule of thumb's plan takes the same time."
    )
    bars = [
        (name, layout_text(plan), seconds_text(seconds), stacked_bar([Part(name, seconds, "", colour)], longest))
        for name, plan, seconds, colour in (
            ("this plan", overview.plan, own, 0),
            ("rule of thumb", rule.plan, other, 8),
        )
    ]
    return {
        "verdict": verdict,
        "within_table": rule.within_table,
        "bars_html": "".join(
            f'<div class="row wide"><span>{name}: {text}</span>{drawn}<small>{layout}</small></div>'
            for name, layout, text, drawn in bars
        ),
    }


def plan_page(overview: Overview, result: ResultDocument | None = None, notes: tuple[str, ...] = ()) -> str:
    """Write the whole page.

    Args:
        overview: the plan and its analysis.
        result: the solve that found the plan, with proof and log.
        notes: sentences at the top.

    Raises:
        InvalidInputError: jinja2 is not installed.
    """
    traffic = None if isinstance(overview.traffic, Missing) else overview.traffic
    return rendered(
        "plan_page.html",
        title=overview.title,
        notes=notes,
        tiles=tiles(overview, result),
        words=plan_sentences(overview.problem, overview.plan, overview.report),
        layout=layout_text(overview.plan),
        stages_html=blocks_html([stage_table(overview)]),
        num_stages=len(overview.report.stages),
        makes=len(overview.plan.layout.replica_micro_batches),
        time=time_section(overview),
        memory=memory_section(overview),
        traffic_html="" if traffic is None else blocks_html([parallelism_table(traffic)]),
        no_traffic=overview.traffic if traffic is None else None,
        search=search_section(result),
        near=near_section(overview),
        rule=rule_section(overview),
        exports=overview.exports,
        data_html=script_json(timeline_data(overview.lanes)),
        matrix_html="" if traffic is None else script_json(matrix_data(traffic)),
        script_html="".join(asset(name) for name in ("page.js", "plan_page.js", "matrix.js")),
    )
