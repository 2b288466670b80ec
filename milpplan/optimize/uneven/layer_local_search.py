"""Better plans by small moves: a layer goes from a virtual stage that the critical path passes often to one that
it passes less. No proof rests on it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from milpplan.optimize.counters import Counters
from milpplan.optimize.layout.cutting_planes import LayoutState
from milpplan.optimize.layout.rounding import fitted_plan
from milpplan.optimize.layout.stage_options import LayoutContext
from milpplan.problem.plan import Plan
from milpplan.simulation.layers.layer_time import ONCE
from milpplan.simulation.layers.terms import PAIRED, WORK
from milpplan.simulation.layout_columns import IntArray
from milpplan.simulation.pipeline.critical_path import CriticalPath
from milpplan.simulation.pipeline.step_graph import StepGraph
from milpplan.simulation.stages import StageMemo, durations, plan_stages

CANDIDATES = 24
"""Moves simulated at a time: those that shorten the critical path most."""
MAX_MOVES = 40
NO_CUTOFF_NS = 2**60
"""A cutoff that every plan meets."""
PROMISING = 1.005
"""Times the fastest plan known: plans from which moves are tried."""


def moved(context: LayoutContext, plan: Plan, deadline: float | None) -> Plan:
    """``improve`` of a single plan; the plan itself where no move helps."""
    costs = context.costs
    graph = StepGraph.of(context.layout, costs.transfer_ns, costs.barrier_ns)
    state = LayoutState(context, graph, [], NO_CUTOFF_NS, 0, 0.0, deadline, Counters())
    improve(state, plan, np.inf)
    assert state.best is not None
    return state.best[1]


def improve(state: LayoutState, plan: Plan, known_ns: float) -> int:
    """Move layers one by one while that makes the plan faster, if it is within ``PROMISING`` of ``known_ns``; the
    best one counts for the attempt, and its critical path joins the pool. Returns its step time in nanoseconds."""
    memo = StageMemo(state.context.layout, state.context.costs)
    (best,), (path,) = _steps(state, [plan])
    for _ in range(MAX_MOVES if best < PROMISING * known_ns else 0):
        layers = np.array([stage.num_layers for stage in plan.virtual_stages])
        fitted = [fitted_plan(state.context, split, memo) for split in _moves(state, layers, path)]
        plans = [other for other in fitted if other is not None]
        if not plans or state.out_of_time():
            break
        steps, paths = _steps(state, plans)
        first = int(np.argmin(steps))
        if steps[first] >= best:
            break
        plan, best, path = plans[first], steps[first], paths[first]
    state.keep(best, plan)
    state.pool.append(path)
    return best


def fastest_of(state: LayoutState, splits: Sequence[IntArray]) -> Plan | None:
    """The fastest of the plans that fit with given layers in every virtual stage, [J] each."""
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
    """Splits with one layer moved, those first that shorten the path most."""
    context = state.context
    kind = int(np.bincount(context.problem.model.layer_kinds).argmax())
    ranks = [context.layout.rank_of(stage) for stage in range(context.num_stages)]
    duration = np.stack([context.costs.of_rank(rank).duration_ns[kind] for rank in ranks], axis=-1)
    paired = np.stack([context.costs.of_rank(rank).paired_ns[kind] for rank in ranks], axis=-1)
    dear = (paired * path.counts[list(PAIRED)]).sum(axis=0)
    dear += (duration[list(ONCE)] * path.counts[list(WORK)]).sum(axis=0)
    least, most = np.array(context.layer_bounds).T
    gain = (dear[:, None] - dear[None, :]).astype(np.float64)
    gain[layers <= least] = -1.0
    gain[:, layers >= most] = -1.0
    order = np.argsort(-gain, axis=None, kind="stable")[:CANDIDATES]
    splits = []
    for source, target in zip(*np.unravel_index(order, gain.shape), strict=True):
        if gain[source, target] > 0:
            split = layers.copy()
            split[source] -= 1
            split[target] += 1
            splits.append(split)
    return splits
