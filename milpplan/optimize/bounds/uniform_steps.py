"""Exact steps of uniform plans of a search, many of them priced at once with the constants that bounded them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from milpplan.optimize.space.layout_space import LayoutSpace
from milpplan.problem.problem import Problem
from milpplan.simulation.bulk.simulate_many import simulate_known, together
from milpplan.simulation.layout_columns import FloatArray, IntArray
from milpplan.simulation.layout_costs import CostTable

FIRST, MOST = 48, 1024
"""Plans priced at once."""
GROWTH = 16
"""Each time so many times as many as the time before: the first plans may leave few others to look at."""


@dataclass(slots=True)
class KnownTables:
    """Constants of the layouts that a search has bounded, by their rows."""

    problem: Problem
    tables: list[CostTable] = field(default_factory=list)
    table: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    place: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def add(self, rows: IntArray, costs: CostTable) -> None:
        """Remember the constants of some layouts."""
        missing = int(rows.max(initial=-1)) + 1 - len(self.table)
        if missing > 0:
            self.table = np.concatenate([self.table, np.full(missing, -1)])
            self.place = np.concatenate([self.place, np.full(missing, -1)])
        self.table[rows], self.place[rows] = len(self.tables), np.arange(len(rows))
        self.tables.append(costs)

    def steps_ns(self, space: LayoutSpace, rows: IntArray, modes: IntArray) -> FloatArray:
        """Step times of the uniform plans of layouts, each with the recompute mode of a number, nanoseconds [n];
        infinite where a plan does not fit. Plans of one schedule, ranks and chunks cost little more together than
        alone."""
        distinct, place = np.unique(rows, return_inverse=True)
        asked, column = np.unique(modes, return_inverse=True)
        names = tuple(self.problem.recompute_modes[mode] for mode in asked.tolist())
        costs = together(self.tables, self.table[distinct], self.place[distinct])
        found = simulate_known(self.problem, space.take(distinct), names, costs)
        return np.where(found.fits, found.step_time_ns, np.inf)[place, column]
