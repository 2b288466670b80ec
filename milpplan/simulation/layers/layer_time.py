"""Time of one decoder layer on one GPU for one micro-batch, by phase and by part.

Every quantity broadcasts over the rows of a ``LayoutColumns``. The sum over the exposed parts is the
duration that the pipeline graph sees; hidden parts are reported, never added.

Operators follow Megatron-LM's layer (source: Shoeybi et al. 2019 section 3 for tensor parallelism;
Korthikanti et al. 2022 section 4 for sequence parallelism; Liu et al. 2023, Ring Attention, for context
parallelism; Shazeer et al. 2017 and Megatron-LM core/transformer/moe for experts; DeepSeek-V2 section 2.1
for latent attention).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from milpplan.problem.model import (
    Attention,
    DenseMlp,
    GroupedQueryAttention,
    LatentAttention,
    LayerRun,
    MixtureOfExperts,
)
from milpplan.problem.plan import TP_OVERLAPS
from milpplan.problem.problem import Problem
from milpplan.simulation.layers import kernels
from milpplan.simulation.layers.cost_models import replaced_seconds
from milpplan.simulation.layers.kernels import Mask, Numbers, average_keys
from milpplan.simulation.layers.terms import EXPOSED, ONCE, Part, Phase, Tally
from milpplan.simulation.layout_columns import BoolArray, FloatArray, LayoutColumns
from milpplan.simulation.network import collectives, placement
from milpplan.simulation.network.collectives import call_s
from milpplan.simulation.network.domains import neighbours_share

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


def layer_seconds(
    problem: Problem, kind: LayerRun, columns: LayoutColumns, core: CoreSeconds | None = None
) -> FloatArray:
    """Seconds of one layer of ``kind``: array [Part, Phase, num_layouts]; ``core`` as in ``Shard``.

    ``Phase.SELECTIVE`` and ``Phase.FULL`` are what recomputing the layer adds to its backward. ``Phase.WEIGHT``
    holds the products of weight gradients where the schedule runs them by themselves, else nothing: they are in
    the backward. ZeRO parts are added by ``milpplan.simulation.layout_costs``, because they depend on the
    data-parallel group.
    """
    return replaced_seconds(problem, kind, columns, layer_tally(problem, kind, columns, core).seconds)


def layer_tally(
    problem: Problem, kind: LayerRun, columns: LayoutColumns, core: CoreSeconds | None = None
) -> Tally:
    """``layer_seconds`` with the collectives that the layer calls."""
    shard = Shard.of(problem, columns, core)
    tally = Tally.empty(columns.split_backward)
    _norms_and_residuals(shard, kind, tally)
    if isinstance(kind.attention, LatentAttention):
        _latent_attention(shard, kind.attention, tally)
    else:
        _grouped_query_attention(shard, kind.attention, tally)
    if isinstance(kind.mlp, MixtureOfExperts):
        _mixture_of_experts(shard, kind.mlp, tally)
    else:
        _dense_mlp(shard, kind.mlp, tally)
    if has_operator_checkpoints(problem, kind):
        _replayed_products(shard, kind, tally)
    _wait_for_launches(shard, tally)
    # A full recompute replays the whole forward, its communication included (Megatron-LM
    # core/tensor_parallel/random.py).
    tally.seconds[:, Phase.FULL] = tally.seconds[:, Phase.FORWARD]
    if problem.inference:
        tally.seconds[:, Phase.BACKWARD :] = 0.0
    return tally


def _wait_for_launches(shard: Shard, tally: Tally) -> None:
    """What the device waits for the host where a layer's kernels are shorter than their launches.

    A forward takes at least layer_launch_s + what its collectives take to call (``calls.call_s``), a backward
    twice the first and its own collectives, of which weight gradients that run by themselves take one.
    Communication counts as busy: a wait for launches hides it. Source: nanotron's benchmark sweeps
    (docs/accuracy.md): a layer takes the longer of its kernels and a time that depends neither on the model's
    width nor on the micro-batch.
    """
    for phase in ONCE if tally.any_split else ONCE[:2]:
        host = host_seconds(shard.problem, tally, phase)
        busy = tally.seconds[EXPOSED, phase].sum(axis=0)
        tally.exposed(Part.LAUNCH, phase, np.maximum(host - busy, 0.0))


def host_seconds(problem: Problem, tally: Tally, phase: Phase) -> FloatArray:
    """What the host needs for the kernels and collectives of a phase of a layer, [num_layouts]."""
    software, apart = problem.hardware.software, tally.split.astype(np.float64)
    times = {Phase.FORWARD: np.ones_like(apart), Phase.BACKWARD: 2.0 - apart, Phase.WEIGHT: apart}
    host = times[phase] * software.layer_launch_s + tally.called_s[phase]
    return np.asarray(host)


def core_shape(attention: Attention, tp: FloatArray) -> tuple[FloatArray, tuple[int, int], int | None]:
    """Heads of a tensor-parallel rank, the sizes of one head's queries and values, and the window of keys."""
    heads = attention.num_attention_heads / tp
    if isinstance(attention, LatentAttention):
        qk_dim = attention.qk_nope_head_dim + attention.qk_rope_head_dim
        return heads, (qk_dim, attention.v_head_dim), None
    return heads, (attention.head_dim, attention.head_dim), attention.sliding_window


def flash_core_s(
    shard: Shard,
    attention: Attention,
    sequence_length: Numbers,
    tokens: Numbers,
    num_kernels: Numbers,
    mask: Mask = "causal",
) -> tuple[FloatArray, FloatArray]:
    """Seconds of flash attention forward and backward on a rank's ``tokens``, all in sequences of one length, with
    the last tiles of ``num_kernels`` kernels. Any shapes that broadcast with the shard's rows.

    FLOPs forward: 2 * tokens * keys * heads * (qk_size + v_size), backward 2.5 times as many (Dao 2023, section
    4.1); to both comes what the last tiles waste in each kernel. Rates are those of causal
    kernels under either mask (full ones were not measured).
    """
    gpu, rate = shard.problem.hardware.accelerator, shard.problem.hardware.software.attention_efficiency
    heads, sizes, window = core_shape(attention, shard.tp)
    chunk = np.asarray(sequence_length) / shard.columns.cp
    tiles = (num_kernels, np.minimum(chunk, np.asarray(sequence_length) if window is None else window))
    keys = average_keys(sequence_length, window, mask)
    flops = kernels.flash_attention_flops(gpu, tokens, keys, heads, sum(sizes), tiles)
    forward = kernels.attention_forward_s(gpu, flops[0] / rate, chunk)
    return forward, kernels.attention_backward_s(gpu, flops[1] / rate, chunk)


def _norms_and_residuals(shard: Shard, kind: LayerRun, tally: Tally) -> None:
    """Norms (read x, write y) are replayed by selective recomputation with flash attention; residual adds
    (with bias and dropout fused) read two tensors and write one."""
    elements = shard.tokens * shard.hidden / shard.sequence_tp
    norm = shard.memory_bound(2 * BF16_BYTES * elements * shard.problem.hardware.software.norm_traffic)
    modules = shard.problem.job.attention_kernel == "flash"
    for _ in range(kind.num_norms):
        tally.compute(norm, 1.5 * norm, selective=modules)
    residual = shard.memory_bound(3 * BF16_BYTES * elements)
    tally.compute(2 * residual, 2 * residual)


def kv_heads_per_rank(attention: GroupedQueryAttention, tp: FloatArray) -> FloatArray:
    """Key/value heads a tensor-parallel rank holds; replicated when there are fewer than tp."""
    return np.maximum(attention.num_key_value_heads / tp, 1.0)


def _grouped_query_attention(shard: Shard, attention: GroupedQueryAttention, tally: Tally) -> None:
    tokens, tp = shard.tokens, shard.tp
    q_width = attention.num_attention_heads * attention.head_dim / tp
    kv_width = 2 * kv_heads_per_rank(attention, tp) * attention.head_dim
    qkv = shard.gemm(tokens, q_width + kv_width, shard.hidden)
    out = shard.gemm(tokens, shard.hidden, q_width)
    rope = shard.memory_bound(2 * BF16_BYTES * tokens * (q_width + kv_width / 2))
    if shard.problem.model.learned_positions:
        rope = np.zeros_like(tokens)
    if attention.qk_norm != "none":
        rope = 2 * rope
    tally.compute(qkv[0] + out[0] + rope, qkv[1] + qkv[2] + out[1] + out[2] + rope, qkv[2] + out[2])
    _linear_pair(shard, tally, (qkv,), out)
    _core_attention(shard, tally, attention, BF16_BYTES * tokens * kv_width)


def has_operator_checkpoints(problem: Problem, kind: LayerRun) -> bool:
    """Whether selective recomputation of the layer goes product by product (``Software.operator_checkpoints``)."""
    known = isinstance(kind.attention, GroupedQueryAttention) and isinstance(kind.mlp, DenseMlp)
    return problem.hardware.software.operator_checkpoints and problem.job.attention_kernel == "flash" and known


def _replayed_products(shard: Shard, kind: LayerRun, tally: Tally) -> None:
    """What operator-wise checkpoints replay beside norms and activation: of the products for queries, keys,
    values, output, gate, up and down every second one, so keys, output and up; rotary positions and a residual
    add. What tensor parallelism gathers again is not in it (lower).

    Source: pytorch/torchtitan torchtitan/parallelisms/parallelize_llama.py (_save_list, "every second mm").
    """
    attention, mlp = kind.attention, kind.mlp
    assert isinstance(attention, GroupedQueryAttention)
    assert isinstance(mlp, DenseMlp)
    tokens, hidden = shard.tokens, shard.hidden
    q_width = attention.num_attention_heads * attention.head_dim / shard.tp
    kv_width = 2 * kv_heads_per_rank(attention, shard.tp) * attention.head_dim
    keys = shard.gemm(tokens, q_width + kv_width, hidden)[0] * (kv_width / 2 / (q_width + kv_width))
    rope = shard.memory_bound(2 * BF16_BYTES * tokens * (q_width + kv_width / 2))
    residual = shard.memory_bound(3 * BF16_BYTES * tokens * hidden / shard.sequence_tp)
    tally.replayed(keys + shard.gemm(tokens, hidden, q_width)[0] + rope + residual)
    if mlp.gated:
        tally.replayed(shard.gemm(tokens, 2 * mlp.intermediate_size / shard.tp, hidden)[0] / 2)


def _latent_attention(shard: Shard, attention: LatentAttention, tally: Tally) -> None:
    tokens, heads = shard.tokens, attention.num_attention_heads / shard.tp
    qk_dim = attention.qk_nope_head_dim + attention.qk_rope_head_dim
    local = tokens / shard.sequence_tp
    if attention.q_lora_rank is None:
        none = np.zeros_like(tokens)
        q_down = Product(none, none, none, (local, 0.0, shard.hidden))
        q_up = shard.gemm(tokens, heads * qk_dim, shard.hidden)
    else:
        q_down = shard.gemm(local, attention.q_lora_rank, shard.hidden)
        q_up = shard.gemm(tokens, heads * qk_dim, attention.q_lora_rank)
    kv_down = shard.gemm(local, attention.kv_lora_rank + attention.qk_rope_head_dim, shard.hidden)
    kv_width = heads * (attention.qk_nope_head_dim + attention.v_head_dim)
    kv_up = shard.gemm(tokens, kv_width, attention.kv_lora_rank)
    out = shard.gemm(tokens, shard.hidden, heads * attention.v_head_dim)
    rope = shard.memory_bound(2 * BF16_BYTES * tokens * heads * qk_dim * 2)
    tally.compute(
        q_down[0] + kv_down[0] + out[0] + rope,
        q_down[1] + q_down[2] + kv_down[1] + kv_down[2] + out[1] + out[2] + rope,
        q_down[2] + kv_down[2] + out[2],
    )
    modules = shard.problem.job.attention_kernel == "flash"
    both = q_up[1] + q_up[2] + kv_up[1] + kv_up[2]
    tally.compute(q_up[0] + kv_up[0], both, q_up[2] + kv_up[2], selective=modules)
    _linear_pair(shard, tally, (q_up, kv_up), out)
    ring_bytes = BF16_BYTES * tokens * heads * (qk_dim + attention.v_head_dim)
    _core_attention(shard, tally, attention, ring_bytes)


def _core_attention(shard: Shard, tally: Tally, attention: Attention, ring_bytes: FloatArray) -> None:
    """Scores and weighted values, and the ring of key/value blocks among context-parallel ranks.

    The ring sends the next step's block beside the attention of this one.
    """
    job = shard.problem.job
    heads, sizes, _ = core_shape(attention, shard.tp)
    if job.attention_kernel == "flash":
        forward, backward = shard.core or flash_core_s(
            shard, attention, job.sequence_length, shard.tokens, shard.columns.cp
        )
        tally.compute(forward, backward)
        _ring_merges(shard, tally, (heads * sizes[0], heads * sizes[1]), ring_bytes)
    else:
        forward, backward = _unfused_attention(shard, heads, sizes)
        tally.compute(forward, backward, selective=True)
    steps = (shard.columns.cp - 1).astype(np.float64)
    ring = placement.context(shard.columns)
    hardware = shard.problem.hardware
    near = neighbours_share(hardware, ring.size, ring.stride, shard.columns.tp)
    send, send_back = (
        collectives.p2p_s(hardware, size, ring.stride, *near) for size in (ring_bytes, 2 * ring_bytes)
    )
    cover, cover_back = forward / shard.columns.cp, backward / shard.columns.cp
    parts = (Part.CP, Part.CP_HIDDEN)
    share = collectives.processor_fraction(hardware, *ring)
    tally.overlapped(parts, Phase.FORWARD, steps * send, steps * cover, share)
    tally.overlapped(parts, Phase.BACKWARD, steps * send_back, steps * cover_back, share)


def _ring_merges(
    shard: Shard, tally: Tally, widths: tuple[FloatArray, FloatArray], ring_bytes: FloatArray
) -> None:
    """What every further step of the ring adds: a kernel, and sums in fp32 (read the step's part in bf16, read and
    write the sum): of the output forward, of the gradients of queries, keys and values backward.

    Source: Transformer Engine, pytorch/attention/dot_product_attention/context_parallel.py
    (AttnFuncWithCPAndKVP2P).
    """
    gpu = shard.problem.hardware.accelerator
    sums = BF16_BYTES + 2 * FP32_BYTES
    steps = shard.columns.cp - 1
    merge = shard.memory_bound(sums * shard.tokens * widths[1])
    merge_back = shard.memory_bound(sums * (shard.tokens * widths[0] + ring_bytes / BF16_BYTES))
    tally.compute(steps * (merge + gpu.kernel_latency_s), steps * (merge_back + gpu.kernel_latency_s))


def _unfused_attention(shard: Shard, heads: FloatArray, sizes: tuple[int, int]) -> tuple[FloatArray, FloatArray]:
    """Scores, softmax (with dropout) and values as separate kernels over the full s x s matrix of every head."""
    model, job = shard.problem.model, shard.problem.job
    scores = shard.tokens * job.sequence_length * heads
    keys = float(job.sequence_length)
    gpu = shard.problem.hardware.accelerator
    count, aligned = shard.tokens * heads / keys, all(size % 8 == 0 for size in (*sizes, job.sequence_length))
    products = kernels.batched_small_gemm_s(gpu, keys, keys, sizes[0], count, aligned)
    products = products + kernels.batched_small_gemm_s(gpu, keys, sizes[1], keys, count, aligned)
    softmax = shard.memory_bound(scores * (2 * BF16_BYTES + (5 if model.drops_scores else 0)))
    return products + softmax, 2 * products + 1.5 * softmax


def _dense_mlp(shard: Shard, mlp: DenseMlp, tally: Tally) -> None:
    matrices = 2 if mlp.gated else 1
    width = mlp.intermediate_size / shard.tp
    up = shard.gemm(shard.tokens, matrices * width, shard.hidden)
    down = shard.gemm(shard.tokens, shard.hidden, width)
    activation = shard.memory_bound(BF16_BYTES * shard.tokens * width * (matrices + 1))
    activation_back = shard.memory_bound(BF16_BYTES * shard.tokens * width * (2 * matrices + 1))
    tally.compute(up[0] + down[0], up[1] + up[2] + down[1] + down[2], up[2] + down[2])
    tally.compute(activation, activation_back, selective=shard.problem.job.attention_kernel == "flash")
    _linear_pair(shard, tally, (up,), down)


def routed_rows(shard: Shard, moe: MixtureOfExperts) -> FloatArray:
    """Token copies an expert shard works on, balanced routing: etp * (tokens / tp) * top-k.

    Not divided by ep: expert parallelism is carved out of data parallelism, so each rank receives on average
    as many copies as it sends.
    """
    return shard.columns.etp * shard.tokens / shard.tp * moe.num_experts_per_tok


def _mixture_of_experts(shard: Shard, moe: MixtureOfExperts, tally: Tally) -> None:
    hardware, gpu = shard.problem.hardware, shard.problem.hardware.accelerator
    columns, hidden, precision = shard.columns, shard.hidden, shard.problem.job.precision
    local = shard.tokens / shard.tp
    rows = routed_rows(shard, moe)
    experts = moe.num_experts / columns.ep
    per_expert = rows / experts
    matrices = 2 if moe.gated else 1
    width = moe.intermediate_size / columns.etp.astype(np.float64)
    router = kernels.gemm_s(gpu, "bf16", local, float(moe.num_experts), float(hidden))
    permute = shard.memory_bound(4 * BF16_BYTES * local * moe.num_experts_per_tok * hidden)
    # What arrives is sorted by source; a rank with several experts sorts it by expert, and back afterwards.
    permute = permute + np.where(
        (columns.ep > 1) & (experts > 1), shard.memory_bound(4 * BF16_BYTES * rows * hidden), 0.0
    )
    tally.compute(router + permute, 2 * router + permute, router)

    def grouped(m: FloatArray | float, n: FloatArray | float, k: FloatArray | float) -> FloatArray:
        return np.asarray(kernels.batched_gemm_s(gpu, precision, m, n, k, experts))

    forward = grouped(per_expert, matrices * width, hidden) + grouped(per_expert, hidden, width)

    def summed(n: FloatArray | float, k: FloatArray | float) -> FloatArray:
        sums = shard.grad_bytes, shard.fused_sums
        return np.asarray(kernels.weight_gradient_s(gpu, precision, n, k, per_expert, experts, *sums))

    backward = grouped(per_expert, hidden, matrices * width) + grouped(per_expert, width, hidden)
    weight = (summed(matrices * width, hidden), summed(hidden, width))
    backward = backward + weight[0] + weight[1]
    if precision == "fp8":
        cast = shard.memory_bound(4.0 * rows * (hidden + width))
        forward, backward = forward + cast, backward + cast
    tally.compute(forward, backward, weight[0] + weight[1])
    activation = shard.memory_bound(BF16_BYTES * rows * width * (matrices + 1))
    activation_back = shard.memory_bound(BF16_BYTES * rows * width * (2 * matrices + 1))
    tally.compute(activation, activation_back, selective=shard.problem.job.attention_kernel == "flash")
    sent = BF16_BYTES * local * moe.num_experts_per_tok * hidden / hardware.software.dispatch_efficiency
    copies = float(moe.num_experts_per_tok) if hardware.software.deduplicated_dispatch else None
    spread, shared = placement.expert(columns), placement.expert_tensor(columns)
    dispatch = collectives.all_to_all_s(hardware, sent, spread.size, spread.stride, copies)
    inside = collectives.all_gather_s(hardware, sent * columns.etp, *shared)
    outside = collectives.reduce_scatter_s(hardware, sent * columns.etp, *shared)
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        tally.exposed(Part.EP, phase, 2 * dispatch + inside + outside)
    tally.calls(2, 2, call_s(hardware, *spread) + call_s(hardware, *shared))
    if moe.shared_intermediate_size:
        _dense_mlp(shard, DenseMlp(intermediate_size=moe.shared_intermediate_size, gated=moe.gated), tally)


_NO_TILES, _PIPELINED_TILES = TP_OVERLAPS.index("none"), TP_OVERLAPS.index("pipelined")
_TP_PARTS = (Part.TP, Part.TP_HIDDEN)


def _linear_pair(shard: Shard, tally: Tally, columns: Sequence[Product], row: Product) -> None:
    """Tensor-parallel communication of column-parallel linear layers followed by a row-parallel one.

    With sequence parallelism: all-gather before, reduce-scatter after; backward: the output gradient is
    all-gathered (exposed), the input is gathered again beside the input-gradient product (unless it was kept) and
    the input gradient is reduce-scattered beside the weight-gradient product. Without: one all-reduce after, and
    in the backward one all-reduce beside the weight-gradient product. Where weight gradients run by themselves,
    nothing is left to hide the input gradient's reduction, and the input is gathered beside the weight gradients
    (sail-sg/zero-bubble-pipeline-parallelism, core/tensor_parallel/layers.py).
    """
    hardware, sp = shard.problem.hardware, shard.columns.sequence_parallel
    message = BF16_BYTES * shard.tokens * shard.hidden
    group = placement.tensor(shard.columns)
    gather = collectives.all_gather_s(hardware, shard.gathered_bytes, *group)
    scatter = collectives.reduce_scatter_s(hardware, message, *group)
    reduce = collectives.all_reduce_s(hardware, message, *group)
    none = np.zeros_like(shard.tokens)
    share = collectives.processor_fraction(hardware, *group)
    again = shard.columns.gather_again
    late = np.where(sp & again, 1, 0)
    tally.calls(np.where(sp, 2, 1), np.where(sp, 2, 1) + late, call_s(hardware, *group), weight=late)
    if shard.columns.any_of("tp_overlap"):
        in_tiles = _Tiles(shard, tally, share)
        in_tiles.beside(Phase.FORWARD, np.where(sp, gather, none), columns)
        in_tiles.beside(Phase.FORWARD, np.where(sp, scatter, reduce), (row,))
        in_tiles.beside(Phase.BACKWARD, np.where(sp, gather, none), (row,))
    else:
        tally.exposed(Part.TP, Phase.FORWARD, np.where(sp, gather + scatter, reduce))
        tally.exposed(Part.TP, Phase.BACKWARD, np.where(sp, gather, none))
    dgrad, wgrad = columns[0].dgrad, columns[0].wgrad
    for other in columns[1:]:
        dgrad, wgrad = dgrad + other.dgrad, wgrad + other.wgrad
    beside = 1.0 if hardware.software.overlap_tensor_parallel else 0.0
    second, reduced = np.where(sp & again, gather, none), np.where(sp, scatter, reduce)
    if tally.any_split:
        tally.exposed(Part.TP, Phase.BACKWARD, np.where(tally.split, reduced, 0.0))
        tally.overlapped(_TP_PARTS, Phase.WEIGHT, np.where(tally.split, second, 0.0), beside * wgrad, share)
        second, reduced = (np.where(tally.split, 0.0, seconds) for seconds in (second, reduced))
    tally.overlapped(_TP_PARTS, Phase.BACKWARD, second, beside * dgrad, share)
    tally.overlapped(_TP_PARTS, Phase.BACKWARD, reduced, beside * wgrad, share)
    if shard.problem.job.attention_kernel == "flash":
        # Selective recomputation drops the inputs: what was to be kept gathered is gathered again after all.
        replayed = np.where(sp & ~again, gather, none)
        tally.overlapped(_TP_PARTS, Phase.SELECTIVE, replayed, beside * dgrad, share)


class _Tiles:
    """Communication in tiles beside the tiles of its own product, where a layout asks for it."""

    def __init__(self, shard: Shard, tally: Tally, share: FloatArray) -> None:
        self.shard, self.tally, self.share = shard, tally, share
        self.chosen: BoolArray = (shard.columns.tp_overlap != _NO_TILES) & (shard.columns.tp > 1)
        self.tiles = np.where(self.chosen, shard.tp, 1.0)

    def beside(self, phase: Phase, seconds: FloatArray, products: Sequence[Product]) -> None:
        """Add communication of ``seconds`` beside its products (forwards, or input gradients backward), and what
        cutting these into tiles adds to them."""
        forward = phase == Phase.FORWARD
        whole, tile = np.zeros_like(seconds), np.zeros_like(seconds)
        for product in products:
            tokens, width, inner = product.size
            part = self.shard.gemm(tokens / self.tiles, width, inner)
            whole = whole + (product.forward if forward else product.dgrad)
            tile = tile + (part.forward if forward else part.dgrad)
        added = np.where(self.chosen & (seconds > 0), self.tiles * tile - whole, 0.0)
        self.tally.seconds[Part.COMPUTE, phase] += added
        pipelined = self.shard.columns.tp_overlap == _PIPELINED_TILES
        exposed, hidden = collectives.tiled_overlap_s(seconds, whole + added, self.tiles, self.share, pipelined)
        self.tally.seconds[Part.TP, phase] += exposed
        self.tally.seconds[Part.TP_HIDDEN, phase] += hidden
