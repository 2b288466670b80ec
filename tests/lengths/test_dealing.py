"""Packings improved at their own times: the times are exact, and no sequence is lost on the way."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from milpplan.lengths import StrategyTables, Timer, replicas_ns, replicas_of_several, workload_of
from milpplan.lengths.tabled import Replica, improved, longest_ns
from tests.lengths.cases import GRAIN, pool, pool_of, random_micro_batches
from tests.small import small_problem


def test_times_of_replicas_are_the_exact_ones() -> None:
    """Random micro-batches under every strategy take what the exact times say, to what is rounded."""
    found, random = pool(), np.random.default_rng(1)
    for number, one in enumerate(found.members):
        timer = Timer.of(found.tables[number], one.own_memory_quanta)
        packed = random_micro_batches(found, one.own_memory_quanta, random, int(random.integers(1, 7)))
        exact = replicas_ns(found.problem, one.candidate, found.load.lengths, (packed,))[0]
        assert Replica.of(timer, packed).time_ns == pytest.approx(exact, rel=1e-5), one.candidate.name


def test_many_replicas_are_timed_at_once() -> None:
    """Replicas of several numbers of micro-batches, one of none, take what they take one by one, all strategies
    together as well; also with nothing but the lengths that there are."""
    found, random = pool(), np.random.default_rng(4)
    parts, each = [], []
    for number, one in enumerate(found.members):
        timer = Timer.of(found.tables[number], one.own_memory_quanta)
        sizes = random.integers(1, 7, 3).tolist()
        packed = [random_micro_batches(found, one.own_memory_quanta, random, size) for size in sizes]
        slowest_ns = max(Replica.of(timer, mine).time_ns for mine in packed)
        assert longest_ns(timer, [*packed, packed[0][:0]]) == pytest.approx(slowest_ns)
        held = np.flatnonzero(np.concatenate(packed).any(axis=0))
        few = [mine[:, held] for mine in packed]
        assert longest_ns(timer.for_lengths(held), few) == pytest.approx(slowest_ns)
        parts.append((one.candidate, (packed[0], packed[1], packed[0][:0], packed[2])))
        each.append(replicas_ns(found.problem, one.candidate, found.load.lengths, parts[-1][1]).tolist())
    together = replicas_of_several(found.problem, parts, found.load.lengths)
    assert [one.tolist() for one in together] == each
    assert all(one[2] == 0 for one in each)
    (nothing,) = replicas_of_several(found.problem, [(parts[0][0], (packed[0][:0],))], found.load.lengths)
    assert nothing.tolist() == [0]


def test_changes_are_timed_as_if_made() -> None:
    """A sequence that comes, goes, or opens a micro-batch, and another order: the time of the packing after it."""
    found, random = pool(), np.random.default_rng(2)
    for number, one in enumerate(found.members):
        timer = Timer.of(found.tables[number], one.own_memory_quanta)
        packed = random_micro_batches(found, one.own_memory_quanta, random, 4)
        replica = Replica.of(timer, packed)
        if len(packed) < 2:
            continue
        goes = np.zeros_like(packed[:1])
        goes[0, np.flatnonzero(packed[0])[0]] = 1
        places = np.array([0]), np.array([1])
        after = packed.copy()
        after[0] -= goes[0]
        if not after[0].any():
            continue
        assert replica.times_after([(places[0], -goes)])[0] == pytest.approx(Replica.of(timer, after).time_ns)
        opened = replica.with_empty(1)
        alone = np.insert(after, 1, goes, axis=0)
        times = opened.times_after([(places[0], -goes), (places[1], goes)])
        assert times[0] == pytest.approx(Replica.of(timer, alone).time_ns)
        order = random.permutation(len(packed))
        assert replica.times_ordered(order[None])[0] == pytest.approx(Replica.of(timer, packed[order]).time_ns)


@pytest.mark.long
def test_improving_keeps_all_sequences_and_the_capacity() -> None:
    """Whatever the packing, replicas with nothing among them, its sequences are still there, every micro-batch
    fits, and it is no slower; one that is far from level becomes much shorter; the same packing gives the same
    answer."""
    found, random, shorter = pool(), np.random.default_rng(3), 1.0
    for number, one in enumerate(found.members):
        layout, timer = one.candidate.layout, Timer.of(found.tables[number], one.own_memory_quanta)
        packed = random_micro_batches(found, one.own_memory_quanta, random, 5)
        replicas = [packed, *[packed[:0]] * (layout.dp - 1)]
        after = improved(timer, replicas, 12_000)
        assert (sum(one.sum(axis=0) for one in after) == sum(one.sum(axis=0) for one in replicas)).all()
        assert all((one @ timer.quanta).max(initial=0) <= timer.max_quanta for one in after)
        assert all(one.any(axis=1).all() for one in after)
        times = [max(Replica.of(timer, one).time_ns for one in both) for both in (replicas, after)]
        assert times[1] <= times[0]
        shorter = min(shorter, times[1] / times[0])
        again = improved(timer, replicas, 12_000)
        assert all(np.array_equal(a, b) for a, b in zip(after, again, strict=True))
    assert shorter < 0.9


def _best_ns(found: StrategyTables, number: int) -> float:
    """The least time of one replica over all ordered packings of some different sequences."""
    timer, count = Timer.of(found.tables[number], found.members[number].own_memory_quanta), len(found.load.lengths)
    least = np.inf
    for places in itertools.product(range(count), repeat=count):
        packed = np.zeros((count, count), dtype=np.int64)
        packed[list(places), range(count)] = 1
        if (packed @ timer.quanta).max() <= timer.max_quanta:
            least = min(least, Replica.of(timer, packed).time_ns)
    return least


@pytest.mark.long
def test_few_sequences_are_packed_as_well_as_can_be() -> None:
    """All ordered packings of five sequences, enumerated: on one replica the best of them is found, whether it is
    a pipeline or not."""
    lengths = np.array([700, 1_500, 2_600, 5_000, 12_000], dtype=np.int64)
    found = pool_of(small_problem(memory_gib=40), workload_of(lengths, GRAIN))
    checked = set()
    for number, one in enumerate(found.members):
        layout = one.candidate.layout
        if layout.dp > 1 or layout.pp in checked or one.own_memory_quanta * GRAIN < lengths[-1]:
            continue
        checked.add(layout.pp)
        start = np.eye(5, dtype=np.int64)
        after = improved(Timer.of(found.tables[number], one.own_memory_quanta), [start], 120_000)
        time_ns = Replica.of(Timer.of(found.tables[number], one.own_memory_quanta), after[0]).time_ns
        assert time_ns == pytest.approx(_best_ns(found, number), rel=1e-9), one.candidate.name
    assert len(checked) > 1, checked
