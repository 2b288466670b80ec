"""Lower bounds of a layout whose layers are already split: every rank's recompute choices are enumerated.

With the layers of all virtual stages known, only recomputation is left. It is chosen rank by rank: memory couples
the chunks of a rank, and only the paths couple ranks. A path's length is linear in the backwards, so its minimum
over all plans of the split is a sum over the ranks of the minimum over the choices that fit. The linear
relaxation, which lets a rank recompute fractions of layers, is weaker.

No solver is involved: the bounds are sums of integers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from milpplan.optimize.layout import LayoutContext
from milpplan.optimize.layout.stage_options import Menu, recompute_options, useful_items
from milpplan.simulation import BoolArray, IntArray, StageOptions, ascending
from milpplan.simulation.pipeline.step_graph import CriticalPath, StepGraph, Term

MAX_CHOICES = 20_000
"""Maximum number of joint choices of a rank's chunks; above it, only the memory at one moment counts."""
MAX_WEIGHTS = 4
"""Maximum number of different weights of a rank's chunks, on paths that stay on the rank, that are
examined then."""
NO_CHOICE_NS = 2**53
"""Stands for the minimum backward of a rank without a choice that fits."""

StageContent = tuple[tuple[int, ...], bool, bool, int, int]
"""Content of a virtual stage: its layers of each run, whether it is the model's first or last, its node type, and
the excess of its transfer to the next stage over the shortest transfer, nanoseconds."""


@dataclass(slots=True)
class SplitBounds:
    """Bounds of the splits of one layout; equal contents of a rank are evaluated once."""

    context: LayoutContext
    graph: StepGraph
    paths: Sequence[CriticalPath]
    """Paths of the layout's step graph; the longest counts."""
    counts: IntArray = field(init=False)
    fixed_ns: IntArray = field(init=False)
    run_edges: IntArray = field(init=False)
    """Layers of the model before each run, and all its layers, [R + 1]."""
    stages: list[tuple[bool, bool, int, int]] = field(init=False)
    """Parts of the contents of the virtual stages that no split changes."""
    options: dict[StageContent, tuple[StageOptions, IntArray]] = field(default_factory=dict)
    menus: dict[tuple[int, StageContent], Menu] = field(default_factory=dict)
    replays: dict[tuple[int, tuple[StageContent, ...]], IntArray | None] = field(default_factory=dict)
    choices: dict[tuple[int, tuple[StageContent, ...]], npt.NDArray[np.int16]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # On paths without negative counts, which are nearly all, the choices left out of menus are dominated, and
        # the minima of some ranks already give a bound.
        paths = [path for path in self.paths if (path.counts >= 0).all()]
        self.counts = np.stack([path.counts for path in paths])
        transfer, barrier = self.graph.transfer_ns, self.graph.barrier_ns
        self.fixed_ns = np.array([path.num_transfers * transfer + path.barrier_count * barrier for path in paths])
        context, J = self.context, self.context.num_stages
        self.run_edges = np.concatenate([[0], np.cumsum(np.array(context.runs)[:, 1])])
        self.stages = [
            (j == 0, j == J - 1, context.costs.type_of(rank), context.costs.crossing_ns(j))
            for j, rank in enumerate(context.layout.stage_ranks)
        ]

    def bound_ns(self, split: Sequence[int], cutoff_ns: int) -> int:
        """Return a lower bound of the step time of a split, at most ``cutoff_ns + 1``.

        ``split``: layers of every virtual stage, [J].
        """
        contents = self._contents(split)
        # The paths with the shortest choices of all stages, whatever they keep.
        min_terms = np.empty((len(Term), len(contents)), dtype=np.int64)
        for stage, content in enumerate(contents):
            min_terms[:, stage] = self._options(stage, content)[1]
        total = np.asarray(self.fixed_ns + np.tensordot(self.counts, min_terms, axes=2))
        # Memory comes last, rank by rank while it can decide: it is expensive, and the first ranks hold most.
        for rank, chunks in enumerate(self._by_rank(contents)):
            if int(total.max()) > cutoff_ns:
                break
            if (rank, chunks) not in self.replays:
                self.replays[rank, chunks] = self._replays(rank, chunks)
            replays = self.replays[rank, chunks]
            if replays is None:
                return cutoff_ns + 1
            total = total + replays
        return min(int(total.max()), cutoff_ns + 1)

    def shortest(self, split: Sequence[int], counts: IntArray) -> IntArray | None:
        """Return durations [Term, J] whose sum, weighted by ``counts``, is a lower bound over all recompute
        choices that fit; None where nothing fits.

        Every term but the backwards has its minimum; the backwards are those of the best choices. Where a rank has
        many joint choices, only its memory at the fullest moment counts.

        Args:
            split: layers of every virtual stage, [J].
            counts: nonnegative weights, [Term, J], such as the counts of a path or of several paths together.
        """
        contents = self._contents(split)
        durations = np.stack([self._options(stage, content)[1] for stage, content in enumerate(contents)], axis=1)
        weights = counts[Term.BACKWARD] + counts[Term.PAIRED_BACKWARD]
        for rank, held in enumerate(self._by_rank(contents)):
            stages = list(self.context.layout.rank_stages[rank])
            menus = self._menus(stages, held)
            items = None if menus is None else self._fastest_items(rank, held, menus, weights[stages])
            if menus is None or items is None:
                return None
            for stage, menu, item in zip(stages, menus, items, strict=True):
                # Recomputation lengthens a backward as much in a pair as alone.
                added = menu.terms[Term.BACKWARD, item] - durations[Term.BACKWARD, stage]
                durations[Term.BACKWARD, stage] += added
                durations[Term.PAIRED_BACKWARD, stage] += added
        return durations

    def min_backward_ns(self, split: Sequence[int]) -> tuple[int, ...]:
        """Return the minimum summed backward of each rank's chunks over the choices that fit, [P]; for a split
        that is not excluded."""
        ones, minima = np.ones(self.context.layout.vpp, dtype=np.int64), []
        for rank, contents in enumerate(self._by_rank(self._contents(split))):
            menus = self._menus(self.context.layout.rank_stages[rank], contents)
            value: int | None = None
            if menus is not None and math.prod(map(len, menus)) <= MAX_CHOICES:
                choices = _backwards(menus, self._joint_choices(rank, contents, menus))
                value = int(choices.sum(axis=0).min()) if choices.shape[1] else None
            elif menus is not None:
                value = _min_fitting(self.context, rank, menus, ones)[0]
            minima.append(NO_CHOICE_NS if value is None else value)
        return tuple(minima)

    def split_menus(self, split: Sequence[int]) -> list[Menu] | None:
        """Return the menu of every virtual stage of a split, [J]; None where a stage has no choice that fits."""
        contents = self._contents(split)
        return self._menus(range(len(contents)), contents)

    def _contents(self, split: Sequence[int]) -> list[StageContent]:
        """Return the content of every virtual stage, [J]."""
        edges = np.array([0, *accumulate(split)])[:, None]
        layers = np.diff(np.clip(edges, self.run_edges[:-1], self.run_edges[1:]), axis=0).tolist()
        return [(tuple(runs), *stage) for runs, stage in zip(layers, self.stages, strict=True)]

    def _by_rank(self, contents: list[StageContent]) -> list[tuple[StageContent, ...]]:
        """Return the contents of each rank's chunks, [P]."""
        return [tuple(map(contents.__getitem__, stages)) for stages in self.context.layout.rank_stages]

    def _replays(self, rank: int, contents: tuple[StageContent, ...]) -> IntArray | None:
        """Return the minimum time beyond each stage's own minimum that each path spends on a rank's backwards for
        lack of memory, [paths] ns; None where nothing fits."""
        stages = list(self.context.layout.rank_stages[rank])
        menus = self._menus(stages, contents)
        if menus is None:
            return None
        # Recomputation lengthens a backward as much in a pair as alone.
        weights = self.counts[:, Term.BACKWARD, stages] + self.counts[:, Term.PAIRED_BACKWARD, stages]
        if math.prod(map(len, menus)) > MAX_CHOICES:
            backwards = self._at_one_moment(rank, menus, weights)
        else:
            choices = _backwards(menus, self._joint_choices(rank, contents, menus))
            backwards = (weights @ choices).min(axis=1) if choices.shape[1] else None
        if backwards is None:
            return None
        minima = [
            self._options(stage, content)[1][Term.BACKWARD]
            for stage, content in zip(stages, contents, strict=True)
        ]
        return np.asarray(backwards - weights @ np.array(minima))

    def _joint_choices(
        self, rank: int, contents: tuple[StageContent, ...], menus: Sequence[Menu]
    ) -> npt.NDArray[np.int16]:
        """Return the items of a rank's chunks in the joint choices that count, [v, choices]; see
        ``_fitting_choices``."""
        if (rank, contents) not in self.choices:
            # There are at most MAX_CHOICES items.
            self.choices[rank, contents] = _fitting_choices(self.context, rank, menus).astype(np.int16)
        return self.choices[rank, contents]

    def _fastest_items(
        self, rank: int, contents: tuple[StageContent, ...], menus: Sequence[Menu], weights: IntArray
    ) -> Sequence[int] | None:
        """Return the items of the rank's chunks with the minimum sum of weighted backwards; None where none
        fits."""
        if math.prod(map(len, menus)) > MAX_CHOICES:
            return _min_fitting(self.context, rank, menus, weights)[1]
        choices = self._joint_choices(rank, contents, menus)
        if not choices.shape[1]:
            return None
        fastest: list[int] = choices[:, int((weights @ _backwards(menus, choices)).argmin())].tolist()
        return fastest

    def _at_one_moment(self, rank: int, menus: Sequence[Menu], weights: IntArray) -> IntArray | None:
        """Return the minimum weighted backwards of each path [paths] over the choices that fit at the moment with
        most micro-batches alive.

        This is done for the most frequent ``weights`` [paths, v] of paths that stay on the rank; other paths get
        the minimum over all choices. None where nothing fits.
        """
        minima = np.array([int(menu.terms[Term.BACKWARD].min()) for menu in menus])
        total = weights @ minima
        stays = weights.sum(axis=1) >= self.context.layout.num_micro_batches
        distinct, inverse, count = np.unique(weights, axis=0, return_inverse=True, return_counts=True)
        wanted_weights = ascending(inverse[stays])
        for index in wanted_weights[np.argsort(-count[wanted_weights], kind="stable")][:MAX_WEIGHTS].tolist():
            value = _min_fitting(self.context, rank, menus, distinct[index])[0]
            if value is None:
                return None
            total[inverse == index] = value
        return np.asarray(total)

    def _menus(self, stages: Iterable[int], contents: Sequence[StageContent]) -> list[Menu] | None:
        """Return the choices of virtual stages; None where a stage has no choice that fits."""
        menus = []
        for stage, content in zip(stages, contents, strict=True):
            if (stage, content) not in self.menus:
                options, _ = self._options(stage, content)
                self.menus[stage, content] = useful_items(self.context, stage, content[0], options)
            menu = self.menus[stage, content]
            if not len(menu):
                return None
            menus.append(menu)
        return menus

    def _options(self, stage: int, content: StageContent) -> tuple[StageOptions, IntArray]:
        """Return the recompute choices of a virtual stage, whether they fit or not, and the minimum of each term
        [Term]; only their backwards differ."""
        if content not in self.options:
            options = recompute_options(self.context, stage, content[0])
            assert options is not None, "without prices there is a choice"
            self.options[content] = options, options.terms.min(axis=1)
        return self.options[content]

    def with_paths(self, paths: Sequence[CriticalPath]) -> SplitBounds:
        """Return a copy with other paths that shares the choices already computed."""
        return replace(self, paths=paths, replays={})


def _fitting_choices(context: LayoutContext, rank: int, menus: Sequence[Menu]) -> IntArray:
    """Return the items of the rank's chunks in joint choices that fit into its memory, [v, choices].

    A choice is left out where a faster item of one of its chunks fits as well, because no sum of backwards with
    nonnegative weights is smaller.
    """
    states = sum(int(menu.state_bytes[0]) for menu in menus) + int(context.costs.of_rank(rank).buffer_bytes)
    running = np.array([chunk for chunk, _ in context.profiles[rank]])
    live = np.array([counts for _, counts in context.profiles[rank]])
    fits = _sums_within(
        [_bytes_at(menus, chunk, running, live) for chunk in range(len(menus))], context.capacity_of(rank) - states
    )
    if context.costs.offloads:
        host_capacity = context.host_capacity_of(rank) - sum(int(menu.host_state_bytes[0]) for menu in menus)
        kept = [live[:, chunk, None] * menu.host_kept_bytes for chunk, menu in enumerate(menus)]
        fits &= _sums_within(kept, host_capacity)
    # Items of every chunk, fastest first.
    orders = [np.argsort(menu.terms[Term.BACKWARD], kind="stable") for menu in menus]
    fits = fits.reshape([len(menu) for menu in menus])[np.ix_(*orders)]
    minimal = fits.copy()
    for chunk in range(len(menus)):
        np.moveaxis(minimal, chunk, 0)[1:] &= ~np.moveaxis(fits, chunk, 0)[:-1]
    return np.stack([order[items] for order, items in zip(orders, np.nonzero(minimal), strict=True)])


def _sums_within(parts: Sequence[IntArray], limit: int) -> BoolArray:
    """Mask the joint choices, [product of the numbers of items], whose sums over the chunks are within a limit at
    every moment; ``parts``: each chunk's amounts [moments, items]."""
    total = parts[0]
    for part in parts[1:]:
        total = (total[:, :, None] + part[:, None, :]).reshape(len(part), -1)
    return np.asarray((total <= limit).all(axis=0))


def _bytes_at(menus: Sequence[Menu], chunk: int, running: IntArray, live: IntArray) -> IntArray:
    """Return the bytes of a chunk's items, apart from states, at several moments of its rank, [moments, items].

    Args:
        menus: of all chunks of the rank.
        chunk: the chunk.
        running: chunk that has its backward at each moment, [moments].
        live: counts of the moments' profiles (``LiveProfile``), [moments, v or 2 v].
    """
    menu, v = menus[chunk], len(menus)
    size: IntArray = live[:, chunk, None] * menu.kept_bytes + (running == chunk)[:, None] * menu.transient_bytes
    if live.shape[1] > v:
        size = size + live[:, chunk + v, None] * menu.deferred_bytes
    return size


def _backwards(menus: Sequence[Menu], choices: npt.NDArray[np.int16]) -> IntArray:
    """Return the backward nanoseconds of joint choices, [v, choices]."""
    return np.stack([menu.terms[Term.BACKWARD][items] for menu, items in zip(menus, choices, strict=True)])


def _min_fitting(
    context: LayoutContext, rank: int, menus: Sequence[Menu], weights: IntArray
) -> tuple[int, list[int]] | tuple[None, None]:
    """Return the minimum sum of weighted backwards over the choices that fit at the moment with most micro-batches
    alive, and its items; None if none fits.

    The chunks are added one by one, keeping the Pareto set of (bytes, nanoseconds).
    """
    running, live = max(context.profiles[rank], key=lambda profile: sum(profile[1]))
    moment = np.array([running]), np.array([live])
    states = sum(int(menu.state_bytes[0]) for menu in menus) + int(context.costs.of_rank(rank).buffer_bytes)
    sizes = [_bytes_at(menus, chunk, *moment)[0] for chunk in range(len(menus))]
    capacity = context.capacity_of(rank) - states - sum(int(size.min()) for size in sizes)
    if capacity < 0:
        return None, None
    used = spent = np.zeros(1, dtype=np.int64)
    trail: list[IntArray] = []
    for size, menu, weight in zip(sizes, menus, weights.tolist(), strict=True):
        # Bytes above the minimum of each chunk, so that the following chunks still fit.
        used = (used[:, None] + (size - size.min())).reshape(-1)
        spent = (spent[:, None] + weight * menu.terms[Term.BACKWARD]).reshape(-1)
        order = np.argsort(used)
        order = order[: np.searchsorted(used, capacity, side="right", sorter=order)]
        better = np.ones(len(order), dtype=np.bool_)
        better[1:] = spent[order[1:]] < np.minimum.accumulate(spent[order])[:-1]
        kept = order[better]
        used, spent = used[kept], spent[kept]
        trail.append(kept)
    items, at = [], len(spent) - 1
    for kept, menu in zip(reversed(trail), reversed(menus), strict=True):
        at, item = divmod(int(kept[at]), len(menu))
        items.append(item)
    return int(spent[-1]), items[::-1]
