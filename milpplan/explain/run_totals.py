"""Totals of a whole run with a plan: days, accelerator hours and money, with lower bounds."""

from __future__ import annotations

from dataclasses import dataclass

from milpplan.optimize.result import PlanResult
from milpplan.units import HOURS_PER_DAY, gpu_hours


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
    tokens, plan, report = result.problem.job.training_tokens, result.plan, result.report
    if tokens is None or plan is None or report is None:
        return None
    hours = gpu_hours(plan.layout.num_gpus, tokens, report.tokens_per_s)
    return RunTotals(
        tokens=tokens,
        days=hours / plan.layout.num_gpus / HOURS_PER_DAY,
        gpu_hours=hours,
        least_gpu_hours=_least_gpu_hours(result, hours),
        price_per_gpu_hour=price_per_gpu_hour,
    )


def _least_gpu_hours(result: PlanResult, hours: float) -> float | None:
    if result.objective_name == "gpu_hours":
        return result.objective_bound
    if result.lower_bound_s is None or result.step_time_s is None:
        return None
    return hours * result.lower_bound_s / result.step_time_s
