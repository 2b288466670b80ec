"""Import of a YAML of NeMo AutoModel as a problem and a plan.

Source of ``automodel_keys.json``: nemo-automodel 0.7.0, recipes/llm/train_ft.py and recipes/_dist_utils.py,
components/distributed/config.py, components/checkpoint/config.py, components/training/step_scheduler.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from milpplan.errors import InvalidInputError
from milpplan.launchers.automodel.run import AUTOMODEL, automodel_refusals, plan_of
from milpplan.launchers.expressible import field_refusals, refuse, rule_refusals
from milpplan.launchers.import_request import ImportRequest, check_gpus, described, job_of
from milpplan.launchers.records import Imported
from milpplan.launchers.settings import Settings, admitted, check_priced, flat, known_settings
from milpplan.launchers.shell.launch_text import load_yaml
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
