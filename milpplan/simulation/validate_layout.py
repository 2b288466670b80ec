"""Checks that a plan fits its problem: the job's number of GPUs and sequences, and degrees that suit the model."""

from __future__ import annotations

from collections.abc import Iterable

from milpplan.errors import IllegalPlanError
from milpplan.problem import SPLIT_SCHEDULES, Job, Layout, MixtureOfExperts, ModelSpec, Plan, Range
from milpplan.simulation.layout_columns import LayoutColumns
from milpplan.simulation.network import placement
from milpplan.simulation.pipeline.work_order import check_schedule

Legality = tuple[bool, str, str]
"""Rule of a layout: True if the layout keeps it, the values seen, and the expectation."""


def check_rules(rules: Iterable[Legality]) -> None:
    """Check rules.

    Raises:
        IllegalPlanError: a rule is broken; the message names the first such rule.
    """
    for legal, seen, expected in rules:
        if not legal:
            raise IllegalPlanError(f"The layout has {seen}.", f"Expected: {expected}.", "Change the layout.")


def check_job(job: Job, layout: Layout) -> None:
    """Compare a layout with the numbers, or ranges of numbers, of a job.

    Raises:
        IllegalPlanError: the layout has another number of GPUs, or another global batch (sequences).
    """
    quantities = (
        ("GPUs", "job.num_gpus", layout.num_gpus, job.num_gpus),
        ("sequences a step", "job.global_batch_size", layout.global_batch_size, job.global_batch_size),
    )
    for name, field, value, values in quantities:
        if not _admitted(values, value):
            raise IllegalPlanError(
                f"The plan has {value:,} {name}.",
                f"The problem asks for {_text(values)} ({field}).",
                f"Change the degrees and the batch of the plan, or {field} of the problem.",
            )


def _admitted(values: int | Range, value: int) -> bool:
    """Check that a job admits a value."""
    if isinstance(values, int):
        return value == values
    return value in range(values.minimum, values.maximum + 1, values.step)


def _text(values: int | Range) -> str:
    """Write a number or a range for a message."""
    if isinstance(values, int):
        return f"{values:,}"
    steps = f" in steps of {values.step:,}" if values.step > 1 else ""
    return f"{values.minimum:,} to {values.maximum:,}{steps}"


def check_plan_of_model(model: ModelSpec, plan: Plan) -> None:
    """Check that a plan suits a model; job and hardware do not matter.

    Raises:
        IllegalPlanError: the plan does not cover the model, or its degrees do not suit it.
    """
    layout = plan.layout
    if plan.virtual_stages[-1].layers[1] != model.num_layers:
        raise IllegalPlanError(
            f"The plan holds {plan.virtual_stages[-1].layers[1]} layers.",
            f"{model.name} has {model.num_layers}.",
            "Make the virtual stages cover every layer once.",
        )
    share = layout.dp * layout.micro_batch_size
    if layout.global_batch_size % share:
        raise IllegalPlanError(
            f"global_batch_size={layout.global_batch_size} is not a multiple of dp={layout.dp} x "
            f"micro_batch_size={layout.micro_batch_size}.",
            "Every replica runs a whole number of micro-batches.",
            "Change one of the three.",
        )
    check_rules(_model_rules(model, layout))
    try:
        check_schedule(layout.schedule, layout.pp, layout.num_micro_batches, layout.vpp)
    except ValueError as error:
        raise IllegalPlanError(
            f"The schedule cannot run: {error}.", "", "Change the schedule, pp, vpp or the batch."
        ) from error


def _model_rules(model: ModelSpec, layout: Layout) -> list[Legality]:
    """List the rules of a model: whole heads and whole experts on every rank."""
    experts = [kind.mlp for kind in model.kinds if isinstance(kind.mlp, MixtureOfExperts)]
    ranks = layout.tp * layout.cp * layout.dp
    expert_ranks = f"ep={layout.ep} x etp={layout.etp}"
    rules = [
        (
            kind.attention.num_attention_heads % layout.tp == 0,
            f"tp={layout.tp}",
            "tp divides the attention heads",
        )
        for kind in model.kinds
    ]
    rules += [
        (
            bool(experts) or layout.ep * layout.etp == 1,
            expert_ranks,
            "ep and etp are 1 in a model without experts",
        ),
        (ranks % (layout.ep * layout.etp) == 0, expert_ranks, "ep x etp divides tp x cp x dp"),
        (
            not experts or bool(placement.stages_agree(LayoutColumns.of([layout]).mapping)[0]),
            f"rank_order={layout.rank_order} with {expert_ranks}",
            "every stage has the same ranks for experts and for the rest",
        ),
        (
            layout.schedule not in SPLIT_SCHEDULES or not layout.offloads,
            f"something offloaded with schedule {layout.schedule}",
            "offloading goes with schedules that do not split the backward",
        ),
    ]
    return rules + [
        (moe.num_experts % layout.ep == 0, f"ep={layout.ep}", "ep divides the experts") for moe in experts
    ]
