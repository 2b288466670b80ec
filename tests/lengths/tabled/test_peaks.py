"""Loads around a sequence that is longer than all that are best without it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from milpplan.lengths.bounds import BatchKind, PipelineTable, around, peaks
from milpplan.lengths.dispatch import Placed, place, place_around
from milpplan.lengths.tabled import (
    FloatArray,
    Int64Array,
    Kind,
    Pipeline,
    pipeline_times_ns,
)
from tests.amounts import first

LONGEST = 8_192
PIPELINE = Pipeline("deep", 4, 0.2, 4_500, 1e6, LONGEST)
UNITS = int(PIPELINE.units(np.array([LONGEST]))[0])


@pytest.fixture(scope="module")
def known() -> tuple[FloatArray, ...]:
    """Loads around a sequence that has more than a fiftieth of the whole."""
    return peaks(PIPELINE, UNITS, 0.02)


def test_loads_are_shares_below_the_longest(known: tuple[FloatArray, ...]) -> None:
    """They add up to the whole, and the largest of each is that of the sequence; each next one is larger."""
    tops = [float(one.max()) for one in known]
    assert tops == pytest.approx([0.02 * 1.15 * 1.35**number for number in range(12)], rel=1e-3)
    assert [float(one.sum()) for one in known] == pytest.approx([1.0] * 12)


def test_they_are_shorter_than_level_loads_around_it(known: tuple[FloatArray, ...]) -> None:
    """The same work and the same longest sequence, the others in any number of equal micro-batches, and it at some
    places: never shorter, and 3 % longer where it has less than a fifth of the whole."""
    empty = PIPELINE.micro_batch_units
    for shares in known:
        units = round(UNITS / float(shares.max()))
        least = int(pipeline_times_ns(PIPELINE, np.rint(shares * units).astype(np.int64) + empty))
        level = []
        for number in range(1, 4 * units // UNITS, 1 + units // UNITS // 20):
            each = (units - UNITS) // number
            if each <= UNITS:
                places = np.unique(np.linspace(0, number, 12).astype(int))
                loads = np.full((len(places), number + 1), each, dtype=np.int64)
                loads[np.arange(len(places)), places] = UNITS
                level.append(int(pipeline_times_ns(PIPELINE, loads + empty).min()))
        assert least <= min(level) * (1.0 + 1e-6)
        assert least * 1.03 < min(level) or shares.max() > 0.2


def test_the_nearest_are_chosen(known: tuple[FloatArray, ...]) -> None:
    """None below all of them; of a share between two the lower one first."""
    tops = [float(one.max()) for one in known]
    assert around(known, 0.9 * tops[0]) == []
    assert around((), 0.5) == []
    middle = (tops[2] + tops[3]) / 2
    assert [float(one.max()) for one in around(known, middle)] == tops[2:4]
    assert [float(one.max()) for one in around(known, 0.99)] == tops[-1:]


def _kind(number: int, *, long: int) -> tuple[BatchKind, Int64Array, Int64Array]:
    """Two replicas with short sequences and some of the longest, from the table of a plan of the same."""
    random = np.random.default_rng(number)
    given = np.append(random.integers(64, 512, number), [LONGEST] * long)
    lengths, at, counts = np.unique(given, return_inverse=True, return_counts=True)
    table = PipelineTable.of(Kind(0, PIPELINE, 2, lengths, counts), 0, int(counts @ PIPELINE.units(lengths)))
    return BatchKind(table, lengths, counts), at, lengths


def _without(kind: BatchKind, at: Int64Array, lengths: Int64Array) -> Placed | None:
    """Places that know nothing of long sequences."""
    table = replace(kind.table, peaks=())
    return place(BatchKind(table, lengths, np.bincount(at, minlength=lengths.size)), at, lengths)


@pytest.mark.parametrize(("number", "part"), first(1, [(300, 0.98), (900, 0.98), (1_500, 1.0)]))
def test_batches_with_long_sequences_are_shorter(number: int, part: float) -> None:
    """What is placed around them takes less than what is not, never more; every sequence is in one place of a
    replica, and no micro-batch holds more than it may."""
    kind, at, lengths = _kind(number, long=4)
    found, before = place(kind, at, lengths), _without(kind, at, lengths)
    assert found is not None
    assert before is not None
    assert found.time_ns <= part * before.time_ns
    held = np.zeros((2, int(found.micro_batch.max()) + 1), dtype=np.int64)
    np.add.at(held, (found.replica, found.micro_batch), lengths[at])
    assert held.max() <= LONGEST
    assert held.sum() == lengths[at].sum()


@pytest.mark.long
def test_batches_without_any_are_as_before() -> None:
    """No sequence is longer than best loads: nothing is placed around it."""
    kind, at, lengths = _kind(2_000, long=0)
    assert kind.table.peaks
    assert place_around(kind, at, lengths, slice(2)) == []


def test_sequences_without_work_are_around_none() -> None:
    """Units are whole: a short sequence may have none."""
    free = replace(PIPELINE, quadratic_ns=0.0, linear_ns=1e-6)
    lengths, counts = np.array([1, 8_000_000]), np.array([2, 1])
    kind = Kind(0, replace(free, micro_batch_tokens=10_000_000), 2, lengths, counts)
    batch = BatchKind(PipelineTable.of(kind, 0, int(counts @ kind.units)), lengths, counts)
    assert not kind.units[0]
    assert place_around(batch, np.array([0, 0]), lengths, slice(2)) == []
