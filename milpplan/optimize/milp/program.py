"""Integer program: variables, rows and an objective as plain NumPy arrays, independent of any solver.

Every coefficient and bound is an int64, so that an answer can be re-checked without rounding. The objective is
minimised. ``INFINITY`` and ``MINUS_INFINITY`` stand for "no bound".

Floating-point solvers get programs that are scaled and relaxed, so that their proofs can be trusted. They have
absolute tolerances. Given rows in nanoseconds, with coefficients of 1e8, HiGHS "proved" an optimum 14 % above a
plan that it finds when rows are scaled. Given a step time in nanoseconds as an integer variable, HiGHS and CBC
both "proved" wrong optima, or infeasibility, on programs of 24 binaries. So rows and wide columns are scaled (by
powers of two: nothing is rounded), and wide integer variables become continuous where that changes nothing. The
MathOpt model is a protocol buffer filled from arrays: adding variables one by one would take longer than many
solves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from milpplan.errors import InvalidInputError, SolverError

if TYPE_CHECKING:
    from ortools.math_opt import model_pb2

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
Values = npt.NDArray[np.int64] | npt.NDArray[np.float64]

INFINITY: Final = int(np.iinfo(np.int64).max)
MINUS_INFINITY: Final = -INFINITY
# Below this, sums of int64 products cannot overflow.
SAFE: Final = float(2**62)


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Rows ``lower <= sum(coefficients * values[columns]) <= upper``, compressed by row.

    Row i holds entries ``starts[i]`` to ``starts[i + 1] - 1`` of ``columns`` and ``coefficients``.
    """

    names: tuple[str, ...]
    starts: IntArray
    columns: IntArray
    coefficients: IntArray
    lower: IntArray
    upper: IntArray

    @staticmethod
    def dense(
        names: Sequence[str],
        matrix: npt.ArrayLike,
        lower: npt.ArrayLike,
        upper: npt.ArrayLike = INFINITY,
        columns: npt.ArrayLike | None = None,
    ) -> Rows:
        """Make rows from an integer matrix ``[row, column]``, whose columns are 0, 1, ... or ``columns``."""
        values = _integers(matrix, "matrix")
        values = values if values.ndim == 2 else values.reshape(len(names), -1)
        width = values.shape[1]
        index = np.arange(width, dtype=np.int64) if columns is None else _integers(columns, "columns")
        row, column = np.nonzero(values)
        starts = np.concatenate(([0], np.cumsum(np.bincount(row, minlength=len(names)))))
        return Rows(
            tuple(names),
            starts.astype(np.int64),
            index[column],
            values[row, column],
            np.broadcast_to(_integers(lower, "lower"), (len(names),)).copy(),
            np.broadcast_to(_integers(upper, "upper"), (len(names),)).copy(),
        )

    @staticmethod
    def concatenate(parts: Iterable[Rows]) -> Rows:
        """Return all rows of ``parts``, in order."""
        blocks = list(parts)
        ends = np.cumsum([0] + [block.columns.size for block in blocks])
        starts = [block.starts[:-1] + end for block, end in zip(blocks, ends, strict=False)]
        return Rows(
            tuple(name for block in blocks for name in block.names),
            np.concatenate([*starts, ends[-1:]]).astype(np.int64),
            np.concatenate([block.columns for block in blocks]),
            np.concatenate([block.coefficients for block in blocks]),
            np.concatenate([block.lower for block in blocks]),
            np.concatenate([block.upper for block in blocks]),
        )

    def __len__(self) -> int:
        return len(self.names)

    def tail(self, first: int) -> Rows:
        """Return rows ``first`` and later."""
        return self.chosen(np.arange(first, len(self)))

    def chosen(self, indices: IntArray) -> Rows:
        """Return the rows at some ``indices``, in this order."""
        sizes = np.diff(self.starts)[indices]
        starts = np.concatenate(([0], np.cumsum(sizes)))
        entries = np.arange(starts[-1]) + np.repeat(self.starts[indices] - starts[:-1], sizes)
        names = tuple(self.names[index] for index in indices.tolist())
        columns, coefficients = self.columns[entries], self.coefficients[entries]
        return Rows(names, starts, columns, coefficients, self.lower[indices], self.upper[indices])

    def entry_rows(self) -> IntArray:
        """Return the row of every entry; shape [entries]."""
        return np.repeat(np.arange(len(self.names), dtype=np.int64), np.diff(self.starts))

    def matrix(self, width: int) -> IntArray:
        """Return the coefficients as a matrix with ``width`` columns, [rows, width]."""
        matrix = np.zeros((len(self), width), dtype=np.int64)
        matrix[self.entry_rows(), self.columns] = self.coefficients
        return matrix

    def activities(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return ``sum(coefficients * values[columns])`` of every row, exact for integer and object values."""
        if np.issubdtype(values.dtype, np.integer):
            magnitude = np.abs(self.coefficients.astype(np.float64)) * np.abs(values[self.columns] + 0.0)
            if float(sums_of(magnitude, self.starts).max(initial=0.0)) >= SAFE:
                values = values.astype(object)
        coefficients = self.coefficients.astype(object) if values.dtype == object else self.coefficients
        return sums_of(coefficients * values[self.columns], self.starts)


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """Integer program: minimise ``objective @ values + offset`` subject to bounds, rows, and integrality where
    marked.

    ``shares``: continuous variables are fractions of a whole, which the exact check must not round to integers.
    """

    name: str
    variable_names: tuple[str, ...]
    lower: IntArray
    upper: IntArray
    is_integer: BoolArray
    rows: Rows
    objective: IntArray
    offset: int = 0
    shares: bool = False

    @property
    def num_variables(self) -> int:
        """Number of variables."""
        return len(self.variable_names)

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.rows)

    def objective_at(self, values: Values) -> int:
        """Return the objective in Python integers; with fractional (continuous) values, rounded up to
        an integer."""
        terms = np.flatnonzero(self.objective)
        total = sum(
            (int(self.objective[column]) * exact(values[column]) for column in terms.tolist()),
            start=Fraction(self.offset),
        )
        return -((-total.numerator) // total.denominator)

    def max_row_magnitude(self) -> int:
        """Return the largest, over rows, of ``sum |coefficient| * max |bound of the variable|`` and ``|row
        bound|``."""
        bound = np.maximum(np.abs(self.lower), np.abs(self.upper))
        sums = replace(self.rows, coefficients=np.abs(self.rows.coefficients)).activities(bound)
        sides = np.concatenate([np.abs(self.rows.lower), np.abs(self.rows.upper)])
        finite = sides[sides < INFINITY]
        return max(int(sums.max(initial=0)), int(finite.max(initial=0)))

    def with_rows(self, rows: Rows) -> Program:
        """Return this program with further rows (cuts)."""
        if rows.columns.size and not 0 <= rows.columns.min() <= rows.columns.max() < self.num_variables:
            raise InvalidInputError(
                f"A row names column {int(rows.columns.max())}.",
                f"Columns are 0 to {self.num_variables - 1}.",
            )
        return replace(self, rows=Rows.concatenate((self.rows, rows)))

    def with_upper_bound(self, column: int, value: int) -> Program:
        """Return this program with ``values[column] <= value`` (never loosened)."""
        upper = self.upper.copy()
        upper[column] = min(int(upper[column]), value)
        if upper[column] < self.lower[column]:
            raise InvalidInputError(
                f"Upper bound {value} of {self.variable_names[column]} is below its lower bound "
                f"{int(self.lower[column])}."
            )
        return replace(self, upper=upper)


class ProgramBuilder:
    """Builder of a ``Program`` from variables and rows."""

    def __init__(self, name: str = "program", *, shares: bool = False) -> None:
        """``shares`` as in ``Program``."""
        self._name, self._shares = name, shares
        self._names: list[str] = []
        self._lower: list[int] = []
        self._upper: list[int] = []
        self._integer: list[bool] = []
        self._rows: list[tuple[str, IntArray, IntArray, int, int]] = []
        self._objective: tuple[IntArray, IntArray] = (np.zeros(0, np.int64), np.zeros(0, np.int64))
        self._offset = 0

    @property
    def num_variables(self) -> int:
        """Number of variables so far."""
        return len(self._names)

    def add_variable(self, name: str, lower: int, upper: int, integer: bool = True) -> int:
        """Add a variable. Returns its column."""
        if lower > upper:
            raise InvalidInputError(f"Variable {name} has bounds [{lower}, {upper}].", "lower <= upper expected.")
        self._names.append(name)
        self._lower.append(lower)
        self._upper.append(upper)
        self._integer.append(integer)
        return len(self._names) - 1

    def add_variables(self, names: Sequence[str], upper: int) -> range:
        """Add integer variables from 0 to ``upper``. Returns their columns."""
        first = len(self._names)
        self._names.extend(names)
        self._lower.extend([0] * len(names))
        self._upper.extend([upper] * len(names))
        self._integer.extend([True] * len(names))
        return range(first, len(self._names))

    def add_row(
        self,
        name: str,
        columns: npt.ArrayLike | range,
        coefficients: npt.ArrayLike,
        lower: int = MINUS_INFINITY,
        upper: int = INFINITY,
    ) -> int:
        """Add a row; columns named twice are summed, zero coefficients dropped. Returns its index."""
        if lower > upper:
            raise InvalidInputError(f"Row {name} has bounds [{lower}, {upper}].", "lower <= upper expected.")
        column, coefficient = self._terms(name, columns, coefficients)
        self._rows.append((name, column, coefficient, lower, upper))
        return len(self._rows) - 1

    def add_rows(
        self,
        names: Sequence[str],
        columns: npt.ArrayLike | range,
        matrix: npt.ArrayLike,
        lower: int = MINUS_INFINITY,
        upper: int = INFINITY,
    ) -> None:
        """Add rows with equal limits and columns, which ascend: coefficients ``matrix`` [row, column]."""
        values, width = _integers(matrix, "matrix"), len(self._names)
        column = _integers(columns, "columns").ravel()
        if column.size and not (np.diff(column, prepend=-1, append=width) > 0).all():
            raise InvalidInputError(f"Columns of {names[0]} are not ascending ones of {width}.")
        for name, row in zip(names, values, strict=True):
            kept = row != 0
            self._rows.append((name, column[kept], row[kept], lower, upper))

    def minimize(self, columns: npt.ArrayLike | range, coefficients: npt.ArrayLike, offset: int = 0) -> None:
        """Set the objective ``sum(coefficients * values[columns]) + offset``."""
        self._objective = self._terms("objective", columns, coefficients)
        self._offset = int(offset)

    def build(self) -> Program:
        """Build the program."""
        width = len(self._names)
        objective = np.zeros(width, np.int64)
        objective[self._objective[0]] = self._objective[1]
        empty = np.zeros(0, np.int64)
        sizes = [column.size for _, column, _, _, _ in self._rows]
        rows = Rows(
            tuple(name for name, _, _, _, _ in self._rows),
            np.concatenate(([0], np.cumsum(sizes))).astype(np.int64),
            np.concatenate([empty, *(column for _, column, _, _, _ in self._rows)]),
            np.concatenate([empty, *(coefficient for _, _, coefficient, _, _ in self._rows)]),
            np.array([lower for _, _, _, lower, _ in self._rows], np.int64),
            np.array([upper for _, _, _, _, upper in self._rows], np.int64),
        )
        return Program(
            self._name,
            tuple(self._names),
            np.array(self._lower, np.int64),
            np.array(self._upper, np.int64),
            np.array(self._integer, np.bool_),
            rows,
            objective,
            self._offset,
            self._shares,
        )

    def _terms(
        self, name: str, columns: npt.ArrayLike | range, coefficients: npt.ArrayLike
    ) -> tuple[IntArray, IntArray]:
        column = _integers(columns, f"columns of {name}").ravel()
        coefficient = np.broadcast_to(_integers(coefficients, f"coefficients of {name}"), column.shape)
        if column.size and not 0 <= column.min() <= column.max() < len(self._names):
            raise InvalidInputError(
                f"Row {name} names columns {int(column.min())} to {int(column.max())}.",
                f"Columns are 0 to {len(self._names) - 1}.",
            )
        if column.size > 1 and not (np.diff(column) > 0).all():
            unique, inverse = np.unique(column, return_inverse=True)
            if float(np.abs(coefficient * 1.0).sum()) >= SAFE:
                raise InvalidInputError(f"Coefficients of {name} do not fit in 64 bits once summed.")
            summed = np.zeros(unique.size, np.int64)
            np.add.at(summed, inverse, coefficient)
            column, coefficient = unique, summed
        kept = coefficient != 0
        return column[kept], coefficient[kept]


def _integers(values: npt.ArrayLike | range, what: str) -> IntArray:
    """Return ``values`` as int64; refuses fractions and values that do not fit."""
    try:
        array = np.asarray(values)
        if array.size and (array.dtype.kind not in "biu" or int(array.max()) > INFINITY):
            raise InvalidInputError(f"{what} are of type {array.dtype}.", "64-bit integers expected.")
        return array.astype(np.int64)
    except OverflowError:
        raise InvalidInputError(f"{what} do not fit in 64 bits.") from None


def sums_of(entries: npt.NDArray[Any], starts: IntArray) -> npt.NDArray[Any]:
    """Return the sum of the entries of every row (an empty row gives 0)."""
    sums = np.zeros(starts.size - 1, entries.dtype)
    filled = np.flatnonzero(np.diff(starts))
    if filled.size:
        sums[filled] = np.add.reduceat(entries, starts[:-1][filled])
    return sums


def exact(value: Any) -> int | Fraction:
    """Return a number without rounding."""
    return int(value) if value == int(value) else Fraction(float(value))


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
    factor = scaling.rows(program.rows)
    fill_rows(model.linear_constraints, model.linear_constraint_matrix, program.rows, scaling, factor, 0)
    return model


def fill_rows(constraints: Any, matrix: Any, rows: Rows, scaling: Scaling, factor: FloatArray, first: int) -> None:
    """Write rows, numbered from ``first`` and each times its ``factor``, into a MathOpt model or update."""
    index = rows.entry_rows()
    constraints.ids.extend(range(first, first + len(rows)))
    constraints.lower_bounds.extend((as_floats(rows.lower) * factor).tolist())
    constraints.upper_bounds.extend((as_floats(rows.upper) * factor).tolist())
    matrix.row_ids.extend((index + first).tolist())
    matrix.column_ids.extend(rows.columns.tolist())
    coefficients = rows.coefficients * scaling.columns[rows.columns] * factor[index]
    matrix.coefficients.extend(coefficients.tolist())


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
