"""The local search on tables: never longer, every sequence kept, as short as listing all ways."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from milpplan.lengths.tabled import (
    Group,
    GroupedProblem,
    Packing,
    Pipeline,
    Strategy,
    SwitchTimes,
    arranged,
    first_packings,
    improved_packings,
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


@pytest.mark.parametrize("seed", first(1, range(4)))
def test_the_local_search_finds_the_best_of_all_ways(seed: int) -> None:
    """Seven sequences, memory that binds: as short as the best of 3^7 ways, and a plan that passes the check."""
    problem = mixed(seed, 7, 80)
    first = first_packings(problem.kinds_of(0))
    assert first is not None
    plan = arranged(problem, [Group(0, tuple(improved_packings(first, 60_000)))])
    assert plan.time_ns == least_ns(problem)


@pytest.mark.parametrize("seed", first(2, range(4)))
def test_the_local_search_never_lengthens(seed: int) -> None:
    """Sixty sequences: no longer than at first, checked, the same when asked again."""
    problem = mixed(seed, 60, 600)
    first = first_packings(problem.kinds_of(0))
    assert first is not None
    found, again = (improved_packings(first, 20_000) for _ in range(2))
    assert max(one.time_ns for one in found) <= max(one.time_ns for one in first)
    arranged(problem, [Group(0, tuple(found))])
    for one, other in zip(found, again, strict=True):
        assert [held.tolist() for held in one.replicas] == [held.tolist() for held in other.replicas]


def test_limits_of_replicas_are_kept() -> None:
    """Pipelines with few tokens in flight and few micro-batches, far from level: shorter, and within both."""
    pipeline = Pipeline("p", 2, 0.2, 30.0, 30.0, 100, in_flight_tokens=150, max_micro_batches=3)
    lengths, counts = np.array([10, 20, 40]), np.array([4, 4, 2])
    problem = GroupedProblem(lengths, counts, (Strategy.of(pipeline, 2),), SwitchTimes.free(1), 1)
    (kind,) = problem.kinds
    far = Packing(kind, (np.array([[4, 2, 0], [0, 0, 1], [0, 2, 1]]), np.zeros((0, 3), np.int64)))
    (found,) = improved_packings([far], 60_000)
    # The plan is checked against both limits.
    assert arranged(problem, [Group(0, (found,))]).time_ns < far.time_ns


def test_too_many_tokens_have_no_first_packing() -> None:
    """One micro-batch a replica holds so much and no more."""
    assert first_packings(mixed(0, 30, 60).kinds_of(0)) is None
