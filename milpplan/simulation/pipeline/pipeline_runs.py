"""The pipelines of a plan in time: one where all replicas are alike, else one for each node type.

Replicas of different make share their reductions, the norm and the update: a reduction starts when the last
replica is there and what its rank reduced before is done. The longest over the views (``replica_costs``) of each
of these moments is that moment of all pipelines together, since a maximum passes through sums and maxima.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from milpplan.problem.plan import Plan
from milpplan.problem.problem import Problem
from milpplan.simulation.layout_columns import IntArray
from milpplan.simulation.mixed_costs import RankCosts, costs_of
from milpplan.simulation.pipeline.step_graph import StepGraph, Term, Timeline, simulate_times
from milpplan.simulation.replica_costs import costs_of_replicas, view_plans
from milpplan.simulation.simulator import check_plan
from milpplan.simulation.stages import StageOptions, durations, plan_stages

SHARED_MOMENTS = ("gather_end_ns", "reduce_end_ns", "gradients_ready_ns")


@dataclass(frozen=True, slots=True, eq=False)
class PipelineRun:
    """One pipeline of a plan, on ``node_type`` (None: on all of them): problem and plan as it sees them, its
    constants and stages, durations [Term, J] and when everything happens."""

    node_type: int | None
    problem: Problem
    plan: Plan
    costs: RankCosts
    stages: tuple[StageOptions, ...]
    terms: IntArray
    timeline: Timeline


def pipeline_runs(problem: Problem, plan: Plan) -> tuple[PipelineRun, ...]:
    """The pipelines of one step that differ: one, or with replicas of different make one of each node type.

    Raises:
        IllegalPlanError: the plan cannot run.
    """
    check_plan(problem, plan)
    if not plan.layout.replica_micro_batches:
        return (_run(None, problem, plan, costs_of(problem, plan.layout)),)
    views = zip(costs_of_replicas(problem, plan.layout).views, view_plans(problem, plan), strict=True)
    return _together(
        [_run(number, view.problem, own, view.costs) for number, (view, (_, own)) in enumerate(views)]
    )


def _run(node_type: int | None, problem: Problem, plan: Plan, costs: RankCosts) -> PipelineRun:
    stages = tuple(plan_stages(costs, problem.model.layer_kinds, plan))
    graph = StepGraph.of(plan.layout, costs.transfer_ns, costs.barrier_ns)
    terms = durations(stages)
    return PipelineRun(node_type, problem, plan, costs, stages, terms, simulate_times(graph, terms))


def _together(runs: list[PipelineRun]) -> tuple[PipelineRun, ...]:
    """The runs with what they share at the time of the last."""
    lines = [run.timeline for run in runs]
    shared = {name: np.maximum.reduce([getattr(line, name) for line in lines]) for name in SHARED_MOMENTS}
    start, step = (max(getattr(line, name) for line in lines) for name in ("optimizer_start_ns", "step_time_ns"))
    found = []
    for run in runs:
        held = np.array([list(stages) for stages in run.plan.layout.rank_stages])
        finish = start + run.terms[Term.OPTIMIZER][held].sum(axis=1)
        moments = shared | {"optimizer_start_ns": start, "step_time_ns": step, "finish_ns": finish}
        found.append(replace(run, timeline=replace(run.timeline, **moments)))
    return tuple(found)
