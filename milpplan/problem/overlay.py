"""Overlay files: constants of hardware and of a software stack that were fitted to measurements.

An overlay names its base, a hardware description, and changes it: ``applied`` does so, and ``moved`` moves a
description within its uncertainty. An overlay is not specific to a single run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import Field, model_validator

from milpplan.errors import InvalidInputError
from milpplan.problem.hardware import Accelerator, BusTable, GemmTable, HardwareSpec, SizeCurve, Uncertainty
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
    "slice_copy_s",
    "step_overhead_s",
    "scale_out_hop_s",
    "kernel_latency_s",
)
"""Constants in seconds that replace those of the software; the last two those of network and accelerator."""
SHARES: Final = ("hidden_gather_fraction", "hidden_reduce_fraction")
"""Constants between 0 and 1 that replace those of the software."""
CONGESTION: Final = "congestion_s_per_byte"
"""Constant that replaces that of the network; its uncertainty is that of its logarithm."""
SWITCHES: Final = ("overlap_tensor_parallel",)
UNCERTAIN: Final = (*FACTORS, *TIMES, *SHARES, CONGESTION)
"""Constants with an uncertainty."""
CONSTANTS: Final = (*UNCERTAIN, *SWITCHES)
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
    "slice_copy_s",
    "scale_out_hop_s",
    "kernel_latency_s",
    *SHARES,
    CONGESTION,
)
"""Constants that are fitted only on request, because few data distinguish them from the others."""
USUAL: Final = tuple(name for name in CONSTANTS if name not in RARE)
LEAST_FACTOR: Final = 0.02
MOST_FACTOR: Final = 50.0
MOST_SECONDS: Final = 1000.0
MOST_SECONDS_PER_BYTE: Final = 1e-6
Name = Annotated[str, Field(min_length=1, max_length=200)]
Text = Annotated[str, Field(max_length=4000)]


PRIOR_SIGMA: Final = {
    # Root mean square of the logarithms that thirteen shipped stacks fit: 0.57 to 1.05.
    "gemm_efficiency": 0.25,
    "gemm_fp8_efficiency": 0.15,  # one stack fits 1.16
    # Four stacks of frameworks without fused kernels fit 0.23 to 0.52; those with them cannot tell it from 1.
    "memory_efficiency": 0.8,
    "attention_efficiency": 0.5,  # six stacks fit 0.36 to 0.98
    "scale_up_efficiency": 0.5,  # four stacks fit 0.39 to 1.04
    "scale_out_efficiency": 0.3,  # two stacks fit 0.95 and 1.00, to 10 %: the fit's own prior
    "dispatch_efficiency": 0.7,  # one stack fits 0.46
    # One of nine stacks fits more than 0: 1.4 ms. Root mean square, rounded down.
    "layer_launch_s": 3e-4,
    # Only runs on a cluster with slow calls have more than 0. A launch by a healthy NCCL takes some 10 to 20 us.
    "collective_rank_s": 1e-6,
    "collective_call_s": 2e-5,
    "collective_far_rank_s": 1e-6,
    # The values that the only stack with tensor parallelism across nodes fits.
    "far_micro_batch_s": 1e-2,
    "far_step_s": 5e-2,
    "far_reduce_s": 4e-2,
    "message_s": 3e-4,  # one of ten stacks with a pipeline fits 1.2 ms
    "slice_copy_s": 1e-5,  # the value that the only stack that gathers lists fits; others copy nothing
    "step_overhead_s": 6e-2,  # eight stacks fit 0.02 to 0.07 s, one 0.7 s
    # Two of ten stacks fit 40 and 48 us where the description has 14 us: root mean square over the ten.
    "scale_out_hop_s": 1e-5,
    "kernel_latency_s": 2e-6,  # the shipped descriptions have 2.2 to 4.3 us
    # Fractions and congestion that single sources fit (docs/accuracy.md).
    "hidden_gather_fraction": 0.27,
    "hidden_reduce_fraction": 0.27,
    "congestion_s_per_byte": 1.4,
}
"""One sigma of every constant that nothing identifies: for factors and congestion of the logarithm, for shares as
they are, for others in seconds. Source: the spread of the values that the stacks in ``hardware/stacks`` fit around
those of the descriptions. The priors of a fit (``milpplan.calibration.fitting``) are wider: they only keep it well
posed."""
DOUBTED_CONGESTION: Final = 3e-14
"""Congestion to move from where a description states none, in seconds per byte and domain: that of a well-built
network (docs/accuracy.md)."""
SHARED: Final = ("gemm_efficiency", "memory_efficiency", "attention_efficiency", "scale_up_efficiency")
LEFT_SHARE: Final = 0.3
"""Factors that share most of a step, and the part of their priors' sigmas that is left beside fitted constants:
an error in one is mostly in the values of the fitted ones. Chosen so that fifths of the runs that were kept aside
lie within one sigma as often as normal errors would (benchmarks/results/accuracy.md)."""
SOURCES_FRACTION: Final = 0.12
"""Spread of step times between clusters that run a framework, for shipped stacks. Source: mean errors of sources
predicted by constants fitted to the others of their framework (benchmarks/results/accuracy.md)."""
PRIORS: Final = Uncertainty(overlay="none", residual_fraction=0.04, **PRIOR_SIGMA)
"""Uncertainty of a description that nothing was fitted to. The residual is the median of those of the stacks."""


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


class Portion(Record):
    """Share between 0 and 1 with its standard deviation."""

    value: Annotated[float, Field(ge=0, le=1)]
    one_sigma: NonNegativeFloat = 0.0
    identified: bool = True


class SecondsPerByte(Record):
    """Time per byte; ``one_sigma`` is that of its logarithm."""

    value: Annotated[float, Field(ge=0, le=MOST_SECONDS_PER_BYTE)]
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
    slice_copy_s: Seconds | None = None
    step_overhead_s: Seconds | None = None
    scale_out_hop_s: Seconds | None = None
    """Latency of a hop between domains, and minimum latency of all hops of a collective that crosses them: a ring
    is no faster than its slowest step."""
    kernel_latency_s: Seconds | None = None
    """Fixed cost of a kernel; above that of the accelerator where the host waits for each kernel."""
    hidden_gather_fraction: Portion | None = None
    hidden_reduce_fraction: Portion | None = None
    congestion_s_per_byte: SecondsPerByte | None = None
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
    memory_margin_fraction: Annotated[float | None, Field(ge=0, le=0.5)] = None
    """Share of the memory that a safe plan leaves, from measured peaks; absent: that of the base."""

    @model_validator(mode="after")
    def _not_itself(self) -> Overlay:
        if self.base == self.name:
            raise ValueError(f"name is {self.name!r}, the name of its base: give the overlay a name of its own")
        return self


MOST_EFFICIENCY: Final = 1.5
LEAST_EFFICIENCY: Final = 1e-6
"""Limits of the efficiencies of tables and curves; fractions are limited to (0, 1]."""
_OF_ACCELERATOR: Final = {"gemm_efficiency", "gemm_fp8_efficiency", "memory_efficiency", "attention_efficiency"}
HOP: Final = "scale_out_hop_s"
KERNEL: Final = "kernel_latency_s"
COLLECTIVES: Final = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
CURVES: Final = ("attention_forward", "attention_backward")


def applied(hardware: HardwareSpec, overlay: Overlay) -> HardwareSpec:
    """Apply an overlay's tables and constants to a description; ``software`` is named after the overlay.

    Tables are replaced first, then factors multiply. Values stay within the ranges of their records. An overlay
    without constants and tables changes no number.

    Raises:
        InvalidInputError: the overlay has a table for a number format that the accelerator lacks.
    """
    changed = _with_tables(hardware, overlay)
    factors, others = constant_values(overlay.constants)
    if overlay.cost_model is not None:
        others["cost_model"] = overlay.cost_model
    changed = with_constants(changed, factors, others | {"name": overlay.name})
    update: dict[str, object] = {"uncertainty": _uncertainty(uncertainty_of(hardware), overlay)}
    if overlay.memory_margin_fraction is not None:
        update["memory_margin_fraction"] = overlay.memory_margin_fraction
    return changed.model_copy(update=update)


def constant_values(constants: Constants) -> tuple[dict[str, float], dict[str, object]]:
    """Return the factors, and the other values, that ``with_constants`` takes."""
    factors = {name: part.value for name in FACTORS if (part := getattr(constants, name)) is not None}
    names = (*TIMES, *SHARES, CONGESTION, *SWITCHES)
    others = {name: part.value for name in names if (part := getattr(constants, name)) is not None}
    return factors, others


def with_constants(
    hardware: HardwareSpec, factors: Mapping[str, float], others: Mapping[str, object]
) -> HardwareSpec:
    """Change constants of a description.

    Args:
        hardware: description to change.
        factors: factors to multiply in, by the names of ``FACTORS``.
        others: new values of software fields, of ``scale_out_hop_s``, ``kernel_latency_s`` or
            ``congestion_s_per_byte``.
    """
    software = {name: value for name, value in others.items() if name not in (HOP, KERNEL, CONGESTION)}
    dispatch = factors.get("dispatch_efficiency", 1.0)
    if dispatch != 1.0:
        software["dispatch_efficiency"] = hardware.software.dispatch_efficiency * dispatch
    scale = {name: factor for name, factor in factors.items() if factor != 1.0}
    update: dict[str, object] = {}
    if scale.keys() & _OF_ACCELERATOR or KERNEL in others:
        accelerator = _accelerator(hardware.accelerator, scale)
        latency_s = others.get(KERNEL, accelerator.kernel_latency_s)
        update["accelerator"] = accelerator.model_copy(update={KERNEL: latency_s})
    if "scale_up_efficiency" in scale:
        factor = scale["scale_up_efficiency"]
        tables = {name: scaled_bus_table(getattr(hardware.scale_up, name), factor) for name in COLLECTIVES}
        update["scale_up"] = hardware.scale_up.model_copy(update=tables)
    network = {CONGESTION: others[CONGESTION]} if CONGESTION in others else {}
    if "scale_out_efficiency" in scale:
        network["efficiency"] = _fraction(hardware.scale_out.efficiency * scale["scale_out_efficiency"])
    if network:
        update["scale_out"] = hardware.scale_out.model_copy(update=network)
    if software:
        update["software"] = hardware.software.model_copy(update=software)
    changed = hardware.model_copy(update=update) if update else hardware
    hop = others.get(HOP)
    return _with_hops(changed, hop) if isinstance(hop, float) else changed


def moved(hardware: HardwareSpec, sigmas: Mapping[str, float]) -> HardwareSpec:
    """Move constants of a description by a number of their standard deviations; positive is slower.

    ``sigmas`` maps names of ``UNCERTAIN`` to this number. Factors move by their logarithms, times and shares stay
    within their ranges. A network without congestion starts from a well-built one's to the slow side.
    """
    changed = with_constants(hardware, *moved_values(hardware, sigmas))
    return _with_longer_hops(changed, sigmas.get(HOP, 0.0) * uncertainty_of(hardware).scale_out_hop_s)


def moved_values(
    hardware: HardwareSpec, sigmas: Mapping[str, float]
) -> tuple[dict[str, float], dict[str, object]]:
    """Compute the factors, and the other values, that ``moved`` gives to ``with_constants``: all but hops."""
    sigma = uncertainty_of(hardware)
    factors = {name: math.exp(-sigmas[name] * getattr(sigma, name)) for name in FACTORS if name in sigmas}
    others: dict[str, object] = {
        name: max(constant_of(hardware, name) + sigmas[name] * getattr(sigma, name), 0.0)
        for name in TIMES
        if name in sigmas and name != HOP
    }
    for name in SHARES:
        if name in sigmas:
            share = constant_of(hardware, name) - sigmas[name] * getattr(sigma, name)
            others[name] = min(max(share, 0.0), 1.0)
    if CONGESTION in sigmas and sigma.congestion_s_per_byte > 0:
        start = constant_of(hardware, CONGESTION) or (DOUBTED_CONGESTION if sigmas[CONGESTION] > 0 else 0.0)
        others[CONGESTION] = start * math.exp(sigmas[CONGESTION] * sigma.congestion_s_per_byte)
    return factors, others


def constant_of(hardware: HardwareSpec, name: str) -> float:
    """Return the value of a constant of ``TIMES``, ``SHARES`` or ``CONGESTION`` in a description."""
    owners = {
        HOP: (hardware.scale_out, "hop_latency_s"),
        KERNEL: (hardware.accelerator, KERNEL),
        CONGESTION: (hardware.scale_out, CONGESTION),
    }
    owner, field = owners.get(name, (hardware.software, name))
    return float(getattr(owner, field))


def _with_hops(hardware: HardwareSpec, hop_s: float) -> HardwareSpec:
    """Set the latency of a hop between domains, which is also the minimum in rings and trees across domains."""
    up, out = hardware.scale_up, hardware.scale_out
    variants = tuple(
        variant.model_copy(
            update={
                "scale_up_hop_latency_s": max(variant.scale_up_hop_latency_s, hop_s),
                "scale_out_hop_latency_s": max(variant.scale_out_hop_latency_s, hop_s),
            }
        )
        for variant in out.variants
    )
    inside = up.model_copy(update={"hop_latency_s": max(up.hop_latency_s, hop_s)})
    across = out.model_copy(update={"hop_latency_s": hop_s, "variants": variants})
    return hardware.model_copy(update={"scale_up": inside, "scale_out": across})


def _with_longer_hops(hardware: HardwareSpec, seconds: float) -> HardwareSpec:
    """Add to the latency of every hop in rings and trees across domains."""
    if not seconds:
        return hardware
    up, out = hardware.scale_up, hardware.scale_out
    inside, across = "scale_up_hop_latency_s", "scale_out_hop_latency_s"
    variants = tuple(
        variant.model_copy(update={name: max(getattr(variant, name) + seconds, 0.0) for name in (inside, across)})
        for variant in out.variants
    )
    longer = {"hop_latency_s": max(out.hop_latency_s + seconds, 0.0), "variants": variants}
    changed = up.model_copy(update={"hop_latency_s": max(up.hop_latency_s + seconds, 0.0)})
    return hardware.model_copy(update={"scale_up": changed, "scale_out": out.model_copy(update=longer)})


def _accelerator(accelerator: Accelerator, scale: Mapping[str, float]) -> Accelerator:
    update: dict[str, object] = {}
    gemm, attention = scale.get("gemm_efficiency", 1.0), scale.get("attention_efficiency")
    for name, factor in (("bf16", gemm), ("fp8", gemm * scale.get("gemm_fp8_efficiency", 1.0))):
        engine = getattr(accelerator, name)
        if engine is not None and factor != 1.0:
            efficiency = _scaled(engine.gemm.efficiency, factor, LEAST_EFFICIENCY, MOST_EFFICIENCY)
            gemm_table = engine.gemm.model_copy(update={"efficiency": efficiency})
            update[name] = engine.model_copy(update={"gemm": gemm_table})
    if attention is not None:
        for name in CURVES:
            curve = getattr(accelerator, name)
            scaled = _scaled(curve.value, attention, LEAST_EFFICIENCY, MOST_EFFICIENCY)
            update[name] = curve.model_copy(update={"value": scaled})
    if "memory_efficiency" in scale:
        share = accelerator.memory_bandwidth_efficiency * scale["memory_efficiency"]
        update["memory_bandwidth_efficiency"] = _fraction(share)
    return accelerator.model_copy(update=update)


def _fraction(value: float) -> float:
    return min(max(value, LEAST_EFFICIENCY), 1.0)


def _scaled(values: Any, factor: float, least: float = 0.0, most: float = math.inf) -> Any:
    """Multiply the numbers of nested tuples, and clamp the products."""
    if isinstance(values, tuple):
        return tuple([_scaled(value, factor, least, most) for value in values])
    return min(max(values * factor, least), most)


def scaled_bus_table(table: BusTable, factor: float) -> BusTable:
    """Multiply all bandwidths of a table."""
    rows = _scaled(table.bus_bandwidth_bytes_per_s, factor)
    return table.model_copy(update={"bus_bandwidth_bytes_per_s": rows})


def _with_tables(hardware: HardwareSpec, overlay: Overlay) -> HardwareSpec:
    tables = overlay.tables
    buses = {name: table for name in COLLECTIVES if (table := getattr(tables, name)) is not None}
    if buses:
        hardware = hardware.model_copy(update={"scale_up": hardware.scale_up.model_copy(update=buses)})
    engines: dict[str, object] = {name: curve for name in CURVES if (curve := getattr(tables, name)) is not None}
    for precision, table in (("bf16", tables.gemm_bf16), ("fp8", tables.gemm_fp8)):
        if table is None:
            continue
        engine = getattr(hardware.accelerator, precision)
        if engine is None:
            raise InvalidInputError(
                f"The overlay {overlay.name!r} has a table for {precision}; {hardware.name} has no such engine.",
                "Expected tables of number formats that the hardware description has.",
                f"Remove the table, or add [accelerator.{precision}] to the hardware description.",
            )
        engines[precision] = engine.model_copy(update={"gemm": table})
    if not engines:
        return hardware
    return hardware.model_copy(update={"accelerator": hardware.accelerator.model_copy(update=engines)})


def uncertainty_of(hardware: HardwareSpec) -> Uncertainty:
    """Return the uncertainty of a description; that of the priors where it states none."""
    return PRIORS if hardware.uncertainty is None else hardware.uncertainty


def _uncertainty(before: Uncertainty, overlay: Overlay) -> Uncertainty:
    """Combine the uncertainties of base and overlay: a fitted constant has its own sigma, others keep theirs.

    The fit of a factor determines its product with the factors below it, so that their sigmas do not add. No
    constant becomes less certain than its prior. Beside fitted constants those of ``SHARED`` keep at most
    ``LEFT_SHARE`` of the prior's sigma, and what is not identified at most the sigma that the data left. Fitted
    constants are those of the cluster that was measured: no spread between clusters is left.
    """
    sigma = {name: getattr(before, name) for name in UNCERTAIN}
    parts = {name: part for name in UNCERTAIN if (part := getattr(overlay.constants, name)) is not None}
    fitted = any(part.identified for part in parts.values())
    if fitted:
        sigma |= {name: min(sigma[name], LEFT_SHARE * PRIOR_SIGMA[name]) for name in SHARED}
    for name, part in parts.items():
        one_sigma = part.one_sigma / (part.value if name in FACTORS else 1.0)
        if part.identified:
            sigma[name] = min(one_sigma, PRIOR_SIGMA[name])
        elif one_sigma > 0:
            sigma[name] = min(one_sigma, sigma[name])
    return Uncertainty(
        overlay=overlay.name,
        residual_fraction=overlay.provenance.residual_fraction or before.residual_fraction,
        sources_fraction=0.0 if fitted else before.sources_fraction,
        **sigma,
    )


def on_other_clusters(hardware: HardwareSpec) -> HardwareSpec:
    """Add the spread between clusters to the uncertainty of a description with a shipped stack."""
    wider = uncertainty_of(hardware).model_copy(update={"sources_fraction": SOURCES_FRACTION})
    return hardware.model_copy(update={"uncertainty": wider})
