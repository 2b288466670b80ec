"""Proved best of a problem as an interval, in the unit of an explanation; and the time for questions."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from milpplan.explain.records import Interval, Optimum, Unit
from milpplan.optimize import PlanResult, objective_weights, with_job
from milpplan.optimize.solve import solve
from milpplan.problem import Plan, Problem
from milpplan.simulation import LayoutColumns, simulate
from milpplan.units import NS_PER_S

MIN_LIMIT_S = 0.05


@dataclass(slots=True)
class Budget:
    """Time for questions: each gets a share, by weight, of the time that earlier questions have left."""

    until: float | None
    """End of the time by ``time.monotonic``; None: no limit."""
    weight_left: float = 0.0

    def share_s(self, weight: float) -> float | None:
        """Return the seconds for the next question; None without a limit."""
        everything = max(self.weight_left, weight)
        self.weight_left = max(0.0, self.weight_left - weight)
        if self.until is None:
            return None
        return max(MIN_LIMIT_S, (self.until - time.monotonic()) * weight / everything)

    @property
    def is_spent(self) -> bool:
        """Test whether the time is over."""
        return self.until is not None and time.monotonic() >= self.until


@dataclass(frozen=True, slots=True)
class Yardstick:
    """Unit and tolerance of a plan's explanation."""

    unit: Unit
    tokens: float
    """Tokens of a step of the plan; seconds of plans with other batches are scaled to them."""
    gap: float

    @staticmethod
    def of(problem: Problem, plan: Plan, gap: float) -> Yardstick:
        """Make the yardstick of a plan."""
        unit: Unit = "GPU-hours" if problem.job.objective == "gpu_hours" else "s"
        return Yardstick(unit, plan.layout.global_batch_size * problem.job.sequence_length, gap)

    def value(self, problem: Problem, plan: Plan, step_time_ns: int) -> float:
        """Return the objective of a plan with a given step time."""
        if self.unit == "GPU-hours":
            weights, _ = objective_weights(problem, LayoutColumns.of([plan.layout]))
            return float(step_time_ns * weights[0])
        own = plan.layout.global_batch_size * problem.job.sequence_length
        return step_time_ns / NS_PER_S * self.tokens / own

    def simulated(self, problem: Problem, plan: Plan) -> float | None:
        """Simulate a plan and return its objective; None where it does not leave the margin of the space."""
        report = simulate(problem, plan)
        return self.value(problem, plan, report.step_time_ns) if report.fits_with_margin else None

    def optimum(self, problem: Problem, limit_s: float | None, start: Plan | None = None) -> Optimum:
        """Solve for the proved best of a problem within a time limit in seconds."""
        result = solve(
            problem,
            gap=self.gap,
            time_limit_s=limit_s,
            warm_start=start,
            any_chunks=False,
            simplest=False,
        )
        return self._optimum(problem, result)

    def _optimum(self, problem: Problem, result: PlanResult) -> Optimum:
        infeasible = result.status == "infeasible"
        scale = 1.0 if self.unit == "GPU-hours" else self.tokens
        low = 0.0 if result.objective_bound is None else result.objective_bound * scale
        high = math.inf
        if result.plan is not None and result.report is not None:
            high = self.value(problem, result.plan, result.report.step_time_ns)
        return Optimum(
            bounds=Interval(math.inf, math.inf) if infeasible else Interval(min(low, high), high),
            plan=result.plan,
            peak_memory_bytes=None if result.report is None else result.report.peak_memory_bytes,
            least_peak_bytes=result.details.get("least_memory_bytes"),
            infeasible=infeasible,
            interrupted=bool(result.message),
            runners_up=result.runners_up,
        )


def asked_for(problem: Problem, plan: Plan) -> Problem:
    """Return the problem that a plan's explanation is about.

    Where the minimum number of GPUs is the objective, that is the shortest step on the plan's own number.
    """
    if problem.job.objective != "num_gpus":
        return problem
    return with_job(problem, objective="step_time_per_token", num_gpus=plan.layout.num_gpus)


def saved_share(before: Interval, after: Interval) -> Interval:
    """Compute 1 - after / before for two intervals."""
    return Interval(1.0 - ratio(after.high, before.low), 1.0 - ratio(after.low, before.high))


def ratio(above: float, below: float) -> float:
    """Divide positive numbers that may be infinite; an unknown operand gives the end without information."""
    if math.isinf(above):
        return math.inf
    return 0.0 if math.isinf(below) else above / below if below > 0 else math.inf
