"""Answer of ``gap``: document and blocks. Times in seconds, memory in bytes, shares of the plan's step; null:
unknown."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from milpplan.errors import MilpplanError
from milpplan.explain import Interval
from milpplan.explain.judge.records import Change, Effort, GapReport, SpaceGap
from milpplan.optimize import PlanResult
from milpplan.optimize.records import Status
from milpplan.optimize.search.closed_layouts import FATES
from milpplan.problem import Layout, Problem
from milpplan.problem.plan import layout_words
from milpplan.problem.records import Computed, Record
from milpplan.reports.answers.step import plan_blocks, would_be_headline
from milpplan.reports.blocks import Block, Fact, Paragraph, Table
from milpplan.reports.documents.certificate import CertificateDocument, certificate_of
from milpplan.reports.documents.document import BoundClassDocument, Fates, bound_classes
from milpplan.reports.documents.fields import IntervalDocument, document_of
from milpplan.reports.documents.plan_file import PlanDocument, plan_document
from milpplan.reports.words.plan_words import cost_model_text, joined, range_text, space_text
from milpplan.simulation.step_report import MemoryVerdict
from milpplan.units import (
    NS_PER_S,
    count_text,
    gib_text,
    lower_bound_text,
    money_text,
    percent_text,
    printable,
    rate_text,
    seconds_text,
)


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
        changes=_changes(gap.changes),
        chain=_changes(gap.chain),
        near=tuple(document_of(NearDocument, near, layout=near.plan.layout) for near in gap.near),
        plan=plan_document(gap.plan, report),
    )


def _changes(changes: Sequence[Change]) -> tuple[ChangeDocument, ...]:
    return tuple(document_of(ChangeDocument, change, plan=plan_document(change.plan)) for change in changes)


def _space(space: SpaceGap) -> SpaceGapDocument:
    result = space.result
    return document_of(
        SpaceGapDocument,
        space,
        result,
        space=space_text(space.problem),
        best=None if space.best is None else plan_document(space.best),
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


EFFORTS = {"flag": "arguments", "reshard": "converts the checkpoint"}


def gap_blocks(gap: GapReport) -> list[Block]:
    """Show all answers about the gap of a plan, the most important first."""
    verdicts = [Paragraph(f"gap to {space.name}: {verdict(gap, space)}") for space in gap.spaces]
    tables = [table for table in (spaces_table(gap), changes_table(gap), chain_table(gap)) if table.rows]
    return [
        would_be_headline(gap.problem, gap.plan, gap.report),
        *verdicts,
        Paragraph(),
        *plan_blocks(gap.problem, gap.plan, gap.report),
        *(block for table in tables for block in (Paragraph(), table)),
        Paragraph(),
        *_closing(gap),
    ]


def verdict(gap: GapReport, space: SpaceGap) -> str:
    """Describe the gap to the best of a space."""
    if space.result.status == "infeasible" and space.best is None:
        return "no plan of it fits (proved)"
    if not gap.report.fits:
        if space.best_s is None:
            return "no plan that fits was found in the time"
        return f"the best that fits takes {_times(space)}"
    if space.is_outside and space.saved.low < 0:
        return f"the plan is outside of it, and its best takes {_times(space)}"
    if space.best == gap.plan and space.proved:
        return f"none: no plan saves more than {percent_text(max(0.0, space.saved.high), 2)} (proved)"
    if space.best == gap.plan:
        return (
            f"no better plan was found; {range_text(Interval(-math.inf, space.saved.high))} can be saved (proved)"
        )
    return f"{range_text(space.saved)} of the step can be saved"


def _times(space: SpaceGap) -> str:
    """Write the bound and the best step time of a space."""
    low = "-" if space.bound_s is None else lower_bound_text(space.bound_s)
    return low if space.best_s is None else joined(low, seconds_text(space.best_s))


def spaces_table(gap: GapReport) -> Table:
    """Show bound, best known plan and saving of every space."""
    columns = ("space", "bound", "best known", "saves", "proof", "best known differs in")
    rows = [_space_row(gap, space) for space in gap.spaces]
    return Table("Proved best", columns, rows, words=(0, -1))


def _space_row(gap: GapReport, space: SpaceGap) -> tuple[str, ...]:
    nothing_fits = space.result.status == "infeasible" and space.best_s is None
    return (
        printable(space.name),
        "-" if space.bound_s is None else lower_bound_text(space.bound_s),
        "-" if space.best_s is None else seconds_text(space.best_s),
        # A plan that cannot run has no saving.
        range_text(space.saved) if gap.report.fits else "-",
        "nothing fits" if nothing_fits else "proved" if space.proved else "open",
        _layout_difference(gap, space),
    )


def _layout_difference(gap: GapReport, space: SpaceGap) -> str:
    """Describe the difference between the plan and the best known plan of a space."""
    if space.best is None:
        return ""
    own, best = gap.plan.layout, space.best.layout
    if not (gap.plan.selects or space.best.selects):
        own = own.model_copy(update={"recompute_modules": best.recompute_modules})
    words = layout_words(own, best)
    if space.best.virtual_stages == gap.plan.virtual_stages:
        return words or "nothing: it is this plan"
    return f"{words}, stages" if words else "stages"


def changes_table(gap: GapReport) -> Table:
    """Show the single changes."""
    return _table("Single changes, each simulated", "saves", gap.changes)


def chain_table(gap: GapReport) -> Table:
    """Show the changes one after the other, if there are several."""
    return _table("One after the other, each simulated", "saves more", gap.chain if len(gap.chain) > 1 else ())


def _table(title: str, saves: str, changes: Sequence[Change]) -> Table:
    rows = [
        (
            change.words,
            seconds_text(change.step_time_s),
            gib_text(change.peak_memory_bytes),
            percent_text(change.saved),
            "-" if change.closed is None else percent_text(change.closed, 0),
            EFFORTS[change.effort],
        )
        for change in changes
    ]
    return Table(title, ("change", "step", "memory", saves, "of the gap", "takes"), rows, words=(0, -1))


def spending_text(gap: GapReport) -> str:
    """Write GPU-hours and money of a run, and the possible savings."""
    spent = gap.spending
    text = f"a run of {count_text(spent.tokens)} tokens takes {rate_text(spent.gpu_hours)} GPU-hours"
    if spent.money is not None:
        text += f" ({money_text(spent.money)} at {spent.price_per_gpu_hour:g} a GPU-hour)"
    if not gap.report.fits:
        return f"{text}, if it fitted"
    less = spent.saved_gpu_hours
    if less.high <= 0:
        return f"{text}, none of which can be saved"
    text += f"; {_amounts(less)} GPU-hours can be saved"
    return text if spent.saved_money is None else f"{text} ({_amounts(spent.saved_money)})"


def _amounts(interval: Interval) -> str:
    """Write an interval in whole numbers, rounded outwards."""
    low = max(0.0, interval.low)
    if math.isinf(interval.high):
        return f"at least {rate_text(math.floor(low))}"
    ends = rate_text(math.floor(low)), rate_text(math.ceil(interval.high))
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)


def _closing(gap: GapReport) -> Iterator[Block]:
    yield Fact("cost", spending_text(gap))
    if gap.unanswered:
        why = "interrupted before" if gap.interrupted else "no time left for"
        yield Fact("open", f"{why}: {'; '.join(gap.unanswered)}")
    spaces = "; ".join(f"{space.name} is {space_text(space.problem)}" for space in gap.spaces)
    model = f"cost model {cost_model_text(gap.problem)}; {spaces}; {seconds_text(gap.wall_time_s)}"
    yield Fact("proof", printable(model))


def gaps_blocks(judged: Sequence[Judged], failed: Sequence[Failed]) -> list[Block]:
    """Show several plans, a row each, in the given order."""
    narrow = next((entry.gap.spaces[0].name for entry in judged if len(entry.gap.spaces) > 1), None)
    columns = ("plan", "step", "memory", *([f"gap to {narrow}"] if narrow else []), "gap to the whole space")
    rows = []
    for entry in judged:
        gap = entry.gap
        shares = [_share(gap, space) for space in gap.spaces]
        missing = ["-"] * (len(columns) - 3 - len(shares))
        step = (
            seconds_text(gap.report.step_time_s),
            gib_text(gap.report.peak_memory_bytes) if gap.report.fits else "does not fit",
        )
        hours = _amounts(gap.spending.saved_gpu_hours) if gap.report.fits else "-"
        rows.append((printable(entry.name), *step, *missing, *shares, hours, _first(gap)))
    empty = ["-"] * len(columns)
    rows += [(printable(lost.name), *empty, "not judged (see below)") for lost in failed]
    table = Table("Gaps", (*columns, "GPU-hours to save", "best single change"), rows, words=(0, -1))
    tokens = {count_text(entry.gap.spending.tokens) for entry in judged}
    return [table, Fact("cost", f"runs of {' or '.join(sorted(tokens))} tokens")] if judged else [table]


def _share(gap: GapReport, space: SpaceGap) -> str:
    if space.best_s is None:
        return "nothing fits" if space.result.status == "infeasible" else "unknown"
    return range_text(space.saved) if gap.report.fits else f"best {seconds_text(space.best_s)}"


def _first(gap: GapReport) -> str:
    if not gap.changes:
        return ""
    first = gap.changes[0]
    closes = "" if first.closed is None else f" ({percent_text(first.closed, 0)} of it)"
    return f"{first.words}{closes}"
