"""Launcher NeMo AutoModel, export and import: the YAML of its recipe, and scripts that run it on every node.

Source of ``automodel_keys.json``: nemo-automodel 0.7.0, recipes/llm/train_ft.py and recipes/_dist_utils.py,
components/distributed/config.py, components/checkpoint/config.py, components/training/step_scheduler.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from milpplan.errors import InvalidInputError
from milpplan.launchers.automodel.run import AUTOMODEL, automodel_refusals, plan_of, settings_of
from milpplan.launchers.expressible import (
    check_replicas,
    config_launch,
    field_refusals,
    recompute_refusals,
    refuse,
    rule_refusals,
)
from milpplan.launchers.records import ConfigLaunch, Imported, ImportRequest, check_gpus, described, job_of
from milpplan.launchers.scripts import header, slurm_script, torchrun_script
from milpplan.launchers.settings import Settings, admitted, check_priced, flat, known_settings, nested
from milpplan.launchers.shell.launch_text import load_yaml
from milpplan.problem.plan import Layout, Plan
from milpplan.problem.problem import Problem
from milpplan.problem.reading import shown

QUIET: Mapping[str, str] = {
    r"(wandb|mlflow|comet|rng|dist_env)(\..*)?|seed|nvtx": "names, seeds and records",
    r"checkpoint\..*|validation_(dataset|dataloader)(\..*)?|step_scheduler\.(ckpt_|save_|val).*": (
        "works between steps"
    ),
    r"step_scheduler\.(log_.*|loss_.*|gc_.*|start_.*|num_epochs|max_steps|preemption_signal)": "counts and prints",
    r"dataloader\..*|dataset\.(?!seq_len$|batch_size$).*": "data, which are not priced",
    r"optimizer\.(?!_target_).*|lr_scheduler(\..*)?|clip_grad_norm\..*|loss_fn\.(?!_target_).*": (
        "numbers of the update and of the loss, whose work does not depend on them"
    ),
    r"model\.(config|config\..*|pretrained_model_name_or_path|trust_remote_code)": "--model says it",
    r"distributed\.patch_.*|distributed\.pipeline\.(patch_.*|scale_grads.*|pp_batch_size)": (
        "how modules are called; the recipe sets pp_batch_size to the local batch"
    ),
    r"distributed\.(broadcast_buffers|bucket_cap_mb|gradient_as_bucket_view|fsdp2_.*_depth)": (
        "sizes of messages: they are priced as they are best cut"
    ),
    r"packed_sequence\.(?!packed_sequence_size$).*": "acts with packing, which is refused",
}
"""Patterns of settings that have no effect on time and memory or concern features that a plan lacks, with
reasons."""
PROGRAMS: Mapping[str, tuple[str, ...]] = {
    "recipe": ("TrainFinetuneRecipeForNextTokenPrediction",),
    "model._target_": ("NeMoAutoModelForCausalLM.from_config", "NeMoAutoModelForCausalLM.from_pretrained"),
    "optimizer._target_": ("AdamW", "Adam", "FusedAdam"),
    "distributed.mp_policy._target_": ("MixedPrecisionPolicy",),
    "loss_fn._target_": ("MaskedCrossEntropy", "TEParallelCrossEntropy", "CrossEntropyLoss", "cross_entropy"),
}
"""Names that decide the model, the training and the update: the last parts of the names that are priced."""


def imported(request: ImportRequest) -> Imported:
    """Read a recipe into a problem and a plan.

    Args:
        request.text: the YAML.
        request.source: its name.
        request.hardware: the cluster.
        request.num_gpus: processes, where distributed.dp_size is not given.
        request.model: its description, which the file only names.
        request.vocab_size: that of the model, or None.
        request.ignored: settings whose effect on the cost the caller ignores.

    Raises:
        InvalidInputError: the file cannot be read, is incomplete, or has settings that are not priced.
        IllegalPlanError: AutoModel would refuse the recipe.
    """
    spec = described(request.model, request.vocab_size, request.source)
    schema = known_settings("automodel_keys.json", AUTOMODEL.versions[0])
    said = {name: _translated(value) for name, value in flat(load_yaml(request.text, request.source)).items()}
    settings, left_out = admitted(said, schema, request.ignored, "NeMo AutoModel", QUIET)
    notes = _looked_at(settings)
    length = settings.size("dataset.seq_len")
    plan = plan_of(settings, spec, request.num_gpus)
    check_priced(settings, QUIET)
    check_gpus(request.num_gpus, plan.layout.num_gpus, request.source)
    problem = Problem(model=spec, hardware=request.hardware, job=job_of(plan.layout, length))
    fields, rules = field_refusals(AUTOMODEL, plan.layout), rule_refusals(AUTOMODEL, problem, plan.layout)
    refuse(AUTOMODEL.name, [*automodel_refusals(problem), *fields, *rules])
    return Imported(problem, plan, (), left_out, notes)


def _translated(value: Any) -> Any:
    """Convert a value as AutoModel's reader does: some words of Python are not texts (config/loader.py)."""
    words = {"none": None, "None": None, "True": True, "False": False}
    return words.get(value, value) if isinstance(value, str) else value


def _looked_at(settings: Settings) -> tuple[str, ...]:
    """Check the settings that decide the model, the training and the formats; note settings that the file leaves
    open.

    Raises:
        InvalidInputError: the model, training, update or format is not priced.
    """
    for name, priced in PROGRAMS.items():
        value = settings.get(name)
        if value is not None and not any(value == suffix or value.endswith(f".{suffix}") for suffix in priced):
            raise _other(name, value, " or ".join(priced))
    for name in ("model.torch_dtype", "model.dtype"):
        value = settings.get(name)
        if value not in (None, "float32", "fp32", "torch.float32"):
            raise _other(name, value, "float32: weights in fp32, products in bf16")
    # Every choice of these formats is priced.
    settings.looked_at |= {f"distributed.mp_policy.{name}" for name in ("param_dtype", "reduce_dtype")}
    attention = settings.get("model.attn_implementation")
    if attention not in (None, "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention", "te"):
        raise _other("model.attn_implementation", attention, "a fused one, such as sdpa or flash_attention_2")
    if {"model.torch_dtype", "model.dtype"} & set(settings.values):
        return ()
    return ("model.torch_dtype is not in the file: weights and states of the optimizer are priced in fp32.",)


def _other(name: str, value: object, priced: str) -> InvalidInputError:
    return InvalidInputError(
        f"{name} is {shown(value)}, which is not priced.",
        f"Expected {priced}.",
        f"Change it to compare it as such a run, or accept not to see what it does: --ignore {name}.",
    )


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
