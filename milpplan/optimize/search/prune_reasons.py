"""What a search decided about every legal layout."""

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
"""``does_not_fit``: proved above memory; ``bounded``: by a closed-form bound or a menu that ran empty;
``relaxed``: by the linear relaxation, its duals checked in exact arithmetic; ``solved``: by an integer program
or, in the uniform space, by simulating every plan of the layout."""

PRUNED: tuple[Fate, ...] = ("does_not_fit", "bounded", "relaxed")
"""Fates of layouts that were never solved."""


@dataclass(frozen=True)
class PruneRecord:
    """The certificate: every legal layout, a proved lower bound on its objective, and what decided it.

    Of layouts that the search never looked at one by one, the ``frontier`` knows the bound of their group or
    block; the bounds of each are only listed when somebody asks.
    """

    problem: Problem
    space: LayoutSpace
    rows: IntArray
    """The layouts that were looked at."""
    own_bounds: FloatArray
    own_fates: npt.NDArray[np.int8]
    frontier: CandidateLayouts
    """All others."""
    threshold: float
    """Layouts with a bound from here on are ``bounded``."""
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
        found = self._of_closed(self.bounds, fits)
        found[self.rows] = self.own_fates
        return found

    def _of_closed(self, values: FloatArray, fits: BoolArray) -> npt.NDArray[np.int8]:
        """Fates of layouts that were not looked at by their bounds, and by whether they may fit, [n]."""
        names: tuple[Fate, ...] = ("open", "bounded", "does_not_fit")
        open_, bounded, too_large = (FATES.index(name) for name in names)
        found = np.where(values >= self.threshold, bounded, open_)
        return np.where(fits, found, too_large).astype(np.int8)

    @cached_property
    def parts(self) -> tuple[tuple[FloatArray, npt.NDArray[np.int8], IntArray], ...]:
        """All layouts, those together that share a bound: bounds, fates, numbers of layouts, [n] in each part."""
        closed = (
            (piece.values, self._of_closed(piece.values, piece.fits), piece.sizes)
            for piece in self.frontier.pieces()
        )
        return (self.own_bounds, self.own_fates, np.ones(len(self.rows), dtype=np.int64)), *closed

    def least(self, interleaved: bool) -> float:
        """Proved lower bound of the objective over the layouts with several virtual stages a rank, or over those
        with one."""
        own = (self.space.vpp_of(self.rows) > 1) == interleaved
        found = [float(self.own_bounds[own].min(initial=np.inf))]
        for piece in self.frontier.pieces():
            among = piece.interleaved if interleaved else piece.plain
            found.append(float(piece.values[among].min(initial=np.inf)))
        return min(found)

    def count(self, fate: Fate) -> int:
        """Layouts with a fate."""
        code = FATES.index(fate)
        return sum(int(sizes[fates == code].sum()) for _, fates, sizes in self.parts)

    @property
    def pruned_fraction(self) -> float | None:
        """Layouts decided with proof by bounds and relaxations, none of whose plans had to be solved for, over all
        legal layouts; None where no layout is legal."""
        pruned = sum(self.count(fate) for fate in PRUNED)
        return pruned / len(self.space) if len(self.space) else None
