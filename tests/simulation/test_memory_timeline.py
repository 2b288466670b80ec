"""Memory over time against the simulator's peak and against a count item by item."""

from __future__ import annotations

import numpy as np
import pytest

from milpplan.problem import Layout, Plan, Problem
from milpplan.simulation import LayoutColumns, plan_stages, simulate
from milpplan.simulation.layout_costs import layout_costs
from milpplan.simulation.pipeline.lanes import memory_timelines, pipeline_runs
from milpplan.units import NS_PER_S
from tests.amounts import first
from tests.simulation.cases import even_plan, problem_of, random_cases


@pytest.mark.parametrize(("problem", "plan"), first(6, random_cases(seed=21, count=20)))
def test_maximum_is_the_reported_peak(problem: Problem, plan: Plan) -> None:
    """The highest point of a rank's memory is its peak to the byte, and its parts at that point are those
    reported (the static part always)."""
    report = simulate(problem, plan)
    for stage, found in zip(report.stages, memory_timelines(problem, plan), strict=True):
        assert found.total_bytes.max() == stage.memory.peak_bytes
        assert found.static_bytes == stage.memory.peak_bytes - (
            stage.memory.activations_bytes + stage.memory.transient_bytes
        )


@pytest.mark.parametrize(("problem", "plan"), first(4, random_cases(seed=22, count=30)))
def test_shape_of_the_curve(problem: Problem, plan: Plan) -> None:
    """Time runs forward from 0 to the step time, nothing is negative, and a step ends as it began."""
    step_s = simulate(problem, plan).step_time_s
    for found in memory_timelines(problem, plan):
        assert np.all(np.diff(found.time_s) >= 0)
        assert (found.time_s[0], found.time_s[-1]) == (0, step_s)
        assert found.activations_bytes.min() == found.transient_bytes.min() == 0
        assert found.total_bytes[0] == found.total_bytes[-1] == found.static_bytes


@pytest.mark.parametrize(("problem", "plan"), first(8, random_cases(seed=23, count=30)))
def test_counted_item_by_item(problem: Problem, plan: Plan) -> None:
    """In the middle of every forward, backward and weight gradient a rank holds what the forwards begun and the
    backwards not yet ended by then keep, and what waits for weight gradients not yet ended."""
    times, layout = pipeline_runs(problem, plan)[0].timeline, plan.layout
    costs = layout_costs(problem, LayoutColumns.of([layout])).at(0)
    stages = plan_stages(costs, problem.model.layer_kinds, plan)
    items = [
        (times.forward_start_ns, times.forward_end_ns),
        (times.backward_start_ns, times.backward_end_ns),
        (times.weight_start_ns, times.weight_end_ns),
    ]
    for rank, found in enumerate(memory_timelines(problem, plan)):
        own = list(layout.rank_stages[rank])
        for starts, ends in items:
            middles = (starts[own] + ends[own]).ravel() / 2
            held = np.zeros(len(middles), dtype=np.int64)
            for j in own:
                begun, done = times.forward_start_ns[j], times.backward_end_ns[j]
                live = (begun[:, None] <= middles) & (done[:, None] > middles)
                held += live.sum(axis=0) * int(stages[j].kept_bytes[0])
                if times.weight_end_ns.size:
                    waits = (done[:, None] <= middles) & (times.weight_end_ns[j][:, None] > middles)
                    held += waits.sum(axis=0) * stages[j].deferred_bytes
            at = np.searchsorted(found.time_s, middles / NS_PER_S, side="right") - 1
            lasts = np.repeat((ends[own] - starts[own])[:, :1], ends.shape[1], axis=1).ravel() > 1
            assert np.array_equal(found.activations_bytes[at][lasts], held[lasts])


def test_one_rank_by_hand() -> None:
    """Two micro-batches on one GPU: kept bytes rise with each forward, the backward adds its workspace and
    frees both; nothing of the first micro-batch is left for the second."""
    problem = problem_of("megatron-22b")
    plan = even_plan(problem, Layout(global_batch_size=2))
    (found,) = memory_timelines(problem, plan)
    kept, transient = found.activations_bytes[1], found.transient_bytes[3]
    assert found.activations_bytes.tolist() == [0, kept, kept, kept, 0, kept, kept, kept, 0, 0]
    assert found.transient_bytes.tolist() == [0, 0, 0, transient, 0, 0, 0, transient, 0, 0]
    assert kept > 0
    assert transient > 0
