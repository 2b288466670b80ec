"""Whole steps: every sequence runs once, the time is that of the parts, no other plan is below the bound."""

from __future__ import annotations

import pickle
from collections import Counter
from functools import cache

import numpy as np
import pytest

from milpplan.errors import InfeasibleError, InvalidInputError
from milpplan.groups.workload import Workload, workload_of
from milpplan.lengths.records import LengthsResult
from milpplan.lengths.sequences import MAX_SEQUENCES
from milpplan.lengths.solving import solve_lengths
from tests.lengths.cases import GRAIN, pool, workload
from tests.small import small_problem


@cache
def solved() -> LengthsResult:
    """Short sequences and two long ones, where one strategy is dear."""
    return solve_lengths(small_problem(memory_gib=40), workload(), GRAIN, 2, 0.02, 20.0, "highs")


def test_every_sequence_runs_once_within_its_micro_batch() -> None:
    """Micro-batches of all groups hold the workload, and none more tokens than its strategy may."""
    steps, held = workload(), Counter[int]()
    for group in solved().groups:
        mine = Counter(length for replica in group.micro_batches for one in replica for length in one)
        assert mine == dict(group.buckets)
        assert len(group.micro_batches) == group.plan.layout.dp
        assert max(sum(one) for replica in group.micro_batches for one in replica) <= group.micro_batch_tokens
        held += mine
    assert held == dict(zip(steps.lengths.tolist(), steps.counts.tolist(), strict=True))


def test_the_step_is_the_sum_of_its_parts() -> None:
    """Parameters are waited for, gradients hide behind groups, reductions and the finish follow."""
    result = solved()
    moved = {(one.source, one.target, one.what): one.time_s for one in result.switches}
    total, before = result.finish_s, result.home
    for position, group in enumerate(result.groups):
        total += moved.get((before, group.strategy, "parameters"), 0.0)
        hidden = moved.get((before, group.strategy, "gradients"), 0.0) if position else 0.0
        total += max(group.time_s, hidden) + group.reduce_s
        before = group.strategy
    total += moved.get((before, result.home, "gradients"), 0.0)
    assert total == pytest.approx(result.step_time_s, abs=1e-8)
    assert result.lower_bound_s <= result.step_time_s <= result.static.step_time_s
    assert result.static.lower_bound_s <= result.static.step_time_s
    assert result.speedup == result.static.step_time_s / result.step_time_s


def test_no_step_of_one_strategy_is_below_the_static_bound() -> None:
    """Every strategy packed at its exact time."""
    found = pool()
    for member, one in enumerate(found.members):
        if one.candidate.layout.pp > 2:
            continue
        packed = found.packed(member, found.load.counts, one.alone_grains)
        if packed is not None:
            total = packed.time_ns + found.reduce_ns(member) + found.finish_ns(member)
            assert total * 1e-9 >= solved().static.lower_bound_s - 1e-9, one.candidate.name


def test_no_step_of_two_strategies_is_below_the_bound() -> None:
    """Random pairs and random shares of the sequences, with switches that cost nothing."""
    found, random = pool(), np.random.default_rng(7)
    several = [
        member for member, one in enumerate(found.members) if one.beside_grains and one.candidate.layout.pp == 1
    ]
    timed = 0
    for _ in range(40):
        pair = random.choice(several, 2, replace=False)
        share = random.integers(0, found.load.counts + 1)
        parts = [
            found.packed(int(member), held, found.members[member].beside_grains)
            for member, held in zip(pair, (share, found.load.counts - share), strict=True)
            if held.any()
        ]
        if None in parts:
            continue
        total = sum(part.time_ns for part in parts if part is not None)
        total += sum(found.reduce_ns(int(member)) for member in pair) + min(found.finish_ns(int(m)) for m in pair)
        assert total * 1e-9 >= solved().lower_bound_s
        timed += 1
    assert timed > 5


def test_results_are_plain_data() -> None:
    """They can be pickled, and their dictionary has the documented keys."""
    result = solved()
    assert pickle.loads(pickle.dumps(result)) == result
    document = result.to_dict()
    assert {"groups", "order", "switches", "static", "speedup", "gap", "lower_bound_s"} <= set(document)
    assert {"strategy", "buckets", "micro_batches", "time_s"} <= set(document["groups"][0])
    assert set(document["static"]) >= {"step_time_s", "lower_bound_s"}


def test_bad_steps_are_refused() -> None:
    """Sequences that fit nowhere, too many of them, and jobs that groups do not know."""
    problem = small_problem(memory_gib=40)
    with pytest.raises(InfeasibleError, match="fits under no strategy"):
        solve_lengths(problem, workload_of([100_000_000], GRAIN), GRAIN)
    many = Workload(np.array([128]), np.array([MAX_SEQUENCES + 1]))
    with pytest.raises(InvalidInputError, match="8,193 sequences"):
        solve_lengths(problem, many, GRAIN)
    with pytest.raises(InvalidInputError, match="multiples"):
        solve_lengths(problem, workload_of([100]), GRAIN)
    unfused = small_problem(attention_kernel="unfused")
    with pytest.raises(InvalidInputError, match="flash"):
        solve_lengths(unfused, workload(), GRAIN)
    fixed = small_problem(space={"zero_stage": (3,)})
    with pytest.raises(InvalidInputError, match="zero_stage"):
        solve_lengths(fixed, workload(), GRAIN)
