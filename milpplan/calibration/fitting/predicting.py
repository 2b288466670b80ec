"""Interface between a fit and the predictor of its measurements."""

from __future__ import annotations

from typing import Protocol, Self

import numpy as np
import numpy.typing as npt

from milpplan.calibration.fitting.parameters import Theta
from milpplan.problem.hardware import HardwareSpec

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


class Predictor(Protocol):
    """Times of measurements as functions of the constants: of whole steps, or of single operators."""

    @property
    def ids(self) -> tuple[str, ...]:
        """Names of the measurements, [n]."""
        ...

    @property
    def base(self) -> HardwareSpec:
        """Description that priors are taken from."""
        ...

    @property
    def measured_s(self) -> FloatArray:
        """Measured seconds, [n]."""
        ...

    def times_s(self, theta: Theta) -> FloatArray:
        """Predict seconds, [n]."""
        ...

    def part(self, rows: IntArray) -> Self:
        """Select measurements by row."""
        ...


def log_ratios(predictor: Predictor, theta: Theta) -> FloatArray:
    """Compute log(predicted / measured) of every measurement."""
    return np.asarray(np.log(predictor.times_s(theta) / predictor.measured_s))
