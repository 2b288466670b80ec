"""Which classes may lead the replicas of a pipeline: *chains*, by how many replicas each class leads.

In the order of their leaders, the longest first, replicas before one hold all sequences that are longer than those
of its class. A chain is excluded where they do less than that, where they are fewer than these need, or where all
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
"""More of them take longer than what they tell."""


@dataclass(frozen=True, eq=False)
class ClassAssignments:
    """All ways: ``numbers`` [m, C] of replicas of each class, one of the last at least; ``before`` [m, C] of
    longer ones."""

    numbers: IntArray
    before: IntArray

    @staticmethod
    def num_assignments(num_classes: int, num_replicas: int) -> int:
        """How many there are."""
        return comb(num_replicas + num_classes - 2, num_classes - 1)

    @staticmethod
    def of(num_classes: int, num_replicas: int) -> ClassAssignments:
        """Those of so many classes and replicas."""
        bars = num_replicas + num_classes - 2
        chosen = list(combinations(range(bars), num_classes - 1))
        places = np.array(chosen, dtype=np.int64).reshape(len(chosen), num_classes - 1)
        ends = np.concatenate([np.full((len(places), 1), -1), places, np.full((len(places), 1), bars)], axis=1)
        numbers = np.diff(ends, axis=1) - 1
        numbers[:, -1] += 1
        return ClassAssignments(numbers, _longer(numbers))

    def has_min_replicas(self, fewest: IntArray) -> BoolArray:
        """Where replicas before each class are no fewer than what longer sequences need, ``fewest`` [C]; [m]."""
        return np.asarray(((self.before >= fewest) | (self.numbers == 0)).all(axis=1))

    def excess_load(self, left: FloatArray, above: FloatArray, total: float) -> FloatArray:
        """How much more than the ``total`` replicas do at most that do what is ``left`` [C] by class, [m];
        ``-inf`` where those before a class do not do what is ``above`` [C] it, or nothing is left of a class."""
        # Of no replicas nothing, also where nothing is known of one.
        done = np.zeros(self.numbers.shape)
        np.multiply(self.numbers, np.maximum(left, 0.0), out=done, where=self.numbers > 0)
        ends = ((_longer(done) >= above) & (left >= 0.0)) | (self.numbers == 0)
        return np.where(ends.all(axis=1), done.sum(axis=1) - total, -np.inf)


def _longer(values: Any) -> Any:
    """Sums over all later columns."""
    sums = values[:, ::-1].cumsum(axis=1)[:, ::-1]
    return np.concatenate([sums[:, 1:], np.zeros_like(sums[:, :1])], axis=1)
