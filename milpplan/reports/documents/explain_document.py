"""JSON document of ``milpplan explain``, in seconds, bytes and fractions; null where nothing is proved."""

from __future__ import annotations

import math
from typing import Any, Literal

from milpplan.explain.records import (
    Explanation,
    Interval,
    Optimum,
    Outcome,
    SingleChange,
    Unit,
    WishAnswer,
    Worth,
)
from milpplan.problem.plan import Layout
from milpplan.problem.problem import Problem
from milpplan.problem.records import Computed, Record
from milpplan.reports.documents.plan_file import PlanDocument, plan_document
from milpplan.version import __version__


class IntervalDocument(Record):
    """Proved interval that contains the true value; an end is null where no bound is known."""

    low: float | None
    high: float | None


class OptimumDocument(Record):
    """Best objective of a problem and the layout of the best plan found. ``infeasible``: there is provably no
    plan."""

    bounds: IntervalDocument
    infeasible: bool
    peak_memory_bytes: Computed | None
    layout: Layout | None


class ExposedDocument(Record):
    """Communication that adds to the step."""

    part: str
    seconds: float
    share: float
    num_ranks: Computed
    tier: str


class RuleDocument(Record):
    """Rule of divisibility with the lower bound, in seconds, of the plans that it alone refuses; null if there are
    none."""

    rule: str
    num_refused: Computed
    least_bound_s: float | None
    may_bind: bool


class LimitsDocument(Record):
    """Limits of the plan: free memory of every stage in bytes, the bubble's share of the step, communication, and
    rules."""

    headroom_bytes: tuple[int, ...]
    bubble_share: float
    num_micro_batches: Computed
    exposed: tuple[ExposedDocument, ...]
    rules: tuple[RuleDocument, ...]


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
    limits: LimitsDocument
    changes: tuple[SingleChangeDocument, ...]
    worth: tuple[WorthDocument, ...]
    wishes: tuple[WishDocument, ...]
    unanswered: tuple[str, ...]
    interrupted: bool
    wall_time_s: float
    plan: PlanDocument
    problem: Problem


def explanation_document(explanation: Explanation) -> ExplanationDocument:
    """Make the document of an explanation, which is also a plan file: it carries plan and problem."""
    report = explanation.report
    return ExplanationDocument(
        milpplan_version=__version__,
        unit=explanation.unit,
        step_time_s=report.step_time_s,
        value=explanation.value,
        best=_optimum(explanation.best),
        above_best=interval_document(explanation.above_best),
        fits=report.fits,
        is_outside=explanation.is_outside,
        peak_memory_bytes=report.peak_memory_bytes,
        usable_memory_bytes=report.usable_memory_bytes,
        breakdown=report.breakdown_s,
        hidden=report.hidden_s,
        limits=_limits(explanation),
        changes=tuple(_change(change) for change in explanation.changes),
        worth=tuple(_worth(worth) for worth in explanation.worth),
        wishes=tuple(_wish(wish) for wish in explanation.wishes),
        unanswered=explanation.unanswered,
        interrupted=explanation.interrupted,
        wall_time_s=explanation.wall_time_s,
        plan=plan_document(explanation.plan, report),
        problem=explanation.problem,
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def interval_document(interval: Interval) -> IntervalDocument:
    """Make the record of an interval; an unbounded end is None."""
    return IntervalDocument(low=_finite(interval.low), high=_finite(interval.high))


def _optimum(best: Optimum) -> OptimumDocument:
    return OptimumDocument(
        bounds=interval_document(best.bounds),
        infeasible=best.infeasible,
        peak_memory_bytes=best.peak_bytes,
        layout=None if best.plan is None else best.plan.layout,
    )


def _limits(explanation: Explanation) -> LimitsDocument:
    limits = explanation.limits
    return LimitsDocument(
        headroom_bytes=limits.headroom_bytes,
        bubble_share=limits.bubble_share,
        num_micro_batches=limits.num_micro_batches,
        exposed=tuple(
            ExposedDocument(
                part=exposed.part,
                seconds=exposed.seconds,
                share=exposed.share,
                num_ranks=exposed.num_ranks,
                tier=exposed.tier,
            )
            for exposed in limits.exposed
        ),
        rules=tuple(
            RuleDocument(
                rule=rule.rule,
                num_refused=rule.num_refused,
                least_bound_s=_finite(rule.least_bound),
                may_bind=rule.may_bind,
            )
            for rule in limits.rules
        ),
    )


def _change(change: SingleChange) -> SingleChangeDocument:
    return SingleChangeDocument(
        fields=change.fields, words=change.words, best=_optimum(change.best), saved=interval_document(change.saved)
    )


def _worth(worth: Worth) -> WorthDocument:
    return WorthDocument(
        name=worth.name,
        words=worth.words,
        same_plan=worth.same_plan,
        best=_optimum(worth.best),
        gain=interval_document(worth.gain),
        implied_by=worth.implied_by,
    )


def _wish(answer: WishAnswer) -> WishDocument:
    wish: dict[str, Any] = dict(answer.wish)
    return WishDocument(
        wish=wish,
        words=answer.words,
        outcome=answer.outcome,
        reason=answer.reason,
        best=None if answer.best is None else _optimum(answer.best),
        price=None if answer.price is None else interval_document(answer.price),
        amount=None if answer.amount is None else interval_document(answer.amount),
        in_space=answer.in_space,
        asked=answer.asked,
    )
