"""Parameter tensors of a model: their shapes, their layers, and the parallelism that divides them.

Every tensor is a matrix [outputs, inputs] as in a linear layer; vectors are [length, 1]. Their total equals the
count of ``milpplan.simulation.layers.parameters`` to the unit: tests compare them for every shipped model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from milpplan.errors import InvalidInputError
from milpplan.problem.model import (
    DenseMlp,
    GroupedQueryAttention,
    LatentAttention,
    LayerRun,
    MixtureOfExperts,
    ModelSpec,
)
from milpplan.simulation.layers.parameters import total_parameters

Split = Literal["rows", "columns", "none"]
"""Dimension that tensor parallelism (etp for experts) divides: outputs of the first linear layer of a pair, inputs
of the second layer, or none."""

EMBEDDING, HEAD = -2, -1
"""Places of the tensors outside layers, as in ``milpplan.simulation.stages``."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of a tensor and rule of its division; tensors with equal shape and place are divided alike."""

    rows: int
    columns: int
    split: Split = "none"
    units: int = 1
    """Number of indivisible pieces of the divided dimension: heads, else its rows or columns."""
    vocabulary: bool = False
    """True if the rows are those of the vocabulary, which frameworks pad before they divide it."""

    @property
    def size(self) -> int:
        """Number of parameters."""
        return self.rows * self.columns


@dataclass(frozen=True, slots=True)
class Tensor:
    """Parameter tensor."""

    name: str
    shape: Shape
    place: int
    """Index of its layer, ``EMBEDDING`` or ``HEAD``."""
    expert: int | None = None
    """Index of its routed expert; None: no routed expert."""
    num_experts: int = 1
    """Routed experts of its layer."""
    tied: bool = False
    """True if the last virtual stage holds a copy as its output projection."""


def _rows(rows: int, columns: int, units: int | None = None) -> Shape:
    """Make a shape whose rows are divided."""
    return Shape(rows, columns, "rows", rows if units is None else units)


def _columns(rows: int, columns: int, units: int | None = None) -> Shape:
    """Make a shape whose columns are divided."""
    return Shape(rows, columns, "columns", columns if units is None else units)


def _vector(length: int) -> Shape:
    """Make the shape of an undivided vector."""
    return Shape(length, 1)


MAX_EXPERTS = 200_000
"""Maximum number of routed experts of all layers, each of which is listed."""
MAX_PARAMETERS = 10**14
"""Maximum number of parameters, so that sums of their bytes over ranks stay in 64 bits."""

Named = Iterator[tuple[str, Shape]]
"""Names and shapes of tensors."""


def _norm(model: ModelSpec, name: str) -> Named:
    """List the tensors of a norm."""
    yield f"{name}.weight", _vector(model.hidden_size)
    if model.norm == "layernorm":
        yield f"{name}.bias", _vector(model.hidden_size)


def _grouped_query_attention(hidden: int, attention: GroupedQueryAttention) -> Named:
    """List the tensors of ``parameters._grouped_query_attention``; cuts respect heads."""
    heads, shared, width = attention.num_attention_heads, attention.num_key_value_heads, attention.head_dim
    for name, count in (("q", heads), ("k", shared), ("v", shared)):
        yield f"{name}.weight", _rows(count * width, hidden, count)
        if attention.qkv_bias:
            yield f"{name}.bias", _rows(count * width, 1, count)
    if attention.sinks:
        yield "sinks", _rows(heads, 1)
    if attention.qk_norm != "none":
        per_head = attention.qk_norm == "per_head"
        yield "q_norm.weight", _vector(width if per_head else heads * width)
        yield "k_norm.weight", _vector(width if per_head else shared * width)
    yield "o.weight", _columns(hidden, heads * width, heads)
    if attention.output_bias:
        yield "o.bias", _vector(hidden)


def _latent_attention(hidden: int, attention: LatentAttention) -> Named:
    """List the tensors of ``parameters._latent_attention``."""
    heads, rank = attention.num_attention_heads, attention.kv_lora_rank
    query = heads * (attention.qk_nope_head_dim + attention.qk_rope_head_dim)
    if attention.q_lora_rank is None:
        yield "q.weight", _rows(query, hidden, heads)
    else:
        yield "q_down.weight", Shape(attention.q_lora_rank, hidden)
        yield "q_norm.weight", _vector(attention.q_lora_rank)
        yield "q_up.weight", _rows(query, attention.q_lora_rank, heads)
    yield "kv_down.weight", Shape(rank + attention.qk_rope_head_dim, hidden)
    yield "kv_norm.weight", _vector(rank)
    yield "kv_up.weight", _rows(heads * (attention.qk_nope_head_dim + attention.v_head_dim), rank, heads)
    yield "o.weight", _columns(hidden, heads * attention.v_head_dim, heads)


def _feed_forward(hidden: int, width: int, gated: bool, bias: bool) -> Named:
    """List the tensors of ``parameters._feed_forward``."""
    for name in ("gate", "up") if gated else ("up",):
        yield f"{name}.weight", _rows(width, hidden)
        if bias:
            yield f"{name}.bias", _rows(width, 1)
    yield "down.weight", _columns(hidden, width)
    if bias:
        yield "down.bias", _vector(hidden)


def _mixture_of_experts(hidden: int, mlp: MixtureOfExperts) -> Named:
    """List the tensors of a mixture of experts outside the routed experts."""
    yield "router.weight", Shape(mlp.num_experts, hidden)
    if mlp.router_bias:
        yield "router.bias", _vector(mlp.num_experts)
    if mlp.shared_intermediate_size:
        shared = _feed_forward(hidden, mlp.shared_intermediate_size, mlp.gated, mlp.bias)
        yield from ((f"shared.{name}", shape) for name, shape in shared)
    if mlp.shared_gate:
        yield "shared.gate_logit.weight", Shape(1, hidden)


def _layer(model: ModelSpec, kind: LayerRun, number: int) -> Iterator[Tensor]:
    """List the tensors of a layer."""
    hidden, attention, mlp = model.hidden_size, kind.attention, kind.mlp
    prefix = f"layers.{number}"
    latent = isinstance(attention, LatentAttention)
    parts = _latent_attention(hidden, attention) if latent else _grouped_query_attention(hidden, attention)  # type: ignore[arg-type]
    for name, shape in parts:
        yield Tensor(f"{prefix}.attention.{name}", shape, number)
    for norm in range(kind.num_norms):
        for name, shape in _norm(model, f"{prefix}.norms.{norm}"):
            yield Tensor(name, shape, number)
    if isinstance(mlp, DenseMlp):
        for name, shape in _feed_forward(hidden, mlp.intermediate_size, mlp.gated, mlp.bias):
            yield Tensor(f"{prefix}.mlp.{name}", shape, number)
        return
    for name, shape in _mixture_of_experts(hidden, mlp):
        yield Tensor(f"{prefix}.mlp.{name}", shape, number)
    for expert in range(mlp.num_experts):
        for name, shape in _feed_forward(hidden, mlp.intermediate_size, mlp.gated, mlp.bias):
            yield Tensor(f"{prefix}.mlp.experts.{expert}.{name}", shape, number, expert, mlp.num_experts)


@lru_cache(maxsize=8)
def model_tensors(model: ModelSpec) -> tuple[Tensor, ...]:
    """List all parameter tensors in the order of the model; a tied embedding occurs once.

    Raises:
        InvalidInputError: too many tensors, or too large.
    """
    _check_size(model)
    hidden, vocabulary = model.hidden_size, model.vocab_size
    words = Shape(vocabulary, hidden, "rows", vocabulary, vocabulary=True)
    tensors = [Tensor("embedding.weight", words, EMBEDDING, tied=model.tie_word_embeddings)]
    if model.learned_positions:
        tensors.append(Tensor("positions.weight", Shape(model.max_position_embeddings, hidden), EMBEDDING))
    number = 0
    for run in model.layers:
        for _ in range(run.count):
            tensors += _layer(model, run, number)
            number += 1
    tensors += [Tensor(name, shape, HEAD) for name, shape in _norm(model, "final_norm")]
    if not model.tie_word_embeddings:
        tensors.append(Tensor("head.weight", words, HEAD))
    if model.lm_head_bias:
        tensors.append(Tensor("head.bias", Shape(vocabulary, 1, "rows", vocabulary, vocabulary=True), HEAD))
    return tuple(tensors)


def _check_size(model: ModelSpec) -> None:
    """Refuse models whose tensors are too many to list."""
    experts = sum(run.count * run.mlp.num_experts for run in model.layers if isinstance(run.mlp, MixtureOfExperts))
    parameters = total_parameters(model)
    if experts > MAX_EXPERTS or parameters > MAX_PARAMETERS:
        raise InvalidInputError(
            f"{model.name} has {parameters:,} parameters and {experts:,} routed experts.",
            f"Expected at most {MAX_PARAMETERS:,} and {MAX_EXPERTS:,} for a switch, which lists every tensor.",
            "Correct the model.",
        )
