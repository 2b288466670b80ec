"""Records of an explanation, and of a plan's page.

Every amount is an interval that provably contains the true value: ``low`` from a lower bound, ``high`` from a
simulated plan. Amounts of the objective are seconds of a step for the plan's own batch, or GPU-hours of the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from milpplan.communication.records import TrafficReport
from milpplan.errors import MilpplanError
from milpplan.problem import Layout, Plan, Problem, Scenario
from milpplan.simulation import StepReport
from milpplan.simulation.pipeline.lanes import StepLanes
from milpplan.units import counted

Unit = Literal["s", "GPU-hours"]
Outcome = Literal["chosen", "priced", "forbidden", "does_not_fit", "too_late", "open"]
"""Outcome of a wish. ``chosen``: the best known plan has it; ``priced``: its proved best costs this;
``forbidden``: no legal layout has it; ``does_not_fit`` and ``too_late``: every layout with it is provably too
large, or too slow for the deadline; ``open``: no plan with it was found in the time."""


@dataclass(frozen=True, slots=True)
class Interval:
    """Proved interval: ``low`` <= the true value <= ``high``; an unknown end is infinite."""

    low: float
    high: float

    def __post_init__(self) -> None:
        # Only a bug could swap the ends by more than rounding.
        assert self.low <= self.high + 1e-9 * max(1.0, abs(self.high)), (self.low, self.high)


@dataclass(frozen=True, slots=True)
class Optimum:
    """Best objective of a problem, within ``bounds`` (both infinite where there is provably no plan); ``plan`` is
    the best known plan."""

    bounds: Interval
    plan: Plan | None
    peak_memory_bytes: int | None = None
    """Peak of the plan's fullest stage."""
    least_peak_bytes: float | None = None
    """Lower bound of the peak over all layouts, where it was computed."""
    infeasible: bool = False
    interrupted: bool = False
    runners_up: tuple[Plan, ...] = ()

    @property
    def layout(self) -> Layout | None:
        """Layout of the best known plan."""
        return None if self.plan is None else self.plan.layout


@dataclass(frozen=True, slots=True)
class Exposed:
    """Communication that adds to the step: seconds averaged over stages, share of the step, and its network
    tier."""

    part: str
    seconds: float
    share: float
    num_ranks: int
    """Number of ranks of a group."""
    tier: str
    """Name of the slowest tier of network that the group uses."""


@dataclass(frozen=True, slots=True)
class RuleEffect:
    """Effect of a rule of divisibility: the number of (partial) layouts refused, and the minimum bound of the
    layouts that it alone refuses (None without any). ``may_bind``: the bound is below the best known plan."""

    rule: str
    num_refused: int
    least_bound_s: float | None
    may_bind: bool


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """Limits of the plan. Free bytes of every pipeline rank, negative where it does not fit; the bubble as a share
    of the step."""

    headroom_bytes: tuple[int, ...]
    bubble_share: float
    num_micro_batches: int
    exposed: tuple[Exposed, ...]
    rules: tuple[RuleEffect, ...]


@dataclass(frozen=True, slots=True)
class Worth:
    """Value of a change of the hardware or the batch.

    ``same_plan``: objective of the unchanged plan after the change; None where it is illegal or does not fit
    there. ``gain``: saved share of the proved best objective, negative where it grows. ``implied_by``: the
    question whose answer implies this one; it was not solved then.
    """

    name: str
    words: str
    same_plan: float | None
    best: Optimum
    gain: Interval
    implied_by: str = ""


@dataclass(frozen=True, slots=True)
class WishAnswer:
    """Proved best with a wish, and its price over the proved best without it: as a share, and in its unit."""

    wish: Mapping[str, object]
    words: str
    outcome: Outcome
    best: Optimum | None
    price: Interval | None
    amount: Interval | None
    reason: str = ""
    """Rule or memory limit that forbids the wish, or the consequence of lying outside the declared space."""
    in_space: bool = True
    asked: bool = True
    """False for a neighbour of the plan, examined because the user gave no wishes."""


@dataclass(frozen=True, slots=True)
class SingleChange:
    """Proved best when only some fields of the plan's layout may change, with stages and recomputation free.

    ``saved`` is the saved share of the plan's objective.
    """

    fields: tuple[str, ...]
    words: str
    best: Optimum
    saved: Interval


@dataclass(frozen=True, slots=True)
class Explanation:
    """Explanation of a plan.

    ``value`` is its objective, ``best`` the proved best of its problem, ``above_best`` the share of ``value`` that
    the proved best saves (negative: the plan is outside the declared space, or does not fit).
    """

    problem: Problem
    plan: Plan
    report: StepReport
    unit: Unit
    value: float
    best: Optimum
    above_best: Interval
    is_outside: bool
    """True if the search refused the plan as a start: its layout or stages are not in the declared space."""
    limits: PlanLimits
    changes: tuple[SingleChange, ...]
    worth: tuple[Worth, ...]
    wishes: tuple[WishAnswer, ...]
    break_even: BreakEvens | None
    """Break-even values of the doubts about the plan; None without time, or where the plan does not
    fit."""
    unanswered: tuple[str, ...]
    """Questions without time for an answer."""
    interrupted: bool
    wall_time_s: float

    def __repr__(self) -> str:
        """Write model, cluster, saving of the best plan and layout in three lines."""
        problem, layout, saved = self.problem, self.plan.layout, self.above_best
        return (
            f"Explanation: {problem.model.name} on {layout.num_gpus} x {problem.hardware.name}\n"
            f"  {self.value:.6g} {self.unit}, the best plan saves {saved.low:.2g} to {saved.high:.2g} of it\n"
            f"  {layout.main_fields}"
        )


@dataclass(frozen=True, slots=True)
class NearPlan:
    """Plan near the given one. ``excess`` is its objective over the given plan's, minus 1 (negative: better)."""

    plan: Plan
    step_time_s: float
    peak_memory_bytes: int
    excess: float


@dataclass(frozen=True, slots=True)
class NearBest:
    """Other layouts whose best known plan is at most ``within`` (a share) worse, best first.

    ``plans`` are simulated, so that at least these exist. ``most_layouts`` is the proved maximum number of
    layouts, without the plan's own, that can have such a plan; those not in ``plans`` were not decided in the
    time.
    """

    within: float
    plans: tuple[NearPlan, ...]
    most_layouts: int
    legal_layouts: int


@dataclass(frozen=True, slots=True)
class RuleOfThumb:
    """Plan of the published tables (``rule_of_thumb``), its cost, and whether the tables' ranges sufficed or pp
    had to exceed them."""

    plan: Plan
    report: StepReport
    within_table: bool


@dataclass(frozen=True, slots=True)
class Missing:
    """Reason why a part of the page cannot be shown: values seen, values expected, and advice."""

    seen: str
    expected: str
    do: str

    @staticmethod
    def of(error: MilpplanError) -> Missing:
        """Convert an error."""
        return Missing(error.seen, error.expected, error.do)


@dataclass(frozen=True, slots=True)
class ExportTab:
    """Launcher's files (name to text) and notes for the plan, or the reason why it cannot run the plan."""

    target: str
    name: str
    version: str
    files: dict[str, str]
    notes: tuple[str, ...] = ()
    refusal: Missing | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Overview:
    """Simulated plan, with the answers to usual questions."""

    problem: Problem
    plan: Plan
    report: StepReport
    lanes: StepLanes
    traffic: TrafficReport | Missing
    near: NearBest | Missing
    rule: RuleOfThumb | Missing
    exports: tuple[ExportTab, ...]
    break_even: BreakEvens | None = None
    """Among the near plans; None where the plan does not fit."""

    @property
    def title(self) -> str:
        """Model and number of GPUs."""
        return f"{self.problem.model.name} on {counted(self.plan.layout.num_gpus, 'GPU')}"


@dataclass(frozen=True, slots=True)
class BreakEven:
    """Break-even of one doubt.

    ``scenario``: the end of the doubt. ``values``: constants at which the plan is still the best, and just beyond
    which ``rival`` is better; those of the end where no compared plan overtakes, and ``rival`` is None.
    """

    scenario: Scenario
    values: dict[str, float]
    rival: Plan | None


@dataclass(frozen=True, slots=True)
class BreakEvens:
    """Break-evens of a plan among ``num_plans`` other plans: ``num_kept`` from elsewhere, the others the best
    uniform plans at the ends of the doubts."""

    doubts: tuple[BreakEven, ...]
    num_plans: int
    num_kept: int
