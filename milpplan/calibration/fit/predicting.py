"""What a fit asks of what predicts its measurements."""

from __future__ import annotations

from typing import Protocol, Self

import numpy as np
import numpy.typing as npt

from milpplan.calibration.fit.parameters import Theta
from milpplan.problem.hardware import HardwareSpec

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


class Predictor(Protocol):
    """Times of measurements as functions of the constants: of whole steps, or of single operators."""

    @property
    def ids(self) -> tuple[str, ...]:
        """A name for every measurement, [n]."""
        ...

    @property
    def base(self) -> HardwareSpec:
        """The description that priors are taken from."""
        ...

    @property
    def measured_s(self) -> FloatArray:
        """Seconds measured, [n]."""
        ...

    def times_s(self, theta: Theta) -> FloatArray:
        """Seconds predicted, [n]."""
        ...

    def part(self, rows: IntArray) -> Self:
        """Some of the measurements."""
        ...


def log_ratios(predictor: Predictor, theta: Theta) -> FloatArray:
    """log(predicted / measured) of every measurement."""
    return np.asarray(np.log(predictor.times_s(theta) / predictor.measured_s))
