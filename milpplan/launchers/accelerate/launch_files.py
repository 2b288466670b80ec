"""Accelerate's files, to write and to read: a launch YAML and the script that starts Transformers' trainer with
it.

Source: accelerate 1.15.0, parallelism_config.py, commands/launch.py, commands/config/config_args.py; flags of the
trainer: transformers 5.24.0, training_args.py and examples/pytorch/language-modeling/run_clm.py; trl 1.16.0,
trainer/sft_config.py, trainer/model_config.py and scripts/utils.py; with names of older releases. All of them are
in ``accelerate_keys.json``.

``settings_of`` writes a plan as Accelerate's settings: FSDP2 over the data- and context-parallel ranks, or a GPU.
``plan_of`` reads settings, also those of replicas without shards.

``FSDP2`` and ``ACCELERATE`` declare the layouts that Accelerate can run.

Source: accelerate 1.15.0, parallelism_config.py (sizes and their order), utils/dataclasses.py (FSDP2 plugin),
accelerator.py (_prepare_tp).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from milpplan.errors import IllegalPlanError, InvalidInputError
from milpplan.launchers import Code, ConfigLaunch, ImportRequest, Known, flat, known_settings
from milpplan.launchers.accelerate.trainers import TRL, trainer_of, trainer_values
from milpplan.launchers.capabilities import (
    FSDP_LIMITS,
    FSDP_RULES,
    TRANSFORMERS,
    Capability,
    Columns,
    Limit,
    RowRule,
)
from milpplan.launchers.scripts import defaults, header
from milpplan.launchers.settings import Settings, check_words, kinds_of, nested, wrong_value, yaml_text
from milpplan.launchers.shell import pairs_of, script_commands, unknown_in
from milpplan.launchers.shell.launch_text import load_yaml, program_place
from milpplan.problem import Job, Layout, ModelSpec, Plan, Problem, Recompute, VirtualStage, parse_json, validated
from milpplan.problem.reading import shown

TRAINER = ("per_device_train_batch_size", "gradient_accumulation_steps", "block_size")
"""Settings that belong to the trainer and not to Accelerate, as ``run_clm.py`` names them."""
CHECKPOINTING = "--gradient_checkpointing"
"""Trainer's flag that recomputes all layers where FSDP does not."""
STAGE = "--stage"
"""Setting that names what a program trains by, where this is not the next token: a method of ``Job.alignment``."""
KEYS = "accelerate_keys.json"
FLAG = "--"
"""Prefix of the trainer's flags, which sets them apart from Accelerate's settings."""
_DOCUMENT = re.compile(r"<<-?\s*['\"]?(\w+)['\"]?")
_TARGET = re.compile(r"(?<![<>&0-9])>\s*['\"]?([^\s'\"<>|;&]+)")
_EMPTY = "\x01"
"""Stand-in for an empty word, which is a value."""
_TRUE, _FALSE = ("true", "yes", "y", "t", "1"), ("false", "no", "n", "f", "0")
"""Words that HfArgumentParser takes for true and false."""


@dataclass(frozen=True, slots=True)
class Read:
    """Read launch: Accelerate's settings by name, the trainer's flags with prefix ``FLAG``, the started program,
    and whose settings these are."""

    values: Mapping[str, Any]
    program: str | None
    launcher: str = "Accelerate and the trainer"


def configuration(launch: ConfigLaunch) -> dict[str, Any]:
    """Select the settings of a launch that the YAML holds."""
    of_trainer = {*TRAINER, CHECKPOINTING, STAGE}
    return {name: value for name, value in launch.settings.items() if name not in of_trainer}


def script(launch: ConfigLaunch, version: str, program: Sequence[str], **data: str) -> str:
    """Write the script that every node runs, which contains the YAML.

    Args:
        launch: the launch to start.
        version: of milpplan.
        program: lines after ``accelerate launch``, without continuation marks: a program and its flags.
        data: defaults of the variables that the program's flags take besides ``MODEL``.
    """
    words = [
        'accelerate launch --config_file "$CONFIG" --machine_rank "$NODE_RANK"',
        '--main_process_ip "$MASTER_ADDR" --main_process_port "$MASTER_PORT"',
        *program,
    ]
    if syncs(launch.settings):
        words.append('--accelerator_config \'{"gradient_accumulation_kwargs": {"sync_each_batch": true}}\'')
    words.append('--output_dir "${OUTPUT_DIR:-output}"')
    lines = ["#!/usr/bin/env bash", *header(launch, version), "set -euo pipefail", ""]
    lines += [
        "# Where this node is, what is trained by which program, and where the configuration goes.",
        *defaults(NODE_RANK=0, MASTER_ADDR="localhost", MASTER_PORT=29500, MODEL=".", **data),
        *defaults(CONFIG="$(mktemp)"),
        "",
        "cat > \"$CONFIG\" <<'YAML'",
        *yaml_text(configuration(launch)).splitlines(),
        "YAML",
        "",
        "# Not decided by the plan: data, learning rates.",
        " \\\n    ".join(words),
    ]
    return "\n".join(lines) + "\n"


def trainer_flags(settings: Mapping[str, Any], **names: str) -> str:
    """Write the sizes of the batch as flags of a trainer; ``names`` holds flags that it names otherwise."""
    return " ".join(f"--{names.get(name, name)} {settings[name]}" for name in TRAINER)


def written(launch: ConfigLaunch, version: str) -> dict[str, str]:
    """Write the files that start ``run_clm.py`` of Transformers' examples, the script first.

    Any program of Transformers' trainer takes its flags.
    """
    program = [
        '"$TRAIN_DIR/run_clm.py"',
        trainer_flags(launch.settings),
        *([f"{CHECKPOINTING} true"] if CHECKPOINTING in launch.settings else []),
        '--config_name "$MODEL" --tokenizer_name "$MODEL" --dataset_name wikitext',
        "--dataset_config_name wikitext-103-raw-v1 --do_train --bf16 true --max_steps 100",
    ]
    return {
        "accelerate.sh": script(launch, version, program, TRAIN_DIR="."),
        "accelerate.yaml": yaml_text(configuration(launch)),
    }


def syncs(settings: Mapping[str, Any]) -> bool:
    """Test whether sharded gradients must be reduced in every micro-batch, as a plan assumes."""
    return "fsdp_config.fsdp_version" in settings and int(settings["gradient_accumulation_steps"]) > 1


def read_files(request: ImportRequest) -> Read:
    """Read a script, a YAML alone (which lacks the trainer's numbers), or the YAML of a program of Transformers.

    Raises:
        InvalidInputError: the text is none of them, or only a running shell has its values.
    """
    text, source = request.text, request.source
    if source.lower().endswith((".yaml", ".yml")):
        data = load_yaml(text, source, "accelerate")
        trainer = trainer_of(data)
        if trainer is None:
            return Read(named(flat(data)), None)
        # TRL's releases differ in what they recompute where no flag says it.
        program = "sft.py" if trainer is TRL else None
        return Read(named(trainer_values(trainer, data, request)), program, trainer.name)
    started = {launched for c in script_commands(text, source) if (launched := _launched(c.words)) is not None}
    if len(started) != 1:
        raise InvalidInputError(
            f"{source} has {len(started)} different commands `accelerate launch ... PROGRAM.py ...`.",
            "Expected one, which starts the training.",
            "Give the script that starts it, as `milpplan export --to accelerate` writes it.",
        )
    before, program, after = next(iter(started))
    launch = _flags_of(
        before, {**known_settings(KEYS, "launch"), **_unprefixed(known_settings(KEYS, "config"))}, source
    )
    values = named(flat(load_yaml(_document(text, launch.pop("config_file", None), source), source, "accelerate")))
    values |= named(launch, flags=True)
    flags = _flags_of(after, known_settings(KEYS, "trainer"), source)
    trainer = trainer_of(flags)
    if trainer is None or trainer is TRL:
        return Read(values | {f"{FLAG}{name}": value for name, value in flags.items()}, program)
    num_gpus = request.num_gpus or values.get("num_processes")
    own = trainer_values(trainer, nested(_scalars(flags, source)), replace(request, num_gpus=num_gpus))
    return Read(named(own) | values, None)


def _scalars(flags: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Convert texts of flags as YAML does, which a program's own file would be."""
    return {
        name: load_yaml(f"value: {value}", source, "accelerate")["value"] if isinstance(value, str) else value
        for name, value in flags.items()
    }


def _unprefixed(schema: Known) -> Known:
    """Name settings as the command does, without their section."""
    return {name.rpartition(".")[2]: row for name, row in schema.items()}


def _launched(words: tuple[str, ...]) -> tuple[tuple[str, ...], str, tuple[str, ...]] | None:
    """Split a command into Accelerate's own words, the program, and the program's words."""
    for index, word in enumerate(words):
        name = word.rpartition("/")[2]
        if name == "accelerate" and words[index + 1 : index + 2] == ("launch",):
            return _parted(words[index + 2 :])
        if name in ("accelerate-launch", "accelerate.commands.launch"):
            return _parted(words[index + 1 :])
    return None


def _parted(words: tuple[str, ...]) -> tuple[tuple[str, ...], str, tuple[str, ...]] | None:
    module = next((index for index, word in enumerate(words) if word in ("-m", "--module")), None)
    at = program_place(words)
    if module is not None and (at is None or module < at) and module + 1 < len(words):
        return words[:module], words[module + 1], words[module + 2 :]
    return None if at is None else (words[:at], words[at].rpartition("/")[2], words[at + 1 :])


def _document(text: str, config_file: object, source: str) -> str:
    """Find the here document that the command takes its configuration from."""
    wanted = config_file if isinstance(config_file, str) else None
    documents: list[tuple[str, str]] = []
    lines = iter(text.splitlines())
    for line in lines:
        match = _DOCUMENT.search(line)
        if match is None or line.lstrip().startswith("#"):
            continue
        body = []
        for inside in lines:
            if inside.strip() == match[1]:
                break
            body.append(inside)
        target = _TARGET.search(line)
        documents.append((target[1] if target else "", "\n".join(body)))
    # A variable may name any file.
    fitting = [(target, body) for target, body in documents if wanted in (None, target) or "$" in target]
    if len(fitting) != 1:
        raise InvalidInputError(
            f"{source} has {len(fitting)} here documents for the configuration of Accelerate.",
            "Expected one, with the YAML in it (cat > FILE <<'YAML'), or a .yaml file.",
            "Give what `milpplan export --to accelerate` writes, or put the YAML into the script.",
        )
    return fitting[0][1]


SECTIONS = {"fsdp_": "fsdp_config", "dynamo_": "dynamo_config", "parallelism_config_": "parallelism_config"}
"""Sections by the prefix of their settings."""


def named(values: Mapping[str, Any], flags: bool = False) -> dict[str, Any]:
    """Give settings their full names (commands/launch.py, _validate_launch_command).

    Args:
        values: settings; in a section they may lack its prefix, except in parallelism_config.
        flags: the settings are flags of the command, which have no section.
    """
    full: dict[str, Any] = {}
    for name, value in values.items():
        section, _, rest = name.partition(".")
        prefix = next((start for start, own in SECTIONS.items() if own == section), "")
        own_section = next((own for start, own in SECTIONS.items() if name.startswith(start) and name != own), "")
        if rest and prefix in ("fsdp_", "dynamo_") and not rest.startswith(prefix):
            name = f"{section}.{prefix}{rest}"
        elif flags and not rest and own_section:
            name = f"{own_section}.{name}"
        full[name] = value
    return full


def _flags_of(words: tuple[str, ...], schema: Known, source: str) -> dict[str, Any]:
    """Read flags and convert their values to the declared types; others stay texts.

    Raises:
        InvalidInputError: a word is not a flag, or only the running shell has it.
    """
    check_words(words, source)
    pairs, stray = pairs_of([word or _EMPTY for word in words])
    if stray:
        said = [*unknown_in(" ".join(stray)), *stray]
        raise InvalidInputError(
            f"{source}: {shown(said[0])} stands between the flags of a program, and may hold others.",
            "Expected flags that the file says.",
            "Write them out in the command.",
        )
    flags_read: dict[str, Any] = {}
    for flag, values in pairs:
        name = flag.lstrip("-").replace("-", "_")
        if name.startswith("no_") and name not in schema and not values:
            name, values = name.removeprefix("no_"), ("false",)
        flags_read |= _typed(name, values, schema.get(name, (None, "text")))
    return flags_read


def _typed(name: str, values: tuple[str, ...], row: tuple[Any, ...]) -> dict[str, Any]:
    """Convert a flag's value as the parser does; a table in JSON becomes settings below the flag."""
    kinds = kinds_of(row)
    if len(values) != 1:
        return {name: True if not values and "bool" in kinds else list(values)}
    text = "" if values[0] == _EMPTY else values[0]
    if unknown_in(text):
        return {name: Code(f"{unknown_in(text)[0]}, which only the running shell knows")}
    if text.startswith("{"):
        return flat(parse_json(text, f"--{name}"), f"{name}.") or {name: {}}
    if "bool" in kinds and text.lower() in (*_TRUE, *_FALSE):
        return {name: text.lower() in _TRUE}
    if {"count", "int", "counts"} & set(kinds) and re.fullmatch(r"-?\d{1,18}", text):
        return {name: int(text)}
    if "number" in kinds and re.fullmatch(r"[-+]?(\d{1,99}\.?\d{0,99}|\.\d{1,99})([eE][-+]?\d{1,3})?", text):
        return {name: float(text)}
    return {name: [text] if kinds == ("texts",) else text}


P, F = "parallelism_config.parallelism_config_", "fsdp_config.fsdp_"
STRATEGY = "alltoall"
"""Rotation method with which PyTorch passes keys and values from rank to rank: the ring that is priced."""
GATHERS = "allgather"
"""Rotation method with which PyTorch gathers all keys and values at once, its default."""


def settings_of(plan: Plan, num_nodes: int, job: Job) -> dict[str, Any]:
    """Write a plan as Accelerate's settings and the trainer's numbers, which count both sequences of a pair as
    one."""
    layout = plan.layout
    kind = "FSDP" if layout.zero_stage else "NO"
    settings: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kind,
        "mixed_precision": "bf16",
        "num_machines": num_nodes,
        "num_processes": layout.num_gpus,
        "rdzv_backend": "static",
        "use_cpu": False,
        "debug": False,
    }
    if layout.zero_stage:
        settings |= {
            f"{F}version": 2,
            f"{F}reshard_after_forward": layout.zero_stage == 3,
            f"{F}auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            f"{F}activation_checkpointing": any(stage.recompute.full for stage in plan.virtual_stages),
            f"{F}offload_params": False,
            f"{P}dp_replicate_size": layout.dp_replicate,
            f"{P}dp_shard_size": layout.dp // layout.dp_replicate,
            f"{P}cp_size": layout.cp,
            f"{P}tp_size": layout.tp,
        }
        if layout.cp > 1:
            settings[f"{P}cp_comm_strategy"] = STRATEGY
    elif any(stage.recompute.full for stage in plan.virtual_stages):
        settings[CHECKPOINTING] = True
    if job.alignment is not None:
        settings[STAGE] = job.alignment.method
    return settings | {
        "gradient_accumulation_steps": layout.num_micro_batches,
        "per_device_train_batch_size": layout.micro_batch_size // job.sequences_together,
        "block_size": job.sequence_length,
    }


def plan_of(settings: Settings, model: ModelSpec, recomputes: bool) -> Plan:
    """Read the plan that the settings stand for.

    Args:
        settings: of Accelerate and of the trainer.
        model: the trained model.
        recomputes: the trainer repeats the forward pass of all layers in the backward pass.

    Raises:
        InvalidInputError: a setting has a value that no plan has.
        IllegalPlanError: Accelerate would refuse the settings.
    """
    kind = settings.text("distributed_type")
    if kind not in ("FSDP", "MULTI_GPU", "NO"):
        raise wrong_value(
            "distributed_type", kind, "FSDP, MULTI_GPU, DEEPSPEED or NO: nothing else is priced here"
        )
    processes = 1 if kind == "NO" and "num_processes" not in settings.values else settings.size("num_processes")
    sizes = {"dp_replicate": processes, "dp_shard": 1, "cp": 1, "tp": 1}
    stage, full = 0, recomputes
    # With these flags the command ignores the file's distributed_type and parallelism_config.
    if not any(name.startswith("parallelism_config.") for name in settings.values):
        settings.looked_at |= {"FSDP": {"use_fsdp"}, "MULTI_GPU": {"multi_gpu"}}.get(kind, set())
    if kind == "FSDP":
        sizes, stage, full = _sharded(settings, processes)
        if recomputes:
            raise wrong_value(CHECKPOINTING, True, f"{F}activation_checkpointing in its place, with FSDP")
    else:
        # Without FSDP its settings have no effect.
        settings.looked_at |= {name for name in settings.values if name.startswith("fsdp_config")}
    check_sizes(kind, sizes, processes)
    replicas = sizes["dp_replicate"] * sizes["dp_shard"]
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    micro, steps = (settings.size(f"{FLAG}{name}") for name in names)
    several = replicas * sizes["cp"] > 1
    data = {
        "tp": sizes["tp"],
        "cp": sizes["cp"],
        "dp": replicas,
        "micro_batch_size": micro,
        "global_batch_size": micro * steps * replicas,
        "zero_stage": stage,
        "dp_replicate": sizes["dp_replicate"] if stage else 1,
        "overlap_grad_reduce": several,
        "overlap_param_gather": stage > 0,
    }
    layers = model.num_layers
    recompute = Recompute(full=layers if full else 0)
    layout = validated(Layout, data, "the layout that the settings describe")
    return Plan(layout=layout, virtual_stages=(VirtualStage(layers=(0, layers), recompute=recompute),))


def _sharded(settings: Settings, processes: int) -> tuple[dict[str, int], int, bool]:
    """Return the sizes, the ZeRO stage, and whether layers are recomputed.

    Without a parallelism_config FSDP shards over all processes (accelerator.py, where no device mesh is built).
    """
    policy = settings.text(f"{F}auto_wrap_policy")
    if policy != "TRANSFORMER_BASED_WRAP":
        raise wrong_value(
            f"{F}auto_wrap_policy", policy, "TRANSFORMER_BASED_WRAP: weights are gathered layer by layer"
        )
    if not any(name.startswith("parallelism_config.") for name in settings.values):
        sizes = {"dp_replicate": 1, "dp_shard": processes, "cp": 1, "tp": 1}
    else:
        sizes = {name: settings.degree(f"{P}{name}_size") for name in ("dp_replicate", "dp_shard", "cp", "tp")}
    strategy = settings.get(f"{P}cp_comm_strategy")
    if strategy not in (STRATEGY, GATHERS):
        raise wrong_value(f"{P}cp_comm_strategy", strategy, f"{STRATEGY} or {GATHERS}")
    if settings.degree(f"{P}sp_size") != 1:
        raise wrong_value(f"{P}sp_size", settings.get(f"{P}sp_size"), "1: Ulysses beside FSDP2 is no plan here")
    for name in ("offload_params", "activation_checkpointing_offload"):
        if settings.switch(f"{F}{name}"):
            raise wrong_value(f"{F}{name}", True, "false: offloading is not priced here")
    if settings.number(f"{F}version") == 1:
        stage = _stage_of_fsdp1(settings)
        if sizes["cp"] * sizes["tp"] > 1:
            raise wrong_value(f"{F}version", 1, "2 with tensor or context parallelism")
    else:
        stage = 3 if settings.switch(f"{F}reshard_after_forward") else 2
    return sizes, stage, settings.switch(f"{F}activation_checkpointing")


STRATEGIES: Mapping[object, int] = {"FULL_SHARD": 3, 1: 3, "1": 3, "SHARD_GRAD_OP": 2, 2: 2, "2": 2}
"""ZeRO stages by FSDP 1's sharding strategy (utils/constants.py, FSDP_SHARDING_STRATEGY)."""


def _stage_of_fsdp1(settings: Settings) -> int:
    """Return the ZeRO stage of FSDP 1, which gathers a wrapped layer's flat weights and scatters its gradients.

    Raises:
        InvalidInputError: the strategy is not priced, or the backward waits for its gathers.
    """
    both = [f"{F}sharding_strategy", f"{F}reshard_after_forward"]
    # The newer name holds a strategy in FSDP 1, and counts where the older is not given.
    stated = next((settings.get(name) for name in both if name in settings.values), "FULL_SHARD")
    settings.looked_at |= set(both)
    strategy = stated.upper() if isinstance(stated, str) else stated
    if isinstance(strategy, bool) or strategy not in STRATEGIES:
        raise wrong_value(f"{F}sharding_strategy", strategy, "FULL_SHARD or SHARD_GRAD_OP: others are not priced")
    names = [f"{F}backward_prefetch", f"{F}backward_prefetch_policy"]
    prefetch = next((settings.get(name) for name in names if name in settings.values), None)
    if prefetch != "BACKWARD_PRE":
        raise wrong_value(names[0], prefetch, "BACKWARD_PRE: a backward that waits for its gathers is not priced")
    return STRATEGIES[strategy]


def check_sizes(kind: str, sizes: Mapping[str, int], processes: int) -> None:
    """Check Accelerate's own rules on sizes.

    Raises:
        IllegalPlanError: a rule is broken.
    """
    product = sizes["dp_replicate"] * sizes["dp_shard"] * sizes["cp"] * sizes["tp"]
    broken = {
        "total_size is num_processes (parallelism_config.py, _validate_accelerator)": product != processes,
        "FSDP has a dimension to shard over (parallelism_config.py, _validate_accelerator)": (
            kind == "FSDP" and sizes["dp_shard"] * sizes["cp"] == 1
        ),
        "tp or cp with replicas has shards (parallelism_config.py, __post_init__)": (
            max(sizes["tp"], sizes["cp"]) > 1 and sizes["dp_replicate"] > 1 and sizes["dp_shard"] == 1
        ),
    }
    for rule, is_broken in broken.items():
        if is_broken:
            given = ", ".join(f"{name} {size}" for name, size in sizes.items())
            raise IllegalPlanError(
                f"Accelerate refuses {given} for {processes} processes; its rule: {rule}.",
                "Expected settings that its own checks admit.",
                "Change the sizes, or solve with --target accelerate.",
            )


def replicas_are_plain(problem: Problem, c: Columns) -> npt.NDArray[np.bool_]:
    """Require unsharded replicas to have neither tensor nor context parallelism."""
    return np.asarray((c["zero_stage"] > 0) | (c["tp"] * c["cp"] == 1))


REDUCED: Mapping[str, object] = {"reduced_gradient_bytes": 2.0}
"""Field of ``Software`` under FSDP2 with mixed_precision bf16, which reduces in bf16 what it keeps in fp32
(utils/dataclasses.py, set_mixed_precision)."""
FSDP2 = Capability(
    name="Accelerate",
    versions=("1.15.0",),
    limits={
        **FSDP_LIMITS,
        "pp": Limit((1,), "it has no pipeline"),
        "vpp": Limit((1,), "it has no pipeline"),
        "ep": Limit((1,), "it has no expert parallelism"),
        "schedule": Limit(("1f1b",), "it has no pipeline"),
        "sequence_parallel": Limit((False,), "Transformers' tensor-parallel plans keep whole activations"),
    },
    rules={
        **FSDP_RULES,
        "replicas_are_plain": RowRule(
            replicas_are_plain,
            "without FSDP it has neither tp nor cp (parallelism_config.py, __post_init__)",
            shards=True,
        ),
    },
    stages="equal",
    formats={
        "precision": "mixed_precision bf16 is what is written",
        "grad_dtype": "FSDP2 keeps the sharded ones in fp32",
        "attention_kernel": "Transformers chooses a fused one (sdpa)",
    },
    batch_settings={
        "micro-batch": "per_device_train_batch_size",
        "accumulation": "gradient_accumulation_steps",
        "seq-len": "block_size",
    },
    complete=True,
)
"""Layouts that a program under Accelerate can run, if it loads its model with a tensor-parallel plan."""
WHOLE_MATRICES = Limit((1,), "its program loads whole matrices, which Accelerate leaves whole (_prepare_tp)")
SHARDED = replace(
    FSDP2,
    rules={
        **FSDP2.rules,
        "replicas_are_sharded": RowRule(
            lambda problem, c: np.asarray((c["cp"] * c["dp"] == 1) | (c["zero_stage"] > 0)),
            "what is written shards replicas with FSDP2; DDP reduces gradients in another format",
            shards=True,
        ),
    },
    program=lambda version: {**TRANSFORMERS, **REDUCED},
)
"""Layouts and bytes of the files that are written for a program with a tensor-parallel plan."""
ACCELERATE = replace(SHARDED, limits={**FSDP2.limits, "tp": WHOLE_MATRICES})
"""Layouts that ``run_clm.py`` can run."""
