"""Branch and bound over the layers of virtual stages: decides interleaved layouts whose splits are free.

A node narrows the layers of virtual stages, or of all chunks of a rank together. Its bound is that of the compact
relaxation, proved in exact integers. Fractions hide most of their cost at the ends (half a layer beside the
embedding or the head) and in the ranks' sums, so these are branched on first. One relaxation serves all nodes:
they differ in the sides of a few rows, and a path found in one node is valid in all.

A branching divides the splits of a node among its parts, so that each split is in exactly one part: by the layers
of one virtual stage, by the layers of all chunks of one rank, or by the fullest inner virtual stage.

A local search over splits finds plans: it moves a layer from a virtual stage that the critical path passes often
to one that it passes less. No proof rests on it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from milpplan.optimize import Counters
from milpplan.optimize.bounds.closed_form import max_layers_on_ranks
from milpplan.optimize.layout.compact_relaxation import (
    CompactRelaxation,
    ceiling_paths,
    fullest_stage_branching,
    has_ceiling_cuts,
)
from milpplan.optimize.layout.cutting_planes import CuttingPlanes, LayoutState, rounds_on
from milpplan.optimize.layout.rank_relaxation import EventTimeRelaxation, RankRelaxation
from milpplan.optimize.layout.rounding import chunk_paths, fitted_plan, rounded_layers
from milpplan.optimize.layout.stage_options import LayoutContext
from milpplan.optimize.space.plan_space import even_splits
from milpplan.problem import Plan
from milpplan.simulation import FloatArray, IntArray, durations, plan_stages
from milpplan.simulation.layers import ONCE
from milpplan.simulation.layers.shard import PAIRED, WORK
from milpplan.simulation.pipeline.step_graph import CriticalPath
from milpplan.simulation.stages import StageMemo

CANDIDATES = 24
"""Number of moves simulated at a time: those that shorten the critical path most."""
MAX_MOVES = 40
NO_CUTOFF_NS = 2**60
"""Cutoff that every plan meets."""
PROMISING = 1.005
"""Multiple of the fastest plan's step up to which moves are tried from a plan."""


def local_search_if_promising(context: LayoutContext, plan: Plan, known_ns: float, deadline: float | None) -> Plan:
    """Improve a single plan by moves if its step is within ``PROMISING`` of ``known_ns``."""
    state = LayoutState(context, [], NO_CUTOFF_NS, 0, 0.0, deadline, Counters())
    improve(state, plan, known_ns)
    assert state.best is not None
    return state.best[1]


def improve(state: LayoutState, plan: Plan, known_ns: float) -> int:
    """Move layers one by one while the plan gets faster, if its step is within ``PROMISING`` of ``known_ns``.

    The best plan is stored in the state, and its critical path joins the pool.

    Returns:
        The best plan's step time in nanoseconds.
    """
    memo = StageMemo(state.context.layout, state.context.costs)
    (best,), (path,) = _steps(state, [plan])
    for _ in range(MAX_MOVES if best < PROMISING * known_ns else 0):
        layers = np.array([stage.num_layers for stage in plan.virtual_stages])
        fitted = [fitted_plan(state.context, split, memo) for split in _moves(state, layers, path)]
        plans = [other for other in fitted if other is not None]
        if not plans or state.out_of_time():
            break
        steps, paths = _steps(state, plans)
        fastest = int(np.argmin(steps))
        if steps[fastest] >= best:
            break
        plan, best, path = plans[fastest], steps[fastest], paths[fastest]
    state.keep(best, plan)
    state.pool.append(path)
    return best


def fastest_of(state: LayoutState, splits: Sequence[IntArray]) -> Plan | None:
    """Return the fastest plan that fits among plans with given layers in every virtual stage, [J] each."""
    memo = StageMemo(state.context.layout, state.context.costs)
    fitted = [fitted_plan(state.context, split, memo) for split in splits]
    plans = [plan for plan in fitted if plan is not None]
    return plans[int(np.argmin(_steps(state, plans)[0]))] if plans else None


def _steps(state: LayoutState, plans: list[Plan]) -> tuple[list[int], list[CriticalPath]]:
    kinds = state.context.problem.model.layer_kinds
    points = [durations(plan_stages(state.context.costs, kinds, plan)) for plan in plans]
    paths, steps = state.paths_at(np.stack(points))
    return steps, paths


def _moves(state: LayoutState, layers: IntArray, path: CriticalPath) -> list[IntArray]:
    """Return splits with one layer moved, those first that shorten the path most."""
    context = state.context
    kind = int(np.bincount(context.problem.model.layer_kinds).argmax())
    ranks = [context.layout.rank_of(stage) for stage in range(context.num_stages)]
    duration = np.stack([context.costs.of_rank(rank).duration_ns[kind] for rank in ranks], axis=-1)
    paired = np.stack([context.costs.of_rank(rank).paired_ns[kind] for rank in ranks], axis=-1)
    stage_time_ns = (paired * path.counts[list(PAIRED)]).sum(axis=0)
    stage_time_ns += (duration[list(ONCE)] * path.counts[list(WORK)]).sum(axis=0)
    low, high = np.array(context.layer_bounds).T
    gain = (stage_time_ns[:, None] - stage_time_ns[None, :]).astype(np.float64)
    gain[layers <= low] = -1.0
    gain[:, layers >= high] = -1.0
    order = np.argsort(-gain, axis=None, kind="stable")[:CANDIDATES]
    splits, places = [], sorted(set(range(int(layers.sum()) + 1)) - context.taking)
    reach = max(np.diff(places)) // 2 + 1
    for source, target in zip(*np.unravel_index(order, gain.shape), strict=True):
        if gain[source, target] > 0:
            split = layers.copy()
            split[source] -= 1
            split[target] += 1
            # Where stages may not start anywhere, the move goes on to the next place.
            splits.append(rounded_layers(context, layers + reach * (split - layers)) if context.taking else split)
    return splits


Branching = list[LayoutContext]
"""Parts of a node."""

INTEGRAL = 1e-6
"""Numbers of layers this close to an integer count as integers."""
MAX_RANKS, MAX_STAGES = 4, 10
"""Maximum number of branchings by ranks, and by virtual stages."""
MIN_RISE_SHARE = 1e-4
"""Minimum rise of a part in the branching score, as a share of the distance to the cutoff."""
SMALL_GRAPH = 1600
"""Maximum number of work items of a graph that the event-time relaxation contains."""
PATH_NODES = 4
"""Number of first nodes that are bounded by paths even where event times could be used."""
EVEN_SPLITS = 4
"""Maximum number of even splits that are tried where the first node leaves a layout open."""
NEAR = 1.015
"""Local search is skipped round plans slower than this multiple of the cutoff."""
NODE_ROUNDS = 20
"""Maximum rounds on the relaxation of a node."""
COMPARED_NODES = 4
"""Number of first nodes whose parts are compared by relaxations other than those of whole ranks."""
MOST_PATHS, KEPT_PATHS = 1000, 500
"""Number of paths in the relaxation before it is rebuilt, and number of newest paths kept then, besides tight
paths."""
FEW_SPLITS = 256
"""Maximum splits of a node that are decided one by one where its relaxation has no solution."""
SOME = 0.01
"""Fraction of a layer from which on a count is regarded as positive."""
Decide = Callable[[LayoutState, tuple[int, ...]], None]
"""Raises the bound of a state for one split of the layers, or finds its best plan."""


def candidate_branchings(context: LayoutContext, layers: FloatArray) -> list[Branching]:
    """Return branchings of a node that exclude its fractional point, layers [J], or settle its ends or its fullest
    stage.

    The most fractional ranks and stages come first.
    """
    layers, sums = _within_limits(context, layers)
    stages = _most_fractional(layers)[:MAX_STAGES]
    branchings = [_rank_parts(context, rank, float(sums[rank])) for rank in _most_fractional(sums)[:MAX_RANKS]]
    branchings += [_stage_parts(context, stage, float(layers[stage])) for stage in stages]
    branchings += [_end_parts(context, end) for end in _open_ends(context)]
    if has_ceiling_cuts(context) and (by_fullest_stage := fullest_stage_branching(context)):
        branchings.append(by_fullest_stage)
    return branchings or [default_branching(context, layers)]


def strong_branching(
    branchings: Sequence[Branching], rise: Callable[[LayoutContext], float], distance: float
) -> Branching:
    """Return the branching whose parts' bounds rise most: strong branching.

    The score is the product of the two smallest rises (Achterberg, Koch and Martin 2005).

    Args:
        branchings: candidates.
        rise: returns the rise of a part's bound over the node's.
        distance: from the node's bound to the cutoff; a rise counts at most this.
    """
    if len(branchings) == 1:
        return branchings[0]
    best, best_score = branchings[0], -1.0
    for branching in branchings:
        rises = sorted(min(rise(part), distance) for part in branching)
        score = float(np.prod([max(raised, MIN_RISE_SHARE * distance) for raised in rises[:2]]))
        if score > best_score:
            best, best_score = branching, score
        if rises[0] >= distance:
            break
    return best


def default_branching(context: LayoutContext, layers: FloatArray) -> Branching:
    """Return the branching by the fullest inner virtual stage, one virtual stage, or one rank of a fractional
    point, layers [J]: the rule where relaxations of the parts are expensive."""
    layers, sums = _within_limits(context, layers)
    if has_ceiling_cuts(context) and (by_fullest_stage := fullest_stage_branching(context)):
        return by_fullest_stage
    for end in _open_ends(context):
        return _end_parts(context, end)
    for stage in (0, context.num_stages - 1):
        if _fraction(layers[stage]) > INTEGRAL:
            return _stage_parts(context, stage, float(layers[stage]))
    for rank in _most_fractional(sums):
        return _rank_parts(context, rank, float(sums[rank]))
    for stage in np.argsort(-_fraction(layers), kind="stable").tolist():
        low, high = context.layer_bounds[stage]
        if low < high:
            return _stage_parts(context, stage, float(layers[stage]))
    raise AssertionError("a node with one split has no parts")


def num_splits(context: LayoutContext) -> float:
    """Return an upper bound of the number of splits within a node's limits."""
    return float(np.prod([high - low + 1.0 for low, high in context.layer_bounds]))


def halve_stage(context: LayoutContext) -> Branching:
    """Return the branching that halves the limits of the first virtual stage with a choice."""
    stage = next(j for j, (low, high) in enumerate(context.layer_bounds) if low < high)
    return _stage_parts(context, stage, sum(context.layer_bounds[stage]) / 2 + 0.25)


def _within_limits(context: LayoutContext, layers: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Clip a point's layers of virtual stages and ranks to the node's limits.

    A point with unplaced layers may be outside of the limits. At the limit the parts are smaller still.
    """
    sums = np.clip(layers[context.stage_grid].sum(axis=0), *np.array(context.rank_bounds).T)
    return np.clip(layers, *np.array(context.layer_bounds).T), sums


def _open_ends(context: LayoutContext) -> list[int]:
    """Return the ends of the model that may hold layers or none: reductions and gathers that nothing hides are
    known only once that is decided."""
    ends = (0, context.num_stages - 1)
    return [end for end in ends if context.layer_bounds[end][0] == 0 < context.layer_bounds[end][1]]


def _end_parts(context: LayoutContext, end: int) -> Branching:
    """Branch on whether an end holds layers."""
    return [context.with_stage(end, 1, context.layer_bounds[end][1]), context.with_stage(end, 0, 0)]


def _rank_parts(context: LayoutContext, rank: int, value: float) -> Branching:
    """Branch below and above a fractional number of layers of a rank."""
    (low, high), floor = context.rank_bounds[rank], int(np.floor(value))
    return [context.with_rank(rank, low, floor), context.with_rank(rank, floor + 1, high)]


def _stage_parts(context: LayoutContext, stage: int, value: float) -> Branching:
    """Branch below and above a fractional number of layers; below, at and above an integer."""
    low, high = context.layer_bounds[stage]
    whole = round(value)
    if _fraction(np.array(value)) <= INTEGRAL:
        ranges = [(low, whole - 1), (whole, whole), (whole + 1, high)]
    else:
        ranges = [(low, int(np.floor(value))), (int(np.floor(value)) + 1, high)]
    return [context.with_stage(stage, start, end) for start, end in ranges if start <= end]


def _most_fractional(values: FloatArray) -> list[int]:
    """Return the indices of fractional numbers, most fractional first."""
    fractions = _fraction(values)
    return [index for index in np.argsort(-fractions, kind="stable").tolist() if fractions[index] > INTEGRAL]


def _fraction(values: FloatArray) -> FloatArray:
    """Return the distance to the nearest integer."""
    return np.asarray(np.abs(values - np.rint(values)))


@dataclass(slots=True)
class BranchingTree:
    """Open nodes of one layout, smallest bound first."""

    state: LayoutState
    decide: Decide
    heap: list[tuple[int, int, LayoutContext]] = field(default_factory=list)
    opened: bool = False
    numbered: int = 0
    num_explored: int = 0
    given_up_ns: float = np.inf
    """Minimum bound of the nodes that could not be decided, because a solver failed or time ran out."""
    paths: list[CriticalPath] = field(default_factory=list)
    """Paths in the order of the relaxation's path rows, which are its last rows."""
    paths_with_dual: set[int] = field(default_factory=set)
    """Indices of the paths that had a nonzero dual."""
    compact: CompactRelaxation = field(init=False)
    """Compact relaxation for the cutoff at which the tree began, so it is valid for all later cutoffs."""
    uses_event_times: bool = False
    """True where nodes after the first ``PATH_NODES`` are bounded by the event-time relaxation. It is expensive at
    first, which does not pay where a few rounds of paths decide, but much tighter."""
    event_times: EventTimeRelaxation | None = None
    by_ranks: RankRelaxation | None = None
    """Takes the place of ``compact`` where memory binds and ranks have few choices."""
    memory_binds: bool = False
    """True if the last node's optimum recomputes layers."""
    rounds: CuttingPlanes | None = None
    rank_limits: tuple[int, IntArray] | None = None
    """Cutoff, and maximum layers of each rank below it, [P]."""
    compares_parts: bool = False
    """True where relaxations of the parts choose the branching (strong branching)."""
    nearest_ns: float = field(init=False)
    """Step of the fastest plan found; initially the limit for a local search."""
    memo: StageMemo = field(init=False)

    def __post_init__(self) -> None:
        layout, pool = self.state.context.layout, self.state.pool
        self.nearest_ns = NEAR * self.state.cutoff_ns
        self.memo = StageMemo(layout, self.state.context.costs)
        graph, has_ceilings = self.state.graph, has_ceiling_cuts(self.state.context)
        cuts = ceiling_paths(layout, graph.structure) if has_ceilings else []
        self.compact = CompactRelaxation(self.state.context, self.state.cutoff_ns, cuts)
        self.uses_event_times = has_ceilings and graph.structure.num_nodes <= SMALL_GRAPH
        self.paths = [*pool[: layout.pp], *chunk_paths(layout), *pool[layout.pp :]]

    @property
    def finished(self) -> bool:
        """True once no open node is left below the cutoff."""
        return self.opened and (not self.heap or self.heap[0][0] > self.state.cutoff_ns)

    def run(self, state: LayoutState, nodes: int) -> None:
        """Explore at most ``nodes`` more nodes. The state's bound becomes the minimum over the open nodes."""
        self.state = state
        if not self.opened:
            self.opened = True
            self._open(state.bound_ns, [state.context])
        for _ in range(nodes):
            if self.finished or state.out_of_time():
                break
            bound, _, context = heapq.heappop(self.heap)
            self._explore(bound, context)
        min_bound = min(self.heap[0][0] if self.heap else np.inf, self.given_up_ns, state.cutoff_ns + 1)
        state.bound_ns = max(state.bound_ns, int(min_bound))

    def _try_even_splits(self, layers: FloatArray) -> None:
        """Try the even plans whose ends are nearest to a fractional point, and improve the best by local search.

        Relaxations of splits that do not divide evenly do not show which stages should hold the larger chunks.
        """
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
        """Return the context with all limits that follow, also from counting below the cutoff; None where nothing
        is left."""
        cutoff = self.state.cutoff_ns
        if self.rank_limits is None or self.rank_limits[0] != cutoff:
            self.rank_limits = (cutoff, max_layers_on_ranks(self.state.context, cutoff).max(axis=0))
        return context.tightened(self.rank_limits[1])

    def _parts(self, part: LayoutState, layers: FloatArray) -> list[LayoutContext]:
        """Return the parts that replace a node.

        Where memory binds, relaxations with the known paths choose the branching that raises the bound most.
        Relaxations by whole ranks are small; others pay only near the root of the tree.
        """
        compares_parts = self.compares_parts and (self.by_ranks is not None or self.num_explored <= COMPARED_NODES)
        if not compares_parts or self.rounds is None:
            return default_branching(part.context, layers)
        distance = float(part.cutoff_ns - part.bound_ns)
        return strong_branching(
            candidate_branchings(part.context, layers), partial(self._rise, self.rounds, part), distance
        )

    def _rise(self, run: CuttingPlanes, part: LayoutState, context: LayoutContext) -> float:
        """Return how much the relaxation with the known paths rises from a node to a part of it."""
        narrower = self._tightened(context)
        if narrower is None:
            return float(part.cutoff_ns - part.bound_ns)
        if part.out_of_time():
            return 0.0
        run.narrow((self.by_ranks or self.compact).narrowed(narrower), narrower, self.paths)
        part.counters.relaxations += 1
        return run.value_ns() - part.bound_ns

    def _explore(self, bound: int, context: LayoutContext) -> None:
        """Bound a node; where it stays open, its parts replace it."""
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
                if self.num_explored == 1:
                    self._try_even_splits(layers)
                    self._switch_to_ranks(context)
            elif split is None and num_splits(context) <= FEW_SPLITS and not self.state.out_of_time():
                # The solver calls the relaxation infeasible, which is no proof: decide split by split.
                self._open(part.bound_ns, halve_stage(context))
            else:
                self.given_up_ns = min(self.given_up_ns, part.bound_ns)

    def _switch_to_ranks(self, context: LayoutContext) -> None:
        """From now on bound nodes by choices of whole ranks, where memory binds and paths bound the nodes."""
        self.compares_parts = self.memory_binds and not self.uses_event_times
        if self.compares_parts:
            cutoff = self.state.cutoff_ns
            self.by_ranks = RankRelaxation.of(self.compact, context, self.paths, cutoff)
            self.rounds = None if self.by_ranks else self.rounds

    def _bound(self, part: LayoutState) -> FloatArray | None:
        """Raise the bound of a node. Returns the layers of every virtual stage at the last optimum,
        [J], if any."""
        layers = None
        self.num_explored += 1
        if self.uses_event_times and self.num_explored > PATH_NODES:
            self.event_times = self.event_times or EventTimeRelaxation(self.compact, self.state.graph)
            layers = self._event_time_bound(self.event_times, part)
        if layers is None and not part.closed:
            self.uses_event_times = self.uses_event_times and self.num_explored <= PATH_NODES
            layers = self._paths_bound(part)
        if layers is not None and not part.closed:
            self._round(part, layers)
        return layers

    def _event_time_bound(self, event_times: EventTimeRelaxation, part: LayoutState) -> FloatArray | None:
        proved, layers = event_times.solve(part.context)
        part.counters.relaxed(event_times.relaxation.program, event_times.iterations)
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
            num_paths = len(self.paths)
            solution = run.solve()
            if part.closed or solution is None:
                break
            self.paths_with_dual.update(np.flatnonzero(solution.row_duals[-num_paths:]).tolist())
            layers = compact.layers(solution.values)
            if compact is not self.by_ranks:
                self.memory_binds = recomputes(self.compact, solution.values)
            if not run.separate(solution) or run.stalled():
                break
        run.prove()
        return layers

    def _round(self, part: LayoutState, layers: FloatArray) -> None:
        """Try a whole plan near a fractional point and improve it by local search among all splits of
        the layout."""
        num_paths = len(self.paths)
        context = part.context
        plan = fitted_plan(context, rounded_layers(context, layers), self.memo)
        if plan is not None:
            part.context = self.state.context
            self.nearest_ns = min(self.nearest_ns, improve(part, plan, self.nearest_ns))
            part.context = context
        if self.rounds is not None:
            self.rounds.relaxation.add_rows(self.rounds.rows(self.paths[num_paths:]))

    def _relax(self) -> None:
        """Rebuild the relaxation with the analytic paths, the paths with a dual and the newest paths."""
        analytic, newest = self.state.context.num_stages, len(self.paths) - KEPT_PATHS
        kept = [n for n in range(len(self.paths)) if n < analytic or n in self.paths_with_dual or n >= newest]
        self.paths, self.paths_with_dual = [self.paths[n] for n in kept], set()
        self.rounds = rounds_on(replace(self.state, pool=self.paths), self.by_ranks or self.compact)


def recomputes(compact: CompactRelaxation, values: FloatArray) -> bool:
    """Return True if a fractional point recomputes layers."""
    return bool(values[compact.num_counts // 3 : compact.num_counts].max() > SOME)
