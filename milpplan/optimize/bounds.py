"""Proved lower bounds on step time and peak memory of every layout at once.

Each bound is a convex combination, with weights y_s over the pipeline ranks, of path sums (or of ranks'
memories) that hold for every plan of the layout; it is then minimised over all ways to place the layers, which
is a minimum over ranks because the combination is linear in the layers. Any weights give a valid bound; those
used here are near the best ones. The paths, for rank s of P, m micro-batches, F and B the durations of virtual
stages, p a transfer, D = F + B:

1f1b (m >= P - s)  sum_j D_j + (m - P + s) F_s + (m - 1) B_s + 2 (P - 1) p
   first micro-batch down to the last stage and back to s, the rest of rank s, last micro-batch back to 0.
1f1b (otherwise)   sum_{i < s} D_i + m D_s + 2 s p
gpipe              sum_j D_j + (m - 1) D_s + 2 (P - 1) p
interleaved        m D_s + sum_{i < s} D_{c,i} + 2 s p + [sum_i F_{<c,i} - P F_{<c,s}]  for every chunk c, where
   F_{<c,i} sums chunks before c on rank i: micro-batch 0 flows through c chunks, then down to rank s. The same
   holds for backwards from the end. Averaged over c; with equal weights the bracket cancels.

Memory enters by Lagrangian relaxation: for any price l_s >= 0 of a byte on rank s, adding
l_s (bytes_s - capacity) <= 0 keeps a bound, and every layer then chooses the cheapest of not being recomputed,
selectively, or wholly. Prices are chosen at the balanced placement.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from milpplan.costs.columns import FloatArray, IntArray, LayoutColumns, unique_rows
from milpplan.costs.layers import EXPOSED, Phase
from milpplan.costs.layout_costs import LAYER_KEYS, LayoutCosts, layer_durations_ns, usable_memory_bytes
from milpplan.costs.stages import EMBEDDING, HEAD
from milpplan.optimize.pricing import (
    GPIPE,
    INTERLEAVED,
    Group,
    fixed_bytes,
    forced_layers,
    least_kept,
    memory_price,
    over_kinds,
    priced_layers,
)
from milpplan.specs.problem import Problem

SAFETY = 1.0 - 1e-12
"""Floating-point sums are a few ulps off; bounds are scaled down by more than that."""


@dataclass(frozen=True, slots=True)
class LayoutBounds:
    """Lower bounds over all plans of each layout: nanoseconds and bytes, arrays [n]. The time is left at zero
    where the memory bound alone decides."""

    step_time_ns: FloatArray
    memory_bytes: FloatArray


def compute_bounds(problem: Problem, columns: LayoutColumns) -> FloatArray:
    """Lower bounds of the step time from the layers' compute alone, nanoseconds [n].

    No memory and no sharding, so only the distinct layers are costed. It is the mean over the ranks of the paths
    above, F and B being the forwards and backwards of the whole model: (m F + (m + P - 1) B) / P for 1f1b,
    m (F + B) / P in general, and at least one micro-batch through the whole model.
    """
    rows, inverse = unique_rows(*(getattr(columns, name) for name in LAYER_KEYS))
    layers = layer_durations_ns(problem, columns.take(rows))
    counts = np.bincount(np.array(problem.model.layer_kinds), minlength=len(layers)).astype(np.float64)
    forward = over_kinds(counts, layers[:, Phase.FORWARD].astype(np.float64))[inverse]
    backward = over_kinds(counts, layers[:, Phase.BACKWARD].astype(np.float64))[inverse]
    m, P = columns.num_micro_batches, columns.pp
    deep = (columns.schedule != INTERLEAVED) & (m >= P)
    ramp = np.where(deep, P - 1, 0)
    bound = (m * forward + (m + ramp) * backward) / P
    return np.asarray(np.maximum(bound, forward + backward) * SAFETY)


def layout_bounds(
    problem: Problem, columns: LayoutColumns, costs: LayoutCosts, chunk_rows: int = 16384
) -> LayoutBounds:
    """Lower bounds of every layout, valid for the problem's space."""
    time = np.zeros(len(columns))
    memory = np.zeros(len(columns))
    kinds = np.array(problem.model.layer_kinds)
    counts = np.bincount(kinds, minlength=len(problem.model.kinds)).astype(np.float64)
    capacity = float(usable_memory_bytes(problem))
    modes = problem.space.recompute
    for pp in np.unique(columns.pp):
        rows_of_pp = np.flatnonzero(columns.pp == pp)
        size = max(256, chunk_rows // int(pp))
        for start in range(0, len(rows_of_pp), size):
            rows = rows_of_pp[start : start + size]
            part = columns.take(rows)
            group = Group(
                int(pp),
                part.num_micro_batches.astype(np.float64),
                part.vpp.astype(np.float64),
                part.schedule,
                costs.take(rows),
                counts,
                problem.space.interleaved_layers == "even",
            )
            memory[rows] = _memory_bound(group, modes)
            fits = np.flatnonzero(memory[rows] * SAFETY <= capacity)
            time[rows[fits]] = _time_bound(group.take(fits), capacity, modes)
    return LayoutBounds(time * SAFETY, memory * SAFETY)


def _memory_bound(group: Group, modes: tuple[str, ...]) -> FloatArray:
    """max_s M_s >= sum_s y_s M_s, minimised over the placement of the layers."""
    least = least_kept(group.costs, modes)
    live = np.minimum(*group.live[:2])
    states = group.costs.state_bytes.sum(axis=0)[:-2]
    fixed = fixed_bytes(group)
    per_layer = states[:, :, None] + least[:, :, None] * live[None]
    weights = 1.0 / over_kinds(group.counts / group.counts.sum(), per_layer)
    weights /= weights.sum(axis=1, keepdims=True)
    placed = over_kinds(group.counts, (weights[None] * per_layer).min(axis=2))
    return np.asarray(placed + (weights * fixed).sum(axis=1))


def path_coefficients(
    micro_batches: FloatArray, schedule: IntArray, num_ranks: int
) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """(whole, on_forward, on_backward, transfers), each [r, P], of 1f1b and gpipe: rank s's path is
    whole * sum_j D_j + on_forward * F_s + on_backward * B_s + transfers * p (+ sum_{i < s} D_i if whole = 0).

    ``micro_batches`` [r, 1], ``schedule`` [r].
    """
    m, P = micro_batches, num_ranks
    s = np.arange(P, dtype=np.float64)[None, :]
    gpipe = (schedule == GPIPE)[:, None]
    deep = (m >= P - s) | gpipe
    forward = np.where(deep, np.where(gpipe, m - 1, m - P + s), m)
    backward = np.where(deep, m - 1, m)
    transfers = np.where(deep, 2.0 * (P - 1), 2 * s)
    return deep.astype(np.float64), forward, backward, transfers


def _time_bound(group: Group, capacity: float, modes: tuple[str, ...]) -> FloatArray:
    interleaved = group.schedule == INTERLEAVED
    bound = np.zeros(len(group.micro_batches))
    for mask, rule in ((~interleaved, _plain_bound), (interleaved, _interleaved_bound)):
        rows = np.flatnonzero(mask)
        if len(rows):
            bound[rows] = rule(group.take(rows), capacity, modes)
    return bound + _tail(group)


def _tail(group: Group) -> FloatArray:
    """After the last backward: the reduction of what rank 0 holds whatever the plan (the embedding), the
    barrier, and the mean rank's optimizer; before the first forward: the embedding's gather."""
    costs = group.costs
    optimizer = over_kinds(group.counts, costs.optimizer_ns[:-2].astype(np.float64))
    optimizer = (optimizer + costs.optimizer_ns[EMBEDDING] + costs.optimizer_ns[HEAD]) / group.num_ranks
    # Without a pipeline the last reduction and the first gather also hold whatever is not a layer.
    return np.asarray(costs.barrier_ns + optimizer + costs.reduce_ns[EMBEDDING] + costs.gather_ns[EMBEDDING])


@dataclass(frozen=True, slots=True)
class _Durations:
    """Per layer kind [K, r] and for the ends [r], nanoseconds."""

    forward: FloatArray
    backward: FloatArray
    embedding: FloatArray
    head: FloatArray


def _durations(group: Group) -> _Durations:
    duration = group.costs.duration_ns.astype(np.float64)
    return _Durations(
        duration[:, Phase.FORWARD],
        duration[:, Phase.BACKWARD],
        group.costs.embedding_ns[EXPOSED].sum(axis=0).astype(np.float64),
        group.costs.head_ns[EXPOSED].sum(axis=0).astype(np.float64),
    )


def _plain_bound(group: Group, capacity: float, modes: tuple[str, ...]) -> FloatArray:
    """1f1b and gpipe: weights that balance the ranks' marginal cost of a layer."""
    d = _durations(group)
    whole, on_forward, on_backward, transfers = path_coefficients(
        group.micro_batches[:, None], group.schedule, group.num_ranks
    )
    work = over_kinds(group.counts, d.forward + d.backward) + d.embedding.sum(0) + d.head.sum(0)
    price = memory_price(group, capacity, modes, whole + on_backward)
    compute = d.forward[:, :, None] * on_forward[None] + d.backward[:, :, None] * on_backward[None]
    memory = priced_layers(group, modes, whole + on_backward, price)[0]
    per_layer = compute + memory
    mean = np.maximum(over_kinds(group.counts / group.counts.sum(), per_layer), 1e-9)
    weights = 1.0 / mean
    weights /= weights.sum(axis=1, keepdims=True)
    ends = _ends(d.embedding, on_forward, on_backward, 0) * weights[:, 0]
    ends += _ends(d.head, on_forward, on_backward, -1) * weights[:, -1]
    transfer = group.costs.transfer_ns * (weights * transfers).sum(axis=1)
    fixed = (weights * price * (fixed_bytes(group) - capacity)).sum(axis=1)
    placed = over_kinds(group.counts, (weights[None] * per_layer).min(axis=2))
    bound = (weights * whole).sum(axis=1) * work + placed + ends + transfer + fixed
    return np.asarray(np.maximum(bound, work))


def _ends(end: FloatArray, on_forward: FloatArray, on_backward: FloatArray, rank: int) -> FloatArray:
    return np.asarray(end[0] * on_forward[:, rank] + end[1] * on_backward[:, rank])


def _interleaved_bound(group: Group, capacity: float, modes: tuple[str, ...]) -> FloatArray:
    """Interleaved: equal weights y_s = 1 / P, for which the bracket cancels; the coefficient of a layer on rank
    i is m / P + (P - 1 - i) / (P v). Every virtual stage but the first and the last holds some layers
    (``forced_layers``), whatever that costs more than the cheapest place."""
    d = _durations(group)
    P, m, v = group.num_ranks, group.micro_batches[:, None], group.vpp[:, None]
    on_rank = (m + (P - 1 - group.ranks) / v) / P
    price = memory_price(group, capacity, modes, on_rank)
    compute = (d.forward + d.backward)[:, :, None] * on_rank[None]
    per_layer = compute[None] + priced_layers(group, modes, on_rank, price)
    cheapest = per_layer.min(axis=(0, 3))
    excess = (per_layer - cheapest[None, :, :, None]).min(axis=1)
    forced = (excess * forced_layers(group)).sum(axis=(0, 2))
    placed = over_kinds(group.counts, cheapest) + forced
    ends = d.embedding.sum(0) * on_rank[:, 0] + d.head.sum(0) * on_rank[:, -1]
    fixed = (price * (fixed_bytes(group) - capacity)).sum(axis=1)
    work = over_kinds(group.counts, d.forward + d.backward) + d.embedding.sum(0) + d.head.sum(0)
    bound = placed + ends + group.costs.transfer_ns * (P - 1.0) + fixed
    return np.asarray(np.maximum(bound, work * group.micro_batches / P))
