"""Constants of single layouts, computed together with those of the layouts that are asked for next."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from milpplan.optimize.space.layout_space import LayoutSpace
from milpplan.problem.problem import Problem
from milpplan.simulation.layout_columns import IntArray, ascending
from milpplan.simulation.mixed_costs import AnyTable, RankCosts, cluster_costs
from milpplan.simulation.replica_costs import ReplicaCosts

BLOCK = 2048


@dataclass(slots=True)
class CostCache:
    """Constants of at most ``BLOCK`` layouts, by their rows."""

    problem: Problem
    rows: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Ascending."""
    costs: AnyTable | None = None

    def keep(self, rows: IntArray, costs: AnyTable) -> None:
        """Remember them (rows ascending), unless they are too many."""
        if len(rows) <= BLOCK:
            self.rows, self.costs = rows, costs

    def at(self, space: LayoutSpace, row: int, queue: IntArray) -> RankCosts | ReplicaCosts:
        """Constants of a layout of a space; those after it in the ``queue`` are computed with it."""
        place = int(np.searchsorted(self.rows, row))
        if self.costs is None or place == len(self.rows) or self.rows[place] != row:
            rows = np.array([row])
            ahead = np.flatnonzero(queue == row)
            if len(ahead):
                rows = ascending(queue[ahead[0] : ahead[0] + BLOCK])
            self.rows, self.costs = rows, cluster_costs(self.problem, space.take(rows))
            place = int(np.searchsorted(rows, row))
        return self.costs.at(place)
