"""Conversion of a system file of Calculon to a ``HardwareSpec``: its step functions become tables.

Calculon's efficiencies are step functions of the size of an operation; ours are tables by shape or size, evaluated
here on grids and interpolated by the cost model. What has no counterpart is said in docs/launchers.md.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Final

from milpplan.errors import InvalidInputError
from milpplan.problem.calculon.fields import CalculonNetwork, CalculonSystem, Datatype, Steps
from milpplan.problem.hardware import HardwareSpec
from milpplan.problem.reading import validated
from milpplan.units import GIB, GIGA, MEGA, TERA

GEMM_SIZES: Final = tuple(2**power for power in range(7, 17))
"""Elements of m, n and k at which the efficiency of a product is evaluated: 128 to 65,536."""
MESSAGE_BYTES: Final = tuple(2**power for power in range(10, 35))
"""Messages at which collectives are evaluated: 1 KiB to 16 GiB."""
STEP_WIDTH: Final = 1e-9
"""Relative width of the ramp that replaces a step of a curve."""
PASSES: Final = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}
"""Passes over the message in nccl-tests' bus bandwidth: passes * (n - 1) / n * bytes / time."""
ELEMENT_BYTES: Final = {"float8": 1, "float16": 2, "bfloat16": 2, "float32": 4}


def step(steps: Steps, size: float) -> float:
    """Return the efficiency of an operation of ``size``, in the unit of the steps.

    Source: calculon/processor.py and memory.py at caa4b11: the first step, from the largest, that is reached.
    """
    return next(efficiency for threshold, efficiency in steps if size >= threshold)


def collective_s(network: CalculonNetwork, operation: str, num_bytes: float, num_ranks: int) -> float:
    """Time an operation on a network: latency + bytes * scalar * (1 + offset / ranks) / (rate * eff), in seconds.

    Source: calculon/network.py at caa4b11, which has no all-to-all: it is a p2p of all parts but the rank's own.
    """
    if operation == "all_to_all":
        scalar, offset = network.ops.p2p[0], -1.0
    else:
        scalar, offset = getattr(network.ops, operation)
    passed = num_bytes * scalar * (1 + offset / num_ranks)
    return float(network.latency + passed / (network.bandwidth * GIGA * network.efficiency))


def product_s(system: CalculonSystem, datatype: Datatype, m: int, n: int, k: int) -> float:
    """Time an (m x k)(k x n) product: FLOPs and bytes at the rates of their steps, in seconds.

    no_overlap: 2 m n k / (rate * eff) + b (m k + k n + m n) / (bandwidth * eff); roofline: the maximum of both.
    b: bytes of an element. Source: calculon/system.py (``get_processing_time``) and llm/layers.py at caa4b11.
    """
    engine, memory = system.matrix[datatype], system.mem1
    flops = 2 * m * n * k
    moved = ELEMENT_BYTES[datatype] * (m * k + k * n + m * n)
    compute_s = flops / (engine.tflops * TERA * step(engine.gflops_efficiency, flops / GIGA))
    memory_s = moved / (memory.GBps * GIGA * step(memory.MB_efficiency, moved / MEGA))
    return compute_s + memory_s if system.processing_mode == "no_overlap" else max(compute_s, memory_s)


def gemm_table(system: CalculonSystem, datatype: Datatype) -> dict[str, Any]:
    """Tabulate the efficiency by shape, [m][n][k]: the time at the peak rate over ``product_s``.

    It is exact at the sizes of the grid and interpolated in the logarithms between them, so a step becomes a ramp
    of at most a cell. The efficiency contains the memory time: where Calculon adds it to the time of the FLOPs, so
    does the table.
    """
    sizes, peak = GEMM_SIZES, system.matrix[datatype].tflops * TERA
    table = [
        [[2 * m * n * k / peak / product_s(system, datatype, m, n, k) for k in sizes] for n in sizes]
        for m in sizes
    ]
    return {"m": list(sizes), "n": list(sizes), "k": list(sizes), "efficiency": table}


def size_curve(steps: Steps, unit: float) -> dict[str, list[float]]:
    """Convert a step function to a curve with a steep ramp below each step. ``unit``: bytes of a size."""
    ascending = steps[::-1]
    sizes, values = [1.0], [ascending[0][1]]
    for (_, below), (size, above) in pairwise(ascending):
        threshold = size * unit
        if threshold * (1 - STEP_WIDTH) > sizes[-1]:
            sizes += [threshold * (1 - STEP_WIDTH), threshold]
            values += [below, above]
        else:
            values[-1] = above
    return {"size": sizes, "value": values}


def bus_table(network: CalculonNetwork, operation: str) -> dict[str, Any]:
    """Tabulate the bus bandwidths of an operation at powers of two of ranks and of bytes."""
    max_ranks = max(2, min(network.size, 2**20))
    powers = {2**power for power in range(1, max_ranks.bit_length()) if 2**power <= max_ranks}
    counts = sorted(powers | {max_ranks})
    rows = [
        [
            PASSES[operation] * (count - 1) / count * size / collective_s(network, operation, size, count)
            for size in MESSAGE_BYTES
        ]
        for count in counts
    ]
    return {"num_gpus": counts, "message_bytes": list(MESSAGE_BYTES), "bus_bandwidth_bytes_per_s": rows}


def hardware_of(
    system: CalculonSystem, datatype: Datatype, wholes: tuple[int, ...], source: str, name: str
) -> HardwareSpec:
    """Build the hardware of a system file with one to three networks.

    Args:
        system: the file.
        datatype: number format of the execution.
        wholes: processors of a domain, and of a pod where there are three networks.
        source: the file's name in messages.
        name: name of the hardware.

    Raises:
        InvalidInputError: a number format without a rate.
    """
    inner, outer = system.networks[0], system.networks[min(1, len(system.networks) - 1)]
    data: dict[str, Any] = {
        "name": name,
        "gpus_per_node": inner.size,
        "accelerator": _accelerator(system, datatype, source, name),
        "scale_up": _scale_up(inner, wholes[0]),
        "scale_out": _scale_out(outer),
        "reserved_bytes": 0,
        # Calculon's executions may fill the memory.
        "memory_margin_fraction": 0.0,
        "software": _SOFTWARE,
    }
    if len(system.networks) > 2:
        data["pods"] = {**_scale_out(system.networks[2]), "name": "outermost network", "num_gpus": wholes[1]}
    if system.mem2.GiB > 0:
        data["host_memory"] = {
            "capacity_bytes": int(system.mem2.GiB * GIB),
            "bandwidth_bytes_per_s": system.mem2.GBps * GIGA,
            "efficiency": size_curve(system.mem2.MB_efficiency, MEGA),
        }
    return validated(HardwareSpec, data, source)


_SOFTWARE: Final = {"name": "calculon", "overlap_tensor_parallel": False, "dummy_weight_gradients": False}
"""Calculon's ``tensor_par_overlap`` none hides no tensor-parallel communication, in the backward neither."""


def _accelerator(system: CalculonSystem, datatype: Datatype, source: str, name: str) -> dict[str, Any]:
    """Build the accelerator. Memory-bound operators get the efficiency of the largest step, and no FLOPs."""
    sixteen: Datatype = "bfloat16" if datatype == "bfloat16" else "float16"
    needed = [sixteen, *(["float8"] if datatype == "float8" else [])]
    missing = [datatype for datatype in needed if datatype not in system.matrix]
    if datatype == "float32" or missing:
        raise InvalidInputError(
            f"{source}: matrix has {', '.join(system.matrix)}, and the execution's datatype is {datatype}.",
            "Expected a 16-bit format that matrix lists, or float8 with float16 beside it.",
            f"Change the execution's datatype, or add {' and '.join(missing or ['float16'])} to the system.",
        )
    engine = system.matrix[sixteen]
    flat = {"size": [1.0], "value": [engine.gflops_efficiency[0][1]]}
    data = {
        "name": name,
        "memory_bytes": int(system.mem1.GiB * GIB),
        "memory_bandwidth_bytes_per_s": system.mem1.GBps * GIGA,
        "memory_bandwidth_efficiency": system.mem1.MB_efficiency[0][1],
        "kernel_latency_s": 0.0,
        "bf16": {"peak_flops_per_s": engine.tflops * TERA, "gemm": gemm_table(system, sixteen)},
        "attention_forward": flat,
        "attention_backward": flat,
    }
    if datatype == "float8":
        peak = system.matrix["float8"].tflops * TERA
        data["fp8"] = {"peak_flops_per_s": peak, "gemm": gemm_table(system, "float8")}
    return data


def _scale_up(network: CalculonNetwork, domain: int) -> dict[str, Any]:
    return {
        "name": "network 0",
        "num_gpus": domain,
        "bandwidth_bytes_per_s": network.bandwidth * GIGA,
        "p2p_efficiency": min(1.0, network.efficiency / network.ops.p2p[0]),
        "p2p_latency_s": network.latency,
        "processor_fraction": network.processor_usage,
        **{operation: bus_table(network, operation) for operation in PASSES},
    }


def slowest_scalar(network: CalculonNetwork) -> float:
    """Return the maximum factor by which a network multiplies the bytes of a pass."""
    ops = network.ops
    return max(1.0, ops.p2p[0], ops.reduce_scatter[0], ops.all_gather[0])


def _scale_out(network: CalculonNetwork) -> dict[str, Any]:
    """Return the rate of a network between domains, that of its slowest operation."""
    return {
        "name": "outer network",
        "bandwidth_bytes_per_s": network.bandwidth * GIGA,
        "efficiency": network.efficiency / slowest_scalar(network),
        "p2p_latency_s": network.latency,
        "collective_base_latency_s": network.latency,
        "hop_latency_s": 0.0,
        "processor_fraction": network.processor_usage,
        "in_network_reduction": network.ops.all_reduce[0] <= 1.0,
    }
