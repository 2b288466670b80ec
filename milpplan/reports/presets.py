"""The shipped models and hardware as tables, and any description as text."""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.table import Table

from milpplan.costs.parameters import active_parameters, total_parameters
from milpplan.errors import InvalidInputError
from milpplan.presets.catalog import hardware_names, load_hardware, load_model, model_names, preset_text
from milpplan.reports.document import document_text
from milpplan.specs.hardware import HardwareSpec
from milpplan.specs.model import ModelSpec
from milpplan.specs.reading import read_text
from milpplan.units import count_text, gib_text


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=True)
    return table


def model_table() -> Table:
    """Every shipped model with its main dimensions."""
    table = _table("model", "parameters", "active", "layers", "hidden", "sequence")
    for name in model_names():
        model = load_model(name)
        table.add_row(
            name,
            count_text(total_parameters(model)),
            count_text(active_parameters(model)),
            f"{model.num_layers:,}",
            f"{model.hidden_size:,}",
            f"{model.default_sequence_length:,}",
        )
    return table


def hardware_table() -> Table:
    """Every shipped hardware description."""
    table = _table("hardware", "accelerator", "memory", "a node", "fast domain", "fp8")
    for name in hardware_names():
        hardware = load_hardware(name)
        accelerator = hardware.accelerator
        table.add_row(
            name,
            accelerator.name,
            gib_text(accelerator.memory_bytes),
            f"{hardware.gpus_per_node}",
            f"{hardware.scale_up.num_gpus}",
            "yes" if accelerator.fp8 else "no",
        )
    return table


def description(name: str) -> str:
    """A preset's TOML with its sources; a user's file as JSON, as milpplan understands it."""
    path = Path(name)
    if name in (*model_names(), *hardware_names()) or not _is_file(path):
        return preset_text(name)
    return document_text(_read(name))


def _is_file(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _read(name: str) -> ModelSpec | HardwareSpec:
    """A hardware description has an accelerator; everything else is read as a model."""
    try:
        return load_model(name)
    except InvalidInputError as error:
        text = read_text(Path(name))
        if "accelerator" not in text and "base" not in text:
            raise error
    return load_hardware(name)
