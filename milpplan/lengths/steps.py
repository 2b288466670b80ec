"""Steps of strategies in turn, the union of all kinds of steps, and the cutoff of a search."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from milpplan.lengths.heterogeneous.count_program import HeterogeneousStep
from milpplan.lengths.side_by_side.teams import TeamStep
from milpplan.lengths.strategy_tables import Packed

GAP_SHARE = 0.5
"""Share of the gap to which integer programs of single strategies and searches of a set's tables are solved."""


@dataclass(frozen=True, eq=False)
class Step:
    """Step of strategies in turn at its exact time: the pool's members with their sequences, in order, and the
    home."""

    home: int
    order: tuple[int, ...]
    packed: dict[int, Packed]
    time_ns: int


def cutoff_ns(time_ns: float, gap: float) -> float:
    """Smallest whole number of ns that proves a step of ``time_ns`` to a relative ``gap``.

    Rounding up keeps float products from accepting a gap that is larger than asked for.
    """
    return float(np.ceil(time_ns * (1.0 - gap)))


AnyStep = Step | TeamStep | HeterogeneousStep
"""Step of any kind; steps are compared by their times."""
