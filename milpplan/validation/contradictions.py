"""Records that contradict themselves or another record of the same source."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from milpplan.units import percent_text, seconds_text
from milpplan.validation.comparison import Comparison
from milpplan.validation.ranking import release_of
from milpplan.validation.runs import stack_of

SAME_STEP: Final = 0.02
"""Relative difference up to which two printed values of one step agree: both are rounded."""
SAME_RERUN: Final = 0.1
"""Relative difference up to which two measurements of one job agree."""


@dataclass(frozen=True, slots=True)
class Contradiction:
    """Records that cannot all be true, and the reason."""

    ids: tuple[str, ...]
    reason: str


def contradictions(comparisons: Sequence[Comparison]) -> list[Contradiction]:
    """List contradictions inside records, then between records.

    Args:
        comparisons: simulated runs.

    Returns:
        One entry a record or group of records. Scores still count the records: which of them is right is not
        known.
    """
    inside = [
        Contradiction((comparison.run.id,), reason) for comparison in comparisons for reason in _inside(comparison)
    ]
    return inside + list(_between(comparisons))


def _inside(comparison: Comparison) -> Iterator[str]:
    measured, printed = comparison.run.measured, comparison.run.parallel
    problem, layout = comparison.statement.problem, comparison.statement.plan.layout
    if measured.step_time_s and measured.tokens_per_s_per_gpu:
        tokens = layout.global_batch_size * problem.job.sequence_length / layout.num_gpus
        other_s = tokens / measured.tokens_per_s_per_gpu
        if abs(other_s / measured.step_time_s - 1) > SAME_STEP:
            yield (
                f"the step takes {seconds_text(measured.step_time_s)} as printed, {seconds_text(other_s)} by the"
                " printed tokens/s"
            )
    if printed.dp is not None and printed.dp != layout.dp:
        yield f"dp={printed.dp} is printed, the number of GPUs gives dp={layout.dp}"
    if printed.ep is not None and printed.ep > layout.ep:
        yield f"ep={printed.ep} is printed, the model and the number of GPUs allow ep={layout.ep}"
    if printed.grad_accum and printed.micro_batch and printed.global_batch:
        batch = layout.dp * printed.micro_batch * printed.grad_accum
        if batch != printed.global_batch:
            yield (
                f"a global batch of {printed.global_batch:,} is printed, dp x micro-batch x accumulation is"
                f" {batch:,}"
            )


def _between(comparisons: Sequence[Comparison]) -> Iterator[Contradiction]:
    """Compare measurements of one job with one release and one state of the framework."""
    groups: dict[tuple[object, ...], list[Comparison]] = defaultdict(list)
    for comparison in comparisons:
        if comparison.step is not None:
            run, statement = comparison.run, comparison.statement
            key = (
                run.group,
                run.framework,
                release_of(run),
                stack_of(run),
                run.sweep_id,
                run.parallel.model_dump_json(),
            )
            groups[(*key, statement.problem, statement.plan)].append(comparison)
    for members in groups.values():
        steps = [member.step.step_time_s for member in members if member.step is not None]
        if max(steps) > (1 + SAME_RERUN) * min(steps):
            yield Contradiction(
                tuple(member.run.id for member in members),
                f"one job took {seconds_text(min(steps))} and {seconds_text(max(steps))},"
                f" {percent_text(max(steps) / min(steps) - 1)} apart",
            )
