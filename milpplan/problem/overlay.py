"""Overlay files: constants of hardware and of a software stack that were fitted to measurements.

An overlay names its base, a hardware description, and changes it; ``milpplan.problem.apply_overlay`` applies it.
An overlay is not specific to a single run.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field, model_validator

from milpplan.problem.hardware import BusTable, GemmTable, SizeCurve
from milpplan.problem.records import Count, NonNegativeFloat, Record

FACTORS: Final = (
    "gemm_efficiency",
    "gemm_fp8_efficiency",
    "memory_efficiency",
    "attention_efficiency",
    "scale_up_efficiency",
    "scale_out_efficiency",
    "dispatch_efficiency",
)
"""Constants that multiply values of the hardware description."""
TIMES: Final = (
    "layer_launch_s",
    "collective_rank_s",
    "collective_call_s",
    "collective_far_rank_s",
    "far_micro_batch_s",
    "far_step_s",
    "far_reduce_s",
    "message_s",
    "step_overhead_s",
    "scale_out_hop_s",
    "kernel_latency_s",
)
"""Constants in seconds that replace those of the software; the last two those of network and accelerator."""
SWITCHES: Final = ("overlap_tensor_parallel",)
CONSTANTS: Final = (*FACTORS, *TIMES, *SWITCHES)
RARE: Final = (
    "gemm_fp8_efficiency",
    "dispatch_efficiency",
    "collective_rank_s",
    "collective_call_s",
    "collective_far_rank_s",
    "far_micro_batch_s",
    "far_step_s",
    "far_reduce_s",
    "message_s",
    "scale_out_hop_s",
    "kernel_latency_s",
)
"""Constants that are fitted only on request, because few data distinguish them from the others."""
USUAL: Final = tuple(name for name in CONSTANTS if name not in RARE)
LEAST_FACTOR: Final = 0.02
MOST_FACTOR: Final = 50.0
MOST_SECONDS: Final = 1000.0
Name = Annotated[str, Field(min_length=1, max_length=200)]
Text = Annotated[str, Field(max_length=4000)]


class Factor(Record):
    """Ratio to the hardware description; ``one_sigma`` has the same unit."""

    value: Annotated[float, Field(ge=LEAST_FACTOR, le=MOST_FACTOR)]
    one_sigma: NonNegativeFloat = 0.0
    identified: bool = True
    """False: the data do not identify the constant, and it keeps its previous value."""


class Seconds(Record):
    """Time in seconds with its standard deviation."""

    value: Annotated[float, Field(ge=0, le=MOST_SECONDS)]
    one_sigma: NonNegativeFloat = 0.0
    identified: bool = True


class Switch(Record):
    """Switch of the framework."""

    value: bool
    identified: bool = True


class Constants(Record):
    """Fitted constants; an absent constant keeps the value of the hardware description."""

    gemm_efficiency: Factor | None = None
    """Factor on the efficiencies in the tables of matrix products."""
    gemm_fp8_efficiency: Factor | None = None
    """Factor on the table of 8-bit products, beside ``gemm_efficiency``: libraries differ more there."""
    memory_efficiency: Factor | None = None
    """Factor on ``memory_bandwidth_efficiency``."""
    attention_efficiency: Factor | None = None
    """Factor on both attention curves."""
    scale_up_efficiency: Factor | None = None
    """Factor on the bus bandwidths inside a domain."""
    scale_out_efficiency: Factor | None = None
    """Factor on ``scale_out.efficiency``."""
    dispatch_efficiency: Factor | None = None
    """Factor on the software's ``dispatch_efficiency``."""
    layer_launch_s: Seconds | None = None
    collective_rank_s: Seconds | None = None
    collective_call_s: Seconds | None = None
    collective_far_rank_s: Seconds | None = None
    far_micro_batch_s: Seconds | None = None
    far_step_s: Seconds | None = None
    far_reduce_s: Seconds | None = None
    message_s: Seconds | None = None
    step_overhead_s: Seconds | None = None
    scale_out_hop_s: Seconds | None = None
    """Latency of a hop between domains, and minimum latency of all hops of a collective that crosses them: a ring
    is no faster than its slowest step."""
    kernel_latency_s: Seconds | None = None
    """Fixed cost of a kernel; above that of the accelerator where the host waits for each kernel."""
    overlap_tensor_parallel: Switch | None = None


class Tables(Record):
    """Measured tables that replace those of the description, before any factor."""

    all_reduce: BusTable | None = None
    all_gather: BusTable | None = None
    reduce_scatter: BusTable | None = None
    all_to_all: BusTable | None = None
    gemm_bf16: GemmTable | None = None
    gemm_fp8: GemmTable | None = None
    attention_forward: SizeCurve | None = None
    attention_backward: SizeCurve | None = None


class Provenance(Record):
    """Origin of the constants. Errors are mean absolute relative errors of step times."""

    data: Text
    date: Text
    method: Text
    num_measurements: Count
    error_before: NonNegativeFloat | None = None
    error_after: NonNegativeFloat | None = None
    error_left_out: NonNegativeFloat | None = None
    """Error of measurements that were left out of the fit that predicts them."""
    residual_fraction: NonNegativeFloat = 0.0
    """Robust standard deviation of the relative errors of these predictions."""


class Overlay(Record):
    """Named change of a hardware description: fitted constants, measured tables, or both."""

    schema_version: Literal[1] = 1
    base: Name
    """Name of a shipped description, or path of a description or another overlay, relative to this file."""
    name: Name
    provenance: Provenance
    cost_model: Name | None = None
    """Plug-in of ``milpplan.cost_models`` that times the layers; absent: that of the base."""
    constants: Constants = Constants()
    tables: Tables = Tables()

    @model_validator(mode="after")
    def _not_itself(self) -> Overlay:
        if self.base == self.name:
            raise ValueError(f"name is {self.name!r}, the name of its base: give the overlay a name of its own")
        return self
