"""Profile as text and as JSON, with the measured layers beside the cost model's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from milpplan.calibration.tables import constants_table, errors_blocks, fit_document, note_blocks
from milpplan.profiling.overlay import LayersCost, Profile, layers_cost
from milpplan.profiling.records import MODES, Layers, LayersTime
from milpplan.reports.blocks import Block, Paragraph, Table
from milpplan.units import percent_text, printable, seconds_text, size_text
from milpplan.version import __version__


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
