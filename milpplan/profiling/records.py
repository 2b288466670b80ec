"""Records of measurements and results, in SI units, and the file of raw measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field

from milpplan.problem.hardware import HardwareSpec, Software
from milpplan.problem.model import DenseMlp, GroupedQueryAttention, LayerRun, ModelSpec
from milpplan.problem.problem import Job, Problem
from milpplan.problem.reading import parse_json, read_text, validated
from milpplan.problem.records import Count, NonNegativeFloat, PositiveInt, Record
from milpplan.reports.files import write_whole

Text = Annotated[str, Field(max_length=1000)]
Seconds = Annotated[float, Field(gt=0, le=1e6)]
Mode = Literal["none", "selective", "full"]
MODES: Final[tuple[Mode, ...]] = ("none", "selective", "full")
MAX_ROWS: Final = 20_000


class Timing(Record):
    """Seconds of a repeated measurement."""

    median_s: Seconds
    spread: NonNegativeFloat
    """Robust one sigma over the median: 1.4826 times the median absolute deviation."""
    num_samples: PositiveInt


class Product(Record):
    """Matrix product (m x k)(k x n)."""

    precision: Literal["bf16", "fp8"] = "bf16"
    m: PositiveInt
    n: PositiveInt
    k: PositiveInt


class Attention(Record):
    """Causal flash attention with equal numbers of heads of keys and queries."""

    sequence_length: PositiveInt
    micro_batch_size: PositiveInt
    num_heads: PositiveInt
    head_dim: PositiveInt


class Traffic(Record):
    """Operator that device memory limits, with the bytes that it reads and writes."""

    operator: Literal["add", "norm"]
    num_bytes: PositiveInt


class Copy(Record):
    """Copy between pinned memory of the host and the device."""

    direction: Literal["host_to_device", "device_to_host"]
    num_bytes: PositiveInt


class Exchange(Record):
    """Collectives among a number of ranks: every operation with every message (bytes as nccl-tests counts
    them)."""

    num_ranks: Annotated[int, Field(ge=2, le=4096)]
    message_bytes: Annotated[tuple[PositiveInt, ...], Field(min_length=1)]


class Layers(Record):
    """Equal transformer layers, forward and backward: ``profiling.pytorch.layers``."""

    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    head_dim: PositiveInt
    sequence_length: PositiveInt
    micro_batch_size: PositiveInt
    num_layers: Annotated[int, Field(gt=0, le=1000)]
    recompute: Mode

    def problem(self, hardware: HardwareSpec) -> Problem:
        """State the layers as a problem: one GPU, bf16 with sums of gradients in bf16.

        Of the description's software only the device's part counts, because these layers belong to no framework.
        """
        own = hardware.software
        software = Software(layer_launch_s=own.layer_launch_s, attention_efficiency=own.attention_efficiency)
        hardware = hardware.model_copy(update={"software": software})
        attention = GroupedQueryAttention(
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
        )
        layers = LayerRun(
            count=self.num_layers, attention=attention, mlp=DenseMlp(intermediate_size=self.intermediate_size)
        )
        model = ModelSpec(
            name="profiled",
            hidden_size=self.hidden_size,
            vocab_size=1,
            max_position_embeddings=self.sequence_length,
            layers=(layers,),
            norm="layernorm",
        )
        job = Job(
            num_gpus=1,
            global_batch_size=self.micro_batch_size,
            sequence_length=self.sequence_length,
            grad_dtype="bf16",
        )
        return Problem(model=model, hardware=hardware, job=job)


class ProductTime(Record):
    """Time of a product."""

    shape: Product
    time: Timing


class AttentionTime(Record):
    """Times of an attention."""

    shape: Attention
    forward: Timing
    backward: Timing


class TrafficTime(Record):
    """Time of a memory-bound operator."""

    shape: Traffic
    time: Timing


class CopyTime(Record):
    """Time of a copy."""

    shape: Copy
    time: Timing


class CollectiveTime(Record):
    """Time of a collective; ``message_bytes`` as nccl-tests counts them."""

    operation: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
    num_ranks: Annotated[int, Field(ge=2, le=4096)]
    message_bytes: PositiveInt
    time: Timing


class LayersTime(Record):
    """Times of all layers together, and their memory.

    ``kept_bytes`` from forward to backward and ``peak_bytes`` (None where the device does not report it) are
    without weights, sums of gradients and the last output.
    """

    shape: Layers
    forward: Timing
    backward: Timing
    kept_bytes: Count
    peak_bytes: Count | None


class Failure(Record):
    """Failed measurement, with the reason."""

    what: Text
    reason: Text


class Environment(Record):
    """Date, device and software of the measurements."""

    date: Text
    device: Literal["cuda", "cpu"]
    device_name: Text
    num_devices: Count
    memory_bytes: Count
    num_processors: Count
    driver: Text
    libraries: dict[Annotated[str, Field(max_length=100)], Text]
    """Versions by name: torch, cuda, cudnn, nccl, python."""
    notes: tuple[Text, ...] = ()
    """Kernels used: the attention kernel, and whether pointwise operators were fused."""


class Measurements(Record):
    """File of raw measurements."""

    schema_version: Literal[1] = 1
    kind: Literal["milpplan profile"] = "milpplan profile"
    environment: Environment
    stopped: Literal["", "time limit", "interrupted"] = ""
    """Reason why measurements were left out; empty: none were."""
    products: Annotated[tuple[ProductTime, ...], Field(max_length=MAX_ROWS)] = ()
    attentions: Annotated[tuple[AttentionTime, ...], Field(max_length=MAX_ROWS)] = ()
    traffic: Annotated[tuple[TrafficTime, ...], Field(max_length=MAX_ROWS)] = ()
    copies: Annotated[tuple[CopyTime, ...], Field(max_length=MAX_ROWS)] = ()
    collectives: Annotated[tuple[CollectiveTime, ...], Field(max_length=MAX_ROWS)] = ()
    layers: Annotated[tuple[LayersTime, ...], Field(max_length=MAX_ROWS)] = ()
    failures: Annotated[tuple[Failure, ...], Field(max_length=MAX_ROWS)] = ()

    @property
    def num_rows(self) -> int:
        """Number of timed items; attention and layers count twice."""
        once = len(self.products) + len(self.traffic) + len(self.copies) + len(self.collectives)
        return once + 2 * (len(self.attentions) + len(self.layers))


def write_raw(path: Path, measurements: Measurements) -> None:
    """Write the file.

    Raises:
        InvalidInputError: it cannot be written; nothing of it remains.
    """
    write_whole(path, measurements.model_dump_json(indent=1) + "\n")


def read_raw(path: Path) -> Measurements:
    """Read the measurements of a file.

    Raises:
        InvalidInputError: it cannot be read, or holds something else.
    """
    return validated(Measurements, parse_json(read_text(path), str(path)), str(path))
