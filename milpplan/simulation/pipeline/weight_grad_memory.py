"""Bytes that wait for a weight gradient after the input gradient is done, where a schedule splits the backward.

The weight gradient of a linear layer needs the layer's input and the gradient of its output. Everything else that
the forward kept is freed when the input gradient is done. Recomputation changes nothing here: what it replayed
stays for the weight gradient, too.

Source: Qi et al. 2023 (Zero bubble pipeline parallelism), table 1: 32 s b h bytes for a GPT layer, against the 34
s b h + 5 a s^2 b that its input gradient needs. With tensor parallelism the gradient of a row-parallel layer's
output is kept as it was gathered, and the input of a column-parallel layer is gathered again (``WeightGradStore``
of sail-sg/zero-bubble-pipeline-parallelism, core/tensor_parallel/layers.py).
"""

from __future__ import annotations

import numpy as np

from milpplan.problem.model import DenseMlp, LatentAttention, LayerRun, MixtureOfExperts
from milpplan.problem.problem import Problem
from milpplan.simulation.layers.layer_time import BF16_BYTES, FP32_BYTES, Shard, kv_heads_per_rank, routed_rows
from milpplan.simulation.layers.parameters import padded_vocab_size
from milpplan.simulation.layout_columns import FloatArray, LayoutColumns


def layer_deferred_bytes(problem: Problem, kind: LayerRun, columns: LayoutColumns) -> FloatArray:
    """Bytes a micro-batch that one layer of ``kind`` keeps for its weight gradients, [num_layouts]; nothing where
    the backward is not split."""
    shard = Shard.of(problem, columns)
    if isinstance(kind.mlp, MixtureOfExperts):
        mlp = _mixture_of_experts(shard, kind.mlp)
    else:
        mlp = _dense_mlp(shard, kind.mlp)
    return np.where(columns.split_backward, _attention(shard, kind) + mlp, 0.0)


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


def _attention(shard: Shard, kind: LayerRun) -> FloatArray:
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


def _dense_mlp(shard: Shard, mlp: DenseMlp) -> FloatArray:
    matrices = 2 if mlp.gated else 1
    inner = shard.operand_bytes * shard.tokens * mlp.intermediate_size / shard.tp * (matrices + 1)
    return _column_input(shard) + inner + _row_gradient(shard)


def _mixture_of_experts(shard: Shard, moe: MixtureOfExperts) -> FloatArray:
    """Inputs and output gradients of both products of every row; the router's input and the gradients of its
    probabilities, in fp32."""
    rows, element = routed_rows(shard, moe), shard.operand_bytes
    matrices = 2 if moe.gated else 1
    width = moe.intermediate_size / shard.columns.etp
    experts = element * rows * (2 * shard.hidden + (matrices + 1) * width)
    router_input = BF16_BYTES * shard.tokens * shard.hidden / shard.sequence_tp
    total = experts + router_input + FP32_BYTES * shard.tokens / shard.tp * moe.num_experts
    if moe.shared_intermediate_size:
        total = total + _dense_mlp(
            shard, DenseMlp(intermediate_size=moe.shared_intermediate_size, gated=moe.gated)
        )
        if shard.problem.job.precision == "bf16":
            # The router reads the very tensor that the shared expert reads.
            total = total - router_input
    return np.asarray(total)
