"""The clock of a solve: equal work on a busy machine and an idle one, and an end by the limit of time."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from milpplan import solve_lengths
from milpplan.lengths import deadline as clock
from milpplan.lengths.deadline import NEVER, PASSED, Deadline
from tests.lengths.cases import GRAIN, workload
from tests.small import small_problem


def at(monkeypatch: pytest.MonkeyPatch, seconds_per_look: float) -> None:
    """Let every look at the time see so many seconds more."""
    now = [0.0]

    def look() -> float:
        now[0] += seconds_per_look
        return now[0]

    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=look))


def test_parts_end_by_counted_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A third of nine seconds, and of what is left; the whole ends by the time, whatever was counted."""
    at(monkeypatch, 0.0)
    whole = Deadline.after(9.0)
    part = whole.share(1 / 3)
    clock.spend(2.0)
    assert part.left_s == pytest.approx(1.0)
    assert not part.passed
    clock.spend(1.0)
    assert part.passed
    assert whole.left_s == pytest.approx(6.0)
    assert whole.within(2.0).left_s == pytest.approx(2.0)
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: 9.0))
    assert whole.passed
    assert not NEVER.passed
    assert NEVER.share(0.5).left_s == math.inf
    assert PASSED.passed


def test_every_solve_counts_a_cached_result_once() -> None:
    """As its first computation, whether it was cached before or not."""

    @clock.counted_cache
    def squared(number: int) -> int:
        clock.spend(0.5)
        return number * number

    for _ in range(2):
        Deadline.after(60.0)
        before = clock._COUNTER.ns
        assert squared(3) == squared(3) == 9
        assert clock._COUNTER.ns - before == 500_000_000


def test_equal_problems_get_equal_answers_however_busy_the_machine_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ended by counted work: the second solve has every cache warm and a clock that is 50 times as slow."""
    answers = []
    for seconds_per_look in (1e-7, 5e-6):
        at(monkeypatch, seconds_per_look)
        before = clock._COUNTER.ns
        found = solve_lengths(small_problem(), workload(long=6, short=40), GRAIN, 2, 1e-4, 0.4, "highs")
        answers.append((found.step_time_s, found.lower_bound_s, found.groups, clock._COUNTER.ns - before))
    assert answers[0] == answers[1]
    # The gap was not reached: the work ended it.
    assert answers[0][1] < answers[0][0] * (1.0 - 1e-4)
    assert answers[0][3] > 0.3e9


def test_the_limit_of_time_ends_a_solve(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock on which every look takes a second: a step with a bound, after little work."""
    at(monkeypatch, 1.0)
    before = clock._COUNTER.ns
    found = solve_lengths(small_problem(), workload(long=6, short=40), GRAIN, 2, 1e-4, 30.0, "highs")
    assert 0.0 < found.lower_bound_s <= found.step_time_s
    assert clock._COUNTER.ns - before < 30e9
