"""Layouts that do nearly as well: against all plans of small problems."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from milpplan import Layout, Plan, Problem, Range, Space, simulate, solve
from milpplan.explain import NearBest
from milpplan.explain import overview as module
from milpplan.explain.overview import near_best, rule_of_thumb
from milpplan.optimize import fixed, with_job
from milpplan.optimize.bounds import uniform_plan
from milpplan.optimize.space.enumerate_layouts import layout_space
from tests.optimize.brute_force import brute_force
from tests.optimize.replica_problems import BOTH, best_of_replicas, brute_force_of_both, replica_problem
from tests.simulation.cases import problem_of
from tests.small import small_problem

NARROW = {
    "tp": (1, 2),
    "cp": (1,),
    "pp": (1, 2),
    "micro_batch_size": (1, 2),
    "zero_stage": (0, 1),
    "schedule": ("1f1b",),
}


def best_plan(problem: Problem) -> Plan:
    """The proved best plan."""
    plan = solve(problem).plan
    assert plan is not None
    return plan


def layouts_of(problem: Problem) -> list[Layout]:
    """All legal layouts."""
    space = layout_space(problem)
    return [space.at(row) for row in range(len(space))]


@pytest.mark.parametrize("within", [0.05, 0.3])
def test_uniform_neighbours_are_those_of_brute_force(within: float) -> None:
    """Of the uniform space all layouts whose best plan is near enough are found, and no other is left open."""
    problem = small_problem(space=NARROW)
    best = best_plan(problem)
    own = simulate(problem, best).step_time_ns
    expected: dict[Layout, float] = {}
    for layout in layouts_of(problem):
        times = [math.inf]
        for mode in problem.recompute_modes:
            stages, layers = layout.num_virtual_stages, problem.model.num_layers
            if layers - -(-layers // stages) * (stages - 1) >= 0:
                report = simulate(problem, uniform_plan(problem, layout, mode))
                times += [report.step_time_ns] if report.fits else []
        if layout != best.layout and min(times) <= own * (1 + within):
            expected[layout] = min(times) / own - 1
    found = near_best(problem, best, within, 30.0)
    assert {near.plan.layout: pytest.approx(near.excess) for near in found.plans} == expected
    assert found.most_layouts == len(expected)
    assert [near.excess for near in found.plans] == sorted(near.excess for near in found.plans)


@pytest.mark.long
def test_free_neighbours_are_near_and_the_rest_proved_far() -> None:
    """Of the free space every plan found is within, and a layout that is not counted has no plan within: its own
    proved best is further away."""
    problem, within = small_problem(space={"kind": "free", **NARROW}), 0.05
    best = best_plan(problem)
    own = simulate(problem, best).step_time_ns
    found = near_best(problem, best, within, 30.0)
    for near in found.plans:
        report = simulate(problem, near.plan)
        assert report.fits
        assert report.step_time_ns <= own * (1 + within)
        assert near.step_time_s == report.step_time_s
    near_layouts = {near.plan.layout for near in found.plans}
    others = [layout for layout in layouts_of(problem) if layout not in near_layouts | {best.layout}]
    assert len(others) + len(near_layouts) + 1 == found.legal_layouts
    within_reach = 0
    for layout in others:
        values = {name: getattr(layout, name) for name in Space.model_fields if hasattr(layout, name)}
        alone = solve(fixed(problem, values), any_chunks=False).report
        within_reach += alone is not None and alone.step_time_ns <= own * (1 + within)
    assert within_reach <= found.most_layouts - len(found.plans)


def test_neighbours_of_replicas_are_those_of_brute_force() -> None:
    """Where stages and replicas of different make compete, every neighbour found is one, and no more layouts are
    counted as possible than all that are not proved to be far."""
    problem = replica_problem(3, mixing=BOTH)
    best = brute_force_of_both(problem)
    assert best is not None
    found = near_best(problem, best.plan, 0.2, 20.0)
    near = {one.plan.layout: one.excess for one in found.plans}
    possible = 0
    for layout in layouts_of(problem):
        alone = (best_of_replicas if layout.replica_micro_batches else brute_force)(problem, [layout])
        within = alone is not None and layout != best.plan.layout and alone.value <= best.value * 1.2
        possible += within
        if layout in near:
            assert within
            assert alone is not None
            assert near[layout] >= alone.value / best.value - 1 - 1e-9
    assert 0 < len(near) <= possible <= found.most_layouts
    assert {bool(layout.replica_micro_batches) for layout in near} >= {True}


def test_without_time_bounds_alone_speak() -> None:
    """No second: what bounds leave is counted as undecided, never fewer than there are."""
    problem = small_problem(space=NARROW)
    best = best_plan(problem)
    quick, slow = near_best(problem, best, 0.2, 0.0), near_best(problem, best, 0.2, 30.0)
    assert quick.most_layouts >= slow.most_layouts == len(slow.plans) > 0
    assert module.WITHIN == 0.01


def test_ranges_are_narrowed_to_the_plan() -> None:
    """Of a job with a range of GPUs and batches those of the plan are asked about."""
    problem = small_problem(space=NARROW)
    best = best_plan(problem)
    many = with_job(problem, num_gpus=Range(minimum=2, maximum=8), global_batch_size=Range(minimum=4, maximum=8))
    found = near_best(many, best, 0.2, 30.0)
    assert {near.plan.layout.num_gpus for near in found.plans} == {4}
    assert len(found.plans) == len(near_best(problem, best, 0.2, 30.0).plans)


def test_the_rule_of_thumb_passes_over_degrees_that_cannot_run() -> None:
    """A model whose 15 heads no tp of the table divides has no plan by the rule, and no error."""
    model = problem_of("llama3-8b", "dgx-h100").model
    attention = model.kinds[0].attention.model_copy(update={"num_attention_heads": 15, "num_key_value_heads": 5})
    runs = tuple(run.model_copy(update={"attention": attention}) for run in model.layers)
    problem = problem_of(model.model_copy(update={"layers": runs}), "dgx-h100", num_gpus=16, global_batch_size=64)
    assert rule_of_thumb(problem) is None


def test_neighbours_get_what_the_rest_of_a_page_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A time limit is of everything: a clock that advances by a second for every launch file leaves less."""
    problem = small_problem(space=NARROW)
    plan, now, given = best_plan(problem), [0.0], list[float]()

    def exports(*_: object) -> tuple[()]:
        now[0] += 7.0
        return ()

    def near(problem: Problem, plan: Plan, within: float, time_limit_s: float, forbid: object) -> NearBest:
        given.append(time_limit_s)
        return NearBest(within, (), 0, 1)

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(module, "_exports", exports)
    monkeypatch.setattr(module, "near_best", near)
    for limit_s in (10.0, 7.0, 1.0):
        module.plan_overview(problem, plan, time_limit_s=limit_s)
    assert given == [3.0, 0.0, 0.0]
