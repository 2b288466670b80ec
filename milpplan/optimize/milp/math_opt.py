"""HiGHS and SCIP through the MathOpt interface of OR-Tools: floating point, so their proofs have a tolerance."""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np

from milpplan.errors import SolverError
from milpplan.optimize.milp.program import (
    INFINITY,
    MINUS_INFINITY,
    FloatArray,
    Program,
    Scaling,
    model_proto,
    sparse_values,
    without_wide_integers,
)
from milpplan.optimize.milp.solution import (
    Limits,
    Solution,
    Status,
    checked_solve,
    require_exact_floats,
    run_interruptibly,
    running,
)

if TYPE_CHECKING:
    from ortools.math_opt import parameters_pb2

_STATUSES: Final[dict[str, Status]] = {
    "OPTIMAL": "optimal",
    "FEASIBLE": "feasible",
    "INFEASIBLE": "infeasible",
    "NO_SOLUTION_FOUND": "no_solution_found",
}
_PREFIX: Final = "TERMINATION_REASON_"


class MathOptBackend:
    """Solver of MathOpt with one thread. It cannot be interrupted: after Ctrl-C or a cancellation its thread ends
    at its limit.

    Attributes:
        name: name of the backend.
        title: name of the solver in sentences.
        solver_type: the solver's name in MathOpt.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    solver_type: ClassVar[str]

    def version(self) -> str:
        """Return the version of OR-Tools, whose build of the solver is used."""
        return f"{self.title} of OR-Tools {version('ortools')}"

    def solve(self, program: Program, limits: Limits) -> Solution:
        """Solve with relative gap ``limits.relative_gap`` (defaults of the solvers are not zero)."""
        if limits.deterministic_limit is not None:
            # MathOpt cannot read the status HiGHS gives at a node limit.
            raise SolverError(
                f"{self.title} has no deterministic limit here.", do="Use a time limit, cbc or cpsat."
            )
        require_exact_floats(program, self.name)
        relaxed = without_wide_integers(program, self.name)
        with running(self.title):
            return checked_solve(
                program, lambda presolve: self._solve(relaxed, limits, presolve and limits.presolve), relaxed
            )

    def _seed(self, parameters: parameters_pb2.SolveParametersProto, seed: int) -> None:
        """Set the solver's seed."""
        parameters.random_seed = seed

    def _parameters(self, limits: Limits, presolve: bool) -> parameters_pb2.SolveParametersProto:
        from ortools.math_opt import parameters_pb2

        parameters = parameters_pb2.SolveParametersProto()
        parameters.relative_gap_tolerance = limits.relative_gap
        self._seed(parameters, limits.seed)
        if limits.time_limit_s is not None:
            parameters.time_limit.FromMicroseconds(max(1, round(limits.time_limit_s * 1_000_000)))
        if not presolve:
            parameters.presolve = parameters_pb2.EMPHASIS_OFF
        return parameters

    def _solve(self, program: Program, limits: Limits, presolve: bool) -> Solution:
        from ortools.math_opt import callback_pb2, model_parameters_pb2, parameters_pb2
        from ortools.math_opt.core.python import solver

        scaling = Scaling.of(program, integer=True)
        model = model_proto(program, scaling, integer=True)
        parameters = self._parameters(limits, presolve)

        def work() -> Any:
            # MathOpt's own wrapper turns an error status into an AttributeError, so call what it wraps.
            return solver.solve(
                model,
                parameters_pb2.SolverTypeProto.Value(self.solver_type),
                parameters_pb2.SolverInitializerProto(),
                parameters,
                model_parameters_pb2.ModelSolveParametersProto(),
                None,
                callback_pb2.CallbackRegistrationProto(),
                None,
                None,
            )

        start = time.perf_counter()
        try:
            result = run_interruptibly(work, lambda: None, grace_s=0.0, cancelled=limits.cancelled)
        except (OSError, MemoryError):
            raise
        except Exception as error:
            raise SolverError(
                f"{self.title} failed on {program.name}: {error}", do="Use another backend."
            ) from error
        return self._solution(program, scaling, result, time.perf_counter() - start)

    def _solution(self, program: Program, scaling: Scaling, result: Any, wall_time_s: float) -> Solution:
        from ortools.math_opt import result_pb2

        termination = result.termination
        raw = result_pb2.TerminationReasonProto.Name(termination.reason).removeprefix(_PREFIX)
        bounded = bool((program.lower > MINUS_INFINITY).all() and (program.upper < INFINITY).all())
        status_name = "INFEASIBLE" if raw == "INFEASIBLE_OR_UNBOUNDED" and bounded else raw
        if status_name not in _STATUSES:
            raise SolverError(
                f"{self.title} answered {raw} ({termination.detail}) to {program.name}.",
                f"One of {', '.join(_STATUSES)} expected.",
                "Bound every variable, or use another backend.",
            )
        status = _STATUSES[status_name]
        has_values = status in ("optimal", "feasible")
        values: FloatArray | None = None
        reported = None
        if has_values and result.solutions:
            primal = result.solutions[0].primal_solution
            values = sparse_values(primal.variable_values, program.num_variables) * scaling.columns
            reported = float(primal.objective_value) * scaling.cost + program.offset
        bound = float(termination.objective_bounds.dual_bound) * scaling.cost + program.offset
        return Solution(
            status=status,
            values=values,
            objective=None,
            bound=bound if status != "infeasible" and np.isfinite(bound) else None,
            raw_status=raw,
            backend=self.name,
            wall_time_s=wall_time_s,
            limit_reached=status in ("feasible", "no_solution_found"),
            reported_objective=reported,
        )


class HighsBackend(MathOptBackend):
    """HiGHS with one thread."""

    name = "highs"
    title = "HiGHS"
    solver_type = "SOLVER_TYPE_HIGHS"

    def _seed(self, parameters: parameters_pb2.SolveParametersProto, seed: int) -> None:
        """Set the solver's seed, which MathOpt passes on by name only."""
        parameters.highs.int_options["random_seed"] = seed


class ScipBackend(MathOptBackend):
    """SCIP with one thread."""

    name = "scip"
    title = "SCIP"
    solver_type = "SOLVER_TYPE_GSCIP"
