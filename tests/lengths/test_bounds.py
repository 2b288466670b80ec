"""Bounds of pipelines and of sets of strategies, held to exact times and to plain enumeration."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from milpplan.lengths import Load, StrategyTables, pipeline_ns, replicas_ns
from milpplan.lengths.bounds import (
    LinearBounds,
    StageLoads,
    Window,
    best_mixture,
    chord,
    group_ns,
    heaviest,
    latencies,
    load_bound,
    long_bound,
)
from milpplan.lengths.turns import branched, screened, split
from milpplan.lengths.turns.lagrangian_mixtures import Bounded, lp_bound_ns
from tests.lengths.cases import GRAIN, mixed_ns, path_bound, pool, pool_of, random_micro_batches, workload
from tests.small import small_problem


def test_paths_bound_every_packing() -> None:
    """Random loads of micro-batches on unequal stages take no less than the bound of their number and sum; equal
    loads on one stage take just that."""
    random = np.random.default_rng(1)
    tight = []
    for _ in range(25):
        stages, number = int(random.integers(2, 5)), int(random.integers(1, 9))
        loads = random.integers(10, 1000, number).astype(float)
        shares = (float(random.uniform(0.1, 0.4)), float(random.uniform(0.3, 0.6)))
        one = StageLoads(np.ones(1), float(random.integers(0, 30)), shares, (3.0, 5.0), int(random.integers(0, 9)))
        bound = path_bound(one, stages, number, float(loads.sum()))
        forward = np.ceil(np.tile(shares[0] * loads + 3.0, (stages, 1)))
        backward = np.ceil(np.tile(shares[1] * loads + 5.0, (stages, 1)))
        whole = loads + one.last_ns
        forward[-1] = np.floor(whole / 3)
        backward[-1] = np.ceil(whole) - forward[-1]
        exact = pipeline_ns(forward.astype(np.int64), backward.astype(np.int64), np.full(number, one.transfer_ns))
        assert bound.at(float(loads.sum())) <= exact
        tight.append(bound.at(float(loads.sum())) / exact)
    assert max(tight) > 0.95


def test_a_load_is_bounded_whatever_the_number_of_micro_batches() -> None:
    """Random pipelines with random loads in any number of micro-batches take no less than the bound of their sum,
    exact or not; the exact one is no lower; between two loads it is above its chord."""
    random = np.random.default_rng(4)
    for _ in range(3):
        stages, load = int(random.integers(2, 4)), float(random.integers(2_000, 20_000))
        shares = (float(random.uniform(0.1, 0.4)), float(random.uniform(0.3, 0.6)))
        one = StageLoads(np.ones(1), float(random.integers(1, 30)), shares, (3.0, 5.0), int(random.integers(0, 9)))
        ramp_ns = 2.0 * (stages - 1) * one.transfer_ns
        found = [load_bound(one, stages, ramp_ns, load, 60, exact=exact) for exact in (False, True)]
        assert found[0].at(load) <= found[1].at(load) * 1.001
        ends = 0.25 * load, load
        slope, constant = chord(ends, [found[1].at(end) for end in ends])
        for share in (0.25, 0.4, 0.7, 1.0):
            assert constant + slope * share * load <= found[1].at(share * load) * (1 + 1e-9)
        tight = 0.0
        for number in [*range(1, 9), 17, 70]:
            parts = random.dirichlet(np.full(number, 20.0)) * load
            whole = parts + one.last_ns
            forward = np.ceil(np.tile(shares[0] * parts + 3.0, (stages, 1)))
            backward = np.ceil(np.tile(shares[1] * parts + 5.0, (stages, 1)))
            forward[-1] = np.floor(whole / 3)
            backward[-1] = np.ceil(whole) - forward[-1]
            lags = np.full(number, one.transfer_ns)
            exact = pipeline_ns(forward.astype(np.int64), backward.astype(np.int64), lags)
            assert max(bound.at(load) for bound in found) <= exact
            tight = max(tight, found[1].at(load) / exact)
        assert tight > 0.85


def test_one_mixture_of_paths_bounds_a_range_of_numbers() -> None:
    """Pipelines of any loads, however uneven, with any number of micro-batches of a range take no less than the
    range's bound of their load, with constants and links of those that are there for sure, and what grows with the
    load on links and on the first stage."""
    random = np.random.default_rng(8)
    for _ in range(60):
        stages, first = int(random.integers(2, 6)), int(random.integers(1, 8))
        last = first + int(random.integers(0, 7))
        shares = (float(random.uniform(0.1, 0.5)), float(random.uniform(0.2, 0.8)))
        constants = [int(one) for one in random.integers(0, 3_000, 3)]
        lag = int(random.integers(0, 3_000))
        tolls = tuple(float(share) for share in random.uniform(0.0, 0.1, 3) * (random.random(3) < 0.5))
        one = StageLoads(
            np.ones(1), float(constants[0]), shares, (float(constants[1]), float(constants[2])), lag, tolls=tolls
        )
        # The mixture for another load is a bound, too.
        bound = path_bound(one, stages, last, float(random.choice([1e4, 1e6])), first)
        for number in range(first, last + 1):
            for spread in (0.3, 30.0):
                loads = np.ceil(random.dirichlet(np.full(number, spread)) * 1e6)
                forward, backward = (
                    np.ceil(np.tile(share * loads + constant, (stages, 1)))
                    for share, constant in zip(shares, constants[1:], strict=True)
                )
                lags = np.ceil(lag + tolls[0] * loads)
                forward[0], backward[0] = np.ceil([forward[0] + tolls[1] * loads, backward[0] + tolls[2] * loads])
                forward[-1] = np.floor(loads / 3)
                backward[-1] = loads + constants[0] - forward[-1]
                exact = pipeline_ns(*(one.astype(np.int64) for one in (forward, backward, lags)))
                assert bound.at(float(loads.sum())) <= exact + 2


def _sequences(random: np.random.Generator, kinds: int) -> Load:
    """Some sequences of lengths in grains of one token."""
    lengths = np.sort(random.choice(np.arange(5, 60), kinds, replace=False))
    return Load(lengths, random.integers(1, 5, kinds), 1)


def _random_packing(random: np.random.Generator, load: Load, room: int) -> np.ndarray:
    """All sequences in micro-batches of at most ``room`` grains [v, n]: as full as can be or not, in some order
    or rising and then falling."""
    full = random.random() < 0.5
    items = np.repeat(np.arange(len(load.lengths)), load.counts)[::-1]
    items = items if full else random.permutation(items)
    rows: list[np.ndarray] = []
    limits = [room if full else int(random.integers(room // 3, room + 1)) for _ in items]
    for k in items.tolist():
        fit = [
            row for row, limit in zip(rows, limits, strict=False) if row @ load.lengths + load.lengths[k] <= limit
        ]
        if not fit:
            fit = [np.zeros(len(load.lengths), dtype=np.int64)]
            rows.append(fit[0])
        fit[0][k] += 1
    packed = np.array(rows)
    if random.random() < 0.5:
        return random.permutation(packed)
    packed = packed[np.argsort(packed @ load.lengths)]
    return np.concatenate([packed[::2], packed[1::2][::-1]])


def test_no_micro_batches_hold_more_than_the_heaviest() -> None:
    """Any j micro-batches of random packings weigh no more than the bound of j, which falls from one to the next;
    full ones of the heaviest sequences weigh just that."""
    random, tight = np.random.default_rng(21), 0.0
    for _ in range(60):
        load, room = _sequences(random, int(random.integers(1, 7))), 60
        each = random.integers(1, 9, len(load.lengths)) * load.lengths + random.integers(0, 50, len(load.lengths))
        most = heaviest(each.astype(float), load, room)
        assert (np.diff(most) <= 1e-6).all()
        for _ in range(10):
            weights = np.sort(_random_packing(random, load, room) @ each)[::-1]
            sums = np.cumsum(most)[: len(weights)]
            assert (np.cumsum(weights) <= sums).all()
            tight = max(tight, float(weights[0] / sums[0]))
        assert np.cumsum(most)[-1] == pytest.approx(float(load.counts @ each))
    assert tight > 0.99


@pytest.mark.long
def test_bounds_that_know_what_fits_hold_for_every_packing() -> None:
    """Random packings of sequences into micro-batches that hold so much take no less than the bounds that know it,
    by programs of their own or shared ones, for their number or any, highest for this load or another; where
    micro-batches are full, these are well above those that do not know. Bounds that took micro-batches to hold
    little more than half of that would break."""
    random, raised, broken = np.random.default_rng(22), [], 0
    for turn in range(12):
        stages, load, room = int(random.integers(2, 5)), _sequences(random, 6), 60
        each = (random.integers(4, 7, 6) * load.lengths * 10).astype(float)
        total, lag = float(load.counts @ each), int(random.integers(0, 50))
        shares = (float(random.uniform(0.2, 0.4)), float(random.uniform(0.4, 0.7)))
        most = heaviest(each, load, room)
        one = StageLoads(each, float(random.integers(0, 900)), shares, (20.0, 30.0), lag, most)
        aim = total * float(random.choice([0.4, 1.0]))
        ramp_ns = 2.0 * (stages - 1) * lag
        without = load_bound(replace(one, most=np.zeros(0)), stages, ramp_ns, aim, 30)
        bounds = [load_bound(one, stages, ramp_ns, aim, 30, exact=exact, known=without) for exact in (False, True)]
        longest = float(each.max())
        long = long_bound(one, stages, bounds[0], longest, aim, float("inf"), 12) if turn % 4 == 0 else None
        raised.append(bounds[1].at(aim) / without.at(aim))
        less = replace(one, most=0.6 * most)
        for _ in range(40):
            packed = _random_packing(random, load, room)
            loads = packed @ each
            forward, backward = (
                np.ceil(np.tile(share * loads + constant, (stages, 1)))
                for share, constant in zip(shares, one.others_ns, strict=True)
            )
            forward[-1] = np.floor(loads / 3)
            backward[-1] = np.ceil(loads + one.last_ns - forward[-1])
            lags = np.full(len(packed), lag, np.int64)
            exact = pipeline_ns(forward.astype(np.int64), backward.astype(np.int64), lags)
            assert max(bound.at(total) for bound in bounds) <= exact
            assert long is None or long.at(total) <= exact
            if len(packed) < 40:
                own = [path_bound(which, stages, len(packed), total).at(total) for which in (one, less)]
                assert own[0] <= exact
                broken += own[1] > exact
    assert broken
    assert max(raised) > 1.02, raised


@pytest.mark.long
def test_an_open_window_bounds_any_numbers_beyond_it() -> None:
    """Random loads, one of them long, with any numbers of micro-batches on the open sides of a window take no less
    than its bound, whether it knows what micro-batches hold or not; bounds of just its own number would break."""
    random, broken, tight = np.random.default_rng(31), 0, 0.0
    for _ in range(60):
        stages, load, opened = int(random.integers(2, 6)), 1e6, [(True, True), (True, False), (False, True)]
        sides = opened[int(random.integers(3))]
        ahead, behind = (int(random.integers(1 if side else 0, 6)) for side in sides)
        shares = (float(random.uniform(0.1, 0.5)), float(random.uniform(0.2, 0.8)))
        constants, lag = random.integers(0, 3_000, 3).tolist(), int(random.integers(0, 500))
        least = load * float(random.uniform(0.05, 0.3))
        numbers = [
            count + int(random.integers(0, 12)) * side for count, side in zip((ahead, behind), sides, strict=True)
        ]
        number, place = sum(numbers) + 1, numbers[0]
        for _ in range(6):
            parts = random.dirichlet(np.full(number, random.choice([0.5, 5.0, 50.0]))) * (load - least)
            if random.random() < 0.7:
                parts = np.concatenate(
                    [np.sort(parts[:place]), parts[place:][:1], np.sort(parts[place + 1 :])[::-1]]
                )
            parts[place] += least
            most = np.sort(parts)[::-1][: int(random.integers(0, 9))]
            one = StageLoads(np.ones(1), constants[0], shares, (constants[1], constants[2]), lag, most)
            forward, backward = (
                np.ceil(np.tile(share * parts + constant, (stages, 1)))
                for share, constant in zip(shares, constants[1:], strict=True)
            )
            forward[-1] = np.floor(parts / 3)
            backward[-1] = np.ceil(parts + constants[0] - forward[-1])
            lags = np.full(number, lag, np.int64)
            exact = pipeline_ns(forward.astype(np.int64), backward.astype(np.int64), lags)
            window = Window((ahead, ahead), (behind, behind), sides)
            found, closed = (
                best_mixture(one, stages, which, load, least).bound(one, load, least).at(load)
                for which in (window, replace(window, open=(False, False)))
            )
            assert found <= exact
            broken += closed > exact
            tight = max(tight, found / exact)
    assert broken > 10
    assert tight > 0.97, tight


def test_a_replica_with_a_long_sequence_is_bounded_wherever_it_runs() -> None:
    """Random loads, one of them long, at any place of any number of micro-batches, take no less than the bound of
    their sum; beside few others the long one raises the bound well above that without it."""
    random = np.random.default_rng(11)
    raised, tight = [], 0.0
    for stages in (2, 3):
        load = 1e6
        shares = (float(random.uniform(0.25, 0.35)), float(random.uniform(0.5, 0.65)))
        one = StageLoads(np.ones(1), 4_000.0, shares, (1_000.0, 2_000.0), 50)
        plain = load_bound(one, stages, 100.0, load)
        least = load * float(random.uniform(0.2, 0.5))
        long = long_bound(one, stages, plain, least, load, float("inf"), 70)
        raised.append(long.at(load) / plain.at(load))
        for number in (1, 2, 3, 5, 8, 13, 21, 34, 80):
            for _ in range(12):
                total = load * float(random.choice([0.6, 1.0]))
                parts = random.dirichlet(np.full(number, random.choice([0.5, 5.0, 50.0]))) * (total - least)
                # Growing towards the long one and falling after it costs least.
                place = int(random.integers(number))
                ahead, behind = np.sort(parts[:place]), np.sort(parts[place + 1 :])[::-1]
                parts = np.concatenate([ahead, parts[place : place + 1] + least, behind])
                forward = np.ceil(np.tile(shares[0] * parts + 1_000, (stages, 1)))
                backward = np.ceil(np.tile(shares[1] * parts + 2_000, (stages, 1)))
                forward[-1] = np.floor(parts / 3)
                backward[-1] = np.ceil(parts + 4_000 - forward[-1])
                exact = pipeline_ns(
                    forward.astype(np.int64), backward.astype(np.int64), np.full(number, 50, np.int64)
                )
                assert long.at(total) <= exact
                tight = max(tight, long.at(total) / exact)
    assert max(raised) > 1.05
    assert tight > 0.85, tight


def test_a_long_sequence_is_bounded_higher_where_short_and_long_differ() -> None:
    """Of sequences that leave the other stages more to do forward or more backward, random micro-batches around a
    long one take no less than its bound, which is well above that of the least of both."""
    random = np.random.default_rng(17)
    mixes = np.array([[0.30, 0.68], [0.34, 0.62]])
    load, stages, tight = 1e6, 3, 0.0
    kinds = StageLoads(np.ones(1), 4_000.0, (0.30, 0.62), (1_000.0, 2_000.0), 50, mixes=mixes)
    least = 0.15 * load
    known, plain = (
        long_bound(one, stages, load_bound(one, stages, 100.0, load, exact=True), least, load, float("inf"), 60)
        for one in (kinds, replace(kinds, mixes=np.zeros((0, 2))))
    )
    assert known.at(load) > 1.005 * plain.at(load)
    for number in (6, 9, 12, 16, 22):
        for _ in range(40):
            parts = random.dirichlet(np.full(number, random.choice([2.0, 20.0]))) * (load - least)
            # Growing towards the long one and falling after it costs least.
            place = int(random.integers(1, number - 1))
            ahead, behind = np.sort(parts[:place]), np.sort(parts[place + 1 :])[::-1]
            parts = np.concatenate([ahead, parts[place : place + 1] + least, behind])
            mixed = random.random(number) if random.random() < 0.5 else np.arange(number) < place
            shares = np.stack([mixed, 1.0 - mixed], axis=1) @ mixes
            forward = np.ceil(np.tile(shares[:, 0] * parts + 1_000, (stages, 1)))
            backward = np.ceil(np.tile(shares[:, 1] * parts + 2_000, (stages, 1)))
            forward[-1] = np.floor(parts / 3)
            backward[-1] = np.ceil(parts + 4_000 - forward[-1])
            lags = np.full(number, 50, np.int64)
            exact = pipeline_ns(forward.astype(np.int64), backward.astype(np.int64), lags)
            assert known.at(load) <= exact
            tight = max(tight, known.at(load) / exact)
    assert tight > 0.9, tight


def test_the_last_stages_of_a_pipeline_bound_all_of_it() -> None:
    """Random loads on a pipeline take no less than the bound of its last stages as a pipeline of their own."""
    random = np.random.default_rng(13)
    one = StageLoads(np.ones(1), 40.0, (0.3, 0.6), (10.0, 20.0), 7)
    for stages in (5, 8):
        for number in (1, 2, 4, 9, 20):
            parts = random.dirichlet(np.full(number, 3.0)) * 1e6
            forward = np.ceil(np.tile(0.3 * parts + 10, (stages, 1)))
            backward = np.ceil(np.tile(0.6 * parts + 20, (stages, 1)))
            forward[-1] = np.floor(parts / 3)
            backward[-1] = np.ceil(parts + 40 - forward[-1])
            lags = np.full(number, 7, np.int64)
            exact = pipeline_ns(forward.astype(np.int64), backward.astype(np.int64), lags)
            few = [path_bound(one, last, number, 1e6).at(1e6) for last in (2, 3, stages)]
            assert few[0] <= few[1] * (1 + 1e-6)
            assert few[1] <= few[2] * (1 + 1e-6)
            assert few[2] <= exact


def _random_replica(
    random: np.random.Generator, total: float, least: float, shares: tuple[float, float], stages: int
) -> int:
    """The time of random micro-batches of a total load, one of which is at least ``least``."""
    number = int(random.integers(1, 12))
    parts = random.dirichlet(np.full(number, random.choice([0.5, 5.0, 50.0]))) * (total - least)
    parts[random.integers(number)] += least
    forward, backward = (np.ceil(np.tile(share * parts, (stages, 1))) for share in shares)
    forward[-1] = np.floor(parts / 3)
    backward[-1] = np.ceil(parts + 500 - forward[-1])
    return pipeline_ns(forward.astype(np.int64), backward.astype(np.int64), np.full(number, 20, np.int64))


def test_a_group_with_a_long_sequence_is_bounded_however_its_replicas_share() -> None:
    """Replicas of random loads, one of them with a long sequence: the slowest takes no less than the bound of
    their mean load, nor than its chord between two loads; with one replica that is the bound of the replica."""
    random = np.random.default_rng(12)
    tight = 0.0
    for replicas in (1, 2, 4):
        stages, load, shares = 2 + replicas // 2, 1e6, (0.3, 0.6)
        one = StageLoads(np.ones(1), 500.0, shares, (0.0, 0.0), 20)
        plain = load_bound(one, stages, 40.0, load)
        least = 0.35 * load
        long = long_bound(one, stages, plain, least, load, float("inf"), 24)
        ends = 0.5 * load, 1.2 * load
        values = group_ns(long, plain, replicas, np.array([*ends, load]))
        if replicas == 1:
            assert values == pytest.approx([long.at(end) for end in (*ends, load)], rel=1e-6)
        assert (values >= [plain.at(end) * (1 - 1e-6) for end in (*ends, load)]).all()
        slope, constant = chord(ends, values[:2].tolist())
        for _ in range(60):
            mean = load * float(random.uniform(0.5, 1.2))
            rest = np.maximum(0.0, random.dirichlet(np.full(replicas, 30.0)) * replicas * mean)
            rest[0] = max(rest[0], least)
            mean = float(rest.mean())
            if not ends[0] <= mean <= ends[1]:
                continue
            exact = max(
                _random_replica(random, total, least if not place else 0.0, shares, stages)
                for place, total in enumerate(rest.tolist())
            )
            bound = float(group_ns(long, plain, replicas, np.array([mean]))[0])
            assert constant + slope * mean <= bound * (1 + 1e-9)
            assert bound <= exact
            tight = max(tight, bound / exact)
    assert tight > 0.75, tight


def test_linear_bounds_hold_for_parts_of_the_workload() -> None:
    """Random parts of the sequences in random micro-batches on random replicas: no exact time is below any bound,
    for pipelines with the bounds of the load and of every interval that it is in, and refined ones with what they
    know of the longest sequence."""
    found, random = replace(pool(), work_bound_cache={}, refined=set()), np.random.default_rng(2)
    checked, tight, holders = 0, 0.0, 0
    lengths = found.load.lengths
    for member, one in enumerate(found.members):
        layout = one.candidate.layout
        if layout.pp > 2 or not one.shared_memory_quanta or one.candidate.recompute == "selective":
            continue
        if layout.pp == 2 and one.candidate.recompute == "none":
            # A third of the pipelines is enough: each asks for some programs.
            continue
        plain = found.linear_bounds(member, shared_memory=True)
        for _ in range(3):
            rows = random_micro_batches(
                found, one.shared_memory_quanta, random, layout.dp * int(random.integers(1, 5))
            )
            if np.isfinite(found.latency_bound_ns(member, shared_memory=True)):
                rows[0] = np.eye(len(lengths), dtype=np.int64)[-1]
            # No more than there are: a chord is proved for parts of the workload.
            rows = rows[(np.cumsum(rows, axis=0) <= found.load.counts).all(axis=1)]
            if not len(rows):
                continue
            parts = tuple(np.array_split(rows, layout.dp))
            exact = int(replicas_ns(found.problem, one.candidate, lengths, parts).max())
            held = rows.sum(axis=0).astype(np.float64)
            bound = plain.at(held)
            if layout.pp > 1:
                loads = found.work_bound(member, shared_memory=True)
                share = float(held @ loads.sequence_loads) / loads.total_load
                bound = loads.chords_between(plain, max(0.0, share - 0.2), min(1.0, share + 0.1)).at(held)
                assert loads.chords_between(plain).at(held) <= exact, one.candidate.name
                found.refine(member)
                refined = found.work_bound(member, shared_memory=True)
                share = float(held @ refined.sequence_loads) / refined.total_load
                for edge in ((0.0, 1.0), (max(0.0, share - 0.2), min(1.0, share + 0.1))):
                    chords = refined.chords_between(plain, *edge, with_longest=bool(held[-1]))
                    assert chords.at(held) <= exact, one.candidate.name
                holders += bool(held[-1])
            assert bound <= exact, one.candidate.name
            tight = max(tight, bound / exact)
            checked += 1
    assert checked > 10
    assert holders
    assert tight > 0.97, tight


def test_passages_are_those_of_the_longest_sequence_alone() -> None:
    """A micro-batch with just one sequence takes at least the passage of its length, and hardly more."""
    found = pool()
    for member, one in enumerate(found.members):
        passage = latencies(found.tables[member], one, one.own_memory_quanta)
        for k in np.flatnonzero(np.isfinite(passage))[::9].tolist():
            alone = np.zeros((1, len(passage)), dtype=np.int64)
            alone[0, k] = 1
            empty = (alone[:0],) * (one.candidate.layout.dp - 1)
            times = replicas_ns(found.problem, one.candidate, found.load.lengths, (alone, *empty))
            assert passage[k] <= times.max(), one.candidate.name
            assert passage[k] >= 0.7 * times.max(), one.candidate.name


def test_mixed_bounds_hold_for_all_assignments() -> None:
    """Groups that take exactly the highest of their linear bounds, or with the longest sequence its passage: no
    assignment of a few sequences to the strategies of a set is below the set's bound, split into parts or not; one
    comes close."""
    random = np.random.default_rng(3)
    close = []
    for _ in range(12):
        size = int(random.integers(2, 4))
        shares = random.integers(1, 30, (size, 3, 5)).astype(float)
        bounds = [LinearBounds(table, random.integers(0, 9, 3).astype(float)) for table in shares]
        serial = shares[:, :, -1].max(axis=1) + random.integers(0, 60, size)
        once, counts = random.integers(0, 9, size).astype(float), np.ones(5, dtype=np.int64)
        finish = random.integers(0, 9, size).astype(float)
        least = np.inf
        for chosen in itertools.product(range(size), repeat=5):
            total = finish.min() + once.sum()
            for one in range(size):
                held = (np.array(chosen) == one).astype(float)
                rows = bounds[one].shares @ held + bounds[one].constants
                total += max(float(rows.max()), float(serial[one]) if chosen[-1] == one else 0.0)
            least = min(least, total)
        problem = Bounded.of(bounds, serial, once, finish, counts)
        used = tuple(range(size))
        bound = mixed_ns(problem, used)
        sharp = lp_bound_ns(problem, np.array(used))
        assert bound <= sharp * (1 + 1e-9) <= least * (1 + 1e-9)
        close.append(sharp / least)
        kept = screened(problem, size, least + 1e-6)
        assert used in [one.strategies for one in kept.sets]
        again = split(problem, {one: [one, one] for one in range(size)}, kept.sets, least + 1e-6)
        assert {one.strategies for one in again.sets} == {one.strategies for one in kept.sets}
        # Cut in the first strategy, then in the last one, one part of which holds nothing but short sequences.
        short = [replace(one, shares=np.where(np.arange(5) < 3, one.shares, np.inf)) for one in bounds]
        cut = Bounded.of(
            [*bounds, bounds[0], short[-1]],
            np.append(serial, serial[[0, -1]]),
            np.append(once, once[[0, -1]]),
            np.append(finish, finish[[0, -1]]),
            counts,
        )
        cuts = [(0, {0: [0, size]}), (size - 1, {size - 1: [size + 1, size - 1]})]
        assert 0.97 * bound <= branched(cut, used, cuts, np.inf) <= least
        assert branched(cut, used, cuts, bound * 0.9) >= bound * 0.9
        assert not [one for one in screened(problem, size, bound * 0.9).sets if one.strategies == used]
    assert np.median(close) > 0.85


def test_the_least_time_of_a_strategy_knows_the_passage_of_the_longest() -> None:
    """One sequence that is most of the work is not spread over replicas or stages: a strategy takes its passage at
    least, and random packings of the whole workload are never below the least time of any."""
    long = workload(long=1, short=6, longest=40_000)
    found = pool_of(small_problem(memory_gib=40), long)
    random, raised = np.random.default_rng(3), 0
    for member, one in enumerate(found.members):
        least_ns = found.step_bound_ns(member)
        once_ns = found.reduce_ns(member) + found.finish_ns(member)
        if not np.isfinite(least_ns):
            continue
        spread_ns = found.linear_bounds(member, shared_memory=False).at(long.counts.astype(np.float64)) + once_ns
        raised += found.latency_bound_ns(member, shared_memory=False) + once_ns > 1.2 * spread_ns
        for _ in range(5):
            replicas = _dealt(found, one.own_memory_quanta, one.candidate.layout.dp, random)
            assert least_ns <= found.time_packing(member, replicas, one.own_memory_quanta).time_ns + once_ns, (
                one.candidate.name
            )
    assert raised > 3


def _dealt(
    found: StrategyTables, max_quanta: int, num_replicas: int, random: np.random.Generator
) -> tuple[np.ndarray, ...]:
    """All sequences in random micro-batches that fit, these on random replicas."""
    lengths, rows = found.load.lengths, [np.zeros(len(found.load.lengths), dtype=np.int64)]
    for k in random.permutation(np.repeat(np.arange(len(lengths)), found.load.counts)):
        if rows[-1] @ lengths + lengths[k] > max_quanta * GRAIN or random.random() < 0.3:
            rows.append(np.zeros(len(lengths), dtype=np.int64))
        rows[-1][k] += 1
    batches = np.array([row for row in rows if row.any()])
    owners = random.integers(0, num_replicas, len(batches))
    return tuple(batches[owners == replica] for replica in range(num_replicas))
