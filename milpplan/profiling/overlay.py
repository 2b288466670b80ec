"""Overlay from measurements, with the fits of ``milpplan.calibration``: tables of products and collectives, curves
of attention, and the constants that operators and layers identify.

A profile is printed as text or JSON, with the measured layers beside the cost model's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from milpplan.calibration import PASSES, fit_bus, fit_gemm
from milpplan.calibration.bus_tables import BusLog
from milpplan.calibration.calibration_tables import constants_table, errors_blocks, fit_document, note_blocks
from milpplan.calibration.efficiency_tables import Attentions, Direction, Products, fit_curve
from milpplan.calibration.fitting import Fit, Theta
from milpplan.calibration.fitting.fit import fit_predicted
from milpplan.calibration.sources import checked_words
from milpplan.errors import InvalidInputError
from milpplan.problem import (
    HardwareSpec,
    Layout,
    Overlay,
    Problem,
    Provenance,
    Tables,
    applied,
    load_hardware,
    with_constants,
)
from milpplan.problem.overlay import CURVES
from milpplan.profiling.measurement_order import layers_words, words_of
from milpplan.profiling.records import (
    MODES,
    Attention,
    AttentionTime,
    Layers,
    LayersTime,
    Measurements,
    Mode,
    TrafficTime,
)
from milpplan.reports.blocks import Block, Paragraph, Table
from milpplan.simulation import LayoutColumns
from milpplan.simulation.layers import (
    EXPOSED,
    Phase,
    attention_backward_s,
    attention_forward_s,
    average_keys,
    layer_activations,
    layer_seconds,
    memory_bound_s,
)
from milpplan.simulation.layers.kernels import flash_attention_flops
from milpplan.units import bandwidth_text, gib_text, percent_text, printable, seconds_text, size_text
from milpplan.version import __version__

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
REPLAY: dict[Mode, Phase] = {"selective": Phase.SELECTIVE, "full": Phase.FULL}


@dataclass(frozen=True, slots=True)
class LayersCost:
    """Predicted cost of layers: seconds forward and backward, bytes kept between the two, and peak bytes."""

    forward_s: float
    backward_s: float
    kept_bytes: float
    peak_bytes: float


def layers_cost(shape: Layers, hardware: HardwareSpec) -> LayersCost:
    """Predict times and bytes of measured layers, without weights, gradients of weights and the output."""
    problem, columns = shape.problem(hardware), _columns(shape)
    bytes_of = layer_activations(problem, problem.model.kinds[0], columns)
    dropped = {"none": 0.0, "selective": bytes_of.dropped_selective[0], "full": bytes_of.dropped_full[0]}
    kept = shape.num_layers * (bytes_of.kept[0] - dropped[shape.recompute])
    forward_s, backward_s = _layers_s(shape, _phases(problem, columns))
    peak = kept + bytes_of.workspace[0] + dropped[shape.recompute]
    return LayersCost(forward_s, backward_s, float(kept), float(peak))


def _columns(shape: Layers) -> LayoutColumns:
    layout = Layout(micro_batch_size=shape.micro_batch_size, global_batch_size=shape.micro_batch_size)
    return LayoutColumns.of([layout])


def _phases(problem: Problem, columns: LayoutColumns) -> FloatArray:
    """Predict the seconds of a layer by phase."""
    seconds = layer_seconds(problem, problem.model.kinds[0], columns)
    return np.asarray(seconds[EXPOSED].sum(axis=0)[:, 0])


def _layers_s(shape: Layers, phases: FloatArray) -> tuple[float, float]:
    """Predict forward and backward of all layers."""
    replay = phases[REPLAY[shape.recompute]] if shape.recompute in REPLAY else 0.0
    forward_s, backward_s = phases[Phase.FORWARD], phases[Phase.BACKWARD] + replay
    return float(shape.num_layers * forward_s), float(shape.num_layers * backward_s)


def attention_flops(shape: Attention, hardware: HardwareSpec) -> tuple[float, float]:
    """Count FLOPs of a measured attention forward and backward, including the last tiles."""
    length = shape.sequence_length
    tokens, width = shape.micro_batch_size * length, 2 * shape.head_dim
    keys, tiles = average_keys(length, None), (1.0, float(length))
    flops = flash_attention_flops(hardware.accelerator, tokens, keys, shape.num_heads, width, tiles)
    return float(flops[0]), float(flops[1])


def attentions_of(rows: Sequence[AttentionTime], direction: Direction, hardware: HardwareSpec) -> Attentions:
    """Convert measured attention to the input of the curve fit."""
    forward = direction == "attention_forward"
    flops = [attention_flops(row.shape, hardware)[0 if forward else 1] for row in rows]
    times = [(row.forward if forward else row.backward).median_s for row in rows]
    lengths = [row.shape.sequence_length for row in rows]
    return Attentions(direction, *(np.array(column, dtype=np.float64) for column in (lengths, flops, times)))


def _attention_s(shape: Attention, hardware: HardwareSpec) -> tuple[float, float]:
    flops, rate = attention_flops(shape, hardware), hardware.software.attention_efficiency
    forward = attention_forward_s(hardware.accelerator, flops[0] / rate, shape.sequence_length)
    backward = attention_backward_s(hardware.accelerator, flops[1] / rate, shape.sequence_length)
    return float(forward), float(backward)


@dataclass(frozen=True, slots=True)
class _Row:
    """Measurements timed together, and their prediction on a description."""

    names: tuple[str, ...]
    measured_s: tuple[float, ...]
    predict: Callable[[HardwareSpec], tuple[float, ...]]


class OperatorPredictor:
    """Operators and layers as a ``milpplan.calibration.fitting.fitted_constants.Predictor``."""

    def __init__(self, rows: Sequence[_Row], base: HardwareSpec, chosen: IntArray | None = None) -> None:
        self._rows, self._base = tuple(rows), base
        names = [name for row in rows for name in row.names]
        self._chosen = np.arange(len(names)) if chosen is None else chosen
        self._names = tuple(names[index] for index in self._chosen)
        measured = [time for row in rows for time in row.measured_s]
        self._measured: FloatArray = np.array(measured, dtype=np.float64)[self._chosen]
        self._known: dict[Theta, FloatArray] = {}

    @staticmethod
    def of(
        base: HardwareSpec,
        traffic: Sequence[TrafficTime] = (),
        attentions: Sequence[AttentionTime] = (),
        layers: Sequence[LayersTime] = (),
    ) -> OperatorPredictor:
        """Make the predictor of some measurements."""
        rows = [_traffic_row(time) for time in traffic]
        rows += [_attention_row(attention) for attention in attentions]
        rows += _layers_rows(layers)
        return OperatorPredictor(rows, base)

    @property
    def ids(self) -> tuple[str, ...]:
        """Names of the measurements."""
        return self._names

    @property
    def base(self) -> HardwareSpec:
        """Description that priors are taken from."""
        return self._base

    @property
    def measured_s(self) -> FloatArray:
        """Median times in seconds."""
        return self._measured

    def on(self, base: HardwareSpec) -> OperatorPredictor:
        """Replace the description."""
        return OperatorPredictor(self._rows, base, self._chosen)

    def part(self, rows: IntArray) -> OperatorPredictor:
        """Select measurements by row."""
        return OperatorPredictor(self._rows, self._base, self._chosen[rows])

    def times_s(self, theta: Theta) -> FloatArray:
        """Predict seconds."""
        if theta not in self._known:
            hardware = theta.on(self._base)
            wanted = set(self._chosen.tolist())
            every: list[float] = []
            for row in self._rows:
                places = range(len(every), len(every) + len(row.names))
                every += row.predict(hardware) if wanted.intersection(places) else [math.nan] * len(places)
            self._known[theta] = np.array(every, dtype=np.float64)[self._chosen]
        return self._known[theta]


def _traffic_row(traffic: TrafficTime) -> _Row:
    def predict(hardware: HardwareSpec) -> tuple[float, ...]:
        return (float(memory_bound_s(hardware.accelerator, traffic.shape.num_bytes)),)

    return _Row((words_of(traffic.shape),), (traffic.time.median_s,), predict)


def _attention_row(attention: AttentionTime) -> _Row:
    def predict(hardware: HardwareSpec) -> tuple[float, ...]:
        return _attention_s(attention.shape, hardware)

    name = words_of(attention.shape)
    names = (f"{name}, forward", f"{name}, backward")
    return _Row(names, (attention.forward.median_s, attention.backward.median_s), predict)


def _layers_rows(layers: Sequence[LayersTime]) -> list[_Row]:
    """Make a row for layers that differ only in their recomputation, which the model prices together."""
    groups: dict[Layers, list[LayersTime]] = {}
    for measured in layers:
        groups.setdefault(measured.shape.model_copy(update={"recompute": "none"}), []).append(measured)
    return [_layers_row(shape, group) for shape, group in groups.items()]


def _layers_row(shape: Layers, group: Sequence[LayersTime]) -> _Row:
    columns = _columns(shape)

    def predict(hardware: HardwareSpec) -> tuple[float, ...]:
        phases = _phases(shape.problem(hardware), columns)
        return tuple(time for measured in group for time in _layers_s(measured.shape, phases))

    words = [layers_words(measured.shape) for measured in group]
    names = tuple(f"{name}, {way}" for name in words for way in ("forward", "backward"))
    measured = tuple(time.median_s for measured in group for time in (measured.forward, measured.backward))
    return _Row(names, measured, predict)


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
    words = checked_words(hardware, out, name or f"{Path(hardware).name.removesuffix('.toml')}-profile"[:200])
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


@dataclass(frozen=True, slots=True)
class LayersCheck:
    """Measured and predicted layers: seconds of all layers together, bytes that they keep, and their peak."""

    shape: Layers
    measured: LayersTime
    predicted: LayersCost

    @property
    def forward_error(self) -> float:
        """Predicted over measured, minus 1."""
        return self.predicted.forward_s / self.measured.forward.median_s - 1.0

    @property
    def backward_error(self) -> float:
        """Predicted over measured, minus 1."""
        return self.predicted.backward_s / self.measured.backward.median_s - 1.0

    @property
    def memory(self) -> tuple[str, int, float]:
        """Compared kind of memory (peak, else kept), with measured and predicted bytes."""
        if self.measured.peak_bytes is not None:
            return "peak", self.measured.peak_bytes, self.predicted.peak_bytes
        return "kept", self.measured.kept_bytes, self.predicted.kept_bytes

    @property
    def memory_error(self) -> float:
        """Predicted over measured, minus 1."""
        _, measured, predicted = self.memory
        return predicted / max(measured, 1) - 1.0


def checked(profile: Profile) -> Iterator[LayersCheck]:
    """Iterate over measurements of layers, by width, tokens and recomputation."""
    hardware = profile.profiled
    for layers in sorted(profile.measurements.layers, key=lambda layers: _place(layers.shape)):
        yield LayersCheck(layers.shape, layers, layers_cost(layers.shape, hardware))


def _place(shape: Layers) -> tuple[int, ...]:
    tokens = shape.micro_batch_size * shape.sequence_length
    return shape.hidden_size, shape.sequence_length, tokens, MODES.index(shape.recompute)


MAX_TOLD = 24


def profile_blocks(profile: Profile) -> list[Block]:
    """Show constants, the layers predicted and measured, and notes."""
    overlay = profile.overlay
    blocks: list[Block] = [
        Paragraph(f"{printable(overlay.name)} on {printable(overlay.base)}", "bold"),
        Paragraph(printable(overlay.provenance.data)),
        Paragraph(_replaced(profile)),
    ]
    if profile.fit is not None:
        errors = errors_blocks(profile.fit, "operators and layers", "shapes")
        blocks += [Paragraph(), constants_table(profile.fit), *errors]
    checks = list(checked(profile))
    if checks:
        title = "Layers: what was measured, and the errors of the model under this overlay"
        blocks += [Paragraph(), Paragraph(title, "bold"), _layers(checks), Paragraph(_means(checks))]
    return [*blocks, Paragraph(), *note_blocks(profile.told, MAX_TOLD)]


def _replaced(profile: Profile) -> str:
    names = [name for name, table in profile.overlay.tables if table is not None]
    return f"tables: {', '.join(names) or 'none'} ({profile.measurements.num_rows:,} measurements)"


def _layers(checks: list[LayersCheck]) -> Table:
    rows = [
        (
            f"{check.shape.hidden_size}",
            f"{check.shape.micro_batch_size * check.shape.sequence_length}",
            f"{check.shape.num_layers}",
            check.shape.recompute,
            seconds_text(check.measured.forward.median_s),
            _error(check.forward_error),
            seconds_text(check.measured.backward.median_s),
            _error(check.backward_error),
            size_text(check.memory[1]),
            _error(check.memory_error),
        )
        for check in checks
    ]
    errors = ("forward", "error", "backward", "error", checks[0].memory[0], "error")
    return Table("", ("width", "tokens", "layers", "recompute", *errors), rows, words=(3,))


def _error(value: float) -> str:
    """Write a relative error with its sign."""
    return f"{'+' if value >= 0 else '-'}{percent_text(abs(value))}"


def _means(checks: list[LayersCheck]) -> str:
    """Write mean absolute errors."""
    columns = (
        ("forward", [abs(check.forward_error) for check in checks]),
        ("backward", [abs(check.backward_error) for check in checks]),
        (f"{checks[0].memory[0]} memory", [abs(check.memory_error) for check in checks]),
    )
    words = ", ".join(f"{name} {percent_text(sum(errors) / len(errors))}" for name, errors in columns)
    return f"mean absolute error: {words}; error is predicted over measured, minus 1"


def document_text(profile: Profile) -> str:
    """Write the JSON document, with a final newline."""
    document: dict[str, Any] = {
        "schema_version": 1,
        "milpplan_version": __version__,
        "kind": "profile",
        "environment": profile.measurements.environment.model_dump(mode="json"),
        "stopped": profile.measurements.stopped,
        "overlay": profile.overlay.model_dump(mode="json"),
        "told": list(profile.told),
        "fit": None if profile.fit is None else fit_document(profile.fit),
        "layers": [_layers_document(check) for check in checked(profile)],
        "failures": [failure.model_dump(mode="json") for failure in profile.measurements.failures],
    }
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def _layers_document(check: LayersCheck) -> dict[str, Any]:
    return {
        **check.shape.model_dump(mode="json"),
        "forward_s": {"measured": check.measured.forward.median_s, "predicted": check.predicted.forward_s},
        "backward_s": {"measured": check.measured.backward.median_s, "predicted": check.predicted.backward_s},
        "kept_bytes": {"measured": check.measured.kept_bytes, "predicted": check.predicted.kept_bytes},
        "peak_bytes": {"measured": check.measured.peak_bytes, "predicted": check.predicted.peak_bytes},
    }
