"""Solve one case once and print what happened as JSON; ``benchmarks.planning`` runs it in a fresh process."""

from __future__ import annotations

import json
import resource
import sys
from typing import Any

from benchmarks.problems import Case, Kind
from benchmarks.rules_of_thumb import layout_text
from milpplan import PlanResult, solve
from milpplan.optimize.crew import num_workers
from milpplan.optimize.fates import FATES
from milpplan.optimize.result import SolveOptions

RU_MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024
"""Unit of getrusage's ru_maxrss."""


def summary(result: PlanResult) -> dict[str, Any]:
    """What the tables need of a result, as plain data.

    ``bounded_fraction``: layouts that closed-form bounds on memory or time decided, without a simulation, a
    linear or an integer program.
    """
    fates = {} if result.layouts is None else {fate: result.layouts.count(fate) for fate in FATES}
    legal = sum(fates.values())
    bounded = fates.get("does_not_fit", 0) + fates.get("bounded", 0)
    return {
        "status": result.status,
        "step_time_s": result.step_time_s,
        "lower_bound_s": result.lower_bound_s,
        "gap": result.gap,
        "mfu": None if result.report is None else result.report.mfu,
        "layout": None if result.plan is None else layout_text(result.plan),
        "legal": legal,
        "fates": fates,
        "bounded_fraction": bounded / legal if legal else 1.0,
        "pruned_fraction": 1.0 if result.layouts is None else result.layouts.pruned_fraction,
        "integer_programs": result.work.integer_programs,
        "relaxations": result.work.relaxations,
        "simulations": result.work.simulations,
        "proof": result.work.proof,
        "peak_bytes": peak_bytes(),
    }


def peak_bytes() -> int:
    """The most memory of this process, and of its largest child as often as it may have had children: at least
    what they held at the same time."""
    own, child = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return (own + child * (num_workers(SolveOptions()) - 1)) * RU_MAXRSS_BYTES


def run(case: Case, kind: Kind, time_limit_s: float) -> dict[str, Any]:
    """Solve a case in this process."""
    return summary(solve(case.problem(kind), time_limit_s=time_limit_s))


if __name__ == "__main__":
    request = json.load(sys.stdin)
    json.dump(run(Case(**request["case"]), request["space"], request["time_limit_s"]), sys.stdout)
