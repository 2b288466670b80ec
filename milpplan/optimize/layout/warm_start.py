"""Warm start of a layout's program: paths that hold for every plan, and balanced plans.

The analytic paths belong to the families of ``bounds.closed_form``. Balanced plans come from a dynamic program
over stage menus, exact for the given objective: the largest or the summed item cost.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from milpplan.optimize.layout.stage_options import LayoutContext, Menu
from milpplan.problem.plan import PAIRED_SCHEDULES, SPLIT_SCHEDULES, V_SCHEDULES, Layout
from milpplan.simulation.layers.terms import PAIRED, WORK
from milpplan.simulation.layout_columns import FloatArray, IntArray
from milpplan.simulation.pipeline.critical_path import CriticalPath
from milpplan.simulation.pipeline.schedule import placement
from milpplan.simulation.pipeline.step_graph import Term
from milpplan.simulation.pipeline.work_order import num_pairs

Choice = list[int]


def analytic_paths(layout: Layout) -> list[CriticalPath]:
    """Return one path through every rank, as in ``bounds.closed_form``.

    It ends with the reduction and the optimizer of rank 0; under V schedules with those of its own rank.
    """
    P, v, m = layout.pp, layout.vpp, layout.num_micro_batches
    if layout.schedule in V_SCHEDULES:
        return [_v_path(layout, rank) for rank in range(P)]
    paths = []
    for rank in range(P):
        counts = np.zeros((len(Term), v, P), dtype=np.int64)
        transfers = 0
        if layout.schedule == "interleaved" and v > 1:
            counts[(Term.FORWARD, Term.BACKWARD), 0, :rank] += 1
            counts[(Term.FORWARD, Term.BACKWARD), :, rank] += m
            transfers = 2 * rank
        elif layout.schedule == "gpipe" or m >= P - rank:
            counts[(Term.FORWARD, Term.BACKWARD), 0, :] += 1
            counts[Term.FORWARD, 0, rank] += m - 1 if layout.schedule == "gpipe" and P > 1 else m - P + rank
            counts[Term.BACKWARD, 0, rank] += m - 1
            transfers = 2 * (P - 1)
        else:
            counts[(Term.FORWARD, Term.BACKWARD), 0, :rank] += 1
            counts[(Term.FORWARD, Term.BACKWARD), 0, rank] += m
            transfers = 2 * rank
        if layout.schedule in SPLIT_SCHEDULES:
            # Between its first and its last backward, and after the last backward of rank 0.
            counts[Term.WEIGHT, 0, rank] += max(0, m - 1 - rank)
            counts[Term.WEIGHT, 0, 0] += 1
        add_ends(layout, counts, 0)
        if layout.node_order:
            counts[Term.CROSSING].reshape(-1)[: transfers // 2] += 2
        paths.append(CriticalPath(counts.reshape(len(Term), -1), transfers))
    return paths


def _v_path(layout: Layout, rank: int) -> CriticalPath:
    """Return the path of micro-batch 0 through the first chunks down to a rank, then all work of the rank."""
    P, v = layout.pp, layout.vpp
    counts = np.zeros((len(Term), v, P), dtype=np.int64)
    counts[Term.FORWARD, 0, :rank] = 1
    counts[WORK, :, rank] = layout.num_micro_batches
    if layout.schedule in PAIRED_SCHEDULES:
        # Forwards of a chunk in pairs, and backwards of the other one.
        pairs = np.array(num_pairs(P, layout.num_micro_batches, rank))
        counts[PAIRED, :, rank] = pairs, pairs[::-1]
        counts[WORK[: len(PAIRED)], :, rank] -= counts[PAIRED, :, rank]
    add_ends(layout, counts, rank)
    by_stage = np.zeros((len(Term), v * P), dtype=np.int64)
    by_stage[:, placement(layout.schedule, P, v)] = counts
    return CriticalPath(by_stage, rank)


def add_ends(layout: Layout, counts: IntArray, rank: int) -> None:
    """Add the start and the end of a step to a path's counts.

    The step starts with the parameters of rank 0. It ends with the gradients and the update of a rank whose last
    work item is of chunk 0.
    """
    if layout.overlap_param_gather:
        counts[Term.FIRST, 0, 0] = 1
    else:
        counts[Term.GATHER, :, 0] = 1
    if layout.overlap_grad_reduce:
        counts[Term.TRAIL, 0, rank] = 1
    else:
        counts[Term.REDUCE, :, rank] = 1
    counts[Term.OPTIMIZER, :, rank] = 1


def chunk_paths(layout: Layout) -> list[CriticalPath]:
    """Return the paths through every chunk c > 0 of every rank; none under V schedules.

    The first micro-batch runs through c chunks of all ranks and down to the rank, which has run P forwards of each
    of its chunks before c by then; likewise at the end.
    """
    P, v = layout.pp, layout.vpp
    paths: list[CriticalPath] = []
    if layout.schedule in V_SCHEDULES:
        return paths
    for rank, path in enumerate(analytic_paths(layout)):
        for chunk in range(1, v):
            counts = path.counts.reshape(len(Term), v, P).copy()
            passed = counts[[Term.FORWARD, Term.BACKWARD]]
            passed[:, 0, :rank] -= 1
            passed[:, chunk, :rank] += 1
            passed[:, :chunk] += 1
            passed[:, :chunk, rank] -= P
            counts[[Term.FORWARD, Term.BACKWARD]] = passed
            if layout.node_order:
                counts[Term.CROSSING].reshape(-1)[: chunk * P + rank] = 2
            paths.append(CriticalPath(counts.reshape(len(Term), -1), 2 * (chunk * P + rank)))
    return paths


def _positions(context: LayoutContext) -> list[tuple[int, ...]]:
    """Return the layers of each run among the first t layers, t = 0 .. L."""
    placed = [0] * len(context.runs)
    states = [tuple(placed)]
    for run, (_, length) in enumerate(context.runs):
        for _ in range(length):
            placed[run] += 1
            states.append(tuple(placed))
    return states


def _moves(
    context: LayoutContext, menu: Menu, costs: FloatArray, states: list[tuple[int, ...]]
) -> tuple[IntArray, IntArray, IntArray]:
    """Return all (start position, end position, item) whose item continues the layer sequence.

    Of items with equal layers only the cheapest counts.
    """
    cheapest: dict[tuple[int, ...], int] = {}
    for item in np.argsort(costs, kind="stable").tolist():
        cheapest.setdefault(tuple(menu.runs[item].tolist()), item)
    items = np.array(list(cheapest.values()), dtype=np.int64)
    if len(context.runs) == 1:
        layers = len(states) - 1
        starts, chosen = np.meshgrid(np.arange(layers + 1), items, indexing="ij")
        ends = starts + menu.layers[chosen]
        keep = ends <= layers
        return starts[keep], ends[keep], chosen[keep]
    index = {state: position for position, state in enumerate(states)}
    triples = []
    for counts, item in cheapest.items():
        for start, state in enumerate(states):
            end = index.get(tuple(a + b for a, b in zip(state, counts, strict=True)), -1)
            if end >= 0:
                triples.append((start, end, item))
    table = np.array(triples, dtype=np.int64).reshape(-1, 3)
    return table[:, 0], table[:, 1], table[:, 2]


def best_choice(
    context: LayoutContext, menus: Sequence[Menu], item_costs: Sequence[FloatArray], bottleneck: bool
) -> Choice | None:
    """Return items that place all layers in order, with the minimum largest (``bottleneck``) or summed cost.

    Exact for these costs, by dynamic programming over (stage, layers placed); None if the layers cannot be placed.
    """
    states = _positions(context)
    width = len(states)
    value = np.full(width, np.inf)
    value[0] = 0.0
    trail: list[tuple[IntArray, IntArray]] = []
    for menu, costs in zip(menus, item_costs, strict=True):
        starts, ends, items = _moves(context, menu, costs, states)
        total = np.maximum(value[starts], costs[items]) if bottleneck else value[starts] + costs[items]
        order = np.lexsort((total, ends))
        ends_sorted = ends[order]
        best = order[np.append(True, ends_sorted[1:] != ends_sorted[:-1])] if len(order) else order
        value = np.full(width, np.inf)
        came_from = np.full(width, -1, dtype=np.int64)
        item_at = np.full(width, -1, dtype=np.int64)
        value[ends[best]] = total[best]
        came_from[ends[best]], item_at[ends[best]] = starts[best], items[best]
        trail.append((came_from, item_at))
    if not np.isfinite(value[-1]):
        return None
    position, choice = width - 1, []
    for came_from, item_at in reversed(trail):
        choice.append(int(item_at[position]))
        position = int(came_from[position])
    return choice[::-1]


def rank_costs(menus: Sequence[Menu], paths: Sequence[CriticalPath], layout: Layout) -> list[FloatArray]:
    """Return the cost of every item on its own rank's path: nanoseconds, one array a stage.

    With several virtual stages a rank the path sums over them. The costs still compare: balancing the virtual
    stages balances the ranks.
    """
    costs = []
    for menu in menus:
        path = paths[layout.stage_ranks[menu.stage]]
        costs.append((path.counts[:, menu.stage] @ menu.terms).astype(np.float64))
    return costs
