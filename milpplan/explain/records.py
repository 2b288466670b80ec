"""What an explanation of a plan says: records only.

Every amount is an interval that is proved to hold the truth: ``low`` from a lower bound, ``high`` from a plan that
was simulated. Amounts of the objective are seconds of a step for the plan's own batch, or GPU-hours of the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from milpplan.problem.plan import Layout, Plan
from milpplan.problem.problem import Problem
from milpplan.simulation.report import StepReport

Unit = Literal["s", "GPU-hours"]
Outcome = Literal["chosen", "priced", "forbidden", "does_not_fit", "too_late", "open"]
"""``chosen``: the best plan found has it; ``priced``: its proved best costs this; ``forbidden``: no legal layout
has it; ``does_not_fit`` and ``too_late``: every layout with it was proved too large, or too slow for the deadline;
``open``: no plan with it was found in the time."""


@dataclass(frozen=True, slots=True)
class Interval:
    """Proved: ``low`` <= the true value <= ``high``; infinite where nothing is known."""

    low: float
    high: float

    def __post_init__(self) -> None:
        # Only an error of this program could turn it round, beyond rounding.
        assert self.low <= self.high + 1e-9 * max(1.0, abs(self.high)), (self.low, self.high)


@dataclass(frozen=True, slots=True)
class Optimum:
    """The best objective of a problem: ``bounds`` hold it, both infinite where no plan exists (proved); ``plan``
    is the best one found."""

    bounds: Interval
    plan: Plan | None
    peak_bytes: int | None = None
    """Of the plan's fullest stage."""
    least_peak_bytes: float | None = None
    """Proved lower bound of the peak over all layouts, where it was computed."""
    infeasible: bool = False
    interrupted: bool = False
    runners_up: tuple[Plan, ...] = ()


@dataclass(frozen=True, slots=True)
class Exposed:
    """Communication that adds to the step: mean seconds of the stages, share of the step, and where it travels."""

    part: str
    seconds: float
    share: float
    num_ranks: int
    """Ranks of one group."""
    tier: str
    """Name of the slowest tier of network that the group needs."""


@dataclass(frozen=True, slots=True)
class RuleEffect:
    """A rule of divisibility, how many (partial) layouts it refused, and the least bound of the layouts that are
    refused by it alone; infinite where there are none. ``may_bind``: it is below the best plan found."""

    rule: str
    num_refused: int
    least_bound: float
    may_bind: bool


@dataclass(frozen=True, slots=True)
class Limits:
    """What holds the plan back. Bytes for every pipeline rank, negative where it does not fit; the bubble as a
    share of the step."""

    headroom_bytes: tuple[int, ...]
    bubble_share: float
    num_micro_batches: int
    exposed: tuple[Exposed, ...]
    rules: tuple[RuleEffect, ...]


@dataclass(frozen=True, slots=True)
class Worth:
    """What a change of the hardware or the batch is worth.

    ``same_plan``: objective of the plan as it is after the change; None where it does not exist there or does not
    fit. ``gain``: share of the proved best objective that is saved, negative where it grows. ``implied_by``: the
    question whose answer this one follows from; it was not solved then.
    """

    name: str
    words: str
    same_plan: float | None
    best: Optimum
    gain: Interval
    implied_by: str = ""


@dataclass(frozen=True, slots=True)
class WishAnswer:
    """The proved best with a wish, and its price over the proved best without: share of it, and in its unit."""

    wish: Mapping[str, object]
    words: str
    outcome: Outcome
    best: Optimum | None
    price: Interval | None
    amount: Interval | None
    reason: str = ""
    """The rule or the memory that forbids it; or what it means that it lies outside the declared space."""
    in_space: bool = True
    asked: bool = True
    """False: a neighbour of the plan, looked at because nothing was asked."""


@dataclass(frozen=True, slots=True)
class SingleChange:
    """The proved best when only some fields of the plan's layout may change, with stages and recomputation free;
    ``saved`` is the share of the plan's objective that it saves, ``layout`` that of the best plan found."""

    fields: tuple[str, ...]
    words: str
    best: Optimum
    saved: Interval

    @property
    def layout(self) -> Layout | None:
        """The layout after the change."""
        return None if self.best.plan is None else self.best.plan.layout


@dataclass(frozen=True, slots=True)
class Explanation:
    """All about a plan: ``value`` is its objective, ``best`` the proved best of its problem, ``above_best`` the
    share of ``value`` that the proved best saves (negative: the plan is outside the declared space, or does not
    fit)."""

    problem: Problem
    plan: Plan
    report: StepReport
    unit: Unit
    value: float
    best: Optimum
    above_best: Interval
    is_outside: bool
    """The search refused the plan as a start: its layout or its stages are not in the declared space."""
    limits: Limits
    changes: tuple[SingleChange, ...]
    worth: tuple[Worth, ...]
    wishes: tuple[WishAnswer, ...]
    unanswered: tuple[str, ...]
    """Questions for which no time was left."""
    interrupted: bool
    wall_time_s: float


@dataclass(frozen=True, slots=True)
class NearPlan:
    """A plan near the one asked about: ``excess`` is its objective over that one's, minus 1 (negative: better)."""

    plan: Plan
    step_time_s: float
    peak_memory_bytes: int
    excess: float


@dataclass(frozen=True, slots=True)
class NearBest:
    """Other layouts whose best known plan is at most ``within`` (a share) worse, best first.

    ``plans`` were simulated, so that many are certain. ``most_layouts`` is proved: no more layouts than that, the
    plan's own left out, can have such a plan; the rest of them were not decided in the time.
    """

    within: float
    plans: tuple[NearPlan, ...]
    most_layouts: int
    legal_layouts: int


@dataclass(frozen=True, slots=True)
class RuleOfThumb:
    """The plan of the published tables (``rule_of_thumb``), what it costs, and whether the tables' ranges were
    enough or pp had to grow beyond them."""

    plan: Plan
    report: StepReport
    within_table: bool
