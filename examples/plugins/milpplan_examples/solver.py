"""A solver: one function from a solver-neutral program to a solution, here SciPy's `milp`."""

from __future__ import annotations

import time

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from milpplan.optimize.milp.program import Program, Scaling, as_floats, without_wide_integers
from milpplan.optimize.milp.solution import Limits, Solution, Status, checked_solve, require_exact_floats

STATUSES: dict[int, Status] = {0: "optimal", 1: "feasible", 2: "infeasible"}


def solve(program: Program, limits: Limits) -> Solution:
    """Minimise the program. milpplan checks the answer exactly, and asks another solver to confirm the bound."""
    require_exact_floats(program, "scipy")
    relaxed = without_wide_integers(program, "scipy")
    return checked_solve(program, lambda presolve: _solve(relaxed, limits, presolve), relaxed)


def _solve(program: Program, limits: Limits, presolve: bool) -> Solution:
    started = time.perf_counter()
    # Floating-point solvers have absolute tolerances: without scaling this one fails `milpplan doctor`.
    scaling = Scaling.of(program, integer=True)
    bounds = Bounds(as_floats(program.lower) / scaling.columns, as_floats(program.upper) / scaling.columns)
    answer = milp(
        program.objective * scaling.columns / scaling.cost,
        integrality=program.is_integer.astype(int),
        bounds=bounds,
        constraints=_rows(program, scaling),
        options={
            "mip_rel_gap": limits.relative_gap,
            "time_limit": limits.time_limit_s or np.inf,
            "presolve": presolve,
        },
    )
    if answer.status not in STATUSES:
        raise RuntimeError(answer.message)
    found, dual = answer.x is not None, answer.get("mip_dual_bound")
    status: Status = "no_solution_found" if answer.status == 1 and not found else STATUSES[answer.status]
    proved = status != "infeasible" and dual is not None and np.isfinite(dual)
    return Solution(
        status=status,
        values=answer.x * scaling.columns if found else None,
        objective=None,
        bound=float(dual) * scaling.cost + program.offset if proved else None,
        raw_status=answer.message,
        backend="scipy",
        wall_time_s=time.perf_counter() - started,
        limit_reached=answer.status == 1,
        reported_objective=float(answer.fun) * scaling.cost + program.offset if found else None,
    )


def _rows(program: Program, scaling: Scaling) -> list[LinearConstraint]:
    """The scaled rows."""
    rows = program.rows
    if not len(rows):
        return []
    factor = scaling.rows(rows)
    coefficients = rows.coefficients * scaling.columns[rows.columns] * factor[rows.entry_rows()]
    matrix = csr_array((coefficients, rows.columns, rows.starts), shape=(len(rows), program.num_variables))
    return [LinearConstraint(matrix, as_floats(rows.lower) * factor, as_floats(rows.upper) * factor)]
