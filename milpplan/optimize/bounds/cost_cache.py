"""Cache of the cost constants of single layouts, computed together with those of the layouts that follow."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from milpplan.optimize.space.layout_space import LayoutSpace
from milpplan.problem.problem import Problem
from milpplan.simulation.layout_columns import IntArray, ascending
from milpplan.simulation.mixed_costs import AnyTable, RankCosts, cluster_costs
from milpplan.simulation.replica_costs import ReplicaCosts

BLOCK = 2048
"""Number of layouts whose constants are computed together."""


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
