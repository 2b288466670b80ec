"""From DeepSpeed's JSON to a problem and a plan: the reverse of the export."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from milpplan.errors import IllegalPlanError, InvalidInputError
from milpplan.launchers.deepspeed_settings import (
    QUIET,
    grad_dtype_of,
    kernel_of,
    known_settings,
    layout_of,
    losses_of,
    plan_of,
    sharding_of,
)
from milpplan.launchers.expressible import model_differences
from milpplan.launchers.imports import check_vocabulary, job_of
from milpplan.launchers.records import Imported
from milpplan.launchers.settings import Settings, check_priced, flat, without
from milpplan.specs.hardware import HardwareSpec
from milpplan.specs.huggingface import model_from_config
from milpplan.specs.model import ModelSpec
from milpplan.specs.problem import Problem
from milpplan.specs.reading import parse_json, shown

AUTO = "auto"
"""What transformers fills in when it starts; only its own arguments know it."""


def imported(
    text: str,
    source: str,
    hardware: HardwareSpec,
    num_gpus: int | None = None,
    model: ModelSpec | None = None,
    vocab_size: int | None = None,
    ignored: Collection[str] = (),
) -> Imported:
    """The plan of a configuration.

    Args:
        text: JSON.
        source: its name.
        hardware: the cluster.
        num_gpus: processes; None: the file's, or as many as its batch sizes make.
        model: its description; needed where the file has none.
        vocab_size: nothing: the model knows it.
        ignored: settings (section.name) whose effect on the cost the caller accepts not to see.

    Raises:
        InvalidInputError: the file cannot be read, or has settings that change the cost and are not priced.
        IllegalPlanError: DeepSpeed would refuse it.
    """
    data = parse_json(text, source)
    own = data.get("milpplan", {})
    if not isinstance(own, dict):
        raise InvalidInputError(f"{source}: milpplan is {shown(own)}.", "Expected a table.", "Correct it.")
    kept, left_out = without(_used(flat(data)), ignored)
    settings = Settings(kept, known_settings())
    _check_filled_in(kept)
    spec = _model(own, model, vocab_size, source)
    notes: list[str] = []
    length = _own(own, "sequence_length", int, spec.default_sequence_length, notes)
    whole = _own(own, "recompute", bool, False, notes)
    kernel = _own(own, "attn_implementation", str, "sdpa", notes)
    world = num_gpus if num_gpus is not None or "world_size" not in own else _own(own, "world_size", int, 0, notes)
    _check_formats(settings)
    grad_dtype = grad_dtype_of(settings)
    layout = layout_of(settings, world)
    stage, overlap = sharding_of(settings)
    losses = losses_of(stage, layout.dp, grad_dtype, overlap)
    if losses:
        raise IllegalPlanError(
            f"The run is not one that is priced: {'; '.join(losses)}.",
            "Expected a run that a plan can tell without loss.",
            "Change the settings to compare it as the nearest run that is.",
        )
    check_priced(settings, QUIET)
    job = job_of(layout, length, grad_dtype=grad_dtype, attention_kernel=kernel_of(kernel))
    plan = plan_of(layout, spec.num_layers, whole)
    problem = Problem(model=spec, hardware=hardware, job=job)
    return Imported(problem, plan, settings.unknown(QUIET), left_out, tuple(notes))


def _used(values: dict[str, Any]) -> dict[str, Any]:
    """Settings without those of offloading to no device."""
    off = [name.rpartition(".")[0] for name, value in values.items() if "offload" in name and value == "none"]
    return {name: value for name, value in values.items() if name.rpartition(".")[0] not in off}


def _check_filled_in(values: dict[str, Any]) -> None:
    left = [name for name, value in values.items() if value == AUTO and not QUIET.fullmatch(name)]
    if left:
        raise InvalidInputError(
            f"{', '.join(left[:6])} {'are' if len(left) > 1 else 'is'} auto: only what starts the run knows.",
            "Expected values.",
            "Write them into the file.",
        )


def _model(own: dict[str, Any], model: ModelSpec | None, vocab_size: int | None, source: str) -> ModelSpec:
    config = own.get("model")
    if config is None and model is None:
        raise InvalidInputError(
            f"{source} does not say which model it trains.",
            "Expected the file of an export, or --model.",
            "Give --model NAME.",
        )
    found = model if config is None else model_from_config(config, "imported" if model is None else model.name)
    assert found is not None
    if model is not None and model_differences(model, found):
        raise InvalidInputError(
            f"The file trains another model than {model.name}.", "Expected its sizes.", "Leave --model out."
        )
    check_vocabulary(vocab_size, found, "the model")
    return model or found


def _own(own: dict[str, Any], name: str, kind: type, otherwise: Any, notes: list[str]) -> Any:
    """What the training program decides; a note says what is taken where the file is not an export's."""
    if name not in own:
        notes.append(f"{name} is not in the file: {otherwise} is taken.")
        return otherwise
    if type(own[name]) is not kind:
        raise InvalidInputError(
            f"milpplan.{name} is {shown(own[name])}.", f"Expected {kind.__name__}.", f"Correct milpplan.{name}."
        )
    return own[name]


def _check_formats(settings: Settings) -> None:
    """bf16, with AdamW.

    Raises:
        InvalidInputError: another number format or optimizer.
    """
    if not settings.switch("bf16.enabled"):
        raise InvalidInputError(
            "bf16.enabled is not true.",
            "Expected bf16: other formats are not priced.",
            "Enable bf16 to compare it as such a run.",
        )
    optimizer = settings.get("optimizer.type")
    if optimizer is not None and str(optimizer).lower() not in ("adam", "adamw"):
        raise InvalidInputError(
            f"optimizer.type is {shown(optimizer)}.",
            "Expected Adam or AdamW, whose states and update are priced.",
            "Use AdamW to compare it as such a run.",
        )
