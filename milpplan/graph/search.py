"""The state of a solve of a strategy graph: incumbent, bound, and reports to the caller."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from milpplan.errors import SolverError
from milpplan.graph.instance import HALF, Instance, Stated
from milpplan.graph.result import GraphProgress, Proof
from milpplan.optimize.milp.solution import Limits, end_if

if TYPE_CHECKING:
    from milpplan.graph.strategy_graph import StrategyGraph


class BoundRefutedError(SolverError):
    """A bound that a solver claimed to have proved is false: a legal choice costs less."""


LOGGER: Final = logging.getLogger("milpplan.graph")


@dataclass(slots=True, eq=False)
class Search:
    """State of one solve: the incumbent (``choice``, original strategies, of cost ``upper``) and the bound
    ``lower``.

    ``coarse`` is the maximum loss of the bound through backends' tolerances. ``refuted`` are backends whose claims
    were disproved. ``witness`` is the backend that confirmed a bound last, and is asked first.
    """

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
        """Take a choice that is cheaper and meets the caller's limits. Returns True if it meets them."""
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
        """Refuse a bound above the cost of the incumbent."""
        if self.lower is not None and self.lower > self.upper:
            unit = self.stated.unit
            raise BoundRefutedError(
                f"The bound {self.lower * unit!r} is above the cost {self.upper * unit!r} of a choice that meets "
                f"all limits (by {', '.join(dict.fromkeys(self.method)) or 'reduction'}).",
                "A bound must not exceed the cost of any choice.",
                "Run `milpplan doctor`, and report this graph.",
            )

    def note(self) -> None:
        """Report progress to the log and to the caller, whose callback may raise ``KeyboardInterrupt`` to stop."""
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
        """Tell whether the requested gap is reached."""
        if self.choice is None or self.lower is None:
            return False
        return self.upper - self.lower <= max(self.relative_gap * abs(self.upper), self.coarse)

    def left_s(self) -> float:
        """Return the seconds until the deadline; end the solve if it was cancelled."""
        end_if(self.cancelled)
        return self.deadline - time.perf_counter()

    def limits(self) -> Limits:
        """Return the limits for a backend: the time that is left, the seed, and the cancellation."""
        seconds = self.left_s()
        return Limits(time_limit_s=seconds if seconds < 1e8 else None, seed=self.seed, cancelled=self.cancelled)
