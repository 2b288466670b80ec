"""Launcher NeMo AutoModel: the YAML of its recipe, and scripts that run it on every node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from milpplan.launchers.automodel.run import settings_of
from milpplan.launchers.capabilities import AUTOMODEL
from milpplan.launchers.expressible import (
    field_refusals,
    format_refusals,
    job_refusals,
    recompute_refusals,
    refuse,
    rule_refusals,
    title_of,
    whole_nodes,
)
from milpplan.launchers.records import ConfigLaunch, Refusal
from milpplan.launchers.scripts import header, slurm_script, torchrun_script
from milpplan.problem.plan import Plan
from milpplan.problem.problem import Problem

CONFIG, SCRIPT, BATCH_SCRIPT = "automodel.yaml", "automodel.sh", "automodel.sbatch"
FIXED: Mapping[str, Any] = {
    "recipe": "TrainFinetuneRecipeForNextTokenPrediction",
    "step_scheduler.max_steps": 100,
    "dist_env.backend": "nccl",
    "dist_env.timeout_minutes": 60,
    "model._target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_config",
    "model.torch_dtype": "float32",
    "loss_fn._target_": "nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy",
    "optimizer._target_": "torch.optim.AdamW",
    "optimizer.lr": 1.0e-4,
    "optimizer.weight_decay": 0.1,
    "dataset._target_": "nemo_automodel.components.datasets.llm.mock_iterable_dataset.MockIterableDataset",
    "dataloader._target_": "torchdata.stateful_dataloader.StatefulDataLoader",
}
"""Settings that a run needs and a plan does not decide; the run uses mock data."""


def problem_refusals(problem: Problem) -> list[Refusal]:
    """List the properties of a problem that no plan for AutoModel supports."""
    return job_refusals(problem) + format_refusals(
        problem,
        products="its mp_policy computes in bf16",
        gradients="its mp_policy reduces them in fp32",
        attention="its models take a fused one",
    )


def check_problem(problem: Problem, version: str) -> None:
    """Refuse a problem for which AutoModel can run no plan.

    Raises:
        IllegalPlanError: gives all reasons.
    """
    refuse(AUTOMODEL.name, problem_refusals(problem))


def exported(problem: Problem, plan: Plan, version: str) -> ConfigLaunch:
    """Turn a plan into a launch.

    Raises:
        IllegalPlanError: AutoModel cannot express the plan or would refuse it; gives all reasons.
    """
    layout = plan.layout
    experts = problem.model.has_experts
    fields = field_refusals(AUTOMODEL, layout, num_replicas=layout.expert_dp if experts else 1)
    rules = rule_refusals(AUTOMODEL, problem, layout)
    refuse(AUTOMODEL.name, [*problem_refusals(problem), *recompute_refusals(plan), *fields, *rules])
    num_nodes, per_node, _ = whole_nodes(problem, layout)
    notes = ["MODEL is a directory or name of Transformers with the sizes of the plan's model."]
    if layout.zero_stage == 2:
        notes.append("ZeRO 2 is reshard_after_forward false: weights stay gathered until the backward.")
    if layout.pp > 1:
        notes.append(
            "Under the pipeline weights stay gathered and gradients whole until all micro-batches have run; they "
            "are priced as ZeRO 1."
        )
        notes.append("The modules of stages have the names of Transformers' decoders (model.layers.N).")
    if experts:
        notes.append("Which kernel sends tokens to experts is model.backend.dispatcher: it is not part of a plan.")
    return ConfigLaunch(
        target=AUTOMODEL.name,
        version=version,
        title=title_of(problem, plan),
        num_nodes=num_nodes,
        gpus_per_node=per_node,
        environment={},
        settings=settings_of(plan, problem.model, problem.job.sequence_length),
        notes=tuple(notes),
    )


def files_of(launch: ConfigLaunch, version: str) -> dict[str, str]:
    """Write the launch as files by name; the first holds the plan. ``version`` is milpplan's."""
    program = ('-m nemo_automodel.cli.app "${CONFIG:-' + CONFIG + '}"', '--model.config="${MODEL:-.}"')
    return {
        CONFIG: _yaml(launch, version),
        SCRIPT: torchrun_script(launch, version, program),
        BATCH_SCRIPT: slurm_script(launch, version, SCRIPT),
    }


def _yaml(launch: ConfigLaunch, version: str) -> str:
    table: dict[str, Any] = {}
    for name, value in [*FIXED.items(), *launch.settings.items()]:
        *sections, last = name.split(".")
        node = table
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = value
    return "\n".join([*header(launch, version), *_lines(table, "")]) + "\n"


def _lines(table: Mapping[str, Any], indent: str) -> list[str]:
    lines: list[str] = []
    for name, value in table.items():
        if isinstance(value, Mapping):
            lines += [f"{indent}{name}:", *_lines(value, indent + "  ")]
        elif isinstance(value, list):
            lines += [f"{indent}{name}:", *(f"{indent}  - [{', '.join(part)}]" for part in value)]
        else:
            lines.append(f"{indent}{name}: {str(value).lower() if isinstance(value, bool) else value}")
    return lines
