"""Launcher DeepSpeed: its JSON, a training program that reads it, and the scripts that start it.

The program builds a dense model from a Hugging Face config. The reader of such configs reads every candidate back,
which must give the model.
"""

from __future__ import annotations

import json
from typing import Any

from milpplan.errors import MilpplanError
from milpplan.launchers.deepspeed.reader import imported
from milpplan.launchers.deepspeed.settings import (
    DEEPSPEED,
    known,
    layout_of,
    losses_of,
    settings_of,
    stage_of,
)
from milpplan.launchers.expressible import (
    check_replicas,
    config_launch,
    field_refusals,
    format_refusals,
    job_refusals,
    layout_differences,
    model_differences,
    recompute_refusals,
    refuse,
    whole_nodes,
)
from milpplan.launchers.import_request import ImportRequest
from milpplan.launchers.records import ConfigLaunch, Imported, Refusal
from milpplan.launchers.scripts import header, slurm_script, torchrun_script
from milpplan.launchers.settings import Settings, nested
from milpplan.problem.huggingface.config import model_from_config
from milpplan.problem.model import DenseMlp, GroupedQueryAttention, ModelSpec
from milpplan.problem.plan import Plan
from milpplan.problem.problem import Problem

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Values of ``model_type`` whose classes differ in biases, windows, and norms of queries and keys."""
PROGRAM = '''"""Trains the model of deepspeed.json with DeepSpeed, on made-up data unless load_batch has others."""

import json
import sys

import deepspeed
import torch
from transformers import AutoConfig, AutoModelForCausalLM

STEPS = 100


def load_batch(size, length, vocabulary, device):
    """The tokens of a micro-batch, [size, length]; put your data here."""
    return torch.randint(vocabulary, (size, length), device=device)


def main(path):
    with open(path) as file:
        settings = json.load(file)
    own = settings.pop("milpplan")
    fields = dict(own["model"])
    config = AutoConfig.for_model(fields.pop("model_type"), **fields, use_cache=False)
    config._attn_implementation = own["attn_implementation"]
    deepspeed.init_distributed()
    if torch.distributed.get_world_size() != own["world_size"]:
        sys.exit(f"{path} is for {own['world_size']} processes")
    with deepspeed.zero.Init(config_dict_or_path=settings, enabled=settings["zero_optimization"]["stage"] == 3):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if own["recompute"]:
        # Every layer, wholly: nothing but its input is kept.
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    size, length = settings["train_micro_batch_size_per_gpu"], own["sequence_length"]
    for _ in range(STEPS * settings["gradient_accumulation_steps"]):
        tokens = load_batch(size, length, config.vocab_size, engine.device)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()


if __name__ == "__main__":
    main(sys.argv[1])
'''
CONFIG, TRAINER = "deepspeed.json", "deepspeed_train.py"
SCRIPT, BATCH_SCRIPT = "deepspeed.sh", "deepspeed.sbatch"
TRAINING: dict[str, Any] = {
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "steps_per_print": 1,
}
"""Settings that a run needs and a plan does not decide."""


class DeepSpeed:
    """Launcher DeepSpeed: its JSON configuration and a training program that reads it."""

    capability = DEEPSPEED

    def check(self, problem: Problem, version: str) -> None:
        """Refuse a problem for which DeepSpeed can run no plan.

        Raises:
            IllegalPlanError: gives all reasons.
        """
        refusals = format_refusals(problem, ("flash", "unfused"), ("fp32", "bf16"))
        if config_of(problem.model) is None:
            refusals.append(Refusal(f"{problem.model.name} is none of the dense families that its program builds"))
        refuse(DEEPSPEED.name, refusals)

    def export(self, problem: Problem, plan: Plan, version: str) -> ConfigLaunch:
        """Turn a plan into a launch.

        Raises:
            IllegalPlanError: DeepSpeed's configuration cannot express the plan; gives all reasons.
        """
        check_replicas(DEEPSPEED, plan)
        uneven, fields = whole_nodes(problem, plan.layout)[2], field_refusals(DEEPSPEED, plan.layout)
        refusals = [*job_refusals(problem), *recompute_refusals(plan), *uneven, *fields]
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
        settings, notes = settings_of(problem, plan, config or {}), _notes(problem, plan, config or {})
        return config_launch(DEEPSPEED, version, problem, plan, settings, notes)

    def files(self, launch: ConfigLaunch, version: str) -> dict[str, str]:
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

    def read(self, request: ImportRequest) -> Imported:
        """Read a configuration into a problem and a plan."""
        return imported(request)


def config_of(model: ModelSpec) -> dict[str, Any] | None:
    """Return the config of a model; None where no family represents it."""
    kind = model.kinds[0]
    if len(model.kinds) > 1 or not isinstance(kind.attention, GroupedQueryAttention):
        return None
    if not isinstance(kind.mlp, DenseMlp):
        return None
    sizes = {
        "hidden_size": model.hidden_size,
        "intermediate_size": kind.mlp.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": kind.attention.num_attention_heads,
        "num_key_value_heads": kind.attention.num_key_value_heads,
        "head_dim": kind.attention.head_dim,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position_embeddings,
        "tie_word_embeddings": model.tie_word_embeddings,
    }
    if kind.attention.output_bias:
        sizes["attention_bias"] = True
    if kind.attention.sliding_window is not None:
        sizes["sliding_window"] = kind.attention.sliding_window
    candidates = ({"model_type": family} | sizes for family in FAMILIES)
    return next((config for config in candidates if _builds(config, model)), None)


def _builds(config: dict[str, Any], model: ModelSpec) -> bool:
    try:
        return not model_differences(model_from_config(config, model.name), model)
    except MilpplanError:
        return False


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


def _config(launch: ConfigLaunch, version: str) -> str:
    tree = nested(launch.settings)
    tree["milpplan"] = {"about": [*launch.title, f"Written by milpplan {version}."], **tree["milpplan"]}
    own = tree.pop("milpplan")
    return json.dumps(tree | TRAINING | {"milpplan": own}, indent=2) + "\n"
