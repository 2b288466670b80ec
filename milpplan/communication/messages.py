"""What the ranks of a layout send: every message of a layer, of the ends of the model and of the states.

The same messages as the time formulas of ``layers``, ``endpoints`` and ``states`` price; a test adds up their
times and compares. Bytes follow the conventions of ``collectives``; arrays [num_layouts].
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

from milpplan.problem.model import GroupedQueryAttention, LatentAttention, LayerRun, MixtureOfExperts
from milpplan.problem.problem import Problem
from milpplan.simulation import states
from milpplan.simulation.layers.embedding_and_head import Endpoint
from milpplan.simulation.layers.layer_time import BF16_BYTES, FP32_BYTES, Shard, kv_heads_per_rank
from milpplan.simulation.layers.parameters import padded_vocab_size
from milpplan.simulation.layout_columns import BoolArray, FloatArray, LayoutColumns
from milpplan.simulation.network.collectives import Operation
from milpplan.simulation.states import LocalParameters

Parallelism = Literal[
    "tp", "sp", "cp", "ep", "pp", "gradient_reduce", "parameter_gather", "tied_embedding", "gradient_norm"
]
PARALLELISMS: tuple[Parallelism, ...] = (
    *("tp", "sp", "cp", "ep", "pp"),
    *("gradient_reduce", "parameter_gather", "tied_embedding", "gradient_norm"),
)
"""tp: all-reduces of tensor parallelism, and the gather of an inference's logits; sp: its gathers and scatters
with sequence parallelism; pp: transfers between stages, and the gathers of those that are sent in parts."""

Groups = Literal[
    "tensor", "context", "expert_tensor", "expert", "replicas", "expert_replicas",
    "replica_shards", "expert_shards", "replica_copies", "expert_copies",
]  # fmt: skip
"""Names of ``placement``; of the replicas those that shard states together, and those that hold equal shards."""


Transport = Operation | Literal["send"]
"""A collective, or with ``send`` a transfer from each rank of a group to the next."""


class Message(NamedTuple):
    """One call: how often in the forward and in the backward of a micro-batch, or in a step for messages of the
    states; arrays [n]."""

    parallelism: Parallelism
    operation: Transport
    group: Groups
    num_bytes: FloatArray
    forward: FloatArray
    backward: FloatArray
    copies: float | None = None
    """Copies of a token that an all-to-all sends once to each domain; None: each copy as it is."""


def _linear_pair(shard: Shard) -> list[Message]:
    """Tensor-parallel messages of two linear layers; source as ``layers._linear_pair``."""
    message = BF16_BYTES * shard.tokens * shard.hidden
    sp, again = (
        values.astype(np.float64) for values in (shard.columns.sequence_parallel, shard.columns.gather_again)
    )
    return [
        Message("tp", "all_reduce", "tensor", message, 1 - sp, 1 - sp),
        Message("sp", "all_gather", "tensor", shard.gathered_bytes, sp, sp * (1 + again)),
        Message("sp", "reduce_scatter", "tensor", message, sp, sp),
    ]


def _ring_bytes(shard: Shard, attention: GroupedQueryAttention | LatentAttention) -> FloatArray:
    """Keys and values of a context-parallel rank, bytes."""
    if isinstance(attention, LatentAttention):
        width = attention.qk_nope_head_dim + attention.qk_rope_head_dim + attention.v_head_dim
        return np.asarray(BF16_BYTES * shard.tokens * attention.num_attention_heads / shard.tp * width)
    heads = 2 * kv_heads_per_rank(attention, shard.tp)
    return np.asarray(BF16_BYTES * shard.tokens * heads * attention.head_dim)


def _experts(shard: Shard, moe: MixtureOfExperts) -> list[Message]:
    """Dispatch and combination; copies of tokens as they are, without what a framework pads."""
    sent = BF16_BYTES * shard.tokens / shard.tp * moe.num_experts_per_tok * shard.hidden
    one, gathered = np.ones_like(sent), sent * shard.columns.etp
    deduplicated = shard.problem.hardware.software.deduplicated_dispatch
    copies = float(moe.num_experts_per_tok) if deduplicated else None
    return [
        Message("ep", "all_to_all", "expert", sent, 2 * one, 2 * one, copies),
        Message("ep", "all_gather", "expert_tensor", gathered, one, one),
        Message("ep", "reduce_scatter", "expert_tensor", gathered, one, one),
    ]


def layer_messages(problem: Problem, kind: LayerRun, columns: LayoutColumns) -> list[Message]:
    """Messages of one layer and one micro-batch; full recomputation repeats those of the forward."""
    shard = Shard.of(problem, columns)
    ring, steps = _ring_bytes(shard, kind.attention), (columns.cp - 1).astype(np.float64)
    none = np.zeros_like(steps)
    found = _linear_pair(shard)
    found += [Message("cp", "send", "context", ring, steps, none)]
    found += [Message("cp", "send", "context", 2 * ring, none, steps)]
    if isinstance(kind.mlp, MixtureOfExperts):
        found += _experts(shard, kind.mlp)
    if _has_dense_part(kind):
        found += _linear_pair(shard)
    return _forwards(found) if problem.inference else found


def _has_dense_part(kind: LayerRun) -> bool:
    """Whether tokens pass a pair of linear layers beside the attention's: a dense block, or a shared expert."""
    return not isinstance(kind.mlp, MixtureOfExperts) or bool(kind.mlp.shared_intermediate_size)


def _forwards(found: list[Message]) -> list[Message]:
    """The messages of forwards alone."""
    return [message._replace(backward=np.zeros_like(message.backward)) for message in found]


def replayed_messages(problem: Problem, kind: LayerRun, columns: LayoutColumns) -> list[Message]:
    """What recomputing one layer selectively adds to the backward of a micro-batch: with flash attention it drops
    the inputs of the linear pairs, and where they were kept gathered they are gathered again after all. Source as
    ``tensor_parallel.linear_pair``."""
    if problem.inference or problem.job.attention_kernel != "flash":
        return []
    shard = Shard.of(problem, columns)
    kept = np.where(columns.sequence_parallel & ~columns.gather_again, 2.0 if _has_dense_part(kind) else 1.0, 0.0)
    return [Message("sp", "all_gather", "tensor", shard.gathered_bytes, np.zeros_like(kept), kept)]


def end_messages(problem: Problem, is_head: bool, columns: LayoutColumns) -> list[Message]:
    """Tensor-parallel messages of the embedding, or of the head with its loss, for one micro-batch."""
    shard = Shard.of(problem, columns)
    message = BF16_BYTES * shard.tokens * shard.hidden
    sp = columns.sequence_parallel.astype(np.float64)
    none = np.zeros_like(sp)
    if not is_head:
        found = [
            Message("tp", "all_reduce", "tensor", message, 1 - sp, none),
            Message("sp", "reduce_scatter", "tensor", message, sp, none),
            Message("sp", "all_gather", "tensor", message, none, sp),
        ]
        return _forwards(found) if problem.inference else found
    if problem.inference:
        # Only the last token of every sequence becomes logits (``endpoints``).
        logits = BF16_BYTES * columns.micro_batch_size * padded_vocab_size(problem.model.vocab_size, columns.tp)
        return [Message("tp", "all_gather", "tensor", np.asarray(logits, np.float64), 1 + none, none)]
    return [
        Message("tp", "all_reduce", "tensor", FP32_BYTES * shard.tokens, 3 + none, none),
        Message("tp", "all_reduce", "tensor", message, none, 1 - sp),
        Message("sp", "all_gather", "tensor", message, sp, none),
        Message("sp", "reduce_scatter", "tensor", message, none, sp),
    ]


def state_messages(
    problem: Problem, columns: LayoutColumns, local: LocalParameters, is_end: bool = False
) -> tuple[list[Message], list[Message]]:
    """(in every micro-batch, once a step) what a layer's weights and gradients need; ``is_end``: of embedding or
    head, which ZeRO shards no further than stage 1.

    Once a step ``forward`` is the gather and ``backward`` the reduction. Source as ``layout_costs._sharding``.
    """
    stage = np.minimum(columns.zero_stage, 1) if is_end else columns.zero_stage
    often: list[Message] = []
    once: list[Message] = []
    none = np.zeros(len(columns))
    names: tuple[tuple[Groups, Groups, Groups], ...] = (
        ("replicas", "replica_shards", "replica_copies"),
        ("expert_replicas", "expert_shards", "expert_copies"),
    )
    for (count, group), (whole, shards, copies) in zip(states.replica_groups(columns, local), names, strict=True):
        gradients, weights = states.grad_bytes(problem) * count, BF16_BYTES * count
        part = gradients / states.num_shards(problem, group.num_ranks)
        both = ((once, stage <= 1, (stage == 1) | (stage == 2)), (often, stage >= 2, stage == 3))
        for found, reduces, gathers in both:
            scatters = (reduces & (stage >= 1)).astype(np.float64)
            gathered = gathers.astype(np.float64)
            back = gathered if found is often else none
            found += [
                Message("gradient_reduce", "all_reduce", whole, gradients, none, reduces - scatters),
                Message("gradient_reduce", "reduce_scatter", shards, gradients, none, scatters),
                Message("gradient_reduce", "all_reduce", copies, part, none, scatters),
                Message("parameter_gather", "all_gather", shards, weights, gathered, back),
            ]
    # Forwards alone have no gradients, and weights that stay as they are need no gather after an update.
    return (_forwards(often), []) if problem.inference else (often, once)


def tied_bytes(problem: Problem, columns: LayoutColumns, embedding: Endpoint) -> FloatArray:
    """Gradient of a tied embedding that the first and the last rank add up, bytes [n]; 0 where it is one."""
    tied = problem.model.tie_word_embeddings
    shared = np.where(tied & (columns.pp > 1) & ~columns.ends_meet, embedding.matrix_parameters(columns.tp), 0.0)
    return np.asarray(states.grad_bytes(problem) * shared)


def transfer_bytes(problem: Problem, columns: LayoutColumns) -> FloatArray:
    """Activation (or its gradient) from one virtual stage to the next, [n]: what each tensor-parallel rank sends,
    with sequence parallelism its own slice, and with ``pp_scatter_gather`` a part of what all of them have."""
    shard = Shard.of(problem, columns)
    share = np.where(scattered(columns), shard.tp, shard.sequence_tp)
    return np.asarray(BF16_BYTES * shard.tokens * shard.hidden / share)


def gathered_bytes(problem: Problem, columns: LayoutColumns) -> FloatArray:
    """What the tensor-parallel ranks of a stage gather after each transfer that came in parts, [n]; else 0."""
    shard = Shard.of(problem, columns)
    return np.asarray(np.where(scattered(columns), BF16_BYTES * shard.tokens * shard.hidden, 0.0))


def scattered(columns: LayoutColumns) -> BoolArray:
    """Whether the ranks send parts of what all of them have, [n]; source as ``transfers.transfer_s``."""
    return np.asarray(columns.pp_scatter_gather & ~columns.sequence_parallel & (columns.tp > 1))
