"""Exchanges of sequences: the times they count with are exact, and steps only become shorter."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from milpplan.lengths.deadline import NEVER
from milpplan.lengths.side_by_side import Family, Turn, families, simulate_turns, turn_times_ns
from milpplan.lengths.side_by_side.team_search import Batch, Degree, improved
from tests.lengths.all_steps import FLAT, random_turns
from tests.lengths.cases import pool_of, random_micro_batches, workload
from tests.small import small_problem


@cache
def family() -> Family:
    """Four seats, one sequence that only half the cluster holds, and sixty short ones."""
    (only,) = families(
        pool_of(small_problem(memory_gib=40, space=FLAT), workload(long=1, short=60, longest=49_152))
    )
    return only


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_exchanged_micro_batches_take_what_new_ones_take(degree: int) -> None:
    """Every exchange of a sequence, or none, for another one, or none, has the time of the micro-batch made anew,
    which is that of the simulation; infinite where it does not fit, nothing where nothing is left."""
    found, random = family(), np.random.default_rng(degree)
    own = Degree.of(found, degree)
    number = len(found.pool.load.counts)
    rows = random_micro_batches(found.pool, own.capacities[-1], random, 6)
    lone = np.zeros_like(rows[0])
    lone[3] = 1
    for held in [*rows, lone]:
        batch = Batch(own, 0, held)
        goes, comes = batch.choices, np.append(random.integers(0, number, 4), number)
        times = batch.exchanged(goes, comes)
        for k, out in enumerate(goes.tolist()):
            for other, into in enumerate(comes.tolist()):
                after = batch.after_exchange(out, into)
                if after.quanta == 0:
                    assert times[k, other] == 0.0
                elif after.quanta > own.capacities[-1]:
                    assert np.isinf(times[k, other])
                else:
                    assert times[k, other] == pytest.approx(after.time_ns, rel=1e-12)
        turn = Turn(own.member(batch.quanta), 0, held[None])
        exact = int(simulated_alone(found, turn))
        assert batch.time_ns == pytest.approx(exact, abs=100.0)


def simulated_alone(found: Family, turn: Turn) -> int:
    """Exact time of one turn."""
    return turn_times_ns(found, [turn])[0]


def test_steps_become_shorter_and_stay_whole() -> None:
    """Random nested turns: after exchanges every sequence still runs once (the simulation refuses anything else),
    in much less time; the same turns give the same step; nothing is done where the step is short enough."""
    found = family()
    turns = sorted(
        random_turns(found, np.random.default_rng(2)),
        key=lambda turn: -found.pool.members[turn.member].candidate.layout.cp,
    )
    before = simulate_turns(found, turns)
    after = simulate_turns(found, improved(found, turns, 1500, 0.0, NEVER))
    assert after.time_ns < 0.85 * before.time_ns
    again = simulate_turns(found, improved(found, turns, 1500, 0.0, NEVER))
    assert again.time_ns == after.time_ns
    same = simulate_turns(found, improved(found, turns, 1500, before.time_ns, NEVER))
    assert after.time_ns < same.time_ns <= before.time_ns
