"""Families of runs that differ in a single number: slope and intercept, measured and predicted separately.

An error of the slope indicates wrongly priced work, an error of the intercept wrongly priced fixed costs. Errors
are relative to the measured slope or intercept and, because either may be near zero, also to the step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np

from milpplan.problem import Layout
from milpplan.validation.comparison import UNSCORED_FLAGS, Comparison

MIN_POINTS = 3


@dataclass(frozen=True, slots=True)
class Line:
    """Least-squares line: step time = intercept_s + slope_s * x."""

    slope_s: float
    intercept_s: float


@dataclass(frozen=True, slots=True)
class Family:
    """Runs in which only ``varies`` differs, over ``values`` (ascending)."""

    varies: str
    group: str
    ids: tuple[str, ...]
    values: tuple[float, ...]
    measured: Line
    predicted: Line
    mean_step_s: float
    """Mean of the measured step times."""

    @property
    def slope_error_fraction(self) -> float | None:
        """Predicted over measured slope, minus 1; None where the measured slope is not positive."""
        return self.predicted.slope_s / self.measured.slope_s - 1 if self.measured.slope_s > 0 else None

    @property
    def intercept_error_fraction(self) -> float | None:
        """Predicted over measured intercept, minus 1; None where the measured intercept is not positive."""
        start = self.measured.intercept_s
        return self.predicted.intercept_s / start - 1 if start > 0 else None

    @property
    def slope_error_of_step(self) -> float:
        """Error of the slope over the whole range of values, as a share of the mean measured step."""
        change_s = (self.predicted.slope_s - self.measured.slope_s) * (self.values[-1] - self.values[0])
        return change_s / self.mean_step_s

    @property
    def intercept_error_of_step(self) -> float:
        """Error of the intercept as a share of the mean measured step."""
        return (self.predicted.intercept_s - self.measured.intercept_s) / self.mean_step_s


@dataclass(frozen=True, slots=True)
class FamilyErrors:
    """Absolute errors of a source's families in which the same number varies.

    ``slope_error`` and ``intercept_error``: medians of those relative to the measured values, None where no
    measured value is positive; ``slope_of_step`` and ``intercept_of_step``: means of those relative to the step.
    """

    varies: str
    group: str
    num_families: int
    num_runs: int
    slope_error: float | None
    slope_of_step: float
    intercept_error: float | None
    intercept_of_step: float


def fitted(values: Sequence[float], times_s: Sequence[float]) -> Line:
    """Fit a line to step times (seconds) over values that are not all equal."""
    slope, intercept = np.polyfit(np.asarray(values, dtype=np.float64), np.asarray(times_s, dtype=np.float64), 1)
    return Line(float(slope), float(intercept))


def families(comparisons: Sequence[Comparison]) -> list[Family]:
    """Find every family with at least three different values."""
    result: list[Family] = []
    for varies, (value, same) in _KINDS.items():
        groups: dict[tuple[object, ...], list[Comparison]] = defaultdict(list)
        for comparison in comparisons:
            if comparison.step is not None and not UNSCORED_FLAGS & set(comparison.run.flags):
                groups[
                    (comparison.run.group, comparison.run.source, *_shared(comparison), *same(comparison))
                ].append(comparison)
        large = [
            members
            for members in groups.values()
            if len({value(comparison) for comparison in members}) >= MIN_POINTS
        ]
        result += [_family(varies, value, members) for members in large]
    return result


def family_errors(all_families: Sequence[Family]) -> list[FamilyErrors]:
    """Compute the errors of every source, by the varying number."""
    groups: dict[tuple[str, str], list[Family]] = defaultdict(list)
    for family in all_families:
        groups[family.varies, family.group].append(family)
    return [
        FamilyErrors(
            varies,
            group,
            len(members),
            sum(len(family.ids) for family in members),
            _median_size(family.slope_error_fraction for family in members),
            fmean(abs(family.slope_error_of_step) for family in members),
            _median_size(family.intercept_error_fraction for family in members),
            fmean(abs(family.intercept_error_of_step) for family in members),
        )
        for (varies, group), members in sorted(groups.items())
    ]


def _median_size(errors: Iterable[float | None]) -> float | None:
    sizes = [abs(error) for error in errors if error is not None]
    return median(sizes) if sizes else None


def _family(varies: str, value: Callable[[Comparison], int], members: list[Comparison]) -> Family:
    members.sort(key=lambda comparison: (value(comparison), comparison.run.id))
    values = [float(value(comparison)) for comparison in members]
    measured = [comparison.step.step_time_s for comparison in members if comparison.step is not None]
    return Family(
        varies,
        members[0].run.group,
        tuple(comparison.run.id for comparison in members),
        tuple(values),
        fitted(values, measured),
        fitted(values, [comparison.report.step_time_s for comparison in members]),
        fmean(measured),
    )


def _layout_without(layout: Layout, *names: str) -> tuple[object, ...]:
    return tuple(getattr(layout, name) for name in Layout.model_fields if name not in names)


def _shared(comparison: Comparison) -> tuple[object, ...]:
    """Return the properties that the members of every kind of family share."""
    problem, run = comparison.statement.problem, comparison.run
    job = problem.job
    return (
        problem.hardware,
        run.parallel.recompute,
        run.parallel.schedule,
        run.parallel.precision,
        str(run.parallel.noted("attention_kernel")),
        str(run.parallel.noted("measurement_era")),
        str(run.parallel.noted("mode")),
        str(run.parallel.noted("mp_mode")),
        str(run.parallel.noted("zero1_group")),
        job.sequence_length,
        job.precision,
    )


def _same_but_micro_batches(comparison: Comparison) -> tuple[object, ...]:
    return comparison.statement.problem.model, _layout_without(
        comparison.statement.plan.layout, "global_batch_size"
    )


def _same_but_layers(comparison: Comparison) -> tuple[object, ...]:
    model = comparison.statement.problem.model
    dims = (model.hidden_size, model.vocab_size, model.kinds)
    return dims, _layout_without(comparison.statement.plan.layout)


def _same_but_gpus(comparison: Comparison) -> tuple[object, ...]:
    """Return the properties shared in weak scaling: more replicas, each with an equal number of micro-batches."""
    layout = comparison.statement.plan.layout
    model = comparison.statement.problem.model
    return model, layout.num_micro_batches, _layout_without(layout, "global_batch_size", "dp", "ep")


_KINDS: dict[str, tuple[Callable[[Comparison], int], Callable[[Comparison], tuple[object, ...]]]] = {
    "micro_batches": (
        lambda comparison: comparison.statement.plan.layout.num_micro_batches,
        _same_but_micro_batches,
    ),
    "layers": (lambda comparison: comparison.statement.problem.model.num_layers, _same_but_layers),
    "gpus": (lambda comparison: comparison.statement.plan.layout.num_gpus, _same_but_gpus),
}
