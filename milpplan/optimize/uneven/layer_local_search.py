"""Local search over splits: move a layer from a virtual stage that the critical path passes often to one that it
passes less. No proof rests on it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from milpplan.optimize.context import Counters
from milpplan.optimize.layout.cutting_planes import LayoutState
from milpplan.optimize.layout.rounding import fitted_plan
from milpplan.optimize.layout.stage_options import LayoutContext
from milpplan.problem.plan import Plan
from milpplan.simulation.layers.terms import ONCE, PAIRED, WORK
from milpplan.simulation.layout_columns import IntArray
from milpplan.simulation.pipeline.critical_path import CriticalPath
from milpplan.simulation.pipeline.step_graph import StepGraph
from milpplan.simulation.stages import StageMemo, durations, plan_stages

CANDIDATES = 24
"""Number of moves simulated at a time: those that shorten the critical path most."""
MAX_MOVES = 40
NO_CUTOFF_NS = 2**60
"""Cutoff that every plan meets."""
PROMISING = 1.005
"""Multiple of the fastest plan's step up to which moves are tried from a plan."""


def moved(context: LayoutContext, plan: Plan, deadline: float | None) -> Plan:
    """Improve a single plan by moves; returns the plan itself where no move helps."""
    costs = context.costs
    graph = StepGraph.of(context.layout, costs.transfer_ns, costs.barrier_ns)
    state = LayoutState(context, graph, [], NO_CUTOFF_NS, 0, 0.0, deadline, Counters())
    improve(state, plan, np.inf)
    assert state.best is not None
    return state.best[1]


def improve(state: LayoutState, plan: Plan, known_ns: float) -> int:
    """Move layers one by one while the plan gets faster, if its step is within ``PROMISING`` of ``known_ns``.

    The best plan is stored in the state, and its critical path joins the pool.

    Returns:
        The best plan's step time in nanoseconds.
    """
    memo = StageMemo(state.context.layout, state.context.costs)
    (best,), (path,) = _steps(state, [plan])
    for _ in range(MAX_MOVES if best < PROMISING * known_ns else 0):
        layers = np.array([stage.num_layers for stage in plan.virtual_stages])
        fitted = [fitted_plan(state.context, split, memo) for split in _moves(state, layers, path)]
        plans = [other for other in fitted if other is not None]
        if not plans or state.out_of_time():
            break
        steps, paths = _steps(state, plans)
        fastest = int(np.argmin(steps))
        if steps[fastest] >= best:
            break
        plan, best, path = plans[fastest], steps[fastest], paths[fastest]
    state.keep(best, plan)
    state.pool.append(path)
    return best


def fastest_of(state: LayoutState, splits: Sequence[IntArray]) -> Plan | None:
    """Return the fastest plan that fits among plans with given layers in every virtual stage, [J] each."""
    memo = StageMemo(state.context.layout, state.context.costs)
    fitted = [fitted_plan(state.context, split, memo) for split in splits]
    plans = [plan for plan in fitted if plan is not None]
    return plans[int(np.argmin(_steps(state, plans)[0]))] if plans else None


def _steps(state: LayoutState, plans: list[Plan]) -> tuple[list[int], list[CriticalPath]]:
    kinds = state.context.problem.model.layer_kinds
    points = [durations(plan_stages(state.context.costs, kinds, plan)) for plan in plans]
    paths, steps = state.paths_at(np.stack(points))
    return steps, paths


def _moves(state: LayoutState, layers: IntArray, path: CriticalPath) -> list[IntArray]:
    """Return splits with one layer moved, those first that shorten the path most."""
    context = state.context
    kind = int(np.bincount(context.problem.model.layer_kinds).argmax())
    ranks = [context.layout.rank_of(stage) for stage in range(context.num_stages)]
    duration = np.stack([context.costs.of_rank(rank).duration_ns[kind] for rank in ranks], axis=-1)
    paired = np.stack([context.costs.of_rank(rank).paired_ns[kind] for rank in ranks], axis=-1)
    stage_time_ns = (paired * path.counts[list(PAIRED)]).sum(axis=0)
    stage_time_ns += (duration[list(ONCE)] * path.counts[list(WORK)]).sum(axis=0)
    low, high = np.array(context.layer_bounds).T
    gain = (stage_time_ns[:, None] - stage_time_ns[None, :]).astype(np.float64)
    gain[layers <= low] = -1.0
    gain[:, layers >= high] = -1.0
    order = np.argsort(-gain, axis=None, kind="stable")[:CANDIDATES]
    splits = []
    for source, target in zip(*np.unravel_index(order, gain.shape), strict=True):
        if gain[source, target] > 0:
            split = layers.copy()
            split[source] -= 1
            split[target] += 1
            splits.append(split)
    return splits
