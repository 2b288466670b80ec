"""Lagrangian relaxation of memory in the bounds: live micro-batches, fixed bytes, and the multiplier of a byte.

For any multiplier (price) >= 0, T + price * (bytes - capacity) bounds the step time of every plan that fits from
below, and each layer chooses its recompute mode separately.

Arrays have the layouts on the last axis and the ranks before it: [P, r] for r layouts of P ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from enum import IntEnum
from functools import cache, cached_property, partial
from typing import Any

import numpy as np

from milpplan.optimize.space.plan_space import fewest_inner_layers, splits_into
from milpplan.problem import SCHEDULES, V_SCHEDULES, Problem
from milpplan.simulation import CostTable, FloatArray, IntArray, LayoutColumns, LayoutCosts, ascending
from milpplan.simulation.layers import Phase
from milpplan.simulation.pipeline.work_orders import num_pairs
from milpplan.simulation.stages import EMBEDDING, HEAD

OPTIONAL = ("saved", "late")
"""Fields of ``CostColumns`` that are None where no layout needs them."""


@dataclass(frozen=True, slots=True)
class CostColumns:
    """Parts of ``LayoutCosts`` as floats with the layout on the last axis; K kinds, M recompute modes in the
    space's order.

    Nanoseconds: ``forward``, ``backward`` (minimum over modes), ``weight`` (separate weight gradients) and
    ``optimizer`` [K, r] a layer; ``extra`` [M, K, r] of its recomputation; ``late`` [M, K, r] excess of its
    forward over the minimum (None where nothing is offloaded); ``embedding`` and ``head`` [3, r] a micro-batch;
    ``end_optimizer`` [2, r]; ``transfer`` [r]; ``tail`` [r], the embedding's gather and reduction and the barrier;
    ``end_reduce`` [r], the reduction in ``tail``.

    Bytes: ``states`` [K, r] and ``kept`` [M, K, r] a layer (kept a live micro-batch); ``deferred`` [K, r] a
    micro-batch that waits for weight gradients, ``head_deferred`` [r] of the head; ``buffers`` [r]; ``end_states``
    [2, r] with the head's workspace, ``end_kept`` [2, r] a live micro-batch (embedding, head).

    ``saved`` [2, K, r]: nanoseconds by which a layer's forward and its backward are shorter in a pair; None where
    no layout has pairs.
    """

    forward: FloatArray
    backward: FloatArray
    weight: FloatArray
    extra: FloatArray
    optimizer: FloatArray
    embedding: FloatArray
    head: FloatArray
    end_optimizer: FloatArray
    transfer: FloatArray
    tail: FloatArray
    end_reduce: FloatArray
    states: FloatArray
    kept: FloatArray
    deferred: FloatArray
    head_deferred: FloatArray
    buffers: FloatArray
    end_states: FloatArray
    end_kept: FloatArray
    saved: FloatArray | None
    late: FloatArray | None

    @staticmethod
    def of(costs: LayoutCosts, modes: tuple[str, ...]) -> CostColumns:
        """Sum the constants of many layouts."""
        duration, states = costs.duration_ns, costs.state_bytes.sum(axis=0)
        zero = np.zeros_like(costs.kept_bytes)
        extra = {"none": zero, "selective": duration[:, Phase.SELECTIVE], "full": duration[:, Phase.FULL]}
        dropped = {"none": zero, "selective": costs.dropped_selective_bytes, "full": costs.dropped_full_bytes}
        ends = states[[EMBEDDING, HEAD]]
        ends[1] += costs.head_workspace_bytes
        min_passes = costs.least_ns
        added = np.stack([extra[mode] for mode in modes]) - (min_passes[1] - duration[:, Phase.BACKWARD])
        values: dict[str, IntArray] = {
            "forward": min_passes[0],
            "backward": min_passes[1],
            "weight": duration[:, Phase.WEIGHT],
            "extra": added,
            "optimizer": costs.optimizer_ns[:EMBEDDING],
            "embedding": costs.embedding_ns,
            "head": costs.head_ns,
            "end_optimizer": costs.optimizer_ns[[EMBEDDING, HEAD]],
            "transfer": costs.transfer_ns,
            "tail": costs.barrier_ns + costs.reduce_ns[EMBEDDING] + costs.gather_ns[EMBEDDING],
            "end_reduce": costs.reduce_ns[EMBEDDING],
            "states": states[:EMBEDDING],
            "kept": np.stack([costs.kept_bytes - dropped[mode] for mode in modes]),
            "deferred": costs.deferred_bytes,
            "head_deferred": costs.head_deferred_bytes,
            "buffers": costs.buffer_bytes,
            "end_states": ends,
            "end_kept": np.stack([costs.embedding_kept_bytes, costs.head_kept_bytes]),
        }
        saved = _saved_in_pairs(costs) if costs.runs_pairs else None
        late = _late_forwards(costs, modes) if costs.offloads else None
        floats = {name: value.astype(np.float64) for name, value in values.items()}
        return CostColumns(**floats, saved=saved, late=late)

    @staticmethod
    def of_layers(layers: FloatArray) -> CostColumns:
        """Return columns with the given forwards, backwards and weight gradients of layers, [K, Phase, r] ns; all
        else is zero."""
        none = np.zeros_like(layers[:, 0])
        values = dict.fromkeys((field.name for field in fields(CostColumns)), none[0])
        values |= dict.fromkeys(("optimizer", "states", "deferred"), none)
        values |= dict.fromkeys(("extra", "kept"), none[None])
        values |= dict.fromkeys(("embedding", "head"), np.zeros((3, none.shape[1])))
        values |= dict.fromkeys(("end_optimizer", "end_states", "end_kept"), np.zeros((2, none.shape[1])))
        values |= {"forward": layers[:, Phase.FORWARD], "backward": layers[:, Phase.BACKWARD]}
        return CostColumns(**values | {"weight": layers[:, Phase.WEIGHT], "saved": None, "late": None})

    def take(self, rows: IntArray) -> CostColumns:
        """Return the chosen layouts."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        taken: dict[str, Any] = {
            name: None if value is None else value.take(rows, axis=-1) for name, value in values.items()
        }
        return CostColumns(**taken)


def _late_forwards(costs: LayoutCosts, modes: tuple[str, ...]) -> FloatArray:
    """Return ``CostColumns.late``."""
    alone = costs.duration_ns[:, Phase.FORWARD]
    replayed = {"selective": costs.replayed_forward_ns[0], "full": costs.replayed_forward_ns[1]}
    return np.stack([alone + replayed.get(mode, 0) - costs.least_ns[0] for mode in modes]).astype(np.float64)


def _saved_in_pairs(costs: LayoutCosts) -> FloatArray:
    """Return ``CostColumns.saved``, zero for layouts without pairs."""
    alone = np.stack([costs.duration_ns[:, Phase.FORWARD], costs.duration_ns[:, Phase.BACKWARD]])
    paired = np.moveaxis(costs.paired_ns, 1, 0)
    return np.where(paired.any(axis=(0, 1)), alone - paired, 0).astype(np.float64)


GPIPE, INTERLEAVED, ZB_H1 = map(SCHEDULES.index, ("gpipe", "interleaved", "zb-h1"))
GROUP_NUMBERS = 65_536
"""Size of an array [P, r]: small enough for the cache, large enough that calls cost little."""


class ScheduleClass(IntEnum):
    """Classes of schedules that share a bound."""

    PLAIN = 0
    INTERLEAVED = 1
    V = 2


_CLASSES = np.array(
    [
        ScheduleClass.V if name in V_SCHEDULES else ScheduleClass.INTERLEAVED * (name == "interleaved")
        for name in SCHEDULES
    ]
)


@dataclass(frozen=True)
class Group:
    """Layouts with equal pp and class of schedule; arrays [r] or, with ranks, [P, r]."""

    num_ranks: int
    schedule_class: ScheduleClass
    micro_batches: FloatArray
    vpp: FloatArray
    schedule: IntArray
    costs: CostColumns
    counts: FloatArray
    """Layers of each kind, [K]."""
    forced_of: Callable[[], dict[int, FloatArray]]
    min_inner_layers: int
    """Minimum layers of an inner virtual stage, under V schedules."""

    def take(self, rows: IntArray) -> Group:
        """Return the chosen layouts."""
        if len(rows) == len(self.vpp):
            return self
        return Group(
            self.num_ranks,
            self.schedule_class,
            self.micro_batches[rows],
            self.vpp[rows],
            self.schedule[rows],
            self.costs.take(rows),
            self.counts,
            self.forced_of,
            self.min_inner_layers,
        )

    @property
    def forced(self) -> dict[int, FloatArray]:
        """Even interleaving: for each number of virtual stages a rank, the layers of each kind that the last, the
        first and the other chunks of each rank hold in every split, [3, K, P]."""
        return self.forced_of()

    @property
    def head_rank(self) -> int:
        """Rank of the model's last virtual stage."""
        return 0 if self.schedule_class is ScheduleClass.V else self.num_ranks - 1

    @cached_property
    def waiting(self) -> FloatArray | None:
        """Micro-batches of a rank that wait for weight gradients at the moment of ``live``, [P, r]; None: none.

        zb-h1: when rank s first has P - s micro-batches alive and its maximum number waiting, before backward k =
        min(s, m - P + s), it has run k backwards and no weight gradient.
        """
        split = self.schedule == ZB_H1
        if not split.any():
            return None
        waits = np.clip(self.micro_batches - self.num_ranks + self.ranks, 0.0, self.ranks)
        return np.where(split, waits, 0.0)

    @cached_property
    def state_bytes_per_layer(self) -> FloatArray:
        """Bytes of a layer under any recomputation: states, and data that waits for weight gradients, [K, P or 1,
        r]."""
        states = self.costs.states[:, None]
        return states if self.waiting is None else states + self.waiting * self.costs.deferred[:, None]

    @cached_property
    def live(self) -> tuple[FloatArray, ...]:
        """Micro-batches alive when the warm-up of a rank ends, [P, r] each: one array without interleaving, else
        for its last, first and any other chunk (V schedules have no other).

        1f1b and zb-h1 min(m, P - s), gpipe m. V schedules: before its first backward a rank has run s + 1 forwards
        of its second chunk and 2 P - 1 - s of its first, if there are as many. Interleaved: the warm-up and a
        forward are 2 (P - s - 1) + (v - 1) P + 1 items, P a chunk in order, so the last chunk has
        min(P, 2 (P - s - 1) + 1), the first P + max(0, P - 2 s - 1), others P.
        """
        m, P = self.micro_batches, self.num_ranks
        depth = P - self.ranks
        if self.schedule_class is ScheduleClass.V:
            return np.minimum(m, self.ranks + 1), np.minimum(m, P + depth - 1)
        if self.schedule_class is not ScheduleClass.INTERLEAVED:
            whole = (self.schedule == GPIPE) & (P > 1)
            return (np.where(whole, m, np.minimum(m, depth)),)
        last = np.broadcast_to(np.minimum(float(P), 2 * depth - 1), (P, len(m)))
        first = np.minimum(P + np.maximum(0.0, 2 * depth - 1 - P), m)
        return last, first, np.where(self.vpp > 2, float(P), first)

    @cached_property
    def forced_by_kind(self) -> FloatArray:
        """``forced`` of every layout, [3, K, P, r]."""
        values, index = np.unique(self.vpp, return_inverse=True)
        return np.stack([self.forced[int(v)] for v in values], axis=-1).take(index, axis=-1)

    @cached_property
    def pairs(self) -> tuple[FloatArray, FloatArray] | None:
        """Number of pairs of every rank with the forward of its first chunk, and with that of its second chunk,
        [P, r] each; None where no layout of the group has pairs."""
        if self.costs.saved is None or self.schedule_class is not ScheduleClass.V:
            return None
        runs = self.costs.saved.any(axis=(0, 1))
        first, second = num_pairs(self.num_ranks, self.micro_batches, self.ranks)
        return np.where(runs, first, 0.0), np.where(runs, second, 0.0)

    @property
    def ranks(self) -> FloatArray:
        """Rank numbers as a column [P, 1]."""
        return np.arange(self.num_ranks, dtype=np.float64)[:, None]


def groups(problem: Problem, columns: LayoutColumns, costs: CostTable) -> Iterator[tuple[IntArray, Group]]:
    """Yield the layouts in groups, each with its row numbers."""
    return groups_of(problem, columns, CostColumns.of(costs.distinct, problem.recompute_modes), costs.place)


def groups_of(
    problem: Problem, columns: LayoutColumns, constants: CostColumns, index: IntArray
) -> Iterator[tuple[IntArray, Group]]:
    """Yield groups of layouts with their row numbers; ``index`` [n] selects each layout's constants."""
    counts = np.bincount(np.array(problem.model.layer_kinds), minlength=len(problem.model.kinds))
    m, vpp = columns.num_micro_batches.astype(np.float64), columns.vpp.astype(np.float64)
    classes = _CLASSES[columns.schedule]
    key = len(ScheduleClass) * columns.pp + classes
    # Stable: neighbours share constants, so gathers stay local.
    order = np.argsort(key, kind="stable")
    edges = np.flatnonzero(np.diff(key[order], prepend=-1, append=-1))
    for first, last in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        num_ranks = int(columns.pp[order[first]])
        size = max(1, GROUP_NUMBERS // num_ranks)
        schedule_class = ScheduleClass(int(classes[order[first]]))
        interleaved = schedule_class is ScheduleClass.INTERLEAVED
        common_layers = partial(_layers_in_every_split, problem, num_ranks, vpp[order[first:last]])
        forced_of: Callable[[], dict[int, FloatArray]] = cache(common_layers) if interleaved else dict
        for start in range(first, last, size):
            rows = order[start : min(start + size, last)]
            yield (
                rows,
                Group(
                    num_ranks,
                    schedule_class,
                    m[rows],
                    vpp[rows],
                    columns.schedule[rows],
                    constants.take(index[rows]),
                    counts.astype(np.float64),
                    forced_of,
                    fewest_inner_layers(problem, 2, 2 * num_ranks),
                ),
            )


def over_kinds(counts: FloatArray, values: FloatArray) -> FloatArray:
    """Return sum_k counts_k values_k of values [K, ...]: faster than a general product for few kinds."""
    total = counts[0] * values[0]
    for count, value in zip(counts[1:], values[1:], strict=True):
        total = total + count * value
    return np.asarray(total)


def end_bytes(group: Group) -> tuple[FloatArray, FloatArray]:
    """Return the bytes of the model's ends, embedding on the first rank and head on
    ``Group.head_rank``, [r] each."""
    costs, live = group.costs, group.live
    first = (
        costs.end_states[0] + live[0 if group.schedule_class is ScheduleClass.PLAIN else 1][0] * costs.end_kept[0]
    )
    last = costs.end_states[1] + live[0][group.head_rank] * costs.end_kept[1]
    if group.waiting is not None:
        last = last + group.waiting[group.head_rank] * costs.head_deferred
    return first, last


def excess_bytes(group: Group, capacity: float) -> FloatArray:
    """Return the bytes of every rank without layers, less the capacity, [P, r]."""
    fixed_bytes = group.costs.buffers - capacity
    excess = np.full((group.num_ranks, len(fixed_bytes)), fixed_bytes)
    first, last = end_bytes(group)
    excess[0] += first
    excess[group.head_rank] += last
    return excess


def over_fixed_bytes(group: Group, weights: FloatArray, capacity: float = 0.0) -> FloatArray:
    """Return sum_s weights_s (bytes of rank s without layers - capacity), [r]; weights [P, r]."""
    first, last = end_bytes(group)
    total = (group.costs.buffers - capacity) * weights.sum(axis=0)
    return np.asarray(total + weights[0] * first + weights[group.head_rank] * last)


def _layers_in_every_split(problem: Problem, num_ranks: int, vpp: FloatArray) -> dict[int, FloatArray]:
    """Return ``Group.forced`` for the numbers of virtual stages that occur; empty where splits are free."""
    kinds, num_kinds = np.array(problem.model.layer_kinds), len(problem.model.kinds)
    before = np.zeros((num_kinds, len(kinds) + 1))
    np.cumsum(kinds == np.arange(num_kinds)[:, None], axis=1, out=before[:, 1:])
    layers_by_vpp = {}
    for v in ascending(vpp).astype(np.int64).tolist():
        splits = splits_into(problem, v, v * num_ranks)
        if splits is None:
            return {}
        edges = np.cumsum(np.array(splits, dtype=np.int64).reshape(-1, v * num_ranks), axis=1)
        layers = np.diff(before[:, np.pad(edges, ((0, 0), (1, 0)))], axis=2)
        minimum = layers.min(axis=1, initial=len(kinds)).reshape(num_kinds, v, num_ranks)
        layers_by_vpp[v] = np.stack([minimum[:, -1], minimum[:, 0], minimum[:, 1:-1].sum(axis=1)])
    return layers_by_vpp


def forced_layers(group: Group) -> FloatArray:
    """Return the layers that every plan has in the last, the first and the other chunks of each rank, [3, P, r].

    These are the layers common to all even splits; else one layer in an inner virtual stage and none in the
    model's first and last.
    """
    if group.forced:
        return np.asarray(group.forced_by_kind.sum(axis=1))
    forced = np.ones((3, group.num_ranks, len(group.vpp)))
    forced[0, -1] = forced[1, 0] = 0.0
    forced[2] = np.maximum(group.vpp - 2, 0.0)
    return forced


def priced_layers(group: Group, on_backward: FloatArray, price: FloatArray) -> FloatArray:
    """Return recomputation and memory cost of one layer by kind of chunk (``Group.live``), [C, K, P, r].

    The cost is the cheapest mode's extra time (times ``on_backward`` [P, r]) plus the price [P, r] of its bytes.
    """
    costs, num_kinds = group.costs, len(group.counts)
    priced = np.empty((len(group.live), num_kinds, *price.shape))
    for kind in range(num_kinds):
        extra, states = costs.extra[:, kind, None] * on_backward, group.state_bytes_per_layer[kind] * price
        for chunk, live in enumerate(group.live):
            best = _cheapest_mode(extra, costs.kept[:, kind], price * live, out=priced[chunk, kind])
            best += states
    return priced


def _cheapest_mode(extra: FloatArray, kept: FloatArray, cost: FloatArray, out: FloatArray) -> FloatArray:
    """Return min over modes of extra [M, P, r] + kept [M, r] * cost, [P, r]."""
    np.multiply(kept[0], cost, out=out)
    out += extra[0]
    for mode_time, mode_bytes in zip(extra[1:], kept[1:], strict=True):
        mode_cost = mode_bytes * cost
        mode_cost += mode_time
        np.minimum(out, mode_cost, out=out)
    return out


def memory_price(group: Group, capacity: float, on_backward: FloatArray) -> FloatArray:
    """Return the multiplier of a byte on each rank that bounds best at the balanced placement, [P, r].

    The bound is concave and piecewise linear in the multiplier, with corners where two modes of a layer cost the
    same; the corners are tried. The balanced rank holds counts / P layers: the forced layers in their chunks, the
    rest where they keep least, in the last chunk.
    """
    costs, live = group.costs, group.live
    share = group.counts / group.num_ranks
    extra = over_kinds(share / share.sum(), costs.extra.swapaxes(0, 1))
    kept = over_kinds(share / share.sum(), costs.kept.swapaxes(0, 1))
    if group.schedule_class is ScheduleClass.INTERLEAVED:
        chunk_layers = forced_layers(group)
        chunk_layers[0] += np.maximum(share.sum() - chunk_layers.sum(axis=0), 0.0)
    else:
        chunk_layers = np.full((len(live), *live[0].shape), share.sum() / len(live))
    needed = excess_bytes(group, capacity) + over_kinds(share, group.state_bytes_per_layer)
    alive = chunk_layers[0] * live[0]
    for layers, micro_batches in zip(chunk_layers[1:], live[1:], strict=True):
        alive += layers * micro_batches
    rows = np.flatnonzero((needed + alive * kept.max(axis=0) > 0).any(axis=0))
    if len(rows) == len(group.vpp):
        return _best_corner(extra, kept, live, chunk_layers, needed, on_backward)
    price = np.zeros_like(needed)
    if len(rows):
        price[:, rows] = _best_corner(
            extra[:, rows],
            kept[:, rows],
            tuple(chunk[:, rows] for chunk in live),
            chunk_layers[..., rows],
            needed[:, rows],
            on_backward[:, rows],
        )
    return price


def price_corners(group: Group) -> list[FloatArray]:
    """Return multipliers, [P, r] each, at which two modes of a layer of some kind cost the same in some chunk, and
    zero."""
    costs = group.costs
    on_backward = np.repeat(group.micro_batches[None], group.num_ranks, axis=0)
    corners = [np.zeros_like(on_backward)]
    for kind in range(len(group.counts)):
        for live in group.live:
            corners += _corners(costs.extra[:, kind], costs.kept[:, kind], live, on_backward)
    return corners


def _best_corner(
    extra: FloatArray,
    kept: FloatArray,
    live: tuple[FloatArray, ...],
    chunk_layers: FloatArray,
    needed: FloatArray,
    on_backward: FloatArray,
) -> FloatArray:
    """Return the corner with the best bound, [P, r]; zero where nothing is forced.

    ``extra`` and ``kept`` [M, r] are those of the mean layer, ``chunk_layers`` [C, P, r] its layers in each kind
    of chunk.
    """
    best, cheapest = np.zeros_like(needed), np.empty_like(needed)
    replayed = extra[:, None] * on_backward
    value = chunk_layers.sum(axis=0) * on_backward * extra.min(axis=0)
    for alive in live[::2]:
        for price in _corners(extra, kept, alive, on_backward):
            bound = price * needed
            for layers, micro_batches in zip(chunk_layers, live, strict=True):
                bound += layers * _cheapest_mode(replayed, kept, micro_batches * price, out=cheapest)
            better = bound > value
            np.copyto(best, price, where=better)
            np.copyto(value, bound, where=better)
    return best


def _corners(extra: FloatArray, kept: FloatArray, live: FloatArray, on_backward: FloatArray) -> list[FloatArray]:
    """Return the multipliers at which two recompute modes of the mean layer cost the same, [P, r] each."""
    scale = on_backward / live
    return [
        scale * (np.maximum(extra[j] - extra[i], 0.0) / np.maximum(kept[i] - kept[j], 1.0))
        for i in range(len(extra))
        for j in range(i + 1, len(extra))
    ]
