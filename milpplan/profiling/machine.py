"""Machine that measures itself: its interface, its device, and repeated timings.

PyTorch is imported only when something is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from statistics import median
from typing import Final, Literal, Protocol

from milpplan.errors import InvalidInputError, UnknownNameError
from milpplan.profiling.records import (
    Attention,
    CollectiveTime,
    Copy,
    Environment,
    Exchange,
    Layers,
    LayersTime,
    Product,
    Timing,
    Traffic,
)

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
            "Install it with: pip install 'milpplan[profile]', or give measurements with --from RAW.json.",
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
