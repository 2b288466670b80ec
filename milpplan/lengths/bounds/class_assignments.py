"""Assignments of classes to the replicas of a pipeline: how many replicas each class has.

In descending order of their longest sequence the replicas before one hold all sequences longer than those of its
class. An assignment is excluded if they do less than that, if they are fewer than these sequences need, or if all
together do less than the workload.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from math import comb
from typing import Any

import numpy as np

from milpplan.simulation.layout_columns import BoolArray, FloatArray, IntArray

MAX_ASSIGNMENTS = 20_000
"""Limit on the number of assignments, beyond which the check is too slow."""


@dataclass(frozen=True, eq=False)
class ClassAssignments:
    """All assignments: ``numbers`` [m, C] of replicas by class, at least one of the last; ``before`` [m, C] of
    longer classes."""

    numbers: IntArray
    before: IntArray

    @staticmethod
    def num_assignments(num_classes: int, num_replicas: int) -> int:
        """Return the number of assignments."""
        return comb(num_replicas + num_classes - 2, num_classes - 1)

    @staticmethod
    def of(num_classes: int, num_replicas: int) -> ClassAssignments:
        """List all assignments of ``num_replicas`` replicas to ``num_classes`` classes."""
        bars = num_replicas + num_classes - 2
        chosen = list(combinations(range(bars), num_classes - 1))
        positions = np.array(chosen, dtype=np.int64).reshape(len(chosen), num_classes - 1)
        ends = np.concatenate(
            [np.full((len(positions), 1), -1), positions, np.full((len(positions), 1), bars)], axis=1
        )
        numbers = np.diff(ends, axis=1) - 1
        numbers[:, -1] += 1
        return ClassAssignments(numbers, _longer(numbers))

    def has_min_replicas(self, fewest: IntArray) -> BoolArray:
        """Return where the replicas of longer classes are at least ``fewest`` [C], [m]."""
        return np.asarray(((self.before >= fewest) | (self.numbers == 0)).all(axis=1))

    def excess_load(self, max_loads: FloatArray, above: FloatArray, total: float) -> FloatArray:
        """Return the excess over ``total`` of replicas that do ``left`` [C] by class, [m].

        ``-inf`` if the replicas before a class do less than ``above`` [C], or a class in use cannot exist.
        """
        # No replicas do nothing, even if the maximum of one is infinite.
        loads = np.zeros(self.numbers.shape)
        np.multiply(self.numbers, np.maximum(max_loads, 0.0), out=loads, where=self.numbers > 0)
        is_possible = ((_longer(loads) >= above) & (max_loads >= 0.0)) | (self.numbers == 0)
        return np.where(is_possible.all(axis=1), loads.sum(axis=1) - total, -np.inf)


def _longer(values: Any) -> Any:
    """Return sums over all later columns."""
    sums = values[:, ::-1].cumsum(axis=1)[:, ::-1]
    return np.concatenate([sums[:, 1:], np.zeros_like(sums[:, :1])], axis=1)
