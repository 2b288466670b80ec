"""Sizes, FLOPs and time of linear recurrences, computed by a scan over chunks: gated delta net, Kimi delta
attention (KDA), Mamba-2 and lightning attention.

Within a chunk of C tokens the scan multiplies matrices, from chunk to chunk it hands on a state of K x V a head.
Its Triton kernels move more bytes than their products need, and no measured kernel comes near a matrix engine's
rate: the time is that of the bytes and of the chunks that follow one another.

Sources: Yang et al. 2024 (Gated delta networks) section 3; Dao and Gu 2024 (Mamba-2) section 6; the operators of
Megatron-LM@d98e8a64 core/ssm; the kernels of fla-org/flash-linear-attention@bc3b101d ops/gated_delta_rule/chunk.py
and ops/kda (chunk_fwd.py, chunk_bwd.py), and of state-spaces/mamba ops/triton/ssd_combined.py; for KDA Kimi Team
2025 (arXiv 2510.26692) section 3 and AMD-AGI/Primus@46840761 kimi_delta_attention.py; for lightning attention
MiniMax 2025 (arXiv 2501.08313) section 2.2 and OpenNLPLab/lightning-attention@2363947
lightning_attn/ops/triton/lightning_attn2.py.
"""

from __future__ import annotations

import numpy as np

from milpplan.problem import Accelerator, LinearRecurrence
from milpplan.simulation import FloatArray
from milpplan.simulation.layers.kernels import BF16_BYTES, Numbers
from milpplan.simulation.layers.parameter_counts import direct_width, scan_flops, widths
from milpplan.simulation.layers.shard import Part, Phase, Shard, Tally, linear_pair
from milpplan.simulation.network import call_s, collectives, placement

SCAN_MEMORY_FRACTION = 0.5
"""Share of the rate of memory-bound operators that the kernels of a scan reach.

Fitted with ``CHUNK_S`` to 1,800 forwards of gated delta nets on H100, B200 and GB200 with 4,096 tokens and more
(ai-dynamo/aiconfigurator@095f58a51, SGLang 0.5.14 and TensorRT-LLM 1.3.0rc20, copies of flash-linear-attention's
kernels): medians by table from 8 % too fast to 32 % too slow, 79 % too slow for TensorRT-LLM on H100. Not fitted
to KDA, whose 720 forwards there (SGLang 0.5.16; H100, H200, B200, GB200, GB300) have medians from 19 % too fast to
38 % too slow. Neither backwards nor the training kernels of Mamba-2 and lightning attention were measured.
"""
CHUNK_S = 2e-6
"""Seconds from one chunk's state to the next, a head's chunks following one another; fitted as above."""


SCAN_TENSORS = {
    "delta": ((7, 6, 2, 2), (20, 15, 2, 4)),
    "kda": ((21, 6, 4, 2), (50, 15, 11, 4)),
    "ssm": ((4, 5, 4, 6), (7, 14, 6, 18)),
    "lightning": ((2, 2, 0, 0), (11, 9, 0, 0)),
}
"""Keys, values, matrices of a chunk and states that a scan moves, forward and backward (``scan_bytes``)."""


def scan_bytes(mixer: LinearRecurrence) -> tuple[float, float]:
    """Count the bytes a token that the kernels of a scan read and write, forward and backward, over all heads.

    Of keys, values, matrices of a chunk (C) and states (K V / C), each tensor that a kernel reads or writes once:

        delta rule   7 K + 6 V + 2 C + 2 K V / C     backward  20 K + 15 V + 2 C + 4 K V / C
        KDA         21 K + 6 V + 4 C + 2 K V / C     backward  50 K + 15 V + 11 C + 4 K V / C
        Mamba-2      4 N/r + 5 P + 4 C/r + 6 N P / C  backward  7 N/r + 14 P + 6 C/r + 18 N P / C
        lightning    2 K + 2 V                        backward  11 K + 9 V

    for every value head, r heads to a group, 2 bytes an element (Mamba-2's states in 4). KDA's decays are as wide
    as keys, in 4 bytes, and most kernels read them. States of lightning attention stay in registers.
    """
    chunk, key, value = mixer.chunk_size, mixer.key_head_dim, mixer.value_head_dim
    share, counts = 1.0, SCAN_TENSORS[mixer.update]
    if mixer.update == "ssm":
        share = mixer.num_key_heads / mixer.num_value_heads
    forward, backward = (
        BF16_BYTES * mixer.num_value_heads * (share * (a * key + c * chunk) + b * value + d * key * value / chunk)
        for a, b, c, d in counts
    )
    return forward, backward


def scan_s(
    gpu: Accelerator, mixer: LinearRecurrence, tokens: Numbers, tp: Numbers, sequence_length: Numbers
) -> tuple[FloatArray, FloatArray]:
    """Time the scan of ``tokens`` tokens with the heads of a tensor-parallel rank, forward and backward.

    max(bytes / (0.5 memory rate), FLOPs / sustained peak) + 2 us for every chunk of a sequence, twice in the
    backward, which computes the states again before their gradients; + kernel latency. 0 without tokens and
    chunks. Shapes broadcast; returns seconds.
    """
    flops_per_s = gpu.bf16.peak_flops_per_s * gpu.bf16.sustained
    rate = SCAN_MEMORY_FRACTION * gpu.memory_rate_bytes_per_s
    share = np.asarray(tokens, dtype=np.float64) / tp
    chunks = np.asarray(sequence_length, dtype=np.float64) / mixer.chunk_size

    def seconds(num_bytes: float, flops: float, passes: int) -> FloatArray:
        work = share * max(num_bytes / rate, flops / flops_per_s) + passes * CHUNK_S * chunks
        return np.where(work == 0, 0.0, work + gpu.kernel_latency_s)

    forward, backward = scan_bytes(mixer)
    return seconds(forward, scan_flops(mixer), 1), seconds(backward, 2 * scan_flops(mixer), 2)


def passes_elements(mixer: LinearRecurrence) -> float:
    """Count the elements a token that the operators between projections and scan read and write forward.

    All but one: the convolution. Delta rule: copies and norms of queries and keys, their copies for every value
    head, copies of values and gate. KDA: norms of queries and keys. Mamba-2: copies of the kernel's input and
    output. Lightning attention, without a convolution: the activation of queries, keys and values, their copies by
    head, and one of the output.
    """
    width = widths(mixer)
    if mixer.update == "lightning":
        return 4.0 * width.convolved + 2 * width.values
    if mixer.update == "kda":
        return 2.0 * width.convolved + 4 * width.keys
    if mixer.update == "delta":
        repeated = mixer.num_value_heads * mixer.key_head_dim
        return 2.0 * width.convolved + 10 * width.keys + 2 * repeated + 4 * width.values
    return 2.0 * width.convolved + 2 * width.projected + 2 * width.values


def kept_elements(mixer: LinearRecurrence) -> float:
    """Count the elements a token that wait for the backward, without the output of the gated norm.

    Delta rule: the projection's output (input of the convolution), copy of the gate, normed queries and keys and
    their copies for every value head, values, a chunk's inverse matrix, output of the scan, gates in fp32.
    KDA: outputs of the projections, normed queries and keys, values, two matrices of a chunk, output of the scan,
    strengths and norms in fp32 (decays are summed again). Mamba-2: the projection's output, and the scan's output
    before and after its gate. Lightning attention: the projection's output, activated queries, keys and values,
    and the scan's output.
    """
    width = widths(mixer)
    if mixer.update == "lightning":
        return float(width.projected + width.convolved + width.values)
    if mixer.update == "ssm":
        return float(width.projected + 2 * width.values)
    heads = mixer.num_value_heads
    if mixer.update == "kda":
        return float(width.projected + 2 * width.keys + 2 * width.values + heads * (2 * mixer.chunk_size + 8))
    copies = 2 * heads * mixer.key_head_dim + heads * (mixer.chunk_size + 6)
    return float(width.projected + 2 * width.keys + 3 * width.values + copies)


def workspace_elements(mixer: LinearRecurrence) -> float:
    """Count the elements a token of the temporary tensors of a scan's backward.

    Delta rule, for every value head: w, dq, dk, dw; u, dv, du; states and their gradients. KDA: decayed queries
    and keys, w, and in fp32 decays and twice the gradients of queries, keys and decays; u, values and twice their
    gradients; gradients of two matrices in fp32; states and their gradients. Mamba-2: the gradients
    of the projection's output and of the scan's, states and their gradients in fp32. Lightning attention: the
    gradients of queries, keys, values and output.
    """
    heads, state = mixer.num_value_heads, mixer.key_head_dim * mixer.value_head_dim / mixer.chunk_size
    if mixer.update == "delta":
        return heads * (4 * mixer.key_head_dim + 3 * mixer.value_head_dim + 2 * state)
    if mixer.update == "kda":
        return heads * (17 * mixer.key_head_dim + 4 * mixer.value_head_dim + 4 * mixer.chunk_size + 2 * state)
    width = widths(mixer)
    if mixer.update == "lightning":
        return float(width.convolved + width.values)
    return width.projected + width.values + 4 * heads * state


def low_rank_bytes(shard: Shard, mixer: LinearRecurrence) -> FloatArray:
    """Size one of the two narrow tensors between the projections of decay and of gate, gathered."""
    return BF16_BYTES * shard.tokens * float(mixer.gate_rank or 0)


def _add_low_rank(shard: Shard, mixer: LinearRecurrence, tally: Tally) -> None:
    """Add the projections of decay and gate through a low rank.

    Every tensor-parallel rank has the first matrix of each, and a part of the second, whose input is gathered
    along the sequence, and its gradient reduced; exposed.
    """
    rank, tokens, hardware = float(mixer.gate_rank or 0), shard.tokens, shard.problem.hardware
    down = shard.gemm(tokens / shard.sequence_tp, rank, shard.hidden, {})
    channels = mixer.num_value_heads * mixer.key_head_dim
    for width in (channels, widths(mixer).values):
        up = shard.gemm(tokens, width / shard.tp, rank, {})
        weight = down.wgrad + up.wgrad
        tally.compute(down.forward + up.forward, down.dgrad + up.dgrad + weight, weight)
    sp, group = shard.columns.sequence_parallel, placement.tensor(shard.columns)
    size = low_rank_bytes(shard, mixer)
    gather = collectives.all_gather_s(hardware, size, *group)
    scatter = collectives.reduce_scatter_s(hardware, size, *group)
    reduce = collectives.all_reduce_s(hardware, size, *group)
    tally.exposed(Part.TP, Phase.FORWARD, np.where(sp, 2 * gather, 0.0))
    tally.exposed(Part.TP, Phase.BACKWARD, 2 * np.where(sp, gather + scatter, reduce))
    tally.calls(np.where(sp, 2, 0), np.where(sp, 4, 2), call_s(hardware, *group))


def add_recurrence(shard: Shard, mixer: LinearRecurrence, tally: Tally) -> None:
    """Add the projections, convolution, scan and gated norm of a linear recurrence.

    A context-parallel rank exchanges its tokens with all heads for all tokens with its heads, and back after the
    scan, with a copy that orders the tokens. With flash attention, selective recomputation replays the gated norm.

    Source: Megatron-LM@d98e8a64 core/ssm (gated_delta_net/gdn.py, mamba_context_parallel.py).
    """
    hardware, tokens, tp = shard.problem.hardware, shard.tokens, shard.tp
    width = widths(mixer)
    into, values = width.projected / tp, width.values / tp
    projection = shard.gemm(tokens, direct_width(mixer) / tp, shard.hidden, {})
    out = shard.gemm(tokens, shard.hidden, values, {})
    tally.compute(
        projection.forward + out.forward,
        projection.dgrad + projection.wgrad + out.dgrad + out.wgrad,
        projection.wgrad + out.wgrad,
    )
    linear_pair(shard, tally, (projection,), out)
    if mixer.gate_rank is not None:
        _add_low_rank(shard, mixer, tally)
    length = shard.problem.job.sequence_length
    tally.compute(*(shard.core or scan_s(hardware.accelerator, mixer, tokens, tp, length)))
    passes = shard.memory_bound(BF16_BYTES * tokens * passes_elements(mixer) / tp)
    tally.compute(passes, 1.5 * passes)
    norm = shard.memory_bound(3 * BF16_BYTES * tokens * values)
    tally.compute(norm, 1.5 * norm, selective=shard.problem.job.attention_kernel == "flash")
    exchanged = BF16_BYTES * tokens * (into + values)
    order = np.where(shard.columns.cp > 1, shard.memory_bound(2 * exchanged), 0.0)
    tally.compute(order, order)
    group = placement.context(shard.columns)
    for part in (into, values):
        exchange = collectives.all_to_all_s(hardware, BF16_BYTES * tokens * part, group.size, group.stride)
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            tally.exposed(Part.CP, phase, exchange)
    tally.calls(2, 2, call_s(hardware, *group))
