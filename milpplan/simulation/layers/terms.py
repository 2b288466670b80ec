"""Axes of the time arrays (``Term``, ``Part``, ``Phase``), times of a product, and a layer's tally of times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from milpplan.problem.model import LinearModule
from milpplan.simulation import BoolArray, FloatArray
from milpplan.simulation.network import collectives


class Term(IntEnum):
    """Rows of a duration matrix: durations of a virtual stage j, in nanoseconds.

    ``milpplan.simulation.pipeline.step_graph`` says how the rows enter the step time.
    """

    FORWARD = 0
    """Forward of a micro-batch."""
    BACKWARD = 1
    """Backward of a micro-batch; the input gradients alone where the schedule splits the backward."""
    GATHER = 2
    """Parameter gather, once a step."""
    REDUCE = 3
    """Gradient reduction, once a step."""
    OPTIMIZER = 4
    """Optimizer update, once a step."""
    LEAD = 5
    """Time from the start of the last backward until the first gradient bucket is ready."""
    TRAIL = 6
    """Reduction of the last gradient bucket, which starts when the last backward ends."""
    FIRST = 7
    """Gather of the first parameter bucket, which the first forward waits for."""
    LAST = 8
    """Part of the first forward that follows the gather of the last parameter bucket."""
    WEIGHT = 9
    """Weight gradients of a micro-batch, where the schedule runs them as work items of their own."""
    CROSSING = 10
    """Time beyond ``StepGraph.transfer_ns`` of a transfer between j and j + 1, in either direction."""
    PAIRED_FORWARD = 11
    """Forward in a pair: a forward and a whole backward of another micro-batch beside each other."""
    PAIRED_BACKWARD = 12
    """Backward in a pair, without its weight gradients, which WEIGHT holds."""


WORK = (Term.FORWARD, Term.BACKWARD, Term.WEIGHT)
"""Rows of the durations of work items, in the order of ``milpplan.simulation.pipeline.work_orders.Kind``."""
PAIRED = (Term.PAIRED_FORWARD, Term.PAIRED_BACKWARD)
"""Rows of the durations of forwards and backwards in pairs, in the order of ``Kind``."""


class Part(IntEnum):
    """Parts of the time of a layer. The first six are exposed and add up to its duration."""

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
"""Parts that add up to the duration of a layer."""


class Phase(IntEnum):
    """Phases of a layer's work on a micro-batch."""

    FORWARD = 0
    BACKWARD = 1
    """Includes the weight gradients unless the schedule runs them as work items of their own."""
    SELECTIVE = 2
    """Time that selective recomputation adds to the backward."""
    FULL = 3
    """Time that full recomputation adds to the backward."""
    WEIGHT = 4
    """Weight gradients where the schedule runs them as work items of their own, else 0."""


ONCE = (Phase.FORWARD, Phase.BACKWARD, Phase.WEIGHT)
"""Phases that every micro-batch passes once, in the order of ``milpplan.simulation.pipeline.work_orders.Kind``."""

REPLAYS = slice(Phase.SELECTIVE, Phase.FULL + 1)
"""Phases of recomputation."""


Outputs = Mapping[LinearModule, FloatArray | float]
"""Matrices that a product joins, with the width of their outputs on a rank."""


class Product(NamedTuple):
    """Times of a linear layer's three matrix products with its adapters, in seconds."""

    forward: FloatArray
    dgrad: FloatArray
    """Gradient of the input."""
    wgrad: FloatArray
    """Gradient of the trained weights."""
    size: tuple[FloatArray, FloatArray | float, FloatArray | float]
    """Tokens, width of the output, width of the input."""
    matrices: Outputs
    trained: bool
    """True if some weights are trained, so that the input is needed again."""


@dataclass(slots=True)
class Tally:
    """Running sum of the times of one layer's operators, for many layouts."""

    seconds: FloatArray
    """[Part, Phase, num_layouts]."""
    called_s: FloatArray
    """Seconds that the host needs to call the layer's collectives, [Phase, num_layouts]."""
    split: BoolArray
    """[num_layouts] True where the schedule runs weight gradients apart from the backward."""
    any_split: bool
    """True if ``split`` is true for some layout."""
    num_blocks: int
    """Blocks of the layer: its token mixer and its feed-forward block."""

    @staticmethod
    def empty(split: BoolArray, num_blocks: int) -> Tally:
        """Start a tally with all times zero."""
        seconds = np.zeros((len(Part), len(Phase), len(split)))
        return Tally(seconds, np.zeros((len(Phase), len(split))), split, bool(split.any()), num_blocks)

    def compute(
        self,
        forward: FloatArray,
        backward: FloatArray,
        weight: FloatArray | float = 0.0,
        *,
        selective: bool = False,
    ) -> None:
        """Add the compute of an operator.

        Args:
            forward: seconds of the forward.
            backward: seconds of the backward, the weight gradient included.
            weight: seconds of the weight gradient.
            selective: selective recomputation replays the operator.
        """
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
        """Add the host's time to call collectives.

        Args:
            forward, backward: number of collectives of each phase.
            call_s: seconds of the host for each call.
            weight: number of the backward's collectives that belong to the weight gradients.
        """
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
        """Add communication of ``seconds`` that runs beside ``cover`` seconds of compute.

        Exposed are the excess over the compute, and the slowdown of the compute beside it (``overlap_s``).
        ``parts`` names the exposed and the hidden part.
        """
        exposed, hidden = collectives.overlap_s(seconds, cover, processor_fraction)
        self.seconds[parts[0], phase] += exposed
        self.seconds[parts[1], phase] += hidden
