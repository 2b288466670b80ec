"""Choice of hardware: documents and blocks of the comparison of candidates and of the minimum number of GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isfinite
from typing import Literal

from milpplan.explain import Choice, Fewest
from milpplan.explain.hardware_choice import Outcome
from milpplan.problem.problem import MAX_GPUS
from milpplan.problem.records import Record
from milpplan.reports.answers.solve import plan_lines, solve_blocks
from milpplan.reports.answers.step import memory_text, plan_blocks
from milpplan.reports.blocks import Block, Fact, Paragraph, Table
from milpplan.reports.documents.document import ResultDocument, result_document
from milpplan.reports.documents.fields import Finite, RunDocument, document_of
from milpplan.reports.words.plan_words import scope_text
from milpplan.units import counted, gap_text, money_text, percent_text, printable, rate_text, seconds_text
from milpplan.validation import Evidence

UNITS = {"cost": "cost", "gpu_hours": "GPU-hours", "s_per_token": "time a token"}


class CandidateDocument(Record):
    """A kind of hardware. ``value`` and ``bound`` are in the unit of the measure: what its plan takes, and what
    no plan of its space undercuts (absent where it is proved that none exists)."""

    hardware: str
    price_per_gpu_hour: float | None
    value: float | None
    bound: Finite
    run: RunDocument | None
    result: ResultDocument


class ChoiceDocument(Record):
    """Kinds of hardware, best first. ``proved``: no plan on another one beats the best plan. ``ahead_fraction``:
    the proved minimum distance to the next."""

    schema_version: Literal[1] = 1
    milpplan_version: str
    measure: Literal["cost", "gpu_hours", "s_per_token"]
    best: str | None
    proved: bool
    ahead_fraction: float | None
    candidates: tuple[CandidateDocument, ...]


def choice_document(choice: Choice, tolerance: float) -> ChoiceDocument:
    """Make the document of a choice."""
    candidates = tuple(_candidate(outcome, tolerance) for outcome in choice.outcomes)
    best = choice.best.candidate.name if choice.best else None
    return document_of(ChoiceDocument, choice, best=best, ahead_fraction=_ahead(choice), candidates=candidates)


def _candidate(outcome: Outcome, tolerance: float) -> CandidateDocument:
    result = result_document(outcome.result, tolerance, totals=outcome.totals)
    name, totals = outcome.candidate.name, outcome.totals
    return document_of(CandidateDocument, outcome, outcome.candidate, hardware=name, run=totals, result=result)


def _ahead(choice: Choice) -> float | None:
    """Return the minimum relative distance of all rivals' plans from the best plan; None where it is not proved
    best."""
    best, rivals = choice.best, choice.rivals_bound
    if best is None or best.value is None or not choice.proved or not isfinite(rivals):
        return None
    return rivals / best.value - 1.0


def choice_blocks(choice: Choice, verbose: bool = False, next_steps: Sequence[str] = ()) -> list[Block]:
    """Show who wins and by how much, a row for every candidate, and the winner's plan.

    Args:
        choice: Candidates with their results.
        verbose: Show the plan with its stages, time and memory.
        next_steps: What to do next, a line each.
    """
    columns = ("hardware", "GPUs", "step", "days", "GPU-hours", "cost", "gap", "status")
    table = Table("candidates", columns, [tuple(_row(outcome)) for outcome in choice.outcomes])
    parts: list[Block] = [_verdict(choice), Paragraph(), table]
    best = choice.best
    if best is not None and best.result.plan is not None and best.result.report is not None:
        parts += [Paragraph(), Paragraph(printable(f"the plan on {best.candidate.name}:"), "bold")]
        lines = plan_blocks if verbose else plan_lines
        parts += lines(best.result.problem, best.result.plan, best.result.report)
        parts += [] if verbose else [Fact("memory", memory_text(best.result.report))]
        scope = scope_text(best.result.problem, best.result.forbid)
        parts.append(Fact("proof", f"{scope}; the same space on every candidate"))
    if next_steps:
        parts.append(Fact("next", "\n".join(next_steps)))
    return parts


def _row(outcome: Outcome) -> Iterator[str]:
    result, totals = outcome.result, outcome.totals
    yield printable(outcome.candidate.name)
    yield "-" if result.plan is None else rate_text(result.plan.layout.num_gpus)
    yield "-" if result.step_time_s is None else seconds_text(result.step_time_s)
    yield "-" if totals is None else f"{totals.days:,.3g}"
    yield "-" if totals is None else rate_text(totals.gpu_hours)
    yield "-" if totals is None or totals.cost is None else money_text(totals.cost)
    yield "-" if result.gap is None else gap_text(result.gap)
    yield {"no_solution_found": "no plan found"}.get(result.status, result.status)


def _verdict(choice: Choice) -> Paragraph:
    best, unit = choice.best, UNITS[choice.measure]
    if best is None:
        words = "no plan on any of them: proved" if choice.proved else "no plan was found, and none is ruled out"
        return Paragraph(words, "bold red" if choice.proved else "bold yellow")
    name = printable(best.candidate.name)
    if not choice.proved:
        return Paragraph(
            f"{name} has the best plan found, but another may still undercut it ({unit})", "bold yellow"
        )
    ahead = _ahead(choice)
    if ahead is None:
        return Paragraph(f"{name} is the only one with a plan: proved", "bold green")
    return Paragraph(
        f"{name} is best: every plan on another takes at least {percent_text(ahead)} more {unit}, proved",
        "bold green",
    )


class FewestDocument(Record):
    """Minimum number of accelerators among the numbers tried.

    ``refused``: smaller numbers that provably have no plan; ``why``: what the largest of them lacks; ``open``:
    smaller numbers without such a proof; ``whole_nodes``: beyond one node only whole nodes were tried; ``result``:
    the best plan on the minimum number.
    """

    schema_version: Literal[1] = 1
    milpplan_version: str
    num_gpus: int | None
    whole_nodes: bool
    refused: tuple[int, ...]
    open: tuple[int, ...]
    why: str | None
    result: ResultDocument


def fewest_document(fewest: Fewest, tolerance: float) -> FewestDocument:
    """Make the document of an answer."""
    return document_of(FewestDocument, fewest, result=result_document(fewest.result, tolerance))


def fewest_blocks(
    found: Fewest,
    tolerance: float,
    evidence: Evidence | None = None,
    verbose: bool = False,
    next_steps: Sequence[str] = (),
) -> list[Block]:
    """Show the minimum number, the smaller numbers that are proved to have no plan, and the plan."""
    plan = solve_blocks(found.result, tolerance, evidence=evidence, verbose=verbose, next_steps=next_steps)
    return [fewest_headline(found), Paragraph(), *plan]


def fewest_headline(found: Fewest) -> Paragraph:
    """Name the minimum number, and the smaller numbers that are proved to have no plan."""
    largest_refused = f"{found.refused[-1]:,}" if found.refused else ""
    tried = _tried(found)
    if found.num_gpus is None:
        proved = (
            f"; of {tried} up to {largest_refused} it is proved that they have none"
            if largest_refused and not found.open
            else ""
        )
        left = f"; {_spans(found)} open" if found.open else ""
        return Paragraph(f"no number of GPUs with a plan was found{proved}{left}", "bold yellow")
    if found.open:
        text = Paragraph(
            f"fits on {counted(found.num_gpus, 'GPU')}; {_spans(found)} open, of {tried}", "bold yellow"
        )
        if largest_refused:
            text = text.extended(f": proved that the other {len(found.refused):,} smaller ones have no plan.")
        if found.why is not None:
            text = text.extended(printable(f"\nWith {largest_refused}: {found.why}"), "default")
        return text
    fewest = counted(found.num_gpus, "GPU is", "GPUs are")
    text = Paragraph(f"{fewest} the fewest that have a plan, of {tried}", "bold green")
    if largest_refused:
        text = text.extended(f": proved of all {len(found.refused):,} smaller ones, up to {largest_refused}.\n")
        if found.why is not None:
            text = text.extended(printable(f"With {largest_refused}: {found.why}"), "default")
    return text


def _spans(fewest: Fewest) -> str:
    """Describe the open numbers, as ``72 to 160`` where all tried numbers in between are open."""
    words, run = [], list[int]()
    for count in sorted((*fewest.refused, *fewest.open, fewest.num_gpus or MAX_GPUS + 1)):
        if count in fewest.open:
            run.append(count)
        elif run:
            words.append(f"{run[0]:,}" if len(run) == 1 else f"{run[0]:,} to {run[-1]:,}")
            run = []
    if run:
        words.append(f"{run[0]:,}" if len(run) == 1 else f"{run[0]:,} to {run[-1]:,}")
    return ", ".join(words)


def _tried(fewest: Fewest) -> str:
    """Describe the candidate numbers."""
    node = fewest.result.problem.hardware.gpus_per_node
    if not fewest.whole_nodes:
        return "the numbers asked for"
    return f"1 to {node:,} and whole nodes of {node:,}" if node > 1 else "all numbers"
