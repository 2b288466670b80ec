"""Exact steps of uniform plans in the order of a search, many of them priced at once."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from milpplan.costs.bulk import simulate_many
from milpplan.optimize.layout_space import LayoutSpace
from milpplan.specs.problem import Problem

Rows = npt.NDArray[np.int64]
MOST = 1024
"""Plans priced at once."""
GROWTH = 16
"""Each time so many times as many as the time before: the first plans may leave few others to look at."""


@dataclass(slots=True)
class StepsAhead:
    """Steps of uniform plans: place i has layout ``rows[i]`` and recompute mode number ``modes[i]``.

    Places are asked for in ascending order. Those that follow are priced with them: plans of one schedule, ranks
    and chunks cost little more together than alone.
    """

    problem: Problem
    space: LayoutSpace
    rows: Rows
    modes: Rows
    priced: list[int | None] = field(default_factory=list)
    size: int = 16

    def at(self, place: int, hopeful: int) -> int | None:
        """Step time in ns; None: the plan does not fit. ``hopeful``: places from there on are unlikely to be
        asked for."""
        while place >= len(self.priced):
            self._price(len(self.priced), max(place + 1, min(len(self.priced) + self.size, hopeful)))
            self.size = min(MOST, GROWTH * self.size)
        return self.priced[place]

    def _price(self, start: int, end: int) -> None:
        rows, place = np.unique(self.rows[start:end], return_inverse=True)
        modes = self.modes[start:end]
        asked, column = np.unique(modes, return_inverse=True)
        names = [self.problem.recompute_modes[mode] for mode in asked.tolist()]
        found = simulate_many(self.problem, self.space.take(rows), names)
        steps, fits = found.step_time_ns[place, column].tolist(), found.fits[place, column].tolist()
        self.priced += [step if fit else None for step, fit in zip(steps, fits, strict=True)]
