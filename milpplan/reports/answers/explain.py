"""Answer of ``explain``: document and blocks. Times in seconds, memory in bytes; null where nothing is proved."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

from milpplan.explain import Explanation, Interval, WishAnswer, Worth
from milpplan.explain.records import BreakEven, Outcome, PlanLimits, Unit
from milpplan.problem import Layout, Problem
from milpplan.problem.plan import layout_words
from milpplan.problem.records import Computed, Record
from milpplan.reports.answers.step import accuracy_blocks, plan_blocks, would_be_headline
from milpplan.reports.blocks import Block, Fact, Paragraph, Table
from milpplan.reports.documents.fields import EvidenceDocument, IntervalDocument, document_of, evidence_document
from milpplan.reports.documents.plan_file import PlanDocument, plan_document
from milpplan.reports.words.plan_words import joined, range_text, scope_text
from milpplan.reports.words.result_words import break_even_table
from milpplan.units import counted, gib_text, lower_bound_text, percent_text, printable, rate_text, seconds_text
from milpplan.validation import Evidence


class OptimumDocument(Record):
    """Best objective of a problem and the layout of the best plan found. ``infeasible``: there is provably no
    plan."""

    bounds: IntervalDocument
    infeasible: bool
    peak_memory_bytes: Computed | None
    layout: Layout | None


class SingleChangeDocument(Record):
    """Proved best when only these fields may change, and the share of the plan's objective that it saves."""

    fields: tuple[str, ...]
    words: str
    best: OptimumDocument
    saved: IntervalDocument


class WorthDocument(Record):
    """Value of a change. ``gain`` is the saved share of the proved best."""

    name: str
    words: str
    same_plan: float | None
    """Objective of the unchanged plan after the change; null where it breaks a rule or does not fit."""
    best: OptimumDocument
    gain: IntervalDocument
    implied_by: str
    """Question whose answer implies this one; empty: this question was solved."""


class WishDocument(Record):
    """Wish, the proved best with it, and its price: as a share of the best without it, and in the unit."""

    wish: dict[str, int | bool | str]
    words: str
    outcome: Outcome
    reason: str
    best: OptimumDocument | None
    price: IntervalDocument | None
    amount: IntervalDocument | None
    in_space: bool
    asked: bool


class BreakEvenDocument(Record):
    """Break-even of a doubt: constants up to which the plan is the best of all compared plans.

    ``rival``: layout of the plan that is better beyond; null where the doubt ends before.
    """

    doubt: str
    values: dict[str, float]
    rival: Layout | None


class ExplanationDocument(Record):
    """Explanation of a plan. Objectives are in ``unit``: seconds of a step of the plan's batch, or GPU-hours."""

    schema_version: Literal[1] = 1
    milpplan_version: str
    unit: Unit
    step_time_s: float
    value: float
    best: OptimumDocument
    above_best: IntervalDocument
    """Share of ``value`` that the proved best saves."""
    fits: bool
    is_outside: bool
    """True if the plan is outside the declared space of the problem."""
    peak_memory_bytes: Computed
    usable_memory_bytes: int
    breakdown: dict[str, float]
    hidden: dict[str, float]
    limits: PlanLimits
    changes: tuple[SingleChangeDocument, ...]
    worth: tuple[WorthDocument, ...]
    wishes: tuple[WishDocument, ...]
    break_even: tuple[BreakEvenDocument, ...] = ()
    break_even_plans: Computed = 0
    """Number of other plans that the break-evens compare."""
    unanswered: tuple[str, ...]
    interrupted: bool
    wall_time_s: float
    evidence: EvidenceDocument | None = None
    plan: PlanDocument
    problem: Problem


def explanation_document(explanation: Explanation, evidence: Evidence | None = None) -> ExplanationDocument:
    """Make the document of an explanation, which is also a plan file: it carries plan and problem.

    Args:
        explanation: Answers about the plan.
        evidence: Measured runs that support the plan.
    """
    report, found = explanation.report, explanation.break_even
    return document_of(
        ExplanationDocument,
        explanation,
        report,
        break_even=() if found is None else tuple(map(_break_even, found.doubts)),
        break_even_plans=0 if found is None else found.num_plans,
        breakdown=report.breakdown_s,
        hidden=report.hidden_s,
        evidence=evidence_document(evidence, report.step_time_s),
        plan=plan_document(explanation.plan, report),
    )


def _break_even(doubt: BreakEven) -> BreakEvenDocument:
    rival = None if doubt.rival is None else doubt.rival.layout
    return BreakEvenDocument(doubt=doubt.scenario.name, values=doubt.values, rival=rival)


SHOWN_STAGES = 4
ALMOST_NOTHING = 0.001
"""Share of the step below which communication does not get a line."""


def explanation_blocks(explanation: Explanation, evidence: Evidence | None = None) -> list[Block]:
    """Show all answers about a plan, the most important first, and what measured runs say about it."""
    tables = [_changes_table(explanation), _worth_table(explanation), _wish_table(explanation)]
    if explanation.break_even is not None:
        tables.append(break_even_table(explanation.plan, explanation.break_even))
    return [
        would_be_headline(explanation.problem, explanation.plan, explanation.report),
        Paragraph(_distance(explanation)),
        *accuracy_blocks(None, evidence),
        Paragraph(),
        *plan_blocks(explanation.problem, explanation.plan, explanation.report),
        Paragraph(),
        *_limits(explanation),
        *(block for table in tables if table.rows for block in (Paragraph(), table)),
        *_closing(explanation),
    ]


def _distance(explanation: Explanation) -> str:
    """Describe the plan's distance from the proved best."""
    model = scope_text(explanation.problem)
    if explanation.is_outside:
        share = range_text(Interval(-explanation.above_best.high, -explanation.above_best.low))
        return f"not in the declared space, whose proved best takes {share} longer ({model})"
    if explanation.best.plan is None:
        return f"no plan of the space was found in the time; the best takes at least {_low(explanation)} ({model})"
    if not explanation.report.fits:
        return f"the proved best that fits takes {_amounts(explanation, explanation.best.bounds)} ({model})"
    if explanation.best.plan == explanation.plan or explanation.value <= explanation.best.bounds.high:
        most = range_text(Interval(-math.inf, max(0.0, explanation.above_best.high)))
        return f"the best plan known; {most} can be saved ({model})"
    bounds = explanation.best.bounds
    return (
        f"not the best: the proved best takes {_amounts(explanation, Interval(bounds.low, bounds.high))}, "
        f"which saves {range_text(explanation.above_best)} ({model})"
    )


def _low(explanation: Explanation) -> str:
    return _amount(explanation, explanation.best.bounds.low)


def _amount(explanation: Explanation, value: float) -> str:
    if math.isinf(value):
        return "-"
    return seconds_text(value) if explanation.unit == "s" else f"{rate_text(value)} GPU-hours"


def _amounts(explanation: Explanation, interval: Interval) -> str:
    low, high = _amount(explanation, interval.low), _amount(explanation, interval.high)
    return joined(low, high)


def _limits(explanation: Explanation) -> Iterator[Block]:
    """Show memory, batch, network and rules, a line each."""
    limits = explanation.limits
    yield Paragraph("What binds", "bold")
    yield Fact("memory", _memory(explanation))
    bubble = (
        f"{counted(limits.num_micro_batches, 'micro-batch', 'micro-batches')} on "
        f"{counted(explanation.plan.layout.pp, 'stage')}: the bubble is "
        f"{percent_text(limits.bubble_share)} of the step"
    )
    yield Fact("batch", bubble if explanation.plan.layout.pp > 1 else "no pipeline, no bubble")
    lines = [
        f"{item.part.replace('_', ' ')} {seconds_text(item.seconds)} ({percent_text(item.share)}), groups of "
        f"{counted(item.num_ranks, 'rank')} over {printable(item.tier)}"
        for item in limits.exposed
        if item.share >= ALMOST_NOTHING
    ]
    yield Fact("network", "; ".join(lines) or "no communication that adds to the step by more than 0.1 %")
    for rule in limits.rules:
        bound = (
            "nothing" if rule.least_bound_s is None else f"steps of {lower_bound_text(rule.least_bound_s)} or more"
        )
        verdict = "may keep out something better" if rule.may_bind else "keeps out nothing better"
        yield Fact("rule", f"{rule.rule} {verdict}: it alone refuses {bound} (by the bounds)")


def _memory(explanation: Explanation) -> str:
    """Describe the free memory by stage, and whether memory binds, as far as it is proved."""
    room = explanation.limits.headroom_bytes
    tightest = min(range(len(room)), key=lambda stage: room[stage])
    shown = ", ".join(gib_text(size) for size in room[:SHOWN_STAGES])
    rest = f", ... ({counted(len(room), 'stage')})" if len(room) > SHOWN_STAGES else ""
    text = f"stage {tightest} is the fullest; left on each stage: {shown}{rest}"
    unlimited = next((worth for worth in explanation.worth if worth.name == "unlimited_memory"), None)
    if unlimited is None:
        return text
    if unlimited.gain.low > 0:
        peak = unlimited.best.peak_memory_bytes
        need = f"; the best plan found without a limit needs {gib_text(peak)} a GPU" if peak else ""
        text += f". Memory binds: without a limit {range_text(unlimited.gain)} would be saved{need}"
        one_more = next(
            (worth for worth in explanation.worth if worth.name == "more_memory" and worth.gain.low > 0), None
        )
        if one_more is not None and one_more.best.peak_memory_bytes:
            needs = gib_text(one_more.best.peak_memory_bytes - explanation.report.peak_memory_bytes)
            text += f". A better plan needs {needs} more than this one"
        return text
    if unlimited.gain.high <= ALMOST_NOTHING:
        share = range_text(Interval(-math.inf, unlimited.gain.high))
        return f"{text}. Memory does not bind: without a limit {share} would be saved"
    return f"{text}. Whether memory binds was not decided in the time"


def _changes_table(explanation: Explanation) -> Table:
    rows = [
        (
            change.words,
            _amounts(explanation, change.best.bounds),
            range_text(change.saved),
            _difference(explanation.plan.layout, change.best.layout),
        )
        for change in explanation.changes
    ]
    columns = ("change", "proved best", "saves", "layout")
    return Table("Single changes, everything else fixed", columns, rows, words=(0, -1), fixed=True)


def _difference(own: Layout, other: Layout | None) -> str:
    """List the fields in which another layout differs; its batch is that of the question."""
    if other is None:
        return ""
    same_batch = other.model_copy(update={"global_batch_size": own.global_batch_size})
    return layout_words(own, same_batch) or "the same layout"


def _worth_table(explanation: Explanation) -> Table:
    rows = [
        (
            worth.words,
            "does not fit" if worth.same_plan is None else _amount(explanation, worth.same_plan),
            "as now" if worth.implied_by else _amounts(explanation, worth.best.bounds),
            range_text(worth.gain),
            _with(explanation, worth),
        )
        for worth in explanation.worth
    ]
    columns = ("change", "this plan", "proved best", "saves", "best with")
    return Table("What more would be worth (proved)", columns, rows, words=(0, -1), fixed=True)


def _with(explanation: Explanation, worth: Worth) -> str:
    if worth.implied_by:
        return "(implied)"
    base = explanation.best.plan or explanation.plan
    other = None if worth.best.plan is None else worth.best.plan.layout
    words = _difference(base.layout, other)
    is_other = worth.best.plan is not None and worth.best.plan.virtual_stages != base.virtual_stages
    return f"{words}, other stages" if other == base.layout and is_other else words


def _wish_table(explanation: Explanation) -> Table:
    rows = []
    for wish in explanation.wishes:
        best = "" if wish.best is None or wish.best.infeasible else _amounts(explanation, wish.best.bounds)
        rows.append((wish.words, best, *_price(explanation, wish), _because(explanation, wish)))
    title = "Why not" if any(wish.asked for wish in explanation.wishes) else "Why not its neighbours"
    columns = ("wish", "proved best", "price", "in time", "best with / forbidden by")
    return Table(title, columns, rows, words=(0, -1), fixed=True)


def _price(explanation: Explanation, wish: WishAnswer) -> tuple[str, str]:
    """Write the price in per cent of the proved best, and in its unit."""
    if wish.outcome in ("forbidden", "does_not_fit", "too_late"):
        return "impossible", ""
    if wish.price is None or wish.amount is None:
        return "", ""
    amount = _amounts(explanation, wish.amount) if math.isfinite(wish.price.high) else ""
    return range_text(wish.price, signed=True), amount


def _because(explanation: Explanation, wish: WishAnswer) -> str:
    base = explanation.best.plan or explanation.plan
    if wish.outcome == "priced" and wish.best is not None and wish.best.plan is not None:
        words = _difference(base.layout, wish.best.plan.layout)
        return f"{words}; {wish.reason}" if wish.reason else words
    if wish.outcome == "open":
        return f"{wish.reason}; none found in the time".removeprefix("; ")
    return wish.reason


def _closing(explanation: Explanation) -> Iterator[Block]:
    if explanation.unanswered:
        why = "interrupted before" if explanation.interrupted else "no time left for"
        yield Fact("open", f"{why}: {'; '.join(explanation.unanswered)}")
    yield Fact("proof", f"every range holds the truth for the cost model; {seconds_text(explanation.wall_time_s)}")
