"""Closed-form lower bounds on step time and peak memory of every layout at once.

Each bound is a convex combination, with weights y_s over the pipeline ranks, of path sums (or of ranks' memories)
that hold for every plan of the layout. It is then minimised over all placements of the layers, which is a minimum
over ranks because the combination is linear in the layers. Any weights give a valid bound; those used here are
near the best. The paths, for rank s of P, m micro-batches, F and B the durations of virtual stages, p a transfer,
D = F + B:

    1f1b (m >= P - s)  sum_j D_j + (m - P + s) F_s + (m - 1) B_s + 2 (P - 1) p
       first micro-batch down to the last stage and back to s, the rest of rank s, last micro-batch back to 0.
    1f1b (otherwise)   sum_{i < s} D_i + m D_s + 2 s p
    gpipe              sum_j D_j + (m - 1) D_s + 2 (P - 1) p
    interleaved        m D_s + sum_{i < s} D_{c,i} + 2 s p + [sum_i F_{<c,i} - P F_{<c,s}]  for every chunk c,
       where F_{<c,i} sums chunks before c on rank i: micro-batch 0 flows through c chunks, then down to rank s.
       Likewise for backwards from the end. Averaged over c; with equal weights the bracket cancels.
    zb-h1              as 1f1b, where B is the input gradient; W_s is passed max(0, m - 1 - s) times more: weight
       gradient k of rank s runs after backward k + s, so those of micro-batches 0 to m - 2 - s before the last
       backward.
    zb-v               sum_{i < s} F_{0,i} + s p + m (F_s + B_s + W_s), each summed over both chunks of rank s:
       the first micro-batch down to rank s, then all work of the rank. It ends on rank s, not on rank 0.
    dualpipe-v         as zb-v, less the time that the rank's pairs save (``work_orders.num_pairs``): at most
       m - P times the difference between a layer's forward and backward alone and in pairs.

Memory enters by Lagrangian relaxation (``lagrangian_memory``): for any multiplier l_s >= 0 of a byte on rank s,
adding l_s (bytes_s - capacity) <= 0 keeps a bound, and every layer then chooses the cheapest of no, selective or
full recomputation. Multipliers are chosen at the balanced placement.

Bounds by averages cut layers into pieces. Bounds by counting do not (``counted_bound``): a rank that stays below a
step time holds a limited number of layers, and all ranks together must hold L. They serve free interleaved splits,
where the content of virtual stages is unknown. The path of rank s goes through its first chunk, m D_s +
sum_{i < s} D_{0,i} + 2 s p, in which every chunk 0 but the model's first holds a layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from milpplan.optimize.bounds.lagrangian_memory import (
    GPIPE,
    INTERLEAVED,
    OPTIONAL,
    ZB_H1,
    CostColumns,
    Group,
    ScheduleClass,
    excess_bytes,
    forced_layers,
    groups,
    groups_of,
    memory_price,
    over_fixed_bytes,
    over_kinds,
    price_corners,
    priced_layers,
)
from milpplan.optimize.layout import LayoutContext
from milpplan.problem import SCHEDULES, V_SCHEDULES, Problem
from milpplan.simulation import (
    CostTable,
    FloatArray,
    IntArray,
    LayoutColumns,
    LayoutCosts,
    ascending,
    layer_durations_ns,
    unique_rows,
    usable_memory_bytes,
)
from milpplan.simulation.layers import ONCE, Phase, least_paired_ns
from milpplan.simulation.layers.paired_layers import PAIR_ROUNDING_NS
from milpplan.simulation.layout_columns import HOSTED, LAYER_KEYS, distinct
from milpplan.simulation.layout_costs import distinct_layers, layout_costs, least_layer_ns

SAFETY = 1.0 - 1e-12
"""Factor that scales bounds down by more than the rounding of floating-point sums, a few ulps."""


@dataclass(frozen=True, slots=True)
class LayoutBounds:
    """Lower bounds over all plans of each layout: nanoseconds and bytes, arrays [n]. The time is zero where the
    memory bound alone decides."""

    step_time_ns: FloatArray
    memory_bytes: FloatArray


def compute_bounds(problem: Problem, columns: LayoutColumns, placed: bool = True) -> FloatArray:
    """Return lower bounds of the step time from the layers' compute alone, nanoseconds [n].

    ``placed``: include the communication inside the layers, which depends on where the groups of ranks lie.
    Without it, the bound holds for all orders of ranks.

    Memory and sharding are ignored, so only the distinct layers are costed. The bound is the mean over the ranks
    of the paths above, F and B being the forwards and backwards of the whole model: (m F + (m + P - 1) B) / P for
    1f1b, m (F + B) / P in general, and at least one micro-batch through the whole model. With separate weight
    gradients W it is m (F + B + W) / P, because every rank does all its work one after another, and for zb-h1 (m F
    + (m + P - 1) B + (m - P) W) / P. Of the m micro-batches at most m - P are in pairs.
    """
    rows, inverse = distinct_layers(problem, columns) if placed else distinct(columns, LAYER_KEYS, ())
    representatives = columns.take(rows)
    durations_ns = layer_durations_ns if placed else least_layer_ns
    layers = durations_ns(problem, representatives)
    counts = np.bincount(np.array(problem.model.layer_kinds), minlength=len(layers)).astype(np.float64)
    forward = over_kinds(counts, layers[:, Phase.FORWARD].astype(np.float64))[inverse]
    backward = over_kinds(counts, layers[:, Phase.BACKWARD].astype(np.float64))[inverse]
    m, P = columns.num_micro_batches, columns.pp
    deep = (columns.schedule != INTERLEAVED) & ~columns.ends_meet & (m >= P)
    ramp = np.where(deep, P - 1, 0)
    bound = (m * forward + (m + ramp) * backward) / P
    split = columns.split_backward
    if split.any():
        weight = over_kinds(counts, layers[:, Phase.WEIGHT].astype(np.float64))[inverse]
        bound += np.where(split & deep, np.maximum(m - P, 0) * weight / P, 0.0)
        bound = np.maximum(bound, np.where(split, m * (forward + backward + weight) / P, 0.0))
        if columns.runs_pairs.any():
            if placed:
                # Pairs take as long to price as all else: only layers of rows that run them are priced.
                paired_rows = ascending(inverse[columns.runs_pairs])
                pair_ns = np.zeros((len(layers), len(rows)))
                pair_ns[:, paired_rows] = least_paired_ns(problem, columns.take(rows[paired_rows])).sum(axis=1)
            else:
                pair_ns = np.maximum(layers[:, ONCE].sum(axis=1) - PAIR_ROUNDING_NS, 0).astype(np.float64)
            paired = P * (forward + backward + weight) + (m - P) * over_kinds(counts, pair_ns)[inverse]
            return np.asarray(
                np.where(columns.runs_pairs, paired / P, np.maximum(bound, forward + backward)) * SAFETY
            )
    return np.asarray(np.maximum(bound, forward + backward) * SAFETY)


def layers_work_ns(problem: Problem, columns: LayoutColumns) -> FloatArray:
    """Return the time of the forwards and backwards of a micro-batch in all layers, [n] ns: alone or, where the
    schedules run pairs, in pairs and from below."""
    rows, inverse = distinct_layers(problem, columns)
    part = columns.take(rows)
    counts = np.bincount(np.array(problem.model.layer_kinds)).astype(np.float64)
    if part.runs_pairs.all():
        work = least_paired_ns(problem, part).sum(axis=1)
    else:
        layers = layer_durations_ns(problem, part)
        weight = np.where(part.split_backward, layers[:, Phase.WEIGHT], 0)
        work = layers[:, Phase.FORWARD] + layers[:, Phase.BACKWARD] + weight
    return over_kinds(counts, work.astype(np.float64))[inverse]


def layout_bounds(problem: Problem, columns: LayoutColumns, costs: CostTable) -> LayoutBounds:
    """Return lower bounds of every layout, valid for the problem's space."""
    return _group_bounds(problem, len(columns), groups(problem, columns, costs))


SETS = (("zero_stage", "offload_optimizer"), ("zero_stage", *HOSTED))
"""Fields of which the layouts of a set have equal values: those that move most bytes first, then more of them."""


def bounds_over_sets(
    problem: Problem,
    heads: LayoutColumns,
    family: IntArray,
    members: LayoutColumns,
    owner: IntArray,
    limits_ns: FloatArray,
) -> FloatArray:
    """Return lower bounds of groups of layouts, [g] ns, at most of those below a limit from their smallest sets.

    The layouts of a group have equal pp, micro-batches and stages, and the constants of its family. They are cut
    into sets with equal values of some fields (``SETS``); the minimum of each constant over a set bounds all its
    layouts. Sets below the limit are cut further. The bound of a group is the minimum over its sets.

    Args:
        problem: with a single node type.
        heads: a layout of each group.
        family: of each group, [g].
        members: layouts of all families, the form of whose backwards is that of the groups.
        owner: family of each of them.
        limits_ns: of each group, [g].
    """
    capacity, costs = usable_memory_bytes(problem), layout_costs(problem, members)
    place, constants = costs.place, CostColumns.of(costs.distinct, problem.recompute_modes)
    group, sets = np.arange(len(heads)), family
    bounds, values = np.full(len(heads), np.inf), np.zeros(len(heads))
    for names in SETS:
        kept = np.flatnonzero(np.isin(owner, sets))
        if not len(kept):
            break
        size, members, place, owner = int(owner.max()) + 1, members.take(kept), place[kept], owner[kept]
        start, child = unique_rows(owner, *(getattr(members, name) for name in names))
        counts, order = np.bincount(owner[start], minlength=size), np.argsort(child, kind="stable")
        sizes = np.bincount(child)
        least = least_constants(constants, place[order], np.cumsum(sizes) - sizes)
        number = np.repeat(np.arange(len(sets)), counts[sets])
        position = np.arange(len(number)) - np.repeat(np.cumsum(counts[sets]) - counts[sets], counts[sets])
        group, sets = group[number], (np.cumsum(counts) - counts)[sets[number]] + position
        part = heads.take(group)
        found = _group_bounds(problem, len(part), groups_of(problem, part, least, sets))
        values = np.where(found.memory_bytes > capacity, np.inf, found.step_time_ns)
        is_open = values < limits_ns[group]
        np.minimum.at(bounds, group[~is_open], values[~is_open])
        group, sets, values, owner = group[is_open], sets[is_open], values[is_open], child
    np.minimum.at(bounds, group, values)
    return bounds


def _group_bounds(problem: Problem, number: int, parts: Iterable[tuple[IntArray, Group]]) -> LayoutBounds:
    """Bound layouts of groups, each given with its row numbers."""
    time, memory = np.zeros(number), np.zeros(number)
    capacity = float(usable_memory_bytes(problem))
    for rows, group in parts:
        memory_bound = _memory_bound(group)
        memory[rows] = memory_bound
        fits = np.flatnonzero(memory_bound * SAFETY <= capacity)
        if len(fits):
            fitting = group.take(fits)
            time[rows[fits]] = RULES[group.schedule_class](fitting, capacity) + tail(fitting)
    return LayoutBounds(time * SAFETY, memory * SAFETY)


def _memory_bound(group: Group) -> FloatArray:
    """Return max_s M_s >= sum_s y_s M_s, minimised over the placement of the layers."""
    costs = group.costs
    live = (
        group.live[0] if group.schedule_class is ScheduleClass.PLAIN else np.minimum(group.live[0], group.live[1])
    )
    per_layer = np.maximum(group.state_bytes_per_layer + costs.kept.min(axis=0)[:, None] * live, 1.0)
    weights = 1.0 / over_kinds(group.counts / group.counts.sum(), per_layer)
    weights /= weights.sum(axis=0)
    placed = over_kinds(group.counts, (weights * per_layer).min(axis=1))
    return np.asarray(placed + over_fixed_bytes(group, weights))


def path_coefficients(
    micro_batches: FloatArray, schedule: IntArray, num_ranks: int
) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray, FloatArray]:
    """Return (whole, on_forward, on_backward, on_weight, transfers), each [P, r], of 1f1b, gpipe and zb-h1.

    Rank s's path is whole * sum_j D_j + on_forward * F_s + on_backward * B_s + on_weight * W_s + transfers * p (+
    sum_{i < s} D_i if whole = 0), with D = F + B.

    ``micro_batches`` [r], ``schedule`` [r].
    """
    m, P = micro_batches, num_ranks
    s = np.arange(P, dtype=np.float64)[:, None]
    gpipe = schedule == GPIPE
    deep = (m >= P - s) | gpipe
    forward = np.where(deep, np.where(gpipe, m - 1, m - P + s), m)
    backward = np.where(deep, m - 1, m)
    weight = np.where(schedule == ZB_H1, np.maximum(m - 1 - s, 0.0), 0.0)
    transfers = np.where(deep, 2.0 * (P - 1), 2 * s)
    return deep.astype(np.float64), forward, backward, weight, transfers


def tail(group: Group) -> FloatArray:
    """Return the minimum time before the first forward and after the last backward, [r].

    After the last backward: the reduction of the embedding on rank 0 (not where paths end on another rank), the
    barrier, and the mean rank's optimizer. Before the first forward: the embedding's gather.
    """
    costs = group.costs
    # Without a pipeline the last reduction and the first gather also cover both ends of the model.
    optimizer = over_kinds(group.counts, costs.optimizer) + costs.end_optimizer[0] + costs.end_optimizer[1]
    step_tail = costs.tail - costs.end_reduce if group.schedule_class is ScheduleClass.V else costs.tail
    return np.asarray(step_tail + optimizer / group.num_ranks)


def _work(group: Group) -> FloatArray:
    """Return forward and backward of one micro-batch through the whole model, without recomputation and separate
    weight gradients, [r]."""
    costs = group.costs
    layers = over_kinds(group.counts, costs.forward + costs.backward)
    return np.asarray(layers + costs.embedding[:2].sum(axis=0) + costs.head[:2].sum(axis=0))


def _plain_bound(group: Group, capacity: float) -> FloatArray:
    """Bound 1f1b, gpipe and zb-h1: the weights balance the ranks' marginal cost of a layer."""
    costs, work = group.costs, _work(group)
    whole, on_forward, on_backward, on_weight, transfers = path_coefficients(
        group.micro_batches, group.schedule, group.num_ranks
    )
    delays = whole + on_backward
    price = memory_price(group, capacity, delays)
    per_layer = priced_layers(group, delays, price)[0]
    per_layer += costs.forward[:, None] * on_forward
    per_layer += costs.backward[:, None] * on_backward
    if on_weight.any():
        per_layer += costs.weight[:, None] * on_weight
    mean = np.maximum(over_kinds(group.counts / group.counts.sum(), per_layer), 1e-9)
    weights = 1.0 / mean
    weights /= weights.sum(axis=0)
    ends = (costs.embedding[0] * on_forward[0] + costs.embedding[1] * on_backward[0]) * weights[0]
    ends += (costs.head[0] * on_forward[-1] + costs.head[1] * on_backward[-1]) * weights[-1]
    ends += costs.head[2] * on_weight[-1] * weights[-1]
    transfer = costs.transfer * (weights * transfers).sum(axis=0)
    fixed = over_fixed_bytes(group, weights * price, capacity)
    placed = over_kinds(group.counts, (weights * per_layer).min(axis=1))
    bound = (weights * whole).sum(axis=0) * work + placed + ends + transfer + fixed
    return np.asarray(np.maximum(bound, work))


def _interleaved_bound(group: Group, capacity: float) -> FloatArray:
    """Bound interleaved schedules with equal weights y_s = 1 / P, for which the bracket cancels.

    The coefficient of a layer on rank i is m / P + (P - 1 - i) / (P v). Every virtual stage but the first and the
    last holds some layers (``forced_layers``), at their extra cost over the cheapest position.
    """
    costs, work = group.costs, _work(group)
    P, m, v = group.num_ranks, group.micro_batches, group.vpp
    on_rank = (m + (P - 1 - group.ranks) / v) / P
    price = memory_price(group, capacity, on_rank)
    per_layer = priced_layers(group, on_rank, price)
    per_layer += (costs.forward + costs.backward)[:, None] * on_rank
    cheapest = per_layer.min(axis=(0, 2))
    excess = (per_layer - cheapest[None, :, None]).min(axis=1)
    forced = (excess * forced_layers(group)).sum(axis=(0, 1))
    placed = over_kinds(group.counts, cheapest) + forced
    ends = costs.embedding.sum(axis=0) * on_rank[0] + costs.head.sum(axis=0) * on_rank[-1]
    fixed = over_fixed_bytes(group, price, capacity)
    bound = placed + ends + costs.transfer * (P - 1.0) + fixed
    price = price * (m / on_rank)
    if group.forced:
        by_rank = rank_paths(group, capacity, price, costs).max(axis=0)
    else:
        by_rank = counted_bound(group, capacity, price)
    bound = np.maximum(bound, by_rank)
    return np.asarray(np.maximum(bound, work * m / P))


def _v_bound(group: Group, capacity: float) -> FloatArray:
    """Bound V schedules with equal weights y_s = 1 / P, so that a layer costs m / P of its work on any rank.

    The forward of chunk 0 on rank i is in the ramps of the P - 1 - i ranks after it: the embedding on rank 0, and
    on every other rank the minimum layers of an inner virtual stage.
    """
    costs, work = group.costs, _work(group)
    P, m = group.num_ranks, group.micro_batches
    on_rank = np.broadcast_to(m / P, (P, len(m)))
    price = memory_price(group, capacity, on_rank)
    layer_cost = (costs.forward + costs.backward + costs.weight) * (m / P)
    ends = (costs.embedding.sum(axis=0) + costs.head.sum(axis=0)) * (m / P)
    fixed = over_fixed_bytes(group, price, capacity)
    ramps = costs.embedding[0] * ((P - 1) / P) + costs.transfer * ((P - 1) / 2)
    ramps += group.min_inner_layers * costs.forward.min(axis=0) * ((P - 1) * (P - 2) / (2 * P))
    if costs.saved is not None:
        # The first micro-batch runs backward through some pairs, but none of its forwards is in a pair.
        layer_cost -= costs.saved.sum(axis=0) * np.maximum(m - P, 0.0) / P
        work = work - over_kinds(group.counts, costs.saved[1])
    # With memory, and without it where the multiplier is poor.
    priced = over_kinds(group.counts, priced_layers(group, on_rank, price).min(axis=(0, 2))) + fixed
    replays = over_kinds(group.counts, costs.extra.min(axis=0)) * (m / P)
    bound = over_kinds(group.counts, layer_cost) + ends + ramps + np.maximum(priced, replays)
    return np.asarray(np.maximum(bound, work))


def rank_paths(group: Group, capacity: float, price: FloatArray, before: CostColumns) -> FloatArray:
    """Even interleaving: return lower bounds of the paths through chunk 0 down to each rank s, [P, r].

    The path is m D_s + sum_{i < s} D_{0,i} + 2 s p, with the layers that every split puts there. Recomputation is
    priced rank by rank ([P, r]).

    Args:
        group: the layouts.
        capacity: bytes of a rank.
        price: multipliers of bytes above the capacity, [P, r].
        before: lower bounds of the constants of the ranks before rank s.
    """
    costs, m, forced = group.costs, group.micro_batches, group.forced_by_kind
    layer_ns = costs.forward + costs.backward + costs.extra.min(axis=0)
    first = over_kinds(forced[1], before.forward + before.backward + before.extra.min(axis=0))
    ramp = np.cumsum(first, axis=0) - first + 2 * group.ranks * before.transfer
    ramp[1:] += before.embedding.sum(axis=0)
    free = m * over_kinds(forced.sum(axis=0), layer_ns)
    rows = np.flatnonzero((price > 0).any(axis=0))
    if len(rows):
        part = group.take(rows)
        priced = priced_layers(part, np.broadcast_to(m[rows], price[:, rows].shape), price[:, rows])
        priced += (part.costs.forward + part.costs.backward)[:, None] * m[rows]
        tight = (forced[..., rows] * priced).sum(axis=(0, 1)) + price[:, rows] * excess_bytes(part, capacity)
        free[:, rows] = np.maximum(free[:, rows], tight)
    free[0] += m * costs.embedding.sum(axis=0)
    free[-1] += m * costs.head.sum(axis=0)
    return np.asarray(free + ramp)


RULES = {
    ScheduleClass.PLAIN: _plain_bound,
    ScheduleClass.INTERLEAVED: _interleaved_bound,
    ScheduleClass.V: _v_bound,
}
"""Bound of the paths of each class of schedules, [r]."""


HALVINGS = 24
"""Bisections of the interval that contains the minimum step time; the interval is a few layers wide."""
ROUNDING = 1e-9
"""Added to numbers of layers before they are rounded down."""

Lines = tuple[FloatArray, FloatArray]
"""Two lower bounds of a rank's time with n layers of a kind: start [2, P, r] + n * each [2, K, P, r]."""


def counted_bound(group: Group, capacity: float, price: FloatArray) -> FloatArray:
    """Interleaved, any split: return the minimum T at which the ranks can hold all layers of each kind, [r]."""
    start, each = _lines(group, capacity, price, group.costs)
    bound = np.zeros_like(group.micro_batches)
    for kind, count in enumerate(group.counts.tolist()):
        bound = np.maximum(bound, _min_time(count, start, each[:, kind]))
    return bound


def max_layers_on_ranks(context: LayoutContext, cutoff_ns: int) -> IntArray:
    """Several chunks: return the maximum layers of each kind that a rank holds in a plan at or below a step time,
    [K, P].

    Negative where not even zero layers stay below. Under V schedules it follows from all work of the rank, without
    memory.
    """
    types = np.array([context.costs.type_of(rank) for rank in range(context.layout.pp)])
    # A rank of each node type stands for all of them.
    ranks = np.unique(types, return_index=True)[1].tolist()
    groups = [_group_of(context, rank) for rank in ranks]
    min_costs = cheapest_costs([group.costs for group in groups])
    max_layers = np.zeros((len(groups[0].counts), len(types)), dtype=np.int64)
    for rank, group in zip(ranks, groups, strict=True):
        alike = types == types[rank]
        rule = _max_by_work if group.schedule_class is ScheduleClass.V else _max_by_lines
        max_layers[:, alike] = rule(context.on_rank(rank), group, cutoff_ns, min_costs)[:, alike]
    return max_layers


def _max_by_lines(context: LayoutContext, group: Group, cutoff_ns: int, before: CostColumns) -> IntArray:
    """Return the maximum layers of each kind below the lines of ``_lines`` at every multiplier, [K, P]."""
    corners = price_corners(group)
    repeated = np.zeros(len(corners), dtype=np.int64)
    group, before = group.take(repeated), before.take(repeated)
    start, each = _lines(group, float(context.capacity_bytes), np.concatenate(corners, axis=1), before)
    max_layers = np.floor((cutoff_ns - before.tail - start)[:, None] / each + ROUNDING)
    return np.asarray(max_layers.min(axis=(0, 3)).astype(np.int64))


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
    min_layers = np.array(context.layer_bounds, dtype=np.int64)[: group.num_ranks - 1, 0]
    layers = np.concatenate([[0], np.cumsum(min_layers)])[:, None]
    start = layers * before.forward.min(axis=0) + group.ranks * before.transfer
    start[0] += m * (costs.embedding.sum(axis=0) + costs.head.sum(axis=0))
    start[1:] += before.embedding[0]
    time_left = cutoff_ns - (before.tail - before.end_reduce) - start
    max_layers = np.floor(time_left / np.maximum(each, 1.0)[:, None] + ROUNDING)
    return np.asarray(max_layers[..., 0].astype(np.int64))


def least_constants(constants: CostColumns, members: IntArray, starts: IntArray) -> CostColumns:
    """Return the minimum of each constant over sets of layouts, and the maximum of what pairs save.

    Path sums and bytes rise with every constant but ``end_reduce``, whose difference from ``tail`` is the minimum,
    and ``saved``. So no plan of a layout in a set has smaller ones.

    Args:
        constants: of single layouts.
        members: their columns, set after set.
        starts: first member of each set.
    """
    own = constants.take(members)
    values = {item.name: getattr(own, item.name) for item in fields(CostColumns)}
    least: dict[str, Any] = {
        name: None if value is None else _EXTREMES.get(name, np.minimum).reduceat(value, starts, axis=-1)
        for name, value in values.items()
    }
    least["end_reduce"] = least["tail"] - np.minimum.reduceat(own.tail - own.end_reduce, starts)
    return CostColumns(**least)


_EXTREMES = {"saved": np.maximum}


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
    priced_start = start + forced + price * excess_bytes(group, capacity)
    return np.stack([start, priced_start]), np.stack([free, (m * work)[:, None] + cheapest])


def _min_time(count: float, start: FloatArray, each: FloatArray) -> FloatArray:
    """Return the minimum T, from below, with sum_s min over the lines of floor((T - start_s) / each_s) >= count,
    [r]; start, each [2, P, r]."""
    share = np.ceil(count / start.shape[1])
    at_share = (start + each * share).max(axis=0)
    # Some rank holds the share; if all can hold it, all layers are placed.
    low, high = at_share.min(axis=0), at_share.max(axis=0)
    for _ in range(HALVINGS):
        middle = 0.5 * (low + high)
        max_layers = np.floor((middle - start) / each + ROUNDING).min(axis=0)
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
