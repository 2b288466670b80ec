"""Import of nanotron's YAML as a problem and a plan."""

from __future__ import annotations

from milpplan.errors import InvalidInputError
from milpplan.launchers.expressible import model_differences
from milpplan.launchers.import_request import ImportRequest, job_of
from milpplan.launchers.nanotron.rules import check_rules
from milpplan.launchers.nanotron.settings import FLASH, QUIET, known, model_of, plan_of
from milpplan.launchers.records import Imported
from milpplan.launchers.settings import Settings, admitted, check_priced, flat
from milpplan.launchers.shell.launch_text import load_yaml
from milpplan.problem.plan import Layout
from milpplan.problem.problem import Problem
from milpplan.problem.reading import shown


def imported(request: ImportRequest) -> Imported:
    """Read a configuration into a problem and a plan.

    Args:
        request.text: YAML.
        request.source: its name.
        request.hardware: the cluster.
        request.num_gpus: None, or the product of the degrees.
        request.model: its description, which must agree with the file's model and gives its name.
        request.vocab_size: None, or the file's; where the file has -1 (the data decide), the vocabulary.
        request.ignored: settings (section.name) whose effect on the cost the caller ignores.

    Raises:
        InvalidInputError: the file cannot be read, or has settings that change the cost and are not priced.
        IllegalPlanError: nanotron would refuse the configuration.
    """
    said = flat(load_yaml(request.text, request.source))
    if said.get("model.model_config.vocab_size") == -1 and request.vocab_size:
        said["model.model_config.vocab_size"] = request.vocab_size
    settings, left_out = admitted(said, known(), request.ignored, "nanotron", QUIET)
    built = model_of(settings, "imported" if request.model is None else request.model.name)
    if request.model is not None and model_differences(request.model, built):
        raise InvalidInputError(
            f"The settings build another model than {request.model.name}.",
            "Expected its sizes.",
            "Correct the file, or leave --model out.",
        )
    plan = plan_of(settings, built)
    layout = plan.layout
    _check_world(layout, request.num_gpus)
    _check_formats(settings, layout)
    tokens = settings.degree("tokens.sequence_length")
    check_rules(built, layout, tokens, "Correct the settings.")
    _check_degrees(layout)
    check_priced(settings, QUIET)
    problem = Problem(model=request.model or built, hardware=request.hardware, job=job_of(layout, tokens))
    return Imported(problem, plan, (), left_out, ())


def _check_world(layout: Layout, num_gpus: int | None) -> None:
    if num_gpus not in (None, layout.num_gpus):
        raise InvalidInputError(
            f"The degrees make {layout.num_gpus} processes, and {num_gpus} are given.",
            "Expected their product to be the number of processes (parallel/context.py:24).",
            "Correct the degrees, or leave --gpus out.",
        )


def _check_degrees(layout: Layout) -> None:
    """Refuse context and expert parallelism, because nanotron's are not priced."""
    for name, setting, what in (
        ("cp", "context_parallel_size", "its ring attention gathers keys and values"),
        ("ep", "expert_parallel_size", "its groups of experts overlap"),
    ):
        if getattr(layout, name) > 1:
            raise InvalidInputError(
                f"{setting} is {getattr(layout, name)}: {what}, which is not priced.",
                f"Expected {setting} 1.",
                "Use 1 to compare it as such a run.",
            )


def _check_formats(settings: Settings, layout: Layout) -> None:
    """Check for the number formats, kernels and optimizer that are priced.

    Raises:
        InvalidInputError: the configuration has others.
    """
    wanted = {
        "model.dtype": (None, "bfloat16"),
        "optimizer.accumulate_grad_in_fp32": (True,),
        "optimizer.optimizer_factory.name": ("adamW",),
        "model.model_config._attn_implementation": FLASH,
    }
    for name, values in wanted.items():
        if settings.get(name) not in values:
            raise InvalidInputError(
                f"{name} is {shown(settings.get(name))}.",
                f"Expected {' or '.join(str(value) for value in values if value is not None)}, which is priced.",
                "Change it to compare it as such a run.",
            )
    asynchronous = settings.values.get("parallelism.tp_linear_async_communication")
    if layout.tp == 1 or not asynchronous:
        settings.looked_at.add("parallelism.tp_linear_async_communication")
