"""Bounds by counting whole layers: a rank that stays below a step time holds a limited number of layers, and all
ranks together must hold L.

Bounds by averages cut layers into pieces and miss this. Counting serves free interleaved splits, where the content
of virtual stages is unknown. The path of rank s goes through its first chunk, m D_s + sum_{i < s} D_{0,i} + 2 s p,
in which every chunk 0 but the model's first holds a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import numpy as np

from milpplan.optimize.bounds.cost_columns import OPTIONAL, CostColumns
from milpplan.optimize.bounds.lagrangian_memory import (
    Group,
    ScheduleClass,
    excess_bytes,
    forced_layers,
    price_corners,
    priced_layers,
)
from milpplan.optimize.layout.stage_options import LayoutContext
from milpplan.problem.plan import SCHEDULES, V_SCHEDULES
from milpplan.simulation.layout_columns import FloatArray, IntArray
from milpplan.simulation.layout_costs import LayoutCosts

HALVINGS = 24
"""Bisections of the interval that contains the minimum step time; the interval is a few layers wide."""
ROUNDING = 1e-9
"""Added to numbers of layers before they are rounded down."""

Lines = tuple[tuple[FloatArray, FloatArray], tuple[FloatArray, FloatArray]]
"""Two lower bounds of a rank's time with n layers of a kind, start [P, r] + n * each [K, P, r]."""


def counted_bound(group: Group, capacity: float, price: FloatArray) -> FloatArray:
    """Interleaved, any split: return the minimum T at which the ranks can hold all layers of each kind, [r]."""
    lines, bound = _lines(group, capacity, price, group.costs), np.zeros_like(group.micro_batches)
    for kind, count in enumerate(group.counts.tolist()):
        bound = np.maximum(bound, _min_time(count, [(start, each[kind]) for start, each in lines]))
    return bound


def max_layers_on_ranks(context: LayoutContext, cutoff_ns: int) -> IntArray:
    """Several chunks: return the maximum layers of each kind that a rank holds in a plan at or below a step time,
    [K, P].

    Negative where not even zero layers stay below. Under V schedules it follows from all work of the rank, without
    memory.
    """
    ranks = range(context.layout.pp)
    types = np.array([context.costs.type_of(rank) for rank in ranks])
    groups = {kind: _group_of(context, int((types == kind).argmax())) for kind in set(types.tolist())}
    min_costs = cheapest_costs([group.costs for group in groups.values()])
    max_layers = np.zeros((len(next(iter(groups.values())).counts), len(types)), dtype=np.int64)
    for kind, group in groups.items():
        mask = types == kind
        rule = _max_by_work if group.schedule_class is ScheduleClass.V else _max_by_lines
        max_layers[:, mask] = rule(context.on_rank(int(mask.argmax())), group, cutoff_ns, min_costs)[:, mask]
    return max_layers


def _max_by_lines(context: LayoutContext, group: Group, cutoff_ns: int, before: CostColumns) -> IntArray:
    """Return the maximum layers of each kind below the lines of ``_lines`` at every multiplier, [K, P]."""
    corners = price_corners(group)
    repeated = np.zeros(len(corners), dtype=np.int64)
    group, before = group.take(repeated), before.take(repeated)
    lines = _lines(group, float(context.capacity_bytes), np.concatenate(corners, axis=1), before)
    max_layers = [np.floor((cutoff_ns - before.tail - start) / each + ROUNDING) for start, each in lines]
    return np.asarray(np.min(max_layers, axis=(0, 3)).astype(np.int64))


def _max_by_work(context: LayoutContext, group: Group, cutoff_ns: int, before: CostColumns) -> IntArray:
    """Return the maximum layers of each kind in m times a rank's work, [K, P].

    The rank starts after the forwards of the minimum layers of the first chunks before it. Both ends of the model
    are on rank 0.
    """
    costs, m = group.costs, group.micro_batches
    each = m * (costs.forward + costs.backward + costs.weight + costs.extra.min(axis=0))
    if costs.saved is not None:
        # Maximum number of pairs of a rank with a forward, or a backward, of a chunk.
        each = each - costs.saved.sum(axis=0) * np.maximum(m - group.num_ranks, 0.0)
    layers = np.cumsum([0, *(context.min_layers(stage) for stage in range(group.num_ranks - 1))])[:, None]
    start = layers * before.forward.min(axis=0) + group.ranks * before.transfer
    start[0] += m * (costs.embedding.sum(axis=0) + costs.head.sum(axis=0))
    start[1:] += before.embedding[0]
    time_left = cutoff_ns - (before.tail - before.end_reduce) - start
    max_layers = np.floor(time_left / np.maximum(each, 1.0)[:, None] + ROUNDING)
    return np.asarray(max_layers[..., 0].astype(np.int64))


def cheapest_costs(costs: Sequence[CostColumns]) -> CostColumns:
    """Return the minimum of each constant over several node types, and of the tail without its reduction."""
    if len(costs) == 1:
        return costs[0]
    names = [item.name for item in fields(CostColumns) if item.name not in OPTIONAL]
    minima = {name: np.minimum.reduce([getattr(table, name) for table in costs]) for name in names}
    minima["end_reduce"] = minima["tail"] - np.minimum.reduce([table.tail - table.end_reduce for table in costs])
    return CostColumns(**minima, saved=None, late=None)


def _lines(group: Group, capacity: float, price: FloatArray, before: CostColumns) -> Lines:
    """Return the time of rank s with n layers of a kind, ignoring layers of other kinds: without its memory, and
    with every byte above the capacity at a price [P, r].

    ``before``: lower bounds of the constants of the ranks before it.
    """
    costs, m = group.costs, group.micro_batches
    work = costs.forward + costs.backward
    start = np.zeros_like(price)
    start[0] += m * costs.embedding.sum(axis=0)
    start[-1] += m * costs.head.sum(axis=0)
    layer_ns = work + costs.extra.min(axis=0)
    ramp = (before.forward + before.backward + before.extra.min(axis=0)).min(axis=0)
    start += np.maximum(group.ranks - 1.0, 0.0) * ramp + 2 * group.ranks * before.transfer
    start[1:] += before.embedding.sum(axis=0)
    priced = priced_layers(group, np.broadcast_to(m, price.shape), price)
    cheapest = priced.min(axis=0)
    forced = ((priced - cheapest).min(axis=1) * forced_layers(group)).sum(axis=0)
    free = np.broadcast_to((m * layer_ns)[:, None], cheapest.shape)
    return (start, free), (start + forced + price * excess_bytes(group, capacity), (m * work)[:, None] + cheapest)


def _min_time(count: float, ranks: list[tuple[FloatArray, FloatArray]]) -> FloatArray:
    """Return the minimum T, from below, with sum_s min over (a, b) of floor((T - a_s) / b_s) >= count, [r]; a, b
    [P, r]."""
    share = np.ceil(count / len(ranks[0][0]))
    at_share = np.max([start + each * share for start, each in ranks], axis=0)
    # Some rank holds the share; if all can hold it, all layers are placed.
    low, high = at_share.min(axis=0), at_share.max(axis=0)
    for _ in range(HALVINGS):
        middle = 0.5 * (low + high)
        max_layers = np.min([np.floor((middle - start) / each + ROUNDING) for start, each in ranks], axis=0)
        sufficient = np.maximum(max_layers, 0.0).sum(axis=0) >= count
        high = np.where(sufficient, middle, high)
        low = np.where(sufficient, low, middle)
    return np.asarray(low)


def _group_of(context: LayoutContext, rank: int) -> Group:
    """Return a single layout as a group in which all ranks are like the given rank."""
    layout, costs = context.layout, context.costs.of_rank(rank)
    numbers = {part.name: getattr(costs, part.name) for part in fields(costs) if part.name != "parts"}
    table = LayoutCosts(costs.parts, **{name: np.asarray(value)[..., None] for name, value in numbers.items()})
    counts = np.bincount(np.array(context.problem.model.layer_kinds), minlength=len(context.problem.model.kinds))
    return Group(
        layout.pp,
        ScheduleClass.V if layout.schedule in V_SCHEDULES else ScheduleClass.INTERLEAVED,
        np.array([float(layout.num_micro_batches)]),
        np.array([float(layout.vpp)]),
        np.array([SCHEDULES.index(layout.schedule)]),
        CostColumns.of(table, context.problem.recompute_modes),
        counts.astype(np.float64),
        dict,
        0,
    )
