"""JSON document of ``milpplan gap``, in seconds, bytes and shares of the plan's step; null: unknown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from milpplan.errors import MilpplanError
from milpplan.explain.judge.records import Effort, GapReport, SpaceGap
from milpplan.optimize.result import PlanResult, Status
from milpplan.optimize.search.prune_reasons import FATES
from milpplan.problem.plan import Layout
from milpplan.problem.problem import Problem
from milpplan.problem.records import Computed, Record
from milpplan.reports.documents.certificate import CertificateDocument, certificate_of
from milpplan.reports.documents.document import BoundClassDocument, Fates, bound_classes
from milpplan.reports.documents.fields import IntervalDocument, document_of
from milpplan.reports.documents.plan_file import PlanDocument, PlanField, plan_document
from milpplan.reports.words.proof_words import cost_model_text, space_text
from milpplan.simulation.report import MemoryVerdict
from milpplan.units import NS_PER_S


@dataclass(frozen=True, slots=True)
class Judged:
    """Judged plan, with the further contents of its file."""

    name: str
    gap: GapReport
    launcher: str | None = None
    unknown_flags: tuple[str, ...] = ()
    ignored_flags: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """File that could not be judged, among several."""

    name: str
    error: MilpplanError


class LayoutFatesDocument(Record):
    """Outcome of every layout of a space.

    ``rejected`` counts (partial) layouts by the rule that refused them; ``bounds`` are those of the legal layouts
    that may fit.
    """

    enumerated: Computed
    legal: Computed
    rejected: Fates
    fates: Fates
    bounds: tuple[BoundClassDocument, ...]


class TimedDocument(Record):
    """Moment of a search, in seconds."""

    wall_time_s: float
    incumbent_s: float | None
    bound_s: float | None
    open_layouts: Computed


class SpaceGapDocument(Record):
    """Gap between the plan and the proved best of a space.

    ``saved``: shares of the plan's step: ``low`` is saved by the plan ``best``, ``high`` is the maximum by the
    bound. ``is_outside``: the plan is not in the space. ``proved``: bound and best known plan meet within the
    tolerance, or nothing fits (``status`` is that of the search of this space alone).
    """

    name: str
    space: str
    status: Status
    bound_s: float | None
    best_s: float | None
    saved: IntervalDocument
    is_outside: bool
    proved: bool
    best: PlanField | None
    layouts: LayoutFatesDocument | None
    log: tuple[TimedDocument, ...]
    certificate: CertificateDocument | None


class ChangeDocument(Record):
    """Simulated change. ``saved``: share of the step before it. ``closed``: share of the way to the fastest known
    plan.

    ``effort``: ``flag``, or ``reshard`` where a checkpoint must be converted.
    """

    lead: str
    words: str
    fields: tuple[str, ...]
    effort: Effort
    step_time_s: float
    peak_memory_bytes: Computed
    saved: float
    closed: float | None
    plan: PlanField


class NearDocument(Record):
    """Plan that the search of the whole space simulated."""

    step_time_s: float
    peak_memory_bytes: Computed
    layout: Layout


class SpendingDocument(Record):
    """Cost of a run of ``tokens``, and the saving with the fastest known plan (``low``) and at most (``high``)."""

    tokens: float
    gpu_hours: float
    saved_gpu_hours: IntervalDocument
    price_per_gpu_hour: float | None
    money: float | None
    saved_money: IntervalDocument | None


class PlanGapDocument(Record):
    """Gap of a plan; its ``plan`` and ``problem`` are those of a plan file."""

    name: str
    launcher: str | None
    cost_model: str
    step_time_s: float
    fits: bool
    memory_verdict: MemoryVerdict
    peak_memory_bytes: Computed
    usable_memory_bytes: int
    breakdown: dict[str, float]
    hidden: dict[str, float]
    proved: bool
    spaces: tuple[SpaceGapDocument, ...]
    changes: tuple[ChangeDocument, ...]
    chain: tuple[ChangeDocument, ...]
    near: tuple[NearDocument, ...]
    spending: SpendingDocument
    unanswered: tuple[str, ...]
    interrupted: bool
    unknown_flags: tuple[str, ...]
    ignored_flags: tuple[str, ...]
    notes: tuple[str, ...]
    wall_time_s: float
    plan: PlanDocument
    problem: Problem


class FailedDocument(Record):
    """File that could not be judged: values seen, values expected, and advice."""

    name: str
    seen: str
    expected: str
    do: str


class GapDocument(Record):
    """Output of ``milpplan gap --json``."""

    schema_version: Literal[1] = 1
    milpplan_version: str
    plans: tuple[PlanGapDocument, ...]
    failed: tuple[FailedDocument, ...]


def gap_document(judged: Sequence[Judged], failed: Sequence[Failed] = ()) -> GapDocument:
    """Make the document of several plans' gaps."""
    plans = tuple(_plan(entry) for entry in judged)
    lost = tuple(document_of(FailedDocument, failure, failure.error) for failure in failed)
    return document_of(GapDocument, plans=plans, failed=lost)


def _plan(entry: Judged) -> PlanGapDocument:
    gap, report = entry.gap, entry.gap.report
    return document_of(
        PlanGapDocument,
        entry,
        gap,
        report,
        cost_model=cost_model_text(gap.problem),
        breakdown=report.breakdown_s,
        hidden=report.hidden_s,
        spaces=tuple(_space(space) for space in gap.spaces),
        near=tuple(document_of(NearDocument, near, layout=near.plan.layout) for near in gap.near),
        plan=plan_document(gap.plan, report),
    )


def _space(space: SpaceGap) -> SpaceGapDocument:
    result = space.result
    return document_of(
        SpaceGapDocument,
        space,
        result,
        space=space_text(space.problem),
        layouts=layout_fates(result, space.best_s),
        log=tuple(
            document_of(TimedDocument, line, incumbent_s=line.incumbent, bound_s=line.bound) for line in result.log
        ),
        certificate=certificate_of(result),
    )


def layout_fates(result: PlanResult, best_s: float | None) -> LayoutFatesDocument | None:
    """Make the record of every layout's outcome, with bounds by class; None without layouts."""
    layouts = result.layouts
    if layouts is None:
        return None
    return LayoutFatesDocument(
        enumerated=result.enumerated,
        legal=len(layouts.space),
        rejected={name: count for name, count in result.rejected.items() if count},
        fates={fate: layouts.count(fate) for fate in FATES},
        bounds=bound_classes(layouts, None if best_s is None else best_s * NS_PER_S),
    )
