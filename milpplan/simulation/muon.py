"""Muon's update: time and messages of the orthogonalization of a layer's momentum matrices.

Five Newton-Schulz iterations X <- a X + (b A + c A A) X with A = X X^T make the momentum X [m, n], m <= n, of a
matrix nearly orthogonal: 5 * 2 (2 m^2 n + m^3) FLOPs, in bf16. Every matrix between embedding and head is updated
so; Adam updates embedding, head and vectors. A matrix has one state beside its master weight, where Adam has two.

Tensor parallelism divides some matrices (``Job.muon_tp_mode``). ``duplicated``: an all-gather of the momentum in
fp32, and the whole work on every rank. ``distributed``: with t parts [m / t, n] A is the sum over ranks of
products n x n, an all-reduce in bf16 in every iteration. ``blockwise``: the work on the rank's own part.

Data parallelism with ZeRO 1 deals whole matrices out to the ranks that shard (Megatron-LM's layer-wise distributed
optimizer), so nothing is gathered for the update, and reductions and gathers of parameters are those of Adam. In
Moonlight's version ranks share flattened states, and the few matrices that two ranks share are gathered.

No activation is alive during the update, so its temporary tensors are not counted.

Source: Jordan et al. 2024 (Muon); Liu et al. 2025 (arXiv 2502.16982), section 2.3; Megatron-LM
core/optimizer/emerging_optimizers.py, layer_wise_optimizer.py; NVIDIA-NeMo/Emerging-Optimizers@fd772926
emerging_optimizers/orthogonalized_optimizers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from milpplan.problem import (
    CompressedAttention,
    GroupedQueryAttention,
    LayerRun,
    LinearRecurrence,
    MixtureOfExperts,
    ModelSpec,
    NoBlock,
    Problem,
)
from milpplan.problem.model import Mixer, Mlp
from milpplan.simulation.layers.kernels import BF16_BYTES, FP32_BYTES, gemm_s, memory_bound_s
from milpplan.simulation.layers.parameter_counts import direct_width, mixed_streams, widths
from milpplan.simulation.layout_columns import FloatArray, LayoutColumns
from milpplan.simulation.network import RankGroup, collectives, placement

ITERATIONS = 5
ITERATED_BYTES = 24
"""Bytes per parameter of an iterated matrix: its norm (4), division by it (8), casts to bf16 and back (12)."""
HELD_BYTES = 32
"""Bytes per parameter that Adam's single kernel has not: weight decay apart (8), two factors of the result (16),
its read (4), a copy in bf16 (4). Source: orthogonalized_optimizer.py; Megatron, ``scaled_orthogonalize_fn``."""
UPDATE_KERNELS = 11
"""Launches of these passes and of the momentum's, one matrix after another."""


class Matrix(NamedTuple):
    """Weight of a layer with two dimensions, as Megatron-LM stores it."""

    outputs: int
    inputs: int
    divided: Literal["outputs", "inputs", ""]
    """Dimension that tensor parallelism divides (of experts, etp); empty: none, every rank has a copy."""
    num_experts: int = 0
    """Routed experts that have such a matrix each; 0: a matrix of the whole layer."""


def hidden_matrices(model: ModelSpec, kind: LayerRun) -> tuple[Matrix, ...]:
    """List the matrices of one layer of ``kind``; gate and up are one, queries, keys and values three.

    Vectors (norms, biases, decays) and convolutions are left out. Source: Megatron-LM's ``linear_fc1``, and
    ``split_qkv`` of its core/optimizer/emerging_optimizers.py; DeepSeek-V4 (arXiv 2606.19348) for its mappings of
    residual streams.
    """
    hidden, streams = model.hidden_size, model.residual_streams
    mapping = Matrix(mixed_streams(model), streams * hidden, "")
    mappings = (mapping,) * (kind.num_blocks if streams > 1 else 0)
    return _mixer_matrices(hidden, kind.attention) + _mlp_matrices(hidden, kind.mlp) + mappings


def _mixer_matrices(hidden: int, mixer: Mixer) -> tuple[Matrix, ...]:
    if isinstance(mixer, NoBlock):
        return ()
    if isinstance(mixer, LinearRecurrence):
        width, rank = widths(mixer), mixer.gate_rank
        found = (Matrix(direct_width(mixer), hidden, "outputs"), Matrix(hidden, width.values, "inputs"))
        if rank is None:
            return found
        decay = Matrix(mixer.num_value_heads * mixer.key_head_dim, rank, "outputs")
        return (*found, *[Matrix(rank, hidden, "")] * 2, decay, Matrix(width.values, rank, "outputs"))
    heads = mixer.num_attention_heads
    if isinstance(mixer, CompressedAttention):
        return _compressed_matrices(hidden, mixer)
    if isinstance(mixer, GroupedQueryAttention):
        keys, values = mixer.num_key_value_heads * mixer.head_dim, mixer.num_key_value_heads * mixer.value_dim
        rows = [heads * mixer.head_dim, keys, *[values] * (not mixer.keys_are_values)]
        rows += [heads * mixer.gate_dim] * (mixer.gate_dim > 0)
        inputs = [Matrix(count, hidden, "outputs") for count in rows]
        if blocks := mixer.blocks:
            sizes = (blocks.width - blocks.index_head_dim, blocks.index_head_dim)
            inputs += [Matrix(count, hidden, "") for count in sizes]
        return (*inputs, Matrix(hidden, heads * mixer.value_dim, "inputs"))
    query = heads * (mixer.qk_nope_head_dim + mixer.qk_rope_head_dim)
    latent = [
        Matrix(mixer.kv_lora_rank + mixer.qk_rope_head_dim, hidden, ""),
        Matrix(heads * (mixer.qk_nope_head_dim + mixer.v_head_dim), mixer.kv_lora_rank, "outputs"),
        Matrix(hidden, heads * mixer.v_head_dim, "inputs"),
    ]
    if mixer.q_lora_rank is None:
        return (*latent, Matrix(query, hidden, "outputs"))
    latent += [Matrix(mixer.q_lora_rank, hidden, ""), Matrix(query, mixer.q_lora_rank, "outputs")]
    if mixer.indexer is not None and not mixer.indexer.takes:
        scored, key = mixer.indexer.index_n_heads, mixer.indexer.index_head_dim
        latent += [Matrix(scored * key, mixer.q_lora_rank, "")]
        latent += [Matrix(rows, hidden, "") for rows in (key, scored)]
    return tuple(latent)


def _compressed_matrices(hidden: int, mixer: CompressedAttention) -> tuple[Matrix, ...]:
    """List the matrices of attention to compressed keys; the groups' first projections are one."""
    query, rank = mixer.num_attention_heads * mixer.head_dim, mixer.q_lora_rank
    outputs = mixer.o_groups * mixer.o_lora_rank
    sizes = [(rank, hidden), (query, rank), (mixer.head_dim, hidden)]
    sizes += [(outputs, query // mixer.o_groups), (hidden, outputs)]
    sizes += [(mixer.series * mixer.head_dim, hidden)] * (2 * (mixer.series > 0))
    if indexer := mixer.indexer:
        sizes += [(mixer.series * indexer.index_head_dim, hidden)] * 2
        sizes += [(indexer.index_n_heads * indexer.index_head_dim, rank), (indexer.index_n_heads, hidden)]
    return tuple(Matrix(rows, columns, "") for rows, columns in sizes)


def _mlp_matrices(hidden: int, mlp: Mlp) -> tuple[Matrix, ...]:
    if isinstance(mlp, NoBlock):
        return ()
    columns = 2 if mlp.gated else 1
    shared, found = mlp.intermediate_size, list[Matrix]()
    if isinstance(mlp, MixtureOfExperts):
        experts, shared, latent = mlp.num_experts, mlp.shared_intermediate_size, mlp.latent_size
        found = [Matrix(experts, hidden, ""), *[Matrix(1, hidden, "")] * mlp.shared_gate]
        found += [Matrix(latent, hidden, ""), Matrix(hidden, latent, "")] if latent else []
        inputs, width = latent or hidden, mlp.intermediate_size
        found += [Matrix(columns * width, inputs, "outputs", experts), Matrix(inputs, width, "inputs", experts)]
    if shared:
        found += [Matrix(columns * shared, hidden, "outputs"), Matrix(hidden, shared, "inputs")]
    return tuple(found)


@dataclass(frozen=True, slots=True)
class MatrixUpdates:
    """Updates of a layer's matrices on one GPU, as if it updated all that it holds; arrays [n]."""

    parameters: FloatArray
    """Parameters of the matrices."""
    seconds: FloatArray
    """Time of all orthogonalizations with their communication."""
    largest_parameters: FloatArray
    """Parameters of the largest matrix."""
    largest_s: FloatArray
    """Time of the longest orthogonalization."""
    gathered_bytes: FloatArray
    """Size of all gathered matrices."""
    added_bytes: FloatArray
    """Size of all messages that ranks add."""


def matrix_updates(
    problem: Problem, kind: LayerRun, columns: LayoutColumns, more: tuple[Matrix, ...] = ()
) -> tuple[MatrixUpdates, MatrixUpdates]:
    """Price the orthogonalizations of one layer.

    Args:
        problem: model, hardware and job.
        kind: layer.
        columns: n layouts.
        more: further matrices of the layer.

    Returns:
        Matrices of all ranks of a tensor-parallel group, and matrices of routed experts.
    """
    matrices = hidden_matrices(problem.model, kind) + more
    dense = [_update(problem, matrix, columns) for matrix in matrices if not matrix.num_experts]
    experts = [_update(problem, matrix, columns) for matrix in matrices if matrix.num_experts]
    return _together(dense, len(columns)), _together(experts, len(columns))


def _together(updates: list[tuple[FloatArray, MatrixUpdates]], length: int) -> MatrixUpdates:
    """Add updates of (number, one matrix)."""
    parameters, seconds, gathered, added = (np.zeros(length) for _ in range(4))
    largest, longest = np.zeros(length), np.zeros(length)
    for count, one in updates:
        parameters, seconds = parameters + count * one.parameters, seconds + count * one.seconds
        gathered, added = gathered + count * one.gathered_bytes, added + count * one.added_bytes
        largest, longest = np.maximum(largest, one.parameters), np.maximum(longest, one.seconds)
    return MatrixUpdates(parameters, seconds, largest, longest, gathered, added)


def _update(problem: Problem, matrix: Matrix, columns: LayoutColumns) -> tuple[FloatArray, MatrixUpdates]:
    """Price the update of one matrix, and count such matrices on a GPU."""
    expert, mode = matrix.num_experts > 0, problem.job.muon_tp_mode
    group = placement.expert_tensor(columns) if expert else placement.tensor(columns)
    ones = np.ones(len(columns))
    parts = np.where(matrix.divided != "", group.size, 1) * ones
    whole, held = matrix.outputs * matrix.inputs * ones, matrix.outputs * matrix.inputs / parts
    rows, row_length = matrix.outputs * ones, matrix.inputs * ones
    if matrix.divided == "inputs":
        rows, row_length = row_length, rows
    # From here on ``rows`` is the dimension that tensor parallelism divides.
    gathered, added = 0 * ones, 0 * ones
    if mode == "duplicated":
        seconds = orthogonalization_s(problem, rows, row_length)
        gathered = np.where(parts > 1, FP32_BYTES * whole, 0.0)
    elif mode == "blockwise":
        seconds = orthogonalization_s(problem, rows / parts, row_length)
    else:
        own = _iterations_s(problem, row_length, rows / parts)
        seconds = np.where(parts > 1, own, orthogonalization_s(problem, rows, row_length))
        added = np.where(parts > 1, ITERATIONS * BF16_BYTES * row_length**2, 0.0)
    gpu = problem.hardware.accelerator
    # Gathered parts are copied into one matrix.
    moved = HELD_BYTES * held + 2 * gathered
    seconds = seconds + moved / gpu.memory_rate_bytes_per_s + UPDATE_KERNELS * gpu.kernel_latency_s
    seconds = seconds + _messages_s(problem, gathered, added, group)
    count = matrix.num_experts / columns.ep if expert else ones
    return count, MatrixUpdates(held, seconds, held, seconds, gathered, added)


def _messages_s(problem: Problem, gathered: FloatArray, added: FloatArray, group: RankGroup) -> FloatArray:
    """Time a gather, and an all-reduce in every iteration, in seconds [n]."""
    gather = collectives.all_gather_s(problem.hardware, gathered, *group)
    add = collectives.all_reduce_s(problem.hardware, added / ITERATIONS, *group)
    return np.where(gathered > 0, gather, 0.0) + np.where(added > 0, ITERATIONS * add, 0.0)


def orthogonalization_s(problem: Problem, rows: FloatArray | float, columns: FloatArray | float) -> FloatArray:
    """Time the orthogonalization of a whole matrix, transposed if it has more rows than columns, in seconds [n].

    Source: ``newton_schulz`` of muon_utils.py.
    """
    return _iterations_s(problem, np.minimum(rows, columns), np.maximum(rows, columns))


def _iterations_s(problem: Problem, m: FloatArray, n: FloatArray) -> FloatArray:
    """Time normalization, casts and iterations of X [m, n], in seconds [n].

    Iterations are X X^T, b A + c A A and a X + (b A + c A A) X. A product that adds to a matrix first copies it, 4
    bytes an element (``addmm_out_cuda_impl`` of pytorch/pytorch@002253ce, aten/src/ATen/native/cuda/Blas.cpp).
    """
    gpu = problem.hardware.accelerator
    one = gemm_s(gpu, "bf16", m, m, n) + gemm_s(gpu, "bf16", m, m, m) + gemm_s(gpu, "bf16", m, n, m)
    copied = memory_bound_s(gpu, 2 * BF16_BYTES * m * m) + memory_bound_s(gpu, 2 * BF16_BYTES * m * n)
    return np.asarray(ITERATIONS * (one + copied) + ITERATED_BYTES * m * n / gpu.memory_rate_bytes_per_s)
