"""Clocks for work on a device: events of CUDA, or the host's clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import torch

from milpplan.units import MIB

FLUSH_CACHES: Final = 4
"""Bytes written between samples, as a multiple of the size of the second-level cache."""
MIN_FLUSH: Final = 256 * MIB
FLUSHES: Final = 6
"""Number of writes before a sample: about 0.4 ms, longer than the host needs to launch a backward."""


class DeviceClock:
    """Clock with events around each run, after a write that clears the second-level cache. The write also keeps
    the device busy while the host launches, so that short kernels do not wait for it."""

    def __init__(self, device: Any) -> None:
        cache = int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0))
        self._flush = torch.empty(max(FLUSH_CACHES * cache, MIN_FLUSH), dtype=torch.int8, device=device)

    def samples_s(self, run: Callable[[], object], number: int) -> list[float]:
        """Measure the seconds of each run."""
        events = [(_event(), _event()) for _ in range(number)]
        for start, end in events:
            for _ in range(FLUSHES):
                self._flush.zero_()
            start.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return [_between_s(start, end) for start, end in events]


class HostClock:
    """Clock of the host; for a CPU, whose work is done when a call returns."""

    def samples_s(self, run: Callable[[], object], number: int) -> list[float]:
        """Measure the seconds of each run."""
        samples = []
        for _ in range(number):
            start = time.perf_counter()
            run()
            samples.append(time.perf_counter() - start)
        return samples


class Marks:
    """Moments of a pass; the seconds between them are known when the device is done."""

    def __init__(self, on_device: bool) -> None:
        self._on_device = on_device
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Mark the present moment, in the order of the device's work."""
        if self._on_device:
            event = _event()
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def between_s(self) -> list[float]:
        """Return the seconds from each mark to the next."""
        pairs = zip(self._marks, self._marks[1:], strict=False)
        if not self._on_device:
            return [end - start for start, end in pairs]
        torch.cuda.synchronize()
        return [_between_s(start, end) for start, end in pairs]


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)


def _between_s(start: Any, end: Any) -> float:
    return float(start.elapsed_time(end)) * 1e-3
