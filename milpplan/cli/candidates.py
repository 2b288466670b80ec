"""The work of ``solve`` on several kinds of hardware: prices of accelerators, and costs of a whole run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from milpplan.cli import arguments, interrupts
from milpplan.cli.next_steps import next_steps
from milpplan.cli.outcome import OF_STATUS, ExitCode, emit, say, show_blocks
from milpplan.cli.progress import shown_progress
from milpplan.cli.solving import within_range
from milpplan.errors import InvalidInputError
from milpplan.explain.hardware_choice import Candidate, Choice, choose
from milpplan.optimize.milp.solution import undisturbed
from milpplan.optimize.result import SolveOptions
from milpplan.problem.problem import Problem
from milpplan.problem.reading import shown
from milpplan.reports.answers.hardware_choice import choice_blocks, choice_document
from milpplan.reports.documents.document import document_text, result_document
from milpplan.reports.files import check_writable, write_whole

MAX_CANDIDATES = 16


def names_of(hardware: str | None) -> list[str]:
    """Read the kinds of hardware of a command line: words with commas between them."""
    names = [name.strip() for name in (hardware or "").split(",")]
    if len(names) > 1 and (len(set(names)) < len(names) or "" in names or len(names) > MAX_CANDIDATES):
        raise InvalidInputError(
            f"HARDWARE is {shown(hardware)}.",
            f"Expected one description, or two to {MAX_CANDIDATES} different ones with commas between them.",
            "Correct HARDWARE.",
        )
    return names


def prices(text: str | None, names: Sequence[str], tokens: float | None) -> dict[str, float]:
    """Read the price of an accelerator-hour of every kind of hardware; empty where none is given.

    Raises:
        InvalidInputError: no number, no hardware of the name, one that is missing, or no tokens to pay for.
    """
    if text is None:
        return {}
    if tokens is None:
        raise InvalidInputError(
            "--price-per-gpu-hour without --tokens.",
            "Expected the tokens that the whole run trains on.",
            "Add --tokens, such as --tokens 15e12.",
        )
    found: dict[str, float] = {}
    for part in text.split(","):
        name, equals, word = part.rpartition("=")
        for one in [name.strip()] if equals else names:
            found[arguments.choice(one, "--price-per-gpu-hour", names)] = _price(word)
    missing = [name for name in names if name not in found]
    if missing:
        raise InvalidInputError(
            f"--price-per-gpu-hour {shown(text)} has no price for {', '.join(missing)}.",
            "Expected one price for all, or NAME=PRICE for each kind of hardware, with commas between them.",
            "Add what is missing.",
        )
    return found


def _price(word: str) -> float:
    try:
        price = float(word)
    except ValueError:
        price = -1.0
    arguments.positive(price if price != -1.0 else float("nan"), "--price-per-gpu-hour", "price")
    return price


def run(
    names: Sequence[str],
    problem_for: Callable[[str], Problem],
    price_of: Mapping[str, float],
    options: SolveOptions,
    out: Path | None,
    as_json: bool,
    verbose: bool,
) -> ExitCode:
    """Solve on every kind of hardware, print them in order, write the best result."""
    if out is not None:
        check_writable(out)
    arguments.positive(options.time_limit_s, "--time-limit", "number of seconds")
    candidates = [Candidate(name, _priced(problem_for(name), price_of), price_of.get(name)) for name in names]
    options = replace(options, cancelled=interrupts.asked_to_stop)
    objective = candidates[0].problem.job.objective
    found: list[Choice] = []
    with (
        interrupts.keeping(found),
        shown_progress(objective) as callback,
        within_range(),
        interrupts.limited(options.time_limit_s),
    ):
        found.append(choose(candidates, replace(options, callback=callback)))
    with undisturbed():
        return _told(found[0], options, out, as_json, verbose)


def _told(choice: Choice, options: SolveOptions, out: Path | None, as_json: bool, verbose: bool) -> ExitCode:
    """Print the candidates in order, write the best result."""
    for outcome in choice.outcomes:
        if outcome.result.message:
            say(f"{outcome.candidate.name}: {outcome.result.message}")
    best = choice.best
    if as_json:
        emit(document_text(choice_document(choice, options.gap)))
    else:
        steps = () if best is None else tuple(next_steps(best.result, out, verbose))
        show_blocks(choice_blocks(choice, verbose, steps))
    if out is not None and best is not None:
        document = result_document(best.result, options.gap, totals=best.totals)
        write_whole(out, document_text(document))
        say(f"The result of {best.candidate.name} is written to {out}.")
    return _code(choice)


def _priced(problem: Problem, price_of: Mapping[str, float]) -> Problem:
    """Minimise GPU-hours where there are prices: the minimum cost of each kind of hardware follows from them."""
    if not price_of:
        return problem
    return problem.model_copy(update={"job": problem.job.model_copy(update={"objective": "gpu_hours"})})


def _code(choice: Choice) -> ExitCode:
    best = choice.best
    if best is None:
        return OF_STATUS["infeasible" if choice.proved else "no_solution_found"]
    return OF_STATUS["optimal" if choice.proved and best.result.status == "optimal" else "feasible"]
