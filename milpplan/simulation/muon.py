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

import numpy as np

from milpplan.problem import LayerRun, Problem
from milpplan.simulation.layers.kernels import BF16_BYTES, FP32_BYTES, gemm_s, memory_bound_s
from milpplan.simulation.layers.parameter_counts import Matrix, hidden_matrices
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
    matrices = hidden_matrices(problem.model.hidden_size, kind) + more
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
