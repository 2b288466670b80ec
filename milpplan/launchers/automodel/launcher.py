"""Launcher NeMo AutoModel: the YAML of its recipe, and scripts that run it on every node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from milpplan.launchers.automodel.reader import imported
from milpplan.launchers.automodel.run import AUTOMODEL, automodel_refusals, settings_of
from milpplan.launchers.expressible import (
    check_replicas,
    config_launch,
    field_refusals,
    recompute_refusals,
    refuse,
    rule_refusals,
)
from milpplan.launchers.import_request import ImportRequest
from milpplan.launchers.records import ConfigLaunch, Imported
from milpplan.launchers.scripts import header, slurm_script, torchrun_script
from milpplan.launchers.settings import nested
from milpplan.problem.plan import Layout, Plan
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


class AutoModel:
    """Launcher NeMo AutoModel: recipes in YAML."""

    capability = AUTOMODEL

    def check(self, problem: Problem, version: str) -> None:
        """Refuse a problem for which AutoModel can run no plan.

        Raises:
            IllegalPlanError: gives all reasons.
        """
        refuse(AUTOMODEL.name, automodel_refusals(problem))

    def export(self, problem: Problem, plan: Plan, version: str) -> ConfigLaunch:
        """Turn a plan into a launch.

        Raises:
            IllegalPlanError: AutoModel cannot express the plan or would refuse it; gives all reasons.
        """
        check_replicas(AUTOMODEL, plan)
        layout, model = plan.layout, problem.model
        fields = field_refusals(AUTOMODEL, layout, num_replicas=layout.expert_dp if model.has_experts else 1)
        rules = rule_refusals(AUTOMODEL, problem, layout)
        refuse(AUTOMODEL.name, [*automodel_refusals(problem), *recompute_refusals(plan), *fields, *rules])
        settings = settings_of(plan, model, problem.job.sequence_length)
        return config_launch(AUTOMODEL, version, problem, plan, settings, _notes(problem, layout))

    def files(self, launch: ConfigLaunch, version: str) -> dict[str, str]:
        """Write the launch as files by name; the first holds the plan. ``version`` is milpplan's."""
        program = ('-m nemo_automodel.cli.app "${CONFIG:-' + CONFIG + '}"', '--model.config="${MODEL:-.}"')
        tables = nested({**FIXED, **launch.settings})
        return {
            CONFIG: "\n".join([*header(launch, version), *_lines(tables, "")]) + "\n",
            SCRIPT: torchrun_script(launch, version, program),
            BATCH_SCRIPT: slurm_script(launch, version, SCRIPT),
        }

    def read(self, request: ImportRequest) -> Imported:
        """Read a recipe into a problem and a plan."""
        return imported(request)


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


def _notes(problem: Problem, layout: Layout) -> list[str]:
    notes = ["MODEL is a directory or name of Transformers with the sizes of the plan's model."]
    if layout.zero_stage == 2:
        notes.append("ZeRO 2 is reshard_after_forward false: weights stay gathered until the backward.")
    if layout.pp > 1:
        notes.append(
            "Under the pipeline weights stay gathered and gradients whole until all micro-batches have run; they "
            "are priced as ZeRO 1."
        )
        notes.append("The modules of stages have the names of Transformers' decoders (model.layers.N).")
    if problem.model.has_experts:
        notes.append("Which kernel sends tokens to experts is model.backend.dispatcher: it is not part of a plan.")
    return notes
