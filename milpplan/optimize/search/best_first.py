"""Best-first search over layouts: each is proved worse than the incumbent, or improves it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from milpplan.optimize.bounds.cost_cache import CostCache
from milpplan.optimize.bounds.mixed_clusters import cluster_bounds, cluster_uniform_bounds
from milpplan.optimize.bounds.uniform_plans import uniform_plan
from milpplan.optimize.bounds.uniform_steps import FIRST, GROWTH, MOST, KnownTables
from milpplan.optimize.layout.evaluation import fitting_step_ns
from milpplan.optimize.milp.solution import deferred
from milpplan.optimize.objective import objective_weights, threshold
from milpplan.optimize.result import Progress
from milpplan.optimize.search.explored_layouts import ExploredLayouts
from milpplan.optimize.search.prune_reasons import FATES, PruneRecord
from milpplan.optimize.search.solution_pool import KEPT_PLANS, with_plan
from milpplan.optimize.space.membership import in_space
from milpplan.problem.plan import Plan
from milpplan.simulation.layout_columns import FloatArray, IntArray, LayoutColumns
from milpplan.simulation.layout_costs import CostTable, usable_memory_bytes
from milpplan.simulation.mixed_costs import AnyTable, cluster_costs
from milpplan.units import NS_PER_S

FIRST_CHUNK, FIRST_UNIFORM_CHUNK, CHUNK = 8_192, 2_048, 65_536
"""Layouts bounded together: few until there is an incumbent, fewer where bounds are near the plans' steps."""
CHUNK_GROWTH = 8
"""Each time so many times as many as the time before."""
PROMISING = 5000
"""Layouts of the free space whose uniform plans are looked at for a first incumbent."""
FIRST_PLANS = 12
"""Uniform plans simulated for a first incumbent of the free space."""


@dataclass(slots=True)
class Search(ExploredLayouts):
    """One run over a layout space. Objective = step time (ns) * weight of the layout."""

    started: float
    starts: tuple[Plan, ...] = ()
    """Plans to start from, where the space has them."""
    keep_below: float = -np.inf
    """Layouts with bounds below this are looked at, even if they cannot improve the incumbent."""
    candidates: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Layouts that may improve the incumbent; all others of opened groups have objectives from ``rest_bound``
    on."""
    rest_bound: float = np.inf
    best: tuple[float, Plan] | None = None
    offered: list[tuple[float, Plan]] = field(default_factory=list)
    """The fastest plans offered, at most ``KEPT_PLANS`` and one a layout, in order."""
    log: list[Progress] = field(default_factory=list)
    last_log: float = 0.0
    queue: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Layouts about to be looked at, in order."""
    first_only: bool = False
    """True where the search ends with its first plan."""
    known: CostCache = field(init=False)
    tables: KnownTables = field(init=False)

    def __post_init__(self) -> None:
        ExploredLayouts.__post_init__(self)
        self.known, self.tables = CostCache(self.problem), KnownTables(self.problem)

    def open(self, groups: IntArray) -> None:
        """Look at the layouts of some groups one by one."""
        # No layout may be counted twice, or not at all.
        with deferred():
            rows = self.grow(groups)
            fit = rows[self.fates[rows] != FATES.index("does_not_fit")]
            self.candidates = np.concatenate([self.candidates, fit])
            self.frontier.open(groups)

    def open_all(self) -> None:
        """Look at all layouts that may be below the threshold."""
        while len(groups := self._groups(len(self.whole))):
            self.open(groups)

    def _groups(self, layouts: int) -> IntArray:
        """The groups to open next, with so many layouts or more, or as many as there is room for."""
        room = self.context.budget.layouts - len(self.rows)
        if room <= 0:
            return np.zeros(0, dtype=np.int64)
        return self.frontier.first(self.threshold(), min(layouts, room), self.context.out_of_time)

    def _bound_all(self) -> None:
        """Bounds with memory and sharding, in the order of the bounds without them, and uniform plans as
        incumbents on the way; until whatever is left computes for longer than the incumbent takes."""
        size = FIRST_UNIFORM_CHUNK if self.problem.space.kind == "uniform" else FIRST_CHUNK
        while not self.is_over():
            rows = self._next(size)
            if not len(rows):
                break
            self._bound(np.sort(rows))
            size = min(CHUNK, CHUNK_GROWTH * size)
            if self.problem.space.kind == "uniform" and not self._any_left():
                # All plans are simulated in their order from here on.
                break
            self._uniform(FIRST_PLANS)

    def _any_left(self) -> bool:
        """Whether layouts without bounds with memory and sharding may improve the incumbent."""
        rows = self.candidates[~self.detailed[self.candidates]]
        below = (self.values(rows) < self.threshold()).any()
        return bool(below) or self.frontier.closed_below(self.threshold()) > 0

    def _next(self, size: int) -> IntArray:
        """The layouts with the least bounds among those that have none with memory and sharding; groups are opened
        until there are so many."""
        while True:
            rows = self.candidates[~self.detailed[self.candidates]]
            rows = self.by_value(rows, self.values(rows))
            # As many as it takes if as few of them fit as of those before.
            fit = max(1, len(self.candidates)) / max(1, len(self.rows))
            groups = self._groups(int((size - len(rows)) / fit))
            if len(rows) >= size or not len(groups):
                return rows[:size]
            self.open(groups)

    def _bound(self, rows: IntArray) -> None:
        part = self.space.take(rows)
        costs = cluster_costs(self.problem, part)
        self.known.keep(rows, costs)
        if self._in_bulk and isinstance(costs, CostTable):
            self.tables.add(rows, costs)
        if self.problem.space.kind == "uniform":
            self._bound_uniform(rows, part, costs)
        else:
            bounds = cluster_bounds(self.problem, part, costs)
            self.bounds_ns[rows] = np.maximum(self.bounds_ns[rows], bounds.step_time_ns)
            self.memory[rows] = bounds.memory_bytes
            fits = np.flatnonzero(bounds.memory_bytes <= usable_memory_bytes(self.problem))
            best = fits[np.argsort((self.bounds_ns * self.weights)[rows[fits]], kind="stable")[:PROMISING]]
            self._bound_uniform(rows[best], part.take(best), costs.take(best))
        self.detailed[rows] = True
        self.fates[rows[self.memory[rows] > usable_memory_bytes(self.problem)]] = FATES.index("does_not_fit")

    def _bound_uniform(self, rows: IntArray, part: LayoutColumns, costs: AnyTable) -> None:
        """Bounds of the uniform plans of some layouts; in the uniform space they are the layouts' bounds."""
        uniform = cluster_uniform_bounds(self.problem, part, costs)
        fits = uniform.memory_bytes <= usable_memory_bytes(self.problem)
        self.uniform_ns[rows] = np.where(fits, uniform.step_time_ns, np.inf)
        if self.problem.space.kind == "uniform":
            self.memory[rows] = uniform.memory_bytes.min(axis=1)
            self.bounds_ns[rows] = np.where(fits.any(axis=1), self.uniform_ns[rows].min(axis=1), np.inf)

    @property
    def scale(self) -> float:
        """From the search's objective to the log's: seconds of step time, or GPU-hours."""
        return 1.0 if self.problem.job.objective == "gpu_hours" else 1.0 / NS_PER_S

    def run(self) -> None:
        """Until every layout is decided, or the time limit."""
        self.bound()
        if self.problem.space.kind == "uniform":
            self._uniform(self.uniform_ns.size)
        else:
            # What it takes to solve for layouts is half of all imports.
            from milpplan.optimize.search.branch_phase import BranchPhase

            BranchPhase.of(self).run()
        self.note(force=True)

    def bound(self) -> None:
        """The plans to start from, and closed-form bounds of all layouts."""
        self._warm_start()
        self.frontier.prepare(self.context.out_of_time)
        if self.best is not None:
            self.note(force=True)
        self._bound_all()

    def is_over(self) -> bool:
        """Tell whether the time limit has passed, or a plan is there and no other is wanted."""
        return self.context.out_of_time() or (self.first_only and self.best is not None)

    @property
    def best_value(self) -> float:
        """Incumbent objective, infinite without one."""
        return self.best[0] if self.best else np.inf

    def global_bound(self) -> float:
        """Proved lower bound over all layouts."""
        return min(float(self.values(self.candidates).min(initial=self.rest_bound)), self.frontier.bound)

    def _narrow(self) -> None:
        """Leave out the layouts that cannot improve the incumbent: there may be millions of them."""
        values = self.values(self.candidates)
        keep = values < self.threshold()
        self.rest_bound = float(values[~keep].min(initial=self.rest_bound))
        self.candidates = self.candidates[keep]

    def result(self) -> PruneRecord:
        """The certificate."""
        known = slice(len(self.rows))
        values, fates = self.values(known), self.fates[known].copy()
        undecided = (fates == FATES.index("open")) & (values >= self.threshold())
        fates[undecided] = FATES.index("bounded")
        best = self.best_value if self.best else None
        found = self.problem, self.whole, self.rows, values, fates, self.frontier
        return PruneRecord(*found, self.threshold(), best)

    def threshold(self) -> float:
        """Layouts with a bound from here on cannot improve the incumbent by more than the gap."""
        return float(self._thresholds(self.best_value))

    def _thresholds(self, best: FloatArray | float) -> FloatArray:
        """The same of any incumbent's objective."""
        return threshold(best, self.context.options.gap, self.keep_below)

    def offer(self, row: int, step_time_ns: int, plan: Plan) -> None:
        """Take a plan of a layout that was simulated and fits as incumbent, if it is better."""
        self._offer(float(self.weights[row]), float(self.limits_ns[row]), step_time_ns, plan)

    def _offer(self, weight: float, limit_ns: float, step_time_ns: int, plan: Plan) -> None:
        value = step_time_ns * weight
        if step_time_ns <= limit_ns:
            self.offered = with_plan(self.offered, value, plan)
        if value < self.best_value and step_time_ns <= limit_ns:
            self.best = (value, plan)
            self._narrow()
            self.note(force=True)

    def note(self, force: bool = False, tell: bool = True) -> None:
        """Log the progress, and tell it, twice a second at most unless by ``force``."""
        now = time.monotonic() - self.started
        # Before the layouts have bounds there is nothing to tell of them.
        if (not force and now - self.last_log < 0.5) or (tell and not self.frontier.bounded):
            return
        self.last_log = now
        bound = self.global_bound()
        # The layouts that are no candidates are decided: so many are open in ``result`` too.
        undecided = (self.fates == 0)[self.candidates] & (self.values(self.candidates) < self.threshold())
        open_layouts = int(undecided.sum()) + self.frontier.closed_below(self.threshold())
        incumbent = self.best_value * self.scale if self.best else None
        proved = bound * self.scale if 0 < bound < np.inf else None
        progress = Progress(now, incumbent, proved, open_layouts)
        self.log.append(progress)
        if tell and self.context.options.callback is not None:
            self.context.options.callback(progress)

    def by_value(self, rows: IntArray, values: FloatArray) -> IntArray:
        """The rows whose value can improve the incumbent, least first."""
        hopeful = values < self.threshold()
        rows, values = rows[hopeful], values[hopeful]
        return np.asarray(rows[np.argsort(values, kind="stable")])

    def _uniform(self, most: int) -> None:
        """Simulate uniform plans in the order of their bounds. In the uniform space this decides every layout."""
        modes = self.problem.recompute_modes
        rows, places = np.nonzero(np.isfinite(self.uniform_ns) & ~self.simulated)
        step_ns = self.uniform_ns[rows, places]
        values = np.where(step_ns <= self.limits_ns[rows], step_ns * self.weights[rows], np.inf)
        order = self.by_value(np.arange(len(rows)), values)[:most]
        self.queue = rows[order]
        if self._in_bulk:
            self._in_batches(rows[order], places[order], values[order])
            return
        for index in order:
            if values[index] >= self.threshold() or self.is_over():
                break
            row, mode = int(rows[index]), int(places[index])
            step = self._simulate(row, modes[mode])
            self.uniform_ns[row, mode] = np.inf if step is None else step
            self.simulated[row, mode] = True
            if self.problem.space.kind == "uniform":
                self.decide(np.array([row]))
            self.note()

    @property
    def _in_bulk(self) -> bool:
        """Whether uniform plans are priced many at once: all that are looked at are plans, and all ranks alike."""
        alike = not self.problem.other_hardware
        return alike and self.problem.space.kind == "uniform" and not self.first_only

    def _in_batches(self, rows: IntArray, places: IntArray, values: FloatArray) -> None:
        """Simulate plans in the order given, which is that of their bounds ``values`` [n], as one by one."""
        start, size = 0, FIRST
        while not self.is_over():
            end = min(start + size, int(np.searchsorted(values, self.threshold())))
            if end <= start:
                break
            own, modes = rows[start:end], places[start:end]
            steps = self.tables.steps_ns(self.space, own, modes)
            objective = np.where(steps <= self.limits_ns[own], steps * self.weights[own], np.inf)
            # The threshold before each of them.
            before = np.minimum.accumulate(np.concatenate([[self.best_value], objective]))[:-1]
            below = values[start:end] < self._thresholds(before)
            count = len(below) if below.all() else int(below.argmin())
            self._take_up(own[:count], modes[:count], steps[:count])
            self.note()
            start, size = start + count, min(MOST, GROWTH * size)

    def _take_up(self, rows: IntArray, places: IntArray, steps: FloatArray) -> None:
        """Write down the steps of plans that were simulated (infinite: it does not fit), and offer those among the
        fastest as incumbents."""
        self.context.counters.simulations += int(np.isfinite(steps).sum())
        self.uniform_ns[rows, places] = steps
        self.simulated[rows, places] = True
        self.decide(rows)
        values = steps * self.weights[rows]
        for place in np.argsort(values, kind="stable").tolist():
            # The fastest first: hardly any plan is made that is not kept.
            full = len(self.offered) >= KEPT_PLANS and values[place] >= self.offered[-1][0]
            if full or not np.isfinite(steps[place]):
                break
            row, mode = int(rows[place]), self.problem.recompute_modes[places[place]]
            self.offer(row, int(steps[place]), uniform_plan(self.problem, self.space.at(row), mode))

    def _simulate(self, row: int, mode: str) -> int | None:
        """Exact step time of a uniform plan, offered as incumbent; None if it does not fit."""
        layout = self.space.at(row)
        stages = layout.num_virtual_stages
        layers = self.problem.model.num_layers
        if layers - -(-layers // stages) * (stages - 1) < 0:
            return None
        plan = uniform_plan(self.problem, layout, mode)
        return self.evaluate(row, plan)

    def evaluate(self, row: int, plan: Plan) -> int | None:
        """Exact step time of a plan of a layout, offered as incumbent; None if it does not fit."""
        step = fitting_step_ns(self.problem, plan, self.known.at(self.space, row, self.queue))
        if step is None:
            return None
        self.context.counters.simulations += 1
        self.offer(row, step, plan)
        return step

    def _warm_start(self) -> None:
        """The plans to start from whose layouts are in the space."""
        for plan in self.starts:
            if self.whole.find(plan.layout) is None or not in_space(self.problem, plan):
                continue
            layout = LayoutColumns.of([plan.layout])
            step = fitting_step_ns(self.problem, plan, cluster_costs(self.problem, layout).at(0))
            if step is not None:
                self.context.counters.simulations += 1
                weight, limit_ns = (float(values[0]) for values in objective_weights(self.problem, layout))
                self._offer(weight, limit_ns, step, plan)
