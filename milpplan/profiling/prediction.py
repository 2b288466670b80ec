"""Predictions of measurements by the cost model, for the fit and the check of an overlay."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from milpplan.calibration.efficiency_tables import Attentions, Direction
from milpplan.calibration.fitting.parameters import Theta
from milpplan.problem.hardware import HardwareSpec
from milpplan.problem.plan import Layout
from milpplan.problem.problem import Problem
from milpplan.profiling.measuring import layers_words, words_of
from milpplan.profiling.records import Attention, AttentionTime, Layers, LayersTime, Mode, TrafficTime
from milpplan.simulation.layers.activations import layer_activations
from milpplan.simulation.layers.kernels import (
    attention_backward_s,
    attention_forward_s,
    average_keys,
    flash_attention_flops,
    memory_bound_s,
)
from milpplan.simulation.layers.layer_time import layer_seconds
from milpplan.simulation.layers.terms import EXPOSED, Phase
from milpplan.simulation.layout_columns import LayoutColumns

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
    """Operators and layers as a ``milpplan.calibration.fitting.parameters.Predictor``."""

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
