"""The rows of a duration matrix."""

from __future__ import annotations

from enum import IntEnum


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
