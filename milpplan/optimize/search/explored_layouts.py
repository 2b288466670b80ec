"""Node store of the search: bounds, fates and cost constants of the layouts that it explores one by one."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from milpplan.optimize.bounds.closed_form import SAFETY
from milpplan.optimize.context import SolveContext
from milpplan.optimize.search.candidate_layouts import CandidateLayouts
from milpplan.optimize.search.prune_reasons import FATES
from milpplan.optimize.space.layout_space import LayoutSpace
from milpplan.problem.problem import Problem
from milpplan.simulation.bulk.simulate_many import simulate_known, together
from milpplan.simulation.layout_columns import BoolArray, FloatArray, IntArray, ascending
from milpplan.simulation.layout_costs import CostTable, usable_memory_bytes
from milpplan.simulation.mixed_costs import AnyTable, RankCosts, cluster_costs
from milpplan.simulation.replica_costs import ReplicaCosts
from milpplan.simulation.states import least_held_bytes

BLOCK = 2048
"""Number of layouts whose constants are computed together."""
FIRST_BATCH, MAX_BATCH = 48, 1024
"""Number of plans simulated together: in the first batch, and at most."""
GROWTH = 16
"""Growth factor of the batches: the first plans may prune nearly all others."""


@dataclass(slots=True)
class ExploredLayouts:
    """Layouts of opened groups, in the order in which they were opened (struct of arrays; all arrays are [n])."""

    problem: Problem
    whole: LayoutSpace
    context: SolveContext
    frontier: CandidateLayouts = field(init=False)
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
        self.frontier = CandidateLayouts(self.problem, self.whole, self.context.budget)
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
        opened = self.frontier.layouts(groups)
        start, count = len(self.rows), len(opened.rows)
        state_bytes = self._held_bytes(opened.rows)
        too_large = state_bytes > usable_memory_bytes(self.problem)
        self.weights = np.concatenate([self.weights, opened.weights])
        self.limits_ns = np.concatenate([self.limits_ns, opened.limits_ns])
        self.bounds_ns = np.concatenate([self.bounds_ns, opened.bounds_ns])
        fates = np.where(too_large, FATES.index("does_not_fit"), FATES.index("open")).astype(np.int8)
        self.memory, self.fates = np.concatenate([self.memory, state_bytes]), np.concatenate([self.fates, fates])
        self.detailed, self.simulated = (
            np.concatenate([old, np.zeros((count, *old.shape[1:]), dtype=old.dtype)])
            for old in (self.detailed, self.simulated)
        )
        self.uniform_ns = np.concatenate([self.uniform_ns, np.full((count, self.uniform_ns.shape[1]), np.inf)])
        rows = np.concatenate([self.rows, opened.rows])
        self.space = self.whole.only(rows)
        self.rows = rows
        return np.arange(start, start + count)

    def _held_bytes(self, rows: IntArray) -> FloatArray:
        """Return lower bounds of the layers' states on the fullest rank, bytes, [n], by rows of the whole space;
        zeros where node types differ."""
        if self.problem.other_hardware:
            return np.zeros(len(rows))
        return np.asarray(least_held_bytes(self.problem, self.whole.take(rows)) * SAFETY)

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
    """Constants of at most ``BLOCK`` layouts, by their rows."""

    problem: Problem
    rows: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Ascending."""
    costs: AnyTable | None = None

    def keep(self, rows: IntArray, costs: AnyTable) -> None:
        """Store constants (rows ascending), unless there are too many."""
        if len(rows) <= BLOCK:
            self.rows, self.costs = rows, costs

    def at(self, space: LayoutSpace, row: int, queue: IntArray) -> RankCosts | ReplicaCosts:
        """Return the constants of a layout; those of the layouts after it in ``queue`` are computed with it."""
        index = int(np.searchsorted(self.rows, row))
        if self.costs is None or index == len(self.rows) or self.rows[index] != row:
            rows = np.array([row])
            ahead = np.flatnonzero(queue == row)
            if len(ahead):
                rows = ascending(queue[ahead[0] : ahead[0] + BLOCK])
            self.rows, self.costs = rows, cluster_costs(self.problem, space.take(rows))
            index = int(np.searchsorted(rows, row))
        return self.costs.at(index)


@dataclass(slots=True)
class KnownTables:
    """Cost constants of the layouts that a search has bounded, by their rows."""

    problem: Problem
    tables: list[CostTable] = field(default_factory=list)
    table_of: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    index_in_table: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

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
