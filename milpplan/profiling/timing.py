"""How often something is timed, and what counts: the median, with a robust spread."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Final, Protocol

from milpplan.profiling.records import Timing

MAD_TO_SIGMA: Final = 1.4826
WARM_UPS: Final = 3
TARGET_S: Final = 0.15
"""Seconds spent on the samples of one measurement, within the bounds below."""
LEAST_SAMPLES: Final = 5
MOST_SAMPLES: Final = 40
SHORTEST_S: Final = 1e-9


class Clock(Protocol):
    """Runs something and says how long each time took."""

    def samples_s(self, run: Callable[[], object], number: int) -> list[float]:
        """Seconds of ``number`` runs, each with cold caches where the device has any to clear."""
        ...


def timed(clock: Clock, run: Callable[[], object]) -> Timing:
    """Warm up, decide how often, measure."""
    first = clock.samples_s(run, WARM_UPS)
    return timing_of(clock.samples_s(run, num_samples(min(first))))


def num_samples(one_s: float) -> int:
    """How many samples of so many seconds."""
    return int(min(max(TARGET_S / max(one_s, SHORTEST_S), LEAST_SAMPLES), MOST_SAMPLES))


def timing_of(samples_s: list[float]) -> Timing:
    """Median and spread of samples."""
    middle = max(median(samples_s), SHORTEST_S)
    deviation = median(abs(one - middle) for one in samples_s)
    return Timing(median_s=middle, spread=MAD_TO_SIGMA * deviation / middle, num_samples=len(samples_s))
