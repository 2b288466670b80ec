"""Import of DeepSpeed's JSON as a problem and a plan."""

from __future__ import annotations

from typing import Any

from milpplan.errors import IllegalPlanError, InvalidInputError
from milpplan.launchers.deepspeed.settings import (
    QUIET,
    grad_dtype_of,
    kernel_of,
    known,
    layout_of,
    losses_of,
    plan_of,
    sharding_of,
)
from milpplan.launchers.expressible import model_differences
from milpplan.launchers.import_request import ImportRequest, check_gpus, check_vocabulary, job_of
from milpplan.launchers.records import Imported
from milpplan.launchers.settings import Settings, admitted, check_priced, flat, is_quiet
from milpplan.problem.huggingface.config import model_from_config
from milpplan.problem.model import ModelSpec
from milpplan.problem.problem import Problem
from milpplan.problem.reading import parse_json, shown

AUTO = "auto"
"""Value that transformers replaces at its start from its own arguments."""


def imported(request: ImportRequest) -> Imported:
    """Read a configuration into a problem and a plan.

    Args:
        request.text: JSON.
        request.source: its name.
        request.hardware: the cluster.
        request.num_gpus: processes; None: the file's, or the number that follows from its batch sizes.
        request.model: its description; needed where the file has none.
        request.vocab_size: None, because the model has it.
        request.ignored: settings (section.name) whose effect on the cost the caller ignores.

    Raises:
        InvalidInputError: the file cannot be read, or has settings that change the cost and are not priced.
        IllegalPlanError: DeepSpeed would refuse the configuration.
    """
    data = parse_json(request.text, request.source)
    settings, left_out = admitted(flat(data), known(), request.ignored, "DeepSpeed", QUIET)
    _check_filled_in(settings)
    _look_at_what_is_off(settings)
    spec = _model(data, settings, request.model, request.vocab_size, request.source)
    notes: list[str] = []
    length = settings.size("milpplan.sequence_length")
    whole = _own(settings, "recompute", False, notes)
    kernel = _own(settings, "attn_implementation", "sdpa", notes)
    world = request.num_gpus
    if settings.get("milpplan.world_size") is not None:
        world = settings.degree("milpplan.world_size")
        check_gpus(request.num_gpus, world, f"{request.source} (milpplan.world_size)")
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
    problem = Problem(model=spec, hardware=request.hardware, job=job)
    return Imported(problem, plan, (), left_out, tuple(notes))


def _look_at_what_is_off(settings: Settings) -> None:
    """Mark settings of disabled features as looked up: offloading without a device, and everything at ZeRO 0."""
    for part in ("offload_optimizer", "offload_param"):
        section = f"zero_optimization.{part}"
        if settings.values.get(f"{section}.device") == "none":
            settings.looked_at |= {name for name in settings.values if name.startswith(f"{section}.")}
    if settings.get("zero_optimization.stage") == 0:
        settings.looked_at |= {name for name in settings.values if name.startswith("zero_optimization.")}


def _check_filled_in(settings: Settings) -> None:
    left = [name for name, value in settings.values.items() if value == AUTO and not is_quiet(name, QUIET)]
    if left:
        raise InvalidInputError(
            f"{', '.join(left[:6])} {'are' if len(left) > 1 else 'is'} auto: only what starts the run knows.",
            "Expected values.",
            "Write them into the file.",
        )


def _model(
    data: dict[str, Any], settings: Settings, model: ModelSpec | None, vocab_size: int | None, source: str
) -> ModelSpec:
    own = data.get("milpplan")
    said = any(name.startswith("milpplan.model.") for name in settings.values)
    config = own.get("model") if said and isinstance(own, dict) else None
    if config is None and model is None:
        raise InvalidInputError(
            f"{source} does not say which model it trains.",
            "Expected the file of an export, or --model.",
            "Give --model NAME.",
        )
    built = model if config is None else model_from_config(config, "imported" if model is None else model.name)
    assert built is not None
    if model is not None and model_differences(model, built):
        raise InvalidInputError(
            f"The file trains another model than {model.name}.", "Expected its sizes.", "Leave --model out."
        )
    check_vocabulary(vocab_size, built, "the model")
    return model or built


def _own(settings: Settings, name: str, otherwise: Any, notes: list[str]) -> Any:
    """Return a setting of the training program; add a note with its assumed value where the file does not have
    it."""
    value = settings.get(f"milpplan.{name}")
    if value is None:
        notes.append(f"{name} is not in the file: {otherwise} is taken.")
        return otherwise
    return value


def _check_formats(settings: Settings) -> None:
    """Check for bf16 with AdamW.

    Raises:
        InvalidInputError: the number format or the optimizer differs.
    """
    if not settings.switch("bf16.enabled"):
        raise InvalidInputError(
            "bf16.enabled is not true.",
            "Expected bf16: other formats are not priced.",
            "Enable bf16 to compare it as such a run.",
        )
    optimizer = settings.get("optimizer.type")
    if optimizer is not None and optimizer.lower() not in ("adam", "adamw"):
        raise InvalidInputError(
            f"optimizer.type is {shown(optimizer)}.",
            "Expected Adam or AdamW, whose states and update are priced.",
            "Use AdamW to compare it as such a run.",
        )
