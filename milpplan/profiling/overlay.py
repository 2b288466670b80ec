"""Overlay from measurements, with the fits of ``milpplan.calibration``: tables of products and collectives, curves
of attention, and the constants that operators and layers identify."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from milpplan.calibration.bus_tables import PASSES, BusLog, fit_bus
from milpplan.calibration.efficiency_tables import Direction, Products, fit_curve, fit_gemm
from milpplan.calibration.fitting.fit import fit_predicted
from milpplan.calibration.fitting.parameters import Theta
from milpplan.calibration.fitting.records import Fit
from milpplan.calibration.sources import checked_words
from milpplan.errors import InvalidInputError
from milpplan.problem.catalog import load_hardware
from milpplan.problem.hardware import HardwareSpec
from milpplan.problem.overlay import CURVES, Overlay, Provenance, Tables, applied, with_constants
from milpplan.profiling.prediction import OperatorPredictor, attentions_of
from milpplan.profiling.records import Measurements
from milpplan.units import bandwidth_text, gib_text, percent_text

OF_MEMORY: Final = ("memory_efficiency", "kernel_latency_s")
OF_LAYERS: Final = (
    "gemm_efficiency",
    "memory_efficiency",
    "attention_efficiency",
    "layer_launch_s",
    "kernel_latency_s",
)
ALIKE: Final = 120
"""Number of leading characters by which reasons are merged; sizes and addresses follow later."""
OTHER_MEMORY: Final = 0.05
"""Relative difference between the device's memory and the description's above which it is reported."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Overlay on ``hardware``, the fit of its constants (None: no data to fit them to), and notes."""

    overlay: Overlay
    hardware: HardwareSpec
    measurements: Measurements
    fit: Fit | None
    told: tuple[str, ...]

    @property
    def profiled(self) -> HardwareSpec:
        """Apply the overlay to the description."""
        return applied(self.hardware, self.overlay)


def profiled(
    measurements: Measurements,
    hardware: str,
    name: str | None = None,
    out: Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> Profile:
    """Make the overlay of measurements on a description; ``out`` is its path.

    Raises:
        InvalidInputError: the hardware cannot be read, or the measurements do not apply to it.
    """
    spec = load_hardware(hardware)
    words = checked_words(hardware, out, name or default_name(hardware))
    notes: list[str] = list(measurements.environment.notes) + _differences(measurements, spec)
    fitted = _tables(measurements, _provisional(measurements, spec, progress), notes)
    empty = Provenance(data="", date="", method="", num_measurements=measurements.num_rows)
    before = Overlay(**words, provenance=empty, tables=fitted)
    result = _constants(measurements, spec, applied(spec, before), progress)
    if result is None and fitted == Tables():
        raise InvalidInputError(
            f"Nothing was measured that an overlay could say: {_failures(measurements)}.",
            "Expected products, memory-bound operators, attention, layers or collectives.",
            "See the reasons above, give more time with --time-limit, or another --device.",
        )
    notes += _copies(measurements) + _failed(measurements)
    return Profile(_overlay(before, result, measurements), spec, measurements, result, tuple(notes))


def default_name(hardware: str) -> str:
    """Make a name for the overlay."""
    return f"{Path(hardware).name.removesuffix('.toml')}-profile"[:200]


def _provisional(
    measurements: Measurements, spec: HardwareSpec, progress: Callable[[str], None] | None
) -> HardwareSpec:
    """Fit the memory's constants to memory-bound operators alone: they decide which products the matrix engine
    limits, and which part of a kernel's time is its latency."""
    if not measurements.traffic:
        return spec
    memory_fit = fit_predicted(OperatorPredictor.of(spec, measurements.traffic), OF_MEMORY, progress=progress)
    values = {constant.name: constant.value for constant in memory_fit.identified}
    return with_constants(
        spec,
        {name: value for name, value in values.items() if name == OF_MEMORY[0]},
        {name: value for name, value in values.items() if name != OF_MEMORY[0]},
    )


def _tables(measurements: Measurements, spec: HardwareSpec, notes: list[str]) -> Tables:
    """Fit replacements for the description's tables; data that cannot be used are reported."""
    replaced: dict[str, Any] = {}
    for products in _products(measurements):
        if products.precision == "fp8" and spec.accelerator.fp8 is None:
            notes.append("fp8 products are left out: the description has no such engine")
            continue
        try:
            gemm = fit_gemm([products], spec)
        except InvalidInputError as error:
            notes.append(f"{error.seen} The table stays as it is.")
            continue
        replaced |= {key: table for key, table in gemm.tables if table is not None}
        notes += gemm.told
        notes.append(
            f"{products.precision} table: mean error {percent_text(gemm.error_before)} before, "
            f"{percent_text(gemm.error_after)} after"
        )
    for direction in CURVES if measurements.attentions else ():
        way: Direction = "attention_forward" if direction == CURVES[0] else "attention_backward"
        curve = fit_curve(attentions_of(measurements.attentions, way, spec), spec)
        if curve is not None:
            replaced[direction] = curve.curve
            notes.append(
                f"{direction}: {curve.num_rows} kernels, mean error {percent_text(curve.error_before)} before, "
                f"{percent_text(curve.error_after)} after"
            )
    if measurements.collectives:
        try:
            bus = fit_bus(_bus_logs(measurements), spec)
        except InvalidInputError as error:
            notes.append(f"{error.seen} Collectives stay as they are.")
        else:
            replaced |= {key: table for key, table in bus.tables if table is not None}
            notes += bus.told
    return Tables(**replaced)


def _products(measurements: Measurements) -> list[Products]:
    parts = []
    for precision in ("bf16", "fp8"):
        rows = [product for product in measurements.products if product.shape.precision == precision]
        if rows:
            columns = [[getattr(product.shape, axis) for product in rows] for axis in ("m", "n", "k")]
            columns.append([product.time.median_s for product in rows])
            m, n, k, time_s = (np.array(column, dtype=np.float64) for column in columns)
            parts.append(Products("fp8" if precision == "fp8" else "bf16", m, n, k, time_s))
    return parts


def _bus_logs(measurements: Measurements) -> list[BusLog]:
    """Convert measured collectives to the form of nccl-tests."""
    logs: dict[tuple[str, int], BusLog] = {}
    for row in sorted(measurements.collectives, key=lambda row: row.message_bytes):
        log = logs.setdefault((row.operation, row.num_ranks), BusLog(row.operation, row.num_ranks))
        factor = PASSES[row.operation] * (row.num_ranks - 1) / row.num_ranks
        log.rates[row.message_bytes] = factor * row.message_bytes / row.time.median_s
    return list(logs.values())


def _constants(
    measurements: Measurements, spec: HardwareSpec, base: HardwareSpec, progress: Callable[[str], None] | None
) -> Fit | None:
    """Fit the constants of operators and layers, on the description with the new tables.

    The errors before are those of the original description. Layers of one shape are left out together.
    """
    rows = OperatorPredictor.of(base, measurements.traffic, measurements.attentions, measurements.layers)
    if not rows.ids:
        return None
    groups = [name.split(", recompute")[0] for name in rows.ids]
    # No hops: launches have their own starts, and the kinks of rooflines are in the tables.
    result = fit_predicted(rows, OF_LAYERS, groups, progress=progress, hops=False)
    return replace(result, before_s=rows.on(spec).times_s(Theta()))


def _overlay(before: Overlay, result: Fit | None, measurements: Measurements) -> Overlay:
    """Add the constants and the sources of the data to the overlay."""
    data, date = _data(measurements), measurements.environment.date
    method = (
        "tables of products and collectives as `milpplan calibrate` fits them, attention curves in the same way; "
        "medians of repeated kernels. Errors are those of operators and layers, forward and backward apart. "
    )
    if result is None:
        update: dict[str, Any] = {"data": data, "date": date, "method": method.strip()}
        return before.model_copy(update={"provenance": before.provenance.model_copy(update=update)})
    fitted = result.overlay(before.base, before.name, data, date)
    update = {
        "method": f"{method}Constants: {fitted.provenance.method}",
        "num_measurements": measurements.num_rows,
    }
    return fitted.model_copy(
        update={"tables": before.tables, "provenance": fitted.provenance.model_copy(update=update)}
    )


def _data(measurements: Measurements) -> str:
    """Describe the measured device in a line."""
    where = measurements.environment
    versions = ", ".join(f"{name} {version}" for name, version in where.libraries.items())
    cut = f"; stopped early ({measurements.stopped})" if measurements.stopped else ""
    return f"milpplan profile on {where.num_devices} x {where.device_name}, driver {where.driver}, {versions}{cut}"


def _differences(measurements: Measurements, spec: HardwareSpec) -> list[str]:
    """List the differences between the device and the description."""
    where = measurements.environment
    if where.device == "cpu":
        return ["measured on the CPU, to try out: these constants say nothing about an accelerator"]
    described = spec.accelerator.memory_bytes
    if abs(where.memory_bytes / described - 1.0) <= OTHER_MEMORY:
        return []
    return [
        f"{where.device_name} has {gib_text(where.memory_bytes)}, {spec.accelerator.name} of {spec.name} "
        f"{gib_text(described)}: is --hardware the right description?"
    ]


def _copies(measurements: Measurements) -> list[str]:
    """Describe the largest copies, for which descriptions have no field."""
    ascending = sorted(measurements.copies, key=lambda copy_time: copy_time.shape.num_bytes)
    rates = {
        copy_time.shape.direction: copy_time.shape.num_bytes / copy_time.time.median_s for copy_time in ascending
    }
    return [
        f"copy {way.replace('_', ' ')}: {bandwidth_text(rate)} (kept in the raw measurements only)"
        for way, rate in rates.items()
    ]


def _failed(measurements: Measurements) -> list[str]:
    """List the measurements that failed, grouped by reason."""
    by_reason: dict[str, list[str]] = {}
    for failure in measurements.failures:
        by_reason.setdefault(failure.reason[:ALIKE], []).append(failure.what)
    return [
        f"not measured: {names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''} ({reason})"
        for reason, names in by_reason.items()
    ]


def _failures(measurements: Measurements) -> str:
    reasons = "; ".join(f"{failure.what}: {failure.reason}" for failure in measurements.failures[:3])
    return reasons or measurements.stopped or "there is no measurement"
