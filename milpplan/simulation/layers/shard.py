"""Share of a micro-batch on one GPU, the times of its linear layers, and their tensor-parallel communication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from milpplan.problem import TP_OVERLAPS, Problem
from milpplan.problem.model import LinearModule
from milpplan.simulation import BoolArray, FloatArray, LayoutColumns
from milpplan.simulation.layers import kernels
from milpplan.simulation.layers.terms import Outputs, Part, Phase, Product, Tally
from milpplan.simulation.network import call_s, collectives, placement

BF16_BYTES = 2
FP32_BYTES = 4

CoreSeconds = tuple[FloatArray, FloatArray]
"""Seconds of one layer's attention kernels forward and backward, [num_layouts]."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Share of one micro-batch that a GPU works on; arrays of shape [num_layouts]."""

    problem: Problem
    columns: LayoutColumns
    tokens: FloatArray
    """Tokens of a context-parallel rank: micro_batch_size * sequence_length / cp."""
    tp: FloatArray
    sequence_tp: FloatArray
    """Divisor of tensors outside the tensor-parallel region: tp with sequence parallelism, else 1."""
    core: CoreSeconds | None = None
    """Times of attention for sequences of several lengths that are packed into the micro-batch
    (``milpplan.simulation.packed_sequences``); None: all sequences have the job's length."""

    @staticmethod
    def of(problem: Problem, columns: LayoutColumns, core: CoreSeconds | None = None) -> Shard:
        """Cut the shard of every layout."""
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
        """True if the products of weight gradients add to the accumulated gradients themselves."""
        return self.problem.hardware.software.fused_gradient_sums

    def trains(self, *modules: LinearModule) -> bool:
        """Check that weights of some of the matrices, or adapters beside them, are trained."""
        lora = self.problem.job.lora
        return lora is None or any(name in lora.modules for name in modules)

    def gemm(self, m: FloatArray, n: FloatArray | float, k: FloatArray | float, matrices: Outputs) -> Product:
        """Time forward, input gradient and weight gradient of a linear layer of m tokens from width k to n.

        fp8 adds one pass over the inputs (read bf16, write fp8 and its transpose) before each product. With LoRA
        the weights are frozen, and the adapters' products are added. ``matrices``: the matrices that it joins.
        """
        gpu, precision = self.problem.hardware.accelerator, self.problem.job.precision
        forward = kernels.gemm_s(gpu, precision, m, n, k)
        dgrad = kernels.gemm_s(gpu, precision, m, k, n)
        wgrad = kernels.weight_gradient_s(gpu, precision, n, k, m, 1.0, self.grad_bytes, self.fused_sums)
        if precision == "fp8":
            forward = forward + self.memory_bound(4.0 * m * k)
            dgrad = dgrad + self.memory_bound(4.0 * m * n)
        if self.problem.job.lora is not None:
            added = self.adapters(m, k, matrices)
            forward, dgrad, wgrad = forward + added[0], dgrad + added[1], added[2]
        return Product(forward, dgrad, wgrad, (m, n, k), matrices, self.trains(*matrices))

    def adapters(
        self, m: FloatArray, k: FloatArray | float, matrices: Outputs, count: FloatArray | float = 1.0
    ) -> FloatArray:
        """Time the adapters beside ``count`` products, in seconds [3, n] as ``kernels.adapter_s``."""
        lora, gpu = self.problem.job.lora, self.problem.hardware.accelerator
        total = np.zeros((3, len(self.columns)))
        for name, n in matrices.items():
            if lora is not None and name in lora.modules:
                total += kernels.adapter_s(gpu, lora.rank, m, n, k, count, self.grad_bytes, self.fused_sums)
        return total

    def memory_bound(self, num_bytes: FloatArray | float) -> FloatArray:
        """Time a memory-bound operator, in seconds."""
        return np.asarray(kernels.memory_bound_s(self.problem.hardware.accelerator, num_bytes))


_NO_TILES, _PIPELINED_TILES = TP_OVERLAPS.index("none"), TP_OVERLAPS.index("pipelined")
_TP_PARTS = (Part.TP, Part.TP_HIDDEN)


def linear_pair(shard: Shard, tally: Tally, columns: Sequence[Product], row: Product) -> None:
    """Add the tensor-parallel communication of column-parallel linear layers followed by a row-parallel layer.

    With sequence parallelism: all-gather before, reduce-scatter after. In the backward, the output gradient is
    all-gathered (exposed), the input is gathered again beside the input-gradient product (unless it was kept) and
    the input gradient is reduce-scattered beside the weight-gradient product. Frozen layers without
    adapters gather no input again.

    Without sequence parallelism: an all-reduce after, and in the backward an all-reduce beside the weight-gradient
    product.

    Where weight gradients run by themselves, no product is left to hide the reduction of the input gradient, and
    the input is gathered beside the weight gradients.

    Sources: Korthikanti et al. 2022 figure 5; Megatron-LM core/tensor_parallel/layers.py; for split backwards
    sail-sg/zero-bubble-pipeline-parallelism, core/tensor_parallel/layers.py. In tiles (``Layout.tp_overlap``):
    Wang et al. 2023, "Overlap communication with dependent computation via decomposition" (ASPLOS); Transformer
    Engine's userbuffers (pytorch/csrc/extensions/comm_gemm_overlap.cpp), which Megatron-LM calls with
    ``--tp-comm-overlap``.
    """
    hardware, sp = shard.problem.hardware, shard.columns.sequence_parallel
    message = BF16_BYTES * shard.tokens * shard.hidden
    group = placement.tensor(shard.columns)
    gather = collectives.all_gather_s(hardware, shard.gathered_bytes, *group)
    scatter = collectives.reduce_scatter_s(hardware, message, *group)
    reduce = collectives.all_reduce_s(hardware, message, *group)
    zeros = np.zeros_like(shard.tokens)
    share = collectives.processor_fraction(hardware, *group)
    # Only weight gradients need the gathered input again.
    needed = any(product.trained for product in columns)
    again = shard.columns.gather_again
    num_regathers = np.where(sp & again & needed, 1, 0)
    tally.calls(
        np.where(sp, 2, 1), np.where(sp, 2, 1) + num_regathers, call_s(hardware, *group), weight=num_regathers
    )
    if shard.columns.any_of("tp_overlap"):
        tiles = _Tiles(shard, tally, share)
        tiles.add_beside(Phase.FORWARD, np.where(sp, gather, zeros), columns)
        tiles.add_beside(Phase.FORWARD, np.where(sp, scatter, reduce), (row,))
        tiles.add_beside(Phase.BACKWARD, np.where(sp, gather, zeros), (row,))
    else:
        tally.exposed(Part.TP, Phase.FORWARD, np.where(sp, gather + scatter, reduce))
        tally.exposed(Part.TP, Phase.BACKWARD, np.where(sp, gather, zeros))
    dgrad, wgrad = columns[0].dgrad, columns[0].wgrad
    for other in columns[1:]:
        dgrad, wgrad = dgrad + other.dgrad, wgrad + other.wgrad
    overlap = 1.0 if hardware.software.overlap_tensor_parallel else 0.0
    regather, reduced = np.where(sp & again & needed, gather, zeros), np.where(sp, scatter, reduce)
    if tally.any_split:
        tally.exposed(Part.TP, Phase.BACKWARD, np.where(tally.split, reduced, 0.0))
        tally.overlapped(_TP_PARTS, Phase.WEIGHT, np.where(tally.split, regather, 0.0), overlap * wgrad, share)
        regather, reduced = (np.where(tally.split, 0.0, seconds) for seconds in (regather, reduced))
    tally.overlapped(_TP_PARTS, Phase.BACKWARD, regather, overlap * dgrad, share)
    tally.overlapped(_TP_PARTS, Phase.BACKWARD, reduced, overlap * wgrad, share)
    if shard.problem.job.attention_kernel == "flash":
        # Selective recomputation drops the gathered inputs, so the replay gathers them once more.
        replayed = np.where(sp & ~again & needed, gather, zeros)
        tally.overlapped(_TP_PARTS, Phase.SELECTIVE, replayed, overlap * dgrad, share)


class _Tiles:
    """Communication in tiles beside the tiles of its own product, for layouts with ``tp_overlap``."""

    def __init__(self, shard: Shard, tally: Tally, share: FloatArray) -> None:
        self.shard, self.tally, self.share = shard, tally, share
        self.chosen: BoolArray = (shard.columns.tp_overlap != _NO_TILES) & (shard.columns.tp > 1)
        self.tiles = np.where(self.chosen, shard.tp, 1.0)

    def add_beside(self, phase: Phase, seconds: FloatArray, products: Sequence[Product]) -> None:
        """Add communication of ``seconds`` beside its products, and the time that tiles add to the products.

        The products are forwards, or input gradients in the backward.
        """
        forward = phase == Phase.FORWARD
        whole, tile = np.zeros_like(seconds), np.zeros_like(seconds)
        for product in products:
            tokens, width, inner = product.size
            part = self.shard.gemm(tokens / self.tiles, width, inner, product.matrices)
            whole = whole + (product.forward if forward else product.dgrad)
            tile = tile + (part.forward if forward else part.dgrad)
        added = np.where(self.chosen & (seconds > 0), self.tiles * tile - whole, 0.0)
        self.tally.seconds[Part.COMPUTE, phase] += added
        pipelined = self.shard.columns.tp_overlap == _PIPELINED_TILES
        exposed, hidden = collectives.tiled_overlap_s(seconds, whole + added, self.tiles, self.share, pipelined)
        self.tally.seconds[Part.TP, phase] += exposed
        self.tally.seconds[Part.TP_HIDDEN, phase] += hidden
