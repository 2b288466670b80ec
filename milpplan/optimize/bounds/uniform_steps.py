"""Exact steps of uniform plans in a search, simulated in batches with the constants that bounded them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from milpplan.optimize.space.layout_space import LayoutSpace
from milpplan.problem.problem import Problem
from milpplan.simulation.bulk.simulate_many import simulate_known, together
from milpplan.simulation.layout_columns import FloatArray, IntArray
from milpplan.simulation.layout_costs import CostTable

FIRST_BATCH, MAX_BATCH = 48, 1024
"""Number of plans simulated together: in the first batch, and at most."""
GROWTH = 16
"""Growth factor of the batches: the first plans may prune nearly all others."""


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
