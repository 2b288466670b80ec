"""Packings of one strategy get no longer, hold every sequence once, and begin from all shapes there are."""

from __future__ import annotations

from functools import cache

import pytest

from benchmarks.length_jobs import ALIGNMENT, Case, K, ParetoTail
from milpplan.lengths import Load, Packed, StrategyTables, quantum_problem, replicas_ns
from milpplan.lengths.single import Incumbents
from tests.lengths.cases import GRAIN, pool_of, workload
from tests.small import small_problem


@cache
def pool() -> StrategyTables:
    """Pipelines of two stages, and few sequences."""
    return pool_of(small_problem(memory_gib=40, space={"pp": (2,)}), workload(short=8))


def pipelined() -> int:
    """A pipeline on several replicas that holds the longest sequence."""
    found = pool()
    return next(
        one
        for one, member in enumerate(found.members)
        if found.num_stages(one) > 1
        and member.candidate.layout.dp > 1
        and found.max_quanta(one, shared_memory=False) * GRAIN >= found.load.lengths[-1]
    )


def exact_ns(member: int, packed: Packed) -> int:
    """The exact time of a packing of all sequences."""
    found = pool()
    assert (sum(one.sum(axis=0) for one in packed.replicas) == found.load.counts).all()
    return int(
        replicas_ns(found.problem, found.members[member].candidate, found.load.lengths, packed.replicas).max()
    )


@pytest.mark.long
def test_every_start_is_improved_once_and_the_shortest_packing_stays() -> None:
    """A pipeline has several; none makes the step longer, and when all are gone there is nothing to do. Without
    the others the first one may be longer than what is found."""
    known, member = Incumbents(pool()), pipelined()
    known.pack(member)
    assert known.best is not None
    assert known.is_rough(member)
    starts = list(known.starts[member])
    assert len(starts) > 1
    assert known.packed[member].time_ns <= min(one.time_ns for one in starts)
    known.improve(member, maximum=False)
    assert not known.is_rough(member)
    times, left = [known.best.time_ns], known.starts[member]
    assert len(left) < len(starts)
    while known.restart(member):
        times.append(known.best.time_ns)
    assert all(one.time_ns > 1.005 * known.packed[member].time_ns for one in known.starts[member])
    assert times == sorted(times, reverse=True)
    assert known.best.time_ns == known.step(member).time_ns
    packed = known.packed[member]
    assert exact_ns(member, packed) == packed.time_ns
    while not known.is_finished(member):
        known.improve(member, maximum=True)
    assert known.best.time_ns <= times[-1]
    assert exact_ns(member, known.packed[member]) == known.packed[member].time_ns


@pytest.mark.long
def test_long_sequences_share_replicas_where_that_is_shorter() -> None:
    """Five sequences of 8K on eight replicas: on three of these the step is more than 1 % shorter than on five and
    more, which begin shorter."""
    case = Case("llama2-13b", "dgx-h100", 32, 8 * K, ParetoTail(3.0), context=False)
    load = Load(case.workload.lengths, case.workload.counts, ALIGNMENT)
    found = StrategyTables.of(quantum_problem(case.problem, ALIGNMENT), load)
    (member,) = (place for place, one in enumerate(found.members) if one.candidate.name == "dp8 pp4")
    known = Incumbents(found)
    known.pack(member)
    first = found.polish(member, known.starts[member][0], found.max_quanta(member, shared_memory=False))
    assert sum(one[:, -1].any() for one in first.replicas) >= 5
    known.improve(member, maximum=False)
    packed = known.packed[member]
    assert sum(one[:, -1].any() for one in packed.replicas) <= 4
    assert packed.time_ns < 0.99 * first.time_ns
