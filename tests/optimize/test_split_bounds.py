"""Bounds of a known split against every plan of it, and what they see that the relaxation does not."""

from __future__ import annotations

import random

import numpy as np
import pytest

from milpplan import Layout, Problem, load_hardware, load_model, simulate
from milpplan.optimize import Counters
from milpplan.optimize.bounds import SplitBounds, uniform_plan
from milpplan.optimize.layout import LayoutContext, LayoutState, analytic_paths, mixture_bound
from milpplan.optimize.space.enumerate_layouts import layout_space
from milpplan.problem import Job
from milpplan.simulation import LayoutCosts, durations, plan_stages, usable_memory_bytes
from milpplan.simulation.layout_costs import layout_costs
from milpplan.simulation.pipeline.step_graph import CriticalPath, StepGraph, critical_path
from tests.amounts import few_or_many, long_but
from tests.optimize.brute_force import constants, costed_plans, time_and_peak
from tests.optimize.problems import problems, random_plan, with_memory

HIGH = 2**60


def setting_of(problem: Problem, layout: Layout, costs: LayoutCosts) -> LayoutContext:
    """Everything fixed about a layout."""
    return LayoutContext.of(problem, layout, costs, usable_memory_bytes(problem))


def paths_of(rng: random.Random, problem: Problem, context: LayoutContext, graph: StepGraph) -> list[CriticalPath]:
    """The analytic paths and critical paths of some plans."""
    plans = [random_plan(rng, problem, context.layout) for _ in range(4)]
    stages = [plan_stages(context.costs, problem.model.layer_kinds, plan) for plan in plans]
    found = [critical_path(graph, durations(held)) for held in stages]
    return [*analytic_paths(context.layout), *found]


@few_or_many(5, 12, problems())
def test_no_plan_of_a_split_is_faster(problem: Problem) -> None:
    """Of every split of every layout of a small problem, no plan that fits undercuts the bound,
    and a cutoff below the bound is passed."""
    rng, columns = random.Random(len(problem.model.layers)), layout_space(problem).columns
    capacity, table = usable_memory_bytes(problem), layout_costs(problem, columns)
    for row in range(len(columns)):
        layout = columns.at(row)
        context = setting_of(problem, layout, table.at(row))
        graph = StepGraph.of(layout, context.costs.transfer_ns, context.costs.barrier_ns)
        bounds = SplitBounds(context, paths_of(rng, problem, context, graph))
        plans = costed_plans(problem, layout, context.costs)
        for split in np.unique(plans.layers, axis=0):
            (bound,) = bounds.bounds_ns([split], HIGH)
            fits = (plans.layers == split).all(axis=1) & (plans.peak_bytes <= capacity)
            assert bound <= plans.step_time_ns[fits].min(initial=HIGH + 1)
            assert bounds.with_paths(bounds.paths).bounds_ns([split], bound - 2) == [bound - 1]


@few_or_many(5, 30, problems())
def test_no_plan_of_a_split_is_faster_than_a_mean_of_paths(problem: Problem) -> None:
    """Whatever paths fictitious play adds below the best plan of a split, their mean length is not above its
    step."""
    columns = layout_space(problem).columns
    capacity, table = usable_memory_bytes(problem), layout_costs(problem, columns)
    for row in range(len(columns)):
        layout = columns.at(row)
        context = setting_of(problem, layout, table.at(row))
        paths = analytic_paths(layout)
        plans = costed_plans(problem, layout, context.costs)
        for split in np.unique(plans.layers, axis=0):
            fits = (plans.layers == split).all(axis=1) & (plans.peak_bytes <= capacity)
            if fits.any():
                best = int(plans.step_time_ns[fits].min())
                state = LayoutState(context, list(paths), best - 1, 0, 0.0, None, Counters())
                bounds = SplitBounds(context, paths)
                assert mixture_bound(state, bounds, tuple(split.tolist())) <= best


def interleaved(vpp: int = 2) -> tuple[Problem, Layout]:
    """Llama-3 8B on 8 pipeline ranks."""
    model, hardware = load_model("llama3-8b"), load_hardware("dgx-a100-40")
    job = Job(num_gpus=64, global_batch_size=64, sequence_length=8192)
    layout = Layout(
        tp=4, pp=8, dp=2, vpp=vpp, global_batch_size=64, sequence_parallel=True, schedule="interleaved",
        zero_stage=1, overlap_grad_reduce=True, overlap_param_gather=True,
    )  # fmt: skip
    return Problem(model=model, hardware=hardware, job=job), layout


@pytest.mark.parametrize("count", long_but((10,), (10, 25)))
@pytest.mark.parametrize("vpp", [2, 4])
def test_random_plans_of_a_real_model_keep_the_bound(count: int, vpp: int) -> None:
    """On devices that a plan fills to the last byte the bound of its split is not above its step."""
    problem, layout = interleaved(vpp)
    rng, costs = random.Random(vpp), constants(problem, layout)
    graph = StepGraph.of(layout, costs.transfer_ns, costs.barrier_ns)
    for _ in range(count):
        plan = random_plan(rng, problem, layout)
        stages = plan_stages(costs, problem.model.layer_kinds, plan)
        path = critical_path(graph, durations(stages))
        step = int(path.length_ns(durations(stages), graph.transfer_ns, graph.barrier_ns))
        tight = setting_of(with_memory(problem, time_and_peak(problem, costs, plan)[1]), layout, costs)
        split = [stage.num_layers for stage in plan.virtual_stages]
        assert SplitBounds(tight, [*analytic_paths(layout), path]).bounds_ns([split], HIGH)[0] <= step


def test_whole_recomputation_is_seen() -> None:
    """Memory that no plan without recomputation fits into costs whole replays; nothing fits into none."""
    problem, layout = interleaved()
    costs = constants(problem, layout)
    peak = simulate(problem, uniform_plan(problem, layout, "none")).peak_memory_bytes

    def bound(usable_bytes: int, cutoff_ns: int = HIGH) -> int:
        context = setting_of(with_memory(problem, usable_bytes), layout, costs)
        return SplitBounds(context, analytic_paths(layout)).bounds_ns([(2,) * 16], cutoff_ns)[0]

    without = bound(2**50)
    assert bound(peak) == without
    assert bound(peak * 7 // 10) > without
    assert bound(2**30) == HIGH + 1
    assert bound(2**50, without - 2) == without - 1


def test_fractions_of_layers_see_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory binds, the bound that lets fractions of layers be recomputed lies between the bound without
    memory and the bound of whole choices."""
    problem, layout = interleaved(4)
    costs = constants(problem, layout)
    peak = simulate(problem, uniform_plan(problem, layout, "none")).peak_memory_bytes

    def bound(usable_bytes: int) -> int:
        context = setting_of(with_memory(problem, usable_bytes), layout, costs)
        return SplitBounds(context, analytic_paths(layout)).bounds_ns([(1,) * 32], HIGH)[0]

    without, whole = bound(2**50), bound(peak * 7 // 10)
    monkeypatch.setattr(SplitBounds, "_replays", lambda *_: 0)
    assert without < bound(peak * 7 // 10) <= whole
    assert bound(peak) == without
