"""Sets by what replicas of their strategies hold at most: never above an exact step, and more than was known."""

from __future__ import annotations

import time

import numpy as np
import pytest

from milpplan.lengths import Step, StrategyTables, replicas_ns
from milpplan.lengths.turns.set_bounds import SetBounds
from milpplan.lengths.turns.set_branch_and_bound import ReplicaInequalities, SetBranchAndBound
from milpplan.lengths.turns.turn_search import TurnSearch
from tests.amounts import long_but
from tests.lengths.cases import deep_pool, pool, pool_of, random_packings, workload
from tests.small import small_problem


def few_long() -> StrategyTables:
    """Five long sequences on two to four replicas."""
    return pool_of(small_problem(memory_gib=40), workload(long=5, short=12))


def searched(found: StrategyTables) -> TurnSearch:
    """Sets that nothing closes: a step that everything is shorter than."""
    search = TurnSearch(found, Step(0, (0,), {}, 10**15), 0.0, "highs")
    search.deadline = time.perf_counter() + 120.0
    return search


@pytest.mark.parametrize(
    "pool_", [deep_pool, *(pytest.param(one, marks=pytest.mark.long) for one in (pool, few_long))]
)
def test_no_step_of_a_set_is_below_it(pool_: object) -> None:
    """Random shares of the sequences between two strategies, packed, switched and timed exactly, for targets above
    and below: a set that is closed has no step below the target, and no other one a step below its bound."""
    assert callable(pool_)
    found, random = pool_(), np.random.default_rng(17)
    search, checked, rose, opened, tight = searched(found), 0, 0, 0, 0.0
    stages = {member: found.num_stages(member) for member in search.members}
    chosen = [member for member in search.members if 1 < stages[member] < 8][:4]
    search.members = [*chosen, *(member for member in search.members if stages[member] == 1)][:6]
    for number, one in enumerate(search.screen(2).sets):
        held = [search.members[place] for place in one.strategies]
        if all(stages[member] == 1 for member in held):
            continue
        left = search.node(one, number)
        search._own_memory(left)
        search._price(left)
        steps = []
        for _ in range(3):
            share = random.binomial(found.load.counts, random.choice([0.05, 0.3, 0.5, 0.7, 0.95]))
            split = {held[0]: share, held[1]: found.load.counts - share}
            step = search.orders.arranged(held, split) if all(counts.any() for counts in split.values()) else None
            steps += [] if step is None else [(step.time_ns, split)]
        if not steps:
            continue
        before_ns, least_ns = left.bound_ns, min(time_ns for time_ns, _ in steps)
        for target_ns in (least_ns * 0.97, least_ns * 1.02):
            search.bounds.branch(left, ["none", "none"], target_ns)
            for place, (each, least, most) in left.open_loads.items():
                # What is shorter than the target has a load that is open.
                short = [split for time_ns, split in steps if time_ns < target_ns]
                loads = [float(each @ split[search.members[place]]) for split in short]
                assert all(least * (1 - 1e-9) <= load <= most * (1 + 1e-9) for load in loads)
                opened += bool(loads) and (least > 0.0 or most < float(each @ found.load.counts) * 0.99)
            search.bounds.bound_by_replicas(left, target_ns, time.perf_counter() + 0.3, anew=True)
            bound_ns = search.bounds.set_searches[number].bound_ns
            assert bound_ns <= least_ns
            tight, checked = max(tight, bound_ns / least_ns), checked + 1
        rose += left.bound_ns > before_ns * 1.001
        if checked > 5:
            break
    assert checked > 3
    assert rose > 0 or pool_ is deep_pool
    assert opened > 0 or pool_ is not deep_pool
    assert tight > 0.8, tight


@pytest.mark.parametrize("pool_", long_but((pool,), (pool, few_long)))
def test_replicas_hold_what_the_rows_say(pool_: object) -> None:
    """Random packings of whatever a group holds: within its exact time every replica is in one of the kinds, with
    all rows of it; so it is after more was learned, which some packings of more break."""
    assert callable(pool_)
    found, random = pool_(), np.random.default_rng(5)
    checked = learned = 0
    for member, strategy in enumerate(found.members):
        if (
            not strategy.shared_memory_quanta
            or not 1 < found.num_stages(member) < 8
            or strategy.candidate.layout.dp == 1
        ):
            continue
        lengths = found.load.lengths
        fits = lengths <= strategy.shared_memory_quanta * found.load.token_quantum
        group = ReplicaInequalities(found, member, found.step_bound_ns(member, shared_memory=False))
        for turn in range(8):
            counts = random.binomial(found.load.counts, random.uniform(0.2, 1.0)) * fits
            replicas = random_packings(found, member, counts, random)
            times = replicas_ns(found.problem, strategy.candidate, lengths, replicas, found.load.rules.mask)
            held = np.array([one.sum(axis=0) for one in replicas])
            kinds = group.replica_classes(float(times.max()))
            for mine in held:
                assert any(_holds(one, mine) for one in kinds) or not mine.any()
            checked += 1
            if turn < 5 and held.any():
                # More than a replica holds, of which it is not known that it does not.
                mine = held[int(held.any(axis=1).argmax())]
                kind = next(one.replica_class for one in kinds if _holds(one, mine))
                parts = [(kind, 1.0, mine * 1.15)]
                learned += group.learn(float(times.max()), parts, time.perf_counter() + 0.2)
    assert checked > 15
    assert learned > 2


def _holds(used: object, mine: np.ndarray) -> bool:
    """Whether a replica with these sequences is one of a kind."""
    kind, holds, rows = used.replica_class, used.holds, used.rows  # type: ignore[attr-defined]
    first, _ = kind.longest_range or (0, len(mine))
    led = not first or bool(mine[first:].any())
    return led and not mine[~holds].any() and bool((rows @ mine[holds] <= 1.0 + 1e-9).all())


def test_sets_of_three_and_strategies_of_one_stage() -> None:
    """A set of three, of which one has no stages: closed by a low target, bounded by a high one."""
    found = pool()
    search = searched(found)
    bounds = search.bounds
    one = search.members[next(i for i, m in enumerate(search.members) if found.num_stages(m) == 1)]
    others = [m for m in search.members if found.num_stages(m) == 2][:2]
    search.members = [one, *others]
    search.screen(3)
    bounds = search.bounds
    assert isinstance(bounds, SetBounds)
    left = search.node(next(s for s in search.screen(3).sets if len(s.strategies) == 3), 0)
    counts = found.load.counts
    third = counts // 3
    step = search.orders.arranged(search.members, {one: third, others[0]: third, others[1]: counts - 2 * third})
    assert step is not None
    search._price(left)
    search.bounds.bound_by_replicas(left, step.time_ns * 1.2, time.perf_counter() + 1.0)
    found_ns = search.bounds.set_searches[0].bound_ns
    assert 0.4 * step.time_ns < found_ns <= step.time_ns
    assert isinstance(search.bounds.set_searches[0], SetBranchAndBound)
