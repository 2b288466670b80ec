"""Linear relaxation of a program, re-solved quickly as rows are added or bounds tightened.

GLOP through MathOpt's incremental interface: dual simplex, warm-started from the last basis. Two choices make it
fast, both measured: presolve off, and the scaling done here, once. GLOP's own scaling changes with every added
row, which spoils the basis.

Signs: the program is minimised, so the dual of a row that is tight at its lower side is >= 0, at its upper side <=
0; ``reduced_costs = objective - A' row_duals``, >= 0 for a variable at its lower bound.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from operator import mul
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from milpplan.errors import SolverError
from milpplan.optimize.milp.program import (
    INFINITY,
    MINUS_INFINITY,
    FloatArray,
    IntArray,
    Program,
    Rows,
    Scaling,
    as_floats,
    fill_rows,
    model_proto,
    sparse_values,
)
from milpplan.optimize.milp.solution import require_exact_floats

RelaxationStatus = Literal["optimal", "infeasible", "unbounded", "stopped"]

_STATUSES: Final[dict[str, RelaxationStatus]] = {
    "TERMINATION_REASON_OPTIMAL": "optimal",
    "TERMINATION_REASON_INFEASIBLE": "infeasible",
    "TERMINATION_REASON_UNBOUNDED": "unbounded",
    "TERMINATION_REASON_FEASIBLE": "stopped",
    "TERMINATION_REASON_NO_SOLUTION_FOUND": "stopped",
    "TERMINATION_REASON_IMPRECISE": "stopped",
    "TERMINATION_REASON_NUMERICAL_ERROR": "stopped",
}
# Dual simplex can cycle on degenerate programs; a relaxation that takes this much work is given up, not trusted.
# Both limits count, so that the same relaxation is given up on every machine.
MAX_ITERATIONS: Final = 20_000
MAX_DETERMINISTIC_TIME: Final = 5.0
"""In GLOP's unit of work, about a second on one core."""
# Duals are cut to at least this many binary digits for ``proved_bound``.
_DUAL_BITS: Final = 52


@dataclass(frozen=True, slots=True, eq=False)
class RelaxationSolution:
    """Optimum of the relaxation; infinite objective and empty arrays if there is none.

    Shapes: values and reduced_costs [variables], row_duals [rows]. All floating point: ``Relaxation.proved_bound``
    gives a reliable bound.
    """

    status: RelaxationStatus
    objective: float
    values: FloatArray
    row_duals: FloatArray
    reduced_costs: FloatArray
    iterations: int


class Relaxation:
    """Program without integrality, kept in the solver between calls. Not thread-safe."""

    def __init__(self, program: Program) -> None:
        require_exact_floats(program, "glop")
        self._program = program
        self._pending: list[Rows] = []
        self._upper: set[int] = set()
        self._sides: set[int] = set()
        self._solver: Any = None
        self._scaling = Scaling(np.ones(program.num_variables), 1.0)
        self._row_factor = np.ones(0)

    @property
    def program(self) -> Program:
        """Program with all rows and bounds added so far."""
        if self._pending:
            self._program = self._program.with_rows(Rows.concatenate(self._pending))
            self._pending = []
        return self._program

    def add_rows(self, rows: Rows) -> None:
        """Add rows (cuts); they enter the solver at the next ``solve``."""
        if len(rows):
            self._pending.append(rows)

    def set_upper_bounds(self, columns: IntArray, values: IntArray) -> None:
        """Change upper bounds of variables, which must not be below the lower bounds."""
        upper = self._program.upper.copy()
        upper[columns] = values
        assert (upper >= self._program.lower).all()
        self._program = replace(self._program, upper=upper)
        self._upper.update(columns.tolist())

    def set_sides(self, rows: IntArray, lower: IntArray, upper: IntArray) -> None:
        """Change sides of rows; the solver gets them at the next ``solve``."""
        program = self.program
        lowers, uppers = program.rows.lower.copy(), program.rows.upper.copy()
        lowers[rows], uppers[rows] = lower, upper
        self._program = replace(program, rows=replace(program.rows, lower=lowers, upper=uppers))
        self._sides.update(rows.tolist())

    def solve(self) -> RelaxationSolution:
        """Solve from the last basis."""
        from ortools.math_opt import callback_pb2, model_parameters_pb2, parameters_pb2, result_pb2

        parameters = parameters_pb2.SolveParametersProto()
        parameters.presolve = parameters_pb2.EMPHASIS_OFF
        parameters.lp_algorithm = parameters_pb2.LP_ALGORITHM_DUAL_SIMPLEX
        parameters.glop.use_scaling = False
        # An answer slightly outside the tolerances will do: bounds come from duals, points are re-evaluated.
        parameters.glop.change_status_to_imprecise = False
        parameters.iteration_limit = MAX_ITERATIONS
        parameters.glop.max_deterministic_time = MAX_DETERMINISTIC_TIME
        program = self.program
        try:
            self._synchronise()
            result = self._solver.solve(
                parameters,
                model_parameters_pb2.ModelSolveParametersProto(),
                None,
                callback_pb2.CallbackRegistrationProto(),
                None,
                None,
            )
        except Exception as error:
            raise SolverError(f"GLOP failed on {program.name}: {error}") from error
        reason = result_pb2.TerminationReasonProto.Name(result.termination.reason)
        if reason not in _STATUSES:
            raise SolverError(f"GLOP answered {reason} to the relaxation of {program.name}.")
        return self._solution(_STATUSES[reason], result)

    def proved_bound(self, solution: RelaxationSolution) -> int | None:
        """Return a lower bound on the integer optimum that holds in exact arithmetic, from any duals.

        bound = sum_i y_i side_i + sum_j min(d_j lower_j, d_j upper_j) + offset, d = objective - A'y, with the
        duals y cut to binary fractions (Neumaier and Shcherbina, 2004). Rounded up to an integer where all of the
        objective is in integer variables. None where a reduced cost meets an infinite bound.
        """
        if solution.status != "optimal":
            return None
        # Slightly smaller duals keep reduced costs of unbounded variables from turning negative.
        best: int | None = None
        for shrink in (1.0, 1.0 - 2.0**-30):
            bound = _exact_bound(self.program, solution.row_duals * shrink)
            if bound is not None and (best is None or bound > best):
                best = bound
        return best

    def _synchronise(self) -> None:
        """Build the model, or send changes to the solver."""
        from ortools.math_opt import model_update_pb2, parameters_pb2
        from ortools.math_opt.core.python import solver

        program = self.program
        if self._solver is None:
            self._scaling = Scaling.of(program, integer=False)
            self._row_factor = self._scaling.rows(program.rows)
            self._solver = solver.new(
                parameters_pb2.SOLVER_TYPE_GLOP,
                model_proto(program, self._scaling, integer=False),
                parameters_pb2.SolverInitializerProto(),
            )
        else:
            update = model_update_pb2.ModelUpdateProto()
            changed = np.array(sorted(row for row in self._sides if row < self._row_factor.size), np.int64)
            if len(changed):
                sides = update.linear_constraint_updates
                for values, side in (
                    (sides.lower_bounds, program.rows.lower),
                    (sides.upper_bounds, program.rows.upper),
                ):
                    values.ids.extend(changed.tolist())
                    values.values.extend((as_floats(side[changed]) * self._row_factor[changed]).tolist())
            new = program.rows.tail(self._row_factor.size)
            if len(new):
                constraints, matrix = update.new_linear_constraints, update.linear_constraint_matrix_updates
                factor = self._scaling.rows(new)
                fill_rows(constraints, matrix, new, self._scaling, factor, self._row_factor.size)
                self._row_factor = np.concatenate([self._row_factor, factor])
            if self._upper:
                columns = np.array(sorted(self._upper), np.int64)
                uppers = as_floats(program.upper[columns]) / self._scaling.columns[columns]
                update.variable_updates.upper_bounds.ids.extend(columns.tolist())
                update.variable_updates.upper_bounds.values.extend(uppers.tolist())
            if not self._solver.update(update):
                raise SolverError("GLOP refused an incremental update.")
        self._upper.clear()
        self._sides.clear()

    def _solution(self, status: RelaxationStatus, result: Any) -> RelaxationSolution:
        iterations = int(result.solve_stats.simplex_iterations)
        if status != "optimal":
            objective = np.inf if status == "infeasible" else -np.inf
            none = np.zeros(0)
            return RelaxationSolution(status, objective, none, none, none, iterations)
        scale, cost = self._scaling.columns, self._scaling.cost
        answer = result.solutions[0]
        duals = sparse_values(answer.dual_solution.dual_values, self._program.num_rows)
        reduced = sparse_values(answer.dual_solution.reduced_costs, scale.size)
        return RelaxationSolution(
            status,
            float(answer.primal_solution.objective_value) * cost + self._program.offset,
            sparse_values(answer.primal_solution.variable_values, scale.size) * scale,
            duals * self._row_factor * cost,
            reduced / scale * cost,
            iterations,
        )


def _exact_bound(program: Program, duals: FloatArray) -> int | None:
    rows = program.rows
    # Rows added since the duals were found have none.
    duals = np.concatenate([duals, np.zeros(len(rows) - duals.size)])
    duals = np.where((duals > 0) & (rows.lower <= MINUS_INFINITY), 0.0, duals)
    duals = np.where((duals < 0) & (rows.upper >= INFINITY), 0.0, duals)
    multipliers, bits = _binary_fractions(program, duals)
    reduced = program.objective.astype(object) * 2**bits
    for word, shift in multipliers:
        part = np.zeros(program.num_variables, np.int64)
        np.add.at(part, rows.columns, rows.coefficients * word[rows.entry_rows()])
        reduced = reduced - part.astype(object) * 2**shift
    total = 0
    for word, shift in multipliers:
        total += _dot(word, np.where(word >= 0, rows.lower, rows.upper)) << shift
    ends = np.where(reduced >= 0, program.lower, program.upper)
    if (np.abs(ends[reduced != 0]) >= INFINITY).any():
        return None
    bound = Fraction(total + _dot(reduced, ends), 2**bits) + program.offset
    whole = bool(program.is_integer[program.objective != 0].all())
    return -((-bound.numerator) // bound.denominator) if whole else bound.numerator // bound.denominator


def _binary_fractions(program: Program, duals: FloatArray) -> tuple[list[tuple[IntArray, int]], int]:
    """Return words and shifts with ``duals ~ sum(word * 2**shift) / 2**bits`` (cut towards zero), such that no
    column sum of coefficients times a word leaves int64."""
    rows = program.rows
    entry, size = rows.entry_rows(), np.abs(rows.coefficients.astype(np.float64))
    width = program.num_variables

    def spare_bits(largest: FloatArray) -> int:
        sums = np.zeros(width)
        np.add.at(sums, rows.columns, size * largest[entry])
        peak = max(1.0, float(sums.max(initial=0.0)), float(largest.max(initial=0.0)))
        return int(np.floor(61 - np.log2(peak)))

    words: list[tuple[IntArray, int]] = []
    rest, bits = duals, 0
    step, later = spare_bits(np.abs(duals)), max(1, spare_bits(np.ones(len(rows))))
    while bits < _DUAL_BITS:
        rest = rest * 2.0**step
        word = np.trunc(rest)
        rest, bits = rest - word, bits + step
        words.append((word.astype(np.int64), bits))
        step = later
    return [(word, bits - at) for word, at in words], bits


def _dot(left: npt.NDArray[Any], right: IntArray) -> int:
    """Return the exact dot product in Python integers."""
    used = np.flatnonzero((left != 0) & (right != 0))
    return sum(map(mul, left[used].tolist(), right[used].tolist()))
