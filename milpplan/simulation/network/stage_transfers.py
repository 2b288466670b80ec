"""Communication of pipeline stages: transfers between neighbours, reductions of the two ends and of all stages."""

from __future__ import annotations

import numpy as np

from milpplan.problem import HardwareSpec, Problem
from milpplan.simulation import BoolArray, FloatArray, IntArray, LayoutColumns
from milpplan.simulation.layers.shard import BF16_BYTES, FP32_BYTES
from milpplan.simulation.network import collectives, placement
from milpplan.simulation.network.collectives import call_s, far_s
from milpplan.simulation.network.domains import neighbours_share


def transfer_s(problem: Problem, columns: LayoutColumns) -> FloatArray:
    """Time an activation (or its gradient) from one stage to the next, in seconds [n]; 0 without a pipeline.

    With sequence parallelism each tensor-parallel rank sends its own part, 2 u h / t bytes. Without, all ranks
    send the same 2 u h bytes. With ``pp_scatter_gather`` each rank sends a part, and the receiving stage gathers
    the parts: p2p(2 u h / t) + all_gather(2 u h). Source: Narayanan et al. 2021, section 4.1. Both hosts need
    their time for a message: + 2 ``message_s``. In DPO the activation of a frozen reference is part of the
    message, and so is its gradient, which is zero (``layer_time.further_forward_s``). Where further forwards are
    phases of their own, the transfers that fill the pipeline for them are left out: a lower bound.
    """
    stages, usual = placement.pipeline(columns), columns.tp * columns.cp * columns.dp
    near = neighbours_share(problem.hardware, stages.size, stages.stride, usual)
    return _sent_s(problem, columns, problem.hardware, *near)


def crossing_transfer_s(problem: Problem, columns: LayoutColumns) -> FloatArray:
    """Time an activation from a stage on one node type to a stage on another type, in seconds [n].

    The transfer crosses domains at the speed of the slowest node type of the cluster, an upper bound if two other
    types meet. It is no faster than a transfer inside any type.
    """
    outside = np.zeros(len(columns), dtype=np.bool_)
    seconds = [
        np.maximum(transfer_s(problem.on_type(number), columns), _sent_s(problem, columns, hardware, outside))
        for number, hardware in enumerate(problem.node_types)
    ]
    return np.asarray(np.max(seconds, axis=0))


def _sent_s(
    problem: Problem,
    columns: LayoutColumns,
    hardware: HardwareSpec,
    inside: BoolArray,
    same_pod: BoolArray | None = None,
) -> FloatArray:
    """Time the message, and the gather where ranks send parts, with the network of one node type."""
    tp = columns.tp
    tokens = columns.micro_batch_size * problem.job.sequence_length / columns.cp
    gathered = columns.pp_scatter_gather & ~columns.sequence_parallel
    message = BF16_BYTES * tokens * problem.model.hidden_size * (1 + problem.job.joined_forwards)
    share = np.where(columns.sequence_parallel | gathered, tp, 1)
    seconds = collectives.p2p_s(hardware, message / share, placement.pipeline(columns).stride, inside, same_pod)
    if columns.any_of("pp_scatter_gather"):
        gather = collectives.all_gather_s(hardware, message, *placement.tensor(columns))
        seconds = seconds + np.where(gathered, gather, 0.0)
    seconds = seconds + 2.0 * hardware.software.message_s
    return np.where(columns.pp > 1, seconds, 0.0)


def ends_reduce_s(problem: Problem, num_bytes: FloatArray, size: IntArray, stride: IntArray) -> FloatArray:
    """Time an all-reduce between the two ends of a pipeline, ``size`` ranks ``stride`` apart, in seconds [n].

    It runs at the speed of the slowest node type. With several node types it crosses domains, because nodes of two
    types never share a domain.
    """
    seconds = []
    for hardware in problem.node_types:
        domain = hardware.scale_up.num_gpus if problem.other_hardware else 0
        # Add a whole domain, so that ranks on the same rail stay on it.
        distance = np.maximum(np.where(stride < domain, stride + domain, stride), 1)
        seconds.append(collectives.all_reduce_s(hardware, num_bytes, size, distance))
    return np.asarray(np.max(seconds, axis=0))


def gradient_norm_s(problem: Problem, num_gpus: IntArray) -> FloatArray:
    """Time the norm of the gradients, a maximum over the node types. Any shape.

    It is an all-reduce of a single number over all GPUs, dominated by latency, with the host time of its call.
    """
    seconds = [
        collectives.all_reduce_s(hardware, FP32_BYTES, num_gpus, 1) + call_s(hardware, num_gpus, 1)
        for hardware in problem.node_types
    ]
    return np.asarray(np.max(seconds, axis=0))


def far_step_s(problem: Problem, columns: LayoutColumns) -> FloatArray:
    """Time the overhead of a step of tensor-parallel groups across domains, a maximum over node types, [n].

    ``far_step_s`` for every pair of domains, and ``far_reduce_s`` if gradients are reduced without ZeRO.
    """
    group = placement.tensor(columns)
    reduced = (columns.zero_stage == 0) & (columns.dp * columns.cp > 1)
    seconds = [
        far_s(
            hardware,
            hardware.software.far_step_s + np.where(reduced, hardware.software.far_reduce_s, 0.0),
            group.size,
            group.stride,
        )
        for hardware in problem.node_types
    ]
    return np.asarray(np.max(seconds, axis=0))
