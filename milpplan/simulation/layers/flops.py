"""Model FLOPs, for utilisation figures only (durations come from ``layers``)."""

from __future__ import annotations

from milpplan.problem.model import LatentAttention, ModelSpec
from milpplan.problem.problem import Problem
from milpplan.simulation.layers.layer_time import average_keys
from milpplan.simulation.layers.parameters import active_parameters, embedding_parameters, position_parameters


def model_flops_per_token(model: ModelSpec, sequence_length: int) -> float:
    """Forward and backward FLOPs one token needs: 6 a parameter that multiplies it, and causal attention.

    6 * (active parameters without look-ups: positions, and an untied embedding) + 6 * keys * (qk + v width) a
    layer, keys averaged over the causal mask (half of Megatron's older count, which takes s). No recompute.
    Source: Chowdhery et al. 2022 (PaLM), appendix B, with the causal half.
    """
    matmul = active_parameters(model) - position_parameters(model)
    if not model.tie_word_embeddings:
        matmul -= embedding_parameters(model)
    attention = 0.0
    for run in model.layers:
        heads = run.attention.num_attention_heads
        if isinstance(run.attention, LatentAttention):
            dims = run.attention
            width = heads * (dims.qk_nope_head_dim + dims.qk_rope_head_dim + dims.v_head_dim)
            keys = float(average_keys(sequence_length, None))
        else:
            width = 2 * heads * run.attention.head_dim
            keys = float(average_keys(sequence_length, run.attention.sliding_window))
        attention += run.count * 6 * keys * width
    return 6.0 * matmul + attention


def mfu(problem: Problem, tokens_per_s: float, num_gpus: int) -> float:
    """Model FLOPs utilisation: model FLOPs a second over the dense peak of the job's precision, summed over the
    accelerators."""
    peak = 0.0
    for hardware, count in zip(problem.node_types, problem.node_gpus, strict=True):
        gpu = hardware.accelerator
        engine = gpu.fp8 if problem.job.precision == "fp8" and gpu.fp8 is not None else gpu.bf16
        peak += (count if problem.other_hardware else num_gpus) * engine.peak_flops_per_s
    flops = model_flops_per_token(problem.model, problem.job.sequence_length)
    if problem.inference:
        # Forwards are a third, and have logits of one token of each sequence.
        length = problem.job.sequence_length
        flops = flops / 3 - 2 * problem.model.vocab_size * problem.model.hidden_size * (length - 1) / length
    return flops * tokens_per_s / peak
