"""Shipped models and hardware as tables, any description as text, and the checks of the installed solvers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from milpplan.errors import InvalidInputError
from milpplan.problem import (
    ModelSpec,
    hardware_names,
    load_hardware,
    load_model,
    model_names,
    preset_text,
    stack_names,
)
from milpplan.problem.catalog import file_keys, stack_provenance
from milpplan.reports.blocks import Block, Paragraph, Span, Table
from milpplan.simulation.layers import active_parameters, total_parameters
from milpplan.units import count_text, counted, gib_text, percent_text

if TYPE_CHECKING:
    from milpplan.optimize.milp.solver_self_test import SelfTestResult
    from milpplan.problem import HardwareSpec


def model_table() -> Table:
    """List every shipped model with its main dimensions."""
    rows = []
    for name in model_names():
        model = load_model(name)
        parameters = (count_text(total_parameters(model)), count_text(active_parameters(model)))
        sizes = (model.num_layers, model.hidden_size, model.default_sequence_length)
        rows.append((name, *parameters, *(f"{size:,}" for size in sizes)))
    columns = ("model", "parameters", "active", "layers", "hidden", "sequence")
    return Table("", columns, rows)


def hardware_table(scored_runs: Callable[[HardwareSpec], int]) -> Table:
    """List every shipped hardware description; ``scored_runs`` counts the runs on its architecture."""
    rows = []
    for name in hardware_names():
        hardware = load_hardware(name)
        accelerator = hardware.accelerator
        counts = (f"{hardware.gpus_per_node}", f"{hardware.scale_up.num_gpus}")
        fp8 = "yes" if accelerator.fp8 else "no"
        runs = f"{scored_runs(hardware) or 'none'}"
        rows.append((name, accelerator.name, gib_text(accelerator.memory_bytes), *counts, fp8, runs))
    columns = ("hardware", "accelerator", "memory", "a node", "fast domain", "fp8", "scored runs")
    return Table("", columns, rows)


def stack_table() -> Table:
    """List every shipped software stack: what its constants were fitted to, and their error."""
    rows = []
    for name in stack_names():
        fit = stack_provenance(name)
        assert fit is not None
        errors = (
            "-" if error is None else percent_text(error) for error in (fit.error_before, fit.error_left_out)
        )
        rows.append((name, fit.data.partition(":")[0], *errors))
    return Table("", ("hardware+stack", "fitted to", "error without", "left out"), rows)


def description(name: str, ignore: Collection[str] = ()) -> tuple[str, str]:
    """Describe a preset or a user's file.

    Args:
        name: A shipped name, or the path of a file.
        ignore: Keys of a config.json to leave out.

    Returns:
        A preset's TOML with its sources, or a file as JSON as milpplan reads it; and a remark, or an empty text.
    """
    shipped = name in (*model_names(), *hardware_names()) or not _is_file(Path(name))
    if shipped and not ignore:
        text = preset_text(name)
        spec = load_model(name) if name in model_names() else load_hardware(name)
    else:
        spec = _read(name, ignore)
        # Documents of answers take long to import, and tables of names do without.
        from milpplan.reports.documents.document import document_text

        text = document_text(spec)
    return text, model_text(spec) if isinstance(spec, ModelSpec) else ""


def model_text(model: ModelSpec) -> str:
    """Describe a model's number of parameters and the keys of its config that the description leaves out."""
    total, active = total_parameters(model), active_parameters(model)
    each = "" if active == total else f", {active:,} of them active ({count_text(active)})"
    published = model.num_nextn_predict_layers
    mtp = (
        f" Beside them: {counted(published, 'layer')} of multi-token prediction (--mtp-layers)."
        if published
        else ""
    )
    stored = f" Stored as {model.stored_weights}, trained in the job's precision." if model.stored_weights else ""
    left_out = f" Ignored, whatever it costs: {', '.join(model.ignored_keys)}." if model.ignored_keys else ""
    return f"{model.name}: {total:,} parameters ({count_text(total)}){each}.{mtp}{stored}{left_out}"


def _is_file(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _read(name: str, ignore: Collection[str]) -> ModelSpec | HardwareSpec:
    """Read a file as the kind of description that its keys indicate.

    Raises:
        InvalidInputError: the file cannot be read, or has keys of neither kind or of both.
    """
    from milpplan.problem import HardwareSpec

    keys = file_keys(name)
    of_model, of_hardware = {*ModelSpec.model_fields}, {"base", *HardwareSpec.model_fields}
    model = sorted(keys & {"model_type", "architectures", "text_config", *(of_model - of_hardware)})
    hardware = sorted(keys & (of_hardware - of_model))
    if len(model) == len(hardware):
        seen = f"keys of both: {', '.join(model)}, and {', '.join(hardware)}" if model else "keys of neither"
        raise InvalidInputError(
            f"{name} is neither a model nor hardware: it has {seen}.",
            "Expected a model (hidden_size, layers, ...; or model_type, of Hugging Face) or hardware "
            "(accelerator, scale_up, ...; or base, of an overlay).",
            "Start from an example: `milpplan show llama3-8b`, `milpplan show dgx-h100`.",
        )
    return load_model(name, ignore) if len(model) > len(hardware) else load_hardware(name)


def doctor_blocks(results: Sequence[SelfTestResult]) -> list[Block]:
    """Show a row for each check, with the consequence of every failure."""
    rows = []
    for result in results:
        verdict = Span("ok", "green") if result.passed else Span("FAILED", "bold red")
        if not result.answered:
            verdict = Span("not usable", "yellow")
        rows.append((result.name, verdict, result.seen))
    failures = [
        Paragraph(f"{result.name}: expected {result.expected}, got {result.seen}. {result.meaning}")
        for result in results
        if not result.passed
    ]
    return [Table("", ("check", "", "seen"), rows, words=(0, 1, 2)), *failures]
