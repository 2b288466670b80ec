"""Parts that the families of Hugging Face models are put together from."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Any, Literal

from milpplan.specs.hf_fields import (
    EXPERTS,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    KEY_VALUE_HEADS,
    POSITIONS,
    Fields,
)
from milpplan.specs.model import (
    Attention,
    DenseMlp,
    GroupedQueryAttention,
    LayerRun,
    MixtureOfExperts,
    Mlp,
    ModelSpec,
)

QkNorm = Literal["none", "per_head", "full_width"]

DEFAULT_SEQUENCE_LENGTH = 4096
"""Tokens a sequence when the user names none; shorter where the model's context is."""


def attention_of(
    fields: Fields,
    qkv_bias: bool = False,
    output_bias: bool = False,
    qk_norm: QkNorm = "none",
    sinks: bool = False,
    num_key_value_heads: int | None = None,
) -> GroupedQueryAttention:
    """Grouped-query attention; ``num_key_value_heads`` is given only where a family fixes it."""
    heads = fields.integer(*HEADS)
    return GroupedQueryAttention(
        num_attention_heads=heads,
        num_key_value_heads=num_key_value_heads or fields.integer(*KEY_VALUE_HEADS, default=heads),
        head_dim=fields.head_dim,
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        qk_norm=qk_norm,
        sinks=sinks,
    )


def dense_mlp(fields: Fields, gated: bool = True, bias: bool = False, default: int | None = None) -> DenseMlp:
    """A dense feed-forward block; ``default`` is its width where the class derives one."""
    return DenseMlp(intermediate_size=fields.integer(*INTERMEDIATE, default=default), gated=gated, bias=bias)


def experts_of(fields: Fields, size_key: str, **more: Any) -> MixtureOfExperts:
    """Routed experts of the width under ``size_key``; ``more`` are fields that the family fixes."""
    return MixtureOfExperts(
        num_experts=fields.integer(*EXPERTS),
        num_experts_per_tok=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer(size_key),
        **more,
    )


def windowed(
    fields: Fields, attention: GroupedQueryAttention, slides: list[bool] | None = None
) -> list[GroupedQueryAttention]:
    """``attention`` in every layer, with ``sliding_window`` where it slides (by default everywhere)."""
    window = fields.optional("sliding_window")
    windowed = attention.model_copy(update={"sliding_window": window})
    windows = fields.windows(slides or [True] * fields.num_layers, window)
    return [attention if one is None else windowed for one in windows]


def runs(attentions: Iterable[Attention], mlps: Iterable[Mlp], num_norms: int = 2) -> tuple[LayerRun, ...]:
    """Consecutive identical layers as runs."""
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
    """The parts all families share; ``more`` are fields of ``ModelSpec`` that the family fixes."""
    positions = max_position_embeddings or fields.integer(*POSITIONS)
    return ModelSpec(
        name=name,
        hidden_size=fields.integer(*HIDDEN),
        vocab_size=fields.integer("vocab_size"),
        max_position_embeddings=positions,
        layers=layers,
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        default_sequence_length=min(positions, DEFAULT_SEQUENCE_LENGTH),
        **more,
    )


def uniform(
    fields: Fields, name: str, attention: Attention, mlp: Mlp, num_norms: int = 2, **more: Any
) -> ModelSpec:
    """A model whose layers are all the same."""
    run = LayerRun(count=fields.num_layers, attention=attention, mlp=mlp, num_norms=num_norms)
    return model_of(fields, name, (run,), **more)


def biased_attention(fields: Fields, qk_norm: QkNorm = "none") -> GroupedQueryAttention:
    """Attention whose four projections have a bias when ``attention_bias`` says so."""
    bias = fields.flag("attention_bias")
    return attention_of(fields, qkv_bias=bias, output_bias=bias, qk_norm=qk_norm)


def expert_mlps(fields: Fields, experts: MixtureOfExperts, is_expert: list[bool]) -> list[Mlp]:
    """``experts`` where the flag says so, a dense block elsewhere."""
    if all(is_expert):
        return [experts] * len(is_expert)
    dense = dense_mlp(fields)
    return [experts if flag else dense for flag in is_expert]
