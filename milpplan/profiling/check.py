"""Comparison of measured layers with the cost model under the new overlay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from milpplan.profiling.overlay import Profile
from milpplan.profiling.prediction import LayersCost, layers_cost
from milpplan.profiling.records import MODES, Layers, LayersTime


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
