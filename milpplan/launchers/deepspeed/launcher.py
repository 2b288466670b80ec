"""Launcher DeepSpeed, export and import: its JSON, a training program that reads it, and the scripts that start
it.

The program builds a dense model from a Hugging Face config. The reader of such configs reads every candidate back,
which must give the model.

**Settings**: a plan as DeepSpeed's JSON, ``section.name`` to value, and back.

Source: deepspeedai/DeepSpeed 0.19.8, runtime/config.py:590-656 (batch sizes), runtime/zero/config.py,
runtime/zero/stage_1_and_2.py and stage3.py, runtime/engine.py:2295-2325; for ``deepspeed_keys.json`` also
runtime/constants.py, runtime/precision_config.py, monitor/config.py and profiling/config.py:

- ZeRO 0 reduces bf16 gradients after the backward; bf16 with fp32 gradients is not implemented there.
- ZeRO 1 keeps whole bf16 gradients and reduces them once per step, beside the last backward with ``overlap_comm``.
  With fp32 gradients another optimizer (BF16_Optimizer) all-reduces, which is not the ZeRO 1 that is priced.
- ZeRO 2 reduces in every micro-batch, and gathers weights after the update; ZeRO 3 gathers them in every pass.

Settings that DeepSpeed leaves to the training program (sequence length, model, recomputation, kernel) are in a
section ``milpplan``, which the program reads and does not pass on.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from milpplan.errors import IllegalPlanError, InvalidInputError, MilpplanError
from milpplan.launchers.capabilities import (
    NO_GROUPS,
    NO_STREAMS,
    TRANSFORMERS,
    Columns,
    Limit,
    RowRule,
    config_capability,
)
from milpplan.launchers.expressible import ConfigLauncher, layout_differences, model_differences
from milpplan.launchers.records import (
    ConfigLaunch,
    Imported,
    ImportRequest,
    Refusal,
    check_gpus,
    check_vocabulary,
    problem_of,
)
from milpplan.launchers.scripts import HERE, header, torchrun_script
from milpplan.launchers.settings import (
    Known,
    Settings,
    admitted,
    check_priced,
    flat,
    is_quiet,
    known_settings,
    nested,
)
from milpplan.problem import NO_MODULES
from milpplan.problem.huggingface.config import model_from_config
from milpplan.problem.model import DenseMlp, GroupedQueryAttention, ModelSpec
from milpplan.problem.plan import Layout, Plan
from milpplan.problem.problem import Problem
from milpplan.problem.reading import parse_json, shown, validated

_Z, _OWN = "zero_optimization", "milpplan"
_CUT = "milpplan.sequence_parallel_size"
"""Ranks that share a sequence (Ulysses), which the program that starts DeepSpeed sets up."""
TYPES = {"fp32": "fp32", "bf16": "bf16", "bfp16": "bf16"}
"""Spellings of ``grad_accum_dtype`` and ``communication_data_type`` (runtime/config.py, DtypeEnum)."""
KERNELS = {"flash": "sdpa", "unfused": "eager"}
"""Values of ``attn_implementation`` by kernel."""
QUIET: Mapping[str, str] = {
    r"milpplan\..*": "what the training program reads, which is looked at by itself",
    r"(wandb|tensorboard|comet|csv_monitor|flops_profiler)\..*|steps_per_print|dump_state|memory_breakdown": (
        "records and prints; a step that is profiled is none that is priced"
    ),
    r"checkpoint\..*|aio\..*|zero_optimization\.(stage3_gather_.*|load_from_fp32_weights|elastic_checkpoint|"
    r"pipeline_loading_checkpoint)": "works between steps, or with offloading, which is refused",
    r"scheduler\..*|gradient_clipping|optimizer\.(params\.(?!torch_adam|amsgrad).*|legacy_fusion)|seed|"
    r"dataloader_drop_last|vocabulary_size": "numbers of the update and the data, whose work is the same",
    r"zero_allow_untested_optimizer|zero_force_ds_cpu_optimizer|use_data_before_expert_parallelism|"
    r"seq_parallel_communication_data_type": (
        "acts with other optimizers and experts, which are refused, or is looked at where sequences are cut"
    ),
    r"(bf16|fp16)\.(?!enabled$|bf16_|fp16_|check_grad|immediate).*|amp\.opt_level": (
        "scales of the loss; amp is refused"
    ),
    r"comms_logger\.(?!enabled$).*|timers\..*": "acts with comms_logger and timers, which are refused",
    r"activation_checkpointing\.(profile|number_checkpoints|synchronize_checkpoint_boundary)": (
        "acts in models that call DeepSpeed's own checkpointing"
    ),
    r"zero_optimization\.(.*bucket_size|sub_group_size|stage3_(param_persistence_threshold|"
    r"model_persistence_threshold|max_live_parameters|max_reuse_distance))": (
        "sizes of buckets: messages are priced as they are best cut"
    ),
    r"zero_optimization\.round_robin_gradients": "an order of copies to the host, which are refused",
    r"_comment": "a text",
    r"zero_optimization\.(ignore_unused_parameters|log_trace.*|enable_sanity_checks)": "checks and records",
}
"""Patterns of settings that have no effect on the cost, with reasons."""


def known() -> Known:
    """Load the settings of DeepSpeed's JSON and of the section ``milpplan``, with defaults and types."""
    return known_settings("deepspeed_keys.json", "0.19.8")


def stage_of(layout: Layout, grad_dtype: str) -> int:
    """Return ``stage``. With one replica and fp32 gradients it is 1, which shards nothing and keeps such
    gradients."""
    return 1 if layout.dp == 1 and grad_dtype == "fp32" else layout.zero_stage


def settings_of(problem: Problem, plan: Plan, version: str) -> dict[str, Any]:
    """Write the settings of a plan."""
    layout, job = plan.layout, problem.job
    stage = stage_of(layout, job.grad_dtype)
    settings: dict[str, Any] = {
        "train_batch_size": layout.global_batch_size,
        "train_micro_batch_size_per_gpu": layout.micro_batch_size,
        "gradient_accumulation_steps": layout.num_micro_batches,
        f"{_Z}.stage": stage,
        f"{_Z}.overlap_comm": layout.overlap_grad_reduce and stage > 0,
        f"{_Z}.contiguous_gradients": True,
        f"{_Z}.reduce_scatter": True,
        "bf16.enabled": True,
        "data_types.grad_accum_dtype": job.grad_dtype,
        "communication_data_type": job.grad_dtype,
        f"{_OWN}.world_size": layout.num_gpus,
        f"{_OWN}.sequence_length": job.sequence_length,
        f"{_OWN}.recompute": any(stage.recompute.full for stage in plan.virtual_stages),
        f"{_OWN}.attn_implementation": KERNELS[job.attention_kernel],
    }
    return settings | {f"{_OWN}.model.{name}": value for name, value in (config_of(problem.model) or {}).items()}


def losses_of(stage: int, dp: int, grad_dtype: str) -> list[str]:
    """List the reasons why no plan expresses DeepSpeed's run."""
    losses = []
    if stage == 0 and grad_dtype == "fp32":
        losses.append("ZeRO 0 with gradients in fp32 is not implemented in bf16 (runtime/engine.py:2323)")
    if stage == 1 and grad_dtype == "fp32" and dp > 1:
        losses.append(
            "ZeRO 1 with gradients in fp32 all-reduces them (BF16_Optimizer, runtime/engine.py:2305), and what is "
            "priced scatters them"
        )
    return losses


def layout_of(settings: Settings, world: int | None) -> Layout:
    """Read the layout of the settings on a number of processes.

    Every layout with ZeRO 2 or 3 overlaps its reductions; ``imported_settings`` tells where the run does not.

    Args:
        settings: of the file.
        world: processes; None: the number that follows from the batch sizes.

    Raises:
        InvalidInputError: the batch sizes contradict each other.
    """
    if settings.get("train_micro_batch_size_per_gpu") is None:
        raise InvalidInputError(
            "The sequences of a GPU in a micro-batch are not in the file.",
            "Expected train_micro_batch_size_per_gpu.",
            "Give --micro-batch N.",
        )
    size, cut = settings.degree("train_micro_batch_size_per_gpu"), settings.degree(_CUT)
    batch, steps = _given(settings, "train_batch_size"), _given(settings, "gradient_accumulation_steps")
    if world is None and batch is not None and steps is not None and batch % (size * steps) == 0:
        world = batch // (size * steps) * cut
    if world is not None and world % cut:
        raise InvalidInputError(
            f"{_CUT} is {cut}, which does not divide {world} processes.",
            "Expected as many ranks for every sequence.",
            f"Correct {_CUT}.",
        )
    if world is None or world < 1:
        raise InvalidInputError(
            "The number of processes is not known: the batch sizes do not make it.",
            "Expected train_batch_size, its size per GPU and gradient_accumulation_steps, or --gpus.",
            "Give --gpus.",
        )
    replicas = world // cut
    if steps is None:
        steps = 1 if batch is None else batch // (size * replicas)
    batch = size * replicas * steps if batch is None else batch
    if batch != size * steps * replicas:
        raise InvalidInputError(
            f"train_batch_size {batch} is not {size} * {steps} * {replicas}.",
            "Expected micro-batch * accumulation * replicas (runtime/config.py:602).",
            "Correct the batch sizes, or the number of processes (--gpus).",
        )
    stage, overlap = sharding_of(settings)
    data = {
        "dp": replicas,
        "cp": cut,
        "ulysses": cut,
        "micro_batch_size": size,
        "global_batch_size": batch,
        "zero_stage": stage if world > 1 else 0,
        "overlap_grad_reduce": (overlap or stage >= 2) and stage > 0 and world > 1,
        "overlap_param_gather": stage == 3 and world > 1,
    }
    return validated(Layout, data, "the layout that the settings describe")


def _cut_software(settings: Settings, grad_dtype: str) -> dict[str, float]:
    """Return the bytes of a gradient as it is sent where ranks share a sequence, which an option of its own says.

    Source: runtime/engine.py:1857 and runtime/constants.py:296 at edaa7221; ZeRO shards over all of these ranks.

    Raises:
        InvalidInputError: the format is not priced.
    """
    if settings.degree(_CUT) == 1:
        return {}
    name = "seq_parallel_communication_data_type"
    sent = TYPES.get(settings.text(name))
    if sent is None:
        raise InvalidInputError(f"{name} is {settings.text(name)}.", "Expected fp32 or bf16.", "Correct it.")
    return {} if sent == grad_dtype else {"reduced_gradient_bytes": 4.0 if sent == "fp32" else 2.0}


def _given(settings: Settings, name: str) -> int | None:
    """Read a positive integer that may be left to follow from others."""
    return None if settings.get(name) is None else settings.degree(name)


def sharding_of(settings: Settings) -> tuple[int, bool]:
    """Return ``stage`` and ``overlap_comm``, whose default is true only at stage 3 (runtime/zero/config.py)."""
    stage = settings.number(f"{_Z}.stage")
    if not 0 <= stage <= 3:
        raise InvalidInputError(f"{_Z}.stage is {stage}.", "Expected 0, 1, 2 or 3.", "Correct it.")
    overlap = settings.get(f"{_Z}.overlap_comm")
    return stage, stage == 3 if overlap is None else settings.switch(f"{_Z}.overlap_comm")


def grad_dtype_of(settings: Settings) -> str:
    """Return the format of gradients, which must be kept and sent alike.

    Raises:
        InvalidInputError: gradients are kept and sent in different formats, or the format is not priced.
    """
    names = ("data_types.grad_accum_dtype", "communication_data_type")
    formats = [TYPES.get("bf16" if settings.get(name) is None else settings.text(name)) for name in names]
    if None in formats or formats[0] != formats[1]:
        raise InvalidInputError(
            f"Gradients are kept in {shown(settings.get(names[0]))} and sent in {shown(settings.get(names[1]))}.",
            "Expected both fp32 or both bf16 (the default in bf16).",
            f"Set {names[0]} and {names[1]} alike to compare it as such a run.",
        )
    return str(formats[0])


def plan_of(layout: Layout, layers: int, whole: bool) -> Plan:
    """Build the plan: one stage, with all of its layers recomputed or none."""
    stage = {"layers": [0, layers], "recompute": {"full": layers * whole}}
    data = {"layout": layout.model_dump(), "virtual_stages": [stage]}
    return validated(Plan, data, "the plan that the settings describe")


def kernel_of(implementation: str) -> str:
    """Return the attention kernel of an implementation of Transformers.

    Raises:
        InvalidInputError: the attention is not priced.
    """
    if implementation not in ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"):
        raise InvalidInputError(
            f"attn_implementation is {shown(implementation)}.",
            "Expected sdpa, flash_attention_2 or eager.",
            "Correct it.",
        )
    return "unfused" if implementation == "eager" else "flash"


def deepspeed_states(problem: Problem, c: Columns) -> npt.NDArray[np.bool_]:
    """Require ZeRO states that DeepSpeed can produce.

    Up to ZeRO 2 weights are gathered after the update. Gradients in fp32 require ZeRO 2 or 3.
    """
    stage = c["zero_stage"]
    keeps = c["overlap_param_gather"] == (stage == 3)
    keeps &= (stage > 0) | (c["overlap_grad_reduce"] == 0)
    if problem.job.grad_dtype == "fp32":
        keeps &= stage >= 2
    return np.asarray(keeps)


_ONLY_DATA = "its configuration is data parallel; "
DEEPSPEED = config_capability(
    name="DeepSpeed",
    versions=("0.19.8",),
    limits={
        "tp": Limit((1,), f"{_ONLY_DATA}AutoTP keeps the embedding whole on every rank, which a plan cuts"),
        "cp": Limit((1,), f"{_ONLY_DATA}Ulysses is a layer of the model's own code (sequence/layer.py)"),
        "ep": Limit((1,), f"{_ONLY_DATA}experts are layers of the model's own code (moe/layer.py)"),
        "etp": Limit((1,), f"{_ONLY_DATA}experts are layers of the model's own code (moe/layer.py)"),
        "pp": Limit((1,), f"{_ONLY_DATA}stages are a PipelineModule of the model's own code (runtime/pipe)"),
        "vpp": Limit((1,), "there is no pipeline in its configuration"),
        "schedule": Limit(("1f1b",), "there is no pipeline in its configuration"),
        "dp_replicate": NO_GROUPS,
        "keep_weights": Limit((False,), "it frees weights after the forward, by reuse distance and not by layer"),
        "pp_scatter_gather": Limit((False,), "there is no pipeline in its configuration"),
        "offload_weights": Limit((False,), f"{NO_STREAMS} (offload_param)"),
        "offload_modules": Limit((NO_MODULES,), NO_STREAMS),
        "offload_activations": Limit((False,), f"{NO_STREAMS} (cpu_checkpointing)"),
        "offload_optimizer": Limit((False,), f"{NO_STREAMS} (offload_optimizer updates on the processor)"),
    },
    rules={
        "states": RowRule(deepspeed_states, "up to ZeRO 2 weights are gathered after the update", shards=True),
    },
    stages="equal",
    formats={
        "precision": "it computes in bf16",
    },
    program=lambda version: TRANSFORMERS,
    batch_settings={
        "micro-batch": "train_micro_batch_size_per_gpu",
        "accumulation": "gradient_accumulation_steps",
        "seq-len": f"{_OWN}.sequence_length",
    },
    complete=True,
)


AUTO = "auto"
"""Value that transformers replaces at its start from its own arguments."""
_ALIASES = {
    f"{_Z}.{name}": f"{_Z}.stage3_{name}"
    for name in (
        *("prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold"),
        *("max_live_parameters", "max_reuse_distance", "gather_16bit_weights_on_model_save"),
        *("module_granularity_threshold", "use_all_reduce_for_fetch_params", "allgather_sequential"),
    )
}
"""Names that settings of ZeRO 3 also have (runtime/zero/config.py, aliases)."""


def imported(request: ImportRequest) -> Imported:
    """Read a configuration into a problem and a plan.

    The text is JSON. Without a model of its own it needs that of the request.

    Raises:
        InvalidInputError: the file cannot be read, or has settings that change the cost and are not priced.
        IllegalPlanError: DeepSpeed would refuse the configuration.
    """
    return imported_settings(flat(parse_json(request.text, request.source)) | dict(request.given), request)


def imported_settings(values: Mapping[str, Any], request: ImportRequest) -> Imported:
    """Import settings, by ``section.name``, that have already been read from a file.

    Raises:
        InvalidInputError: settings are missing, or change the cost and are not priced.
        IllegalPlanError: DeepSpeed would refuse the configuration.
    """
    settings, left_out = admitted(
        _filled_in(values, request.ignored), known(), request.ignored, "DeepSpeed", QUIET
    )
    _look_at_what_is_off(settings)
    spec = _model(settings, request.model, request.vocab_size, request.source)
    notes: list[str] = []
    length = _length(settings)
    whole = _own(settings, "recompute", False, notes)
    kernel = _own(settings, "attn_implementation", "sdpa", notes)
    world = request.num_gpus
    if settings.get("milpplan.world_size") is not None:
        world = settings.degree("milpplan.world_size")
        check_gpus(request.num_gpus, world, f"{request.source} (milpplan.world_size)")
    notes += _formats(settings)
    grad_dtype = grad_dtype_of(settings)
    layout = layout_of(settings, world)
    stage, overlap = sharding_of(settings)
    losses = losses_of(stage, layout.cp * layout.dp, grad_dtype)
    if stage >= 2 and layout.cp * layout.dp > 1 and not overlap:
        notes.append(
            f"overlap_comm is false: ZeRO {stage} reduces in line with the backward, and is priced as reducing "
            "beside it. The step is a lower bound in this."
        )
    if stage == 3 and settings.get("zero_optimization.stage3_prefetch_bucket_size") == 0:
        losses.append("ZeRO 3 that gathers no weights ahead (stage3_prefetch_bucket_size 0) is not priced")
    if losses:
        raise IllegalPlanError(
            f"The run is not one that is priced: {'; '.join(losses)}.",
            "Expected a run that a plan can tell without loss.",
            "Change the settings to compare it as the nearest run that is.",
        )
    check_priced(settings, QUIET)
    plan = plan_of(layout, spec.num_layers, whole)
    software = {**TRANSFORMERS, **_cut_software(settings, grad_dtype)}
    attention = kernel_of(kernel)
    formats = {"grad_dtype": grad_dtype, "attention_kernel": attention}
    problem = problem_of(request, spec, layout, length, software, lora=None, **formats)
    return Imported(problem, plan, (), left_out, tuple(notes))


def _look_at_what_is_off(settings: Settings) -> None:
    """Mark settings of disabled features as looked up: offloading without a device, and everything at ZeRO 0."""
    for part in ("offload_optimizer", "offload_param"):
        section = f"zero_optimization.{part}"
        if settings.values.get(f"{section}.device") == "none":
            settings.looked_at |= {name for name in settings.values if name.startswith(f"{section}.")}
    if settings.get("zero_optimization.stage") == 0:
        settings.looked_at |= {name for name in settings.values if name.startswith("zero_optimization.")}


def _filled_in(values: Mapping[str, Any], ignored: Collection[str]) -> dict[str, Any]:
    """Drop ``auto`` where other settings decide it or nothing depends on it, and write aliases as full names.

    The batch of a step follows from its parts, and fp16 is off where bf16 is on (runtime/config.py).

    Raises:
        InvalidInputError: only what starts the run knows a setting.
    """
    full = {_ALIASES.get(name, name): value for name, value in values.items()}
    decided = {"train_batch_size", *(("fp16.enabled",) if full.get("bf16.enabled") is True else ())}
    named = [name for name, value in full.items() if value == AUTO]
    left = [name for name in named if name not in {*decided, *ignored} and not is_quiet(name, QUIET)]
    if left:
        options = {name: f"--{option} N" for option, name in DEEPSPEED.batch_settings.items()}
        said = [options.get(name, f"--set {name}=VALUE") for name in left[:6] if name != "fp16.enabled"]
        raise InvalidInputError(
            f"{', '.join(left[:6])} {'are' if len(left) > 1 else 'is'} auto: only what starts the run knows.",
            "Expected values: the trainer's flags have them.",
            f"Give {', '.join(said) or '--set fp16.enabled=false'}.",
        )
    return {name: value for name, value in full.items() if name not in named or name in ignored}


def _model(settings: Settings, model: ModelSpec | None, vocab_size: int | None, source: str) -> ModelSpec:
    own = {name: value for name, value in settings.values.items() if name.startswith("milpplan.model.")}
    config = nested(own)["milpplan"]["model"] if own else None
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


def _length(settings: Settings) -> int:
    """Return the tokens of a sequence.

    Raises:
        InvalidInputError: nothing states them.
    """
    if settings.get("milpplan.sequence_length") is None:
        raise InvalidInputError(
            "The tokens of a sequence are not in the file.",
            "Expected the length that the trainer cuts its data to.",
            "Give --seq-len N.",
        )
    return settings.degree("milpplan.sequence_length")


def _own(settings: Settings, name: str, otherwise: Any, notes: list[str]) -> Any:
    """Return a setting of the training program; add a note with its assumed value where the file does not have
    it."""
    value = settings.get(f"milpplan.{name}")
    if value is None:
        notes.append(f"{name} is not in the file: {otherwise} is taken.")
        return otherwise
    return value


def _formats(settings: Settings) -> list[str]:
    """Check for a 16-bit format with AdamW, with notes for the user.

    Raises:
        InvalidInputError: the number format or the optimizer differs.
    """
    half, notes = settings.switch("bf16.enabled"), []
    if not half and settings.switch("fp16.enabled"):
        half = True
        notes.append("fp16 is priced as bf16: its weights, gradients and messages have the same bytes.")
    elif half:
        # Both are refused by DeepSpeed, and by check_priced.
        settings.looked_at.discard("fp16.enabled")
    if not half:
        raise InvalidInputError(
            "Neither bf16.enabled nor fp16.enabled is true.",
            "Expected one of them: other formats are not priced.",
            "Enable bf16 to compare it as such a run.",
        )
    optimizer = settings.get("optimizer.type")
    if optimizer is not None and optimizer.lower() not in ("adam", "adamw"):
        raise InvalidInputError(
            f"optimizer.type is {shown(optimizer)}.",
            "Expected Adam or AdamW, whose states and update are priced.",
            "Use AdamW to compare it as such a run.",
        )
    return notes


FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Values of ``model_type`` whose classes differ in biases, windows, and norms of queries and keys."""
PROGRAM = '''"""Trains the model of deepspeed.json with DeepSpeed, on made-up data unless load_batch has others."""

import json
import sys

import deepspeed
import torch
import torch._dynamo  # Transformers imports it lazily, which fails inside zero.Init, where tensors are patched.
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
SCRIPT = "deepspeed.sh"
TRAINING: dict[str, Any] = {
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "steps_per_print": 1,
}
"""Settings that a run needs and a plan does not decide."""


def _files(launch: ConfigLaunch, version: str) -> dict[str, str]:
    """Write the launch as files by name; the first is the configuration. ``version`` is milpplan's."""
    program = (f'"$HERE/{TRAINER}"', f'"$HERE/{CONFIG}"')
    comment = "\n".join(header(launch, version))
    return {
        CONFIG: _config(launch, version),
        TRAINER: f"{comment}\n{PROGRAM}",
        SCRIPT: torchrun_script(launch, version, program, (HERE,)),
    }


def _losses(model: ModelSpec) -> list[str]:
    families = f"the dense families that the program builds ({', '.join(FAMILIES)})"
    return [f"{model.name} is none of {families}"] if config_of(model) is None else []


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


def _differences(problem: Problem, plan: Plan, version: str) -> list[Refusal]:
    """List the differences between the plan and the run that the files start."""
    layout, job = plan.layout, problem.job
    stage = stage_of(layout, job.grad_dtype)
    refusals = [Refusal(text) for text in losses_of(stage, layout.dp, job.grad_dtype)]
    if layout.num_gpus == layout.dp:
        runs = layout_of(Settings(settings_of(problem, plan, version), known()), layout.dp)
        reasons = {
            "overlap_grad_reduce": "at stage 0 gradients are reduced after the backward",
            "overlap_param_gather": "up to stage 2 weights are gathered after the update (stage_1_and_2.py, step)",
            "zero_stage": "there is one replica",
            "rank_order": "there are data-parallel ranks alone",
        }
        refusals += layout_differences(plan, runs, reasons)
    return refusals


def _notes(problem: Problem, plan: Plan, version: str) -> list[str]:
    config = config_of(problem.model) or {}
    notes = [
        f"The model is built as {config.get('model_type')}: which function gates it is no part of a plan.",
        "The program has norms, activations and the loss of transformers, which are not fused as the plan prices "
        "them unless torch.compile fuses them.",
    ]
    if not problem.model.learned_positions:
        notes.append("Rotary base and scaling are not part of a plan: add rope_theta and the like to the model.")
    if plan.layout.zero_stage == 3:
        notes.append("Weights below stage3_param_persistence_threshold stay whole on every rank: the norms.")
    return notes


def _config(launch: ConfigLaunch, version: str) -> str:
    tree = nested(launch.settings)
    tree["milpplan"] = {"about": [*launch.title, f"Written by milpplan {version}."], **tree["milpplan"]}
    own = tree.pop("milpplan")
    return json.dumps(tree | TRAINING | {"milpplan": own}, indent=2) + "\n"


LAUNCHER = ConfigLauncher(
    DEEPSPEED, settings_of, _notes, _files, imported, losses=_losses, differences=_differences
)
"""Launcher DeepSpeed, export and import: its JSON configuration and a training program that reads it."""
