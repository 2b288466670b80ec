"""Accuracy figures of comparisons: per source, per generation, and for memory, fit and ranking.

**Families** of runs differ in a single number: slope and intercept, measured and predicted separately. An error of
the slope indicates wrongly priced work, an error of the intercept wrongly priced fixed costs. Errors are relative
to the measured slope or intercept and, because either may be near zero, also to the step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np

from milpplan.problem import Layout
from milpplan.validation.comparison import UNSCORED_FLAGS, Comparison, Validation, scored
from milpplan.validation.contradictions import Contradiction, contradictions
from milpplan.validation.memory import MEMORY_KINDS, MemoryKind
from milpplan.validation.ranking import Sweep, sweeps

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


KORTHIKANTI = "korthikanti-2022"
"""Source of Korthikanti et al. 2022, table 5: the classical reference, which has its own row."""


@dataclass(frozen=True, slots=True)
class Errors:
    """Errors of a set of runs, as fractions of the measured value; ``mean_error`` keeps the sign."""

    num_runs: int
    mean_error: float
    mean_abs_error: float
    median_abs_error: float
    max_abs_error: float
    worst_id: str

    @staticmethod
    def of(errors: Sequence[tuple[str, float]]) -> Errors | None:
        """Summarise (id, error) pairs; None for an empty sequence."""
        if not errors:
            return None
        sizes = [abs(error) for _, error in errors]
        worst = max(errors, key=lambda pair: abs(pair[1]))
        return Errors(
            len(errors),
            fmean(error for _, error in errors),
            fmean(sizes),
            median(sizes),
            max(sizes),
            worst[0],
        )


@dataclass(frozen=True, slots=True)
class GroupedErrors:
    """Errors over sources with equal weights, however many runs a source has.

    ``mean_abs_error`` and ``median_abs_error``: mean and median of the sources' mean absolute errors;
    ``max_abs_error``: worst single run.
    """

    num_sources: int
    num_runs: int
    mean_error: float
    mean_abs_error: float
    median_abs_error: float
    max_abs_error: float
    worst_id: str

    @staticmethod
    def of(sources: Sequence[Errors]) -> GroupedErrors | None:
        """Summarise sources; None for an empty sequence."""
        if not sources:
            return None
        worst = max(sources, key=lambda source: source.max_abs_error)
        return GroupedErrors(
            len(sources),
            sum(source.num_runs for source in sources),
            fmean(source.mean_error for source in sources),
            fmean(source.mean_abs_error for source in sources),
            median(source.mean_abs_error for source in sources),
            worst.max_abs_error,
            worst.worst_id,
        )


@dataclass(frozen=True, slots=True)
class Source:
    """Source: the number of its simulated runs, and the errors of step time."""

    group: str
    num_runs: int
    num_simulated: int
    timed: Errors | None
    """Errors of all runs with a measured time."""
    scored: Errors | None
    """Errors of the scored runs."""


UNSAFE_FRACTION = 0.02
"""Share of safe plans that may run out of memory."""
MIN_RUNS = 100
"""Minimum number of runs of a source by which a margin is found: smaller sources cannot show shares of 2 %."""
MAX_PERCENT = 50


@dataclass(frozen=True, slots=True)
class Fit:
    """Confusion matrix of the prediction whether a plan fits, in counts of runs; "positive" means out of
    memory."""

    num_oom: int
    num_ok: int
    oom_predicted: int
    """Number of runs of ``num_oom`` predicted not to fit."""
    ok_predicted: int
    """Number of runs of ``num_ok`` predicted to fit."""
    num_safe: int
    """Number of runs predicted safe: they leave the margin of their hardware."""
    safe_oom: int
    """Number of runs of ``num_safe`` that ran out of memory."""

    @property
    def accuracy(self) -> float:
        """Share of correct predictions."""
        return (self.oom_predicted + self.ok_predicted) / (self.num_oom + self.num_ok)

    @property
    def recall(self) -> float | None:
        """Share of the runs out of memory that were predicted not to fit."""
        return self.oom_predicted / self.num_oom if self.num_oom else None

    @property
    def precision(self) -> float | None:
        """Share of the runs predicted not to fit that ran out of memory."""
        said = self.oom_predicted + self.num_ok - self.ok_predicted
        return self.oom_predicted / said if said else None


@dataclass(frozen=True, slots=True)
class Summary:
    """All accuracy figures. Generations and sources map names to errors of scored runs."""

    sources: tuple[Source, ...]
    dense: GroupedErrors | None
    moe: GroupedErrors | None
    by_generation: dict[str, dict[str, GroupedErrors | None]]
    korthikanti: Errors | None
    fit: Fit | None
    fit_by_source: dict[str, Fit]
    memory: dict[str, Errors | None]
    memory_by_source: dict[str, Errors]
    sweeps: tuple[Sweep, ...]
    sweeps_across: tuple[Sweep, ...]
    """Jobs that several frameworks or releases ran."""
    contradictions: tuple[Contradiction, ...]
    families: tuple[Family, ...]
    family_errors: tuple[FamilyErrors, ...]


def summarise(validation: Validation) -> Summary:
    """Compute every figure of a validation."""
    all_runs = validation.comparisons
    counted = scored(all_runs)
    dense = [comparison for comparison in counted if not comparison.has_experts]
    moe = [comparison for comparison in counted if comparison.has_experts]
    deciding = [comparison for comparison in all_runs if comparison.decides_fit]
    by_group = _by(deciding, lambda comparison: comparison.run.group)
    generations = _by(counted, lambda comparison: comparison.generation)
    lines = families(all_runs)
    return Summary(
        sources=tuple(_sources(validation)),
        dense=grouped(dense),
        moe=grouped(moe),
        by_generation={
            name: {
                "dense": grouped([comparison for comparison in runs if not comparison.has_experts]),
                "moe": grouped([comparison for comparison in runs if comparison.has_experts]),
            }
            for name, runs in generations.items()
        },
        korthikanti=step_errors([comparison for comparison in counted if comparison.run.group == KORTHIKANTI]),
        fit=_fit(deciding),
        fit_by_source={group: fit for group, runs in by_group.items() if (fit := _fit(runs)) is not None},
        memory={kind: memory_errors(all_runs, kind) for kind in MEMORY_KINDS},
        memory_by_source=_memory_by_source(all_runs),
        sweeps=tuple(sweeps(all_runs)),
        sweeps_across=tuple(sweeps(all_runs, across=True)),
        contradictions=tuple(contradictions(all_runs)),
        families=tuple(lines),
        family_errors=tuple(family_errors(lines)),
    )


def step_errors(runs: Sequence[Comparison]) -> Errors | None:
    """Compute errors of step time."""
    return Errors.of(
        [
            (comparison.run.id, comparison.error_fraction)
            for comparison in runs
            if comparison.error_fraction is not None
        ]
    )


def memory_errors(runs: Sequence[Comparison], kind: MemoryKind) -> Errors | None:
    """Compute errors of peak memory of a kind, with an error per run and group of ranks."""
    usable = [comparison for comparison in runs if "old_pp_engine" not in comparison.run.flags]
    pairs = [
        (comparison, measure) for comparison in usable for measure in comparison.memories if measure.kind == kind
    ]
    return Errors.of([(comparison.run.id, comparison.memory_error(measure)) for comparison, measure in pairs])


def _memory_by_source(runs: Sequence[Comparison]) -> dict[str, Errors]:
    """Group by source and, where a source prints two kinds of memory, by ``source, kind``."""
    by_source: dict[str, Errors] = {}
    for group, own in _by(runs, lambda comparison: comparison.run.group).items():
        kinds = {kind: errors for kind in MEMORY_KINDS if (errors := memory_errors(own, kind)) is not None}
        by_source |= {group if len(kinds) == 1 else f"{group}, {kind}": errors for kind, errors in kinds.items()}
    return by_source


def grouped(runs: Sequence[Comparison]) -> GroupedErrors | None:
    """Compute errors of step time with equal weight for every source."""
    errors = [step_errors(members) for members in _by(runs, lambda comparison: comparison.run.group).values()]
    return GroupedErrors.of([error for error in errors if error is not None])


def _sources(validation: Validation) -> list[Source]:
    simulated = _by(validation.comparisons, lambda comparison: comparison.run.group)
    others: dict[str, int] = defaultdict(int)
    for unstated in validation.unstated:
        others[unstated.run.group] += 1
    return [
        Source(
            group,
            len(runs := simulated.get(group, [])) + others.get(group, 0),
            len(runs),
            step_errors(runs),
            step_errors(scored(runs)),
        )
        for group in sorted(set(simulated) | set(others))
    ]


def _fit(runs: Sequence[Comparison]) -> Fit | None:
    if not runs:
        return None
    oom = [comparison for comparison in runs if comparison.run.measured.status == "oom"]
    ran = [comparison for comparison in runs if comparison.run.measured.status == "ok"]
    safe = [comparison for comparison in runs if comparison.report.memory_verdict == "safe"]
    predicted = sum(not o.report.fits for o in oom), sum(o.report.fits for o in ran)
    return Fit(len(oom), len(ran), *predicted, len(safe), sum(o.run.measured.status == "oom" for o in safe))


def memory_margin(runs: Sequence[Comparison]) -> float:
    """Find the smallest margin of memory, in whole per cent of the device, that makes plans safe.

    With it, fewer than ``UNSAFE_FRACTION`` of the runs that leave the margin ran out of memory, in every source
    that has at least ``MIN_RUNS`` runs predicted to fit.
    """
    deciding = [comparison for comparison in runs if comparison.decides_fit and comparison.report.fits]
    groups = _by(deciding, lambda comparison: comparison.run.group).values()
    large = [own for own in groups if len(own) >= MIN_RUNS]
    shares = (percent / 100 for percent in range(MAX_PERCENT + 1))
    return next(share for share in shares if all(_unsafe(own, share) < UNSAFE_FRACTION for own in large))


def _unsafe(runs: Sequence[Comparison], share: float) -> float:
    """Return the share of the runs that leave a margin, but ran out of memory."""
    memory = [comparison.statement.problem.hardware.accelerator.memory_bytes for comparison in runs]
    leave = [
        comparison.run.measured.status
        for comparison, size in zip(runs, memory, strict=True)
        if comparison.report.memory_margin_bytes >= share * size
    ]
    return leave.count("oom") / len(leave) if leave else 0.0


def _by(runs: Sequence[Comparison], key: Callable[[Comparison], str]) -> dict[str, list[Comparison]]:
    groups: dict[str, list[Comparison]] = defaultdict(list)
    for comparison in runs:
        groups[key(comparison)].append(comparison)
    return dict(sorted(groups.items()))
