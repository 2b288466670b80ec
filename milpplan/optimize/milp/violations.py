"""Violations of a program by an answer, without rounding error."""

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

# Twice the relative error of one floating-point operation.
_EPSILON: Final = 2.0**-52


@dataclass(frozen=True, slots=True)
class Violation:
    """Row, bound or integrality that a vector of values violates."""

    kind: Literal["row", "bound", "integrality"]
    name: str
    value: int | float
    lower: int
    upper: int

    def __str__(self) -> str:
        return f"{self.kind} {self.name}: {self.value} is not in [{_shown(self.lower)}, {_shown(self.upper)}]"


def violations(program: Program, values: Values, tolerance: float = 0.0) -> list[Violation]:
    """Return all violations of a program by ``values``.

    Fractions are a hundred times slower than floats, so only values that may be violated within the rounding error
    are checked exactly.

    Args:
        program: rows, bounds and integrality.
        values: one value per variable, integers or floats.
        tolerance: allowed excess in bounds of continuous variables, relative to these (at least 1), and in rows
            with a continuous variable, relative to the row's magnitude (at least its largest coefficient of such a
            variable). Rows of integer variables have no tolerance.
    """
    if values.shape != (program.num_variables,):
        raise InvalidInputError(
            f"{values.shape} values for {program.num_variables} variables.",
            "One value per variable expected.",
        )
    floats, names = values.astype(np.float64), program.variable_names
    broken = program.is_integer & (values != np.rint(values))
    violated = [
        Violation("integrality", names[i], float(values[i]), int(program.lower[i]), int(program.upper[i]))
        for i in np.flatnonzero(broken).tolist()
    ]
    slack = np.where(program.is_integer, 0.0, tolerance * np.maximum(1.0, np.abs(floats)))
    doubtful = _doubtful(floats, _EPSILON * np.abs(floats) - slack, program.lower, program.upper)
    for i in doubtful.tolist():
        violated += _out_of_range(
            "bound", names[i], exact(values[i]), program.lower[i], program.upper[i], slack[i]
        )
    rows = program.rows
    terms = rows.coefficients * floats[rows.columns]
    size, slack = sums_of(np.abs(terms), rows.starts), np.zeros(len(rows))
    if tolerance:
        loose = np.where(program.is_integer[rows.columns], 0, np.abs(rows.coefficients))
        # A continuous variable at zero may exceed it by the tolerance of any other.
        largest_loose = np.zeros(len(rows))
        np.maximum.at(largest_loose, rows.entry_rows(), loose)
        slack = np.where(largest_loose > 0, tolerance * np.maximum(largest_loose, size), 0.0)
    error = (np.diff(rows.starts) + 4) * _EPSILON * size
    doubtful = _doubtful(sums_of(terms, rows.starts), error - slack, rows.lower, rows.upper)
    if not doubtful.size:
        return violated
    activities = rows.chosen(doubtful).activities(_as_exact(values))
    for i, activity in zip(doubtful.tolist(), activities.tolist(), strict=True):
        violated += _out_of_range("row", rows.names[i], activity, rows.lower[i], rows.upper[i], slack[i])
    return violated


def _doubtful(sums: FloatArray, margin: FloatArray, lower: IntArray, upper: IntArray) -> IntArray:
    """Return the indices of ``sums`` that may be outside of their limits, given a margin and rounding errors."""
    low = sums - margin >= lower + _EPSILON * np.abs(lower * 1.0)
    high = sums + margin <= upper - _EPSILON * np.abs(upper * 1.0)
    inside: BoolArray = (low | (lower <= MINUS_INFINITY)) & (high | (upper >= INFINITY))
    return np.flatnonzero(~inside)


def _as_exact(values: Values) -> npt.NDArray[Any]:
    """Return values as int64, or as exact fractions where some are fractional."""
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
    """Return a violation if an exact value is outside of its limits by more than ``slack``."""
    below = int(lower) - value if lower > MINUS_INFINITY else 0
    above = value - int(upper) if upper < INFINITY else 0
    if max(below, above) <= float(slack):
        return []
    shown = float(value) if isinstance(value, Fraction) else int(value)
    return [Violation(kind, name, shown, int(lower), int(upper))]


def _shown(bound: int) -> str:
    return "inf" if bound >= INFINITY else "-inf" if bound <= MINUS_INFINITY else str(bound)
