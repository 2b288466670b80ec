"""Steps in several scenarios: one plan, one layout, the cost constants of each scenario (a *view* of the layout).

The scaled step of a plan is the maximum of its steps over the scenarios, each times the scale of its scenario.
With scales in the ratio of 1 / U_s, where U_s is the best step found in scenario s, a search that minimises the
scaled step minimises the worst-case regret.

Scaled steps are integers, rounded up: a step t has the scaled step ceil(t a / 2**30) with an integer a <= 2**30.
So scaling keeps the order of steps, and ``TimeScale.longest_ns`` inverts it exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from milpplan.problem import Problem
from milpplan.simulation.layout_columns import FloatArray, IntArray, LayoutColumns
from milpplan.simulation.mixed_costs import AnyTable, RankCosts, ReplicaCosts, cluster_costs

SHIFT: Final = 30
UNIT: Final = 1 << SHIFT


@dataclass(frozen=True, slots=True)
class TimeScale:
    """Scale of at most 1 of the step times of a scenario: ``numerator`` / 2**30."""

    numerator: int = UNIT

    @staticmethod
    def at_most(ratio: float) -> TimeScale:
        """Return the largest scale that does not exceed a ratio in (0, 1]."""
        return TimeScale(min(UNIT, max(1, int(ratio * UNIT * (1.0 - 1e-15)) if ratio < 1.0 else UNIT)))

    @property
    def ratio(self) -> float:
        """The scale as a float."""
        return self.numerator / UNIT

    def up(self, step_ns: int) -> int:
        """Return a scaled step."""
        return -(-step_ns * self.numerator // UNIT)

    def up_array(self, steps_ns: FloatArray) -> FloatArray:
        """Return scaled steps; infinite steps stay infinite."""
        finite = np.isfinite(steps_ns)
        steps = np.where(finite, steps_ns, 0).astype(np.int64)
        # Exact in 64 bits: the high and the low 30 bits separately.
        scaled = (steps >> SHIFT) * self.numerator + -(-((steps & (UNIT - 1)) * self.numerator) >> SHIFT)
        return np.where(finite, scaled, np.inf)

    def down(self, times_ns: IntArray) -> IntArray:
        """Return scaled times rounded down; their sum is at most the scaled sum of the times."""
        if self.numerator == UNIT:
            return times_ns
        high, low = times_ns >> SHIFT, times_ns & (UNIT - 1)
        return np.asarray(high * self.numerator + (low * self.numerator >> SHIFT))

    def longest_ns(self, scaled: int) -> int:
        """Return the longest step whose scaled step is at most ``scaled``."""
        return scaled * UNIT // self.numerator


SAME: Final = TimeScale()
"""Scale 1."""


@dataclass(frozen=True, slots=True)
class ScenarioView:
    """A layout in one scenario."""

    problem: Problem
    costs: RankCosts
    scale: TimeScale


@dataclass(frozen=True, slots=True)
class ScenarioCosts:
    """Constants of a layout in every scenario."""

    views: tuple[ScenarioView, ...]


@dataclass(frozen=True)
class ScenarioTable:
    """Constants of many layouts in every scenario."""

    scenarios: Scenarios
    tables: tuple[AnyTable, ...]

    def take(self, rows: npt.NDArray[np.integer]) -> ScenarioTable:
        """Select layouts."""
        return ScenarioTable(self.scenarios, tuple(table.take(rows) for table in self.tables))

    def at(self, row: int) -> ScenarioCosts:
        """Select one layout."""
        views = []
        for problem, scale, table in zip(self.scenarios.problems, self.scenarios.scales, self.tables, strict=True):
            costs = table.at(row)
            assert not isinstance(costs, ReplicaCosts), "solve_robust refuses heterogeneous replicas"
            views.append(ScenarioView(problem, costs, scale))
        return ScenarioCosts(tuple(views))


@dataclass(frozen=True, slots=True)
class Scenarios:
    """Problems that differ in cost constants only, with the scales of their steps."""

    problems: tuple[Problem, ...]
    """The first has scale 1."""
    scales: tuple[TimeScale, ...]

    @staticmethod
    def of(problems: Sequence[Problem], best: Sequence[float]) -> Scenarios:
        """Scale the steps of problems by the best objectives found; the smallest comes first, with scale 1."""
        order = sorted(range(len(problems)), key=best.__getitem__)
        smallest = best[order[0]]
        scales = tuple(TimeScale.at_most(smallest / best[index]) for index in order)
        return Scenarios(tuple(problems[index] for index in order), scales)

    def table(self, columns: LayoutColumns) -> ScenarioTable:
        """Compute the constants of many layouts."""
        return ScenarioTable(self, tuple(cluster_costs(problem, columns) for problem in self.problems))


SearchTable = AnyTable | ScenarioTable
"""Constants of many layouts of a search."""
