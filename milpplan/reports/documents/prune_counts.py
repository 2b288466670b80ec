"""Counts of layouts by prune reason and proved bound, for JSON documents and pages."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Final

import numpy as np

from milpplan.optimize.search.prune_reasons import FATES, PruneRecord
from milpplan.problem.records import Computed, Record
from milpplan.units import percent_text

EDGES: Final = (1.0, 1.01, 1.02, 1.05, 1.1, 1.2, 1.5, 2.0, 4.0)
"""Edges of the classes of bounds, as multiples of the fastest known plan."""
WORDS: Final = {
    "does_not_fit": "proved not to fit in memory",
    "bounded": "proved slower by a closed-form bound",
    "relaxed": "proved slower by a linear relaxation",
    "solved": "solved",
    "open": "not decided",
}
"""Prune reasons as pages describe them, in order."""
Fates = dict[str, Computed]


class BoundClassDocument(Record):
    """Layouts whose proved bound is at least ``low`` and below ``high`` times the fastest known plan, by prune
    reason; ``high`` is null without an upper limit."""

    low: float
    high: float | None
    fates: Fates

    @property
    def words(self) -> str:
        """Describe the minimum distance of these layouts from the fastest known plan."""
        if self.low < 1.0:
            return "may be as fast"
        if self.high is None:
            return f"{self.low:g} times as long or more"
        if self.high > 2.0:
            return f"{self.low:g} to {self.high:g} times as long"
        low, high = percent_text(self.low - 1.0, 0), percent_text(self.high - 1.0, 0)
        return f"{low.removesuffix(' %')} to {high} longer"


def bound_classes(layouts: PruneRecord, best: float | None) -> tuple[BoundClassDocument, ...]:
    """Count the legal layouts that may fit, by class of their bound.

    Args:
        layouts: outcome of every layout.
        best: the fastest known plan, in the unit of the bounds; None: all classes are empty.
    """
    edges = (0.0, *EDGES, math.inf)
    counts = np.zeros((len(FATES), len(edges)), dtype=np.int64)
    for bounds, fates, sizes in layouts.parts:
        finite = np.isfinite(bounds) & (best is not None)
        classes_of = np.searchsorted(np.array(edges), bounds[finite] / (best or 1.0), side="right") - 1
        np.add.at(counts, (fates[finite], classes_of), sizes[finite])
    return tuple(
        BoundClassDocument(
            low=low,
            high=high if math.isfinite(high) else None,
            fates={fate: int(counts[code, number]) for code, fate in enumerate(FATES)},
        )
        for number, (low, high) in enumerate(pairwise(edges))
    )


def empty_classes() -> tuple[BoundClassDocument, ...]:
    """Make the classes without any layout."""
    ends = pairwise((0.0, *EDGES, None))
    return tuple(
        BoundClassDocument(low=low or 0.0, high=high, fates=dict.fromkeys(FATES, 0)) for low, high in ends
    )
