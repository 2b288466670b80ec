"""Durations of layers in a pair: a forward beside the whole backward of another micro-batch on the same rank.

In a pair the communication of one runs beside the compute of the other. Which layers stand beside which depends
on the split, and durations have to be sums over the layers of a virtual stage. So each layer is priced as if a
layer of its own kind stood beside it, with as much compute to hide its communication as it has itself:

    forward         max(C, M) = C + exposed part of M seconds of communication beside C seconds of compute
    whole backward  the same with the compute and the communication of the backward and its weight gradients

The two together are no less than the compute and no less than the communication of both layers, and no less than
either of the two alone: than the forward, and than the backward without its weight gradients, each with its own
exposed communication. Replays of recomputed layers, embedding and head hide nothing (upper). Where the chunks of a
rank hold different numbers or kinds of layers, the larger one finds less beside it than is counted (lower).

Source: DeepSeek-AI 2024 (DeepSeek-V3), section 3.2.1: chunks of a forward and a backward are taken apart into
attention, dispatch, MLP and combine, and arranged so that all-to-all and pipeline communication are hidden.
"""

from __future__ import annotations

import numpy as np

from milpplan.problem.model import LayerRun
from milpplan.problem.problem import Problem
from milpplan.simulation.layers.layer_time import host_seconds, layer_tally
from milpplan.simulation.layers.terms import EXPOSED, ONCE, Part, Phase
from milpplan.simulation.layout_columns import FloatArray, IntArray, LayoutColumns
from milpplan.simulation.network import collectives, placement
from milpplan.units import NS_PER_S

LAYER_COMMUNICATION = (Part.TP, Part.CP, Part.EP, Part.TP_HIDDEN, Part.CP_HIDDEN)
"""Seconds of communication inside a layer, whether it is exposed when the layer runs alone or not."""
PAIR_ROUNDING_NS = 2 * (len(Part) * len(Phase) + 1)
"""By how much ``least_paired_ns`` may be below the kernels of both layers for the rounding of its parts."""
WHOLE = (Phase.BACKWARD, Phase.WEIGHT)


def paired_seconds(problem: Problem, kind: LayerRun, columns: LayoutColumns) -> FloatArray:
    """Seconds of one layer of ``kind`` in a pair, forward and whole backward, without sharded states [2, n]."""
    tally = layer_tally(problem, kind, columns)
    seconds, share = tally.seconds, _processor_fraction(problem, columns)
    alone = {phase: seconds[EXPOSED, phase].sum(axis=0) for phase in ONCE}

    def beside(*phases: Phase) -> FloatArray:
        compute = sum(seconds[Part.COMPUTE, phase] for phase in phases)
        busy = sum(seconds[list(LAYER_COMMUNICATION), phase].sum(axis=0) for phase in phases)
        host = sum(host_seconds(problem, tally, phase) for phase in phases)
        exposed, _ = collectives.overlap_s(np.asarray(busy), np.asarray(compute), share)
        return np.asarray(np.maximum(compute + exposed, host))

    forward = np.minimum(beside(Phase.FORWARD), alone[Phase.FORWARD])
    longest = np.maximum(alone[Phase.FORWARD], alone[Phase.BACKWARD])
    backward = np.maximum(beside(*WHOLE), longest - forward)
    return np.stack([forward, np.minimum(backward, alone[Phase.BACKWARD] + alone[Phase.WEIGHT])])


def least_paired_ns(problem: Problem, columns: LayoutColumns) -> IntArray:
    """Nanoseconds that a layer's forward and its whole backward take in a pair at least, [K, 2, n]: what
    ``paired_ns`` says, which adds what ZeRO 2 and 3 do beside it, less more than the rounding of its parts."""
    seconds = np.stack([paired_seconds(problem, kind, columns) for kind in problem.model.kinds])
    return np.maximum(np.floor(seconds * NS_PER_S).astype(np.int64) - len(Part) * len(Phase), 0)


def _processor_fraction(problem: Problem, columns: LayoutColumns) -> FloatArray:
    """The largest share of the compute that a collective of a layer takes while it runs beside it, [n]."""
    groups = (placement.tensor, placement.context, placement.expert, placement.expert_tensor)
    share = np.zeros(len(columns))
    for group in (place(columns) for place in groups):
        own = collectives.processor_fraction(problem.hardware, *group)
        share = np.maximum(share, np.where(np.asarray(group.size) > 1, own, 0.0))
    return share


def paired_ns(
    problem: Problem,
    layers: LayoutColumns,
    parts: IntArray,
    zero: IntArray,
    columns: LayoutColumns,
    place: IntArray,
) -> IntArray:
    """Nanoseconds of a layer of each kind in a pair, [K, 2, n]: the forward, and the backward without its weight
    gradients, which take what they take alone. Nothing where the schedule has no pairs.

    ``layers``: the distinct layers, of which ``place`` [n] says which is a layout's; ``parts`` [K, Part, Phase, l]
    nanoseconds of these and ``zero`` [K, 2, 3, n] (exposed, hidden) of the layouts when layers run alone. What
    sharding sends in every micro-batch runs beside the pair.
    """
    if not columns.runs_pairs.any():
        return np.broadcast_to(np.int64(0), (len(problem.model.kinds), 2, len(columns)))
    parts = parts[..., place]
    seconds = np.stack([paired_seconds(problem, kind, layers) for kind in problem.model.kinds])[..., place]
    replicas = placement.replicas(columns)
    share = collectives.processor_fraction(problem.hardware, *replicas)
    sent = zero.sum(axis=1) / NS_PER_S
    busy = np.stack([sent[:, 0], sent[:, 1] + sent[:, 2]], axis=1)
    exposed, _ = collectives.overlap_s(busy, seconds, share)
    paired = np.rint((seconds + exposed) * NS_PER_S).astype(np.int64)
    alone = parts[:, EXPOSED][:, :, ONCE].sum(axis=1) + zero[:, 0]
    compute = parts[:, Part.COMPUTE][:, ONCE]
    whole = np.clip(paired[:, 1], compute[:, 1] + compute[:, 2], alone[:, 1] + alone[:, 2])
    forward = np.clip(paired[:, 0], compute[:, 0], alone[:, 0])
    backward = np.maximum(whole - alone[:, 2], 0)
    return np.where(columns.runs_pairs, np.stack([forward, backward], axis=1), 0)
