"""Parts of several commands' output: progress of a solve, error bar, evidence, runners-up, next steps."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from milpplan.calibration import error_bar, robustness
from milpplan.calibration.error_bars import ErrorBar, Robustness
from milpplan.cli.outcome import say
from milpplan.errors import InfeasibleError
from milpplan.optimize import PlanResult, Progress
from milpplan.problem import Plan, Problem
from milpplan.problem.problem import Objective
from milpplan.simulation import step_times_s
from milpplan.units import gap_text, lower_bound_text, rate_text, seconds_text
from milpplan.validation import Evidence
from milpplan.validation.evidence import evidence

INTERRUPTED: Final = InfeasibleError(
    "No plan satisfies the request: proved.",
    "Expected a problem with a plan.",
    "The search for what would help was interrupted; run it again to know.",
)
"""Explanation of an infeasible problem whose diagnosis was interrupted."""

SolveEnd = Callable[[Problem], tuple[Plan | None, float | None]]


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
    hints += [] if verbose else ["--verbose prints stages, time, memory and the search"]
    hints += ["a longer --time-limit narrows the gap"] if result.status == "feasible" else []
    if hints:
        yield "; ".join(hints)
    file = shlex.quote("plan.json" if out is None else str(out))
    if result.problem.space.target is not None:
        yield f"milpplan export {file} --to {result.problem.space.target} --out launch"
    elif _is_exportable(result.problem):
        yield "--target megatron (or another launcher): the best plan to export"
    yield f"milpplan report {file} --out report.html"


def _is_exportable(problem: Problem) -> bool:
    """Return True if some launcher's export writes jobs of this kind."""
    unlike = problem.inference or bool(problem.other_hardware) or problem.job.alignment is not None
    return not (unlike or problem.job.frozen_text or problem.model.vision is not None)


@contextmanager
def shown_progress(objective: Objective, lines: bool = False) -> Iterator[Callable[[Progress], None] | None]:
    """Make a callback for ``solve`` that prints on stderr; None where stderr is no terminal.

    Args:
        objective: The objective of the search.
        lines: Print every progress as a line where stderr is no terminal.
    """
    if not sys.stderr.isatty():
        yield (lambda progress: say(progress_line(progress, objective))) if lines else None
        return
    # Rich takes long to import, and --help does without.
    from rich.console import Console

    console = Console(stderr=True, markup=False, highlight=False, emoji=False)
    best: list[float] = []
    with console.status("looking for a first plan ...") as status:

        def callback(progress: Progress) -> None:
            line = progress_line(progress, objective)
            if progress.incumbent is not None and (not best or progress.incumbent < best[-1]):
                best.append(progress.incumbent)
                console.print(line)
            status.update(line)

        yield callback


def progress_line(progress: Progress, objective: Objective) -> str:
    """Format incumbent, bound, gap, open layouts and seconds."""
    incumbent, bound = progress.incumbent, progress.bound
    gap = "-"
    open_layouts = "-" if progress.open_layouts is None else f"{progress.open_layouts:,}"
    if incumbent and bound is not None:
        gap = gap_text(max(0.0, (incumbent - bound) / incumbent))
    return (
        f"{progress.wall_time_s:7.1f} s  best {_amount(incumbent, objective)}  "
        f"bound {_amount(bound, objective, is_bound=True)}  gap {gap}  open layouts {open_layouts}"
    )


def _amount(value: float | None, objective: Objective, is_bound: bool = False) -> str:
    """Write an objective; a lower bound is rounded down."""
    if value is None:
        return "-"
    if objective == "gpu_hours":
        return f"{rate_text(math.floor(value) if is_bound else value)} GPU-hours"
    return lower_bound_text(value) if is_bound else seconds_text(value)
