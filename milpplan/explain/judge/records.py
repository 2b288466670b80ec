"""Records of a plan's gap.

Every share is of the plan's own simulated step. ``low`` of a gap is the saving of a known, simulated plan;
``high`` follows from a proved lower bound: no plan of the space saves more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from milpplan.explain import Interval
from milpplan.optimize import PlanResult
from milpplan.problem import Plan, Problem
from milpplan.simulation import StepReport

Effort = Literal["flag", "reshard"]
"""Effort of a change. ``flag``: every rank holds the same parameters, and the run continues with other arguments.
``reshard``: parameters or optimizer states move between ranks, so a checkpoint must be converted."""


@dataclass(frozen=True, slots=True)
class SpaceGap:
    """Gap between a plan and the proved best of a space, in seconds of a step of the plan's batch.

    ``bound_s``: no plan of the space is faster (proved); None: nothing is proved. ``best_s`` and ``best``: the
    fastest known plan of the space, None without any. ``saved``: ``[1 - best_s / step, 1 - bound_s / step]``; an
    end is infinite where it is unknown. ``is_outside``: the plan's layout or stages are not in the space, so it
    may be faster than every plan in it. ``proved``: bound and best known plan meet within the tolerance of the
    solve, or nothing fits.
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
    """Simulated change of a plan.

    ``words``: such as ``tp=4``; ``fields``: all differing fields of the layout, including those that must follow.
    ``saved``: share of the step before the change (of the plan's own, for a single one); negative where the plan
    did not fit and the change makes it fit, but slower. ``closed``: share of the way from the plan's own step to
    the fastest known plan; None where the plan is the fastest.
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
    """Other plan that a search simulated, one per layout."""

    plan: Plan
    step_time_s: float
    peak_memory_bytes: int


@dataclass(frozen=True, slots=True)
class Spending:
    """Cost of a run of ``tokens`` with the plan, and the saving with another plan.

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
    """Gap of a plan to the proved best.

    ``problem``: the plan's model and hardware, and its own number of GPUs and batch. ``spaces``: the plans that
    its launcher can run, where requested, and last the whole space. ``changes``: the best single change of each
    kind, fastest first; ``chain``: the greedy chain of them. ``near``: the fastest plans that the search of the
    whole space simulated; layouts decided by bounds were never simulated. ``unanswered``: questions without time
    for an answer.
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

    def __repr__(self) -> str:
        """Write model, cluster, gap and layout in three lines."""
        problem, layout, saved = self.problem, self.plan.layout, self.whole.saved
        return (
            f"GapReport: {problem.model.name} on {layout.num_gpus} x {problem.hardware.name}\n"
            f"  {self.report.step_time_s:.6g} s a step, the best plan saves {saved.low:.2g} to "
            f"{saved.high:.2g} of it\n"
            f"  {layout.main_fields}"
        )

    @property
    def whole(self) -> SpaceGap:
        """Gap to the whole space."""
        return self.spaces[-1]

    @property
    def proved(self) -> bool:
        """True if every gap is proved to the tolerance of the solves."""
        return not self.interrupted and all(space.proved for space in self.spaces)
