"""Records of error bars of a step time, and of the choice between plans. Times in seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from milpplan.problem.plan import Plan

End = Literal["fast", "slow"]


@dataclass(frozen=True, slots=True)
class ErrorBar:
    """Step time with its uncertainty, first order.

    ``below_s`` and ``above_s``: one sigma down and up; the parts of ``parts_s`` (down, up) in quadrature.
    ``residual``: the scatter that no constant explains. ``overlay``: the source of the uncertainty.
    """

    step_time_s: float
    below_s: float
    above_s: float
    parts_s: dict[str, tuple[float, float]]
    overlay: str


@dataclass(frozen=True, slots=True)
class Rival:
    """Comparison of the best plan with the fastest other plan, with all constants one sigma to the same side.

    ``rival_s`` is None where no other plan fits or is known. ``lower_bound_s``: proved for the whole space at this
    end, ``solved``: the best plan of the end's own solve; both None where it was not solved again.
    """

    end: End
    best_s: float
    rival_s: float | None
    lower_bound_s: float | None
    solved: Plan | None = None

    @property
    def still_best(self) -> bool:
        """True if no compared plan is faster."""
        return self.rival_s is None or self.best_s <= self.rival_s


@dataclass(frozen=True, slots=True)
class Robustness:
    """Comparison of the best plan at both ends with ``num_plans`` other plans of the search or, if ``solved``,
    with all plans of the space within the gap proved at each end."""

    ends: tuple[Rival, ...]
    num_plans: int
    solved: bool

    @property
    def still_best(self) -> bool:
        """True if the plan is the best at both ends."""
        return all(end.still_best for end in self.ends)
