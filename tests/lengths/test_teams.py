"""Degrees side by side: exact times seat by seat, a bound below every step, and the best of all small steps."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from functools import cache

import numpy as np
import pytest

from milpplan import solve_lengths
from milpplan.errors import IllegalPlanError, InvalidInputError
from milpplan.lengths import (
    LengthsResult,
    Load,
    SequenceRules,
    StrategyTables,
    Workload,
    micro_batch_times,
    quantum_problem,
    workload_of,
)
from milpplan.lengths.baselines import flexsp_step
from milpplan.lengths.deadline import NEVER
from milpplan.lengths.side_by_side import Family, Turn, families, shared_work, simulate_turns
from milpplan.lengths.side_by_side.team_quick import Packer
from milpplan.lengths.side_by_side.team_search import Effort, TeamSearch, shortest
from tests.lengths.all_steps import FLAT, AllSteps, few, random_turns
from tests.lengths.cases import GRAIN, pool_of, workload
from tests.small import small_problem


@cache
def steps_of() -> Workload:
    """One sequence that only half the cluster holds, and sixty short ones."""
    return workload(long=1, short=60, longest=49_152)


@cache
def pool() -> StrategyTables:
    """Strategies without stages and tensor parallelism."""
    return pool_of(small_problem(memory_gib=40, space=FLAT), steps_of())


@cache
def family() -> Family:
    """The family of the pool: degrees 1, 2 and 4."""
    (only,) = families(pool())
    assert set(only.degrees) == {1, 2, 4}
    return only


def test_families_hold_what_one_set_of_parameters_allows() -> None:
    """One tensor parallelism, no stages, two degrees at least, and no degree twice with one recompute setting; the
    reduction and the finish are the same under every degree."""
    found = families(pool_of(small_problem(memory_gib=40, space={"pp": (1,)}), few(np.random.default_rng(1))))
    assert len(found) == 2
    for one in found:
        layouts = [one.pool.members[member].candidate.layout for member in one.members]
        assert len({(layout.tp, layout.pp, layout.ep) for layout in layouts}) == 1
        assert all(layout.pp == 1 and layout.dp * layout.cp == one.num_slots for layout in layouts)
        assert len(set(one.degrees)) > 1
        assert len({one.pool.reduce_ns(member) for member in one.members}) == 1
        assert len({one.pool.finish_ns(member) for member in one.members}) == 1


def test_teams_are_neighbours() -> None:
    """Where cp is not next to tp in the order of ranks, a ring's GPUs are no neighbours: there are no teams."""
    apart = small_problem(memory_gib=40, space={"rank_order": ("tp-dp-cp-pp",), **FLAT})
    assert not families(pool_of(apart, steps_of()))


def test_steps_take_what_their_seats_take() -> None:
    """Random turns: a clock for every seat, moved by hand, gives the same step; none is below the bound."""
    found, random = family(), np.random.default_rng(6)
    bound = shared_work(found).bound_ns
    for _ in range(3):
        turns = random_turns(found, random)
        step = simulate_turns(found, turns)
        clocks = [0] * found.num_slots
        for turn, start, end in zip(turns, step.starts_ns, step.ends_ns, strict=True):
            candidate = pool().members[turn.member].candidate
            mine = range(candidate.layout.cp * turn.team, candidate.layout.cp * (turn.team + 1))
            times = micro_batch_times(pool().problem, candidate, pool().load.lengths, turn.packed)
            begin = max(clocks[seat] for seat in mine)
            for seat in mine:
                clocks[seat] = begin + int(times.forward.sum() + times.backward.sum())
            assert (start, end) == (begin, clocks[mine[0]])
        assert step.time_ns == max(clocks) + found.fixed_cost_ns
        assert bound <= step.time_ns


@pytest.mark.long
def test_equal_replicas_are_steps_of_teams() -> None:
    """The packing of one strategy, each replica a turn of its team, takes what the strategy takes."""
    found = pool()
    for member in family().members:
        if found.max_quanta(member, shared_memory=False) * GRAIN < found.load.lengths[-1]:
            continue
        packed = found.pack(member, found.load.counts, found.max_quanta(member, shared_memory=False))
        assert packed is not None
        turns = [Turn(member, team, rows) for team, rows in enumerate(packed.replicas) if len(rows)]
        step = simulate_turns(family(), turns)
        assert step.time_ns == packed.time_ns + found.reduce_ns(member) + found.finish_ns(member)
        assert shared_work(family()).bound_ns <= step.time_ns


@pytest.mark.long
def test_degrees_that_do_not_divide_each_other_are_bounded_and_planned() -> None:
    """Six seats have degrees 1, 2, 3 and 6: the packing nests 6, 3 and 1, or 6, 2 and 1; a step under the others
    alone is not below the bound either."""
    grain = 384
    steps = workload_of([500, 900, 1300, 2000, 2600, 4000, 7000, 16_000], grain)
    problem = quantum_problem(small_problem(num_gpus=6, memory_gib=40, space=FLAT), grain)
    found = StrategyTables.of(problem, Load(steps.lengths, steps.counts, grain))
    (only,) = families(found)
    assert set(only.degrees) == {1, 2, 3, 6}
    shared = shared_work(only)
    step = shortest(Packer(only, shared), Effort(24, 500, 20), 0.0, NEVER)
    assert shared.bound_ns <= step.time_ns
    for member in only.members:
        packed = found.pack(member, found.load.counts, only.max_quanta(member))
        if packed is not None:
            assert shared.bound_ns <= packed.time_ns + only.fixed_cost_ns


def test_illegal_steps_are_refused() -> None:
    """A sequence that does not run, a team beyond the cluster, and a micro-batch beyond memory."""
    found, random = family(), np.random.default_rng(9)
    turns = random_turns(found, random)
    with pytest.raises(IllegalPlanError, match="Every sequence once"):
        simulate_turns(found, turns[:-1])
    beyond = Turn(turns[0].member, found.pool.members[turns[0].member].candidate.layout.dp, turns[0].packed)
    with pytest.raises(IllegalPlanError, match="Team"):
        simulate_turns(found, [beyond, *turns[1:]])
    everything = found.pool.load.counts[None]
    least = min(found.members, key=found.max_quanta)
    with pytest.raises(IllegalPlanError, match="tokens each"):
        simulate_turns(found, [Turn(least, 0, everything)])


@pytest.mark.parametrize("number", [3, pytest.param(80, marks=pytest.mark.long)])
def test_no_step_of_few_sequences_is_below_the_bound_or_what_is_found_by_much(number: int) -> None:
    """Random sequences on four seats against all steps: the bound is below the best of them, and what is found is
    that one in most cases, and within a twentieth of it in all."""
    random, same = np.random.default_rng(12), 0
    for _ in range(number):
        (one,) = families(pool_of(small_problem(memory_gib=40, space=FLAT), few(random)))
        shared, best = shared_work(one), AllSteps(one).least_ns()
        assert shared.bound_ns <= best
        step = shortest(Packer(one, shared), Effort(24, 500, 20), 0.0, NEVER)
        assert best <= step.time_ns <= 1.05 * best
        same += step.time_ns == best
    assert same > 0.6 * number, (same, number)


@cache
def solved() -> LengthsResult:
    """The small problem with degrees side by side."""
    problem = small_problem(memory_gib=40, space=FLAT)
    return solve_lengths(problem, steps_of(), GRAIN, 1, 0.01, 10.0, "highs")


@pytest.mark.long
def test_results_say_who_runs_what_when() -> None:
    """Runs hold every sequence once, on GPUs of the cluster, never two at once on one of them; groups hold the
    same; the step is the last end with the reduction and the finish."""
    result, steps = solved(), steps_of()
    assert result.is_side_by_side
    assert len(result.groups) > 1
    assert result.side_by_side is not None
    assert result.side_by_side.lower_bound_s is not None
    turns = result.side_by_side.turns
    held = Counter(length for turn in turns for one in turn.micro_batches for length in one)
    assert held == dict(zip(steps.lengths.tolist(), steps.counts.tolist(), strict=True))
    for gpu in range(4):
        mine = sorted(
            (turn.start_s, turn.end_s) for turn in turns if turn.first_gpu <= gpu < turn.first_gpu + turn.num_gpus
        )
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(mine))
    reduce_s = sum(group.reduce_s for group in result.groups)
    last = max(turn.end_s for turn in turns)
    assert result.step_time_s == pytest.approx(last + reduce_s + result.finish_s, rel=1e-9)
    assert Counter(turn.strategy for turn in turns).keys() == set(result.order)
    assert {event.strategy for event in result.timeline if event.kind == "group"} == set(result.order)
    assert max(event.end_s for event in result.timeline) == pytest.approx(result.step_time_s, rel=1e-9)
    for group in result.groups:
        mine = Counter(length for replica in group.micro_batches for one in replica for length in one)
        assert mine == dict(group.buckets)
        assert len(group.micro_batches) == group.plan.layout.dp
        assert {turn.num_gpus for turn in turns if turn.strategy == group.strategy} == {
            group.plan.layout.tp * group.plan.layout.cp
        }


@pytest.mark.long
def test_degrees_side_by_side_are_one_space_with_the_rest() -> None:
    """The step is no longer than the best of one strategy, which stays as it is without them; the bound is below
    both, and below FlexSP's rounds, which are such steps."""
    result = solved()
    problem = small_problem(memory_gib=40, space=FLAT)
    plain = solve_lengths(problem, steps_of(), GRAIN, 1, 0.01, 10.0, "highs", side_by_side=False)
    assert plain.side_by_side is None
    assert "side_by_side" not in plain.to_dict()
    assert result.static.step_time_s == plain.static.step_time_s
    assert result.lower_bound_s <= result.step_time_s < plain.step_time_s
    assert result.status == "optimal"
    document = result.to_dict()["side_by_side"]
    assert document["step_time_s"] == result.step_time_s
    assert len(document["turns"]) == len(result.side_by_side.turns if result.side_by_side else ())
    rounds = flexsp_step(pool(), 0.01, "highs")
    assert rounds.step_time_s is not None
    assert rounds.step_time_s * 1e9 >= TeamSearch(pool(), 0.02).run(math.inf, NEVER).bound_ns


def test_rounds_that_hold_the_tokens_but_not_the_sequences_are_passed_over() -> None:
    """Three sequences of more than half of what a group of two GPUs holds: not two of them in one, so one round of
    two groups holds their tokens, but not them; FlexSP's rule takes two."""
    problem = small_problem(memory_gib=40, space={"cp": (2,), **FLAT})
    room = max(one.own_memory_quanta for one in pool_of(problem, steps_of()).members)
    found = pool_of(problem, workload_of([GRAIN * (6 * room // 10)] * 3, GRAIN))
    assert flexsp_step(found, 2.0, "highs").step_time_s is not None


def test_what_has_no_two_degrees_stays_as_it_is() -> None:
    """With one degree only there is no family; padded sequences are refused."""
    problem = small_problem(memory_gib=40, space={"cp": (2,), **FLAT})
    result = solve_lengths(problem, steps_of(), GRAIN, 1, 0.05, 5.0, "highs")
    assert result.side_by_side is not None
    assert result.side_by_side.num_families == 0
    assert result.side_by_side.lower_bound_s is None
    assert not result.is_side_by_side
    with pytest.raises(InvalidInputError, match="padded"):
        solve_lengths(problem, steps_of(), GRAIN, rules=SequenceRules(padded=True), side_by_side=True)
