"""The command ``min-gpus``: the fewest accelerators that a job needs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

import typer

from milpplan.cli import command, interrupts
from milpplan.cli import options as o
from milpplan.cli.arguments import within_range
from milpplan.cli.outcome import OF_STATUS, ExitCode, emit, say, show_blocks, shown_progress
from milpplan.cli.solve_options import DEFAULTS, SolveWords
from milpplan.cli.solving import evidence_of, next_steps
from milpplan.explain import Fewest, fewest_gpus
from milpplan.optimize import SolveOptions
from milpplan.optimize.context import undisturbed
from milpplan.problem import Problem
from milpplan.reports import write_whole
from milpplan.reports.answers.hardware_choice import fewest_blocks, fewest_document
from milpplan.reports.documents.document import document_text
from milpplan.reports.files import check_writable

EXAMPLES: Final = (
    ("As few H100 as Llama-3 70B trains on", "llama3-70b dgx-h100 --global-batch 512"),
    (
        "As few as finish in 90 days",
        "llama3-70b dgx-h100 --global-batch 1024 --tokens 1e12 --deadline-days 90 --gpus 64:1024:64",
    ),
)

NOT_ASKED: Final = {
    name: DEFAULTS[name]
    for name in (
        *(
            "target",
            "target_version",
            "stack",
            "price_limit",
            "price",
            "job",
            "calculon",
            "attention",
            "grad_dtype",
        ),
        *("inference", "method", "backend", "seed", "workers", "witness", "warm_start", "check_ends", "robust"),
        "scenarios",
    )
} | {"objective": "num_gpus"}
"""Values of ``solve``'s options that are no options here."""


def min_gpus(
    *,
    model: o.Model,
    hardware: o.Hardware,
    gpus: Annotated[
        str | None,
        typer.Option(
            "--gpus", metavar="LO:HI[:STEP]", help="Numbers to try.", show_default="1 to a node, then whole nodes"
        ),
    ] = None,
    time_limit: Annotated[
        float,
        typer.Option("--time-limit", metavar="S", help="Seconds; more refuses more of the smaller numbers."),
    ] = 60.0,
    words: Annotated[SolveWords, NOT_ASKED],
) -> ExitCode:
    """Find the fewest GPUs on which a model trains at all, or in time for a deadline, and prove that every smaller
    number does not suffice (up to a node every number is tried, beyond it whole nodes)."""
    problem = replace(words, gpus=gpus or "1").problem(hardware)
    options = words.options(problem)
    command.positive(time_limit, "--time-limit", "number of seconds")
    if words.out is not None:
        check_writable(words.out)
    fewest = _fewest(problem, options, gpus is None, words.progress)
    with undisturbed():
        return _print(fewest, options.gap, words.out, words.as_json, words.verbose)


def _fewest(problem: Problem, options: SolveOptions, widen: bool, progress: bool) -> Fewest:
    """Find the minimum number of GPUs."""
    options = replace(options, cancelled=interrupts.asked_to_stop)
    limit_s = options.time_limit_s
    answers: list[Fewest] = []
    with (
        interrupts.keeping(answers),
        shown_progress("step_time_per_token", progress) as callback,
        within_range(),
        interrupts.limited(limit_s),
    ):
        answers.append(fewest_gpus(problem, replace(options, callback=callback), widen=widen))
    return answers[0]


def _print(fewest: Fewest, gap: float, out: Path | None, as_json: bool, verbose: bool) -> ExitCode:
    """Print the minimum with its plan and with what smaller numbers lack, and write the file."""
    if fewest.result.message:
        say(fewest.result.message)
    document = fewest_document(fewest, gap)
    if as_json:
        emit(document_text(document))
    else:
        steps = tuple(next_steps(fewest.result, out, verbose))
        show_blocks(fewest_blocks(fewest, gap, evidence_of(fewest.result), verbose, steps))
    if out is not None and fewest.result.plan is not None:
        write_whole(out, document_text(document.result))
        say(f"Written to {out}.")
    return OF_STATUS[fewest.result.status]
