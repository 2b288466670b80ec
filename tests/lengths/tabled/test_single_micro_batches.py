"""Replicas of one micro-batch each: all ways of few sequences, and FlexSP's micro-batches."""

from __future__ import annotations

import numpy as np
import pytest

from examples.adapters import flexsp
from milpplan.lengths.tabled import (
    GroupedProblem,
    Pipeline,
    Strategy,
    SwitchTimes,
    solve_groups,
)
from tests.amounts import first


@pytest.mark.parametrize("seed", first(1, range(4)))
def test_small_steps_are_solved_to_the_end(seed: int) -> None:
    """Few sequences on two replicas of one micro-batch: the plan is the best of all ways, whatever levels it."""
    random = np.random.default_rng(seed)
    items = np.sort(random.integers(1, 25, 7))
    lengths, counts = np.unique(items, return_counts=True)
    pipeline = Pipeline("p", 1, 3.0, 30.0, 3.0, 400, max_micro_batches=1)
    strategies = (Strategy.of(pipeline, 2),)
    problem = GroupedProblem(lengths.astype(np.int64), counts.astype(np.int64), strategies, SwitchTimes.free(1), 1)
    work = pipeline.units(items) * pipeline.parts
    ways = [work[[(way >> place) & 1 == 1 for place in range(7)]].sum() for way in range(128)]
    least = min(max(one, int(work.sum()) - one) for one in ways) + 3
    assert solve_groups(problem, "highs").plan.time_ns == least


@pytest.mark.long
@pytest.mark.parametrize("name", ["F1_16gpu_7b_64K_gbs128", "F2_64gpu_7b_192K_gbs512", "F3_64gpu_13b_384K_gbs512"])
def test_flexsps_micro_batches_are_at_most_the_best_known(name: str) -> None:
    """Another model's best after a minute each, and proved within 1 %."""
    case = flexsp.cases()[name]
    for lengths, known in zip(flexsp.split(case["lengths"], len(case["known"])), case["known"], strict=True):
        found = solve_groups(flexsp.problem_of(case, lengths), "highs", 0.002, 120)
        assert found.plan.time_ns <= known["best_ms"] * 1e6
        assert found.gap <= 0.01
