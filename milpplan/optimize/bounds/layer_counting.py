"""Counting whole layers: a rank that stays below a step time holds at most so many, and all together must hold L.

What the bounds by averages miss: they cut layers into pieces. Used for interleaved splits that are free, where
nothing is known of what a virtual stage holds. The path of rank s is the one through its first chunk,
m D_s + sum_{i < s} D_{0,i} + 2 s p, in which every chunk 0 but the model's first holds a layer.
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
"""Of the interval in which the least step time lies, itself a few layers wide."""
ROUNDING = 1e-9
"""Added to numbers of layers before they are rounded down."""

Lines = tuple[tuple[FloatArray, FloatArray], tuple[FloatArray, FloatArray]]
"""Two lower bounds of what a rank takes with n layers of a kind, start [P, r] + n * each [K, P, r]."""


def counted_bound(group: Group, capacity: float, price: FloatArray) -> FloatArray:
    """Interleaved, any split: the least T at which the ranks can hold all layers of each kind, [r]."""
    lines, bound = _lines(group, capacity, price, group.costs), np.zeros_like(group.micro_batches)
    for kind, count in enumerate(group.counts.tolist()):
        bound = np.maximum(bound, _least_time(count, [(start, each[kind]) for start, each in lines]))
    return bound


def most_on_ranks(context: LayoutContext, cutoff_ns: int) -> IntArray:
    """Several chunks: most layers of each kind that a rank holds in a plan at or below a step time, [K, P];
    negative where not even none. Under V schedules from all work of the rank, its memory forgotten."""
    ranks = range(context.layout.pp)
    types = np.array([context.costs.type_of(rank) for rank in ranks])
    groups = {kind: _group_of(context, int((types == kind).argmax())) for kind in set(types.tolist())}
    least = least_costs([group.costs for group in groups.values()])
    most = np.zeros((len(next(iter(groups.values())).counts), len(types)), dtype=np.int64)
    for kind, group in groups.items():
        own = types == kind
        rule = _most_by_work if group.sort is ScheduleClass.V else _most_by_lines
        most[:, own] = rule(context.on_rank(int(own.argmax())), group, cutoff_ns, least)[:, own]
    return most


def _most_by_lines(context: LayoutContext, group: Group, cutoff_ns: int, before: CostColumns) -> IntArray:
    """Most layers of each kind below the lines of ``_lines`` at every price, [K, P]."""
    corners = price_corners(group)
    repeated = np.zeros(len(corners), dtype=np.int64)
    group, before = group.take(repeated), before.take(repeated)
    lines = _lines(group, float(context.capacity_bytes), np.concatenate(corners, axis=1), before)
    held = [np.floor((cutoff_ns - before.tail - start) / each + ROUNDING) for start, each in lines]
    return np.asarray(np.min(held, axis=(0, 3)).astype(np.int64))


def _most_by_work(context: LayoutContext, group: Group, cutoff_ns: int, before: CostColumns) -> IntArray:
    """Most layers of each kind in m times a rank's work, [K, P], after the forwards of what the first chunks
    before it hold at least; both ends of the model are on rank 0."""
    costs, m = group.costs, group.micro_batches
    each = m * (costs.forward + costs.backward + costs.weight + costs.extra.min(axis=0))
    if costs.saved is not None:
        # No rank has more pairs with a forward, or a backward, of a chunk.
        each = each - costs.saved.sum(axis=0) * np.maximum(m - group.num_ranks, 0.0)
    layers = np.cumsum([0, *(context.min_layers(stage) for stage in range(group.num_ranks - 1))])[:, None]
    start = layers * before.forward.min(axis=0) + group.ranks * before.transfer
    start[0] += m * (costs.embedding.sum(axis=0) + costs.head.sum(axis=0))
    start[1:] += before.embedding[0]
    room = cutoff_ns - (before.tail - before.end_reduce) - start
    held = np.floor(room / np.maximum(each, 1.0)[:, None] + ROUNDING)
    return np.asarray(held[..., 0].astype(np.int64))


def least_costs(costs: Sequence[CostColumns]) -> CostColumns:
    """The least of several node types' constants, one by one, and of the tail without its reduction."""
    if len(costs) == 1:
        return costs[0]
    names = [part.name for part in fields(CostColumns) if part.name not in OPTIONAL]
    least = {name: np.minimum.reduce([getattr(one, name) for one in costs]) for name in names}
    least["end_reduce"] = least["tail"] - np.minimum.reduce([one.tail - one.end_reduce for one in costs])
    return CostColumns(**least, saved=None, late=None)


def _lines(group: Group, capacity: float, price: FloatArray, before: CostColumns) -> Lines:
    """What rank s takes with n layers of a kind, layers of other kinds counted for nothing: once with its memory
    forgotten, once with every byte above the capacity at a price [P, r]. ``before``: constants of which the ranks
    before it have no less."""
    costs, m = group.costs, group.micro_batches
    work = costs.forward + costs.backward
    start = np.zeros_like(price)
    start[0] += m * costs.embedding.sum(axis=0)
    start[-1] += m * costs.head.sum(axis=0)
    least = work + costs.extra.min(axis=0)
    ramp = (before.forward + before.backward + before.extra.min(axis=0)).min(axis=0)
    start += np.maximum(group.ranks - 1.0, 0.0) * ramp + 2 * group.ranks * before.transfer
    start[1:] += before.embedding.sum(axis=0)
    priced = priced_layers(group, np.broadcast_to(m, price.shape), price)
    cheapest = priced.min(axis=0)
    forced = ((priced - cheapest).min(axis=1) * forced_layers(group)).sum(axis=0)
    free = np.broadcast_to((m * least)[:, None], cheapest.shape)
    return (start, free), (start + forced + price * excess_bytes(group, capacity), (m * work)[:, None] + cheapest)


def _least_time(count: float, ranks: list[tuple[FloatArray, FloatArray]]) -> FloatArray:
    """Least T, from below, with sum_s min over (a, b) of floor((T - a_s) / b_s) >= count, [r]; a, b [P, r]."""
    share = np.ceil(count / len(ranks[0][0]))
    at_share = np.max([start + each * share for start, each in ranks], axis=0)
    # Some rank holds the share, and if all can hold it nothing is missing.
    low, high = at_share.min(axis=0), at_share.max(axis=0)
    for _ in range(HALVINGS):
        middle = 0.5 * (low + high)
        held = np.min([np.floor((middle - start) / each + ROUNDING) for start, each in ranks], axis=0)
        enough = np.maximum(held, 0.0).sum(axis=0) >= count
        high = np.where(enough, middle, high)
        low = np.where(enough, low, middle)
    return np.asarray(low)


def _group_of(context: LayoutContext, rank: int) -> Group:
    """A single layout as a group whose ranks are all as one of them."""
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
