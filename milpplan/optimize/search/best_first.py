"""Best-first search over layouts: each is proved worse than the incumbent, or improves it.

``ExploredLayouts`` is the node store of the search, ``Search`` the search itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from milpplan.optimize import Progress, SolveContext, objective_weights
from milpplan.optimize.bounds.closed_form import SAFETY
from milpplan.optimize.bounds.cluster_bounds import cluster_bounds, cluster_uniform_bounds
from milpplan.optimize.context import deferred, progress_unit, threshold
from milpplan.optimize.layout.stage_options import fitting_step_ns
from milpplan.optimize.search.closed_layouts import FATES, ClosedLayouts, PruneRecord
from milpplan.optimize.space.layout_space import LayoutSpace
from milpplan.optimize.space.plan_space import in_space, with_used_modules
from milpplan.problem import Plan, Problem
from milpplan.simulation import (
    BoolArray,
    CostTable,
    FloatArray,
    IntArray,
    LayoutColumns,
    RankCosts,
    ascending,
    cluster_costs,
    least_held_bytes,
    usable_memory_bytes,
)
from milpplan.simulation.bulk import has_uniform_plan, uniform_plan
from milpplan.simulation.bulk.simulate_many import simulate_known, together
from milpplan.simulation.mixed_costs import ReplicaCosts
from milpplan.simulation.scenario_costs import ScenarioCosts, Scenarios, ScenarioTable, SearchTable

BLOCK = 2048
"""Number of layouts whose constants are computed together."""
FIRST_BATCH, MAX_BATCH = 48, 1024
"""Number of plans simulated together: in the first batch, and at most."""
GROWTH = 16
"""Growth factor of the batches: the first plans may prune nearly all others."""


def no_rows() -> IntArray:
    """Return an empty array of rows."""
    return np.zeros(0, dtype=np.int64)


@dataclass(slots=True)
class ExploredLayouts:
    """Layouts of opened groups, in the order in which they were opened (struct of arrays; all arrays are [n])."""

    problem: Problem
    whole: LayoutSpace
    context: SolveContext
    closed: ClosedLayouts = field(init=False)
    """Closed layouts: groups and blocks that are not explored one by one and are in no array here."""
    space: LayoutSpace = field(init=False)
    """Space of the explored layouts only."""
    rows: IntArray = field(init=False)
    """Rows of the explored layouts in the whole space."""
    weights: FloatArray = field(init=False)
    limits_ns: FloatArray = field(init=False)
    bounds_ns: FloatArray = field(init=False)
    memory: FloatArray = field(init=False)
    """Lower bounds of the peak memory, bytes; where not ``detailed``, of the layers' states only."""
    detailed: BoolArray = field(init=False)
    """True for layouts whose bound takes memory and sharding into account."""
    fates: npt.NDArray[np.int8] = field(init=False)
    """Indices into ``FATES``."""
    uniform_ns: FloatArray = field(init=False)
    """Bounds of the uniform plans [n, modes], exact where ``simulated``; infinite where they do not fit."""
    simulated: BoolArray = field(init=False)

    def __post_init__(self) -> None:
        self.closed = ClosedLayouts(self.problem, self.whole, self.context.budget)
        none = np.zeros(0, dtype=np.int64)
        self.space, self.memory = self.whole.only(none), np.zeros(0)
        self.weights, self.limits_ns, self.bounds_ns = np.zeros((3, 0))
        self.detailed, self.fates = np.zeros(0, dtype=np.bool_), np.zeros(0, dtype=np.int8)
        shape = (0, len(self.problem.recompute_modes))
        self.uniform_ns, self.simulated = np.zeros(shape), np.zeros(shape, dtype=np.bool_)
        self.rows = none

    def grow(self, groups: IntArray) -> IntArray:
        """Add the layouts of some groups to the arrays. Returns their rows.

        Memory may run out between any two lines. So the arrays grow first, and ``rows``, whose length says how
        much of them is valid, grows last. The groups stay closed until the caller opens them, so no bound ever
        leaves a layout out.
        """
        opened = self.closed.layouts(groups)
        start, count = len(self.rows), len(opened.rows)
        # Lower bounds of the layers' states on the fullest rank; none where node types differ.
        state_bytes = np.zeros(count)
        if not self.problem.other_hardware:
            state_bytes = least_held_bytes(self.problem, self.whole.take(opened.rows)) * SAFETY
        too_large = state_bytes > usable_memory_bytes(self.problem)
        self.weights = np.concatenate([self.weights, opened.weights])
        self.limits_ns = np.concatenate([self.limits_ns, opened.limits_ns])
        self.bounds_ns = np.concatenate([self.bounds_ns, opened.bounds_ns])
        fates = np.where(too_large, FATES.index("does_not_fit"), FATES.index("open")).astype(np.int8)
        self.memory, self.fates = np.concatenate([self.memory, state_bytes]), np.concatenate([self.fates, fates])
        uniform_ns = np.full((count, self.uniform_ns.shape[1]), np.inf)
        self.detailed = np.concatenate([self.detailed, np.zeros(count, dtype=np.bool_)])
        self.simulated = np.concatenate([self.simulated, np.zeros(uniform_ns.shape, dtype=np.bool_)])
        self.uniform_ns = np.concatenate([self.uniform_ns, uniform_ns])
        rows = np.concatenate([self.rows, opened.rows])
        self.space = self.whole.only(rows)
        self.rows = rows
        return np.arange(start, start + count)

    def values(self, rows: IntArray | slice = slice(None)) -> FloatArray:
        """Return proved lower bounds of the objective; infinite where no plan fits or meets the deadline."""
        value = self.bounds_ns[rows] * self.weights[rows]
        value = np.where(self.bounds_ns[rows] > self.limits_ns[rows], np.inf, value)
        return np.where(self.fates[rows] == FATES.index("does_not_fit"), np.inf, value)

    def least_memory(self) -> float | None:
        """Return the minimum peak memory (a proved lower bound, bytes) over all layouts; None unless all have
        detailed bounds."""
        complete = len(self.rows) == len(self.whole) and self.detailed.all()
        return float(self.memory.min()) if len(self.memory) and complete else None

    def decide(self, rows: IntArray) -> None:
        """Set bounds and fates of layouts of the uniform space from their simulated plans."""
        own = self.uniform_ns[rows]
        best, mode = own.min(axis=1, initial=np.inf), own.argmin(axis=1)
        simulated = self.simulated[rows, mode] & np.isfinite(best)
        self.bounds_ns[rows] = best
        self.fates[rows[~np.isfinite(best)]] = FATES.index("does_not_fit")
        self.fates[rows[simulated]] = FATES.index("solved")


@dataclass(slots=True)
class CostCache:
    """Constants of at most ``BLOCK`` layouts, by their rows; ``costs_of`` computes them."""

    costs_of: Callable[[LayoutColumns], SearchTable]
    rows: IntArray = field(default_factory=no_rows)
    """Ascending."""
    costs: SearchTable | None = None

    def keep(self, rows: IntArray, costs: SearchTable) -> None:
        """Store constants (rows ascending), unless there are too many."""
        if len(rows) <= BLOCK:
            self.rows, self.costs = rows, costs

    def at(self, space: LayoutSpace, row: int, queue: IntArray) -> RankCosts | ReplicaCosts | ScenarioCosts:
        """Return the constants of a layout; those of the layouts after it in ``queue`` are computed with it."""
        index = int(np.searchsorted(self.rows, row))
        if self.costs is None or index == len(self.rows) or self.rows[index] != row:
            rows = np.array([row])
            ahead = np.flatnonzero(queue == row)
            if len(ahead):
                rows = ascending(queue[ahead[0] : ahead[0] + BLOCK])
            self.rows, self.costs = rows, self.costs_of(space.take(rows))
            index = int(np.searchsorted(rows, row))
        return self.costs.at(index)


@dataclass(slots=True)
class KnownTables:
    """Cost constants of the layouts that a search has bounded, by their rows."""

    problem: Problem
    tables: list[CostTable] = field(default_factory=list)
    table_of: IntArray = field(default_factory=no_rows)
    index_in_table: IntArray = field(default_factory=no_rows)

    def add(self, rows: IntArray, costs: CostTable) -> None:
        """Add the constants of some layouts."""
        missing = int(rows.max(initial=-1)) + 1 - len(self.table_of)
        if missing > 0:
            self.table_of = np.concatenate([self.table_of, np.full(missing, -1)])
            self.index_in_table = np.concatenate([self.index_in_table, np.full(missing, -1)])
        self.table_of[rows], self.index_in_table[rows] = len(self.tables), np.arange(len(rows))
        self.tables.append(costs)

    def steps_ns(self, space: LayoutSpace, rows: IntArray, modes: IntArray) -> FloatArray:
        """Return step times of the uniform plans of layouts, each with the recompute mode of a number, nanoseconds
        [n].

        Infinite where a plan does not fit. Plans with equal schedule, ranks and chunks cost little more together
        than alone.
        """
        distinct, index = np.unique(rows, return_inverse=True)
        asked_modes, column = np.unique(modes, return_inverse=True)
        names = tuple(self.problem.recompute_modes[mode] for mode in asked_modes.tolist())
        costs = together(self.tables, self.table_of[distinct], self.index_in_table[distinct])
        steps = simulate_known(self.problem, space.take(distinct), names, costs)
        return np.where(steps.fits, steps.step_time_ns, np.inf)[index, column]


KEPT_PLANS = 16
"""Capacity of the pool."""
FIRST_CHUNK, FIRST_UNIFORM_CHUNK, CHUNK = 8_192, 2_048, 65_536
"""Number of layouts bounded together: small until there is an incumbent, and smaller in the uniform space, where
bounds are close to the plans' step times."""
CHUNK_GROWTH, SMALL_GROWTH = 8, 2
"""Factor by which the number of layouts bounded together grows; smaller where layouts are relaxed on the way."""
PROMISING = 5000
"""Number of layouts of the free space whose uniform plans are bounded in search of a first incumbent."""
FIRST_PLANS = 12
"""Number of uniform plans simulated for a first incumbent of the free space."""


def with_plan(offered: list[tuple[float, Plan]], value: float, plan: Plan) -> list[tuple[float, Plan]]:
    """Return the pool, sorted by objective, with a plan added.

    The plan is added only if it is among the ``KEPT_PLANS`` best, and the best of its layout.
    """
    if len(offered) >= KEPT_PLANS and value >= offered[-1][0]:
        return offered
    others = []
    for entry in offered:
        if entry[1].layout != plan.layout:
            others.append(entry)
        elif entry[0] <= value:
            return offered
    return sorted([*others, (value, plan)], key=itemgetter(0))[:KEPT_PLANS]


@dataclass(slots=True)
class Search:
    """Run of the search over one layout space.

    The objective is step time (ns) times the layout's weight. ``bound`` gives all layouts closed-form bounds,
    ``solve.decide_layouts`` then decides the layouts that the bounds leave open. With ``scenarios`` all step times
    are scaled steps (``simulation.scenario_costs``), and ``problem`` is the first scenario's.
    """

    problem: Problem
    whole: LayoutSpace
    """The space."""
    context: SolveContext
    started: float
    starts: tuple[Plan, ...] = ()
    """Plans to start from, where the space contains them."""
    keep_below: float = -np.inf
    """Objective below which layouts are explored even if they cannot improve the incumbent
    (``explain.near_best``)."""
    open_rows: IntArray = field(default_factory=no_rows)
    """Layouts that may improve the incumbent. All other layouts of opened groups have objectives of at least
    ``rest_bound``."""
    rest_bound: float = np.inf
    best: tuple[float, Plan] | None = None
    """Incumbent: objective and plan."""
    offered: list[tuple[float, Plan]] = field(default_factory=list)
    """Solution pool: objectives and plans, best first, at most ``KEPT_PLANS`` and one per layout."""
    log: list[Progress] = field(default_factory=list)
    last_log: float = 0.0
    queue: IntArray = field(default_factory=no_rows)
    """Layouts to explore next, in order."""
    promising: IntArray = field(default_factory=no_rows)
    """Layouts whose uniform plans are bounded, and may be simulated next."""
    first_only: bool = False
    """True where the search ends with its first plan."""
    scenarios: Scenarios | None = None
    explored: ExploredLayouts = field(init=False)
    """Layouts that are looked at one by one, and the groups that are not."""
    costs_of: Callable[[LayoutColumns], SearchTable] = field(init=False)
    """Computes the constants of layouts, in every scenario."""
    cost_cache: CostCache = field(init=False)
    step_tables: tuple[KnownTables, ...] = field(init=False)
    """Cost constants by scenario."""

    def __post_init__(self) -> None:
        self.explored = ExploredLayouts(self.problem, self.whole, self.context)
        problems = (self.problem,) if self.scenarios is None else self.scenarios.problems
        self.costs_of = partial(cluster_costs, self.problem) if self.scenarios is None else self.scenarios.table
        self.cost_cache, self.step_tables = CostCache(self.costs_of), tuple(map(KnownTables, problems))

    def open(self, groups: IntArray) -> None:
        """Explore the layouts of some groups one by one."""
        # No layout may be counted twice, or not at all.
        with deferred():
            rows = self.explored.grow(groups)
            fit = rows[self.explored.fates[rows] != FATES.index("does_not_fit")]
            self.open_rows = np.concatenate([self.open_rows, fit])
            self.explored.closed.open(groups)

    def open_all(self) -> None:
        """Explore all layouts whose bound is below the threshold."""
        while len(groups := self._groups(len(self.whole))):
            self.open(groups)

    def _groups(self, layouts: int, below: float = np.inf) -> IntArray:
        """Return the groups to open next, whose bounds are below a value: at least ``layouts`` layouts, or as many
        as the budget allows."""
        capacity = self.context.budget.layouts - len(self.explored.rows)
        if capacity <= 0:
            return np.zeros(0, dtype=np.int64)
        stop = self.context.out_of_time
        return self.explored.closed.first(self.threshold(), min(layouts, capacity), stop, below)

    def _next(self, size: int) -> IntArray:
        """Return the ``size`` layouts with the smallest bounds among those without detailed bounds; open groups
        until there are enough, and no closed group comes before the last."""
        while True:
            rows = self.open_rows[~self.explored.detailed[self.open_rows]]
            rows = self.by_value(rows, self.explored.values(rows))[:size]
            if len(rows) < size:
                # Share of explored layouts that fit, to guess how many to open for ``size`` open rows.
                fit = max(1, len(self.open_rows)) / max(1, len(self.explored.rows))
                groups = self._groups(int((size - len(rows)) / fit))
            else:
                groups = self._groups(size, float(self.explored.values(rows[-1:])[0]))
            if not len(groups):
                return rows
            self.open(groups)

    def _bound(self, rows: IntArray) -> None:
        """Bound layouts with memory and sharding; prune those that do not fit."""
        part = self.explored.space.take(rows)
        costs = self.costs_of(part)
        self.cost_cache.keep(rows, costs)
        if self._simulates_in_batches:
            tables = costs.tables if isinstance(costs, ScenarioTable) else (costs,)
            for known, table in zip(self.step_tables, tables, strict=True):
                assert isinstance(table, CostTable), "all hardware is equal"
                known.add(rows, table)
        if self.problem.space.kind == "uniform":
            self._bound_uniform(rows, part, costs)
        else:
            bounds = cluster_bounds(self.problem, part, costs)
            self.explored.bounds_ns[rows] = np.maximum(self.explored.bounds_ns[rows], bounds.step_time_ns)
            self.explored.memory[rows] = bounds.memory_bytes
            fits = np.flatnonzero(bounds.memory_bytes <= usable_memory_bytes(self.problem))
            best = fits[
                np.argsort((self.explored.bounds_ns * self.explored.weights)[rows[fits]], kind="stable")[
                    :PROMISING
                ]
            ]
            self._bound_uniform(rows[best], part.take(best), costs.take(best))
        self.explored.detailed[rows] = True
        self.explored.fates[rows[self.explored.memory[rows] > usable_memory_bytes(self.problem)]] = FATES.index(
            "does_not_fit"
        )

    def _bound_uniform(self, rows: IntArray, part: LayoutColumns, costs: SearchTable) -> None:
        """Bound the uniform plans of some layouts; in the uniform space these bounds are the layouts' bounds."""
        uniform = cluster_uniform_bounds(self.problem, part, costs)
        fits = uniform.memory_bytes <= usable_memory_bytes(self.problem)
        self.explored.uniform_ns[rows] = np.where(fits, uniform.step_time_ns, np.inf)
        self.promising = np.concatenate([self.promising, rows[fits.any(axis=1)]])
        if self.problem.space.kind == "uniform":
            self.explored.memory[rows] = uniform.memory_bytes.min(axis=1)
            self.explored.bounds_ns[rows] = np.where(
                fits.any(axis=1), self.explored.uniform_ns[rows].min(axis=1), np.inf
            )

    def bound(self, relax: Callable[[float], None] | None = None) -> None:
        """Evaluate the start plans and bound all layouts in closed form.

        First all layouts get a bound from compute alone. Then memory and sharding count, in the order of these
        bounds, and uniform plans are simulated on the way as incumbents. The loop ends when the compute time of
        every layout left is above the incumbent.

        ``relax``: called with a value on the way, to raise bounds of layouts below it; no layout that is yet to be
        bounded has a smaller bound.
        """
        self._warm_start()
        closed = self.explored.closed
        if not closed.bounded and closed.are_few:
            closed.split_blocks()
        elif not closed.bounded:
            closed.bound_blocks(self.context.out_of_time)
        if self.best is not None:
            self.note(force=True)
        uniform = self.problem.space.kind == "uniform"
        # Where layouts are relaxed on the way, small steps keep to the order of the bounds.
        small, growth = uniform or relax is not None, CHUNK_GROWTH if relax is None else SMALL_GROWTH
        size = FIRST_UNIFORM_CHUNK if small else FIRST_CHUNK
        while not self.is_over():
            rows = self._next(size)
            if not len(rows):
                break
            self._bound(np.sort(rows))
            self._drop_bounded()
            if relax is not None:
                left = self.open_rows[~self.explored.detailed[self.open_rows]]
                relax(float(self.explored.values(left).min(initial=closed.bound)))
            size = min(CHUNK, growth * size)
            if uniform:
                rows = self.open_rows[~self.explored.detailed[self.open_rows]]
                any_open = (self.explored.values(rows) < self.threshold()).any()
                if not any_open and not self.explored.closed.closed_below(self.threshold()):
                    # All plans are simulated in their order from here on.
                    break
            self.simulate_uniform_plans(FIRST_PLANS)

    def is_over(self) -> bool:
        """Return True once the time limit has passed, or once a first plan is found and no other is wanted."""
        return self.context.out_of_time() or (self.first_only and self.best is not None)

    @property
    def best_value(self) -> float:
        """Objective of the incumbent; infinite without an incumbent."""
        return self.best[0] if self.best else np.inf

    def global_bound(self) -> float:
        """Return the proved lower bound over all layouts."""
        return min(
            float(self.explored.values(self.open_rows).min(initial=self.rest_bound)), self.explored.closed.bound
        )

    def prune_record(self) -> PruneRecord:
        """Return every layout's bound and what decided it."""
        explored = slice(len(self.explored.rows))
        values, fates = self.explored.values(explored), self.explored.fates[explored].copy()
        undecided = (fates == FATES.index("open")) & (values >= self.threshold())
        fates[undecided] = FATES.index("bounded")
        best = self.best_value if self.best else None
        parts = self.problem, self.whole, self.explored.rows, values, fates, self.explored.closed
        return PruneRecord(*parts, self.threshold(), best, self.context.known_paths)

    def threshold(self) -> float:
        """Return the objective from which on a bound prunes: such layouts cannot improve the incumbent by more
        than the gap."""
        return float(threshold(self.best_value, self.context.options.gap, self.keep_below))

    def offer(self, plan: Plan, step_time_ns: int, weight: float, limit_ns: float) -> None:
        """Add a simulated plan that fits to the solution pool, and make it the incumbent if it is better.

        Args:
            plan: the plan.
            step_time_ns: its exact step time.
            weight: factor from step time to objective.
            limit_ns: longest admissible step.
        """
        if step_time_ns > limit_ns:
            return
        value = step_time_ns * weight
        if not self.context.options.forbid:
            plan = with_used_modules(self.problem, plan)
        self.offered = with_plan(self.offered, value, plan)
        if value < self.best_value:
            self.best = (value, plan)
            self._drop_bounded()
            self.note(force=True)

    def _drop_bounded(self) -> None:
        """Drop open layouts that cannot improve the incumbent: there may be millions of them."""
        values = self.explored.values(self.open_rows)
        keep = values < self.threshold()
        self.rest_bound = float(values[~keep].min(initial=self.rest_bound))
        self.open_rows = self.open_rows[keep]

    def note(self, force: bool = False, tell: bool = True) -> None:
        """Log the progress and, if ``tell``, call the callback: at most twice a second unless ``force`` is set."""
        now = time.monotonic() - self.started
        # Before the layouts have bounds there is no bound to report.
        if (not force and now - self.last_log < 0.5) or (tell and not self.explored.closed.bounded):
            return
        self.last_log = now
        bound = self.global_bound()
        # Layouts outside ``open_rows`` are decided; ``result`` counts the same number of open layouts.
        undecided = (self.explored.fates == 0)[self.open_rows] & (
            self.explored.values(self.open_rows) < self.threshold()
        )
        open_layouts = int(undecided.sum()) + self.explored.closed.closed_below(self.threshold())
        scale = progress_unit(self.problem)
        incumbent = self.best_value * scale if self.best else None
        proved = bound * scale if 0 < bound < np.inf else None
        progress = Progress(now, incumbent, proved, open_layouts)
        self.log.append(progress)
        if tell and self.context.options.callback is not None:
            self.context.options.callback(progress)

    def by_value(self, rows: IntArray, values: FloatArray) -> IntArray:
        """Return the rows whose value can improve the incumbent, smallest value first."""
        hopeful = values < self.threshold()
        rows, values = rows[hopeful], values[hopeful]
        return np.asarray(rows[np.argsort(values, kind="stable")])

    def simulate_uniform_plans(self, max_plans: int) -> None:
        """Simulate at most ``max_plans`` uniform plans in the order of their bounds. In the uniform space this
        decides every layout."""
        modes = self.problem.recompute_modes
        known = np.sort(self.promising)
        step_ns = np.where(self.explored.simulated[known], np.inf, self.explored.uniform_ns[known])
        values = step_ns * self.explored.weights[known, None]
        values = np.where(step_ns <= self.explored.limits_ns[known, None], values, np.inf)
        below = values < self.threshold()
        self.promising = known[below.any(axis=1)]
        number, mode_indices = np.nonzero(below)
        rows, values = known[number], values[below]
        order = self.by_value(np.arange(len(rows)), values)[:max_plans]
        self.queue = rows[order]
        if self._simulates_in_batches:
            self._simulate_in_batches(rows[order], mode_indices[order], values[order])
            return
        for index in order:
            if values[index] >= self.threshold() or self.is_over():
                break
            row, mode = int(rows[index]), int(mode_indices[index])
            layout = self.explored.space.at(row)
            step = None
            # Stages of ceil(L / J) layers may use up more than all layers before the last stage.
            if has_uniform_plan(self.problem.model, layout.num_virtual_stages):
                step = self.evaluate(row, uniform_plan(self.problem, layout, modes[mode]))
            self.explored.uniform_ns[row, mode] = np.inf if step is None else step
            self.explored.simulated[row, mode] = True
            if self.problem.space.kind == "uniform":
                self.explored.decide(np.array([row]))
            self.note()

    @property
    def _simulates_in_batches(self) -> bool:
        """True where uniform plans are simulated in batches: in the uniform space, with one node type."""
        alike = not self.problem.other_hardware
        return alike and self.problem.space.kind == "uniform" and not self.first_only

    def _simulate_in_batches(self, rows: IntArray, mode_indices: IntArray, values: FloatArray) -> None:
        """Simulate plans in batches, in the given order, which is that of their bounds ``values`` [n].

        The set of simulated plans is the set that a loop over single plans would simulate.
        """
        start, size = 0, FIRST_BATCH
        while not self.is_over():
            end = min(start + size, int(np.searchsorted(values, self.threshold())))
            if end <= start:
                break
            own, modes = rows[start:end], mode_indices[start:end]
            steps = self._steps_ns(own, modes)
            objective = np.where(steps <= self.explored.limits_ns[own], steps * self.explored.weights[own], np.inf)
            # Incumbent before each of the plans, as if they were simulated singly.
            before = np.minimum.accumulate(np.concatenate([[self.best_value], objective]))[:-1]
            below = values[start:end] < threshold(before, self.context.options.gap, self.keep_below)
            count = len(below) if below.all() else int(below.argmin())
            self._record_steps(own[:count], modes[:count], steps[:count])
            self.note()
            start, size = start + count, min(MAX_BATCH, GROWTH * size)

    def _steps_ns(self, rows: IntArray, modes: IntArray) -> FloatArray:
        """Return step times of uniform plans (``KnownTables.steps_ns``), scaled if there are scenarios."""
        steps = [known.steps_ns(self.explored.space, rows, modes) for known in self.step_tables]
        if self.scenarios is None:
            return steps[0]
        scaled = [scale.up_array(own) for scale, own in zip(self.scenarios.scales, steps, strict=True)]
        return np.asarray(np.maximum.reduce(scaled))

    def _record_steps(self, rows: IntArray, modes: IntArray, steps: FloatArray) -> None:
        """Store simulated steps (infinite where a plan does not fit), and offer the fastest plans."""
        self.context.counters.simulations += int(np.isfinite(steps).sum())
        self.explored.uniform_ns[rows, modes] = steps
        self.explored.simulated[rows, modes] = True
        self.explored.decide(rows)
        values = steps * self.explored.weights[rows]
        for index in np.argsort(values, kind="stable").tolist():
            # Fastest first, so that few plans are built and then not kept.
            full = len(self.offered) >= KEPT_PLANS and values[index] >= self.offered[-1][0]
            if full or not np.isfinite(steps[index]):
                break
            row, mode = int(rows[index]), self.problem.recompute_modes[modes[index]]
            plan = uniform_plan(self.problem, self.explored.space.at(row), mode)
            self.offer(
                plan, int(steps[index]), float(self.explored.weights[row]), float(self.explored.limits_ns[row])
            )

    def evaluate(self, row: int, plan: Plan) -> int | None:
        """Simulate and offer a plan of a layout. Returns its exact step time in ns, or None if it does not fit."""
        step = fitting_step_ns(self.problem, plan, self.cost_cache.at(self.explored.space, row, self.queue))
        if step is None:
            return None
        self.context.counters.simulations += 1
        self.offer(plan, step, float(self.explored.weights[row]), float(self.explored.limits_ns[row]))
        return step

    def _warm_start(self) -> None:
        """Offer the start plans whose layouts are in the space."""
        for plan in self.starts:
            if self.whole.find(plan.layout) is None or not in_space(self.problem, plan):
                continue
            layout = LayoutColumns.of([plan.layout])
            step = fitting_step_ns(self.problem, plan, self.costs_of(layout).at(0))
            if step is not None:
                self.context.counters.simulations += 1
                weights, limits_ns = objective_weights(self.problem, layout)
                self.offer(plan, step, float(weights[0]), float(limits_ns[0]))
