"""The cells of a study: every combination of the axes, in the order of the study file."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from milpplan.errors import InvalidInputError, MilpplanError, UnknownNameError
from milpplan.optimize.milp.backends import backend_names
from milpplan.problem.catalog import load_hardware, load_model
from milpplan.problem.hardware import HardwareSpec
from milpplan.problem.model import ModelSpec
from milpplan.problem.plan import Layout
from milpplan.problem.problem import SPACES, Job, Problem, Space
from milpplan.problem.reading import plain_reason, shown
from milpplan.studies.changes import apply_case
from milpplan.studies.records import Case, Study

MAX_CELLS: Final = 100_000
FIXABLE: Final = tuple(name for name in Layout.model_fields if name in Space.model_fields)
JOB_AXES: Final = ("precision", "attention_kernel", "grad_dtype")
GRID_AXES: Final = ("model", "hardware", "sequence_length", *JOB_AXES, "space", "fixed")
"""Axes of the grid before the what-ifs; the numbers of GPUs and the batches vary fastest."""

Words = dict[str, str | int]


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination of values of the axes.

    ``words`` are its coordinates by axis; ``problem`` is None where the values cannot be combined, for the reason
    ``impossible``.
    """

    number: int
    words: Words
    problem: Problem | None
    price_per_gpu_hour: float | None
    impossible: str = ""


def axes(study: Study) -> dict[str, tuple[str | int, ...]]:
    """Return the values of every axis, as words: grid, then what-ifs, numbers of GPUs and batches."""
    grid = study.grid
    values: dict[str, tuple[str | int, ...]] = {name: getattr(grid, name) for name in GRID_AXES}
    values["sequence_length"] = grid.sequence_length or ("model's own",)
    values["fixed"] = tuple(fixed_words(fields) for fields in grid.fixed)
    values |= {axis.name: tuple(case.name for case in axis.all_cases) for axis in study.what_if}
    return values | {"num_gpus": grid.num_gpus, "global_batch_size": grid.global_batch_size}


def fixed_words(values: Mapping[str, object]) -> str:
    """Write ``{"tp": 8, "pp": 4}`` as ``tp=8 pp=4``, and no fields as ``-``."""
    words = {name: str(value).lower() if isinstance(value, bool) else value for name, value in values.items()}
    return " ".join(f"{name}={value}" for name, value in words.items()) or "-"


def num_cells(study: Study) -> int:
    """Count the cells of the study."""
    values = axes(study)
    names = {axis.name for axis in study.what_if}
    return prod(len(words) for name, words in values.items() if name not in names) * len(combinations(study))


def combinations(study: Study) -> list[tuple[Case, ...]]:
    """List the combinations of the what-ifs' cases, one case of every what-if each.

    Raises:
        InvalidInputError: there are too many to list.
    """
    cases = [axis.all_cases for axis in study.what_if]
    if study.combine == "one_at_a_time":
        base = tuple(axis_cases[0] for axis_cases in cases)
        changed_alone = [
            (*base[:i], case, *base[i + 1 :]) for i, axis_cases in enumerate(cases) for case in axis_cases[1:]
        ]
        return [base, *changed_alone]
    _check_number(prod(len(axis_cases) for axis_cases in cases))
    return list(product(*cases))


def cells(study: Study, directory: Path) -> tuple[Cell, ...]:
    """Build every cell, numbered from 1; files are looked up in ``directory``, that of the study file.

    Raises:
        UnknownNameError: a model, hardware, space, field or path does not exist.
        InvalidInputError: a value or change is invalid, or there are too many cells.
    """
    _check_number(num_cells(study))
    models = {name: _load(load_model, name, directory, "grid.model") for name in study.grid.model}
    hardware = {name: _load(load_hardware, name, directory, "grid.hardware") for name in study.grid.hardware}
    _check_names(study)
    spaces = _spaces(study)
    variants = _variants(study, hardware, directory)
    return tuple(_cells(study, models, variants, spaces))


def _cells(
    study: Study,
    models: dict[str, ModelSpec],
    variants: dict[tuple[str, int], HardwareSpec],
    spaces: dict[tuple[str, int], Space],
) -> Iterator[Cell]:
    """Yield the cells; the numbers of GPUs and the batches vary fastest."""
    grid, values, number = study.grid, axes(study), 0
    what_ifs = combinations(study)
    for choice in product(*(range(len(values[name])) for name in GRID_AXES)):
        words: Words = {name: values[name][i] for name, i in zip(GRID_AXES, choice, strict=True)}
        model, name = models[str(words["model"])], str(words["hardware"])
        words["sequence_length"] = length = (
            grid.sequence_length[choice[2]] if grid.sequence_length else model.default_sequence_length
        )
        for i, cases in enumerate(what_ifs):
            named = {axis.name: case.name for axis, case in zip(study.what_if, cases, strict=True)}
            for gpus, batch in product(grid.num_gpus, grid.global_batch_size):
                number += 1
                coordinates = words | named | {"num_gpus": gpus, "global_batch_size": batch}
                job = {axis: words[axis] for axis in JOB_AXES} | {
                    "num_gpus": gpus,
                    "global_batch_size": batch,
                    "sequence_length": length,
                }
                space = spaces[str(words["space"]), choice[-1]]
                problem, why = _problem(model, variants[name, i], job, space)
                yield Cell(number, coordinates, problem, study.prices.get(name), why)


def _problem(
    model: ModelSpec, hardware: HardwareSpec, job: dict[str, Any], space: Space
) -> tuple[Problem | None, str]:
    """Build the problem of a cell; None and the reason if its parts cannot be combined."""
    try:
        return Problem(model=model, hardware=hardware, job=Job(**job), space=space), ""
    except ValidationError as error:
        return None, plain_reason(error.errors(include_url=False)[0])


def _check_number(number: int) -> None:
    """Refuse a study with too many cells."""
    if number > MAX_CELLS:
        raise InvalidInputError(
            f"The study has {number:,} cells or more.",
            f"Expected at most {MAX_CELLS:,}.",
            "Give fewer values, split the study, or vary what-ifs with combine = 'one_at_a_time'.",
        )


def _check_names(study: Study) -> None:
    """Check that spaces, fixed fields, backend and priced hardware exist."""
    for space in study.grid.space:
        _check_known(space, SPACES, "grid.space")
    for values in study.grid.fixed:
        for name in values:
            _check_known(name, FIXABLE, "grid.fixed")
    for name in study.prices:
        _check_known(name, study.grid.hardware, "prices")
    _check_known(study.solve.backend, ("auto", *backend_names()), "solve.backend")


def _check_known(name: str, known_names: Any, where: str) -> None:
    """Refuse an unknown name, with the nearest known one."""
    names = tuple(known_names)
    if name in names:
        return
    close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    raise UnknownNameError(
        f"{where} names {shown(name)}, which is not there.",
        f"Expected one of {', '.join(names)}.",
        f"Did you mean {close[0]}?" if close else "Give one of these names.",
    )


def _load(load: Any, name: str, directory: Path, where: str) -> Any:
    """Load a model or hardware by name, or by a path relative to the study file."""
    file = directory / name
    try:
        return load(file if Path(name).suffix and file.is_file() else name)
    except MilpplanError as error:
        raise type(error)(f"{where}: {error.seen}", error.expected, error.do) from error


def _spaces(study: Study) -> dict[tuple[str, int], Space]:
    """Build the space of every kind with every set of fixed fields, by kind and number of the set."""
    spaces = {}
    for i, values in enumerate(study.grid.fixed):
        for kind in study.grid.space:
            spaces[kind, i] = _narrowed(SPACES[kind], values)
    return spaces


def _narrowed(space: Space, values: Mapping[str, object]) -> Space:
    """Fix fields of a space."""
    try:
        Layout.model_validate({"global_batch_size": 1, **values}, strict=True)
        data = space.model_dump() | {name: (value,) for name, value in values.items()}
        return Space.model_validate(data, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise InvalidInputError(
            f"grid.fixed {first['loc'][0]} = {shown(first['input'])} makes no sense: {plain_reason(first)}.",
            "Expected values that a layout can have.",
            "Correct the value; `milpplan schema plan` describes the fields of a layout.",
        ) from error


def _variants(
    study: Study, hardware: dict[str, HardwareSpec], directory: Path
) -> dict[tuple[str, int], HardwareSpec]:
    """Build every hardware under every combination of the what-ifs, by name and number of the combination."""

    def load(name: str) -> HardwareSpec:
        other: HardwareSpec = _load(load_hardware, name, directory, "what_if")
        return other

    variants = {}
    for name, spec in hardware.items():
        for i, cases in enumerate(combinations(study)):
            variant = spec
            for axis, case in zip(study.what_if, cases, strict=True):
                variant = apply_case(variant, case, load, f"what_if {shown(axis.name)}, case {shown(case.name)}")
            variants[name, i] = variant
    return variants
