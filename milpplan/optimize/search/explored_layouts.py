"""What a search knows of the layouts that it looks at one by one."""

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
    """Layouts of opened groups, by rows in the order in which they were opened: all arrays are of these, [n]."""

    problem: Problem
    whole: LayoutSpace
    context: SolveContext
    frontier: CandidateLayouts = field(init=False)
    """The groups of layouts that are not looked at one by one: no arrays hold them."""
    space: LayoutSpace = field(init=False)
    """The layouts that are."""
    rows: IntArray = field(init=False)
    """Their rows in the whole space."""
    weights: FloatArray = field(init=False)
    limits_ns: FloatArray = field(init=False)
    bounds_ns: FloatArray = field(init=False)
    memory: FloatArray = field(init=False)
    """Lower bounds of the peak, bytes; of the layers' states alone where not ``detailed``."""
    detailed: BoolArray = field(init=False)
    """Layouts whose bound takes memory and sharding into account."""
    fates: npt.NDArray[np.int8] = field(init=False)
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
        """Look at the layouts of some groups one by one; returns their rows.

        Memory may run out between any two lines: the arrays grow first, and ``rows``, which says how much of them
        counts, last. The groups stay closed until the caller opens them: so no bound ever leaves a layout out.
        """
        found = self.frontier.layouts(groups)
        start, count = len(self.rows), len(found.rows)
        held = self._held_bytes(found.rows)
        too_large = held > usable_memory_bytes(self.problem)
        self.weights = np.concatenate([self.weights, found.weights])
        self.limits_ns = np.concatenate([self.limits_ns, found.limits_ns])
        self.bounds_ns = np.concatenate([self.bounds_ns, found.bounds_ns])
        fates = np.where(too_large, FATES.index("does_not_fit"), FATES.index("open")).astype(np.int8)
        self.memory, self.fates = np.concatenate([self.memory, held]), np.concatenate([self.fates, fates])
        self.detailed, self.simulated = (
            np.concatenate([old, np.zeros((count, *old.shape[1:]), dtype=old.dtype)])
            for old in (self.detailed, self.simulated)
        )
        self.uniform_ns = np.concatenate([self.uniform_ns, np.full((count, self.uniform_ns.shape[1]), np.inf)])
        rows = np.concatenate([self.rows, found.rows])
        self.space = self.whole.only(rows)
        self.rows = rows
        return np.arange(start, start + count)

    def _held_bytes(self, rows: IntArray) -> FloatArray:
        """What the states of layers alone fill of the fullest rank's device at least, by rows of the whole space,
        [n]; nothing where the node types differ."""
        if self.problem.other_hardware:
            return np.zeros(len(rows))
        return np.asarray(least_held_bytes(self.problem, self.whole.take(rows)) * SAFETY)

    def values(self, rows: IntArray | slice = slice(None)) -> FloatArray:
        """Proved lower bound of the layouts' objective; infinite where no plan fits or meets the deadline."""
        value = self.bounds_ns[rows] * self.weights[rows]
        value = np.where(self.bounds_ns[rows] > self.limits_ns[rows], np.inf, value)
        return np.where(self.fates[rows] == FATES.index("does_not_fit"), np.inf, value)

    def least_memory(self) -> float | None:
        """Least peak (a proved lower bound, bytes) over all layouts; None where some were never asked."""
        all_ = len(self.rows) == len(self.whole) and self.detailed.all()
        return float(self.memory.min()) if len(self.memory) and all_ else None

    def decide(self, rows: IntArray) -> None:
        """Bounds and fates of layouts of the uniform space from their plans."""
        own = self.uniform_ns[rows]
        best, place = own.min(axis=1, initial=np.inf), own.argmin(axis=1)
        simulated = self.simulated[rows, place] & np.isfinite(best)
        self.bounds_ns[rows] = best
        self.fates[rows[~np.isfinite(best)]] = FATES.index("does_not_fit")
        self.fates[rows[simulated]] = FATES.index("solved")
