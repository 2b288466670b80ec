"""The uniform space: equal virtual stages and one recompute setting, so a layout has one plan a setting.

The plan is known, so its bound is the largest of its path sums, and nothing is left to minimise over.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from milpplan.costs.columns import FloatArray, IntArray, LayoutColumns, unique_rows
from milpplan.costs.distinct import distinct_layers
from milpplan.costs.layout_costs import CostTable, layer_durations_ns, usable_memory_bytes
from milpplan.costs.uniform_stages import uniform_plan
from milpplan.optimize.bounds import SAFETY, path_coefficients
from milpplan.optimize.pricing import Group, Sort, end_bytes, groups, groups_of
from milpplan.optimize.row_costs import RowCosts
from milpplan.specs.problem import Problem

__all__ = ["UniformBounds", "rank_work", "uniform_bounds", "uniform_compute_bounds", "uniform_plan"]


@dataclass(frozen=True, slots=True)
class UniformBounds:
    """Per layout and recompute setting (in the space's order): arrays [n, modes]. The time is left at zero where
    the plan does not fit."""

    step_time_ns: FloatArray
    memory_bytes: FloatArray


def uniform_bounds(problem: Problem, columns: LayoutColumns, costs: CostTable) -> UniformBounds:
    """Lower bounds on the time and memory of each layout's plans, all layouts at once."""
    modes, capacity = problem.recompute_modes, usable_memory_bytes(problem)
    time = np.zeros((len(columns), len(modes)))
    memory = np.zeros((len(columns), len(modes)))
    for rows, group in groups(problem, columns, costs):
        held = _HeldLayers.of(problem, group)
        for index in range(len(modes)):
            peak = _memory(group, held, index)
            memory[rows, index] = peak
            fits = np.flatnonzero(peak * SAFETY <= capacity)
            if len(fits):
                time[rows[fits], index] = _time(group.take(fits), held.take(fits), index)
    return UniformBounds(time * SAFETY, memory * SAFETY)


def uniform_compute_bounds(problem: Problem, columns: LayoutColumns) -> FloatArray:
    """Lower bounds of the step time of uniform plans from the layers' compute alone, whatever is recomputed,
    nanoseconds [n]: the longest of the same path sums, of layers without recomputation and of nothing else. Zero
    where the schedule runs pairs, which may be shorter than their layers.
    """
    layer_rows, layer = distinct_layers(problem, columns)
    layers = layer_durations_ns(problem, columns.take(layer_rows)).astype(np.float64)
    # Other orders of ranks often change nothing here.
    first, same = unique_rows(layer, columns.pp, columns.vpp, columns.schedule, columns.num_micro_batches)
    part, time = columns.take(first), np.zeros(len(first))
    for rows, group in groups_of(problem, part, RowCosts.of_layers(layers), layer[first]):
        time[rows] = _time(group, _HeldLayers.of(problem, group), 0)
    return np.where(part.runs_pairs, 0.0, time * SAFETY)[same]


@dataclass(frozen=True, slots=True)
class _HeldLayers:
    """Layers of each kind on each rank, and in its first chunk: [K, P, u] for the u numbers of virtual stages
    that occur; ``place`` [r] says which is a layout's."""

    total: FloatArray
    first: FloatArray
    place: IntArray

    @staticmethod
    def of(problem: Problem, group: Group) -> _HeldLayers:
        kinds, pp = np.array(problem.model.layer_kinds), group.num_ranks
        layers, num_kinds = len(kinds), len(problem.model.kinds)
        prefix = np.zeros((num_kinds, layers + 1), dtype=np.int64)
        for kind in range(num_kinds):
            np.cumsum(kinds == kind, out=prefix[kind, 1:])
        values, place = np.unique(group.vpp, return_inverse=True)
        total = np.zeros((num_kinds, pp, len(values)))
        first = np.zeros_like(total)
        for column, vpp in enumerate(values.astype(np.int64).tolist()):
            each = -(-layers // (pp * vpp))
            edges = prefix[:, np.minimum(np.arange(pp * vpp + 1) * each, layers)]
            held = np.diff(edges, axis=1).reshape(num_kinds, vpp, pp)
            if group.sort is Sort.V:
                held[:, 1] = held[:, 1, ::-1].copy()
            total[..., column], first[..., column] = held.sum(axis=1), held[:, 0]
        return _HeldLayers(total, first, place)

    def take(self, rows: IntArray) -> _HeldLayers:
        """The chosen layouts."""
        return _HeldLayers(self.total, self.first, self.place[rows])

    def on_ranks(self, per_layer: FloatArray) -> FloatArray:
        """sum_k layers of kind k * per_layer [K, r] (or [K, P, r]) on each rank, [P, r]."""
        return _over(self.total, self.place, per_layer)

    def in_first_chunks(self, per_layer: FloatArray) -> FloatArray:
        """The same of the first chunk of each rank."""
        return _over(self.first, self.place, per_layer)


def _over(held: FloatArray, place: IntArray, per_layer: FloatArray) -> FloatArray:
    total = held[0][:, place] * per_layer[0]
    for layers, value in zip(held[1:], per_layer[1:], strict=True):
        total += layers[:, place] * value
    return np.asarray(total)


def _time(group: Group, held: _HeldLayers, mode: int) -> FloatArray:
    costs, pp, m = group.costs, group.num_ranks, group.micro_batches
    backward, turns = costs.backward + costs.extra[mode], group.sort is Sort.V
    # V schedules: the path of a rank ends there.
    ramp = held.in_first_chunks(costs.forward if turns else costs.forward + backward)
    ramp[0] += costs.embedding[0] if turns else costs.embedding.sum(axis=0)
    f, b = held.on_ranks(costs.forward), held.on_ranks(backward)
    w = held.on_ranks(costs.weight) if turns or group.waiting is not None else np.zeros_like(f)
    for part, own in enumerate((f, b, w)):
        own[0] += costs.embedding[part]
        own[group.head_rank] += costs.head[part]
    paths = np.cumsum(ramp, axis=0) - ramp + m * (f + b) + (1 if turns else 2) * group.ranks * costs.transfer
    if turns:
        paths += m * w - costs.end_reduce
    if costs.saved is not None and group.pairs is not None:
        # Forwards of one chunk beside backwards of the other one.
        every, first = ([place(saved) for saved in costs.saved] for place in (held.on_ranks, held.in_first_chunks))
        one, other = group.pairs
        paths -= one * (first[0] + every[1] - first[1]) + other * (every[0] - first[0] + first[1])
    if group.sort is Sort.PLAIN:
        whole, on_forward, on_backward, on_weight, transfers = path_coefficients(m, group.schedule, pp)
        deep = whole * (f + b).sum(axis=0) + on_forward * f + on_backward * b + transfers * costs.transfer
        paths = np.where(whole > 0, np.maximum(deep, paths), paths) + on_weight * w
    optimizer = held.on_ranks(costs.optimizer)
    optimizer[0] += costs.end_optimizer[0]
    optimizer[group.head_rank] += costs.end_optimizer[1]
    return np.asarray(paths.max(axis=0) + optimizer.max(axis=0) + costs.tail)


def rank_work(problem: Problem, group: Group, mode: int) -> FloatArray:
    """What every rank works in a step with one recompute setting, one item after another, [P, r]: no schedule is
    faster."""
    costs, held = group.costs, _HeldLayers.of(problem, group)
    once = held.on_ranks(costs.forward + costs.backward + costs.weight + costs.extra[mode])
    once[0] += costs.embedding.sum(axis=0)
    once[group.head_rank] += costs.head.sum(axis=0)
    return np.asarray(group.micro_batches * once)


def _memory(group: Group, held: _HeldLayers, mode: int) -> FloatArray:
    """Bytes of the fullest rank, with the fewest live micro-batches of a chunk (exact for gpipe and 1f1b, but for
    temporary bytes)."""
    costs, vpp = group.costs, group.vpp
    live = group.live[0]
    if group.sort is Sort.V:
        live = np.minimum(*group.live)
    if group.interleaved:
        # All chunks hold the same but the model's last one, which may hold less: leave it out if there are more.
        _, first, other = group.live
        live = np.where(vpp > 1, (first + np.maximum(vpp - 2, 0) * other) / vpp, live)
    total = held.on_ranks(group.held_states + costs.kept[mode][:, None] * live)
    total += costs.buffers
    embedding, head = end_bytes(group)
    total[0] += embedding
    total[group.head_rank] += head
    return np.asarray(total.max(axis=0))
