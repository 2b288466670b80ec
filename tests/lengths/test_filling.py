"""Configuration programs of pipelines: never above the time of whole sequences, and higher than real loads."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from milpplan.lengths import StrategyTables, micro_batch_times, replicas_ns
from milpplan.lengths.bounds import (
    ConfigurationBound,
    ConfigurationLP,
    KnapsackDP,
    MicroBatchPricing,
    PinnedItem,
    Window,
    best_mixture,
    improved,
)
from milpplan.lengths.deadline import Deadline
from tests.amounts import first
from tests.lengths.cases import GRAIN, deep_pool, pool, pool_of, random_micro_batches, workload
from tests.small import small_problem


@cache
def pipelines() -> tuple[int, ...]:
    """Members with several stages that hold the longest sequence alone: with a ring, and without; few and more
    stages."""
    found, longest = pool(), int(pool().load.lengths[-1])
    able = [
        one
        for one in range(len(found.members))
        if found.num_stages(one) > 1 and found.max_quanta(one, shared_memory=False) * GRAIN >= longest
    ]
    chosen: dict[tuple[bool, int], int] = {}
    for one in able:
        layout = found.members[one].candidate.layout
        chosen.setdefault((layout.cp > 1, layout.pp), one)
    members = tuple(chosen.values())
    assert {cp for cp, _ in chosen} == {True, False}
    assert len(members) == 2
    return members


def contents_of(member: int) -> MicroBatchPricing:
    return pool().micro_batch_pricing(member)


def pipeline(turn: int) -> tuple[StrategyTables, int]:
    """One of these, or one of four stages on two replicas."""
    if turn < 2:
        return pool(), pipelines()[turn]
    found = deep_pool()
    deep = [one for one in range(len(found.members)) if found.num_stages(one) == 4]
    return found, next(one for one in deep if found.members[one].candidate.layout.dp == 2)


@pytest.mark.parametrize("place", range(2))
def test_the_least_of_contents_is_below_all_and_reached_by_one(place: int) -> None:
    """At random weights and prices no micro-batch is worth less than what is said, and the one that is told is
    worth about that."""
    member = pipelines()[place]
    found, random, contents = pool(), np.random.default_rng(member), contents_of(member)
    most = found.max_quanta(member, shared_memory=False)
    rows = random_micro_batches(found, most, random, 60)
    times, sizes = contents.times(rows), found.load.lengths // GRAIN
    assert (times[:, :4] > 0).all()
    assert (contents.times(np.zeros_like(rows[:1])) == 0).all()
    unit = times.sum() / (rows @ sizes).sum()
    last = len(sizes) - 1
    loose = 0.0
    for turn in range(8):
        weights = random.uniform(0.0, 1.0, (6, 3))
        prices = unit * sizes * random.uniform(0.3, 1.2, len(sizes))
        must = np.array([False, True, True])
        core = PinnedItem(last) if turn % 2 else PinnedItem(quanta=int(random.integers(1, most // 2)))
        values, told = contents.best_contents(weights, prices, must, core)
        worth = times @ weights - (rows @ prices)[:, None]
        held = (rows[:, core.first :].any(axis=1)) & (rows @ sizes >= core.quanta)
        assert (held == core.is_held(rows, sizes)).all()
        assert values[0] <= worth[:, 0].min() + 1e-6 * abs(values[0])
        if held.any():
            assert (values[1:] <= worth[held][:, 1:].min(axis=0) + 1e-6 * abs(values[1])).all()
        assert (told <= found.load.counts).all()
        assert (told @ sizes <= most).all()
        assert core.is_held(told[must], sizes).all()
        true = (contents.times(told) * weights.T).sum(axis=1)
        assert (true - told @ prices >= values - 1e-6 * abs(values)).all()
        loose = max(loose, float(((true - told @ prices - values) / true).max()))
    assert loose < 0.03, loose


@pytest.mark.parametrize("place", range(2))
def test_few_mixtures_say_as_much_as_all(place: int) -> None:
    """The least over what a micro-batch may hold by all mixtures of ways at once, whatever was asked before: no
    higher is said, and no less by more than a little of its time."""
    contents = contents_of(pipelines()[place])
    random, items, room = np.random.default_rng(place), contents.items, int(contents.base.shape[-1])
    unit = float(contents.base.sum(axis=1).mean() / room)
    differing = 0
    for turn in range(6):
        weights = random.uniform(0.0, 1.0, (6, 3))
        prices = unit * items.sizes * random.uniform(0.3, 1.2, len(items.sizes))
        core = PinnedItem(len(prices) - 1) if turn % 2 else PinnedItem(quanta=5)
        cores = np.array([False, True, True])
        values, rows = contents.best_contents(weights, prices, cores, core)
        time_ns = (contents.times(rows) * weights.T).sum(axis=1)
        for micro_batch in range(3):
            parts = np.stack([weights[[0, 0], micro_batch], weights[1:3, micro_batch]])
            base, attention, once = (np.einsum("rspx,sp->rx", part, parts) for part in contents.mixed)
            base = base + weights[3:, micro_batch] @ contents.transfer_terms
            most, alone = -np.inf, -np.inf
            for k, held in KnapsackDP(items, prices - attention, room).rows():
                worth = held - base - once[:, k, None]
                begin = core.quanta - 1 if cores[micro_batch] else 0
                if not cores[micro_batch] or k >= core.first:
                    most = max(most, float(worth.min(axis=0)[begin:].max()))
                    alone = max(alone, float(worth[0, begin:].max()))
            assert values[micro_batch] <= -most + 1e-9 * abs(most)
            assert values[micro_batch] >= -most - 1e-4 * time_ns[micro_batch]
            differing += alone > most + 1e-6 * abs(most)
    assert (differing > 0) == (len(contents.mixed[0]) > 1)


@pytest.mark.parametrize("turn", range(3))
def test_times_of_contents_are_those_of_every_stage(turn: int) -> None:
    """Never above the exact times, forward and backward, of the last stage, the first with tolls, and any other
    one; transfers just the same. Tolls are what is missing on the first of several."""
    (found, member), random = pipeline(turn), np.random.default_rng(2)
    one, most = found.members[member].candidate, found.max_quanta(member, shared_memory=False)
    rows = random_micro_batches(found, most, random, 60)
    told = found.micro_batch_pricing(member).times(rows)
    exact = micro_batch_times(found.problem, one, found.load.lengths, rows, found.load.rules.mask)
    assert (told[:, 0] <= exact.forward[-1] + exact.backward[-1]).all()
    for place, phase in enumerate((exact.forward, exact.backward)):
        first = told[:, 1 + place] + told[:, 4 + place]
        assert (told[:, 1 + place] <= phase[:-1].min(axis=0)).all()
        assert (first <= phase[0]).all()
        assert first == pytest.approx(phase[0], rel=2e-3)
        assert ((told[:, 4 + place] > 0) == (len(phase) > 2)).all()
    assert (told[:, 3] == exact.transfer).all()


@pytest.mark.parametrize("turn", first(1, range(3)))
def test_no_replica_in_a_window_is_below_its_bound(turn: int) -> None:
    """Random micro-batches, as many as the window says and the longest sequence where it says: the exact time is
    no less than what the mixture of real loads proves of whole sequences, or an improved one, which is more."""
    (found, member), random = pipeline(turn), np.random.default_rng(7 + turn)
    contents = found.micro_batch_pricing(member)
    one, stages = found.members[member].candidate, found.num_stages(member)
    loads = found.work_bound(member, shared_memory=False)
    most, last = found.max_quanta(member, shared_memory=False), len(found.load.lengths) - 1
    sizes = found.load.lengths // GRAIN
    longest, large = PinnedItem(last), PinnedItem(quanta=most // 2)
    each = float((loads.stages.last / sizes).min())
    windows = [
        (Window.of(4, 4), None),
        (Window.of(3, 5), None),
        (Window((1, 1), (2, 2)), longest),
        (Window((1, 2), (0, 3)), longest),
        (Window((1, 2), (0, 3)), large),
        (Window((1, 1), (2, 2), (True, False)), longest),
        (Window((2, 2), (1, 1), (False, True)), longest),
    ]
    gained = 0.0
    for window, core in windows:
        least = 0.0 if core is None else float(loads.stages.last[last]) if core.first else each * core.quanta
        load = max(loads.total_load, least)
        mixture = best_mixture(loads.stages, stages, window, load, least)
        line = mixture.bound(loads.stages, load, least)
        filling = ConfigurationLP(contents, loads.stages.last, loads.stages.last, stages, window, core)
        proved, rows = filling.prove_load_bound(mixture, line.slope)
        # About as long as a step of this load.
        time_ns = 1.02 * max(line.at(load), proved.at(load))
        better, known = proved, None
        if not any(window.open):
            better, _, known = improved(filling, mixture, line.slope, rows, known, time_ns, 0.0)
        assert better.within(time_ns) <= proved.within(time_ns)
        gained = max(gained, line.within(time_ns) / better.within(time_ns) - 1.0)
        for _ in range(12):
            before = int(random.integers(window.ahead[0], window.ahead[1] + 1))
            after = int(random.integers(window.behind[0], window.behind[1] + 1))
            before += int(random.integers(3)) if window.open[0] else 0
            after += int(random.integers(3)) if window.open[1] else 0
            number = before + after + 1
            held = random_micro_batches(found, most, random, 3 * number)[:number]
            held[:, last] = 0
            held = held[held.any(axis=1)]
            if len(held) < number:
                continue
            if core == longest:
                held[before] = np.arange(last + 1) == last
            elif core is not None:
                many = random_micro_batches(found, most, random, 40)
                held[before] = next(row for row in many if row @ sizes >= core.quanta)
            exact = int(replicas_ns(found.problem, one, found.load.lengths, (held,), found.load.rules.mask)[0])
            total = float((held @ loads.stages.last).sum())
            assert max(proved.at(total), better.at(total)) <= exact
    assert gained > 0.0


@pytest.mark.long
@pytest.mark.parametrize("turn", first(1, range(3)))
def test_pipelines_are_bounded_higher_and_no_packing_is_below(turn: int) -> None:
    """Whatever was refined: the bound of the whole workload does not fall, and the best packing is no shorter; for
    a time that it says is too short there is none."""
    found, member = pipeline(turn)
    loads = found.work_bound(member, shared_memory=False).with_longest(float("inf"))
    packed = found.pack(member, found.load.counts, found.max_quanta(member, shared_memory=False))
    assert packed is not None
    search = ConfigurationBound(loads, found.micro_batch_pricing(member))
    for share in (0.9, 0.97, 0.99):
        search.run(share * packed.time_ns, Deadline.after(1.0))
        assert loads.workload_bound_ns * (1 - 1e-9) <= search.loads.workload_bound_ns <= packed.time_ns


@pytest.mark.long
def test_parts_of_a_workload_are_bounded_by_what_sequences_are_worth() -> None:
    """One replica whose large micro-batches are told apart: no random part of the workload, with the longest
    sequence or without, is shorter than its bounds."""
    found, random, told = pool(), np.random.default_rng(3), 0
    for member in range(len(found.members)):
        one = found.members[member].candidate
        most, stages = found.max_quanta(member, shared_memory=False), found.num_stages(member)
        if one.layout.dp > 1 or stages == 1 or most * GRAIN < found.load.lengths[-1]:
            continue
        loads = found.work_bound(member, shared_memory=False).with_longest(float("inf"))
        packed = found.pack(member, found.load.counts, most)
        assert packed is not None
        search = ConfigurationBound(loads, contents_of(member))
        search.run(0.97 * packed.time_ns, Deadline.after(4.0))
        search.run(packed.time_ns, Deadline.after(4.0))
        told += len(search.with_large) > 0
        known = search.loads
        plain = search.bound
        assert known.workload_bound_ns <= packed.time_ns
        assert float(found.load.counts @ known.sequence_loads) == pytest.approx(known.total_load)
        (replica,) = packed.replicas
        for _ in range(40):
            rows = np.minimum(replica, random.integers(0, 3, replica.shape) * (random.random(replica.shape) < 0.7))
            rows = np.where(random.random((len(replica), 1)) < 0.5, replica, rows)
            rows = rows[rows.any(axis=1)]
            if not len(rows):
                continue
            exact = int(replicas_ns(found.problem, one, found.load.lengths, (rows,), found.load.rules.mask)[0])
            load = float((rows @ search.duals.sequence_loads).sum())
            assert plain.at(load) <= exact
            if rows[:, -1].any():
                assert known.long_bounds[0].at(float((rows @ known.sequence_loads).sum())) <= exact
    assert told > 0


@pytest.mark.long
def test_whole_sequences_raise_what_is_proved_of_pipelines() -> None:
    """Of one of them at least by a part in a thousand."""
    found, gained = pool(), 0.0
    for member in pipelines():
        loads = found.work_bound(member, shared_memory=False).with_longest(float("inf"))
        packed = found.pack(member, found.load.counts, found.max_quanta(member, shared_memory=False))
        assert packed is not None
        search = ConfigurationBound(loads, contents_of(member))
        search.run(packed.time_ns, Deadline.after(1.0))
        gained = max(gained, search.loads.workload_bound_ns / loads.workload_bound_ns - 1.0)
        if gained > 0.001:
            break
    assert gained > 0.001, gained


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
