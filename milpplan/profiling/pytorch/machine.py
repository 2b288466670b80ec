"""Implementation of ``milpplan.profiling.machine.Machine`` for a CUDA device or the CPU."""

from __future__ import annotations

import datetime
import gc
import os
import platform
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import torch

from milpplan.profiling.machine import MeasurementError, timed
from milpplan.profiling.pytorch.clock import DeviceClock, HostClock
from milpplan.profiling.pytorch.collectives import collective_times
from milpplan.profiling.pytorch.layers import Flash, layers_time, pointwise
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
from milpplan.version import __version__

BF16_BYTES: Final = 2
NORM_WIDTH: Final = 4096
"""Width of the rows that a norm works on."""
CPU_RANKS: Final = 2


class TorchMachine:
    """PyTorch device that measures with random numbers, because zeros run faster than real data."""

    def __init__(self, device: str) -> None:
        """Open a device, cuda or cpu."""
        self._device = torch.device(device)
        self._on_device = device == "cuda"
        torch.manual_seed(1)
        self._clock = DeviceClock(self._device) if self._on_device else HostClock()
        self._point = pointwise(self._device)
        self._flash = Flash(self._device, self._timed)
        kernel = self._flash.name.lower().replace("_", " ") or "attention as PyTorch chooses it"
        self._notes = (f"kernel of attention: {kernel}", self._point.note)

    @property
    def num_ranks(self) -> int:
        """Number of devices that can take part in a collective."""
        return int(torch.cuda.device_count()) if self._on_device else CPU_RANKS

    def environment(self) -> Environment:
        """Describe date, device and versions."""
        return environment_of(self._device, self._notes)

    def product(self, shape: Product) -> Timing:
        """Time x W^T, as in a linear layer."""
        with self._room():
            left, right = self._random(shape.m, shape.k), self._random(shape.n, shape.k)
            if shape.precision == "fp8":
                return self._timed(self._fp8_product(left, right))
            return self._timed(lambda: left @ right.t())

    def _fp8_product(self, left: Any, right: Any) -> Callable[[], object]:
        """Make an fp8 product with a scale per matrix."""
        unit_scale = torch.ones((), device=self._device)
        narrow = [matrix.to(torch.float8_e4m3fn) for matrix in (left, right)]
        return lambda: torch._scaled_mm(
            narrow[0],
            narrow[1].t(),
            scale_a=unit_scale,
            scale_b=unit_scale,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )

    def attention(self, shape: Attention) -> tuple[Timing, Timing]:
        """Time the forward, and the backward with the tensors that the forward kept."""
        with self._room():
            sizes = (shape.micro_batch_size, shape.sequence_length, shape.num_heads, shape.head_dim)
            parts = [self._random(*sizes).requires_grad_() for _ in range(3)]
            views = [part.transpose(1, 2) for part in parts]
            with torch.no_grad():
                forward = self._timed(lambda: self._flash(*views))
            out = self._flash(*views)
            grad = torch.randn_like(out)
            backward = self._timed(lambda: torch.autograd.grad(out, parts, grad, retain_graph=True))
            return forward, backward

    def traffic(self, shape: Traffic) -> Timing:
        """Time a residual (two reads, one write) or a norm (one read, one write)."""
        with self._room():
            if shape.operator == "add":
                x, y, out = (self._random(max(shape.num_bytes // (3 * BF16_BYTES), 1)) for _ in range(3))
                return self._timed(lambda: torch.add(x, y, out=out))
            rows = max(shape.num_bytes // (2 * BF16_BYTES * NORM_WIDTH), 1)
            x, gain = self._random(rows, NORM_WIDTH), self._random(NORM_WIDTH)
            return self._timed(lambda: torch.nn.functional.layer_norm(x, (NORM_WIDTH,), gain, gain))

    def copy(self, shape: Copy) -> Timing:
        """Time a copy to or from pinned memory."""
        if not self._on_device:
            raise MeasurementError("a CPU has no other memory to copy to")
        with self._room():
            host = torch.empty(shape.num_bytes, dtype=torch.int8, pin_memory=True)
            there = torch.empty(shape.num_bytes, dtype=torch.int8, device=self._device)
            target, source = (there, host) if shape.direction == "host_to_device" else (host, there)
            return self._timed(lambda: target.copy_(source, non_blocking=True))

    def collectives(self, shape: Exchange) -> Iterator[CollectiveTime]:
        """Time collectives among processes, after releasing this process's memory."""
        self._given_back()
        yield from collective_times(shape, self._device.type)

    def layers(self, shape: Layers) -> LayersTime:
        """Time layers forward and backward."""
        try:
            with self._room():
                return layers_time(shape, self._device, self._point, self._flash)
        finally:
            self._given_back()

    def _random(self, *sizes: int) -> Any:
        return torch.randn(*sizes, dtype=torch.bfloat16, device=self._device)

    def _timed(self, run: Callable[[], object]) -> Timing:
        return timed(self._clock, run)

    @contextmanager
    def _room(self) -> Iterator[None]:
        """Turn PyTorch's errors into a ``MeasurementError`` and release the memory."""
        failed = ""
        try:
            yield
        except torch.OutOfMemoryError as error:
            failed = f"out of memory: {error}"
        except (RuntimeError, ValueError, TypeError, NotImplementedError, AttributeError) as error:
            failed = f"{type(error).__name__}: {error}"
        if failed:
            # After the handler, because the traceback has held tensors until here.
            self._given_back()
            raise MeasurementError(failed)

    def _given_back(self) -> None:
        """Collect cycles that hold memory, and return the allocator's cache to the device."""
        gc.collect()
        if self._on_device:
            # A device that has failed for good also fails here; every measurement reports it.
            with suppress(RuntimeError):
                torch.cuda.empty_cache()


WAIT_S: Final = 10.0


def environment_of(device: Any, notes: tuple[str, ...]) -> Environment:
    """Describe date, device, driver and libraries."""
    libraries = {"torch": str(torch.__version__), "python": platform.python_version(), "milpplan": __version__}
    date = datetime.date.today().isoformat()
    if device.type != "cuda":
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Environment(
            date=date,
            device="cpu",
            device_name=platform.processor() or platform.machine(),
            num_devices=1,
            memory_bytes=memory,
            num_processors=os.cpu_count() or 0,
            driver="none",
            libraries=libraries,
            notes=notes,
        )
    properties = torch.cuda.get_device_properties(device)
    return Environment(
        date=date,
        device="cuda",
        device_name=properties.name,
        num_devices=torch.cuda.device_count(),
        memory_bytes=int(properties.total_memory),
        num_processors=int(properties.multi_processor_count),
        driver=_driver(),
        libraries=libraries | _of_cuda(),
        notes=notes,
    )


def _of_cuda() -> dict[str, str]:
    """Return the versions of CUDA (or HIP), cuDNN and NCCL."""
    versions = {"cuda": torch.version.cuda, "hip": torch.version.hip, "cudnn": torch.backends.cudnn.version()}
    with suppress(AttributeError, RuntimeError, TypeError):
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return {name: str(version) for name, version in versions.items() if version}


def _driver() -> str:
    """Return the driver's version from nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    lines = done.stdout.split()
    return lines[0] if lines else "unknown"
