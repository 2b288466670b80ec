"""A ``solve`` on several kinds of hardware: the kinds in order, with the costs of a whole run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from milpplan.cli import checks, interrupts
from milpplan.cli.answer import next_steps, shown_progress
from milpplan.cli.arguments import within_range
from milpplan.cli.outcome import OF_STATUS, ExitCode, emit, say, show_blocks
from milpplan.explain import Candidate, Choice, choose
from milpplan.optimize import SolveOptions
from milpplan.optimize.milp.solution import undisturbed
from milpplan.problem import Problem
from milpplan.reports import write_whole
from milpplan.reports.answers.hardware_choice import choice_blocks, choice_document
from milpplan.reports.documents.document import document_text, result_document
from milpplan.reports.files import check_writable


def choose_hardware(
    names: Sequence[str],
    problem_for: Callable[[str], Problem],
    price_of: Mapping[str, float],
    options: SolveOptions,
    out: Path | None,
    as_json: bool,
    verbose: bool,
    progress: bool,
) -> ExitCode:
    """Solve on every kind of hardware, print them in order, write the best result."""
    if out is not None:
        check_writable(out)
    checks.positive(options.time_limit_s, "--time-limit", "number of seconds")
    candidates = [Candidate(name, _priced(problem_for(name), price_of), price_of.get(name)) for name in names]
    options = replace(options, cancelled=interrupts.asked_to_stop)
    objective = candidates[0].problem.job.objective
    choices: list[Choice] = []
    with (
        interrupts.keeping(choices),
        shown_progress(objective, progress) as callback,
        within_range(),
        interrupts.limited(options.time_limit_s),
    ):
        choices.append(choose(candidates, replace(options, callback=callback)))
    with undisturbed():
        return _print(choices[0], options, out, as_json, verbose)


def _print(choice: Choice, options: SolveOptions, out: Path | None, as_json: bool, verbose: bool) -> ExitCode:
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
