"""Plan as nanotron's settings, ``section.name`` to value, and back.

Source: huggingface/nanotron at 2411b022, config/config.py, config/parallelism_config.py, config/models_config.py;
trainer.py:1085-1165 and helpers.py:385-460 (gradients are kept in fp32 and reduced beside the last backward; ZeRO
1 gathers weights when the update is over, optim/zero.py:119).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import Any

from milpplan.errors import InvalidInputError
from milpplan.launchers import Known, known_settings
from milpplan.launchers.settings import Settings
from milpplan.problem import DenseMlp, GroupedQueryAttention, Layout, ModelSpec, Plan, Problem, validated
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
    r"data_stages|data_stages\[\]\.(name|start_training_step|data\..*)": "data, which are not priced",
    r"tokens\.train_steps|optimizer\.(weight_decay.*|clip_grad|learning_rate_scheduler\..*|"
    r"optimizer_factory\.(adam_.*|torch_adam_.*))": "numbers of the update, whose work does not depend on them",
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
        return [*losses, f"{model.name} has latent attention or experts: its experts run on one rank alone"]
    parts = {
        f"heads of {attention.head_dim}, not hidden_size / heads": (
            attention.head_dim * attention.num_attention_heads != model.hidden_size
        ),
        "norms of queries and keys": attention.qk_norm != "none",
        "attention sinks": attention.sinks,
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


def settings_of(problem: Problem, plan: Plan) -> dict[str, Any]:
    """Write the settings of a plan whose model nanotron can build."""
    layout, model, job = plan.layout, problem.model, problem.job
    kind = model.kinds[0]
    assert isinstance(kind.attention, GroupedQueryAttention)
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
    heads = kind.attention.num_attention_heads
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
