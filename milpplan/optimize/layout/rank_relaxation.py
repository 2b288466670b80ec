"""Relaxations of layouts with free interleaved splits: by whole ranks, and by event times.

``RankRelaxation`` has one column for each joint choice of all chunks of a rank:

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

``EventTimeRelaxation`` is an LP with the step graph in it, whose variables are the ends of all work items:

    end_i >= end_h + duration_i(x) (+ transfer)                 for every item i and what it waits for, h
    end_i >= bucket(x) + duration_i(x)                          for first forwards, and what they wait for
    reduced_j, ready, updated                                   the tail of the step, likewise
    z = ready + barrier + updated

It has the bound of ``CompactRelaxation`` with all paths of the graph at once, without searching for paths: much
cheaper where the graph is small, more expensive where it is large. With free interleaved splits the chains of
the ceiling cuts join the graph: down_j, the forwards of micro-batch 0 to virtual stage j, and up_j, the backwards
from it,

    end of forward r of j >= down_j + r forwards of the fullest stage
    ready >= end of backward m - 1 - q of j + q backwards of the fullest stage + up_j

for all virtual stages j of the last chunks. These rows are stronger than ``CompactRelaxation.ceiling_rows``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

import numpy as np

from milpplan.optimize.layout.compact_relaxation import (
    MOST_UNITS,
    UNPLACED_PRICE,
    CeilingPath,
    CompactRelaxation,
    fullest_stage_bound,
    num_inner,
)
from milpplan.optimize.layout.stage_options import LayoutContext, Menu, stage_menu
from milpplan.optimize.milp.linear_relaxation import Relaxation
from milpplan.optimize.milp.program import INFINITY, Program, ProgramBuilder, Rows
from milpplan.optimize.space.plan_space import layers_up_to, place_bounds
from milpplan.simulation import BoolArray, FloatArray, IntArray, ascending
from milpplan.simulation.pipeline.step_graph import CriticalPath, StepGraph, Term, borders
from milpplan.simulation.pipeline.work_orders import held_bytes
from milpplan.simulation.stages import EDGES

FINENESS = 2**28
"""Units between zero and the cutoff: the duration of every item is rounded down separately."""
MOST_END, END_UNPLACED_PRICE = 4 * FINENESS, 64 * FINENESS

Waits = tuple[int | None, Iterable[tuple[Term, int]], int]
"""(earlier moment, durations (term, virtual stage) that follow it, nanoseconds)."""


@dataclass(slots=True)
class EventTimeRelaxation:
    """Event-time relaxation of one layout. ``compact`` gives the columns and all rows but those of paths. Narrower
    limits change only the sides of rows."""

    compact: CompactRelaxation
    graph: StepGraph
    unit: int = field(init=False)
    relaxation: Relaxation = field(init=False)
    iterations: int = 0
    """Simplex iterations of the last solution."""
    _moments: int = field(init=False)
    """First column of the moments: ends of all items, then of reductions, ready, updated, down, up."""
    _entries: list[tuple[int, int, int]] = field(default_factory=list)
    """(row, column, coefficient)"""
    _sides: list[int] = field(default_factory=list)
    """Lower sides of the rows, nanoseconds."""
    _edges: list[tuple[int, Term, int]] = field(default_factory=list)
    """(row, term, end of the model) of the parts of sides that depend on whether the end holds a layer."""
    _ceilings: list[tuple[int, int, int]] = field(default_factory=list)
    """(row, forwards, backwards) of the fullest stage in a row's side."""

    def __post_init__(self) -> None:
        compact = self.compact
        self.unit = max(1, compact.cutoff_ns // FINENESS)
        plain = compact.program
        self._moments = plain.num_variables
        structure = self.graph.structure
        count = structure.num_nodes + 3 * structure.num_virtual_stages + 2
        self._items()
        self._tail()
        self._chains()
        entries = np.array(self._entries, dtype=np.int64)
        row, column, value = entries[np.lexsort((entries[:, 1], entries[:, 0]))].T
        starts = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=len(self._sides)))])
        names = tuple(f"waits[{index}]" for index in range(len(self._sides)))
        sides = np.array(self._sides, dtype=np.int64) // self.unit
        waits = Rows(names, starts.astype(np.int64), column, value, sides, np.full(len(sides), INFINITY))
        upper = np.concatenate([plain.upper, np.full(count, MOST_END)])
        objective = np.concatenate([plain.objective, np.zeros(count, dtype=np.int64)])
        z = compact.num_counts
        upper[z] = MOST_END
        objective[z + 1 : self._moments] = END_UNPLACED_PRICE
        self.relaxation = Relaxation(
            Program(
                "timed",
                (*plain.variable_names, *(f"moment[{index}]" for index in range(count))),
                np.zeros(len(upper), dtype=np.int64),
                upper,
                np.zeros(len(upper), dtype=np.bool_),
                Rows.concatenate([plain.rows, waits]),
                objective,
            )
        )

    def solve(self, context: LayoutContext) -> tuple[int, FloatArray | None]:
        """Solve under the limits of ``context``.

        Returns:
            The proved bound in nanoseconds (0: none), and the layers of every virtual stage, [J].
        """
        self.relaxation.set_sides(*self.compact.limits(context))
        self.relaxation.set_sides(*self._limits(context))
        solution = self.relaxation.solve()
        if solution.status != "optimal":
            # A solver that gives up often succeeds from the point it has reached.
            solution = self.relaxation.solve()
        self.iterations = solution.iterations
        proved = self.relaxation.proved_bound(solution)
        layers = self.compact.layers(solution.values) if solution.status == "optimal" else None
        return (0 if proved is None else proved * self.unit), layers

    def _limits(self, context: LayoutContext) -> tuple[IntArray, IntArray, IntArray]:
        """Return indices, lower and upper sides of the rows whose sides depend on the limits."""
        ceilings = np.array(self._ceilings, dtype=np.int64).reshape(-1, 3)
        row, term, stage = np.array(self._edges, dtype=np.int64).reshape(-1, 3).T
        sides = np.array(self._sides, dtype=np.int64)
        sides[ceilings[:, 0]] += fullest_stage_bound(context) * (ceilings[:, 1:] @ self.compact.min_passes_ns)
        np.add.at(sides, row, (self.compact.narrowed(context).empty - self.compact.empty)[term, stage])
        rows = ascending(np.concatenate([ceilings[:, 0], row]))
        lower = sides[rows] // self.unit
        return self.compact.program.num_rows + rows, lower, np.full(len(rows), INFINITY)

    def _edge(self, row: int, term: Term, stage: int) -> None:
        """Record a row whose side depends on an end of the model."""
        if term in EDGES and stage in (0, self.graph.structure.num_virtual_stages - 1):
            self._edges.append((row, term, stage))

    def _add_waits(self, moment: int, *parts: Waits, backwards: int = 0, forwards: int = 0) -> None:
        """Add rows: a moment is no earlier than other moments plus the durations that follow them."""
        for other, durations, nanoseconds in parts:
            row, side = len(self._sides), nanoseconds
            self._entries.append((row, self._moments + moment if moment >= 0 else self.compact.num_counts, 1))
            if other is not None:
                self._entries.append((row, self._moments + other, -1))
            counts = np.zeros(self.compact.slope.shape[1:], dtype=np.int64)
            for term, stage in durations:
                counts[:, stage] += self.compact.slope[term, :, stage]
                side += int(self.compact.empty[term, stage])
                self._edge(row, term, stage)
            flat = counts.reshape(-1)
            # Rounded so that the row is weaker.
            used = np.flatnonzero(flat)
            self._entries += zip(
                [row] * len(used), used.tolist(), (-(flat[used] // self.unit)).tolist(), strict=True
            )
            self._sides.append(side)
            if forwards or backwards:
                self._ceilings.append((row, forwards, backwards))

    def _items(self) -> None:
        """Add the rows of items: each waits for its predecessor on its rank and for its input, first forwards for
        parameters."""
        graph, structure = self.graph, self.graph.structure
        J, P, N = structure.num_virtual_stages, structure.num_stages, structure.num_nodes
        border = borders(structure)
        crossing = self.compact.empty[Term.CROSSING]
        for node in range(N):
            term, stage = divmod(int(structure.duration_index[node]), J)
            duration = [(Term(term), stage)]
            rank_predecessor, sender = (
                int(structure.rank_predecessor[node]),
                int(structure.transfer_predecessor[node]),
            )
            if rank_predecessor < N:
                self._add_waits(node, (rank_predecessor, duration, 0))
            else:
                gathers = [] if graph.overlap_param_gather else self._of_rank(Term.GATHER, rank_predecessor - N)
                self._add_waits(node, (None, duration + gathers, 0))
            if sender < N:
                self._add_waits(node, (sender, duration, graph.transfer_ns + int(crossing[border[node]])))
        for index in range(J if graph.overlap_param_gather else 0):
            chunk, rank = divmod(index, P)
            stage = int(structure.chunk_stages[chunk, rank])
            earlier = [(Term.GATHER, int(other)) for other in structure.chunk_stages[:chunk, rank]]
            self._add_waits(
                int(structure.forward_node[stage, 0]),
                (None, [*earlier, (Term.FIRST, stage), (Term.FORWARD, stage)], 0),
                (None, [*earlier, (Term.GATHER, stage), (Term.LAST, stage)], 0),
            )

    def _of_rank(self, term: Term, rank: int) -> list[tuple[Term, int]]:
        """Return a duration of all chunks of a rank."""
        return [(term, int(stage)) for stage in self.graph.structure.chunk_stages[:, rank]]

    @property
    def _reduced(self) -> int:
        return self.graph.structure.num_nodes

    @property
    def _ready(self) -> int:
        return self._reduced + self.graph.structure.num_virtual_stages

    def _tail(self) -> None:
        """Add the rows of the tail: reductions after, or beside, the last backwards; the barrier; the updates."""
        graph, structure = self.graph, self.graph.structure
        ready, updated = self._ready, self._ready + 1
        for rank in range(structure.num_stages):
            self._add_waits(updated, (None, self._of_rank(Term.OPTIMIZER, rank), 0))
            if not graph.overlap_grad_reduce:
                self._add_waits(ready, (int(structure.last_node[rank]), self._of_rank(Term.REDUCE, rank), 0))
                continue
            stages = structure.chunk_stages[:, rank].tolist()
            for chunk, stage in enumerate(stages):
                last = int(structure.release_node[chunk, rank])
                self._start_reducing(self._reduced + stage, last, stage)
                if chunk + 1 < len(stages):
                    self._add_waits(
                        self._reduced + stage, (self._reduced + stages[chunk + 1], [(Term.REDUCE, stage)], 0)
                    )
                self._add_waits(ready, (self._reduced + stage, [], 0), (last, [(Term.TRAIL, stage)], 0))
        self._add_waits(-1, (ready, [], graph.barrier_ns))
        self._entries.append((len(self._sides) - 1, self._moments + updated, -1))

    def _start_reducing(self, moment: int, last: int, stage: int) -> None:
        """Add the row reduced_j >= the last item's end - its duration + LEAD + REDUCE."""
        compact, release = self.compact, self.graph.structure.release_term
        row, unit = len(self._sides), self.unit
        counts = (compact.slope[Term.LEAD] + compact.slope[Term.REDUCE] - compact.slope[release])[
            :, stage
        ].reshape(-1)
        columns = np.arange(compact.num_counts).reshape(compact.slope.shape[1:])[:, stage].reshape(-1)
        self._entries += [(row, self._moments + moment, 1), (row, self._moments + last, -1)]
        self._entries += [
            (row, column, -(value // unit))
            for column, value in zip(columns.tolist(), counts.tolist(), strict=True)
        ]
        empty = compact.empty[:, stage]
        self._edge(row, Term.LEAD, stage)
        self._sides.append(int(empty[Term.LEAD] + empty[Term.REDUCE] - empty[release]))

    def _chains(self) -> None:
        """Add the chains of the ceiling cuts: see the head of this module."""
        graph, structure, layout = self.graph, self.graph.structure, self.compact.context.layout
        J, P, m = structure.num_virtual_stages, structure.num_stages, structure.num_micro_batches
        down = self._ready + 2
        up = down + J
        crossing = self.compact.empty[Term.CROSSING]
        start = [(Term.FIRST, 0)] if graph.overlap_param_gather else self._of_rank(Term.GATHER, 0)
        end = [(Term.TRAIL, 0)] if graph.overlap_grad_reduce else self._of_rank(Term.REDUCE, 0)
        self._add_waits(down, (None, [*start, (Term.FORWARD, 0)], 0))
        self._add_waits(up, (None, end, 0))
        for stage in range(1, J):
            transfer = graph.transfer_ns + int(crossing[stage - 1])
            self._add_waits(down + stage, (down + stage - 1, [(Term.FORWARD, stage)], transfer))
            self._add_waits(up + stage, (up + stage - 1, [(Term.BACKWARD, stage - 1)], transfer))
        for stage in range(num_inner(layout), J):
            for passes in range(1, min(P, m)):
                entry = int(structure.forward_node[stage, passes])
                self._add_waits(entry, (down + stage, [], 0), forwards=passes)
                exit_ = int(structure.backward_node[stage, m - 1 - passes])
                self._add_waits(self._ready, (exit_, [], 0), backwards=passes)
                self._entries.append((len(self._sides) - 1, self._moments + up + stage, -1))


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
        builder.add_variables([f"x[{column}]" for column in range(z)], 1)
        builder.add_variable("z", 0, MOST_UNITS)
        for run, (_, length) in enumerate(context.runs):
            builder.add_variable(f"unplaced[{run}]", 0, length)
        builder.add_variables([f"undecided[{rank}]" for rank in range(P)], 1)
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
