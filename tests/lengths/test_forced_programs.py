"""Programs of groups that hold the longest sequences for sure, held to exact times of packings."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from milpplan.lengths import Step, StrategyTables, replicas_ns
from milpplan.lengths.bounds import ExclusiveProgram, Items, KnapsackDP, PinnedItem
from milpplan.lengths.deadline import Deadline
from milpplan.lengths.turns import TurnSearch
from tests.lengths.cases import pool, pool_of, random_micro_batches, random_packings, restrict, workload
from tests.small import small_model, small_problem

LONG = 9


def _pool() -> StrategyTables:
    """Eight layers on four GPUs, many long sequences and short ones."""
    problem = small_problem(memory_gib=40).model_copy(update={"model": small_model(8)})
    return pool_of(problem, workload(long=LONG, short=30, longest=12_288))


def _program(found: StrategyTables, member: int, first: int, share: float) -> ExclusiveProgram:
    """Others are worth so many times what linear bounds say."""
    worths = share * found.linear_bounds(member, shared_memory=True).shares[0]
    return ExclusiveProgram(
        found.work_bound(member, shared_memory=True),
        found.micro_batch_pricing(member, shared_memory=True),
        first,
        worths,
    )


def test_loose_sequences_fill_what_is_left_as_all_ways_say() -> None:
    """The most that two loose kinds and two sequences are worth in exactly so many grains, against all ways; and
    what is told is worth that."""
    random = np.random.default_rng(3)
    sizes, room = np.array([1, 1, 3, 4]), 11
    items = Items(sizes, np.array([99, 99, 2, 1]), np.ones(4, dtype=bool), 2)
    values = random.uniform(-1.0, 2.0, (6, 4))
    table = KnapsackDP(items, values, room)
    told = 0
    for k, held in table.rows():
        for row, grains in product(range(6), range(1, room + 1)):
            ways = [
                (*loose, *whole)
                for whole in product(range(3), range(2))
                for loose in product(range(grains + 1), repeat=2)
                if np.array([*loose, *whole]) @ sizes == grains
            ]
            own = [np.array(way) for way in ways if way[k] and not any(way[k + 1 :])]
            best = max((float(way @ values[row]) for way in own), default=-1e30)
            if not own:
                assert held[row, grains - 1] < -1e20
                continue
            assert held[row, grains - 1] == pytest.approx(best, abs=1e-9)
            content = table.content(k, grains, row)
            assert content @ sizes == grains
            assert float(content @ values[row]) == pytest.approx(best, abs=1e-9)
            told += 1
    assert told > 150
    assert items.num_passes(room) < Items(sizes, items.counts, items.fits).num_passes(room)


def test_contents_with_loose_sequences_are_no_dearer() -> None:
    """At random weights and prices a micro-batch is worth no less than with its short sequences by the grain."""
    found, random = pool(), np.random.default_rng(4)
    member = next(m for m in range(len(found.members)) if found.num_stages(m) > 1)
    contents, most = found.micro_batch_pricing(member), found.max_quanta(member, shared_memory=False)
    sizes = contents.items.sizes
    rows = random_micro_batches(found, most, random, 60)
    times = contents.times(rows)
    first = len(sizes) // 2
    kinds = np.arange(first) * 3 // first
    loose = contents.with_loose_quanta(kinds)
    assert loose.items.counts[:3].sum() == contents.items.counts[:first] @ sizes[:first]
    unit = times.sum() / (rows @ sizes).sum()
    for _ in range(6):
        weights = random.uniform(0.0, 1.0, (6, 2))
        prices = unit * random.uniform(0.3, 1.2, 3 + len(sizes) - first)
        prices[3:] *= sizes[first:]
        own = np.append(prices[kinds] * sizes[:first], prices[3:])
        values, _ = loose.best_contents(weights, prices, np.zeros(2, dtype=bool), PinnedItem())
        worth = times @ weights - (rows @ own)[:, None]
        assert (values <= worth.min(axis=0) + 1e-6 * abs(values)).all()


@pytest.mark.long
@pytest.mark.parametrize(("stages", "near"), [(2, 0.9), (4, 0.8)])
def test_no_packing_of_what_is_held_is_below_the_programs(stages: int, near: float) -> None:
    """Random parts of the workload with the longest sequences of it, in few or many random micro-batches in any
    order, and packed well, take no less than the program says; that comes close. One of some sequences more for
    sure would break."""
    found, random = _pool(), np.random.default_rng(stages)
    lengths, counts = found.load.lengths, found.load.counts
    members = [
        member
        for member, one in enumerate(found.members)
        if one.candidate.layout.pp == stages
        and one.candidate.layout.dp == 1
        and np.isfinite(found.latency_bound_ns(member, shared_memory=True))
    ]
    assert members
    first = len(lengths) - int((np.cumsum(counts[::-1]) < LONG).sum()) - 1
    member = members[0]
    one = found.members[member]
    whole = np.where(np.arange(len(lengths)) < first, 0, counts)
    close, broken = 0.0, 0
    for share in (0.7, 1.5):
        known, more = _program(found, member, first, share), _program(found, member, first - 9, share)
        cheap, before_ns = known.bounds, known.bound_ns
        for program in (known, more):
            program.run(float("inf"), Deadline.after(1.0))
        assert known.bound_ns > before_ns
        for turn in range(7):
            held = whole if turn < 4 else whole + random.integers(0, counts - whole + 1)
            packings = random_packings(found, member, held, random)
            exact = int(replicas_ns(found.problem, one.candidate, lengths, tuple(packings)).max())
            packed = found.pack(member, held, one.shared_memory_quanta)
            assert packed is not None
            for bounds in (cheap, known.bounds):
                assert bounds.at(held.astype(float)) <= min(exact, packed.time_ns)
            if turn < 4:
                broken += more.bounds.at(held.astype(float)) > packed.time_ns
                close = max(close, known.bounds.at(held.astype(float)) / packed.time_ns)
    assert broken
    assert close > near, close


@pytest.mark.long
def test_sets_know_programs_of_what_is_there_for_sure() -> None:
    """A pair of which only a pipeline of one replica holds the long sequences: programs raise what is known of it,
    and with random shares of the others, packed, switched and timed exactly, no step is below."""
    problem = small_problem(memory_gib=30).model_copy(update={"model": small_model(8)})
    space = problem.space.model_copy(update={"memory_margin_fraction": 0.0})
    problem = problem.model_copy(update={"space": space})
    found = pool_of(problem, workload(long=5, short=100, longest=40_000))
    random = np.random.default_rng(5)
    search = TurnSearch(found, Step(0, (0,), {}, 10**15), 0.0)
    search.deadline = Deadline.after(60.0)
    names = [one.candidate.name for one in found.members]
    few = ("cp2 pp2 selective", "pp4 full", "tp2 pp2 selective", "tp2 cp2")
    restrict(search, [names.index(one) for one in few])
    checked, raised = 0, 0
    for one in search.bounds.screen(2, search.target_ns, search.deadline).sets:
        used = one.strategies
        held = [search.members[place] for place in used]
        single = [found.num_stages(m) > 1 and found.members[m].candidate.layout.dp == 1 for m in held]
        forced = [search.bounds.first_exclusive(used, place) < len(found.load.lengths) for place in used]
        if not any(map(all, zip(single, forced, strict=True))):
            continue
        if checked > 5 and raised:
            break
        left = search.node(one, checked)
        search._price(left)
        search._branch(left)
        before_ns = left.bound_ns
        search.bounds.prove_exclusive(used, left.order_ns, 1e15, Deadline.after(5.0))
        assert search.bounds.programs
        search._branch(left)
        raised += left.bound_ns > 1.002 * before_ns
        place = forced.index(True)
        number = search.bounds.first_exclusive(used, used[place])
        for _ in range(3):
            share = random.integers(0, found.load.counts + 1)
            # What fits under one only is there.
            share[number:] = found.load.counts[number:]
            parts = {held[place]: share, held[1 - place]: found.load.counts - share}
            step = search.orders.arranged(held, parts)
            if step is not None:
                assert left.bound_ns <= step.time_ns
                checked += 1
    assert checked > 5, checked
    assert raised
