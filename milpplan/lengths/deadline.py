"""The clock of a solve: one deadline, made where the work begins and handed down.

No other module of ``lengths`` reads a clock. A part of a search gets a part of the time that is left
(``share``, ``within``); what it finds within its time does not depend on how often it asks.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Deadline:
    """Moment of ``time.perf_counter``, in seconds; infinite without a limit."""

    end_s: float

    @staticmethod
    def after(seconds: float) -> Deadline:
        """Return the deadline ``seconds`` from now."""
        return Deadline(time.perf_counter() + seconds)

    @property
    def passed(self) -> bool:
        """True once the deadline has passed."""
        return self.end_s < math.inf and time.perf_counter() >= self.end_s

    @property
    def left_s(self) -> float:
        """Seconds that are left, at least 0."""
        return max(0.0, self.end_s - time.perf_counter())

    def within(self, seconds: float) -> Deadline:
        """Return the deadline of a part of at most ``seconds``."""
        return Deadline(min(self.end_s, time.perf_counter() + seconds))

    def share(self, fraction: float) -> Deadline:
        """Return the deadline of a part with a share of the time that is left."""
        return self.within(fraction * self.left_s)


NEVER: Final = Deadline(math.inf)
"""No limit."""
PASSED: Final = Deadline(-math.inf)
"""No time at all: the work that an answer needs, and no more."""
