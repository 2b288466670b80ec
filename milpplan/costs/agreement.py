"""Whether a plan is one for its problem's job: as many GPUs and sequences a step as the job asks for."""

from __future__ import annotations

from milpplan.errors import IllegalPlanError
from milpplan.specs.plan import Layout
from milpplan.specs.problem import Job, Range


def check_job(job: Job, layout: Layout) -> None:
    """Compare a layout with the numbers, or ranges of numbers, of a job.

    Raises:
        IllegalPlanError: the layout has another number of GPUs, or another global batch (sequences).
    """
    asked = (
        ("GPUs", "job.num_gpus", layout.num_gpus, job.num_gpus),
        ("sequences a step", "job.global_batch_size", layout.global_batch_size, job.global_batch_size),
    )
    for name, field, value, values in asked:
        if not _admitted(values, value):
            raise IllegalPlanError(
                f"The plan has {value:,} {name}.",
                f"The problem asks for {_text(values)} ({field}).",
                f"Change the degrees and the batch of the plan, or {field} of the problem.",
            )


def _admitted(values: int | Range, value: int) -> bool:
    if isinstance(values, int):
        return value == values
    return value in range(values.minimum, values.maximum + 1, values.step)


def _text(values: int | Range) -> str:
    if isinstance(values, int):
        return f"{values:,}"
    steps = f" in steps of {values.step:,}" if values.step > 1 else ""
    return f"{values.minimum:,} to {values.maximum:,}{steps}"
