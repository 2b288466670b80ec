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
    """One memory limit, in the caller's unit of memory.

    ``used`` is the use of the choice; ``least`` the smallest use of any choice, edges and the other limits
    ignored.
    """

    alive_set: int
    device: int
    limit: float
    used: float | None
    least: float


@dataclass(frozen=True, slots=True)
class GraphProgress:
    """Progress of a solve, in the caller's unit.

    Seconds since the start, cost of the incumbent and the proved bound; None where there is none yet. The numbers
    are rounded, for display; the answer has the exact numbers.
    """

    wall_time_s: float
    objective: float | None
    lower_bound: float | None


@dataclass(frozen=True, slots=True, eq=False)
class GraphSolution:
    """An answer with its proof.

    ``choice`` [nodes] holds one strategy per node, None if none was found; ``objective`` is its cost summed
    exactly from the caller's numbers and rounded once. ``lower_bound`` is not above the cost of any choice that
    meets all limits. ``rounding_error`` is the maximum loss of the bound through integer costs: an optimal
    answer's gap is at most this (or the requested gap).

    ``proof`` says what the bound rests on: integer arithmetic throughout ("exact"), a floating-point solver's
    claim about the reduced graph ("tolerance"), or nothing. ``explanation`` says why no choice fits.
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
