"""Time of one decoder layer on one GPU for one micro-batch, by phase and by part.

Every quantity broadcasts over the rows of a ``LayoutColumns``. The exposed parts add up to the duration that the
pipeline graph uses. Hidden parts are reported, but never added.

``layer_seconds`` is the entry: it adds operator after operator to a ``Tally``. Operators follow Megatron-LM.

Sources: Shoeybi et al. 2019 section 3 for tensor parallelism; Korthikanti et al. 2022 section 4 for sequence
parallelism; Liu et al. 2023, Ring Attention, for context parallelism; Shazeer et al. 2017 and Megatron-LM
core/transformer/moe for experts; DeepSeek-V2 section 2.1 for latent attention; for an indexer, see
``milpplan.simulation.layers.sparse_attention``.
"""

from __future__ import annotations

from typing import Protocol, cast

import numpy as np

from milpplan.plugins import PluginError, plugin, plugin_title
from milpplan.problem import (
    CompressedAttention,
    DenseMlp,
    GroupedQueryAttention,
    Indexer,
    LatentAttention,
    LayerRun,
    LinearRecurrence,
    MixtureOfExperts,
    Problem,
)
from milpplan.problem.hardware import OWN_COST_MODEL
from milpplan.problem.model import Attention, LinearModule
from milpplan.simulation import FloatArray, LayoutColumns
from milpplan.simulation.layers import kernels, recurrence
from milpplan.simulation.layers.kernels import BF16_BYTES, FP32_BYTES, Mask, Numbers, average_keys
from milpplan.simulation.layers.residual_streams import add_hyper_connections
from milpplan.simulation.layers.shard import (
    ALLGATHER,
    EXPOSED,
    ONCE,
    CoreSeconds,
    Outputs,
    Part,
    Phase,
    Product,
    Shard,
    Tally,
    key_value_widths,
    kv_heads_per_rank,
    linear_pair,
    named_dispatch,
)
from milpplan.simulation.layers.sparse_attention import (
    add_compressed_attention,
    add_gathered_keys,
    block_scores_s,
    compressed_core_s,
    indexer_input_bytes,
    selected_keys,
    sparse_core_s,
)
from milpplan.simulation.network import call_s, collectives, placement
from milpplan.simulation.network.placement import neighbours_share


def layer_seconds(
    problem: Problem, kind: LayerRun, columns: LayoutColumns, core: CoreSeconds | None = None
) -> FloatArray:
    """Time one layer with the cost model that the hardware description names.

    Args:
        problem: model, hardware and job.
        kind: the layer.
        columns: layouts.
        core: times of attention as in ``Shard``.

    Returns:
        Seconds [Part, Phase, num_layouts]. The ZeRO parts are 0: they depend on the data-parallel group, and
        ``milpplan.simulation.layout_costs`` adds them. The forward includes that of a frozen reference.
    """
    seconds = replaced_seconds(problem, kind, columns, layer_tally(problem, kind, columns, core).seconds)
    if problem.job.further_forwards:
        seconds[:, Phase.FORWARD] += further_forward_s(problem, kind, columns, core)
    return seconds


def further_forward_s(
    problem: Problem, kind: LayerRun, columns: LayoutColumns, core: CoreSeconds | None = None
) -> FloatArray:
    """Time the forwards of a layer beside that of training: of the frozen reference, and of the policy before
    its update. The reference has no adapters, and no recomputation repeats them.

    In a pipeline they run as phases of their own in GRPO, which takes as long if all stages take equal time, else
    longer: a lower bound.

    Returns:
        Seconds [Part, num_layouts].

    Source: ms-swift, swift/megatron/trainers/dpo_trainer.py (``forward_step``): in every micro-batch the stage
    runs the reference without gradients, then the policy, and sends on both outputs as one tensor.
    """
    job = problem.job.model_copy(update={"alignment": None, "rollout": None})
    counts = {job.lora: problem.job.policy_forwards}
    counts[None] = counts.get(None, 0) + problem.job.reference_forwards
    total = np.zeros((len(Part), len(columns)))
    for lora, count in counts.items():
        if not count:
            continue
        alone = problem.model_copy(update={"job": job.model_copy(update={"lora": lora})})
        total += count * layer_seconds(alone, kind, columns, core)[:, Phase.FORWARD]
    return total


def layer_tally(
    problem: Problem, kind: LayerRun, columns: LayoutColumns, core: CoreSeconds | None = None
) -> Tally:
    """Sum the operators of one layer in milpplan's own cost model, with the calls of its collectives."""
    shard = Shard.of(problem, columns, core)
    tally = Tally.empty(columns, kind.num_blocks)
    _norms_and_residuals(shard, kind, tally)
    if isinstance(kind.attention, LatentAttention):
        _latent_attention(shard, kind.attention, tally)
    elif isinstance(kind.attention, GroupedQueryAttention):
        _grouped_query_attention(shard, kind.attention, tally)
    elif isinstance(kind.attention, LinearRecurrence):
        recurrence.add_recurrence(shard, kind.attention, tally)
    elif isinstance(kind.attention, CompressedAttention):
        core = core or flash_core_s(shard, kind.attention, problem.job.sequence_length, shard.tokens, 1)
        add_compressed_attention(shard, kind.attention, tally, core)
        add_gathered_keys(shard, kind.attention, tally)
    if isinstance(kind.mlp, MixtureOfExperts):
        with tally.module("moe"):
            _mixture_of_experts(shard, kind.mlp, tally, by_product=has_operator_checkpoints(problem, kind))
    elif isinstance(kind.mlp, DenseMlp):
        with tally.module("mlp"):
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
    """Add the device's waits for the host where a layer's kernels are shorter than their launches.

    The host needs layer_launch_s and the calls of the collectives (``call_s``) for a forward, and 2 layer_launch_s
    and its calls for a backward. Weight gradients that run by themselves take one layer_launch_s of the two.
    Communication counts as device work: it hides in a wait for launches. Source: nanotron's benchmark sweeps
    (docs/accuracy.md), where a layer takes the maximum of its kernels and a time that depends neither on the
    model's width nor on the micro-batch.
    """
    for phase in ONCE if tally.any_split else ONCE[:2]:
        host = host_seconds(shard.problem, tally, phase)
        device = tally.seconds[EXPOSED, phase].sum(axis=0)
        tally.exposed(Part.LAUNCH, phase, np.maximum(host - device, 0.0))


def host_seconds(problem: Problem, tally: Tally, phase: Phase) -> FloatArray:
    """Time the host for the kernels and collectives of a phase of a layer, in seconds [num_layouts].

    A layer of a single block has half the launches.
    """
    software, split = problem.hardware.software, tally.split.astype(np.float64)
    num_launches = {Phase.FORWARD: np.ones_like(split), Phase.BACKWARD: 2.0 - split, Phase.WEIGHT: split}
    launch_s = software.layer_launch_s * (tally.num_blocks / 2)
    host = num_launches[phase] * launch_s + tally.called_s[phase]
    return np.asarray(host)


def core_shape(attention: Attention, tp: FloatArray) -> tuple[FloatArray, tuple[int, int], int | None]:
    """Return the heads of a tensor-parallel rank, a head's query and value sizes, and the window of keys."""
    heads = attention.num_attention_heads / tp
    if isinstance(attention, LatentAttention):
        qk_dim = attention.qk_nope_head_dim + attention.qk_rope_head_dim
        return heads, (qk_dim, attention.v_head_dim), None
    limit = attention.blocks.selected_keys if attention.blocks else attention.sliding_window
    return heads, (attention.head_dim, attention.value_dim), limit


def flash_core_s(
    shard: Shard,
    attention: Attention | CompressedAttention,
    sequence_length: Numbers,
    tokens: Numbers,
    num_kernels: Numbers,
    mask: Mask = "causal",
) -> tuple[FloatArray, FloatArray]:
    """Time flash attention on a rank's tokens, all in sequences of one length.

    FLOPs forward: 2 * tokens * keys * heads * (qk_size + v_size), backward 2.5 times as many (Dao 2023, section
    4.1), and in both the FLOPs that the last tiles of each kernel lose (``kernels.last_tile_flops``).

    Args:
        shard: share of the micro-batch.
        attention: attention of the layer.
        sequence_length, tokens, num_kernels: any shapes that broadcast with the shard's rows.
        mask: keys that a query attends to. Rates are those of causal kernels under either mask; full kernels were
            not measured.

    Returns:
        Seconds forward and backward, in the broadcast shape.
    """
    gpu, rate = shard.problem.hardware.accelerator, shard.problem.hardware.software.attention_efficiency
    chunk = np.asarray(sequence_length) / shard.columns.ring
    if isinstance(attention, CompressedAttention):
        assert mask == "causal"
        return compressed_core_s(gpu, rate, attention, (sequence_length, chunk), tokens, num_kernels)
    heads, sizes, window = core_shape(attention, shard.tp)
    if isinstance(attention, LatentAttention) and attention.indexer is not None:
        assert mask == "causal"
        return sparse_core_s(gpu, rate, attention, heads, (sequence_length, chunk), tokens, num_kernels)
    blocks = attention.blocks if isinstance(attention, GroupedQueryAttention) else None
    if blocks is not None:
        # Gathered keys take one kernel.
        num_kernels = np.minimum(num_kernels, 1)
    tiles = (num_kernels, np.minimum(chunk, np.asarray(sequence_length) if window is None else window))
    chunked = isinstance(attention, GroupedQueryAttention) and attention.chunked
    keys = average_keys(sequence_length, window, mask, chunked)
    flops = kernels.flash_attention_flops(gpu, tokens, keys, heads, sum(sizes), tiles)
    forward = kernels.attention_forward_s(gpu, flops[0] / rate, chunk)
    if blocks is not None:
        assert mask == "causal"
        forward = forward + block_scores_s(gpu, rate, blocks, (sequence_length, chunk), tokens)
    return forward, kernels.attention_backward_s(gpu, flops[1] / rate, chunk)


def _norms_and_residuals(shard: Shard, kind: LayerRun, tally: Tally) -> None:
    """Add norms (read x, write y) and residual adds (read two tensors, write one; bias and dropout are fused).

    With flash attention, selective recomputation replays the norms.
    """
    elements = shard.tokens * shard.hidden / shard.sequence_tp
    norm = shard.memory_bound(2 * BF16_BYTES * elements * shard.problem.hardware.software.norm_traffic)
    flash = shard.problem.job.attention_kernel == "flash"
    for _ in range(kind.num_norms):
        tally.compute(norm, 1.5 * norm, selective=flash)
    # The norm before a dense MLP is part of its first product, and so of the module.
    own = (kind.attention.type in ("mla", "compressed")) + isinstance(kind.mlp, MixtureOfExperts)
    tally.replayed_by("layernorm", Part.COMPUTE, own * norm)
    tally.replayed_by("mlp", Part.COMPUTE, isinstance(kind.mlp, DenseMlp) * norm)
    if shard.problem.model.residual_streams > 1:
        add_hyper_connections(shard, kind.num_blocks, tally)
        return
    residual = shard.memory_bound(3 * BF16_BYTES * elements)
    tally.compute(kind.num_blocks * residual, kind.num_blocks * residual)


def _grouped_query_attention(shard: Shard, attention: GroupedQueryAttention, tally: Tally) -> None:
    """Add the projections, rotary positions and attention of a grouped-query attention."""
    tokens, tp = shard.tokens, shard.tp
    q_width = attention.num_attention_heads * attention.head_dim / tp
    k_width, kv_width = key_value_widths(attention, tp)
    matrices: dict[LinearModule, FloatArray | float] = {"q_proj": q_width, "k_proj": k_width}
    if not attention.keys_are_values:
        matrices["v_proj"] = kv_width - k_width
    out_width = attention.num_attention_heads * attention.value_dim / tp
    gate = attention.num_attention_heads * attention.gate_dim / tp
    qkv = shard.gemm(tokens, sum(matrices.values()) + gate, shard.hidden, matrices)
    out = shard.gemm(tokens, shard.hidden, out_width, {"o_proj": shard.hidden})
    rope = shard.memory_bound(2 * BF16_BYTES * tokens * (q_width + k_width))
    # Rotary positions and norms of queries and keys are a pass over them each.
    rope = (int(not shard.problem.model.learned_positions) + int(attention.qk_norm != "none")) * rope
    tally.compute(
        qkv.forward + out.forward + rope,
        qkv.dgrad + qkv.wgrad + out.dgrad + out.wgrad + rope,
        qkv.wgrad + out.wgrad,
    )
    if attention.gate_dim:
        tally.compute(
            shard.memory_bound(BF16_BYTES * tokens * (2 * out_width + gate)),
            shard.memory_bound(BF16_BYTES * tokens * (3 * out_width + 2 * gate)),
        )
    linear_pair(shard, tally, (qkv,), out)
    if attention.blocks is not None:
        # Both projections, and their norms and rotary positions; every rank has the whole branch.
        width = float(attention.blocks.width)
        passes = shard.memory_bound(4 * BF16_BYTES * tokens * width)
        tally.compute(shard.gemm(tokens, width, shard.hidden, {}).forward + passes, np.zeros_like(tokens))
        length = shard.problem.job.sequence_length
        tally.compute(*(shard.core or flash_core_s(shard, attention, length, tokens, 1)))
        add_gathered_keys(shard, attention, tally)
        return
    with tally.module("core_attn"):
        _core_attention(shard, tally, attention, BF16_BYTES * tokens * kv_width)


def has_operator_checkpoints(problem: Problem, kind: LayerRun) -> bool:
    """Check if selective recomputation of the layer goes by product (``Software.operator_checkpoints``)."""
    has = problem.hardware.software.operator_checkpoints and problem.job.attention_kernel == "flash"
    return has and kind.prices_products


def _replayed_products(shard: Shard, kind: LayerRun, tally: Tally) -> None:
    """Add the operators that operator-wise checkpoints replay beside norms, activation and routed experts.

    They replay every second product: output and up where queries, keys and values are one product, beside gate and
    down; otherwise the keys as well. They also replay rotary positions and a residual add. The gathers of tensor
    parallelism that a replay repeats are left out, and so are adapters: a lower bound.

    Source: torchtitan at b5bcd76c, distributed/activation_checkpoint.py; before, parallelisms/parallelize_llama.py
    (_save_list, "every second mm").
    """
    attention, mlp = kind.attention, kind.mlp
    assert isinstance(attention, GroupedQueryAttention)
    tokens, hidden = shard.tokens, shard.hidden
    q_width = attention.num_attention_heads * attention.head_dim / shard.tp
    k_width, kv_width = key_value_widths(attention, shard.tp)
    keys = shard.gemm(tokens, q_width + kv_width, hidden, {}).forward * (k_width / (q_width + kv_width))
    rope = shard.memory_bound(2 * BF16_BYTES * tokens * (q_width + k_width))
    residual = shard.memory_bound(3 * BF16_BYTES * tokens * hidden / shard.sequence_tp)
    out = shard.gemm(tokens, hidden, attention.num_attention_heads * attention.value_dim / shard.tp, {})
    tally.replayed(out.forward + rope + residual)
    if not shard.problem.hardware.software.fused_qkv:
        tally.replayed(keys)
    if isinstance(mlp, DenseMlp) and mlp.gated:
        tally.replayed(shard.gemm(tokens, 2 * mlp.intermediate_size / shard.tp, hidden, {}).forward / 2)


def _latent_attention(shard: Shard, attention: LatentAttention, tally: Tally) -> None:
    """Add the down and up projections, rotary positions and attention of a latent attention.

    With flash attention, selective recomputation replays the up projections, with an indexer those of queries and
    keys.
    """
    tokens, heads = shard.tokens, attention.num_attention_heads / shard.tp
    qk_dim = attention.qk_nope_head_dim + attention.qk_rope_head_dim
    local = tokens / shard.sequence_tp
    if attention.q_lora_rank is None:
        zeros = np.zeros_like(tokens)
        q_down = Product(zeros, zeros, zeros, (local, 0.0, shard.hidden), {}, False)
        q_up = shard.gemm(tokens, heads * qk_dim, shard.hidden, {"q_proj": heads * qk_dim})
    else:
        rank = attention.q_lora_rank
        q_down = shard.gemm(local, rank, shard.hidden, {"q_a_proj": rank})
        q_up = shard.gemm(tokens, heads * qk_dim, rank, {"q_b_proj": heads * qk_dim})
    down = attention.kv_lora_rank + attention.qk_rope_head_dim
    kv_down = shard.gemm(local, down, shard.hidden, {"kv_a_proj_with_mqa": down})
    out = shard.gemm(tokens, shard.hidden, heads * attention.v_head_dim, {"o_proj": shard.hidden})
    sparse = attention.indexer is not None
    rotated = attention.kv_lora_rank + attention.qk_rope_head_dim if sparse else 2 * qk_dim
    rope = shard.memory_bound(2 * BF16_BYTES * tokens * heads * rotated)
    tally.compute(
        q_down.forward + kv_down.forward + out.forward + rope,
        q_down.dgrad + q_down.wgrad + kv_down.dgrad + kv_down.wgrad + out.dgrad + out.wgrad + rope,
        q_down.wgrad + kv_down.wgrad + out.wgrad,
    )
    if attention.indexer is not None:
        linear_pair(shard, tally, (q_up,), out)
        tally.compute(q_up.forward, q_up.dgrad + q_up.wgrad, q_up.wgrad, selective=True)
        _sparse_attention(shard, attention, attention.indexer, tally)
        return
    kv_width = heads * (attention.qk_nope_head_dim + attention.v_head_dim)
    kv_up = shard.gemm(tokens, kv_width, attention.kv_lora_rank, {"kv_b_proj": kv_width})
    flash = shard.problem.job.attention_kernel == "flash"
    up_backward = q_up.dgrad + q_up.wgrad + kv_up.dgrad + kv_up.wgrad
    with tally.module("mla_up_proj"):
        tally.compute(q_up.forward + kv_up.forward, up_backward, q_up.wgrad + kv_up.wgrad, selective=flash)
    tally.replayed_by("mla_up_proj", Part.COMPUTE, rope)
    gather = collectives.all_gather_s(
        shard.problem.hardware, latent_input_bytes(shard, attention), *placement.tensor(shard.columns)
    )
    tally.replayed_by("mla_up_proj", Part.TP, np.where(shard.columns.sequence_parallel, gather, 0.0))
    linear_pair(shard, tally, (q_up, kv_up), out)
    ring_bytes = BF16_BYTES * tokens * heads * (qk_dim + attention.v_head_dim)
    with tally.module("core_attn"):
        _core_attention(shard, tally, attention, ring_bytes)


def latent_input_bytes(shard: Shard, attention: LatentAttention) -> FloatArray:
    """Size the inputs of the up projections of latent attention, which a replay with sequence parallelism gathers.

    Source: Megatron-LM at d98e8a64, core/transformer/multi_latent_attention.py (qkv_up_proj_and_rope_apply).
    """
    return shard.operand_bytes * shard.tokens * ((attention.q_lora_rank or shard.hidden) + attention.kv_lora_rank)


def _sparse_attention(shard: Shard, attention: LatentAttention, indexer: Indexer, tally: Tally) -> None:
    """Add the absorbed up projections, the indexer and the attention to the keys that it selects.

    Every tensor-parallel rank runs the whole indexer, whose inputs need no gradient. Exposed are the gathers of
    the indexer's inputs (sequence parallelism) and of all keys (context parallelism), the reductions of the keys'
    gradients, and the sum of the loss's target over the heads of all ranks. The mean of the indexer's gradients
    over tensor-parallel ranks, once a step, is left out: a lower bound.

    Source: see ``milpplan.simulation.layers.sparse_attention``.
    """
    problem, tokens, hidden = shard.problem, shard.tokens, shard.hidden
    hardware, gpu, columns = problem.hardware, problem.hardware.accelerator, shard.columns
    heads, rank = attention.num_attention_heads / shard.tp, attention.kv_lora_rank
    for width, inner, selective in ((rank, attention.qk_nope_head_dim, True), (attention.v_head_dim, rank, False)):
        forward = kernels.gemm_s(gpu, "bf16", tokens, width, inner, heads)
        dgrad = kernels.gemm_s(gpu, "bf16", tokens, inner, width, heads)
        sums = shard.grad_bytes, shard.fused_sums
        wgrad = kernels.weight_gradient_s(gpu, "bf16", width, inner, tokens, heads, *sums)
        tally.compute(forward, dgrad + wgrad, wgrad, selective=selective)
    if not indexer.takes:
        size, count = float(indexer.index_head_dim), float(indexer.index_n_heads)
        products = [
            shard.gemm(tokens, width, inner, {})
            for width, inner in ((count * size, attention.q_lora_rank or 0), (size, hidden), (count, hidden))
        ]
        # Rotary positions, and the Hadamard rotation of queries and keys.
        passes = shard.memory_bound(4 * BF16_BYTES * tokens * (count + 1) * size)
        weight = np.sum([product.wgrad for product in products], axis=0)
        tally.compute(np.sum([product.forward for product in products], axis=0) + passes, weight + passes, weight)
    length = problem.job.sequence_length
    tally.compute(*(shard.core or flash_core_s(shard, attention, length, tokens, 1)))
    tensor = placement.tensor(columns)
    inputs = collectives.all_gather_s(hardware, indexer_input_bytes(attention, hidden, tokens), *tensor)
    target = collectives.all_reduce_s(hardware, FP32_BYTES * tokens * selected_keys(indexer, length), *tensor)
    if not indexer.takes:
        sp = columns.sequence_parallel
        tally.exposed(Part.TP, Phase.FORWARD, np.where(sp, inputs, 0.0))
        tally.exposed(Part.TP, Phase.BACKWARD, target)
        tally.calls(np.where(sp, 2, 0), 1, call_s(hardware, *tensor))
    add_gathered_keys(shard, attention, tally)


def _core_attention(shard: Shard, tally: Tally, attention: Attention, ring_bytes: FloatArray) -> None:
    """Add scores and weighted values, and the communication of context parallelism.

    The ring of key/value blocks sends the block of the next step beside the attention of the present step. With
    ``gathered_keys`` a gather of all blocks beside the first step replaces it, in forward and backward; the
    gradients of keys and values go around the ring.

    Source: PyTorch 2.13, torch/distributed/tensor/experimental/_context_parallel/_attention.py
    (_AllGatherRotater, _templated_ring_attention_backward).
    """
    job = shard.problem.job
    heads, sizes, _ = core_shape(attention, shard.tp)
    if job.attention_kernel == "flash":
        forward, backward = shard.core or flash_core_s(
            shard, attention, job.sequence_length, shard.tokens, shard.columns.ring
        )
        tally.compute(forward, backward)
        _ring_merges(shard, tally, (heads * sizes[0], heads * sizes[1]), ring_bytes)
    else:
        forward, backward = _unfused_attention(shard, heads, sizes)
        tally.compute(forward, backward, selective=True)
    if (shard.columns.ulysses > 1).any():
        _head_exchange(shard, attention, tally)
    steps = (shard.columns.ring - 1).astype(np.float64)
    ring = placement.context_ring(shard.columns)
    hardware = shard.problem.hardware
    near = neighbours_share(hardware, ring.size, ring.stride, shard.columns.tp * shard.columns.ulysses)
    send, send_back = (
        collectives.p2p_s(hardware, size, ring.stride, *near) for size in (ring_bytes, 2 * ring_bytes)
    )
    cover, cover_back = forward / shard.columns.ring, backward / shard.columns.ring
    parts = (Part.CP, Part.CP_HIDDEN)
    share = collectives.processor_fraction(hardware, *ring)
    if hardware.software.gathered_keys:
        gather = collectives.all_gather_s(hardware, ring_bytes * shard.columns.ring, *ring)
        tally.overlapped(parts, Phase.FORWARD, gather, cover, share)
        tally.overlapped(parts, Phase.BACKWARD, gather, cover_back, share)
    else:
        tally.overlapped(parts, Phase.FORWARD, steps * send, steps * cover, share)
    tally.overlapped(parts, Phase.BACKWARD, steps * send_back, steps * cover_back, share)


def exchanged_bytes(shard: Shard, attention: Attention) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Count the bytes of a rank's queries, keys, values and outputs of attention."""
    heads, (qk_dim, v_dim), _ = core_shape(attention, shard.tp)
    kv_heads = heads if isinstance(attention, LatentAttention) else kv_heads_per_rank(attention, shard.tp)
    queries, keys, values, outputs = (
        BF16_BYTES * shard.tokens * width
        for width in (heads * qk_dim, kv_heads * qk_dim, kv_heads * v_dim, heads * v_dim)
    )
    return queries, keys, values, outputs


def _head_exchange(shard: Shard, attention: Attention, tally: Tally) -> None:
    """Add the all-to-alls of ``Layout.ulysses``: all tokens of some heads for some tokens of all heads, and back.

    Queries, keys, values and outputs have an all-to-all each, forwards and backwards, which nothing hides. Each
    tensor is copied before and after: its heads, and the two pieces of the sequence that a rank has, are put in
    order.

    Sources: Jacobs et al. 2023, DeepSpeed Ulysses, section 3; Transformer Engine at d0067d0d, pytorch/attention/
    dot_product_attention/context_parallel.py (flash_attn_a2a_communicate).
    """
    hardware, group = shard.problem.hardware, placement.head_exchange(shard.columns)
    chosen = shard.columns.ulysses > 1
    for num_bytes in exchanged_bytes(shard, attention):
        seconds = collectives.all_to_all_s(hardware, num_bytes, group.size, group.stride)
        copies = np.where(chosen, 2 * shard.memory_bound(2 * num_bytes), 0.0)
        tally.compute(copies, copies)
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            tally.exposed(Part.CP, phase, seconds)
    tally.calls(4, 4, call_s(hardware, *group))


def _ring_merges(
    shard: Shard, tally: Tally, widths: tuple[FloatArray, FloatArray], ring_bytes: FloatArray
) -> None:
    """Add the kernel and the sums of every step of the ring after the first.

    The forward sums outputs, the backward sums gradients of queries, keys and values. A sum is in fp32: it reads
    the step's part in bf16, and reads and writes the sum.

    Source: Transformer Engine, pytorch/attention/dot_product_attention/context_parallel.py
    (AttnFuncWithCPAndKVP2P).
    """
    gpu = shard.problem.hardware.accelerator
    sums = BF16_BYTES + 2 * FP32_BYTES
    steps = shard.columns.ring - 1
    merge = shard.memory_bound(sums * shard.tokens * widths[1])
    merge_back = shard.memory_bound(sums * (shard.tokens * widths[0] + ring_bytes / BF16_BYTES))
    tally.compute(steps * (merge + gpu.kernel_latency_s), steps * (merge_back + gpu.kernel_latency_s))


def _unfused_attention(shard: Shard, heads: FloatArray, sizes: tuple[int, int]) -> tuple[FloatArray, FloatArray]:
    """Time scores, softmax (with dropout) and values as separate kernels over every head's s x s matrix.

    Returns:
        Seconds forward and backward.
    """
    model, job = shard.problem.model, shard.problem.job
    scores = shard.tokens * job.sequence_length * heads
    keys = float(job.sequence_length)
    gpu = shard.problem.hardware.accelerator
    count, aligned = shard.tokens * heads / keys, all(size % 8 == 0 for size in (*sizes, job.sequence_length))
    products = kernels.batched_small_gemm_s(gpu, keys, keys, sizes[0], count, aligned)
    products = products + kernels.batched_small_gemm_s(gpu, keys, sizes[1], keys, count, aligned)
    softmax = shard.memory_bound(scores * (2 * BF16_BYTES + (5 if model.drops_scores else 0)))
    return products + softmax, 2 * products + 1.5 * softmax


def up_outputs(mlp: DenseMlp | MixtureOfExperts, width: FloatArray) -> Outputs:
    """Name the matrices of an MLP's first product, with outputs of ``width`` each."""
    return {"gate_proj": width, "up_proj": width} if mlp.gated else {"up_proj": width}


def _dense_mlp(shard: Shard, mlp: DenseMlp, tally: Tally) -> None:
    """Add the products and the activation of a dense MLP."""
    matrices = 2 if mlp.gated else 1
    width = mlp.intermediate_size / shard.tp
    up = shard.gemm(shard.tokens, matrices * width, shard.hidden, up_outputs(mlp, width))
    down = shard.gemm(shard.tokens, shard.hidden, width, {"down_proj": shard.hidden})
    activation = shard.memory_bound(BF16_BYTES * shard.tokens * width * (matrices + 1))
    activation_back = shard.memory_bound(BF16_BYTES * shard.tokens * width * (2 * matrices + 1))
    tally.compute(up.forward + down.forward, up.dgrad + up.wgrad + down.dgrad + down.wgrad, up.wgrad + down.wgrad)
    tally.compute(activation, activation_back, selective=shard.problem.job.attention_kernel == "flash")
    linear_pair(shard, tally, (up,), down)


def routed_rows(shard: Shard, moe: MixtureOfExperts) -> FloatArray:
    """Count the token copies that the fullest expert shard works on: F etp (tokens / tp) top-k (``fullest``).

    The count is not divided by ep: expert parallelism is carved out of data parallelism, so the mean rank receives
    as many copies as it sends.
    """
    return fullest(shard) * shard.columns.etp * shard.tokens / shard.tp * moe.num_experts_per_tok


def fullest(shard: Shard) -> FloatArray:
    """Return what the fullest expert rank receives over the mean: ``Job.expert_imbalance``, at most ep.

    The others wait for it in the exchange of every layer. Its memory is an upper bound where it is another rank in
    every layer.
    """
    return np.minimum(shard.problem.job.expert_imbalance, shard.columns.ep.astype(np.float64))


def _mixture_of_experts(shard: Shard, moe: MixtureOfExperts, tally: Tally, *, by_product: bool) -> None:
    """Add router, permutations, grouped products, activation and token exchange of a mixture of experts.

    Tokens are dispatched in the width of ``latent_size``, whose projections every rank has (Megatron-LM@d98e8a64
    core/transformer/moe/moe_layer.py). Checkpoints ``by_product`` keep what exchanges give and replay the rest; a
    compiled layer that exchanges needs no last product again.
    """
    hardware, gpu = shard.problem.hardware, shard.problem.hardware.accelerator
    columns, precision = shard.columns, shard.problem.job.precision
    hidden = moe.latent_size or shard.hidden
    local = shard.tokens / shard.tp
    rows = routed_rows(shard, moe)
    experts = moe.num_experts / columns.ep
    per_expert = rows / experts
    matrices = 2 if moe.gated else 1
    width = moe.intermediate_size / columns.etp.astype(np.float64)
    router = kernels.gemm_s(gpu, "bf16", local, float(moe.num_experts), float(shard.hidden))
    permute = shard.memory_bound(4 * BF16_BYTES * local * moe.num_experts_per_tok * hidden)
    # Tokens arrive sorted by source; a rank with several experts sorts them by expert, and back afterwards.
    permute = permute + np.where(
        (columns.ep > 1) & (experts > 1), shard.memory_bound(4 * BF16_BYTES * rows * hidden), 0.0
    )
    gathers = (columns.expert_dispatch == ALLGATHER) & (columns.ep > 1)
    if gathers.any():
        # Rows are taken from all gathered tokens, and their results are added to such a tensor.
        gathered = shard.memory_bound(BF16_BYTES * (3 * rows + columns.ep * local) * hidden)
        permute = np.where(gathers, gathered, permute)
    router_weight = router * shard.trains()
    tally.compute(router + permute, router + router_weight + permute, router_weight)

    if moe.latent_size:
        for sizes in ((hidden, shard.hidden), (shard.hidden, hidden)):
            projection = shard.gemm(local, *sizes, {})
            tally.compute(projection.forward, projection.dgrad + projection.wgrad, projection.wgrad)

    def grouped(m: FloatArray | float, n: FloatArray | float, k: FloatArray | float) -> FloatArray:
        """Time the products of all experts of a rank."""
        return np.asarray(kernels.gemm_s(gpu, precision, m, n, k, experts))

    first, last = grouped(per_expert, matrices * width, hidden), grouped(per_expert, hidden, width)
    forward = first + last
    if by_product:
        again = (columns.ep == 1) | hardware.software.keeps_unread_results
        tally.replayed(router + permute + first + np.where(again, last, 0.0))

    backward = grouped(per_expert, hidden, matrices * width) + grouped(per_expert, width, hidden)
    up_weight, down_weight = (
        kernels.weight_gradient_s(gpu, precision, n, k, per_expert, experts, shard.grad_bytes, shard.fused_sums)
        for n, k in ((matrices * width, hidden), (hidden, width))
    )
    if shard.problem.job.lora is not None:
        up = shard.adapters(per_expert, hidden, up_outputs(moe, width), experts)
        down = shard.adapters(per_expert, width, {"down_proj": hidden}, experts)
        forward, backward = forward + up[0] + down[0], backward + up[1] + down[1]
        up_weight, down_weight = up[2], down[2]
    backward = backward + up_weight + down_weight
    cast = shard.cast(rows * (hidden + width))
    forward, backward = forward + cast, backward + cast
    tally.compute(forward, backward, up_weight + down_weight)
    activation = shard.memory_bound(BF16_BYTES * rows * width * (matrices + 1))
    activation_back = shard.memory_bound(BF16_BYTES * rows * width * (2 * matrices + 1))
    with tally.module("moe_act"):
        tally.compute(activation, activation_back, selective=shard.problem.job.attention_kernel == "flash")
    sent = fullest(shard) * BF16_BYTES * local * moe.num_experts_per_tok * hidden
    sent = sent / hardware.software.dispatch_efficiency
    copies = float(moe.num_experts_per_tok) if hardware.software.deduplicated_dispatch else None
    ep_group, etp_group = placement.expert(columns), placement.expert_tensor(columns)
    exchange = collectives.all_to_all_s(hardware, sent, ep_group.size, ep_group.stride, copies)
    gather = collectives.all_gather_s(hardware, sent * columns.etp, *etp_group)
    scatter = collectives.reduce_scatter_s(hardware, sent * columns.etp, *etp_group)
    moved = [2 * exchange + gather + scatter] * 2
    if columns.any_of("expert_dispatch"):
        moved = named_dispatch(shard, moe, sent, moved)
    for phase, seconds in zip((Phase.FORWARD, Phase.BACKWARD), moved, strict=True):
        tally.exposed(Part.EP, phase, seconds)
    tally.calls(2, 2, call_s(hardware, *ep_group) + call_s(hardware, *etp_group))
    if moe.shared_intermediate_size:
        with tally.module("shared_experts"):
            _dense_mlp(shard, DenseMlp(intermediate_size=moe.shared_intermediate_size, gated=moe.gated), tally)


class LayerModel(Protocol):
    """Signature of a cost model, an entry point of ``milpplan.cost_models``."""

    def __call__(
        self, problem: Problem, kind: LayerRun, columns: LayoutColumns, seconds: FloatArray
    ) -> FloatArray:
        """Return the seconds of one layer, [Part, Phase, n], given milpplan's own.

        Times are finite and not negative. The times of a layout must not depend on the other layouts of the call.
        They may depend on ``LAYER_KEYS`` of the layout and on the fields that place its ranks, on nothing else.
        """


def replaced_seconds(problem: Problem, kind: LayerRun, columns: LayoutColumns, seconds: FloatArray) -> FloatArray:
    """Return the times of the cost model that the hardware names; ``seconds`` for milpplan's own model.

    Raises:
        UnknownNameError: the plug-in is not installed.
        PluginError: the plug-in fails, or returns wrong shapes, negative or infinite times.
    """
    name = problem.hardware.software.cost_model
    if name == OWN_COST_MODEL:
        return seconds
    model = cast(LayerModel, plugin("cost_models", name))
    try:
        answer = np.asarray(model(problem, kind, columns, seconds.copy()), dtype=np.float64)
    except Exception as error:
        raise _broken(name, f"fails: {type(error).__name__}: {error}") from error
    if answer.shape != seconds.shape:
        raise _broken(name, f"gives times of shape {answer.shape}, expected {seconds.shape}")
    if not (np.isfinite(answer).all() and (answer >= 0).all()):
        raise _broken(name, "gives times that are negative or not finite")
    return answer


def has_own_times(problem: Problem) -> bool:
    """Check that milpplan's own formulas time the layers of all node types."""
    return all(hardware.software.cost_model == OWN_COST_MODEL for hardware in problem.node_types)


def _broken(name: str, what: str) -> PluginError:
    """Make the error of a cost model that fails or returns wrong times."""
    return PluginError(
        f"The cost model {plugin_title('cost_models', name)} {what}.",
        "Expected seconds of a layer by part, phase and layout.",
        "Repair its package, or take cost_model out of the hardware description.",
    )
