"""Bounds by the longest sequence of every replica: never above an exact time, and more where long ones are few."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest

from milpplan.lengths import StrategyTables, replicas_ns
from milpplan.lengths.bounds import (
    ClassAssignments,
    ConfigurationBound,
    ConfigurationLP,
    LongestSequenceBranching,
    MinReplicas,
    PinnedItem,
    Window,
    best_mixture,
    fewest_bins,
    improved,
)
from milpplan.lengths.deadline import Deadline
from tests.lengths.cases import pool_of, random_micro_batches, random_packings, workload
from tests.small import small_problem

SHARES = 0.3, 0.8


def partitions(items: list[float]) -> Iterator[list[list[float]]]:
    """All ways to divide items into parts."""
    if not items:
        yield []
        return
    for parts in partitions(items[1:]):
        yield [[items[0]], *parts]
        for place, part in enumerate(parts):
            yield [*parts[:place], [items[0], *part], *parts[place + 1 :]]


def together_ns(part: list[float]) -> float:
    """The longest path through the first and the last of some of the sequences, the best ones for these."""
    found = 0.0
    for number in range(2, len(part) + 1):
        some = sorted(part)[-number:]
        ends = [(a, b) for i, a in enumerate(some) for j, b in enumerate(some) if i != j]
        found = max(found, sum(some) + min(SHARES[0] * a + SHARES[1] * b for a, b in ends))
    return found


def test_bins_are_never_fewer() -> None:
    """Against all ways to divide up to seven sizes: no more bins than are needed, mostly as many, and often more
    than the volume alone says."""
    random, exact, more = np.random.default_rng(1), 0, 0
    for _ in range(60):
        sizes = random.integers(1, 10, int(random.integers(1, 8))).astype(float)
        room = float(random.integers(6, 14))
        needed = min(
            len(parts)
            for parts in partitions(sizes.tolist())
            if all(len(part) == 1 or sum(part) <= room for part in parts)
        )
        found = fewest_bins(sizes, room)
        assert found <= needed
        exact += found == needed
        more += found > np.ceil(sizes.sum() / room)
    assert exact > 50
    assert more > 3


def test_sequences_together_are_those_of_the_best_way_to_divide_them() -> None:
    """Of the few longest: what every number of replicas takes at least is what the best way takes, so the fewest
    replicas are exact; of all: never more than are needed."""
    random = np.random.default_rng(2)
    for turn in range(12):
        sizes = np.sort(random.uniform(1.0, 10.0, 6 if turn else 1))
        found = MinReplicas.of(sizes, SHARES)
        for number in range(1, len(sizes) + 1):
            longest = sizes[len(sizes) - number :].tolist()
            ways = [(len(parts), max(map(together_ns, parts))) for parts in partitions(longest)]
            for replicas in range(1, len(sizes) + 1):
                least = min(time_ns for parts, time_ns in ways if parts <= replicas)
                assert found.times[number, replicas - 1] == pytest.approx(least)
            for time_ns in random.uniform(0.0, 1.2 * together_ns(longest) + 1.0, 6).tolist():
                assert found.min_replicas(number, time_ns) == min(n for n, needed in ways if needed <= time_ns)
    assert found.min_replicas(0, 1.0) == 0


def test_more_sequences_than_every_way_is_looked_at_for() -> None:
    """Twelve of a size of which two fit together need six replicas; eleven that fit with none eleven."""
    assert MinReplicas.of(np.full(12, 4.0), SHARES).min_replicas(12, 2 * 4.0 + 1.1 * 4.0 + 0.01) == 6
    assert MinReplicas.of(np.full(11, 4.0), SHARES).min_replicas(11, 2 * 4.0 + 1.1 * 4.0 - 0.01) == 11


def replicated(found: StrategyTables) -> list[int]:
    """Pipelines on several replicas that hold the longest sequence."""
    longest = found.load.lengths[-1] // found.load.token_quantum
    members = range(len(found.members))
    return [
        one
        for one in members
        if found.num_stages(one) > 1
        and found.members[one].candidate.layout.dp > 1
        and min(found.max_quanta(one, shared_memory=False), found.members[one].shared_memory_quanta) >= longest
    ]


@pytest.mark.parametrize(
    ("long", "short", "effort_s"),
    [
        pytest.param(3, 20, 2.0, marks=pytest.mark.long),
        pytest.param(5, 12, 2.0, marks=pytest.mark.long),
        (1, 40, 0.4),
    ],
)
def test_no_packing_is_below_the_bound_of_its_leaders(long: int, short: int, effort_s: float) -> None:
    """Few long sequences on two replicas: of random replicas none holds more than its class may within its exact
    time, and no packing, good or random, is shorter than the bound, which is more than that of ``filled`` where
    long sequences are few."""
    found = pool_of(small_problem(memory_gib=60), workload(long=long, short=short))
    random, counts, gained, seen = np.random.default_rng(long), found.load.counts, 0.0, set()
    members = replicated(found)
    assert members
    for member in members[:2]:
        one, grains = found.members[member].candidate, found.max_quanta(member, shared_memory=False)
        best = found.pack(member, counts, grains)
        assert best is not None
        loads = found.work_bound(member, shared_memory=False).with_longest(float("inf"))
        first = ConfigurationBound(loads, found.micro_batch_pricing(member))
        first.run(0.98 * best.time_ns, Deadline.after(effort_s))
        rows = [packing for _ in range(6) for packing in [random_packings(found, member, counts, random)]]
        parts = [random_micro_batches(found, grains, random, int(random.integers(1, 9))) for _ in range(30)]
        leaders = LongestSequenceBranching(first, 0.98 * best.time_ns)
        known = leaders.bound_ns
        leaders.run(0.98 * best.time_ns, Deadline.after(effort_s))
        leaders.run(best.time_ns, Deadline.after(effort_s))
        assert known <= leaders.bound_ns <= best.time_ns
        gained = max(gained, leaders.bound_ns / known - 1.0)
        for packing in rows:
            times = replicas_ns(found.problem, one, found.load.lengths, tuple(packing), found.load.rules.mask)
            assert leaders.bound_ns <= times.max()
        for replica in [*best.replicas, *(part for packing in rows for part in packing), *parts]:
            if not len(replica) or (replica.sum(axis=0) > counts).any():
                continue
            (exact,) = replicas_ns(found.problem, one, found.load.lengths, (replica,), found.load.rules.mask)
            led = int(np.flatnonzero(replica.any(axis=0))[-1])
            place = next(at for at, (begin, end) in enumerate(leaders.classes) if begin <= led < end)
            seen.add(place)
            load = float((replica @ leaders.class_bound.duals.sequence_loads).sum())
            assert load <= leaders.class_bound.max_load(place, float(exact)) * (1 + 1e-9)
    assert len(seen) > 1
    assert gained > (1e-3 if long > 1 else -1.0)


def test_chains_are_all_ways_to_lead_replicas() -> None:
    """Against all numbers of replicas by class: each once, with what longer leaders do and need counted."""
    for classes, replicas in ((1, 3), (2, 1), (3, 4), (5, 3)):
        found = ClassAssignments.of(classes, replicas)
        ways = [
            way for way in product(range(replicas + 1), repeat=classes) if sum(way) == replicas and way[-1] > 0
        ]
        assert sorted(map(tuple, found.numbers.tolist())) == ways
        assert ClassAssignments.num_assignments(classes, replicas) == len(ways)
        random = np.random.default_rng(classes)
        for _ in range(20):
            left = np.where(random.random(classes) < 0.2, -np.inf, random.uniform(0.5, 1.5, classes))
            above = np.sort(random.uniform(0.0, 2.0, classes))[::-1] * (np.arange(classes) < classes - 1)
            fewest = np.sort(random.integers(0, replicas + 1, classes))[::-1] * (np.arange(classes) < classes - 1)
            beyond, enough = found.excess_load(left, above, 2.0), found.has_min_replicas(fewest)
            for numbers, more, is_enough in zip(found.numbers.tolist(), beyond, enough, strict=True):
                total, number, possible, allowed = 0.0, 0, True, True
                for place in reversed(range(classes)):
                    if numbers[place]:
                        possible &= total >= above[place] and bool(np.isfinite(left[place]))
                        allowed &= number >= fewest[place]
                        total, number = total + numbers[place] * left[place], number + numbers[place]
                assert allowed == is_enough
                assert more == (pytest.approx(total - 2.0) if possible else -np.inf)


def test_a_window_whose_sequence_takes_too_long_is_left_nothing() -> None:
    """Where the longest sequence alone takes longer than the time, programs have no answer for it; what proves
    most for a longer time says that nothing is left."""
    found = pool_of(small_problem(memory_gib=60), workload(long=3, short=20))
    member = replicated(found)[0]
    one, stages = found.members[member].candidate, found.num_stages(member)
    loads = found.work_bound(member, shared_memory=False)
    last = len(loads.sequence_loads) - 1
    alone = (np.arange(last + 1) == last).astype(np.int64)[None]
    (exact,) = replicas_ns(found.problem, one, found.load.lengths, (alone,), found.load.rules.mask)
    least, time_ns = float(loads.stages.last[last]), 0.9 * float(exact)
    each, window = loads.sequence_loads * loads.num_replicas, Window((1, 1), (1, 1))
    filling = ConfigurationLP(
        found.micro_batch_pricing(member), each, loads.stages.last, stages, window, PinnedItem(last)
    )
    mixture = best_mixture(loads.stages, stages, window, loads.total_load, least)
    slope = mixture.bound(loads.stages, loads.total_load, least).slope
    proved, rows = filling.prove_load_bound(mixture, slope)
    better, _, _ = improved(filling, mixture, slope, rows, None, time_ns, 0.0)
    assert better.within(time_ns) < float(each[last])
    assert better.within(time_ns) <= proved.within(time_ns)
