"""Next steps after a solve: the last lines of its screen."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from milpplan.optimize.result import PlanResult


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
    elif not result.problem.inference and not result.problem.other_hardware:
        yield "--target megatron (or another launcher) finds the best plan that it can run, to export"
    yield f"milpplan report {file} --out report.html"
