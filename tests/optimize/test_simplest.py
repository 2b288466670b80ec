"""Within the tolerance the answer is the simplest plan: still proved, and the fastest is kept beside it."""

from __future__ import annotations

import numpy as np
import pytest

from milpplan import Plan, PlanResult, SolveOptions, simulate, solve
from milpplan.optimize import untested_terms
from milpplan.optimize.search.simplest import SIMULATED, Simplicity, searched_gap, simplicity
from milpplan.problem import Problem
from milpplan.simulation import usable_memory_bytes
from tests.amounts import first, long_but
from tests.optimize.brute_force import brute_force, costed_layouts, deadline_ns, weight
from tests.optimize.problems import random_problem
from tests.small import small_problem

GAP = 0.05
"""Wide enough that many plans of small problems lie within it."""


def order(problem: Problem, plan: Plan) -> Simplicity:
    """The simplicity of a plan with the shipped table of measured runs."""
    return simplicity(plan, untested_terms(problem))


def value_of(problem: Problem, plan: Plan) -> float:
    """The objective of a plan, in nanoseconds of the largest batch."""
    return simulate(problem, plan).step_time_ns * weight(problem, plan.layout)


def check(problem: Problem, result: PlanResult, gap: float) -> None:
    """The plan is within the gap of the optimum, the bound holds, and plan and fastest plan are what they say."""
    best = brute_force(problem)
    if best is None:
        assert result.status == "infeasible"
        return
    assert result.plan is not None
    assert result.report == simulate(problem, result.plan)
    assert result.report.fits
    assert result.objective is not None
    assert result.objective_bound is not None
    value, scale = value_of(problem, result.plan), result.objective / value_of(problem, result.plan)
    assert result.objective_bound <= best.value * scale * (1 + 1e-12)
    assert result.gap == pytest.approx(1 - result.objective_bound / result.objective, abs=1e-12)
    assert result.status == "optimal"
    assert result.gap <= gap * (1 + 1e-9)
    assert value * (1 - gap) <= best.value * (1 + 1e-9)
    if result.fastest is not None:
        other = result.fastest
        faster = simulate(problem, other.plan)
        assert faster.fits
        assert faster.step_time_s == other.step_time_s
        assert value_of(problem, other.plan) < value
        assert other.saved_fraction == pytest.approx(1 - value_of(problem, other.plan) / value)
        assert order(problem, result.plan) < order(problem, other.plan)


def within(problem: Problem, result: PlanResult) -> list[tuple[float, Plan]]:
    """All plans of the explored layouts that fit and have an objective within the gap of the bound."""
    assert result.layouts is not None
    assert result.objective is not None
    assert result.objective_bound is not None
    scale = result.objective / value_of(problem, result.plan) if result.plan else 0.0
    limit = result.objective_bound / scale / (1 - GAP)
    layouts = [result.layouts.space.at(int(row)) for row in result.layouts.rows]
    plans = []
    for costed in costed_layouts(problem, layouts):
        values = costed.step_time_ns * weight(problem, costed.layout)
        fits = costed.peak_bytes <= usable_memory_bytes(problem)
        in_time = costed.step_time_ns <= deadline_ns(problem, costed.layout)
        rows = np.flatnonzero(fits & in_time & (values <= limit)).tolist()
        plans += [(float(values[row]), costed.plan(row)) for row in rows]
    return plans


@pytest.mark.parametrize("count", long_but((6,), (6, 60)))
def test_no_simpler_uniform_plan_is_left_out(count: int) -> None:
    """In the uniform space no plan of an explored layout within the gap is simpler than the answer, nor as simple
    and faster, wherever fewer plans than may be simulated come before it."""
    chosen = 0
    for seed in range(count):
        problem = random_problem(seed, kind="uniform")
        result = solve(problem, gap=GAP)
        check(problem, result, GAP)
        if result.plan is None:
            continue
        keys = sorted((order(problem, plan), value) for value, plan in within(problem, result))
        own = order(problem, result.plan), value_of(problem, result.plan)
        assert len(keys) <= SIMULATED or own <= keys[SIMULATED]
        # None where bounds of groups alone proved the first plan, so that no layout was explored.
        if 0 < len(keys) <= SIMULATED:
            assert own[0] == keys[0][0]
            assert own[1] == pytest.approx(keys[0][1], rel=1e-12)
        chosen += result.fastest is not None
    assert chosen > 0


@pytest.mark.parametrize("backend", first(1, ("cpsat", "cbc")))
@pytest.mark.parametrize("count", long_but((4,), (4, 40)))
def test_the_answer_of_the_free_space_is_proved(backend: str, count: int) -> None:
    """In the free space the answer is within the gap of brute force, and no plan that the search kept and that is
    within the gap is simpler."""
    for seed in range(count):
        problem = random_problem(500 + seed)
        result = solve(problem, gap=GAP, backend=backend)
        check(problem, result, GAP)
        if result.plan is None or result.objective_bound is None or result.objective is None:
            continue
        scale = result.objective / value_of(problem, result.plan)
        for plan in result.runners_up:
            if value_of(problem, plan) * scale * (1 - GAP) <= result.objective_bound:
                assert order(problem, plan) >= order(problem, result.plan)


def test_the_fastest_plan_is_kept_on_request() -> None:
    """Without the choice, and with a gap of 0, the answer is the fastest plan found, and no other is named."""
    for seed in range(4):
        problem = random_problem(seed, kind="uniform")
        for result in (solve(problem, gap=GAP, simplest=False), solve(problem, gap=0.0)):
            assert result.fastest is None
            assert result.plan is None or all(
                value_of(problem, other) >= value_of(problem, result.plan) for other in result.runners_up
            )


def test_the_order_names_what_is_simple() -> None:
    """Terms without a measured run count first, then sharding, recomputation, chunks and switches."""
    problem = small_problem()
    plan = solve(problem, simplest=False).plan
    assert plan is not None
    own = simplicity(plan, lambda _: 0)
    for changed, place in (({"zero_stage": 3}, 1), ({"vpp": plan.layout.vpp + 1}, 3), ({"tp_overlap": "ring"}, 4)):
        other = plan.model_copy(update={"layout": plan.layout.model_copy(update=changed)})
        assert simplicity(other, lambda _: 0)[place] > own[place]
    assert simplicity(plan, lambda _: 1) > own


def test_the_search_leaves_room_for_the_choice() -> None:
    """The proof aims at half of a wide gap, and at the whole of a narrow one."""
    assert searched_gap(1e-3) == 5e-4
    assert searched_gap(1e-4) == 1e-4
    assert SolveOptions().gap == 1e-3


@pytest.mark.parametrize("gap", long_but((7e-3,), (1e-4, 3e-4, 1e-3, 7e-3, 0.1, 0.3, 0.999)))
def test_any_gap_gives_an_answer(gap: float) -> None:
    """Where the bound is the incumbent less the gap, rounding does not lose the incumbent."""
    for seed in range(6):
        check(random_problem(seed, kind="uniform"), solve(random_problem(seed, kind="uniform"), gap=gap), gap)
