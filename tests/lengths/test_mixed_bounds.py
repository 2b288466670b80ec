"""Bounds of many sets at once, cut into parts of their strategies, held to plain enumeration."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from milpplan.lengths.bounds import LinearBounds
from milpplan.lengths.deadline import PASSED
from milpplan.lengths.turns import StrategySet, screened, split
from milpplan.lengths.turns.lagrangian_mixtures import Bounded, lp_bound_ns, single_row_bound_ns
from milpplan.simulation import FloatArray
from tests.lengths.cases import mixed_ns

NUMBER = 6
# What each of the sequences is of the workload.
MEASURE = np.array([0.05, 0.1, 0.1, 0.15, 0.2, 0.4])


@dataclass(frozen=True)
class Strategies:
    """Strategies whose groups take exactly the highest of their bounds, with the longest sequence its passage."""

    bounds: list[LinearBounds]
    serial: FloatArray
    once: FloatArray
    finish: FloatArray

    @staticmethod
    def drawn(random: np.random.Generator, number: int, constants: int = 9) -> Strategies:
        """Three bounds each, in small numbers."""
        shares = random.integers(1, 30, (number, 3, NUMBER)).astype(float)
        bounds = [LinearBounds(table, random.integers(0, constants, 3).astype(float)) for table in shares]
        serial = shares[:, :, -1].max(axis=1) + random.integers(0, 40, number)
        once, finish = (random.integers(0, constants, number).astype(float) for _ in range(2))
        return Strategies(bounds, serial, once, finish)

    def bounded(self, more: list[tuple[int, LinearBounds, tuple[float, float]]]) -> Bounded:
        """What screening needs of all of them, and ``more`` parts of them."""
        rows = [*range(len(self.bounds)), *(one for one, _, _ in more)]
        bounds = [*self.bounds, *(bound for _, bound, _ in more)]
        held = [(0.0, 1.0)] * len(self.bounds) + [ends for _, _, ends in more]
        counts = np.ones(NUMBER, dtype=np.int64)
        return Bounded.of(bounds, self.serial[rows], self.once[rows], self.finish[rows], counts, held)

    def group(self, one: int, held: FloatArray) -> float:
        """Time of a group."""
        rows = self.bounds[one].shares @ held + self.bounds[one].constants
        return max(float(rows.max()), float(self.serial[one]) if held[-1] else 0.0)

    def least(self, used: tuple[int, ...]) -> float:
        """Of all assignments of the sequences to a set."""
        found = np.inf
        for chosen in itertools.product(used, repeat=NUMBER):
            groups = [self.group(one, (np.array(chosen) == one).astype(float)) for one in used]
            found = min(found, sum(groups))
        return found + float(self.once[list(used)].sum() + self.finish[list(used)].min())

    def part(self, one: int, low: float, high: float) -> tuple[int, LinearBounds, tuple[float, float]]:
        """Groups that hold between two shares of the workload: none of them takes less than the least of all."""
        every = (np.array(held, dtype=float) for held in itertools.product((0, 1), repeat=NUMBER))
        times = [self.group(one, held) for held in every if low <= float(MEASURE @ held) <= high]
        bounds = self.bounds[one]
        shares = np.concatenate([bounds.shares, np.where(np.isfinite(bounds.shares[:1]), 0.0, np.inf)])
        return one, LinearBounds(shares, np.append(bounds.constants, min(times))), (low, high)


def few(seed: int) -> Iterator[tuple[Strategies, tuple[int, ...]]]:
    """Sets of two and three."""
    random = np.random.default_rng(seed)
    for size in (2, 3, 2, 3):
        yield Strategies.drawn(random, size), tuple(range(size))


@pytest.mark.parametrize("seed", range(3))
def test_sets_cut_into_parts_are_bounded(seed: int) -> None:
    """Parts that together are all groups: no assignment is below the least of all choices of parts; some sets are
    bounded higher than whole; a set that may be shorter than a target is left, and a bound above the target closes
    it."""
    gained = 0
    for drawn, used in few(seed):
        least = drawn.least(used)
        ends = [0.0, 0.3, 0.62, 1.0]
        more, parts = [], {}
        for one in used:
            parts[one] = list(range(len(used) + len(more), len(used) + len(more) + 3))
            more += [drawn.part(one, *pair) for pair in itertools.pairwise(ends)]
        problem = drawn.bounded(more)
        whole = mixed_ns(problem, used)
        sets = [StrategySet(0.0, used)]
        (cut,) = split(problem, parts, sets, np.inf).sets
        assert cut.bound_ns <= least * (1 + 1e-9)
        gained += cut.bound_ns > whole * 1.001
        assert split(problem, parts, sets, least + 1e-6).sets[0].strategies == used
        closed = split(problem, parts, sets, cut.bound_ns * 0.99)
        assert not closed.sets
        assert cut.bound_ns * 0.99 <= closed.dropped_ns <= least * (1 + 1e-9)
        # Out of time a set is left as it is.
        assert split(problem, parts, [StrategySet(1.0, used)], 0.5, PASSED).sets[0].bound_ns == 1.0
    assert gained > 0


def test_choices_that_cannot_hold_the_workload_are_left_out() -> None:
    """Two parts that hold half of it at most, together with others of as much: less than all, or just enough."""
    drawn = Strategies.drawn(np.random.default_rng(5), 2)
    little = [(one, drawn.bounds[one], (0.0, 0.4)) for one in (0, 1)]
    enough = [(one, drawn.bounds[one], (0.0, 0.5)) for one in (0, 1)]
    much = [(one, drawn.bounds[one], (0.6, 1.0)) for one in (0, 1)]
    problem = drawn.bounded([*little, *enough, *much])
    sets = np.array([[2, 3], [4, 5], [6, 7], [2, 7], [0, 1]])
    assert problem.can_hold_workload(sets).tolist() == [False, True, False, True, True]
    only_little = split(problem, {0: [2], 1: [3]}, [StrategySet(0.0, (0, 1))], np.inf)
    assert not only_little.sets
    assert only_little.dropped_ns == np.inf


@pytest.mark.parametrize("seed", range(3))
def test_any_weights_bound_a_set(seed: int) -> None:
    """Random ones, and those of some strategies that are for one bound only."""
    random = np.random.default_rng(seed)
    for drawn, used in few(seed):
        problem, least = drawn.bounded([]), drawn.least(used)
        for power in (1.0, 8.0):
            weights = random.random((len(used), 2, 4)) ** power
            weights[:, 0, -1] = 0.0
            weights /= weights.sum(axis=2, keepdims=True)
            assert single_row_bound_ns(problem, np.array([used, used[::-1]]), weights).max() <= least * (1 + 1e-9)


def test_no_set_is_lost_while_sets_grow() -> None:
    """Of all sets of two to four strategies those with a bound below the target are left, though sets are not
    grown where whatever joins them is above it."""
    random = np.random.default_rng(8)
    for _ in range(4):
        drawn = Strategies.drawn(random, 7, constants=25)
        problem = drawn.bounded([])
        every = [used for size in (2, 3, 4) for used in itertools.combinations(range(7), size)]
        sharp = {used: lp_bound_ns(problem, np.array(used)) for used in every}
        target = float(np.quantile(list(sharp.values()), 0.3))
        found = screened(problem, 4, target)
        left = {one.strategies for one in found.sets}
        assert {used for used, bound in sharp.items() if bound < target * (1 - 1e-9)} <= left
        assert len(left) < len(every)
        dropped = [bound for used, bound in sharp.items() if used not in left]
        assert target <= found.dropped_ns <= min(dropped) * (1 + 1e-9)
        # Out of time, what is not left is bounded, too.
        late = screened(problem, 4, target, PASSED)
        bounds = {one.strategies: one.bound_ns for one in late.sets}
        assert all(bounds.get(used, late.dropped_ns) <= bound * (1 + 1e-9) for used, bound in sharp.items())
        assert all(len(used) == 2 for used in bounds)
        assert 0.0 < late.dropped_ns < target
