"""What one GPU works on of a micro-batch, and what a linear layer takes there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from milpplan.problem.problem import Problem
from milpplan.simulation.layers import kernels
from milpplan.simulation.layout_columns import FloatArray, LayoutColumns

BF16_BYTES = 2
FP32_BYTES = 4


class Product(NamedTuple):
    """Seconds of a linear layer's three products; ``size``: tokens, width of the output, width of the input."""

    forward: FloatArray
    dgrad: FloatArray
    wgrad: FloatArray
    size: tuple[FloatArray, FloatArray | float, FloatArray | float]


CoreSeconds = tuple[FloatArray, FloatArray]
"""Seconds of one layer's attention kernels forward and backward, [num_layouts]."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The share of one micro-batch that a GPU works on; arrays of shape [num_layouts]."""

    problem: Problem
    columns: LayoutColumns
    tokens: FloatArray
    """Tokens of a context-parallel rank: micro_batch_size * sequence_length / cp."""
    tp: FloatArray
    sequence_tp: FloatArray
    """Divisor of tensors outside the tensor-parallel region: tp with sequence parallelism, else 1."""
    core: CoreSeconds | None = None
    """Of sequences of several lengths packed into the micro-batch (``milpplan.simulation.packed_sequences``);
    None: all have the job's length."""

    @staticmethod
    def of(problem: Problem, columns: LayoutColumns, core: CoreSeconds | None = None) -> Shard:
        """The shard of every layout."""
        tokens = columns.micro_batch_size * problem.job.sequence_length / columns.cp
        tp = columns.tp.astype(np.float64)
        return Shard(problem, columns, tokens, tp, np.where(columns.sequence_parallel, tp, 1.0), core)

    @property
    def hidden(self) -> int:
        """Hidden size of the model."""
        return self.problem.model.hidden_size

    @property
    def operand_bytes(self) -> int:
        """Bytes of an element of a product's inputs."""
        return kernels.FP8_BYTES if self.problem.job.precision == "fp8" else BF16_BYTES

    @property
    def gathered_bytes(self) -> FloatArray:
        """Bytes of the tensor that sequence parallelism gathers before a product: tokens x hidden.

        Source: Transformer Engine 1.11, pytorch/module/layernorm_linear.py and linear.py: the input is cast before
        it is gathered, forwards and again for the weight gradient; module/base.py (``grad_output_preprocess``): so
        is the output gradient. What is reduce-scattered stays in bf16.
        """
        return self.operand_bytes * self.tokens * self.hidden

    @property
    def grad_bytes(self) -> int:
        """Bytes of one accumulated gradient."""
        return FP32_BYTES if self.problem.job.grad_dtype == "fp32" else BF16_BYTES

    @property
    def fused_sums(self) -> bool:
        """Whether products of weight gradients add to the sums themselves."""
        return self.problem.hardware.software.fused_gradient_sums

    def gemm(self, m: FloatArray, n: FloatArray | float, k: FloatArray | float) -> Product:
        """Seconds of forward, input gradient and weight gradient of a linear layer of m tokens, k to n.

        fp8 adds one pass over the inputs (read bf16, write fp8 and its transpose) before each product.
        """
        gpu, precision = self.problem.hardware.accelerator, self.problem.job.precision
        forward = kernels.gemm_s(gpu, precision, m, n, k)
        dgrad = kernels.gemm_s(gpu, precision, m, k, n)
        wgrad = kernels.weight_gradient_s(gpu, precision, n, k, m, 1.0, self.grad_bytes, self.fused_sums)
        if precision == "fp8":
            forward = forward + self.memory_bound(4.0 * m * k)
            dgrad = dgrad + self.memory_bound(4.0 * m * n)
        return Product(forward, dgrad, wgrad, (m, n, k))

    def memory_bound(self, num_bytes: FloatArray | float) -> FloatArray:
        """Seconds of a memory-bound operator."""
        return np.asarray(kernels.memory_bound_s(self.problem.hardware.accelerator, num_bytes))
