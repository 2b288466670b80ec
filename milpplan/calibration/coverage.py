"""Coverage of error bars: the share of measured runs that lie within one sigma of their prediction."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from milpplan.calibration.error_bars import side_s
from milpplan.problem import Plan, Problem
from milpplan.validation import Comparison

MAX_RUNS: Final = 8
"""Runs of a source that are looked at: an error bar takes as long as twenty simulations."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """Runs of a source or framework, and how many of them lie within one sigma."""

    name: str
    num_runs: int
    num_within: int

    @property
    def share(self) -> float:
        """Share of the runs within one sigma; 0.68 for normal errors of the stated size."""
        return self.num_within / self.num_runs


def within_one_sigma(problem: Problem, plan: Plan, step_time_s: float, measured_s: float) -> bool:
    """Test whether a measured step lies within the error bar of its prediction."""
    sign = 1.0 if measured_s > step_time_s else -1.0
    return abs(measured_s - step_time_s) <= side_s(problem, plan, step_time_s, sign)


def coverage(comparisons: Iterable[Comparison], max_runs: int = MAX_RUNS) -> tuple[Coverage, ...]:
    """Count the scored runs within one sigma, source by source; of more than ``max_runs`` an even selection."""
    sources: dict[str, list[Comparison]] = defaultdict(list)
    for run in comparisons:
        if run.scored:
            sources[run.run.group].append(run)
    found = []
    for name, runs in sorted(sources.items()):
        chosen = _evenly(runs, max_runs)
        found.append(Coverage(name, len(chosen), sum(_is_within(run) for run in chosen)))
    return tuple(found)


def mean_share(found: Sequence[Coverage]) -> float | None:
    """Compute the mean share over sources with equal weights; None without runs."""
    return fmean(part.share for part in found) if found else None


def _evenly(runs: Sequence[Comparison], number: int) -> list[Comparison]:
    """Select ``number`` runs at even distances, in order; all where there are no more."""
    if len(runs) <= number:
        return list(runs)
    return [runs[(2 * index + 1) * len(runs) // (2 * number)] for index in range(number)]


def _is_within(run: Comparison) -> bool:
    assert run.step is not None
    statement = run.statement
    return within_one_sigma(statement.problem, statement.plan, run.report.step_time_s, run.step.step_time_s)
