"""Bounds in the uniform space: equal virtual stages and one recompute setting, so a layout has one plan per
setting.

The plan is known, so its bound is the largest of its path sums, with nothing to minimise over.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from milpplan.optimize.bounds.closed_form import SAFETY, path_coefficients
from milpplan.optimize.bounds.lagrangian_memory import (
    CostColumns,
    Group,
    ScheduleClass,
    end_bytes,
    groups,
    groups_of,
    over_kinds,
)
from milpplan.problem import Problem
from milpplan.simulation import (
    CostTable,
    FloatArray,
    IntArray,
    LayoutColumns,
    LayoutCosts,
    layer_durations_ns,
    unique_rows,
    usable_memory_bytes,
)
from milpplan.simulation.bulk import uniform_plan
from milpplan.simulation.layout_costs import distinct_layers
from milpplan.simulation.stages import EMBEDDING, HEAD

__all__ = ["UniformBounds", "rank_work", "uniform_bounds", "uniform_compute_bounds", "uniform_plan"]

MODES = ("none", "selective", "full")
"""Recompute modes in the order of ``LayoutCosts.host_kept_bytes``."""


@dataclass(frozen=True, slots=True)
class UniformBounds:
    """Bounds per layout and recompute setting (in the space's order): arrays [n, modes]. The time is zero where
    the plan does not fit."""

    step_time_ns: FloatArray
    memory_bytes: FloatArray


def uniform_bounds(problem: Problem, columns: LayoutColumns, costs: CostTable) -> UniformBounds:
    """Return lower bounds of time and memory of each layout's plans."""
    modes, capacity = problem.recompute_modes, usable_memory_bytes(problem)
    time, memory = np.zeros((2, len(columns), len(modes)))
    # The best constants of several node types belong to no device: dropped and replayed bytes may differ in type.
    passing = None if problem.other_hardware else _TransientBytes.of(costs.distinct, modes)
    for rows, group in groups(problem, columns, costs):
        rank_layers = _RankLayers.of(problem, group)
        passes = None if passing is None else passing.take(costs.place[rows])
        peaks = _memory(group, rank_layers, passes)
        memory[rows] = peaks
        fits = peaks * SAFETY <= capacity
        with_fit = np.flatnonzero(fits.any(axis=1))
        if not len(with_fit):
            continue
        group, rank_layers, rows, fits = (
            group.take(with_fit),
            rank_layers.take(with_fit),
            rows[with_fit],
            fits[with_fit],
        )
        surroundings = _Surroundings.of(problem, group, rank_layers, columns.take(rows), costs.take(rows))
        for index in range(len(modes)):
            fitting = np.flatnonzero(fits[:, index])
            if len(fitting):
                time[rows[fitting], index] = _time(
                    group.take(fitting), rank_layers.take(fitting), index, surroundings.take(fitting)
                )
    return UniformBounds(time * SAFETY, memory * SAFETY)


def uniform_compute_bounds(problem: Problem, columns: LayoutColumns) -> FloatArray:
    """Return lower bounds of the step time of uniform plans from the layers' compute alone, nanoseconds [n].

    They are the longest path sums of layers without recomputation. Zero where the schedule runs pairs, which may
    be shorter than their layers.

    If all layers are of one kind, the virtual stages are equal and no backward is split, the longest path is the
    one through the last rank: m + (P - 1) / v times the layers of a rank, forward and backward.
    """
    layer_rows, layer = distinct_layers(problem, columns)
    layers = layer_durations_ns(problem, columns.take(layer_rows)).astype(np.float64)
    # Orders of ranks often have equal values here.
    first, same = unique_rows(layer, columns.pp, columns.vpp, columns.schedule, columns.num_micro_batches)
    part, layer = columns.take(first), layer[first]
    alike = (len(layers) == 1) & (problem.model.num_layers % part.num_virtual_stages == 0)
    equal = alike & ~part.split_backward
    passes = part.num_micro_batches + (part.pp - 1) / part.vpp
    time = passes * (problem.model.num_layers / part.pp) * layers[0, :2].sum(axis=0)[layer]
    rest = np.flatnonzero(~equal)
    for rows, group in groups_of(problem, part.take(rest), CostColumns.of_layers(layers), layer[rest]):
        time[rest[rows]] = _time(group, _RankLayers.of(problem, group), 0, None)
    return np.where(part.runs_pairs, 0.0, time * SAFETY)[same]


@dataclass(frozen=True, slots=True)
class _RankLayers:
    """Layers of each kind on each rank, in its first and in its last chunk: [K, P, u] for the u numbers of virtual
    stages that occur.

    ``min_stage_layers`` [u]: layers of the smallest virtual stage. ``index`` [r]: column of each layout.
    """

    total: FloatArray
    first: FloatArray
    last: FloatArray
    min_stage_layers: FloatArray
    index: IntArray

    @staticmethod
    def of(problem: Problem, group: Group) -> _RankLayers:
        kinds, pp = np.array(problem.model.layer_kinds), group.num_ranks
        layers, num_kinds = len(kinds), len(problem.model.kinds)
        prefix = np.zeros((num_kinds, layers + 1), dtype=np.int64)
        for kind in range(num_kinds):
            np.cumsum(kinds == kind, out=prefix[kind, 1:])
        values, index = np.unique(group.vpp, return_inverse=True)
        total = np.zeros((num_kinds, pp, len(values)))
        first, last, min_stage_layers = np.zeros_like(total), np.zeros_like(total), np.zeros(len(values))
        for column, vpp in enumerate(values.astype(np.int64).tolist()):
            each = -(-layers // (pp * vpp))
            edges = prefix[:, np.minimum(np.arange(pp * vpp + 1) * each, layers)]
            min_stage_layers[column] = max(0, layers - each * (pp * vpp - 1))
            chunk_layers = np.diff(edges, axis=1).reshape(num_kinds, vpp, pp)
            if group.schedule_class is ScheduleClass.V:
                chunk_layers[:, 1] = chunk_layers[:, 1, ::-1].copy()
            total[..., column], first[..., column], last[..., column] = (
                chunk_layers.sum(axis=1),
                chunk_layers[:, 0],
                chunk_layers[:, -1],
            )
        return _RankLayers(total, first, last, min_stage_layers, index)

    def take(self, rows: IntArray) -> _RankLayers:
        """Return the chosen layouts."""
        return _RankLayers(self.total, self.first, self.last, self.min_stage_layers, self.index[rows])

    def on_ranks(self, per_layer: FloatArray) -> FloatArray:
        """Return sum_k layers of kind k * per_layer [K, r] (or [K, P, r]) on each rank, [P, r]."""
        return over_kinds(self.total[:, :, self.index], per_layer)

    def in_first_chunks(self, per_layer: FloatArray) -> FloatArray:
        """Return sum_k layers of kind k * per_layer in the first chunk of each rank, [P, r]."""
        return over_kinds(self.first[:, :, self.index], per_layer)


@dataclass(frozen=True, slots=True)
class _Surroundings:
    """Times around the work items of a step, nanoseconds.

    ``start`` [r]: before the first forward. ``first_end`` [r]: earliest end of the first forward (zero where
    gathers do not overlap). ``trail`` [P, r]: after a rank's last item. ``reduced`` [r]: after the start of the
    last backward of virtual stage 0 (zero where reductions do not overlap). ``barrier`` [r].
    ``hidden`` [2, r]: fractions of the first forward and of the last backward that hide gather and reduction.

    They are those of rank 0 (``simulation.pipeline``): plain and interleaved paths start and end there. Under V
    schedules a path ends on its own rank, and overlapping reductions are ignored.
    """

    start: FloatArray
    first_end: FloatArray
    trail: FloatArray
    reduced: FloatArray
    barrier: FloatArray
    hidden: FloatArray

    @staticmethod
    def of(
        problem: Problem, group: Group, rank_layers: _RankLayers, columns: LayoutColumns, costs: CostTable
    ) -> _Surroundings:
        """Compute the times for a group with ``columns`` and ``costs``."""
        constants = costs.distinct
        reduce = constants.reduce_ns[:, costs.place].astype(np.float64)
        gather = constants.gather_ns[:, costs.place].astype(np.float64)
        kinds = np.array(problem.model.layer_kinds)
        # The first and the last layer of virtual stage 0, which holds the head where it is the only stage.
        front, back = kinds[0], kinds[-(-len(kinds) // (columns.pp * columns.vpp)) - 1]
        edge = constants.edge_ns[:2, back, costs.place].astype(np.float64)
        edge += np.where(columns.pp * columns.vpp == 1, constants.head_ns[:2, costs.place], 0)
        every_reduce = _on_ranks_with_ends(group, rank_layers, reduce)
        every_gather = _on_ranks_with_ends(group, rank_layers, gather)
        early, late = columns.overlap_param_gather.astype(bool), columns.overlap_grad_reduce.astype(bool)
        # The edges of virtual stage 0 as ``simulation.stages`` lengthens them.
        exposed = constants.exposed_fractions[:, costs.place]
        hidden = 1.0 - exposed
        stage_gather, stage_reduce = (_of_first_stage(rank_layers, columns, part) for part in (gather, reduce))
        bucket = hidden[0] * (gather[front] + gather[EMBEDDING]) + exposed[0] * stage_gather
        start = np.where(early, bucket, every_gather[0])
        first_end = np.where(early, stage_gather + hidden[0] * edge[0], 0.0)
        reduced = stage_reduce + hidden[1] * edge[1]
        trail = np.where(late, 0.0, every_reduce)
        if group.schedule_class is not ScheduleClass.V:
            bucket = hidden[1] * (reduce[front] + reduce[EMBEDDING]) + exposed[1] * stage_reduce
            trail[0] += np.where(late, bucket, 0.0)
        counted = late & (group.schedule_class is not ScheduleClass.V) & ~columns.split_backward
        barrier = constants.barrier_ns[costs.place].astype(np.float64)
        return _Surroundings(start, first_end, trail, np.where(counted, reduced, 0.0), barrier, hidden)

    def take(self, rows: IntArray) -> _Surroundings:
        """Return the chosen layouts."""
        values = (self.start[rows], self.first_end[rows], self.trail[:, rows], self.reduced[rows])
        return _Surroundings(*values, self.barrier[rows], self.hidden[:, rows])


def _on_ranks_with_ends(group: Group, rank_layers: _RankLayers, values: FloatArray) -> FloatArray:
    """Return sums over the layers and ends of every rank, [P, r], of ``values`` [K + 2, r]."""
    total = rank_layers.on_ranks(values[:EMBEDDING])
    total[0] += values[EMBEDDING]
    total[group.head_rank] += values[HEAD]
    return total


def _of_first_stage(rank_layers: _RankLayers, columns: LayoutColumns, values: FloatArray) -> FloatArray:
    """Return sums over the layers and ends of virtual stage 0, [r], of ``values`` [K + 2, r]."""
    total = rank_layers.in_first_chunks(values[:EMBEDDING])[0] + values[EMBEDDING]
    return np.asarray(total + np.where(columns.pp * columns.vpp == 1, values[HEAD], 0.0))


def _time(group: Group, rank_layers: _RankLayers, mode: int, surroundings: _Surroundings | None) -> FloatArray:
    """Return the longest path sum; without ``surroundings`` of the work items alone."""
    costs, is_v = group.costs, group.schedule_class is ScheduleClass.V
    paths = _work_paths(group, rank_layers, mode)
    if surroundings is not None:
        single_stage = group.num_ranks * group.vpp == 1
        forward, backward = _passes(group, mode)
        head = np.where(single_stage, costs.head, 0.0)
        first = rank_layers.in_first_chunks(forward)[0] + costs.embedding[0] + head[0]
        last = rank_layers.in_first_chunks(backward)[0] + costs.embedding[1] + head[1]
        after = surroundings.trail.copy()
        after[0] = np.maximum(after[0], surroundings.reduced - surroundings.hidden[1] * last)
        paths += after if is_v else after[0]
        waited = np.maximum(surroundings.start, surroundings.first_end - surroundings.hidden[0] * first)
        paths += waited + surroundings.barrier
    optimizer = rank_layers.on_ranks(costs.optimizer)
    optimizer[0] += costs.end_optimizer[0]
    optimizer[group.head_rank] += costs.end_optimizer[1]
    return np.asarray(paths.max(axis=0) + optimizer.max(axis=0))


def _passes(group: Group, mode: int) -> tuple[FloatArray, FloatArray]:
    """Return forward and backward of a layer of each kind with one recompute setting, [K, r] each."""
    costs = group.costs
    forward = costs.forward if costs.late is None else costs.forward + costs.late[mode]
    return forward, costs.backward + costs.extra[mode]


def _work_paths(group: Group, rank_layers: _RankLayers, mode: int) -> FloatArray:
    """Return the paths through each rank s, work items and transfers alone, [P, r].

    They go from the first forward of rank 0 to the last backward of rank 0, under V schedules to the last item of
    rank s.
    """
    costs, pp, m = group.costs, group.num_ranks, group.micro_batches
    (forward, backward), is_v = _passes(group, mode), group.schedule_class is ScheduleClass.V
    ramp = rank_layers.in_first_chunks(forward if is_v else forward + backward)
    ramp[0] += costs.embedding[0] if is_v else costs.embedding.sum(axis=0)
    f, b = rank_layers.on_ranks(forward), rank_layers.on_ranks(backward)
    w = rank_layers.on_ranks(costs.weight) if is_v or group.waiting is not None else np.zeros_like(f)
    for part, times in enumerate((f, b, w)):
        times[0] += costs.embedding[part]
        times[group.head_rank] += costs.head[part]
    paths = np.cumsum(ramp, axis=0) - ramp + m * (f + b) + (1 if is_v else 2) * group.ranks * costs.transfer
    if is_v:
        paths += m * w
    if costs.saved is not None and group.pairs is not None:
        # Forwards of one chunk run in pairs with backwards of the other.
        every, first = (
            [sum_layers(saved) for saved in costs.saved]
            for sum_layers in (rank_layers.on_ranks, rank_layers.in_first_chunks)
        )
        first_pairs, second_pairs = group.pairs
        paths -= first_pairs * (first[0] + every[1] - first[1]) + second_pairs * (every[0] - first[0] + first[1])
    if group.schedule_class is ScheduleClass.PLAIN:
        whole, on_forward, on_backward, on_weight, transfers = path_coefficients(m, group.schedule, pp)
        deep = whole * (f + b).sum(axis=0) + on_forward * f + on_backward * b + transfers * costs.transfer
        paths = np.where(whole > 0, np.maximum(deep, paths), paths) + on_weight * w
    return np.asarray(paths)


def rank_work(problem: Problem, group: Group, mode: int) -> FloatArray:
    """Return the serial work of every rank in a step with one recompute setting, [P, r]: no schedule is faster."""
    costs, layers = group.costs, _RankLayers.of(problem, group)
    pass_ns = layers.on_ranks(sum(_passes(group, mode), costs.weight))
    pass_ns[0] += costs.embedding.sum(axis=0)
    pass_ns[group.head_rank] += costs.head.sum(axis=0)
    return np.asarray(group.micro_batches * pass_ns)


@dataclass(frozen=True, slots=True)
class _TransientBytes:
    """Transient bytes while the backward of a layer of each kind runs (``simulation.stages``); all [M, K, r].

    ``alone``: temporary bytes, bytes brought back, and the layer's part on the host. ``beyond_head``: the part
    that the head's temporary bytes do not cover. ``beside``: the part of another layer.
    """

    alone: FloatArray
    beyond_head: FloatArray
    beside: FloatArray

    @staticmethod
    def of(costs: LayoutCosts, modes: tuple[str, ...]) -> _TransientBytes:
        """Compute the bytes of many layouts."""
        numbers, host = [MODES.index(mode) for mode in modes], costs.host_kept_bytes
        dropped = (np.zeros_like(host[0]), costs.dropped_selective_bytes, costs.dropped_full_bytes)
        beside = np.stack([costs.streamed_bytes + host[number] for number in numbers])
        rest = beside + np.stack([dropped[number] + host[0] - host[number] for number in numbers])
        beyond = np.maximum(costs.workspace_bytes - costs.head_workspace_bytes, 0)
        alone = (rest + costs.workspace_bytes).astype(np.float64)
        return _TransientBytes(alone, (rest + beyond).astype(np.float64), beside.astype(np.float64))

    def take(self, rows: IntArray) -> _TransientBytes:
        """Return the chosen layouts."""
        return _TransientBytes(self.alone[..., rows], self.beyond_head[..., rows], self.beside[..., rows])


def _passing_bytes(group: Group, rank_layers: _RankLayers, passing: _TransientBytes, mode: int) -> FloatArray:
    """Return the transient bytes on every rank at the peak, beside the head's temporary bytes, [P, r].

    With one chunk they are exact where all layers are of one kind; with several they are the minimum over virtual
    stages.
    """
    if group.schedule_class is ScheduleClass.PLAIN:
        layers = rank_layers.total.sum(axis=0)[:, rank_layers.index]
        if (rank_layers.total > 0).all():
            bytes_ = np.repeat(passing.alone[mode].max(axis=0)[None], group.num_ranks, axis=0)
            bytes_[-1] = passing.beyond_head[mode].max(axis=0)
        else:
            there = rank_layers.total[:, :, rank_layers.index] > 0
            bytes_ = np.where(there, passing.alone[mode][:, None], 0.0).max(axis=0)
            bytes_[-1] = np.where(there[:, -1], passing.beyond_head[mode], 0.0).max(axis=0)
    else:
        layers = rank_layers.min_stage_layers[rank_layers.index][None]
        bytes_ = np.repeat(passing.alone[mode].min(axis=0)[None], group.num_ranks, axis=0)
        bytes_[group.head_rank] = passing.beyond_head[mode].min(axis=0)
        bytes_ = np.where(layers > 0, bytes_, 0.0)
    return np.asarray(bytes_ + np.where(layers > 1, passing.beside[mode].min(axis=0), 0.0))


def _live_layers(group: Group, rank_layers: _RankLayers) -> FloatArray:
    """Return layers of each kind times the micro-batches alive in them when a rank's warm-up ends, [K, P, r]."""
    total = rank_layers.total[:, :, rank_layers.index]
    if group.schedule_class is ScheduleClass.PLAIN:
        return np.asarray(total * group.live[0])
    first, last = rank_layers.first[:, :, rank_layers.index], rank_layers.last[:, :, rank_layers.index]
    in_last, in_first = group.live[:2]
    if group.schedule_class is not ScheduleClass.INTERLEAVED:
        return np.asarray(in_first * first + in_last * last)
    other = group.live[2]
    return np.asarray(other * total + (in_first - other) * first + (in_last - other) * last)


def _memory(group: Group, rank_layers: _RankLayers, passing: _TransientBytes | None) -> FloatArray:
    """Return bytes of the fullest rank when its warm-up ends, [r, M].

    Exact for gpipe and 1f1b up to the transient bytes (``_passing_bytes``; none where ``passing`` is None).
    """
    live, peaks = _live_layers(group, rank_layers), []
    states = rank_layers.on_ranks(group.state_bytes_per_layer) + group.costs.buffers
    embedding, head = end_bytes(group)
    states[0] += embedding
    states[group.head_rank] += head
    for mode, kept in enumerate(group.costs.kept):
        total = states + over_kinds(kept[:, None], live)
        if passing is not None:
            total += _passing_bytes(group, rank_layers, passing, mode)
        peaks.append(total.max(axis=0))
    return np.stack(peaks, axis=1)
