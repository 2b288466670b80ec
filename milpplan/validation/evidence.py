"""Evidence of measured runs for a plan: terms that runs exercise, and the choice without the others. Times in
seconds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import resources
from typing import Final

from milpplan.problem import (
    HardwareSpec,
    Plan,
    Problem,
    hardware_names,
    load_hardware,
    parse_json,
    stack_names,
    validated,
)
from milpplan.problem.catalog import errors_by_stack
from milpplan.problem.records import Count, NonNegativeFloat, Record
from milpplan.simulation import step_weight
from milpplan.validation.runs import GENERATIONS, generation_of
from milpplan.validation.terms import Term, step_doubled_s, step_without_s, used_terms

FILE: Final = "exercised.json"


@dataclass(frozen=True, slots=True)
class Outside:
    """Measure of a plan outside the range that the runs of a term have: a layout or job field, its value in the
    plan, and the limit that the value exceeds or falls below."""

    measure: str
    value: int
    limit: int

    @property
    def ratio(self) -> float:
        """Factor between value and limit, at least 1."""
        return max(self.value / self.limit, self.limit / self.value)


@dataclass(frozen=True, slots=True)
class TermEvidence:
    """Term of a plan, with the scored runs on its generation of hardware that exercise it.

    ``mean_abs_error`` is that of their step times, with equal weight for every source, in the number format where
    it is largest; None without runs.
    ``share``: the reduction of the step without the term; ``share_doubled``: its increase with the term doubled;
    both are shares of the step, and None for exercised terms. ``ranges``: minimum and maximum of every measure
    over the runs; ``outside``: measures of the plan that are not in them.
    """

    name: str
    words: str
    num_runs: int
    num_sources: int
    mean_abs_error: float | None
    share: float | None = None
    share_doubled: float | None = None
    ranges: dict[str, tuple[int, int]] = field(default_factory=dict)
    outside: tuple[Outside, ...] = ()


@dataclass(frozen=True, slots=True)
class Ablated:
    """Comparison of the best plan with the fastest other plan, with unexercised terms scaled by ``times``.

    ``rival_s`` is scaled to the best plan's batch; None without another plan.
    """

    times: int
    best_s: float
    rival_s: float | None

    @property
    def still_best(self) -> bool:
        """True if no compared plan is faster."""
        return self.rival_s is None or self.best_s <= self.rival_s


@dataclass(frozen=True, slots=True)
class Evidence:
    """Evidence for a plan.

    ``num_runs``: scored runs on the generation; ``num_memory_runs``: runs that state whether they fitted.
    ``elsewhere``: words of unexercised terms that only the other plans have. ``ablations``: empty where every term
    of all plans is exercised, or without scored runs on the generation. ``constants_error``: mean error of the
    hardware's constants on the runs of a framework, the largest over frameworks where none is fitted, and
    ``constants_of``, the stack fitted to these runs.
    """

    generation: str
    num_runs: int
    num_memory_runs: int
    terms: tuple[TermEvidence, ...]
    constants_error: float | None = None
    constants_of: str | None = None
    elsewhere: tuple[str, ...] = ()
    ablations: tuple[Ablated, ...] = ()
    num_plans: int = 0

    @property
    def unexercised(self) -> tuple[TermEvidence, ...]:
        """Terms of the plan that no scored run on the generation exercises."""
        return tuple(term for term in self.terms if not term.num_runs)

    @property
    def extrapolated(self) -> tuple[TermEvidence, ...]:
        """Exercised terms of the plan with a measure outside the range of their runs."""
        return tuple(term for term in self.terms if term.outside)


class Exercise(Record):
    """Scored runs that exercise a term. Errors are mean absolute ones of their step times over their sources, with
    and without the constants fitted to each framework. ``ranges``: minimum and maximum of ``measures``."""

    num_runs: Count
    num_sources: Count
    error_with_stacks: NonNegativeFloat
    error_without_stacks: NonNegativeFloat
    ranges: dict[str, tuple[Count, Count]] = {}


class Generation(Record):
    """Runs on one generation of hardware.

    ``runs`` and ``terms`` are of scored runs, by number format; ``memory_runs`` state whether they fitted.
    """

    runs: dict[str, Count]
    memory_runs: Count
    terms: dict[str, dict[str, Exercise]]

    def of(self, term: str) -> tuple[Exercise, ...]:
        """Return the runs that exercise a term, with an entry per number format."""
        return tuple(formats[term] for formats in self.terms.values() if term in formats)


def measures(problem: Problem, plan: Plan) -> dict[str, int]:
    """Return the sizes of a run that costs grow with: those that a plan must share with measured runs."""
    layout = plan.layout
    return {
        "num_gpus": layout.num_gpus,
        "num_nodes": -(-layout.num_gpus // problem.hardware.gpus_per_node),
        "tp": layout.tp,
        "micro_batch_size": layout.micro_batch_size,
        "sequence_length": problem.job.sequence_length,
    }


def ranges(rows: Iterable[Mapping[str, int]]) -> dict[str, tuple[int, int]]:
    """Find the minimum and maximum of every measure over runs."""
    found: dict[str, tuple[int, int]] = {}
    for row in rows:
        for name, value in row.items():
            low, high = found.get(name, (value, value))
            found[name] = min(low, value), max(high, value)
    return found


class ExercisedTerms(Record):
    """Table of runs by generation."""

    made_by: str
    milpplan_version: str
    generations: dict[str, Generation]


@lru_cache(maxsize=1)
def exercised_terms() -> ExercisedTerms:
    """Load the shipped table."""
    file = resources.files("milpplan.validation") / FILE
    return validated(ExercisedTerms, parse_json(file.read_text(encoding="utf-8"), FILE), FILE)


def generation_name(hardware: HardwareSpec) -> str:
    """Return the generation of a description; a user's own has that of the shipped description with its
    accelerator."""
    if hardware.name in GENERATIONS:
        return GENERATIONS[hardware.name]
    return _by_accelerator().get(hardware.accelerator.name, generation_of(hardware))


@lru_cache(maxsize=1)
def _by_accelerator() -> dict[str, str]:
    shipped = [load_hardware(name) for name in hardware_names()]
    return {spec.accelerator.name: generation_of(spec) for spec in shipped}


NOTHING = Generation(runs={}, memory_runs=0, terms={})


def scored_runs(hardware: HardwareSpec) -> int:
    """Count the scored runs on the generation of a description."""
    return sum(exercised_terms().generations.get(generation_name(hardware), NOTHING).runs.values())


def evidence(
    problem: Problem,
    best: Plan,
    step_time_s: float,
    others: Sequence[Plan] = (),
    table: ExercisedTerms | None = None,
) -> Evidence:
    """Collect the evidence of scored runs for the terms of a plan.

    The runs are those on the generation of the problem's hardware. Terms of ``best`` and ``others`` that none of
    them exercises are scaled by zero and by two in all plans at once. ``others`` are compared by time per
    sequence, times GPUs where GPU-hours are minimised. They are not compared where GPUs are minimised, because the
    plan is then chosen among those that meet the deadline. On several node types there are no measured runs, which
    is the only answer.

    Args:
        problem: the problem of the plans.
        best: the plan.
        step_time_s: its step time in seconds.
        others: plans that it competes with.
        table: runs by term; None: the shipped table.
    """
    if problem.other_hardware:
        names = dict.fromkeys(generation_name(hardware) for hardware in problem.node_types)
        return Evidence(" with ".join(names), num_runs=0, num_memory_runs=0, terms=())
    name = generation_name(problem.hardware)
    generation = (table or exercised_terms()).generations.get(name, NOTHING)
    with_stack = problem.hardware.software.name in stack_names()
    errors = errors_by_stack(problem.hardware)
    own, sizes = used_terms(problem, best), measures(problem, best)
    terms = tuple(
        _exercised(term, generation.of(term.name), with_stack, sizes)
        if generation.of(term.name)
        else _unexercised(problem, best, step_time_s, term)
        for term in own
    )
    num_runs = sum(generation.runs.values())
    plans = () if problem.job.objective == "num_gpus" or not num_runs else others
    used = {term.name: term for plan in (best, *plans) for term in used_terms(problem, plan)}
    missing = [term for term in used.values() if not generation.of(term.name)]
    compared = bool(num_runs and missing)
    return Evidence(
        generation=name,
        num_runs=num_runs,
        num_memory_runs=generation.memory_runs,
        terms=terms,
        constants_error=max(errors.values(), default=None),
        constants_of=max(errors, key=errors.__getitem__, default=None),
        elsewhere=tuple(term.words for term in missing if term not in own),
        ablations=_ablations(problem, best, plans, missing) if compared else (),
        num_plans=len(plans) if compared else 0,
    )


def num_unexercised(problem: Problem, plan: Plan) -> int:
    """Count the terms of a plan that no scored run exercises: all its terms on several node types, for inference,
    and on a generation without runs."""
    runs = NOTHING
    if not problem.other_hardware and not problem.inference:
        runs = exercised_terms().generations.get(generation_name(problem.hardware), NOTHING)
    return sum(not runs.of(term.name) for term in used_terms(problem, plan))


def _exercised(term: Term, runs: tuple[Exercise, ...], with_stack: bool, sizes: Mapping[str, int]) -> TermEvidence:
    """Combine the runs of several number formats: the error and the number of sources are the maximum over the
    formats, and a range covers all of them."""
    error = max(exercise.error_with_stacks if with_stack else exercise.error_without_stacks for exercise in runs)
    num_runs = sum(exercise.num_runs for exercise in runs)
    num_sources = max(exercise.num_sources for exercise in runs)
    whole = ranges({name: pair[side] for name, pair in one.ranges.items()} for one in runs for side in (0, 1))
    outside = tuple(
        Outside(name, sizes[name], low if sizes[name] < low else high)
        for name, (low, high) in whole.items()
        if not low <= sizes[name] <= high
    )
    return TermEvidence(term.name, term.words, num_runs, num_sources, error, ranges=whole, outside=outside)


def _unexercised(problem: Problem, plan: Plan, step_time_s: float, term: Term) -> TermEvidence:
    without = step_without_s(problem, plan, (term,))
    doubled = step_doubled_s(problem, plan, (term,))
    return TermEvidence(term.name, term.words, 0, 0, None, 1 - without / step_time_s, doubled / step_time_s - 1)


def _ablations(
    problem: Problem, best: Plan, others: Sequence[Plan], missing: Sequence[Term]
) -> tuple[Ablated, ...]:
    ends = []
    for times, step_s in ((0, step_without_s), (2, step_doubled_s)):
        rivals = [
            step_s(problem, plan, missing) * step_weight(problem, plan, best) for plan in others if plan != best
        ]
        ends.append(Ablated(times, step_s(problem, best, missing), min(rivals, default=None)))
    return tuple(ends)
