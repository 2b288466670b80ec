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
    """Of every node type among its own GPUs; with replicas of different make also among the GPUs of all types,
    whose collectives take as long as on the slowest."""
    found: list[Bandwidth] = []
    for block in blocks:
        found += effective_bandwidths([problem.node_types[block.node_type]], block.num_gpus, block.name)
    if layout.replica_micro_batches:
        types = [across(problem, block.node_type) for block in blocks]
        found += effective_bandwidths(types, layout.num_gpus, ALL_TYPES)
    return tuple(found)


def effective_bandwidths(hardware: Sequence[HardwareSpec], num_gpus: int, nodes: str) -> list[Bandwidth]:
    """All operations among 2, 4, 8, ... neighbours up to ``num_gpus``, and among as many GPUs with one in each
    domain (each pod), the slowest of the types each."""
    sizes = [2**power for power in range(1, num_gpus.bit_length()) if 2**power <= num_gpus]
    domain = max(one.scale_up.num_gpus for one in hardware)
    strides = [1, domain, *(one.pods.num_gpus for one in hardware if one.pods is not None)]
    shapes = [(size, stride) for stride in strides for size in sizes if size * stride <= max(num_gpus, domain)]
    shapes = list(dict.fromkeys(shapes))
    found = []
    for operation in OPERATIONS:
        for size, stride in shapes:
            message = np.array(MESSAGE_BYTES)
            seconds = np.maximum.reduce([collective_s(one, operation, message, size, stride) for one in hardware])
            moved = collectives.wire_factor(operation, np.array(size)) * message
            fewest = min(int(collectives.members_per_domain(one, size, stride)) for one in hardware)
            tier: Tier = "inside" if fewest == size else "between"
            apart = "one a pod" if stride > domain else "one a domain"
            where = tier if stride == 1 else apart
            found += [
                Bandwidth(operation, size, stride, tier, float(m), float(s), float(b / s), nodes, where)
                for m, s, b in zip(message, seconds, moved, strict=True)
            ]
    return found


def collective_s(
    hardware: HardwareSpec, operation: Operation, num_bytes: FloatArray, size: int, stride: int
) -> FloatArray:
    """Seconds of a collective by its name."""
    if operation == "all_to_all":
        return collectives.all_to_all_s(hardware, num_bytes, size, stride)
    by_name = {
        "all_reduce": collectives.all_reduce_s,
        "all_gather": collectives.all_gather_s,
        "reduce_scatter": collectives.reduce_scatter_s,
    }
    return by_name[operation](hardware, num_bytes, size, stride)
