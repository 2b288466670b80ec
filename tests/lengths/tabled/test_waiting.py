"""Waits around long sequences: no packing of random sequences does more within its time than they allow."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from benchmarks.length_groups import case_problem
from examples.adapters import hydraulis
from milpplan.lengths.bounds import CapacityRow, IdleTimeBound, PipelineCuts
from milpplan.lengths.tabled import (
    Int64Array,
    Kind,
    Pipeline,
    pipeline_times_ns,
    solve_groups,
)
from tests.amounts import first

LENGTHS = np.array([5, 10, 20, 40, 150, 400])
COUNTS = np.array([8, 8, 8, 4, 2, 1])


def kind_of(stages: int, replicas: int, transfer_ns: int = 0) -> Kind:
    """Short sequences and a few that are as long as many of them together."""
    pipeline = Pipeline("p", stages, 0.2, 300.0, 2_000.0, 600, transfer_ns=transfer_ns)
    return Kind(0, pipeline, replicas, LENGTHS, COUNTS)


@cache
def known(stages: int, replicas: int, transfer_ns: int, low: float, high: float) -> tuple[Kind, CapacityRow]:
    """What is known after learning the three longest lengths."""
    kind = kind_of(stages, replicas, transfer_ns)
    waits = IdleTimeBound(kind, PipelineCuts(kind))
    for length in (5, 4, 3):
        assert waits.learn(length, low, high)
        assert not waits.learn(length, low, high)
    return kind, waits.capacity_row(low, high)


def times_of(kind: Kind, replicas: list[Int64Array]) -> list[int]:
    """Exact times of micro-batches [v, K] of every replica."""
    loads = [one @ kind.units + kind.pipeline.micro_batch_units for one in replicas]
    return [int(pipeline_times_ns(kind.pipeline, one)) for one in loads]


@pytest.mark.parametrize(
    ("stages", "replicas", "transfer_ns"), first(1, [(2, 1, 0), (4, 1, 900), (3, 2, 0), (4, 3, 0)])
)
def test_no_packing_does_more_within_its_time(stages: int, replicas: int, transfer_ns: int) -> None:
    """Random sequences in random micro-batches of random replicas, whose time is in the interval: work is at most
    what the room for their longest says, and some come near it."""
    random = np.random.default_rng(7 * stages + replicas)
    kind = kind_of(stages, replicas, transfer_ns)
    whole = float(kind.total_units * kind.pipeline.parts / replicas)
    low, high = 0.4 * whole, 1.6 * whole
    kind, room = known(stages, replicas, transfer_ns, low, high)
    seen, nearest = 0, np.inf
    for _ in range(1500):
        held = random.binomial(COUNTS, random.uniform(0.3, 1.0))
        micro_batches = [np.zeros((int(random.integers(1, 12)), LENGTHS.size), np.int64) for _ in range(replicas)]
        for k in np.repeat(np.arange(LENGTHS.size), held):
            replica = micro_batches[int(random.integers(replicas))]
            replica[int(random.integers(len(replica))), k] += 1
        time_ns = max(times_of(kind, [one[one.any(axis=1)] for one in micro_batches]))
        if low <= time_ns <= high and held.any():
            seen += 1
            work = float(held @ kind.units) * kind.pipeline.parts
            longest = int(np.flatnonzero(held)[-1])
            left = min([room.capacity_of_any, *(one for length, one in room.capacities if length <= longest)])
            assert work <= room.slope * time_ns + left
            nearest = min(nearest, time_ns - (work - left) / room.slope)
    assert seen > 50
    assert nearest < 0.5 * whole


@pytest.mark.parametrize(("stages", "replicas"), first(1, [(2, 1), (4, 2), (4, 1)]))
def test_longer_sequences_leave_less_room(stages: int, replicas: int) -> None:
    """Rooms fall with the length, and the longest one's is well below what replicas without it have."""
    whole = float(kind_of(stages, replicas).total_units * 3 / replicas)
    _, room = known(stages, replicas, 0, 1.2 * whole, 1.5 * whole)
    rooms = [room.capacity_of_any, *(one for _, one in room.capacities)]
    assert rooms == sorted(rooms, reverse=True)
    assert rooms[-1] < rooms[0] - 0.02 * whole


def test_bound_is_reached_where_one_sequence_is_all() -> None:
    """A kind that holds nothing but the longest sequence: the bound is nearly its time alone."""
    pipeline = Pipeline("p", 4, 0.2, 300.0, 2_000.0, 600)
    kind = Kind(0, pipeline, 1, np.array([400]), np.array([1]))
    alone = 4 * 3 * (int(kind.units[0]) + pipeline.micro_batch_units)
    waits = IdleTimeBound(kind, PipelineCuts(kind))
    waits.learn(0, 0.9 * alone, 1.1 * alone)
    room = waits.capacity_row(0.9 * alone, 1.1 * alone)
    bound = (float(kind.units[0] * 3) - room.capacities[0][1]) / room.slope
    assert 0.95 * alone < bound <= alone


@pytest.mark.long
@pytest.mark.parametrize("number", [1, 2])
def test_few_long_sequences_on_pipelines_are_proved_within_one_percent(number: int) -> None:
    """Hydraulis' H1 with unlike pipelines: 4 % were left where waits were not known."""
    case = hydraulis.cases()["H1_7b_16gpu_100K"]
    result = solve_groups(case_problem(case, number), "highs", 0.01, 60)
    assert result.gap <= 0.01
    assert {record.by for record in result.sets} == {"waits"}
