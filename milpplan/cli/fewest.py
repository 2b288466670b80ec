"""The work of ``milpplan min-gpus``: the fewest accelerators that a job needs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from milpplan.cli import arguments, interrupts
from milpplan.cli.next_steps import next_steps
from milpplan.cli.outcome import OF_STATUS, ExitCode, emit, say, show_blocks
from milpplan.cli.progress import shown_progress
from milpplan.cli.solving import evidence_of, within_range
from milpplan.explain.hardware_choice import Fewest, fewest_gpus
from milpplan.optimize.milp.solution import undisturbed
from milpplan.optimize.result import SolveOptions
from milpplan.problem.problem import Problem
from milpplan.reports.answers.hardware_choice import fewest_blocks, fewest_document
from milpplan.reports.documents.document import document_text
from milpplan.reports.files import check_writable, write_whole


def run(
    problem: Problem, options: SolveOptions, widen: bool, out: Path | None, as_json: bool, verbose: bool
) -> ExitCode:
    """Find the minimum number of GPUs, print it with its plan and with what smaller numbers lack."""
    arguments.positive(options.time_limit_s, "--time-limit", "number of seconds")
    if out is not None:
        check_writable(out)
    options = replace(options, cancelled=interrupts.asked_to_stop)
    limit_s = options.time_limit_s
    answers: list[Fewest] = []
    with (
        interrupts.keeping(answers),
        shown_progress("step_time_per_token") as callback,
        within_range(),
        interrupts.limited(limit_s),
    ):
        answers.append(fewest_gpus(problem, replace(options, callback=callback), widen=widen))
    found = answers[0]
    with undisturbed():
        if found.result.message:
            say(found.result.message)
        document = fewest_document(found, options.gap)
        if as_json:
            emit(document_text(document))
        else:
            steps = tuple(next_steps(found.result, out, verbose))
            show_blocks(fewest_blocks(found, options.gap, evidence_of(found.result), verbose, steps))
        if out is not None and found.result.plan is not None:
            write_whole(out, document_text(document.result))
            say(f"Written to {out}.")
    return OF_STATUS[found.result.status]
