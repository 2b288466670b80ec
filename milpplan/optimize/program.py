"""A linear program in integers: variables, rows and an objective as plain NumPy arrays, free of any solver.

Every coefficient and bound is an int64, so that an answer can be re-checked without rounding. The objective
is minimised. ``INFINITY`` and ``MINUS_INFINITY`` stand for "no bound".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from milpplan.errors import InvalidInputError

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
Values = npt.NDArray[np.int64] | npt.NDArray[np.float64]

INFINITY: Final = int(np.iinfo(np.int64).max)
MINUS_INFINITY: Final = -INFINITY
# Below this, sums of int64 products cannot wrap round.
_SAFE: Final = float(2**62)


@dataclass(frozen=True, slots=True)
class Violation:
    """One thing that a vector of values breaks: a row, a bound, or integrality."""

    kind: Literal["row", "bound", "integrality"]
    name: str
    value: int | float
    lower: int
    upper: int

    def __str__(self) -> str:
        return f"{self.kind} {self.name}: {self.value} is not in [{_shown(self.lower)}, {_shown(self.upper)}]"


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
        """Rows from an integer matrix ``[row, column]``, whose columns are 0, 1, ... or ``columns``."""
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
        """All rows of ``parts``, in order."""
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
        """Rows ``first`` and later."""
        start = self.starts[first]
        return Rows(
            self.names[first:],
            self.starts[first:] - start,
            self.columns[start:],
            self.coefficients[start:],
            self.lower[first:],
            self.upper[first:],
        )

    def entry_rows(self) -> IntArray:
        """Row of every entry; shape [entries]."""
        return np.repeat(np.arange(len(self), dtype=np.int64), np.diff(self.starts))

    def activities(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """``sum(coefficients * values[columns])`` of every row, exact for integer and object values."""
        if np.issubdtype(values.dtype, np.integer):
            magnitude = np.abs(self.coefficients.astype(np.float64)) * np.abs(values[self.columns] + 0.0)
            if float(_sums(magnitude, self.starts).max(initial=0.0)) >= _SAFE:
                values = values.astype(object)
        coefficients = self.coefficients.astype(object) if values.dtype == object else self.coefficients
        return _sums(coefficients * values[self.columns], self.starts)


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """Minimise ``objective @ values + offset`` subject to bounds, rows, and integrality where marked.

    ``shares``: continuous variables are shares of something, of which no answer is made whole.
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
        """Objective in Python integers; with fractional (continuous) values, rounded up to a whole unit."""
        terms = np.flatnonzero(self.objective)
        total = sum(
            (int(self.objective[column]) * _exact(values[column]) for column in terms.tolist()),
            start=Fraction(self.offset),
        )
        return -((-total.numerator) // total.denominator)

    def violations(self, values: Values, tolerance: float = 0.0) -> list[Violation]:
        """What ``values`` breaks, checked without rounding error.

        Args:
            values: one value per variable, integers or floats.
            tolerance: allowed excess in bounds of continuous variables, relative to these (at least 1), and in
                rows that contain one, relative to the row's magnitude (at least its largest coefficient of one).
                Rows of integer variables only get none.
        """
        if values.shape != (self.num_variables,):
            raise InvalidInputError(
                f"{values.shape} values for {self.num_variables} variables.",
                "One value per variable expected.",
            )
        point, whole = _as_exact(values)
        found = [
            Violation(
                "integrality",
                self.variable_names[i],
                float(values[i]),
                int(self.lower[i]),
                int(self.upper[i]),
            )
            for i in np.flatnonzero(self.is_integer & ~whole).tolist()
        ]
        slack = np.where(self.is_integer, 0.0, tolerance * np.maximum(1.0, np.abs(values.astype(np.float64))))
        names = self.variable_names
        found += _out_of_range("bound", names, point, self.lower, self.upper, slack)
        rows = self.rows
        activity = rows.activities(point)
        slack = np.zeros(len(rows))
        if tolerance:
            size = np.abs(rows.coefficients * 1.0) * np.abs(values[rows.columns] * 1.0)
            loose = np.where(self.is_integer[rows.columns], 0, np.abs(rows.coefficients))
            # A continuous variable that should be nothing may be as much above it as any other.
            least = np.zeros(len(rows))
            np.maximum.at(least, rows.entry_rows(), loose)
            slack = np.where(least > 0, tolerance * np.maximum(least, _sums(size, rows.starts)), 0.0)
        return found + _out_of_range("row", rows.names, activity, rows.lower, rows.upper, slack)

    def max_row_magnitude(self) -> int:
        """Largest, over rows, of ``sum |coefficient| * max |bound of the variable|`` and ``|row bound|``."""
        bound = np.maximum(np.abs(self.lower), np.abs(self.upper))
        sums = replace(self.rows, coefficients=np.abs(self.rows.coefficients)).activities(bound)
        sides = np.concatenate([np.abs(self.rows.lower), np.abs(self.rows.upper)])
        finite = sides[sides < INFINITY]
        return max(int(sums.max(initial=0)), int(finite.max(initial=0)))

    def with_rows(self, rows: Rows) -> Program:
        """This program and further rows (cuts)."""
        if rows.columns.size and not 0 <= rows.columns.min() <= rows.columns.max() < self.num_variables:
            raise InvalidInputError(
                f"A row names column {int(rows.columns.max())}.",
                f"Columns are 0 to {self.num_variables - 1}.",
            )
        return replace(self, rows=Rows.concatenate((self.rows, rows)))

    def with_upper_bound(self, column: int, value: int) -> Program:
        """This program with ``values[column] <= value`` (never loosened)."""
        upper = self.upper.copy()
        upper[column] = min(int(upper[column]), value)
        if upper[column] < self.lower[column]:
            raise InvalidInputError(
                f"Upper bound {value} of {self.variable_names[column]} is below its lower bound "
                f"{int(self.lower[column])}."
            )
        return replace(self, upper=upper)


class ProgramBuilder:
    """Collects variables and rows, then makes a ``Program``."""

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
        """Variables so far."""
        return len(self._names)

    def add_variable(self, name: str, lower: int, upper: int, integer: bool = True) -> int:
        """Add one variable; returns its column."""
        if lower > upper:
            raise InvalidInputError(f"Variable {name} has bounds [{lower}, {upper}].", "lower <= upper expected.")
        self._names.append(name)
        self._lower.append(lower)
        self._upper.append(upper)
        self._integer.append(integer)
        return len(self._names) - 1

    def add_variables(self, names: Sequence[str], lower: int, upper: int) -> range:
        """Add integer variables with the same bounds; returns their columns."""
        if lower > upper:
            raise InvalidInputError(f"Variables have bounds [{lower}, {upper}].", "lower <= upper expected.")
        first = len(self._names)
        self._names.extend(names)
        self._lower.extend([lower] * len(names))
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

    def minimize(self, columns: npt.ArrayLike | range, coefficients: npt.ArrayLike, offset: int = 0) -> None:
        """Set the objective ``sum(coefficients * values[columns]) + offset``."""
        self._objective = self._terms("objective", columns, coefficients)
        self._offset = int(offset)

    def build(self) -> Program:
        """The program collected so far."""
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
            if float(np.abs(coefficient * 1.0).sum()) >= _SAFE:
                raise InvalidInputError(f"Coefficients of {name} do not fit in 64 bits once summed.")
            summed = np.zeros(unique.size, np.int64)
            np.add.at(summed, inverse, coefficient)
            column, coefficient = unique, summed
        kept = coefficient != 0
        return column[kept], coefficient[kept]


def _integers(values: npt.ArrayLike | range, what: str) -> IntArray:
    """``values`` as int64; refuses fractions and what does not fit."""
    try:
        array = np.asarray(values)
        if array.size and (array.dtype.kind not in "biu" or int(array.max()) > INFINITY):
            raise InvalidInputError(f"{what} are of type {array.dtype}.", "64-bit integers expected.")
        return array.astype(np.int64)
    except OverflowError:
        raise InvalidInputError(f"{what} do not fit in 64 bits.") from None


def _sums(entries: npt.NDArray[Any], starts: IntArray) -> npt.NDArray[Any]:
    """Sum of the entries of every row (an empty row gives 0)."""
    sums = np.zeros(starts.size - 1, entries.dtype)
    filled = np.flatnonzero(np.diff(starts))
    if filled.size:
        sums[filled] = np.add.reduceat(entries, starts[:-1][filled])
    return sums


def _exact(value: Any) -> int | Fraction:
    return int(value) if isinstance(value, (int, np.integer)) else Fraction(float(value))


def _as_exact(values: Values) -> tuple[npt.NDArray[Any], BoolArray]:
    """Values as int64, or exact fractions where some are not whole; and which are whole."""
    if np.issubdtype(values.dtype, np.integer):
        return values.astype(np.int64), np.ones(values.shape, np.bool_)
    whole = values == np.rint(values)
    if whole.all() and (np.abs(values) < _SAFE).all():
        return values.astype(np.int64), whole
    return np.array([_exact(value) for value in values.tolist()], dtype=object), whole


def _out_of_range(
    kind: Literal["row", "bound"],
    names: tuple[str, ...],
    values: npt.NDArray[Any],
    lower: IntArray,
    upper: IntArray,
    slack: FloatArray,
) -> list[Violation]:
    low = (values < lower) & (lower > MINUS_INFINITY)
    high = (values > upper) & (upper < INFINITY)
    found = []
    for i in np.flatnonzero((low | high).astype(np.bool_)).tolist():
        value = _exact(values[i]) if values.dtype != object else values[i]
        excess = int(lower[i]) - value if low[i] else value - int(upper[i])
        if excess > slack[i]:
            shown = float(value) if isinstance(value, Fraction) else int(value)
            found.append(Violation(kind, names[i], shown, int(lower[i]), int(upper[i])))
    return found


def _shown(bound: int) -> str:
    return "inf" if bound >= INFINITY else "-inf" if bound <= MINUS_INFINITY else str(bound)
