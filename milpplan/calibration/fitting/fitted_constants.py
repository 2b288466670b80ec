"""Constants as parameters of a fit: bounds, priors, the resulting hardware, and the predictor of measurements.

Factors and the congestion are fitted as logarithms, times in seconds, shares as they are. The priors are weak and
normal: they keep the problem well posed where the data do not determine a constant, which then stays at its prior.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import exp, log
from typing import Any, Final, Protocol, Self

import numpy as np
import numpy.typing as npt

from milpplan.problem import FACTORS, PRIOR_SIGMA, HardwareSpec, with_constants
from milpplan.problem.overlay import CONGESTION, SHARES, TIMES, constant_of

PRIOR_FACTOR_SIGMA: Final = 0.3
"""One sigma of the prior of a factor's logarithm around 0."""
PRIOR_SECONDS_SIGMA: Final = {
    "layer_launch_s": 1e-3,
    "collective_rank_s": 1e-4,
    "collective_call_s": 3e-4,
    "collective_far_rank_s": 1e-4,
    "far_micro_batch_s": 3e-2,
    "far_step_s": 0.1,
    "far_reduce_s": 0.1,
    "message_s": 0.1,
    "slice_copy_s": 1e-5,
    "step_overhead_s": 1.0,
    "scale_out_hop_s": 1e-4,
    "kernel_latency_s": 1e-4,
}
"""One sigma of a time's prior around the value of the hardware description and its software."""
PRIOR_SHARE_SIGMA: Final = PRIOR_SIGMA["hidden_gather_fraction"]
"""One sigma of a hidden fraction's prior around the value of the description. Source: the spread of the fractions
that single sources of frameworks with prefetch fit (docs/accuracy.md)."""
PRIOR_CONGESTION_S_PER_BYTE: Final = 4e-13
PRIOR_CONGESTION_SIGMA: Final = PRIOR_SIGMA["congestion_s_per_byte"]
"""Median of the congestion's prior where the description has none, and one sigma of its logarithm. Source: the
congestion that five sources fit, 0.03 to 2 ms for a GB and a node (docs/accuracy.md)."""
CONGESTION_BOUNDS: Final = (1e-16, 1e-10)
FACTOR_BOUNDS: Final = (0.2, 5.0)
SECONDS_BOUNDS: Final = {
    "layer_launch_s": (0.0, 2e-2),
    "collective_rank_s": (0.0, 2e-3),
    "collective_call_s": (0.0, 2e-2),
    "collective_far_rank_s": (0.0, 2e-3),
    "far_micro_batch_s": (0.0, 1.0),
    "far_step_s": (0.0, 2.0),
    "far_reduce_s": (0.0, 2.0),
    "message_s": (0.0, 2.0),
    "slice_copy_s": (0.0, 1e-3),
    "step_overhead_s": (0.0, 20.0),
    "scale_out_hop_s": (0.0, 2e-3),
    "kernel_latency_s": (0.0, 2e-3),
}
STARTS_S: Final = {"layer_launch_s": (4e-4, 2e-3), "collective_rank_s": (2.5e-4,)}
"""Starts of the fit besides the prior: launch times below that of every layer have no effect, so that no slope
would lead away from zero."""


@dataclass(frozen=True, slots=True)
class Theta:
    """Values of all constants: factors on the description, and others (None: the description's own)."""

    gemm_efficiency: float = 1.0
    gemm_fp8_efficiency: float = 1.0
    memory_efficiency: float = 1.0
    attention_efficiency: float = 1.0
    scale_up_efficiency: float = 1.0
    scale_out_efficiency: float = 1.0
    dispatch_efficiency: float = 1.0
    layer_launch_s: float | None = None
    collective_rank_s: float | None = None
    collective_call_s: float | None = None
    collective_far_rank_s: float | None = None
    far_micro_batch_s: float | None = None
    far_step_s: float | None = None
    far_reduce_s: float | None = None
    message_s: float | None = None
    slice_copy_s: float | None = None
    step_overhead_s: float | None = None
    scale_out_hop_s: float | None = None
    kernel_latency_s: float | None = None
    hidden_gather_fraction: float | None = None
    hidden_reduce_fraction: float | None = None
    congestion_s_per_byte: float | None = None
    overlap_tensor_parallel: bool | None = None

    def on(self, hardware: HardwareSpec) -> HardwareSpec:
        """Apply these values to a description."""
        factors = {name: getattr(self, name) for name in FACTORS}
        others = {
            name: value
            for name in (*TIMES, *SHARES, CONGESTION, "overlap_tensor_parallel")
            if (value := getattr(self, name)) is not None
        }
        return with_constants(hardware, factors, others)

    def with_value(self, name: str, value: float) -> Theta:
        """Replace a constant."""
        changed: dict[str, Any] = {name: value}
        return replace(self, **changed)


@dataclass(frozen=True, slots=True)
class Parameter:
    """Continuous constant: prior mean and one sigma, bounds, and difference step, in the fit's own unit."""

    name: str
    prior: float
    sigma: float
    low: float
    high: float
    step: float
    longest_move: float
    """Maximum move in an iteration."""

    @property
    def is_factor(self) -> bool:
        """True if the constant multiplies values of the description."""
        return self.name in FACTORS

    @property
    def is_logarithm(self) -> bool:
        """True if the fit's unit is a logarithm."""
        return self.is_factor or self.name == CONGESTION

    def value(self, inner: float) -> float:
        """Convert from the fit's unit to the constant's."""
        return exp(inner) if self.is_logarithm else inner

    def value_sigma(self, inner: float, sigma: float) -> float:
        """Convert one sigma to the unit of the overlay's ``one_sigma``, at a value in the fit's unit."""
        return exp(inner) * sigma if self.is_factor else sigma


def parameter(name: str, hardware: HardwareSpec) -> Parameter:
    """Return the parameter of a constant in ``UNCERTAIN``."""
    if name in FACTORS:
        low, high = (log(bound) for bound in FACTOR_BOUNDS)
        return Parameter(name, 0.0, PRIOR_FACTOR_SIGMA, low, high, 1e-3, 0.35)
    if name == CONGESTION:
        low, high = (log(bound) for bound in CONGESTION_BOUNDS)
        median = log(constant_of(hardware, name) or PRIOR_CONGESTION_S_PER_BYTE)
        return Parameter(name, median, PRIOR_CONGESTION_SIGMA, low, high, 1e-2, 2.0)
    is_share = name in SHARES
    sigma = PRIOR_SHARE_SIGMA if is_share else PRIOR_SECONDS_SIGMA[name]
    least, most = (0.0, 1.0) if is_share else SECONDS_BOUNDS[name]
    prior = min(max(constant_of(hardware, name), least), most)
    return Parameter(name, prior, sigma, least, most, sigma * 1e-3, 1.5 * sigma)


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
