"""Durations of layers in a pair: a forward beside the whole backward of another micro-batch on the same rank.

In a pair, the communication of each half runs beside the compute of the other half. The split of the layers
decides which layers run beside each other, but durations must be sums over the layers of a virtual stage. So each
layer is priced as if a layer of its own kind ran beside it, with as much compute to hide communication as it has
itself:

    forward         max(C, M) = C + exposed part of M seconds of communication beside C seconds of compute
    whole backward  likewise, with compute and communication of the backward and its weight gradients

The sum of both halves is at least the compute and at least the communication of both layers. It is also at least
the forward alone, and at least the backward alone without its weight gradients, each with its own exposed
communication. Replays of recomputed layers, a frozen reference, embedding and head hide nothing: an upper bound.
Where the chunks of a rank hold different numbers or kinds of layers, the larger chunk has less compute beside it
than is counted: a lower bound.

Source: DeepSeek-AI 2024 (DeepSeek-V3), section 3.2.1: chunks of a forward and a backward are taken apart into
attention, dispatch, MLP and combine, and arranged so that all-to-all and pipeline communication are hidden.
"""

from __future__ import annotations

import numpy as np

from milpplan.problem import LayerRun, Problem
from milpplan.simulation import FloatArray, IntArray, LayoutColumns
from milpplan.simulation.layers.layer_time import further_forward_s, host_seconds, layer_tally
from milpplan.simulation.layers.shard import EXPOSED, ONCE, Part, Phase
from milpplan.simulation.network import collectives, placement
from milpplan.units import NS_PER_S

LAYER_COMMUNICATION = (Part.TP, Part.CP, Part.EP, Part.TP_HIDDEN, Part.CP_HIDDEN)
"""Parts of the communication inside a layer, exposed and hidden when the layer runs alone."""
PAIR_ROUNDING_NS = 2 * (len(Part) * len(Phase) + 1)
"""Maximum amount by which ``least_paired_ns`` is below the kernels of both layers because its parts are
rounded."""
WHOLE = (Phase.BACKWARD, Phase.WEIGHT)
"""Phases of a whole backward."""


def paired_seconds(problem: Problem, kind: LayerRun, columns: LayoutColumns) -> FloatArray:
    """Time one layer of ``kind`` in a pair: forward and whole backward, without sharded states, seconds [2, n]."""
    tally = layer_tally(problem, kind, columns)
    seconds, share = tally.seconds, _processor_fraction(problem, columns)
    alone = {phase: seconds[EXPOSED, phase].sum(axis=0) for phase in ONCE}

    def overlapped(*phases: Phase) -> FloatArray:
        """Time phases whose communication has their own amount of compute beside it."""
        compute = sum(seconds[Part.COMPUTE, phase] for phase in phases)
        communication = sum(seconds[list(LAYER_COMMUNICATION), phase].sum(axis=0) for phase in phases)
        host = sum(host_seconds(problem, tally, phase) for phase in phases)
        exposed, _ = collectives.overlap_s(np.asarray(communication), np.asarray(compute), share)
        return np.asarray(np.maximum(compute + exposed, host))

    forward = np.minimum(overlapped(Phase.FORWARD), alone[Phase.FORWARD])
    longest = np.maximum(alone[Phase.FORWARD], alone[Phase.BACKWARD])
    backward = np.maximum(overlapped(*WHOLE), longest - forward)
    if problem.job.further_forwards:
        forward = forward + further_forward_s(problem, kind, columns)[EXPOSED].sum(axis=0)
    return np.stack([forward, np.minimum(backward, alone[Phase.BACKWARD] + alone[Phase.WEIGHT])])


def least_paired_ns(problem: Problem, columns: LayoutColumns) -> IntArray:
    """Bound a layer's forward and its whole backward in a pair from below, in nanoseconds [K, 2, n].

    A lower bound of ``paired_ns``, which adds the communication of ZeRO 2 and 3: the times are rounded down by
    more than the rounding of their parts.
    """
    seconds = np.stack([paired_seconds(problem, kind, columns) for kind in problem.model.kinds])
    return np.maximum(np.floor(seconds * NS_PER_S).astype(np.int64) - len(Part) * len(Phase), 0)


def _processor_fraction(problem: Problem, columns: LayoutColumns) -> FloatArray:
    """Return the maximum share of the compute that a collective of a layer uses, [n]."""
    dimensions = (placement.tensor, placement.context, placement.expert, placement.expert_tensor)
    share = np.zeros(len(columns))
    for group in (dimension(columns) for dimension in dimensions):
        fraction = collectives.processor_fraction(problem.hardware, *group)
        share = np.maximum(share, np.where(np.asarray(group.size) > 1, fraction, 0.0))
    return share


def paired_ns(
    problem: Problem,
    layers: LayoutColumns,
    parts: IntArray,
    zero: IntArray,
    columns: LayoutColumns,
    place: IntArray,
) -> IntArray:
    """Time a layer of each kind in a pair. Communication of sharded states in every micro-batch runs beside it.

    Args:
        layers: l distinct layers.
        parts: [K, Part, Phase, l] nanoseconds of the layers when they run alone.
        zero: [K, 2, 3, n] nanoseconds (exposed, hidden) of the communication of sharded states.
        columns: n layouts.
        place: [n] index in ``layers`` of each layout.

    Returns:
        Nanoseconds [K, 2, n]: the forward, and the backward without its weight gradients, which take as long as
        alone. 0 where the schedule has no pairs.
    """
    parts = parts[..., place]
    seconds = np.stack([paired_seconds(problem, kind, layers) for kind in problem.model.kinds])[..., place]
    replicas = placement.replicas(columns)
    share = collectives.processor_fraction(problem.hardware, *replicas)
    zero_s = zero.sum(axis=1) / NS_PER_S
    gathers, reductions = zero_s[:, :2], np.stack([np.zeros_like(zero_s[:, 2]), zero_s[:, 2]], axis=1)
    hidden = collectives.hidden_fraction(problem.hardware, gathers, reductions)
    exposed, _ = collectives.overlap_s(gathers + reductions, seconds, share, hidden)
    paired = np.rint((seconds + exposed) * NS_PER_S).astype(np.int64)
    alone = parts[:, EXPOSED][:, :, ONCE].sum(axis=1) + zero[:, 0]
    compute = parts[:, Part.COMPUTE][:, ONCE]
    whole = np.clip(paired[:, 1], compute[:, 1] + compute[:, 2], alone[:, 1] + alone[:, 2])
    forward = np.clip(paired[:, 0], compute[:, 0], alone[:, 0])
    backward = np.maximum(whole - alone[:, 2], 0)
    return np.where(columns.runs_pairs, np.stack([forward, backward], axis=1), 0)
