"""Records of measurements and results, in SI units, and the file of raw measurements.

``Machine`` is the interface of a machine that measures itself. PyTorch is imported only when something is
measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Annotated, Final, Literal, Protocol

from pydantic import Field

from milpplan.errors import InvalidInputError, UnknownNameError
from milpplan.problem import (
    DenseMlp,
    GroupedQueryAttention,
    HardwareSpec,
    Job,
    LayerRun,
    ModelSpec,
    Problem,
    Software,
    parse_json,
    read_text,
    validated,
)
from milpplan.problem.records import Count, NonNegativeFloat, PositiveInt, Record
from milpplan.reports import write_whole

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


MAD_TO_SIGMA: Final = 1.4826
WARM_UPS: Final = 3
TARGET_S: Final = 0.15
"""Seconds spent on the samples of a measurement, within the bounds below."""
MIN_SAMPLES: Final = 5
MAX_SAMPLES: Final = 40
SHORTEST_S: Final = 1e-9


class Clock(Protocol):
    """Clock that runs a function and returns the time of each run."""

    def samples_s(self, run: Callable[[], object], number: int) -> list[float]:
        """Measure the seconds of ``number`` runs, each with cold caches where the device has caches to clear."""
        ...


def timed(clock: Clock, run: Callable[[], object]) -> Timing:
    """Warm up, choose the number of samples, and measure."""
    first = clock.samples_s(run, WARM_UPS)
    return timing_of(clock.samples_s(run, num_samples(min(first))))


def num_samples(one_s: float) -> int:
    """Choose the number of samples, each of ``one_s`` seconds."""
    return int(min(max(TARGET_S / max(one_s, SHORTEST_S), MIN_SAMPLES), MAX_SAMPLES))


def timing_of(samples_s: list[float]) -> Timing:
    """Summarise samples by median and spread."""
    middle = max(median(samples_s), SHORTEST_S)
    deviation = median(abs(sample - middle) for sample in samples_s)
    return Timing(median_s=middle, spread=MAD_TO_SIGMA * deviation / middle, num_samples=len(samples_s))


class MeasurementError(Exception):
    """Error for a single measurement that fails (memory, or a missing kernel); others may succeed."""


class Machine(Protocol):
    """Device with its libraries. Every method raises ``MeasurementError`` where it cannot measure."""

    @property
    def num_ranks(self) -> int:
        """Number of devices that can take part in a collective."""
        ...

    def environment(self) -> Environment:
        """Describe device and libraries."""
        ...

    def product(self, shape: Product) -> Timing:
        """Time a matrix product."""
        ...

    def attention(self, shape: Attention) -> tuple[Timing, Timing]:
        """Time flash attention, forward and backward."""
        ...

    def traffic(self, shape: Traffic) -> Timing:
        """Time a memory-bound operator."""
        ...

    def copy(self, shape: Copy) -> Timing:
        """Time a copy between host and device."""
        ...

    def collectives(self, shape: Exchange) -> Iterator[CollectiveTime]:
        """Time collectives one after another; the ranks end when the iterator does."""
        ...

    def layers(self, shape: Layers) -> LayersTime:
        """Time layers forward and backward, and measure their memory."""
        ...


Device = Literal["cuda", "cpu"]
DEVICES: Final[tuple[Device, ...]] = ("cuda", "cpu")


def open_machine(wanted: str | None) -> tuple[Machine, Device]:
    """Open the machine of a device; None: a GPU if there is one.

    Raises:
        InvalidInputError: PyTorch is missing, or there is no such device.
    """
    if wanted is not None and wanted not in DEVICES:
        raise UnknownNameError(
            f"--device {wanted!r} does not exist.", f"Expected one of {', '.join(DEVICES)}.", "Correct --device."
        )
    if find_spec("torch") is None:
        raise InvalidInputError(
            "PyTorch is not installed; `milpplan profile` measures with it.",
            "Expected the package torch in the environment that milpplan runs in.",
            "Install it with: pip install -e '.[profile]', or give measurements with --from RAW.json.",
        )
    device: Device = "cpu" if wanted == "cpu" else "cuda"
    if device == "cuda":
        _check_gpu()
    try:
        machine: Machine = import_module("milpplan.profiling.pytorch.machine").TorchMachine(device)
    except (RuntimeError, ImportError, OSError) as error:
        raise InvalidInputError(
            f"PyTorch cannot use the device {device}: {' '.join(str(error).split())[:300]}.",
            "Expected a device with free memory, and libraries and a driver that belong together.",
            "Check nvidia-smi and the installation of PyTorch, or try it out with --device cpu.",
        ) from error
    return machine, device


def _check_gpu() -> None:
    torch = import_module("torch")
    if torch.cuda.is_available():
        return
    built = torch.version.cuda or torch.version.hip
    why = "PyTorch sees no GPU" if built else "this PyTorch is built for the CPU only"
    raise InvalidInputError(
        f"There is no GPU to measure: {why} (torch {torch.__version__}).",
        "Expected at least one CUDA (or ROCm) device and a PyTorch built for it.",
        "Check nvidia-smi and the installation of PyTorch, run this on a machine with a GPU, or try it out with "
        "--device cpu.",
    )
