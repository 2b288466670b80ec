"""The rows of a duration matrix."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from milpplan.simulation.layout_columns import BoolArray, FloatArray
from milpplan.simulation.network import collectives


class Term(IntEnum):
    """Rows of a duration matrix: what virtual stage j takes, in nanoseconds.

    WEIGHT holds the weight gradients where the schedule runs them as work items of their own; BACKWARD holds the
    input gradients alone then. CROSSING: what a transfer between j and j + 1, either way, takes beyond
    ``StepGraph.transfer_ns``. PAIRED_FORWARD and PAIRED_BACKWARD are the two parts of a pair, a forward and a
    whole backward beside each other, the second without the weight gradients, which WEIGHT holds there, too.
    """

    FORWARD = 0
    BACKWARD = 1
    GATHER = 2
    REDUCE = 3
    OPTIMIZER = 4
    LEAD = 5
    TRAIL = 6
    FIRST = 7
    LAST = 8
    WEIGHT = 9
    CROSSING = 10
    PAIRED_FORWARD = 11
    PAIRED_BACKWARD = 12


WORK = (Term.FORWARD, Term.BACKWARD, Term.WEIGHT)
"""The rows that work items take, in the order of ``milpplan.simulation.pipeline.work_order.Kind``."""
PAIRED = (Term.PAIRED_FORWARD, Term.PAIRED_BACKWARD)
"""The rows that forwards and backwards take in pairs, in the same order."""


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
    """Forward, backward, what recomputation adds to the backward of a layer, and weight gradients.

    The backward holds the weight gradients, too, unless the schedule runs them as work items of their own.
    """

    FORWARD = 0
    BACKWARD = 1
    SELECTIVE = 2
    FULL = 3
    WEIGHT = 4


ONCE = (Phase.FORWARD, Phase.BACKWARD, Phase.WEIGHT)
"""The phases that every micro-batch passes once, in the order of
``milpplan.simulation.pipeline.work_order.Kind``."""

REPLAYS = slice(Phase.SELECTIVE, Phase.FULL + 1)


@dataclass(slots=True)
class Tally:
    """Accumulates seconds of one layer into an array [Part, Phase, num_layouts], and what the host takes to call
    its collectives, [Phase, num_layouts].

    ``split`` [num_layouts]: whether the schedule runs weight gradients apart from the backward.
    """

    seconds: FloatArray
    called_s: FloatArray
    split: BoolArray
    any_split: bool

    @staticmethod
    def empty(split: BoolArray) -> Tally:
        """All zero."""
        seconds = np.zeros((len(Part), len(Phase), len(split)))
        return Tally(seconds, np.zeros((len(Phase), len(split))), split, bool(split.any()))

    def compute(
        self,
        forward: FloatArray,
        backward: FloatArray,
        weight: FloatArray | float = 0.0,
        *,
        selective: bool = False,
    ) -> None:
        """Add an operator; ``backward`` holds its weight gradient of ``weight`` seconds; ``selective`` ones are
        replayed by selective recomputation."""
        self.seconds[Part.COMPUTE, Phase.FORWARD] += forward
        self.seconds[Part.COMPUTE, Phase.BACKWARD] += backward
        if self.any_split:
            apart = np.where(self.split, weight, 0.0)
            self.seconds[Part.COMPUTE, Phase.BACKWARD] -= apart
            self.seconds[Part.COMPUTE, Phase.WEIGHT] += apart
        if selective:
            self.replayed(forward)

    def replayed(self, seconds: FloatArray) -> None:
        """Add compute that selective recomputation replays."""
        self.seconds[Part.COMPUTE, Phase.SELECTIVE] += seconds

    def calls(
        self,
        forward: FloatArray | int,
        backward: FloatArray | int,
        call_s: FloatArray,
        weight: FloatArray | int = 0,
    ) -> None:
        """Add collectives that take the host ``call_s`` each; ``weight`` of the backward's belong to the weight
        gradients."""
        self.called_s[Phase.FORWARD] += forward * call_s
        self.called_s[Phase.BACKWARD] += backward * call_s
        if self.any_split:
            apart = np.where(self.split, weight, 0) * call_s
            self.called_s[Phase.BACKWARD] -= apart
            self.called_s[Phase.WEIGHT] += apart

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
