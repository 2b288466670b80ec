"""Bytes that a decoder layer keeps from its forward to its backward, and until its weight gradients.

``layer_activations`` counts the activations by recompute mode. Source: Korthikanti et al. 2022 section 4 (the
terms of sbh(34 + 5as/h)), with flash attention (no score matrix; a float of statistics per query and head), gated
MLPs, grouped-query and latent attention, experts and quantized inputs of matrix products (a copy is kept).
Routed-expert activations are not divided by ep. ``Software`` (``milpplan.problem.hardware``) holds the bytes that
kernels in single operators keep beside this.

``layer_deferred_bytes`` and ``head_deferred_bytes`` count the bytes that wait for a weight gradient after the
input gradient is done, where a schedule splits the backward. The weight gradient of a linear layer needs the
layer's input and the gradient of its output; all other tensors of the forward are freed when the input gradient is
done. Recomputation changes nothing here: the replayed tensors stay for the weight gradient. Source: Qi et al. 2023
(Zero bubble pipeline parallelism), table 1: 32 s b h bytes for a GPT layer, against the 34 s b h + 5 a s^2 b that
its input gradient needs. With tensor parallelism the gradient of a row-parallel layer's output is kept as it was
gathered, and the input of a column-parallel layer is gathered again (``WeightGradStore`` of
sail-sg/zero-bubble-pipeline-parallelism, core/tensor_parallel/layers.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from milpplan.problem import (
    CompressedAttention,
    DenseMlp,
    GroupedQueryAttention,
    LatentAttention,
    LayerRun,
    LinearRecurrence,
    MixtureOfExperts,
    NoBlock,
    OffloadModule,
    Problem,
    RecomputeModule,
)
from milpplan.problem.model import Attention
from milpplan.simulation import FloatArray, LayoutColumns
from milpplan.simulation.layers import recurrence
from milpplan.simulation.layers.kernels import BF16_BYTES, FP32_BYTES
from milpplan.simulation.layers.layer_time import (
    exchanged_bytes,
    has_operator_checkpoints,
    routed_rows,
    up_outputs,
)
from milpplan.simulation.layers.parameter_counts import mixed_streams, padded_vocab_size, widths
from milpplan.simulation.layers.residual_streams import deferred_stream_bytes, hyper_connection_bytes
from milpplan.simulation.layers.shard import (
    ALLGATHER,
    Shard,
    gathered_token_bytes,
    key_value_widths,
    kv_heads_per_rank,
)
from milpplan.simulation.layers.sparse_attention import (
    SCORE_BYTES,
    compressed_deferred_bytes,
    compressed_kept_bytes,
    gathered_widths,
    indexer_input_bytes,
    indexer_output_width,
    kept_bytes,
    position_bytes,
    workspace_bytes,
)


@dataclass(frozen=True, slots=True)
class LayerActivations:
    """Bytes of a layer per micro-batch; arrays of shape [num_layouts]."""

    kept: FloatArray
    """Activations without recomputation."""
    dropped_selective: FloatArray
    """Part that selective recomputation drops. A replay restores it, for a single layer at a time."""
    dropped_full: FloatArray
    """Part that full recomputation drops. A replay restores it, for a single layer at a time."""
    workspace: FloatArray
    """Temporary gradients of the largest operator."""


def layer_activations(problem: Problem, kind: LayerRun, columns: LayoutColumns) -> LayerActivations:
    """Count the activation bytes of one layer for one micro-batch on one GPU.

    In an inference job a layer keeps nothing, and its workspace is all that it would keep in training: an upper
    bound.
    """
    shard = Shard.of(problem, columns)
    flash = problem.job.attention_kernel == "flash"
    stream = BF16_BYTES * shard.tokens * shard.hidden / shard.sequence_tp * problem.model.residual_streams
    linear_input = shard.operand_bytes * shard.tokens * shard.hidden / shard.sequence_tp
    attention_needs, mlp_needs = _needs_inputs(shard, kind)
    attention_kept, attention_dropped = _attention(shard, kind)
    mlp_kept, mlp_dropped, workspace = _mlp(shard, kind)
    blocks = kind.num_blocks
    masks = blocks * shard.tokens * shard.hidden / shard.sequence_tp if problem.model.dropout else 0.0
    mixer_input = 0.0 if isinstance(kind.attention, NoBlock) else linear_input * attention_needs
    norms = _norm_copies(shard, kind) + _input_copies(shard, kind)
    # Residual-stream inputs of the norms, and the norm outputs that feed the matrix products.
    kept = blocks * stream + mixer_input + attention_kept + mlp_kept + masks + norms
    kept = kept + _adapters(shard, kind)
    if problem.model.residual_streams > 1:
        # The three gradients of the streams, which are added, are alive together.
        kept, workspace = kept + blocks * hyper_connection_bytes(shard), np.maximum(workspace, 3 * stream)
    if problem.inference:
        # No tensor waits for a backward: only the layer at work holds its tensors, at most all at the same time.
        zeros = np.zeros_like(shard.tokens)
        return LayerActivations(zeros, zeros, zeros, kept)
    if has_operator_checkpoints(problem, kind):
        selective = np.maximum(kept - stream - _kept_products(shard, kind), 0.0)
    elif flash:
        # Both norms are replayed (Megatron-LM core/transformer/transformer_layer.py, recompute_pre_mlp_layernorm).
        mlp_input = linear_input * mlp_needs if isinstance(kind.mlp, DenseMlp) else 0.0
        selective = mixer_input + mlp_input + attention_dropped + mlp_dropped + norms
    else:
        selective = attention_dropped
    if columns.any_of("recompute_modules"):
        selective = np.where(columns.recompute_modules > 0, _module_bytes(shard, kind), selective)
    workspace = np.maximum(workspace, _mixer_workspace(shard, kind))
    return LayerActivations(kept, selective, kept - stream - _given_positions(shard, kind), workspace + stream)


def _given_positions(shard: Shard, kind: LayerRun) -> FloatArray:
    """Count the bytes of positions that the next layers need for their replays, before that of this layer."""
    indexer = getattr(kind.attention, "indexer", None)
    if indexer is None or indexer.sharing != "gives":
        return np.zeros_like(shard.tokens)
    return position_bytes(indexer, shard.tokens, shard.problem.job.sequence_length)


def _module_bytes(shard: Shard, kind: LayerRun) -> FloatArray:
    """Count the bytes that the modules of ``Layout.recompute_modules`` drop.

    ``layernorm``: 2 u h/r for experts, and the input of the projections of latent attention. ``mla_up_proj``:
    expanded queries, keys and values, or the queries for compressed keys. ``core_attn``: scores, or with flash
    attention its statistics. ``moe_act``: the input of the experts' last product. ``shared_experts``, ``mlp``,
    ``moe``: all but the input of the block.

    Source: Megatron-LM at d98e8a64, core/transformer/transformer_layer.py, core/transformer/attention.py,
    core/transformer/multi_latent_attention.py, core/transformer/moe/moe_layer.py and moe/experts.py: modules keep
    their inputs; layernorm, moe_act and mla_up_proj free their outputs until the backward needs them.
    """
    mixer, mlp, job, tokens = kind.attention, kind.mlp, shard.problem.job, shard.tokens
    stream = tokens * shard.hidden / shard.sequence_tp
    copies = shard.problem.hardware.software.norm_kept_bytes * stream
    block_input = BF16_BYTES * stream
    dropped: dict[RecomputeModule, FloatArray] = {}
    if "core_attn" in kind.recompute_modules:
        assert isinstance(mixer, GroupedQueryAttention | LatentAttention)
        statistics = 4 * tokens * mixer.num_attention_heads / shard.tp + _exchanged_outputs(shard, mixer)
        dropped["core_attn"] = statistics if job.attention_kernel == "flash" else _attention(shard, kind)[1]
    if isinstance(mixer, LatentAttention | CompressedAttention):
        dropped["layernorm"] = shard.operand_bytes * stream + copies
    if isinstance(mixer, CompressedAttention):
        dropped["mla_up_proj"] = compressed_kept_bytes(shard, mixer)[1]
    if isinstance(mixer, LatentAttention):
        widths = 2 * (mixer.qk_nope_head_dim + mixer.qk_rope_head_dim) + mixer.v_head_dim
        dropped["mla_up_proj"] = BF16_BYTES * tokens * mixer.num_attention_heads / shard.tp * widths
    if isinstance(mlp, MixtureOfExperts):
        dropped["layernorm"] = dropped.get("layernorm", 0.0) + block_input + copies
        width = mlp.intermediate_size / shard.columns.etp
        dropped["moe_act"] = shard.operand_bytes * routed_rows(shard, mlp) * width
        dropped["moe"] = _mlp(shard, kind)[0] - block_input
        shared = DenseMlp(intermediate_size=mlp.shared_intermediate_size or 1, gated=mlp.gated)
        # Router and shared expert keep the same tensor; fp8 keeps a separate copy.
        dropped["shared_experts"] = _dense(shard, shared)[0] - (block_input if job.precision == "bf16" else 0.0)
    if isinstance(mlp, DenseMlp):
        dropped["mlp"] = _dense(shard, mlp)[0] + copies
    named = [np.where(shard.columns.recomputes(name), dropped[name], 0.0) for name in kind.recompute_modules]
    return np.asarray(np.sum([np.zeros_like(tokens), *named], axis=0))


def hosted_module_bytes(problem: Problem, kind: LayerRun, columns: LayoutColumns) -> FloatArray:
    """Count the bytes of a layer that ``Layout.offload_modules`` keeps on the host, by recompute mode [MODES, n].

    Inputs of modules: of norms before latent attention and experts 2 u h/r; of the projections their input, with
    the norm's where one product has both, or the latent vectors; queries, keys and values; outputs of attention;
    rows of experts, and their gate and up products. Selective recomputation drops some of them by itself; full
    recomputation keeps none. Outputs of attention that are sent and stay on the device do not count (**lower**).

    Source: Megatron-LM at d98e8a64, core/transformer/transformer_layer.py, attention.py, multi_latent_attention.py
    and moe/experts.py (``off_interface``).
    """
    shard, mixer, mlp = Shard.of(problem, columns), kind.attention, kind.mlp
    tokens, named, zeros = shard.tokens, columns.recompute_modules > 0, np.zeros(len(columns))
    stream = BF16_BYTES * tokens * shard.hidden / shard.sequence_tp
    norm_output = shard.operand_bytes * tokens * shard.hidden / shard.sequence_tp
    sizes: dict[OffloadModule, FloatArray] = {"attn_norm": stream, "mlp_norm": stream}
    dropped: dict[OffloadModule, FloatArray] = {}
    if isinstance(mixer, GroupedQueryAttention):
        heads = mixer.num_attention_heads / shard.tp
        sizes["qkv_linear"] = stream + norm_output
        dropped["qkv_linear"] = np.where(named, 0.0, norm_output)
        sizes["core_attn"] = BF16_BYTES * tokens * (heads * mixer.head_dim + key_value_widths(mixer, shard.tp)[1])
        sizes["attn_proj"] = BF16_BYTES * tokens * heads * mixer.value_dim
    if isinstance(mixer, LatentAttention):
        heads = mixer.num_attention_heads / shard.tp
        normed = (mixer.q_lora_rank or 0) + mixer.kv_lora_rank + mixer.qk_rope_head_dim
        sizes["qkv_linear"] = norm_output + 2 * BF16_BYTES * tokens * normed / shard.sequence_tp
        dropped["qkv_linear"] = np.where(named & ~columns.recomputes("layernorm"), 0.0, norm_output)
        expanded = 2 * (mixer.qk_nope_head_dim + mixer.qk_rope_head_dim) + mixer.v_head_dim
        sizes["core_attn"] = BF16_BYTES * tokens * heads * expanded
        dropped["core_attn"] = np.where(named & ~columns.recomputes("mla_up_proj"), 0.0, sizes["core_attn"])
        sizes["attn_proj"] = BF16_BYTES * tokens * heads * mixer.v_head_dim
    if isinstance(mlp, MixtureOfExperts):
        rows, width = routed_rows(shard, mlp), mlp.intermediate_size / shard.columns.etp
        sizes["expert_fc1"] = shard.operand_bytes * rows * (mlp.latent_size or shard.hidden)
        sizes["moe_act"] = BF16_BYTES * rows * (2 if mlp.gated else 1) * width
    chosen = [(name, columns.offloads(name)) for name in kind.offload_modules]
    kept = sum((np.where(on, sizes[name], 0.0) for name, on in chosen), zeros)
    gone = sum((np.where(on, dropped.get(name, 0.0), 0.0) for name, on in chosen), zeros)
    return np.stack([kept, kept - gone, zeros])


def _mixer_workspace(shard: Shard, kind: LayerRun) -> FloatArray:
    """Count the temporary bytes of an indexer's scores, of a recurrence's backward, of gathered keys and values,
    or of attention without an MLP.

    Those of other attention beside an MLP are smaller than the MLP's.
    """
    mixer = kind.attention
    if isinstance(mixer, LatentAttention) and mixer.indexer is not None:
        return workspace_bytes(mixer.indexer, shard.tokens, shard.problem.job.sequence_length)
    if isinstance(mixer, CompressedAttention):
        if mixer.indexer is None:
            return np.zeros_like(shard.tokens)
        length = shard.problem.job.sequence_length // (mixer.compress_rate or 1)
        return workspace_bytes(mixer.indexer, shard.tokens, length)
    if isinstance(mixer, LinearRecurrence):
        return np.asarray(BF16_BYTES * shard.tokens * recurrence.workspace_elements(mixer) / shard.tp)
    temporary = _attention(shard, kind)[0] if isinstance(kind.mlp, NoBlock) else np.zeros_like(shard.tokens)
    if isinstance(mixer, GroupedQueryAttention) and (blocks := mixer.blocks) is not None:
        length = -(-shard.problem.job.sequence_length // blocks.index_block_size)
        temporary = temporary + SCORE_BYTES * shard.tokens * blocks.index_n_heads * length
        back = BF16_BYTES * shard.tokens * shard.columns.cp * gathered_widths(mixer, shard.tp)[1]
        return np.asarray(np.where(shard.columns.cp > 1, np.maximum(temporary, back), temporary))
    gathers = shard.problem.hardware.software.gathered_keys
    if gathers and isinstance(mixer, GroupedQueryAttention | LatentAttention):
        _, keys, values, _ = exchanged_bytes(shard, mixer)
        temporary = temporary + np.where(shard.columns.ring > 1, (keys + values) * shard.columns.ring, 0.0)
    return np.asarray(temporary)


def _needs_inputs(shard: Shard, kind: LayerRun) -> tuple[bool, bool]:
    """Check that attention and the MLP keep the outputs of their norms, which only weight gradients need."""
    attention = ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa")
    first = tuple(name for name in kind.linear_modules if name in attention)
    return shard.trains(*first), shard.trains(*kind.column_modules[1])


def _adapters(shard: Shard, kind: LayerRun) -> FloatArray:
    """Count the bytes of A x that adapters keep, 2 r for each row of each adapted matrix."""
    lora, total = shard.problem.job.lora, np.zeros_like(shard.tokens)
    if lora is None:
        return total
    mlp = kind.column_modules[1] + ("down_proj",)
    for name in kind.linear_modules:
        if name not in lora.modules:
            continue
        rows = shard.tokens / (shard.sequence_tp if name in ("q_a_proj", "kv_a_proj_with_mqa") else 1.0)
        if name in mlp and isinstance(kind.mlp, MixtureOfExperts):
            rows = routed_rows(shard, kind.mlp) + (shard.tokens if kind.mlp.shared_intermediate_size else 0.0)
        total = total + BF16_BYTES * lora.rank * rows
    return total


def _kept_products(shard: Shard, kind: LayerRun) -> FloatArray:
    """Count the bytes that operator-wise checkpoints keep beside a layer's input.

    They keep the result, statistics, queries and values of attention, and the keys if they come from the same
    product; the gate and, unless compiled, the down product of a gated MLP, or the up product of a plain MLP; the
    choice of experts, and the rows of both exchanges of tokens; and both sums of tensor parallelism.

    2 u (2 q + v) + 2 u k [one product] + 4 u a/t + 4 u h/r [t > 1], in 8 bits as in 16; of a dense MLP
    2 u f/t + 2 u h [gated, unread]; of n chosen experts 12 u n/t + 2 h (rows + u n/t) [ep > 1].
    Source: that of the replayed products in ``milpplan.simulation.layers.layer_time``.
    """
    attention, mlp, tokens = kind.attention, kind.mlp, shard.tokens
    assert isinstance(attention, GroupedQueryAttention)
    heads = attention.num_attention_heads / shard.tp
    software = shard.problem.hardware.software
    key_dim = attention.head_dim if software.fused_qkv else 0
    values = kv_heads_per_rank(attention, shard.tp) * (attention.value_dim + key_dim)
    summed = np.where(shard.tp > 1, 2 * shard.hidden / shard.sequence_tp, 0.0)
    widths = heads * (attention.head_dim + attention.value_dim) + values + summed
    kept = 4 * tokens * heads + _exchanged_outputs(shard, attention)
    if isinstance(mlp, MixtureOfExperts):
        copies = tokens / shard.tp * mlp.num_experts_per_tok
        rows = np.where(shard.columns.ep > 1, routed_rows(shard, mlp) + copies, 0.0)
        kept = kept + 12 * copies + BF16_BYTES * rows * shard.hidden
    elif isinstance(mlp, DenseMlp):
        down = mlp.gated and software.keeps_unread_results
        widths = widths + mlp.intermediate_size / shard.tp + (shard.hidden if down else 0)
    return np.asarray(BF16_BYTES * tokens * widths + kept)


def _norm_copies(shard: Shard, kind: LayerRun) -> FloatArray:
    """Count the bytes that the norm of each block keeps beside a fused kernel's, and the gathered outputs.

    k u h / r for a norm. Where the layout or the framework keeps the inputs of products gathered, the
    gathered part of each norm's output adds 2 u h (1 - 1/r). Routed experts gather no input.
    """
    software = shard.problem.hardware.software
    elements = shard.tokens * shard.hidden
    copies = kind.num_blocks * software.norm_kept_bytes * elements / shard.sequence_tp
    mixes = not isinstance(kind.attention, NoBlock)
    attention_needs, mlp_needs = _needs_inputs(shard, kind)
    inputs = (mixes and attention_needs) + (kind.has_dense_part and mlp_needs)
    gathered = inputs * shard.operand_bytes * elements * (1 - 1 / shard.sequence_tp)
    kept = ~shard.columns.gather_again | software.gathered_inputs
    return np.asarray(copies + np.where(kept, gathered, 0.0))


def _input_copies(shard: Shard, kind: LayerRun) -> FloatArray:
    """Count the bytes of the inputs that tensor-parallel products copy beside the shared input.

    2 u h / r for each of two copies for queries, keys and values, and of one copy for a dense gate and up. Only
    for grouped-query attention with three separate products; other attention has no copies here, a lower bound.
    """
    if not shard.problem.hardware.software.copied_inputs or not isinstance(kind.attention, GroupedQueryAttention):
        return np.zeros_like(shard.tokens)
    attention_needs, mlp_needs = _needs_inputs(shard, kind)
    copies = 2 * attention_needs + (isinstance(kind.mlp, DenseMlp) and kind.mlp.gated and mlp_needs)
    size = BF16_BYTES * copies * shard.tokens * shard.hidden / shard.sequence_tp
    return np.asarray(np.where(shard.tp > 1, size, 0.0))


def _attention(shard: Shard, kind: LayerRun) -> tuple[FloatArray, FloatArray]:
    """Count the bytes that attention keeps, and the part of them that selective recomputation drops."""
    attention, tokens, tp, job = kind.attention, shard.tokens, shard.tp, shard.problem.job
    if isinstance(attention, NoBlock):
        return np.zeros_like(tokens), np.zeros_like(tokens)
    if isinstance(attention, LinearRecurrence):
        # The gated norm's output is the input of a product.
        output = shard.operand_bytes * tokens * widths(attention).values / tp
        kept = BF16_BYTES * tokens * recurrence.kept_elements(attention) / tp + output
        kept = kept + 2 * recurrence.low_rank_bytes(shard, attention) / shard.sequence_tp
        return kept, output if job.attention_kernel == "flash" else np.zeros_like(tokens)
    if isinstance(attention, CompressedAttention):
        return compressed_kept_bytes(shard, attention)
    heads = attention.num_attention_heads / tp
    if isinstance(attention, LatentAttention):
        qk_dim = attention.qk_nope_head_dim + attention.qk_rope_head_dim
        latent = (attention.q_lora_rank or 0) + attention.kv_lora_rank + attention.qk_rope_head_dim
        if attention.indexer is not None:
            inputs, cp = (shard.hidden, shard.sequence_tp), shard.columns.cp
            sparse, dropped = kept_bytes(attention, tokens, heads, job.sequence_length, cp, inputs)
            return BF16_BYTES * tokens * latent / shard.sequence_tp * 2 + sparse, dropped
        needed = (attention.q_lora_rank or 0) * shard.trains("q_b_proj") + (
            attention.kv_lora_rank + attention.qk_rope_head_dim
        ) * shard.trains("kv_b_proj")
        expanded = BF16_BYTES * tokens * heads * (2 * qk_dim + attention.v_head_dim)
        out = BF16_BYTES * tokens * heads * attention.v_head_dim
        # Inputs of the norms, and their outputs.
        kept = BF16_BYTES * tokens * (latent + needed) / shard.sequence_tp + expanded + out
        dropped = expanded
    else:
        # A gate, and the gated output, add to queries and output.
        gate_dims = attention.gate_dim + attention.value_dim if attention.gate_dim else 0
        q_bytes = BF16_BYTES * tokens * heads * (attention.head_dim + attention.value_dim + gate_dims)
        kept = q_bytes + BF16_BYTES * tokens * key_value_widths(attention, tp)[1]
        dropped = np.zeros_like(tokens)
        if blocks := attention.blocks:
            kept = kept + SCORE_BYTES * tokens * blocks.index_n_heads * blocks.index_topk_blocks
            # Keys and values of other ranks.
            kept = kept + BF16_BYTES * tokens * (shard.columns.cp - 1) * gathered_widths(attention, tp)[1]
    kept = kept + _exchanged_outputs(shard, attention)
    if job.attention_kernel == "flash":
        return kept + 4 * tokens * heads, dropped
    per_score = shard.problem.hardware.software.score_kept_bytes + (3 if shard.problem.model.drops_scores else 0)
    scores = per_score * tokens * job.sequence_length * heads
    return kept + scores, scores


def _exchanged_outputs(shard: Shard, attention: Attention) -> FloatArray:
    """Count the bytes of the second output of attention that all-to-alls of heads keep.

    The backward of attention keeps the output of all tokens and some heads, the next product that of some tokens
    and all heads. Source: Transformer Engine, see ``layer_time._head_exchange``.
    """
    return np.where(shard.columns.ulysses > 1, exchanged_bytes(shard, attention)[3], 0.0)


def _mlp(shard: Shard, kind: LayerRun) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Count the bytes of the MLP.

    Returns:
        Bytes kept (with the input), the part that selective recomputation drops, and the temporary gradients of
        the widest operator.
    """
    if isinstance(kind.mlp, NoBlock):
        zeros = np.zeros_like(shard.tokens)
        return zeros, zeros, zeros
    if isinstance(kind.mlp, DenseMlp):
        return _dense(shard, kind.mlp)
    moe, problem = kind.mlp, shard.problem
    rows = routed_rows(shard, moe)
    width = moe.intermediate_size / shard.columns.etp
    matrices = 2 if moe.gated else 1
    hidden = moe.latent_size or shard.hidden
    inputs = shard.operand_bytes * rows * hidden * shard.trains(*up_outputs(moe, width))
    up = BF16_BYTES * rows * matrices * width
    down_input = shard.operand_bytes * rows * width * shard.trains("down_proj")
    # Router probabilities and indices in fp32, and the expert outputs that the probabilities weight.
    local = shard.tokens / shard.tp
    routing = 8 * local * moe.num_experts + BF16_BYTES * local * moe.num_experts_per_tok * hidden
    if moe.latent_size:
        # Experts' sum, the input of the projection from the latent width.
        routing = routing + BF16_BYTES * local * moe.latent_size
    router_input = BF16_BYTES * shard.tokens * shard.hidden / shard.sequence_tp * shard.trains()
    kept = router_input + inputs + up + down_input + routing
    dropped = down_input + router_input
    workspace = up + BF16_BYTES * rows * hidden
    if (gathers := (shard.columns.expert_dispatch == ALLGATHER) & (shard.columns.ep > 1)).any():
        workspace = workspace + np.where(gathers, gathered_token_bytes(shard, moe)[0], 0.0)
    if moe.shared_intermediate_size:
        shared = _dense(shard, DenseMlp(intermediate_size=moe.shared_intermediate_size, gated=moe.gated))
        kept, dropped = kept + shared[0], dropped + shared[1]
        if problem.job.precision == "bf16":
            # Router and shared expert keep the same tensor; fp8 keeps a separate copy.
            kept = kept - router_input
    return kept, dropped, workspace


def _dense(shard: Shard, mlp: DenseMlp) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Count the bytes of a dense MLP, as ``_mlp`` does."""
    matrices = 2 if mlp.gated else 1
    width = mlp.intermediate_size / shard.tp
    element = shard.operand_bytes
    up = BF16_BYTES * shard.tokens * matrices * width
    down_input = element * shard.tokens * width * shard.trains("down_proj")
    linear_input = element * shard.tokens * shard.hidden / shard.sequence_tp
    linear_input = linear_input * shard.trains(*up_outputs(mlp, width))
    software = shard.problem.hardware.software
    workspace = up + BF16_BYTES * shard.tokens * shard.hidden
    unfused = mlp.gated and not software.fused_activation
    inner = down_input + (BF16_BYTES * shard.tokens * width if unfused else 0.0)
    if software.activate_again:
        inner, workspace = inner - down_input, workspace + down_input
    return linear_input + up + inner, inner, workspace


def layer_deferred_bytes(problem: Problem, kind: LayerRun, columns: LayoutColumns) -> FloatArray:
    """Count the bytes per micro-batch that a layer keeps for its weight gradients, [num_layouts].

    0 where the backward is not split.
    """
    shard = Shard.of(problem, columns)
    mlp: FloatArray = np.zeros_like(shard.tokens)
    if isinstance(kind.mlp, MixtureOfExperts):
        mlp = _deferred_mixture_of_experts(shard, kind.mlp)
    elif isinstance(kind.mlp, DenseMlp):
        mlp = _deferred_dense_mlp(shard, kind.mlp)
    # Adapters keep A x and the gradient of it.
    total = _deferred_attention(shard, kind) + mlp + 2 * _adapters(shard, kind)
    if problem.model.residual_streams > 1:
        total = total + deferred_stream_bytes(shard, kind.num_blocks, mixed_streams(problem.model))
    return np.where(columns.split_backward, total, 0.0)


def head_deferred_bytes(problem: Problem, columns: LayoutColumns) -> FloatArray:
    """Count the bytes per micro-batch that the head keeps for its weight gradient, [num_layouts].

    They are its input and the gradient of the logits or scores, in bf16. A layer of multi-token prediction has a
    head again, a transformer layer, and a projection with two inputs and the gradient of its output, or of n
    residual streams with n + 1 of each.
    """
    shard = Shard.of(problem, columns)
    vocab = padded_vocab_size(problem.model.vocab_size, columns.tp) / columns.tp
    whole = columns.tp if problem.hardware.software.gathered_logits else 1
    outputs = vocab * whole if problem.model.num_labels is None else problem.model.num_labels
    kept = BF16_BYTES * shard.tokens * (shard.hidden / shard.sequence_tp + outputs)
    if (streams := problem.model.residual_streams) > 1:
        kept = kept + deferred_stream_bytes(shard, 1, streams)
    head = np.where(columns.split_backward & problem.job.trains("head"), kept, 0.0)
    if not problem.job.mtp_layers:
        return head
    stream = BF16_BYTES * shard.tokens * shard.hidden / shard.sequence_tp
    layer = layer_deferred_bytes(problem, problem.model.mtp_kind, columns) + head
    projected = (3 if streams == 1 else 2 * (streams + 1)) * stream
    return np.asarray(head + problem.job.mtp_layers * (layer + np.where(columns.split_backward, projected, 0.0)))


def _column_input(shard: Shard) -> FloatArray:
    """Count the bytes of the input of a column-parallel layer.

    It is sharded along the sequence unless the framework or the layout keeps it gathered.
    """
    is_gathered = ~shard.columns.gather_again | shard.problem.hardware.software.gathered_inputs
    return shard.operand_bytes * shard.tokens * shard.hidden / np.where(is_gathered, 1.0, shard.sequence_tp)


def _row_gradient(shard: Shard) -> FloatArray:
    """Count the bytes of the gradient of a row-parallel layer's output, gathered along the sequence."""
    return shard.operand_bytes * shard.tokens * shard.hidden


def _deferred_attention(shard: Shard, kind: LayerRun) -> FloatArray:
    """Count the bytes that attention keeps for its weight gradients."""
    attention, tokens, element = kind.attention, shard.tokens, shard.operand_bytes
    if isinstance(attention, NoBlock):
        return np.zeros_like(tokens)
    if isinstance(attention, LinearRecurrence):
        width = widths(attention)
        saved = (element * width.projected + BF16_BYTES * width.values) / shard.tp
        # Inputs of the second matrices of a low rank, and gradients of the first ones' outputs.
        narrow = 4 * recurrence.low_rank_bytes(shard, attention) / shard.sequence_tp
        return _column_input(shard) + _row_gradient(shard) + tokens * saved + narrow
    if isinstance(attention, CompressedAttention):
        return _column_input(shard) + _row_gradient(shard) + compressed_deferred_bytes(shard, attention)
    heads, trains = attention.num_attention_heads / shard.tp, shard.trains
    ends = _column_input(shard) * _needs_inputs(shard, kind)[0] + _row_gradient(shard) * trains("o_proj")
    if not isinstance(attention, LatentAttention):
        q_width, out_width = heads * attention.head_dim, heads * attention.value_dim
        k_width, kv_width = key_value_widths(attention, shard.tp)
        values = 0.0 if attention.keys_are_values else (kv_width - k_width) * trains("v_proj")
        gate = heads * attention.gate_dim
        outputs = q_width * trains("q_proj") + k_width * trains("k_proj") + values + gate
        return ends + element * tokens * outputs + BF16_BYTES * tokens * out_width * trains("o_proj")
    qk_dim = attention.qk_nope_head_dim + attention.qk_rope_head_dim
    q_rank, kv_rank = attention.q_lora_rank or 0, attention.kv_lora_rank
    # Inputs of the up projections, and gradients of the outputs of the down projections.
    inner: float = BF16_BYTES * (q_rank * trains("q_b_proj") + kv_rank * trains("kv_b_proj"))
    down = q_rank * trains("q_a_proj") + (kv_rank + attention.qk_rope_head_dim) * trains("kv_a_proj_with_mqa")
    inner = inner + element * down
    if attention.indexer is not None:
        # Inputs of the absorbed products and gradients of their outputs, and those of the indexer's products.
        absorbed = attention.qk_nope_head_dim + 2 * attention.kv_lora_rank + attention.v_head_dim
        own = BF16_BYTES * (heads * absorbed + indexer_output_width(attention.indexer))
        gathered = indexer_input_bytes(attention, shard.hidden, tokens)
        ends = ends + tokens * own + np.where(shard.sequence_tp > 1, gathered, 0.0)
        out = heads * (element * qk_dim + BF16_BYTES * attention.v_head_dim)
        return ends + tokens * (inner / shard.sequence_tp + out)
    key_value = (attention.qk_nope_head_dim + attention.v_head_dim) * trains("kv_b_proj")
    up = element * heads * (qk_dim * trains("q_proj", "q_b_proj") + key_value)
    out = BF16_BYTES * heads * attention.v_head_dim * trains("o_proj")
    return ends + tokens * (inner / shard.sequence_tp + up + out)


def _deferred_dense_mlp(shard: Shard, mlp: DenseMlp) -> FloatArray:
    """Count the bytes that a dense MLP keeps for its weight gradients."""
    first, down = up_outputs(mlp, shard.tokens), shard.trains("down_proj")
    widths = sum(shard.trains(name) for name in first) + down
    inner = shard.operand_bytes * shard.tokens * mlp.intermediate_size / shard.tp * widths
    return _column_input(shard) * shard.trains(*first) + inner + _row_gradient(shard) * down


def _deferred_mixture_of_experts(shard: Shard, moe: MixtureOfExperts) -> FloatArray:
    """Count the bytes that a mixture of experts keeps for its weight gradients.

    Inputs and output gradients of both products of every row; the router's input, and the gradients of its
    probabilities in fp32.
    """
    rows, element = routed_rows(shard, moe), shard.operand_bytes
    width = moe.intermediate_size / shard.columns.etp
    first, down = up_outputs(moe, width), shard.trains("down_proj")
    hidden_widths = (shard.trains(*first) + down) * (moe.latent_size or shard.hidden)
    widths = hidden_widths + (sum(shard.trains(name) for name in first) + down) * width
    experts = element * rows * widths
    if moe.latent_size:
        # Inputs and output gradients of both projections.
        experts = experts + element * shard.tokens / shard.tp * 2 * (moe.latent_size + shard.hidden)
    router_input = BF16_BYTES * shard.tokens * shard.hidden / shard.sequence_tp * shard.trains()
    probabilities = FP32_BYTES * shard.tokens / shard.tp * moe.num_experts * shard.trains()
    total = experts + router_input + probabilities
    if moe.shared_intermediate_size:
        total = total + _deferred_dense_mlp(
            shard, DenseMlp(intermediate_size=moe.shared_intermediate_size, gated=moe.gated)
        )
        if shard.problem.job.precision == "bf16":
            # Router and shared expert read the same tensor.
            total = total - router_input
    return np.asarray(total)
