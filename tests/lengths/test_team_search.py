"""Finding steps of teams: whole micro-batches from shares, and what dealing out anew gains."""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from milpplan.lengths.deadline import NEVER
from milpplan.lengths.side_by_side import (
    Family,
    Priced,
    SharedWork,
    Turn,
    families,
    priced,
    shared_work,
    simulate_turns,
    turn_times_ns,
)
from milpplan.lengths.side_by_side.team_search import dealt, improve_turns, plan_family, shortest
from tests.lengths.all_steps import FLAT
from tests.lengths.cases import pool_of, workload
from tests.small import small_problem


@cache
def work() -> tuple[Family, SharedWork]:
    """Four seats, one sequence that only half the cluster holds, and sixty short ones."""
    steps = workload(long=1, short=60, longest=49_152)
    (only,) = families(pool_of(small_problem(memory_gib=40, space=FLAT), steps))
    return only, shared_work(only)


def test_shares_become_whole_micro_batches() -> None:
    """Shares of the program, and thirds of single sequences: every sequence runs once (the simulation refuses
    anything else); under a limit no degree is chosen that takes longer, if another does not."""
    family, shared = work()
    counts = family.pool.load.counts
    alone = Priced(0.0, counts / 3, np.eye(len(counts), dtype=np.int64), np.zeros(len(counts)))
    for found in (priced(family, shared, math.inf, NEVER), alone):
        free = simulate_turns(family, dealt(family, found, math.inf))
        limit_ns = 0.9 * max(_times(family, dealt(family, found, math.inf))) + family.fixed_cost_ns
        limited = dealt(family, found, limit_ns)
        assert simulate_turns(family, limited).time_ns <= 2 * free.time_ns
        assert max(_times(family, limited)) + family.fixed_cost_ns < limit_ns


def _times(family: Family, turns: list[Turn]) -> list[float]:
    return [float(time) for turn in turns for time in turn_times_ns(family, [turn])]


def test_exchanges_never_lose_and_gain_from_a_bad_start() -> None:
    """From every sequence by itself, all on the first team that holds it: a step far shorter; the same again;
    more of it is no longer; it stops where it is short enough."""
    family, shared = work()
    widest = max(family.members, key=family.max_quanta)
    turns = [
        Turn(widest, 0, np.repeat(np.eye(len(shared.prices.T), dtype=np.int64), family.pool.load.counts, axis=0))
    ]
    bad = simulate_turns(family, turns)
    steps = [improve_turns(family, turns, rounds, 0.0, NEVER) for rounds in (200, 2_000, 2_000)]
    assert steps[1].time_ns == steps[2].time_ns <= steps[0].time_ns < bad.time_ns
    best = shortest(family, 2_000, 0.0, NEVER)
    assert steps[1].time_ns <= 1.15 * best.time_ns < bad.time_ns
    same = improve_turns(family, list(steps[1].turns), 200, steps[1].time_ns + 10, NEVER)
    assert same.time_ns == steps[1].time_ns


def test_a_planned_step_is_at_its_bound_nearly() -> None:
    """With its bound, which is above the linear one."""
    family, shared = work()
    step, bound_ns = plan_family(family, 700, 0.005)
    assert shared.bound_ns < bound_ns <= step.time_ns <= 1.03 * bound_ns
