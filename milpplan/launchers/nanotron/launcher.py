"""Launcher nanotron, export and import: its YAML configuration, checked against its rules before writing.

**Rules** of nanotron, restated: layouts that its configuration, its groups or its pipeline refuse.

Each rule has a name, its source (huggingface/nanotron at 2411b022, src/nanotron) and a function that describes the
violation, if there is one. ``NANOTRON`` declares the layouts that nanotron can run.

**Settings**: a plan as ``section.name`` to value, and back.

Source: huggingface/nanotron at 2411b022, config/config.py, config/parallelism_config.py, config/models_config.py;
trainer.py:1085-1165 and helpers.py:385-460 (gradients are kept in fp32 and reduced beside the last backward; ZeRO
1 gathers weights when the update is over, optim/zero.py:119).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from milpplan.errors import InvalidInputError
from milpplan.launchers import ConfigLaunch, Imported, ImportRequest, Known, flat, known_settings
from milpplan.launchers.capabilities import (
    NO_GROUPS,
    ONE_F_ONE_B,
    Columns,
    Limit,
    RowRule,
    config_capability,
    whole_kv_heads,
)
from milpplan.launchers.expressible import (
    ConfigLauncher,
    Rules,
    broken_rules,
    check_rules,
    layout_differences,
    model_differences,
)
from milpplan.launchers.records import Refusal, job_of
from milpplan.launchers.scripts import HERE, defaults, header, torchrun_script
from milpplan.launchers.settings import Settings, admitted, check_priced, nested
from milpplan.launchers.shell.launch_text import load_yaml
from milpplan.problem import (
    NO_MODULES,
    DenseMlp,
    GroupedQueryAttention,
    Layout,
    ModelSpec,
    Plan,
    Problem,
    validated,
)
from milpplan.problem.reading import shown

_P, _M, _T = "parallelism", "model.model_config", "tokens"
ENGINES = {"1f1b": "1f1b", "gpipe": "afab"}
"""Values of ``pp_engine`` by schedule."""
FLASH = ("flash_attention_2", "sdpa", "flex_attention")
"""Values of ``_attn_implementation`` for fused attention without a ring."""
QUIET: Mapping[str, str] = {
    r"general\..*|(logging|metrics_logging|tokenizer)(\..*)?": "names, seeds and what is printed",
    r"(checkpoints|s3_upload|lighteval)(\..*)?|tokens\.(val_check_interval|limit_.*)": (
        "works between steps, or as a job of its own"
    ),
    r"profiler(\..*)?": "records steps; those that are recorded are no steps that are priced",
    r"data_stages|data_stages\[\]\.(name|start_training_step|data\..*)|data\..*": "data, which are not priced",
    r"tokens\.train_steps|optimizer\.(weight_decay.*|clip_grad|learning_rate_scheduler\..*|"
    r"(optimizer_factory\.)?(adam_.*|torch_adam_.*))": "numbers of the update, whose work does not depend on them",
    r"model\.(init_method\.(std|scaling_method|path)|ddp_bucket_cap_mb)": "initial values, and sizes of messages",
    r"model\.model_config\.((bos|eos|pad)_token_id|hidden_act|initializer_range|pretraining_tp|rms_norm_eps|"
    r"rope_.*|interleaved_rotary|use_cache|max_position_embeddings|z_loss_coefficient|no_rope_layer|"
    r"log_attn_probs)": ("numbers inside kernels: rotary positions are priced as none"),
    r"model\.model_config\.(_fused_.*|_use_qkv_packed)": "kernels, which are priced as fused",
}
"""Patterns of settings that have no effect on the cost, with reasons."""
CLASSES = ("is_llama_config", "is_qwen2_config")
"""Keys that tell nanotron the class of a model_config: LlamaConfig or Qwen2Config."""


def known() -> Known:
    """Load every setting with its default and its type. Sizes of models have no default here."""
    return known_settings("nanotron_keys.json", "2411b022")


def model_losses(model: ModelSpec) -> list[str]:
    """List parts of a model that nanotron's LlamaForTraining and Qwen2ForTraining do not build."""
    kind, losses = model.kinds[0], []
    attention, mlp = kind.attention, kind.mlp
    if len(model.kinds) > 1:
        losses.append(f"{model.name} has {len(model.kinds)} kinds of layer, its models have one")
    if not isinstance(attention, GroupedQueryAttention) or not isinstance(mlp, DenseMlp):
        return [
            *losses,
            f"{model.name} has latent attention, a recurrence or experts, which run on one rank alone",
        ]
    parts = {
        f"heads of {attention.head_dim}, not hidden_size / heads": (
            attention.head_dim * attention.num_attention_heads != model.hidden_size
            or attention.value_dim != attention.head_dim
            or attention.keys_are_values
        ),
        "norms of queries and keys": attention.qk_norm != "none",
        "attention sinks": attention.sinks,
        "gated attention": attention.gate_dim > 0,
        "an indexer of blocks": attention.blocks is not None,
        "sliding windows": attention.sliding_window is not None,
        "a bias after the attention": attention.output_bias,
        "biases of the feed-forward block": mlp.bias,
        "a feed-forward block without a gate": not mlp.gated,
        f"{kind.num_norms} norms a layer": kind.num_norms != 2,
        "LayerNorm": model.norm != "rmsnorm",
        "learned positions": model.learned_positions,
        "a head with a bias": model.lm_head_bias,
        "dropout": model.dropout or model.drops_embedding or model.drops_scores,
    }
    return losses + [f"{model.name} has {part}, which its models lack" for part, there in parts.items() if there]


def settings_of(problem: Problem, plan: Plan, version: str) -> dict[str, Any]:
    """Write the settings of a plan whose model nanotron can build."""
    layout, model, job = plan.layout, problem.model, problem.job
    kind = model.kinds[0]
    assert isinstance(kind.attention, GroupedQueryAttention)
    assert isinstance(kind.mlp, DenseMlp)
    biased = kind.attention.qkv_bias
    settings: dict[str, Any] = {
        f"{_P}.dp": layout.dp,
        f"{_P}.pp": layout.pp,
        f"{_P}.tp": layout.tp,
        f"{_P}.context_parallel_size": layout.cp,
        f"{_P}.expert_parallel_size": layout.ep,
        f"{_P}.pp_engine": ENGINES.get(layout.schedule, "1f1b"),
        f"{_P}.tp_mode": "REDUCE_SCATTER" if layout.sequence_parallel else "ALL_REDUCE",
        f"{_P}.tp_linear_async_communication": False,
        f"{_P}.tp_recompute_allgather": layout.gather_again,
        f"{_P}.recompute_layer": any(stage.recompute.full for stage in plan.virtual_stages),
        f"{_T}.sequence_length": job.sequence_length,
        f"{_T}.micro_batch_size": layout.micro_batch_size,
        f"{_T}.batch_accumulation_per_replica": layout.num_micro_batches,
        "optimizer.zero_stage": layout.zero_stage,
        "optimizer.accumulate_grad_in_fp32": True,
        "model.dtype": "bfloat16",
        "model.make_vocab_size_divisible_by": 1,
        f"{_M}.is_{'qwen2' if biased else 'llama'}_config": True,
        f"{_M}.hidden_size": model.hidden_size,
        f"{_M}.intermediate_size": kind.mlp.intermediate_size,
        f"{_M}.num_hidden_layers": model.num_layers,
        f"{_M}.num_attention_heads": kind.attention.num_attention_heads,
        f"{_M}.num_key_value_heads": kind.attention.num_key_value_heads,
        f"{_M}.vocab_size": model.vocab_size,
        f"{_M}.max_position_embeddings": max(model.max_position_embeddings, job.sequence_length),
        f"{_M}.tie_word_embeddings": model.tie_word_embeddings,
        f"{_M}.attention_bias": biased,
        f"{_M}._attn_implementation": FLASH[0],
    }
    return settings


def model_of(settings: Settings, name: str) -> ModelSpec:
    """Build the model that the settings describe.

    Raises:
        InvalidInputError: sizes are missing, or the model has parts that are not modelled.
    """
    if any(key.startswith(f"{_M}.moe_config.") for key in settings.values):
        raise InvalidInputError(
            "The model has a moe_config.",
            "Expected a dense model: its experts run on one rank alone, which is not priced.",
            "Import a run without experts.",
        )
    named = [name for name in CLASSES if settings.switch(f"{_M}.{name}")]
    if len(named) != 1:
        raise InvalidInputError(
            f"model_config has {' and '.join(named) or 'neither is_llama_config nor is_qwen2_config'}.",
            "Expected one of them to be true: it names the class of the model.",
            "Write the one that is meant into model.model_config.",
        )
    heads, groups = settings.size(f"{_M}.num_attention_heads"), settings.get(f"{_M}.num_key_value_heads")
    if f"{_M}.num_key_value_heads" not in settings.values or groups is not None:
        groups = settings.size(f"{_M}.num_key_value_heads")
    window, hidden = settings.get(f"{_M}.sliding_window_size"), settings.size(f"{_M}.hidden_size")
    if hidden % heads:
        raise InvalidInputError(
            f"hidden_size is {hidden}, and num_attention_heads {heads}.",
            "Expected whole heads: hidden_size / num_attention_heads is the size of one.",
            "Correct one of them.",
        )
    tokens = settings.size(f"{_T}.sequence_length")
    positions = settings.get(f"{_M}.max_position_embeddings")
    attention = {
        "type": "gqa",
        "num_attention_heads": heads,
        "num_key_value_heads": heads if groups is None else groups,
        "head_dim": hidden // heads,
        # LlamaForTraining has the setting but no such bias.
        "qkv_bias": settings.switch(f"{_M}.attention_bias") and named[0] == "is_qwen2_config",
        "sliding_window": window,
    }
    mlp = {"type": "dense", "intermediate_size": settings.size(f"{_M}.intermediate_size")}
    data = {
        "name": name,
        "hidden_size": hidden,
        "vocab_size": settings.size(f"{_M}.vocab_size"),
        "max_position_embeddings": tokens if positions is None else positions,
        "layers": [{"count": settings.size(f"{_M}.num_hidden_layers"), "attention": attention, "mlp": mlp}],
        "tie_word_embeddings": settings.switch(f"{_M}.tie_word_embeddings"),
        "default_sequence_length": tokens,
    }
    return validated(ModelSpec, data, "the model that the settings describe")


def stage_sizes(model: ModelSpec, pp: int) -> tuple[int, ...]:
    """Return the layers of every pipeline rank as nanotron assigns them.

    A rank takes blocks until the sum of their costs exceeds its share. Costs are those of products: the layer's
    ``4 a d h + 3 f h`` (a heads of d = h / a) and the head's ``v h``. The result is empty where the last rank does
    not get the head.

    Source: models/base.py:216-237 (build_model), models/llama.py:938 and models/qwen.py:813 at 2411b022.
    """
    if pp > model.num_layers:
        return ()
    kind, hidden = model.kinds[0], model.hidden_size
    assert isinstance(kind.mlp, DenseMlp)
    heads = kind.head_counts[0]
    layer = 4 * heads * (hidden // heads) * hidden + 3 * kind.mlp.intermediate_size * hidden
    sums = [layer * (index + 1) for index in range(model.num_layers)]
    total = sums[-1] + model.vocab_size * hidden
    shares = [total * ((rank + 1) / pp) for rank in range(pp)]
    sizes, rank = [0] * pp, 0
    for cost in sums:
        sizes[rank] += 1
        rank += cost > shares[rank]
    return tuple(sizes) if rank == pp - 1 else ()


def layout_of(settings: Settings) -> Layout:
    """Read the layout from the settings.

    Raises:
        InvalidInputError: degrees or modes are invalid.
    """
    tp, pp, dp, cp, ep = (
        settings.degree(f"{_P}.{name}")
        for name in ("tp", "pp", "dp", "context_parallel_size", "expert_parallel_size")
    )
    # Null stands for these values in config/parallelism_config.py.
    engine, mode = settings.get(f"{_P}.pp_engine"), settings.get(f"{_P}.tp_mode")
    engine, mode = "afab" if engine is None else engine, "ALL_REDUCE" if mode is None else mode.upper()
    schedule = {name: word for word, name in ENGINES.items()}.get(engine)
    if schedule is None or mode not in ("ALL_REDUCE", "REDUCE_SCATTER"):
        raise InvalidInputError(
            f"pp_engine is {shown(engine)} and tp_mode {shown(mode)}.",
            "Expected 1f1b or afab, and ALL_REDUCE or REDUCE_SCATTER (config/parallelism_config.py).",
            "Correct them.",
        )
    again = settings.switch(f"{_P}.tp_recompute_allgather")
    sequence_parallel = mode == "REDUCE_SCATTER" and tp > 1
    size, count = (
        settings.size(f"{_T}.micro_batch_size"),
        settings.size(f"{_T}.batch_accumulation_per_replica"),
    )
    stage = settings.number("optimizer.zero_stage")
    data = {
        "tp": tp,
        "cp": cp,
        "ep": ep,
        "pp": pp,
        "dp": dp,
        "micro_batch_size": size,
        "global_batch_size": size * count * dp,
        "sequence_parallel": sequence_parallel,
        "zero_stage": int(stage > 0 and dp * cp > 1),
        "schedule": schedule if pp > 1 else "1f1b",
        "overlap_grad_reduce": dp * cp > 1,
        "gather_again": again or not sequence_parallel,
    }
    return validated(Layout, data, "the layout that the settings describe")


def plan_of(settings: Settings, model: ModelSpec) -> Plan:
    """Read the plan from the settings.

    Raises:
        InvalidInputError: a plan cannot have these stages.
    """
    layout = layout_of(settings)
    sizes = stage_sizes(model, layout.pp)
    if not sizes:
        raise InvalidInputError(
            f"nanotron's costs leave the last of {layout.pp} pipeline ranks without the head.",
            "Expected embedding and head at the ends (models/base.py, build_model).",
            "Use fewer pipeline ranks.",
        )
    whole = settings.switch(f"{_P}.recompute_layer")
    spans = pairwise(accumulate(sizes, initial=0))
    stages = [{"layers": list(span), "recompute": {"full": (span[1] - span[0]) * whole}} for span in spans]
    return validated(
        Plan, {"layout": layout.model_dump(), "virtual_stages": stages}, "the plan that the settings describe"
    )


def _heads(model: ModelSpec, layout: Layout, tokens: int) -> str:
    heads = model.kinds[0].head_counts[0]
    return f"{heads} heads over tp={layout.tp}" if heads % layout.tp else ""


def _groups(model: ModelSpec, layout: Layout, tokens: int) -> str:
    attention = model.kinds[0].attention
    groups = attention.num_key_value_heads if isinstance(attention, GroupedQueryAttention) else 0
    if groups < layout.tp or groups % layout.tp:
        return f"{groups} heads of keys and values over tp={layout.tp}"
    return ""


def _widths(model: ModelSpec, layout: Layout, tokens: int) -> str:
    mlp = model.kinds[0].mlp
    assert isinstance(mlp, DenseMlp)
    width = mlp.intermediate_size
    return f"a width of {width} over tp={layout.tp}" if width % layout.tp else ""


def _sequence(model: ModelSpec, layout: Layout, tokens: int) -> str:
    count = tokens * layout.micro_batch_size
    return f"{count} tokens over tp={layout.tp}" if layout.sequence_parallel and count % layout.tp else ""


def _micro_batches(model: ModelSpec, layout: Layout, tokens: int) -> str:
    if layout.pp == 1 or layout.schedule != "1f1b" or layout.num_micro_batches >= layout.pp - 1:
        return ""
    return f"{layout.num_micro_batches} micro-batches are fewer than {layout.pp - 1}"


RULES: Rules = {
    "heads_divide": ("config/config.py:537", _heads),
    "key_value_heads_divide": ("config/config.py:543, models/llama.py: heads of a rank are whole", _groups),
    "widths_divide": ("parallel/tensor_parallel/nn.py:63, :128", _widths),
    "micro_batches": ("parallel/pipeline_parallel/engine.py:252", _micro_batches),
    "sequence_divides": ("parallel/tensor_parallel/distributed_differentiable_primitives.py", _sequence),
}
"""Rules by name, with source and check of a model, a layout and a sequence length in tokens."""


def nanotron_stages(problem: Problem, c: Columns) -> npt.NDArray[np.bool_]:
    """Require equal stages where nanotron's own placement makes equal stages."""
    layers = problem.model.num_layers
    equal = {int(pp): stage_sizes(problem.model, int(pp)) == (layers // int(pp),) * int(pp) for pp in set(c["pp"])}
    return np.asarray([equal[int(pp)] for pp in c["pp"]], dtype=np.bool_)


def nanotron_pipelines(problem: Problem, c: Columns) -> npt.NDArray[np.bool_]:
    """Require at least pp - 1 micro-batches for 1F1B (parallel/pipeline_parallel/engine.py)."""
    few = (c["pp"] > 1) & (c["schedule"] == ONE_F_ONE_B) & (c["num_micro_batches"] < c["pp"] - 1)
    return np.asarray(~few)


def reduces_beside(problem: Problem, c: Columns) -> npt.NDArray[np.bool_]:
    """Require the gradient reduction of several replicas to overlap with the last backward pass."""
    return np.asarray((c["cp"] * c["dp"] == 1) | (c["overlap_grad_reduce"] == 1))


NANOTRON = config_capability(
    name="nanotron",
    versions=("2411b022",),
    limits={
        "cp": Limit((1,), "its ring attention gathers keys and values, and what is priced is a ring"),
        "ep": Limit(
            (1,), "expert_parallel_size above 1 passes only one of its two checks (parallel/context.py:24, :62)"
        ),
        "vpp": Limit((1,), "its pipeline has one stage a rank (models/base.py, build_model)"),
        "schedule": Limit(("1f1b", "gpipe"), "pp_engine is 1f1b or afab"),
        "zero_stage": Limit((0, 1), "zero_stage above 0 is ZeRO 1 (helpers.py:409)"),
        "dp_replicate": NO_GROUPS,
        "pp_scatter_gather": Limit((False,), "its pipeline sends whole activations"),
        "offload_weights": Limit((False,), "it keeps nothing on the host"),
        "offload_modules": Limit((NO_MODULES,), "it keeps nothing on the host"),
        "offload_activations": Limit((False,), "it keeps nothing on the host"),
        "offload_optimizer": Limit((False,), "it keeps nothing on the host"),
        "overlap_param_gather": Limit(
            (False,), "weights are gathered when the update is over (optim/zero.py:119)"
        ),
    },
    rules={
        "whole_key_value_heads": RowRule(whole_kv_heads, "heads of a rank are whole"),
        "stages": RowRule(nanotron_stages, "it places layers by its own costs (models/base.py:216)"),
        "pipelines": RowRule(nanotron_pipelines, "1F1B wants one micro-batch less than ranks"),
        "reduces_beside": RowRule(reduces_beside, "gradients are reduced beside the backward", shards=True),
    },
    stages="equal",
    formats={
        "precision": "its models have no such products",
        "grad_dtype": "without accumulate_grad_in_fp32 it keeps no fp32 weights either",
        "attention_kernel": "its attention is fused",
    },
    complete=True,
)


def imported(request: ImportRequest) -> Imported:
    """Read a configuration into a problem and a plan.

    The text is YAML. A model of the request must agree with the file's, and gives its name. Where the file leaves
    the vocabulary to the data (-1), the request has it.

    Raises:
        InvalidInputError: the file cannot be read, or has settings that change the cost and are not priced.
        IllegalPlanError: nanotron would refuse the configuration.
    """
    said = flat(load_yaml(request.text, request.source, "nanotron")) | dict(request.given)
    if said.get("model.model_config.vocab_size") == -1 and request.vocab_size:
        said["model.model_config.vocab_size"] = request.vocab_size
    settings, left_out = admitted(said, known(), request.ignored, "nanotron", QUIET)
    built = model_of(settings, "imported" if request.model is None else request.model.name)
    if request.model is not None and model_differences(request.model, built):
        raise InvalidInputError(
            f"The settings build another model than {request.model.name}.",
            "Expected its sizes.",
            "Correct the file, or leave --model out.",
        )
    plan = plan_of(settings, built)
    layout = plan.layout
    _check_world(layout, request.num_gpus)
    _check_formats(settings, layout)
    tokens = settings.degree("tokens.sequence_length")
    check_rules("nanotron", broken_rules(RULES, built, layout, tokens), "Correct the settings.")
    _check_degrees(layout)
    check_priced(settings, QUIET)
    problem = Problem(model=request.model or built, hardware=request.hardware, job=job_of(layout, tokens))
    return Imported(problem, plan, (), left_out, ())


def _check_world(layout: Layout, num_gpus: int | None) -> None:
    if num_gpus not in (None, layout.num_gpus):
        raise InvalidInputError(
            f"The degrees make {layout.num_gpus} processes, and {num_gpus} are given.",
            "Expected their product to be the number of processes (parallel/context.py:24).",
            "Correct the degrees, or leave --gpus out.",
        )


def _check_degrees(layout: Layout) -> None:
    """Refuse context and expert parallelism, because nanotron's are not priced."""
    for name, setting, what in (
        ("cp", "context_parallel_size", "its ring attention gathers keys and values"),
        ("ep", "expert_parallel_size", "its groups of experts overlap"),
    ):
        if getattr(layout, name) > 1:
            raise InvalidInputError(
                f"{setting} is {getattr(layout, name)}: {what}, which is not priced.",
                f"Expected {setting} 1.",
                "Use 1 to compare it as such a run.",
            )


def _check_formats(settings: Settings, layout: Layout) -> None:
    """Check for the number formats, kernels and optimizer that are priced.

    Raises:
        InvalidInputError: the configuration has others.
    """
    wanted = {
        "model.dtype": (None, "bfloat16"),
        "optimizer.accumulate_grad_in_fp32": (True,),
        "optimizer.optimizer_factory.name": ("adamW",),
        "model.model_config._attn_implementation": FLASH,
    }
    for name, values in wanted.items():
        if settings.get(name) not in values:
            raise InvalidInputError(
                f"{name} is {shown(settings.get(name))}.",
                f"Expected {' or '.join(str(value) for value in values if value is not None)}, which is priced.",
                "Change it to compare it as such a run.",
            )
    asynchronous = settings.values.get("parallelism.tp_linear_async_communication")
    if layout.tp == 1 or not asynchronous:
        settings.looked_at.add("parallelism.tp_linear_async_communication")


_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*( [A-Za-z0-9_./-]+)*")
_WORDS = {"true", "false", "null", "yes", "no", "on", "off", "y", "n", "none"}
CONFIG, SCRIPT = "nanotron.yaml", "nanotron.sh"
WHY = {
    "parallelism": "Degrees, the order of work, and recomputation of all layers or of none.",
    "tokens": "Micro-batches, and how many make a step of a replica.",
    "optimizer": "Sharding of states: 0, or 1.",
    "model": "The model.",
    "general": "Not decided by the plan, from here on. As it stands, it runs on made-up data.",
}
TRAINING: dict[str, dict[str, Any]] = {
    "tokens": {"train_steps": 100},
    "optimizer": {
        "clip_grad": 1.0,
        "weight_decay": 0.1,
        "learning_rate_scheduler": {
            "learning_rate": 3e-4,
            "lr_warmup_steps": 10,
            "lr_warmup_style": "linear",
            "lr_decay_style": "cosine",
            "min_decay_lr": 3e-5,
        },
        "optimizer_factory": {
            "name": "adamW",
            "adam_beta1": 0.9,
            "adam_beta2": 0.95,
            "adam_eps": 1e-8,
            "torch_adam_is_fused": True,
        },
    },
    "model": {"init_method": {"std": 0.02}, "ddp_bucket_cap_mb": 25},
    "general": {"project": "milpplan", "run": "plan", "seed": 42, "ignore_sanity_checks": True},
    "checkpoints": {"checkpoint_interval": 1000, "checkpoints_path": "checkpoints"},
    "data_stages": {
        "": [
            {
                "name": "Stable Training Stage",
                "start_training_step": 1,
                "data": {"dataset": None, "num_loading_workers": 1, "seed": 42},
            }
        ]
    },
}
"""Settings that a run needs and a plan does not decide."""


def _files(launch: ConfigLaunch, version: str) -> dict[str, str]:
    """Write the launch as files by name: first the configuration, then scripts that start it. ``version`` is
    milpplan's."""
    before = ("# Where nanotron is, and this file.", *defaults(NANOTRON_DIR="."), HERE)
    program = ('"$NANOTRON_DIR/run_train.py"', f'--config-file "$HERE/{CONFIG}"')
    return {
        CONFIG: _config(launch, version),
        SCRIPT: torchrun_script(launch, version, program, before),
    }


def yaml_lines(value: Mapping[str, Any] | list[Any], indent: int = 0) -> list[str]:
    """Write the lines of a table, or of a list of tables."""
    lines: list[str] = []
    space = " " * indent
    if isinstance(value, list):
        for element in value:
            inner = yaml_lines(element, indent + 2)
            lines += [f"{space}- {inner[0].strip()}", *inner[1:]]
        return lines
    for name, inner_value in value.items():
        if isinstance(inner_value, Mapping):
            lines += [f"{space}{name}:", *yaml_lines(inner_value, indent + 2)]
        else:
            lines.append(f"{space}{name}: {scalar(inner_value)}")
    return lines


def scalar(value: object) -> str:
    """Write a value on its line. YAML 1.1 reads 1e-08 as text, so an exponent gets a decimal point before it."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, float):
        text = repr(value)
        mantissa, exponent, power = text.partition("e")
        return f"{mantissa}.0e{power}" if exponent and "." not in mantissa else text
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    return json.dumps(value)


def _differences(problem: Problem, plan: Plan, version: str) -> list[Refusal]:
    """List the differences between the plan and the run that the files start."""
    runs = layout_of(Settings(settings_of(problem, plan, version), known()))
    reasons = {
        "zero_stage": "there is one replica",
        "overlap_grad_reduce": "it reduces gradients beside the last backward, always (helpers.py:445)",
        "rank_order": "its ranks stand as tp-cp-dp-pp (parallel/context.py:62)",
        "schedule": "without a pipeline there is one schedule",
    }
    differences = layout_differences(plan, runs, reasons)
    broken = broken_rules(RULES, problem.model, plan.layout, problem.job.sequence_length)
    differences += [Refusal(text) for text in broken.values()]
    sizes = tuple(stage.num_layers for stage in plan.virtual_stages)
    there = stage_sizes(problem.model, plan.layout.pp)
    if sizes != there and plan.layout.vpp == 1:
        places = ", ".join(map(str, there)) if there else "none on the last rank, not even the head"
        differences.append(
            Refusal(
                f"stages of {', '.join(map(str, sizes))} layers: it places them by its own costs "
                f"(models/base.py:216), here {places}",
                "pp=1",
            )
        )
    return differences


def _notes(problem: Problem, plan: Plan, version: str) -> list[str]:
    notes = []
    if not problem.model.learned_positions:
        notes.append("Rotary base and scaling are not part of a plan: add rope_theta and the like.")
    if plan.layout.zero_stage == 0 and plan.layout.dp > 1:
        notes.append("At ZeRO 0 fp32 gradients are all-reduced as they are.")
    return notes


def _config(launch: ConfigLaunch, version: str) -> str:
    sections = nested(launch.settings)
    lines = header(launch, version)
    for section in dict.fromkeys((*sections, *TRAINING)):
        lines += ["", *([f"# {WHY[section]}"] if section in WHY else []), f"{section}:"]
        lines += yaml_lines(sections.get(section, {}), 2)
        others = TRAINING.get(section, {})
        if section in sections and others:
            lines.append("  # Not decided by the plan:")
        lines += yaml_lines(others.get("", others), 2)
    return "\n".join(lines) + "\n"


LAUNCHER = ConfigLauncher(
    NANOTRON,
    settings_of,
    _notes,
    _files,
    imported,
    losses=model_losses,
    differences=_differences,
    environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
)
"""Launcher nanotron, export and import: its YAML configuration."""
