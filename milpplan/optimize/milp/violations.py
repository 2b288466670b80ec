"""What an answer breaks of a program, without rounding error."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from milpplan.errors import InvalidInputError
from milpplan.optimize.milp.program import (
    INFINITY,
    MINUS_INFINITY,
    SAFE,
    BoolArray,
    FloatArray,
    IntArray,
    Program,
    Values,
    exact,
    sums_of,
)

# Twice what one operation with floats is off, relatively.
_EPSILON: Final = 2.0**-52


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


def violations(program: Program, values: Values, tolerance: float = 0.0) -> list[Violation]:
    """What ``values`` breaks. Fractions take a hundred times as long as floats, so only what these leave in doubt,
    whatever their roundings add, is looked at exactly.

    Args:
        program: rows, bounds and what is integer.
        values: one value per variable, integers or floats.
        tolerance: allowed excess in bounds of continuous variables, relative to these (at least 1), and in
            rows that contain one, relative to the row's magnitude (at least its largest coefficient of one).
            Rows of integer variables only get none.
    """
    if values.shape != (program.num_variables,):
        raise InvalidInputError(
            f"{values.shape} values for {program.num_variables} variables.",
            "One value per variable expected.",
        )
    floats, names = values.astype(np.float64), program.variable_names
    broken = program.is_integer & (values != np.rint(values))
    found = [
        Violation("integrality", names[i], float(values[i]), int(program.lower[i]), int(program.upper[i]))
        for i in np.flatnonzero(broken).tolist()
    ]
    slack = np.where(program.is_integer, 0.0, tolerance * np.maximum(1.0, np.abs(floats)))
    doubtful = _doubtful(floats, _EPSILON * np.abs(floats) - slack, program.lower, program.upper)
    for i in doubtful.tolist():
        found += _out_of_range("bound", names[i], exact(values[i]), program.lower[i], program.upper[i], slack[i])
    rows = program.rows
    terms = rows.coefficients * floats[rows.columns]
    size, slack = sums_of(np.abs(terms), rows.starts), np.zeros(len(rows))
    if tolerance:
        loose = np.where(program.is_integer[rows.columns], 0, np.abs(rows.coefficients))
        # A continuous variable that should be nothing may be as much above it as any other.
        least = np.zeros(len(rows))
        np.maximum.at(least, rows.entry_rows(), loose)
        slack = np.where(least > 0, tolerance * np.maximum(least, size), 0.0)
    error = (np.diff(rows.starts) + 4) * _EPSILON * size
    doubtful = _doubtful(sums_of(terms, rows.starts), error - slack, rows.lower, rows.upper)
    if not doubtful.size:
        return found
    activities = rows.chosen(doubtful).activities(_as_exact(values))
    for i, activity in zip(doubtful.tolist(), activities.tolist(), strict=True):
        found += _out_of_range("row", rows.names[i], activity, rows.lower[i], rows.upper[i], slack[i])
    return found


def _doubtful(sums: FloatArray, margin: FloatArray, lower: IntArray, upper: IntArray) -> IntArray:
    """Which ``sums`` are not by a margin, and by what rounding does to them, inside of their limits."""
    low = sums - margin >= lower + _EPSILON * np.abs(lower * 1.0)
    high = sums + margin <= upper - _EPSILON * np.abs(upper * 1.0)
    inside: BoolArray = (low | (lower <= MINUS_INFINITY)) & (high | (upper >= INFINITY))
    return np.flatnonzero(~inside)


def _as_exact(values: Values) -> npt.NDArray[Any]:
    """Values as int64, or exact fractions where some are not whole."""
    if np.issubdtype(values.dtype, np.integer):
        return values.astype(np.int64)
    if (values == np.rint(values)).all() and (np.abs(values) < SAFE).all():
        return values.astype(np.int64)
    return np.array([exact(value) for value in values.tolist()], dtype=object)


def _out_of_range(
    kind: Literal["row", "bound"],
    name: str,
    value: int | Fraction,
    lower: np.int64,
    upper: np.int64,
    slack: np.float64,
) -> list[Violation]:
    """Whether an exact value is by more than ``slack`` outside of its limits."""
    below = int(lower) - value if lower > MINUS_INFINITY else 0
    above = value - int(upper) if upper < INFINITY else 0
    if max(below, above) <= float(slack):
        return []
    shown = float(value) if isinstance(value, Fraction) else int(value)
    return [Violation(kind, name, shown, int(lower), int(upper))]


def _shown(bound: int) -> str:
    return "inf" if bound >= INFINITY else "-inf" if bound <= MINUS_INFINITY else str(bound)
