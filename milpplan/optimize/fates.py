"""What a search decided about every legal layout."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from milpplan.costs.columns import BoolArray, FloatArray, IntArray
from milpplan.optimize.compute_groups import compute_values, fitting_blocks
from milpplan.optimize.layout_space import LayoutSpace
from milpplan.specs.problem import Problem

Fate = Literal["open", "does_not_fit", "bounded", "relaxed", "solved"]
FATES: tuple[Fate, ...] = ("open", "does_not_fit", "bounded", "relaxed", "solved")
"""``does_not_fit``: proved above memory; ``bounded``: by a closed-form bound or a menu that ran empty;
``relaxed``: by the linear relaxation, its duals checked in exact arithmetic; ``solved``: by an integer program
or, in the uniform space, by simulating every plan of the layout."""

PRUNED: tuple[Fate, ...] = ("does_not_fit", "bounded", "relaxed")
"""Fates of layouts that were never solved."""


@dataclass(frozen=True)
class LayoutFates:
    """The certificate: every legal layout, a proved lower bound on its objective, and what decided it.

    Layouts that the search never looked at one by one are bounded by their compute alone, in groups that share
    the bound, or do not fit with the rest of their block (``compute_groups``); the bounds of each are only listed
    when somebody asks.
    """

    problem: Problem
    space: LayoutSpace
    rows: IntArray
    """The layouts that were looked at."""
    own_bounds: FloatArray
    own_fates: npt.NDArray[np.int8]
    closed_open: int
    """Of the others, those whose bound is below the threshold."""
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
        open_, bounded = FATES.index("open"), FATES.index("bounded")
        found = np.where(self.bounds >= self.threshold, bounded, open_).astype(np.int8)
        found[~self._fits[self.space.block_of(np.arange(len(found)))]] = FATES.index("does_not_fit")
        found[self.rows] = self.own_fates
        return found

    @cached_property
    def _fits(self) -> BoolArray:
        """Blocks with layouts that may fit, [b]."""
        return fitting_blocks(self.problem, self.space)

    @cached_property
    def _too_large(self) -> int:
        """Layouts that were not looked at because their whole block does not fit."""
        per_block = np.bincount(self.space.block_of(self.rows), minlength=len(self._fits))
        return int((self.space.sizes - per_block)[~self._fits].sum())

    def count(self, fate: Fate) -> int:
        """Layouts with a fate."""
        own = int((self.own_fates == FATES.index(fate)).sum())
        if fate == "does_not_fit":
            return own + self._too_large
        if fate == "open":
            return own + self.closed_open
        others = len(self.space) - len(self.rows) - self._too_large - self.closed_open
        return own + (others if fate == "bounded" else 0)

    @property
    def pruned_fraction(self) -> float | None:
        """Layouts decided with proof by bounds and relaxations, none of whose plans had to be solved for, over all
        legal layouts; None where no layout is legal."""
        pruned = sum(self.count(fate) for fate in PRUNED)
        return pruned / len(self.space) if len(self.space) else None
