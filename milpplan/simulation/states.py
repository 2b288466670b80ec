"""Weights, gradients and optimizer states: their bytes, their communication and their update.

Source: Rajbhandari et al. 2020 (ZeRO stages 1 to 3); Megatron-LM docs/user-guide/features/dist_optimizer.md
(18 bytes a parameter without sharding in bf16 with fp32 gradients, 6 + 12/d with the distributed optimizer).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from milpplan.problem.model import GroupedQueryAttention, LayerRun, MixtureOfExperts
from milpplan.problem.problem import Problem
from milpplan.simulation.bulk.cache_keys import STATE_KEYS
from milpplan.simulation.layers.layer_time import BF16_BYTES
from milpplan.simulation.layers.parameters import layer_parameters
from milpplan.simulation.layout_columns import FloatArray, IntArray, LayoutColumns, unique_rows
from milpplan.simulation.network import collectives, placement
from milpplan.simulation.network.collectives import call_s
from milpplan.simulation.network.placement import RankGroup

FP32_BYTES = 4
ADAM_STATE_BYTES = 12
"""fp32 master weight and two fp32 moments."""
STATE_OFFLOADS = ("offload_weights", "offload_optimizer")
"""Switches that take states of layers off the device."""
UPDATE_TRAFFIC_BYTES = 38
"""Adam reads gradient, master and moments (16), writes master, moments and the bf16 weight (14), and the
gradient is read for the norm and zeroed (8)."""


@dataclass(frozen=True, slots=True)
class LocalParameters:
    """Parameters one GPU holds of a layer (or of the embedding, or of the head); arrays [num_layouts].

    ``dense`` ones are replicated over the cp * dp ranks, ``expert`` ones over the expert replicas.
    """

    dense: FloatArray
    expert: FloatArray


def local_layer_parameters(problem: Problem, kind: LayerRun, columns: LayoutColumns) -> LocalParameters:
    """Parameters of one layer on one GPU; key/value heads fewer than tp are replicated."""
    counts = layer_parameters(problem.model, kind)
    tp = columns.tp.astype(np.float64)
    dense = counts.tensor_parallel / tp + counts.replicated
    if isinstance(kind.attention, GroupedQueryAttention):
        heads = kind.attention.num_key_value_heads
        replicated_heads = np.maximum(heads / tp, 1.0) - heads / tp
        dense = dense + 2 * problem.model.hidden_size * kind.attention.head_dim * replicated_heads
    expert = counts.experts / (columns.ep * columns.etp).astype(np.float64)
    return LocalParameters(dense, expert)


def grad_bytes(problem: Problem) -> int:
    """Bytes of one accumulated gradient."""
    return FP32_BYTES if problem.job.grad_dtype == "fp32" else BF16_BYTES


def weight_bytes(problem: Problem) -> int:
    """Bytes of one weight: bf16, and with fp8 also an fp8 copy and its transpose (Transformer Engine's cached
    weights), or these alone."""
    fp8 = problem.job.precision == "fp8"
    return BF16_BYTES + (2 if fp8 and not problem.hardware.software.fp8_weights_only else 0)


def state_bytes(
    problem: Problem, columns: LayoutColumns, parameters: LocalParameters, per_weight: int | None = None
) -> FloatArray:
    """Bytes of weights, gradients and Adam states on one GPU under the layout's ZeRO stage: [3, n]. Gradients
    include the framework's buckets for the reduction. ``per_weight``: bytes of a weight, those of layers unless
    given: no product of the embedding and the head is in 8 bits."""
    per_weight = weight_bytes(problem) if per_weight is None else per_weight
    software, stage = problem.hardware.software, columns.zero_stage
    total = np.zeros((3, len(columns)))
    for local, replicas in _sharded_groups(problem, columns, parameters):
        for part, (per_parameter, sharded_from) in enumerate(
            ((per_weight, 3), (grad_bytes(problem), 2), (ADAM_STATE_BYTES, 1))
        ):
            total[part] += local * per_parameter / np.where(stage >= sharded_from, replicas, 1)
        if software.gradient_bucket_bytes:
            bucketed = (stage <= 1) & (replicas > 1)
            total[1] += np.where(bucketed, software.gradient_bucket_bytes * local, 0.0)
    if software.master_shards_only:
        total[0] = np.where(stage >= 3, 0.0, total[0])
    if problem.inference:
        total[1:] = 0.0
    return total


def unsharded_buffer_bytes(problem: Problem, columns: LayoutColumns, parameters: LocalParameters) -> FloatArray:
    """Whole-layer buffers that ZeRO needs beside the shards: one layer's gradients from stage 2, and two
    layers' gathered weights (the current one and the prefetched one) at stage 3."""
    local = parameters.dense + parameters.expert
    grads = np.where((columns.zero_stage >= 2) & (not problem.inference), grad_bytes(problem), 0)
    weights = np.where(columns.zero_stage >= 3, 2 * weight_bytes(problem), 0)
    return np.asarray(local * (grads + weights))


def dummy_gradient_bytes(
    problem: Problem, kind: LayerRun, columns: LayoutColumns, parameters: LocalParameters
) -> FloatArray:
    """Buffers that stand for weight gradients up to ZeRO stage 1: one a shape of weight in bf16, so one layer's
    weights, of the experts those of one.

    Source: get_dummy_wgrad of Transformer Engine 2.3 and later (transformer_engine/pytorch/module/base.py).
    Without it the peaks of Megatron-LM on 8 B200 (MooreThreads/SimuMax) come out up to 7 % too low.
    """
    if not problem.hardware.software.dummy_weight_gradients or problem.inference:
        return np.zeros(len(columns))
    experts = kind.mlp.num_experts / columns.ep if isinstance(kind.mlp, MixtureOfExperts) else 1.0
    shapes = parameters.dense + parameters.expert / experts
    return np.asarray(np.where(columns.zero_stage <= 1, BF16_BYTES * shapes, 0.0))


WEIGHTS_A_LAYER = 4
"""Queries with keys and values, output, up with gate, down."""


def reduce_s(problem: Problem, columns: LayoutColumns, parameters: LocalParameters) -> FloatArray:
    """Seconds to reduce the gradients once: all-reduce unsharded, reduce-scatter from ZeRO stage 1. With groups
    smaller than all replicas an all-reduce of the shards among the groups follows. Forwards alone have none."""
    total = np.zeros(len(columns))
    if problem.inference:
        return total
    for local, group in replica_groups(columns, parameters):
        message = grad_bytes(problem) * local
        shards = num_shards(problem, group.num_ranks)
        whole = collectives.all_reduce_s(problem.hardware, message, *group)
        scatter = collectives.reduce_scatter_s(problem.hardware, message, *group.first(shards))
        if problem.hardware.software.sharding_group:
            copies = group.apart(shards)
            scatter = scatter + collectives.all_reduce_s(problem.hardware, message / shards, *copies)
        whole = whole + _calls_s(problem, local, group)
        total = total + np.where(columns.zero_stage >= 1, scatter, whole)
    return total


def _calls_s(problem: Problem, local: FloatArray, group: RankGroup) -> FloatArray:
    """Host seconds of the calls of a layer's unsharded reduction: one for every ``reduce_call_bytes`` of 16-bit
    gradients, but at most one for each of a layer's four weights, none of which is split.

    call_s(group) * min(2 N / reduce_call_bytes, 4) for N parameters on a rank (``local``); [n]. Lower for experts,
    whose weights are many; upper for embedding and head, one weight each. Nothing was fitted for the number of
    calls.

    Source: PyTorch DistributedDataParallel (bucket_cap_mb); nanotron's runs without ZeRO (docs/accuracy.md).
    """
    software = problem.hardware.software
    if not software.reduce_call_bytes:
        return np.zeros_like(local)
    calls = np.minimum(BF16_BYTES * local / software.reduce_call_bytes, WEIGHTS_A_LAYER)
    return np.asarray(call_s(problem.hardware, *group) * calls)


def gather_s(problem: Problem, columns: LayoutColumns, parameters: LocalParameters) -> FloatArray:
    """Seconds to gather the bf16 weights of a layer once from their shards."""
    total = np.zeros(len(columns))
    for local, group in replica_groups(columns, parameters):
        shards = group.first(num_shards(problem, group.num_ranks))
        total = total + collectives.all_gather_s(problem.hardware, BF16_BYTES * local, *shards)
    return total


def optimizer_s(problem: Problem, columns: LayoutColumns, parameters: LocalParameters) -> FloatArray:
    """Seconds of the Adam update of the GPU's share: bytes moved over memory bandwidth. None of forwards alone."""
    if problem.inference:
        return np.zeros(len(columns))
    rate = problem.hardware.accelerator.memory_rate_bytes_per_s
    total = np.zeros(len(columns))
    for local, replicas in _sharded_groups(problem, columns, parameters):
        share = local / np.where(columns.zero_stage >= 1, replicas, 1)
        total = total + UPDATE_TRAFFIC_BYTES * share / rate
    return total


def num_shards(problem: Problem, replicas: IntArray) -> IntArray:
    """Replicas that ZeRO shards over: all, or those that the framework's group has in common with them (gcd)."""
    group = problem.hardware.software.sharding_group
    return replicas if group == 0 else np.gcd(replicas, group)


def least_held_bytes(problem: Problem, columns: LayoutColumns) -> FloatArray:
    """Bytes of layers' weights, gradients and Adam states on the device of the fullest pipeline rank, however the
    layers are split, [n] (lower: without ends, buffers and activations).

    max(sum_k n_k b_k / P, ceil(L / P) min_k b_k) for n_k of L layers of kind k with b_k bytes on P ranks: the
    fullest rank has at least the mean, and some rank at least ceil(L / P) layers. What is offloaded is elsewhere.
    """
    rows, place = unique_rows(*(getattr(columns, name) for name in (*STATE_KEYS, "pp", *STATE_OFFLOADS)))
    part, kinds = columns.take(rows), problem.model.kinds
    counts = np.bincount(np.array(problem.model.layer_kinds), minlength=len(kinds))
    parameters = (local_layer_parameters(problem, kind, part) for kind in kinds)
    sizes = np.stack([state_bytes(problem, part, local) for local in parameters])
    sizes[:, 0] *= ~part.offload_weights
    sizes[:, 2] *= ~part.offload_optimizer
    layers = sizes.sum(axis=1)
    mean = counts @ layers / part.pp
    most = -(-problem.model.num_layers // part.pp) * layers.min(axis=0)
    return np.asarray(np.maximum(mean, most)[place])


def _sharded_groups(
    problem: Problem, columns: LayoutColumns, parameters: LocalParameters
) -> tuple[tuple[FloatArray, IntArray], ...]:
    """(local parameters, ranks that shard them) of the dense and the expert part."""
    replicas = ((parameters.dense, columns.cp * columns.dp), (parameters.expert, columns.expert_dp))
    return tuple((local, num_shards(problem, count)) for local, count in replicas)


def replica_groups(
    columns: LayoutColumns, parameters: LocalParameters
) -> tuple[tuple[FloatArray, RankGroup], ...]:
    """(local parameters, ranks with the same) of the dense and the expert part."""
    return (
        (parameters.dense, placement.replicas(columns)),
        (parameters.expert, placement.expert_replicas(columns)),
    )
