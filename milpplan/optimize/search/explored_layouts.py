"""Node store of the search: bounds and fates of the layouts that it explores one by one."""

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
from milpplan.simulation.layout_columns import BoolArray, FloatArray, IntArray
from milpplan.simulation.layout_costs import usable_memory_bytes
from milpplan.simulation.states import least_held_bytes


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
