"""Groups that hold the longest sequences for sure: bounds held to exact times of random packings."""

from __future__ import annotations

import numpy as np
import pytest

from milpplan.lengths import Step, StrategyTables, replicas_ns
from milpplan.lengths.bounds import exclusive_bounds, longest, max_exclusive
from milpplan.lengths.deadline import Deadline
from milpplan.lengths.turns import TurnSearch, branched
from tests.lengths.cases import pool_of, random_packings, workload
from tests.small import small_model, small_problem

LONG = 6


def _pool() -> StrategyTables:
    """Eight layers on four GPUs, some long sequences and many short ones."""
    problem = small_problem(memory_gib=40).model_copy(update={"model": small_model(8)})
    return pool_of(problem, workload(long=LONG, short=14, longest=12_288))


@pytest.mark.long
def test_no_packing_of_what_is_held_is_below_the_bounds() -> None:
    """Random parts of the workload with the longest sequences of it, in random micro-batches on random replicas,
    take no less than any of the bounds that know these; the best packing of the longest alone comes close, well
    above what linear bounds know of it. Bounds that took one more for sure would break."""
    found, random = _pool(), np.random.default_rng(1)
    lengths, counts = found.load.lengths, found.load.counts
    members = [
        member
        for member, one in enumerate(found.members)
        if one.candidate.layout.pp == 1 and np.isfinite(found.latency_bound_ns(member, shared_memory=True))
    ]
    assert members
    close, raised, broken = 0.0, 0.0, 0
    for member in members[::4]:
        one = found.members[member]
        grains, table = one.shared_memory_quanta, found.tables[member]
        for number in (1, min(LONG, max_exclusive(one))):
            bounds = exclusive_bounds(table, one, grains, number)
            more = exclusive_bounds(table, one, grains, min(number + 1, max_exclusive(one)))
            whole = np.bincount(longest(table, number), minlength=len(lengths))
            for turn in range(9):
                held = whole if turn < 3 else whole + random.integers(0, counts - whole + 1)
                packings = random_packings(found, member, held, random)
                exact = int(replicas_ns(found.problem, one.candidate, lengths, tuple(packings)).max())
                bound = bounds.at(held.astype(float))
                assert bound <= exact, (one.candidate.name, number)
                broken += more.at(held.astype(float)) > exact
            best = found.pack(member, whole, grains)
            assert best is not None
            bound = bounds.at(whole.astype(float))
            assert bound <= best.time_ns
            close = max(close, bound / best.time_ns)
            raised = max(raised, bound / found.linear_bounds(member, shared_memory=True).at(whole.astype(float)))
    assert broken
    assert close > 0.99, close
    assert raised > 1.2, raised


@pytest.mark.long
def test_sets_know_who_holds_the_longest() -> None:
    """Pairs of which only one strategy holds the long sequences: with random shares of the others, packed,
    switched and timed exactly, no step is below what is known of the pair, which is more than without."""
    found = pool_of(small_problem(memory_gib=40), workload(long=3, short=14, longest=60_000))
    random = np.random.default_rng(5)
    search = TurnSearch(found, Step(0, (0,), {}, 10**15), 0.0)
    search.deadline = Deadline.after(60.0)
    names = [one.candidate.name for one in found.members]
    search.members = [names.index(name) for name in ("dp4", "dp2 tp2", "cp2 pp2")]
    checked, raised = 0, 0.0
    for one in search.screen(2).sets:
        numbers = search.bounds.num_exclusive(one.strategies)
        if not any(numbers):
            continue
        left = search.node(one, checked)
        for learn in left.bounding_steps[:3]:
            learn(left)
        linear = search.bounds.screening_problem(
            list(one.strategies), [search.bounds.linear_bounds[place] for place in one.strategies]
        )
        plain, *_ = branched(linear, [0, 1], [], np.inf)
        raised = max(raised, left.bound_ns / (plain + left.order_ns))
        held = [search.members[place] for place in one.strategies]
        search.switches.price(held)
        for _ in range(8):
            share = random.integers(0, found.load.counts + 1)
            # What fits under one only is there.
            share[-3:] = found.load.counts[-3:] if numbers[0] else 0
            step = search.orders.arranged(held, {held[0]: share, held[1]: found.load.counts - share})
            if step is not None:
                assert left.bound_ns <= step.time_ns
                checked += 1
    assert checked > 5
    assert raised > 1.05, raised
