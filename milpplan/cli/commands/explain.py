"""The command ``explain``: questions about a plan, with proved answers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

from milpplan.cli import arguments, command, interrupts
from milpplan.cli import options as o
from milpplan.cli.arguments import check_plan_of_file, within_range
from milpplan.cli.outcome import ExitCode, emit, say, show_blocks
from milpplan.errors import InvalidInputError
from milpplan.explain import WISHABLE, Explanation
from milpplan.explain.explain_plan import explain_plan
from milpplan.optimize import DEFAULT_GAP
from milpplan.optimize.context import undisturbed
from milpplan.problem import Space
from milpplan.problem.reading import shown
from milpplan.reports.answers.explain import explanation_blocks, explanation_document
from milpplan.reports.documents.claims import bound_for, result_in
from milpplan.reports.documents.document import document_text, read_plan
from milpplan.units import lower_bound_text
from milpplan.validation.evidence import evidence

EXAMPLES: Final = (
    ("What limits the plan, and what more memory or bandwidth would gain", "plan.json"),
    ("Why not tensor parallelism of 8", "plan.json --why-not tp=8"),
)


def explain(
    plan: Annotated[Path, typer.Argument(metavar="PLAN.json", help="A plan file, or the JSON of a solve.")],
    why_not: Annotated[
        list[str] | None,
        typer.Option(
            "--why-not",
            "--wish",
            metavar="NAME=VALUE,...",
            help="A choice to price, as tp=8 or recompute=full. Repeatable.",
            show_default="the plan's neighbours",
        ),
    ] = None,
    time_limit: Annotated[
        float,
        typer.Option("--time-limit", metavar="S", help="Seconds for all questions; more narrows the ranges."),
    ] = 60.0,
    gap: o.Gap = DEFAULT_GAP,
    as_json: o.AsJson = False,
) -> ExitCode:
    """Explain a plan: what limits it, what more memory or bandwidth would gain, why not another choice; proved."""
    command.positive(time_limit, "--time-limit", "number of seconds")
    wishes = [wish(text) for text in why_not or []]
    problem, explained = read_plan(plan)
    check_plan_of_file(problem, explained)
    result_in(plan)
    known_s = bound_for(plan, problem)
    if known_s is not None:
        say(
            f"The file proves that no plan takes less than {lower_bound_text(known_s)} "
            "(`milpplan certify` checks it)."
        )
    answers: list[Explanation] = []
    with (
        interrupts.keeping(answers),
        _asking() as callback,
        within_range(),
        interrupts.limited(time_limit),
    ):
        answers.append(
            explain_plan(
                problem,
                explained,
                wishes,
                time_limit_s=time_limit,
                gap=gap,
                proved_bound_s=known_s,
                callback=callback,
            )
        )
    answer = answers[0]
    with undisturbed():
        if answer.interrupted:
            say(interrupts.STOPPED)
        known = None if problem.inference else evidence(problem, explained, answer.report.step_time_s)
        if as_json:
            emit(document_text(explanation_document(answer, known)))
        else:
            show_blocks(explanation_blocks(answer, known))
    return ExitCode.STOPPED_WITH_PLAN if answer.unanswered or answer.interrupted else ExitCode.OPTIMAL


def wish(text: str) -> Mapping[str, object]:
    """Read ``tp=8,recompute=full`` as fields and values.

    Raises:
        InvalidInputError: a field without a value, or twice.
        UnknownNameError: a name or a mode that does not exist.
    """
    parts = text.split(",")
    modes = [part for part in parts if part.partition("=")[0].strip() == "recompute"]
    names = [part.partition("=")[0].strip() for part in parts]
    if len(set(names)) < len(names):
        raise InvalidInputError(
            f"--why-not {shown(text)} names a field twice.", "Expected one value for each field.", "Ask twice."
        )
    others = [part for part in parts if part not in modes]
    values: dict[str, object] = {}
    if others:
        values = arguments.assignments(",".join(others), "--why-not", WISHABLE)
    for part in modes:
        values["recompute"] = command.choice(
            part.partition("=")[2].strip(), "--why-not recompute", Space().recompute
        )
    return values


@contextmanager
def _asking() -> Iterator[Callable[[str], None] | None]:
    """Make a callback that shows the current question on a terminal; None where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    console = Console(stderr=True, markup=False, highlight=False, emoji=False)
    with console.status("the proved best ...") as status:
        yield lambda words: status.update(f"{words} ...")
