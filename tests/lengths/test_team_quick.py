"""Steps of teams in milliseconds: legal, near what a search finds, and bounds in steps shorter than a limit."""

from __future__ import annotations

import math

import numpy as np
import pytest

from milpplan.lengths.deadline import NEVER
from milpplan.lengths.side_by_side import Family, SharedTables, families, shared_work
from milpplan.lengths.side_by_side.team_quick import AffineTime, Packer, lines, quick_step
from milpplan.lengths.side_by_side.team_search import Effort, shortest
from tests.amounts import first
from tests.lengths.all_steps import FLAT, AllSteps, few
from tests.lengths.cases import pool_of, workload
from tests.small import small_problem


def family_of(long: int, short: int, longest: int) -> Family:
    """Four seats of one GPU."""
    steps = workload(long=long, short=short, longest=longest)
    (only,) = families(pool_of(small_problem(memory_gib=40, space=FLAT), steps))
    return only


@pytest.mark.parametrize(("long", "short", "near"), first(1, [(1, 60, 0.05), (4, 400, 0.02), (2, 900, 0.01)]))
def test_quick_steps_are_near_what_a_search_finds(long: int, short: int, near: float) -> None:
    """Every sequence once and within memory (the simulation refuses anything else), no step below the bound, and
    little longer than after a search."""
    found = family_of(long, short, 49_152)
    step, shared = quick_step(found, lines(found)), shared_work(found)
    assert step.time_ns >= shared.bound_ns
    searched = shortest(Packer(found, shared), Effort(24, 500, 20), 0.0, NEVER)
    assert step.time_ns <= searched.time_ns * (1.0 + near)


def test_lines_are_the_times_of_large_micro_batches() -> None:
    """A full micro-batch of short sequences takes what its line says; alone, a sequence the exact time of a
    micro-batch of one."""
    found = family_of(1, 60, 49_152)
    for mine in lines(found).values():
        for one in mine:
            timer = found.timer(one.member)
            each = np.zeros((1, len(timer.quanta)), dtype=np.int64)
            each[0, 0] = one.capacity // int(timer.quanta[0])
            if each[0, 0] * timer.quanta[0] == one.capacity:
                exact = float(timer.phases(each).sum())
                assert one.constant_ns + each[0, 0] * one.sequence_ns[0] == pytest.approx(exact, rel=0.02)
            place = int(np.flatnonzero(np.isfinite(one.single_ns))[-1])
            alone = np.zeros_like(each)
            alone[0, place] = 1
            assert one.single_ns[place] == pytest.approx(float(timer.phases(alone).sum()), rel=1e-9)
            assert isinstance(one.for_lengths(np.array([0])), AffineTime)


def test_seats_are_done_together() -> None:
    """Where short sequences are many, the last seat is done at most a hundredth after the mean."""
    found = family_of(2, 900, 49_152)
    step = quick_step(found, lines(found))
    ends = np.zeros(found.num_slots)
    for turn, end in zip(step.turns, step.ends_ns, strict=True):
        ends[found.slots(turn)] = np.maximum(ends[found.slots(turn)], end)
    assert ends.max() <= 1.01 * ends.mean()


@pytest.mark.parametrize("number", [3, pytest.param(40, marks=pytest.mark.long)])
def test_no_step_below_a_limit_is_below_its_bound(number: int) -> None:
    """Few sequences against all steps: the bound of steps shorter than a limit is no more than the best step where
    that is shorter, and at most the limit; it is never less than the bound of all steps up to there."""
    random, raised = np.random.default_rng(3), 0
    for _ in range(number):
        (one,) = families(pool_of(small_problem(memory_gib=40, space=FLAT), few(random)))
        best, tables = AllSteps(one).least_ns(), SharedTables.of(one)
        counts = one.pool.load.counts.astype(np.float64)
        free = tables.shared(counts).bound_ns
        for limit_ns in (0.8 * best, best + 1.0, 1.5 * best, math.inf):
            bound_ns = tables.shared(counts, limit_ns, 8).bound_ns
            assert bound_ns <= min(best + 1e-6 * best, limit_ns)
            raised += bound_ns > 1.0001 * min(free, limit_ns)
        step = quick_step(one, lines(one))
        assert step.time_ns >= best
    assert raised
