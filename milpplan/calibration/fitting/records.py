"""Records of a fit: constants with uncertainties, and errors before, after and of left-out runs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from milpplan.calibration.fitting.least_squares import MAD_TO_SIGMA
from milpplan.problem import FACTORS, Constants, Factor, HardwareSpec, Overlay, Provenance, Seconds, Switch
from milpplan.problem.overlay import CONGESTION, SHARES, SWITCHES, Portion, SecondsPerByte

FloatArray = npt.NDArray[np.float64]
OUTLIER_WEIGHT = 0.3
"""Weight in the robust fit below which runs are named as outliers."""
_KINDS = dict.fromkeys(FACTORS, Factor) | dict.fromkeys(SHARES, Portion) | {CONGESTION: SecondsPerByte}
METHOD = (
    "least squares of log(predicted / measured) with soft_l1 loss, normal priors (factors: one sigma 0.3 of the "
    "logarithm; layer_launch_s 1 ms, collective_rank_s, scale_out_hop_s and kernel_latency_s 0.1 ms, "
    "far_micro_batch_s 30 ms, message_s, far_step_s and far_reduce_s 0.1 s, slice_copy_s 10 us, step_overhead_s 1 "
    "s, hidden fractions 0.27, congestion_s_per_byte 1.4 of its logarithm), linearised in turn"
)


@dataclass(frozen=True, slots=True)
class Constant:
    """Fitted constant. Factors are ratios, times seconds, the congestion seconds a byte, a switch 0 or 1.

    Where not ``identified``, ``value`` is the prior, and ``one_sigma`` the uncertainty that the data left (None
    for a switch and where the data do not depend on it). ``note`` gives the reason in words.
    """

    name: str
    value: float
    one_sigma: float | None
    identified: bool
    prior: float
    note: str = ""


@dataclass(frozen=True, slots=True)
class Fit:
    """Constants fitted to observations; arrays have an entry per observation, in the given order, in seconds.

    ``left_out_s`` are predictions by a fit without the observation's fold, NaN where there was only one fold.
    ``scatter``: robust one sigma of log(predicted / measured) after the fit.
    """

    constants: tuple[Constant, ...]
    ids: tuple[str, ...]
    measured_s: FloatArray
    before_s: FloatArray
    after_s: FloatArray
    left_out_s: FloatArray
    scatter: float
    num_folds: int

    def errors(self, predicted_s: FloatArray) -> FloatArray:
        """Compute relative errors of predictions."""
        return np.asarray(predicted_s / self.measured_s - 1.0)

    def mean_abs_error(self, predicted_s: FloatArray) -> float:
        """Compute the mean absolute relative error."""
        return float(np.mean(np.abs(self.errors(predicted_s))))

    @property
    def error_before(self) -> float:
        """Mean absolute error with the original description."""
        return self.mean_abs_error(self.before_s)

    @property
    def error_after(self) -> float:
        """Mean absolute error of the fitted runs."""
        return self.mean_abs_error(self.after_s)

    @property
    def error_left_out(self) -> float | None:
        """Mean absolute error of runs that the fit had not seen; None with a single fold."""
        return None if np.isnan(self.left_out_s).any() else self.mean_abs_error(self.left_out_s)

    @property
    def residual_fraction(self) -> float:
        """One sigma of what the constants leave unexplained: the larger of the scatter of the fit and of the
        left-out predictions (robust)."""
        if self.error_left_out is None:
            return self.scatter
        left_out = MAD_TO_SIGMA * float(np.median(np.abs(np.log(self.left_out_s / self.measured_s))))
        return max(self.scatter, left_out)

    @property
    def outliers(self) -> tuple[str, ...]:
        """Ids of runs that the robust loss nearly ignored."""
        scaled = np.log(self.after_s / self.measured_s) / self.scatter
        weights = 1.0 / np.sqrt(1.0 + scaled**2)
        return tuple(name for name, weight in zip(self.ids, weights, strict=True) if weight < OUTLIER_WEIGHT)

    def constant(self, name: str) -> Constant:
        """Return a constant by name."""
        return next(constant for constant in self.constants if constant.name == name)

    @property
    def identified(self) -> tuple[Constant, ...]:
        """Constants that the data identify."""
        return tuple(constant for constant in self.constants if constant.identified)

    def as_constants(self) -> Constants:
        """Make the record for an overlay."""
        values: dict[str, object] = {}
        for constant in self.constants:
            if constant.name in SWITCHES:
                values[constant.name] = Switch(value=bool(constant.value), identified=constant.identified)
                continue
            kind = _KINDS.get(constant.name, Seconds)
            values[constant.name] = kind(
                value=constant.value, one_sigma=constant.one_sigma or 0.0, identified=constant.identified
            )
        return Constants.model_validate(values)

    def overlay(self, base: HardwareSpec | str, name: str, data: str, date: str) -> Overlay:
        """Make the overlay; ``data`` describes the measurements, ``date`` is that of the fit."""
        provenance = Provenance(
            data=data,
            date=date,
            method=METHOD,
            num_measurements=len(self.ids),
            error_before=self.error_before,
            error_after=self.error_after,
            error_left_out=self.error_left_out,
            residual_fraction=self.residual_fraction,
        )
        under = base if isinstance(base, str) else base.name
        return Overlay(base=under, name=name, provenance=provenance, constants=self.as_constants())
