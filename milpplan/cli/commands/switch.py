"""The command ``switch``: from one plan file to another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from milpplan.cli import command
from milpplan.cli import options as o
from milpplan.cli.arguments import check_plan_of_file, within_range
from milpplan.cli.outcome import ExitCode, emit, say, show_blocks
from milpplan.errors import InvalidInputError
from milpplan.problem import Plan, Problem
from milpplan.problem.reading import shown
from milpplan.reports import write_whole
from milpplan.reports.answers.switch import switch_blocks, switch_document
from milpplan.reports.documents.document import read_plan
from milpplan.reports.files import check_writable
from milpplan.simulation.states import grad_bytes
from milpplan.switching.ownership import WHATS
from milpplan.switching.planning import plan_switch
from milpplan.switching.records import SENDERS
from milpplan.switching.routes import Links

EXAMPLES: Final = (("What moves when a job changes its plan", "before.json after.json"),)


def switch(
    source: Annotated[Path, typer.Argument(metavar="FROM.json", help="A plan file, or the JSON of a solve.")],
    target: Annotated[Path, typer.Argument(metavar="TO.json", help="Another plan for the same model and GPUs.")],
    senders: Annotated[
        str,
        typer.Option(
            "--senders",
            metavar="nearest|exact|relay",
            help="Nearest holders; the fastest direct senders, proved; or with relays inside fast domains.",
        ),
    ] = "relay",
    bandwidths: Annotated[
        str | None,
        typer.Option(
            "--bandwidths",
            metavar="INSIDE,BETWEEN",
            help="Bytes/s of a GPU inside its fast domain and between, as 200e9,25e9; no latencies.",
            show_default="the hardware's",
        ),
    ] = None,
    as_json: o.AsJson = False,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Also write the JSON here.")] = None,
) -> ExitCode:
    """Plan the switch of a job to another plan: who sends which states to whom, and how long that takes."""
    chosen = next(name for name in SENDERS if name == command.choice(senders, "--senders", SENDERS))
    rates = None if bandwidths is None else _rates(bandwidths)
    if out is not None:
        check_writable(out)
    problem, other, before, after = _two_plans(source, target)
    whats = WHATS[:1] if problem.inference or other.inference else WHATS
    with within_range():
        links = Links.of(problem.hardware, before.layout.num_gpus)
        links = links if rates is None else Links(links.gpus_per_domain, *rates)
        each = grad_bytes(problem)
        found = [plan_switch(problem.model, before, after, links, what, chosen, each) for what in whats]
    document = switch_document(before, after, found) if as_json or out is not None else ""
    if as_json:
        emit(document)
    else:
        show_blocks(switch_blocks(before, after, found))
    if out is not None:
        write_whole(out, document)
        say(f"Written to {out}.")
    return ExitCode.OPTIMAL


def _rates(text: str) -> tuple[float, float]:
    """Read ``200e9,25e9`` as two rates.

    Raises:
        InvalidInputError: they are not two numbers.
    """
    try:
        inside, between = (float(part) for part in text.split(","))
    except ValueError as error:
        raise InvalidInputError(
            f"--bandwidths {shown(text)} is not two numbers.",
            "Expected bytes/s inside a fast domain and between domains, as 200e9,25e9.",
            "Correct the option.",
        ) from error
    return inside, between


def _two_plans(source: Path, target: Path) -> tuple[Problem, Problem, Plan, Plan]:
    """Read both plans with their problems.

    From training to inference, as before the rollouts of a GRPO step, only the policy's weights move.

    Raises:
        InvalidInputError: they are not of one model on one kind of hardware with gradients of one precision.
    """
    (problem, before), (other, after) = (read_plan(path) for path in (source, target))
    check_plan_of_file(problem, before)
    check_plan_of_file(other, after)
    pairs: dict[str, tuple[object, object, str, str]] = {
        "model": (problem.model, other.model, problem.model.name, other.model.name),
        "hardware": (problem.hardware, other.hardware, problem.hardware.name, other.hardware.name),
    }
    if problem.inference or not other.inference:
        pairs["job.kind"] = (problem.job.kind, other.job.kind) * 2
        pairs["job.grad_dtype"] = (problem.job.grad_dtype, other.job.grad_dtype) * 2
    for path, job in ((source, problem.job), (target, other.job)):
        if job.frozen_text:
            raise InvalidInputError(
                f"{path} has {job.frozen_text}.",
                "Expected plans that train all weights: a switch moves the states of all weights.",
                "Give plans of a job without --lora-rank and --freeze.",
            )
        if job.reference_copies and not other.inference:
            raise InvalidInputError(
                f"{path} has {job.alignment_text}.",
                "Expected plans of one model: a switch moves the policy's states alone.",
                "Give plans of a job without --alignment, or with --reference none.",
            )
        if job.mtp_layers:
            raise InvalidInputError(
                f"{path} trains layers of multi-token prediction.",
                "Expected plans without: a switch moves the states of the other layers, embedding and head.",
                "Give plans of a job without --mtp-layers.",
            )
        if job.optimizer != "adam":
            raise InvalidInputError(
                f"{path} has the optimizer {job.optimizer}.",
                "Expected Adam, whose two moments a switch moves.",
                "Give plans of a job without --optimizer.",
            )
    if states := problem.hardware.software.states_text:
        raise InvalidInputError(
            f"{source} has {states}.",
            "Expected optimizer states in fp32, whose moves are priced.",
            "Give plans on hardware with optimizer_state_bytes 12.",
        )
    for name, (first, second, *words) in pairs.items():
        if first != second:
            raise InvalidInputError(
                f"{source} and {target} have different {name}: {shown(words[0])} and {shown(words[1])}.",
                "Expected two plans for the same model on the same GPUs.",
                "Give plans of one problem; a switch changes the layout only.",
            )
    return problem, other, before, after
