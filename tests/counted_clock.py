"""A clock that counts how often it is read, in place of the machine's: a search that stops at a time then stops
after so much work, however busy the machine is."""

from __future__ import annotations

import itertools
import time
from typing import Any, Final

import pytest

from milpplan.lengths.heterogeneous import count_program as unlike_program
from milpplan.lengths.tabled import search
from milpplan.optimize.milp import Limits

TICK_S: Final = 3e-3
"""Seconds between two readings: about what a search takes on one idle core."""


def _without_time(*, time_limit_s: float, **others: Any) -> Limits:
    """Build limits of a solver that has no clock: programs of tests are small."""
    return Limits(**others)


@pytest.fixture(autouse=True)
def counted_clock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the clocks that searches read, and take the time limits from their solvers.

    A test that starts another process asks for ``real_clock``: what that process does is not counted here.
    """
    if "real_clock" in request.fixturenames:
        return
    begin, readings = time.time(), itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: TICK_S * next(readings))
    monkeypatch.setattr(time, "time", lambda: begin + TICK_S * next(readings))
    for module in (search, unlike_program):
        monkeypatch.setattr(module, "Limits", _without_time)


@pytest.fixture
def real_clock() -> None:
    """Keep the machine's clock in this test, whose result must not depend on it."""
