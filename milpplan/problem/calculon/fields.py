"""The three files of Calculon (Isaev et al. 2023), field by field, in Calculon's own names and units,
and their reader.

What they mean here is in ``milpplan.problem.calculon.translation``. The rules are those that Calculon asserts
when it reads them (calculon-ai/calculon at caa4b11: calculon/llm/llm.py, system.py, processor.py, memory.py,
network.py), so a file that Calculon takes is taken here, and one that it refuses is refused with a sentence.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from milpplan.problem.reading import RecordType, parse_json, read_text, validated
from milpplan.problem.records import Count, Fraction, NonNegativeFloat, PositiveInt, Record

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
