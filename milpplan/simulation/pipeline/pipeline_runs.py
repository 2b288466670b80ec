"""Timelines of the pipelines of a plan: a single pipeline if all replicas are alike, else one for each node type.

Heterogeneous replicas share their reductions, the norm and the update. A reduction starts when the last replica is
ready and the previous reduction of its rank is done. The time of such an event is its maximum over the views
(``replica_costs``), because a maximum passes through sums and maxima.
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
"""Fields of ``Timeline`` that heterogeneous replicas share."""


@dataclass(frozen=True, slots=True, eq=False)
class PipelineRun:
    """One pipeline of a plan with its timeline."""

    node_type: int | None
    """Node type of the pipeline; None: all node types."""
    problem: Problem
    """Problem as this pipeline sees it (``ReplicaView``)."""
    plan: Plan
    """Plan as this pipeline sees it."""
    costs: RankCosts
    stages: tuple[StageOptions, ...]
    terms: IntArray
    """Durations [Term, J] in nanoseconds."""
    timeline: Timeline


def pipeline_runs(problem: Problem, plan: Plan) -> tuple[PipelineRun, ...]:
    """Simulate the different pipelines of a step: a single pipeline, or one for each node type.

    Raises:
        IllegalPlanError: the plan cannot run.
    """
    check_plan(problem, plan)
    if not plan.layout.replica_micro_batches:
        return (_run(None, problem, plan, costs_of(problem, plan.layout)),)
    views = zip(costs_of_replicas(problem, plan.layout).views, view_plans(problem, plan), strict=True)
    return _synchronised(
        [_run(number, view.problem, view_plan, view.costs) for number, (view, (_, view_plan)) in enumerate(views)]
    )


def _run(node_type: int | None, problem: Problem, plan: Plan, costs: RankCosts) -> PipelineRun:
    """Simulate one pipeline by itself."""
    stages = tuple(plan_stages(costs, problem.model.layer_kinds, plan))
    graph = StepGraph.of(plan.layout, costs.transfer_ns, costs.barrier_ns)
    terms = durations(stages)
    return PipelineRun(node_type, problem, plan, costs, stages, terms, simulate_times(graph, terms))


def _synchronised(runs: list[PipelineRun]) -> tuple[PipelineRun, ...]:
    """Move the events that the runs share to the time of the last run."""
    timelines = [run.timeline for run in runs]
    shared = {name: np.maximum.reduce([getattr(line, name) for line in timelines]) for name in SHARED_MOMENTS}
    start, step = (
        max(getattr(line, name) for line in timelines) for name in ("optimizer_start_ns", "step_time_ns")
    )
    synchronised = []
    for run in runs:
        rank_stages = np.array([list(stages) for stages in run.plan.layout.rank_stages])
        finish = start + run.terms[Term.OPTIMIZER][rank_stages].sum(axis=1)
        moments = shared | {"optimizer_start_ns": start, "step_time_ns": step, "finish_ns": finish}
        synchronised.append(replace(run, timeline=replace(run.timeline, **moments)))
    return tuple(synchronised)
