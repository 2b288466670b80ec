"""Constants of a hardware and of a software stack that were fitted to measurements: what an overlay file holds.

An overlay names the hardware it lies on and changes it; ``milpplan.problem.apply_overlay`` applies it. It never
belongs to one run.
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
"""Constants that multiply what the hardware description says."""
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
"""Constants in seconds that replace the software's, the last two the network's and the accelerator's."""
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
"""Fitted only where they are asked for: few data tell them from the others."""
USUAL: Final = tuple(name for name in CONSTANTS if name not in RARE)
LEAST_FACTOR: Final = 0.02
MOST_FACTOR: Final = 50.0
MOST_SECONDS: Final = 1000.0
Name = Annotated[str, Field(min_length=1, max_length=200)]
Text = Annotated[str, Field(max_length=4000)]


class Factor(Record):
    """A ratio to the hardware description; ``one_sigma`` in the same unit."""

    value: Annotated[float, Field(ge=LEAST_FACTOR, le=MOST_FACTOR)]
    one_sigma: NonNegativeFloat = 0.0
    identified: bool = True
    """False: the data do not say; the value is what it was before."""


class Seconds(Record):
    """A time in seconds, with its one sigma."""

    value: Annotated[float, Field(ge=0, le=MOST_SECONDS)]
    one_sigma: NonNegativeFloat = 0.0
    identified: bool = True


class Switch(Record):
    """A yes or a no of the framework."""

    value: bool
    identified: bool = True


class Constants(Record):
    """What is fitted; absent: as the hardware description has it."""

    gemm_efficiency: Factor | None = None
    """On the efficiencies of the matrix products' tables."""
    gemm_fp8_efficiency: Factor | None = None
    """On the table of 8-bit products, besides ``gemm_efficiency``: libraries differ more there."""
    memory_efficiency: Factor | None = None
    """On ``memory_bandwidth_efficiency``."""
    attention_efficiency: Factor | None = None
    """On both attention curves."""
    scale_up_efficiency: Factor | None = None
    """On the bus bandwidths inside a domain."""
    scale_out_efficiency: Factor | None = None
    """On ``scale_out.efficiency``."""
    dispatch_efficiency: Factor | None = None
    """On the software's ``dispatch_efficiency``."""
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
    """Latency of a hop between domains, and the least one of every hop of a collective that crosses them: a ring
    goes no faster than its slowest step."""
    kernel_latency_s: Seconds | None = None
    """What every kernel costs beside its work: more than the accelerator's where the host waits for each one."""
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
    """Where the constants come from. Errors are mean absolute relative errors of step times."""

    data: Text
    date: Text
    method: Text
    num_measurements: Count
    error_before: NonNegativeFloat | None = None
    error_after: NonNegativeFloat | None = None
    error_left_out: NonNegativeFloat | None = None
    """Of measurements that were left out of the fit that predicts them."""
    residual_fraction: NonNegativeFloat = 0.0
    """Robust one sigma of the left-out predictions' relative errors."""


class Overlay(Record):
    """A named change of a hardware description: fitted constants, measured tables, or both."""

    schema_version: Literal[1] = 1
    base: Name
    """A shipped description's name, or the path of a description or another overlay, relative to this file."""
    name: Name
    provenance: Provenance
    cost_model: Name | None = None
    """A plug-in of ``milpplan.cost_models`` that times the layers; absent: as the base has it."""
    constants: Constants = Constants()
    tables: Tables = Tables()

    @model_validator(mode="after")
    def _not_itself(self) -> Overlay:
        if self.base == self.name:
            raise ValueError(f"name is {self.name!r}, the name of its base: give the overlay a name of its own")
        return self
