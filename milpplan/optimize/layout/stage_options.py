"""Stage menus: for every virtual stage, the choices that can be part of a plan better than a cutoff.

An item says how many layers of each run the stage holds and how many are recomputed. Step time never falls when
a backward gets longer, so of two items with the same layers the one with the shorter backward and no more
memory is enough: where a rank has one virtual stage, one item a layer count remains (the least recomputation
that fits); where it has several, the Pareto set of (backward, kept bytes, transient bytes).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from milpplan.optimize.space.layer_splits import layer_bounds, layers_up_to, model_runs, place_bounds, run_counts
from milpplan.problem.plan import Layout
from milpplan.problem.problem import Problem
from milpplan.simulation.layout_columns import BoolArray, FloatArray, IntArray
from milpplan.simulation.mixed_costs import RankCosts, rank_capacities
from milpplan.simulation.pipeline.schedule import LiveProfile, live_profiles, placement
from milpplan.simulation.pipeline.step_graph import Term
from milpplan.simulation.stages import EMBEDDING, HEAD, StageOptions, stage_options

ITEM_BYTES = (
    *("state_bytes", "kept_bytes", "deferred_bytes", "transient_bytes"),
    *("host_state_bytes", "host_kept_bytes"),
)
FLOOR_UNITS = 10_000
"""Units of the longest backward in the rows that say how much a rank recomputes at least."""


@dataclass(frozen=True, slots=True, eq=False)
class Menu:
    """Items of one virtual stage: ``runs`` [I, R] layers of each run, ``terms`` [Term, I] nanoseconds,
    ``state_bytes``, ``kept_bytes``, ``deferred_bytes``, ``transient_bytes``, ``host_state_bytes``,
    ``host_kept_bytes``, ``full``, ``selective`` [I]."""

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
        """The chosen items."""
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
    """One layout with everything that is fixed about it; P ranks, J virtual stages."""

    problem: Problem
    layout: Layout
    costs: RankCosts
    capacity_bytes: int
    """What the ranks with most memory can hold."""
    profiles: tuple[tuple[LiveProfile, ...], ...]
    runs: tuple[tuple[int, int], ...]
    """(kind, layers) of every run of equal layers."""
    layer_bounds: tuple[tuple[int, int], ...]
    """(fewest, most) layers of every virtual stage."""
    least_backward_ns: tuple[int, ...] = ()
    """Where the layers are fixed: the least summed backward of each rank's chunks that fits, [P]."""
    rank_bounds: tuple[tuple[int, int], ...] = ()
    """(fewest, most) layers of all chunks of every rank together, [P]."""
    capacities: tuple[int, ...] = ()
    """Bytes that each rank can hold, [P]; empty where all are alike."""
    first_full: int | None = None
    """So many first layers of every virtual stage are recomputed wholly, the others not; None: any counts."""
    peak: int = 0
    """Interleaved: some virtual stage before the last chunks holds at least so many layers."""

    @staticmethod
    def of(problem: Problem, layout: Layout, costs: RankCosts, capacity_bytes: int) -> LayoutContext:
        """Gather what menus and rows need."""
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
        )

    def on_rank(self, rank: int) -> LayoutContext:
        """The same with the memory of one rank on all."""
        return replace(self, capacity_bytes=self.capacity_of(rank), capacities=()) if self.capacities else self

    def capacity_of(self, rank: int) -> int:
        """Bytes that a rank can hold."""
        return self.capacities[rank] if self.capacities else self.capacity_bytes

    def host_capacity_of(self, rank: int) -> int:
        """Bytes that a rank can have on the host."""
        return self.problem.node_types[self.costs.type_of(rank)].host_bytes

    def with_split(self, split: tuple[int, ...], least_backward_ns: tuple[int, ...] = ()) -> LayoutContext:
        """The same with the layers of every virtual stage fixed."""
        bounds = tuple((count, count) for count in split)
        return replace(self, layer_bounds=bounds, least_backward_ns=least_backward_ns)

    def with_stage(self, stage: int, fewest: int, most: int) -> LayoutContext:
        """The same with other limits to the layers of one virtual stage."""
        bounds = list(self.layer_bounds)
        bounds[stage] = (fewest, most)
        return replace(self, layer_bounds=tuple(bounds))

    def with_rank(self, rank: int, fewest: int, most: int) -> LayoutContext:
        """The same with other limits to the layers of one rank."""
        bounds = list(self.rank_bounds)
        bounds[rank] = (fewest, most)
        return replace(self, rank_bounds=tuple(bounds))

    def tightened(self, most: IntArray) -> LayoutContext | None:
        """The same with all limits that follow from the others and from ``most`` layers a rank [P]; None where
        they leave no split."""
        layers = self.problem.model.num_layers
        least, held = np.array(self.layer_bounds, dtype=np.int64).T[:, self.places]
        fewest, upper = np.array(self.rank_bounds, dtype=np.int64).T
        upper = np.minimum(upper, most)
        while True:
            before = (least, held, fewest, upper)
            upper = np.minimum(np.minimum(upper, held.sum(axis=0)), layers - fewest.sum() + fewest)
            fewest = np.maximum(np.maximum(fewest, least.sum(axis=0)), layers - upper.sum() + upper)
            held = np.minimum(held, upper - least.sum(axis=0) + least)
            least = np.maximum(least, fewest - held.sum(axis=0) + held)
            if (least > held).any() or (fewest > upper).any():
                return None
            if all((new == old).all() for new, old in zip((least, held, fewest, upper), before, strict=True)):
                break
        stages = zip(self.by_stage(least).tolist(), self.by_stage(held).tolist(), strict=True)
        ranks = zip(fewest.tolist(), upper.tolist(), strict=True)
        return replace(self, layer_bounds=tuple(stages), rank_bounds=tuple(ranks))

    def only_split(self) -> tuple[int, ...] | None:
        """The layers of every virtual stage where the limits leave one choice."""
        fixed = all(fewest == most for fewest, most in self.layer_bounds)
        return tuple(fewest for fewest, _ in self.layer_bounds) if fixed else None

    @property
    def num_stages(self) -> int:
        """Virtual stages, J."""
        return self.layout.num_virtual_stages

    @property
    def places(self) -> IntArray:
        """The virtual stage of every chunk and rank, [v, P]."""
        return placement(self.layout.schedule, self.layout.pp, self.layout.vpp)

    def by_stage(self, values: IntArray) -> IntArray:
        """Values [v, P] of chunks and ranks in the order of the virtual stages, [J]."""
        ordered = np.empty(self.num_stages, dtype=values.dtype)
        ordered[self.places] = values
        return ordered

    def placed_counts(self, stage: int, most: int) -> list[tuple[int, ...]]:
        """Layers of each run that a virtual stage can hold, at most ``most``, such that the other virtual stages
        leave a place in the model for them."""
        counts = list(run_counts(self.runs, self.min_layers(stage), most))
        if not counts or len(self.runs) == 1:
            return counts
        total = self.problem.model.num_layers
        first, last = layers_up_to(self.layer_bounds, total)
        earliest, latest = place_bounds(self.runs, np.array(counts))
        size = np.array(counts).sum(axis=1)
        earliest = np.maximum(earliest, first[stage] - size)
        latest = np.minimum(latest, total - last[stage])
        if stage > 0:
            earliest = np.maximum(earliest, first[stage - 1])
        if stage + 1 < self.num_stages:
            latest = np.minimum(latest, total - last[stage + 1] - size)
        return [held for held, fits in zip(counts, earliest <= latest, strict=True) if fits]

    def ends_fit(self) -> bool:
        """Whether the ranks that hold the ends of the model have room for them without layers."""
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
        """Fewest layers a virtual stage holds."""
        return self.layer_bounds[stage][0]

    def max_layers(self, stage: int) -> int:
        """Most layers a virtual stage holds, whatever the others do."""
        return self.layer_bounds[stage][1]


@dataclass(frozen=True, slots=True)
class UnitCosts:
    """Proved cost of every unit of a count in one stage, [3, K] for (layers, full, selective) by kind: an item
    whose counts cost more than ``slack`` is in no plan at or below the cutoff."""

    slack: float
    price: FloatArray


def stage_menu(context: LayoutContext, stage: int, most: int, prices: UnitCosts | None = None) -> Menu:
    """All items of a virtual stage with at most ``most`` layers that fit into its rank's memory alone, and for
    whose layers the other virtual stages leave a place in the model."""
    kinds = np.array([kind for kind, _ in context.runs])
    parts = []
    for counts in context.placed_counts(stage, most):
        if prices is not None and float(prices.price[0, kinds] @ np.array(counts)) > prices.slack:
            continue
        options = recompute_options(context, stage, counts, prices)
        if options is not None:
            parts.append(useful_items(context, stage, counts, options))
    parts = [part for part in parts if len(part)]
    if not parts:
        return _empty_menu(stage, len(context.runs))
    return Menu(
        stage,
        np.concatenate([part.runs for part in parts]),
        np.concatenate([part.terms for part in parts], axis=1),
        *(np.concatenate([getattr(part, name) for part in parts]) for name in (*ITEM_BYTES, "full", "selective")),
    )


def _empty_menu(stage: int, num_runs: int) -> Menu:
    none = np.zeros(0, dtype=np.int64)
    runs = np.zeros((0, num_runs), dtype=np.int64)
    return Menu(stage, runs, np.zeros((len(Term), 0), dtype=np.int64), *[none] * (len(ITEM_BYTES) + 2))


def _affordable(
    context: LayoutContext, counts: tuple[int, ...], full: IntArray, selective: IntArray, prices: UnitCosts
) -> BoolArray:
    """Which recompute choices cost no more than the slack."""
    total = np.zeros(len(full))
    before = 0
    for (kind, _), count in zip(context.runs, counts, strict=True):
        wholly = np.clip(full - before, 0, count)
        selectively = np.clip(full + selective - before, 0, count) - wholly
        layers, price_full, price_selective = prices.price[:, kind]
        total += count * layers + wholly * price_full + selectively * price_selective
        before += count
    return np.asarray(total <= prices.slack)


def _recompute_choices(context: LayoutContext, num_layers: int) -> tuple[IntArray, IntArray]:
    """Every (full, selective) pair the space allows for a number of layers."""
    if context.first_full is not None:
        return np.array([min(context.first_full, num_layers)]), np.zeros(1, dtype=np.int64)
    modes = context.problem.recompute_modes
    grid = np.indices((num_layers + 1, num_layers + 1)).reshape(2, -1)
    full, selective = grid[0], grid[1]
    keep = full + selective <= num_layers
    if "none" not in modes:
        keep &= full + selective == num_layers
    if "full" not in modes:
        keep &= full == 0
    if "selective" not in modes:
        keep &= selective == 0
    return full[keep].astype(np.int64), selective[keep].astype(np.int64)


def recompute_options(
    context: LayoutContext, stage: int, counts: tuple[int, ...], prices: UnitCosts | None = None
) -> StageOptions | None:
    """The recompute choices of a virtual stage that holds ``counts`` layers of each run; None without any. Of the
    stage only counts whether it is the model's first or last, its node type, and how far the next one is."""
    kinds = [kind for (kind, _), count in zip(context.runs, counts, strict=True) for _ in range(count)]
    full, selective = _recompute_choices(context, len(kinds))
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


def useful_items(context: LayoutContext, stage: int, counts: tuple[int, ...], options: StageOptions) -> Menu:
    """The options of a virtual stage that fit its rank and that no other one beats."""
    options = options.take(_useful(context, stage, options))
    size = len(options.full)
    return Menu(
        stage,
        np.tile(np.array(counts, dtype=np.int64), (size, 1)),
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


def _useful(context: LayoutContext, stage: int, options: StageOptions) -> IntArray:
    """Options that fit, and are not beaten by one with no longer forward and backward and no more memory."""
    rank = context.layout.stage_ranks[stage]
    chunk = context.layout.rank_stages[rank].index(stage)
    buffers = int(context.costs.of_rank(rank).buffer_bytes)
    room = context.capacity_of(rank) - int(options.state_bytes.sum()) - buffers
    profiles, v = context.profiles[rank], context.layout.vpp
    # (live, waiting for weight gradients, whether in backward): the stage's own part of every profile.
    own = {(counts[chunk], sum(counts[chunk + v : chunk + v + 1]), on == chunk) for on, counts in profiles}
    most = max((live for live, _, _ in own), default=0)
    fits = options.host_state_bytes + most * options.host_kept_bytes <= context.host_capacity_of(rank)
    for live, waiting, running in own:
        used = live * options.kept_bytes + waiting * options.deferred_bytes + running * options.transient_bytes
        fits &= used <= room
    rows = np.flatnonzero(fits)
    if not len(rows):
        return rows
    if context.costs.offloads:
        return _undominated(context, options, rows)
    backward = options.terms[Term.BACKWARD, rows]
    order = np.lexsort((options.transient_bytes[rows], options.kept_bytes[rows], backward))
    rows = rows[order]
    if v == 1:
        return rows[:1]
    return _pareto(options, rows)


def _undominated(context: LayoutContext, options: StageOptions, rows: IntArray) -> IntArray:
    """With offloading recomputation may shorten forwards and transfers: rows that no other one matches in forward,
    backward and, where a rank has several virtual stages, every kind of memory."""
    table = [*options.terms[[Term.FORWARD, Term.BACKWARD]]]
    if context.layout.vpp > 1:
        table += [options.kept_bytes, options.transient_bytes, options.host_kept_bytes]
    values = np.stack([column[rows] for column in table], axis=1)
    rows = rows[np.lexsort(values.T[::-1])]
    values = values[np.lexsort(values.T[::-1])]
    best: list[int] = []
    for row in range(len(rows)):
        if not best or not (values[best] <= values[row]).all(axis=1).any():
            best.append(row)
    return rows[best]


def _pareto(options: StageOptions, rows: IntArray) -> IntArray:
    """Rows, sorted by backward, that no earlier one matches in both kept and transient bytes."""
    kept, transient = options.kept_bytes[rows], options.transient_bytes[rows]
    best: list[int] = []
    for row in range(len(rows)):
        if not best or not ((kept[best] <= kept[row]) & (transient[best] <= transient[row])).any():
            best.append(row)
    return rows[best]
