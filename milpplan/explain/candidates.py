"""Choice of hardware for a job: each candidate is solved with a proof, and the candidates are ranked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from milpplan.errors import InvalidInputError
from milpplan.explain.run_totals import RunTotals, run_totals
from milpplan.optimize.context import Deadline
from milpplan.optimize.result import PlanResult, SolveOptions
from milpplan.optimize.solve import solve
from milpplan.problem.problem import Problem
from milpplan.units import counted

Measure = Literal["cost", "gpu_hours", "s_per_token"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """Candidate hardware for the job, with the price of an accelerator hour."""

    name: str
    problem: Problem
    price_per_gpu_hour: float | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """Solved candidate. ``value`` and ``bound`` are in the unit of the measure: the value of its best plan, and a
    lower bound over its space (infinite where there is provably no plan, 0 where nothing is proved)."""

    candidate: Candidate
    result: PlanResult
    totals: RunTotals | None
    value: float | None
    bound: float


@dataclass(frozen=True, slots=True)
class Choice:
    """Candidates, those with the best plans first. ``proved``: no plan on another candidate beats the first
    one's."""

    measure: Measure
    outcomes: tuple[Outcome, ...]

    @property
    def best(self) -> Outcome | None:
        """Candidate with the best plan; None where no candidate has a plan."""
        first = self.outcomes[0]
        return first if first.value is not None else None

    @property
    def rivals_bound(self) -> float:
        """Lower bound over the plans of all other candidates; infinite where none of them has a plan."""
        return min((outcome.bound for outcome in self.outcomes[1:]), default=float("inf"))

    @property
    def proved(self) -> bool:
        """True if the best plan provably beats every plan of the other candidates."""
        best = self.best
        if best is None:
            return all(outcome.result.status == "infeasible" for outcome in self.outcomes)
        return best.value is not None and best.value <= self.rivals_bound


def choose(candidates: Sequence[Candidate], options: SolveOptions | None = None) -> Choice:
    """Solve the job on every candidate and rank them.

    The measure is the price of the run where every candidate has a price (their objective must be ``gpu_hours``),
    else GPU-hours where those are the objective, else the step time per token.

    Args:
        candidates: at least two, with a common objective.
        options: as for ``solve``; its time limit is shared among the candidates.

    Raises:
        InvalidInputError: the candidates cannot be compared.
    """
    measure = _measure(candidates)
    options = options or SolveOptions()
    deadline = Deadline.after(options.time_limit_s)
    outcomes = []
    for number, candidate in enumerate(candidates):
        left_s = deadline.left_s()
        share = None if left_s is None else left_s / (len(candidates) - number)
        result = solve(candidate.problem, replace(options, time_limit_s=share))
        outcomes.append(_outcome(candidate, result, measure))
    return Choice(measure, tuple(sorted(outcomes, key=_order)))


def _order(outcome: Outcome) -> tuple[float, float]:
    return (float("inf") if outcome.value is None else outcome.value, outcome.bound)


def _measure(candidates: Sequence[Candidate]) -> Measure:
    objectives = {candidate.problem.job.objective for candidate in candidates}
    if len(candidates) < 2 or len(objectives) > 1 or "num_gpus" in objectives:
        raise InvalidInputError(
            f"{counted(len(candidates), 'candidate')} with the objectives {', '.join(sorted(objectives))}.",
            "Expected at least two, all with step_time_per_token or all with gpu_hours.",
            "Correct the candidates.",
        )
    if "gpu_hours" not in objectives:
        return "s_per_token"
    return "cost" if all(candidate.price_per_gpu_hour is not None for candidate in candidates) else "gpu_hours"


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
