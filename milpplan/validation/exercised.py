"""Table of the measured runs that exercise each term of the cost model, which ships with the package.

``benchmarks/validation_tables.py`` makes it from the shipped runs, because validation takes a minute and the
evidence for a plan must be available at once.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import resources
from typing import Final

from milpplan.problem.catalog import hardware_names, load_hardware
from milpplan.problem.hardware import HardwareSpec
from milpplan.problem.reading import parse_json, validated
from milpplan.problem.records import Count, NonNegativeFloat, Record
from milpplan.validation.runs.clusters import GENERATIONS, generation_of

FILE: Final = "exercised.json"


class Exercise(Record):
    """Scored runs that exercise a term. Errors are mean absolute ones of their step times over their sources, with
    and without the constants fitted to each framework."""

    num_runs: Count
    num_sources: Count
    error_with_stacks: NonNegativeFloat
    error_without_stacks: NonNegativeFloat


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
