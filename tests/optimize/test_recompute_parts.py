"""Spaces in which all virtual stages recompute alike: the optimum is that of brute force, the plans are alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from milpplan import Plan, Problem, solve
from milpplan.optimize.space import in_parts, recomputes_as_declared
from milpplan.optimize.space.enumerate_layouts import layout_space
from milpplan.simulation import host_capacity_bytes, usable_memory_bytes
from tests.amounts import long_but
from tests.optimize.brute_force import costed_layouts, deadline_ns, weight
from tests.optimize.problems import random_problem


def with_counts(problem: Problem, counts: str, **more: Any) -> Problem:
    """The problem with another rule for the counts of recomputed layers."""
    changes = {"recompute_counts": counts, **more}
    return problem.model_copy(update={"space": problem.space.model_copy(update=changes)})


def alike(counts: str, layers: Any, full: Any, selective: Any) -> Any:
    """Which rows [N, J] of counts are of one setting: worked out from the definition, setting by setting."""
    none = (full == 0) & (selective == 0)
    ok = none.all(axis=1) | (full == layers).all(axis=1) | (selective == layers).all(axis=1)
    if counts == "block":
        for block in range(1, int(layers.max()) + 1):
            ok |= (full == np.minimum(block, layers)).all(axis=1) & (selective == 0).all(axis=1)
    return ok


def least(problem: Problem, counts: str) -> float | None:
    """The least objective of all alike plans that fit; None without any."""
    columns = layout_space(problem).columns
    best = None
    for costed in costed_layouts(problem, [columns.at(row) for row in range(len(columns))]):
        ok = (costed.peak_bytes <= usable_memory_bytes(problem)) & (
            costed.host_bytes <= host_capacity_bytes(problem)
        )
        ok &= costed.step_time_ns <= deadline_ns(problem, costed.layout)
        ok &= alike(counts, costed.layers, costed.full, costed.selective)
        if ok.any():
            value = int(costed.step_time_ns[ok].min()) * weight(problem, costed.layout)
            best = value if best is None else min(best, value)
    return best


def check(seed: int, counts: str) -> tuple[bool, bool]:
    """The optimum of a seed's problem is that of brute force; whether there is one, and whether it costs more than
    with any counts."""
    problem = with_counts(random_problem(seed), "any", recompute=("none", "selective", "full"))
    best = least(problem, counts)
    restricted = with_counts(problem, counts)
    assert in_parts(restricted)
    result = solve(restricted, gap=1e-12)
    if best is None:
        assert result.status == "infeasible"
        return False, False
    assert result.plan is not None
    assert result.report is not None
    assert result.report.step_time_ns * weight(problem, result.plan.layout) == pytest.approx(best, rel=1e-12)
    assert recomputes_as_declared(restricted, result.plan)
    bound = result.objective_bound
    assert bound is not None
    assert result.objective is not None
    assert bound <= result.objective * (1 + 1e-12)
    free = least(problem, "block") if counts == "alike" else None
    return True, free is not None and free < best


@pytest.mark.parametrize("count", long_but((3,), (3, 5)))
@pytest.mark.parametrize("counts", long_but(("block",), ("alike", "block")))
def test_optimum_is_that_of_brute_force(count: int, counts: str) -> None:
    """On random problems ``solve`` finds the best plan with one recompute setting, or proves that none fits."""
    found = [check(seed, counts) for seed in range(7000, 7000 + count)]
    assert any(there for there, _ in found)


@pytest.mark.long
@pytest.mark.parametrize("counts", ["alike", "block"])
@pytest.mark.parametrize("first", range(7100, 7300, 20))
def test_optimum_is_that_of_brute_force_often(counts: str, first: int) -> None:
    """The same on 200 more."""
    for seed in range(first, first + 20):
        check(seed, counts)


def test_blocks_can_be_worth_it() -> None:
    """Where memory lets a few layers of each stage go without recomputation, a block beats all or nothing."""
    problem = with_counts(random_problem(7000), "any", recompute=("none", "full"))
    plans: list[Plan] = []
    for seed in range(7000, 7040):
        problem = with_counts(random_problem(seed), "any", recompute=("none", "full"))
        best, blocks = least(problem, "alike"), least(problem, "block")
        if blocks is None or (best is not None and blocks >= best):
            continue
        plan = solve(with_counts(problem, "block"), gap=1e-12).plan
        assert plan is not None
        assert not recomputes_as_declared(with_counts(problem, "alike"), plan)
        plans.append(plan)
        if len(plans) == 2:
            return
    raise AssertionError("no seed has a problem in which a block helps")
