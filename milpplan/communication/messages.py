"""Messages of the ranks of a layout: those of a layer, of the ends of the model and of the states.

They are the messages that the time formulas of ``layer_time``, ``embedding_and_head`` and ``states`` price; a test
adds up their times and compares. Bytes follow the conventions of ``collectives``; arrays [num_layouts].
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
"""Purposes of messages. tp: all-reduces of tensor parallelism, and the gather of the logits in inference; sp: its
gathers and scatters with sequence parallelism; pp: transfers between stages, and the gathers of transfers that are
sent in parts."""

Groups = Literal[
    "tensor", "context", "expert_tensor", "expert", "replicas", "expert_replicas",
    "replica_shards", "expert_shards", "replica_copies", "expert_copies",
]  # fmt: skip
"""Groups of ranks, named as in ``placement``. Shards: replicas that shard states together. Copies: replicas that
hold equal shards."""


Transport = Operation | Literal["send"]
"""Collective, or ``send`` for a transfer from each rank of a group to the next."""


class Message(NamedTuple):
    """Calls of a collective with messages of equal size; arrays [n]."""

    parallelism: Parallelism
    operation: Transport
    group: Groups
    num_bytes: FloatArray
    forward: FloatArray
    """Calls in the forward of a micro-batch; for states once a step, gathers of a step."""
    backward: FloatArray
    """Calls in the backward of a micro-batch; for states once a step, reductions of a step."""
    copies: float | None = None
    """Number of copies of a token of which an all-to-all sends only one to each domain; None: it sends all."""


def _linear_pair(shard: Shard) -> list[Message]:
    """List the tensor-parallel messages of two linear layers. Source: see ``layer_time._linear_pair``."""
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
    """Count the bytes of the keys and values of a context-parallel rank."""
    if isinstance(attention, LatentAttention):
        width = attention.qk_nope_head_dim + attention.qk_rope_head_dim + attention.v_head_dim
        return np.asarray(BF16_BYTES * shard.tokens * attention.num_attention_heads / shard.tp * width)
    heads = 2 * kv_heads_per_rank(attention, shard.tp)
    return np.asarray(BF16_BYTES * shard.tokens * heads * attention.head_dim)


def _experts(shard: Shard, moe: MixtureOfExperts) -> list[Message]:
    """List the messages of dispatch and combination, without a framework's padding."""
    sent = BF16_BYTES * shard.tokens / shard.tp * moe.num_experts_per_tok * shard.hidden
    ones, gathered = np.ones_like(sent), sent * shard.columns.etp
    deduplicated = shard.problem.hardware.software.deduplicated_dispatch
    copies = float(moe.num_experts_per_tok) if deduplicated else None
    return [
        Message("ep", "all_to_all", "expert", sent, 2 * ones, 2 * ones, copies),
        Message("ep", "all_gather", "expert_tensor", gathered, ones, ones),
        Message("ep", "reduce_scatter", "expert_tensor", gathered, ones, ones),
    ]


def layer_messages(problem: Problem, kind: LayerRun, columns: LayoutColumns) -> list[Message]:
    """List the messages of one layer and one micro-batch; full recomputation repeats those of the forward."""
    shard = Shard.of(problem, columns)
    ring, steps = _ring_bytes(shard, kind.attention), (columns.cp - 1).astype(np.float64)
    zeros = np.zeros_like(steps)
    messages = _linear_pair(shard)
    messages += [Message("cp", "send", "context", ring, steps, zeros)]
    messages += [Message("cp", "send", "context", 2 * ring, zeros, steps)]
    if isinstance(kind.mlp, MixtureOfExperts):
        messages += _experts(shard, kind.mlp)
    if _has_dense_part(kind):
        messages += _linear_pair(shard)
    return _forwards(messages) if problem.inference else messages


def _has_dense_part(kind: LayerRun) -> bool:
    """Check that a layer has a pair of linear layers beside those of attention: a dense MLP or a shared expert."""
    return not isinstance(kind.mlp, MixtureOfExperts) or bool(kind.mlp.shared_intermediate_size)


def _forwards(messages: list[Message]) -> list[Message]:
    """Drop the messages of backwards."""
    return [message._replace(backward=np.zeros_like(message.backward)) for message in messages]


def replayed_messages(problem: Problem, kind: LayerRun, columns: LayoutColumns) -> list[Message]:
    """List the messages that selective recomputation of a layer adds to the backward of a micro-batch.

    With flash attention it drops the inputs of the linear pairs. If they were kept gathered, the replay gathers
    them once more. Source: see ``layer_time._linear_pair``.
    """
    if problem.inference or problem.job.attention_kernel != "flash":
        return []
    shard = Shard.of(problem, columns)
    kept = np.where(columns.sequence_parallel & ~columns.gather_again, 2.0 if _has_dense_part(kind) else 1.0, 0.0)
    return [Message("sp", "all_gather", "tensor", shard.gathered_bytes, np.zeros_like(kept), kept)]


def end_messages(problem: Problem, is_head: bool, columns: LayoutColumns) -> list[Message]:
    """List the tensor-parallel messages of the embedding, or of the head with its loss, for one micro-batch."""
    shard = Shard.of(problem, columns)
    message = BF16_BYTES * shard.tokens * shard.hidden
    sp = columns.sequence_parallel.astype(np.float64)
    zeros = np.zeros_like(sp)
    if not is_head:
        messages = [
            Message("tp", "all_reduce", "tensor", message, 1 - sp, zeros),
            Message("sp", "reduce_scatter", "tensor", message, sp, zeros),
            Message("sp", "all_gather", "tensor", message, zeros, sp),
        ]
        return _forwards(messages) if problem.inference else messages
    if problem.inference:
        # Only the last token of every sequence has logits (``embedding_and_head``).
        logits = BF16_BYTES * columns.micro_batch_size * padded_vocab_size(problem.model.vocab_size, columns.tp)
        return [Message("tp", "all_gather", "tensor", np.asarray(logits, np.float64), 1 + zeros, zeros)]
    return [
        Message("tp", "all_reduce", "tensor", FP32_BYTES * shard.tokens, 3 + zeros, zeros),
        Message("tp", "all_reduce", "tensor", message, zeros, 1 - sp),
        Message("sp", "all_gather", "tensor", message, sp, zeros),
        Message("sp", "reduce_scatter", "tensor", message, zeros, sp),
    ]


def state_messages(
    problem: Problem, columns: LayoutColumns, local: LocalParameters, is_end: bool = False
) -> tuple[list[Message], list[Message]]:
    """List the messages of a layer's weights and gradients. Source: see ``layout_costs._sharding``.

    Args:
        local: parameters on one GPU.
        is_end: embedding or head, which ZeRO shards at most at stage 1.

    Returns:
        Messages of every micro-batch, and messages of a step, where ``forward`` counts gathers and ``backward``
        counts reductions.
    """
    stage = np.minimum(columns.zero_stage, 1) if is_end else columns.zero_stage
    per_micro_batch: list[Message] = []
    per_step: list[Message] = []
    zeros = np.zeros(len(columns))
    names: tuple[tuple[Groups, Groups, Groups], ...] = (
        ("replicas", "replica_shards", "replica_copies"),
        ("expert_replicas", "expert_shards", "expert_copies"),
    )
    for (count, group), (replicas, shards, copies) in zip(
        states.replica_groups(columns, local), names, strict=True
    ):
        gradients, weights = states.reduced_bytes(problem) * count, BF16_BYTES * count
        part = gradients / states.num_shards(problem, group.num_ranks)
        for messages, reduces, gathers in (
            (per_step, stage <= 1, (stage == 1) | (stage == 2)),
            (per_micro_batch, stage >= 2, stage == 3),
        ):
            scatters = (reduces & states.scatters(problem, stage)).astype(np.float64)
            gathered = gathers.astype(np.float64)
            regathered = gathered if messages is per_micro_batch else zeros
            messages += [
                Message("gradient_reduce", "all_reduce", replicas, gradients, zeros, reduces - scatters),
                Message("gradient_reduce", "reduce_scatter", shards, gradients, zeros, scatters),
                Message("gradient_reduce", "all_reduce", copies, part, zeros, scatters),
                Message("parameter_gather", "all_gather", shards, weights, gathered, regathered),
            ]
    # Inference has no gradients, and its constant weights need no gather after an update.
    return (_forwards(per_micro_batch), []) if problem.inference else (per_micro_batch, per_step)


def tied_bytes(problem: Problem, columns: LayoutColumns, embedding: Endpoint) -> FloatArray:
    """Size the gradient of a tied embedding that the first and the last rank add, in bytes [n].

    0 if embedding and head share a matrix on the same rank.
    """
    tied = problem.model.tie_word_embeddings
    shared = np.where(tied & (columns.pp > 1) & ~columns.ends_meet, embedding.matrix_parameters(columns.tp), 0.0)
    return np.asarray(states.grad_bytes(problem) * shared)


def transfer_bytes(problem: Problem, columns: LayoutColumns) -> FloatArray:
    """Size the activation (or its gradient) that each tensor-parallel rank sends to the next virtual stage, [n].

    With sequence parallelism it is the rank's own slice, with ``pp_scatter_gather`` a part of the common
    activation.
    """
    shard = Shard.of(problem, columns)
    share = np.where(scattered(columns), shard.tp, shard.sequence_tp)
    return np.asarray(BF16_BYTES * shard.tokens * shard.hidden / share)


def gathered_bytes(problem: Problem, columns: LayoutColumns) -> FloatArray:
    """Size the activation that the ranks of a stage gather after a transfer in parts, in bytes [n]; else 0."""
    shard = Shard.of(problem, columns)
    return np.asarray(np.where(scattered(columns), BF16_BYTES * shard.tokens * shard.hidden, 0.0))


def scattered(columns: LayoutColumns) -> BoolArray:
    """Check that ranks send parts of a common activation, [n]. Source: see ``stage_transfers.transfer_s``."""
    return np.asarray(columns.pp_scatter_gather & ~columns.sequence_parallel & (columns.tp > 1))
