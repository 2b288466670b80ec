"""What passes between pipeline stages, inside one node type and from one to another, and what all of them do
together."""

from __future__ import annotations

import numpy as np

from milpplan.problem.hardware import HardwareSpec
from milpplan.problem.problem import Problem
from milpplan.simulation.layers.layer_time import BF16_BYTES, FP32_BYTES
from milpplan.simulation.layout_columns import BoolArray, FloatArray, IntArray, LayoutColumns
from milpplan.simulation.network import collectives, placement
from milpplan.simulation.network.collectives import call_s, far_s
from milpplan.simulation.network.domains import neighbours_share


def transfer_s(problem: Problem, columns: LayoutColumns) -> FloatArray:
    """Seconds of an activation (or its gradient) from one stage to the next, [n]; 0 without a pipeline.

    With sequence parallelism each tensor-parallel rank sends its own part, 2 u h / t bytes; without, all send the
    same 2 u h bytes, or (``pp_scatter_gather``) each a part, and the stage that receives gathers them:
    p2p(2 u h / t) + all_gather(2 u h). Source: Narayanan et al. 2021, section 4.1.
    Both hosts take their time for a message: + 2 ``message_s``.
    """
    stages, usual = placement.pipeline(columns), columns.tp * columns.cp * columns.dp
    near = neighbours_share(problem.hardware, stages.size, stages.stride, usual)
    return _sent_s(problem, columns, problem.hardware, *near)


def crossing_transfer_s(problem: Problem, columns: LayoutColumns) -> FloatArray:
    """The same from a stage on one node type to a stage on another, [n]: across domains, on the slowest of all
    types (upper where a pair of others meets), and no faster than between stages on one of them."""
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
    """Sent, and gathered where only parts are sent, with the network of one node type."""
    tp = columns.tp
    tokens = columns.micro_batch_size * problem.job.sequence_length / columns.cp
    gathered = columns.pp_scatter_gather & ~columns.sequence_parallel
    message = BF16_BYTES * tokens * problem.model.hidden_size
    share = np.where(columns.sequence_parallel | gathered, tp, 1)
    seconds = collectives.p2p_s(hardware, message / share, placement.pipeline(columns).stride, inside, same_pod)
    if columns.any_of("pp_scatter_gather"):
        gather = collectives.all_gather_s(hardware, message, *placement.tensor(columns))
        seconds = seconds + np.where(gathered, gather, 0.0)
    seconds = seconds + 2.0 * hardware.software.message_s
    return np.where(columns.pp > 1, seconds, 0.0)


def ends_reduce_s(problem: Problem, num_bytes: FloatArray, size: IntArray, stride: IntArray) -> FloatArray:
    """All-reduce between the two ends of a pipeline, ``size`` of them ``stride`` apart, [n]: on the slowest node
    type, and where there are several across domains, which nodes of two types never share."""
    seconds = []
    for hardware in problem.node_types:
        domain = hardware.scale_up.num_gpus if problem.other_hardware else 0
        # A whole domain further, so that what is on one rail stays on it.
        apart = np.maximum(np.where(stride < domain, stride + domain, stride), 1)
        seconds.append(collectives.all_reduce_s(hardware, num_bytes, size, apart))
    return np.asarray(np.max(seconds, axis=0))


def gradient_norm_s(problem: Problem, num_gpus: IntArray) -> FloatArray:
    """The norm of the gradients: an all-reduce of one number over all GPUs (dominated by latency), and what the
    library takes to call it; of several node types the slowest. Any shape."""
    seconds = [
        collectives.all_reduce_s(hardware, FP32_BYTES, num_gpus, 1) + call_s(hardware, num_gpus, 1)
        for hardware in problem.node_types
    ]
    return np.asarray(np.max(seconds, axis=0))


def far_step_s(problem: Problem, columns: LayoutColumns) -> FloatArray:
    """What tensor-parallel groups in several domains take once a step, [n]: ``far_step_s`` for every pair of
    domains, and ``far_reduce_s`` where gradients are reduced without ZeRO; of several node types the slowest."""
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
