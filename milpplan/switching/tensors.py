"""The parameters of a model, tensor by tensor: their shapes, where they stand, and what divides them.

Every tensor is a matrix [outputs, inputs] as a linear layer holds it; vectors are [length, 1]. Together they are
what ``costs.parameters`` counts, to the unit: tests compare them for every shipped model.
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
"""What tensor parallelism (etp for experts) divides: outputs of the first linear layer of a pair, inputs of the
second one, or nothing."""

EMBEDDING, HEAD = -2, -1
"""Places of the tensors that belong to no layer, as in ``costs.stages``."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What decides how a tensor is divided; tensors of one shape at one place are divided alike.

    ``units`` is the number of pieces of the divided dimension that stay whole: heads, else its rows or columns.
    """

    rows: int
    columns: int
    split: Split = "none"
    units: int = 1
    vocabulary: bool = False
    """Whether the rows are those of the vocabulary, which frameworks pad before they divide it."""

    @property
    def size(self) -> int:
        """Parameters."""
        return self.rows * self.columns


@dataclass(frozen=True, slots=True)
class Tensor:
    """One parameter tensor. ``place``: its layer, ``EMBEDDING`` or ``HEAD``; ``expert``: its routed expert of
    ``num_experts``; ``tied``: the last virtual stage holds a copy of it as its output projection."""

    name: str
    shape: Shape
    place: int
    expert: int | None = None
    num_experts: int = 1
    tied: bool = False


def _rows(rows: int, columns: int, units: int | None = None) -> Shape:
    return Shape(rows, columns, "rows", rows if units is None else units)


def _columns(rows: int, columns: int, units: int | None = None) -> Shape:
    return Shape(rows, columns, "columns", columns if units is None else units)


def _vector(length: int) -> Shape:
    return Shape(length, 1)


MAX_EXPERTS = 200_000
"""Most routed experts of all layers together; each is listed by itself."""
MAX_PARAMETERS = 10**14
"""Most parameters; sums of their bytes over ranks stay in 64 bits."""

Named = Iterator[tuple[str, Shape]]


def _norm(model: ModelSpec, name: str) -> Named:
    yield f"{name}.weight", _vector(model.hidden_size)
    if model.norm == "layernorm":
        yield f"{name}.bias", _vector(model.hidden_size)


def _grouped_query_attention(hidden: int, attention: GroupedQueryAttention) -> Named:
    """As ``parameters._grouped_query_attention``; cuts respect heads."""
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
    """As ``parameters._latent_attention``."""
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
    """As ``parameters._feed_forward``."""
    for name in ("gate", "up") if gated else ("up",):
        yield f"{name}.weight", _rows(width, hidden)
        if bias:
            yield f"{name}.bias", _rows(width, 1)
    yield "down.weight", _columns(hidden, width)
    if bias:
        yield "down.bias", _vector(hidden)


def _mixture_of_experts(hidden: int, mlp: MixtureOfExperts) -> Named:
    """What every rank of a layer holds beside the routed experts."""
    yield "router.weight", Shape(mlp.num_experts, hidden)
    if mlp.router_bias:
        yield "router.bias", _vector(mlp.num_experts)
    if mlp.shared_intermediate_size:
        shared = _feed_forward(hidden, mlp.shared_intermediate_size, mlp.gated, mlp.bias)
        yield from ((f"shared.{name}", shape) for name, shape in shared)
    if mlp.shared_gate:
        yield "shared.gate_logit.weight", Shape(1, hidden)


def _layer(model: ModelSpec, kind: LayerRun, number: int) -> Iterator[Tensor]:
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
    """All parameter tensors, in the order of the model; a tied embedding is there once.

    Raises:
        InvalidInputError: too many of them, or too large.
    """
    _check_size(model)
    hidden, vocabulary = model.hidden_size, model.vocab_size
    words = Shape(vocabulary, hidden, "rows", vocabulary, vocabulary=True)
    found = [Tensor("embedding.weight", words, EMBEDDING, tied=model.tie_word_embeddings)]
    if model.learned_positions:
        found.append(Tensor("positions.weight", Shape(model.max_position_embeddings, hidden), EMBEDDING))
    number = 0
    for run in model.layers:
        for _ in range(run.count):
            found += _layer(model, run, number)
            number += 1
    found += [Tensor(name, shape, HEAD) for name, shape in _norm(model, "final_norm")]
    if not model.tie_word_embeddings:
        found.append(Tensor("head.weight", words, HEAD))
    if model.lm_head_bias:
        found.append(Tensor("head.bias", Shape(vocabulary, 1, "rows", vocabulary, vocabulary=True), HEAD))
    return tuple(found)


def _check_size(model: ModelSpec) -> None:
    experts = sum(run.count * run.mlp.num_experts for run in model.layers if isinstance(run.mlp, MixtureOfExperts))
    parameters = total_parameters(model)
    if experts > MAX_EXPERTS or parameters > MAX_PARAMETERS:
        raise InvalidInputError(
            f"{model.name} has {parameters:,} parameters and {experts:,} routed experts.",
            f"Expected at most {MAX_PARAMETERS:,} and {MAX_EXPERTS:,} for a switch, which lists every tensor.",
            "Correct the model.",
        )
