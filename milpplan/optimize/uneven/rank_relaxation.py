"""Relaxation by whole ranks: one column for each joint choice of all chunks of a rank.

    x_si in [0, 1]: rank s takes choice i, layers and recomputation of all its chunks;  z as in
    ``compact_relaxation``

    minimise z + price * (unplaced + undecided)
    one_choice_per_rank     sum_i x_si + undecided_s = 1                                      every rank s
    layers_are_placed_once  sum_si runs_sir x_si + unplaced_r = N_r                           every run r
    runs_in_order           sum of the runs r up to virtual stage j + unplaced_r >= N_r [j has layers after r]
    fullest_stage, critical_path                                              as in ``compact_relaxation``

A choice is integral and fits into its rank's memory exactly, so the savings of fractional recomputation are gone:
only mixtures of whole choices remain. Limits to the layers of stages and ranks fix the choices outside them at
zero. The relaxation serves where ranks have few choices, and memory binds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

import numpy as np

from milpplan.optimize.layout.ceiling_cuts import CeilingPath
from milpplan.optimize.layout.compact_relaxation import MOST_UNITS, UNPLACED_PRICE, CompactRelaxation
from milpplan.optimize.layout.stage_options import LayoutContext, Menu, stage_menu
from milpplan.optimize.milp.linear_relaxation import Relaxation
from milpplan.optimize.milp.program import INFINITY, Program, ProgramBuilder, Rows
from milpplan.optimize.space.layer_splits import layers_up_to, place_bounds
from milpplan.simulation.layout_columns import BoolArray, FloatArray, IntArray
from milpplan.simulation.pipeline.critical_path import CriticalPath
from milpplan.simulation.pipeline.schedule import held_bytes
from milpplan.simulation.pipeline.step_graph import Term

MOST_PRODUCTS = 300_000
"""Maximum number of combinations of a rank's chunks that are examined."""
MOST_CHOICES = 4_000
"""Maximum number of choices of all ranks together in a relaxation."""


@dataclass(frozen=True, slots=True, eq=False)
class RankChoices:
    """Joint choices of the chunks of one rank, which are the virtual stages ``stages``.

    ``runs`` [I, v, R]: layers of each run. ``terms`` [Term, v, I]: nanoseconds.
    """

    stages: tuple[int, ...]
    runs: IntArray
    terms: IntArray

    def take(self, kept: BoolArray) -> RankChoices:
        """Return the chosen rows."""
        return RankChoices(self.stages, self.runs[kept], self.terms[..., kept])


def rank_choices(context: LayoutContext, rank: int) -> RankChoices | None:
    """Return every undominated choice of a rank that fits; None where there is none, or too many to examine."""
    stages = context.layout.rank_stages[rank]
    if math.prod(_num_items(*context.layer_bounds[stage]) for stage in stages) > MOST_PRODUCTS:
        return None
    menus = [stage_menu(context, stage, context.max_layers(stage)) for stage in stages]
    if not 0 < math.prod(map(len, menus)) <= MOST_PRODUCTS:
        return None
    grid = np.indices([len(menu) for menu in menus]).reshape(len(menus), -1)
    total = sum(menu.layers[items] for menu, items in zip(menus, grid, strict=True))
    low, high = context.rank_bounds[rank]
    grid = grid[:, (total >= low) & (total <= high)]
    grid = grid[:, _fit(context, rank, menus, grid)]
    if not grid.size:
        return None
    parts = list(zip(menus, grid, strict=True))
    runs = np.stack([menu.runs[items] for menu, items in parts], axis=1)
    terms = np.stack([menu.terms[:, items] for menu, items in parts], axis=1)
    return _undominated(RankChoices(stages, runs, terms))


def _num_items(low: int, high: int) -> int:
    """Return the number of layer counts in [low, high] times ways to recompute them fully, selectively or not."""
    return math.comb(high + 3, 3) - math.comb(low + 2, 3)


def _fit(context: LayoutContext, rank: int, menus: Sequence[Menu], grid: IntArray) -> BoolArray:
    """Mask the choices of the chunks [v, choices] that fit into a rank's memory."""

    def stacked(name: str) -> IntArray:
        return np.stack([getattr(menu, name)[items] for menu, items in zip(menus, grid, strict=True)])

    kept, deferred, transient = stacked("kept_bytes"), stacked("deferred_bytes"), stacked("transient_bytes")
    capacity = (
        context.capacity_of(rank)
        - int(context.costs.of_rank(rank).buffer_bytes)
        - stacked("state_bytes").sum(axis=0)
    )
    host_capacity = context.host_capacity_of(rank) - stacked("host_state_bytes").sum(axis=0)
    host = stacked("host_kept_bytes")
    fits = np.ones(grid.shape[1], dtype=np.bool_)
    for running, live in context.profiles[rank]:
        fits &= np.array(live) @ held_bytes(kept, deferred, len(live)) + transient[running] <= capacity
        fits &= np.array(live[: len(menus)]) @ host <= host_capacity
    return fits


def _undominated(choices: RankChoices) -> RankChoices:
    """Drop choices dominated by another with the same layers in every chunk and no longer forwards and backwards.

    The memory of a choice does not matter to other ranks, and no path gets longer.
    """
    size = len(choices.runs)
    layers = choices.runs.reshape(size, -1)
    _, group = np.unique(layers, axis=0, return_inverse=True)
    work = choices.terms[[Term.FORWARD, Term.BACKWARD]].reshape(-1, size).T
    order = np.lexsort((work.sum(axis=1), group.reshape(-1)))
    best: list[int] = []
    first = 0
    for row in order.tolist():
        if best and group[best[-1]] != group[row]:
            first = len(best)
        if not (work[best[first:]] <= work[row]).all(axis=1).any():
            best.append(row)
    kept = np.zeros(size, dtype=np.bool_)
    kept[best] = True
    return choices.take(kept)


@dataclass
class RankRelaxation:
    """Relaxation by whole ranks. Columns: the choices of rank 0, of rank 1, ..., then z, unplaced layers of each
    run, undecided ranks."""

    compact: CompactRelaxation
    """Compact relaxation of this layout, with its ceiling paths."""
    choices: list[RankChoices]
    offsets: IntArray = field(init=False)

    def __post_init__(self) -> None:
        self.offsets = np.cumsum([0, *(len(rank.runs) for rank in self.choices)])

    @staticmethod
    def of(
        compact: CompactRelaxation, context: LayoutContext, paths: Sequence[CriticalPath], cutoff_ns: int
    ) -> RankRelaxation | None:
        """Make the relaxation for ``context`` and narrower limits, with the choices that can be part of a plan at
        or below the cutoff; None where there are too many."""
        choices = []
        for rank in range(context.layout.pp):
            rank_items = rank_choices(context, rank)
            if rank_items is None:
                return None
            choices.append(rank_items)
        relaxation = RankRelaxation(compact, choices)
        kept = relaxation._take(relaxation._within(context))
        kept = None if kept is None else kept._without_hopeless(paths, cutoff_ns)
        return kept if kept is not None and int(kept.offsets[-1]) <= MOST_CHOICES else None

    def _without_hopeless(self, paths: Sequence[CriticalPath], cutoff_ns: int) -> RankRelaxation | None:
        """Drop the choices that alone push a path beyond the cutoff; None where a rank has none left."""
        kept = np.ones(int(self.offsets[-1]), dtype=np.bool_)
        for path in paths:
            above, min_path_ns = self._above(path)
            kept &= min_path_ns + above <= cutoff_ns
        return self._take(kept)

    def _take(self, kept: BoolArray) -> RankRelaxation | None:
        """Keep the chosen columns; None where a rank has none left."""
        if not np.logical_or.reduceat(kept, self.offsets[:-1]).all():
            return None
        ends = zip(self.offsets[:-1], self.offsets[1:], self.choices, strict=True)
        return RankRelaxation(self.compact, [rank.take(kept[start:end]) for start, end, rank in ends])

    def _above(self, path: CriticalPath) -> tuple[IntArray, int]:
        """Return the excess of every choice over its rank's minimum on a path, and the path's sum of minima."""
        path_terms = [
            np.einsum("tv,tvi->i", path.counts[:, list(rank.stages)], rank.terms) for rank in self.choices
        ]
        lows = [int(values.min()) for values in path_terms]
        costs = self.compact.context.costs
        fixed = path.num_transfers * int(costs.transfer_ns) + path.barrier_count * int(costs.barrier_ns)
        return np.concatenate([values - low for values, low in zip(path_terms, lows, strict=True)]), sum(
            lows
        ) + fixed

    @property
    def ceiling_paths(self) -> Sequence[CeilingPath]:
        """Ceiling cuts, whose rows come right after those of the program."""
        return self.compact.ceiling_paths

    def narrowed(self, context: LayoutContext) -> RankRelaxation:
        """Return this relaxation: each choice has its own edges."""
        del context
        return self

    def base_ns(self, paths: Sequence[CriticalPath]) -> int:
        """Return the largest path with the minimum of every rank, where z starts."""
        return max(self._above(path)[1] for path in paths)

    def path_rows(self, paths: Sequence[CriticalPath], base: int, unit: int) -> Rows:
        """Return the rows z * unit - path >= constant - base, coefficients in units rounded down."""
        z = int(self.offsets[-1])
        matrix = np.zeros((len(paths), z + 1), dtype=np.int64)
        matrix[:, z] = 1
        lower = np.zeros(len(paths), dtype=np.int64)
        for row, path in enumerate(paths):
            above, min_path_ns = self._above(path)
            matrix[row, :z] = -(above // unit)
            lower[row] = (min_path_ns - base) // unit
        return Rows.dense([f"critical_path[{index}]" for index in range(len(paths))], matrix, lower)

    def ceiling_rows(self, base: int, unit: int) -> Rows:
        """Return the rows fullest_stage, without the passes of the fullest stage."""
        return self.path_rows([peak.path for peak in self.compact.ceiling_paths], base, unit)

    def path_limits(
        self, context: LayoutContext, paths: Sequence[CriticalPath], base: int, unit: int
    ) -> tuple[IntArray, IntArray, IntArray]:
        """Return indices, lower and upper sides of ``ceiling_rows`` under narrower limits; path rows stay as they
        are."""
        del paths
        min_paths_ns = np.array([self._above(peak.path)[1] for peak in self.compact.ceiling_paths], dtype=np.int64)
        lower = (min_paths_ns + self.compact.ceiling_passes_ns(context) - base) // unit
        return self.program.num_rows + np.arange(len(lower)), lower, np.full(len(lower), INFINITY)

    def durations(self, values: FloatArray) -> IntArray:
        """Return the duration matrix [Term, J] of a fractional point."""
        matrix = np.zeros((len(Term), self.compact.context.num_stages), dtype=np.int64)
        for rank, start, end in zip(self.choices, self.offsets[:-1], self.offsets[1:], strict=True):
            matrix[:, list(rank.stages)] = np.rint(rank.terms @ values[start:end])
        return matrix

    def layers(self, values: FloatArray) -> FloatArray:
        """Return the layers of every virtual stage at a fractional point, [J]."""
        return np.asarray(self._layers_held @ values[: int(self.offsets[-1])])

    @cached_property
    def _layers_held(self) -> IntArray:
        """Layers of every virtual stage in every choice, [J, choices]."""
        return np.asarray(self._runs.sum(axis=2))

    @cached_property
    def _runs(self) -> IntArray:
        """Layers of each run of every virtual stage in every choice, [J, choices, R]."""
        context = self.compact.context
        runs = np.zeros((context.num_stages, int(self.offsets[-1]), len(context.runs)), dtype=np.int64)
        for rank, start, end in zip(self.choices, self.offsets[:-1], self.offsets[1:], strict=True):
            runs[list(rank.stages), start:end] = rank.runs.transpose(1, 0, 2)
        return runs

    @cached_property
    def program(self) -> Program:
        """All rows but those of paths and ceiling cuts."""
        context, z = self.compact.context, int(self.offsets[-1])
        P, R = context.layout.pp, len(context.runs)
        builder = ProgramBuilder("ranks")
        builder.add_variables([f"x[{column}]" for column in range(z)], 0, 1)
        builder.add_variable("z", 0, MOST_UNITS)
        for run, (_, length) in enumerate(context.runs):
            builder.add_variable(f"unplaced[{run}]", 0, length)
        builder.add_variables([f"undecided[{rank}]" for rank in range(P)], 0, 1)
        builder.minimize(range(z, z + 1 + R + P), [1, *[UNPLACED_PRICE] * (R + P)])
        for rank in range(P):
            columns = np.append(np.arange(self.offsets[rank], self.offsets[rank + 1]), z + 1 + R + rank)
            builder.add_row(f"one_choice_per_rank[{rank}]", columns, np.ones_like(columns), 1, 1)
        self._placed(builder)
        built = builder.build()
        return replace(built, is_integer=np.zeros(len(built.upper), dtype=np.bool_))

    def _placed(self, builder: ProgramBuilder) -> None:
        """layers_are_placed_once and runs_in_order."""
        z, context, runs = int(self.offsets[-1]), self.compact.context, self._runs
        columns = np.arange(z)
        for run, (_, length) in enumerate(context.runs):
            unplaced = z + 1 + run
            coefficients = np.append(runs[..., run].sum(axis=0), 1)
            builder.add_row(
                f"layers_are_placed_once[{run}]", np.append(columns, unplaced), coefficients, length, length
            )
            before = list(accumulate(runs[..., run]))
            for stage in range(context.num_stages if run + 1 < len(context.runs) else 0):
                later = runs[stage, :, run + 1 :].sum(axis=1) > 0
                row = np.append(before[stage] - length * later, 1)
                builder.add_row(f"runs_in_order[{run},{stage}]", np.append(columns, unplaced), row, 0)

    def narrow(self, relaxation: Relaxation, context: LayoutContext) -> None:
        """Fix the choices outside the limits of ``context`` at zero in a relaxation that holds the program."""
        columns = np.arange(int(self.offsets[-1]))
        relaxation.set_upper_bounds(columns, self._within(context).astype(np.int64))

    def _within(self, context: LayoutContext) -> BoolArray:
        """Mask the choices that are within the limits to stages and ranks, and have a position in the model."""
        stage_min, stage_max = np.array(context.layer_bounds, dtype=np.int64).T
        total, parts = context.problem.model.num_layers, []
        first, last = layers_up_to(context.layer_bounds, total)
        for choices, (rank_min, rank_max) in zip(self.choices, context.rank_bounds, strict=True):
            stages = np.array(choices.stages)
            layers = choices.runs.sum(axis=2)
            earliest, latest = place_bounds(context.runs, choices.runs)
            # Before and after a chunk: the minimum layers of other stages, and the rank's own other chunks.
            above_min = layers - stage_min[stages]
            before = np.maximum(
                first[stages] - layers, stage_min.cumsum()[stages] - layers + above_min.cumsum(axis=1)
            )
            behind = stage_min[::-1].cumsum()[::-1][stages] - layers + above_min[:, ::-1].cumsum(axis=1)[:, ::-1]
            after = np.maximum(last[stages] - layers, behind)
            fits = (np.maximum(earliest, before) <= np.minimum(latest, total - layers - after)).all(axis=1)
            fits &= ((layers >= stage_min[stages]) & (layers <= stage_max[stages])).all(axis=1)
            parts.append(fits & (layers.sum(axis=1) >= rank_min) & (layers.sum(axis=1) <= rank_max))
        return np.concatenate(parts)
