"""Repetition of measurements, and their summary: the median, with a robust spread."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Final, Protocol

from milpplan.profiling.records import Timing

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
