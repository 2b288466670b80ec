"""Others' rules: each figure is the exact time of a plan that fits and runs every sequence."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from milpplan import solve_lengths
from milpplan.lengths import StrategyTables, Switches, replicas_ns
from milpplan.lengths.baselines import (
    BOUNDARIES,
    Bucket,
    bucketing_step,
    buckets,
    dealt,
    flexsp_step,
    hotspa_step,
    packs,
    rounds,
)
from tests.lengths.cases import GRAIN, pool, workload
from tests.small import small_problem


def test_buckets_end_where_they_are_said_to() -> None:
    """Five lengths and the published ends: the last ends at the longest length, empty ones are left out."""
    lengths = np.array([512, 4096, 4224, 20_480, 32_768])
    assert buckets(lengths, BOUNDARIES[0]) == [
        Bucket(slice(3, 5), 32_768), Bucket(slice(2, 3), 16_384), Bucket(slice(0, 2), 4096),
    ]  # fmt: skip
    assert buckets(lengths[:2], BOUNDARIES[1]) == [Bucket(slice(0, 2), 4096)]


def test_packs_are_filled_greedily_by_hand() -> None:
    """Longest first, the first pack with room: 6, 5, 3, 3, 2, 1 into packs of 8 are 6 2, 5 3, 3 1."""
    found = packs(np.array([1, 2, 3, 5, 6]), np.array([1, 1, 2, 1, 1]), 8)
    assert found.tolist() == [[0, 1, 0, 0, 1], [0, 0, 1, 1, 0], [1, 0, 1, 0, 0]]
    assert [one.tolist() for one in dealt(found, 2)] == [found[[0, 2]].tolist(), found[[1]].tolist()]


@pytest.mark.parametrize("seed", range(4))
def test_rounds_are_cut_where_the_fullest_holds_least(seed: int) -> None:
    """Random sequences against all cuts of the sorted row."""
    random = np.random.default_rng(seed)
    lengths = np.sort(random.choice(np.arange(1, 40), 5, replace=False))
    counts = random.integers(1, 3, 5)
    items = np.repeat(lengths, counts)[::-1]
    for number in range(1, 5):
        found = rounds(lengths, counts, number)
        assert (np.sum(found, axis=0) == counts).all()
        cuts = itertools.combinations(range(1, len(items)), number - 1)
        least = min(max(part.sum() for part in np.split(items, cut)) for cut in cuts)
        assert max(int(one @ lengths) for one in found) == least


def test_bucketing_is_a_step_of_one_strategy() -> None:
    """Its time is that of its own packs, made again bucket by bucket, each within memory."""
    found = pool()
    step = bucketing_step(found)
    member = _member(found, step.strategies[0])
    lengths, tokens = found.load.lengths, found.max_quanta(member, shared_memory=False) * GRAIN
    rows = []
    for bucket in buckets(lengths, BOUNDARIES[0]):
        held = np.where(np.isin(np.arange(len(lengths)), np.r_[bucket.places]), found.load.counts, 0)
        rows.append(packs(lengths, held, tokens))
        assert (rows[-1] @ lengths).max() <= tokens
    whole = np.concatenate(rows)
    assert (whole.sum(axis=0) == found.load.counts).all()
    one = found.members[member].candidate
    times = replicas_ns(found.problem, one, lengths, dealt(whole, one.layout.dp))
    total = int(times.max()) + found.reduce_ns(member) + found.finish_ns(member)
    assert step.step_time_s == pytest.approx(total * 1e-9, rel=1e-12)


def test_hotspas_step_adds_up() -> None:
    """It is one of the ways to give its buckets in order to its strategies, each group at its exact time, with
    parameters and gradients of every switch, reductions, and the longest at home."""
    found = pool()
    switches = Switches(found)
    step = hotspa_step(found, switches)
    members = [_member(found, name) for name in step.strategies]
    assert len(set(members)) == len(members)
    switches.price(members)
    possible = []
    for ends in BOUNDARIES:
        held = buckets(found.load.lengths, ends)
        for chosen in itertools.product(members[::-1], repeat=len(held)):
            if list(dict.fromkeys(chosen)) == members[::-1]:
                given = list(zip(held, chosen, strict=True))
                possible += [_hotspa_s(found, switches, members, given)]
    assert any(step.step_time_s == pytest.approx(one, rel=1e-9) for one in possible)


def _hotspa_s(
    found: StrategyTables, switches: Switches, order: list[int], given: list[tuple[Bucket, int]]
) -> float:
    """Seconds of a step of HotSPa's, written out: ``order`` of the members, the last one at home."""
    lengths, counts = found.load.lengths, found.load.counts
    moved = {(one.source, one.target, one.what): one.time_s for one in switches.of_step(order[-1], order)}
    names = [found.members[one].candidate.name for one in order]
    total, before = found.finish_ns(order[-1]) * 1e-9, names[-1]
    for position, (member, name) in enumerate(zip(order, names, strict=True)):
        rows = [
            packs(lengths[one.places], counts[one.places], one.end) for one, holder in given if holder == member
        ]
        spans = [one.places for one, holder in given if holder == member]
        whole = np.zeros((sum(map(len, rows)), len(lengths)), dtype=np.int64)
        first = 0
        for part, places in zip(rows, spans, strict=True):
            whole[first : first + len(part), places] = part
            first += len(part)
        one = found.members[member].candidate
        group = int(replicas_ns(found.problem, one, lengths, dealt(whole, one.layout.dp)).max()) * 1e-9
        total += moved.get((before, name, "parameters"), 0.0) + found.reduce_ns(member) * 1e-9
        total += max(group, moved.get((before, name, "gradients"), 0.0) if position else 0.0)
        before = name
    return total


def test_given_strategies_are_kept() -> None:
    """The degrees asked for, or the reason why there is no step."""
    found = pool()
    given = hotspa_step(found, Switches(found), ((2, 2, 1), (4, 1, 1)))
    assert given.step_time_s is not None
    degrees = [found.members[_member(found, name)].candidate.layout for name in given.strategies]
    assert {(one.dp, one.tp, one.pp) for one in degrees} <= {(2, 2, 1), (4, 1, 1)}
    none = hotspa_step(found, Switches(found), ((3, 1, 1),))
    assert none.step_time_s is None
    assert "No strategy" in none.why


def test_flexsps_rounds_hold_every_sequence() -> None:
    """Its groups fill the cluster in every round; all work at the fastest rate of any strategy takes no longer."""
    found = pool()
    step = flexsp_step(found, 0.5, "highs")
    assert step.step_time_s is not None
    flat = [one for one in range(len(found.members)) if found.num_stages(one) == 1]
    work = []
    for member in flat:
        (pipeline, replicas), lengths = (
            found.strategy(member, shared_memory=False).pipelines[0],
            found.load.lengths,
        )
        share = pipeline.units(lengths) * pipeline.parts / replicas
        work.append(np.where(pipeline.holds(lengths), share, np.inf))
    assert step.step_time_s * 1e9 >= float(np.min(work, axis=0) @ found.load.counts)
    for mix in step.strategies:
        gpus = Counter[str]()
        for part in mix.split(" + "):
            number, _, name = part.partition(" x ")
            degrees = [int(word[2:]) for word in name.split() if word[:2] in ("tp", "cp")]
            gpus["all"] += int(number) * int(np.prod(degrees))
        assert gpus["all"] == 4


def test_baselines_of_a_solve() -> None:
    """Within the proved space (one strategy, or as many as may take turns) no rule is below the bound."""
    problem = small_problem(memory_gib=40, space={"pp": (1,), "recompute": ("none",)})
    result = solve_lengths(problem, workload(), GRAIN, 3, 0.05, 1.0, "highs", baselines=True)
    rules = {one.rule: one for one in result.baselines}
    assert list(rules) == ["bucketing", "HotSPa", "FlexSP"]
    bucketing, hotspa = rules["bucketing"].step_time_s, rules["HotSPa"].step_time_s
    assert bucketing is not None
    assert bucketing >= result.static.lower_bound_s
    assert hotspa is not None
    assert len(rules["HotSPa"].strategies) <= 3
    assert hotspa >= result.lower_bound_s
    assert [one["rule"] for one in result.to_dict()["baselines"]] == list(rules)


def _member(found: StrategyTables, name: str) -> int:
    return next(place for place, one in enumerate(found.members) if one.candidate.name == name)
