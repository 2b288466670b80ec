"""The time limit of everything that one command, or one call of the library, does."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

LEAST_S: Final = 0.01
"""Seconds that a solve gets that begins after the end: solvers want more than nothing."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment of ``time.monotonic``; None: there is no limit. It is made once, where the work begins, and handed
    down: nothing that is a part of the work starts a limit of its own anew."""

    until: float | None

    @staticmethod
    def after(seconds: float | None) -> Deadline:
        """The deadline so many seconds from now."""
        return Deadline(None if seconds is None else time.monotonic() + seconds)

    def left_s(self, most: float | None = None) -> float | None:
        """Seconds that are left, at most ``most``; None where neither limits them."""
        if self.until is None:
            return most
        left = max(LEAST_S, self.until - time.monotonic())
        return left if most is None else min(left, most)

    @property
    def passed(self) -> bool:
        """Tell whether it is over."""
        return self.until is not None and time.monotonic() >= self.until
