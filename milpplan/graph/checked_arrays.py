"""Checks of what a caller gives: arrays of costs, tables of booleans, lists and mappings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from milpplan.errors import InvalidInputError
from milpplan.optimize.milp.program import FloatArray

# Sums above this limit, times ten thousand, no longer fit into a double.
MAX_SUM: Final = 1e300


def cost_array(values: npt.ArrayLike, shape: tuple[int, ...], what: str) -> FloatArray:
    """Copy costs as doubles of the expected shape, without NaN and minus infinity; read-only."""
    array = doubles(values, what)
    expected = array.shape[:1] if shape == (-1,) else shape
    if array.shape != expected or array.size == 0:
        shown = "[strategies], at least one," if shape == (-1,) else str(shape)
        raise InvalidInputError(
            f"{what} has shape {array.shape}.",
            f"Shape {shown} expected.",
            "Rows are strategies of the first node.",
        )
    if np.isnan(array).any() or (array == -np.inf).any():
        raise InvalidInputError(
            f"{what} holds {'NaN' if np.isnan(array).any() else '-inf'}.",
            "Numbers expected, or inf for what is forbidden.",
        )
    array.flags.writeable = False
    return array


def doubles(values: npt.ArrayLike, what: str) -> FloatArray:
    """Copy numbers as doubles."""
    try:
        array = np.array(values)
        if array.dtype.kind not in "biufO":
            raise TypeError
        return array.astype(np.float64)
    except (TypeError, ValueError, OverflowError):
        raise InvalidInputError(f"{what} holds what is no number.", "Numbers expected.") from None


def listed(values: Any, what: str) -> list[Any]:
    """Return the entries of a sequence field as a list."""
    if not isinstance(values, Iterable) or isinstance(values, (str, bytes, Mapping)):
        raise InvalidInputError(f"{what} is {values!r}.", "A sequence expected.")
    try:
        return list(values)
    except TypeError:
        raise InvalidInputError(f"{what} is {values!r}.", "A sequence expected.") from None


def mapping(values: Any, what: str) -> Mapping[Any, Any]:
    """Return a mapping field, or refuse another type."""
    if not isinstance(values, Mapping):
        raise InvalidInputError(f"{what} is {values!r}.", "A mapping expected.")
    return values


def require_number(
    value: object, what: str, largest: float, kinds: tuple[type, ...] = (int, float, np.integer)
) -> None:
    """Refuse a value that is no number from 0 to ``largest``."""
    if not isinstance(value, kinds) or not 0 <= value <= largest:  # type: ignore[operator]
        whole = "A whole number" if float not in kinds else "A number"
        raise InvalidInputError(f"{what} is {value!r}.", f"{whole} from 0 to {largest} expected.")


def finite(array: FloatArray, what: str) -> FloatArray:
    """Return the array, or refuse infinite entries."""
    if not np.isfinite(array).all():
        raise InvalidInputError(
            f"{what} holds inf.", "Finite numbers expected.", "Forbid through an infinite cost."
        )
    return array
