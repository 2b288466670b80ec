"""Weights, gradients and optimizer states: their bytes, their communication and their update.

Source: Rajbhandari et al. 2020 (ZeRO stages 1 to 3); Megatron-LM docs/user-guide/features/dist_optimizer.md
(18 bytes a parameter without sharding in bf16 with fp32 gradients, 6 + 12/d with the distributed optimizer).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from milpplan.problem import GroupedQueryAttention, LayerRun, MixtureOfExperts, Problem
from milpplan.simulation.layers import adapter_parameters, layer_parameters, mtp_projection_parameters
from milpplan.simulation.layers.embedding_and_head import Endpoint
from milpplan.simulation.layers.kernels import BF16_BYTES, FP32_BYTES
from milpplan.simulation.layers.parameter_counts import encoder_parameters
from milpplan.simulation.layers.vision import encoder_tp
from milpplan.simulation.layout_columns import (
    STATE_KEYS,
    BoolArray,
    FloatArray,
    IntArray,
    LayoutColumns,
    unique_rows,
)
from milpplan.simulation.muon import Matrix, MatrixUpdates, matrix_updates
from milpplan.simulation.network import RankGroup, call_s, collectives, placement

MOMENT_BYTES = 4
"""Bytes of a second moment, which Adam has and Muon has not."""
STATE_OFFLOADS = ("offload_weights", "offload_optimizer")
"""Switches that move states of layers off the device."""
UPDATE_TRAFFIC_BYTES = 14
"""Bytes that Adam moves per parameter beside its states, which it reads and writes: it reads the gradient (4) and
writes the bf16 weight (2), and the gradient is read for the norm and zeroed (8). An upper bound with gradients in
16 bits."""


@dataclass(frozen=True, slots=True)
class LocalParameters:
    """Parameters of a layer (or of the embedding, or of the head) on one GPU; arrays [num_layouts]."""

    dense: FloatArray
    """Parameters that are replicated over the cp * dp ranks."""
    expert: FloatArray
    """Parameters that are replicated over the expert replicas."""
    trained: LocalParameters | None = None
    """Part that has gradients and optimizer states; None: all."""
    copied: LocalParameters | None = None
    """Part of ``trained`` whose gradients tensor-parallel ranks add (experts: expert-tensor-parallel ranks); None:
    none."""
    muon: tuple[MatrixUpdates, MatrixUpdates] | None = None
    """Part of the dense parameters, and of the experts, that Muon updates; None: Adam updates all."""

    @property
    def gradients(self) -> LocalParameters:
        """Parameters that have gradients."""
        return self if self.trained is None else self.trained

    @staticmethod
    def end(problem: Problem, end: Endpoint, tp: IntArray, copied: FloatArray | float = 0.0) -> LocalParameters:
        """Count the parameters of the head, or of embedding and encoder, on one GPU, each trained or frozen.

        Args:
            problem: model and job.
            end: embedding or head.
            tp: tensor-parallel degrees, [n].
            copied: parameters of a tied matrix that the head has beside its own.
        """
        job, vision, own = problem.job, problem.model.vision, end.parameters(tp) + copied
        encoder, zero = np.zeros(len(own)), np.zeros(len(own))
        if vision is not None and not end.is_head:
            counts = encoder_parameters(problem.model)
            encoder = counts.tensor_parallel / encoder_tp(vision, tp) + counts.replicated
        trains = job.trains("head" if end.is_head else "embedding")
        trained = own * trains + encoder * job.trains("vision")
        whole = own + encoder
        return LocalParameters(whole, zero, None if (trained == whole).all() else LocalParameters(trained, zero))


def local_layer_parameters(problem: Problem, kind: LayerRun, columns: LayoutColumns) -> LocalParameters:
    """Count the parameters of one layer on one GPU; key/value heads fewer than tp are replicated."""
    counts = layer_parameters(problem.model, kind)
    tp = columns.tp.astype(np.float64)
    dense = counts.tensor_parallel / tp + counts.replicated
    if isinstance(kind.attention, GroupedQueryAttention):
        heads = kind.attention.num_key_value_heads
        replicated_heads = np.maximum(heads / tp, 1.0) - heads / tp
        dense = dense + 2 * problem.model.hidden_size * kind.attention.head_dim * replicated_heads
    expert = counts.experts / (columns.ep * columns.etp).astype(np.float64)
    if problem.job.lora is None:
        muon = matrix_updates(problem, kind, columns) if problem.job.optimizer == "muon" else None
        return LocalParameters(dense, expert, muon=muon)
    degrees = tp, columns.ep.astype(np.float64), columns.etp.astype(np.float64)
    adapters = adapter_parameters(problem.model.hidden_size, kind, problem.job.lora, *degrees)
    zero = np.zeros(len(columns))
    trained = LocalParameters(zero + adapters.dense, zero + adapters.expert)
    copied = LocalParameters(zero + adapters.dense_copied, zero + adapters.expert_copied)
    return LocalParameters(dense + trained.dense, expert + trained.expert, trained, copied)


def local_mtp_parameters(problem: Problem, columns: LayoutColumns) -> LocalParameters:
    """Count the parameters of one layer of multi-token prediction on one GPU."""
    layer = local_layer_parameters(problem, problem.model.mtp_kind, columns)
    projection, hidden = mtp_projection_parameters(problem.model), problem.model.hidden_size
    muon = layer.muon
    if muon is not None:
        both: tuple[Matrix, ...] = (Matrix(hidden, 2 * hidden, "outputs"),)
        if problem.model.residual_streams > 1:
            both = (Matrix(hidden, hidden, "outputs"),) * 2
        muon = matrix_updates(problem, problem.model.mtp_kind, columns, both)
    dense = layer.dense + projection.tensor_parallel / columns.tp + projection.replicated
    return LocalParameters(dense, layer.expert, muon=muon)


def grad_bytes(problem: Problem) -> int:
    """Return the bytes of one accumulated gradient."""
    return FP32_BYTES if problem.job.grad_dtype == "fp32" else BF16_BYTES


def reduced_bytes(problem: Problem) -> float:
    """Return the bytes of a gradient as replicas send it (``Software.reduced_gradient_bytes``)."""
    return problem.hardware.software.reduced_gradient_bytes or grad_bytes(problem)


def scatters(problem: Problem, stage: IntArray) -> BoolArray:
    """Check that gradients are reduce-scattered, not all-reduced, at ZeRO stages [n]."""
    return (stage >= 1) & (not problem.hardware.software.all_reduces_gradients)


def weight_bytes(problem: Problem) -> float:
    """Return the bytes of one weight.

    Weights are in bf16. In 8 or 4 bits, Transformer Engine also caches a copy by rows and one by columns, or holds
    these alone.
    """
    quantization = problem.job.quantization
    if quantization.engine == "bf16":
        return BF16_BYTES
    alone = problem.hardware.software.fp8_weights_only
    return 2 * quantization.copy_bytes + (0 if alone else BF16_BYTES)


def gathered_weight_bytes(problem: Problem) -> float:
    """Return the bytes of one weight of a layer as ranks gather it."""
    alone = problem.hardware.software.fp8_weights_only
    return problem.job.quantization.gathered_bytes if alone else BF16_BYTES


def state_bytes(
    problem: Problem, columns: LayoutColumns, parameters: LocalParameters, per_weight: float | None = None
) -> FloatArray:
    """Size the states on one GPU under the layout's ZeRO stage.

    Args:
        problem: model, hardware and job.
        columns: n layouts.
        parameters: parameters on one GPU.
        per_weight: bytes of a weight; None: those of a layer. (Products of embedding and head are never in 8
        bits.)

    Returns:
        Bytes of weights, gradients and optimizer states, [3, n]; the latter two of trained parameters only.
        ``Layout.keep_weights`` has whole weights beside the shards.
        Gradients include the framework's reduction buckets, weights those of a reference, sharded as the policy's:
        TRL shards both at ZeRO 3 or neither (trl/models/utils.py, ``prepare_deepspeed``).
    """
    per_weight = weight_bytes(problem) if per_weight is None else per_weight
    software, stage = problem.hardware.software, columns.zero_stage
    total, frozen, reference = np.zeros((3, len(columns))), np.zeros(len(columns)), np.zeros(len(columns))
    for (local, trained, replicas, shards), muon in _updated_groups(columns, parameters):
        if muon is not None:
            total[2] -= MOMENT_BYTES * muon.parameters / np.where(stage >= 1, shards, 1)
        for part, (count, per_parameter, sharded_from) in enumerate(
            (
                (local, per_weight, 3),
                (trained, grad_bytes(problem), 2),
                (trained, software.optimizer_state_bytes, 1),
            )
        ):
            total[part] += count * per_parameter / np.where(stage >= sharded_from, shards, 1)
        frozen += (local - trained) * per_weight / shards
        if problem.job.reference_copies:
            reference += problem.job.reference_copies * local * per_weight / np.where(stage >= 3, shards, 1)
        if software.gradient_bucket_bytes:
            bucketed = (stage <= 1) & (replicas > 1)
            total[1] += np.where(bucketed, software.gradient_bucket_bytes * trained, 0.0)
    if software.master_shards_only:
        total[0] = np.where(stage >= 3, frozen, total[0])
    whole = (parameters.dense + parameters.expert) * per_weight
    total[0] += np.where((stage >= 3) & columns.keep_weights, whole, 0.0)
    total[0] += reference
    if problem.inference:
        total[1:] = 0.0
    return total


def unsharded_buffer_bytes(problem: Problem, columns: LayoutColumns, parameters: LocalParameters) -> FloatArray:
    """Size the whole-layer buffers that ZeRO needs beside the shards, in bytes [n].

    They hold a layer's gradients from stage 2, and at stage 3 the gathered weights of two layers, the present
    layer and the prefetched layer, unless those of all layers are kept.
    """
    local, trained = (part.dense + part.expert for part in (parameters, parameters.gradients))
    grads = np.where((columns.zero_stage >= 2) & (not problem.inference), grad_bytes(problem), 0)
    passing = (columns.zero_stage >= 3) & ~columns.keep_weights
    weights = np.where(passing, 2 * weight_bytes(problem), 0)
    return np.asarray(trained * (grads + weights) + (local - trained) * weights)


def dummy_gradient_bytes(
    problem: Problem, kind: LayerRun, columns: LayoutColumns, parameters: LocalParameters
) -> FloatArray:
    """Size the buffers that stand for weight gradients up to ZeRO stage 1, in bytes [n].

    There is a bf16 buffer for each shape of weight, so they have the size of a layer's weights with a single
    expert.

    Source: get_dummy_wgrad of Transformer Engine 2.3 and later (transformer_engine/pytorch/module/base.py).
    Without it the peaks of Megatron-LM on 8 B200 (MooreThreads/SimuMax) come out up to 7 % too low.
    """
    if not problem.hardware.software.dummy_weight_gradients or problem.inference:
        return np.zeros(len(columns))
    experts = kind.mlp.num_experts / columns.ep if isinstance(kind.mlp, MixtureOfExperts) else 1.0
    shapes = parameters.gradients.dense + parameters.gradients.expert / experts
    return np.asarray(np.where(columns.zero_stage <= 1, BF16_BYTES * shapes, 0.0))


WEIGHTS_A_LAYER = 4
"""Weights of a layer: queries with keys and values, output, up with gate, down."""
TENSORS_A_LAYER = WEIGHTS_A_LAYER + 2
"""Weights of a layer, and its two norms."""


def _layers_a_call(problem: Problem, columns: LayoutColumns) -> IntArray | int:
    """Count the layers that share the calls of ZeRO (``Software.single_calls``), [n] or 1.

    They are all of the model, so that costs stay those of a layer by itself: a lower bound for pipelines.
    """
    if not problem.hardware.software.single_calls:
        return 1
    return np.where(columns.zero_stage == 1, problem.model.num_layers, 1)


def single_calls_s(problem: Problem, columns: LayoutColumns) -> FloatArray:
    """Time the host's checks of the two calls of a step (``Software.single_calls``), in seconds [n]."""
    if not problem.hardware.software.single_calls:
        return np.zeros(len(columns))
    called = (columns.zero_stage == 1) & (columns.cp * columns.dp > 1)
    return np.where(called, 2 * call_s(problem.hardware, *placement.replicas(columns)), 0.0)


def reduce_s(problem: Problem, columns: LayoutColumns, parameters: LocalParameters) -> FloatArray:
    """Time the reduction of a layer's gradients, in seconds [n]; 0 for inference.

    It is an all-reduce without ZeRO, a reduce-scatter from ZeRO stage 1 (``scatters``). With hybrid sharding it is
    a reduce-scatter among the S shards, then an all-reduce of 1/S of the message among the ranks with equal
    shards: RS(S, b) + AR(dp_replicate, b / S) for b bytes, one after the other. Gradients of copied adapters
    are first all-reduced among tensor-parallel ranks.

    Source: PyTorch FSDP2 (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, foreach_reduce); Megatron-LM
    core/distributed/param_and_grad_buffer.py (num_distributed_optimizer_instances); Zhang et al. 2022 (MiCS).
    """
    total = np.zeros(len(columns))
    if problem.inference:
        return total
    layers = _layers_a_call(problem, columns)
    for local, group in replica_groups(columns, parameters.gradients):
        message = reduced_bytes(problem) * local * layers
        shards = num_shards(columns, group.num_ranks)
        whole = collectives.all_reduce_s(problem.hardware, message, *group)
        scatter = collectives.reduce_scatter_s(problem.hardware, message, *group.first(shards))
        if (columns.dp_replicate > 1).any():
            copies = group.apart(shards)
            scatter = scatter + collectives.all_reduce_s(problem.hardware, message / shards, *copies)
        whole = whole + np.where(layers == 1, _calls_s(problem, local, group), 0.0)
        total = total + np.where(scatters(problem, columns.zero_stage), scatter, whole) / layers
    if parameters.copied is not None:
        copied = parameters.copied
        tensor, expert_tensor = placement.tensor(columns), placement.expert_tensor(columns)
        for local, group in ((copied.dense, tensor), (copied.expert, expert_tensor)):
            total = total + collectives.all_reduce_s(problem.hardware, reduced_bytes(problem) * local, *group)
    return total


def _calls_s(problem: Problem, local: FloatArray, group: RankGroup) -> FloatArray:
    """Time the host's calls of a layer's unsharded reduction, in seconds [n].

    There is a call for every ``reduce_call_bytes`` of 16-bit gradients, but at most one for each of a layer's four
    weights, which are never split: call_s(group) * min(2 N / reduce_call_bytes, 4) for N parameters on a rank
    (``local``). A lower bound for experts, which have many weights; an upper bound for embedding and head, which
    have a single weight each. The number of calls was not fitted.

    Source: PyTorch DistributedDataParallel (bucket_cap_mb); nanotron's runs without ZeRO (docs/accuracy.md).
    """
    software = problem.hardware.software
    if not software.reduce_call_bytes:
        return np.zeros_like(local)
    calls = np.minimum(BF16_BYTES * local / software.reduce_call_bytes, WEIGHTS_A_LAYER)
    return np.asarray(call_s(problem.hardware, *group) * calls)


def gather_s(
    problem: Problem, columns: LayoutColumns, parameters: LocalParameters, is_end: bool = False
) -> FloatArray:
    """Time a gather of the weights of a layer from their shards, in seconds [n] (``gathered_parameters``).

    Embedding and head (``is_end``) are in bf16. With ``single_calls``, ZeRO 1 adds ``slice_copy_s`` for each of
    the tensors and ranks.

    Source: huggingface/nanotron src/nanotron/distributed.py (all_gather_coalesced) and optim/zero.py.
    """
    total = np.zeros(len(columns))
    layers, software = _layers_a_call(problem, columns), problem.hardware.software
    tensors, per_weight = (1, BF16_BYTES) if is_end else (TENSORS_A_LAYER, gathered_weight_bytes(problem))
    for local, group in replica_groups(columns, gathered_parameters(columns, parameters)):
        shards = group.first(num_shards(columns, group.num_ranks))
        message = per_weight * local * layers
        total = total + collectives.all_gather_s(problem.hardware, message, *shards) / layers
        if software.single_calls:
            copied = (columns.zero_stage == 1) & (shards.num_ranks > 1) & (local > 0)
            total = total + np.where(copied, software.slice_copy_s * tensors * shards.num_ranks, 0.0)
    return total


def gathered_parameters(columns: LayoutColumns, parameters: LocalParameters) -> LocalParameters:
    """Count the parameters that a gather brings: all at ZeRO stage 3, else the trained ones, which an update
    changed."""
    if parameters.trained is None:
        return parameters
    whole, trained = columns.zero_stage >= 3, parameters.trained
    return LocalParameters(
        np.where(whole, parameters.dense, trained.dense), np.where(whole, parameters.expert, trained.expert)
    )


def optimizer_s(problem: Problem, columns: LayoutColumns, parameters: LocalParameters) -> FloatArray:
    """Time the update of the GPU's share, in seconds [n]; 0 for inference.

    (14 + 2 s) N / r for N parameters with s bytes of states each and a memory rate of r bytes/s, and the
    orthogonalizations of ``muon``, a mean over the ranks that share them (``beyond_the_mean``).
    """
    if problem.inference:
        return np.zeros(len(columns))
    rate = problem.hardware.accelerator.memory_rate_bytes_per_s
    traffic = UPDATE_TRAFFIC_BYTES + 2 * problem.hardware.software.optimizer_state_bytes
    total = np.zeros(len(columns))
    for (_, trained, _, shards), muon in _updated_groups(columns, parameters):
        sharing = np.where(columns.zero_stage >= 1, shards, 1)
        share = trained / sharing
        total = total + traffic * share / rate
        if muon is not None:
            total = total + (muon.seconds - 2 * MOMENT_BYTES * muon.parameters / rate) / sharing
    return total


def beyond_the_mean(columns: LayoutColumns, parameters: LocalParameters) -> tuple[FloatArray, FloatArray]:
    """Return what the most loaded rank updates and the fullest holds beyond the mean, because matrices stay whole.

    (1 - 1/d) max_i t_i for d ranks that share updates of t_i seconds, and (1 - 1/d) of the master weight and
    momentum of the largest matrix. An upper bound where ranks are balanced by time; Megatron-LM balances them by
    parameters.

    Returns:
        Seconds and bytes, [n] each.

    Source: Graham 1969, list scheduling.
    """
    seconds = largest = np.zeros(len(columns))
    for (_, _, _, shards), muon in _updated_groups(columns, parameters):
        if muon is not None:
            share = 1 - 1 / np.where(columns.zero_stage >= 1, shards, 1)
            seconds, largest = seconds + share * muon.largest_s, largest + share * muon.largest_parameters
    return seconds, (FP32_BYTES + MOMENT_BYTES) * largest


def num_shards(columns: LayoutColumns, replicas: IntArray) -> IntArray:
    """Count the ranks that ZeRO shards over, of ``replicas`` [n] with equal weights: a group of ``dp_replicate``.

    Source: the meshes dp_replicate x dp_shard of PyTorch; Megatron-LM core/parallel_state.py, where all data- and
    context-parallel ranks, and all replicas of an expert, are cut into ``num_distributed_optimizer_instances``.
    """
    return np.asarray(replicas // columns.dp_replicate)


def least_held_bytes(problem: Problem, columns: LayoutColumns) -> FloatArray:
    """Bound the states of layers on the fullest pipeline rank from below, for any split of the layers, in bytes
    [n].

    Embedding, head, buffers, activations and offloaded states do not count.

    max(sum_k n_k b_k / P, ceil(L / P) min_k b_k) for n_k of L layers of kind k with b_k bytes on P ranks: the
    fullest rank has at least the mean, and some rank holds at least ceil(L / P) layers.
    """
    rows, index = unique_rows(*(getattr(columns, name) for name in (*STATE_KEYS, "pp", *STATE_OFFLOADS)))
    part, kinds = columns.take(rows), problem.model.kinds
    counts = np.bincount(np.array(problem.model.layer_kinds), minlength=len(kinds))
    parameters = (local_layer_parameters(problem, kind, part) for kind in kinds)
    sizes = np.stack([state_bytes(problem, part, local) for local in parameters])
    sizes[:, 0] *= ~part.offload_weights
    sizes[:, 2] *= ~part.offload_optimizer
    layers = sizes.sum(axis=1)
    mean = counts @ layers / part.pp
    largest = -(-problem.model.num_layers // part.pp) * layers.min(axis=0)
    return np.asarray(np.maximum(mean, largest)[index])


def _sharded_groups(
    columns: LayoutColumns, parameters: LocalParameters
) -> tuple[tuple[FloatArray, FloatArray, IntArray, IntArray], ...]:
    """List (local parameters, trained ones, replicas, ranks that shard) of the dense and the expert part."""
    trained = parameters.gradients
    replicas = (
        (parameters.dense, trained.dense, columns.cp * columns.dp),
        (parameters.expert, trained.expert, columns.expert_dp),
    )
    return tuple((local, part, count, num_shards(columns, count)) for local, part, count in replicas)


def _updated_groups(
    columns: LayoutColumns, parameters: LocalParameters
) -> list[tuple[tuple[FloatArray, FloatArray, IntArray, IntArray], MatrixUpdates | None]]:
    """List the groups of ``_sharded_groups``, each with the matrices in it that Muon updates."""
    groups = _sharded_groups(columns, parameters)
    return list(zip(groups, parameters.muon or (None, None), strict=True))


def replica_groups(
    columns: LayoutColumns, parameters: LocalParameters
) -> tuple[tuple[FloatArray, RankGroup], ...]:
    """List (local parameters, group of ranks with the same parameters) of the dense and the expert part."""
    return (
        (parameters.dense, placement.replicas(columns)),
        (parameters.expert, placement.expert_replicas(columns)),
    )
