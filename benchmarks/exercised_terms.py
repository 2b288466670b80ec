"""Table of the runs that exercise each term of the cost model, made from a validation.

``python -m benchmarks.validation_tables`` makes the table that ships.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from milpplan.validation.comparison import Comparison
from milpplan.validation.evidence import Exercise, ExercisedTerms, Generation, measures, ranges
from milpplan.validation.runs.records import Run
from milpplan.validation.runs.statement import Statement
from milpplan.validation.runs.variants import generation_of
from milpplan.validation.summary import grouped
from milpplan.validation.terms import used_terms


def counted(runs: Iterable[tuple[Run, Statement]]) -> dict[tuple[str, str, str], tuple[int, int]]:
    """Count scored runs and their sources by generation, number format and term."""
    groups: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for run, statement in runs:
        problem = statement.problem
        for term in used_terms(problem, statement.plan):
            groups[generation_of(problem.hardware), problem.job.precision, term.name].append(run.group)
    return {place: (len(sources), len(set(sources))) for place, sources in groups.items()}


def table_of(
    with_stacks: Sequence[Comparison], without_stacks: Sequence[Comparison], made_by: str, version: str
) -> ExercisedTerms:
    """Make the table from two validations of a set of runs, with and without fitted constants."""
    bare = {comparison.run.id: comparison for comparison in without_stacks}
    generations = {}
    for name in sorted({one.generation for one in with_stacks}):
        own = [one for one in with_stacks if one.generation == name]
        scored = _by_precision([one for one in own if one.scored])
        deciding = sum(one.decides_fit for one in own)
        if scored or deciding:
            generations[name] = Generation(
                runs={precision: len(runs) for precision, runs in scored.items()},
                memory_runs=deciding,
                terms={precision: _exercises(runs, bare) for precision, runs in scored.items()},
            )
    return ExercisedTerms(made_by=made_by, milpplan_version=version, generations=generations)


def _exercises(runs: Sequence[Comparison], bare: dict[str, Comparison]) -> dict[str, Exercise]:
    found: dict[str, list[Comparison]] = defaultdict(list)
    for one in runs:
        for term in used_terms(one.statement.problem, one.statement.plan):
            found[term.name].append(one)
    exercises = {}
    for name, members in sorted(found.items()):
        fitted, plain = grouped(members), grouped([bare[one.run.id] for one in members])
        assert fitted is not None
        assert plain is not None
        exercises[name] = Exercise(
            num_runs=fitted.num_runs,
            num_sources=fitted.num_sources,
            error_with_stacks=round(fitted.mean_abs_error, 4),
            error_without_stacks=round(plain.mean_abs_error, 4),
            ranges=ranges(measures(one.statement.problem, one.statement.plan) for one in members),
        )
    return exercises


def _by_precision(runs: Sequence[Comparison]) -> dict[str, list[Comparison]]:
    groups: dict[str, list[Comparison]] = defaultdict(list)
    for one in runs:
        groups[one.statement.problem.job.precision].append(one)
    return dict(sorted(groups.items()))
