"""Time limit of one command, or of one call of the library."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

LEAST_S: Final = 0.01
"""Minimum seconds given to a solve that begins after the deadline: solvers reject a limit of zero."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """Moment of ``time.monotonic``; None means that there is no limit.

    It is made once, where the work begins, and handed down: no part of the work starts a new limit.
    """

    until: float | None

    @staticmethod
    def after(seconds: float | None) -> Deadline:
        """Return the deadline ``seconds`` from now."""
        return Deadline(None if seconds is None else time.monotonic() + seconds)

    def left_s(self, limit_s: float | None = None) -> float | None:
        """Return the seconds left, at most ``limit_s``; None where neither is set."""
        if self.until is None:
            return limit_s
        left = max(LEAST_S, self.until - time.monotonic())
        return left if limit_s is None else min(left, limit_s)

    @property
    def passed(self) -> bool:
        """True once the deadline has passed."""
        return self.until is not None and time.monotonic() >= self.until
