"""Cutting planes of one layout: critical paths are added until the relaxation's bound and its best point meet.

Points are stabilised (in-out separation, Ben-Ameur and Neto 2007): besides the relaxation's optimum, paths are
taken at points between the optimum and the best point so far. This keeps the sequence of points from oscillating.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np

from milpplan.optimize import Counters
from milpplan.optimize.layout.compact_relaxation import RESOLUTION as COMPACT_RESOLUTION
from milpplan.optimize.layout.compact_relaxation import CeilingPath, CompactRelaxation
from milpplan.optimize.layout.layout_program import LayoutProgram
from milpplan.optimize.layout.rounding import (
    Choice,
    analytic_paths,
    best_choice,
    fitted_plan,
    rank_costs,
    rounded_layers,
)
from milpplan.optimize.layout.stage_options import LayoutContext, Menu, UnitCosts, stage_menu
from milpplan.optimize.milp.linear_relaxation import Relaxation, RelaxationSolution
from milpplan.optimize.milp.program import Program, Rows
from milpplan.problem import Plan
from milpplan.simulation import FloatArray, IntArray, ascending, durations, plan_stages
from milpplan.simulation.layers.shard import PAIRED, WORK
from milpplan.simulation.pipeline.step_graph import CriticalPath, StepGraph, Term, critical_paths

INWARD = (1.0, 0.5, 0.2)
"""Weights of the relaxation's optimum in the points that are separated; the rest of the weight is on the best
point."""
NEARBY = 4
"""Number of further points with one rank slowed down, whose critical paths differ."""
MAX_POOL = 96
"""Maximum number of paths kept for later layouts with the same graph."""
CONVERGED = 5e-6
"""Relative distance of best point and bound at which rounds stop."""
STALL_ROUNDS, STALL_SHARE = 6, 0.02
"""Rounds stop when this number of rounds closed less than this share of the distance to the cutoff."""


class PathRelaxation(Protocol):
    """Interface of a relaxation of one layout without its path rows; z counts units above a base."""

    @property
    def program(self) -> Program:
        """All rows but those of paths and ceiling cuts."""

    @property
    def ceiling_paths(self) -> Sequence[CeilingPath]:
        """Ceiling cuts, whose rows come right after those of the program."""

    def base_ns(self, paths: list[CriticalPath]) -> int:
        """Return the step time at z = 0."""

    def ceiling_rows(self, base: int, unit: int) -> Rows:
        """Return the rows of the ceiling cuts."""

    def path_rows(self, paths: list[CriticalPath], base: int, unit: int) -> Rows:
        """Return the rows of paths."""

    def narrow(self, relaxation: Relaxation, context: LayoutContext) -> None:
        """Narrow the program's rows in a relaxation to the limits of ``context``."""

    def path_limits(
        self, context: LayoutContext, paths: Sequence[CriticalPath], base: int, unit: int
    ) -> tuple[IntArray, IntArray, IntArray]:
        """Return indices, lower and upper sides of the rows of ceiling cuts and paths under narrower limits."""

    def durations(self, values: FloatArray) -> IntArray:
        """Return the duration matrix [Term, J] of a fractional point."""

    def layers(self, values: FloatArray) -> FloatArray:
        """Return the layers of every virtual stage at a fractional point, [J]."""


@dataclass(slots=True)
class LayoutState:
    """State of one layout against a cutoff: the proved bound, the best plan found, and the known paths of its
    graph."""

    context: LayoutContext
    pool: list[CriticalPath]
    cutoff_ns: int
    bound_ns: int
    gap: float
    deadline: float | None
    counters: Counters
    best: tuple[int, Plan] | None = None
    rounded: bool = False
    """True once an integer program was solved to the end, and only its rounding keeps bound and best plan apart.
    """

    @property
    def graph(self) -> StepGraph:
        """Step graph of the layout; bounds close most layouts without one."""
        costs = self.context.costs
        return StepGraph.of(self.context.layout, costs.transfer_ns, costs.barrier_ns)

    @property
    def closed(self) -> bool:
        """True once no plan at or below the cutoff is left."""
        return self.bound_ns > self.cutoff_ns

    def out_of_time(self) -> bool:
        """Return True once the time limit has passed."""
        return self.deadline is not None and time.monotonic() >= self.deadline

    def keep(self, step: int, plan: Plan) -> None:
        """Store a plan that fits if it meets the cutoff, and lower the cutoff."""
        if step <= self.cutoff_ns:
            self.best = (step, plan)
            self.cutoff_ns = min(int(step * (1.0 - self.gap)), step - 1)

    def widen(self, slack: float) -> None:
        """Lower the cutoff, and those that follow from better plans, by a share."""
        self.cutoff_ns = int(self.cutoff_ns * (1.0 - slack))
        self.gap = 1.0 - (1.0 - self.gap) * (1.0 - slack)

    def take_best(self, part: LayoutState) -> None:
        """Take over the best plan and the cutoff of a part of this layout."""
        if part.best is not None and (self.best is None or part.best[0] < self.best[0]):
            self.best = part.best
        self.cutoff_ns = min(self.cutoff_ns, part.cutoff_ns)

    def paths_at(self, points: IntArray) -> tuple[list[CriticalPath], list[int]]:
        """Return critical paths and step times (ns) of duration matrices [B, Term, J]."""
        paths = critical_paths(self.graph, points)
        transfer, barrier = self.graph.transfer_ns, self.graph.barrier_ns
        self.counters.simulated(len(points), self.graph)
        steps = [int(path.length_ns(point, transfer, barrier)) for path, point in zip(paths, points, strict=True)]
        return list(paths), steps

    def try_plan(self, plan: Plan | None) -> CriticalPath | None:
        """Simulate a plan that fits in memory. Returns its critical path."""
        if plan is None:
            return None
        stages = plan_stages(self.context.costs, self.context.problem.model.layer_kinds, plan)
        paths, steps = self.paths_at(durations(stages)[None])
        self.keep(steps[0], plan)
        return paths[0]

    def evened_chunks(self, point: IntArray) -> list[IntArray]:
        """Return variants of a point in which each rank's work is spread evenly over its chunks; for free
        interleaved splits.

        Good plans are near such points, while relaxations with few paths have optima far from them.
        """
        context = self.context
        if context.layout.vpp == 1 or context.problem.interleaved_layers == "even":
            return []
        evened, terms = point.copy(), list(WORK + PAIRED)
        work = point[terms][:, context.stage_grid]
        evened[terms] = work.mean(axis=1)[:, list(context.layout.stage_ranks)]
        return [evened, (point + evened) // 2]

    def slower_ranks(self, point: IntArray) -> list[IntArray]:
        """Return variants of a point in which one of some ranks is two per cent slower."""
        P = self.context.layout.pp
        nearby = []
        for rank in ascending(np.linspace(0, P - 1, NEARBY).astype(np.int64)):
            slower = point.copy()
            rank_terms = np.ix_(WORK + PAIRED, self.context.layout.rank_stages[rank])
            slower[rank_terms] += slower[rank_terms] // 50
            nearby.append(slower)
        return nearby


@dataclass(slots=True)
class CuttingPlanes:
    """Cutting-plane loop on one relaxation, with the best point found for it."""

    state: LayoutState
    relaxation: Relaxation
    base: int
    unit: int
    matrix: Callable[[FloatArray], IntArray]
    rows: Callable[[list[CriticalPath]], Rows]
    center: FloatArray | None = None
    center_ns: float = np.inf
    improved: bool = False
    distances_ns: list[float] = field(default_factory=list)
    """Distance from the bound to the cutoff after every round, ns."""
    bound_ns: float = 0.0
    """Last optimum in floating point; proved where it passes the cutoff, and at the end."""
    unproved: RelaxationSolution | None = None

    def restart(self, state: LayoutState, compact: PathRelaxation) -> None:
        """Go on with another state of this graph, on this program."""
        self.state, self.center, self.center_ns, self.distances_ns = state, None, np.inf, []
        self.bound_ns, self.unproved = 0.0, None
        self.matrix, self.rows = compact.durations, partial(compact.path_rows, base=self.base, unit=self.unit)

    def narrow(self, compact: PathRelaxation, context: LayoutContext, paths: Sequence[CriticalPath]) -> None:
        """Narrow the relaxation, which has rows of ``paths``, to the limits of ``context``."""
        compact.narrow(self.relaxation, context)
        self.relaxation.set_sides(*compact.path_limits(context, paths, self.base, self.unit))

    def value_ns(self) -> float:
        """Return the optimum with the known paths in floating point, which is not a proved bound; 0 where the
        solver fails."""
        solution = self.relaxation.solve()
        return self.base + self.unit * solution.objective if solution.status == "optimal" else 0.0

    def stalled(self) -> bool:
        """Return True if the last rounds hardly raised the bound: rows rounded to units leave a tail of tiny
        steps."""
        self.distances_ns.append(self.state.cutoff_ns - max(self.bound_ns, self.state.bound_ns))
        if len(self.distances_ns) <= STALL_ROUNDS:
            return False
        return self.distances_ns[-1] > self.distances_ns[-1 - STALL_ROUNDS] * (1.0 - STALL_SHARE)

    def solve(self) -> RelaxationSolution | None:
        """Solve the relaxation; None when the solver stopped or time is up.

        The bound is proved where it passes the cutoff. A proof takes as long as a solution, and only the last
        proof counts.
        """
        solution = self.relaxation.solve()
        self.state.counters.relaxed(self.relaxation.program, solution.iterations)
        if solution.status != "optimal" or self.state.out_of_time():
            return None
        self.bound_ns, self.unproved = self.base + self.unit * solution.objective, solution
        if self.bound_ns > self.state.cutoff_ns:
            self.prove()
        return solution

    def prove(self) -> None:
        """Raise the state's bound to the value that the duals of the last optimum prove."""
        if self.unproved is None:
            return
        proved = self.relaxation.proved_bound(self.unproved)
        self.unproved = None
        if proved is not None:
            self.state.bound_ns = max(self.state.bound_ns, self.base + self.unit * proved)

    def separate(self, solution: RelaxationSolution) -> bool:
        """Add the critical paths near the optimum. Returns False when best point and bound have met, or no path is
        new."""
        optimum = solution.values
        points = [optimum]
        if self.center is not None:
            points += [weight * optimum + (1.0 - weight) * self.center for weight in INWARD[1:]]
        matrices = [self.matrix(point) for point in points]
        matrices += self.state.evened_chunks(matrices[0])
        matrices += self.state.slower_ranks(matrices[-1])
        paths, steps = self.state.paths_at(np.stack(matrices))
        self.improved = False
        for point, step in zip(points, steps, strict=False):
            if step < self.center_ns:
                self.improved = step < self.center_ns * (1 - 1e-4)
                self.center, self.center_ns = point, step
        if self.center_ns <= max(self.bound_ns, self.state.bound_ns) * (1 + CONVERGED):
            return False
        new_paths = _distinct(paths)
        self.state.counters.paths += len(new_paths)
        self.state.pool.extend(new_paths)
        rows = self.rows(new_paths)
        self.relaxation.add_rows(rows)
        return len(rows) > 0


def _distinct(paths: list[CriticalPath]) -> list[CriticalPath]:
    """Drop repeated paths."""
    seen: dict[bytes, CriticalPath] = {}
    for path in paths:
        seen.setdefault(path.counts.tobytes() + path.num_transfers.to_bytes(8, "big"), path)
    return list(seen.values())


def rounds_on(state: LayoutState, compact: PathRelaxation) -> CuttingPlanes | None:
    """Return the cutting-plane loop on a relaxation with all known paths; None where the paths alone pass the
    cutoff."""
    base = compact.base_ns(state.pool)
    if base > state.cutoff_ns:
        state.bound_ns = max(state.bound_ns, base)
        return None
    unit = max(1, (state.cutoff_ns - base) // COMPACT_RESOLUTION)
    relaxation = Relaxation(compact.program)
    if compact.ceiling_paths:
        relaxation.add_rows(compact.ceiling_rows(base, unit))
    relaxation.add_rows(compact.path_rows(state.pool, base, unit))
    rows = partial(compact.path_rows, base=base, unit=unit)
    return CuttingPlanes(state, relaxation, base, unit, compact.durations, rows)


def compact_rounds(state: LayoutState, max_layers: IntArray, rounds: int) -> list[Menu] | None:
    """Run rounds on the compact relaxation.

    Returns:
        The menus of the items that the duals leave; None when the bound passes the cutoff.
    """
    prices = compact_prices(state, rounds)
    return None if prices is None else _menus(state, max_layers, prices)


def compact_prices(state: LayoutState, rounds: int) -> list[UnitCosts | None] | None:
    """Run rounds on the compact relaxation.

    Returns:
        The proved costs of units in every virtual stage (None where the duals prove nothing), [J]; None when the
        bound passes the cutoff.
    """
    compact = CompactRelaxation(state.context, state.cutoff_ns)
    run = rounds_on(state, compact)
    if run is None:
        return None
    best, prices = -np.inf, None
    for _ in range(rounds):
        solution = run.solve()
        if state.closed:
            return None
        if solution is None:
            break
        bound, price = compact.item_prices(run.relaxation.program, solution.row_duals)
        if bound > best:
            best, prices = bound, price
        separated = run.separate(solution)
        if run.center is not None and run.improved and run.center_ns <= state.cutoff_ns:
            _round(state, compact.layers(run.center))
        if not separated or state.closed or run.stalled():
            break
    run.prove()
    trim_pool(state)
    if state.closed:
        return None
    slack = (state.cutoff_ns - run.base) / run.unit + 1.0 - best
    return [None if prices is None else UnitCosts(slack, prices[:, j]) for j in range(state.context.num_stages)]


def trim_pool(state: LayoutState) -> None:
    """Keep the analytic paths, which come first, and the newest of the others."""
    pool, num_analytic = state.pool, state.context.layout.pp
    del pool[num_analytic : max(num_analytic, len(pool) - MAX_POOL)]


def _round(state: LayoutState, layers: FloatArray) -> None:
    """Try a whole plan near fractional layers [J]."""
    plan = fitted_plan(state.context, rounded_layers(state.context, layers))
    path = state.try_plan(plan)
    if path is not None:
        state.pool.append(path)


def _menus(state: LayoutState, max_layers: IntArray, prices: list[UnitCosts | None]) -> list[Menu] | None:
    """Return the menus of the items that can be in a plan at or below the cutoff; None if a menu is empty."""
    menus = []
    for j, stage_prices in enumerate(prices):
        menu = stage_menu(state.context, j, int(max_layers[j]), stage_prices)
        if not len(menu):
            return None
        menus.append(menu)
    return menus


def menu_rounds(state: LayoutState, program: LayoutProgram, rounds: int) -> None:
    """Run rounds on the relaxation of the menus: raise the proved bound, and try whole plans."""
    base, unit = program.scaling()
    if base > state.cutoff_ns:
        state.bound_ns = max(state.bound_ns, base)
        return
    relaxation = Relaxation(program.program(base, unit, elastic=True))
    num_items = int(program.offsets[-1])

    def rows(paths: list[CriticalPath]) -> Rows:
        first_new = len(program.paths)
        for path in paths:
            program.add_path(path)
        return program.path_rows(first_new, base, unit)

    run = CuttingPlanes(state, relaxation, base, unit, lambda v: program.fractional_durations(v[:num_items]), rows)
    for index in range(rounds):
        solution = run.solve()
        if state.closed or solution is None:
            break
        separated = run.separate(solution)
        if index % 6 == 0 or not separated:
            assert run.center is not None
            _whole_plans(state, program, run.center[:num_items], solution.row_duals)
        if not separated or state.closed or run.stalled():
            break
    run.prove()


def _whole_plans(state: LayoutState, program: LayoutProgram, values: FloatArray, duals: FloatArray) -> None:
    """Try whole plans near a fractional point."""
    context, menus = state.context, program.menus
    balanced = rank_costs(menus, analytic_paths(context.layout), context.layout)
    for choice in (
        best_choice(context, menus, balanced, True),
        best_choice(context, menus, _dual_costs(program, duals), False),
        best_choice(context, menus, _distances(program, values), False),
    ):
        try_choice(state, program, choice)


def try_choice(state: LayoutState, program: LayoutProgram, choice: Choice | None) -> None:
    """Simulate a choice of items: critical paths of it and its neighbours join the program; its plan counts if it
    fits."""
    if choice is None:
        return
    point = program.durations(choice)
    paths, steps = state.paths_at(np.stack([point, *state.slower_ranks(point)]))
    for path in paths:
        program.add_path(path)
    if program.overfull_rank(choice) is None:
        state.keep(steps[0], program.plan(choice))


def _dual_costs(program: LayoutProgram, duals: FloatArray) -> list[FloatArray]:
    """Return costs of items under paths weighted by their duals; the paths are the last rows of the relaxation."""
    num_paths = min(len(program.coefficients), len(duals))
    total = np.zeros(int(program.offsets[-1]))
    for row, dual in zip(program.coefficients[:num_paths], duals[len(duals) - num_paths :], strict=True):
        total += max(float(dual), 0.0) * row
    return program.by_menu(total)


def _distances(program: LayoutProgram, values: FloatArray) -> list[FloatArray]:
    """Return distances of items from a fractional point, in layers."""
    costs = []
    for menu, share in zip(program.menus, program.by_menu(values), strict=True):
        backward = menu.terms[Term.BACKWARD]
        tie = backward / max(1.0, float(backward.max()))
        costs.append((menu.layers - float(share @ menu.layers)) ** 2 + 0.01 * tie - 0.1 * share)
    return costs
