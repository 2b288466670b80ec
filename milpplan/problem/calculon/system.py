"""Conversion of a system file of Calculon to a ``HardwareSpec``: its step functions become tables.

Calculon's efficiencies are step functions of the size of an operation; ours are tables by shape or size, evaluated
here on grids and interpolated by the cost model. What has no counterpart is said in docs/launchers.md.

**Records** of the three files of Calculon (Isaev et al. 2023), field by field, in Calculon's own names and units,
and their reader. What they mean here is in ``milpplan.problem.calculon.translation``. The rules are those that
Calculon asserts when it reads them (calculon-ai/calculon at caa4b11: calculon/llm/llm.py, system.py, processor.py,
memory.py, network.py), so a file that Calculon takes is taken here, and one that it refuses is refused with a
sentence.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field, model_validator

from milpplan.errors import InvalidInputError
from milpplan.problem import HardwareSpec, parse_json, read_text, validated
from milpplan.problem.reading import RecordType
from milpplan.problem.records import Count, Fraction, NonNegativeFloat, PositiveInt, Record
from milpplan.units import GIB, GIGA, MEGA, TERA

Datatype = Literal["float8", "float16", "float32", "bfloat16"]
Steps = Annotated[tuple[tuple[NonNegativeFloat, Fraction], ...], Field(min_length=1, max_length=1000)]
"""(least size, efficiency), the largest size first; the first whose size is reached counts."""
Rate = Annotated[float, Field(gt=0, le=1e9)]
"""In 1e12 FLOP/s or 1e9 bytes/s."""
Scalar = Annotated[float, Field(gt=0, le=1e6)]
Offset = Annotated[float, Field(gt=-2, le=1e6)]
"""Scales a message by 1 + offset / ranks, which must stay positive for two ranks."""


class CalculonModel(Record):
    """A transformer of equal blocks; widths in elements."""

    hidden: PositiveInt
    feedforward: PositiveInt
    seq_size: PositiveInt
    attn_heads: PositiveInt
    attn_size: PositiveInt
    """Elements of one head."""
    num_blocks: Annotated[int, Field(gt=0, le=10_000)]


def _check_steps(name: str, steps: Steps) -> None:
    if steps[-1][0] != 0:
        raise ValueError(f"{name} must end with the size 0, ends with {steps[-1][0]}")
    if any(above[0] <= below[0] for above, below in pairwise(steps)):
        raise ValueError(f"{name} must list its sizes from the largest to 0, got {[size for size, _ in steps]}")


class CalculonEngine(Record):
    """Rate of one number format, in 1e12 FLOP/s; efficiency by 1e9 FLOPs of an operation."""

    tflops: Rate
    gflops_efficiency: Steps

    @model_validator(mode="after")
    def _descends(self) -> CalculonEngine:
        _check_steps("gflops_efficiency", self.gflops_efficiency)
        return self


class CalculonMemory(Record):
    """A memory of one processor: 2**30 bytes, 1e9 bytes/s; efficiency by 1e6 bytes of an operation."""

    GiB: Annotated[float, Field(ge=0, le=900_000)]
    GBps: Rate
    MB_efficiency: Steps

    @model_validator(mode="after")
    def _descends(self) -> CalculonMemory:
        _check_steps("MB_efficiency", self.MB_efficiency)
        return self


class CalculonOperations(Record):
    """(scalar, offset) of each operation: size * scalar * (1 + offset / ranks) bytes pass a processor's link."""

    p2p: tuple[Scalar, None]
    reduce_scatter: tuple[Scalar, Offset]
    all_gather: tuple[Scalar, Offset]
    all_reduce: tuple[Scalar, Offset]


class CalculonNetwork(Record):
    """A network of ``size`` processors; bandwidth in 1e9 bytes/s a processor, latency in seconds."""

    bandwidth: Rate
    efficiency: Fraction
    size: PositiveInt
    latency: Annotated[float, Field(ge=0, le=1e6)]
    ops: CalculonOperations
    must_be_filled: bool
    processor_usage: Annotated[float, Field(ge=0, lt=1)]


class CalculonSystem(Record):
    """A processor, its two memories and its networks."""

    matrix: Annotated[dict[Datatype, CalculonEngine], Field(min_length=1)]
    vector: Annotated[dict[Datatype, CalculonEngine], Field(min_length=1)]
    mem1: CalculonMemory
    mem2: CalculonMemory
    processing_mode: Literal["roofline", "no_overlap"]
    networks: Annotated[tuple[CalculonNetwork, ...], Field(min_length=1, max_length=16)]

    @model_validator(mode="after")
    def _has_memory(self) -> CalculonSystem:
        if self.mem1.GiB == 0:
            raise ValueError("mem1.GiB must be above 0, is 0")
        return self


class CalculonExecution(Record):
    """How a model runs on a system; batch sizes count sequences."""

    num_procs: PositiveInt
    tensor_par: PositiveInt
    pipeline_par: PositiveInt
    data_par: PositiveInt
    tensor_par_net: Count
    pipeline_par_net: Count
    data_par_net: Count
    batch_size: PositiveInt
    microbatch_size: PositiveInt
    datatype: Datatype
    fused_activation: bool
    attention_type: Literal["multihead", "multiquery"]
    activation_recompute: Literal["full", "attn_only", "none"]
    pipeline_interleaving: PositiveInt
    optimizer_sharding: bool
    tensor_par_comm_type: Literal["ar", "p2p_rs_ag", "rs_ag"]
    tensor_par_overlap: Literal["none", "ring", "pipe"]
    seq_par_ag_redo: bool
    data_par_overlap: bool
    weight_offload: bool
    activations_offload: bool
    optimizer_offload: bool
    training: bool

    @property
    def degrees(self) -> dict[str, int]:
        """Degree of every parallelism."""
        return {name: getattr(self, f"{name}_par") for name in ("tensor", "pipeline", "data")}

    def network_of(self, parallelism: str) -> int:
        """Index of the network that a parallelism uses."""
        return int(getattr(self, f"{parallelism}_par_net"))

    @model_validator(mode="after")
    def _adds_up(self) -> CalculonExecution:
        product = self.tensor_par * self.pipeline_par * self.data_par
        share = self.data_par * self.microbatch_size
        conflicts = {
            f"num_procs={self.num_procs} is not tensor_par * pipeline_par * data_par = {product}": (
                self.num_procs != product
            ),
            f"batch_size={self.batch_size} is not a multiple of data_par * microbatch_size = {share}": (
                self.batch_size % share != 0
            ),
            f"pipeline_interleaving={self.pipeline_interleaving} needs pipeline_par above 1": (
                self.pipeline_par == 1 and self.pipeline_interleaving > 1
            ),
            "optimizer_sharding needs data_par above 1": self.optimizer_sharding and self.data_par == 1,
            "data_par_overlap needs data_par above 1": self.data_par_overlap and self.data_par == 1,
            f"tensor_par_overlap={self.tensor_par_overlap} needs tensor_par above 1": (
                self.tensor_par_overlap != "none" and self.tensor_par == 1
            ),
            "seq_par_ag_redo needs tensor_par_comm_type rs_ag and activation_recompute other than full": (
                self.seq_par_ag_redo
                and (self.tensor_par_comm_type != "rs_ag" or self.activation_recompute == "full")
            ),
            "activation_recompute, data_par_overlap and optimizer_offload are for training only": (
                not self.training
                and (self.activation_recompute != "none" or self.data_par_overlap or self.optimizer_offload)
            ),
        }
        broken = [text for text, is_broken in conflicts.items() if is_broken]
        if broken:
            raise ValueError("; ".join(broken))
        return self


@dataclass(frozen=True, slots=True)
class CalculonFiles:
    """Checked contents of the three files, and their names."""

    model: CalculonModel
    execution: CalculonExecution
    system: CalculonSystem
    names: tuple[str, str, str] = ("model", "execution", "system")


def read_calculon(model: Path, execution: Path, system: Path) -> CalculonFiles:
    """Read and check three files of Calculon.

    Raises:
        InvalidInputError: the file and the field that are wrong.
    """
    return CalculonFiles(
        _read(CalculonModel, model),
        _read(CalculonExecution, execution),
        _read(CalculonSystem, system),
        (str(model), str(execution), str(system)),
    )


def _read(record: type[RecordType], path: Path) -> RecordType:
    return validated(record, parse_json(read_text(path), str(path)), str(path))


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
