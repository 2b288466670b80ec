"""What a search may use: options, solvers and time, and the count of what it did."""

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
    """Of one search. ``deadline``: of ``time.monotonic``."""

    options: SolveOptions
    backend: Backend
    witnesses: list[Backend]
    """Asked in turn to confirm a bound that rests on an integer program; none: not confirmed."""
    deadline: float | None
    counters: Counters = field(default_factory=Counters)
    unavailable: dict[str, str] = field(default_factory=dict)
    """Solvers that could not run, by what it says of it: others went on without it."""
    budget: Budget = BUDGET

    def without(self, error: UnavailableError) -> None:
        """Remember that something could not run."""
        self.unavailable[error.seen] = error.do

    def out_of_time(self) -> bool:
        """Whether the time limit has passed; ends the solve if it was cancelled."""
        end_if(self.options.cancelled)
        return self.deadline is not None and time.monotonic() >= self.deadline
