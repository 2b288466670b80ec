"""The same job on several kinds of hardware: each solved and proved, and which of them wins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from milpplan.errors import InvalidInputError
from milpplan.explain.run_totals import RunTotals, run_totals
from milpplan.optimize.deadline import Deadline
from milpplan.optimize.result import PlanResult, SolveOptions
from milpplan.optimize.solve import solve
from milpplan.problem.problem import Problem
from milpplan.units import counted

Measure = Literal["cost", "gpu_hours", "s_per_token"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One kind of hardware for the job, and what an hour of one accelerator costs."""

    name: str
    problem: Problem
    price_per_gpu_hour: float | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """A solved candidate. ``value`` and ``bound`` are in the unit of the measure: what its plan takes, and what no
    plan of its space can undercut (infinite where it is proved that none exists, 0 where nothing is proved)."""

    candidate: Candidate
    result: PlanResult
    totals: RunTotals | None
    value: float | None
    bound: float


@dataclass(frozen=True, slots=True)
class Choice:
    """Candidates, the best plans first; ``proved``: no plan on any other candidate undercuts the first one's."""

    measure: Measure
    outcomes: tuple[Outcome, ...]

    @property
    def best(self) -> Outcome | None:
        """The candidate with the best plan; None where none has a plan."""
        first = self.outcomes[0]
        return first if first.value is not None else None

    @property
    def rivals_bound(self) -> float:
        """What no plan on another candidate can undercut; infinite where no other has a plan."""
        return min((one.bound for one in self.outcomes[1:]), default=float("inf"))

    @property
    def proved(self) -> bool:
        """Whether the best plan wins over every plan of the others."""
        best = self.best
        if best is None:
            return all(one.result.status == "infeasible" for one in self.outcomes)
        return best.value is not None and best.value <= self.rivals_bound


def choose(candidates: Sequence[Candidate], options: SolveOptions | None = None) -> Choice:
    """Solve the job on every candidate and set them in order.

    The measure is the price of the run where every candidate has one (their objective must be ``gpu_hours``), else
    GPU-hours where those are the objective, else the step time a token.

    Args:
        candidates: at least two, of one objective.
        options: as for ``solve``; its time limit is shared among the candidates.

    Raises:
        InvalidInputError: candidates that cannot be compared.
    """
    measure = _measure(candidates)
    options = options or SolveOptions()
    deadline = Deadline.after(options.time_limit_s)
    outcomes = []
    for number, candidate in enumerate(candidates):
        left_s = deadline.left_s()
        share = None if left_s is None else left_s / (len(candidates) - number)
        found = solve(candidate.problem, replace(options, time_limit_s=share))
        outcomes.append(_outcome(candidate, found, measure))
    return Choice(measure, tuple(sorted(outcomes, key=_order)))


def _order(outcome: Outcome) -> tuple[float, float]:
    return (float("inf") if outcome.value is None else outcome.value, outcome.bound)


def _measure(candidates: Sequence[Candidate]) -> Measure:
    objectives = {one.problem.job.objective for one in candidates}
    if len(candidates) < 2 or len(objectives) > 1 or "num_gpus" in objectives:
        raise InvalidInputError(
            f"{counted(len(candidates), 'candidate')} with the objectives {', '.join(sorted(objectives))}.",
            "Expected at least two, all with step_time_per_token or all with gpu_hours.",
            "Correct the candidates.",
        )
    if "gpu_hours" not in objectives:
        return "s_per_token"
    return "cost" if all(one.price_per_gpu_hour is not None for one in candidates) else "gpu_hours"


def _outcome(candidate: Candidate, result: PlanResult, measure: Measure) -> Outcome:
    totals = run_totals(result, candidate.price_per_gpu_hour)
    factor = 1.0
    if measure == "cost":
        assert candidate.price_per_gpu_hour is not None
        factor = candidate.price_per_gpu_hour
    bound = result.objective_bound * factor if result.objective_bound is not None else 0.0
    if result.status == "infeasible":
        bound = float("inf")
    value = None if result.objective is None else result.objective * factor
    return Outcome(candidate, result, totals, value, bound)
