"""Choice of hardware for a job: totals of a run, candidates ranked with proofs, and the minimum number of GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from milpplan.errors import InvalidInputError
from milpplan.optimize import Effort, PlanResult, SolveOptions, explain
from milpplan.optimize.context import Deadline
from milpplan.optimize.solve import fewest, solve
from milpplan.problem import Job, Plan, Problem, Range
from milpplan.problem.problem import MAX_GPUS
from milpplan.simulation import StepReport
from milpplan.units import HOURS_PER_DAY, counted, gpu_hours


@dataclass(frozen=True, slots=True)
class RunTotals:
    """Whole run with a plan.

    ``least_gpu_hours`` is a proved lower bound over the plans of the declared space: with any batch and number of
    GPUs of its ranges if the objective is ``gpu_hours``, else with those of the plan; None where nothing is
    proved. Money is in the currency of the price.
    """

    tokens: float
    days: float
    gpu_hours: float
    least_gpu_hours: float | None
    price_per_gpu_hour: float | None = None

    @property
    def cost(self) -> float | None:
        """Price of the run."""
        return None if self.price_per_gpu_hour is None else self.gpu_hours * self.price_per_gpu_hour

    @property
    def least_cost(self) -> float | None:
        """Lower bound of the price, as ``least_gpu_hours``."""
        if self.price_per_gpu_hour is None or self.least_gpu_hours is None:
            return None
        return self.least_gpu_hours * self.price_per_gpu_hour


def run_totals(result: PlanResult, price_per_gpu_hour: float | None = None) -> RunTotals | None:
    """Compute the totals of the run that a result's job describes; None without a plan or without
    ``training_tokens``."""
    job, plan, report = result.problem.job, result.plan, result.report
    tokens = job.training_tokens
    if tokens is None or plan is None or report is None:
        return None
    hours = run_gpu_hours(job, plan, report, tokens)
    return RunTotals(
        tokens=tokens,
        days=hours / plan.layout.num_gpus / HOURS_PER_DAY,
        gpu_hours=hours,
        least_gpu_hours=_least_gpu_hours(result, hours),
        price_per_gpu_hour=price_per_gpu_hour,
    )


def run_gpu_hours(job: Job, plan: Plan, report: StepReport, tokens: float) -> float:
    """Compute the GPU-hours of a run with a plan on so many tokens, with the waits for rollouts elsewhere."""
    slower = job.paced_s(report.step_time_s) / report.step_time_s
    return gpu_hours(plan.layout.num_gpus, tokens, report.tokens_per_s / slower)


def _least_gpu_hours(result: PlanResult, hours: float) -> float | None:
    if result.objective_name == "gpu_hours":
        return result.objective_bound
    if result.lower_bound_s is None or result.step_time_s is None:
        return None
    job = result.problem.job
    return hours * job.paced_s(result.lower_bound_s) / job.paced_s(result.step_time_s)


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


WIDENING = 8
"""Growth factor of the range of numbers from each span to the next."""
REASON_LAYOUTS = 1_500_000
"""Maximum number of layouts listed to explain why the largest refused number has no plan."""


@dataclass(frozen=True, slots=True)
class Fewest:
    """Minimum number of accelerators.

    ``result`` is of the span that holds the number, or of the last one tried. ``refused``: the smaller numbers
    that provably have no plan; ``why``: what the largest of them lacks, if there was time to determine it;
    ``open``: smaller numbers without such a proof; ``whole_nodes``: beyond one node only whole nodes were tried,
    and nothing is proved about the numbers between them.
    """

    result: PlanResult
    refused: tuple[int, ...]
    open: tuple[int, ...]
    why: str | None
    whole_nodes: bool

    @property
    def num_gpus(self) -> int | None:
        """Minimum number; None where no plan was found."""
        return None if self.result.plan is None else self.result.plan.layout.num_gpus


def fewest_gpus(problem: Problem, options: SolveOptions | None = None, *, widen: bool = True) -> Fewest:
    """Find the minimum number of accelerators whose best plan fits and meets the job's deadline, if there is one.

    Args:
        problem: its ``num_gpus`` are the candidates; with ``widen`` the possible sizes of a cluster: every number
            up
            to one node, then whole nodes.
        options: as for ``solve``; the time limit holds for all numbers together.
        widen: search beyond the problem's own numbers.
    """
    options = options or SolveOptions()
    deadline = Deadline.after(options.time_limit_s)
    tried: list[Range | int] = []

    def counts() -> Iterator[int]:
        for span in _spans(problem.hardware.gpus_per_node) if widen else (problem.job.num_gpus,):
            tried.append(span)
            yield from _on(problem, span).job.num_gpus_values

    result = fewest(_on(problem, 1), options, counts())
    num_gpus = None if result.plan is None else result.plan.layout.num_gpus
    span = next((span for span in tried if num_gpus in _on(problem, span).job.num_gpus_values), tried[-1])
    refused, open_ = result.details["refused"], result.details["open_counts"]
    below = [count for count in refused if num_gpus is None or count < num_gpus]
    why = None
    if below and not deadline.passed and not result.message:
        with suppress(KeyboardInterrupt):
            why = _reason(problem, below[-1], options, deadline)
    return Fewest(replace(result, problem=_on(problem, span)), tuple(below), open_, why, widen)


def _on(problem: Problem, num_gpus: int | Range) -> Problem:
    job = problem.job.model_copy(update={"num_gpus": num_gpus, "objective": "num_gpus"})
    return problem.model_copy(update={"job": job})


def _spans(per_node: int) -> Iterator[Range]:
    """Iterate over spans of numbers: up to one node all numbers, then whole nodes."""
    yield Range(minimum=1, maximum=per_node, step=1)
    first, last = 2 * per_node, WIDENING * per_node
    while first <= MAX_GPUS:
        last = min(last, MAX_GPUS // per_node * per_node)
        yield Range(minimum=first, maximum=last, step=per_node)
        first, last = last + per_node, WIDENING * last


def _reason(problem: Problem, count: int, options: SolveOptions, deadline: Deadline) -> str:
    """Describe what a refused number of accelerators lacks."""
    job = _on(problem, count).job.model_copy(update={"objective": "step_time_per_token"})
    return explain(
        problem.model_copy(update={"job": job}), options.forbid, Effort(REASON_LAYOUTS, deadline.until)
    ).seen
