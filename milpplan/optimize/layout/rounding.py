"""Balanced plans from stage menus, plans near fractional points, and the paths that hold for every plan.

The analytic paths belong to the families of ``bounds.closed_form``. Balanced plans come from a dynamic program
over stage menus, exact for the given objective: the largest or the summed item cost.

A fractional point becomes a plan by rounding its layers, then recomputing as much as memory requires.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from milpplan.optimize.layout.stage_options import LayoutContext, Menu
from milpplan.optimize.space.plan_space import even_splits, in_parts, place_bounds
from milpplan.problem import PAIRED_SCHEDULES, SPLIT_SCHEDULES, V_SCHEDULES, Layout, Plan, Recompute, VirtualStage
from milpplan.simulation import FloatArray, IntArray, StageOptions
from milpplan.simulation.layers import Phase
from milpplan.simulation.layers.shard import PAIRED, WORK
from milpplan.simulation.pipeline.step_graph import CriticalPath, Term
from milpplan.simulation.pipeline.work_orders import LiveProfile, chunk_stages, held_bytes, num_pairs
from milpplan.simulation.stages import StageMemo

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
    by_stage[:, chunk_stages(layout.schedule, P, v)] = counts
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


def _moves(context: LayoutContext, menu: Menu, costs: FloatArray) -> tuple[IntArray, IntArray, IntArray]:
    """Return all (start position, end position, item) whose item continues the layer sequence.

    Of items with equal layers only the cheapest counts.
    """
    cheapest: dict[tuple[int, ...], int] = {}
    for item in np.argsort(costs, kind="stable").tolist():
        cheapest.setdefault(tuple(menu.runs[item].tolist()), item)
    items = np.array(list(cheapest.values()), dtype=np.int64)
    first, last = place_bounds(context.runs, menu.runs[items])
    each = last - first + 1
    starts = np.arange(each.sum()) + np.repeat(first - each.cumsum() + each, each)
    chosen = np.repeat(items, each)
    # Of equally good moves to an end the first is taken.
    order = np.argsort(starts, kind="stable") if len(context.runs) == 1 else slice(None)
    return starts[order], (starts + menu.layers[chosen])[order], chosen[order]


def best_choice(
    context: LayoutContext, menus: Sequence[Menu], item_costs: Sequence[FloatArray], bottleneck: bool
) -> Choice | None:
    """Return items that place all layers in order, with the minimum largest (``bottleneck``) or summed cost.

    Exact for these costs, by dynamic programming over (stage, layers placed); None if the layers cannot be placed.
    """
    width = context.problem.model.num_layers + 1
    value = np.full(width, np.inf)
    value[0] = 0.0
    trail: list[tuple[IntArray, IntArray]] = []
    for menu, costs in zip(menus, item_costs, strict=True):
        starts, ends, items = _moves(context, menu, costs)
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


def rounded_layers(context: LayoutContext, layers: FloatArray) -> IntArray:
    """Round fractional layers of each stage, [J], to integers: differences of the rounded running sum, within the
    stage limits."""
    splits = even_splits(context.problem, context.layout)
    min_layers, max_layers = np.array(context.layer_bounds, dtype=np.int64).T
    if splits is None and context.taking:
        return _layers_between_selections(context, layers)
    if splits is not None:
        # The allowed split with the minimum summed distance.
        table = np.array(splits, dtype=np.int64).reshape(-1, context.num_stages)
        table = table[((table >= min_layers) & (table <= max_layers)).all(axis=1)]
        if not len(table):
            return np.zeros(context.num_stages, dtype=np.int64)
        return np.asarray(table[int(np.abs(table - layers).sum(axis=1).argmin())])
    total = context.problem.model.num_layers
    whole = np.clip(np.diff(np.rint(np.cumsum(layers)), prepend=0), min_layers, max_layers).astype(np.int64)
    while (missing := total - int(whole.sum())) != 0:
        step = 1 if missing > 0 else -1
        movable = np.flatnonzero(whole < max_layers) if missing > 0 else np.flatnonzero(whole > min_layers)
        if not len(movable):
            break
        furthest = movable[np.argsort(step * (whole - layers)[movable], kind="stable")]
        whole[furthest[: abs(missing)]] += step
    return whole


def _layers_between_selections(context: LayoutContext, layers: FloatArray) -> IntArray:
    """Return the split of minimum summed distance to fractional ends of stages, where no stage starts with a layer
    that takes the keys of the layer before: by dynamic programming over (stage, end); zeros without any, [J]."""
    total = context.problem.model.num_layers
    places = np.array(sorted(set(range(total + 1)) - context.taking))
    size, value, trail = places[:, None] - places, np.where(places == 0, 0.0, np.inf), list[IntArray]()
    for (low, high), end in zip(context.layer_bounds, np.cumsum(layers), strict=True):
        reached = np.where((low <= size) & (size <= high), value, np.inf)
        trail.append(reached.argmin(axis=1))
        value = reached.min(axis=1) + np.abs(places - end)
    place, ends = len(places) - 1, list[int]()
    for before in reversed(trail):
        ends.append(int(places[place]))
        place = int(before[place])
    whole = np.diff(ends[::-1], prepend=0)
    return whole if np.isfinite(value[-1]) else np.zeros_like(whole)


@dataclass(slots=True)
class _Rank:
    """Virtual stages of one rank while recomputation is added to them."""

    context: LayoutContext
    memo: StageMemo
    rank: int
    kinds: list[list[int]]
    full: list[int]
    selective: list[int]

    def options(self, chunk: int) -> StageOptions:
        """Return the costs of a chunk with its current recomputation."""
        stage = self.context.layout.rank_stages[self.rank][chunk]
        return self.memo.option(stage, self.kinds[chunk], self.full[chunk], self.selective[chunk])

    def worst(self) -> tuple[int, tuple[int, ...]]:
        """Return (bytes above the capacity, live vector) of the fullest moment, on the device or on the host."""
        options = list(map(self.options, range(len(self.kinds))))
        state_bytes = sum(int(option.state_bytes.sum()) for option in options)
        state_bytes += int(self.context.costs.of_rank(self.rank).buffer_bytes)
        kept = np.array([int(option.kept_bytes[0]) for option in options])
        deferred = np.array([option.deferred_bytes for option in options])
        transient = np.array([int(option.transient_bytes[0]) for option in options])
        running, live = _moments(self.context.profiles[self.rank])
        bytes_used = live @ held_bytes(kept, deferred, live.shape[1]) + transient[running]
        fullest = int(bytes_used.argmax())
        excess = state_bytes + int(bytes_used[fullest]) - self.context.capacity_of(self.rank)
        if self.context.costs.offloads:
            on_host = live @ np.array([int(option.host_kept_bytes[0]) for option in options])
            over = int(sum(option.host_state_bytes for option in options)) - self.context.host_capacity_of(
                self.rank
            )
            if over + int(on_host.max()) > excess:
                fullest = int(on_host.argmax())
                excess = over + int(on_host[fullest])
        return excess, tuple(live[fullest].tolist())

    def relieve(self, excess: int, live: tuple[int, ...]) -> bool:
        """Recompute a few more layers where this frees the most bytes per nanosecond. Returns False when all are
        recomputed."""
        costs, modes = self.context.costs.of_rank(self.rank), self.context.problem.recompute_modes
        # Bytes freed on the device and on the host.
        host = costs.host_kept_bytes
        selectively = costs.dropped_selective_bytes + host[0] - host[1]
        wholly = costs.dropped_full_bytes + host[0] - host[2]
        best: tuple[float, str, int, float] | None = None
        for chunk, kinds in enumerate(self.kinds):
            plain = len(kinds) - self.full[chunk] - self.selective[chunk]
            if not kinds:
                continue
            kind = kinds[-1]
            for mode, phase, dropped in (
                ("selective", Phase.SELECTIVE, selectively),
                ("full", Phase.FULL, wholly),
            ):
                if mode not in modes or (plain == 0 and (mode == "selective" or not self.selective[chunk])):
                    continue
                freed = float(dropped[kind]) * live[chunk]
                spent = float(costs.duration_ns[kind, phase])
                if plain == 0:
                    freed -= float(selectively[kind]) * live[chunk]
                    spent -= float(costs.duration_ns[kind, Phase.SELECTIVE])
                rate = freed / max(spent, 1.0)
                if freed > 0 and (best is None or rate > best[0]):
                    best = (rate, mode, chunk, freed)
        if best is None:
            return False
        _, mode, chunk, freed = best
        self._add(mode, chunk, max(1, int(excess // max(freed, 1.0))))
        return True

    def _add(self, mode: str, chunk: int, layers: int) -> None:
        plain = len(self.kinds[chunk]) - self.full[chunk] - self.selective[chunk]
        if mode == "selective":
            self.selective[chunk] += min(layers, plain)
        elif plain:
            self.full[chunk] += min(layers, plain)
        else:
            moved = min(layers, self.selective[chunk])
            self.full[chunk] += moved
            self.selective[chunk] -= moved


@lru_cache(maxsize=512)
def _moments(profiles: tuple[LiveProfile, ...]) -> tuple[IntArray, IntArray]:
    """Return running chunk [n] and micro-batch counts [n, counts] at a rank's fullest moments."""
    return np.array([chunk for chunk, _ in profiles]), np.array([live for _, live in profiles])


def fitted_plan(context: LayoutContext, layers: IntArray, memo: StageMemo | None = None) -> Plan | None:
    """Return the plan with the given layers in each stage and a greedy minimum of recomputation; None if it cannot
    fit.

    ``memo`` is kept between plans of a layout.
    """
    kinds = context.problem.model.layer_kinds
    if int(layers.sum()) != len(kinds) or not context.taking.isdisjoint(np.cumsum(layers).tolist()):
        return None
    if context.first_full is not None or in_parts(context.problem):
        return _uniform_recompute_plan(context, layers, memo or StageMemo(context.layout, context.costs))
    P, v = context.layout.pp, context.layout.vpp
    ends = np.cumsum(layers)
    starts = ends - layers
    must_recompute = "none" not in context.problem.recompute_modes
    recompute: list[Recompute] = [Recompute()] * context.num_stages
    memo = memo or StageMemo(context.layout, context.costs)
    for rank in range(P):
        stages = context.layout.rank_stages[rank]
        chunk_kinds = [list(kinds[starts[j] : ends[j]]) for j in stages]
        lightest = "selective" if "selective" in context.problem.recompute_modes else "full"
        all_layers = [len(part) if must_recompute else 0 for part in chunk_kinds]
        none = [0] * v
        rank_state = _Rank(
            context,
            memo,
            rank,
            chunk_kinds,
            all_layers if must_recompute and lightest == "full" else list(none),
            all_layers if must_recompute and lightest == "selective" else list(none),
        )
        excess, live = rank_state.worst()
        while excess > 0:
            if not rank_state.relieve(excess, live):
                return None
            excess, live = rank_state.worst()
        for chunk, j in enumerate(stages):
            recompute[j] = Recompute(full=rank_state.full[chunk], selective=rank_state.selective[chunk])
    return _plan(context, layers, recompute)


def _plan(context: LayoutContext, layers: IntArray, recompute: list[Recompute]) -> Plan:
    ends = np.cumsum(layers)
    return Plan(
        layout=context.layout,
        virtual_stages=tuple(
            VirtualStage(layers=(int(end - size), int(end)), recompute=choice)
            for size, end, choice in zip(layers, ends, recompute, strict=True)
        ),
    )


def _uniform_recompute_plan(context: LayoutContext, layers: IntArray, memo: StageMemo) -> Plan | None:
    """Return the plan with one recompute setting for all stages that fits and has the shortest recomputation."""
    modes, max_layers = context.problem.recompute_modes, int(layers.max())
    if context.first_full is not None:
        blocks = [context.first_full]
    else:
        by_block = context.problem.space.recompute_counts == "block" and {"none", "full"} <= set(modes)
        blocks = [0] * ("none" in modes) + list(range(1, max_layers)) * by_block + [max_layers] * ("full" in modes)
    tried = [_blocks(layers, _first_that_fits(context, layers, memo, blocks))] if blocks else []
    if "selective" in modes and context.first_full is None:
        tried.append([Recompute(selective=int(size)) for size in layers])
    fitting: list[tuple[int, list[Recompute]]] = []
    for recompute in tried:
        spent = _spent_if_it_fits(context, layers, memo, recompute)
        if spent is not None:
            fitting.append((spent, recompute))
    return _plan(context, layers, min(fitting, key=lambda entry: entry[0])[1]) if fitting else None


def _blocks(layers: IntArray, block: int) -> list[Recompute]:
    return [Recompute(full=min(block, int(size))) for size in layers]


def _first_that_fits(context: LayoutContext, layers: IntArray, memo: StageMemo, blocks: list[int]) -> int:
    """Return the first block that fits, by bisection; the last block where none does.

    More recomputed layers hold fewer bytes, apart from the layer that is being replayed.
    """
    low, high = 0, len(blocks) - 1
    while low < high:
        middle = (low + high) // 2
        if _spent_if_it_fits(context, layers, memo, _blocks(layers, blocks[middle])) is None:
            low = middle + 1
        else:
            high = middle
    return blocks[low]


def _spent_if_it_fits(
    context: LayoutContext, layers: IntArray, memo: StageMemo, recompute: list[Recompute]
) -> int | None:
    """Return the summed nanoseconds of all backwards; None where a rank does not fit."""
    kinds, ends, spent = context.problem.model.layer_kinds, np.cumsum(layers), 0
    for rank, stages in enumerate(context.layout.rank_stages):
        chunk_kinds = [list(kinds[int(ends[j] - layers[j]) : int(ends[j])]) for j in stages]
        full, selective = [recompute[j].full for j in stages], [recompute[j].selective for j in stages]
        rank_state = _Rank(context, memo, rank, chunk_kinds, full, selective)
        if rank_state.worst()[0] > 0:
            return None
        spent += sum(int(rank_state.options(chunk).terms[Term.BACKWARD, 0]) for chunk in range(len(stages)))
    return spent
