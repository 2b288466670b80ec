"""Effective bandwidth of collectives as a function of message, group and tier: the cost model as a table."""

from __future__ import annotations

import numpy as np

from milpplan.communication.records import Bandwidth
from milpplan.costs import collectives
from milpplan.costs.collectives import Operation
from milpplan.costs.columns import FloatArray
from milpplan.specs.hardware import HardwareSpec

MESSAGE_BYTES = tuple(float(2**power) for power in range(14, 33, 2))
"""16 KiB to 4 GiB."""
OPERATIONS: tuple[Operation, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def effective_bandwidths(hardware: HardwareSpec, num_gpus: int) -> tuple[Bandwidth, ...]:
    """All operations among 2, 4, 8, ... neighbours up to ``num_gpus``, and among as many GPUs with one in each
    domain."""
    sizes = [2**power for power in range(1, num_gpus.bit_length()) if 2**power <= num_gpus]
    domain = hardware.scale_up.num_gpus
    shapes = [(size, stride) for stride in (1, domain) for size in sizes if size * stride <= max(num_gpus, domain)]
    shapes = list(dict.fromkeys(shapes))
    if domain == 1:
        shapes = [(size, 1) for size in sizes]
    found = []
    for operation in OPERATIONS:
        for size, stride in shapes:
            message = np.array(MESSAGE_BYTES)
            seconds = collective_s(hardware, operation, message, size, stride)
            moved = collectives.wire_factor(operation, np.array(size)) * message
            inside = int(collectives.members_per_domain(hardware, size, stride)) == size
            found += [
                Bandwidth(
                    operation, size, stride, "inside" if inside else "between", float(m), float(s), float(b / s)
                )
                for m, s, b in zip(message, seconds, moved, strict=True)
            ]
    return tuple(found)


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
