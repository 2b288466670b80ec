"""Sparse attention of a lightning indexer: FLOPs and traffic of its kernels, bytes that they keep.

An indexer of H heads of size d scores every earlier key, sum over heads of w ReLU(q k), and each query attends to
the k best. Attention then is of one shared head of latent keys (c + rope) and values (c) for all query heads: the
up projections of keys and values are absorbed into queries and outputs. In training the indexer learns the
distribution of the attention over the selected keys, and no gradient leaves it.

Tensor-parallel ranks divide the heads of the attention and copy the indexer: each scores all tokens of the
micro-batch. Context-parallel ranks gather all keys. A layer that takes the keys of the layer before it (GLM-5.2)
has the attention alone; the layer that selects them keeps their positions, which its replay cannot give in time.

Attention to compressed keys (DeepSeek-V4) selects of them in this way, or attends to all. Its one head of keys is
that of values too, and no rank has a part of it: tensor parallelism is refused. Context-parallel ranks have
contiguous parts of a sequence. Each receives the hidden states before its own that a window or a compression
reaches, and all gather the compressed keys. All wait for the last rank, whose queries have the most of them.

Context-parallel ranks of block-sparse attention (MiniMax-M3) have two pieces of a sequence each and gather keys,
values and keys of the index branch; the gradients of gathered keys and values are summed on all ranks.

Sources: DeepSeek-AI 2025 (DeepSeek-V3.2), section 2.1, equations 1, 2 and 4, its second stage of training;
Megatron-LM d98e8a64, core/transformer/experimental_attention_variant (dsa.py, absorbed_mla.py,
dsa_cudnn_kernels.py) with a fused kernel and the loss of selected keys; DeepSeek-AI 2026 (DeepSeek-V4, arXiv
2606.19348), section 2.3, Megatron-LM 009276bb, deepseek_v4_hybrid_attention.py, and csa_utils/cp_utils.py of
050d8e96 (exchange_cp_boundary_hidden); NeMo Automodel 36044ad3, components/models, deepseek_v4/cp.py and layers.py
(the same gathers), minimax_m3_vl/cp_sparse_attn.py. No measured run has such layers: index scores take the rate of
dense attention.
"""

from __future__ import annotations

import numpy as np

from milpplan.problem import (
    Accelerator,
    BlockIndexer,
    CompressedAttention,
    GroupedQueryAttention,
    Indexer,
    LatentAttention,
)
from milpplan.problem.model import Attention
from milpplan.simulation import FloatArray
from milpplan.simulation.layers import kernels
from milpplan.simulation.layers.kernels import BF16_BYTES, Numbers, average_keys
from milpplan.simulation.layers.shard import CoreSeconds, Part, Phase, Shard, Tally, key_value_widths
from milpplan.simulation.network import call_s, collectives, placement
from milpplan.units import GIB

HEAD_TILE = 64
"""Query heads of a kernel's tile, to which fewer are padded. Source: Megatron-LM d98e8a64,
dsa_cudnn_kernels.py, ``_flash_mla_head_padding`` (FlashMLA's sparse kernel)."""
SCORE_BYTES = 4
"""Bytes of an index score and of a selected position."""
CHUNK_BYTES = 3 * GIB
"""Maximum bytes of a chunk of index scores: 1 GiB of scores and 2 GiB in which the selection works. Source:
Megatron-LM d98e8a64, dsa_cudnn_kernels.py (``_INDEXER_SCORE_CHUNK_MAX_BYTES``,
``_TOPK_WRAPPER_MAX_SCRATCH_BYTES``)."""
CHUNK_BYTES_PER_SCORE = 12
"""Bytes of a score in such a chunk."""


def selected_keys(indexer: Indexer, sequence_length: Numbers) -> FloatArray:
    """Return the keys of the longest selection, min(k, s)."""
    return np.minimum(np.asarray(sequence_length, dtype=np.float64), indexer.index_topk)


def sparse_core_s(
    accelerator: Accelerator,
    rate: float,
    attention: LatentAttention,
    heads: Numbers,
    lengths: tuple[Numbers, Numbers],
    tokens: Numbers,
    num_kernels: Numbers,
) -> tuple[FloatArray, FloatArray]:
    """Time index scores, selection, attention to the selected keys and the indexer's loss on a rank's tokens.

    Of u tokens, with K the mean number of earlier keys, k' the mean of min(earlier keys, k), A heads, padded:

        forward     2 u K H d + 2 u k' A (2 c + rope) FLOPs + last tile;  8 u K + 4 u min(k, s) bytes
        backward    2.5 times the attention + last tile;  2 u k' A (c + rope) of the loss's target and
                    6 u k' H d of the scores, read again, and their two gradients

    Frameworks compute the loss and its gradients in the forward that keeps activations, which is the same time.

    Args:
        accelerator: accelerator with the rates of flash attention.
        rate: factor of these rates.
        attention: attention with an indexer.
        heads: query heads of a rank.
        lengths: tokens of a sequence, and of its part on a rank, which sets the rate.
        tokens: tokens of a rank.
        num_kernels: number of kernels that lose last tiles, at most 1 here.

    Returns:
        Seconds forward and backward, in the broadcast shape.
    """
    indexer = attention.indexer
    assert indexer is not None
    tokens = np.asarray(tokens, dtype=np.float64)
    filled = np.ceil(np.asarray(heads) / HEAD_TILE) * HEAD_TILE
    earlier, selected = average_keys(lengths[0], None), average_keys(lengths[0], indexer.index_topk)
    tiles = np.minimum(num_kernels, 1), selected_keys(indexer, lengths[0])
    key_width = attention.kv_lora_rank + attention.qk_rope_head_dim
    flops = kernels.flash_attention_flops(
        accelerator, tokens, selected, filled, key_width + attention.kv_lora_rank, tiles
    )
    scored = None if indexer.takes else (earlier, selected, tiles[1])
    return _selected_s(accelerator, rate, flops, indexer, scored, (tokens, filled * key_width, lengths[1]))


def _selected_s(
    accelerator: Accelerator,
    rate: float,
    flops: tuple[FloatArray, FloatArray],
    indexer: Indexer | None,
    scored: tuple[FloatArray, FloatArray, FloatArray] | None,
    sizes: tuple[FloatArray, FloatArray | float, Numbers],
) -> tuple[FloatArray, FloatArray]:
    """Time attention of ``flops`` forward and backward with the scores, selection and loss of an indexer, if any.

    Args:
        accelerator: accelerator with the rates of flash attention.
        rate: factor of these rates.
        flops: of the attention.
        indexer: indexer of the layer.
        scored: mean number of scored keys of a query, of selected keys, and their maximum; None: no indexer works.
        sizes: tokens, width of all heads' keys, and the length that sets the rate.

    Returns:
        Seconds forward and backward.
    """
    tokens, width, length = sizes
    traffic: FloatArray | float = 0.0
    if indexer is not None and scored is not None:
        score_flops = 2 * tokens * indexer.index_n_heads * indexer.index_head_dim
        loss = 2 * tokens * scored[1] * width + 3 * score_flops * scored[1]
        traffic = SCORE_BYTES * tokens * (2 * scored[0] + scored[2])
        flops = flops[0] + score_flops * scored[0], flops[1] + loss
    forward = kernels.attention_forward_s(accelerator, flops[0] / rate, length)
    backward = kernels.attention_backward_s(accelerator, flops[1] / rate, length)
    return np.asarray(forward + traffic / accelerator.memory_rate_bytes_per_s), backward


def latest_keys(sequence_length: Numbers, limit: int | None, cp: Numbers) -> FloatArray:
    """Average the number of keys, at most ``limit``, of the queries in the last of cp equal parts of a sequence.

    The mean over all parts is A(s), so that of the last is cp A(s) - (cp - 1) A(s - s / cp): s (1 - 1 / (2 cp))
    without a limit.
    """
    length, parts = np.asarray(sequence_length, dtype=np.float64), np.asarray(cp, dtype=np.float64)
    before = np.where(parts > 1, length - length / parts, length)
    return np.asarray(parts * average_keys(length, limit) - (parts - 1) * average_keys(before, limit))


def compressed_keys(
    attention: CompressedAttention, sequence_length: Numbers, cp: Numbers = 1
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Count compressed keys: the mean before a query, the mean that it attends to, and their maximum.

    With blocks of m tokens and a selection of k: s / (2 m), the mean of min(earlier keys, k), and min(s / m, k),
    of the queries of the last of cp ranks. A key stands for whole blocks before a query, and the means are at most
    half a key too many: an upper bound.
    """
    if attention.compress_rate is None:
        zeros = np.zeros_like(np.asarray(sequence_length, dtype=np.float64))
        return zeros, zeros, zeros
    keys, indexer = np.asarray(sequence_length, dtype=np.float64) / attention.compress_rate, attention.indexer
    earlier = latest_keys(keys, None, cp)
    if indexer is None:
        return earlier, earlier, keys
    return earlier, latest_keys(keys, indexer.index_topk, cp), selected_keys(indexer, keys)


def compressed_core_s(
    accelerator: Accelerator,
    rate: float,
    attention: CompressedAttention,
    lengths: tuple[Numbers, Numbers],
    tokens: Numbers,
    num_kernels: Numbers,
) -> tuple[FloatArray, FloatArray]:
    """Time attention to a window and to compressed keys on the last rank, with an indexer's work as in
    ``sparse_core_s``.

    2 u (w + k') A 2 d FLOPs forward + last tile, with A heads, padded, of width d, and w and k' the mean numbers
    of keys of the window and of compressed keys that a query attends to.

    Args:
        accelerator: accelerator with the rates of flash attention.
        rate: factor of these rates.
        attention: attention to compressed keys.
        lengths: tokens of a sequence, and of its part on a rank, which sets the rate.
        tokens: tokens of a rank.
        num_kernels: number of kernels that lose last tiles, at most 1 here.

    Returns:
        Seconds forward and backward, in the broadcast shape.
    """
    tokens, cp = np.asarray(tokens, dtype=np.float64), np.asarray(lengths[0]) / lengths[1]
    filled = np.ceil(attention.num_attention_heads / HEAD_TILE) * HEAD_TILE
    earlier, chosen, most = compressed_keys(attention, lengths[0], cp)
    attended = chosen + latest_keys(lengths[0], attention.sliding_window, cp)
    tiles = np.minimum(num_kernels, 1), most + np.minimum(lengths[0], attention.sliding_window)
    flops = kernels.flash_attention_flops(accelerator, tokens, attended, filled, 2 * attention.head_dim, tiles)
    sizes = tokens, filled * attention.head_dim, lengths[1]
    return _selected_s(accelerator, rate, flops, attention.indexer, (earlier, chosen, most), sizes)


def add_compressed_attention(
    shard: Shard, attention: CompressedAttention, tally: Tally, core: CoreSeconds
) -> None:
    """Add the products, compressions, norms and rotary positions of attention to compressed keys, and its core.

    Bytes of u tokens: 4 u (A d + d) for norms and rotary positions of queries and key, which the kernel of the
    attention takes off its output; 4 n u d + 2 u d / m for a compression of n series to keys of width d in one
    kernel (Megatron-LM's csa_utils/fused_compressor.py), 8 n u d + 2 u d / m backward. First projections of groups
    are one launch in bf16. Selective recomputation replays the queries. The indexer's inputs need no gradient.

    Args:
        shard: share of the micro-batch.
        attention: attention of the layer.
        tally: sum to add to.
        core: seconds of the attention forward and backward.
    """
    tokens, hidden, gpu = shard.tokens, float(shard.hidden), shard.problem.hardware.accelerator
    size, heads = float(attention.head_dim), float(attention.num_attention_heads)
    rank, groups, width = float(attention.q_lora_rank), float(attention.o_groups), float(attention.o_lora_rank)
    series, rate = attention.series, attention.compress_rate or 1
    sizes = [(rank, hidden), (size, hidden), (hidden, groups * width)]
    sizes += [(2 * series * size, hidden)] * (series > 0)
    for outputs, inputs in sizes:
        product = shard.gemm(tokens, outputs, inputs, {})
        tally.compute(product.forward, product.dgrad + product.wgrad, product.wgrad)
    up = shard.gemm(tokens, heads * size, rank, {})
    turned = shard.memory_bound(2 * BF16_BYTES * tokens * (heads + 1) * size)
    backward = up.dgrad + up.wgrad + 1.5 * turned
    with tally.module("mla_up_proj"):
        tally.compute(up.forward + turned, backward, up.wgrad, selective=True)
    inner = heads * size / groups
    weight = kernels.weight_gradient_s(
        gpu, "bf16", width, inner, tokens, groups, shard.grad_bytes, shard.fused_sums
    )
    grouped = kernels.gemm_s(gpu, "bf16", tokens, width, inner, groups)
    tally.compute(grouped, kernels.gemm_s(gpu, "bf16", tokens, inner, width, groups) + weight, weight)
    indexer = attention.indexer
    for narrow in [size] * (series > 0) + ([float(indexer.index_head_dim)] if indexer else []):
        read, written = 2 * series * narrow * tokens, narrow * tokens / rate
        forward_s, backward_s = (BF16_BYTES * (times * read + written) for times in (1, 2))
        tally.compute(shard.memory_bound(forward_s), shard.memory_bound(backward_s))
    if indexer is not None:
        count, narrow = float(indexer.index_n_heads), float(indexer.index_head_dim)
        # Rotary positions, and the Hadamard rotation of queries.
        passes = shard.memory_bound(4 * BF16_BYTES * tokens * count * narrow)
        tally.compute(passes, passes)
        for outputs, inputs in ((count * narrow, rank), (2 * series * narrow, hidden), (count, hidden)):
            product = shard.gemm(tokens, outputs, inputs, {})
            tally.compute(product.forward, product.wgrad, product.wgrad)
    tally.compute(*core)


def compressed_kept_bytes(shard: Shard, attention: CompressedAttention) -> tuple[FloatArray, FloatArray]:
    """Count the bytes that attention to compressed keys keeps, and those that selective recomputation drops.

        dropped     4 u A d queries before their norm and after it
        kept        4 u (rq + d) query of low rank and key, before their norms and after; 4 n u d values and gates
                    of n series, 4 u d / m compressed keys; 2 u A d outputs, 4 u A statistics, 2 u g ro input of
                    the last product, quantized a copy; 4 u min(k, s / m) positions, 2 u (H (d' + 1) + 2 n d')
                    gradients of the indexer's queries, weights, values and gates; 2 u (cp - 1) (d + d') / m
                    gathered keys of other ranks

    Args:
        shard: share of the micro-batch.
        attention: attention of the layer.
    """
    tokens, size, heads = shard.tokens, attention.head_dim, attention.num_attention_heads
    dropped = 2 * BF16_BYTES * tokens * heads * size
    elements = 2.0 * (attention.q_lora_rank + size) + 2 * attention.series * size + heads * size
    if attention.compress_rate is not None:
        elements += 2 * size / attention.compress_rate
    others = (shard.columns.cp - 1) * gathered_widths(attention, shard.tp)[0]
    kept = tokens * (BF16_BYTES * (elements + others) + 4 * heads)
    kept = kept + shard.operand_bytes * tokens * attention.o_groups * attention.o_lora_rank
    if attention.indexer is not None:
        chosen = compressed_keys(attention, shard.problem.job.sequence_length)[2]
        kept = kept + tokens * (SCORE_BYTES * chosen + BF16_BYTES * selecting_width(attention))
    return np.asarray(kept + dropped), dropped


def selecting_width(attention: CompressedAttention) -> int:
    """Count an indexer's outputs of a token for compressed keys: queries, weights of heads, values and gates."""
    if (indexer := attention.indexer) is None:
        return 0
    return indexer.index_n_heads * (indexer.index_head_dim + 1) + 2 * attention.series * indexer.index_head_dim


def compressed_deferred_bytes(shard: Shard, attention: CompressedAttention) -> FloatArray:
    """Count the bytes that weight gradients of attention to compressed keys wait for: inputs of its products and
    gradients of their outputs, without its own input and the gradient of its output."""
    rank, query = attention.q_lora_rank, attention.num_attention_heads * attention.head_dim
    outputs, size = attention.o_groups * attention.o_lora_rank, attention.head_dim
    inputs = rank + query + 2 * outputs + selecting_width(attention)
    gradients = rank + query + (1 + 2 * attention.series) * size
    return np.asarray(shard.tokens * (BF16_BYTES * inputs + shard.operand_bytes * gradients))


def block_scores_s(
    accelerator: Accelerator, rate: float, blocks: BlockIndexer, lengths: tuple[Numbers, Numbers], tokens: Numbers
) -> FloatArray:
    """Time the scores of an index branch, the best key of each block and the selection of blocks, forward.

    Of u tokens with K earlier keys: 2 u K n d FLOPs; 4 u n (2 K / block + blocks) bytes. No gradient reaches the
    branch: training keeps it (``freeze_minimax_m3_indexer_params``) or teaches it by a loss that is not priced.

    Args:
        accelerator: accelerator with the rates of flash attention.
        rate: factor of these rates.
        blocks: index branch.
        lengths: tokens of a sequence, and of its part on a rank, which sets the rate.
        tokens: tokens of a rank.

    Source: MiniMax 2026 (arXiv 2606.13392), transformers 5.24.0 ``MiniMaxM3VLIndexer``, NeMo Automodel@36044ad3
    components/models/minimax_m3_vl. No measured run has such layers.
    """
    earlier, heads = average_keys(lengths[0], None), blocks.index_n_heads
    flops = 2 * np.asarray(tokens, dtype=np.float64) * earlier * heads * blocks.index_head_dim
    scores = 2 * earlier / blocks.index_block_size + blocks.index_topk_blocks
    traffic = SCORE_BYTES * np.asarray(tokens, dtype=np.float64) * heads * scores
    seconds = kernels.attention_forward_s(accelerator, flops / rate, lengths[1])
    return np.asarray(seconds + traffic / accelerator.memory_rate_bytes_per_s)


def gathers_keys(attention: object) -> bool:
    """Return True if context-parallel ranks gather keys, where a ring serves other attention."""
    if isinstance(attention, GroupedQueryAttention):
        return attention.blocks is not None
    selects = isinstance(attention, LatentAttention) and attention.indexer is not None
    return selects or isinstance(attention, CompressedAttention)


def gathered_widths(
    attention: Attention | CompressedAttention, tp: FloatArray
) -> tuple[FloatArray | float, FloatArray | float]:
    """Count the elements of a token that context-parallel ranks gather, and those with gradients: keys, of grouped
    queries also values, and the keys of an indexer, which need no gradient beside blocks."""
    if isinstance(attention, GroupedQueryAttention):
        assert attention.blocks is not None
        width = key_value_widths(attention, tp)[1]
        return width + attention.blocks.index_head_dim, width
    indexer = attention.indexer
    own = 0 if indexer is None or indexer.takes else indexer.index_head_dim
    if isinstance(attention, LatentAttention):
        keys: float = attention.kv_lora_rank + attention.qk_rope_head_dim + own
    else:
        keys = (attention.head_dim + own) / attention.compress_rate if attention.compress_rate else 0.0
    return keys, keys


def boundary_bytes(shard: Shard, attention: CompressedAttention) -> FloatArray:
    """Count the bytes of the hidden states before its own that a context-parallel rank receives for the window and
    the first compression: 2 b max(w, n m) h."""
    rows = shard.columns.micro_batch_size.astype(np.float64) * attention.boundary_tokens
    return BF16_BYTES * rows * shard.hidden


def add_gathered_keys(shard: Shard, attention: Attention | CompressedAttention, tally: Tally) -> None:
    """Add the gather of keys of context parallelism and the sum of their gradients, which nothing hides; before
    compressed keys also the transfer of ``boundary_bytes``, and back that of their gradients.

    Products of the received hidden states are left out: a lower bound.

    Args:
        shard: share of the micro-batch.
        attention: attention that gathers keys (``gathers_keys``).
        tally: sum to add to.
    """
    hardware, context = shard.problem.hardware, placement.context(shard.columns)
    keys, back = (
        BF16_BYTES * shard.tokens * shard.columns.cp * width for width in gathered_widths(attention, shard.tp)
    )
    summed = collectives.all_reduce_s if attention.type == "gqa" else collectives.reduce_scatter_s
    tally.exposed(Part.CP, Phase.FORWARD, collectives.all_gather_s(hardware, keys, *context))
    tally.exposed(Part.CP, Phase.BACKWARD, summed(hardware, back, *context))
    tally.calls(2, 2, call_s(hardware, *context))
    if isinstance(attention, CompressedAttention):
        near = placement.neighbours_share(hardware, context.size, context.stride, shard.columns.tp)
        send = collectives.p2p_s(hardware, boundary_bytes(shard, attention), context.stride, *near)
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            tally.exposed(Part.CP, phase, np.where(shard.columns.cp > 1, send, 0.0))


def kept_bytes(
    attention: LatentAttention,
    tokens: FloatArray,
    heads: FloatArray,
    sequence_length: int,
    cp: Numbers,
    shared_input: tuple[int, FloatArray],
) -> tuple[FloatArray, FloatArray]:
    """Count the bytes that sparse attention keeps after its latents, and those that selective recomputation drops.

        dropped     2 u A (nope + rope) queries and 2 u A (c + rope) absorbed queries
        kept        2 u A (c + v) outputs, 4 u A statistics, 2 u cp (c + rope + d) gathered keys, 4 u min(k, s)
                    positions, 2 u (H (d + 1) + d) gradients of the indexer's queries and weights and its keys
                    before their norm, 2 u (h + rq) its gathered inputs [tensor and sequence parallelism]

    Args:
        attention: attention with an indexer.
        tokens, heads: tokens and query heads of a rank, [num_layouts].
        sequence_length: tokens of a sequence.
        cp: context-parallel degree.
        shared_input: hidden size, and the divisor of tensors outside the tensor-parallel region.
    """
    indexer = attention.indexer
    assert indexer is not None
    rank, rope = attention.kv_lora_rank, attention.qk_rope_head_dim
    dropped = BF16_BYTES * tokens * heads * (attention.qk_nope_head_dim + rope + rank + rope)
    outputs = tokens * heads * (BF16_BYTES * (rank + attention.v_head_dim) + 4)
    keys = BF16_BYTES * tokens * cp * gathered_widths(attention, np.ones_like(heads))[0]
    positions = position_bytes(indexer, tokens, sequence_length)
    own = BF16_BYTES * tokens * indexer_output_width(indexer)
    inputs = np.where(shared_input[1] > 1, indexer_input_bytes(attention, shared_input[0], tokens), 0.0)
    return np.asarray(dropped + outputs + keys + positions + own + inputs), np.asarray(dropped)


def indexer_output_width(indexer: Indexer) -> int:
    """Count the outputs of the indexer's products for a token: queries, weights of heads and a key."""
    if indexer.takes:
        return 0
    return indexer.index_n_heads * (indexer.index_head_dim + 1) + indexer.index_head_dim


def indexer_input_bytes(attention: LatentAttention, hidden: int, tokens: FloatArray) -> FloatArray:
    """Count the bytes of the indexer's inputs, which sequence parallelism gathers: hidden states and the low-rank
    query."""
    assert attention.indexer is not None
    if attention.indexer.takes:
        return np.zeros_like(tokens)
    return BF16_BYTES * tokens * (hidden + (attention.q_lora_rank or 0))


def position_bytes(indexer: Indexer, tokens: FloatArray, sequence_length: int) -> FloatArray:
    """Count the bytes of the selected positions that a layer keeps."""
    if indexer.takes:
        return np.zeros_like(tokens)
    return SCORE_BYTES * tokens * selected_keys(indexer, sequence_length)


def workspace_bytes(indexer: Indexer, tokens: FloatArray, sequence_length: int) -> FloatArray:
    """Count the bytes of the largest chunk of index scores with the memory of its selection."""
    if indexer.takes:
        return np.zeros_like(tokens)
    return np.minimum(CHUNK_BYTES_PER_SCORE * tokens * sequence_length, CHUNK_BYTES)
