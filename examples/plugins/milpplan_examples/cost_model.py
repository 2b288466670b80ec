"""A cost model: the times of a layer, given milpplan's. This one takes every product at half the peak rate, as
back-of-the-envelope planners do, and leaves communication as it is.

A real one would look measurements up by the sizes in `problem`, `kind` and `columns`.
"""

from __future__ import annotations

import numpy as np

from milpplan.problem.model import GroupedQueryAttention, LayerRun, MixtureOfExperts
from milpplan.problem.problem import Problem
from milpplan.simulation.layers.kernels import average_keys
from milpplan.simulation.layers.parameter_counts import layer_parameters
from milpplan.simulation.layers.shard import Part, Phase
from milpplan.simulation.layout_columns import FloatArray, LayoutColumns

UTILISATION = 0.5


def layer_seconds(problem: Problem, kind: LayerRun, columns: LayoutColumns, seconds: FloatArray) -> FloatArray:
    """Seconds of one layer, [Part, Phase, number of layouts]."""
    if not isinstance(kind.attention, GroupedQueryAttention):
        raise ValueError("half-peak times grouped-query attention only")
    job, peak = problem.job, problem.hardware.accelerator.bf16.peak_flops_per_s
    tokens = columns.micro_batch_size * job.sequence_length / columns.cp
    width = kind.attention.num_attention_heads * kind.attention.head_dim
    attention = 4 * average_keys(job.sequence_length, kind.attention.sliding_window) * width
    second = tokens / columns.tp / (UTILISATION * peak)
    products, replayed = 2 * _active_parameters(problem, kind) * second, attention * second
    forward = products + replayed
    weight = np.where(columns.split_backward, products, 0.0)
    compute = {
        Phase.FORWARD: forward,
        Phase.BACKWARD: 2 * forward - weight,
        Phase.WEIGHT: weight,
        Phase.SELECTIVE: replayed,
        Phase.FULL: forward,
    }
    for phase, spent in compute.items():
        seconds[Part.COMPUTE, phase] = 0.0 if problem.inference and phase != Phase.FORWARD else spent
    return seconds


def _active_parameters(problem: Problem, kind: LayerRun) -> float:
    """Parameters that a token meets."""
    parameters = layer_parameters(problem.model, kind)
    if isinstance(kind.mlp, MixtureOfExperts):
        share = kind.mlp.num_experts_per_tok / kind.mlp.num_experts
        return parameters.total - parameters.experts * (1 - share)
    return parameters.total
