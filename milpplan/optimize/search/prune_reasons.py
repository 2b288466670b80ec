"""Pruning reasons: what a search proved about every legal layout."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from milpplan.optimize.search.candidate_layouts import CandidateLayouts
from milpplan.optimize.space.compute_groups import compute_values
from milpplan.optimize.space.layout_space import LayoutSpace
from milpplan.problem.problem import Problem
from milpplan.simulation.layout_columns import BoolArray, FloatArray, IntArray

Fate = Literal["open", "does_not_fit", "bounded", "relaxed", "solved"]
FATES: tuple[Fate, ...] = ("open", "does_not_fit", "bounded", "relaxed", "solved")
"""Reasons why a layout is decided.

``does_not_fit``: proved above memory. ``bounded``: by a closed-form bound, or because no stage option is left.
``relaxed``: by the linear relaxation, its duals checked in exact arithmetic. ``solved``: by an integer program or,
in the uniform space, by simulating every plan of the layout. ``open``: not decided.
"""

PRUNED: tuple[Fate, ...] = ("does_not_fit", "bounded", "relaxed")
"""Fates of layouts that were never solved."""


@dataclass(frozen=True)
class PruneRecord:
    """Certificate of a search: a proved lower bound of every legal layout's objective, and what decided the
    layout.

    Layouts that were not explored one by one have the bound of their group or block in ``frontier``. Their own
    bounds are computed on demand.
    """

    problem: Problem
    space: LayoutSpace
    rows: IntArray
    """Rows of the explored layouts."""
    own_bounds: FloatArray
    own_fates: npt.NDArray[np.int8]
    frontier: CandidateLayouts
    """Closed layouts: all others."""
    threshold: float
    """Objective from which on a bound makes a layout ``bounded``."""
    best: float | None = None
    """Objective of the best plan found, in the unit of the bounds; None without a plan."""

    @cached_property
    def bounds(self) -> FloatArray:
        """Proved lower bounds of the objective, [n]; infinite where no plan fits or meets the deadline."""
        values = compute_values(self.problem, self.space)
        values[self.rows] = self.own_bounds
        return values

    @cached_property
    def fates(self) -> npt.NDArray[np.int8]:
        """Indices into ``FATES``, [n]."""
        fits = self.frontier.fits[self.space.block_of(np.arange(len(self.space)))]
        fates = self._of_closed(self.bounds, fits)
        fates[self.rows] = self.own_fates
        return fates

    def _of_closed(self, values: FloatArray, fits: BoolArray) -> npt.NDArray[np.int8]:
        """Return fates of closed layouts from their bounds and from whether they may fit, [n]."""
        names: tuple[Fate, ...] = ("open", "bounded", "does_not_fit")
        open_, bounded, too_large = (FATES.index(name) for name in names)
        fates = np.where(values >= self.threshold, bounded, open_)
        return np.where(fits, fates, too_large).astype(np.int8)

    @cached_property
    def parts(self) -> tuple[tuple[FloatArray, npt.NDArray[np.int8], IntArray], ...]:
        """All layouts in classes that share a bound: bounds, fates and numbers of layouts, [n] in each part."""
        closed = (
            (layout_class.values, self._of_closed(layout_class.values, layout_class.fits), layout_class.sizes)
            for layout_class in self.frontier.classes()
        )
        return (self.own_bounds, self.own_fates, np.ones(len(self.rows), dtype=np.int64)), *closed

    def least(self, interleaved: bool) -> float:
        """Return the proved lower bound over the layouts with several virtual stages a rank, or over the layouts
        with a single stage a rank."""
        mask = (self.space.vpp_of(self.rows) > 1) == interleaved
        minima = [float(self.own_bounds[mask].min(initial=np.inf))]
        for layout_class in self.frontier.classes():
            members = layout_class.interleaved if interleaved else layout_class.plain
            minima.append(float(layout_class.values[members].min(initial=np.inf)))
        return min(minima)

    def count(self, fate: Fate) -> int:
        """Return the number of layouts with a fate."""
        code = FATES.index(fate)
        return sum(int(sizes[fates == code].sum()) for _, fates, sizes in self.parts)

    @property
    def pruned_fraction(self) -> float | None:
        """Share of the legal layouts that bounds and relaxations decided without solving for a plan; None where no
        layout is legal."""
        pruned = sum(self.count(fate) for fate in PRUNED)
        return pruned / len(self.space) if len(self.space) else None
