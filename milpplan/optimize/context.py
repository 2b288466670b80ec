"""Context of one solve: options, solvers, deadline and counters."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from milpplan.errors import UnavailableError
from milpplan.optimize.counters import Counters
from milpplan.optimize.milp.solution import Backend, end_if
from milpplan.optimize.result import SolveOptions
from milpplan.optimize.search.candidate_layouts import BUDGET, Budget


@dataclass(slots=True)
class SolveContext:
    """Options, solvers, deadline (a value of ``time.monotonic``) and counters of one search."""

    options: SolveOptions
    backend: Backend
    witnesses: list[Backend]
    """Solvers that are asked in turn to confirm a bound from an integer program; empty: bounds stay unconfirmed.
    """
    deadline: float | None
    counters: Counters = field(default_factory=Counters)
    unavailable: dict[str, str] = field(default_factory=dict)
    """Advice for the user by reason, for every solver that could not run and was replaced by another."""
    budget: Budget = BUDGET

    def without(self, error: UnavailableError) -> None:
        """Record that a solver could not run."""
        self.unavailable[error.seen] = error.do

    def out_of_time(self) -> bool:
        """Return True once the time limit has passed; raise KeyboardInterrupt if the solve was cancelled."""
        end_if(self.options.cancelled)
        return self.deadline is not None and time.monotonic() >= self.deadline
