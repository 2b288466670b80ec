"""Lower bounds of layouts with heterogeneous replicas: the larger of the views' bounds.

A step is the longest of its views (``simulation.replica_costs``). Each view is a step on one node type, whose
bounds (``closed_form``) hold for every plan that fits that type. A plan must fit all types.
"""

from __future__ import annotations

import numpy as np

from milpplan.optimize.bounds.closed_form import LayoutBounds, compute_bounds, layout_bounds
from milpplan.optimize.bounds.uniform_plans import UniformBounds, uniform_bounds
from milpplan.problem.problem import Problem
from milpplan.simulation.layout_columns import FloatArray, LayoutColumns
from milpplan.simulation.layout_costs import usable_memory_bytes
from milpplan.simulation.replica_costs import ReplicaTable, on_one_type, view_columns


def replica_compute_bounds(problem: Problem, columns: LayoutColumns, placed: bool = True) -> FloatArray:
    """Return ``closed_form.compute_bounds`` of the slower view, nanoseconds [n]."""
    types = range(len(problem.node_types))
    views = [compute_bounds(on_one_type(problem, t), view_columns(columns, t), placed) for t in types]
    return np.asarray(np.maximum.reduce(views))


def replica_bounds(problem: Problem, columns: LayoutColumns, costs: ReplicaTable) -> LayoutBounds:
    """Return ``closed_form.layout_bounds``: the slower view's time and the fuller view's memory."""
    parts = [
        layout_bounds(on_one_type(problem, t), view_columns(columns, t), table)
        for t, table in enumerate(costs.tables)
    ]
    return LayoutBounds(*_joined(problem, [(part.step_time_ns, part.memory_bytes) for part in parts]))


def replica_uniform_bounds(problem: Problem, columns: LayoutColumns, costs: ReplicaTable) -> UniformBounds:
    """Return ``uniform_plans.uniform_bounds``: the slower view's time and the fuller view's memory, with one
    recompute mode in both."""
    parts = [
        uniform_bounds(on_one_type(problem, t), view_columns(columns, t), table)
        for t, table in enumerate(costs.tables)
    ]
    return UniformBounds(*_joined(problem, [(part.step_time_ns, part.memory_bytes) for part in parts]))


def _joined(problem: Problem, views: list[tuple[FloatArray, FloatArray]]) -> tuple[FloatArray, FloatArray]:
    """Return the larger time and the larger memory; a view that does not fit its type counts as more than the
    largest capacity."""
    max_capacity = usable_memory_bytes(problem)
    memory = [
        np.where(bytes_ > hardware.usable_bytes, np.maximum(bytes_, max_capacity + 1.0), bytes_)
        for (_, bytes_), hardware in zip(views, problem.node_types, strict=True)
    ]
    return np.maximum.reduce([time for time, _ in views]), np.maximum.reduce(memory)
