"""Constants of single layouts, computed together with those of the layouts that are asked for next."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from milpplan.costs.columns import IntArray
from milpplan.costs.mixed_costs import AnyTable, RankCosts, cluster_costs
from milpplan.costs.replica_costs import ReplicaCosts
from milpplan.optimize.layout_space import LayoutSpace
from milpplan.specs.problem import Problem

BLOCK = 2048


@dataclass(slots=True)
class KnownCosts:
    """Constants of at most ``BLOCK`` layouts, by their rows."""

    problem: Problem
    block: dict[int, tuple[AnyTable, int]] = field(default_factory=dict)

    def keep(self, rows: IntArray, costs: AnyTable) -> None:
        """Remember them, unless they are too many."""
        if len(rows) <= BLOCK:
            self.block = {number: (costs, place) for place, number in enumerate(rows.tolist())}

    def at(self, space: LayoutSpace, row: int, queue: IntArray) -> RankCosts | ReplicaCosts:
        """Constants of a layout of a space; those after it in the ``queue`` are computed with it."""
        if row not in self.block:
            rows = np.array([row])
            ahead = np.flatnonzero(queue == row)
            if len(ahead):
                rows = np.unique(queue[ahead[0] : ahead[0] + BLOCK])
            self.keep(rows, cluster_costs(self.problem, space.take(rows)))
        costs, place = self.block[row]
        return costs.at(place)
