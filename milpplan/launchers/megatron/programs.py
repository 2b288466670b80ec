"""Programs that take Megatron-LM's arguments under other names: Primus, ms-swift, slime and verl.

A program is a table of names (``Program``) and a function that reads its file. What is in no table becomes an
unknown flag, which the reader of arguments refuses by name.

Source: AMD-AGI/Primus at fd1eeabb, primus/configs and docs/04-technical-guides/moe-training.md;
modelscope/ms-swift at 3602360a, swift/megatron/arguments; THUDM/slime at 624b824a, slime/utils/arguments.py and
slime/backends/megatron_utils/arguments.py; volcengine/verl at b178a3cd, verl/trainer/config and
verl/utils/megatron_utils.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from milpplan.errors import InvalidInputError
from milpplan.launchers.megatron.flags import Values, megatron_flags, model_arguments
from milpplan.launchers.megatron.rules import MEGATRON
from milpplan.launchers.records import ImportRequest, described
from milpplan.launchers.shell import readable, script_commands
from milpplan.launchers.shell.launch_text import Given, load_yaml, pairs_of, program_name, yaml_values
from milpplan.problem import Alignment, ModelSpec, read_text
from milpplan.problem.reading import shown

_WHOLE = re.compile(r"[0-9]{1,12}")


@dataclass(frozen=True, slots=True)
class Program:
    """Names under which a program takes Megatron-LM's arguments."""

    name: str
    """Name of the program."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Megatron-LM's names by the program's."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that the program sets where the file does not."""
    neutral: Mapping[str, Any] = field(default_factory=dict)
    """Values of the program's own settings that leave the cost as it is; other values are refused."""
    quiet: Mapping[str, str] = field(default_factory=dict)
    """Patterns of the program's own settings that have no effect on the cost, with reasons."""


_OFF = {
    "add_bias_linear": "--disable-bias-linear",
    "apply_rope_fusion": "--no-rope-fusion",
    "overlap_p2p_comm": "--no-overlap-p2p-communication",
    "perform_initialization": "--no-initialization",
    "add_position_embedding": "--no-position-embedding",
    "barrier_with_L1_time": "--no-barrier-with-level-1-timing",
    "enable_gloo_process_groups": "--disable-gloo-process-groups",
}
"""Switches that turn a setting off, by the name of the setting in Megatron-LM's namespace."""
_KEYS = {
    "fp4": "fp4-format",
    "fp4_param": "fp4-param-gather",
    "fp8": "fp8-format",
    "fp8_param": "fp8-param-gather",
    "no_load_optim": "no-load-optim",
    "num_layers_in_first_pipeline_stage": "decoder-first-pipeline-num-layers",
    "num_layers_in_last_pipeline_stage": "decoder-last-pipeline-num-layers",
    "virtual_pipeline_model_parallel_size": "num-virtual-stages-per-pipeline-rank",
}
"""Flags by the names of their settings, where these are not the flag with underscores."""


def arguments_of(values: Mapping[str, Any], program: Program, source: str) -> list[tuple[str, Values]]:
    """Write settings in Megatron-LM's namespace as flags with values.

    Args:
        values: settings by name; None: not given. A tuple has words of a command line.
        program: the names that differ, and settings of the program's own.
        source: name of the file, for messages.

    Returns:
        Pairs of flag and values. A setting that is not Megatron-LM's stays under its name, and is refused later.
    """
    pairs: list[tuple[str, Values]] = []
    flags = megatron_flags()
    for name, value in {**program.fixed, **values}.items():
        plain = program.renamed.get(name, name)
        flag = f"--{_KEYS.get(plain, plain).replace('_', '-')}"
        own = flag not in flags
        if value is None or (own and _is_quiet(name, program)) or _is_neutral(name, value, program):
            continue
        off = next(
            (way for way in (_OFF.get(plain, ""), f"--no-{flag[2:]}", f"--disable-{flag[2:]}") if way in flags),
            None,
        )
        switch = value if own or flags[flag].kind == "value" or value not in (0, 1) else bool(value)
        if isinstance(switch, bool) and off is not None and own:
            pairs += [] if switch else [(off, ())]
        elif switch is False and own:
            pairs.append((flag, ("false",)))
        elif isinstance(switch, tuple):
            pairs.append((flag, switch))
        elif switch != []:
            words = yaml_values(switch, f"{source}: {shown(name)}")
            pairs += [] if words is None else [(flag, words)]
    return pairs


def _is_quiet(name: str, program: Program) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in program.quiet)


def _is_neutral(name: str, value: object, program: Program) -> bool:
    """Test whether a setting has its neutral value; a command line also writes zero as 0.0."""
    if name not in program.neutral:
        return False
    wanted = program.neutral[name]
    if isinstance(value, tuple) and len(value) == 1:
        value = value[0]
    if wanted == 0 and isinstance(value, str):
        return re.fullmatch(r"0(\.0{0,9})?", value) is not None
    return type(value) is type(wanted) and value == wanted


def stated(request: ImportRequest) -> tuple[dict[str, Any], list[tuple[str, Values]]]:
    """Split what options state into settings of the file, and the batch and length as flags."""
    given = dict(request.given)
    batch = {name: given.pop(name) for name in MEGATRON.batch_settings.values() if name in given}
    return given, [(f"--{name.replace('_', '-')}", (str(value),)) for name, value in batch.items()]


PRIMUS = Program(
    "Primus",
    # primus/configs/modules/megatron: pre_trainer.yaml and trainer_base.yaml.
    fixed={
        "bf16": True, "use_distributed_optimizer": True, "sequence_parallel": True, "seq_length": 1024,
        "micro_batch_size": 2, "global_batch_size": 16, "use_flash_attn": True,
    },
    neutral={
        "model_type": "gpt", "use_legacy_models": False, "deprecated_use_mcore_models": False,
        "legacy_tokenizer": False, "async_tensor_model_parallel_allreduce": True,
        "encoder_tensor_model_parallel_size": 0, "encoder_pipeline_model_parallel_size": 0,
        "moe_use_legacy_grouped_gemm": False, "moe_extended_tp": False,
        "tp_comm_overlap_rs_dgrad": False, "no_fp8_weight_transpose_cache": False, "qk_l2_norm": False,
        "moe_layer_recompute": False, "use_te_activation_func": False, "turbo_sync_free_moe_stage": 0,
        "disable_primus_topk_router": False, "use_deprecated_20241209_moe_layer": False,
    },
    quiet={
        r"disable_(tensorboard|wandb|mlflow|last_saving)|stderr_sink_level|log_avg_.*|auto_continue_train|"
        r"file_sink_level|mlflow_.*|wandb_.*": "records, saving and loading",
        r"enable_primus_turbo|use_turbo_(attention|grouped_gemm|gemm|rms_norm|fused_act_with_probs)|"
        r"turbo_deepep_.*": "fused kernels, which are priced as such; settings of one that is refused",
        r"tokenizer_.*|vocab_extra_ids|tiktoken_.*|trust_remote_code": "tokenizers",
        r"conv_.*|original_max_position_embeddings": "convolutions of another model; rotary angles",
        r"moe_use_fused_router_with_aux_score": "the router's choices, whose fused kernels are what is priced",
    },
)  # fmt: skip
_VARIABLE = re.compile(r"\$\{(\w+)(?::([^}]*))?\}")


def from_primus(data: Mapping[str, Any], request: ImportRequest) -> Given:
    """Read the pre-trainer of a Primus experiment: the model's preset, and the overrides.

    Raises:
        InvalidInputError: the experiment trains otherwise, or its preset is not beside the file.
    """
    trainer = data.get("modules", {}).get("pre_trainer") if isinstance(data.get("modules"), Mapping) else None
    if not isinstance(trainer, Mapping) or trainer.get("framework") != "megatron":
        raise InvalidInputError(
            f"{request.source} has no pre_trainer of framework megatron.",
            "Expected modules.pre_trainer with it: other modules and frameworks of Primus are not read.",
            "Import an experiment of that kind.",
        )
    model = str(_decided(trainer.get("model")))
    own, batch = stated(request)
    overrides = trainer.get("overrides")
    values = _preset(_primus_models(request.source, model), 0)
    if isinstance(overrides, Mapping):
        values |= {name: _decided(value) for name, value in overrides.items()}
    notes = [f"The arguments are those of {model} with the overrides, and Primus' defaults."]
    if values.get("cross_entropy_fusion_impl") == "te":
        # Megatron-LM has switched it off since.
        del values["cross_entropy_fusion_impl"]
        notes.append("cross_entropy_fusion_impl te is priced as native, which today's Megatron-LM has left.")
    if values.get("turbo_sync_free_moe_stage") in (1, 2):
        # Without waits for the host, as experts are priced; stage 3 takes more memory.
        values["use_turbo_deepep"] = values.pop("turbo_sync_free_moe_stage") == 2 or values.get("use_turbo_deepep")
    if values.pop("use_turbo_deepep", False) is True:
        values["moe_token_dispatcher_type"] = "flex"
        notes.append("use_turbo_deepep is priced as Megatron-LM's dispatcher flex, which is DeepEP's.")
    pairs = arguments_of({**values, **own}, PRIMUS, request.source)
    return Given((*pairs, *batch), None, (), notes=tuple(notes))


def _decided(value: object) -> Any:
    """Replace ``${NAME:default}`` by its default; numbers and words of YAML are read as such."""
    if not isinstance(value, str) or not _VARIABLE.search(value):
        return value
    text = _VARIABLE.sub(lambda match: match[2] if match[2] is not None else match[0], value)
    words = {"null": None, "true": True, "false": False}
    return int(text) if _WHOLE.fullmatch(text) else words.get(text.lower(), text)


def _primus_models(source: str, name: str) -> Path:
    """Find a model's preset: Primus keeps it in primus/configs/models/megatron."""
    for folder in Path(source).resolve().parents:
        path = folder / "primus" / "configs" / "models" / "megatron" / name
        if re.fullmatch(r"[\w.-]+", name) and path.is_file():
            return path
    raise InvalidInputError(
        f"{source} names the model {shown(name)}, whose preset is not found.",
        "Expected it in primus/configs/models/megatron, in a folder above the file.",
        "Import the file where it lies in a copy of Primus.",
    )


def _preset(path: Path, depth: int) -> dict[str, Any]:
    """Read a preset and those that it extends."""
    data = load_yaml(read_text(path), str(path), "megatron")
    above = data.pop("extends", None) or []
    if depth > 8 or not isinstance(above, list) or not all(isinstance(name, str) for name in above):
        raise InvalidInputError(
            f"{path.name} extends {shown(above)}.", "Expected names of presets, at most 8 deep.", "Correct it."
        )
    values: dict[str, Any] = {}
    for name in above:
        if (path.parent / name).is_file():
            values |= _preset(path.parent / name, depth + 1)
    return values | data


SWIFT = Program(
    "ms-swift",
    renamed={"max_length": "seq_length", "packing_length": "seq_length"},
    # swift/megatron/arguments/megatron_args.py.
    fixed={
        "bf16": True, "use_distributed_optimizer": True, "micro_batch_size": 1, "global_batch_size": 16,
        "recompute_granularity": "selective", "attention_backend": "flash", "cross_entropy_loss_fusion": True,
        "moe_token_dispatcher_type": "alltoall", "expert_tensor_parallel_size": 1,
    },
    neutral={
        "tuner_type": "full", "train_type": "full", "padding_free": True, "mlp_padding_free": False,
        "task_type": "causal_lm", "bias_activation_fusion": True, "apply_rope_fusion": False,
    },
    quiet={
        r"model|model_(type|revision)|template|system|use_hf|torch_dtype|check_model|bridge_backend|hub_token": (
            "--model says what the model is"
        ),
        r"(val_|cached_)?dataset.*|load_from_cache_file|split_dataset_ratio|streaming.*|data_seed|"
        r"truncation_strategy|dataloader_.*|train_dataloader_shuffle|loss_scale|interleave_prob|model_(author|name)|packing_num_proc|"
        r"add_non_thinking_prefix|packing": "data",
        r"save_.*|output_dir|add_version|max_shard_size|logging_.*|report_to|eval_.*|max_epochs|num_train_epochs|"
        r"swanlab_.*|(mcore|ref)_.*|merge_lora|max_steps|hub_.*|resume_.*": "records and works between steps",
        r"ddp_timeout|ddp_backend|no_(save|load)_.*|finetune": "how processes find each other; what is loaded",
        r"beta|rpo_alpha|label_smoothing|loss_type|f_divergence_type": "the loss of a pair, of its two scores",
    },
)  # fmt: skip


def _swift(words: Sequence[str], text: str, request: ImportRequest) -> Given:
    """Read the arguments of ``megatron sft``, ``megatron pt`` or ``megatron rlhf``, which is the first word.

    Raises:
        InvalidInputError: no description of the model or no length is given, or it trains on other than pairs.
    """
    started, *words = words
    model = described(request.model, request.vocab_size, request.source)
    pairs, stray = pairs_of(words)
    values = {flag.lstrip("-").replace("-", "_"): _word(values) for flag, values in pairs}
    own, batch = stated(request)
    alignment = _swift_alignment(values) if started == "rlhf" else None
    if values.get("use_megatron_fsdp") is True:
        values = {"data_parallel_sharding_strategy": "optim_grads_params", "ckpt_format": "fsdp_dtensor"} | values
    length = request.given.get("seq_length") or values.get("packing_length") or values.get("max_length")
    length = _check_length(length, request.source, "--max_length")
    packed = values.get("packing") is True
    notes = () if packed else (_AT_MOST.format(length),)
    arguments = arguments_of({**values, **own}, SWIFT, request.source)
    each, nodes = (re.search(rf"\b{name}=['\"]?([0-9]{{1,6}})\b", text) for name in ("NPROC_PER_NODE", "NNODES"))
    world = int(each[1]) * (int(nodes[1]) if nodes else 1) if each else None
    return Given((*_model(model, length), *arguments, *batch), world, stray, notes=notes, alignment=alignment)


def _swift_alignment(values: dict[str, Any]) -> Alignment:
    """Take the kind of training out of the arguments of ``megatron rlhf``.

    Raises:
        InvalidInputError: it is not DPO, or the reference is whole beside a policy that Megatron-FSDP shards.
    """
    kind, sharded = values.pop("rlhf_type", ("dpo",)), values.get("use_megatron_fsdp") is True
    if kind != ("dpo",) or sharded:
        seen = "use_megatron_fsdp is true beside a whole reference" if sharded else f"rlhf_type is {shown(kind)}"
        raise InvalidInputError(
            f"{seen}.",
            "Expected dpo, and a reference that is held as the policy: nothing else is priced here.",
            "Import a script of that kind.",
        )
    return Alignment(method="dpo")


def _model(model: ModelSpec, length: int) -> list[tuple[str, Values]]:
    """Write the description of a model as arguments, for programs that read a checkpoint's configuration."""
    return [pair for pair in model_arguments(model, length).items() if pair[0] != "--seq-length"]


_AT_MOST = "All sequences are priced as {} tokens: without packing they are at most as long."


def _word(values: Values) -> Any:
    """Read a flag's words: a switch, a number, or words as they are, which the shell has expanded."""
    if not values:
        return True
    if len(values) == 1 and _WHOLE.fullmatch(values[0]):
        return int(values[0])
    words = {"true": True, "false": False, "none": None}
    return words.get(values[0].lower(), values) if len(values) == 1 else values


def _check_length(length: object, source: str, flag: str) -> int:
    """Return the length of sequences in tokens, as ``_whole``."""
    seen = f"{source} does not say how long its sequences are ({flag})."
    return _whole(length, seen, "tokens of a sequence", "Give --seq-len.")


def _whole(value: object, seen: str, expected: str, do: str) -> int:
    """Return a whole number, or raise an error of the given words.

    Raises:
        InvalidInputError: it is missing or not decided.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidInputError(seen, f"Expected {expected}.", do)
    return value


SLIME = Program(
    "slime",
    # slime/backends/megatron_utils/arguments.py, set_default_megatron_args.
    fixed={"bf16": True, "use_distributed_optimizer": True, "micro_batch_size": 1},
    # slime_plugins/models/glm4.py builds the layers with the norms that the arguments name.
    neutral={"entropy_coef": 0, "spec": ("slime_plugins.models.glm4", "get_glm_spec")},
    quiet={
        r"actor_num_.*|colocate|num_gpus_per_node|ray_.*|train_env_vars|update_weight.*": (
            "where processes run, and how weights reach the rollouts"
        ),
        r"rollout_.*|num_(rollout|epoch|steps_per_rollout)|n_samples_per_.*|over_sampling_.*|dynamic_sampling_.*|"
        r"partial_rollout|buffer_filter_.*|rm_.*|reward_key|custom_.*|sglang_.*|balance_data|group_rm|"
        r"use_(fault_tolerance|distributed_post|rollout_logprobs)|debug_train_only": "rollouts and rewards",
        r"prompt_data|apply_chat_template.*|input_key|label_key|metadata_key|tool_key|loss_mask_type": "data",
        r"eval_.*|skip_eval_.*|hf_checkpoint|ref_load|ref_ckpt_step|save_.*|use_wandb|use_tensorboard|wandb_.*|"
        r"tb_.*|model_name|log_(multi_turn|passrate|reward_category)": "evaluation, saving and records",
        r"advantage_estimator|kl_.*|eps_clip.*|gamma|lambd|normalize_advantages|loss_type|tis_.*|value_clip|"
        r"use_(kl_loss|tis|unbiased_kl)|disable_(compute_advantages.*|grpo_std.*|rewards_normalization|"
        r"rollout_global_dataset|wandb_random_suffix)": "the loss of a token, elementwise; rewards and records",
    },
)  # fmt: skip
SLIME_PROGRAMS = ("train.py", "train_async.py")
"""slime's programs; both are told by ``--actor-num-nodes``."""
_NORMS_AFTER = ("post_self_attn_layernorm", "post_mlp_layernorm")
"""Switches of slime's Megatron-LM: norms after attention and feed-forward block, beside those before them."""


def from_other_script(request: ImportRequest) -> Given | None:
    """Read a script that starts ms-swift, slime or verl; None: it starts none of them.

    Raises:
        InvalidInputError: a number is missing, or the script starts several.
    """
    started: dict[tuple[str, tuple[str, ...]], None] = {}
    for command in script_commands(request.text, request.source):
        words = command.words
        for at, word in enumerate(words[:-1]):
            name = program_name(word)
            if name == "megatron" and words[at + 1] in ("sft", "pt", "rlhf"):
                started[SWIFT.name, words[at + 1 :]] = None
            elif name in SLIME_PROGRAMS and "--actor-num-nodes" in words:
                started[SLIME.name, words[at + 1 :]] = None
            elif name == "verl.trainer.main_ppo":
                started[VERL.name, words[at + 1 :]] = None
            else:
                continue
            break
    if not started:
        return None
    if len(started) > 1:
        raise InvalidInputError(
            f"{request.source} starts training in {len(started)} ways, with different arguments.",
            "Expected one training command.",
            "Keep the one to import in a file of its own.",
        )
    program, words = next(iter(started))
    if program == SWIFT.name:
        return _swift(words, request.text, request)
    return _slime(words, request) if program == SLIME.name else _verl(words, request)


_UPDATE_ALONE = (
    "The update of the policy alone is priced: not its rollouts, their log-probabilities, nor a critic."
)


def _slime(words: Sequence[str], request: ImportRequest) -> Given:
    """Read the arguments of slime, whose trainer is Megatron-LM.

    Raises:
        InvalidInputError: the batch or the length is missing.
    """
    pairs, stray = pairs_of(words)
    values = {flag.lstrip("-").replace("-", "_"): _word(values) for flag, values in pairs}
    own, batch = stated(request)
    nodes, each = (_count(values, f"actor_num_{name}", 0) for name in ("nodes", "gpus_per_node"))
    if "global_batch_size" not in values:
        sequences = _count(values, "rollout_batch_size", 0) * _count(values, "n_samples_per_prompt", 1)
        values["global_batch_size"] = sequences // max(_count(values, "num_steps_per_rollout", 1), 1) or None
    length = request.given.get("seq_length", values.get("seq_length"))
    values["seq_length"] = _check_length(length, request.source, "--seq-length")
    values.setdefault("max_position_embeddings", values["seq_length"])
    notes = [] if values.get("loss_type") == ("sft_loss",) else [_UPDATE_ALONE]
    if values.pop("use_dynamic_batch_size", False):
        tokens = _count(values, "max_tokens_per_gpu", 0)
        values["micro_batch_size"] = _packed(tokens, values, nodes * each)
        notes.append(_PACKED)
    if "mtp_num_layers" in values and not values.pop("enable_mtp_training", False):
        raise InvalidInputError(
            f"{request.source} has --mtp-num-layers without --enable-mtp-training.",
            "Expected both: layers of multi-token prediction that are not trained are not priced.",
            "Take --mtp-num-layers out to price the run without them.",
        )
    for name in ("max_tokens_per_gpu", "log_probs_max_tokens_per_gpu"):
        values.pop(name, None)
    parts = {}
    if all(values.get(name) is True for name in _NORMS_AFTER):
        values = {name: value for name, value in values.items() if name not in _NORMS_AFTER}
        parts = {"num_norms": 4}
    arguments = arguments_of({**values, **own}, SLIME, request.source)
    return Given((*arguments, *batch), nodes * each or None, stray, notes=tuple(notes), parts=parts)


def _count(values: Mapping[str, Any], name: str, otherwise: int) -> int:
    """Read a whole number, as ``_whole``."""
    value = values.get(name, otherwise)
    seen = f"{name} is {shown(readable(' '.join(value)) if isinstance(value, tuple) else value)}."
    do = "Write it into the command, or give --set NAME=VALUE for a variable."
    return _whole(value, seen, "a whole number, which the script says", do)


_DEGREES = ("tensor_model", "pipeline_model", "context")
_PACKED = "A micro-batch is priced as the whole sequences of that length that its limit of tokens admits."


def _packed(tokens: int, values: Mapping[str, Any], world: int) -> int:
    """Return the sequences of a micro-batch: as many as its tokens admit and a replica's batch divides into.

    Args:
        tokens: maximum of a GPU; context parallelism multiplies it.
        values: settings, with the length, the batch of a step and the degrees.
        world: processes.
    """
    tp, pp, cp = (_count(values, f"{kind}_parallel_size", 1) for kind in _DEGREES)
    sequences = _count(values, "global_batch_size", 1) // max(world // max(tp * pp * cp, 1), 1)
    fitting = range(min(tokens * cp // max(int(values["seq_length"]), 1), sequences), 0, -1)
    return next((size for size in fitting if sequences % size == 0), 1)


VERL = Program(
    "verl",
    fixed={
        "bf16": True, "use_distributed_optimizer": True, "sequence_parallel": True, "attention_backend": "flash",
        "moe_token_dispatcher_type": "alltoall",
    },
    neutral={
        "use_dynamic_bsz": False,
        "use_mbridge": True, "vanilla_mbridge": True, "dtype": "bfloat16", "use_prefix_grouper": False,
        "forward_only": False, "ppo_epochs": 1, "calculate_entropy": False, "entropy_coeff": 0,
        "strategy": "megatron", "freeze_vision_tower": False,
    },
    quiet={
        r"data\..*|algorithm\..*|trainer\..*|critic\..*|reward.*|custom_reward.*|ray_kwargs\..*|hydra\..*|"
        r"global_profiler\..*|actor_rollout_ref\.((rollout|ref|model)\..*|nccl_timeout)": (
            "rollouts, rewards, data, records and other models"
        ),
        r"optim\..*|checkpoint\..*|clip_.*|kl_.*|use_kl_loss|loss_agg_mode|policy_loss\..*|shuffle|tau_.*|"
        r"grad_clip|use_torch_compile|use_fused_kernels|use_dist_checkpointing|dist_checkpointing_.*|load_weight|seed|"
        r"data_loader_seed|profiler\..*|use_remove_padding|ppo_max_token_len_per_gpu": (
            "the loss of a token, numbers of the update, saving and records; limits of tokens are looked at"
        ),
    },
)  # fmt: skip
_ACTOR = re.compile(
    r"actor_rollout_ref\.actor\."
    r"(megatron\.(override_(transformer|ddp)_config\.)?|optim\.override_optimizer_config\.)?"
)
_HOSTED = ("param_offload", "grad_offload", "optimizer_offload")
_MOVED = (
    "Weights, gradients or states move to the host after an update and back before the next (*_offload): the step "
    "is priced without these moves."
)
"""Note on what waits on the host during the rollouts (verl/workers/engine/base.py, BaseEngineCtx)."""


def _verl(words: Sequence[str], request: ImportRequest) -> Given:
    """Read the settings of verl's actor, whose trainer is Megatron-LM's.

    Raises:
        InvalidInputError: the trainer is another, or a number is missing.
    """
    model = described(request.model, request.vocab_size, request.source)
    settings = dict(pair for word in words if (pair := _override(word)) is not None)
    own, batch = stated(request)
    settings |= own
    if not any(name.startswith("actor_rollout_ref.actor.megatron.") for name in settings):
        raise InvalidInputError(
            f"{request.source} trains with FSDP, as verl does without settings of Megatron-LM.",
            "Expected actor_rollout_ref.actor.megatron settings: its FSDP workers are not read.",
            "Import a script of that kind.",
        )
    values = {_ACTOR.sub("", name): _word(_listed(str(value))) for name, value in settings.items()}
    number = {name: _count(values, _ACTOR.sub("", name), count) for name, count in VERL_NUMBERS.items()}
    world = number["trainer.nnodes"] * number["trainer.n_gpus_per_node"]
    length = request.given.get("seq_length") or (
        number["data.max_prompt_length"] + number["data.max_response_length"]
    )
    sequences = number["actor_rollout_ref.actor.ppo_mini_batch_size"] * number["actor_rollout_ref.rollout.n"]
    notes = [_UPDATE_ALONE, _AT_MOST.format(length)]
    values.pop("ppo_mini_batch_size", None)
    values |= {"global_batch_size": sequences, "seq_length": length}
    values["micro_batch_size"] = values.pop("ppo_micro_batch_size_per_gpu", None)
    moves = [values.pop(name) for name in _HOSTED if isinstance(values.get(name), bool)]
    notes += [_MOVED] if any(moves) else []
    if values.pop("use_dynamic_bsz", False) is True:
        tokens = number["actor_rollout_ref.actor.ppo_max_token_len_per_gpu"]
        values["micro_batch_size"] = _packed(tokens, values, world)
        notes.append(_PACKED)
    pairs = arguments_of(values, VERL, request.source)
    return Given((*_model(model, length), *pairs, *batch), world, (), notes=tuple(notes))


def _listed(text: str) -> Values:
    """Split a flat list in Hydra's grammar; any other text is one word."""
    flat = re.fullmatch(r"\[([^\[\]]+)\]", text)
    return (text,) if flat is None else tuple(word.strip("\"' ") for word in flat[1].split(","))


VERL_NUMBERS = {
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 256,
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 16384,
    "actor_rollout_ref.rollout.n": 1,
}
"""Numbers of verl's configuration that a step depends on, with their defaults."""


def _override(word: str) -> tuple[str, str] | None:
    """Split an override of Hydra; None: the word is a flag, or whatever the shell is given."""
    match = re.fullmatch(r"\+{0,2}([A-Za-z_][\w.@-]*)=(.*)", word, re.DOTALL)
    return None if match is None else (match[1], match[2].strip("'\""))
