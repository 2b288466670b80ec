"""Bytes one decoder layer keeps alive between its forward and its backward, by recompute mode.

Source: Korthikanti et al. 2022 section 4 (the terms of sbh(34 + 5as/h)), with flash attention (no score
matrix; one float of statistics a query and head), gated MLPs, grouped-query and latent attention, experts and
fp8 (inputs of matrix products saved in one byte). Routed-expert activations are not divided by ep. What kernels in
single operators keep beside this is told by ``Software`` (``milpplan.problem.hardware``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from milpplan.problem.model import DenseMlp, GroupedQueryAttention, LatentAttention, LayerRun, MixtureOfExperts
from milpplan.problem.problem import Problem
from milpplan.simulation.layers.layer_time import (
    BF16_BYTES,
    FP32_BYTES,
    Shard,
    has_operator_checkpoints,
    kv_heads_per_rank,
    routed_rows,
)
from milpplan.simulation.layers.parameters import padded_vocab_size
from milpplan.simulation.layout_columns import FloatArray, LayoutColumns


@dataclass(frozen=True, slots=True)
class LayerActivations:
    """Bytes per micro-batch; arrays of shape [num_layouts].

    ``kept`` without recomputation; ``dropped_selective`` and ``dropped_full``: how much less is kept; the
    same bytes come back for one layer at a time while its backward replays them. ``workspace``: temporary
    gradients of the largest operator.
    """

    kept: FloatArray
    dropped_selective: FloatArray
    dropped_full: FloatArray
    workspace: FloatArray


def layer_activations(problem: Problem, kind: LayerRun, columns: LayoutColumns) -> LayerActivations:
    """Activation bytes of one layer of ``kind`` for one micro-batch on one GPU; of forwards alone the workspace is
    all that a layer would keep (upper)."""
    shard = Shard.of(problem, columns)
    flash = problem.job.attention_kernel == "flash"
    stream = BF16_BYTES * shard.tokens * shard.hidden / shard.sequence_tp
    linear_input = _input_bytes(problem) * shard.tokens * shard.hidden / shard.sequence_tp
    attention_kept, attention_dropped = _attention(shard, kind)
    mlp_kept, mlp_dropped, workspace = _mlp(shard, kind)
    masks = 2 * shard.tokens * shard.hidden / shard.sequence_tp if problem.model.dropout else 0.0
    norms = _norm_copies(shard, kind) + _input_copies(shard, kind)
    # Two residual-stream inputs of the norms; the norm outputs feed the two matrix products.
    kept = 2 * stream + linear_input + attention_kept + mlp_kept + masks + norms
    if problem.inference:
        # Nothing waits for a backward: only the layer at work has its tensors, all at once at most.
        none = np.zeros_like(shard.tokens)
        return LayerActivations(none, none, none, kept)
    if has_operator_checkpoints(problem, kind):
        selective = kept - stream - _kept_products(shard, kind)
    elif flash:
        # Both norms are replayed (Megatron-LM core/transformer/transformer_layer.py, recompute_pre_mlp_layernorm).
        second = 0.0 if isinstance(kind.mlp, MixtureOfExperts) else linear_input
        selective = linear_input + second + attention_dropped + mlp_dropped + norms
    else:
        selective = attention_dropped
    return LayerActivations(kept, selective, kept - stream, workspace + stream)


def _kept_products(shard: Shard, kind: LayerRun) -> FloatArray:
    """Bytes that operator-wise checkpoints keep beside a layer's input: of attention its result, statistics,
    queries and values, of a gated MLP gate and, unless compiled, down, of a plain one up;
    both sums of tensor parallelism.

    2 u (2 q + v) + 4 u a/t + 2 u f/t + 2 u h [gated, unread] + 4 u h/r [t > 1], in 8 bits as in 16.
    Source: as ``milpplan.simulation.layers.layer_time`` says of the products that are replayed.
    """
    attention, mlp, tokens = kind.attention, kind.mlp, shard.tokens
    assert isinstance(attention, GroupedQueryAttention)
    assert isinstance(mlp, DenseMlp)
    heads = attention.num_attention_heads / shard.tp
    widths = (2 * heads + kv_heads_per_rank(attention, shard.tp)) * attention.head_dim
    down = mlp.gated and shard.problem.hardware.software.keeps_unread_results
    widths = widths + mlp.intermediate_size / shard.tp + (shard.hidden if down else 0)
    summed = np.where(shard.tp > 1, 2 * shard.hidden / shard.sequence_tp, 0.0)
    return np.asarray(BF16_BYTES * tokens * (widths + summed) + 4 * tokens * heads)


def _input_bytes(problem: Problem) -> int:
    """Bytes an element of a saved matrix-product input takes."""
    return 1 if problem.job.precision == "fp8" else BF16_BYTES


def _norm_copies(shard: Shard, kind: LayerRun) -> FloatArray:
    """Bytes that both norms of a layer keep beside a fused kernel's, and the gathered part of their outputs where
    the products keep it (the layout does, or always the framework): 2 k u h / r, and 2 u h (1 - 1/r) each. Routed
    experts gather nothing: with them alone there is one such output."""
    software = shard.problem.hardware.software
    elements = shard.tokens * shard.hidden
    copies = 2 * software.norm_kept_bytes * elements / shard.sequence_tp
    dense = isinstance(kind.mlp, DenseMlp) or kind.mlp.shared_intermediate_size > 0
    gathered = (1 + dense) * _input_bytes(shard.problem) * elements * (1 - 1 / shard.sequence_tp)
    kept = ~shard.columns.gather_again | software.gathered_inputs
    return np.asarray(copies + np.where(kept, gathered, 0.0))


def _input_copies(shard: Shard, kind: LayerRun) -> FloatArray:
    """Bytes of the copies of its input that each tensor-parallel product keeps beside the one that all share:
    2 u h / r for two more of queries, keys and values, and for one more of a dense gate and up. Of grouped-query
    attention with its three products apart; others have none here (lower)."""
    if not shard.problem.hardware.software.copied_inputs or isinstance(kind.attention, LatentAttention):
        return np.zeros_like(shard.tokens)
    copies = 2 + (isinstance(kind.mlp, DenseMlp) and kind.mlp.gated)
    size = BF16_BYTES * copies * shard.tokens * shard.hidden / shard.sequence_tp
    return np.asarray(np.where(shard.tp > 1, size, 0.0))


def _attention(shard: Shard, kind: LayerRun) -> tuple[FloatArray, FloatArray]:
    """Bytes kept by attention, and the part that selective recomputation drops."""
    attention, tokens, tp, job = kind.attention, shard.tokens, shard.tp, shard.problem.job
    heads = attention.num_attention_heads / tp
    if isinstance(attention, LatentAttention):
        qk_dim = attention.qk_nope_head_dim + attention.qk_rope_head_dim
        latent = (attention.q_lora_rank or 0) + attention.kv_lora_rank + attention.qk_rope_head_dim
        expanded = BF16_BYTES * tokens * heads * (2 * qk_dim + attention.v_head_dim)
        out = BF16_BYTES * tokens * heads * attention.v_head_dim
        kept = BF16_BYTES * tokens * latent / shard.sequence_tp * 2 + expanded + out
        dropped = expanded
    else:
        q_bytes = BF16_BYTES * tokens * heads * attention.head_dim
        kv_bytes = BF16_BYTES * tokens * 2 * kv_heads_per_rank(attention, tp) * attention.head_dim
        kept = 2 * q_bytes + kv_bytes
        dropped = np.zeros_like(tokens)
    if job.attention_kernel == "flash":
        return kept + 4 * tokens * heads, dropped
    per_score = shard.problem.hardware.software.score_kept_bytes + (3 if shard.problem.model.drops_scores else 0)
    scores = per_score * tokens * job.sequence_length * heads
    return kept + scores, scores


def _mlp(shard: Shard, kind: LayerRun) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Bytes kept by the MLP (its input included), the part selective recomputation drops, and the temporary
    gradients of its widest operator."""
    if isinstance(kind.mlp, DenseMlp):
        return _dense(shard, kind.mlp)
    moe, problem = kind.mlp, shard.problem
    rows = routed_rows(shard, moe)
    width = moe.intermediate_size / shard.columns.etp
    matrices = 2 if moe.gated else 1
    inputs = _input_bytes(problem) * rows * shard.hidden
    up = BF16_BYTES * rows * matrices * width
    down_input = _input_bytes(problem) * rows * width
    # Router probabilities and indices in fp32, and the expert outputs that the probabilities weight.
    local = shard.tokens / shard.tp
    routing = 8 * local * moe.num_experts + BF16_BYTES * local * moe.num_experts_per_tok * shard.hidden
    router_input = BF16_BYTES * shard.tokens * shard.hidden / shard.sequence_tp
    kept = router_input + inputs + up + down_input + routing
    dropped = down_input + router_input
    workspace = up + BF16_BYTES * rows * shard.hidden
    if moe.shared_intermediate_size:
        shared = _dense(shard, DenseMlp(intermediate_size=moe.shared_intermediate_size, gated=moe.gated))
        kept, dropped = kept + shared[0], dropped + shared[1]
        if problem.job.precision == "bf16":
            # The router keeps the very tensor that the shared expert reads; fp8 keeps a copy of its own.
            kept = kept - router_input
    return kept, dropped, workspace


def _dense(shard: Shard, mlp: DenseMlp) -> tuple[FloatArray, FloatArray, FloatArray]:
    matrices = 2 if mlp.gated else 1
    width = mlp.intermediate_size / shard.tp
    element = _input_bytes(shard.problem)
    up = BF16_BYTES * shard.tokens * matrices * width
    down_input = element * shard.tokens * width
    linear_input = element * shard.tokens * shard.hidden / shard.sequence_tp
    software = shard.problem.hardware.software
    workspace = up + BF16_BYTES * shard.tokens * shard.hidden
    single = mlp.gated and not software.fused_activation
    inner = down_input + (BF16_BYTES * shard.tokens * width if single else 0.0)
    if software.activate_again:
        inner, workspace = inner - down_input, workspace + down_input
    return linear_input + up + inner, inner, workspace


def layer_deferred_bytes(problem: Problem, kind: LayerRun, columns: LayoutColumns) -> FloatArray:
    """Bytes a micro-batch that one layer of ``kind`` keeps for its weight gradients, [num_layouts]; nothing where
    the backward is not split."""
    shard = Shard.of(problem, columns)
    if isinstance(kind.mlp, MixtureOfExperts):
        mlp = _deferred_mixture_of_experts(shard, kind.mlp)
    else:
        mlp = _deferred_dense_mlp(shard, kind.mlp)
    return np.where(columns.split_backward, _deferred_attention(shard, kind) + mlp, 0.0)


def head_deferred_bytes(problem: Problem, columns: LayoutColumns) -> FloatArray:
    """Bytes a micro-batch that the language-model head keeps for its weight gradient, [num_layouts]: its input and
    the gradient of the logits, in bf16."""
    shard = Shard.of(problem, columns)
    vocab = padded_vocab_size(problem.model.vocab_size, columns.tp) / columns.tp
    whole = columns.tp if problem.hardware.software.gathered_logits else 1
    kept = BF16_BYTES * shard.tokens * (shard.hidden / shard.sequence_tp + vocab * whole)
    return np.where(columns.split_backward, kept, 0.0)


def _column_input(shard: Shard) -> FloatArray:
    """The input of a column-parallel layer; sharded along the sequence unless the framework or the layout keeps it
    gathered."""
    whole = ~shard.columns.gather_again | shard.problem.hardware.software.gathered_inputs
    return shard.operand_bytes * shard.tokens * shard.hidden / np.where(whole, 1.0, shard.sequence_tp)


def _row_gradient(shard: Shard) -> FloatArray:
    """The gradient of a row-parallel layer's output, gathered along the sequence."""
    return shard.operand_bytes * shard.tokens * shard.hidden


def _deferred_attention(shard: Shard, kind: LayerRun) -> FloatArray:
    attention, tokens, element = kind.attention, shard.tokens, shard.operand_bytes
    heads = attention.num_attention_heads / shard.tp
    ends = _column_input(shard) + _row_gradient(shard)
    if not isinstance(attention, LatentAttention):
        q_width = heads * attention.head_dim
        kv_width = 2 * kv_heads_per_rank(attention, shard.tp) * attention.head_dim
        return ends + element * tokens * (q_width + kv_width) + BF16_BYTES * tokens * q_width
    qk_dim = attention.qk_nope_head_dim + attention.qk_rope_head_dim
    latent = (attention.q_lora_rank or 0) + attention.kv_lora_rank
    # Inputs of the up projections, and gradients of what the down projections put out.
    inner = BF16_BYTES * latent + element * (latent + attention.qk_rope_head_dim)
    up = element * heads * (qk_dim + attention.qk_nope_head_dim + attention.v_head_dim)
    out = BF16_BYTES * heads * attention.v_head_dim
    return ends + tokens * (inner / shard.sequence_tp + up + out)


def _deferred_dense_mlp(shard: Shard, mlp: DenseMlp) -> FloatArray:
    matrices = 2 if mlp.gated else 1
    inner = shard.operand_bytes * shard.tokens * mlp.intermediate_size / shard.tp * (matrices + 1)
    return _column_input(shard) + inner + _row_gradient(shard)


def _deferred_mixture_of_experts(shard: Shard, moe: MixtureOfExperts) -> FloatArray:
    """Inputs and output gradients of both products of every row; the router's input and the gradients of its
    probabilities, in fp32."""
    rows, element = routed_rows(shard, moe), shard.operand_bytes
    matrices = 2 if moe.gated else 1
    width = moe.intermediate_size / shard.columns.etp
    experts = element * rows * (2 * shard.hidden + (matrices + 1) * width)
    router_input = BF16_BYTES * shard.tokens * shard.hidden / shard.sequence_tp
    total = experts + router_input + FP32_BYTES * shard.tokens / shard.tp * moe.num_experts
    if moe.shared_intermediate_size:
        total = total + _deferred_dense_mlp(
            shard, DenseMlp(intermediate_size=moe.shared_intermediate_size, gated=moe.gated)
        )
        if shard.problem.job.precision == "bf16":
            # The router reads the very tensor that the shared expert reads.
            total = total - router_input
    return np.asarray(total)
