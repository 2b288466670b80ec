"""What the remaining error is made of: points of every aim by cause, computed from a validation of the runs.

A cause is a class of runs, told by what their records say, except for two: rows of an earlier pipeline engine that
no flag marks, and single runs that are far off, are told by their step times. So these tables are a diagnosis, and
no prediction uses them. Every run is in one class, and the points add up.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import sqrt
from statistics import fmean, median

from benchmarks.tables import markdown_table
from milpplan.problem.catalog import load_overlay
from milpplan.problem.overlay import applied
from milpplan.simulation.simulator import simulate
from milpplan.validation.comparison import Comparison, scored
from milpplan.validation.ranking import Sweep, competitions, sweeps
from milpplan.validation.runs.frameworks import framework_of, stack_of

WORST_AIM = 0.12
FAR_TOO_FAST = -0.3
"""Error below which the row of a run may be of the earlier engine."""
FAR_OFF = 0.3
CLOSE = 0.05
"""Measured times this near each other are in no order: one timed iteration scatters by more."""
SHOWN_REGRET = 0.02
MANY_GPUS = 512
LEAST_TWINS = 10
_NO_SHARDING = {"zero_stage": 0, "overlap_param_gather": False}

Class = tuple[str, Callable[[Comparison], bool]]


@dataclass(frozen=True, slots=True)
class Share:
    """Runs of a source in one class. ``points``: of the mean absolute error over the sources of a generation that
    they make; ``common``: the part that the medians of like runs make, ``scatter``: what is left around these."""

    generation: str
    source: str
    cause: str
    runs: tuple[Comparison, ...]
    points: float
    common: float

    @property
    def scatter(self) -> float:
        """Points around the medians of like runs."""
        return self.points - self.common


def error_of(one: Comparison) -> float:
    """Predicted over measured step time, minus 1."""
    assert one.error_fraction is not None
    return one.error_fraction


def with_earlier_engine(one: Comparison) -> float | None:
    """The error of a run with a pipeline under the constants of its framework's earlier engine; None where it has
    them already, or there are none."""
    stack, problem = framework_of(one.run).earlier_engine_stack, one.statement.problem
    if not stack or one.statement.plan.layout.pp == 1 or stack_of(one.run) == stack:
        return None
    overlay = load_overlay(f"{problem.hardware.name}+{stack}")
    assert overlay is not None
    assert one.step is not None
    again = problem.model_copy(update={"hardware": applied(problem.hardware, overlay)})
    return simulate(again, one.statement.plan).step_time_s / one.step.step_time_s - 1


def _unmarked(one: Comparison) -> bool:
    """Whether the earlier engine's constants take a run that is far too fast to within half of its error."""
    if error_of(one) > FAR_TOO_FAST:
        return False
    other = with_earlier_engine(one)
    return other is not None and abs(other) < abs(error_of(one)) / 2


def _nanotron(one: Comparison) -> bool:
    return one.run.group == "nanotron-bench"


CLASSES: tuple[Class, ...] = (
    ("rows of the earlier pipeline engine without a flag", _unmarked),
    (
        "rows of the earlier pipeline engine, flagged",
        lambda one: (
            bool(framework_of(one.run).earlier_engine_stack)
            and stack_of(one.run) == framework_of(one.run).earlier_engine_stack
        ),
    ),
    ("64 nodes", lambda one: _nanotron(one) and one.statement.plan.layout.num_gpus >= MANY_GPUS),
    ("single runs more than 30 % off", lambda one: abs(error_of(one)) > FAR_OFF),
    ("the rest", lambda one: True),
)


def cause_of(one: Comparison) -> str:
    """The first class that a run is in."""
    return next(words for words, holds in CLASSES if holds(one))


def _like(one: Comparison) -> Hashable:
    """What like runs share: state of the nodes, model, length, tp, kernel, with a pipeline or without."""
    layout, job = one.statement.plan.layout, one.statement.problem.job
    kernel = str(one.run.parallel.noted("attention_kernel"))
    return stack_of(one.run), one.run.model.name, job.sequence_length, layout.tp, layout.pp > 1, kernel


def shares(comparisons: Sequence[Comparison]) -> list[Share]:
    """Every source's runs by cause, of dense models."""
    groups: dict[str, dict[str, list[Comparison]]] = defaultdict(lambda: defaultdict(list))
    for one in scored(comparisons):
        if not one.has_experts:
            groups[one.generation][one.run.group].append(one)
    found = []
    for generation, sources in sorted(groups.items()):
        for source, runs in sorted(sources.items()):
            weight = 100.0 / len(runs) / len(sources)
            by_cause: dict[str, list[Comparison]] = defaultdict(list)
            for one in runs:
                by_cause[cause_of(one)].append(one)
            for words, _ in CLASSES:
                members = by_cause.get(words, [])
                if members:
                    points = weight * sum(abs(error_of(one)) for one in members)
                    around = weight * _around_medians(members)
                    found.append(
                        Share(generation, source, words, tuple(members), points, max(points - around, 0.0))
                    )
    return found


def _around_medians(members: Sequence[Comparison]) -> float:
    """Sum of the sizes of errors less the median error of like runs."""
    like: dict[Hashable, list[float]] = defaultdict(list)
    for one in members:
        like[_like(one)].append(error_of(one))
    return sum(abs(error - median(errors)) for errors in like.values() for error in errors)


def share_table(found: Sequence[Share]) -> str:
    """A row a generation, source and cause; then what they add up to."""
    header = ("generation", "source", "cause", "runs", "above 12 %", "points", "like runs", "scatter")
    rows: list[tuple[object, ...]] = []
    for generation in dict.fromkeys(one.generation for one in found):
        own = [one for one in found if one.generation == generation]
        rows += [(one.generation, one.source, one.cause, *_cells([one])) for one in own]
        rows.append((f"**{generation}**", "all", "", *_cells(own)))
    return markdown_table(header, rows)


def _cells(of: Sequence[Share]) -> tuple[object, ...]:
    runs = [run for one in of for run in one.runs]
    above = sum(abs(error_of(run)) > WORST_AIM for run in runs)
    points, common = sum(one.points for one in of), sum(one.common for one in of)
    return len(runs), above, f"{points:.2f}", f"{common:.2f}", f"{points - common:.2f}"


def order_table(comparisons: Sequence[Comparison]) -> str:
    """What regret and tau are lost to: a row a sweep with a regret, and pairs of runs in the wrong order."""
    all_sweeps = sweeps(comparisons)
    by_id = {one.run.id: one for one in comparisons}
    rows = list(_regrets(all_sweeps, by_id))
    regrets = markdown_table(
        ("sweep", "regret", "points of the mean", "ranked first", "error of it", "of the best", "cause"), rows
    )
    return "\n\n".join((regrets, _pairs(comparisons)))


def _regrets(all_sweeps: Sequence[Sweep], by_id: dict[str, Comparison]) -> Iterator[tuple[str, ...]]:
    rest = 0.0
    for one in sorted(all_sweeps, key=lambda sweep: -sweep.regret):
        points = 100.0 * one.regret / len(all_sweeps)
        if one.regret < SHOWN_REGRET:
            rest += points
            continue
        first, best = by_id[one.first_id], by_id[one.best_id]
        yield (
            one.id,
            f"{one.regret:.1%}",
            f"{points:.2f}",
            one.first_id,
            f"{error_of(first):+.0%}",
            f"{error_of(best):+.0%}",
            cause_of(first),
        )
    small = sum(one.regret < SHOWN_REGRET for one in all_sweeps)
    yield (f"the other {small}", f"below {SHOWN_REGRET:.0%}", f"{rest:.2f}", "", "", "", "")


def _pairs(comparisons: Sequence[Comparison]) -> str:
    """Pairs of finished runs of a sweep: how many are in the wrong order, by how far apart they were measured."""
    bands = ((0.0, CLOSE), (CLOSE, 0.1), (0.1, 0.2), (0.2, float("inf")))
    counts = {band: [0, 0, 0] for band in bands}
    for members in competitions(comparisons):
        ran = [one for one in members if one.step is not None]
        unmarked = {one.run.id for one in ran if _unmarked(one)}
        for first, second in combinations(ran, 2):
            assert first.step is not None
            assert second.step is not None
            times = sorted((first.step.step_time_s, second.step.step_time_s))
            apart = times[1] / times[0] - 1
            band = next(one for one in bands if one[0] <= apart < one[1])
            change = first.step.step_time_s - second.step.step_time_s
            wrong = change * (first.report.step_time_s - second.report.step_time_s) < 0
            counts[band][0] += 1
            counts[band][1] += wrong
            counts[band][2] += wrong and bool({first.run.id, second.run.id} & unmarked)
    rows = []
    for (low, high), (pairs, wrong, engine) in counts.items():
        words = f"{low:.0%} to {high:.0%}" if high < float("inf") else f"more than {low:.0%}"
        rows.append((words, f"{pairs:,}", f"{wrong:,}", f"{wrong / pairs:.0%}" if pairs else "-", f"{engine:,}"))
    header = ("measured apart", "pairs", "wrong order", "share", "with a row of the earlier engine without a flag")
    return markdown_table(header, rows)


def twin_table(comparisons: Sequence[Comparison]) -> str:
    """How far apart the errors are of runs that differ in ZeRO 0 or 1 only, and what that says of a single run.

    Two of one scatter differ by sqrt(2) of what each is off on average (normal). What the model gets wrong about
    ZeRO is in it, too, so it is an upper bound of a measurement's scatter.
    """
    groups: dict[tuple[str, Hashable], list[float]] = defaultdict(list)
    for one in scored(comparisons):
        layout = one.statement.plan.layout
        if layout.zero_stage <= 1 and one.statement.problem.job.precision == "bf16":
            plan = one.statement.plan.model_copy(update={"layout": layout.model_copy(update=_NO_SHARDING)})
            groups[one.run.group, (stack_of(one.run), _like(one), plan)].append(error_of(one))
    apart: dict[str, list[float]] = defaultdict(list)
    for (source, _), errors in groups.items():
        apart[source] += [abs(a - b) for a, b in combinations(errors, 2)]
    rows = [
        (source, len(sizes), f"{fmean(sizes):.1%}", f"{median(sizes):.1%}", f"{fmean(sizes) / sqrt(2):.1%}")
        for source, sizes in sorted(apart.items())
        if len(sizes) >= LEAST_TWINS
    ]
    return markdown_table(("source", "pairs", "apart, mean", "median", "one run, mean"), rows)


def evidence_table(comparisons: Sequence[Comparison]) -> str:
    """The rows that are taken for those of the earlier engine: errors with its constants and with their own."""
    rows = []
    for one in scored(comparisons):
        if _unmarked(one):
            layout, other = one.statement.plan.layout, with_earlier_engine(one)
            assert other is not None
            degrees = f"dp={layout.dp} tp={layout.tp} pp={layout.pp}"
            rows.append((one.run.id, degrees, layout.num_micro_batches, error_of(one), other))
    if not rows:
        return "None."
    cells = [(*row[:3], f"{row[3]:+.0%}", f"{row[4]:+.0%}") for row in rows]
    means = [f"{fmean(abs(row[place]) for row in rows):.0%}" for place in (3, 4)]
    header = ("run", "degrees", "micro-batches", "error", "with the earlier engine's constant")
    return markdown_table(header, [*cells, ("mean size", "", "", *means)])
