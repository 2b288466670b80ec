"""The trace of a step: valid trace-event JSON that says what the simulator says."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from milpplan import simulate, step_lanes
from milpplan.errors import InvalidInputError
from milpplan.problem import Schedule
from milpplan.reports import chrome_trace as trace
from milpplan.simulation.pipeline.lanes import Lane
from tests.reports.pages import piped

SCHEDULES: tuple[Schedule, ...] = ("interleaved", "zb-h1", "dualpipe-v")
RESERVED_COLOURS = {
    "thread_state_running", "thread_state_iowait", "thread_state_runnable", "rail_load", "rail_animation",
    "rail_response", "good", "bad", "grey",
}  # fmt: skip
"""Of the names that catapult's color_scheme.html knows, those used here."""


def events_of(schedule: Schedule) -> list[dict[str, Any]]:
    """The events of a written trace."""
    document = json.loads(trace.trace_text(step_lanes(*piped(schedule)), "any"))
    assert document["displayTimeUnit"] in ("ms", "ns")
    events: list[dict[str, Any]] = document["traceEvents"]
    return events


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_events_keep_the_rules_of_the_format(schedule: Schedule) -> None:
    """Every event has the fields of its phase; slices of a thread nest; every thread and process has a name."""
    threads: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    named, counters = set(), defaultdict(list)
    for event in events_of(schedule):
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "M":
            named.add((event["name"], event["pid"], event["tid"]))
            assert set(event["args"]) == {"sort_index" if event["name"].endswith("sort_index") else "name"}
            continue
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] > 0
            assert event["cname"] in RESERVED_COLOURS
            threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        else:
            assert event["ph"] == "C"
            assert all(isinstance(value, int) and value >= 0 for value in event["args"].values())
            counters[event["pid"]].append(event["ts"])
    for (process, thread), slices in threads.items():
        assert ("process_name", process, 0) in named
        assert ("thread_name", process, thread) in named
        ordered = sorted(slices)
        # Microseconds with three decimals: less than half a nanosecond is rounding.
        assert all(end <= start + 5e-4 for (_, end), (start, _) in pairwise(ordered))
    assert len(counters) == 4
    assert all(times == sorted(times) for times in counters.values())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_trace_is_the_step(schedule: Schedule) -> None:
    """It ends when the step ends, its counters reach the peaks, and there is a slice for every piece of work."""
    problem, plan = piped(schedule)
    report, events = simulate(problem, plan), events_of(schedule)
    last = max(event["ts"] + event["dur"] for event in events if event["ph"] == "X")
    assert last == pytest.approx(report.step_time_s * 1e6, abs=1e-3)
    for rank, stage in enumerate(report.stages):
        sums = [sum(event["args"].values()) for event in events if event["ph"] == "C" and event["pid"] == rank]
        assert max(sums) == stage.memory.peak_bytes
    layout = plan.layout
    work = layout.num_micro_batches * layout.num_virtual_stages
    for word in ("forward", "backward"):
        assert sum(event["ph"] == "X" and event["name"].startswith(f"{word} ") for event in events) == work


def test_slices_that_overlap_get_their_own_row() -> None:
    """The first free row is taken: worked out by hand for four transfers, of which two overlap twice."""
    start, end = np.array([0, 5, 10, 12]), np.array([10, 15, 20, 30])
    nothing = np.zeros(4, dtype=np.int64)
    lane = Lane("to next stage", start, end, nothing, nothing, nothing)
    assert trace.rows_of(lane).tolist() == [0, 1, 0, 2]


def test_too_many_slices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond what a viewer opens the trace is refused, with the number."""
    monkeypatch.setattr(trace, "MAX_SLICES", 10)
    with pytest.raises(InvalidInputError, match="slices on 4 pipeline ranks"):
        trace.trace_text(step_lanes(*piped()), "any")
