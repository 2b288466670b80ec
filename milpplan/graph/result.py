"""The answer to a strategy graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from milpplan.optimize.milp.solution import Status

Proof = Literal["exact", "tolerance", "none"]


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """One memory limit: what the choice takes of it, and the least that any choice could take (edges and the
    other limits ignored). In the caller's unit of memory."""

    alive_set: int
    device: int
    limit: float
    used: float | None
    least: float


@dataclass(frozen=True, slots=True)
class GraphProgress:
    """What is known while a graph is solved, in the caller's unit: seconds since the start, the cheapest choice so
    far, the proved bound; None: nothing yet. Rounded, and good to look at; the answer has the exact numbers."""

    wall_time_s: float
    objective: float | None
    lower_bound: float | None


@dataclass(frozen=True, slots=True, eq=False)
class GraphSolution:
    """An answer with its proof.

    ``choice`` [nodes] holds one strategy per node, None if none was found; ``objective`` is its cost summed
    exactly from the caller's numbers and rounded once. ``lower_bound`` is below the cost of every choice that
    meets all limits. ``rounding_error`` is the most that stating the costs in integers can have taken from the
    bound: an optimal answer's gap is at most this (or the gap that was asked for).

    ``proof`` says on what the bound stands: integer arithmetic throughout ("exact"), a floating-point solver's
    word for what was left to it ("tolerance"), or nothing. ``explanation`` says why nothing fits.
    """

    status: Status
    choice: npt.NDArray[np.int64] | None
    objective: float | None
    lower_bound: float | None
    rounding_error: float
    proof: Proof
    method: str
    backend: str | None
    memory: tuple[MemoryRow, ...]
    explanation: str
    wall_time_s: float

    @property
    def gap(self) -> float | None:
        """``(objective - lower_bound) / |objective|``; None without both, 0 where both are equal."""
        if self.objective is None or self.lower_bound is None:
            return None
        difference = self.objective - self.lower_bound
        return difference / abs(self.objective) if difference and self.objective else difference
