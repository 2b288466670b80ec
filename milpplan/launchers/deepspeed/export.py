"""Export of a plan as DeepSpeed's JSON, a training program that reads it, and the scripts that start it."""

from __future__ import annotations

import json
from typing import Any

from milpplan.launchers.capabilities import DEEPSPEED
from milpplan.launchers.deepspeed.program import PROGRAM
from milpplan.launchers.deepspeed.settings import (
    known,
    layout_of,
    losses_of,
    settings_of,
    stage_of,
)
from milpplan.launchers.expressible import (
    field_refusals,
    job_refusals,
    layout_differences,
    recompute_refusals,
    refuse,
    title_of,
    whole_nodes,
)
from milpplan.launchers.hf_config import FAMILIES, config_of
from milpplan.launchers.records import ConfigLaunch, Refusal
from milpplan.launchers.scripts import header, slurm_script, torchrun_script
from milpplan.launchers.settings import Settings
from milpplan.problem.plan import Plan
from milpplan.problem.problem import Problem

CONFIG, TRAINER = "deepspeed.json", "deepspeed_train.py"
SCRIPT, BATCH_SCRIPT = "deepspeed.sh", "deepspeed.sbatch"
TRAINING: dict[str, Any] = {
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "steps_per_print": 1,
}
"""Settings that a run needs and a plan does not decide."""


def exported(problem: Problem, plan: Plan, version: str) -> ConfigLaunch:
    """Turn a plan into a launch.

    Raises:
        IllegalPlanError: DeepSpeed's configuration cannot express the plan; gives all reasons.
    """
    layout = plan.layout
    num_nodes, per_node, uneven = whole_nodes(problem, layout)
    refusals = [*job_refusals(problem), *recompute_refusals(plan), *uneven, *field_refusals(DEEPSPEED, layout)]
    if problem.job.precision != "bf16":
        refusals.append(Refusal(f"precision {problem.job.precision}: the program computes in bf16"))
    config = config_of(problem.model)
    if config is None:
        names = ", ".join(FAMILIES)
        refusals.append(
            Refusal(f"{problem.model.name} is none of the dense families that the program builds ({names})")
        )
    else:
        refusals += _plan_refusals(problem, plan, config, refusals)
    refuse(DEEPSPEED.name, refusals)
    return ConfigLaunch(
        target=DEEPSPEED.name,
        version=version,
        title=title_of(problem, plan),
        num_nodes=num_nodes,
        gpus_per_node=per_node,
        environment={},
        settings=settings_of(problem, plan, config or {}),
        notes=_notes(problem, plan, config or {}),
    )


def _plan_refusals(problem: Problem, plan: Plan, config: dict[str, Any], before: list[Refusal]) -> list[Refusal]:
    """List the differences between the plan and the run that the files start."""
    layout, job = plan.layout, problem.job
    stage = stage_of(layout, job.grad_dtype)
    named = {refusal.why.split("=")[0] for refusal in before}
    refusals = [Refusal(text) for text in losses_of(stage, layout.dp, job.grad_dtype, layout.overlap_grad_reduce)]
    if layout.num_gpus == layout.dp:
        runs = layout_of(Settings(settings_of(problem, plan, config), known()), layout.dp)
        reasons = {
            "overlap_grad_reduce": "at stage 0 gradients are reduced after the backward",
            "overlap_param_gather": "up to stage 2 weights are gathered after the update (stage_1_and_2.py, step)",
            "zero_stage": "there is one replica",
            "rank_order": "there are data-parallel ranks alone",
        }
        refusals += layout_differences(plan, runs, reasons, 1, named)
    return refusals


def _notes(problem: Problem, plan: Plan, config: dict[str, Any]) -> tuple[str, ...]:
    notes = [
        f"The model is built as {config.get('model_type')}: which function gates it is no part of a plan.",
        "The program has norms, activations and the loss of transformers, which are not fused as the plan prices "
        "them unless torch.compile fuses them.",
    ]
    if not problem.model.learned_positions:
        notes.append("Rotary base and scaling are not part of a plan: add rope_theta and the like to the model.")
    if plan.layout.zero_stage == 3:
        notes.append("Weights below stage3_param_persistence_threshold stay whole on every rank: the norms.")
    return tuple(notes)


def files_of(launch: ConfigLaunch, version: str) -> dict[str, str]:
    """Write the launch as files by name; the first is the configuration. ``version`` is milpplan's."""
    before = ('HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)',)
    program = (f'"$HERE/{TRAINER}"', f'"$HERE/{CONFIG}"')
    comment = "\n".join(header(launch, version))
    return {
        CONFIG: _config(launch, version),
        TRAINER: f"{comment}\n{PROGRAM}",
        SCRIPT: torchrun_script(launch, version, program, before),
        BATCH_SCRIPT: slurm_script(launch, version, SCRIPT),
    }


def _config(launch: ConfigLaunch, version: str) -> str:
    tree: dict[str, Any] = {}
    for name, value in launch.settings.items():
        *path, key = name.split(".")
        table = tree
        for part in path:
            table = table.setdefault(part, {})
        table[key] = value
    tree["milpplan"] = {"about": [*launch.title, f"Written by milpplan {version}."], **tree["milpplan"]}
    own = tree.pop("milpplan")
    return json.dumps(tree | TRAINING | {"milpplan": own}, indent=2) + "\n"
