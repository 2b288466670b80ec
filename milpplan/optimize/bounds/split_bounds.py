"""Lower bounds of a layout whose layers are already split: every rank's recompute choices are enumerated.

With the layers of all virtual stages known, only recomputation is left. It is chosen rank by rank: memory couples
the chunks of a rank, and only the paths couple ranks. A path's length is linear in the backwards, so its minimum
over all plans of the split is a sum over the ranks of the minimum over the choices that fit. The linear
relaxation, which lets a rank recompute fractions of layers, is weaker.

Before that, all splits are bounded together, by a price of memory and fractions of layers: most layouts need no
more. No solver is involved: the bounds are sums of integers, and of floating-point numbers with a margin.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from milpplan.optimize.bounds.closed_form import SAFETY
from milpplan.optimize.layout import LayoutContext
from milpplan.optimize.layout.stage_options import Menu, recompute_options, useful_items
from milpplan.simulation import BoolArray, IntArray, LayoutCosts, StageOptions, ascending
from milpplan.simulation.layers import Phase
from milpplan.simulation.pipeline.step_graph import CriticalPath, Term
from milpplan.simulation.pipeline.work_orders import LiveProfile
from milpplan.simulation.stages import EMBEDDING, HEAD, HeldLayers, recomputed_terms

MAX_CHOICES = 20_000
"""Maximum number of joint choices of a rank's chunks; above it, only the memory at one moment counts."""
MAX_WEIGHTS = 4
"""Maximum number of different weights of a rank's chunks, on paths that stay on the rank, that are
examined then."""
MAX_PRICES = 40
"""Maximum number of prices of a byte that are tried for fractions of layers."""
NO_CHOICE_NS = 2**53
"""Stands for the minimum backward of a rank without a choice that fits."""

StageContent = tuple[tuple[int, ...], bool, bool, int, int]
"""Content of a virtual stage: its layers of each run, whether it is the model's first or last, its node type, and
the excess of its transfer to the next stage over the shortest transfer, nanoseconds."""


@dataclass(slots=True)
class SplitBounds:
    """Bounds of the splits of one layout; equal contents of a rank are evaluated once."""

    context: LayoutContext
    paths: Sequence[CriticalPath]
    """Paths of the layout's step graph; the longest counts."""
    counts: IntArray = field(init=False)
    fixed_ns: IntArray = field(init=False)
    run_edges: IntArray = field(init=False)
    """Layers of the model before each run, and all its layers, [R + 1]."""
    stages: list[tuple[bool, bool, int, int]] = field(init=False)
    """Parts of the contents of the virtual stages that no split changes."""
    options: dict[StageContent, StageOptions] = field(default_factory=dict)
    menus: dict[tuple[int, StageContent], Menu] = field(default_factory=dict)
    replays: dict[tuple[int, tuple[StageContent, ...]], IntArray | None] = field(default_factory=dict)
    choices: dict[tuple[int, tuple[StageContent, ...]], npt.NDArray[np.int16]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # On paths without negative counts, which are nearly all, the choices left out of menus are dominated, and
        # the minima of some ranks already give a bound.
        paths = [path for path in self.paths if (path.counts >= 0).all()]
        self.counts = np.stack([path.counts for path in paths])
        transfer, barrier = int(self.context.costs.transfer_ns), int(self.context.costs.barrier_ns)
        self.fixed_ns = np.array([path.num_transfers * transfer + path.barrier_count * barrier for path in paths])
        context, J = self.context, self.context.num_stages
        self.run_edges = np.concatenate([[0], np.cumsum(np.array(context.runs)[:, 1])])
        self.stages = [
            (j == 0, j == J - 1, context.costs.type_of(rank), context.costs.crossing_ns(j))
            for j, rank in enumerate(context.layout.stage_ranks)
        ]

    def bounds_ns(self, splits: Sequence[Sequence[int]], cutoff_ns: int) -> list[int]:
        """Return a lower bound of the step time of each split, at most ``cutoff_ns + 1``.

        ``splits``: layers of every virtual stage, [S][J].
        """
        if not len(splits):
            return []
        # The paths with the shortest choices of all stages, whatever they keep; then memory that may be shared by
        # fractions of layers; then whole choices, rank by rank while it can decide: they are expensive, and the
        # first ranks hold most.
        held = HeldLayers.of_splits(np.array(self.context.problem.model.layer_kinds), np.array(splits))
        terms = self._least_terms(held)
        totals = self.fixed_ns + np.einsum("ptj,tsj->sp", self.counts, terms, optimize=True)
        bounds = totals.max(axis=1)
        left = np.flatnonzero(bounds <= cutoff_ns)
        bounds[left] = np.maximum(bounds[left], self._with_memory(held, totals, left).max(axis=1))
        for row in np.flatnonzero(bounds <= cutoff_ns).tolist():
            total = totals[row]
            for rank, chunks in enumerate(self._by_rank(self._contents(splits[row]))):
                if int(total.max()) > cutoff_ns:
                    break
                if (rank, chunks) not in self.replays:
                    stages = self.context.layout.rank_stages[rank]
                    minima = terms[Term.BACKWARD, row, stages]
                    self.replays[rank, chunks] = self._replays(rank, chunks, minima)
                replays = self.replays[rank, chunks]
                total = total + (cutoff_ns + 1 if replays is None else replays)
            bounds[row] = max(int(bounds[row]), int(total.max()))
        return [min(bound, cutoff_ns + 1) for bound in bounds.tolist()]

    def _least_terms(self, held: HeldLayers) -> IntArray:
        """Return lower bounds of the durations of stages over all recompute choices, [Term, S, J] ns: every layer
        has the modes that add least to its forward and to its backward."""
        context = self.context
        terms = np.zeros((len(Term), *held.first.shape), dtype=np.int64)
        types = np.array([node_type for _, _, node_type, _ in self.stages])
        crossing_ns = np.array([crossing for _, _, _, crossing in self.stages])
        for node_type in ascending(types).tolist():
            costs = context.costs.of_rank(context.layout.stage_ranks[types.tolist().index(node_type)])
            forward, backward, _ = _by_mode(costs, context.problem.recompute_modes)
            added = held.counts @ forward.min(axis=0), held.counts @ backward.min(axis=0)
            if context.first_full is not None:
                recomputed = np.minimum(held.counts.sum(axis=-1), context.first_full)
                added = added[0], recomputed * int(costs.duration_ns[:, Phase.FULL].min())
            own = recomputed_terms(costs, held, *added, crossing_ns)
            terms = np.where(types == node_type, own, terms)
        return terms

    def _with_memory(self, held: HeldLayers, totals: IntArray, rows: IntArray) -> IntArray:
        """Return the lengths of the paths, ``totals`` [S, paths], for some splits, with what the memory of the
        ranks adds at least where fractions of layers may be recomputed, [rows, paths] ns.

        At the moment with most micro-batches alive a rank is d bytes over its capacity if nothing is dropped.
        Layer i in mode m drops b_im bytes and takes t_im beyond its shortest backward. So for any price g >= 0 a
        byte, all together take at least g d + sum_i min_m (t_im - g b_im), a closed form.
        """
        context, longer = self.context, totals[rows].astype(np.float64)
        all_weights = self.counts[:, Term.BACKWARD] + self.counts[:, Term.PAIRED_BACKWARD]
        for rank in range(context.layout.pp):
            stages = np.array(context.layout.rank_stages[rank])
            weights, held_by_rank = all_weights[:, stages], held.counts[np.ix_(rows, stages)]
            excess = self._excess_bytes(rank, held_by_rank)
            if not (excess > 0).any():
                continue
            _, backward, dropped = _by_mode(context.costs.of_rank(rank), context.problem.recompute_modes)
            _, live = _fullest(context, rank)
            bytes_saved = np.array(live[: len(stages)])[:, None] * dropped[:, None]
            inverse, distinct = _staying(weights, context.layout.num_micro_batches)
            for index, weight in distinct if bytes_saved.any() else ():
                taken = weight[:, None] * (backward - backward.min(axis=0))[:, None]
                prices = ascending((taken / np.maximum(bytes_saved, 1))[bytes_saved > 0])
                prices = prices[ascending(np.linspace(0, len(prices) - 1, MAX_PRICES).astype(np.int64))]
                least = (taken - prices[:, None, None, None] * bytes_saved).min(axis=1)
                saved = -np.tensordot(least, held_by_rank, axes=([1, 2], [1, 2]))
                asked = prices[:, None] * excess
                # The margin is above the rounding of the sums.
                added = (asked - saved - (1.0 - SAFETY) * (np.abs(asked) + saved)).max(axis=0, initial=0.0)
                longer[:, inverse == index] += np.floor(added)[:, None]
        return longer.astype(np.int64)

    def _excess_bytes(self, rank: int, counts: IntArray) -> IntArray:
        """Return the bytes that a rank needs beyond its capacity at its fullest moment if it drops nothing,
        without replays and transfers, [S]; ``counts`` [S, v, K] of its layers."""
        context, v = self.context, self.context.layout.vpp
        costs, stages = context.costs.of_rank(rank), context.layout.rank_stages[rank]
        running, live = _fullest(context, rank)
        alive, waiting = np.array(live[:v]), np.array(live[v:] or (0,) * v)
        states = costs.state_bytes.sum(axis=0)
        each = states[:EMBEDDING] + np.multiply.outer(alive, costs.kept_bytes)
        each += np.multiply.outer(waiting, costs.deferred_bytes)
        used = np.tensordot(counts, each, axes=2) + int(costs.buffer_bytes) - context.capacity_of(rank)
        workspace = np.where(counts[:, running] > 0, costs.workspace_bytes, 0).max(axis=1)
        if stages[0] == 0:
            used += int(states[EMBEDDING]) + alive[0] * int(costs.embedding_kept_bytes)
        if stages[-1] == context.num_stages - 1:
            used += int(states[HEAD]) + alive[-1] * int(costs.head_kept_bytes)
            used += waiting[-1] * int(costs.head_deferred_bytes)
            if running == v - 1:
                workspace = np.maximum(workspace, int(costs.head_workspace_bytes))
        return np.asarray(used + workspace)

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
        kinds = np.array(self.context.problem.model.layer_kinds)
        durations = self._least_terms(HeldLayers.of_splits(kinds, np.array([split])))[:, 0]
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

    def _replays(self, rank: int, contents: tuple[StageContent, ...], minima: IntArray) -> IntArray | None:
        """Return the minimum time beyond each stage's own minimum that each path spends on a rank's backwards for
        lack of memory, [paths] ns; None where nothing fits. ``minima``: of its backwards, [v] ns."""
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
        return np.asarray(backwards - weights @ minima)

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
        inverse, distinct = _staying(weights, self.context.layout.num_micro_batches)
        for index, weight in distinct:
            value = _min_fitting(self.context, rank, menus, weight)[0]
            if value is None:
                return None
            total[inverse == index] = value
        return np.asarray(total)

    def _menus(self, stages: Iterable[int], contents: Sequence[StageContent]) -> list[Menu] | None:
        """Return the choices of virtual stages; None where a stage has no choice that fits."""
        menus = []
        for stage, content in zip(stages, contents, strict=True):
            if (stage, content) not in self.menus:
                # Options depend on the content alone, whether they fit on the rank as well.
                counts = np.array(content[0], dtype=np.int64)
                if content not in self.options:
                    options = recompute_options(self.context, stage, counts)
                    assert options is not None, "without prices there is a choice"
                    self.options[content] = options
                self.menus[stage, content] = useful_items(self.context, stage, counts, self.options[content])
            menu = self.menus[stage, content]
            if not len(menu):
                return None
            menus.append(menu)
        return menus

    def with_paths(self, paths: Sequence[CriticalPath]) -> SplitBounds:
        """Return a copy with other paths that shares the choices already computed."""
        return replace(self, paths=paths, replays={})


def _by_mode(costs: LayoutCosts, modes: Sequence[str]) -> tuple[IntArray, IntArray, IntArray]:
    """Return what each mode of a layer adds to its forward and to its backward, and the bytes that it drops,
    [modes, K] each."""
    none = np.zeros_like(costs.kept_bytes)
    durations, replayed = costs.duration_ns, costs.replayed_forward_ns
    table = {
        "none": (none, none, none),
        "selective": (replayed[0], durations[:, Phase.SELECTIVE], costs.dropped_selective_bytes),
        "full": (replayed[1], durations[:, Phase.FULL], costs.dropped_full_bytes),
    }
    forward, backward, dropped = (np.stack(rows) for rows in zip(*(table[mode] for mode in modes), strict=True))
    return forward, backward, dropped


def _fullest(context: LayoutContext, rank: int) -> LiveProfile:
    """Return the moment of a rank with most micro-batches alive."""
    return max(context.profiles[rank], key=lambda profile: sum(profile[1]))


def _staying(weights: IntArray, num_micro_batches: int) -> tuple[IntArray, list[tuple[int, IntArray]]]:
    """Return the most frequent weights [v] of paths that stay on a rank, with their numbers, and the number of the
    weights of every path [paths]; ``weights`` [paths, v]."""
    distinct, inverse, count = np.unique(weights, axis=0, return_inverse=True, return_counts=True)
    wanted = ascending(inverse[weights.sum(axis=1) >= num_micro_batches])
    wanted = wanted[np.argsort(-count[wanted], kind="stable")][:MAX_WEIGHTS]
    return inverse, [(index, distinct[index]) for index in wanted.tolist()]


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
    running, live = _fullest(context, rank)
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
