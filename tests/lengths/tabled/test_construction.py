"""First packings: loads that leave no stage waiting, every sequence once, within all limits, near the best."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milpplan.lengths.tabled import (
    Kind,
    KindTimes,
    Pipeline,
    SwitchTimes,
    constructed,
    longest_ns,
    pipeline_times_ns,
    shapes,
)
from tests.lengths.tabled.brute_force import least_time_ns, random_problem


@pytest.mark.parametrize("num_stages", [2, 4, 8])
@pytest.mark.parametrize("number", [6, 12, 30])
def test_rising_loads_leave_the_last_stage_hardly_waiting(num_stages: int, number: int) -> None:
    """A pipeline takes the work of its last stage and the shortest ramps, and at most a hundredth more."""
    pipeline = Pipeline("equal", num_stages, 0, 1e3, 0, 10**9)

    def excess(loads: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> float:
        units = np.rint(loads / loads.max() * 10**8).astype(np.int64)
        ramps = (num_stages - 1) * (units[0] + 2 * units[-1])
        return int(pipeline_times_ns(pipeline, units)) / float(3 * units.sum() + ramps) - 1.0

    rising = [loads for loads in shapes(number, num_stages, 2.0) if loads[-1] == loads.max()]
    assert rising
    assert max(map(excess, rising)) < 0.01


@pytest.mark.parametrize("num_stages", [2, 4, 8])
def test_they_are_shorter_than_equal_loads(num_stages: int) -> None:
    """The same work in as many micro-batches: the best of them is shorter by some hundredths."""
    pipeline = Pipeline("equal", num_stages, 0, 1e3, 0, 10**9)
    loads = np.rint(shapes(16, num_stages, 2.0) * 10**9).astype(np.int64)
    times = pipeline_times_ns(pipeline, loads)
    equal = int(pipeline_times_ns(pipeline, np.full(16, 10**9 // 16)))
    assert int(times.min()) < 0.981 * equal


def times_of(kind: Kind, counts: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> int | None:
    """The time of a packing, after checks of its limits and sequences; None if there is none."""
    replicas = constructed(KindTimes(kind), kind.num_replicas, counts)
    if replicas is None:
        return None
    pipeline = kind.pipeline
    assert len(replicas) == kind.num_replicas
    assert (sum(rows.sum(axis=0) for rows in replicas) == counts).all()
    slowest = 0
    for rows in replicas:
        assert all(0 < tokens <= pipeline.micro_batch_tokens for tokens in (rows @ kind.lengths).tolist())
        assert pipeline.max_micro_batches is None or len(rows) <= pipeline.max_micro_batches
        assert KindTimes(kind).allows(rows)
        loads = rows @ kind.units + pipeline.micro_batch_units
        slowest = max(slowest, int(pipeline_times_ns(pipeline, loads)))
    assert longest_ns(KindTimes(kind), replicas) == slowest
    return slowest


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 4_000), st.integers(1, 12)), min_size=1, max_size=8),
    st.integers(1, 4),
    st.integers(1, 5),
    st.sampled_from([None, 1, 3]),
    st.sampled_from([None, 6_000]),
)
def test_every_sequence_is_packed_once(
    pairs: list[tuple[int, int]], num_stages: int, num_replicas: int, most: int | None, in_flight: int | None
) -> None:
    """Whatever lengths, stages, replicas and limits: within them or not at all; without limits always."""
    table = dict(pairs)
    lengths = np.array(sorted(table), np.int64)
    counts = np.array([table[length] for length in lengths.tolist()], np.int64)
    pipeline = Pipeline("any", num_stages, 0.2, 4e3, 1e6, 4_096, in_flight, most, 10_000)
    found = times_of(Kind(0, pipeline, num_replicas, lengths, counts), counts)
    assert found is not None or most is not None or in_flight is not None


def test_sequences_of_more_than_half_a_micro_batch_are_packed() -> None:
    """Seven of them need seven micro-batches, though four would hold their tokens."""
    lengths, counts = np.array([2_100]), np.array([7])
    kind = Kind(0, Pipeline("full", 2, 0.2, 4e3, 1e9, 4_096), 1, lengths, counts)
    assert times_of(kind, counts) is not None


def test_small_packings_are_near_the_best() -> None:
    """Against all packings of small problems on replicas of one kind."""
    ratios = []
    for seed in range(150):
        problem = random_problem(seed)
        strategy = problem.strategies[0]
        if len(strategy.pipelines) > 1 or not strategy.holds(problem.lengths).all():
            continue
        problem = replace(
            problem, strategies=(strategy,), switches=SwitchTimes.free(1), finish_ns=problem.finish_ns[:1]
        )
        (kind,) = problem.kinds_of(0)
        found = times_of(kind, problem.counts)
        if found is not None:
            overhead = strategy.reduce_ns + problem.finish_of(problem.home_choices[0])
            ratios.append((found + overhead) / least_time_ns(problem))
    assert len(ratios) > 20
    assert min(ratios) >= 1.0
    assert np.mean(ratios) < 1.01
    assert max(ratios) < 1.1
