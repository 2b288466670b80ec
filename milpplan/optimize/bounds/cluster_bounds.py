"""Lower bounds of layouts in a cluster of several node types.

There are three bounds, of which the largest counts:

 - A cluster with the best constants over the types is no slower and holds no less (``MixedTable.best``), so its
   bounds (``closed_form``) hold here, too.
 - Weights y_s over the ranks, as in ``closed_form``, but with every rank's own constants. With d_s the time of a
   layer on rank s, weights 1 / d_s make all ranks equally expensive: a rank that ends within T holds at most T /
   d_s layers, all together must hold L, so T >= L / sum_s (1 / d_s). That is the harmonic mean of the types'
   bounds, weighted by their ranks. It is near the best bound where layers go to the types by their speed.
 - Even interleaving gives every rank layers that all splits have there, so its path takes at least their time on
   the rank's own type.

Memory enters as in ``lagrangian_memory``: every rank prices its own bytes above its own capacity.

With heterogeneous replicas a step is the longest of its views (``simulation.mixed_costs``). Each view is a step
on one node type, whose bounds (``closed_form``) hold for every plan that fits that type. A plan must fit all
types.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from milpplan.optimize.bounds.closed_form import (
    SAFETY,
    LayoutBounds,
    cheapest_costs,
    compute_bounds,
    layout_bounds,
    path_coefficients,
    rank_paths,
    tail,
)
from milpplan.optimize.bounds.lagrangian_memory import (
    INTERLEAVED,
    Group,
    ScheduleClass,
    excess_bytes,
    groups,
    memory_price,
    over_kinds,
    priced_layers,
)
from milpplan.optimize.bounds.uniform_plans import UniformBounds, rank_work, uniform_bounds
from milpplan.problem import Problem, order_of
from milpplan.simulation import (
    BoolArray,
    CostTable,
    FloatArray,
    IntArray,
    LayoutColumns,
    ascending,
    capacities_bytes,
    layer_durations_ns,
    usable_memory_bytes,
)
from milpplan.simulation.layers import ONCE
from milpplan.simulation.layout_columns import LAYER_KEYS, distinct
from milpplan.simulation.layout_costs import distinct_layers, least_layer_ns
from milpplan.simulation.mixed_costs import (
    AnyTable,
    ClusterTable,
    ReplicaTable,
    on_one_type,
    types_of_ranks,
    view_columns,
)
from milpplan.simulation.scenario_costs import ScenarioTable, SearchTable


def cluster_compute_bounds(problem: Problem, columns: LayoutColumns, placed: bool = True) -> FloatArray:
    """Return ``closed_form.compute_bounds`` for any cluster, nanoseconds [n].

    Several types: weights y_t of the ranks of type t, inverse to the whole model's work on it, and every kind of
    layer at its cheapest type: (F + B) + y ((m - P) F + (m - 1) B) for 1f1b, y m (F + B) in general. With separate
    weight gradients W, y m (F + B + W), and for zb-h1 y (m - P) W more than for 1f1b.
    """
    if not problem.other_hardware:
        return compute_bounds(problem, columns, placed)
    if not columns.any_of("replica_micro_batches"):
        return _pipeline_compute_bounds(problem, columns, placed)
    different, bound = columns.replica_micro_batches > 0, np.empty(len(columns))
    bound[different] = replica_compute_bounds(problem, columns.take(different), placed)
    bound[~different] = _pipeline_compute_bounds(problem, columns.take(~different), placed)
    return bound


def _pipeline_compute_bounds(problem: Problem, columns: LayoutColumns, placed: bool) -> FloatArray:
    """Return the bounds of layouts with equal replicas."""
    rows, inverse = distinct_layers(problem, columns) if placed else distinct(columns, LAYER_KEYS, ())
    part, durations_ns = columns.take(rows), layer_durations_ns if placed else least_layer_ns
    types = range(len(problem.node_types))
    layers = np.stack([durations_ns(problem.on_type(t), part) for t in types]).astype(np.float64)
    forward, backward, weight = (layers[:, :, phase][..., inverse] for phase in ONCE)
    counts = np.bincount(np.array(problem.model.layer_kinds), minlength=forward.shape[1]).astype(np.float64)
    m, P = columns.num_micro_batches, columns.pp
    speed = 1.0 / np.stack([over_kinds(counts, work) for work in forward + backward])
    gpu_share = np.array(problem.node_gpus) / sum(problem.node_gpus)
    weights = (speed / (P * (gpu_share[:, None] * speed).sum(axis=0)))[:, None]
    deep = ((columns.schedule != INTERLEAVED) & ~columns.ends_meet & (m >= P)).astype(np.float64)
    separate = deep * columns.split_backward * (m - P)
    paths = deep * (forward + backward) + weights * ((m - deep * P) * forward + (m - deep) * backward)
    paths += weights * separate * weight
    work = over_kinds(counts, (weights * m * (forward + backward + weight)).min(axis=0))
    pass_ns = over_kinds(counts, (forward + backward).min(axis=0))
    return np.asarray(np.maximum.reduce([over_kinds(counts, paths.min(axis=0)), work, pass_ns]) * SAFETY)


def cluster_bounds(problem: Problem, columns: LayoutColumns, costs: SearchTable) -> LayoutBounds:
    """Return ``closed_form.layout_bounds`` for any cluster; in several scenarios of the scaled step."""
    if isinstance(costs, ScenarioTable):
        return LayoutBounds(*_of_scenarios(cluster_bounds, columns, costs))
    if isinstance(costs, ClusterTable):
        return LayoutBounds(*_of_both(cluster_bounds, problem, columns, costs))
    if isinstance(costs, ReplicaTable):
        return replica_bounds(problem, columns, costs)
    if isinstance(costs, CostTable):
        return layout_bounds(problem, columns, costs)
    best = layout_bounds(problem, columns, costs.best)
    time = best.step_time_ns.copy()
    capacities = [float(capacity) for capacity in capacities_bytes(problem)]
    tables = (costs.best, *costs.tables)
    for parts in zip(*(groups(problem, columns, table) for table in tables), strict=True):
        rows, of_best = parts[0]
        for code in ascending(columns.node_order[rows]).tolist():
            open_rows = np.flatnonzero((columns.node_order[rows] == code) & (time[rows] > 0))
            if not len(open_rows):
                continue
            types = np.array(types_of_ranks(problem, order_of(code), of_best.num_ranks))
            by_type = [group.take(open_rows) for _, group in parts[1:]]
            bound = _weighted_bound(by_type, types, capacities) + tail(of_best.take(open_rows))
            time[rows[open_rows]] = np.maximum(time[rows[open_rows]], bound * SAFETY)
    return LayoutBounds(time, best.memory_bytes)


def _of_both(
    bounds: Callable[[Problem, LayoutColumns, AnyTable], LayoutBounds | UniformBounds],
    problem: Problem,
    columns: LayoutColumns,
    costs: ClusterTable,
) -> tuple[FloatArray, FloatArray]:
    """Return time and memory where only some layouts have heterogeneous replicas."""
    arrays: list[FloatArray] = []
    parts: list[tuple[BoolArray, AnyTable]] = [
        (costs.different, costs.replicas),
        (~costs.different, costs.pipelines),
    ]
    for rows, table in parts:
        part_bounds = bounds(problem, columns.take(rows), table)
        for index, values in enumerate((part_bounds.step_time_ns, part_bounds.memory_bytes)):
            if len(arrays) <= index:
                arrays.append(np.empty((len(columns), *values.shape[1:])))
            arrays[index][rows] = values
    return arrays[0], arrays[1]


def _of_scenarios(
    bounds: Callable[[Problem, LayoutColumns, AnyTable], LayoutBounds | UniformBounds],
    columns: LayoutColumns,
    costs: ScenarioTable,
) -> tuple[FloatArray, FloatArray]:
    """Return the largest scaled time over the scenarios, and the memory."""
    problems, scales = costs.scenarios.problems, costs.scenarios.scales
    parts = [bounds(problem, columns, table) for problem, table in zip(problems, costs.tables, strict=True)]
    times = [part.step_time_ns * scale.ratio for part, scale in zip(parts, scales, strict=True)]
    return np.maximum.reduce(times), np.maximum.reduce([part.memory_bytes for part in parts])


def cluster_uniform_bounds(problem: Problem, columns: LayoutColumns, costs: SearchTable) -> UniformBounds:
    """Return ``uniform_plans.uniform_bounds`` for any cluster: with the best constants over the types, and at
    least the work of any rank on its own type. In several scenarios they bound the scaled step."""
    if isinstance(costs, ScenarioTable):
        return UniformBounds(*_of_scenarios(cluster_uniform_bounds, columns, costs))
    if isinstance(costs, ClusterTable):
        return UniformBounds(*_of_both(cluster_uniform_bounds, problem, columns, costs))
    if isinstance(costs, ReplicaTable):
        return replica_uniform_bounds(problem, columns, costs)
    best = uniform_bounds(problem, columns, costs.best)
    if isinstance(costs, CostTable):
        return best
    time = best.step_time_ns.copy()
    for node_type, table in enumerate(costs.tables):
        for rows, group in groups(problem, columns, table):
            codes = columns.node_order[rows]
            for code in ascending(codes).tolist():
                chosen = np.flatnonzero(codes == code)
                on_type = np.array(types_of_ranks(problem, order_of(code), group.num_ranks)) == node_type
                for mode in range(time.shape[1]):
                    work = rank_work(problem, group.take(chosen), mode)[on_type].max(axis=0) * SAFETY
                    current = time[rows[chosen], mode]
                    # Zero stands for plans that do not fit.
                    time[rows[chosen], mode] = np.where(current > 0, np.maximum(current, work), current)
    return UniformBounds(time, best.memory_bytes)


def _weighted_bound(by_type: list[Group], types: IntArray, capacities: list[float]) -> FloatArray:
    """Return T >= sum_s y_s (path_s + price_s (bytes_s - capacity_s)), every layer at its cheapest rank, [r].

    ``types`` [P]: node types of the ranks. The path of rank s is whole sum_j D_j + on_forward F_s + on_backward
    B_s + on_weight W_s + transfers p (``path_coefficients``); with several chunks m times all its work and,
    interleaved, 2 s p.
    """
    group = by_type[0]
    m, P = group.micro_batches, group.num_ranks
    if group.schedule_class is ScheduleClass.PLAIN:
        whole, on_forward, on_backward, on_weight, transfers = path_coefficients(m, group.schedule, P)
    else:
        on_forward = on_backward = on_weight = np.broadcast_to(m, (P, len(m)))
        downward = 2 * group.ranks * (group.schedule_class is ScheduleClass.INTERLEAVED)
        whole, transfers = np.zeros((P, len(m))), np.broadcast_to(downward, (P, len(m)))
    delays = whole + on_backward
    per_layer, pass_ns = np.empty((2, len(group.counts), P, len(m)))
    memory_cost, by_rank = np.zeros((2, P, len(m)))
    before = cheapest_costs([group_of_type.costs for group_of_type in by_type])
    for node_type, (group_of_type, capacity) in enumerate(zip(by_type, capacities, strict=True)):
        costs, on_type = group_of_type.costs, types == node_type
        price = memory_price(group_of_type, capacity, delays)
        cost = priced_layers(group_of_type, delays, price).min(axis=0)
        cost += costs.forward[:, None] * on_forward + costs.backward[:, None] * on_backward
        cost += costs.weight[:, None] * on_weight
        per_layer[:, on_type] = cost[:, on_type]
        pass_ns[:, on_type] = (costs.forward + costs.backward)[:, None]
        memory_cost[on_type] = (price * excess_bytes(group_of_type, capacity))[on_type]
        if group.schedule_class is ScheduleClass.INTERLEAVED and group.forced:
            by_rank[on_type] = rank_paths(group_of_type, capacity, price, before)[on_type]
    weights = 1.0 / np.maximum(over_kinds(group.counts / group.counts.sum(), per_layer), 1e-9)
    weights /= weights.sum(axis=0)
    passes = (weights * whole).sum(axis=0)
    placed = over_kinds(group.counts, (weights * per_layer + passes * pass_ns).min(axis=1))
    ends = np.zeros_like(m)
    for rank, end in ((0, "embedding"), (group.head_rank, "head")):
        end_ns = getattr(by_type[int(types[rank])].costs, end)
        ends += passes * end_ns[:2].sum(axis=0)
        times = np.stack([on_forward[rank], on_backward[rank], on_weight[rank]])
        ends += weights[rank] * (end_ns * times).sum(axis=0)
    transfer = np.minimum.reduce([group_of_type.costs.transfer for group_of_type in by_type])
    mean = placed + ends + transfer * (weights * transfers).sum(axis=0) + (weights * memory_cost).sum(axis=0)
    return np.asarray(np.maximum(mean, by_rank.max(axis=0)))


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
        np.where(bytes_ > capacity, np.maximum(bytes_, max_capacity + 1.0), bytes_)
        for (_, bytes_), capacity in zip(views, capacities_bytes(problem), strict=True)
    ]
    return np.maximum.reduce([time for time, _ in views]), np.maximum.reduce(memory)
