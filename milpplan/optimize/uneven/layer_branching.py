"""Branch and bound over the layers of virtual stages: decides interleaved layouts whose splits are free.

A node narrows how many layers virtual stages, or all chunks of a rank together, may hold; its bound is the
compact relaxation's, proved in exact integers. What fractions hide is mostly at the ends (half a layer beside the
embedding or the head) and in the ranks' sums, so these are branched on first. One relaxation serves all nodes:
they differ in the sides of a few rows, and a path found in one holds in all.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from milpplan.optimize.bounds.layer_counting import most_on_ranks
from milpplan.optimize.layout.ceiling_cuts import ceiling_paths, has_ceiling_cuts
from milpplan.optimize.layout.compact_relaxation import CompactRelaxation
from milpplan.optimize.layout.cutting_planes import CuttingPlanes, LayoutState, rounds_on
from milpplan.optimize.layout.rounding import fitted_plan, rounded_layers
from milpplan.optimize.layout.stage_options import LayoutContext
from milpplan.optimize.layout.warm_start import chunk_paths
from milpplan.optimize.space.layer_splits import even_splits
from milpplan.optimize.uneven.branching_rules import (
    candidate_branchings,
    default_branching,
    halve_stage,
    num_splits,
    strong_branching,
)
from milpplan.optimize.uneven.event_time_lp import EventTimeRelaxation
from milpplan.optimize.uneven.layer_local_search import fastest_of, improve
from milpplan.optimize.uneven.rank_relaxation import RankRelaxation
from milpplan.simulation.layout_columns import FloatArray, IntArray
from milpplan.simulation.pipeline.critical_path import CriticalPath
from milpplan.simulation.stages import StageMemo

SMALL_GRAPH = 1600
"""Most work items of a graph that the relaxation of a node holds whole."""
PATH_NODES = 4
EVEN_SPLITS = 4
"""At most so many even splits are tried where the first node leaves a layout open."""
NEAR = 1.015
"""Plans of a layout that are slower than so many times the cutoff are not worth a search around them."""
NODE_ROUNDS = 20
"""Most rounds on the relaxation of a node."""
ASKED_NODES = 4
"""The first nodes whose parts are compared by relaxations other than those of whole ranks."""
MOST_PATHS, KEPT_PATHS = 1000, 500
"""Paths in the relaxation before it is made anew, and of how many (besides the tight ones) then."""
FEW_SPLITS = 256
"""Splits of a node that are decided one by one where its relaxation says nothing."""
SOME = 0.01
"""Layers from which on a fractional number of them counts as some."""

Decide = Callable[[LayoutState, tuple[int, ...]], None]
"""Raise the bound of an attempt at one split of the layers, or find its best plan."""


@dataclass(slots=True)
class BranchingTree:
    """The open nodes of one layout, those with the least bounds first."""

    state: LayoutState
    decide: Decide
    heap: list[tuple[int, int, LayoutContext]] = field(default_factory=list)
    opened: bool = False
    numbered: int = 0
    looked_at: int = 0
    given_up_ns: float = np.inf
    """Least bound of the nodes that could not be decided: a solver or the time gave out."""
    paths: list[CriticalPath] = field(default_factory=list)
    """In the order of the relaxation's path rows, which are its last."""
    tight: set[int] = field(default_factory=set)
    """Of those, the ones that had a dual."""
    compact: CompactRelaxation = field(init=False)
    """Made for the cutoff at which the tree began, so it holds for all later ones."""
    can_be_timed: bool = False
    """Whether nodes are bounded with the graph in the relaxation after the first ``PATH_NODES``: dear at first,
    which does not pay where a few rounds of paths decide, and much nearer the truth."""
    timed: EventTimeRelaxation | None = None
    by_ranks: RankRelaxation | None = None
    """Takes the place of ``compact`` where memory binds and ranks have few choices."""
    memory_binds: bool = False
    """Whether the last node's optimum recomputes layers."""
    rounds: CuttingPlanes | None = None
    most: tuple[int, IntArray] | None = None
    """A cutoff, and the most layers that each rank holds below it, [P]."""
    asks: bool = False
    """Whether relaxations of the parts are asked how to part a node."""
    nearest_ns: float = field(init=False)
    """The fastest plan found; at first what plans must be near for a search around them."""
    memo: StageMemo = field(init=False)

    def __post_init__(self) -> None:
        layout, pool = self.state.context.layout, self.state.pool
        self.nearest_ns = NEAR * self.state.cutoff_ns
        self.memo = StageMemo(layout, self.state.context.costs)
        graph, has_ceilings = self.state.graph, has_ceiling_cuts(self.state.context)
        ceilings = ceiling_paths(layout, graph.structure) if has_ceilings else []
        self.compact = CompactRelaxation(self.state.context, self.state.cutoff_ns, ceilings)
        self.can_be_timed = has_ceilings and graph.structure.num_nodes <= SMALL_GRAPH
        self.paths = [*pool[: layout.pp], *chunk_paths(layout), *pool[layout.pp :]]

    @property
    def finished(self) -> bool:
        """Whether no node is left that could be looked at."""
        return self.opened and (not self.heap or self.heap[0][0] > self.state.cutoff_ns)

    def run(self, state: LayoutState, nodes: int) -> None:
        """Look at so many more nodes at most; the attempt's bound becomes the least of those left open."""
        self.state = state
        if not self.opened:
            self.opened = True
            self._open(state.bound_ns, [state.context])
        for _ in range(nodes):
            if self.finished or state.out_of_time():
                break
            bound, _, context = heapq.heappop(self.heap)
            self._look(bound, context)
        least = min(self.heap[0][0] if self.heap else np.inf, self.given_up_ns, state.cutoff_ns + 1)
        state.bound_ns = max(state.bound_ns, int(least))

    def _near_even(self, layers: FloatArray) -> None:
        """The best of the even plans with nearly the ends of a fractional point, and better ones near it:
        relaxations of splits that do not come out even say little of where the larger chunks belong."""
        context = self.state.context
        space = context.problem.space.model_copy(update={"interleaved_layers": "even"})
        even = context.problem.model_copy(update={"space": space})
        splits = [np.array(split) for split in even_splits(even, context.layout) or ()]
        splits.sort(key=lambda split: float(np.abs(split - layers)[[0, -1]].sum()))
        plan = fastest_of(self.state, splits[:EVEN_SPLITS])
        if plan is not None:
            self.nearest_ns = min(self.nearest_ns, improve(self.state, plan, self.nearest_ns))

    def _open(self, bound: int, contexts: list[LayoutContext]) -> None:
        """Add nodes that counting does not close."""
        for context in contexts:
            narrower = self._tightened(context)
            if narrower is not None:
                heapq.heappush(self.heap, (bound, self.numbered, narrower))
                self.numbered += 1

    def _tightened(self, context: LayoutContext) -> LayoutContext | None:
        """With the limits that follow, also from counting below the cutoff; None where nothing is left."""
        cutoff = self.state.cutoff_ns
        if self.most is None or self.most[0] != cutoff:
            self.most = (cutoff, most_on_ranks(self.state.context, cutoff).max(axis=0))
        return context.tightened(self.most[1])

    def _parts(self, part: LayoutState, layers: FloatArray) -> list[LayoutContext]:
        """What takes a node's place. Where memory binds, relaxations with the paths known so far say which way to
        part it raises the bound most. Those of whole ranks are small; others pay only near the top of the tree."""
        asks = self.asks and (self.by_ranks is not None or self.looked_at <= ASKED_NODES)
        if not asks or self.rounds is None:
            return default_branching(part.context, layers)
        left = float(part.cutoff_ns - part.bound_ns)
        return strong_branching(
            candidate_branchings(part.context, layers), partial(self._rise, self.rounds, part), left
        )

    def _rise(self, run: CuttingPlanes, part: LayoutState, context: LayoutContext) -> float:
        """How much the relaxation with the paths known so far rises from a node to a part of it."""
        narrower = self._tightened(context)
        if narrower is None:
            return float(part.cutoff_ns - part.bound_ns)
        if part.out_of_time():
            return 0.0
        run.narrow((self.by_ranks or self.compact).narrowed(narrower), narrower, self.paths)
        part.counters.relaxations += 1
        return run.value_ns() - part.bound_ns

    def _look(self, bound: int, context: LayoutContext) -> None:
        """Bound a node; where it stays open, its parts take its place."""
        part = replace(self.state, context=context, bound_ns=bound, best=None, pool=self.paths)
        split = context.only_split()
        if split is not None:
            part.pool = list(self.paths)
            self.decide(part, split)
        layers = self._bound(part) if split is None else None
        self.state.take_best(part)
        if part.bound_ns <= self.state.cutoff_ns:
            if layers is not None:
                self._open(part.bound_ns, self._parts(part, layers))
                if self.looked_at == 1:
                    self._near_even(layers)
                    self._look_at_ranks(context)
            elif split is None and num_splits(context) <= FEW_SPLITS and not self.state.out_of_time():
                # Where no point satisfies the relaxation, which a solver's word does not prove, splits decide.
                self._open(part.bound_ns, halve_stage(context))
            else:
                self.given_up_ns = min(self.given_up_ns, part.bound_ns)

    def _look_at_ranks(self, context: LayoutContext) -> None:
        """Bound nodes by what whole ranks hold from now on, where memory binds and paths bound them."""
        self.asks = self.memory_binds and not self.can_be_timed
        if self.asks:
            cutoff = self.state.cutoff_ns
            self.by_ranks = RankRelaxation.of(self.compact, context, self.paths, cutoff)
            self.rounds = None if self.by_ranks else self.rounds

    def _bound(self, part: LayoutState) -> FloatArray | None:
        """Raise the bound of a node; the layers of every virtual stage at the last optimum, [J], if any."""
        layers = None
        self.looked_at += 1
        if self.can_be_timed and self.looked_at > PATH_NODES:
            self.timed = self.timed or EventTimeRelaxation(self.compact, self.state.graph)
            layers = self._timed_bound(self.timed, part)
        if layers is None and not part.closed:
            self.can_be_timed = self.can_be_timed and self.looked_at <= PATH_NODES
            layers = self._paths_bound(part)
        if layers is not None and not part.closed:
            self._round(part, layers)
        return layers

    def _timed_bound(self, timed: EventTimeRelaxation, part: LayoutState) -> FloatArray | None:
        proved, layers = timed.solve(part.context)
        part.counters.relaxed(timed.relaxation.program, timed.iterations)
        part.bound_ns = max(part.bound_ns, proved)
        return layers

    def _paths_bound(self, part: LayoutState) -> FloatArray | None:
        if self.rounds is None or len(self.paths) > MOST_PATHS:
            self._relax()
            part.pool = self.paths
        if self.rounds is None:
            part.bound_ns = max(part.bound_ns, part.cutoff_ns + 1)
            return None
        run, compact = self.rounds, (self.by_ranks or self.compact).narrowed(part.context)
        run.restart(part, compact)
        run.narrow(compact, part.context, self.paths)
        layers = None
        for _ in range(NODE_ROUNDS):
            known = len(self.paths)
            solution = run.solve()
            if part.closed or solution is None:
                break
            self.tight.update(np.flatnonzero(solution.row_duals[-known:]).tolist())
            layers = compact.layers(solution.values)
            if compact is not self.by_ranks:
                self.memory_binds = recomputes(self.compact, solution.values)
            if not run.separate(solution) or run.stalled():
                break
        run.prove()
        return layers

    def _round(self, part: LayoutState, layers: FloatArray) -> None:
        """Whole plans near a fractional point, and better ones near those, of all splits of the layout."""
        known = len(self.paths)
        context = part.context
        plan = fitted_plan(context, rounded_layers(context, layers), self.memo)
        if plan is not None:
            part.context = self.state.context
            self.nearest_ns = min(self.nearest_ns, improve(part, plan, self.nearest_ns))
            part.context = context
        if self.rounds is not None:
            self.rounds.relaxation.add_rows(self.rounds.rows(self.paths[known:]))

    def _relax(self) -> None:
        """A new relaxation, with the newest paths, the tight ones and those that need no simulation."""
        analytic, newest = self.state.context.num_stages, len(self.paths) - KEPT_PATHS
        kept = [n for n in range(len(self.paths)) if n < analytic or n in self.tight or n >= newest]
        self.paths, self.tight = [self.paths[n] for n in kept], set()
        self.rounds = rounds_on(replace(self.state, pool=self.paths), self.by_ranks or self.compact)


def recomputes(compact: CompactRelaxation, values: FloatArray) -> bool:
    """Whether a fractional point recomputes anything."""
    return bool(values[compact.num_counts // 3 : compact.num_counts].max() > SOME)
