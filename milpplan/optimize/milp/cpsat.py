"""CP-SAT (OR-Tools): exact in integers, one worker by default so that a run can be reproduced."""

from __future__ import annotations

import time
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Final

import numpy as np

from milpplan.errors import SolverError
from milpplan.optimize.milp.program import INFINITY, Program
from milpplan.optimize.milp.solution import Limits, Solution, Status, checked_solve, run_interruptibly

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

# OR-Tools 9.15 proves wrong optima from about 1e8 on (google/or-tools#5293), and search slows with magnitude.
MAX_ROW_MAGNITUDE: Final = 10**7
# CP-SAT needs sums of the objective to stay inside int64.
_MAX_OBJECTIVE: Final = float(2**61)


@dataclass(frozen=True)
class CpSatBackend:
    """CP-SAT backend.

    Continuous variables are treated as integers, which needs finite bounds. Coefficients are integers here, so for
    a variable bounded by integer rows with a coefficient of 1 nothing changes; otherwise the answer is that of the
    program with integral values.
    """

    name = "cpsat"
    num_workers: int = 1

    def version(self) -> str:
        """Return the version of OR-Tools."""
        return f"CP-SAT of OR-Tools {version('ortools')}"

    def solve(self, program: Program, limits: Limits) -> Solution:
        """Solve with a soft time limit; raises SolverError on rows of magnitude ``MAX_ROW_MAGNITUDE``."""
        _require_moderate(program)
        return checked_solve(program, lambda presolve: self._solve(program, limits, presolve and limits.presolve))

    def _solve(self, program: Program, limits: Limits, presolve: bool) -> Solution:
        from ortools.sat.python import cp_model

        model = _model(program)
        solver = cp_model.CpSolver()
        parameters = solver.parameters
        parameters.num_workers = self.num_workers
        parameters.random_seed = limits.seed
        parameters.search_branching = parameters.PORTFOLIO_WITH_QUICK_RESTART_SEARCH
        parameters.relative_gap_limit = limits.relative_gap
        parameters.cp_model_presolve = presolve
        # Python must see Ctrl-C, not CP-SAT, which would swallow it.
        parameters.catch_sigint_signal = False
        if limits.time_limit_s is not None:
            parameters.max_time_in_seconds = limits.time_limit_s
        if limits.deterministic_limit is not None:
            parameters.max_deterministic_time = limits.deterministic_limit
        start = time.perf_counter()
        code = run_interruptibly(lambda: solver.solve(model), solver.stop_search, cancelled=limits.cancelled)
        return _solution(program, solver, solver.status_name(code), time.perf_counter() - start)


def _require_moderate(program: Program) -> None:
    if (program.lower <= -INFINITY).any() or (program.upper >= INFINITY).any():
        raise SolverError(
            f"{program.name} has a variable without finite bounds.",
            "CP-SAT needs both.",
            "Bound it or use cbc.",
        )
    magnitude = program.max_row_magnitude()
    if magnitude >= MAX_ROW_MAGNITUDE:
        raise SolverError(
            f"{program.name} has a row of magnitude {magnitude}.",
            f"CP-SAT is trusted below {MAX_ROW_MAGNITUDE} only.",
            "Use a coarser unit or another backend (cbc, highs).",
        )
    bound = np.maximum(np.abs(program.lower), np.abs(program.upper)).astype(np.float64)
    if float((np.abs(program.objective) * bound).sum()) >= _MAX_OBJECTIVE:
        raise SolverError(f"The objective of {program.name} does not fit in CP-SAT's 64 bits.")


def _model(program: Program) -> cp_model.CpModel:
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    proto = model.proto
    for lower, upper in zip(program.lower.tolist(), program.upper.tolist(), strict=True):
        proto.variables.add().domain.extend((lower, upper))
    rows = program.rows
    columns, coefficients, starts = rows.columns.tolist(), rows.coefficients.tolist(), rows.starts.tolist()
    sides = zip(rows.lower.tolist(), rows.upper.tolist(), strict=True)
    for row, (lower, upper) in enumerate(sides):
        linear = proto.constraints.add().linear
        linear.vars.extend(columns[starts[row] : starts[row + 1]])
        linear.coeffs.extend(coefficients[starts[row] : starts[row + 1]])
        linear.domain.extend((lower, upper))
    used = np.flatnonzero(program.objective)
    proto.objective.vars.extend(used.tolist())
    proto.objective.coeffs.extend(program.objective[used].tolist())
    return model


_STATUSES: Final[dict[str, Status]] = {
    "OPTIMAL": "optimal",
    "FEASIBLE": "feasible",
    "INFEASIBLE": "infeasible",
    "UNKNOWN": "no_solution_found",
}


def _solution(program: Program, solver: cp_model.CpSolver, raw: str, wall_time_s: float) -> Solution:
    if raw not in _STATUSES:
        raise SolverError(f"CP-SAT answered {raw} to {program.name}.", f"One of {', '.join(_STATUSES)} expected.")
    status = _STATUSES[raw]
    has_values = status in ("optimal", "feasible")
    response = solver.response_proto
    values = np.array(response.solution, np.int64) if has_values else None
    bound = None if status == "infeasible" else float(solver.best_objective_bound) + program.offset
    if not np.any(program.objective):
        bound = float(program.offset) if status != "infeasible" else None
    return Solution(
        status=status,
        values=values,
        objective=None,
        bound=bound,
        raw_status=raw,
        backend=CpSatBackend.name,
        wall_time_s=wall_time_s,
        limit_reached=status in ("feasible", "no_solution_found"),
        reported_objective=float(solver.objective_value) + program.offset if has_values else None,
    )
