"""Launcher NeMo AutoModel, export and import: the YAML of its recipe, and scripts that run it on every node.

Source of ``automodel_keys.json``: nemo-automodel 0.7.0, recipes/llm/train_ft.py and recipes/_dist_utils.py,
components/distributed/config.py, components/checkpoint/config.py, components/training/step_scheduler.py;
settings of ``peft``: NVIDIA-NeMo/Automodel at 36044ad3, components/_peft/lora.py (PeftConfig).

**Settings** of a recipe from a plan, and back: FSDP2, or unsharded replicas by DDP.

``AUTOMODEL`` declares the layouts that AutoModel can run.

Source: nemo-automodel 0.7.0, components/distributed/config.py and mesh_utils.py, its pipelining/config.py and
pipelining/functional.py, components/training/step_scheduler.py, recipes/llm/train_ft.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import numpy.typing as npt

from milpplan.errors import InvalidInputError
from milpplan.launchers import ConfigLaunch, Imported, ImportRequest, flat, known_settings
from milpplan.launchers.capabilities import (
    FSDP_LIMITS,
    FSDP_RULES,
    Capability,
    Columns,
    Limit,
    RowRule,
    piped_states,
)
from milpplan.launchers.expressible import ConfigLauncher, layout_refusals, refuse
from milpplan.launchers.records import ADAPTERS, AT_MOST, DEFERRED, adapters_of, described, problem_of
from milpplan.launchers.scripts import header, torchrun_script
from milpplan.launchers.settings import Settings, admitted, check_priced, wrong_value, yaml_text
from milpplan.launchers.shell.launch_text import load_yaml
from milpplan.problem import Layout, ModelSpec, Plan, Problem, Recompute, Schedule, VirtualStage, validated
from milpplan.problem.reading import shown

D, PIPE = "distributed.", "distributed.pipeline."
SCHEDULES: dict[Schedule, str] = {"1f1b": "1F1B", "interleaved": "Interleaved1F1B", "gpipe": "GPipe"}
"""Names of PyTorch's schedules (torch/distributed/pipelining/schedules.py, get_schedule_class)."""


CHECKPOINTING = {"true": True, "on": True, "full": True, "enabled": True, "yes": True} | dict.fromkeys(
    ("false", "off", "none", "disabled", "no"), False
)
"""Words of ``activation_checkpointing`` (recipes/_dist_utils.py, _normalize_activation_checkpointing)."""


def settings_of(problem: Problem, plan: Plan, version: str) -> dict[str, Any]:
    """Write a plan as settings of the recipe, by section and name."""
    layout = plan.layout
    local = layout.micro_batch_size * (layout.num_micro_batches if layout.pp > 1 else 1)
    settings: dict[str, Any] = {
        "step_scheduler.global_batch_size": layout.global_batch_size,
        "step_scheduler.local_batch_size": local,
        f"{D}strategy": "ddp" if layout.zero_stage == 0 and layout.dp > 1 else "fsdp2",
        f"{D}dp_size": layout.dp,
        f"{D}activation_checkpointing": any(stage.recompute.full for stage in plan.virtual_stages),
    }
    if settings[f"{D}strategy"] == "fsdp2":
        settings |= {
            f"{D}dp_replicate_size": layout.dp_replicate,
            f"{D}tp_size": layout.tp,
            f"{D}cp_size": layout.cp,
            f"{D}pp_size": layout.pp,
            f"{D}ep_size": layout.ep,
            f"{D}sequence_parallel": layout.sequence_parallel,
            f"{D}reshard_after_forward": layout.zero_stage == 3,
            f"{D}defer_fsdp_grad_sync": layout.pp > 1,
        }
    if layout.ep > 1:
        settings[f"{D}moe.reshard_after_forward"] = layout.zero_stage == 3
    if layout.pp > 1:
        settings |= {
            f"{PIPE}pp_schedule": SCHEDULES[layout.schedule],
            f"{PIPE}pp_microbatch_size": layout.micro_batch_size,
            f"{PIPE}pp_batch_size": local,
            f"{PIPE}module_fqns_per_model_part": parts_of(plan),
        }
    return settings | {
        "dataset.seq_len": problem.job.sequence_length,
        "dataset.vocab_size": problem.model.vocab_size,
    }


def parts_of(plan: Plan) -> list[list[str]]:
    """List the modules of every virtual stage by the names of Transformers' decoders."""
    parts = []
    last = len(plan.virtual_stages) - 1
    for number, stage in enumerate(plan.virtual_stages):
        names = [f"model.layers.{layer}" for layer in range(*stage.layers)]
        if number == 0:
            names.insert(0, "model.embed_tokens")
        if number == last:
            names += ["model.norm", "lm_head"]
        parts.append([*names, "model.rotary_emb"])
    return parts


def plan_of(settings: Settings, model: ModelSpec, world: int | None) -> Plan:
    """Read the plan that the settings stand for.

    Raises:
        InvalidInputError: a setting has a value that no plan has, or the number of processes is open.
    """
    kind = settings.get(f"{D}strategy")
    if kind not in ("fsdp2", "ddp"):
        raise wrong_value(f"{D}strategy", kind, "fsdp2 or ddp: nothing else is priced here")
    sharded = kind == "fsdp2"
    # Null stands for one rank (recipes/_dist_utils.py).
    size = {
        name: 1 if settings.get(f"{D}{name}_size") is None else settings.degree(f"{D}{name}_size")
        for name in ("tp", "cp", "pp", "ep")
    }
    dp = _replicas(settings, size["tp"] * size["cp"] * size["pp"], world)
    local, batch = (
        settings.size("step_scheduler.local_batch_size"),
        settings.size("step_scheduler.global_batch_size"),
    )
    several = dp * size["cp"] > 1
    stage = _zero_stage(settings, size["ep"], size["pp"] > 1) if sharded and several else 0
    groups = _sharding_groups(settings, model, dp) if sharded else 1
    for name in (
        "dp_replicate_size",
        "reshard_after_forward",
        "defer_fsdp_grad_sync",
        "moe.reshard_after_forward",
    ):
        # These settings have no effect on unsharded replicas.
        settings.get(f"{D}{name}")
    stages, vpp, schedule, micro = _pipeline(settings, model, size["pp"], local)
    full = CHECKPOINTING.get(str(settings.get(f"{D}activation_checkpointing")).lower())
    if full is None:
        full = settings.get(f"{D}activation_checkpointing")
        raise wrong_value(
            f"{D}activation_checkpointing", full, "true or false: selective is another than a plan's"
        )
    parallel = settings.switch(f"{D}sequence_parallel")
    data = {
        **size,
        "dp": dp,
        "vpp": vpp,
        "micro_batch_size": micro,
        "global_batch_size": batch,
        "sequence_parallel": sharded and size["tp"] > 1 and parallel,
        "zero_stage": stage,
        "dp_replicate": groups,
        "schedule": schedule,
        "overlap_grad_reduce": several and size["pp"] == 1,
        "overlap_param_gather": stage > 1,
    }
    layout = validated(Layout, data, "the layout that the recipe describes")
    held, first = [], 0
    for count in stages:
        recompute = Recompute(full=count if full else 0)
        held.append(VirtualStage(layers=(first, first + count), recompute=recompute))
        first += count
    return Plan(layout=layout, virtual_stages=tuple(held))


def _sharding_groups(settings: Settings, model: ModelSpec, dp: int) -> int:
    """Return the number of groups that shard states by themselves.

    Raises:
        InvalidInputError: AutoModel refuses the number (components/distributed/mesh_utils.py), or shards experts
            over other groups.
    """
    name = f"{D}dp_replicate_size"
    if settings.get(name) in (None, 1):
        return 1
    groups = settings.degree(name)
    if dp % groups or groups == dp:
        raise wrong_value(name, groups, f"a divisor of dp_size {dp} below it")
    if model.has_experts:
        raise wrong_value(name, groups, "1 with experts, whose mesh shards over all replicas")
    return groups


def _zero_stage(settings: Settings, ep: int, pipelined: bool) -> int:
    """Return the ZeRO stage.

    In a pipeline nothing is sharded until all micro-batches have run: ZeRO 1. By default weights are gathered
    again in the backward pass, except in a pipeline (components/distributed/parallelizer.py).
    """
    reshards = settings.get(f"{D}reshard_after_forward")
    reshard = not pipelined if reshards is None else settings.switch(f"{D}reshard_after_forward")
    if not settings.switch(f"{D}defer_fsdp_grad_sync") and pipelined:
        raise wrong_value(f"{D}defer_fsdp_grad_sync", False, "true: gradients are whole under a pipeline")
    if pipelined and reshard:
        raise wrong_value(
            f"{D}reshard_after_forward",
            True,
            "false: weights gathered for every micro-batch of a pipeline, with whole gradients, are no ZeRO stage",
        )
    if ep > 1 and settings.switch(f"{D}moe.reshard_after_forward") != reshard:
        raise wrong_value(f"{D}moe.reshard_after_forward", not reshard, "the same as of the other layers")
    return 1 if pipelined else 3 if reshard else 2


def _replicas(settings: Settings, others: int, world: int | None) -> int:
    size = settings.get(f"{D}dp_size")
    if size is not None:
        return settings.degree(f"{D}dp_size")
    if world is None:
        raise InvalidInputError(
            f"{D}dp_size is left to the number of processes.",
            "Expected that number, or the size.",
            "Give --gpus.",
        )
    if world % others:
        raise InvalidInputError(
            f"{world} processes are no multiple of tp_size * cp_size * pp_size = {others}.",
            "Expected whole replicas (components/distributed/mesh_utils.py).",
            "Correct --gpus, or the sizes.",
        )
    return world // others


def _pipeline(
    settings: Settings, model: ModelSpec, pp: int, local: int
) -> tuple[tuple[int, ...], int, Schedule, int]:
    """Return the layers of every virtual stage, the virtual stages per rank, the schedule and the micro-batch
    size."""
    if pp == 1:
        # The recipe warns and ignores the section.
        settings.looked_at |= {name for name in settings.values if name.startswith(PIPE)}
        return (model.num_layers,), 1, "1f1b", local
    word = settings.text(f"{PIPE}pp_schedule").lower()
    named = {name.lower(): schedule for schedule, name in SCHEDULES.items()}
    if word not in named:
        raise wrong_value(f"{PIPE}pp_schedule", word, " or ".join(SCHEDULES.values()))
    parts, each = settings.get(f"{PIPE}module_fqns_per_model_part"), settings.get(f"{PIPE}layers_per_stage")
    count = pp * (2 if named[word] == "interleaved" else 1)
    if parts is None and each is not None:
        count = _rounded(settings, -(-model.num_layers // settings.degree(f"{PIPE}layers_per_stage")), pp)
    if parts is None and not 0 < count <= model.num_layers:
        raise wrong_value(f"{D}pp_size", pp, f"stages for {model.num_layers} layers, and not {count} of them")
    sizes = _evenly(model.num_layers, count) if parts is None else _sizes(parts, model)
    if len(sizes) % pp or (len(sizes) > pp) != (named[word] == "interleaved"):
        raise wrong_value(f"{PIPE}pp_schedule", word, f"one that has {len(sizes)} virtual stages on {pp} ranks")
    return sizes, len(sizes) // pp, named[word], settings.size(f"{PIPE}pp_microbatch_size")


def _rounded(settings: Settings, stages: int, pp: int) -> int:
    """Round the number of virtual stages to a multiple of the ranks
    (components/distributed/pipelining/functional.py)."""
    how = settings.get(f"{PIPE}round_virtual_stages_to_pp_multiple")
    if how is None or stages % pp == 0:
        return stages
    return stages + (-stages % pp if how == "up" else -(stages % pp))


def _evenly(layers: int, stages: int) -> tuple[int, ...]:
    """Split layers evenly; the first stages hold the remainder
    (components/distributed/pipelining/functional.py)."""
    each, remainder = divmod(layers, stages)
    return tuple(each + (number < remainder) for number in range(stages))


def _sizes(listed: list[list[str]], model: ModelSpec) -> tuple[int, ...]:
    """Count the layers of the listed modules, which must be all modules in order."""
    name = f"{PIPE}module_fqns_per_model_part"
    layers = [re.fullmatch(r".*layers\.(\d{1,9})", module) for part in listed for module in part]
    numbers = [int(match[1]) for match in layers if match]
    ends = bool(listed) and any("embed" in module for module in listed[0]) and "lm_head" in listed[-1]
    if numbers != list(range(model.num_layers)) or not ends:
        raise wrong_value(name, f"{len(numbers)} layers", f"all {model.num_layers} layers in order, and both ends")
    return tuple(sum(bool(re.fullmatch(r".*layers\.\d+", module)) for module in part) for part in listed)


def unsharded_is_alone(problem: Problem, c: Columns) -> npt.NDArray[np.bool_]:
    """Require unsharded replicas to have no other parallelism."""
    plain = (c["cp"] * c["dp"] == 1) | (c["tp"] * c["pp"] * c["ep"] == 1)
    return np.asarray((c["zero_stage"] > 0) | plain)


def fills_the_pipeline(problem: Problem, c: Columns) -> npt.NDArray[np.bool_]:
    """Require at least as many micro-batches as pipeline ranks."""
    return np.asarray((c["pp"] == 1) | (c["num_micro_batches"] >= c["pp"]))


def experts_are_not_split(problem: Problem, c: Columns) -> npt.NDArray[np.bool_]:
    """Require models with experts to have no tensor parallelism."""
    return np.asarray((c["tp"] == 1) | (not problem.model.has_experts))


def experts_limits(problem: Problem) -> dict[str, Limit]:
    """Return the limits of models with experts."""
    why = "its mesh of experts shards over all replicas (components/distributed/mesh_utils.py)"
    return {"dp_replicate": Limit((1,), why)} if problem.model.has_experts else {}


AUTOMODEL = Capability(
    name="NeMo AutoModel",
    versions=("0.7.0",),
    limits={
        **FSDP_LIMITS,
        "zero_stage": Limit((0, 1, 2, 3), ""),
        "cp": Limit((1,), "its context parallelism gathers keys and values, and what is priced is a ring"),
        "schedule": Limit(
            ("1f1b", "interleaved", "gpipe"),
            "PyTorch's zero-bubble schedules wait for weight gradients in other ways than is priced",
        ),
    },
    rules={
        **FSDP_RULES,
        "fsdp_states": RowRule(
            piped_states,
            "FSDP2 is ZeRO 3, or with one micro-batch ZeRO 2, always overlapped; under a pipeline ZeRO 1, never "
            "overlapped (components/moe/fsdp_mixin.py); DDP is ZeRO 0, overlapped",
            shards=True,
        ),
        "unsharded_is_alone": RowRule(
            unsharded_is_alone,
            "its ddp has neither tp, pp nor ep (components/distributed/mesh_utils.py)",
            shards=True,
        ),
        "fills_the_pipeline": RowRule(
            fills_the_pipeline,
            "it wants as many micro-batches as pipeline ranks (recipes/llm/train_ft.py:675)",
        ),
        "experts_are_not_split": RowRule(
            experts_are_not_split, "tensor parallelism of its models with experts leaves the experts whole"
        ),
    },
    more_limits=experts_limits,
    formats={
        "precision": "its mp_policy computes in bf16",
        "grad_dtype": "its mp_policy reduces them in fp32",
        "attention_kernel": "its models take a fused one",
    },
    batch_settings={"seq-len": "dataset.seq_len"},
    complete=True,
)


QUIET: Mapping[str, str] = {
    r"(wandb|mlflow|comet|rng|dist_env)(\..*)?|seed|nvtx": "names, seeds and records",
    r"checkpoint\..*|validation_(dataset|dataloader)(\..*)?|step_scheduler\.(ckpt_|save_|val).*": (
        "works between steps"
    ),
    r"step_scheduler\.(log_.*|loss_.*|gc_.*|start_.*|num_epochs|max_steps|preemption_signal)": "counts and prints",
    r"dataloader\..*|dataset\.(?!seq_len$|seq_length$|batch_size$).*": "data, which are not priced",
    r"optimizer\.(?!_target_).*|lr_scheduler(\..*)?|clip_grad_norm\..*|loss_fn\.(?!_target_).*": (
        "numbers of the update and of the loss, whose work does not depend on them"
    ),
    r"model\.(config|config\..*|pretrained_model_name_or_path|trust_remote_code)": "--model says it",
    r"distributed\._target_": "of an older dialect, dropped by the recipe (recipes/_dist_utils.py)",
    r"distributed\.patch_.*|distributed\.pipeline\.(patch_.*|scale_grads.*|pp_batch_size)": (
        "how modules are called; the recipe sets pp_batch_size to the local batch"
    ),
    r"distributed\.(broadcast_buffers|bucket_cap_mb|gradient_as_bucket_view|fsdp2_.*_depth)": (
        "sizes of messages: they are priced as they are best cut"
    ),
    r"ci(\..*)?": "what the project's own tests do with the file",
    r"compile\.(?!enabled$).*": "acts with compilation, which is refused",
    r"packed_sequence\.(?!packed_sequence_size$).*": "acts with packing, which is refused",
}
"""Patterns of settings that have no effect on time and memory or concern features that a plan lacks, with
reasons."""
PROGRAMS: Mapping[str, tuple[str, ...]] = {
    "recipe": ("TrainFinetuneRecipeForNextTokenPrediction",),
    "model._target_": ("NeMoAutoModelForCausalLM.from_config", "NeMoAutoModelForCausalLM.from_pretrained"),
    "optimizer._target_": ("AdamW", "Adam", "FusedAdam"),
    "distributed.mp_policy._target_": ("MixedPrecisionPolicy",),
    "peft._target_": ("PeftConfig",),
    "loss_fn._target_": ("MaskedCrossEntropy", "TEParallelCrossEntropy", "CrossEntropyLoss", "cross_entropy"),
}
"""Names that decide the model, the training and the update: the last parts of the names that are priced."""


def imported(request: ImportRequest) -> Imported:
    """Read a recipe into a problem and a plan.

    The text is the YAML, which only names the model: the request describes it. It also has the number of processes
    where distributed.dp_size is not given.

    Raises:
        InvalidInputError: the file cannot be read, is incomplete, or has settings that are not priced.
        IllegalPlanError: AutoModel would refuse the recipe.
    """
    spec = described(request.model, request.vocab_size, request.source)
    schema = known_settings("automodel_keys.json", AUTOMODEL.versions[0])
    stated = flat(load_yaml(request.text, request.source, "automodel")) | dict(request.given)
    said = {name: _translated(value) for name, value in stated.items()}
    settings, left_out = admitted(said, schema, request.ignored, "NeMo AutoModel", QUIET)
    _check_programs(settings)
    notes: list[str] = []
    name = "dataset.seq_length" if "dataset.seq_length" in settings.values else "dataset.seq_len"
    length = settings.size(name)
    if name in request.given or name != "dataset.seq_len":
        notes.append(AT_MOST.format(length))
    plan = plan_of(settings, spec, request.num_gpus)
    layout = plan.layout
    if layout.pp == 1 and layout.zero_stage and layout.num_micro_batches > 1:
        notes += [DEFERRED.format("defer_fsdp_grad_sync")] * settings.switch(f"{D}defer_fsdp_grad_sync")
    formats, software = _formats(settings, spec, notes)
    modules = _adapted(settings, spec, notes)
    lora = None if modules is None else adapters_of(spec, settings.degree("peft.dim"), modules, _TARGETS)
    check_priced(settings, QUIET)
    problem = problem_of(request, spec, layout, length, software, lora=lora, **formats)
    refuse(AUTOMODEL.name, layout_refusals(AUTOMODEL, problem, layout))
    return Imported(problem, plan, (), left_out, tuple(notes))


def _translated(value: Any) -> Any:
    """Convert a value as AutoModel's reader does: some words of Python are not texts (config/loader.py)."""
    words = {"none": None, "None": None, "True": True, "False": False}
    return words.get(value, value) if isinstance(value, str) else value


_FP32 = ("float32", "fp32", "torch.float32")
_BF16 = ("bfloat16", "bf16", "torch.bfloat16", "auto")
"""Formats of weights; ``auto`` is that of the checkpoint, and bf16 in a model from a configuration
(_transformers/auto_model.py)."""
_WEIGHTS = ("model.torch_dtype", "model.dtype")
HALF_STATES: Mapping[str, object] = {
    "optimizer_state_bytes": 4,
    "reduced_gradient_bytes": 4,
    "master_shards_only": False,
}
"""Fields of ``Software`` with weights in bf16: PyTorch's Adam keeps its moments in the format of the weights,
without a master weight; FSDP2 reduces in fp32 (components/distributed/config.py, mp_policy)."""
EAGER_SCORE_BYTES = 6
"""Bytes of a score that the eager attention keeps: its softmax in fp32, and a copy in bf16 for the product with
the values (transformers 5.24.0, models/gemma2/modeling_gemma2.py, eager_attention_forward)."""
_TARGETS = "peft.target_modules"


def _formats(settings: Settings, model: ModelSpec, notes: list[str]) -> tuple[dict[str, str], dict[str, object]]:
    """Read the formats of weights, gradients and states, and the attention kernel.

    Returns:
        Fields of the job, and fields of ``Software``.

    Raises:
        InvalidInputError: a format or the attention is not priced.
    """
    formats: dict[str, str] = {}
    software: dict[str, object] = {}
    names = [name for name in _WEIGHTS if settings.get(name) is not None]
    weights = settings.get(names[0]) if names else "auto"
    for name in names:
        if settings.get(name) != weights or weights not in (*_FP32, *_BF16):
            raise _other(name, settings.get(name), "float32 or bf16, in one setting")
    if weights not in _FP32:
        formats["grad_dtype"] = "bf16"
        software |= HALF_STATES
    if weights == "auto":
        notes.append(
            f"{'model.torch_dtype is auto' if names else 'model.torch_dtype is not in the file'}: weights and "
            "states of the optimizer are priced in bf16, which most checkpoints have."
        )
    # Every choice of these formats is priced.
    settings.looked_at |= {f"distributed.mp_policy.{name}" for name in ("param_dtype", "reduce_dtype")}
    attention = settings.get("model.attn_implementation")
    if attention == "eager" and not model.has_indexers:
        formats["attention_kernel"] = "unfused"
        software["score_kept_bytes"] = EAGER_SCORE_BYTES
    elif attention not in (None, "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention", "te"):
        raise _other("model.attn_implementation", attention, "eager, or a fused one such as sdpa")
    return formats, software


def _adapted(settings: Settings, model: ModelSpec, notes: list[str]) -> list[str] | None:
    """Read which matrices have LoRA adapters; None: all weights are trained.

    A pattern is matched with the whole name of a module (components/_peft/module_matcher.py).

    Raises:
        InvalidInputError: a pattern names modules by other than names and asterisks, modules of some layers alone,
            or the head.
    """
    stated = [name for name in settings.values if name.startswith("peft.")]
    if not stated:
        return None
    if any(settings.get(name) in _FP32 for name in _WEIGHTS):
        raise _other(
            stated[0], settings.values[stated[0]], "weights in bf16 beside adapters, not frozen ones in fp32"
        )
    given = settings.get(_TARGETS)
    patterns = [given] if isinstance(given, str) else given or ["*_proj"]
    if not all(re.fullmatch(r"[\w.*]{1,200}", pattern) for pattern in patterns):
        raise _other(_TARGETS, given, "names of modules with asterisks")
    # An asterisk after a dot takes the dot along (_compile_wildcard_pattern).
    globs = [re.sub(r"\.?\*+", "*", pattern) for pattern in patterns]
    modules: list[str] = []
    for name in model.linear_modules:
        block = "self_attn" if name in _ATTENTION else "mlp"
        hits = {
            any(fnmatchcase(f"model.layers.{layer}.{block}.{name}", glob) for glob in globs)
            for layer in range(model.num_layers)
        }
        if len(hits) > 1:
            raise _other(_TARGETS, given, "the same modules in all layers")
        modules += [name] * hits.pop()
    if any(fnmatchcase("lm_head", glob) for glob in globs):
        raise _other(_TARGETS, given, "modules of layers: adapters of the head are not priced")
    notes.append(ADAPTERS.format(", ".join(modules)))
    settings.looked_at |= {"peft.alpha", "peft.lora_A_init", "peft.use_triton", "peft.dropout_position"}
    return modules


_ATTENTION = frozenset(
    ("q_proj", "k_proj", "v_proj", "o_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
)


def _check_programs(settings: Settings) -> None:
    """Check the settings that decide the model, the training and the update.

    Raises:
        InvalidInputError: the model, training or update is not priced.
    """
    for name, priced in PROGRAMS.items():
        value = settings.get(name)
        if value is not None and not any(value == suffix or value.endswith(f".{suffix}") for suffix in priced):
            raise _other(name, value, " or ".join(priced))


def _other(name: str, value: object, priced: str) -> InvalidInputError:
    return InvalidInputError(
        f"{name} is {shown(value)}, which is not priced.",
        f"Expected {priced}.",
        f"Change it to compare it as such a run, or accept not to see what it does: --ignore {name}.",
    )


CONFIG, SCRIPT = "automodel.yaml", "automodel.sh"
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


def _files(launch: ConfigLaunch, version: str) -> dict[str, str]:
    """Write the launch as files by name; the first holds the plan. ``version`` is milpplan's."""
    program = ('-m nemo_automodel.cli.app "${CONFIG:-' + CONFIG + '}"', '--model.config="${MODEL:-.}"')
    return {
        CONFIG: "\n".join(header(launch, version)) + "\n" + yaml_text({**FIXED, **launch.settings}),
        SCRIPT: torchrun_script(launch, version, program),
    }


def _notes(problem: Problem, plan: Plan, version: str) -> list[str]:
    layout = plan.layout
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


LAUNCHER = ConfigLauncher(AUTOMODEL, settings_of, _notes, _files, imported)
"""Launcher NeMo AutoModel: recipes in YAML."""
