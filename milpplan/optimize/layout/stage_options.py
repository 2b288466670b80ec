"""Context of one layout, and menus: for every virtual stage, the options of plans better than a cutoff.

An option (item) says how many layers of each run the stage holds and how many are recomputed. Step time never
falls when a backward gets longer. So among items with the same layers, an item is dominated by another with a
shorter backward and no more memory. Where a rank has a single virtual stage, one item a layer count remains: the
least recomputation that fits. Where it has several, the Pareto set of (backward, kept bytes, transient bytes)
remains.

A layout whose virtual stages share one recompute setting (``Space.recompute_counts``) is solved in parts, setting
by setting. In a part the counts of a virtual stage follow from its layers, so everything that holds for free
counts holds for the part, with smaller menus. The layout's bound is the minimum over its parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from milpplan.optimize.space.plan_space import layer_bounds, layers_up_to, model_runs, place_bounds, run_counts
from milpplan.problem import Layout, Plan, Problem
from milpplan.simulation import (
    BoolArray,
    FloatArray,
    IntArray,
    RankCosts,
    StageOptions,
    durations,
    plan_stages,
    rank_capacities,
    rank_memory,
    stage_options,
    step_times_ns,
    usable_memory_bytes,
)
from milpplan.simulation.layers import ONCE, Phase
from milpplan.simulation.mixed_costs import ReplicaCosts
from milpplan.simulation.pipeline.step_graph import Term
from milpplan.simulation.pipeline.work_orders import LiveProfile, chunk_stages, live_profiles
from milpplan.simulation.scenario_costs import ScenarioCosts
from milpplan.simulation.simulator import fits_in_memory
from milpplan.simulation.stages import EMBEDDING, HEAD

ITEM_BYTES = (
    *("state_bytes", "kept_bytes", "deferred_bytes", "transient_bytes"),
    *("host_state_bytes", "host_kept_bytes"),
)
"""Fields of ``Menu`` that hold bytes."""
FLOOR_UNITS = 10_000
"""Units of the longest backward in the rows of the minimum recomputation of a rank."""


PartKey = tuple[tuple[str, ...], int | None]
"""Recompute modes of a part, and the number of first layers that it recomputes."""


@dataclass(frozen=True, slots=True, eq=False)
class Menu:
    """Items of one virtual stage.

    ``runs`` [I, R]: layers of each run. ``terms`` [Term, I]: nanoseconds. ``state_bytes``, ``kept_bytes``,
    ``deferred_bytes``, ``transient_bytes``, ``host_state_bytes``, ``host_kept_bytes``, ``full``, ``selective``:
    [I].
    """

    stage: int
    runs: IntArray
    terms: IntArray
    state_bytes: IntArray
    kept_bytes: IntArray
    deferred_bytes: IntArray
    transient_bytes: IntArray
    host_state_bytes: IntArray
    host_kept_bytes: IntArray
    full: IntArray
    selective: IntArray

    @property
    def layers(self) -> IntArray:
        """Layers of every item, [I]."""
        return np.asarray(self.runs.sum(axis=1))

    def __len__(self) -> int:
        return len(self.full)

    def take(self, rows: IntArray | BoolArray) -> Menu:
        """Return the menu of the chosen items."""
        return Menu(
            self.stage,
            self.runs[rows],
            self.terms[:, rows],
            self.state_bytes[rows],
            self.kept_bytes[rows],
            self.deferred_bytes[rows],
            self.transient_bytes[rows],
            self.host_state_bytes[rows],
            self.host_kept_bytes[rows],
            self.full[rows],
            self.selective[rows],
        )


@dataclass(frozen=True, slots=True)
class LayoutContext:
    """Layout with all its data and its limits to layers; P ranks, J virtual stages."""

    problem: Problem
    layout: Layout
    costs: RankCosts
    capacity_bytes: int
    """Capacity of the ranks with the most memory."""
    profiles: tuple[tuple[LiveProfile, ...], ...]
    runs: tuple[tuple[int, int], ...]
    """(kind, layers) of every run of equal layers."""
    layer_bounds: tuple[tuple[int, int], ...]
    """(minimum, maximum) layers of every virtual stage."""
    min_backward_ns: tuple[int, ...] = ()
    """Where the layers are fixed: minimum summed backward of each rank's chunks that fits, [P]."""
    rank_bounds: tuple[tuple[int, int], ...] = ()
    """(minimum, maximum) layers of all chunks of every rank together, [P]."""
    capacities: tuple[int, ...] = ()
    """Capacity of each rank in bytes, [P]; empty where all ranks are alike."""
    first_full: int | None = None
    """Number of first layers of every virtual stage that are fully recomputed, while the others are not; None: any
    counts."""
    taking: frozenset[int] = frozenset()
    """Layers with which no virtual stage starts (``ModelSpec.taking_layers``)."""
    min_fullest_stage: int = 0
    """Interleaved: minimum layers of the fullest virtual stage before the last chunks."""

    @staticmethod
    def of(problem: Problem, layout: Layout, costs: RankCosts, capacity_bytes: int) -> LayoutContext:
        """Gather the data that menus and rows need."""
        profiles = live_profiles(layout.schedule, layout.pp, layout.num_micro_batches, layout.vpp)
        bounds, ranks = layer_bounds(problem, layout), ((0, problem.model.num_layers),) * layout.pp
        capacities = rank_capacities(problem, layout) if problem.other_hardware else ()
        return LayoutContext(
            problem,
            layout,
            costs,
            capacity_bytes,
            profiles,
            model_runs(problem),
            bounds,
            rank_bounds=ranks,
            capacities=capacities,
            taking=problem.model.taking_layers,
        )

    def on_rank(self, rank: int) -> LayoutContext:
        """Return a copy in which all ranks have the memory of one rank."""
        return replace(self, capacity_bytes=self.capacity_of(rank), capacities=()) if self.capacities else self

    def capacity_of(self, rank: int) -> int:
        """Return the capacity of a rank in bytes."""
        return self.capacities[rank] if self.capacities else self.capacity_bytes

    def host_capacity_of(self, rank: int) -> int:
        """Return the host memory of a rank in bytes."""
        return self.problem.node_types[self.costs.type_of(rank)].host_bytes

    def with_split(self, split: tuple[int, ...], min_backward_ns: tuple[int, ...] = ()) -> LayoutContext:
        """Return a copy with the layers of every virtual stage fixed."""
        bounds = tuple((count, count) for count in split)
        return replace(self, layer_bounds=bounds, min_backward_ns=min_backward_ns)

    def with_stage(self, stage: int, min_layers: int, max_layers: int) -> LayoutContext:
        """Return a copy with other limits to the layers of one virtual stage."""
        bounds = list(self.layer_bounds)
        bounds[stage] = (min_layers, max_layers)
        return replace(self, layer_bounds=tuple(bounds))

    def with_rank(self, rank: int, min_layers: int, max_layers: int) -> LayoutContext:
        """Return a copy with other limits to the layers of one rank."""
        bounds = list(self.rank_bounds)
        bounds[rank] = (min_layers, max_layers)
        return replace(self, rank_bounds=tuple(bounds))

    def tightened(self, rank_limit: IntArray) -> LayoutContext | None:
        """Propagate the limits of stages and ranks, and ``rank_limit`` layers a rank [P].

        Returns:
            A copy with all limits that follow; None where they leave no split.
        """
        layers = self.problem.model.num_layers
        stage_min, stage_max = np.array(self.layer_bounds, dtype=np.int64).T[:, self.stage_grid]
        rank_min, rank_max = np.array(self.rank_bounds, dtype=np.int64).T
        rank_max = np.minimum(rank_max, rank_limit)
        while True:
            before = (stage_min, stage_max, rank_min, rank_max)
            rank_max = np.minimum(np.minimum(rank_max, stage_max.sum(axis=0)), layers - rank_min.sum() + rank_min)
            rank_min = np.maximum(np.maximum(rank_min, stage_min.sum(axis=0)), layers - rank_max.sum() + rank_max)
            stage_max = np.minimum(stage_max, rank_max - stage_min.sum(axis=0) + stage_min)
            stage_min = np.maximum(stage_min, rank_min - stage_max.sum(axis=0) + stage_max)
            if (stage_min > stage_max).any() or (rank_min > rank_max).any():
                return None
            if all(
                (new == old).all()
                for new, old in zip((stage_min, stage_max, rank_min, rank_max), before, strict=True)
            ):
                break
        stages = zip(self.by_stage(stage_min).tolist(), self.by_stage(stage_max).tolist(), strict=True)
        ranks = zip(rank_min.tolist(), rank_max.tolist(), strict=True)
        return replace(self, layer_bounds=tuple(stages), rank_bounds=tuple(ranks))

    def only_split(self) -> tuple[int, ...] | None:
        """Return the layers of every virtual stage where the limits leave a single split, else None."""
        fixed = all(low == high for low, high in self.layer_bounds)
        return tuple(low for low, _ in self.layer_bounds) if fixed else None

    @property
    def num_stages(self) -> int:
        """Number of virtual stages, J."""
        return self.layout.num_virtual_stages

    @property
    def stage_grid(self) -> IntArray:
        """Virtual stage of every chunk and rank, [v, P]."""
        return chunk_stages(self.layout.schedule, self.layout.pp, self.layout.vpp)

    def by_stage(self, values: IntArray) -> IntArray:
        """Return values [v, P] of chunks and ranks in the order of the virtual stages, [J]."""
        ordered = np.empty(self.num_stages, dtype=values.dtype)
        ordered[self.stage_grid] = values
        return ordered

    def placed_counts(self, stage: int, max_layers: int) -> IntArray:
        """Return the layer counts by run that a virtual stage can hold, at most ``max_layers`` layers, such that
        the limits of the other virtual stages allow a position in the model for them, [N, R]."""
        counts = run_counts(self.runs)
        size = counts.sum(axis=1)
        within = (self.min_layers(stage) <= size) & (size <= max_layers)
        counts, size = np.asarray(counts[within]), size[within]
        if not len(counts) or len(self.runs) == 1:
            return counts
        total = self.problem.model.num_layers
        first, last = layers_up_to(self.layer_bounds, total)
        earliest, latest = place_bounds(self.runs, counts)
        taking = list(self.taking)
        legal = ~(np.isin(latest, taking) | ((earliest == latest) & np.isin(latest + size, taking)))
        earliest = np.maximum(earliest, first[stage] - size)
        latest = np.minimum(latest, total - last[stage])
        if stage > 0:
            earliest = np.maximum(earliest, first[stage - 1])
        if stage + 1 < self.num_stages:
            latest = np.minimum(latest, total - last[stage + 1] - size)
        return np.asarray(counts[legal & (earliest <= latest)])

    def ends_fit(self) -> bool:
        """Return True if the ranks with the ends of the model have capacity for these without any layers."""
        last = self.layout.stage_ranks[-1]
        return all(self._ends_of_rank_fit(rank, rank == 0, rank == last) for rank in {0, last})

    def _ends_of_rank_fit(self, rank: int, is_first: bool, is_last: bool) -> bool:
        costs, v, ends = self.costs.of_rank(rank), self.layout.vpp, [EMBEDDING] * is_first + [HEAD] * is_last
        if int(costs.host_state_bytes[ends].sum()) > self.host_capacity_of(rank):
            return False
        states = int(costs.state_bytes[:, ends].sum()) + int(costs.buffer_bytes)
        for running, counts in self.profiles[rank]:
            used = states + counts[0] * int(costs.embedding_kept_bytes) * is_first
            if is_last:
                used += counts[v - 1] * int(costs.head_kept_bytes)
                used += counts[-1] * int(costs.head_deferred_bytes) * (len(counts) > v)
                used += int(costs.head_workspace_bytes) * (running == v - 1)
            if used > self.capacity_of(rank):
                return False
        return True

    def min_layers(self, stage: int) -> int:
        """Return the minimum number of layers of a virtual stage."""
        return self.layer_bounds[stage][0]

    def max_layers(self, stage: int) -> int:
        """Return the maximum number of layers of a virtual stage, whatever the others hold."""
        return self.layer_bounds[stage][1]


@dataclass(frozen=True, slots=True)
class UnitCosts:
    """Proved cost of every unit of a count in one stage, [3, K] for (layers, full, selective) by kind. An item
    whose counts cost more than ``slack`` is in no plan at or below the cutoff."""

    slack: float
    price: FloatArray


def stage_menu(context: LayoutContext, stage: int, max_layers: int, prices: UnitCosts | None = None) -> Menu:
    """Return the items of a virtual stage with at most ``max_layers`` layers that fit into its rank's memory
    alone."""
    placed, kinds = context.placed_counts(stage, max_layers), np.array([kind for kind, _ in context.runs])
    if prices is not None:
        placed = placed[placed @ prices.price[0, kinds] <= prices.slack]
    parts, known = [], dict[bytes, Menu | None]()
    for counts in placed:
        # In a model whose kinds of layers alternate, many stretches hold the same layers.
        layers = np.repeat(kinds, counts).tobytes()
        if layers not in known:
            options = recompute_options(context, stage, counts, prices)
            known[layers] = None if options is None else useful_items(context, stage, counts, options)
        if (part := known[layers]) is not None and len(part):
            parts.append(replace(part, runs=np.tile(counts, (len(part), 1))))
    return _concatenated(parts) if parts else _empty_menu(stage, len(context.runs))


def _concatenated(parts: Sequence[Menu]) -> Menu:
    return Menu(
        parts[0].stage,
        np.concatenate([part.runs for part in parts]),
        np.concatenate([part.terms for part in parts], axis=1),
        *(np.concatenate([getattr(part, name) for part in parts]) for name in (*ITEM_BYTES, "full", "selective")),
    )


def shared_menus(
    contexts: Sequence[LayoutContext], stage: int, max_layers: int, prices: Sequence[UnitCosts | None]
) -> list[Menu]:
    """Return a menu of a virtual stage for each of several scenarios, with the same items in all of them.

    An item is dominated where another is no slower in any scenario and needs no more memory.

    Args:
        contexts: the layout in every scenario.
        stage: the virtual stage.
        max_layers: maximum layers of the stage.
        prices: proved costs of units in every scenario.
    """
    first, kinds = contexts[0], np.array([kind for kind, _ in contexts[0].runs])
    priced = [(context, own) for context, own in zip(contexts, prices, strict=True) if own is not None]
    parts: list[list[Menu]] = []
    placed = first.placed_counts(stage, max_layers)
    for _, own in priced:
        placed = placed[placed @ own.price[0, kinds] <= own.slack]
    for counts in placed:
        options = [recompute_options(context, stage, counts) for context in contexts]
        shared = [option for option in options if option is not None]
        if len(shared) < len(options):
            continue
        full, selective = shared[0].full, shared[0].selective
        fits = _fits(first, stage, shared[0])
        for context, own in priced:
            fits &= _affordable(context, counts, full, selective, own)
        rows = _undominated(first, shared, np.flatnonzero(fits))
        if len(rows):
            parts.append([_menu_of(stage, counts, option.take(rows)) for option in shared])
    if not parts:
        return [_empty_menu(stage, len(first.runs)) for _ in contexts]
    return [_concatenated([part[index] for part in parts]) for index in range(len(contexts))]


def _empty_menu(stage: int, num_runs: int) -> Menu:
    none = np.zeros(0, dtype=np.int64)
    runs = np.zeros((0, num_runs), dtype=np.int64)
    return Menu(stage, runs, np.zeros((len(Term), 0), dtype=np.int64), *[none] * (len(ITEM_BYTES) + 2))


def _affordable(
    context: LayoutContext, counts: IntArray, full: IntArray, selective: IntArray, prices: UnitCosts
) -> BoolArray:
    """Mask the recompute choices that cost no more than the slack."""
    total = np.zeros(len(full))
    before = 0
    for (kind, _), count in zip(context.runs, counts, strict=True):
        if not count:
            continue
        wholly = np.clip(full - before, 0, count)
        selectively = np.clip(full + selective - before, 0, count) - wholly
        layers, price_full, price_selective = prices.price[:, kind]
        total += count * layers + wholly * price_full + selectively * price_selective
        before += count
    return np.asarray(total <= prices.slack)


def recompute_options(
    context: LayoutContext, stage: int, counts: IntArray, prices: UnitCosts | None = None
) -> StageOptions | None:
    """Return the recompute choices of a virtual stage that holds ``counts`` layers of each run; None without any.

    They depend on the stage only by its being the model's first or last, its node type, and the distance to the
    next stage.
    """
    kinds = np.repeat(np.array(context.runs)[:, 0], counts).tolist()
    modes, num_layers = context.problem.recompute_modes, len(kinds)
    if context.first_full is not None:
        full, selective = np.array([min(context.first_full, num_layers)]), np.zeros(1, dtype=np.int64)
    else:
        # Every pair that the space allows.
        full, selective = np.indices((num_layers + 1, num_layers + 1)).reshape(2, -1)
        allowed = full + selective <= num_layers if "none" in modes else full + selective == num_layers
        if "full" not in modes:
            allowed &= full == 0
        if "selective" not in modes:
            allowed &= selective == 0
        full, selective = full[allowed].astype(np.int64), selective[allowed].astype(np.int64)
    if prices is not None:
        keep = _affordable(context, counts, full, selective, prices)
        full, selective = full[keep], selective[keep]
    if not len(full):
        return None
    return stage_options(
        context.costs.of_rank(context.layout.rank_of(stage)),
        kinds,
        full,
        selective,
        is_first=stage == 0,
        is_last=stage == context.num_stages - 1,
        crossing_ns=context.costs.crossing_ns(stage),
    )


def useful_items(context: LayoutContext, stage: int, counts: IntArray, options: StageOptions) -> Menu:
    """Return the undominated options of a virtual stage that fit its rank.

    An option is dominated by another with no longer forward and backward and no more memory.
    """
    rows = np.flatnonzero(_fits(context, stage, options))
    if context.costs.offloads and len(rows):
        rows = _undominated(context, [options], rows)
    elif len(rows):
        kept, transient, backward = options.kept_bytes, options.transient_bytes, options.terms[Term.BACKWARD]
        rows = rows[np.lexsort((transient[rows], kept[rows], backward[rows]))]
        best = rows[:1].tolist()
        # The backward grows along the rows: an earlier row dominates if it needs no more memory of either kind.
        for row in rows[1:].tolist() if context.layout.vpp > 1 else ():
            if not ((kept[best] <= kept[row]) & (transient[best] <= transient[row])).any():
                best.append(row)
        rows = np.array(best)
    return _menu_of(stage, counts, options.take(rows))


def _menu_of(stage: int, counts: IntArray, options: StageOptions) -> Menu:
    size = len(options.full)
    return Menu(
        stage,
        np.tile(counts, (size, 1)),
        options.terms,
        np.full(size, int(options.state_bytes.sum()), dtype=np.int64),
        options.kept_bytes,
        np.full(size, options.deferred_bytes, dtype=np.int64),
        options.transient_bytes,
        np.full(size, options.host_state_bytes, dtype=np.int64),
        options.host_kept_bytes,
        options.full,
        options.selective,
    )


def _fits(context: LayoutContext, stage: int, options: StageOptions) -> BoolArray:
    """Mask the options that fit their rank alone."""
    rank = context.layout.stage_ranks[stage]
    chunk = context.layout.rank_stages[rank].index(stage)
    buffers = int(context.costs.of_rank(rank).buffer_bytes)
    capacity = context.capacity_of(rank) - int(options.state_bytes.sum()) - buffers
    profiles, v = context.profiles[rank], context.layout.vpp
    # (live, waiting for weight gradients, in backward): the stage's part of every profile.
    moments = {(counts[chunk], sum(counts[chunk + v : chunk + v + 1]), on == chunk) for on, counts in profiles}
    max_live = max((live for live, _, _ in moments), default=0)
    fits = options.host_state_bytes + max_live * options.host_kept_bytes <= context.host_capacity_of(rank)
    for live, waiting, running in moments:
        used = live * options.kept_bytes + waiting * options.deferred_bytes + running * options.transient_bytes
        fits &= used <= capacity
    return np.asarray(fits)


def _undominated(context: LayoutContext, views: Sequence[StageOptions], rows: IntArray) -> IntArray:
    """Return the undominated rows where something is offloaded, so that recomputation may shorten forwards and
    transfers, or where several scenarios price the options.

    Criteria are forward and backward of every view and, where a rank has several virtual stages, every kind of
    memory.
    """
    options = views[0]
    table = [row for view in views for row in view.terms[[Term.FORWARD, Term.BACKWARD]]]
    if context.layout.vpp > 1:
        table += [options.kept_bytes, options.transient_bytes, options.host_kept_bytes]
    values = np.stack([column[rows] for column in table], axis=1)
    order = np.lexsort(values.T[::-1])
    rows, values = rows[order], values[order]
    best: list[int] = []
    while len(left := np.flatnonzero((values >= 0).all(axis=1))):
        row = int(left[0])
        best.append(row)
        # Dominated rows, and the row itself, are marked.
        values[left[(values[row] <= values[left]).all(axis=1)]] = -1
    return rows[best]


def fitting_step_ns(problem: Problem, plan: Plan, costs: RankCosts | ReplicaCosts | ScenarioCosts) -> int | None:
    """Return the exact step time in ns; None where the plan does not fit. Heterogeneous replicas: the slowest
    replica's step. Several scenarios: the scaled step."""
    if isinstance(costs, ScenarioCosts):
        scaled = []
        for view in costs.views:
            step = fitting_step_ns(view.problem, plan, view.costs)
            if step is None:
                return None
            scaled.append(view.scale.up(step))
        return max(scaled)
    if isinstance(costs, ReplicaCosts):
        views = enumerate(costs.views)
        steps = [fitting_step_ns(v.problem, plan.of_replicas(t, v.layout), v.costs) for t, v in views]
        fitting_steps = [step for step in steps if step is not None]
        return max(fitting_steps) if len(fitting_steps) == len(steps) else None
    stages = plan_stages(costs, problem.model.layer_kinds, plan)
    if not fits_in_memory(problem, plan.layout, rank_memory(plan.layout, costs, stages)):
        return None
    return int(step_times_ns(plan.layout, costs, durations(stages)))


def contexts_of(
    problem: Problem, layout: Layout, costs: RankCosts | ReplicaCosts | ScenarioCosts
) -> tuple[LayoutContext, ...]:
    """Return the contexts of a layout: one, or one per view for heterogeneous replicas or several scenarios."""
    if isinstance(costs, ScenarioCosts):
        return tuple(context for view in costs.views for context in contexts_of(view.problem, layout, view.costs))
    if isinstance(costs, ReplicaCosts):
        return tuple(
            context for view in costs.views for context in contexts_of(view.problem, view.layout, view.costs)
        )
    return (LayoutContext.of(problem, layout, costs, usable_memory_bytes(problem)),)


def longest_step_ns(context: LayoutContext) -> int:
    """Return an upper bound of the layout's step: everything one after another, every layer fully recomputed, on
    the slowest node type."""
    layout = context.layout
    ranks = {context.costs.type_of(rank): context.costs.of_rank(rank) for rank in range(layout.pp)}
    crossings = sum(context.costs.crossing_ns(stage) for stage in range(context.num_stages))
    transfers = 2 * (context.num_stages * int(context.costs.transfer_ns) + crossings)
    counts = np.bincount(np.array(context.problem.model.layer_kinds), minlength=len(context.problem.model.kinds))
    longest_ns = 0
    for costs in ranks.values():
        duration = costs.duration_ns
        extra = np.maximum(np.maximum(duration[:, Phase.FULL], duration[:, Phase.SELECTIVE]), 0)
        work = int((duration[:, ONCE].sum(axis=1) + extra) @ counts)
        work += int(costs.embedding_ns.sum() + costs.head_ns.sum()) + transfers
        once = int((costs.gather_ns + costs.reduce_ns + costs.optimizer_ns) @ np.append(counts, [1, 1]))
        longest_ns = max(longest_ns, layout.num_micro_batches * work + once + int(context.costs.barrier_ns))
    # Twice as a margin; differences between ranks add up to at most the sum over the types.
    return 2 * longest_ns * len(ranks)


def part_key(context: LayoutContext) -> PartKey:
    """Return the key of a part of a layout."""
    return context.problem.recompute_modes, context.first_full


def part_settings(context: LayoutContext, most_layers: int) -> Iterator[LayoutContext]:
    """Yield the parts of a layout: all layers of one mode, then, where the space has blocks, the first n layers of
    every virtual stage fully recomputed; ``most_layers``: maximum layers of a virtual stage."""
    modes = context.problem.recompute_modes
    for mode in modes:
        yield replace(context, problem=_with_modes(context.problem, mode))
    if context.problem.space.recompute_counts == "block" and {"none", "full"} <= set(modes):
        blocks = _with_modes(context.problem, "none", "full")
        # A block as long as the longest stage is all layers.
        for number in range(1, min(most_layers, max(high for _, high in context.layer_bounds))):
            yield replace(context, problem=blocks, first_full=number)


def _with_modes(problem: Problem, *modes: str) -> Problem:
    space = problem.space.model_copy(update={"recompute": modes, "recompute_counts": "any"})
    return problem.model_copy(update={"space": space})
