"""What the gap of a plan says: records only.

Every share is of the plan's own simulated step. ``low`` of a gap is what a plan saves that is known and was
simulated, ``high`` what a proved lower bound leaves: no plan of the space saves more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from milpplan.explain.records import Interval
from milpplan.optimize.result import PlanResult
from milpplan.problem.plan import Layout, Plan
from milpplan.problem.problem import Problem
from milpplan.simulation.report import StepReport

Effort = Literal["flag", "reshard"]
"""``flag``: the same ranks hold the same parameters, the run goes on with other arguments; ``reshard``: parameters
or optimizer states move between ranks, so a checkpoint must be converted."""


@dataclass(frozen=True, slots=True)
class SpaceGap:
    """A plan against the proved best of one space. Seconds of a step of the plan's batch.

    ``bound_s``: no plan of the space is faster (proved); None: nothing is proved. ``best_s`` and ``best``: the
    fastest plan known of the space, None where none was found. ``saved``: ``[1 - best_s / step, 1 - bound_s /
    step]``; an end is infinite where nothing is known. ``is_outside``: the plan's layout or its stages are
    not in the space, so that it may be faster than everything in it. ``proved``: bound and best known meet
    within the tolerance of the solve, or nothing fits.
    """

    name: str
    problem: Problem
    result: PlanResult
    bound_s: float | None
    best_s: float | None
    best: Plan | None
    saved: Interval
    is_outside: bool
    proved: bool


@dataclass(frozen=True, slots=True)
class Change:
    """One change of a plan, simulated.

    ``words``: such as ``tp=4``; ``fields``: everything of the layout that differs, with what has to follow.
    ``saved``: share of the step before the change (of the plan's own, for a single one); negative where the plan
    did not fit and the change makes it fit, only slower. ``closed``: share of the way from the plan's own step to
    the fastest plan known; None where there is no way to go.
    """

    lead: str
    words: str
    fields: tuple[str, ...]
    effort: Effort
    plan: Plan
    step_time_s: float
    peak_memory_bytes: int
    saved: float
    closed: float | None


@dataclass(frozen=True, slots=True)
class NearPlan:
    """Another plan that a search simulated, one a layout."""

    plan: Plan
    step_time_s: float
    peak_memory_bytes: int


@dataclass(frozen=True, slots=True)
class Spending:
    """What a run of ``tokens`` costs with the plan, and what of that another plan would save.

    ``price_per_gpu_hour`` and the amounts of money are None where no price is given; any currency.
    """

    tokens: float
    gpu_hours: float
    saved_gpu_hours: Interval
    price_per_gpu_hour: float | None
    money: float | None
    saved_money: Interval | None


@dataclass(frozen=True, slots=True)
class GapReport:
    """How far a plan is from the proved best.

    ``problem``: the plan's model and hardware, and its own number of GPUs and batch. ``spaces``: what its launcher
    can run, where that was asked, and last the whole space. ``changes``: the best single change of each kind,
    fastest first; ``chain``: the greedy chain of them. ``near``: the fastest plans that the search of the whole
    space simulated; what its bounds decided was never simulated. ``unanswered``: what no time was left for.
    """

    problem: Problem
    plan: Plan
    report: StepReport
    spaces: tuple[SpaceGap, ...]
    changes: tuple[Change, ...]
    chain: tuple[Change, ...]
    near: tuple[NearPlan, ...]
    spending: Spending
    unanswered: tuple[str, ...]
    interrupted: bool
    wall_time_s: float

    @property
    def whole(self) -> SpaceGap:
        """Against the whole space."""
        return self.spaces[-1]

    @property
    def proved(self) -> bool:
        """Whether every gap is known to the tolerance of the solves."""
        return not self.interrupted and all(space.proved for space in self.spaces)


def layout_words(own: Layout, other: Layout, lead: str = "") -> str:
    """The values in which another layout differs, as ``tp=4 dp=2``; that of ``lead`` first."""
    names = [name for name in Layout.model_fields if getattr(own, name) != getattr(other, name)]
    ordered = sorted(names, key=lambda name: name != lead)
    return " ".join(f"{name}={_word(getattr(other, name))}" for name in ordered)


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
