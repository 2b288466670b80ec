"""Model as Megatron-LM's arguments. Models that Megatron-LM's GPT cannot represent are refused."""

from __future__ import annotations

from milpplan.errors import IllegalPlanError
from milpplan.launchers.arguments import Values
from milpplan.launchers.layer_patterns import pattern_text
from milpplan.problem.model import (
    DenseMlp,
    GroupedQueryAttention,
    LatentAttention,
    MixtureOfExperts,
    ModelSpec,
)

Pairs = dict[str, Values]


def model_arguments(model: ModelSpec, sequence_length: int) -> Pairs:
    """Write the sizes of the model as arguments.

    Raises:
        IllegalPlanError: Megatron-LM has no arguments for the model.
    """
    _check_layers_alike(model)
    pairs: Pairs = {
        "--num-layers": (str(model.num_layers),),
        "--hidden-size": (str(model.hidden_size),),
        "--vocab-size": (str(model.vocab_size),),
        "--seq-length": (str(sequence_length),),
        "--max-position-embeddings": (str(max(model.max_position_embeddings, sequence_length)),),
        "--position-embedding-type": ("learned_absolute" if model.learned_positions else "rope",),
        "--normalization": ("LayerNorm" if model.norm == "layernorm" else "RMSNorm",),
    }
    if model.drops_embedding != model.dropout:
        raise _refuse(f"{model.name} has dropout in one of embedding and layers", "one hidden dropout for both")
    dropouts = {"--attention-dropout": model.drops_scores, "--hidden-dropout": model.dropout}
    pairs |= {name: ("0.1" if drops else "0.0",) for name, drops in dropouts.items()}
    if not model.tie_word_embeddings:
        pairs["--untie-embeddings-and-output-weights"] = ()
    return pairs | _attention(model) | _biases(model) | _mlps(model)


def _refuse(seen: str, has: str) -> IllegalPlanError:
    return IllegalPlanError(
        f"{seen}, which Megatron-LM cannot build from its arguments.",
        f"Expected {has}.",
        "Export to another target, or plan a model that Megatron-LM has.",
    )


def _check_layers_alike(model: ModelSpec) -> None:
    """Check that layer types differ only in their window and in being dense or not."""
    if model.lm_head_bias:
        raise _refuse(f"{model.name} has a head with a bias", "a head without one (core/models/gpt/gpt_model.py)")
    if any(kind.num_norms != 2 for kind in model.kinds):
        counts = sorted({kind.num_norms for kind in model.kinds})
        raise _refuse(f"{model.name} has layers with {counts} norms", "two norms a layer")
    attentions = {
        kind.attention.model_copy(update={"sliding_window": None})
        if isinstance(kind.attention, GroupedQueryAttention)
        else kind.attention
        for kind in model.kinds
    }
    windows = {window for window in _windows(model) if window is not None}
    dense = {kind.mlp for kind in model.kinds if isinstance(kind.mlp, DenseMlp)}
    experts = {kind.mlp for kind in model.kinds if isinstance(kind.mlp, MixtureOfExperts)}
    gated = {kind.mlp.gated for kind in model.kinds}
    for what, different in (
        ("attentions", attentions),
        ("sliding windows", windows),
        ("dense feed-forward blocks", dense),
        ("blocks of experts", experts),
        ("activations (gated and not)", gated),
    ):
        if len(different) > 1:
            raise _refuse(
                f"{model.name} has layers of {len(different)} different {what}", "one kind of each in all layers"
            )


def _windows(model: ModelSpec) -> list[int | None]:
    """List the sliding window of every layer, in tokens."""
    kinds = [kind.attention for kind in model.kinds]
    return [getattr(kinds[index], "sliding_window", None) for index in model.layer_kinds]


def _attention(model: ModelSpec) -> Pairs:
    attention = model.kinds[0].attention
    pairs: Pairs = {"--num-attention-heads": (str(attention.num_attention_heads),)}
    if isinstance(attention, LatentAttention):
        pairs |= {
            "--multi-latent-attention": (),
            "--qk-layernorm": (),
            "--kv-lora-rank": (str(attention.kv_lora_rank),),
            "--qk-head-dim": (str(attention.qk_nope_head_dim),),
            "--qk-pos-emb-head-dim": (str(attention.qk_rope_head_dim),),
            "--v-head-dim": (str(attention.v_head_dim),),
        }
        if attention.q_lora_rank is not None:
            pairs["--q-lora-rank"] = (str(attention.q_lora_rank),)
        if model.hidden_size % attention.num_attention_heads:
            # Latent attention does not use it, but Megatron-LM derives and checks it where it is not given.
            pairs["--kv-channels"] = (str(attention.v_head_dim),)
        return pairs
    pairs["--kv-channels"] = (str(attention.head_dim),)
    if attention.num_key_value_heads != attention.num_attention_heads:
        pairs |= {"--group-query-attention": (), "--num-query-groups": (str(attention.num_key_value_heads),)}
    if attention.qk_norm == "full_width":
        raise _refuse(f"{model.name} normalises queries over all heads", "norms of single heads (--qk-layernorm)")
    if attention.qk_norm == "per_head":
        pairs["--qk-layernorm"] = ()
    if attention.sinks:
        pairs["--softmax-type"] = ("learnable",)
    return pairs | _window_arguments(model)


def _window_arguments(model: ModelSpec) -> Pairs:
    """Write the windows; ``--window-size`` counts the tokens before the query's own."""
    windows = _windows(model)
    width = next((window for window in windows if window is not None), None)
    if width is None:
        return {}
    pairs: Pairs = {"--window-size": (f"{width - 1},0",)}
    if None in windows:
        pairs["--window-attn-skip-freq"] = (pattern_text([window is not None for window in windows]),)
    return pairs


def _biases(model: ModelSpec) -> Pairs:
    """Write the biases: on all linear layers, on none, or on queries, keys and values only."""
    biases = set()
    for kind in model.kinds:
        mlp = [kind.mlp.bias] + ([kind.mlp.router_bias] if isinstance(kind.mlp, MixtureOfExperts) else [])
        qkv, others = False, mlp
        if isinstance(kind.attention, GroupedQueryAttention):
            qkv, others = kind.attention.qkv_bias, [kind.attention.output_bias, *mlp]
        elif any(mlp):
            # Latent attention has no biases here, but Megatron-LM's switch for all layers would add some.
            others = [True, False]
        biases.add((qkv, all(others), any(others)))
    if biases == {(True, True, True)}:
        return {}
    if biases == {(False, False, False)}:
        return {"--disable-bias-linear": ()}
    if biases == {(True, False, False)}:
        return {"--disable-bias-linear": (), "--add-qkv-bias": ()}
    raise _refuse(
        f"{model.name} has biases in some of its linear layers",
        "biases in all, in none, or in queries, keys and values alone (--disable-bias-linear, --add-qkv-bias)",
    )


def _mlps(model: ModelSpec) -> Pairs:
    kinds = model.kinds
    dense = next((kind.mlp for kind in kinds if isinstance(kind.mlp, DenseMlp)), None)
    moe = next((kind.mlp for kind in kinds if isinstance(kind.mlp, MixtureOfExperts)), None)
    width = dense.intermediate_size if dense is not None else moe.intermediate_size if moe is not None else 0
    pairs: Pairs = {"--ffn-hidden-size": (str(width),)}
    if kinds[0].mlp.gated:
        pairs["--swiglu"] = ()
    if moe is None:
        return pairs
    pairs |= {
        "--num-experts": (str(moe.num_experts),),
        "--moe-router-topk": (str(moe.num_experts_per_tok),),
        "--moe-ffn-hidden-size": (str(moe.intermediate_size),),
        "--moe-grouped-gemm": (),
    }
    if dense is not None:
        with_experts = [isinstance(kinds[index].mlp, MixtureOfExperts) for index in model.layer_kinds]
        pairs["--moe-layer-freq"] = (pattern_text(with_experts),)
    if moe.shared_intermediate_size:
        pairs["--moe-shared-expert-intermediate-size"] = (str(moe.shared_intermediate_size),)
    if moe.shared_gate:
        pairs["--moe-shared-expert-gate"] = ()
    return pairs
