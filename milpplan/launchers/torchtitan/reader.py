"""Import of torchtitan's configuration file as a problem and a plan."""

from __future__ import annotations

from typing import Any

from milpplan.errors import InvalidInputError
from milpplan.launchers.expressible import model_differences
from milpplan.launchers.import_request import ImportRequest, check_vocabulary, job_of
from milpplan.launchers.records import Imported
from milpplan.launchers.settings import Settings, admitted, check_priced, flat
from milpplan.launchers.torchtitan.flavors import Pair, flavors
from milpplan.launchers.torchtitan.recipe import recipe_settings
from milpplan.launchers.torchtitan.rules import check_rules
from milpplan.launchers.torchtitan.run import NEWEST, V022, V030, Run, plan_of_run
from milpplan.launchers.torchtitan.settings import QUIET, known, run_of, translated
from milpplan.problem.hardware import HardwareSpec
from milpplan.problem.model import ModelSpec
from milpplan.problem.problem import Problem
from milpplan.problem.reading import parse_toml, shown


def imported(request: ImportRequest) -> Imported:
    """Read a configuration into a problem and a plan.

    Args:
        request.text: TOML (up to 0.2.2), or Python (since), which is read and not run.
        request.source: its name; .py is Python.
        request.hardware: the cluster.
        request.num_gpus: processes, where data_parallel_shard_degree is -1; else they must be the product of the
        degrees. request.model: its description, which must agree with the flavor and gives its name.
        request.vocab_size: that of the flavor, or None. request.ignored: settings (section.name) whose effect on
        the cost the caller ignores.

    Raises:
        InvalidInputError: the file cannot be read, or has settings that change the cost and are not priced.
        IllegalPlanError: torchtitan would refuse the configuration.
    """
    values, version = _read(request.text, request.source)
    said, left_out = admitted(values, known(version), request.ignored, f"torchtitan {version}", QUIET)
    settings, notes = translated(said)
    flavor = _flavor(settings, request.source)
    spec = flavors()[flavor]
    _check_model(spec, flavor, request.model, request.vocab_size)
    run = run_of(settings, version, flavor, spec.has_experts, spec.num_layers, request.num_gpus)
    check_rules(run, "Correct the settings, or the number of GPUs (--gpus).")
    plan = plan_of_run(run)
    told = [*notes, *_looked_at(settings, version)]
    there = _software(run, request.hardware, told)
    check_priced(settings, QUIET)
    problem = Problem(model=request.model or spec, hardware=there, job=job_of(plan.layout, run.sequence_length))
    return Imported(problem, plan, (), left_out, tuple(told))


def _read(text: str, source: str) -> tuple[dict[str, Any], str]:
    """Read the settings and determine their dialect."""
    if source.lower().endswith(".py"):
        values = recipe_settings(text, source)
        tokens = any(name in known(NEWEST) and name not in known(V030) for name in values)
        return values, NEWEST if tokens else V030
    return flat(parse_toml(text, source)), V022


def _flavor(settings: Settings, source: str) -> Pair:
    # A class's defaults are not the model of this run.
    settings.looked_at |= {"model.name", "model.flavor"}
    name, flavor = settings.values.get("model.name"), settings.values.get("model.flavor")
    if (name, flavor) not in flavors():
        names = ", ".join(f"{name} {flavor}" for name, flavor in flavors())
        raise InvalidInputError(
            f"{source} has model.name {shown(name)} in flavor {shown(flavor)}, whose sizes are not known here.",
            f"Expected one of {names}.",
            "Plan it from its sizes instead: milpplan simulate with a model file.",
        )
    return str(name), str(flavor)


def _check_model(spec: ModelSpec, flavor: Pair, model: ModelSpec | None, vocab_size: int | None) -> None:
    if model is not None and model_differences(model, spec):
        raise InvalidInputError(
            f"--model {model.name} is not {flavor[0]} {flavor[1]}.",
            "Expected a description with the sizes of the flavor.",
            "Give another --model, or leave it out.",
        )
    check_vocabulary(vocab_size, spec, f"{flavor[0]} {flavor[1]}")


def _looked_at(settings: Settings, version: str) -> list[str]:
    """Check the number formats and kernels that are priced; note differences without effect.

    Raises:
        InvalidInputError: a format or an optimizer is not priced.
    """
    for name, wanted in (("dtype", "float32"), ("mixed_precision_param", "bfloat16")):
        text = settings.text(f"training.{name}")
        if text != wanted:
            raise InvalidInputError(
                f"training.{name} is {text}.",
                f"Expected {wanted}: weights in fp32, products in bf16, which is what is priced.",
                f"Use {wanted} to compare it as such a run.",
            )
    settings.text("training.mixed_precision_reduce")
    optimizer = settings.get("optimizer.name" if version == V022 else "optimizer")
    if optimizer not in ("Adam", "AdamW", "default_adamw", "OptimizersContainer.Config"):
        raise InvalidInputError(
            f"{'optimizer.name' if version == V022 else 'optimizer'} is {shown(optimizer)}.",
            "Expected AdamW, whose states and update are priced.",
            "Use AdamW to compare it as such a run.",
        )
    notes = []
    parts = settings.get("compile.components") or []
    if not settings.switch("compile.enable") or "model" not in parts:
        notes.append("Without torch.compile norms and activations are not fused; they are priced as fused.")
    if settings.get("loss") == "ChunkedLossWrapper.Config":
        notes.append("ChunkedLossWrapper keeps fewer logits than are counted.")
    return notes


def _software(run: Run, hardware: HardwareSpec, notes: list[str]) -> HardwareSpec:
    """Set the dispatcher of the hardware that the settings name."""
    if run.ep == 1 or hardware.software.deduplicated_dispatch == run.deduplicated:
        return hardware
    notes.append(f"software.deduplicated_dispatch = {str(run.deduplicated).lower()}, as the settings say.")
    software = hardware.software.model_copy(update={"deduplicated_dispatch": run.deduplicated})
    return hardware.model_copy(update={"software": software})
