"""Zero-bubble schedules in the search: bounds, cuts and optima against every plan of small problems."""

from __future__ import annotations

import random

import numpy as np
import pytest

from milpplan import Space, load_hardware, load_model, simulate, solve
from milpplan.optimize.bounds import compute_bounds, layout_bounds, uniform_bounds, uniform_plan
from milpplan.optimize.layout import analytic_paths
from milpplan.optimize.space.enumerate_layouts import layout_space
from milpplan.problem import SCHEDULES, V_SCHEDULES, Job, Problem
from milpplan.simulation import durations, plan_stages, usable_memory_bytes
from milpplan.simulation.layout_costs import layout_costs
from milpplan.simulation.pipeline.step_graph import StepGraph, critical_path
from tests.amounts import long_but
from tests.optimize.bounded import bounded_layouts
from tests.optimize.brute_force import (
    brute_force,
    costed_plans,
    naive_layouts,
    time_and_peak,
    weight,
    with_more_overlap,
)
from tests.optimize.problems import random_plan, random_problem, with_memory
from tests.optimize.test_execution import with_execution
from tests.optimize.test_monolith import assert_monolith_agrees
from tests.optimize.test_optimality import check

NEW = ("zb-h1", "zb-v")


def small(seed: int, **options: object) -> Problem:
    """A random problem whose space has the new schedules, and sometimes 1F1B."""
    schedules = NEW if seed % 3 else ("1f1b", "interleaved", *NEW)
    return random_problem(seed, schedules=schedules, **options)


@pytest.mark.parametrize(("count", "least"), [(8, 2), pytest.param(14, 5, marks=pytest.mark.long)])
def test_bounds_hold_for_every_plan(count: int, least: int) -> None:
    """No plan that fits is faster, and none is smaller, than its layout's bounds; they are no formality."""
    shares: dict[str, list[float]] = {name: [] for name in SCHEDULES}
    for seed in range(count):
        problem = small(seed)
        for one in bounded_layouts(problem):
            if one.share is not None:
                shares[one.layout.schedule].append(one.share)
    for name in NEW:
        assert len(shares[name]) > least
        assert np.mean(shares[name]) > 0.6


@pytest.mark.parametrize("count", long_but((4,), (4, 8)))
@pytest.mark.parametrize("name", ["gpt3-175b", "deepseek-v3"])
def test_bounds_hold_for_real_models(count: int, name: str) -> None:
    """Random plans of real models, on devices that they fill to the last byte, keep the bounds of their layout."""
    model, rng = load_model(name), random.Random(8)
    job = Job(num_gpus=256, global_batch_size=256, sequence_length=model.default_sequence_length)
    hardware = load_hardware("dgx-h100")
    problem = Problem(model=model, hardware=hardware, job=job, space=Space(schedule=NEW, interleaved_layers="any"))
    columns = layout_space(problem).columns
    tried = 0
    while tried < count:
        row = np.array([rng.randrange(len(columns))])
        one = columns.take(row)
        layout = one.at(0)
        if layout.pp == 1 or layout.num_virtual_stages * layout.num_micro_batches > 2048:
            continue
        tried += 1
        costs = layout_costs(problem, one)
        for _ in range(2):
            step_ns, peak = time_and_peak(problem, costs.at(0), random_plan(rng, problem, layout))
            bounds = layout_bounds(with_memory(problem, peak), one, costs)
            assert bounds.memory_bytes[0] <= peak
            assert bounds.step_time_ns[0] <= step_ns
            assert compute_bounds(problem, one)[0] <= step_ns


def test_uniform_bounds_hold() -> None:
    """Uniform plans take at least their bounds in time and memory."""
    for seed in range(10):
        problem = small(seed, kind="uniform")
        columns = layout_space(problem).columns
        costs = layout_costs(problem, columns)
        bounds = uniform_bounds(problem, columns, costs)
        for row in range(len(columns)):
            for index, mode in enumerate(problem.space.recompute):
                step, peak = time_and_peak(problem, costs.at(row), uniform_plan(problem, columns.at(row), mode))
                assert bounds.step_time_ns[row, index] <= step
                assert bounds.memory_bytes[row, index] <= peak


@pytest.mark.parametrize(("count", "least"), [(12, 3), pytest.param(20, 6, marks=pytest.mark.long)])
def test_paths_bound_every_plan_of_their_layout(count: int, least: int) -> None:
    """Analytic paths, and the critical paths of other plans, are never longer than a random plan's step."""
    rng, tried = random.Random(3), 0
    for seed in range(count):
        problem = small(seed)
        columns = layout_space(problem).columns
        row = rng.randrange(len(columns))
        layout = columns.at(row)
        if layout.schedule not in NEW:
            continue
        tried += 1
        costs = layout_costs(problem, columns).at(row)
        graph = StepGraph.of(layout, costs.transfer_ns, costs.barrier_ns)
        kinds = problem.model.layer_kinds
        plans = [random_plan(rng, problem, layout) for _ in range(4)]
        matrices = [durations(plan_stages(costs, kinds, plan)) for plan in plans]
        steps = [time_and_peak(problem, costs, plan)[0] for plan in plans]
        for path in (*analytic_paths(layout), *(critical_path(graph, matrix) for matrix in matrices)):
            for matrix, step in zip(matrices, steps, strict=True):
                assert path.length_ns(matrix, graph.transfer_ns, graph.barrier_ns) <= step
    assert tried > least


@pytest.mark.parametrize("backend", long_but(("highs",), ("cpsat", "cbc", "highs", "auto")))
def test_optimum_is_that_of_brute_force(backend: str) -> None:
    """``solve`` finds the best of all plans with all schedules, or proves that none fits."""
    chosen = set()
    for seed in range(100 * len(backend), 100 * len(backend) + 3):
        problem = small(seed)
        best, result = brute_force(problem), solve(problem, backend=backend, gap=0.0)
        if best is None:
            assert result.status == "infeasible"
            continue
        assert result.plan is not None
        assert result.report is not None
        assert result.report == simulate(problem, result.plan)
        value = result.report.step_time_ns * weight(problem, result.plan.layout)
        assert value == pytest.approx(best.value, rel=1e-12)
        assert result.gap is not None
        assert result.gap <= 1e-4
        chosen.add(result.plan.layout.schedule)
    assert chosen & set(NEW)


@pytest.mark.parametrize("count", long_but((3,), (3, 5)))
def test_uniform_optimum_is_that_of_brute_force(count: int) -> None:
    """The same in the uniform space."""
    for seed in range(count):
        problem = small(seed, kind="uniform")
        best, result = brute_force(problem), solve(problem, gap=0.0)
        assert (best is None) == (result.status == "infeasible")
        if best is not None:
            assert result.plan is not None
            assert result.report is not None
            value = result.report.step_time_ns * weight(problem, result.plan.layout)
            assert value == pytest.approx(best.value, rel=1e-12)


@pytest.mark.long
def test_monolith_agrees() -> None:
    """The one program over all layouts has the optimum of brute force."""
    assert_monolith_agrees((small(seed) for seed in range(200, 230)), 3)


def test_layouts_are_those_of_trying_everything() -> None:
    """Of all combinations those are legal that break no rule; a V schedule has two chunks a rank and any number of
    micro-batches."""
    seen = False
    for seed in range(8):
        problem = small(seed)
        columns = layout_space(problem).columns
        found = {columns.at(row) for row in range(len(columns))}
        legal = {layout for layout in naive_layouts(problem) if layout.pp > 1}
        assert {layout for layout in found if layout.pp > 1} <= legal
        for layout in legal - found:
            # What is legal and left out has a twin with more overlap.
            twins = with_more_overlap(layout)
            assert any(twin in found for twin in twins)
        turned = [layout for layout in found if layout.schedule in V_SCHEDULES]
        assert all(layout.vpp == 2 for layout in turned)
        seen = seen or any(layout.num_micro_batches % layout.pp for layout in turned)
    assert seen


@pytest.mark.long
def test_switches_of_the_execution_go_with_split_backwards() -> None:
    """With tiles or inputs that stay gathered open, the proved optimum over zero-bubble layouts with a pipeline is
    that of brute force, and no bound is above a plan."""
    for seed in (16, 24, 35, 50, 55):
        problem = with_execution(seed, ("tp_overlap", "gather_again"), schedules=NEW)
        check(problem, "auto")
        columns = layout_space(problem).columns
        costs = layout_costs(problem, columns)
        bounds = layout_bounds(problem, columns, costs)
        for row in range(len(columns)):
            plans = costed_plans(problem, columns.at(row), costs.at(row))
            fits = plans.peak_bytes <= usable_memory_bytes(problem)
            assert bounds.memory_bytes[row] <= plans.peak_bytes.min()
            assert not fits.any() or bounds.step_time_ns[row] <= plans.step_time_ns[fits].min()
        assert (columns.split_backward & (columns.pp > 1)).all()
        assert columns.any_of("tp_overlap") or not columns.gather_again.all()


def test_offloading_needs_a_whole_backward() -> None:
    """Of both opened together the space has each alone, and nothing of the two."""
    job = Job(num_gpus=4, global_batch_size=8, sequence_length=2048)
    space = Space(schedule=("1f1b", *NEW), pp=(2,), offload_optimizer=(False, True))
    problem = Problem(model=load_model("llama3-8b"), hardware=load_hardware("dgx-h100"), job=job, space=space)
    found = layout_space(problem)
    split, offloaded = found.columns.split_backward, found.columns.offload_optimizer
    assert split.any()
    assert offloaded.any()
    assert not (split & offloaded).any()
    assert found.rejected["offload_needs_whole_backward"] > 0


def test_default_space_has_no_new_schedule() -> None:
    """Nobody gets a schedule that was not asked for."""
    assert Space().schedule == ("1f1b", "interleaved")
