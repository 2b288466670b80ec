"""DualPipeV in the search: bounds, cuts and optima against every plan of small problems."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import numpy as np
import pytest

from milpplan import Space, load_hardware, load_model, solve
from milpplan.optimize.bounds import compute_bounds, layout_bounds, uniform_bounds, uniform_plan
from milpplan.optimize.layout import analytic_paths
from milpplan.optimize.space.enumerate_layouts import broken_rules, layout_space
from milpplan.problem import PAIRED_SCHEDULES, SCHEDULES, Job, Layout, Problem
from milpplan.simulation import durations, plan_stages
from milpplan.simulation.layout_costs import layout_costs
from milpplan.simulation.pipeline.step_graph import StepGraph, critical_path
from tests.amounts import long_but
from tests.optimize.bounded import bounded_layouts
from tests.optimize.brute_force import (
    brute_force,
    naive_layouts,
    time_and_peak,
    weight,
    with_more_overlap,
)
from tests.optimize.mixed_problems import mixed_problem
from tests.optimize.problems import random_plan, random_problem, with_memory
from tests.optimize.test_monolith import assert_monolith_agrees
from tests.optimize.test_optimality import check

FAMILIES = ("moe", "mixed", "dense", "mla")
RIVALS = ("dualpipe-v", "zb-v", "interleaved")


@cache
def small(seed: int, kind: str = "free", schedules: tuple[str, ...] = RIVALS) -> Problem | None:
    """A random problem with at least 8 sequences a step and DualPipeV among its layouts; None where the seed has
    none."""
    rng = random.Random(seed)
    family = rng.choice(FAMILIES)
    job: dict[str, Any] = {
        "num_gpus": rng.choice((2, 4, 4, 8)),
        "global_batch_size": rng.choice((8, 12, 16, 24)),
        "sequence_length": 512,
    }
    try:
        problem = random_problem(seed, kind, family, schedules, **job)
    except AssertionError:
        return None
    return problem if layout_space(problem).columns.runs_pairs.any() else None


def several(first: int, count: int, **options: Any) -> list[Problem]:
    """So many problems, of the seeds from ``first`` on."""
    found: list[Problem] = []
    for seed in range(first, first + 40 * count):
        problem = small(seed, **options)
        if problem is not None:
            found.append(problem)
        if len(found) == count:
            return found
    raise AssertionError("too few seeds give a problem")


def test_bounds_hold_for_every_plan() -> None:
    """No plan that fits is faster, and none is smaller, than its layout's bounds; they are no formality, nor are
    pairs."""
    shares, hidden = [], 0
    for problem in several(0, 8):
        for one in bounded_layouts(problem):
            if one.share is not None and one.layout.schedule in PAIRED_SCHEDULES:
                shares.append(one.share)
                hidden += bool((one.costs.paired_ns < 0.95 * one.costs.duration_ns[:, :2]).any())
    assert len(shares) > 15
    assert np.mean(shares) > 0.6
    assert hidden > 5


@pytest.mark.parametrize("count", long_but((3,), (3, 5)))
@pytest.mark.parametrize("name", ["gpt3-175b", "deepseek-v3"])
def test_bounds_and_paths_hold_for_real_models(count: int, name: str) -> None:
    """Random plans of real models, on devices that they fill to the last byte, keep the bounds of their layout,
    its analytic paths and the critical paths of each other."""
    model, rng = load_model(name), random.Random(9)
    job = Job(num_gpus=256, global_batch_size=512, sequence_length=model.default_sequence_length)
    space = Space(schedule=("dualpipe-v",), interleaved_layers="any")
    problem = Problem(model=model, hardware=load_hardware("dgx-h100"), job=job, space=space)
    columns = layout_space(problem).columns
    assert columns.runs_pairs[columns.pp > 1].all()
    fitting = np.flatnonzero((columns.pp > 1) & (columns.num_virtual_stages * columns.num_micro_batches <= 1024))
    for row in rng.sample(fitting.tolist(), count):
        one = columns.take(np.array([row]))
        layout, table = one.at(0), layout_costs(problem, one)
        costs, kinds = table.at(0), model.layer_kinds
        graph = StepGraph.of(layout, costs.transfer_ns, costs.barrier_ns)
        plans = [random_plan(rng, problem, layout) for _ in range(3)]
        matrices = [durations(plan_stages(costs, kinds, plan)) for plan in plans]
        paths = (*analytic_paths(layout), *(critical_path(graph, matrix) for matrix in matrices))
        for plan, matrix in zip(plans, matrices, strict=True):
            step_ns, peak = time_and_peak(problem, costs, plan)
            bounds = layout_bounds(with_memory(problem, peak), one, table)
            assert bounds.memory_bytes[0] <= peak
            assert bounds.step_time_ns[0] <= step_ns
            assert compute_bounds(problem, one)[0] <= step_ns
            for path in paths:
                assert path.length_ns(matrix, graph.transfer_ns, graph.barrier_ns) <= step_ns


@pytest.mark.long
def test_uniform_bounds_and_optima_hold() -> None:
    """Uniform plans take at least their bounds in time and memory, and the best of all is found."""
    chosen = []
    for problem in several(302, 5, kind="uniform", schedules=("dualpipe-v",)):
        columns = layout_space(problem).columns
        costs = layout_costs(problem, columns)
        bounds = uniform_bounds(problem, columns, costs)
        for row in range(len(columns)):
            for index, mode in enumerate(problem.space.recompute):
                step, peak = time_and_peak(problem, costs.at(row), uniform_plan(problem, columns.at(row), mode))
                assert bounds.step_time_ns[row, index] <= step
                assert bounds.memory_bytes[row, index] <= peak
        best, result = brute_force(problem), solve(problem, gap=0.0)
        assert (best is None) == (result.status == "infeasible")
        if best is not None:
            assert result.plan is not None
            assert result.report is not None
            value = result.report.step_time_ns * weight(problem, result.plan.layout)
            assert value == pytest.approx(best.value, rel=1e-12)
            chosen.append(result.plan.layout.schedule)
    assert chosen.count("dualpipe-v") > 1


@pytest.mark.parametrize("backend", long_but(("auto",), ("cpsat", "cbc", "highs", "auto")))
def test_optimum_is_that_of_brute_force(backend: str) -> None:
    """With all schedules, or its nearest rivals, ``solve`` finds the best of all plans, or proves that none fits:
    no better schedule is left unused."""
    number = ("cpsat", "cbc", "highs", "auto").index(backend)
    for schedules in (RIVALS, SCHEDULES):
        for problem in several(400 + 40 * number, 1, schedules=schedules):
            check(problem, backend)


def test_each_rival_is_the_best_somewhere() -> None:
    """The best of all plans is one of DualPipeV in some problems and one of another schedule in others."""
    best = [brute_force(problem) for problem in several(0, 8)]
    names = [found.plan.layout.schedule for found in best if found is not None]
    assert names.count("dualpipe-v") > 2
    assert len(set(names)) > 1


@pytest.mark.long
def test_monolith_agrees() -> None:
    """The one program over all layouts has the optimum of brute force."""
    assert_monolith_agrees(several(500, 12), 2)


def test_layouts_have_two_micro_batches_a_stage() -> None:
    """All layouts of DualPipeV have two chunks a rank and at least 2 P micro-batches; of all that are legal those
    are left out alone that have a twin with more overlap."""
    refused = 0
    for problem in several(0, 6):
        found = layout_space(problem)
        refused += found.rejected.get("pairs_need_two_micro_batches_per_stage", 0)
        layouts = {found.columns.at(row) for row in range(len(found.columns))}
        paired = {layout for layout in layouts if layout.schedule == "dualpipe-v"}
        assert paired
        assert all(layout.vpp == 2 and layout.num_micro_batches >= 2 * layout.pp for layout in paired)
        for layout in set(naive_layouts(problem)) - layouts:
            twins = with_more_overlap(layout)
            assert layout.pp == 1 or any(twin in layouts for twin in twins)
    assert refused > 0


def test_an_infeasible_tree_of_free_splits_ends() -> None:
    """Where relaxations leave layers unplaced and no plan fits, branching narrows its nodes until none is left.
    (It took the same node again and again.)"""
    problem = small(40)
    assert problem is not None
    assert problem.interleaved_layers == "any"
    for name in ("zb-v", "dualpipe-v"):
        space = problem.space.model_copy(update={"schedule": (name,)})
        result = solve(problem.model_copy(update={"space": space}), gap=0.0, time_limit_s=20)
        assert result.status == "infeasible"


def test_mixed_clusters_have_no_pairs() -> None:
    """Their bounds count all work of a rank as if nothing ran beside it, so the schedule is refused by name."""
    problem = mixed_problem(0)
    space = problem.space.model_copy(update={"schedule": ("1f1b", "dualpipe-v"), "vpp": None, "pp": None})
    found = layout_space(problem.model_copy(update={"space": space}))
    assert not found.columns.runs_pairs.any()
    paired = Layout(pp=2, vpp=2, schedule="dualpipe-v", global_batch_size=8)
    assert "pairs_need_one_node_type" in broken_rules(problem, paired)
    assert "pairs_need_one_node_type" not in broken_rules(small(2) or problem, paired)
