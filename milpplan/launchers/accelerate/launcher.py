"""Launcher Accelerate, export and import: its files start Transformers' trainer, checked against its rules before
writing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from milpplan.errors import InvalidInputError
from milpplan.launchers import ConfigLaunch, Imported, ImportRequest, known_settings
from milpplan.launchers.accelerate.launch_files import (
    ACCELERATE,
    FLAG,
    FSDP2,
    GATHERS,
    KEYS,
    REDUCED,
    TRAINER,
    P,
    check_sizes,
    named,
    plan_of,
    read_files,
    settings_of,
    written,
)
from milpplan.launchers.accelerate.trainers import DEEPSPEED_FILE, PAIRS, deepspeed_file, filled_in
from milpplan.launchers.capabilities import TRANSFORMERS, Capability
from milpplan.launchers.deepspeed.launcher import imported_settings
from milpplan.launchers.expressible import ConfigLauncher, layout_refusals, refuse, whole_nodes, word
from milpplan.launchers.records import ADAPTERS, AT_MOST, DEFERRED, adapters_of, aligned, described, problem_of
from milpplan.launchers.settings import Settings, admitted, check_priced, is_in, wrong_value
from milpplan.problem import Alignment, Lora, ModelSpec, Plan, Problem
from milpplan.problem.reading import shown

_D = "deepspeed_config."
QUIET: Mapping[str, str] = {
    r"deepspeed_config\.(deepspeed_(multinode_launcher|hostfile|inclusion_filter|exclusion_filter)|zero3_.*|"
    r"gradient_clipping|offload_(optimizer|param)_nvme_path)": (
        "how processes are started, how the model is built and saved, and a number of the update"
    ),
    r"compute_environment|machine_rank|main_.*|rdzv_.*|same_network|gpu_ids|enable_cpu_affinity|num_machines|"
    r"num_cpu_threads_per_process|log_dir|tee|role|quiet|max_restarts|"
    r"monitor_interval|mpirun_hostfile": "how processes are started: other settings say how many",
    r"downcast_bf16|tpu_.*|command_file|commands": "acts on TPUs, whose distributed_type is refused",
    r"fsdp_config\.fsdp_(state_dict_type|cpu_ram_efficient_loading|sync_module_states)": "works between steps",
    r"fsdp_config\.fsdp_(use_orig_params|backward_prefetch.*|forward_prefetch|min_num_params|sharding_strategy|"
    r"transformer_layer_cls_to_wrap)": "looked at with FSDP 1, or acts in refused policies; a class",
    r"parallelism_config\.parallelism_config_(cp_backend|cp_comm_strategy|sp_(?!size).+)": "acts above one rank",
    r"deepspeed_config\.seq_parallel_communication_data_type": "a key of DeepSpeed, not passed on",
    r"dynamo_config\.dynamo_(mode|use_.*)": "acts with a backend, which is refused",
}
"""Patterns of Accelerate's settings that have no effect on the cost, with reasons."""
QUIET_FLAGS: Mapping[str, str] = {
    r"output_dir|overwrite_output_dir|run_name|project|trackio_.*|hub_.*|push_to_hub.*|report_to|logging_.*|"
    r"log_.*|disable_tqdm|include_num_input_tokens_seen|include_tokens_per_second|skip_memory_metrics": "records",
    r"eval_.*|evaluation_strategy|per_device_eval_batch_size|prediction_loss_only|include_for_metrics|"
    r"include_inputs_for_metrics|batch_eval_metrics|do_eval|do_predict|do_train|save_.*|load_best_model_at_end|"
    r"metric_for_best_model|greater_is_better|.*_full_eval|resume_from_checkpoint|ignore_data_skip|"
    r"restore_callback_.*|enable_jit_checkpoint|validation_.*|max_eval_samples": "works between steps",
    r"learning_rate|lr_scheduler_.*|warmup_.*|weight_decay|adam_.*|max_grad_norm|num_train_epochs|max_steps|seed|"
    r"data_seed|average_tokens_across_devices": "numbers of the update, whose work does not depend on them",
    r"optim": "names of AdamW alone, whose update is priced as fused; others are no choices",
    r"dataset_.*|dataloader_.*|remove_unused_columns|label_names|length_column_name|train_file|max_train_samples|"
    r"streaming|preprocessing_num_workers|keep_linebreaks|overwrite_cache|shuffle_dataset|eos_token|pad_token|"
    r"chat_template_path|truncation_mode|completion_only_loss|assistant_only_loss|num_of_sequences|chars_per_token|"
    r"packing_strategy|dispatch_batches|accelerator_config\.(even_batches|use_seedable_sampler|non_blocking|"
    r"dispatch_batches|gradient_accumulation_kwargs\.adjust_scheduler)": "data, which are not priced",
    r"model_name_or_path|model_revision|model_type|config_name|tokenizer_name|use_fast_tokenizer|cache_dir|token|"
    r"trust_remote_code|low_cpu_mem_usage": "--model says what the model is",
    r"ddp_(timeout|bucket_cap_mb|broadcast_buffers|static_graph)|local_rank": (
        "sizes of messages, which are priced as they are best cut"
    ),
    r"fp16_opt_level|half_precision_backend|fp16_backend|torch_compile_.+|ray_scope|xpu_backend|tpu_.*": (
        "acts with fp16, compilation or other devices, which are refused"
    ),
    r"(gradient|activation)_checkpointing_kwargs\.(use_reentrant|preserve_rng_state|determinism_check|debug|"
    r"early_stop)|gradient_checkpointing_use_reentrant": "how the same layers are run again",
}
"""Patterns of the trainer's flags that have no effect on the cost, with reasons."""
ALL_QUIET: Mapping[str, str] = {
    **QUIET,
    **{f"{FLAG}({pattern})": reason for pattern, reason in QUIET_FLAGS.items()},
}
PROGRAMS = ("run_clm.py", "sft.py", "trl.scripts.sft", "train_sft.py", "run_sft.py")
"""Programs that train all weights of a language model on the next token.

These are Transformers' run_clm.py, TRL's sft.py, and the usual names of such programs. Others may do anything.
"""
ON_PAIRS = "trl.scripts.dpo"
"""TRL's program that trains all weights on pairs of sequences."""
TRL = ("sft.py", "trl.scripts.sft", ON_PAIRS)
"""Programs of TRL, where the release decides on recomputation if no flag does."""
LENGTHS = ("block_size", "max_length", "max_seq_length")
"""Flags for the sequence length in tokens: of run_clm.py, of TRL, and of older TRL."""


def imported(request: ImportRequest) -> Imported:
    """Read a launch into a problem and a plan.

    The text is the script that starts it, with the YAML in a here document. The files only name the model, which
    the request describes.

    Raises:
        InvalidInputError: the file cannot be read, is incomplete, or has settings that are not priced.
        IllegalPlanError: Accelerate would refuse the settings.
    """
    read = read_files(request)
    spec = described(request.model, request.vocab_size, request.source)
    program = None if read.program in request.ignored else read.program
    schema = {**known_settings(KEYS, "launch"), **known_settings(KEYS, "config")}
    schema |= {f"{FLAG}{name}": row for name, row in known_settings(KEYS, "trainer").items()}
    spelled = {name.lstrip("-") for name in read.values}
    names = [
        name
        if name.startswith(FLAG) or name in spelled
        else next(iter(named({name.lstrip("-"): None}, flags=True)))
        for name in request.ignored
        if name != read.program
    ]
    stated = _stated(request.given)
    values = {**read.values, **stated}
    inner = _inner_names(values, names, request.source)
    names = [name for name in names if name not in inner]
    unset = values.get("mixed_precision") in (None, "no", "NO", False)
    if unset and values.get(f"{FLAG}bf16") is True and values.get("distributed_type") != "DEEPSPEED":
        # The trainer's flag wins (transformers, training_args.py, __post_init__).
        values["mixed_precision"] = "bf16"
    under = values.get("distributed_type") == "DEEPSPEED"
    steps = values.get(f"{_D}gradient_accumulation_steps") if under else None
    if (
        f"{FLAG}gradient_accumulation_steps" not in stated
        and steps is not None
        and values.setdefault(f"{FLAG}gradient_accumulation_steps", steps) != steps
    ):
        raise InvalidInputError(
            f"deepspeed_config.gradient_accumulation_steps is {shown(steps)}, and the trainer has another number.",
            "Expected the same in both: Transformers compares them.",
            "Correct one of them.",
        )
    pairs = values.pop(PAIRS, program == ON_PAIRS)
    settings, left_out = admitted(values, schema, names, read.launcher, ALL_QUIET)
    _check_program(program, request.source)
    _check_trainer(settings, request.source)
    recompute = _recomputes(settings, program)
    lora = _adapters(settings, spec, names)
    alignment = _alignment(settings, program, lora) if pairs else None
    wrong, states = _wrong_format(settings, lora is not None), _states(settings, lora is not None)
    if settings.get("distributed_type") == "DEEPSPEED":
        result = _under_deepspeed(settings, recompute, replace(request, model=spec, ignored=inner), left_out)
        if wrong is not None:
            raise wrong
        return aligned(_with_adapters(result, lora), alignment)
    plan = plan_of(settings, spec, recompute)
    accumulation = _accumulates(settings, plan)
    settings.looked_at |= {f"{FLAG}{name}" for name in (*LENGTHS, "packing")}
    check_priced(settings, ALL_QUIET)
    # What the file says and nobody prices is named before what follows from it.
    if wrong is not None:
        raise wrong
    length, note = _length(settings)
    gathers = plan.layout.cp > 1 and settings.get(f"{P}cp_comm_strategy") == GATHERS
    reduced = REDUCED if settings.get("distributed_type") == "FSDP" else {}
    software = {"gathered_keys": gathers, **TRANSFORMERS, **reduced}
    formats = {"grad_dtype": "bf16"} if states is HALF_STATES else {}
    problem = problem_of(request, spec, plan.layout, length, software | states, lora=lora, **formats)
    refuse(FSDP2.name, layout_refusals(FSDP2, problem, plan.layout))
    if program is None and read.program is not None:
        left_out = (*left_out, f"{read.program} (what it does besides its flags)")
    adapters = () if lora is None else (ADAPTERS.format(", ".join(lora.modules)),)
    result = Imported(problem, plan, (), left_out, (*note, *accumulation, *adapters))
    return aligned(result, alignment)


def _alignment(settings: Settings, program: str | None, lora: Lora | None) -> Alignment:
    """Read the reference of training on pairs (DPO): LLaMA-Factory's is a model, TRL's may be computed before.

    Raises:
        InvalidInputError: TRL gathers the whole reference at once (trl 1.16.0, models/utils.py, prepare_fsdp).
    """
    before = settings.switch(f"{FLAG}precompute_ref_log_probs")
    settings.looked_at |= {f"{FLAG}{name}" for name in ("beta", "precompute_ref_batch_size")}
    gathered = program is not None and lora is None and settings.get("distributed_type") == "FSDP"
    if gathered and not before:
        expected = "true beside FSDP: under it TRL gathers a whole reference at once, which is not priced"
        raise wrong_value("precompute_ref_log_probs", False, expected)
    return Alignment(method="dpo", reference="none" if before else "frozen")


def _inner_names(values: Mapping[str, Any], names: Sequence[str], source: str) -> tuple[str, ...]:
    """Find the ignored names that are settings of the configuration of DeepSpeed that the file names."""
    file = values.get(DEEPSPEED_FILE)
    others = [name for name in names if not any(is_in(key, name) for key in values)]
    if file is None or not others:
        return ()
    inside = deepspeed_file(file, source)
    return tuple(name for name in others if any(is_in(key, name) for key in inside))


def _adapters(settings: Settings, model: ModelSpec, ignored: Sequence[str]) -> Lora | None:
    """Read the LoRA adapters of the trainer; None: all weights are trained. An ignored dropout is none.

    Source: trl 1.16.0, trainer/model_config.py; PEFT's ``all-linear`` leaves out the head.

    Raises:
        InvalidInputError: the adapters are not priced, or the frozen weights are not in bf16.
    """
    if not settings.switch(f"{FLAG}use_peft"):
        return None
    targets, dropout = (settings.get(f"{FLAG}lora_{name}") for name in ("target_modules", "dropout"))
    if "lora_dropout" in (name.lstrip("-") for name in ignored):
        dropout = 0
    kind = settings.get("distributed_type")
    frozen = settings.get(f"{FLAG}dtype") or settings.get(f"{FLAG}torch_dtype")
    wrong = {
        "lora_dropout": "" if dropout == 0 else f"{shown(dropout)}: its masks and copies are not priced, so 0",
        "lora_target_modules": "" if targets == "all-linear" or (isinstance(targets, list) and len(targets) > 1)
        else f"{shown(targets)}: several names of matrices, or all-linear",
        "use_peft": f"true beside {shown(kind)}: weights that FSDP shards in fp32" if kind == "FSDP" else "",
        "dtype": "" if kind == "DEEPSPEED" or frozen in ("bfloat16", "auto")
        else f"{shown(frozen)}: frozen weights are priced in bfloat16",
    }  # fmt: skip
    for name, why in wrong.items():
        if why:
            raise InvalidInputError(
                f"{name} is {why}.",
                "Expected adapters that are priced, beside weights in bf16.",
                f"Give --set {name}=VALUE, or --ignore use_peft and all flags of LoRA.",
            )
    settings.looked_at |= {f"{FLAG}lora_{name}" for name in ("alpha", "task_type")}
    modules = None if targets == "all-linear" else targets
    return adapters_of(model, settings.degree(f"{FLAG}lora_r"), modules, "lora_target_modules")


OPTIMIZERS: Mapping[str, float] = {
    **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit"), 4 + 2 * (1 + 4 / 256)),
    **dict.fromkeys(("paged_adamw", "paged_adamw_32bit"), 12.0),
}
"""Bytes of a trained fp32 weight and its two states, by names of bitsandbytes' AdamW: in 8 bits with an fp32 scale
for each block of 256 values (bitsandbytes 0.45, optim/optimizer.py). Paged states move only where memory ends."""


HALF_STATES: dict[str, object] = {"optimizer_state_bytes": 4}
"""Fields of ``Software`` where whole weights are in bf16: PyTorch's Adam keeps its moments in their format."""


def _states(settings: Settings, adapted: bool) -> dict[str, object]:
    """Read the states of the optimizer, as fields of ``Software``: bitsandbytes' beside adapters, or those of
    weights in bf16 that nobody copies to fp32."""
    kind, optimizer = settings.get("distributed_type"), settings.get(f"{FLAG}optim")
    if adapted and kind != "DEEPSPEED" and optimizer in OPTIMIZERS:
        return {"optimizer_state_bytes": OPTIMIZERS[optimizer]}
    half = "bfloat16" in (settings.get(f"{FLAG}dtype"), settings.get(f"{FLAG}torch_dtype"))
    return HALF_STATES if half and not adapted and kind not in COPIED else {}


def _with_adapters(result: Imported, lora: Lora | None) -> Imported:
    """Add adapters to an imported problem."""
    if lora is None:
        return result
    job = result.problem.job.model_copy(update={"lora": lora})
    problem = result.problem.model_copy(update={"job": job})
    return replace(result, problem=problem, notes=(*result.notes, ADAPTERS.format(", ".join(lora.modules))))


def _under_deepspeed(
    settings: Settings, recompute: bool, request: ImportRequest, left_out: tuple[str, ...]
) -> Imported:
    """Import a run of DeepSpeed whose configuration Accelerate makes of a few settings.

    Source: accelerate 1.15.0, utils/dataclasses.py, DeepSpeedPlugin.__post_init__.

    Raises:
        InvalidInputError: settings are missing, or change the cost and are not priced.
        IllegalPlanError: DeepSpeed would refuse the configuration.
    """
    length, note = _length(settings)
    file = settings.get(DEEPSPEED_FILE)
    values = {} if file is None else filled_in(deepspeed_file(file, request.source), settings.values)
    if file is None:
        values = {
            "zero_optimization.stage": settings.number(f"{_D}zero_stage"),
            "zero_optimization.offload_optimizer.device": settings.get(f"{_D}offload_optimizer_device"),
            "zero_optimization.offload_param.device": settings.get(f"{_D}offload_param_device"),
            "bf16.enabled": True,
        }
    numbers = ("per_device_train_batch_size", "gradient_accumulation_steps")
    micro, steps = (settings.size(f"{FLAG}{name}") for name in numbers)
    own = {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": steps}
    for name, number in own.items():
        if values.get(name, number) != number:
            raise InvalidInputError(
                f"{name} is {shown(values[name])} in {shown(file)}, and {number} for the trainer.",
                "Expected the same in both: Transformers compares them.",
                "Correct one of them.",
            )
    values = own | values
    cut = _cut(settings)
    attention = settings.get(f"{FLAG}attn_implementation") or "sdpa"
    values |= {
        "milpplan.sequence_length": length,
        "milpplan.recompute": recompute,
        "milpplan.world_size": settings.size("num_processes"),
        "milpplan.attn_implementation": settings.get(f"{P}sp_attn_implementation") if cut > 1 else attention,
        "milpplan.sequence_parallel_size": cut,
    }
    settings.looked_at |= {f"{FLAG}{name}" for name in (*LENGTHS, "packing")}
    settings.looked_at |= {f"{_D}gradient_accumulation_steps", f"{FLAG}optim"}
    check_priced(settings, ALL_QUIET)
    inner = imported_settings(values, replace(request, given={}))
    return replace(inner, ignored_flags=(*left_out, *inner.ignored_flags), notes=(*note, *inner.notes))


def _cut(settings: Settings) -> int:
    """Return the ranks that share a sequence under DeepSpeed (Ulysses).

    Source: accelerate 1.15.0, parallelism_config.py and accelerator.py, _prepare_deepspeed.

    Raises:
        InvalidInputError: the degrees do not make the number of processes.
    """
    cut, shards = settings.degree(f"{P}sp_size"), settings.degree(f"{P}dp_shard_size")
    processes = settings.size("num_processes")
    if cut > 1 and cut * shards != processes:
        raise InvalidInputError(
            f"sp_size {cut} and dp_shard_size {shards} do not make {processes} processes.",
            "Expected their product: DeepSpeed shards over all of them.",
            "Correct the parallelism_config.",
        )
    return cut


def _check_program(program: str | None, source: str) -> None:
    """Refuse programs whose training is unknown.

    Raises:
        InvalidInputError: the program is not in ``PROGRAMS``.
    """
    if program is not None and program not in (*PROGRAMS, ON_PAIRS):
        raise InvalidInputError(
            f"{source} starts {shown(program)}, and nobody here knows what it trains.",
            f"Expected a program that trains all weights on the next token: {', '.join(PROGRAMS)}.",
            f"If it is one, say so: --ignore {program}.",
        )


def _check_trainer(settings: Settings, source: str) -> None:
    """Check that the trainer's flags give the numbers of a plan.

    Raises:
        InvalidInputError: a number is missing.
    """
    given = any(f"{FLAG}{name}" in settings.values for name in LENGTHS)
    missing = [name for name in TRAINER if f"{FLAG}{name}" not in settings.values and name != LENGTHS[0]]
    missing += [] if given else [" or ".join(LENGTHS)]
    if missing:
        raise InvalidInputError(
            f"{source} does not say {', '.join(missing)}.",
            "Expected the flags of the trainer: Accelerate's YAML has neither micro-batches nor lengths.",
            "Give --micro-batch, --accumulation and --seq-len, or the script that starts the trainer.",
        )


def _stated(given: Mapping[str, Any]) -> dict[str, Any]:
    """Name stated settings as the files' are named: the trainer's flags have the prefix ``FLAG``."""
    flags = known_settings(KEYS, "trainer")
    stated: dict[str, Any] = {}
    for name, value in given.items():
        bare = name.lstrip("-")
        stated |= {f"{FLAG}{bare}": value} if bare in flags else named({bare: value}, flags=True)
    return stated


def _length(settings: Settings) -> tuple[int, tuple[str, ...]]:
    """Read the sequence length in tokens, with notes for the user.

    Raises:
        InvalidInputError: two flags disagree.
    """
    given = {name: settings.size(f"{FLAG}{name}") for name in LENGTHS if f"{FLAG}{name}" in settings.values}
    if len(set(given.values())) > 1:
        raise InvalidInputError(
            f"{' and '.join(f'{name} {value}' for name, value in given.items())} are different lengths.",
            "Expected one length of sequences.",
            "Keep the one that the program takes.",
        )
    packed = settings.switch(f"{FLAG}packing")
    if LENGTHS[0] in given or packed:
        return next(iter(given.values())), ()
    name = next(iter(given))
    return given[name], (AT_MOST.format(name),)


def _recomputes(settings: Settings, program: str | None) -> bool:
    """Test whether the trainer recomputes all layers; activation_checkpointing is the newer name.

    Raises:
        InvalidInputError: two flags disagree, or no flag is given and the release decides.
    """
    names = ("gradient_checkpointing", "activation_checkpointing")
    given = {name: settings.switch(f"{FLAG}{name}") for name in names if f"{FLAG}{name}" in settings.values}
    if len(set(given.values())) > 1 or (program in TRL and not given):
        said = " and ".join(f"{name} {value}" for name, value in given.items())
        raise InvalidInputError(
            f"{said}." if given else f"Whether {program} recomputes without a flag depends on the release of TRL.",
            "Expected --gradient_checkpointing true or false.",
            "Write it into the command.",
        )
    return any(given.values())


COPIED = ("FSDP", "DEEPSPEED")
"""Values of ``distributed_type`` under which weights of any format have copies in fp32: Accelerate converts
sharded weights (utils/fsdp_utils.py, fsdp2_prepare_model), and DeepSpeed keeps such copies of all."""


def _wrong_format(settings: Settings, adapted: bool) -> InvalidInputError | None:
    """Check formats, states and the attention: the error about one that is not priced, or None."""
    kind = settings.get("distributed_type")
    # A configuration of DeepSpeed has the format itself.
    by_file = DEEPSPEED_FILE in settings.values and "mixed_precision" not in settings.values
    wanted: dict[str, tuple[object, ...]] = {
        "mixed_precision": ("bf16", *((settings.get("mixed_precision"),) if by_file else ())),
        f"{FLAG}bf16": (None, True),
        f"{FLAG}attn_implementation": (None, "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"),
    }
    weights = ("auto", "float16") if adapted or kind in COPIED else ()
    for name in (f"{FLAG}dtype", f"{FLAG}torch_dtype"):
        wanted[name] = (None, "float32", "bfloat16", *weights)
    for name, values in wanted.items():
        if settings.get(name) not in values:
            priced = " or ".join(str(value).lower() for value in values if value is not None)
            return wrong_value(name.lstrip("-"), settings.get(name), f"{priced}, which is priced")
    optimizer = settings.get(f"{FLAG}optim")
    if optimizer in OPTIMIZERS and (not adapted or kind == "DEEPSPEED"):
        # Transformers keeps the states of embeddings in 32 bits, beside those of the rest in 8.
        expected = "adamw_torch or adamw_torch_fused: these states are priced for adapters alone"
        return wrong_value("optim", optimizer, expected)
    return None


def _accumulates(settings: Settings, plan: Plan) -> tuple[str, ...]:
    """Note properties of gradients that are accumulated over several micro-batches."""
    name = f"{FLAG}accelerator_config.gradient_accumulation_kwargs.sync_each_batch"
    settings.looked_at.add(name)
    if plan.layout.num_micro_batches == 1 or plan.layout.zero_stage == 0 or settings.get(name):
        return ()
    return (DEFERRED.format("Without sync_each_batch FSDP"),)


def _settings(problem: Problem, plan: Plan, version: str) -> dict[str, Any]:
    layout = plan.layout
    kind = "FSDP" if layout.zero_stage else "NO"
    shards = layout.dp // layout.dp_replicate if layout.zero_stage else 1
    sizes = {"dp_replicate": layout.dp // shards, "dp_shard": shards, "cp": layout.cp, "tp": layout.tp}
    check_sizes(kind, sizes, layout.num_gpus)
    num_nodes, _, _ = whole_nodes(problem, layout)
    return settings_of(plan, num_nodes, problem.job)


def _notes(remarks: Sequence[str], problem: Problem, plan: Plan, version: str) -> list[str]:
    layout = plan.layout
    notes = ["MODEL is a directory or name of Transformers with the sizes of the plan's model."]
    if layout.zero_stage == 2:
        notes.append(
            "ZeRO 2 is fsdp_reshard_after_forward false: weights stay gathered from the forward to the backward."
        )
    if layout.cp > 1:
        notes.append(f"Context parallelism needs sdpa without a mask; {word(layout.cp)} ranks pass keys around.")
    if problem.job.alignment is not None:
        return [*notes, AT_MOST.format(problem.job.sequence_length)]
    return [*notes, *remarks]


def trainer_launcher(
    capability: Capability,
    files: Callable[[ConfigLaunch, str], dict[str, str]],
    remarks: tuple[str, ...] = (),
) -> ConfigLauncher:
    """Make the launcher of a program that trains with Transformers' trainer under Accelerate.

    Args:
        capability: layouts that the program can run.
        files: writes the files of a launch, for milpplan's version.
        remarks: of the program, besides those of all, where it trains on the next token.
    """
    return ConfigLauncher(capability, _settings, partial(_notes, remarks), files, imported)


LAUNCHER = trainer_launcher(ACCELERATE, written)
"""Launcher Accelerate: ``run_clm.py`` of Transformers' examples."""
