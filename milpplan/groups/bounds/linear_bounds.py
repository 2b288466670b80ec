"""Linear lower bounds of a pipeline's time by its load, and chords of concave bounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from milpplan.groups.strategies import FloatArray

# Relative slack for rounding errors in sums of flows.
_SAFETY = 1.0 - 1e-9


@dataclass(frozen=True, slots=True)
class PathBound:
    """``time >= constant + slope * load`` for all loads."""

    constant: float
    slope: float

    def at(self, load: float) -> float:
        """Return the bound at a load, ns."""
        return (self.constant + self.slope * load) * _SAFETY

    def within(self, time_ns: float) -> float:
        """Return the largest load that the bound allows within a time."""
        slack_ns = time_ns / _SAFETY - self.constant
        return 0.0 if slack_ns <= 0.0 else slack_ns / self.slope if self.slope > 0.0 else float("inf")


def loads_within(bounds: Sequence[PathBound]) -> Callable[[FloatArray], FloatArray]:
    """Return a function: the largest loads within times [n] ns if one of the bounds holds; 0 if none."""
    constants, slopes = (np.array([getattr(bound, name) for bound in bounds]) for name in ("constant", "slope"))

    def within(times: FloatArray) -> FloatArray:
        slack_ns = (times[:, None] / _SAFETY - constants).clip(0.0)
        # A bound without a slope allows any load, or none.
        limits = np.divide(slack_ns, slopes, out=np.where(slack_ns > 0.0, np.inf, 0.0), where=slopes > 0.0)
        return np.asarray(limits.max(axis=1))

    return within


def chord(ends: tuple[float, float], values: Sequence[float]) -> tuple[float, float]:
    """Return (slope, constant) of the line through a function's values at two loads.

    For a concave function the line is below it between the loads.
    """
    slope = (values[1] - values[0]) / (ends[1] - ends[0])
    return slope, values[0] - slope * ends[0]
