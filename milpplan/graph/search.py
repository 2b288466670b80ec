"""What a solve of a strategy graph knows so far, and who is told."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from milpplan.errors import SolverError
from milpplan.graph.instance import HALF, Instance, Stated
from milpplan.graph.result import GraphProgress, Proof
from milpplan.graph.statement import StrategyGraph
from milpplan.optimize.milp.solution import Limits, end_if


class BoundRefutedError(SolverError):
    """A bound that was called proved is false: a legal choice disproves it."""


LOGGER: Final = logging.getLogger("milpplan.graph")


@dataclass(slots=True, eq=False)
class Search:
    """What is known so far about one instance: the best choice (original strategies) and a proved bound.
    ``coarse`` is what the tolerances of backends can have taken from the bound; ``refuted`` are backends whose
    word has been disproved, ``witness`` is the one that confirmed a bound last: it is asked first."""

    graph: StrategyGraph
    stated: Stated
    root: Instance
    deadline: float
    backend: str
    relative_gap: float
    seed: int
    choice: dict[int, int] | None = None
    upper: int = HALF
    lower: int | None = None
    infeasible: bool = False
    coarse: int = 0
    proof: Proof = "exact"
    method: list[str] = field(default_factory=list)
    used_backend: str | None = None
    parts_tried: bool = False
    callback: Callable[[GraphProgress], None] | None = None
    cancelled: Callable[[], bool] | None = None
    refuted: set[str] = field(default_factory=set)
    witness: str | None = None
    started: float = field(default_factory=time.perf_counter)

    def offer(self, choice: dict[int, int]) -> bool:
        """Take a choice that is better and meets the caller's limits; says whether it meets them."""
        cost = self.root.cost(choice)
        if cost >= HALF or not self.graph.fits(self.stated.choice(choice)):
            return False
        if cost < self.upper:
            self.choice, self.upper = choice, cost
            self._require_agreement()
            self.note()
        return True

    def prove(self, bound: int) -> None:
        """Raise the lower bound."""
        if self.lower is None or bound > self.lower:
            self.lower = bound
            self._require_agreement()
            self.note()

    def _require_agreement(self) -> None:
        """Refuse a bound above the cost of a choice that is known to be legal."""
        if self.lower is not None and self.lower > self.upper:
            unit = self.stated.unit
            raise BoundRefutedError(
                f"The bound {self.lower * unit!r} is above the cost {self.upper * unit!r} of a choice that meets "
                f"all limits (by {', '.join(dict.fromkeys(self.method)) or 'reduction'}).",
                "A bound must not exceed the cost of any choice.",
                "Run `milpplan doctor`, and report this graph.",
            )

    def note(self) -> None:
        """Say what is known to the log and to the caller, who may raise ``KeyboardInterrupt`` to stop."""
        unit = self.stated.unit
        progress = GraphProgress(
            wall_time_s=time.perf_counter() - self.started,
            objective=None if self.choice is None else self.upper * unit,
            lower_bound=None if self.lower is None else self.lower * unit,
        )
        LOGGER.debug("%s", progress)
        if self.callback is not None:
            self.callback(progress)

    def finished(self) -> bool:
        """Whether the gap is closed, as far as was asked."""
        if self.choice is None or self.lower is None:
            return False
        return self.upper - self.lower <= max(self.relative_gap * abs(self.upper), self.coarse)

    def left_s(self) -> float:
        """Seconds until the limit; ends the solve if it was cancelled."""
        end_if(self.cancelled)
        return self.deadline - time.perf_counter()

    def limits(self) -> Limits:
        """What a backend may take of the time that is left."""
        seconds = self.left_s()
        return Limits(time_limit_s=seconds if seconds < 1e8 else None, seed=self.seed, cancelled=self.cancelled)
