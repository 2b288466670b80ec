"""The work of ``solve`` and ``simulate``: progress, the answer, the file, the exit code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from milpplan.calibration.error_bars import error_bar, robustness
from milpplan.calibration.records import ErrorBar, Robustness
from milpplan.cli import arguments, interrupts
from milpplan.cli.next_steps import next_steps
from milpplan.cli.outcome import OF_STATUS, ExitCode, emit, of_error, say, say_error, show_blocks
from milpplan.cli.progress import shown_progress
from milpplan.errors import IllegalPlanError, InfeasibleError, InvalidInputError, MilpplanError
from milpplan.explain.hardware_choice import run_totals
from milpplan.optimize.context import Deadline
from milpplan.optimize.infeasibility import explain
from milpplan.optimize.milp.solution import undisturbed
from milpplan.optimize.nearby_problems import Effort
from milpplan.optimize.result import PlanResult, SolveOptions
from milpplan.optimize.solve import solve, target_price
from milpplan.optimize.space.enumerate_layouts import broken_rules
from milpplan.problem.plan import Plan
from milpplan.problem.problem import Problem
from milpplan.reports.answers.solve import solve_blocks
from milpplan.reports.answers.step import simulation_blocks
from milpplan.reports.documents.document import document_text, read_plan, result_document, simulation_document
from milpplan.reports.files import check_writable, write_whole
from milpplan.simulation.report import StepReport
from milpplan.simulation.simulator import check_plan
from milpplan.simulation.simulator import simulate as simulate_plan
from milpplan.units import gap_text
from milpplan.validation.ablation import evidence
from milpplan.validation.evidence import Evidence

MAX_WORK_ITEMS = 33_554_432
"""Maximum of virtual stages x micro-batches of a plan file that is simulated (a few GiB)."""

INTERRUPTED: Final = InfeasibleError(
    "No plan satisfies the request: proved.",
    "Expected a problem with a plan.",
    "The search for what would help was interrupted; run it again to know.",
)
"""Explanation of an infeasible problem whose diagnosis was interrupted."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Questions beside the plan, and how the answer is printed."""

    check_ends: bool = False
    """Solve again at both ends of the hardware's uncertainty."""
    price_per_gpu_hour: float | None = None
    """Price of an accelerator-hour, for the cost of the whole run."""
    whole: Problem | None = None
    """The problem without the restriction to a launcher, to prove what the restriction costs."""
    whole_limit_s: float = 0.0
    """Seconds for ``whole``."""
    verbose: bool = False
    """Print everything, and not only the first screen."""


def run(
    problem: Problem, options: SolveOptions, out: Path | None, as_json: bool, asked: Asked | None = None
) -> ExitCode:
    """Solve a problem, print and write the answer; the exit code says how it ended."""
    asked = asked or Asked()
    arguments.positive(options.time_limit_s, "--time-limit", "number of seconds")
    if out is not None:
        check_writable(out)
    deadline = Deadline.after(options.time_limit_s)
    options = replace(options, cancelled=interrupts.asked_to_stop)
    found: list[_Told] = []
    with (
        interrupts.keeping(found),
        shown_progress(problem.job.objective) as callback,
        within_range(),
        interrupts.limited(deadline.left_s()),
    ):
        found.append(_Told(solve(problem, replace(options, callback=callback))))
        _add(found[0], options, deadline, asked)
    # Neither another signal nor the time limit may lose the plan now.
    with undisturbed(), within_range():
        if interrupts.asked_to_stop():
            found[0].result = replace(found[0].result, message=interrupts.STOPPED)
        return _tell(found[0], options, out, as_json, asked)


@dataclass(slots=True)
class _Told:
    """A result and its comments; a comment is None if there was no time for it."""

    result: PlanResult
    bar: ErrorBar | None = None
    robust: Robustness | None = None
    known: Evidence | None = None
    why: MilpplanError | None = None


def _add(told: _Told, options: SolveOptions, deadline: Deadline, asked: Asked) -> None:
    """Add the comments to a result in the time that is left."""
    result = told.result
    if result.status == "infeasible":
        # This explanation stays if the diagnosis below is interrupted.
        told.why = INTERRUPTED
        told.why = explain(result.problem, options.forbid, Effort(deadline=deadline.until))
    told.known = evidence_of(result)
    if asked.whole is not None and not result.message:
        found = target_price(result, asked.whole, options, deadline.left_s(asked.whole_limit_s))
        told.result = replace(result, target_price=found)
    check_ends = asked.check_ends and not result.message
    told.bar, told.robust = uncertainty(result, _end_solver(result, options, deadline) if check_ends else None)


def _tell(told: _Told, options: SolveOptions, out: Path | None, as_json: bool, asked: Asked) -> ExitCode:
    """Print and write the result."""
    result, why, bar, robust, known = told.result, told.why, told.bar, told.robust, told.known
    others = compared(result, robust, known)
    totals = run_totals(result, asked.price_per_gpu_hour)
    for line in (*result.details.get("unavailable", ()), result.message, _why_not_proved(result, options)):
        if line:
            say(line)
    text = (
        document_text(result_document(result, options.gap, why, bar, robust, known, totals, others))
        if as_json or out
        else ""
    )
    try:
        if as_json:
            emit(text)
        elif why is None:
            steps = tuple(next_steps(result, out, asked.verbose))
            blocks = solve_blocks(
                result, options.gap, bar, robust, known, totals, verbose=asked.verbose, next_steps=steps
            )
            show_blocks(blocks)
        if why is not None:
            say_error(why)
    finally:
        # A full disk behind standard output must not cost the file as well.
        code = _written(out, text, OF_STATUS[result.status])
    return code


def _why_not_proved(result: PlanResult, options: SolveOptions) -> str:
    """Say why a search ended without its proof although nobody stopped it; empty where it did not."""
    limit = options.time_limit_s
    # A solver that is given the rest of the time ends a little before it.
    stopped = result.message or (limit is not None and result.wall_time_s > 0.95 * limit)
    if result.status != "feasible" or result.gap is None or stopped:
        return ""
    return (
        f"The search ended by itself: no solver could prove --gap {gap_text(options.gap)} (bounds of integer "
        "programs are rounded, and count only if a second solver confirms them). "
        f"A --gap a little above {gap_text(result.gap)} is proved."
    )


SolveEnd = Callable[[Problem], tuple[Plan | None, float | None]]


def _end_solver(result: PlanResult, options: SolveOptions, deadline: Deadline) -> SolveEnd:
    """Make a function that solves the problem at an end from the best plan: its plan, and its bound in seconds."""
    if result.problem.hardware.uncertainty is None:
        say("The hardware has no uncertainty: there are no ends to check.")

    def solve_end(there: Problem) -> tuple[Plan | None, float | None]:
        again = solve(there, replace(options, warm_start=result.plan, time_limit_s=deadline.left_s()))
        return again.plan, again.lower_bound_s

    return solve_end


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
    return tuple((plan, simulate_plan(result.problem, plan).step_time_s) for plan in result.runners_up)


def within_range() -> np.errstate:
    """Raise where a number leaves the range of floats or 64-bit integers, instead of computing on."""
    return np.errstate(over="raise", invalid="raise", divide="raise")


def _written(out: Path | None, text: str, code: ExitCode) -> ExitCode:
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


def starting_plan(problem: Problem, path: Path) -> Plan:
    """Read the plan of a file, as a start for a problem.

    Raises:
        IllegalPlanError: it is no plan for this model, or for none of these numbers of GPUs and batches.
    """
    plan = read_plan(path)[1]
    check_plan_of_file(problem, plan)
    return plan


def simulate_file(path: Path | None, as_json: bool, read: tuple[Problem, Plan] | None = None) -> ExitCode:
    """Simulate the plan of a file, or one that has been ``read`` already, and print the report."""
    problem, plan = read_plan(path or Path()) if read is None else read
    check_plan_of_file(problem, plan)
    with within_range():
        report = simulate_plan(problem, plan)
        _check_numbers(report)
        # What is known of one node type says nothing about a cluster of several.
        single = not problem.other_hardware
        bar = error_bar(problem, plan, report.step_time_s) if single else None
        known = None if problem.inference else evidence(problem, plan, report.step_time_s)
    if as_json:
        emit(document_text(simulation_document(problem, plan, report, bar, known)))
    else:
        show_blocks(simulation_blocks(problem, plan, report, bar, known))
    return ExitCode.OPTIMAL if report.fits else ExitCode.INFEASIBLE


def check_plan_of_file(problem: Problem, plan: Plan) -> None:
    """Check that a plan belongs to the problem, breaks no rule, and is of a size that can be simulated."""
    arguments.check_size(problem.job)
    check_plan(problem, plan)
    layout = plan.layout
    items = layout.num_virtual_stages * layout.num_micro_batches
    if items > MAX_WORK_ITEMS:
        raise IllegalPlanError(
            f"The plan has {items:,} work items a pipeline (virtual stages x micro-batches).",
            f"Expected at most {MAX_WORK_ITEMS:,}.",
            "Use larger micro-batches or more replicas.",
        )
    broken = broken_rules(problem, layout)
    if broken:
        raise IllegalPlanError(
            f"The layout breaks {'the rule' if len(broken) == 1 else 'the rules'} {', '.join(broken)}.",
            "Expected a layout that keeps every rule of the frameworks.",
            "Change the degrees and switches that the rule names.",
        )


def _check_numbers(report: StepReport) -> None:
    """Refuse negative sums: they left the range of 64-bit integers."""
    peaks = [stage.memory.peak_bytes for stage in report.stages]
    if report.step_time_ns <= 0 or min(peaks) < 0:
        raise OverflowError("a step time or a memory size left the range of 64-bit integers")
