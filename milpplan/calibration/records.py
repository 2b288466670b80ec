"""Error bars of a step time, and of the choice between plans: records only. Times in seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from milpplan.problem.plan import Plan

End = Literal["fast", "slow"]


@dataclass(frozen=True, slots=True)
class ErrorBar:
    """A step time with its uncertainty, first order.

    ``below_s`` and ``above_s``: one sigma down and up; the parts of ``parts_s`` (down, up) in quadrature.
    ``residual``: what no constant explains. ``overlay``: whose uncertainty it is.
    """

    step_time_s: float
    below_s: float
    above_s: float
    parts_s: dict[str, tuple[float, float]]
    overlay: str


@dataclass(frozen=True, slots=True)
class Rival:
    """At one end, all constants one sigma to the same side: the best plan beside the fastest other plan.

    ``rival_s`` is None where no other plan fits or is known. ``lower_bound_s``: proved for the whole space at
    this end, ``solved`` the best plan of its own; both None where it was not solved again.
    """

    end: End
    best_s: float
    rival_s: float | None
    lower_bound_s: float | None
    solved: Plan | None = None

    @property
    def still_best(self) -> bool:
        """Whether no plan looked at is faster."""
        return self.rival_s is None or self.best_s <= self.rival_s


@dataclass(frozen=True, slots=True)
class Robustness:
    """Whether the best plan is best at both ends, among ``num_plans`` other plans of the search, or where
    ``solved`` among all plans of the space within the gap proved at each end."""

    ends: tuple[Rival, ...]
    num_plans: int
    solved: bool

    @property
    def still_best(self) -> bool:
        """At both ends."""
        return all(end.still_best for end in self.ends)
