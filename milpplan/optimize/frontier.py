"""Which layouts a search looks at one by one: those of the groups that may improve its incumbent."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from milpplan.costs.columns import FloatArray, IntArray
from milpplan.optimize.compute_groups import ComputeGroups
from milpplan.optimize.layout_space import LayoutSpace
from milpplan.specs.problem import Problem


class Opened(NamedTuple):
    """Layouts of groups that were just opened, by their rows in the whole space, with the weights and limits of
    their steps and bounds of these, nanoseconds; all [n]."""

    rows: IntArray
    weights: FloatArray
    limits_ns: FloatArray
    bounds_ns: FloatArray


@dataclass(slots=True)
class Frontier:
    """The groups of layouts of a space that are closed: of each, one bound is all that is known."""

    problem: Problem
    space: LayoutSpace
    groups: ComputeGroups = field(init=False)
    values: FloatArray = field(init=False)
    """Lower bounds of the objective, [g]; infinite where a group is open."""
    sizes: IntArray = field(init=False)
    order: IntArray = field(init=False)
    """All groups, those with the least bounds first."""

    def __post_init__(self) -> None:
        self.groups = ComputeGroups.of(self.problem, self.space)
        self.values, self.sizes = self.groups.values, self.groups.sizes
        self.order = np.argsort(self.values, kind="stable")

    @property
    def bound(self) -> float:
        """Proved lower bound of the objective over all closed groups."""
        return float(self.values.min(initial=np.inf))

    def closed_below(self, threshold: float) -> int:
        """Layouts of closed groups that may be below a value of the objective."""
        return int(self.sizes[self.values < threshold].sum())

    def first(self, threshold: float, layouts: int) -> IntArray:
        """The closed groups with the least bounds below the threshold, with so many layouts together or more."""
        order = self.order[self.values[self.order] < threshold]
        most = int(np.searchsorted(np.cumsum(self.sizes[order]), layouts)) + 1
        return np.sort(order[:most])

    def layouts(self, groups: IntArray) -> Opened:
        """The layouts of some groups, which stay closed until ``open``."""
        rows, group = self.groups.layouts(groups)
        own = self.groups
        return Opened(rows, *(values[group] for values in (own.weights, own.limits_ns, own.bounds_ns)))

    def open(self, groups: IntArray) -> None:
        """From now on the bounds of these groups are those of their layouts, which are looked at one by one."""
        self.values[groups] = np.inf
