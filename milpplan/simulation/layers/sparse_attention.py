"""Sparse attention of a lightning indexer: FLOPs and traffic of its kernels, bytes that they keep.

An indexer of H heads of size d scores every earlier key, sum over heads of w ReLU(q k), and each query attends to
the k best. Attention then is of one shared head of latent keys (c + rope) and values (c) for all query heads: the
up projections of keys and values are absorbed into queries and outputs. In training the indexer learns the
distribution of the attention over the selected keys, and no gradient leaves it.

Tensor-parallel ranks divide the heads of the attention and copy the indexer: each scores all tokens of the
micro-batch. Context-parallel ranks gather all keys. A layer that takes the keys of the layer before it (GLM-5.2)
has the attention alone; the layer that selects them keeps their positions, which its replay cannot give in time.

Sources: DeepSeek-AI 2025 (DeepSeek-V3.2), section 2.1, equations 1, 2 and 4, its second stage of training;
Megatron-LM d98e8a64, core/transformer/experimental_attention_variant (dsa.py, absorbed_mla.py,
dsa_cudnn_kernels.py) with a fused kernel and the loss of selected keys. No measured run has such layers: index
scores take the rate of dense attention.
"""

from __future__ import annotations

import numpy as np

from milpplan.problem import Accelerator, BlockIndexer, Indexer, LatentAttention
from milpplan.simulation import FloatArray
from milpplan.simulation.layers import kernels
from milpplan.simulation.layers.kernels import BF16_BYTES, Numbers, average_keys
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
    if indexer.takes:
        forward = kernels.attention_forward_s(accelerator, flops[0] / rate, lengths[1])
        return forward, kernels.attention_backward_s(accelerator, flops[1] / rate, lengths[1])
    score_flops = 2 * tokens * indexer.index_n_heads * indexer.index_head_dim
    loss = 2 * tokens * selected * filled * key_width + 3 * score_flops * selected
    traffic = SCORE_BYTES * tokens * (2 * earlier + tiles[1])
    forward = kernels.attention_forward_s(accelerator, (flops[0] + score_flops * earlier) / rate, lengths[1])
    backward = kernels.attention_backward_s(accelerator, (flops[1] + loss) / rate, lengths[1])
    return forward + traffic / accelerator.memory_rate_bytes_per_s, backward


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


def gathered_key_width(attention: LatentAttention) -> int:
    """Count the elements of a token that context-parallel ranks gather: its latent key and its indexer's key."""
    indexer = attention.indexer
    assert indexer is not None
    return attention.kv_lora_rank + attention.qk_rope_head_dim + (0 if indexer.takes else indexer.index_head_dim)


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
    keys = BF16_BYTES * tokens * cp * gathered_key_width(attention)
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
