"""Scaled and relaxed programs for floating-point solvers, so that their proofs can be trusted.

These solvers have absolute tolerances. Given rows in nanoseconds, with coefficients of 1e8, HiGHS "proved" an
optimum 14 % above a plan that it finds when rows are scaled. Given a step time in nanoseconds as an integer
variable, HiGHS and CBC both "proved" wrong optima, or infeasibility, on programs of 24 binaries. So rows and wide
columns are scaled (by powers of two: nothing is rounded), and wide integer variables become continuous where that
changes nothing. The MathOpt model is a protocol buffer filled from arrays: adding variables one by one would take
longer than many solves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from milpplan.errors import SolverError
from milpplan.optimize.milp.program import INFINITY, MINUS_INFINITY, FloatArray, IntArray, Program, Rows

if TYPE_CHECKING:
    from ortools.math_opt import model_pb2

# Columns with a wider range than this are scaled; binaries and small counts are left alone.
_WIDE: Final = 2.0**10
# Integer columns with a wider range than this are not left to a solver with tolerances.
_WIDE_INTEGER: Final = 2.0**17


@dataclass(frozen=True, slots=True, eq=False)
class Scaling:
    """Scaling by powers of two: a variable is ``columns`` times the solver's, the objective ``cost`` times."""

    columns: FloatArray
    cost: float

    @staticmethod
    def of(program: Program, integer: bool) -> Scaling:
        """Scale the coefficients of each wide column to the size of the others in its rows.

        With ``integer`` the integer columns keep their unit.
        """
        lower, upper = as_floats(program.lower), as_floats(program.upper)
        wide = (upper - lower) > _WIDE
        if integer:
            wide &= ~program.is_integer
        rows = program.rows
        index = rows.entry_rows()
        size = np.abs(rows.coefficients.astype(np.float64))
        entry_wide = wide[rows.columns]
        largest = np.zeros(len(rows))
        np.maximum.at(largest, index[~entry_wide], size[~entry_wide])
        ratio = np.zeros(program.num_variables)
        np.maximum.at(ratio, rows.columns[entry_wide], largest[index[entry_wide]] / size[entry_wide])
        bound = np.maximum(np.abs(lower), np.abs(upper))
        ratio = np.where((ratio == 0.0) & np.isfinite(bound), bound, ratio)
        columns = np.where(wide, powers_of_two(ratio), 1.0)
        cost = np.abs(program.objective * columns).max(initial=0.0)
        return Scaling(columns, float(powers_of_two(np.array([cost]))[0]))

    def rows(self, rows: Rows) -> FloatArray:
        """Return the factor of every row that brings its largest coefficient near 1."""
        largest = np.zeros(len(rows))
        scaled = np.abs(rows.coefficients * self.columns[rows.columns])
        np.maximum.at(largest, rows.entry_rows(), scaled)
        return 1.0 / powers_of_two(largest)


def without_wide_integers(program: Program, backend: str) -> Program:
    """Return the program with wide integer variables made continuous, where this changes nothing.

    It changes nothing where such a variable has coefficients of 1 or -1 only and shares no row with another
    continuous variable: with the integers fixed, its rows leave it an interval with integral ends.

    Raises:
        SolverError: making the variable continuous would change the program.
    """
    span = as_floats(program.upper) - as_floats(program.lower)
    wide = program.is_integer & (span > _WIDE_INTEGER)
    if not wide.any():
        return program
    rows = program.rows
    unit = np.abs(rows.coefficients) == 1
    shared = np.zeros(len(rows), np.int64)
    np.add.at(shared, rows.entry_rows(), (wide | ~program.is_integer)[rows.columns])
    bad = wide[rows.columns] & (~unit | (shared > 1)[rows.entry_rows()])
    if bad.any():
        column = int(rows.columns[np.flatnonzero(bad)[0]])
        raise SolverError(
            f"Integer variable {program.variable_names[column]} of {program.name} ranges over "
            f"{int(program.lower[column])} to {int(program.upper[column])}.",
            f"{backend} is trusted up to a range of {int(_WIDE_INTEGER)}, or with coefficients of 1 and -1.",
            "Tighten its bounds, use a coarser unit, or make it continuous.",
        )
    return replace(program, is_integer=program.is_integer & ~wide)


def model_proto(program: Program, scaling: Scaling, integer: bool) -> model_pb2.ModelProto:
    """Return the scaled program as a MathOpt model (``integer=False``: its relaxation), without offset
    and names."""
    from ortools.math_opt import model_pb2

    model = model_pb2.ModelProto()
    width = program.num_variables
    variables = model.variables
    variables.ids.extend(range(width))
    variables.lower_bounds.extend((as_floats(program.lower) / scaling.columns).tolist())
    variables.upper_bounds.extend((as_floats(program.upper) / scaling.columns).tolist())
    variables.integers.extend(program.is_integer.tolist() if integer else [False] * width)
    used = np.flatnonzero(program.objective)
    terms = model.objective.linear_coefficients
    terms.ids.extend(used.tolist())
    terms.values.extend((program.objective[used] * scaling.columns[used] / scaling.cost).tolist())
    fill_rows(model.linear_constraints, model.linear_constraint_matrix, program.rows, scaling, 0)
    return model


def fill_rows(constraints: Any, matrix: Any, rows: Rows, scaling: Scaling, first: int) -> FloatArray:
    """Write rows, numbered from ``first``, into a MathOpt model or update; returns their factors."""
    factor = scaling.rows(rows)
    index = rows.entry_rows()
    constraints.ids.extend(range(first, first + len(rows)))
    constraints.lower_bounds.extend((as_floats(rows.lower) * factor).tolist())
    constraints.upper_bounds.extend((as_floats(rows.upper) * factor).tolist())
    matrix.row_ids.extend((index + first).tolist())
    matrix.column_ids.extend(rows.columns.tolist())
    coefficients = rows.coefficients * scaling.columns[rows.columns] * factor[index]
    matrix.coefficients.extend(coefficients.tolist())
    return factor


def sparse_values(vector: Any, size: int) -> FloatArray:
    """Return a sparse vector of MathOpt as a dense array."""
    dense = np.zeros(size)
    dense[np.array(vector.ids, np.int64)] = vector.values
    return dense


def as_floats(bounds: IntArray) -> FloatArray:
    """Return bounds as doubles, the sentinels as infinities."""
    floats = bounds.astype(np.float64)
    floats[bounds >= INFINITY] = np.inf
    floats[bounds <= MINUS_INFINITY] = -np.inf
    return floats


def powers_of_two(values: FloatArray) -> FloatArray:
    """Return the nearest powers of two; 1 for 0."""
    positive = np.where(values > 0, values, 1.0)
    return np.exp2(np.rint(np.log2(positive)))
