"""The uniform space: equal virtual stages and one recompute setting, so a layout has one plan a setting.

The plan is known, so its bound is the largest of its path sums, and nothing is left to minimise over.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from milpplan.costs.columns import FloatArray, IntArray, LayoutColumns
from milpplan.costs.layers import EXPOSED, Phase
from milpplan.costs.layout_costs import LayoutCosts, usable_memory_bytes
from milpplan.costs.stages import EMBEDDING, HEAD
from milpplan.optimize.bounds import SAFETY, path_coefficients
from milpplan.optimize.pricing import INTERLEAVED, live_at_peak
from milpplan.specs.plan import Layout, Plan, Recompute, VirtualStage
from milpplan.specs.problem import Problem


@dataclass(frozen=True, slots=True)
class UniformBounds:
    """Per layout and recompute setting (in the space's order): arrays [n, modes]. The time is left at zero where
    the plan does not fit."""

    step_time_ns: FloatArray
    memory_bytes: FloatArray


def uniform_plan(problem: Problem, layout: Layout, mode: str) -> Plan:
    """ceil(L / J) layers in every virtual stage but the last, which holds the rest."""
    layers, stages = problem.model.num_layers, layout.num_virtual_stages
    each = -(-layers // stages)
    held = []
    for j in range(stages):
        first, last = min(j * each, layers), min((j + 1) * each, layers)
        recompute = Recompute(**({mode: last - first} if mode != "none" else {}))
        held.append(VirtualStage(layers=(first, last), recompute=recompute))
    return Plan(layout=layout, virtual_stages=tuple(held))


def uniform_bounds(problem: Problem, columns: LayoutColumns, costs: LayoutCosts) -> UniformBounds:
    """Lower bounds on the time and memory of each layout's plans, all layouts at once."""
    modes, capacity = problem.space.recompute, usable_memory_bytes(problem)
    time = np.zeros((len(columns), len(modes)))
    memory = np.zeros((len(columns), len(modes)))
    for pp in np.unique(columns.pp):
        rows = np.flatnonzero(columns.pp == pp)
        part, part_costs = columns.take(rows), costs.take(rows)
        counts, first = _layers_by_rank(problem, part, int(pp))
        for index, mode in enumerate(modes):
            memory[rows, index] = _memory(part, part_costs, counts, mode)
            fits = np.flatnonzero(memory[rows, index] * SAFETY <= capacity)
            time[rows[fits], index] = _time(
                part.take(fits), part_costs.take(fits), counts[:, fits], first[:, fits], mode
            )
    return UniformBounds(time * SAFETY, memory * SAFETY)


def _layers_by_rank(problem: Problem, columns: LayoutColumns, pp: int) -> tuple[IntArray, IntArray]:
    """Layers of each kind on each rank, and in its first chunk: [K, r, P]."""
    kinds = np.array(problem.model.layer_kinds)
    layers, num_kinds = len(kinds), len(problem.model.kinds)
    prefix = np.zeros((num_kinds, layers + 1), dtype=np.int64)
    for kind in range(num_kinds):
        np.cumsum(kinds == kind, out=prefix[kind, 1:])
    values, inverse = np.unique(columns.vpp, return_inverse=True)
    total = np.zeros((num_kinds, len(values), pp), dtype=np.int64)
    first = np.zeros_like(total)
    for place, vpp in enumerate(values.tolist()):
        each = -(-layers // (pp * vpp))
        edges = prefix[:, np.minimum(np.arange(pp * vpp + 1) * each, layers)]
        held = np.diff(edges, axis=1).reshape(num_kinds, vpp, pp)
        total[:, place], first[:, place] = held.sum(axis=1), held[:, 0]
    return total[:, inverse], first[:, inverse]


def over_ranks(reduce: np.ufunc, values: FloatArray) -> FloatArray:
    """Reduce [r, P] over its few ranks, a column at a time: NumPy's own reduction goes row by row."""
    total = values[:, 0].astype(np.float64)
    for rank in range(1, values.shape[1]):
        reduce(total, values[:, rank], out=total)
    return total


def _extra(costs: LayoutCosts, mode: str) -> tuple[IntArray, IntArray]:
    """Nanoseconds that recomputation adds and bytes that it drops, a layer: [K, r]."""
    if mode == "none":
        zero = np.zeros_like(costs.kept_bytes)
        return zero, zero
    phase = Phase.FULL if mode == "full" else Phase.SELECTIVE
    return costs.duration_ns[:, phase], getattr(costs, f"dropped_{mode}_bytes")


def _time(columns: LayoutColumns, costs: LayoutCosts, counts: IntArray, first: IntArray, mode: str) -> FloatArray:
    extra, _ = _extra(costs, mode)
    duration = costs.duration_ns
    forward, backward = duration[:, Phase.FORWARD], duration[:, Phase.BACKWARD] + extra
    embedding, head = costs.embedding_ns[EXPOSED].sum(axis=0), costs.head_ns[EXPOSED].sum(axis=0)

    def on_ranks(per_layer: IntArray, held: IntArray) -> FloatArray:
        return np.asarray((per_layer[:, :, None] * held).sum(axis=0), dtype=np.float64)

    pp = counts.shape[2]
    f, b = on_ranks(forward, counts), on_ranks(backward, counts)
    f[:, 0] += embedding[0]
    b[:, 0] += embedding[1]
    f[:, -1] += head[0]
    b[:, -1] += head[1]
    ramp = on_ranks(forward + backward, first)
    ramp[:, 0] += embedding.sum(axis=0)
    before = np.cumsum(ramp, axis=1) - ramp
    micro_batches = columns.num_micro_batches.astype(np.float64)[:, None]
    ranks = np.arange(pp, dtype=np.float64)[None, :]
    plain = columns.schedule != INTERLEAVED
    whole, on_forward, on_backward, transfers = path_coefficients(micro_batches, columns.schedule, pp)
    transfer = costs.transfer_ns[:, None]
    deep = whole * over_ranks(np.add, f + b)[:, None] + on_forward * f + on_backward * b + transfers * transfer
    straight = before + micro_batches * (f + b) + 2 * ranks * transfer
    paths = np.where(plain[:, None] & (whole > 0), np.maximum(deep, straight), straight)
    optimizer = (costs.optimizer_ns[:-2, :, None] * counts).sum(axis=0)
    optimizer[:, 0] += costs.optimizer_ns[EMBEDDING]
    optimizer[:, -1] += costs.optimizer_ns[HEAD]
    ends = costs.barrier_ns + costs.reduce_ns[EMBEDDING] + costs.gather_ns[EMBEDDING]
    return np.asarray(over_ranks(np.maximum, paths) + over_ranks(np.maximum, optimizer) + ends)


def _memory(columns: LayoutColumns, costs: LayoutCosts, counts: IntArray, mode: str) -> FloatArray:
    """Bytes of the fullest rank, with the fewest live micro-batches of a chunk (exact without interleaving,
    but for temporary bytes)."""
    _, dropped = _extra(costs, mode)
    pp = counts.shape[2]
    lives = live_at_peak(
        columns.num_micro_batches.astype(np.float64), columns.schedule, pp, columns.vpp.astype(np.float64)
    )
    vpp = columns.vpp[:, None]
    # All chunks hold the same but the model's last one, which may hold less: leave it out where there are more.
    live = np.where(vpp > 1, (lives[1] + np.maximum(vpp - 2, 0) * lives[2]) / np.maximum(vpp, 1), lives[0])
    states = costs.state_bytes.sum(axis=0)
    per_layer = states[:-2, :, None] + (costs.kept_bytes - dropped)[:, :, None] * live[None]
    total = (per_layer * counts).sum(axis=0) + costs.buffer_bytes[:, None]
    last, first, _ = lives
    total[:, 0] += states[EMBEDDING] + first[:, 0] * costs.embedding_kept_bytes
    total[:, -1] += states[HEAD] + last[:, -1] * costs.head_kept_bytes + costs.head_workspace_bytes
    return over_ranks(np.maximum, total)
