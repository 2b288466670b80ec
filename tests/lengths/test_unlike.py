"""Unlike replicas: exact times, places, rows and bounds below every step, and the best of all small steps."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from milpplan import solve_lengths
from milpplan.errors import InvalidInputError
from milpplan.lengths import (
    LengthsResult,
    Load,
    Packed,
    SequenceRules,
    StrategyTables,
    Workload,
    quantum_problem,
    replicas_ns,
    workload_of,
)
from milpplan.lengths.bounds.master import replica_duals
from milpplan.lengths.deadline import Deadline
from milpplan.lengths.dispatch import Dispatcher
from milpplan.lengths.heterogeneous.count_program import (
    HeterogeneousStep,
    close,
    have_places,
    heterogeneous_members,
    replica_gpus,
    undominated,
    whole_shares,
)
from milpplan.lengths.heterogeneous.search import HeterogeneousBound, HeterogeneousPacker, HeterogeneousSearch
from milpplan.simulation import IntArray
from tests.amounts import first, long_but
from tests.lengths.all_steps import partitions
from tests.lengths.cases import GRAIN, deep_pool, pool, pool_of, workload
from tests.small import small_problem


def packed_at_random(found: StrategyTables, member: int, held: IntArray, random: np.random.Generator) -> IntArray:
    """Micro-batches [v, n] of one replica that fit, in any order."""
    lengths, room = found.load.lengths, found.max_quanta(member, shared_memory=False) * GRAIN
    rows: list[IntArray] = []
    for k in random.permutation(np.repeat(np.arange(len(held)), held)).tolist():
        fitting = [row for row in rows if row @ lengths + lengths[k] <= room]
        if not fitting or random.random() < 0.4:
            fitting = [np.zeros(len(held), dtype=np.int64)]
            rows += fitting
        fitting[int(random.integers(len(fitting)))][k] += 1
    return np.array(rows, dtype=np.int64).reshape(-1, len(held))


def random_step(found: StrategyTables, random: np.random.Generator) -> HeterogeneousStep:
    """Replicas of some strategies, one of which holds the longest sequence, with sequences anywhere."""
    members, load = heterogeneous_members(found), found.load
    while True:
        numbers: Counter[int] = Counter()
        left = found.members[0].candidate.layout.num_gpus
        for member in random.permutation(members).tolist():
            most = left // replica_gpus(found, member)
            numbers[member] = int(random.integers(most + 1))
            left -= numbers[member] * replica_gpus(found, member)
        numbers = Counter({member: number for member, number in numbers.items() if number})
        holds = (
            max((found.max_quanta(one, shared_memory=False) for one in numbers), default=0) * GRAIN
            >= load.lengths[-1]
        )
        if holds and len(numbers) > 1 and have_places(found, numbers):
            break
    replicas = [member for member, number in numbers.items() for _ in range(number)]
    held = np.zeros((len(replicas), len(load.lengths)), dtype=np.int64)
    for k in np.repeat(np.arange(len(load.lengths)), load.counts).tolist():
        fits = [
            r
            for r, one in enumerate(replicas)
            if found.max_quanta(one, shared_memory=False) * GRAIN >= load.lengths[k]
        ]
        held[int(random.choice(fits)), k] += 1
    packed = {}
    for member in numbers:
        rows = [packed_at_random(found, one, mine, random) for one, mine in zip(replicas, held, strict=True)
                if one == member]  # fmt: skip
        packed[member] = found.time_packing(member, tuple(rows), found.max_quanta(member, shared_memory=False))
    return HeterogeneousStep.of(found, packed)


def test_steps_take_what_their_slowest_replica_takes_and_fill_the_cluster() -> None:
    """Random steps: every replica by itself, then once what ends the slowest strategy's own step; each GPU has one
    replica, and what works closely together stands at a multiple of its size."""
    found, random = deep_pool(), np.random.default_rng(1)
    for _ in range(20):
        step = random_step(found, random)
        slowest = 0
        for member, packed in step.packed.items():
            candidate = found.members[member].candidate
            slowest = max(slowest, *replicas_ns(found.problem, candidate, found.load.lengths, packed.replicas))
        once = max(map(found.reduce_ns, step.packed)) + max(map(found.finish_ns, step.packed))
        assert step.time_ns == slowest + once
        gpus = [
            gpu
            for member in step.packed
            for first in step.first_gpus(member)
            for gpu in range(first, first + replica_gpus(found, member))
        ]
        assert sorted(gpus) == list(range(8))
        for member in step.packed:
            assert all(first % close(found, member) == 0 for first in step.first_gpus(member))


def test_sizes_that_do_not_nest_have_no_places() -> None:
    """Context parallelism of 2 beside 3 would stand askew; too few replicas leave GPUs empty."""
    grain, steps = 384, workload_of([384, 768, 1920], 384)
    problem = quantum_problem(small_problem(num_gpus=6, memory_gib=40, space={"pp": (1,), "tp": (1,)}), grain)
    found = StrategyTables.of(problem, Load(steps.lengths, steps.counts, grain))
    by_size = {replica_gpus(found, member): member for member in heterogeneous_members(found)}
    assert {1, 2, 3} <= set(by_size)
    assert have_places(found, {by_size[1]: 3, by_size[3]: 1})
    assert have_places(found, {by_size[1]: 2, by_size[2]: 2})
    assert not have_places(found, {by_size[1]: 1, by_size[2]: 1, by_size[3]: 1})
    assert not have_places(found, {by_size[1]: 3, by_size[2]: 1})


def test_whole_shares_fit_where_shares_do() -> None:
    """Random sequences that fill a replica at most: what counts whole ones never says more."""
    random, more = np.random.default_rng(2), 0
    for _ in range(400):
        shares = random.uniform(0.02, 0.7, 12)
        held = np.zeros(12)
        for place in random.permutation(np.repeat(np.arange(12), 4)):
            held[place] += shares[place] + shares @ held <= 1.0
        for parts in range(1, 5):
            assert whole_shares(shares, parts) @ held <= 1.0 + 1e-12
            more += whole_shares(shares, parts) @ held > shares @ held
    assert more > 100


def test_rows_that_others_imply_are_left_out() -> None:
    """Random rows of few values, one by one: whatever obeys those that are kept obeys all, of equal ones the first
    is kept, and none is implied by another one."""
    random = np.random.default_rng(4)
    for _ in range(200):
        rows = random.integers(0, 3, (random.integers(1, 9), random.integers(1, 4))) / 4.0
        kept = undominated(rows)
        for place, row in enumerate(rows):
            above = [one for one, other in enumerate(rows) if (other >= row).all() and one != place]
            implied = any(not np.array_equal(rows[one], row) or one < place for one in above)
            assert kept[place] != implied


def searched(found: StrategyTables, seconds: float) -> HeterogeneousSearch:
    """What is known of a pool after a search that would rather prove more."""
    search = HeterogeneousSearch(found, 0.0, "highs")
    least = [found.step_bound_ns(member) for member in range(len(found.members))]
    search.run(4.0 * min(least), Deadline.after(seconds))
    return search


def learned(found: StrategyTables) -> HeterogeneousBound:
    """Everything that may be learned of every kind: prices of strategies of one stage, work of pipelines."""
    bound, kinds = HeterogeneousBound.of(found, "highs"), []
    for kind in bound.classes:
        fits = kind.can_hold(1e15)
        if found.num_stages(kind.member) == 1:
            prices = replica_duals(found, kind.member, np.where(fits, found.load.counts, 0.0), 1e15)
            kinds.append(replace(kind, prices=(prices,)))
            continue
        found.best_own_memory_bound(kind.member)
        kinds.append(kind)
    return HeterogeneousBound(found, "highs", kinds)


@pytest.mark.long
@pytest.mark.parametrize("make", [pool, pytest.param(deep_pool, marks=pytest.mark.long)])
def test_no_step_breaks_what_is_learned(make: Callable[[], StrategyTables]) -> None:
    """Random steps, at their own times, and what is found: no replica breaks a row of its kind, and no step is
    excluded."""
    found, random = make(), np.random.default_rng(3)
    bound, step = learned(found), searched(found, 1.0).step
    assert step is not None
    # More than linear bounds say.
    plain = HeterogeneousBound.of(found, "highs").relax(step.time_ns, 10.0, whole=False).share
    assert bound.relax(step.time_ns, 10.0, whole=False).share < plain
    for one in [step, *(random_step(found, random) for _ in range(20))]:
        for member, packed in one.packed.items():
            kinds = [kind for kind in bound.classes if kind.member == member]
            for replica in packed.replicas:
                held = replica.sum(axis=0)
                (kind,) = kinds
                time_ns = one.time_ns - kind.fixed_cost_ns
                assert kind.can_hold(time_ns)[held > 0].all()
                assert (kind.rows(time_ns) @ held).max() <= 1.0 + 1e-9
        assert not bound.relax(one.time_ns, 10.0).excludes


@pytest.mark.parametrize(("make", "seconds"), first(0, [(pool, 1.0), (deep_pool, 2.0)]))
def test_no_step_is_below_what_is_proved(make: Callable[[], StrategyTables], seconds: float) -> None:
    """What a search proves is below what it finds and below random steps, and not by much."""
    found, random = make(), np.random.default_rng(8)
    search = searched(found, seconds)
    assert search.step is not None
    assert 0.93 * search.step.time_ns < search.bound_ns <= search.step.time_ns
    assert all(search.step.time_ns < random_step(found, random).time_ns for _ in range(30))
    assert search.bound.relax(search.bound_ns, 10.0).excludes


def test_prices_of_a_replica_are_worth_no_more_than_its_time() -> None:
    """Random contents of one replica: what they are worth, whatever was wanted; and high for what was."""
    found, random = pool(), np.random.default_rng(4)
    singles = [one for one in heterogeneous_members(found) if found.num_stages(one) == 1]
    for member in singles:
        fits = found.load.lengths <= found.max_quanta(member, shared_memory=False) * GRAIN
        wanted = np.where(fits, random.uniform(0.0, 1.0, len(fits)) * found.load.counts, 0.0)
        prices = replica_duals(found, member, wanted, 1e15)
        linear = (found.linear_bounds(member, shared_memory=False).shares[:, fits] @ wanted[fits]).max()
        layout = found.members[member].candidate.layout
        assert prices @ wanted >= 0.999 * linear * layout.dp
        for _ in range(20):
            held = random.integers(0, found.load.counts + 1) * fits
            rows = packed_at_random(found, member, held, random)
            (time_ns,) = replicas_ns(
                found.problem, found.members[member].candidate, found.load.lengths, (rows,)
            ).tolist()
            assert prices @ held <= time_ns


@pytest.mark.long
def test_every_backend_says_the_same() -> None:
    """The most that a step leaves, below and above what is proved."""
    found = pool()
    other, search = HeterogeneousBound.of(found, "highs"), searched(found, 1.0)
    assert search.step is not None
    for solver, part in itertools.product(("cbc", "cpsat", "highs"), (0.8, 1.05)):
        time_ns = part * search.step.time_ns
        shared = HeterogeneousBound.of(found, solver).relax(time_ns, 60.0)
        assert shared.excludes == (part < 1.0)
        # CP-SAT has coarser parts, but whole sequences only.
        if solver == "cbc":
            assert shared.share == pytest.approx(other.relax(time_ns, 60.0).share, abs=1e-5)


def all_steps_ns(found: StrategyTables) -> float:
    """Least time of all steps of a few different sequences: every mix of replicas, who holds which sequence, in
    which micro-batches, in which order."""
    load, members = found.load, heterogeneous_members(found)
    number, gpus = len(load.lengths), found.members[0].candidate.layout.num_gpus
    assert (load.counts == 1).all()
    subsets = [s for size in range(number + 1) for s in itertools.combinations(range(number), size)]
    least: dict[tuple[int, tuple[int, ...]], float] = {}
    for member in members:
        room = found.max_quanta(member, shared_memory=False) * GRAIN
        for subset in subsets:
            best = 0.0 if not subset else math.inf
            for parts in partitions(subset) if subset else []:
                if any(sum(int(load.lengths[k]) for k in part) > room for part in parts):
                    continue
                for order in itertools.permutations(parts):
                    rows = np.array([[int(k in part) for k in range(number)] for part in order])
                    times = replicas_ns(found.problem, found.members[member].candidate, load.lengths, (rows,))
                    best = min(best, float(times[0]))
            least[member, subset] = best
    found_ns = math.inf
    for size in range(2, gpus + 1):
        for mix in itertools.combinations_with_replacement(members, size):
            if len(set(mix)) < 2 or not have_places(found, Counter(mix)):
                continue
            once = max(map(found.reduce_ns, mix)) + max(map(found.finish_ns, mix))
            for where in itertools.product(range(size), repeat=number):
                held = [tuple(k for k in range(number) if where[k] == place) for place in range(size)]
                slowest = max(least[member, mine] for member, mine in zip(mix, held, strict=True))
                found_ns = min(found_ns, slowest + once)
    return found_ns


def few(random: np.random.Generator) -> Workload:
    """Two to four sequences of different lengths, one of them long."""
    short = random.integers(100, 6_000, random.integers(1, 4))
    return workload_of(np.unique(np.append(short, random.integers(6_000, 16_000)) // GRAIN + 1) * GRAIN, GRAIN)


@pytest.mark.parametrize(("number", "seconds"), [(1, 1.0), pytest.param(60, 4.0, marks=pytest.mark.long)])
def test_no_step_of_few_sequences_is_below_the_bound_or_what_is_found_by_much(number: int, seconds: float) -> None:
    """Random sequences on four GPUs against all steps: the bound is below the best of them, and what is found is
    that one in most cases, and within a twentieth of it in all."""
    random, same = np.random.default_rng(12), 0
    space = {"cp": (1,), "recompute": ("none",)}
    for _ in range(number):
        found = pool_of(small_problem(memory_gib=40, space=space), few(random))
        best = all_steps_ns(found)
        search = searched(found, seconds)
        assert search.bound_ns <= best
        assert search.step is not None
        assert best <= search.step.time_ns <= 1.05 * best
        same += search.step.time_ns == best
    assert same >= 0.5 * number, (same, number)


@pytest.mark.long
@pytest.mark.parametrize("number", long_but((1,), (1, 2)))
def test_a_packing_that_is_improved_keeps_every_sequence(number: int) -> None:
    """Sequences may go from one strategy's replica to another's, but none is lost, and memory holds them."""
    found, random = deep_pool(), np.random.default_rng(6)
    packer = HeterogeneousPacker(found)
    for _ in range(number):
        step = random_step(found, random)
        better = packer.polish(step)
        assert better.time_ns < step.time_ns
        assert (sum(one.counts for one in better.packed.values()) == found.load.counts).all()
        for member, packed in better.packed.items():
            assert len(packed.replicas) == len(step.packed[member].replicas)
            assert isinstance(packed, Packed)
            for replica in packed.replicas:
                assert (
                    replica @ found.load.lengths <= found.max_quanta(member, shared_memory=False) * GRAIN
                ).all()


@cache
def solved() -> LengthsResult:
    """A small problem whose long sequence needs half of the GPUs, without context parallelism."""
    problem = small_problem(num_gpus=8, memory_gib=40, space={"cp": (1,)})
    return solve_lengths(
        problem, workload(long=1, short=150, longest=49_152), GRAIN, 1, 0.02, 12.0, "highs", unlike_replicas=True
    )


def test_results_say_who_runs_what() -> None:
    """Every sequence once, on GPUs of the cluster, no two replicas on one; groups hold the same; the step is the
    last end with the reduction and the finish, shorter than that of any single strategy, and the bound below."""
    result, steps = solved(), workload(long=1, short=150, longest=49_152)
    assert result.is_unlike
    assert result.unlike_replicas is not None
    assert result.unlike_replicas.step_time_s == result.step_time_s < result.static.step_time_s
    assert result.unlike_replicas.lower_bound_s is not None
    assert result.lower_bound_s <= result.unlike_replicas.lower_bound_s
    assert result.gap <= 0.02
    held = Counter(length for turn in result.turns for one in turn.micro_batches for length in one)
    assert held == dict(zip(steps.lengths.tolist(), steps.counts.tolist(), strict=True))
    gpus = [gpu for turn in result.turns for gpu in range(turn.first_gpu, turn.first_gpu + turn.num_gpus)]
    assert len(set(gpus)) == len(gpus)
    assert set(gpus) <= set(range(8))
    last = max(turn.end_s for turn in result.turns)
    reduce_s = sum(group.reduce_s for group in result.groups)
    assert result.step_time_s == pytest.approx(last + reduce_s + result.finish_s, rel=1e-9)
    assert max(event.end_s for event in result.timeline) == pytest.approx(result.step_time_s, rel=1e-9)
    assert len(result.groups) > 1
    for group in result.groups:
        mine = Counter(length for replica in group.micro_batches for one in replica for length in one)
        assert mine == dict(group.buckets)
    document = result.to_dict()
    assert document["unlike_replicas"]["replicas"] == [turn.to_dict() for turn in result.turns]
    assert document["switches"] == []


def test_what_does_not_go_with_unlike_replicas_is_refused() -> None:
    """Padded sequences, and batches of such a step in turn."""
    problem = small_problem(num_gpus=8, memory_gib=40, space={"cp": (1,)})
    with pytest.raises(InvalidInputError, match="Unlike replicas"):
        solve_lengths(problem, workload(), GRAIN, rules=SequenceRules(padded=True), unlike_replicas=True)
    with pytest.raises(InvalidInputError, match="unlike replicas"):
        Dispatcher(solved(), problem)


def test_without_a_strategy_of_several_replicas_there_is_nothing_unlike() -> None:
    """One replica of everything: no such step, and the rest as it is."""
    problem = small_problem(memory_gib=40, space={"dp": (1,)})
    result = solve_lengths(problem, workload(), GRAIN, 1, 0.05, 4.0, "highs", unlike_replicas=True)
    assert result.unlike_replicas is not None
    assert result.unlike_replicas.step_time_s is None
    assert result.unlike_replicas.lower_bound_s is None
    assert not result.is_unlike
