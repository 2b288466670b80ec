"""Edges of every collective on every group of ranks: rings, trees, hierarchies and all-to-alls.

A group's ranks are numbered 0 .. n - 1 in ascending order; ``parts`` are the numbers of consecutive ranks in each
domain. Edges carry shares of the message; their sum equals ``wire_bytes``, which is in closed form.

**Messages** of the ranks of a layout: those of a layer, of the ends of the model and of the states. They are those
that the time formulas of ``layer_time``, ``embedding_and_head`` and ``states`` price; a test adds up their times
and compares. Bytes follow the conventions of ``collectives``; arrays [num_layouts].
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

import numpy as np

from milpplan.communication.records import Pairs, Places, pairs_of
from milpplan.errors import InvalidInputError
from milpplan.problem import (
    CompressedAttention,
    GroupedQueryAttention,
    Indexer,
    LatentAttention,
    LayerRun,
    LinearRecurrence,
    MixtureOfExperts,
    NoBlock,
    Problem,
    RecomputeModule,
)
from milpplan.problem.model import Attention, LinearModule
from milpplan.simulation import BoolArray, FloatArray, IntArray, LayoutColumns, LocalParameters, states
from milpplan.simulation.layers import Shard, low_rank_bytes, padded_vocab_size, sparse_attention, widths
from milpplan.simulation.layers.embedding_and_head import copied_embedding, score_bytes
from milpplan.simulation.layers.kernels import BF16_BYTES, FP32_BYTES
from milpplan.simulation.layers.layer_time import exchanged_bytes, latent_input_bytes
from milpplan.simulation.layers.shard import ALLGATHER, ALLTOALL, DEEPEP, gathered_token_bytes
from milpplan.simulation.layers.vision import encoder_columns, encoder_problem, image_sharers, mean_patches
from milpplan.simulation.muon import MatrixUpdates
from milpplan.simulation.network import all_to_all_bytes, placement, wire_factor
from milpplan.simulation.network.collectives import PASSES, Operation, copies_sent

Parallelism = Literal[
    "tp", "sp", "cp", "ep", "pp", "gradient_reduce", "parameter_gather", "tied_embedding", "gradient_norm"
]
PARALLELISMS: tuple[Parallelism, ...] = (
    *("tp", "sp", "cp", "ep", "pp"),
    *("gradient_reduce", "parameter_gather", "tied_embedding", "gradient_norm"),
)
"""Purposes of messages. tp: all-reduces of tensor parallelism, the gather of the logits in inference, and
Muon's momentum (of experts: ep); sp: its
gathers and scatters with sequence parallelism; pp: transfers between stages, and the gathers of transfers that are
sent in parts."""

Groups = Literal[
    "tensor", "context", "head_exchange", "context_ring", "expert_tensor", "expert", "replicas", "expert_replicas",
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


def _linear_pair(shard: Shard, modules: tuple[LinearModule, ...]) -> list[Message]:
    """List the tensor-parallel messages of two linear layers, ``modules`` the first one's matrices.

    Source: see ``shard.linear_pair``.
    """
    message = BF16_BYTES * shard.tokens * shard.hidden
    sp, again = (
        values.astype(np.float64) for values in (shard.columns.sequence_parallel, shard.columns.gather_again)
    )
    return [
        Message("tp", "all_reduce", "tensor", message, 1 - sp, 1 - sp),
        Message("sp", "all_gather", "tensor", shard.gathered_bytes, sp, sp * (1 + again * shard.trains(*modules))),
        Message("sp", "reduce_scatter", "tensor", message, sp, sp),
    ]


def _context(shard: Shard, attention: Attention) -> list[Message]:
    """List the messages of context parallelism: all-to-alls of heads, and the ring or gather of keys and
    values."""
    tensors, steps = exchanged_bytes(shard, attention), (shard.columns.ring - 1).astype(np.float64)
    ring, zeros = tensors[1] + tensors[2], np.zeros_like(steps)
    once = np.where(shard.columns.ulysses > 1, 1.0, 0.0)
    keys = Message("cp", "send", "context_ring", ring, steps, zeros)
    if shard.problem.hardware.software.gathered_keys:
        keys = Message("cp", "all_gather", "context_ring", ring * shard.columns.ring, zeros + 1, zeros + 1)
    return [
        *(Message("cp", "all_to_all", "head_exchange", num_bytes, once, once) for num_bytes in tensors),
        keys,
        Message("cp", "send", "context_ring", 2 * ring, zeros, steps),
    ]


def _experts(shard: Shard, moe: MixtureOfExperts) -> list[Message]:
    """List the messages of dispatch and combination, without a framework's padding."""
    sent = BF16_BYTES * shard.tokens / shard.tp * moe.num_experts_per_tok * (moe.latent_size or shard.hidden)
    ones, gathered = np.ones_like(sent), sent * shard.columns.etp
    deduplicated = shard.problem.hardware.software.deduplicated_dispatch
    copies, named = float(moe.num_experts_per_tok), shard.columns.expert_dispatch
    once = np.where((named == DEEPEP) | ((named == 0) & deduplicated), 2.0, 0.0)
    every = np.where((named == ALLTOALL) | ((named == 0) & (not deduplicated)), 2.0, 0.0)
    gathers = np.where(named == ALLGATHER, ones, 0.0)
    tokens, routing, weights = gathered_token_bytes(shard, moe)
    return [
        Message("ep", "all_to_all", "expert", sent, once, once, copies),
        Message("ep", "all_to_all", "expert", sent, every, every),
        Message("ep", "all_gather", "expert", tokens, gathers, gathers),
        Message("ep", "reduce_scatter", "expert", tokens, gathers, gathers),
        Message("ep", "all_gather", "expert", routing, gathers, 0 * ones),
        Message("ep", "reduce_scatter", "expert", weights, 0 * ones, gathers),
        Message("ep", "all_gather", "expert_tensor", gathered, ones, ones),
        Message("ep", "reduce_scatter", "expert_tensor", gathered, ones, ones),
    ]


def _sparse_attention(shard: Shard, attention: LatentAttention, indexer: Indexer) -> list[Message]:
    """List the messages of an indexer and of its keys. Source: see ``layer_time._sparse_attention``."""
    inputs = sparse_attention.indexer_input_bytes(attention, shard.hidden, shard.tokens)
    target = FP32_BYTES * shard.tokens * sparse_attention.selected_keys(indexer, shard.problem.job.sequence_length)
    ones, zeros = np.ones_like(inputs), np.zeros_like(inputs)
    return [
        Message("sp", "all_gather", "tensor", inputs, shard.columns.sequence_parallel * ones, zeros),
        Message("tp", "all_reduce", "tensor", target, zeros, ones),
    ]


def _gathered_keys(shard: Shard, attention: Attention | CompressedAttention) -> list[Message]:
    """List the messages of gathered keys. Source: see ``add_gathered_keys``."""
    widths_of = sparse_attention.gathered_widths(attention, shard.tp)
    keys, back = (BF16_BYTES * shard.tokens * shard.columns.cp * width for width in widths_of)
    summed: Operation = "all_reduce" if attention.type == "gqa" else "reduce_scatter"
    messages = [
        Message("cp", "all_gather", "context_ring", keys, np.ones_like(keys), np.zeros_like(keys)),
        Message("cp", summed, "context_ring", back, np.zeros_like(keys), np.ones_like(keys)),
    ]
    if isinstance(attention, CompressedAttention):
        once, states_sent = (
            np.where(shard.columns.cp > 1, 1.0, 0.0),
            sparse_attention.boundary_bytes(shard, attention),
        )
        messages.append(Message("cp", "send", "context_ring", states_sent, once, once))
    return messages


def layer_messages(problem: Problem, kind: LayerRun, columns: LayoutColumns) -> list[Message]:
    """List the messages of one layer and one micro-batch; full recomputation repeats those of the forward."""
    shard = Shard.of(problem, columns)
    messages = _mixer_messages(shard, kind)
    if isinstance(kind.mlp, MixtureOfExperts):
        messages += _experts(shard, kind.mlp)
    if kind.has_dense_part:
        messages += _linear_pair(shard, kind.column_modules[1])
    return _forwards(messages) if problem.inference else messages


def _mixer_messages(shard: Shard, kind: LayerRun) -> list[Message]:
    """List the messages of a token mixer: tensor parallelism, and the ring or exchange of context parallelism."""
    mixer = kind.attention
    if isinstance(mixer, NoBlock):
        return []
    if isinstance(mixer, CompressedAttention):
        return _gathered_keys(shard, mixer)
    messages = _linear_pair(shard, kind.column_modules[0])
    if isinstance(mixer, LatentAttention) and mixer.indexer is not None and not mixer.indexer.takes:
        messages += _sparse_attention(shard, mixer, mixer.indexer)
    if isinstance(mixer, LinearRecurrence):
        width, ones = widths(mixer), np.ones_like(shard.tokens)
        for elements in (width.projected, width.values):
            sent = BF16_BYTES * shard.tokens * elements / shard.tp
            messages += [Message("cp", "all_to_all", "context", sent, ones, ones)]
        if mixer.gate_rank is not None:
            size, sp = low_rank_bytes(shard, mixer), shard.columns.sequence_parallel * ones
            messages += [
                Message("tp", "all_reduce", "tensor", size, 0 * ones, 2 * (1 - sp)),
                Message("sp", "all_gather", "tensor", size, 2 * sp, 2 * sp),
                Message("sp", "reduce_scatter", "tensor", size, 0 * ones, 2 * sp),
            ]
        return messages
    return messages + (
        _gathered_keys(shard, mixer) if sparse_attention.gathers_keys(mixer) else _context(shard, mixer)
    )


def _forwards(messages: list[Message]) -> list[Message]:
    """Drop the messages of backwards."""
    return [message._replace(backward=np.zeros_like(message.backward)) for message in messages]


def replayed_messages(problem: Problem, kind: LayerRun, columns: LayoutColumns) -> list[Message]:
    """List the messages that selective recomputation of a layer adds to the backward of a micro-batch.

    With flash attention it drops the inputs of the linear pairs. If they were kept gathered, the replay gathers
    them once more. Source: see ``shard.linear_pair``. Named modules repeat the messages of their forward.
    """
    if problem.inference:
        return []
    if columns.any_of("recompute_modules"):
        return _module_messages(problem, kind, columns)
    if problem.job.attention_kernel != "flash":
        return []
    shard = Shard.of(problem, columns)
    pairs = (kind.attention.type != "none", kind.has_dense_part)
    needed = sum(there and shard.trains(*names) for there, names in zip(pairs, kind.column_modules, strict=True))
    kept = np.where(columns.sequence_parallel & ~columns.gather_again, float(needed), 0.0)
    return [Message("sp", "all_gather", "tensor", shard.gathered_bytes, np.zeros_like(kept), kept)]


def _module_messages(problem: Problem, kind: LayerRun, columns: LayoutColumns) -> list[Message]:
    """List the messages that the replays of the modules in ``Layout.recompute_modules`` repeat."""
    shard, mixer, zeros = Shard.of(problem, columns), kind.attention, np.zeros(len(columns))
    parts: dict[RecomputeModule, list[Message]] = {}
    if isinstance(mixer, GroupedQueryAttention | LatentAttention):
        parts["core_attn"] = _context(shard, mixer)
    if isinstance(mixer, LatentAttention):
        gathered, sp = latent_input_bytes(shard, mixer), columns.sequence_parallel.astype(np.float64)
        parts["mla_up_proj"] = [Message("sp", "all_gather", "tensor", gathered, sp, zeros)]
    pair = _linear_pair(shard, kind.column_modules[1]) if kind.has_dense_part else []
    parts["mlp"] = parts["shared_experts"] = pair
    if isinstance(kind.mlp, MixtureOfExperts):
        parts["moe"] = [*_experts(shard, kind.mlp), *pair]
    return [
        message._replace(forward=zeros, backward=message.forward * columns.recomputes(name))
        for name in kind.recompute_modules
        for message in parts.get(name, [])
    ]


def end_messages(problem: Problem, is_head: bool, columns: LayoutColumns) -> list[Message]:
    """List the messages of the embedding, or of the head with its loss and the layers of multi-token prediction.

    They count for one micro-batch.
    """
    shard = Shard.of(problem, columns)
    message = BF16_BYTES * shard.tokens * shard.hidden
    sp = columns.sequence_parallel.astype(np.float64)
    zeros = np.zeros_like(sp)
    # A frozen embedding needs no gradient of its output; layers of multi-token prediction go with a trained one.
    embedding = [
        Message("tp", "all_reduce", "tensor", message, 1 - sp, zeros),
        Message("sp", "reduce_scatter", "tensor", message, sp, zeros),
        Message("sp", "all_gather", "tensor", message, zeros, sp),
    ]
    if not is_head:
        embedding = embedding if problem.job.trains("embedding") else _forwards(embedding)
        return embedding + _encoder_messages(problem, columns) if problem.job.has_images else embedding
    if problem.inference:
        # Only the last token of every sequence has logits (``embedding_and_head``).
        logits = BF16_BYTES * columns.micro_batch_size * padded_vocab_size(problem.model.vocab_size, columns.tp)
        return [Message("tp", "all_gather", "tensor", np.asarray(logits, np.float64), 1 + zeros, zeros)]
    if problem.model.num_labels is not None:
        return [Message("sp", "all_gather", "tensor", score_bytes(shard), sp, zeros)]
    messages = [
        Message("tp", "all_reduce", "tensor", FP32_BYTES * shard.tokens, 3 + zeros, zeros),
        Message("tp", "all_reduce", "tensor", message, zeros, 1 - sp),
        Message("sp", "all_gather", "tensor", message, sp, zeros),
        Message("sp", "reduce_scatter", "tensor", message, zeros, sp),
    ]
    if not problem.job.mtp_layers:
        return messages
    of_mtp = messages + embedding + layer_messages(problem, problem.model.mtp_kind, columns)
    of_mtp += [
        Message("tp", "all_gather", "tensor", message, 1 + zeros, sp),
        Message("sp", "all_gather", "tensor", 2 * message, sp, sp),
        Message("sp", "reduce_scatter", "tensor", 2 * message, zeros, sp),
        Message("tp", "all_reduce", "tensor", 2 * message, zeros, 1 - sp),
    ]
    return messages + of_mtp * problem.job.mtp_layers


def _encoder_messages(problem: Problem, columns: LayoutColumns) -> list[Message]:
    """List the messages of the encoder of images. Source: see ``milpplan.simulation.layers.vision``."""
    vision, part = problem.model.vision, encoder_problem(problem)
    assert vision is not None
    sharers = image_sharers(columns)
    shard = Shard.of(part, encoder_columns(problem.model, columns, mean_patches(problem, columns) / sharers))
    divided, again = (shard.columns.tp > 1).astype(np.float64), columns.recompute_vision.astype(np.float64)
    zeros, shared, messages, gathers = np.zeros_like(divided), (sharers > 1).astype(np.float64), [], []
    for kind in vision.layers:
        for message in layer_messages(part, kind, shard.columns):
            forward, backward = (kind.count * divided * calls for calls in (message.forward, message.backward))
            messages.append(message._replace(forward=forward, backward=backward + again * forward))
    for projector in vision.projectors:
        tokens = shard.tokens / (1 if projector.of_patches else vision.patches_per_token)
        inputs, output = (BF16_BYTES * tokens * projector.widths[end] for end in (0, -1))
        calls, gathered = projector.count * divided * (len(projector.widths) > 2), projector.count * shared
        messages.append(Message("tp", "all_reduce", "tensor", output, calls, zeros))
        messages.append(Message("tp", "all_reduce", "tensor", inputs, zeros, calls))
        gathers.append(Message("cp", "all_gather", "context", sharers * output, gathered, zeros))
        gathers.append(Message("cp", "all_reduce", "context", sharers * output, zeros, gathered))
    used = [message for message in messages if message.group == "tensor"]
    return (_forwards(used) if part.inference else used) + (_forwards(gathers) if problem.inference else gathers)


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
    trained, gathered_parts = local.gradients, states.gathered_parameters(columns, local)
    per_micro_batch: list[Message] = []
    per_step: list[Message] = []
    zeros = np.zeros(len(columns))
    names: tuple[tuple[Groups, Groups, Groups], ...] = (
        ("replicas", "replica_shards", "replica_copies"),
        ("expert_replicas", "expert_shards", "expert_copies"),
    )
    for (count, group), (moved, _), (replicas, shards, copies) in zip(
        states.replica_groups(columns, trained), states.replica_groups(columns, gathered_parts), names, strict=True
    ):
        per_weight = BF16_BYTES if is_end else states.gathered_weight_bytes(problem)
        gradients, weights = states.reduced_bytes(problem) * count, per_weight * moved
        part = gradients / states.num_shards(columns, group.num_ranks)
        for messages, reduces, gathers in (
            (per_step, stage <= 1, (stage == 1) | (stage == 2)),
            (per_micro_batch, stage >= 2, stage == 3),
        ):
            scatters = (reduces & states.scatters(problem, stage)).astype(np.float64)
            gathered = gathers.astype(np.float64)
            regathered = gathered * ~columns.keep_weights if messages is per_micro_batch else zeros
            messages += [
                Message("gradient_reduce", "all_reduce", replicas, gradients, zeros, reduces - scatters),
                Message("gradient_reduce", "reduce_scatter", shards, gradients, zeros, scatters),
                Message("gradient_reduce", "all_reduce", copies, part, zeros, scatters),
                Message("parameter_gather", "all_gather", shards, weights, gathered, regathered),
            ]
    if local.copied is not None:
        # Gradients of copied adapters are summed whenever gradients are reduced among replicas.
        summed: tuple[tuple[FloatArray, Groups], ...] = (
            (local.copied.dense, "tensor"),
            (local.copied.expert, "expert_tensor"),
        )
        for count, ranks in summed:
            size = states.reduced_bytes(problem) * count
            for messages, reduces in ((per_step, stage <= 1), (per_micro_batch, stage >= 2)):
                times = reduces.astype(np.float64)
                messages.append(Message("gradient_reduce", "all_reduce", ranks, size, zeros, times))
    if local.muon is not None:
        per_step += _momentum_messages(columns, local.muon)
    # Inference has no gradients, and its constant weights need no gather after an update.
    return (_forwards(per_micro_batch), []) if problem.inference else (per_micro_batch, per_step)


def _momentum_messages(columns: LayoutColumns, muon: tuple[MatrixUpdates, MatrixUpdates]) -> list[Message]:
    """List the messages of the ranks that share momentum matrices, counted as gathers (``simulation.muon``)."""
    replicas = placement.replicas(columns).size, placement.expert_replicas(columns).size
    zeros, messages = np.zeros(len(columns)), []
    places: tuple[tuple[Parallelism, Groups], ...] = (("tp", "tensor"), ("ep", "expert_tensor"))
    for count, updates, (parallelism, group) in zip(replicas, muon, places, strict=True):
        share = 1 / np.where(columns.zero_stage >= 1, states.num_shards(columns, count), 1)
        gathered, added = share * updates.gathered_bytes, share * updates.added_bytes
        messages.append(Message(parallelism, "all_gather", group, gathered, zeros + 1, zeros))
        messages.append(Message(parallelism, "all_reduce", group, added, zeros + 1, zeros))
    return messages


def tied_bytes(problem: Problem, columns: LayoutColumns) -> FloatArray:
    """Size the gradient of a copied embedding that the first and the last rank add, in bytes [n]; 0 if it is
    frozen."""
    trained = copied_embedding(problem, columns) * problem.job.trains("head")
    return np.asarray(states.grad_bytes(problem) * trained)


def transfer_bytes(problem: Problem, columns: LayoutColumns) -> FloatArray:
    """Size the activation (or its gradient) that each tensor-parallel rank sends to the next virtual stage, [n].

    With sequence parallelism it is the rank's own slice, with ``pp_scatter_gather`` a part of the common
    activation. That of a frozen reference goes with it.
    """
    shard = Shard.of(problem, columns)
    share = np.where(scattered(columns), shard.tp, shard.sequence_tp)
    return np.asarray(_whole_bytes(problem, shard) / share)


def _whole_bytes(problem: Problem, shard: Shard) -> FloatArray:
    """Size the activation between two stages, in bytes [n]."""
    width = shard.hidden * problem.model.residual_streams
    return BF16_BYTES * shard.tokens * width * (1 + problem.job.joined_forwards)


def gathered_bytes(problem: Problem, columns: LayoutColumns) -> FloatArray:
    """Size the activation that the ranks of a stage gather after a transfer in parts, in bytes [n]; else 0."""
    shard = Shard.of(problem, columns)
    return np.asarray(np.where(scattered(columns), _whole_bytes(problem, shard), 0.0))


def scattered(columns: LayoutColumns) -> BoolArray:
    """Check that ranks send parts of a common activation, [n]. Source: see ``stage_transfers.transfer_s``."""
    return np.asarray(columns.pp_scatter_gather & ~columns.sequence_parallel & (columns.tp > 1))


Algorithm = Literal["ring", "tree", "hierarchical"]
ALGORITHMS: tuple[Algorithm, ...] = ("ring", "tree", "hierarchical")


class Edges(NamedTuple):
    """Edges of a collective, arrays [e]."""

    sender: IntArray
    """Number of the sender in the group."""
    receiver: IntArray
    """Number of the receiver in the group."""
    share: FloatArray
    """Share of the message that the edge carries."""


def wire_bytes(
    operation: Transport, num_bytes: float, parts: tuple[int, ...], copies: float | None = None
) -> float:
    """Count the bytes that all ranks of a group send together.

    n * factor * bytes (``collectives.wire_factor``) for every algorithm; all-to-all: the sum of
    ``all_to_all_bytes`` over the ranks, each with the members of its own domain; ``send``: n * bytes around the
    ring. 0 for a single rank.
    """
    size = sum(parts)
    if size == 1:
        return 0.0
    if operation == "send":
        return size * num_bytes
    if operation != "all_to_all" or len(parts) == 1:
        return size * num_bytes * float(wire_factor(operation, np.array(size)))
    members = np.array(parts, dtype=np.int64)
    domains = np.array(len(parts))
    network, links = all_to_all_bytes(np.array(num_bytes), np.array(size), members, domains, copies)
    return float((members * (network + links)).sum())


@lru_cache(maxsize=256)
def edges(
    operation: Transport,
    algorithm: Algorithm,
    parts: tuple[int, ...],
    copies: float | None = None,
) -> Edges:
    """Build the edges of a collective.

    Trees apply to all-reduces only, and hierarchies to groups with equally many members in every domain. All other
    collectives of these algorithms are rings, as in NCCL.
    """
    size = sum(parts)
    if size == 1:
        return Edges(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))
    if operation == "send":
        return _cycle(np.arange(size), 1.0)
    if operation == "all_to_all":
        return _all_to_all(parts, copies)
    if algorithm == "tree" and operation == "all_reduce":
        return _double_tree(parts)
    if algorithm == "hierarchical" and len(set(parts)) == 1:
        return _hierarchy(operation, parts)
    return _rings(operation, parts)


def _joined(parts: list[Edges]) -> Edges:
    """Concatenate edges."""
    return Edges(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def _cycle(order: IntArray, share: float) -> Edges:
    """Connect each rank to the next, and the last rank to the first."""
    return Edges(order, np.roll(order, -1), np.full(len(order), share))


def _domains(parts: tuple[int, ...]) -> list[IntArray]:
    """List the ranks of each domain."""
    return [np.arange(low, high) for low, high in pairwise((0, *accumulate(parts)))]


def _rings(operation: Operation, parts: tuple[int, ...]) -> Edges:
    """Build a ring inside a domain, or several rings across domains.

    Across domains there are as many rings as the smallest part has members, each with its share of the message.
    Ring c enters a domain at member c and leaves it at member c - 1, and the other way round in every second
    domain. So neighbours in different domains have the same position in their domains (NCCL_CROSS_NIC).
    """
    domains, size = _domains(parts), sum(parts)
    count = min(parts) if len(parts) > 1 else 1
    share = float(wire_factor(operation, np.array(size))) / count
    rings = []
    for channel in range(count):
        order = [
            np.roll(domain, -channel) if number % 2 == 0 else np.roll(domain, -channel)[::-1]
            for number, domain in enumerate(domains)
        ]
        rings.append(_cycle(np.concatenate(order), share))
    return _joined(rings)


def _parent(node: int, count: int) -> int:
    """Return the parent of a node in a binary tree with in-order numbers 0 .. count - 1; -1 for the root, 0."""
    if node == 0:
        return -1
    low = node & -node
    up = (node ^ low) | (low << 1)
    return up if up < count else node ^ low


def _double_tree(parts: tuple[int, ...]) -> Edges:
    """Build two binary trees over the domains, each for half of the message, up and down.

    Inside a domain, a chain starts at the member that is a node of the tree. The leaves of each tree are inner
    nodes of the other tree.

    Source: Sanders, Speck and Traeff 2009 (two-tree algorithms); NCCL's tree algorithm.
    """
    domains, count = _domains(parts), len(parts)
    pairs: list[tuple[int, int]] = []
    for tree in range(2):
        chains = [np.roll(domain, -(tree % len(domain))) for domain in domains]
        for number, chain in enumerate(chains):
            pairs += zip(chain[1:].tolist(), chain[:-1].tolist(), strict=True)
            # The second tree numbers the domains backwards, or shifts them by one if their number is odd.
            node = number if tree == 0 else (number - 1) % count if count % 2 else count - 1 - number
            up = _parent(node, count)
            if up >= 0:
                above = up if tree == 0 else (up + 1) % count if count % 2 else count - 1 - up
                pairs.append((int(chain[0]), int(chains[above][0])))
    child, parent = np.array(pairs, dtype=np.int64).T
    half = np.full(2 * len(child), 0.5)
    return Edges(np.concatenate([child, parent]), np.concatenate([parent, child]), half)


def _hierarchy(operation: Operation, parts: tuple[int, ...]) -> Edges:
    """Build a ring inside every domain, and rings across domains of the ranks with the same position.

    The message is scattered inside before it crosses domains, and gathered inside afterwards. Each pass moves
    (k - 1) / k of the message inside and (d - 1) / n across.
    """
    table = np.arange(sum(parts)).reshape(len(parts), -1)
    domains, members = table.shape
    passes = PASSES[operation]
    rings = [_cycle(row, passes * (members - 1) / members) for row in table if members > 1]
    rings += [_cycle(column, passes * (domains - 1) / table.size) for column in table.T if domains > 1]
    return _joined(rings)


def _all_to_all(parts: tuple[int, ...], copies: float | None) -> Edges:
    """Connect every rank to every other rank, with an n-th of its bytes.

    With ``copies`` across domains, a rank sends once to every other domain, to the rank with the sender's position
    in that domain (modulo its members), which passes the copies on.
    """
    size, domains = sum(parts), _domains(parts)
    everyone = np.arange(size)
    sender, receiver = (axis.ravel() for axis in np.meshgrid(everyone, everyone, indexing="ij"))
    if copies is None or len(parts) == 1:
        other = sender != receiver
        return Edges(sender[other], receiver[other], np.full(int(other.sum()), 1 / size))
    copies_share = float(copies_sent(np.array(len(parts)), copies))
    domain_of = np.repeat(np.arange(len(parts)), parts)
    position = everyone - np.array([domains[number][0] for number in domain_of])
    inside = (domain_of[sender] == domain_of[receiver]) & (sender != receiver)
    parts_of_edges = [Edges(sender[inside], receiver[inside], np.full(int(inside.sum()), 1 / size))]
    for number, domain in enumerate(domains):
        outside = everyone[domain_of != number]
        relay = domain[position[outside] % len(domain)]
        parts_of_edges.append(Edges(outside, relay, np.full(len(outside), copies_share * len(domain) / size)))
        relayed = np.bincount(relay - domain[0], minlength=len(domain)) / size
        within = inside & (domain_of[sender] == number)
        parts_of_edges.append(Edges(sender[within], receiver[within], relayed[position[sender[within]]]))
    return _joined(parts_of_edges)


MAX_PAIRS = 50_000_000
"""Maximum number of edges that are written out (a few GiB)."""


@dataclass(frozen=True, slots=True)
class Wiring:
    """Edges of a collective on all groups of a family, for a message of one byte; arrays [edges]."""

    key: IntArray
    """Pair of GPUs, as ``Wires.key`` encodes it."""
    share: FloatArray
    stage: IntArray
    """Pipeline rank; for transfers, index of the pair of ranks."""
    wire_bytes: FloatArray
    """[pp] bytes of all groups of a pipeline rank in closed form."""


@dataclass(slots=True)
class Wires:
    """Cache of wirings, and the bytes that the parallelisms send over them.

    ``groups`` holds the ranks of every group [pp, groups of a stage, ranks] by name, as each node type shards
    them.
    """

    places: Places
    algorithm: Algorithm
    groups: tuple[dict[str, IntArray], ...]
    cache: dict[tuple[Transport, str, float | None, int | None], Wiring] = field(default_factory=dict)
    sent: dict[str, list[tuple[IntArray, FloatArray]]] = field(default_factory=lambda: defaultdict(list))
    closed: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    edges: int = 0

    def wiring(
        self, operation: Transport, group: str, copies: float | None = None, node_type: int | None = None
    ) -> Wiring:
        """Return the edges of a collective on a family of groups; ``node_type`` selects groups on one type."""
        key = operation, group, copies, node_type
        if key not in self.cache:
            self.cache[key] = self._made(operation, self.groups[node_type or 0][group], copies, node_type)
        return self.cache[key]

    def _made(self, operation: Transport, groups: IntArray, copies: float | None, node_type: int | None) -> Wiring:
        """Build a wiring; groups that are cut by domains in the same way share their edges."""
        stages, number, size = groups.shape
        rows, rank = groups.reshape(-1, size), np.repeat(np.arange(stages), number)
        if node_type is not None:
            on_type = self.places.node_type[rows[:, 0]] == node_type
            rows, rank = rows[on_type], rank[on_type]
        wire = np.zeros(len(rows))
        keys, shares, stage = [np.zeros(0, np.int64)], [np.zeros(0)], [np.zeros(0, np.int64)]
        cuts = np.diff(self.places.domain[rows], axis=1) != 0
        patterns, inverse = np.unique(cuts, axis=0, return_inverse=True)
        for index, pattern in enumerate(patterns):
            ends = [0, *(np.flatnonzero(pattern) + 1).tolist(), size]
            parts = tuple(np.diff(ends).tolist())
            chosen = np.flatnonzero(inverse.reshape(-1) == index)
            channels = min(parts) if len(parts) > 1 else 1
            self._count(len(chosen) * size * (size if operation == "all_to_all" else channels))
            group_edges = edges(operation, self.algorithm, parts, copies)
            keys.append(
                self.key(rows[chosen][:, group_edges.sender], rows[chosen][:, group_edges.receiver]).ravel()
            )
            shares.append(np.tile(group_edges.share, len(chosen)))
            stage.append(np.repeat(rank[chosen], len(group_edges.share)))
            wire[chosen] = wire_bytes(operation, 1.0, parts, copies)
        per_stage = np.bincount(rank, wire, minlength=stages).astype(np.float64)
        return Wiring(np.concatenate(keys), np.concatenate(shares), np.concatenate(stage), per_stage)

    def key(self, sender: IntArray, receiver: IntArray) -> IntArray:
        """Encode pairs of GPUs as integers."""
        return np.asarray(sender * self.places.num_gpus + receiver)

    def _count(self, max_edges: int) -> None:
        """Refuse more edges than memory holds, before they are made."""
        self.edges += max_edges
        if self.edges > MAX_PAIRS:
            raise InvalidInputError(
                f"The traffic has more than {MAX_PAIRS:,} pairs of GPUs.",
                "Expected a plan whose GPUs send to fewer others.",
                "Use a plan on fewer GPUs: the pattern is the same, and repeats.",
            )

    def send(self, parallelism: str, wiring: Wiring, num_bytes: FloatArray) -> None:
        """Add messages of ``num_bytes`` [pp] to a parallelism."""
        self.sent[parallelism].append((wiring.key, wiring.share * num_bytes[wiring.stage]))
        self.closed[parallelism] += float((wiring.wire_bytes * num_bytes).sum())

    def tiers(self, wiring: Wiring) -> FloatArray:
        """Count the bytes by pipeline rank and tier [pp, 2] for a message of one byte."""
        between = self.places.between(*np.divmod(wiring.key, self.places.num_gpus))
        size = len(wiring.wire_bytes)
        counted = np.bincount(wiring.stage * 2 + between, wiring.share, minlength=2 * size)
        return np.asarray(counted.reshape(size, 2), dtype=np.float64)

    def pairs(self) -> dict[str, Pairs]:
        """Sum the sent bytes by pair of GPUs, by parallelism."""
        pairs: dict[str, Pairs] = {}
        for name in PARALLELISMS:
            parts = self.sent.get(name, [])
            key = np.concatenate([np.zeros(0, np.int64), *(part[0] for part in parts)])
            num_bytes = np.concatenate([np.zeros(0), *(part[1] for part in parts)])
            pairs[name] = pairs_of(key[num_bytes > 0], num_bytes[num_bytes > 0], self.places.num_gpus)
        return pairs
