"""Residual of several streams: hyper-connections around each block, and the ends of the streams.

A hyper-connection (manifold-constrained) has a mapping of the n streams of a token, n h numbers, to 2 n + n^2
numbers in fp32. They weight the streams to the input of the block, its output to every stream, and the streams
among each other, X' = B X + C F(A X); Sinkhorn's iterations make B doubly stochastic. Embeddings are copied to the
streams, and a last mapping to n numbers weights the streams to the input of the final norm.

Kernels are fused, read and write each tensor once, and mappings run at the rate of bf16: a lower bound. Blocks
keep the n streams, stages send them to each other, and full recomputation starts from them. Launchers may
recompute the inputs and outputs of hyper-connections by themselves, which is not modelled.

Sources: Xie et al. 2025 (mHC, arXiv 2512.24880), section 4.3; DeepSeek-AI 2026 (DeepSeek-V4, arXiv 2606.19348),
sections 2.2 and 3; Megatron-LM@023f5cf1 core/transformer/hyper_connection.py; transformers 5.24.0,
``DeepseekV4HyperConnection``, ``DeepseekV4HyperHead``. No scored run has such layers; steps of DeepSeek-V4-Flash
in NVIDIA-NeMo/Megatron-Bridge#5724 take 13 % (GB200) and 18 % (GB300) more than simulated ones.
"""

from __future__ import annotations

import numpy as np

from milpplan.simulation import FloatArray
from milpplan.simulation.layers import kernels
from milpplan.simulation.layers.kernels import BF16_BYTES, FP32_BYTES
from milpplan.simulation.layers.parameter_counts import mixed_streams
from milpplan.simulation.layers.shard import Shard, Tally


def mapping_s(shard: Shard, tokens: FloatArray, mapped: int) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Time a mapping of the streams of ``tokens`` to ``mapped`` numbers.

    Returns:
        Seconds of the forward, of the input gradient and of the weight gradient.
    """
    gpu, inputs = shard.problem.hardware.accelerator, float(shard.problem.model.residual_streams * shard.hidden)
    sums = shard.grad_bytes, shard.fused_sums
    return (
        kernels.gemm_s(gpu, "bf16", tokens, mapped, inputs),
        kernels.gemm_s(gpu, "bf16", tokens, inputs, mapped),
        kernels.weight_gradient_s(gpu, "bf16", mapped, inputs, tokens, 1.0, *sums),
    )


def add_hyper_connections(shard: Shard, num_blocks: int, tally: Tally) -> None:
    """Add the hyper-connections around the blocks of a layer, which take the place of its residual adds.

    Beside the mapping of n streams, kernels read and write n + 1 tensors of 2 u h bytes to weight the input, and
    2 n + 1 to add and mix; backward 2 n + 1, 3 n + 2, and 4 n to sum the streams' three gradients. Sinkhorn's
    iterations pass over 8 (n^2 + 2 n) u bytes.
    """
    streams, mapped = shard.problem.model.residual_streams, mixed_streams(shard.problem.model)
    tokens = shard.tokens / shard.sequence_tp
    forward, inputs, weight = mapping_s(shard, tokens, mapped)
    stream = BF16_BYTES * tokens * shard.hidden
    projected = shard.memory_bound(2 * FP32_BYTES * tokens * mapped)
    for passes in (streams + 1, 2 * streams + 1):
        forward = forward + shard.memory_bound(passes * stream)
    for passes in (2 * streams + 1, 3 * streams + 2, 4 * streams):
        inputs = inputs + shard.memory_bound(passes * stream)
    backward = inputs + weight + projected
    tally.compute(num_blocks * (forward + projected), num_blocks * backward, num_blocks * weight)


def hyper_connection_bytes(shard: Shard) -> FloatArray:
    """Count the bytes that a block keeps beside its streams: its input before the norm and its output, 4 u h, and
    8 (n^2 + 2 n) u of numbers in fp32, before Sinkhorn's iterations and after."""
    mapped = mixed_streams(shard.problem.model)
    return np.asarray(shard.tokens / shard.sequence_tp * 2 * (BF16_BYTES * shard.hidden + FP32_BYTES * mapped))


def deferred_stream_bytes(shard: Shard, num_mappings: int, mapped: int) -> FloatArray:
    """Count the bytes that weight gradients of mappings wait for: 2 n u h of inputs, 4 u a gradient in fp32."""
    width = BF16_BYTES * shard.problem.model.residual_streams * shard.hidden + FP32_BYTES * mapped
    return np.asarray(num_mappings * shard.tokens / shard.sequence_tp * width)
