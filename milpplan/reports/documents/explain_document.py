"""JSON document of ``milpplan explain``, in seconds, bytes and fractions; null where nothing is proved."""

from __future__ import annotations

from typing import Literal

from milpplan.explain.records import Explanation, Outcome, Unit
from milpplan.problem.plan import Layout
from milpplan.problem.problem import Problem
from milpplan.problem.records import Computed, Record
from milpplan.reports.documents.fields import Finite, IntervalDocument, document_of
from milpplan.reports.documents.plan_file import PlanDocument, plan_document


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
    least_bound_s: Finite
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
    return document_of(
        ExplanationDocument,
        explanation,
        report,
        breakdown=report.breakdown_s,
        hidden=report.hidden_s,
        plan=plan_document(explanation.plan, report),
    )
