"""Balancing replicas of different kinds: never longer, every sequence kept, as short as listing all ways."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from milpplan.lengths.tabled import (
    Group,
    GroupedProblem,
    Pipeline,
    Strategy,
    SwitchTimes,
    arranged,
    balance,
    first_packings,
    has_single_micro_batches,
)
from tests.amounts import first


def mixed(seed: int, number: int, tokens: int) -> GroupedProblem:
    """Sequences for two replicas of 2 GPUs and one of 4, one micro-batch each, all work quadratic."""
    random = np.random.default_rng(seed)
    lengths, counts = np.unique(random.integers(1, 40, number), return_counts=True)
    kinds = (
        (Pipeline("sp2", 1, 3.0, 40.0, 30.0, tokens, max_micro_batches=1), 2),
        (Pipeline("sp4", 1, 1.5, 24.0, 30.0, 2 * tokens, max_micro_batches=1), 1),
    )
    return GroupedProblem(lengths.astype(np.int64), counts, (Strategy("m", kinds),), SwitchTimes.free(1), 1)


def least_ns(problem: GroupedProblem) -> float:
    """The least time over all ways to spread the sequences within the tokens."""
    items = np.repeat(problem.lengths, problem.counts)
    replicas = problem.strategies[0].replicas
    units = np.array([pipeline.units(items) * pipeline.parts for pipeline in replicas])
    best = np.inf
    for ways in itertools.product(range(len(replicas)), repeat=items.size):
        where = np.array(ways)
        tokens = np.bincount(where, items, len(replicas))
        if all(held <= one.micro_batch_tokens for held, one in zip(tokens, replicas, strict=True)):
            empty = [one.parts * one.micro_batch_units * ((where == r).any()) for r, one in enumerate(replicas)]
            times = [units[r][where == r].sum() + empty[r] for r in range(len(replicas))]
            best = min(best, max(times))
    return float(best)


@pytest.mark.parametrize("seed", first(2, range(4)))
def test_balance_finds_the_best_of_all_ways(seed: int) -> None:
    """Seven sequences, memory that binds: as short as the best of 3^7 ways, and a plan that passes the check."""
    problem = mixed(seed, 7, 80)
    first = first_packings(problem.kinds_of(0))
    assert first is not None
    found = balance(first)
    plan = arranged(problem, [Group(0, tuple(found))])
    assert plan.time_ns == least_ns(problem)


@pytest.mark.parametrize("seed", range(4))
def test_balance_never_lengthens(seed: int) -> None:
    """Sixty sequences: no longer than at first, checked, the same when asked again."""
    problem = mixed(seed, 60, 600)
    first = first_packings(problem.kinds_of(0))
    assert first is not None
    found = balance(first, 300)
    assert max(one.time_ns for one in found) <= max(one.time_ns for one in first)
    arranged(problem, [Group(0, tuple(found))])
    again = balance(first, 300)
    for one, other in zip(found, again, strict=True):
        assert [held.tolist() for held in one.replicas] == [held.tolist() for held in other.replicas]


def test_only_single_micro_batches_are_balanced() -> None:
    """Replicas that accumulate, or have stages, are not for it; too many tokens have no first packing."""
    problem = mixed(0, 8, 90)
    assert has_single_micro_batches(problem.kinds_of(0))
    assert first_packings(mixed(0, 30, 60).kinds_of(0)) is None
    other = Strategy.of(Pipeline("a", 1, 1.0, 1.0, 1.0, 90), 2)
    free = GroupedProblem(problem.lengths, problem.counts, (other,), SwitchTimes.free(1), 1)
    assert not has_single_micro_batches(free.kinds_of(0))
