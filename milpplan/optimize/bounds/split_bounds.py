"""Lower bounds of a layout whose layers are already split: every rank's recompute choices, one by one.

With the layers of all virtual stages known, only recomputation is left, and it is chosen rank by rank: memory ties
together the chunks of a rank, nothing ties ranks but the paths. A path's length is linear in the backwards, so
its least length over all plans of the split is a sum over the ranks of the least over the choices that fit.
The linear relaxation lets a rank recompute fractions of layers, and sees less.

Nothing here rests on a solver: the bounds are sums of integers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np

from milpplan.optimize.layout.stage_options import LayoutContext, Menu, recompute_options, useful_items
from milpplan.simulation.layout_columns import BoolArray, IntArray, ascending
from milpplan.simulation.pipeline.critical_path import CriticalPath
from milpplan.simulation.pipeline.schedule import held_bytes
from milpplan.simulation.pipeline.step_graph import StepGraph, Term
from milpplan.simulation.stages import StageOptions

MAX_CHOICES = 20_000
"""Choices of a rank's chunks that are looked at together; where there are more, at one moment's memory."""
MAX_WEIGHTS = 4
"""Different weights of a rank's chunks, on paths that stay on the rank, that are looked at then."""
NEVER_NS = 2**53
"""Instead of the least backward of a rank that has no choice that fits."""

Held = tuple[tuple[int, ...], bool, bool, int, int]
"""Layers of each run that a virtual stage holds, whether it is the model's first or last, its node type, and the
nanoseconds that its transfer to the next takes beyond the shortest."""


@dataclass(slots=True)
class SplitBounds:
    """Bounds of the splits of one layout; ranks that hold the same in several splits are looked at once."""

    context: LayoutContext
    graph: StepGraph
    paths: Sequence[CriticalPath]
    """Of the layout's step graph; the longest counts."""
    counts: IntArray = field(init=False)
    fixed_ns: IntArray = field(init=False)
    options: dict[Held, tuple[StageOptions, IntArray]] = field(default_factory=dict)
    menus: dict[tuple[int, Held], Menu | None] = field(default_factory=dict)
    replays: dict[tuple[int, tuple[Held, ...]], IntArray | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # On paths that pass nothing backwards, as nearly all are, the choices left out of menus are beaten, and
        # what some ranks take at least is a bound already.
        useful = [path for path in self.paths if (path.counts >= 0).all()]
        self.counts = np.stack([path.counts for path in useful])
        transfer, barrier = self.graph.transfer_ns, self.graph.barrier_ns
        self.fixed_ns = np.array([path.num_transfers * transfer + path.barrier_count * barrier for path in useful])

    def bound_ns(self, split: Sequence[int], cutoff_ns: int) -> int:
        """A step time in nanoseconds that no plan of a split undercuts, ``cutoff_ns + 1`` at most.

        ``split``: layers of every virtual stage, [J].
        """
        held = self._held(split)
        terms = np.array([self._options(stage, own)[1] for stage, own in enumerate(held)])
        total = self.fixed_ns + np.tensordot(self.counts, terms.T, axes=2)
        # Memory comes after that, rank by rank while it can decide: it is dear, and the first ranks hold most.
        for rank, own in enumerate(self._by_rank(held)):
            if int(total.max()) > cutoff_ns:
                break
            if (rank, own) not in self.replays:
                self.replays[rank, own] = self._replays(rank, own)
            replays = self.replays[rank, own]
            if replays is None:
                return cutoff_ns + 1
            total = total + replays
        return min(int(total.max()), cutoff_ns + 1)

    def least_backward_ns(self, split: Sequence[int]) -> tuple[int, ...]:
        """Least summed backward of each rank's chunks over the choices that fit, [P]; of a split not excluded."""
        ones, least = np.ones(self.context.layout.vpp, dtype=np.int64), []
        for rank, own in enumerate(self._by_rank(self._held(split))):
            menus = self._menus(rank, own)
            value: int | None = None
            if menus is not None and math.prod(map(len, menus)) <= MAX_CHOICES:
                choices = _fitting_backwards(self.context, rank, menus)
                value = int(choices.sum(axis=0).min()) if choices.shape[1] else None
            elif menus is not None:
                value = _least_fitting(self.context, rank, menus, ones)
            least.append(NEVER_NS if value is None else value)
        return tuple(least)

    def _held(self, split: Sequence[int]) -> list[Held]:
        """What every virtual stage holds, [J]."""
        runs = np.array([0, *accumulate(length for _, length in self.context.runs)])
        edges = np.array([0, *accumulate(split)])[:, None]
        layers = map(tuple, np.diff(np.clip(edges, runs[:-1], runs[1:]), axis=0).tolist())
        rank_of, costs = self.context.layout.rank_of, self.context.costs
        return [
            (held, stage == 0, stage == len(split) - 1, costs.type_of(rank_of(stage)), costs.crossing_ns(stage))
            for stage, held in enumerate(layers)
        ]

    def _by_rank(self, held: list[Held]) -> list[tuple[Held, ...]]:
        """What the chunks of each rank hold, [P]."""
        return [tuple(held[j] for j in stages) for stages in self.context.layout.rank_stages]

    def _replays(self, rank: int, own: tuple[Held, ...]) -> IntArray | None:
        """Nanoseconds, beyond the least of each stage alone, that each path spends at least on a rank's backwards
        for lack of memory, [paths]; None where nothing fits."""
        stages = list(self.context.layout.rank_stages[rank])
        menus = self._menus(rank, own)
        if menus is None:
            return None
        # Recomputation lengthens a backward as much in a pair as alone.
        weights = (self.counts[:, Term.BACKWARD] + self.counts[:, Term.PAIRED_BACKWARD])[:, stages]
        if math.prod(map(len, menus)) > MAX_CHOICES:
            backwards = self._at_one_moment(rank, menus, weights)
        else:
            choices = _fitting_backwards(self.context, rank, menus)
            backwards = (weights @ choices).min(axis=1) if choices.shape[1] else None
        if backwards is None:
            return None
        least = [self._options(stage, held)[1][Term.BACKWARD] for stage, held in zip(stages, own, strict=True)]
        return np.asarray(backwards - weights @ np.array(least))

    def _at_one_moment(self, rank: int, menus: Sequence[Menu], weights: IntArray) -> IntArray | None:
        """Least weighted backwards of each path [paths] over the choices that fit when most micro-batches are
        alive, for the most frequent ``weights`` [paths, v] of paths that stay on the rank; for other paths over
        all choices. None where nothing fits."""
        least = np.array([int(menu.terms[Term.BACKWARD].min()) for menu in menus])
        total = weights @ least
        stays = weights.sum(axis=1) >= self.context.layout.num_micro_batches
        distinct, inverse, count = np.unique(weights, axis=0, return_inverse=True, return_counts=True)
        wanted = ascending(inverse[stays])
        for place in wanted[np.argsort(-count[wanted], kind="stable")][:MAX_WEIGHTS].tolist():
            value = _least_fitting(self.context, rank, menus, distinct[place])
            if value is None:
                return None
            total[inverse == place] = value
        return np.asarray(total)

    def _menus(self, rank: int, own: tuple[Held, ...]) -> list[Menu] | None:
        """The choices of a rank's chunks; None where one has none that fits."""
        menus = []
        for stage, held in zip(self.context.layout.rank_stages[rank], own, strict=True):
            menu = self._menu(stage, held)
            if menu is None:
                return None
            menus.append(menu)
        return menus

    def _menu(self, stage: int, held: Held) -> Menu | None:
        if (stage, held) not in self.menus:
            menu = useful_items(self.context, stage, held[0], self._options(stage, held)[0])
            self.menus[stage, held] = menu if len(menu) else None
        return self.menus[stage, held]

    def _options(self, stage: int, held: Held) -> tuple[StageOptions, IntArray]:
        """The recompute choices of a virtual stage, whether they fit or not, and the least of each term [Term];
        only their backwards differ."""
        if held not in self.options:
            options = recompute_options(self.context, stage, held[0])
            assert options is not None, "without prices there is a choice"
            self.options[held] = options, options.terms.min(axis=1)
        return self.options[held]

    def with_paths(self, paths: Sequence[CriticalPath]) -> SplitBounds:
        """The same with other paths, and the choices already looked up."""
        return replace(self, paths=paths, replays={})


def _fitting_backwards(context: LayoutContext, rank: int, menus: Sequence[Menu]) -> IntArray:
    """Backward nanoseconds of the rank's chunks under every choice that fits into its memory, [v, choices]."""
    grid = np.indices([len(menu) for menu in menus]).reshape(len(menus), -1)
    kept = np.stack([menu.kept_bytes[items] for menu, items in zip(menus, grid, strict=True)])
    transient = np.stack([menu.transient_bytes[items] for menu, items in zip(menus, grid, strict=True)])
    deferred = np.stack([menu.deferred_bytes[items] for menu, items in zip(menus, grid, strict=True)])
    states = sum(int(menu.state_bytes[0]) for menu in menus) + int(context.costs.of_rank(rank).buffer_bytes)
    fits = np.ones(grid.shape[1], dtype=np.bool_)
    for running, live in context.profiles[rank]:
        used = np.array(live) @ held_bytes(kept, deferred, len(live)) + transient[running]
        fits &= used <= context.capacity_of(rank) - states
    if context.costs.offloads:
        fits &= _fit_on_host(context, rank, menus, grid)
    return np.stack([menu.terms[Term.BACKWARD][items[fits]] for menu, items in zip(menus, grid, strict=True)])


def _fit_on_host(context: LayoutContext, rank: int, menus: Sequence[Menu], grid: IntArray) -> BoolArray:
    """Which choices of the chunks [v, choices] fit on the host together."""
    kept = np.stack([menu.host_kept_bytes[items] for menu, items in zip(menus, grid, strict=True)])
    room = context.host_capacity_of(rank) - sum(int(menu.host_state_bytes[0]) for menu in menus)
    live = np.array([counts for _, counts in context.profiles[rank]])
    return np.asarray(((live @ kept) <= room).all(axis=0))


def _least_fitting(context: LayoutContext, rank: int, menus: Sequence[Menu], weights: IntArray) -> int | None:
    """Least sum of weighted backwards over the choices of the chunks that fit at the moment when most
    micro-batches are alive, chunk by chunk over the pairs (bytes, nanoseconds) that nothing beats; None if none
    fits."""
    running, live = max(context.profiles[rank], key=lambda profile: sum(profile[1]))
    states = sum(int(menu.state_bytes[0]) for menu in menus) + int(context.costs.of_rank(rank).buffer_bytes)
    v = len(menus)
    sizes = [
        live[chunk] * menu.kept_bytes
        + sum(live[chunk + v : chunk + v + 1]) * menu.deferred_bytes
        + (menu.transient_bytes if chunk == running else 0)
        for chunk, menu in enumerate(menus)
    ]
    room = context.capacity_of(rank) - states - sum(int(size.min()) for size in sizes)
    if room < 0:
        return None
    used = spent = np.zeros(1, dtype=np.int64)
    for size, menu, weight in zip(sizes, menus, weights.tolist(), strict=True):
        # Bytes above the least of each chunk, so that whatever follows still fits.
        used = (used[:, None] + (size - size.min())).reshape(-1)
        spent = (spent[:, None] + weight * menu.terms[Term.BACKWARD]).reshape(-1)
        order = np.argsort(used)
        order = order[: np.searchsorted(used, room, side="right", sorter=order)]
        used, spent = used[order], spent[order]
        better = np.ones(len(spent), dtype=np.bool_)
        better[1:] = spent[1:] < np.minimum.accumulate(spent)[:-1]
        used, spent = used[better], spent[better]
    return int(spent[-1])
