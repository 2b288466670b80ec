"""Days, accelerator hours and money of a whole run: record and text."""

from __future__ import annotations

from milpplan.explain.run_totals import RunTotals
from milpplan.problem.records import Record
from milpplan.units import count_text, money_text, rate_text


class RunDocument(Record):
    """Totals of the whole run. ``least_gpu_hours`` and ``least_cost`` are lower bounds over the declared space."""

    tokens: float
    days: float
    gpu_hours: float
    least_gpu_hours: float | None
    price_per_gpu_hour: float | None
    cost: float | None
    least_cost: float | None


def run_document(totals: RunTotals | None) -> RunDocument | None:
    """Make the record of a run's totals."""
    if totals is None:
        return None
    return RunDocument(
        tokens=totals.tokens,
        days=totals.days,
        gpu_hours=totals.gpu_hours,
        least_gpu_hours=totals.least_gpu_hours,
        price_per_gpu_hour=totals.price_per_gpu_hour,
        cost=totals.cost,
        least_cost=totals.least_cost,
    )


def run_text(totals: RunTotals) -> str:
    """Write a line: ``15T tokens in 61.2 days: 1,504,211 GPU-hours, cost 3.76M; proved: not below 3.759M``."""
    days = f"{totals.days:,.3g} days"
    text = f"{count_text(totals.tokens)} tokens in {days}: {rate_text(totals.gpu_hours)} GPU-hours"
    if totals.cost is not None:
        text += f", cost {money_text(totals.cost)}"
    if totals.least_gpu_hours is None:
        return text
    bound = totals.least_cost
    return f"{text}; proved: not below {rate_text(totals.least_gpu_hours) if bound is None else money_text(bound)}"
