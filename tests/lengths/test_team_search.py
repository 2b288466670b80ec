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
)
from milpplan.lengths.side_by_side.team_quick import Packer, spread
from milpplan.lengths.side_by_side.team_search import Effort, dealt, improve_turns, plan_family, shortest
from tests.lengths.all_steps import FLAT
from tests.lengths.cases import pool_of, workload
from tests.small import small_problem


@cache
def work() -> tuple[Family, SharedWork]:
    """Four seats, one sequence that only half the cluster holds, and sixty short ones."""
    steps = workload(long=1, short=60, longest=49_152)
    (only,) = families(pool_of(small_problem(memory_gib=40, space=FLAT), steps))
    return only, shared_work(only)


def test_dealing_out_takes_the_seats_of_its_block_only() -> None:
    """Sequences on seats 2 and 3 behind what is there: all of them run once, on teams of these seats, and the ends
    grow by their times."""
    family, shared = work()
    packer = Packer(family, shared)
    counts = family.pool.load.counts.copy()
    counts[-1] = 0
    ends = np.array([5.0, 6.0, 7.0, 8.0])
    turns = spread(packer, np.ones(len(family.degree_chain)), counts, slice(2, 4), ends)
    assert (sum(turn.packed.sum(axis=0) for turn in turns) == counts).all()
    after = np.array([5.0, 6.0, 7.0, 8.0])
    for turn in turns:
        part = family.slots(turn)
        assert part.start >= 2
        after[part] += packer.times(turn.member, turn.packed).sum()
    assert (ends[:2] == [5.0, 6.0]).all()
    np.testing.assert_allclose(ends, after, rtol=1e-12)


def test_shares_become_whole_micro_batches() -> None:
    """Shares of the program, and thirds of single sequences: every sequence runs once (the simulation refuses
    anything else); under a limit no degree is chosen that takes longer, if another does not."""
    family, shared = work()
    packer = Packer(family, shared)
    counts = family.pool.load.counts
    alone = Priced(0.0, counts / 3, np.eye(len(counts), dtype=np.int64), np.zeros(len(counts)))
    for found in (priced(family, shared, math.inf, NEVER), alone):
        free = simulate_turns(family, dealt(packer, found, math.inf))
        limit_ns = 0.9 * max(_times(packer, dealt(packer, found, math.inf))) + family.fixed_cost_ns
        limited = dealt(packer, found, limit_ns)
        assert simulate_turns(family, limited).time_ns <= 2 * free.time_ns
        assert max(_times(packer, limited)) + family.fixed_cost_ns < limit_ns


def _times(packer: Packer, turns: list[Turn]) -> list[float]:
    return [float(time) for turn in turns for time in packer.times(turn.member, turn.packed)]


def test_dealing_out_anew_never_loses_and_gains_from_a_bad_start() -> None:
    """From every sequence by itself, all on the first team that holds it: a step near the best; the same again;
    more of it is no longer; it stops where it is short enough."""
    family, shared = work()
    packer = Packer(family, shared)
    widest = max(family.members, key=family.max_quanta)
    turns = [
        Turn(widest, 0, np.repeat(np.eye(len(shared.prices.T), dtype=np.int64), family.pool.load.counts, axis=0))
    ]
    bad = simulate_turns(family, turns)
    steps = [improve_turns(packer, turns, Effort(0, 200, again), 0.0, NEVER) for again in (0, 15, 15)]
    assert steps[1].time_ns == steps[2].time_ns <= steps[0].time_ns < bad.time_ns
    best = shortest(packer, Effort(24, 500, 20), 0.0, NEVER)
    assert steps[1].time_ns <= 1.05 * best.time_ns
    same = improve_turns(packer, list(steps[1].turns), Effort(0, 200, 15), steps[1].time_ns + 10, NEVER)
    assert same.time_ns == steps[1].time_ns


def test_a_planned_step_is_at_its_bound_nearly() -> None:
    """With its bound, which is above the linear one."""
    family, shared = work()
    step, bound_ns = plan_family(family, Effort(4, 200, 4), Effort(0, 200, 10), 0.005)
    assert shared.bound_ns < bound_ns <= step.time_ns <= 1.03 * bound_ns
