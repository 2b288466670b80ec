"""Lower bounds of layouts in a cluster of several node types.

Two bounds, the larger counts:

 - A cluster with the best constants of every type, each by itself, is no slower and holds no less
   (``costs.mixed_costs.MixedTable.best``), so its bounds (``bounds``) hold here, too.
 - Weights y_s over the ranks, as there, but with every rank's own constants. With d_s what a layer takes on rank
   s, weights 1 / d_s make all ranks equally dear: a rank that ends within T holds at most T / d_s layers, all
   together must hold L, so T >= L / sum_s (1 / d_s). That is the harmonic mean of the types' bounds, weighted by
   their ranks, and it is near the best where layers go to the types by their speed.

Memory enters as in ``bounds``: every rank prices its own bytes above its own capacity.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from milpplan.optimize.bounds.closed_form import (
    SAFETY,
    LayoutBounds,
    compute_bounds,
    layers_ns,
    layout_bounds,
    path_coefficients,
    rows_of_layers,
    tail,
)
from milpplan.optimize.bounds.heterogeneous_replicas import (
    replica_bounds,
    replica_compute_bounds,
    replica_uniform_bounds,
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
from milpplan.problem.plan import order_of
from milpplan.problem.problem import Problem
from milpplan.simulation.layers.layer_time import ONCE
from milpplan.simulation.layout_columns import BoolArray, FloatArray, IntArray, LayoutColumns, ascending
from milpplan.simulation.layout_costs import CostTable
from milpplan.simulation.mixed_costs import AnyTable, ClusterTable, types_of_ranks
from milpplan.simulation.replica_costs import ReplicaTable


def cluster_compute_bounds(problem: Problem, columns: LayoutColumns, placed: bool = True) -> FloatArray:
    """``bounds.compute_bounds`` for any cluster, nanoseconds [n]; ``placed`` as there.

    Several types: weights y_t of the ranks of type t, inversely as the whole model's work on it, and every kind
    of layer at its cheapest type: (F + B) + y ((m - P) F + (m - 1) B) for 1f1b, y m (F + B) in general. With
    weight gradients W apart, y m (F + B + W), and for zb-h1 y (m - P) W more than for 1f1b.
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
    """Of layouts whose replicas are alike."""
    rows, inverse = rows_of_layers(problem, columns, placed)
    part = columns.take(rows)
    types = range(len(problem.node_types))
    layers = np.stack([layers_ns(problem.on_type(t), part, placed) for t in types]).astype(np.float64)
    forward, backward, weight = (layers[:, :, phase][..., inverse] for phase in ONCE)
    counts = np.bincount(np.array(problem.model.layer_kinds), minlength=forward.shape[1]).astype(np.float64)
    m, P = columns.num_micro_batches, columns.pp
    speed = 1.0 / np.stack([over_kinds(counts, work) for work in forward + backward])
    share = np.array(problem.node_gpus) / sum(problem.node_gpus)
    weights = (speed / (P * (share[:, None] * speed).sum(axis=0)))[:, None]
    deep = ((columns.schedule != INTERLEAVED) & ~columns.ends_meet & (m >= P)).astype(np.float64)
    apart = deep * columns.split_backward * (m - P)
    paths = deep * (forward + backward) + weights * ((m - deep * P) * forward + (m - deep) * backward)
    paths += weights * apart * weight
    work = over_kinds(counts, (weights * m * (forward + backward + weight)).min(axis=0))
    once = over_kinds(counts, (forward + backward).min(axis=0))
    return np.asarray(np.maximum.reduce([over_kinds(counts, paths.min(axis=0)), work, once]) * SAFETY)


def cluster_bounds(problem: Problem, columns: LayoutColumns, costs: AnyTable) -> LayoutBounds:
    """``bounds.layout_bounds`` for any cluster."""
    if isinstance(costs, ClusterTable):
        return LayoutBounds(*_of_both(cluster_bounds, problem, columns, costs))
    if isinstance(costs, ReplicaTable):
        return replica_bounds(problem, columns, costs)
    if isinstance(costs, CostTable):
        return layout_bounds(problem, columns, costs)
    best = layout_bounds(problem, columns, costs.best)
    time = best.step_time_ns.copy()
    capacities = [float(hardware.usable_bytes) for hardware in problem.node_types]
    tables = (costs.best, *costs.tables)
    for parts in zip(*(groups(problem, columns, table) for table in tables), strict=True):
        rows, of_best = parts[0]
        for code in ascending(columns.node_order[rows]).tolist():
            own = np.flatnonzero((columns.node_order[rows] == code) & (time[rows] > 0))
            if not len(own):
                continue
            types = np.array(types_of_ranks(problem, order_of(code), of_best.num_ranks))
            by_type = [group.take(own) for _, group in parts[1:]]
            bound = _weighted_bound(by_type, types, capacities) + tail(of_best.take(own))
            time[rows[own]] = np.maximum(time[rows[own]], bound * SAFETY)
    return LayoutBounds(time, best.memory_bytes)


def _of_both(
    bounds: Callable[[Problem, LayoutColumns, AnyTable], LayoutBounds | UniformBounds],
    problem: Problem,
    columns: LayoutColumns,
    costs: ClusterTable,
) -> tuple[FloatArray, FloatArray]:
    """Time and memory where some layouts have replicas of different make and others have not."""
    found: list[FloatArray] = []
    parts: list[tuple[BoolArray, AnyTable]] = [
        (costs.different, costs.replicas),
        (~costs.different, costs.pipelines),
    ]
    for rows, table in parts:
        own = bounds(problem, columns.take(rows), table)
        for number, values in enumerate((own.step_time_ns, own.memory_bytes)):
            if len(found) <= number:
                found.append(np.empty((len(columns), *values.shape[1:])))
            found[number][rows] = values
    return found[0], found[1]


def cluster_uniform_bounds(problem: Problem, columns: LayoutColumns, costs: AnyTable) -> UniformBounds:
    """``uniform.uniform_bounds`` for any cluster: those of the best of all types, and no less than the work of any
    rank on its own type."""
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
                own = np.flatnonzero(codes == code)
                place = np.array(types_of_ranks(problem, order_of(code), group.num_ranks)) == node_type
                for mode in range(time.shape[1]):
                    work = rank_work(problem, group.take(own), mode)[place].max(axis=0) * SAFETY
                    known = time[rows[own], mode]
                    # Zero stands for plans that do not fit.
                    time[rows[own], mode] = np.where(known > 0, np.maximum(known, work), known)
    return UniformBounds(time, best.memory_bytes)


def _weighted_bound(by_type: list[Group], types: IntArray, capacities: list[float]) -> FloatArray:
    """T >= sum_s y_s (path_s + price_s (bytes_s - capacity_s)), every layer at its cheapest rank, [r]; ``types``
    [P] are those of the ranks.

    The path of rank s is whole sum_j D_j + on_forward F_s + on_backward B_s + on_weight W_s + transfers p
    (``path_coefficients``), with several chunks m times all its work and, interleaved, 2 s p.
    """
    group = by_type[0]
    m, P = group.micro_batches, group.num_ranks
    if group.sort is ScheduleClass.PLAIN:
        whole, on_forward, on_backward, on_weight, transfers = path_coefficients(m, group.schedule, P)
    else:
        on_forward = on_backward = on_weight = np.broadcast_to(m, (P, len(m)))
        whole, transfers = np.zeros((P, len(m))), np.broadcast_to(2 * group.ranks * group.interleaved, (P, len(m)))
    delays = whole + on_backward
    per_layer, once = np.empty((2, len(group.counts), P, len(m)))
    over = np.empty((P, len(m)))
    for node_type, (own, capacity) in enumerate(zip(by_type, capacities, strict=True)):
        costs, place = own.costs, types == node_type
        price = memory_price(own, capacity, delays)
        cost = priced_layers(own, delays, price).min(axis=0)
        cost += costs.forward[:, None] * on_forward + costs.backward[:, None] * on_backward
        cost += costs.weight[:, None] * on_weight
        per_layer[:, place] = cost[:, place]
        once[:, place] = (costs.forward + costs.backward)[:, None]
        over[place] = (price * excess_bytes(own, capacity))[place]
    weights = 1.0 / np.maximum(over_kinds(group.counts / group.counts.sum(), per_layer), 1e-9)
    weights /= weights.sum(axis=0)
    passes = (weights * whole).sum(axis=0)
    placed = over_kinds(group.counts, (weights * per_layer + passes * once).min(axis=1))
    ends = np.zeros_like(m)
    for rank, end in ((0, "embedding"), (group.head_rank, "head")):
        taken = getattr(by_type[int(types[rank])].costs, end)
        ends += passes * taken[:2].sum(axis=0)
        times = np.stack([on_forward[rank], on_backward[rank], on_weight[rank]])
        ends += weights[rank] * (taken * times).sum(axis=0)
    transfer = np.minimum.reduce([own.costs.transfer for own in by_type])
    return np.asarray(placed + ends + transfer * (weights * transfers).sum(axis=0) + (weights * over).sum(axis=0))
