"""Where the time of a layer goes: parts and phases, and the sum that its operators are added to."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from milpplan.costs import collectives
from milpplan.costs.columns import FloatArray


class Part(IntEnum):
    """Where the time of a layer goes; the first six are exposed and add up to its duration."""

    COMPUTE = 0
    TP = 1
    CP = 2
    EP = 3
    LAUNCH = 4
    ZERO = 5
    TP_HIDDEN = 6
    CP_HIDDEN = 7
    ZERO_HIDDEN = 8


EXPOSED = slice(Part.COMPUTE, Part.ZERO + 1)


class Phase(IntEnum):
    """Forward, backward, and what recomputation adds to the backward of a layer."""

    FORWARD = 0
    BACKWARD = 1
    SELECTIVE = 2
    FULL = 3


@dataclass(slots=True)
class Tally:
    """Accumulates seconds of one layer into an array [Part, Phase, num_layouts], and the other ranks of the
    groups that its collectives call, [2, num_layouts] (forward, backward)."""

    seconds: FloatArray
    called_ranks: FloatArray

    @staticmethod
    def empty(num_layouts: int) -> Tally:
        """All zero."""
        return Tally(np.zeros((len(Part), len(Phase), num_layouts)), np.zeros((2, num_layouts)))

    def compute(self, forward: FloatArray, backward: FloatArray, *, selective: bool = False) -> None:
        """Add an operator; ``selective`` ones are replayed by selective recomputation."""
        self.seconds[Part.COMPUTE, Phase.FORWARD] += forward
        self.seconds[Part.COMPUTE, Phase.BACKWARD] += backward
        if selective:
            self.seconds[Part.COMPUTE, Phase.SELECTIVE] += forward

    def calls(self, forward: FloatArray | int, backward: FloatArray | int, ranks: FloatArray) -> None:
        """Add collectives among groups of so many ranks; a group of one rank is not called."""
        called = ranks - 1
        self.called_ranks[Phase.FORWARD] += forward * called
        self.called_ranks[Phase.BACKWARD] += backward * called

    def exposed(self, part: Part, phase: Phase, seconds: FloatArray) -> None:
        """Add communication that nothing hides."""
        self.seconds[part, phase] += seconds

    def overlapped(
        self,
        parts: tuple[Part, Part],
        phase: Phase,
        seconds: FloatArray,
        cover: FloatArray,
        processor_fraction: FloatArray,
    ) -> None:
        """Add communication that runs beside ``cover`` seconds of compute: exposed are the excess and what
        the communication takes from the compute beside it."""
        exposed, hidden = collectives.overlap_s(seconds, cover, processor_fraction)
        self.seconds[parts[0], phase] += exposed
        self.seconds[parts[1], phase] += hidden
