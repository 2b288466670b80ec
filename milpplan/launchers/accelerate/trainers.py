"""Programs that start Transformers' trainer from a YAML of their own: LLaMA-Factory, axolotl and TRL.

A program is a table of names (``Trainer``) onto the settings of Accelerate and the flags of the trainer. What is
in no table stays under its name, and is refused by name where it is not the trainer's.

Source: hiyouga/LLaMA-Factory at ff6d4d12, src/llamafactory/hparams and model/model_utils/checkpointing.py;
axolotl-ai-cloud/axolotl at 067b021c, src/axolotl/utils/schemas; trl 1.16.0, scripts/utils.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from milpplan.errors import InvalidInputError
from milpplan.launchers.records import ImportRequest
from milpplan.launchers.settings import flat, wrong_value
from milpplan.problem import parse_json, read_text
from milpplan.problem.reading import shown

DEEPSPEED_FILE = "deepspeed_config.deepspeed_config_file"
"""Accelerate's setting that names a configuration of DeepSpeed."""
PAIRS = "milpplan.pairs"
"""Setting of a program that trains on pairs of sequences (DPO)."""
_AUTO = {
    "train_micro_batch_size_per_gpu": "--per_device_train_batch_size",
    "gradient_accumulation_steps": "--gradient_accumulation_steps",
}
"""Numbers of DeepSpeed that the trainer fills in where a configuration says ``auto``."""


@dataclass(frozen=True, slots=True)
class Trainer:
    """Names under which a program takes the settings of Accelerate and of the trainer."""

    name: str
    """Name of the program."""
    marks: frozenset[str]
    """Keys that tell its YAML."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """The trainer's flags, or Accelerate's settings, by the program's keys."""
    words: Mapping[str, Mapping[object, object]] = field(default_factory=dict)
    """Values in the trainer's words by the program's, of keys whose values are words of its own."""
    neutral: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """Values of the program's own keys that are priced as they are; other values are refused."""
    quiet: Mapping[str, str] = field(default_factory=dict)
    """Patterns of the program's own keys that have no effect on the cost, with reasons."""


LLAMA_FACTORY = Trainer(
    "LLaMA-Factory",
    frozenset(("finetuning_type", "stage")),
    renamed={"cutoff_len": "--max_length", "flash_attn": "--attn_implementation"},
    words={"flash_attn": {"auto": "sdpa", "sdpa": "sdpa", "fa2": "flash_attention_2", "disabled": "eager"}},
    neutral={
        "stage": ("sft", "pt"),
        "pref_loss": ("sigmoid", "hinge", "ipo", "kto_pair"),
        "finetuning_type": ("full",),
        "pure_bf16": (False,),
        "neat_packing": (False,),
        "use_reentrant_gc": (True, False),
        "bf16": (True,),
    },
    quiet={
        r"dataset|dataset_dir|media_dir|template|max_samples|val_size|tokenized_path|mix_strategy|"
        r"interleave_probs|train_on_prompt|mask_history|buffer_size|eval_dataset|tool_format|"
        r"default_system|enable_thinking": "data",
        r"pref_(beta|ftx|bco_weight)|dpo_label_smoothing": "the loss of a pair, of its two scores",
        r"plot_loss|use_swanlab|swanlab_.*|ignore_pad_token_for_loss|compute_accuracy": "records",
        r"adapter_folder|hf_hub_token|ms_hub_token|export_.*|infer_.*|ray_.*|tf32": (
            "what is loaded or exported; products in fp32, of which there are none"
        ),
    },
)
AXOLOTL = Trainer(
    "axolotl",
    frozenset(("base_model", "datasets")),
    renamed={
        "micro_batch_size": "--per_device_train_batch_size",
        "sequence_len": "--max_length",
        "sample_packing": "--packing",
        "optimizer": "--optim",
        "dp_shard_size": "parallelism_config.parallelism_config_dp_shard_size",
        "dp_replicate_size": "parallelism_config.parallelism_config_dp_replicate_size",
        "tensor_parallel_size": "parallelism_config.parallelism_config_tp_size",
        "fsdp_version": "fsdp_config.fsdp_version",
        "flash_attention": "--attn_implementation",
    },
    words={"flash_attention": {True: "flash_attention_2", False: "sdpa"}},
    neutral={
        "adapter": ("",),
        "load_in_8bit": (False,),
        "load_in_4bit": (False,),
        "bf16": (True, "auto", "true"),
        "fp16": (False,),
        "fsdp_config.fsdp_limit_all_gathers": (True,),
        "fsdp_config.limit_all_gathers": (True,),
        "flash_attn_cross_entropy": (False,),
    },
    quiet={
        r"(test_)?datasets(\[\d+\])?(\..*)?|dataset_.*|val_set_size|chat_template.*|shuffle_.*|train_on_inputs|"
        r"min_sample_len|group_by_length|special_tokens(\..*)?|tokens|tokenizer_.*|pad_to_sequence_len|"
        r"eval_sample_packing|sample_packing_.*|eot_tokens|default_system_message|roles_to_train|"
        r"skip_prepare_dataset": "data",
        r"base_model(_config)?|model_type|revision_of_model|is_.*_derived_model|strict|trust_remote_code": (
            "--model says what the model is"
        ),
        r"num_epochs|lr_scheduler|cosine_.*|saves_per_epoch|evals_per_epoch|wandb_.*|mlflow_.*|comet_.*|"
        r"early_stopping_.*|save_first_step|auto_resume_.*|trackio_.*|resume_from_checkpoint|lora_model_dir|"
        r"loss_watchdog_.*": ("rates, and works between steps"),
        r"tf32|ddp_timeout|experimental_skip_move_to_device": "products in fp32, where there are none; the start",
    },
)
TRL = Trainer(
    "TRL",
    frozenset(("per_device_train_batch_size",)),
    neutral={"bf16": (True,)},
    quiet={r"chat_template|dataset_mixture\..*|dataset_mixer\..*|tf32": "data; products in fp32: there are none"},
)
TRAINERS = (LLAMA_FACTORY, AXOLOTL, TRL)


def trainer_of(data: Mapping[str, Any]) -> Trainer | None:
    """Return the program whose YAML this is; None: it is none of these."""
    return next((trainer for trainer in TRAINERS if trainer.marks <= data.keys()), None)


def trainer_values(trainer: Trainer, data: Mapping[str, Any], request: ImportRequest) -> dict[str, Any]:
    """Write the YAML of a program as settings of Accelerate and flags of the trainer.

    Args:
        trainer: the program.
        data: the YAML.
        request: gives the name of the file, the number of processes, and stated settings.

    Raises:
        InvalidInputError: the number of processes, or what shards the model, is not given.
    """
    source, num_gpus = request.source, request.num_gpus or _processes(data)
    if trainer is TRL and "distributed_type" not in request.given:
        raise InvalidInputError(
            f"{source} is a configuration of TRL's trainer, which does not say what shards the model.",
            "Expected Accelerate's settings beside it.",
            "Give --set distributed_type=FSDP, MULTI_GPU, or DEEPSPEED with --set deepspeed_config.zero_stage=N.",
        )
    if num_gpus is None:
        raise InvalidInputError(
            f"{source} does not say how many processes {trainer.name} starts.",
            "Expected their number.",
            "Give --gpus.",
        )
    said = {name: value for name, value in flat(data).items() if value is not None}
    if trainer is AXOLOTL:
        said.setdefault("bf16", "auto")
        if said.pop("context_parallel_size", 1) != 1:
            raise wrong_value(
                "context_parallel_size",
                data["context_parallel_size"],
                "1: ranks hold consecutive tokens, the last attends to most keys, and others wait unpriced",
            )
    values: dict[str, Any] = {"num_processes": num_gpus, "mixed_precision": "bf16" if said.get("bf16") else "no"}
    for name, value in said.items():
        if _is_neutral(value, trainer.neutral.get(name, ())) or name in ("deepspeed", "fsdp"):
            continue
        if name not in trainer.neutral and any(re.fullmatch(pattern, name) for pattern in trainer.quiet):
            continue
        own = name.startswith("fsdp_config.") or name in _ACCELERATES
        values[trainer.renamed.get(name, name if own else f"--{name}")] = trainer.words.get(name, {}).get(
            value if isinstance(value, str | bool) else None, value
        )
    values |= {} if trainer is TRL else _distribution(said, num_gpus)
    if trainer is LLAMA_FACTORY and said.get("finetuning_type") == "lora":
        values |= _factory_adapters(values)
    if trainer is AXOLOTL and said.get("adapter") == "lora":
        values |= _axolotl_adapters(values)
    if trainer is LLAMA_FACTORY:
        if values.get("--stage") == "dpo":
            del values["--stage"]
            values[PAIRS] = True
        off = said.get("disable_gradient_checkpointing", False)
        values.pop("--disable_gradient_checkpointing", None)
        values["--gradient_checkpointing"] = off is not True
    if trainer is AXOLOTL:
        values.setdefault("--gradient_checkpointing", False)
        if values.get("distributed_type") in ("MULTI_GPU", "NO"):
            # Weights are loaded in the format of the products (utils/config/__init__.py).
            values["--dtype"] = "bfloat16"
    return values


_SIZES = ("dp_replicate_size", "dp_shard_size", "tensor_parallel_size", "context_parallel_size")


def _processes(data: Mapping[str, Any]) -> int | None:
    """Multiply axolotl's sizes where they make the number of processes (utils/distributed.py); None: unknown."""
    sizes = [data.get(name) or 1 for name in _SIZES]
    if not data.get("dp_shard_size") or not all(type(size) is int and size > 0 for size in sizes):
        return None
    return prod(sizes)


def _factory_adapters(values: dict[str, Any]) -> dict[str, Any]:
    """Take LLaMA-Factory's settings of adapters out of ``values`` and write them as TRL's flags.

    Frozen weights are loaded in bf16 (hparams/parser.py, compute_dtype; model/adapter.py).
    """
    del values["--finetuning_type"]
    rank, dropout = values.pop("--lora_rank", 8), values.get("--lora_dropout", 0)
    target = values.pop("--lora_target", "all")
    names = [name.strip() for name in target.split(",")] if isinstance(target, str) else target
    return {
        "--use_peft": True,
        "--lora_r": rank,
        "--lora_dropout": dropout,
        "--lora_target_modules": "all-linear" if names == ["all"] else names,
        "--dtype": "bfloat16",
    }


def _axolotl_adapters(values: dict[str, Any]) -> dict[str, Any]:
    """Take axolotl's settings of adapters out of ``values`` and write them as TRL's flags.

    ``lora_target_linear`` adds every matrix but the head to the names (loaders/adapter.py). Frozen weights are
    loaded in the format of the products (utils/config/__init__.py).
    """
    del values["--adapter"]
    every = values.pop("--lora_target_linear", False) is True
    values.setdefault("--lora_dropout", 0.0)
    target = {"--lora_target_modules": "all-linear"} if every else {}
    return {"--use_peft": True, "--dtype": "bfloat16", **target}


_ACCELERATES = ("distributed_type", "deepspeed_config", "parallelism_config")


def _is_neutral(value: object, neutral: tuple[object, ...]) -> bool:
    return any(type(value) is type(priced) and value == priced for priced in neutral)


def _distribution(said: Mapping[str, Any], num_gpus: int) -> dict[str, Any]:
    """Read what shards the model: a configuration of DeepSpeed, FSDP, or nothing."""
    if isinstance(said.get("deepspeed"), str) and said["deepspeed"]:
        return {"distributed_type": "DEEPSPEED", DEEPSPEED_FILE: said["deepspeed"]}
    options = said.get("fsdp")
    words = options.split() if isinstance(options, str) else options if isinstance(options, list) else []
    if words or "fsdp_version" in said or any(name.startswith("fsdp_config.") for name in said):
        strange = [word for word in words if word not in ("full_shard", "auto_wrap")]
        return {"distributed_type": "FSDP", **({"--fsdp": words} if strange else {})}
    return {"distributed_type": "MULTI_GPU" if num_gpus > 1 else "NO"}


def deepspeed_file(name: object, source: str) -> dict[str, Any]:
    """Read a configuration of DeepSpeed that a file names, beside the file or from a folder above it.

    Raises:
        InvalidInputError: it is not found, or is no JSON.
    """
    folders = Path(source).resolve().parents
    paths = [folder / name for folder in folders] if isinstance(name, str) and name else []
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        raise InvalidInputError(
            f"{source} names the configuration of DeepSpeed {shown(name)}, which is not found.",
            "Expected it beside the file, or from a folder above it.",
            "Import the file where it lies in a copy of its program.",
        )
    return flat(parse_json(read_text(path), str(path)))


def filled_in(configuration: Mapping[str, Any], trainer: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in what a configuration of DeepSpeed leaves to the trainer (transformers, integrations/deepspeed.py).

    Args:
        configuration: of DeepSpeed, by ``section.name``.
        trainer: settings of Accelerate, and flags of the trainer with their prefix.
    """
    values = {
        name: trainer.get(_AUTO[name]) if value == "auto" and name in _AUTO else value
        for name, value in configuration.items()
    }
    half = trainer.get("mixed_precision") == "bf16"
    for name, on in (("bf16.enabled", half), ("fp16.enabled", False)):
        if values.get(name) == "auto" and half:
            values[name] = on
    if half:
        values.setdefault("bf16.enabled", True)
    for name, flag in _AUTO.items():
        values.setdefault(name, trainer.get(flag))
    return values
