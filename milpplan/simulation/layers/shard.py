"""Layer on one GPU: its shard of a micro-batch, and the tally of its times by ``Part`` and ``Phase``.

``Term`` names the rows of a virtual stage's durations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from milpplan.problem import (
    EXPERT_DISPATCHES,
    TP_OVERLAPS,
    GroupedQueryAttention,
    MixtureOfExperts,
    Problem,
    RecomputeModule,
)
from milpplan.problem.model import LinearModule
from milpplan.simulation import BoolArray, FloatArray, LayoutColumns
from milpplan.simulation.layers import kernels
from milpplan.simulation.layers.kernels import BF16_BYTES, FP32_BYTES
from milpplan.simulation.network import call_s, collectives, placement


class Term(IntEnum):
    """Rows of a duration matrix: durations of a virtual stage j, in nanoseconds.

    ``milpplan.simulation.pipeline.step_graph`` says how the rows enter the step time.
    """

    FORWARD = 0
    """Forward of a micro-batch."""
    BACKWARD = 1
    """Backward of a micro-batch; the input gradients alone where the schedule splits the backward."""
    GATHER = 2
    """Parameter gather, once a step."""
    REDUCE = 3
    """Gradient reduction, once a step."""
    OPTIMIZER = 4
    """Optimizer update, once a step."""
    LEAD = 5
    """Time from the start of the last backward until the first gradient bucket is ready."""
    TRAIL = 6
    """Reduction of the last gradient bucket, which starts when the last backward ends."""
    FIRST = 7
    """Gather of the first parameter bucket, which the first forward waits for."""
    LAST = 8
    """Part of the first forward that follows the gather of the last parameter bucket."""
    WEIGHT = 9
    """Weight gradients of a micro-batch, where the schedule runs them as work items of their own."""
    CROSSING = 10
    """Time beyond ``StepGraph.transfer_ns`` of a transfer between j and j + 1, in either direction."""
    PAIRED_FORWARD = 11
    """Forward in a pair: a forward and a whole backward of another micro-batch beside each other."""
    PAIRED_BACKWARD = 12
    """Backward in a pair, without its weight gradients, which WEIGHT holds."""


WORK = (Term.FORWARD, Term.BACKWARD, Term.WEIGHT)
"""Rows of the durations of work items, in the order of ``milpplan.simulation.pipeline.work_orders.Kind``."""
PAIRED = (Term.PAIRED_FORWARD, Term.PAIRED_BACKWARD)
"""Rows of the durations of forwards and backwards in pairs, in the order of ``Kind``."""


class Part(IntEnum):
    """Parts of the time of a layer. The first six are exposed and add up to its duration."""

    COMPUTE = 0
    TP = 1
    CP = 2
    EP = 3
    LAUNCH = 4
    ZERO = 5
    TP_HIDDEN = 6
    CP_HIDDEN = 7
    ZERO_HIDDEN = 8


EXPOSED = slice(Part.COMPUTE, Part.ZERO + 1)
"""Parts that add up to the duration of a layer."""


class Phase(IntEnum):
    """Phases of a layer's work on a micro-batch."""

    FORWARD = 0
    BACKWARD = 1
    """Includes the weight gradients unless the schedule runs them as work items of their own."""
    SELECTIVE = 2
    """Time that selective recomputation adds to the backward."""
    FULL = 3
    """Time that full recomputation adds to the backward."""
    WEIGHT = 4
    """Weight gradients where the schedule runs them as work items of their own, else 0."""


ONCE = (Phase.FORWARD, Phase.BACKWARD, Phase.WEIGHT)
"""Phases that every micro-batch passes once, in the order of ``milpplan.simulation.pipeline.work_orders.Kind``."""

REPLAYS = slice(Phase.SELECTIVE, Phase.FULL + 1)
"""Phases of recomputation."""


Outputs = Mapping[LinearModule, FloatArray | float]
"""Matrices that a product joins, with the width of their outputs on a rank."""


class Product(NamedTuple):
    """Times of a linear layer's three matrix products with its adapters, in seconds."""

    forward: FloatArray
    dgrad: FloatArray
    """Gradient of the input."""
    wgrad: FloatArray
    """Gradient of the trained weights."""
    size: tuple[FloatArray, FloatArray | float, FloatArray | float]
    """Tokens, width of the output, width of the input."""
    matrices: Outputs
    trained: bool
    """True if some weights are trained, so that the input is needed again."""


@dataclass(slots=True)
class Tally:
    """Running sum of the times of one layer's operators, for many layouts."""

    seconds: FloatArray
    """[Part, Phase, num_layouts]."""
    called_s: FloatArray
    """Seconds that the host needs to call the layer's collectives, [Phase, num_layouts]."""
    columns: LayoutColumns
    split: BoolArray
    """[num_layouts] True where the schedule runs weight gradients apart from the backward."""
    any_split: bool
    """True if ``split`` is true for some layout."""
    by_module: bool
    """True if some layout names the modules that selective recomputation replays."""
    num_blocks: int
    """Blocks of the layer: its token mixer and its feed-forward block."""

    @staticmethod
    def empty(columns: LayoutColumns, num_blocks: int) -> Tally:
        """Start a tally with all times zero."""
        split, num = columns.split_backward, len(columns)
        seconds, called = np.zeros((len(Part), len(Phase), num)), np.zeros((len(Phase), num))
        by_module = columns.any_of("recompute_modules")
        return Tally(seconds, called, columns, split, bool(split.any()), by_module, num_blocks)

    @contextmanager
    def module(self, name: RecomputeModule) -> Iterator[None]:
        """Mark the operators that a module holds: layouts that name it replay their forward, communication
        included."""
        before = self.seconds[:, Phase.FORWARD].copy() if self.by_module else None
        yield
        if before is not None:
            added = self.seconds[:, Phase.FORWARD] - before
            self.seconds[:, Phase.SELECTIVE] += np.where(self.columns.recomputes(name), added, 0.0)

    def replayed_by(self, name: RecomputeModule, part: Part, seconds: FloatArray) -> None:
        """Add the replay of an operator of a module that is marked nowhere."""
        if self.by_module:
            self.seconds[part, Phase.SELECTIVE] += np.where(self.columns.recomputes(name), seconds, 0.0)

    def compute(
        self,
        forward: FloatArray,
        backward: FloatArray,
        weight: FloatArray | float = 0.0,
        *,
        selective: bool = False,
    ) -> None:
        """Add the compute of an operator.

        Args:
            forward: seconds of the forward.
            backward: seconds of the backward, the weight gradient included.
            weight: seconds of the weight gradient.
            selective: selective recomputation replays the operator.
        """
        self.seconds[Part.COMPUTE, Phase.FORWARD] += forward
        self.seconds[Part.COMPUTE, Phase.BACKWARD] += backward
        if self.any_split:
            apart = np.where(self.split, weight, 0.0)
            self.seconds[Part.COMPUTE, Phase.BACKWARD] -= apart
            self.seconds[Part.COMPUTE, Phase.WEIGHT] += apart
        if selective:
            self.replayed(forward)

    def replayed(self, seconds: FloatArray) -> None:
        """Add compute that selective recomputation replays, unless a layout names modules."""
        seconds = np.where(self.columns.recompute_modules > 0, 0.0, seconds) if self.by_module else seconds
        self.seconds[Part.COMPUTE, Phase.SELECTIVE] += seconds

    def calls(
        self,
        forward: FloatArray | int,
        backward: FloatArray | int,
        call_s: FloatArray,
        weight: FloatArray | int = 0,
    ) -> None:
        """Add the host's time to call collectives.

        Args:
            forward, backward: number of collectives of each phase.
            call_s: seconds of the host for each call.
            weight: number of the backward's collectives that belong to the weight gradients.
        """
        self.called_s[Phase.FORWARD] += forward * call_s
        self.called_s[Phase.BACKWARD] += backward * call_s
        if self.any_split:
            apart = np.where(self.split, weight, 0) * call_s
            self.called_s[Phase.BACKWARD] -= apart
            self.called_s[Phase.WEIGHT] += apart

    def exposed(self, part: Part, phase: Phase, seconds: FloatArray) -> None:
        """Add communication that nothing hides."""
        self.seconds[part, phase] += seconds

    def overlapped(
        self,
        parts: tuple[Part, Part],
        phase: Phase,
        seconds: FloatArray,
        cover: FloatArray,
        processor_fraction: FloatArray,
    ) -> None:
        """Add communication of ``seconds`` that runs beside ``cover`` seconds of compute.

        Exposed are the excess over the compute, and the slowdown of the compute beside it (``overlap_s``).
        ``parts`` names the exposed and the hidden part.
        """
        exposed, hidden = collectives.overlap_s(seconds, cover, processor_fraction)
        self.seconds[parts[0], phase] += exposed
        self.seconds[parts[1], phase] += hidden


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
    def operand_bytes(self) -> float:
        """Bytes of an element of a product's inputs."""
        return self.problem.job.quantization.copy_bytes

    def cast(self, elements: FloatArray | float) -> FloatArray:
        """Time the kernels that quantize inputs of products, in seconds; 0 in bf16."""
        pass_bytes = self.problem.job.quantization.pass_bytes
        return self.memory_bound(pass_bytes * elements) if pass_bytes else np.zeros(())

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

        In 8 or 4 bits the input and the output gradient are quantized before (``Quantization``). With LoRA
        the weights are frozen, and the adapters' products are added. ``matrices``: the matrices that it joins.
        """
        gpu, precision = self.problem.hardware.accelerator, self.problem.job.precision
        forward = kernels.gemm_s(gpu, precision, m, n, k)
        dgrad = kernels.gemm_s(gpu, precision, m, k, n)
        wgrad = kernels.weight_gradient_s(gpu, precision, n, k, m, 1.0, self.grad_bytes, self.fused_sums)
        forward = forward + self.cast(m * k)
        dgrad = dgrad + self.cast(m * n)
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


def kv_heads_per_rank(attention: GroupedQueryAttention, tp: FloatArray) -> FloatArray:
    """Return the key/value heads of a tensor-parallel rank; fewer heads than tp are replicated."""
    return np.maximum(attention.num_key_value_heads / tp, 1.0)


def key_value_widths(attention: GroupedQueryAttention, tp: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the widths of a rank's keys, and of its keys and values together."""
    heads = kv_heads_per_rank(attention, tp)
    return heads * attention.head_dim, heads * (attention.head_dim + attention.value_dim)


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


ALLGATHER, ALLTOALL, DEEPEP = map(EXPERT_DISPATCHES.index, ("allgather", "alltoall", "deepep"))
"""Positions in ``EXPERT_DISPATCHES``."""


def named_dispatch(
    shard: Shard, moe: MixtureOfExperts, sent: FloatArray, default: list[FloatArray]
) -> list[FloatArray]:
    """Time the exchange of tokens where ``Layout.expert_dispatch`` names it, else as by default.

    ``allgather``: n ranks gather 2 n u h bytes of tokens and 3 n u E of bf16 probabilities and a map, and
    reduce-scatter 2 n u h of results (in bf16: a lower bound where probabilities are in fp32); backward the same,
    with 2 n u E. No message grows with the experts of a token or their imbalance.

    Args:
        shard: n layouts.
        moe: the experts.
        sent: bytes of the copies of a rank's tokens, [n].
        default: seconds forward and backward by default, [n] each.

    Returns:
        Seconds forward and backward, [n] each.

    Source: Megatron-LM core/transformer/moe/token_dispatcher.py (MoEAllGatherTokenDispatcher, tp_ep_group).
    """
    hardware, columns = shard.problem.hardware, shard.columns
    ep_group, etp_group = placement.expert(columns), placement.expert_tensor(columns)
    tensor = collectives.all_gather_s(hardware, sent * columns.etp, *etp_group)
    tensor = tensor + collectives.reduce_scatter_s(hardware, sent * columns.etp, *etp_group)
    every, once = (
        2 * collectives.all_to_all_s(hardware, sent, ep_group.size, ep_group.stride, copies) + tensor
        for copies in (None, float(moe.num_experts_per_tok))
    )
    tokens, routing, weights = gathered_token_bytes(shard, moe)
    scale = hardware.software.dispatch_efficiency
    both = collectives.all_gather_s(hardware, tokens / scale, *ep_group)
    both = both + collectives.reduce_scatter_s(hardware, tokens / scale, *ep_group)
    ends = (
        collectives.all_gather_s(hardware, routing / scale, *ep_group),
        collectives.reduce_scatter_s(hardware, weights / scale, *ep_group),
    )
    names = [columns.expert_dispatch == name for name in (ALLGATHER, ALLTOALL, DEEPEP)]
    return [np.select(names, [both + end, every, once], own) for end, own in zip(ends, default, strict=True)]


def gathered_token_bytes(shard: Shard, moe: MixtureOfExperts) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Size what all ranks of experts hold together, in bytes [n]: tokens, probabilities with their map, and
    gradients of probabilities."""
    tokens = shard.columns.ep * shard.tokens / shard.tp
    width = moe.latent_size or shard.hidden
    chosen = tokens * moe.num_experts
    return BF16_BYTES * tokens * width, (BF16_BYTES + 1) * chosen, BF16_BYTES * chosen
