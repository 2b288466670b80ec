"""Bounds of a pipeline's time by its load: constants and slopes, and lines below concave functions of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from milpplan.groups.strategies import FloatArray

# What floats may add to sums of flows.
_SAFETY = 1.0 - 1e-9


@dataclass(frozen=True, slots=True)
class PathBound:
    """``time >= constant + slope * load`` for all loads."""

    constant: float
    slope: float

    def at(self, load: float) -> float:
        """The bound of a load, ns."""
        return (self.constant + self.slope * load) * _SAFETY

    def within(self, time_ns: float) -> float:
        """The largest load that it leaves for a time."""
        left = time_ns / _SAFETY - self.constant
        return 0.0 if left <= 0.0 else left / self.slope if self.slope > 0.0 else float("inf")


def loads_within(bounds: Sequence[PathBound]) -> Callable[[FloatArray], FloatArray]:
    """The largest load that may be done within each of some times [n] ns where one bound holds; 0 if none."""
    constants, slopes = (np.array([getattr(one, name) for one in bounds]) for name in ("constant", "slope"))

    def within(times: FloatArray) -> FloatArray:
        left = (times[:, None] / _SAFETY - constants).clip(0.0)
        # What adds no time to a load has room for any.
        found = np.divide(left, slopes, out=np.where(left > 0.0, np.inf, 0.0), where=slopes > 0.0)
        return np.asarray(found.max(axis=1))

    return within


def chord(ends: tuple[float, float], values: Sequence[float]) -> tuple[float, float]:
    """(slope, constant) of the line through a function's values at two loads: below it between them where it is
    concave."""
    slope = (values[1] - values[0]) / (ends[1] - ends[0])
    return slope, values[0] - slope * ends[0]
