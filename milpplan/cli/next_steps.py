"""What to do after a solve: the last lines of its screen."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from milpplan.errors import MilpplanError
from milpplan.launchers.restriction import version_of
from milpplan.launchers.targets import TARGETS
from milpplan.optimize.result import PlanResult
from milpplan.problem.plan import Plan
from milpplan.problem.problem import Problem


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
    launcher = result.problem.space.target or _launcher_of(result.problem, result.plan)
    if launcher is not None:
        yield f"milpplan export {file} --to {launcher} --out launch"
    elif not result.problem.inference and not result.problem.other_hardware:
        yield "no launcher can run this plan; --target megatron (or another) finds the best that it can run"
    yield f"milpplan report {file} --out report.html"


def _launcher_of(problem: Problem, plan: Plan) -> str | None:
    """Find the first launcher that can run the plan."""
    for name, target in TARGETS.items():
        try:
            target.export(problem, plan, version_of(target.capability, None))
        except MilpplanError:
            continue
        return name
    return None
