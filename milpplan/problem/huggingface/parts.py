"""Parts of a ``ModelSpec`` from the fields of a Hugging Face config, which the builders of families share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any, Literal

from milpplan.problem import (
    DenseMlp,
    GroupedQueryAttention,
    LatentAttention,
    LayerRun,
    MixtureOfExperts,
    ModelSpec,
)
from milpplan.problem.huggingface.typed_keys import HEADS, HIDDEN, POSITIONS, Fields
from milpplan.problem.model import Mixer, Mlp
from milpplan.problem.reading import shown

QkNorm = Literal["none", "unweighted", "per_head", "full_width"]

Builder = Callable[[Fields, str], ModelSpec]
"""Function that builds a model of a config's fields and a name."""

DEFAULT_SEQUENCE_LENGTH = 4096
"""Default number of tokens of a sequence; the model's context if that is shorter."""


def attention_of(
    fields: Fields,
    qkv_bias: bool = False,
    output_bias: bool = False,
    qk_norm: QkNorm = "none",
    sinks: bool = False,
    num_key_value_heads: int | None = None,
    head_dim: int | None = None,
) -> GroupedQueryAttention:
    """Build grouped-query attention; ``num_key_value_heads`` and ``head_dim`` are given only where a family fixes
    them."""
    return GroupedQueryAttention(
        num_attention_heads=fields.integer(HEADS),
        num_key_value_heads=num_key_value_heads or fields.num_key_value_heads,
        head_dim=head_dim or fields.head_dim,
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        qk_norm=qk_norm,
        sinks=sinks,
    )


def plain_attention(fields: Fields, qkv_bias: bool = False, output_bias: bool = False) -> GroupedQueryAttention:
    """Build multi-head attention of classes that read neither ``num_key_value_heads`` nor ``head_dim``."""
    heads, width = fields.integer(HEADS), fields.divided_head_dim
    return attention_of(fields, qkv_bias, output_bias, num_key_value_heads=heads, head_dim=width)


def dense_mlp(
    fields: Fields,
    gated: bool = True,
    bias: bool = False,
    key: str = "intermediate_size",
    default: int | None = None,
) -> DenseMlp:
    """Build a dense feed-forward block; ``default`` is its width where the class derives one."""
    return DenseMlp(intermediate_size=fields.integer(key, default=default), gated=gated, bias=bias)


def experts_of(fields: Fields, number_key: str, size_key: str, **more: Any) -> MixtureOfExperts:
    """Build routed experts of the width under ``size_key``; ``more`` are fields that the family fixes."""
    return MixtureOfExperts(
        num_experts=fields.integer(number_key),
        num_experts_per_tok=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer(size_key),
        **more,
    )


def windowed(
    fields: Fields, attention: GroupedQueryAttention, slides: list[bool] | None = None
) -> list[GroupedQueryAttention]:
    """Repeat ``attention`` for every layer, with ``sliding_window`` where it slides (by default everywhere)."""
    slides = [True] * fields.num_layers if slides is None else slides
    if not any(slides):
        fields.unused("sliding_window")
        return [attention] * len(slides)
    sliding = attention.model_copy(update={"sliding_window": fields.window()})
    return [sliding if slide else attention for slide in slides]


def runs(attentions: Iterable[Mixer], mlps: Iterable[Mlp], num_norms: int = 2) -> tuple[LayerRun, ...]:
    """Collect consecutive identical layers in runs."""
    return tuple(
        LayerRun(count=len(list(same)), attention=attention, mlp=mlp, num_norms=num_norms)
        for (attention, mlp), same in groupby(zip(attentions, mlps, strict=True))
    )


def model_of(
    fields: Fields,
    name: str,
    layers: tuple[LayerRun, ...],
    max_position_embeddings: int | None = None,
    **more: Any,
) -> ModelSpec:
    """Build the parts that all families share; ``more`` are fields of ``ModelSpec`` that the family fixes."""
    positions = max_position_embeddings or fields.integer(POSITIONS)
    if "dropout" not in more and fields.drops("attention_dropout"):
        more["attention_dropout"] = True
    return ModelSpec(
        name=name,
        hidden_size=fields.integer(HIDDEN),
        vocab_size=fields.integer("vocab_size"),
        max_position_embeddings=positions,
        layers=layers,
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        default_sequence_length=min(positions, DEFAULT_SEQUENCE_LENGTH),
        **more,
    )


def masks(fields: Fields, residual: str, embedding: str | None, attention: str) -> dict[str, bool]:
    """Return the fields of ``ModelSpec`` about dropout masks.

    The arguments are the keys of the three probabilities; without a key, the embedding has no mask.
    """
    dropped = fields.drops(residual)
    parts = {
        "embedding_dropout": embedding is not None and fields.drops(embedding),
        "attention_dropout": fields.drops(attention),
    }
    return {"dropout": dropped, **{name: value for name, value in parts.items() if value != dropped}}


def uniform(fields: Fields, name: str, attention: Mixer, mlp: Mlp, num_norms: int = 2, **more: Any) -> ModelSpec:
    """Build a model whose layers are all equal."""
    run = LayerRun(count=fields.num_layers, attention=attention, mlp=mlp, num_norms=num_norms)
    return model_of(fields, name, (run,), **more)


def biased_attention(fields: Fields, qk_norm: QkNorm = "none") -> GroupedQueryAttention:
    """Build attention whose four projections have a bias if ``attention_bias`` is true."""
    bias = fields.flag("attention_bias")
    return attention_of(fields, qkv_bias=bias, output_bias=bias, qk_norm=qk_norm)


def expert_mlps(fields: Fields, experts: MixtureOfExperts, is_expert: list[bool]) -> list[Mlp]:
    """Build runs of layers with ``experts`` where a flag is true, and with a dense block elsewhere."""
    if all(is_expert):
        fields.unused("intermediate_size")
        return [experts] * len(is_expert)
    dense = dense_mlp(fields)
    return [experts if flag else dense for flag in is_expert]


def listed_experts(fields: Fields, default: list[bool]) -> list[bool]:
    """Find the layers that ``mlp_layer_types`` calls sparse, with experts; ``default`` where it is absent."""
    listed = fields.sequence("mlp_layer_types")
    if listed is None:
        return default
    if len(listed) != fields.num_layers or any(kind not in ("dense", "sparse") for kind in listed):
        raise fields.refuse(f"mlp_layer_types is {shown(listed)}.", "Expected dense or sparse for every layer.")
    return [kind == "sparse" for kind in listed]


def leading_dense(fields: Fields) -> list[bool]:
    """Build experts in all but the first ``first_k_dense_replace`` layers."""
    fields.must_be("moe_layer_freq", 1, "experts sit in every layer after the dense ones")
    dense = fields.integer("first_k_dense_replace", minimum=0)
    return [layer >= dense for layer in range(fields.num_layers)]


def shared_experts(fields: Fields) -> MixtureOfExperts:
    """Build routed experts beside shared experts of the same width."""
    # A null stands for none in DeepSeek's own files.
    none = 0 if fields.there("n_shared_experts") else None
    shared = fields.integer("n_shared_experts", default=none, minimum=0)
    size = "moe_intermediate_size"
    return experts_of(fields, "n_routed_experts", size, shared_intermediate_size=shared * fields.integer(size))


def query_rank(fields: Fields) -> int | None:
    """Read ``q_lora_rank``; null means that the query has no low rank."""
    if not fields.there("q_lora_rank"):
        raise fields.missing("q_lora_rank")
    return fields.optional("q_lora_rank")


def latent_attention(fields: Fields) -> LatentAttention:
    """Build DeepSeek's latent attention, without biases."""
    fields.must_be("attention_bias", False, "latent attention is described without biases")
    fields.must_be("mlp_bias", False, "DeepSeek's experts are described without biases")
    return LatentAttention(
        num_attention_heads=fields.integer(HEADS),
        q_lora_rank=query_rank(fields),
        kv_lora_rank=fields.integer("kv_lora_rank"),
        qk_nope_head_dim=fields.integer("qk_nope_head_dim"),
        qk_rope_head_dim=fields.integer("qk_rope_head_dim"),
        v_head_dim=fields.integer("v_head_dim"),
    )
