"""The rows of a duration matrix."""

from __future__ import annotations

from enum import IntEnum


class Term(IntEnum):
    """Rows of a duration matrix: what virtual stage j takes, in nanoseconds.

    WEIGHT holds the weight gradients where the schedule runs them as work items of their own; BACKWARD holds the
    input gradients alone then. CROSSING: what a transfer between j and j + 1, either way, takes beyond
    ``StepGraph.transfer_ns``.
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


WORK = (Term.FORWARD, Term.BACKWARD, Term.WEIGHT)
"""The rows that work items take, in the order of ``milpplan.costs.work_order.Kind``."""
