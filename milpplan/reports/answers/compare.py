"""Comparison of plans side by side: differences of problems and layouts, and shares of time and memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from milpplan.problem import Layout, Plan, Problem
from milpplan.problem.records import Computed, Record
from milpplan.reports.blocks import Block, Paragraph, Table
from milpplan.reports.documents.fields import document_of
from milpplan.reports.words.plan_words import cluster_text
from milpplan.simulation import BREAKDOWN, StepReport
from milpplan.units import (
    SECONDS_PER_HOUR,
    gib_text,
    percent_text,
    printable,
    rate_text,
    seconds_text,
    signed_percent_text,
)

DIFFERENT = 1e-4
"""Relative difference up to which plans count as equally fast: the default tolerance of a proof."""


@dataclass(frozen=True, slots=True)
class Side:
    """Plan of a comparison. ``bound_s``: the proved lower bound in its file, if there is one."""

    name: str
    problem: Problem
    plan: Plan
    report: StepReport
    bound_s: float | None = None

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.plan.layout.global_batch_size * self.problem.job.sequence_length

    @property
    def gpu_s_per_token(self) -> float:
        """Accelerator seconds per token, the cost of training."""
        return self.report.step_time_s * self.plan.layout.num_gpus / self.tokens

    @property
    def breakdown_per_token(self) -> dict[str, float]:
        """Breakdown in accelerator seconds per token."""
        share = self.plan.layout.num_gpus / self.tokens
        return {name: seconds * share for name, seconds in self.report.breakdown_s.items()}


class SideDocument(Record):
    """Compared plan. ``slower_fraction``: accelerator seconds per token over the first plan's, minus 1;
    ``gap_to_bound``: distance of the plan from the best bound that a file proves for the same problem."""

    name: str
    step_time_s: float
    tokens_per_s: float
    mfu: float
    num_gpus: Computed
    gpu_hours_per_billion_tokens: float
    peak_memory_bytes: Computed
    fits: bool
    slower_fraction: float
    gap_to_bound: float | None
    layout: Layout
    breakdown: dict[str, float]


class ComparisonDocument(Record):
    """Output of ``milpplan compare --json``; ``differences`` maps a field's name to the value of each plan."""

    schema_version: Literal[1] = 1
    milpplan_version: str
    same_problem: bool
    differences: dict[str, tuple[str, ...]]
    plans: tuple[SideDocument, ...]


def differences(sides: Sequence[Side]) -> dict[str, tuple[str, ...]]:
    """List the fields of problem and layout, and the contents of stages, in which two plans differ."""
    rows: dict[str, tuple[str, ...]] = {}
    facts = [dict(_facts(side)) for side in sides]
    for name in facts[0]:
        values = tuple(fact[name] for fact in facts)
        if len(set(values)) > 1:
            rows[name] = values
    return rows


def _facts(side: Side) -> Iterator[tuple[str, str]]:
    job, layout = side.problem.job, side.plan.layout
    yield "model", side.problem.model.name
    several = side.problem.other_hardware
    yield "hardware", cluster_text(side.problem, layout.num_gpus) if several else side.problem.hardware.name
    yield "GPUs", f"{layout.num_gpus:,}"
    for name in ("kind", "sequence_length", "precision", "attention_kernel", "grad_dtype"):
        yield name, _word(getattr(job, name))
    yield "images", job.vision_text or "none"
    yield "trained", job.frozen_text or "all weights"
    yield "alignment", job.alignment_text or "none"
    yield "MTP layers", f"{job.mtp_layers}"
    yield "expert imbalance", f"{job.expert_imbalance:g}"
    yield "optimizer", job.optimizer_text
    for name, value in layout.model_dump().items():
        yield name, _word(value)
    yield "micro-batches", f"{layout.num_micro_batches:,}"
    for mode in ("full", "selective"):
        counts = sum(getattr(stage.recompute, mode) for stage in side.plan.virtual_stages)
        yield f"layers recomputed {mode}", f"{counts:,}"
    layers = [stage.num_layers for stage in side.plan.virtual_stages]
    yield (
        "layers a virtual stage",
        f"{min(layers)} to {max(layers)}" if min(layers) < max(layers) else str(layers[0]),
    )


def _word(value: Any) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def same_problem(sides: Sequence[Side]) -> bool:
    """Test whether all plans have the same model, hardware and job, so that a bound for one plan holds for all."""
    asked = [
        (side.problem.model, side.problem.hardware, side.problem.other_hardware, side.problem.job)
        for side in sides
    ]
    return all(problem == asked[0] for problem in asked)


def best_bound_s(sides: Sequence[Side]) -> float | None:
    """Return the lowest bound of the files, if all plans have the same problem and each is in some file's space.

    Each bound holds for its declared space; only their minimum holds for all declared spaces.
    """
    bounds = [side.bound_s for side in sides if side.bound_s is not None]
    return min(bounds) if bounds and same_problem(sides) else None


def comparison_document(sides: Sequence[Side]) -> ComparisonDocument:
    """Make the document of a comparison."""
    bound, first = best_bound_s(sides), sides[0]
    plans = tuple(
        document_of(
            SideDocument,
            side,
            side.report,
            num_gpus=side.plan.layout.num_gpus,
            gpu_hours_per_billion_tokens=side.gpu_s_per_token * 1e9 / SECONDS_PER_HOUR,
            slower_fraction=side.gpu_s_per_token / first.gpu_s_per_token - 1.0,
            gap_to_bound=None if bound is None else max(0.0, 1.0 - bound / side.report.step_time_s),
            layout=side.plan.layout,
            breakdown=side.report.breakdown_s,
        )
        for side in sides
    )
    same, different = same_problem(sides), differences(sides)
    return document_of(ComparisonDocument, same_problem=same, differences=different, plans=plans)


def comparison_blocks(sides: Sequence[Side]) -> list[Block]:
    """Show the verdict, the differences, the results, and the parts of the time from the largest difference on."""
    names = tuple(printable(side.name) for side in sides)
    rows = [
        (name.replace("_", " "), *(printable(value) for value in values))
        for name, values in differences(sides).items()
    ]
    differing = Table("What differs", ("field", *names), rows)
    shown = differing if rows else Paragraph("Layouts, stages and problems are the same.")
    verdicts = (Paragraph(line) for line in _verdicts(sides, names))
    return [*verdicts, Paragraph(), shown, _results(sides, names), _times(sides, names)]


def _verdicts(sides: Sequence[Side], names: tuple[str, ...]) -> Iterator[str]:
    first = sides[0]
    for side, name in zip(sides[1:], names[1:], strict=True):
        ratio = side.gpu_s_per_token / first.gpu_s_per_token - 1.0
        if abs(ratio) < DIFFERENT:
            yield f"{name} is as fast as {names[0]} (within {DIFFERENT:.0e})."
            continue
        word = "more" if ratio > 0 else "less"
        part, change = _largest(first, side)
        yield (
            f"{name} takes {percent_text(abs(ratio), 2)} {word} GPU time a token than {names[0]}; "
            f"most of the difference is in {part.replace('_', ' ')} ({signed_percent_text(change, 2)})."
        )


def _largest(first: Side, side: Side) -> tuple[str, float]:
    """Return the part of the breakdown that differs most, and the difference as a share of the first plan's
    step."""
    ours, theirs = first.breakdown_per_token, side.breakdown_per_token
    change = {name: (theirs[name] - ours[name]) / first.gpu_s_per_token for name in BREAKDOWN}
    sign = 1.0 if sum(change.values()) > 0 else -1.0
    part = max(BREAKDOWN, key=lambda name: sign * change[name])
    return part, change[part]


def _results(sides: Sequence[Side], names: tuple[str, ...]) -> Table:
    reports, bound = [side.report for side in sides], best_bound_s(sides)
    hours = (side.gpu_s_per_token * 1e9 / SECONDS_PER_HOUR for side in sides)
    rows = [
        ("step", *(seconds_text(report.step_time_s) for report in reports)),
        ("tokens/s", *(rate_text(report.tokens_per_s) for report in reports)),
        ("MFU", *(percent_text(report.mfu) for report in reports)),
        ("GPU-hours a billion tokens", *(f"{value:,.4g}" for value in hours)),
        ("peak memory", *(gib_text(report.peak_memory_bytes) for report in reports)),
        ("memory", *(report.memory_verdict.replace("_", " ") for report in reports)),
    ]
    if bound is not None:
        gaps = (percent_text(max(0.0, 1.0 - bound / report.step_time_s), 2) for report in reports)
        rows.append(("above the proved bound", *gaps))
    return Table("Results", ("", *names), rows)


def _times(sides: Sequence[Side], names: tuple[str, ...]) -> Table:
    breakdowns = [side.report.breakdown_s for side in sides]
    shown = [name for name in BREAKDOWN if any(parts[name] for parts in breakdowns)]
    spread = {
        name: max(parts[name] for parts in breakdowns) - min(parts[name] for parts in breakdowns) for name in shown
    }
    rows = [
        (name.replace("_", " "), *(seconds_text(parts[name]) for parts in breakdowns))
        for name in sorted(shown, key=lambda part: -spread[part])
    ]
    return Table("Time (mean of the stages)", ("part", *names), rows)
