"""What became of every layout, by the bound that was proved for it: for the JSON documents and the pages."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Final

import numpy as np

from milpplan.optimize.search.prune_reasons import FATES, PruneRecord
from milpplan.problem.records import Computed, Record
from milpplan.units import percent_text

EDGES: Final = (1.0, 1.01, 1.02, 1.05, 1.1, 1.2, 1.5, 2.0, 4.0)
"""Edges of the classes of bounds, as multiples of the fastest plan known."""
WORDS: Final = {
    "does_not_fit": "proved not to fit in memory",
    "bounded": "proved slower by a closed-form bound",
    "relaxed": "proved slower by a linear relaxation",
    "solved": "solved",
    "open": "not decided",
}
"""Fates in the words of the pages, in their order."""
Fates = dict[str, Computed]


class BoundClassDocument(Record):
    """Layouts whose proved bound is from ``low`` to below ``high`` times the fastest plan known, by what decided
    them; ``high`` null: no bound from above."""

    low: float
    high: float | None
    fates: Fates

    @property
    def words(self) -> str:
        """How much longer than the fastest plan known these layouts take at least."""
        if self.low < 1.0:
            return "may be as fast"
        if self.high is None:
            return f"{self.low:g} times as long or more"
        if self.high > 2.0:
            return f"{self.low:g} to {self.high:g} times as long"
        low, high = percent_text(self.low - 1.0, 0), percent_text(self.high - 1.0, 0)
        return f"{low.removesuffix(' %')} to {high} longer"


def bound_classes(layouts: PruneRecord, best: float | None) -> tuple[BoundClassDocument, ...]:
    """The legal layouts that may fit, by class of their bound; ``best`` is the fastest plan known, in the unit of
    the bounds. Without it there are no multiples, and all classes are empty."""
    edges = (0.0, *EDGES, math.inf)
    counts = np.zeros((len(FATES), len(edges)), dtype=np.int64)
    for bounds, fates, sizes in layouts.parts:
        finite = np.isfinite(bounds) & (best is not None)
        place = np.searchsorted(np.array(edges), bounds[finite] / (best or 1.0), side="right") - 1
        np.add.at(counts, (fates[finite], place), sizes[finite])
    return tuple(
        BoundClassDocument(
            low=low,
            high=high if math.isfinite(high) else None,
            fates={fate: int(counts[code, number]) for code, fate in enumerate(FATES)},
        )
        for number, (low, high) in enumerate(pairwise(edges))
    )


def empty_classes() -> tuple[BoundClassDocument, ...]:
    """Make the classes without a layout in them."""
    ends = pairwise((0.0, *EDGES, None))
    return tuple(
        BoundClassDocument(low=low or 0.0, high=high, fates=dict.fromkeys(FATES, 0)) for low, high in ends
    )
