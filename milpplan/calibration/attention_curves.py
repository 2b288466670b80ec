"""Efficiency curves of attention, corrected node by node to measured flash-attention kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from milpplan.calibration.nodes import MAX_EFFICIENCY, MIN_EFFICIENCY, corrected, hat_weights
from milpplan.problem.hardware import HardwareSpec, SizeCurve
from milpplan.simulation.layers.kernels import interpolate_curve

FloatArray = npt.NDArray[np.float64]
Direction = Literal["attention_forward", "attention_backward"]

LATENCY_MARGIN: Final = 2.0
"""Factor over the latency of any kernel below which a kernel's time does not show its rate."""


@dataclass(frozen=True, slots=True)
class Attentions:
    """Measured causal kernels of one direction: tokens per sequence, FLOPs including the last tiles, and seconds
    each."""

    direction: Direction
    length: FloatArray
    flops: FloatArray
    time_s: FloatArray


@dataclass(frozen=True, slots=True)
class CurveFit:
    """Curve, number of rows used, and mean absolute errors of the efficiency."""

    curve: SizeCurve
    num_rows: int
    error_before: float
    error_after: float


def fit_curve(kernels: Attentions, hardware: HardwareSpec) -> CurveFit | None:
    """Fit the curve of a direction at the description's lengths; None where no kernel is long enough."""
    accelerator = hardware.accelerator
    before: SizeCurve = getattr(accelerator, kernels.direction)
    use = kernels.time_s > LATENCY_MARGIN * accelerator.kernel_latency_s
    if not use.any():
        return None
    length = kernels.length[use]
    kernel_s = kernels.time_s[use] - accelerator.kernel_latency_s
    peak = accelerator.bf16.peak_flops_per_s * hardware.software.attention_efficiency
    efficiency = np.clip(kernels.flops[use] / kernel_s / peak, MIN_EFFICIENCY, MAX_EFFICIENCY)
    nodes = corrected(hat_weights((before.size, length)), np.array(before.value, dtype=np.float64), efficiency)
    curve = before.model_copy(update={"value": tuple(map(float, nodes))})
    errors = [
        float(np.mean(np.abs(interpolate_curve(candidate, length) / efficiency - 1.0)))
        for candidate in (before, curve)
    ]
    return CurveFit(curve, int(use.sum()), errors[0], errors[1])
