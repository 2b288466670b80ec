"""A step of strategies in turn, whoever found it, and steps of all kinds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from milpplan.lengths.heterogeneous.replicas import HeterogeneousStep
from milpplan.lengths.side_by_side.teams import TeamStep
from milpplan.lengths.strategy_tables import Packed

GAP_SHARE = 0.5
"""What is proved of single strategies, and searched of a set's tables, to this part of the gap."""


@dataclass(frozen=True, eq=False)
class Step:
    """A step at its exact time: members of the pool with their sequences, in order, and the home."""

    home: int
    order: tuple[int, ...]
    packed: dict[int, Packed]
    time_ns: int


def enough_ns(time_ns: float, gap: float) -> float:
    """The least bound that proves a step of some time to a gap, in whole ns: what products of floats are less than
    that would be a gap that is larger than asked for."""
    return float(np.ceil(time_ns * (1.0 - gap)))


AnyStep = Step | TeamStep | HeterogeneousStep
"""One that is compared with the others by its time."""
