"""Launcher Megatron-Bridge, export and import: a script that starts a recipe with every setting of the plan as
override.

Source of ``bridge_keys.json``: megatron-bridge 0.3.1, training/config.py and models/gpt_provider.py; megatron-core
0.16.1, optimizer/optimizer_config.py, transformer/transformer_config.py, datasets/.

**Names** of Megatron-LM's arguments in Bridge, in both directions.

Bridge is built on Megatron-Core and takes its settings as overrides of a recipe, ``section.name=value`` in Hydra's
grammar. Every setting that a plan decides is written, even where it is off, so that a recipe decides none of them.
Source: megatron-bridge 0.3.1, training/config.py, models/gpt_provider.py, training/mixed_precision.py;
megatron-core 0.16.1, transformer/transformer_config.py, distributed/distributed_data_parallel_config.py.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from milpplan.errors import IllegalPlanError, InvalidInputError
from milpplan.launchers import Code, Imported, ImportRequest, Launch, known_settings
from milpplan.launchers.capabilities import NO_GROUPS, TRANSFORMER_ENGINE, Capability, Limit
from milpplan.launchers.expressible import check_replicas
from milpplan.launchers.megatron.flags import Arguments, Values, megatron_flags, pattern_flags
from milpplan.launchers.megatron.launcher import Megatron, imported_from
from milpplan.launchers.megatron.plan_arguments import RECIPES as MEGATRON_RECIPES
from milpplan.launchers.megatron.plan_arguments import check_problem as check_megatron
from milpplan.launchers.megatron.plan_arguments import weight_flags
from milpplan.launchers.megatron.rules import (
    MEGATRON,
    MEGATRON_LIMITS,
    megatron_limits,
    megatron_modes,
    megatron_modules,
)
from milpplan.launchers.records import Section
from milpplan.launchers.scripts import arguments_script, defaults
from milpplan.launchers.settings import Settings, admitted, check_words, wrong_value
from milpplan.launchers.shell import pairs_of, script_commands, unknown_in
from milpplan.launchers.shell.launch_text import Given, program_place, world_of
from milpplan.problem import LatentAttention, Plan, Problem
from milpplan.problem.hardware import PrecisionName
from milpplan.problem.reading import shown

Kind = Literal["value", "on", "off", "pair", "words", "pattern", "text"]
Part = Literal["all", "experts", "latent", "levels"]


@dataclass(frozen=True, slots=True)
class Name:
    """Flag of Megatron-LM and the equivalent settings of Bridge.

    ``kind``: a value, a switch that is on where the flag is given, a switch that is off where it is given, a pair
    of numbers, a list of words, a pattern over layers, or a text that needs Hydra's quotes. ``absent``: the value
    to write where a flag with values is not given; None: nothing. ``part``: the models that have the flag, or
    context parallelism in two levels.
    """

    flag: str
    keys: tuple[str, ...]
    kind: Kind = "value"
    absent: str | None = None
    part: Part = "all"


def _names(
    *flags: str, section: str = "model", kind: Kind = "value", absent: str | None = None, part: Part = "all"
) -> tuple[Name, ...]:
    """Name flags whose settings have the same names in a section."""
    return tuple(Name(flag, (f"{section}.{flag[2:].replace('-', '_')}",), kind, absent, part) for flag in flags)


NAMES = (
    *_names("--num-layers", "--hidden-size", "--ffn-hidden-size", "--num-attention-heads"),
    *_names("--num-query-groups", "--kv-channels", absent="null"),
    *_names("--vocab-size"),
    *_names("--mtp-num-layers", absent="null"),
    Name("--seq-length", ("model.seq_length", "dataset.sequence_length", "dataset.seq_length")),
    *_names("--position-embedding-type", "--normalization", "--attention-dropout", "--hidden-dropout"),
    Name("--untie-embeddings-and-output-weights", ("model.share_embeddings_and_output_weights",), kind="off"),
    Name("--disable-bias-linear", ("model.add_bias_linear",), kind="off"),
    *_names("--add-qkv-bias", kind="on"),
    Name("--swiglu", ("model.gated_linear_unit",), kind="on"),
    *_names("--qk-layernorm", kind="on"),
    *_names("--softmax-type", absent="vanilla"),
    *_names("--window-size", kind="pair", absent="null"),
    *_names("--window-attn-skip-freq", kind="pattern", absent="null"),
    Name("--num-experts", ("model.num_moe_experts",), absent="null"),
    *_names("--moe-router-topk", "--moe-ffn-hidden-size", part="experts"),
    *_names("--moe-grouped-gemm", kind="on", part="experts"),
    *_names("--moe-layer-freq", kind="pattern", absent="1", part="experts"),
    *_names("--moe-shared-expert-intermediate-size", absent="null", part="experts"),
    *_names("--moe-shared-expert-gate", kind="on", part="experts"),
    *_names("--moe-token-dispatcher-type", part="experts"),
    *_names("--q-lora-rank", absent="null", part="latent"),
    *_names("--kv-lora-rank", "--qk-head-dim", "--qk-pos-emb-head-dim", "--v-head-dim", part="latent"),
    *_names("--multi-latent-attention", kind="on"),
    *_names("--tensor-model-parallel-size", "--context-parallel-size", "--pipeline-model-parallel-size"),
    *_names("--expert-model-parallel-size", "--expert-tensor-parallel-size", absent="1"),
    *_names("--cp-comm-type", absent="null"),
    *_names("--hierarchical-context-parallel-sizes", kind="words", part="levels"),
    *_names("--sequence-parallel", kind="on"),
    *_names("--use-tp-pp-dp-mapping", section="dist", kind="on"),
    Name("--num-virtual-stages-per-pipeline-rank", ("model.virtual_pipeline_model_parallel_size",), absent="null"),
    *_names("--pipeline-model-parallel-layout", kind="text", absent="null"),
    *_names("--recompute-granularity", "--recompute-method", "--recompute-num-layers", absent="null"),
    *_names("--recompute-modules", kind="words", absent="null"),
    *_names("--micro-batch-size", "--global-batch-size", section="train"),
    Name(
        "--use-distributed-optimizer",
        ("ddp.use_distributed_optimizer", "optimizer.use_distributed_optimizer"),
        kind="on",
    ),
    Name("--use-megatron-fsdp", ("dist.use_megatron_fsdp", "ddp.use_megatron_fsdp"), kind="on"),
    *_names("--data-parallel-sharding-strategy", section="ddp", absent="no_shard"),
    *_names("--ckpt-format", section="checkpoint", absent="torch_dist"),
    *_names("--overlap-grad-reduce", "--overlap-param-gather", section="ddp", kind="on"),
    *_names("--cross-entropy-loss-fusion", kind="on"),
    *_names("--cross-entropy-fusion-impl", absent="native"),
)
CONSTANT = {
    "model.should_pad_vocab": "true",
    "model.account_for_embedding_in_pipeline_split": "false",
    "model.account_for_loss_in_pipeline_split": "false",
    "model.num_layers_in_first_pipeline_stage": "null",
    "model.num_layers_in_last_pipeline_stage": "null",
    "model.cuda_graph_impl": "none",
    "model.moe_shared_expert_overlap": "false",
    "comm_overlap": "null",
}
"""Settings that a recipe may enable and a plan does not have: an export disables them."""
_RECIPES: dict[str, PrecisionName] = {
    "bf16_mixed": "bf16",
    "bf16_with_fp8_delayed_scaling_mixed": "fp8",
    "bf16_with_fp8_current_scaling_mixed": "fp8-tensorwise",
    "bf16_with_fp8_subchannel_scaling_mixed": "fp8-blockwise",
    "bf16_with_mxfp8_mixed": "mxfp8",
    "bf16_with_nvfp4_mixed": "nvfp4",
}
BESIDE_BF16 = ("bf16", "fp8-blockwise")
"""Number formats whose weights it does not keep in the format alone."""
PRECISIONS: Mapping[str, dict[str, Values]] = {
    name: {"--bf16": ()}
    | MEGATRON_RECIPES[precision]
    | dict.fromkeys(() if precision in BESIDE_BF16 else weight_flags(precision), ())
    for name, precision in _RECIPES.items()
}
"""Values of ``mixed_precision`` with the equivalent arguments of Megatron-LM."""


def written(name: Name, values: Values | None) -> str | None:
    """Write a flag's values in Hydra's grammar; None where nothing is written."""
    if name.kind in ("on", "off"):
        return "true" if (values is not None) == (name.kind == "on") else "false"
    if values is None:
        return name.absent
    if name.kind == "pair":
        return f"[{values[0]}]"
    if name.kind == "words":
        return f"[{','.join(values)}]"
    if name.kind == "pattern":
        flags = pattern_flags(values[0], name.flag)
        return str(flags) if isinstance(flags, int) else f"[{','.join(str(int(flag)) for flag in flags)}]"
    return f'"{values[0]}"' if name.kind == "text" else values[0]


def read(name: Name, text: str) -> Values | None:
    """Read a setting's value as the values of a flag; None where the flag is not given.

    Raises:
        InvalidInputError: a switch is neither true nor false.
    """
    bare = text.strip("\"'")
    if name.kind in ("on", "off"):
        if bare.lower() not in ("true", "false"):
            raise wrong_value(name.keys[0], bare, "true or false")
        return () if (bare.lower() == "true") == (name.kind == "on") else None
    if bare.lower() in ("null", "none"):
        return None
    if name.kind == "pair":
        return (bare.strip("[]() ").replace(" ", ""),)
    if name.kind == "words":
        return tuple(word.strip(" \"'") for word in bare.strip("[]").split(",") if word.strip())
    return (bare,)


OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_][\w.]*)=(.*)", re.DOTALL)
QUIET: Mapping[str, str] = {
    r"(rng|scheduler|logger|tokenizer|profiling|dataset|train|validation|dist|optimizer)\..*": (
        "seeds, numbers of the update, data and records: bridge_keys.json lists them one by one"
    ),
    r"checkpoint\..*": "works between steps",
    r"model\..*": "numbers inside kernels: rotary positions, initial values, scores and losses of the router",
}
"""Patterns of settings in bridge_keys.json that have no effect on the cost, with reasons."""
PROGRAM = "run_recipe.py"
RECIPE_NAME = re.compile(
    r"(vanilla_gpt|gpt3|gpt_oss|llama|qwen2|qwen3(?!_next|_vl|_omni)|deepseek|mixtral|mistral|moonlight|olmoe|kimi|glm)"
    r"\w*_pretrain(_\d+gpu_\w+)?_config"
)
"""Recipes whose model is a decoder of attention and feed-forward layers, all of whose weights are trained; since
0.6 most name their hardware."""
FLAGS: Mapping[str, str] = {
    "--recipe": "looked at by itself",
    "--dataset": "data, which are not priced",
    "--hf_path": "overrides say what the model is",
    "--hf-path": "overrides say what the model is",
}
"""Flags of the program that have no effect on the cost, with reasons."""
FIELDS: Mapping[str, str] = {
    **{
        f"--{name}": f"model.{name}"
        for name in (
            *("seq_length", "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
            *("virtual_pipeline_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"),
        )
    },
    "--global_batch_size": "train.global_batch_size",
    "--micro_batch_size": "train.micro_batch_size",
    "--max_steps": "train.train_iters",
    "--lr": "optimizer.lr",
    "--min_lr": "optimizer.min_lr",
    "--warmup_iters": "scheduler.lr_warmup_iters",
    "--save_dir": "checkpoint.save",
    "--load_dir": "checkpoint.load",
    "--save_interval": "checkpoint.save_interval",
    "--pretrained_checkpoint": "checkpoint.pretrained_checkpoint",
}
"""Settings by the flags that set them, before the overrides (0.6.0, scripts/training/run_recipe.py)."""
SHORT: Mapping[str, str] = {
    "-ms": "--max_steps", "-gb": "--global_batch_size", "-mb": "--micro_batch_size", "-sl": "--seq_length",
    "-tp": "--tensor_model_parallel_size", "-pp": "--pipeline_model_parallel_size",
    "-cp": "--context_parallel_size", "-vp": "--virtual_pipeline_model_parallel_size",
    "-ep": "--expert_model_parallel_size", "-etp": "--expert_tensor_parallel_size",
    "--step-func": "--step_func",
}  # fmt: skip
"""Other names of flags."""
PRETRAINS: Mapping[str, tuple[str, ...]] = {"--mode": ("pretrain",), "--step_func": ("gpt_step", "llm_step")}
"""Values of flags with which the program trains all weights of a decoder on texts."""


def imported(request: ImportRequest) -> Imported:
    """Read a launch by overrides of a recipe into a problem and a plan.

    A recipe's own settings are unknown here, so the overrides must give every setting of a plan, as an export
    writes them.

    Raises:
        InvalidInputError: the text cannot be read, a setting of a plan is missing, or a setting changes the cost
            and is
            not priced.
        IllegalPlanError: Megatron-Core would refuse the arguments.
    """
    words, world, program = _command(request.text, request.source)
    said, others = _said(words, request.source)
    schema = {key: (None, "text") for name in NAMES for key in name.keys}
    schema |= dict.fromkeys((*CONSTANT, "mixed_precision", *FLAGS, *PRETRAINS), (None, "text"))
    listed = known_settings("bridge_keys.json", "quiet")
    values = {key: _value(value) if key in listed else value for key, value in said.items()}
    asked = [name.lstrip("+-") for name in request.ignored if name != program]
    settings, left_out = admitted(values | others, {**schema, **listed}, asked, "Megatron-Bridge", QUIET)
    _check_program(settings, program, request.ignored, request.source)
    kept = {key: said[key] for key in settings.values if key in said and key not in listed}
    _check_known(kept, request.source)
    pairs = _pairs(kept, request.source)
    read_in = Given(tuple(pairs.items()), world, ())
    result = imported_from(read_in, replace(request, ignored=()))
    if program in request.ignored:
        left_out = (*left_out, f"{program} (what it does besides its overrides)")
    return Imported(result.problem, result.plan, result.unknown_flags, left_out, result.notes)


def _command(text: str, source: str) -> tuple[tuple[str, ...], int | None, str]:
    """Find the words after the program that the script starts with overrides, the number of processes, and its
    name.

    Raises:
        InvalidInputError: there is no such command, or several differ.
    """
    found = {}
    commands = script_commands(text, source)
    for command in commands:
        at = program_place(command.words)
        after = command.words[0 if at is None else at + 1 :]
        overrides = [word for word in after if (match := OVERRIDE.fullmatch(word)) and _is_setting(match[1])]
        if overrides and (at is not None or len(commands) == 1):
            program = PROGRAM if at is None else command.words[at].rpartition("/")[2]
            found[after] = world_of(command.words[: at or 0], text), program
    if len(found) != 1:
        raise InvalidInputError(
            f"{source} has {f'{len(found)} commands with different' if found else 'no command with'} overrides "
            "of a recipe.",
            "Expected a script that starts Python with settings such as model.tensor_model_parallel_size=4.",
            "Give the script that starts training.",
        )
    words, (world, program) = next(iter(found.items()))
    return words, world, program


PLAIN = ("comm_overlap", "mixed_precision")
"""Settings without a section."""


def _is_setting(name: str) -> bool:
    return "." in name or name in PLAIN


def _said(words: Sequence[str], source: str) -> tuple[dict[str, str], dict[str, Any]]:
    """Read the last value of every override, and the flags beside them.

    Raises:
        InvalidInputError: a word is neither an override nor a flag.
    """
    check_words(words, source)
    overrides = [(word, OVERRIDE.fullmatch(word)) for word in words]
    settings = {match[1]: match[2] for _, match in overrides if match is not None}
    pairs, stray = pairs_of([word for word, match in overrides if match is None])
    if stray:
        raise InvalidInputError(
            f"{source}: {shown((*unknown_in(' '.join(stray)), *stray)[0])} is neither an override nor a flag.",
            "Expected settings such as model.num_layers=32, which the file says.",
            "Write them out in the command, or take the word out.",
        )
    flags = {SHORT.get(flag, flag): " ".join(values) for flag, values in pairs}
    fields = {FIELDS[flag]: value for flag, value in flags.items() if flag in FIELDS}
    return fields | settings, {flag: value for flag, value in flags.items() if flag not in FIELDS}


def _check_program(settings: Settings, program: str, ignored: Collection[str], source: str) -> None:
    """Refuse programs and recipes whose model or training is unknown.

    Raises:
        InvalidInputError: the program, the recipe or its step is not a known one.
    """
    for flag, words in PRETRAINS.items():
        if settings.values.get(flag, words[0]) not in words:
            raise wrong_value(
                flag, settings.values[flag], f"{' or '.join(words)}: what others train is not priced here"
            )
    recipe = settings.values.get("--recipe")
    strange = "" if program == PROGRAM or program in ignored else program
    if not strange and recipe is not None and RECIPE_NAME.fullmatch(recipe) is None:
        strange = "recipe"
    if strange:
        seen = (
            f"the recipe {shown((*unknown_in(str(recipe)), recipe)[0])}" if strange == "recipe" else shown(program)
        )
        raise InvalidInputError(
            f"{source} starts {seen}, and nobody here knows what it trains.",
            f"Expected {PROGRAM} with a recipe that trains all weights of a decoder, NAME_pretrain_config.",
            f"If it is one, say so: --ignore {strange}.",
        )


def _value(text: str) -> object:
    """Read a value in Hydra's grammar, to the extent that its type needs."""
    if unknown_in(text):
        return Code(f"{unknown_in(text)[0]}, which only the running shell knows")
    bare, low = text.strip(), text.strip().lower()
    if low in ("true", "false", "null"):
        return {"true": True, "false": False, "null": None}[low]
    if re.fullmatch(r"[-+]?\d{1,18}", bare):
        return int(bare)
    if re.fullmatch(r"[-+]?(\d{1,99}\.?\d{0,99}|\.\d{1,99})([eE][-+]?\d{1,3})?", bare):
        return float(bare)
    if bare[:1] == "[" and bare[-1:] == "]":
        return [_value(part) for part in bare[1:-1].split(",")] if bare[1:-1].strip() else []
    if bare[:1] == "{" and bare[-1:] == "}":
        return {"": bare}
    return bare.strip("\"'")


def _check_known(settings: Mapping[str, str], source: str) -> None:
    """Check that settings which recipes may enable are off, and that the file states every value.

    Raises:
        InvalidInputError: a setting may change the cost, or only the running shell has its value.
    """
    left = [
        f"{key}={value}" for key, value in settings.items() if key in CONSTANT and not _same(value, CONSTANT[key])
    ]
    if left:
        raise InvalidInputError(
            f"{len(left)} setting(s) may change the cost in ways that are not priced: {', '.join(left[:12])}.",
            "Expected settings that a plan or a model has, or that change neither time nor memory.",
            f"Take them out, or accept not to see what they cost: --ignore {left[0].split('=')[0]} (repeatable).",
        )
    unknown = [f"{key} is {unknown_in(value)[0]}" for key, value in settings.items() if unknown_in(value)]
    if unknown:
        raise InvalidInputError(
            f"{source}: {unknown[0]}, a value that only the running shell knows.",
            "Expected values that the file says.",
            "Write the value into the file, or a default such as ${TP:-8}.",
        )


def _same(value: str, other: str) -> bool:
    return value.strip("\"'").lower() == other


def _pairs(settings: Mapping[str, str], source: str) -> dict[str, Values]:
    """Translate the settings into Megatron-LM's arguments."""
    has = {
        "all": True,
        "experts": not _same(settings.get("model.num_moe_experts", "null"), "null"),
        "latent": _same(settings.get("model.multi_latent_attention", "false"), "true"),
        "levels": _same(settings.get("model.cp_comm_type", "null"), "a2a+p2p"),
    }
    asked = [name for name in NAMES if has[name.part]]
    missing = [name.keys[0] for name in asked if name.keys[0] not in settings]
    missing += ["mixed_precision"] if "mixed_precision" not in settings else []
    if missing:
        raise InvalidInputError(
            f"{source} leaves {len(missing)} setting(s) of a plan to the recipe: {', '.join(missing[:12])}.",
            "Expected an override of every setting of a plan or a model: what recipes say is not known here.",
            "Add the settings, as `milpplan export --to megatron-bridge` writes them.",
        )
    pairs: dict[str, Values] = {}
    for name in asked:
        values = _agreed(name, settings)
        if values is not None:
            pairs[name.flag] = values
    pairs |= _read_precision(settings["mixed_precision"])
    pairs["--max-position-embeddings"] = pairs["--seq-length"]
    pairs["--attention-backend"] = ("auto",)
    if "--num-query-groups" in pairs:
        pairs["--group-query-attention"] = ()
    if not has["experts"]:
        for flag in ("--expert-model-parallel-size", "--expert-tensor-parallel-size"):
            if pairs.get(flag) == ("1",):
                del pairs[flag]
    if "--pipeline-model-parallel-layout" in pairs:
        # The stage string gives the number, and Megatron-Core only checks that they agree.
        pairs.pop("--num-virtual-stages-per-pipeline-rank", None)
    return pairs


def _agreed(name: Name, settings: Mapping[str, str]) -> Values | None:
    """Return the values of a flag, if all of its settings agree.

    Raises:
        InvalidInputError: the settings differ.
    """
    values = {key: read(name, settings[key]) for key in name.keys if key in settings}
    if len(set(values.values())) > 1:
        raise InvalidInputError(
            f"{' and '.join(f'{key}={settings[key]}' for key in values)} contradict each other.",
            "Expected the same in all of them.",
            "Correct one of them.",
        )
    agreed = next(iter(values.values()))
    if name.kind == "pattern" and agreed:
        pattern_flags(agreed[0], name.keys[0])
    wrong = "" if agreed is None else megatron_flags()[name.flag].refusal(agreed)
    if wrong:
        raise InvalidInputError(
            f"{name.keys[0]} {wrong}.", "Expected what Megatron-Core's setting takes.", f"Correct {name.keys[0]}."
        )
    return agreed


def _read_precision(text: str) -> dict[str, Values]:
    name = text.strip("\"'").replace("-", "_")
    if name not in PRECISIONS:
        raise wrong_value("mixed_precision", text, f"{' or '.join(PRECISIONS)}: others are not priced")
    return PRECISIONS[name]


MOCK_DATA: Mapping[str, str] = {
    "0.6.0": " --dataset mock",
    "0.3.1": "",
}
"""Words that select mock data by version of Megatron-Bridge (scripts/training/run_recipe.py).

In 0.3.1 there is no such argument, and a recipe without a path has mock data. It hands unknown words to Hydra,
which refuses them.
"""
_LENGTH, _NEW_LENGTH = "dataset.sequence_length", "dataset.seq_length"
"""Length of the data's sequences in 0.3 and since 0.6, where it overrules the other (training/config.py)."""
_BRIDGE_TILES = Limit(("none",), "comm_overlap of a recipe switches other overlaps with it")
BRIDGE = Capability(
    name="Megatron-Bridge",
    versions=tuple(MOCK_DATA),
    limits={**MEGATRON_LIMITS, "tp_overlap": _BRIDGE_TILES, "dp_replicate": NO_GROUPS},
    rules=TRANSFORMER_ENGINE,
    recompute_counts="block",
    modes=megatron_modes,
    more_limits=megatron_limits,
    own_modules=megatron_modules,
    complete=True,
)


SCRIPT = "megatron-bridge.sh"
RECIPES = {
    "0.6.0": {True: "deepseek_v3_pretrain_config", False: "gpt3_175b_pretrain_32gpu_h100_bf16_config"},
    "0.3.1": {True: "deepseek_v3_pretrain_config", False: "qwen2_7b_pretrain_config"},
}
"""Recipes by version whose model classes have latent attention (True) or not (False); all sizes are overridden.

``--recipe`` finds those that recipes/__init__.py exports, and in 0.3.1 it exports no recipe of GPT: that of Qwen 2
reads the config of its checkpoint first.
"""
WITHOUT_NAME = {
    "--max-position-embeddings": "follows from model.seq_length (models/gpt_provider.py, provide)",
    "--group-query-attention": "follows from model.num_query_groups",
    **dict.fromkeys((flag for flags in PRECISIONS.values() for flag in flags), "part of mixed_precision"),
    "--attention-backend": "auto is the default",
}
"""Arguments of Megatron-LM without a setting of their own, with reasons."""
TRAINING = {"train.train_iters": "100", "optimizer.lr": "1.0e-4", "optimizer.min_lr": "1.0e-5"}
"""Training settings that a run needs and a plan does not decide."""


class MegatronBridge:
    """Launcher Megatron-Bridge: overrides of a recipe, written and read through Megatron-LM's arguments."""

    capability = BRIDGE

    def check(self, problem: Problem, version: str) -> None:
        """Refuse a problem for which Megatron-Bridge can run no plan.

        Raises:
            IllegalPlanError: Megatron-Bridge cannot build the model, or does not support such a job or cluster.
        """
        check_megatron(problem, MEGATRON.versions[0])
        job, model = problem.job, problem.model
        if job.optimizer != "adam":
            raise _refused(
                "The job has the optimizer muon", "Adam: exports to it write no other", "Export to megatron."
            )
        if model.has_indexers:
            raise _refused(
                f"{model.name} attends to selected or compressed keys",
                "attention to all earlier keys: exports to it write no other",
                "Export to megatron.",
            )
        if job.grad_dtype != "fp32":
            raise _refused(
                f"gradients are accumulated in {job.grad_dtype}",
                "fp32, as in mixed_precision=bf16_mixed",
                "Solve again with --grad-dtype fp32.",
            )
        if job.attention_kernel != "flash":
            raise _refused(
                "the attention kernel is unfused, and model.attention_backend is no text that an override can "
                "give",
                "a flash kernel",
                "Solve again with --attention flash.",
            )
        if job.precision == "nvfp4" and version == "0.3.1":
            # training/mixed_precision.py sets no fp4_param_gather there.
            raise _refused("its 0.3.1 keeps weights in bf16 beside nvfp4", "0.6.0", "Leave --target-version out.")
        alone = job.precision not in BESIDE_BF16
        if job.precision != "bf16" and problem.hardware.software.fp8_weights_only != alone:
            name = next(name for name, precision in _RECIPES.items() if precision == job.precision)
            raise _refused(
                f"weights are {'' if alone else 'not '}kept in bf16 beside {job.precision} products",
                f"fp8_weights_only = {str(alone).lower()}, as in mixed_precision={name}",
                "Describe the software so, or solve again with --precision bf16.",
            )
        positions = model.max_position_embeddings
        if model.learned_positions and max(positions, job.sequence_length) != job.sequence_length:
            raise _refused(
                f"the model has {positions} learned positions and sequences of {job.sequence_length} tokens",
                "as many positions as tokens (models/gpt_provider.py, provide)",
                "Change --seq-len.",
            )

    def export(self, problem: Problem, plan: Plan, version: str) -> Launch:
        """Turn a plan into a launch.

        Raises:
            IllegalPlanError: Megatron-Bridge cannot express the plan or would refuse it.
        """
        check_replicas(BRIDGE, plan)
        self.check(problem, version)
        for name, limit in BRIDGE.refused(plan.layout).items():
            if name not in MEGATRON.limits or getattr(plan.layout, name) in MEGATRON.limits[name].values:
                raise _refused(
                    f"the plan has {name}={getattr(plan.layout, name)}: {limit.why}",
                    f"{name} {' or '.join(map(str, limit.values)).lower()}",
                    f"Solve again with --target megatron-bridge, or --fix {name}={limit.values[0]}.",
                )
        core = Megatron().export(problem, plan, MEGATRON.versions[0])
        latent = isinstance(problem.model.kinds[0].attention, LatentAttention)
        given = core.arguments
        missing = set(given.values) - {name.flag for name in NAMES} - set(WITHOUT_NAME)
        assert not missing, f"no name for {missing}"
        notes = [note for note in core.notes if "--" not in note]
        notes.append(
            "The sizes are those of the plan; activation function, rotary base and router's scores are the "
            "recipe's: give RECIPE one of your model's family where they matter."
        )
        if problem.job.precision == "fp8-tensorwise":
            notes.append(
                "This mixed_precision runs the first and the last layer in bf16; the plan counts them as fp8."
            )
        return replace(
            core,
            target=BRIDGE.name,
            version=version,
            sections=_sections(given, core, latent, _LENGTH if version.startswith("0.6") else _NEW_LENGTH),
            notes=tuple(notes),
        )

    def files(self, launch: Launch, version: str) -> dict[str, str]:
        """Write the launch as files by name; the first is enough to start the run. ``version`` is milpplan's."""
        return {SCRIPT: _script(launch, version)}

    def read(self, request: ImportRequest) -> Imported:
        """Read a recipe's overrides into a problem and a plan."""
        return imported(request)


def _refused(seen: str, expected: str, do: str) -> IllegalPlanError:
    return IllegalPlanError(f"Megatron-Bridge cannot run it: {seen}.", f"Expected {expected}.", do)


def _sections(given: Arguments, core: Launch, latent: bool, lacking: str) -> tuple[Section, ...]:
    """Rename the sections of Megatron-LM's launch to Bridge's settings, and fix settings that a recipe must not
    decide; ``lacking`` is a setting that the version does not have."""
    experts = given.given("--num-experts")
    levels = given.given("--hierarchical-context-parallel-sizes")
    has = {"all": True, "experts": experts, "latent": latent, "levels": levels}
    of_flag = {flag: part.name for part in core.sections for flag in part.arguments}
    rows: dict[str, dict[str, tuple[str, ...]]] = {part.name: {} for part in core.sections}
    off: dict[str, tuple[str, ...]] = {}
    for name in NAMES:
        text = written(name, given.values.get(name.flag)) if has[name.part] else None
        row = rows[of_flag[name.flag]] if name.flag in of_flag else off
        if text is not None:
            row.update(dict.fromkeys((key for key in name.keys if key != lacking), (text,)))
    named = next(name for name, flags in PRECISIONS.items() if flags == _precision(given))
    rows["KERNEL_ARGS"]["mixed_precision"] = (named,)
    off |= {key: (value,) for key, value in CONSTANT.items()}
    parts = [replace(part, arguments=rows[part.name]) for part in core.sections if rows[part.name]]
    return (*parts, Section("OFF_ARGS", "Off in this plan, whatever the recipe says.", off))


def _precision(given: Arguments) -> dict[str, tuple[str, ...]]:
    written = {flag for flags in PRECISIONS.values() for flag in flags}
    return {flag: values for flag, values in given.values.items() if flag in written}


def _script(launch: Launch, version: str) -> str:
    recipe = RECIPES[launch.version]["model.kv_lora_rank" in launch.arguments.values]
    before = (
        "# Where Megatron-Bridge is, whose recipe says what the plan does not, and where this node is.",
        *defaults(BRIDGE_DIR=".", RECIPE=recipe),
    )
    program = f'"$BRIDGE_DIR/scripts/training/run_recipe.py" --recipe "$RECIPE"{MOCK_DATA[launch.version]}'
    fixed = {"TRAINING_ARGS": {key: (value,) for key, value in TRAINING.items()}}
    return arguments_script(launch, version, before, program, fixed, _written)


def _written(key: str, values: Values) -> str:
    return shlex.quote(f"{key}={values[0]}")
