"""Parts of the command ``solve``: comments on its result, several kinds of hardware, output and file."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from milpplan.calibration import error_bar, robustness
from milpplan.calibration.error_bars import ErrorBar, Robustness
from milpplan.cli import command, interrupts
from milpplan.cli.arguments import within_range
from milpplan.cli.outcome import OF_STATUS, ExitCode, emit, of_error, say, say_error, show_blocks, shown_progress
from milpplan.cli.solve_options import LengthOptions
from milpplan.errors import InfeasibleError, InvalidInputError, MilpplanError
from milpplan.optimize import Effort, PlanResult, SolveOptions, explain, target_price
from milpplan.optimize.context import BUDGET, Deadline, undisturbed
from milpplan.optimize.records import ProgramAnswer
from milpplan.optimize.solve import MARGIN_PRICE_GAP, without_margin
from milpplan.optimize.solve import solve as solve_problem
from milpplan.problem import Plan, Problem
from milpplan.problem.reading import shown
from milpplan.reports import write_whole
from milpplan.reports.answers import solve_blocks
from milpplan.reports.answers.solve import program_fact, program_text
from milpplan.reports.files import check_writable
from milpplan.simulation import step_times_s
from milpplan.units import gap_text
from milpplan.validation import Evidence
from milpplan.validation.evidence import evidence

if TYPE_CHECKING:
    from milpplan.cli.solve_options import SolveWords
    from milpplan.explain import Choice
    from milpplan.explain.records import BreakEvens


NUM_RIVALS: Final = 4
"""Number of runners-up that a break-even compares; ``explain`` compares all, and more."""
SolveEnd = Callable[[Problem], tuple[Plan | None, float | None]]


def interrupted_diagnosis() -> InfeasibleError:
    """Build the explanation of an infeasible problem whose diagnosis was interrupted."""
    return InfeasibleError(
        "No plan satisfies the request: proved.",
        "Expected a problem with a plan.",
        "The search for what would help was interrupted; run it again to know.",
    )


def uncertainty(result: PlanResult, solve_end: SolveEnd | None) -> tuple[ErrorBar | None, Robustness | None]:
    """Compute the best plan's error bar, and whether it is best at both ends; ``solve_end`` solves there again."""
    problem, plan = result.problem, result.plan
    if plan is None or result.step_time_s is None or problem.other_hardware:
        return None, None
    bar = error_bar(problem, plan, result.step_time_s)
    return bar, robustness(problem, plan, result.runners_up, solve_end)


def evidence_of(result: PlanResult) -> Evidence | None:
    """Look up what measured runs say about the plan, and about its choice among the runners-up."""
    if result.plan is None or result.step_time_s is None or result.problem.inference:
        return None
    return evidence(result.problem, result.plan, result.step_time_s, result.runners_up)


def compared(
    result: PlanResult, robust: Robustness | None, known: Evidence | None
) -> tuple[tuple[Plan, float], ...]:
    """Simulate the runners-up, where robustness or evidence compares the plan with them."""
    if robust is None and (known is None or not known.ablations):
        return ()
    return tuple(zip(result.runners_up, step_times_s(result.problem, result.runners_up), strict=True))


def next_steps(result: PlanResult, out: Path | None, verbose: bool) -> Iterator[str]:
    """Yield commands and options that help from here, a line each.

    Args:
        result: The answer of the solve.
        out: Where its plan is written.
        verbose: The whole answer is printed already.
    """
    if result.plan is None:
        if result.status == "no_solution_found":
            yield "a longer --time-limit, or fewer choices (--space uniform, --fix tp=8)"
        return
    hints = [] if out is not None else ["--out plan.json keeps the plan"]
    hints += ["a longer --time-limit narrows the gap"] if result.status == "feasible" else []
    hints += [] if verbose else ["--verbose prints stages, time, memory"]
    if hints:
        # Two fit one line of a terminal, and the first screen has room for one.
        yield "; ".join(hints[:2])
    file = shlex.quote("plan.json" if out is None else str(out))
    if result.problem.space.target is not None:
        yield f"milpplan export {file} --to {result.problem.space.target} --out launch"
    elif _is_exportable(result.problem):
        yield "--target megatron (or another launcher): the best plan that it can run"
    yield f"milpplan report {file} --out report.html"


def _is_exportable(problem: Problem) -> bool:
    """Return True if some launcher's export writes jobs of this kind."""
    unlike = problem.inference or bool(problem.other_hardware) or problem.job.alignment is not None
    return not (unlike or problem.job.frozen_text or problem.model.vision is not None)


def choose_hardware(
    names: list[str], words: SolveWords, price_of: dict[str, float], options: SolveOptions
) -> ExitCode:
    """Solve on every kind of hardware, print the kinds in order with the costs of a whole run, write the best."""
    from milpplan.explain import Candidate, choose

    unfitted = words.unfitted() if words.target is not None and words.stack else ()
    if unfitted:
        say(
            f"No stack of {words.target} is fitted on {', '.join(unfitted)}: all kinds are compared with the "
            "constants of their descriptions alone."
        )
    if words.out is not None:
        check_writable(words.out)
    command.positive(options.time_limit_s, "--time-limit", "number of seconds")
    candidates = [Candidate(name, _priced(words.problem(name), price_of), price_of.get(name)) for name in names]
    options = replace(options, cancelled=interrupts.asked_to_stop)
    choices: list[Choice] = []
    with (
        interrupts.keeping(choices),
        shown_progress(candidates[0].problem.job.objective, words.progress) as callback,
        within_range(),
        interrupts.limited(options.time_limit_s),
    ):
        choices.append(choose(candidates, replace(options, callback=callback)))
    with undisturbed():
        return _print_choice(choices[0], options, words)


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
    price_of: dict[str, float] = {}
    for part in text.split(","):
        name, equals, word = part.rpartition("=")
        for priced in [name.strip()] if equals else names:
            price_of[command.choice(priced, "--price-per-gpu-hour", names)] = _price(word)
    missing = [name for name in names if name not in price_of]
    if missing:
        raise InvalidInputError(
            f"--price-per-gpu-hour {shown(text)} has no price for {', '.join(missing)}.",
            "Expected one price for all, or NAME=PRICE for each kind of hardware, with commas between them.",
            "Add what is missing.",
        )
    return price_of


def _price(word: str) -> float:
    try:
        price = float(word)
    except ValueError:
        price = -1.0
    command.positive(price if price != -1.0 else float("nan"), "--price-per-gpu-hour", "price")
    return price


@dataclass(slots=True)
class Answer:
    """A result and its comments; a comment is None if there was no time for it."""

    result: PlanResult
    bar: ErrorBar | None = None
    robust: Robustness | None = None
    known: Evidence | None = None
    why: MilpplanError | None = None
    program: ProgramAnswer | None = None
    break_even: BreakEvens | None = None


def comment_on(
    answer: Answer, options: SolveOptions, deadline: Deadline, words: SolveWords, whole: Problem | None
) -> None:
    """Add the comments to a result in the time that is left."""
    result = answer.result
    if result.status == "infeasible":
        # This explanation stays if the diagnosis below is interrupted.
        answer.why = interrupted_diagnosis()
        answer.why = explain(result.problem, options.forbid, Effort(deadline=deadline.until))
    answer.known = evidence_of(result)
    if words.method == "program" and result.plan is not None and not result.message:
        from milpplan.optimize.milp.block_program import solve_block_program

        answer.program = solve_block_program(result, options, deadline.left_s())
    if whole is not None and not result.message:
        cost = target_price(result, whole, options, deadline.left_s(words.price_limit))
        answer.result = replace(result, target_price=cost)
    whole = without_margin(result.problem)
    if words.price_limit and not result.message and whole is not None:
        rough = replace(options, gap=max(options.gap, MARGIN_PRICE_GAP))
        cost = target_price(result, whole, rough, deadline.left_s(words.price_limit))
        answer.result = replace(answer.result, margin_price=cost)
    check_ends = words.check_ends and not result.message
    solve_end = _end_solver(result, options, deadline) if check_ends else None
    answer.bar, answer.robust = uncertainty(result, solve_end)
    # A robust plan has its regret instead, and JSON has no break-even.
    is_shown = words.verbose or not (words.as_json or words.robust)
    if result.plan is not None and not result.message and words.objective != "num_gpus" and is_shown:
        from milpplan.explain.break_even import break_evens

        rivals = result.runners_up[:NUM_RIVALS]
        answer.break_even = break_evens(result.problem, result.plan, rivals, options.gap, deadline, uniform=False)
    if check_ends and answer.robust is None and result.plan is not None:
        say("No constant of the hardware is uncertain, or it has several node types: there are no ends to check.")


def print_answer(answer: Answer, options: SolveOptions, words: SolveWords, price: float | None) -> ExitCode:
    """Print and write the result."""
    result, why, bar, robust, known = answer.result, answer.why, answer.bar, answer.robust, answer.known
    totals = None
    if result.problem.job.training_tokens is not None:
        from milpplan.explain import run_totals

        totals = run_totals(result, price)
    for line in (*result.details.get("unavailable", ()), result.message, _why_not_proved(result, options)):
        if line:
            say(line)
    text = ""
    if words.as_json or words.out:
        from milpplan.reports.documents.document import document_text, result_document

        others = compared(result, robust, known)
        text = document_text(result_document(result, options.gap, why, bar, robust, known, totals, others))
    try:
        if words.as_json:
            emit(text)
        elif why is None:
            steps = tuple(next_steps(result, words.out, words.verbose))
            comments = bar, robust, known, totals, answer.break_even
            show_blocks(solve_blocks(result, options.gap, *comments, verbose=words.verbose, next_steps=steps))
        if answer.program is not None:
            # Standard output holds one document.
            say(program_text(answer.program)) if words.as_json else show_blocks([program_fact(answer.program)])
        if why is not None:
            say_error(why)
    finally:
        # A full disk behind standard output must not cost the file as well.
        code = _write(words.out, text, OF_STATUS[result.status])
    if code == ExitCode.OPTIMAL and answer.program is not None and not answer.program.agrees:
        return ExitCode.STOPPED_WITH_PLAN
    return code


def _why_not_proved(result: PlanResult, options: SolveOptions) -> str:
    """Say why a search ended without its proof although nobody stopped it; empty where it did not."""
    limit = options.time_limit_s
    # A solver that is given the rest of the time ends a little before it.
    stopped = result.message or (limit is not None and result.wall_time_s > 0.95 * limit)
    if result.status != "feasible" or result.gap is None or stopped or result.regret is not None:
        return ""
    if unexplored := result.details.get("num_unexplored"):
        return (
            f"The search ended by itself: it bounds at most {BUDGET.layouts:,} layouts one by one, and"
            f" {unexplored:,} others that might be better have only the bounds of their groups. Fix or"
            " forbid some choices, or --allow fewer."
        )
    return (
        f"The search ended by itself: no solver could prove --gap {gap_text(options.gap)} (bounds of integer "
        "programs are rounded, and count only if a second solver confirms them). "
        f"A --gap a little above {gap_text(result.gap)} is proved."
    )


def _end_solver(result: PlanResult, options: SolveOptions, deadline: Deadline) -> SolveEnd:
    """Make a function that solves the problem at an end from the best plan: its plan, and its bound in seconds."""

    def solve_end(there: Problem) -> tuple[Plan | None, float | None]:
        start, limit_s = result.plan, deadline.left_s()
        asked = replace(options, warm_start=start, time_limit_s=limit_s, simplest=False)
        again = solve_problem(there, asked)
        return again.plan, again.lower_bound_s

    return solve_end


def _write(out: Path | None, text: str, code: ExitCode) -> ExitCode:
    """Write the document, and report a failure. Without a plan and without a proof of infeasibility nothing is
    written, because the file may hold a plan of an earlier run."""
    if out is None:
        return code
    if code == ExitCode.STOPPED_WITHOUT_PLAN:
        say(f"Not written to {out}: there is no plan.")
        return code
    try:
        write_whole(out, text)
    except InvalidInputError as error:
        say_error(error)
        return of_error(error)
    say(f"Written to {out}.")
    return code


def solve_with_lengths(words: SolveWords, asked: LengthOptions) -> ExitCode:
    """Solve ``solve --lengths``, the older form of ``solve-lengths``."""
    from milpplan.cli.commands.solve_lengths import answer_lengths

    others = {
        "--calculon": words.calculon,
        "--allow": words.allow,
        "--forbid": words.forbid,
        "--schedule": words.schedule,
        "--warm-start": words.warm_start,
        "--check-ends": words.check_ends,
        "--robust": words.robust,
        "--scenarios": words.scenarios,
        "--price-per-gpu-hour": words.price,
        "--target": words.target,
        "--target-version": words.target_version,
        "--space": words.space != "free",
        "--deadline-hours": words.deadline_hours,
        "--deadline-days": words.deadline_days,
        "--tokens": words.tokens,
        "--workers": words.workers is not None,
        "--no-witness": not words.witness,
        "--fastest": words.fastest,
        "--method": words.method != "search",
    }
    given = [name for name, value in others.items() if value]
    if given:
        raise InvalidInputError(
            f"--lengths is given together with {' and '.join(given)}.",
            "Expected lengths with a model, a cluster, formats, --fix, --gap, --time-limit and --backend.",
            "Leave the other options out.",
        )
    code = answer_lengths(words, asked)
    say("`milpplan solve --lengths` is now `milpplan solve-lengths`, with the same options.")
    return code


def _print_choice(choice: Choice, options: SolveOptions, words: SolveWords) -> ExitCode:
    """Print the candidates in order, write the best result."""
    from milpplan.reports.answers.hardware_choice import choice_blocks, choice_document
    from milpplan.reports.documents.document import document_text, result_document

    for outcome in choice.outcomes:
        if outcome.result.message:
            say(f"{outcome.candidate.name}: {outcome.result.message}")
    best = choice.best
    if words.as_json:
        emit(document_text(choice_document(choice, options.gap)))
    else:
        steps = () if best is None else tuple(next_steps(best.result, words.out, words.verbose))
        show_blocks(choice_blocks(choice, words.verbose, steps))
    if words.out is not None and best is not None:
        document = result_document(best.result, options.gap, totals=best.totals)
        write_whole(words.out, document_text(document))
        say(f"The result of {best.candidate.name} is written to {words.out}.")
    return _code_of_choice(choice)


def _priced(problem: Problem, price_of: Mapping[str, float]) -> Problem:
    """Minimise GPU-hours where there are prices: the minimum cost of each kind of hardware follows from them."""
    if not price_of:
        return problem
    return problem.model_copy(update={"job": problem.job.model_copy(update={"objective": "gpu_hours"})})


def _code_of_choice(choice: Choice) -> ExitCode:
    best = choice.best
    if best is None:
        return OF_STATUS["infeasible" if choice.proved else "no_solution_found"]
    return OF_STATUS["optimal" if choice.proved and best.result.status == "optimal" else "feasible"]
