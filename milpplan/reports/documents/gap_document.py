"""JSON document of ``milpplan gap``, in seconds, bytes and shares of the plan's step; null: unknown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from milpplan.errors import MilpplanError
from milpplan.explain.judge.records import Change, Effort, GapReport, SpaceGap, Spending
from milpplan.optimize.result import PlanResult, Status
from milpplan.optimize.search.candidate_layouts import FATES
from milpplan.problem.plan import Layout
from milpplan.problem.problem import Problem
from milpplan.problem.records import Computed, Record
from milpplan.reports.documents.certificate import CertificateDocument, certificate_of
from milpplan.reports.documents.document import BoundClassDocument, Fates, bound_classes
from milpplan.reports.documents.explain_document import IntervalDocument, interval_document
from milpplan.reports.documents.plan_file import PlanDocument, plan_document
from milpplan.reports.words.proof_words import cost_model_text, space_text
from milpplan.simulation.report import MemoryVerdict
from milpplan.units import NS_PER_S
from milpplan.version import __version__


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
    best: PlanDocument | None
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
    plan: PlanDocument


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
    return GapDocument(
        milpplan_version=__version__,
        plans=tuple(_plan(entry) for entry in judged),
        failed=tuple(
            FailedDocument(
                name=failure.name, seen=failure.error.seen, expected=failure.error.expected, do=failure.error.do
            )
            for failure in failed
        ),
    )


def _plan(entry: Judged) -> PlanGapDocument:
    gap, report = entry.gap, entry.gap.report
    return PlanGapDocument(
        name=entry.name,
        launcher=entry.launcher,
        cost_model=cost_model_text(gap.problem),
        step_time_s=report.step_time_s,
        fits=report.fits,
        memory_verdict=report.memory_verdict,
        peak_memory_bytes=report.peak_memory_bytes,
        usable_memory_bytes=report.usable_memory_bytes,
        breakdown=report.breakdown_s,
        hidden=report.hidden_s,
        proved=gap.proved,
        spaces=tuple(_space(space) for space in gap.spaces),
        changes=tuple(_change(change) for change in gap.changes),
        chain=tuple(_change(change) for change in gap.chain),
        near=tuple(
            NearDocument(
                step_time_s=near.step_time_s, peak_memory_bytes=near.peak_memory_bytes, layout=near.plan.layout
            )
            for near in gap.near
        ),
        spending=_spending(gap.spending),
        unanswered=gap.unanswered,
        interrupted=gap.interrupted,
        unknown_flags=entry.unknown_flags,
        ignored_flags=entry.ignored_flags,
        notes=entry.notes,
        wall_time_s=gap.wall_time_s,
        plan=plan_document(gap.plan, report),
        problem=gap.problem,
    )


def _space(space: SpaceGap) -> SpaceGapDocument:
    result = space.result
    return SpaceGapDocument(
        name=space.name,
        space=space_text(space.problem),
        status=result.status,
        bound_s=space.bound_s,
        best_s=space.best_s,
        saved=interval_document(space.saved),
        is_outside=space.is_outside,
        proved=space.proved,
        best=None if space.best is None else plan_document(space.best),
        layouts=layout_fates(result, space.best_s),
        log=tuple(
            TimedDocument(
                wall_time_s=line.wall_time_s,
                incumbent_s=line.incumbent,
                bound_s=line.bound,
                open_layouts=line.open_layouts,
            )
            for line in result.log
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


def _change(change: Change) -> ChangeDocument:
    return ChangeDocument(
        lead=change.lead,
        words=change.words,
        fields=change.fields,
        effort=change.effort,
        step_time_s=change.step_time_s,
        peak_memory_bytes=change.peak_memory_bytes,
        saved=change.saved,
        closed=change.closed,
        plan=plan_document(change.plan),
    )


def _spending(spent: Spending) -> SpendingDocument:
    return SpendingDocument(
        tokens=spent.tokens,
        gpu_hours=spent.gpu_hours,
        saved_gpu_hours=interval_document(spent.saved_gpu_hours),
        price_per_gpu_hour=spent.price_per_gpu_hour,
        money=spent.money,
        saved_money=None if spent.saved_money is None else interval_document(spent.saved_money),
    )
