"""Effective bandwidth of collectives as a function of message, group and tier: the cost model as a table."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from milpplan.communication.records import ALL_TYPES, Bandwidth, NodeBlock, Tier
from milpplan.problem.hardware import HardwareSpec
from milpplan.problem.plan import Layout
from milpplan.problem.problem import Problem
from milpplan.simulation.layout_columns import FloatArray
from milpplan.simulation.network import collectives
from milpplan.simulation.network.collectives import Operation
from milpplan.simulation.replica_costs import across

MESSAGE_BYTES = tuple(float(2**power) for power in range(14, 33, 2))
"""16 KiB to 4 GiB."""
OPERATIONS: tuple[Operation, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def cluster_bandwidths(problem: Problem, layout: Layout, blocks: tuple[NodeBlock, ...]) -> tuple[Bandwidth, ...]:
    """Tabulate the bandwidths of every node type among its own GPUs.

    With heterogeneous replicas also among the GPUs of all types, at the speed of the slowest type.
    """
    bandwidths: list[Bandwidth] = []
    for block in blocks:
        bandwidths += effective_bandwidths([problem.node_types[block.node_type]], block.num_gpus, block.name)
    if layout.replica_micro_batches:
        types = [across(problem, block.node_type) for block in blocks]
        bandwidths += effective_bandwidths(types, layout.num_gpus, ALL_TYPES)
    return tuple(bandwidths)


def effective_bandwidths(hardware: Sequence[HardwareSpec], num_gpus: int, nodes: str) -> list[Bandwidth]:
    """Tabulate the bandwidths of all operations among 2, 4, 8, ... GPUs.

    The GPUs are neighbours, or there is one in each domain (each pod). With several types of hardware the slowest
    type counts.
    """
    sizes = [2**power for power in range(1, num_gpus.bit_length()) if 2**power <= num_gpus]
    domain = max(spec.scale_up.num_gpus for spec in hardware)
    strides = [1, domain, *(spec.pods.num_gpus for spec in hardware if spec.pods is not None)]
    shapes = [(size, stride) for stride in strides for size in sizes if size * stride <= max(num_gpus, domain)]
    shapes = list(dict.fromkeys(shapes))
    bandwidths = []
    for operation in OPERATIONS:
        for size, stride in shapes:
            message = np.array(MESSAGE_BYTES)
            seconds = np.maximum.reduce(
                [collective_s(spec, operation, message, size, stride) for spec in hardware]
            )
            moved = collectives.wire_factor(operation, np.array(size)) * message
            members = min(int(collectives.members_per_domain(spec, size, stride)) for spec in hardware)
            tier: Tier = "inside" if members == size else "between"
            apart = "one a pod" if stride > domain else "one a domain"
            where = tier if stride == 1 else apart
            bandwidths += [
                Bandwidth(operation, size, stride, tier, float(m), float(s), float(b / s), nodes, where)
                for m, s, b in zip(message, seconds, moved, strict=True)
            ]
    return bandwidths


def collective_s(
    hardware: HardwareSpec, operation: Operation, num_bytes: FloatArray, size: int, stride: int
) -> FloatArray:
    """Time a collective by its name, in seconds."""
    if operation == "all_to_all":
        return collectives.all_to_all_s(hardware, num_bytes, size, stride)
    by_name = {
        "all_reduce": collectives.all_reduce_s,
        "all_gather": collectives.all_gather_s,
        "reduce_scatter": collectives.reduce_scatter_s,
    }
    return by_name[operation](hardware, num_bytes, size, stride)
