"""The cells of a study: every combination of the axes, in the order of the study file, and the changed hardware.

A hardware description is changed by dotted path: set, multiply, add, or take from another description. A path
names fields as the TOML does (``accelerator.memory_bytes``); an entry of a list has its number
(``scale_out.variants.0.bandwidth_fraction``); ``*`` stands for every field or entry that has the rest of the path
(``scale_up.*.bus_bandwidth_bytes_per_s``: the tables of all collectives).

**Records** of a study file: axes of a grid, what-ifs on the hardware, prices, and solve settings. A cell is one
choice from every axis.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from math import prod
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, Field, JsonValue, ValidationError, model_validator

from milpplan.errors import InvalidInputError, MilpplanError, UnknownNameError
from milpplan.optimize import DEFAULT_GAP
from milpplan.optimize.milp.backends import backend_names
from milpplan.problem import (
    HardwareSpec,
    Job,
    Layout,
    ModelSpec,
    Problem,
    Space,
    load_hardware,
    load_model,
    parse_json,
    read_text,
    validated,
)
from milpplan.problem.hardware import PrecisionName
from milpplan.problem.problem import MAX_BATCH, MAX_GPUS, MAX_SEQUENCE, SPACES
from milpplan.problem.reading import parse_toml, plain_reason, shown
from milpplan.problem.records import PositiveFloat, Record
from milpplan.units import engineering_text

OPERATIONS: Final = ("set", "multiply", "add", "replace_from")
"""Operations on a value of the hardware, in the order in which a case applies them."""
MAX_NUMBER: Final = 1e30
"""Larger than any number of a hardware description."""
MAX_VALUES: Final = 10_000
"""Maximum number of values of one axis."""


def _dotted(value: object) -> object:
    """Write ``{scale_up = {num_gpus = 2}}`` as ``{"scale_up.num_gpus" = 2}``.

    TOML reads a dotted key without quotes as the first form.
    """
    if not isinstance(value, Mapping):
        return value
    flat: dict[str, Any] = {}
    for name, inner in value.items():
        deeper = _dotted(inner)
        if isinstance(deeper, dict) and deeper:
            flat |= {f"{name}.{rest}": leaf for rest, leaf in deeper.items()}
        else:
            flat[name] = deeper
    return flat


def _different(values: tuple[Any, ...]) -> None:
    """Refuse repeated values."""
    # The type separates booleans from numbers.
    keys = [(type(value), value) if isinstance(value, str | int) else repr(value) for value in values]
    if len(set(keys)) < len(keys):
        twice = next(value for i, value in enumerate(values) if keys[i] in keys[:i])
        raise ValueError(f"{twice!r} stands there twice")


Name = Annotated[str, Field(min_length=1, max_length=200)]
Names = Annotated[tuple[Name, ...], Field(min_length=1, max_length=MAX_VALUES)]
DottedPath = Annotated[str, Field(min_length=1, max_length=400)]
DottedPaths = DottedPath | Annotated[tuple[DottedPath, ...], Field(min_length=1, max_length=100)]
Factor = Annotated[float, Field(gt=0, le=1e9)]
Term = Annotated[float, Field(ge=-1e30, le=1e30)]
Gpus = Annotated[int, Field(ge=1, le=MAX_GPUS)]
Batch = Annotated[int, Field(ge=1, le=MAX_BATCH)]
Length = Annotated[int, Field(ge=1, le=MAX_SEQUENCE)]
FixedValue = bool | int | Annotated[str, Field(max_length=100)]
Many = Field(min_length=1, max_length=MAX_VALUES)


class Grid(Record):
    """The axes: every combination of their values is solved."""

    model: Names
    """Names or files; a file's path is relative to the study file."""
    hardware: Names
    """Names or files, as of models."""
    num_gpus: Annotated[tuple[Gpus, ...], Many]
    global_batch_size: Annotated[tuple[Batch, ...], Many]
    """Sequences a step."""
    sequence_length: Annotated[tuple[Length, ...], Field(max_length=MAX_VALUES)] = ()
    """Tokens a sequence; empty: each model's own."""
    precision: Annotated[tuple[PrecisionName, ...], Many] = ("bf16",)
    attention_kernel: Annotated[tuple[Literal["flash", "unfused"], ...], Many] = ("flash",)
    grad_dtype: Annotated[tuple[Literal["fp32", "bf16"], ...], Many] = ("fp32",)
    space: Names = ("free",)
    """``uniform``, ``free`` or ``any``, as ``milpplan solve --space``."""
    fixed: Annotated[tuple[dict[Name, FixedValue], ...], Many] = ({},)
    """Fields of the layout with one value, as ``milpplan solve --fix``; an empty table fixes none."""

    @model_validator(mode="after")
    def _values_differ(self) -> Grid:
        """Refuse repeated values of an axis."""
        for name in type(self).model_fields:
            try:
                _different(getattr(self, name))
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
        return self


class Case(Record):
    """One value of a what-if: nothing, or changes of the hardware that are made together."""

    name: Name
    set: Annotated[dict[DottedPath, JsonValue], Field()] = {}
    """New values by dotted path; a table sets the fields that it names and leaves the others."""
    multiply: Annotated[dict[DottedPath, Factor], BeforeValidator(_dotted)] = {}
    """Factors by dotted path, on a number or on every number of a table of them."""
    add: Annotated[dict[DottedPath, Term], BeforeValidator(_dotted)] = {}
    replace_from: Annotated[dict[DottedPath, Name], BeforeValidator(_dotted)] = {}
    """By dotted path the hardware, a name or a file, whose value of that path is taken: a whole section too."""

    @property
    def changes_something(self) -> bool:
        """True if the case changes the hardware."""
        unity = all(factor == 1 for factor in self.multiply.values()) and not any(self.add.values())
        return bool(self.set or self.replace_from) or not unity


class WhatIf(Record):
    """An axis of hardware changes.

    It has a path (or several, changed together) with values for one operation, or cases with any changes. The
    first value is the reference of the others.
    """

    name: Name
    path: DottedPaths | None = None
    set: Annotated[tuple[JsonValue, ...], Field(max_length=MAX_VALUES)] = ()
    multiply: Annotated[tuple[Factor, ...], Field(max_length=MAX_VALUES)] = ()
    add: Annotated[tuple[Term, ...], Field(max_length=MAX_VALUES)] = ()
    replace_from: Annotated[tuple[Name, ...], Field(max_length=MAX_VALUES)] = ()
    cases: Annotated[tuple[Case, ...], Field(max_length=MAX_VALUES)] = ()

    @model_validator(mode="after")
    def _one_form(self) -> WhatIf:
        """Require either a path with values of one operation, or cases."""
        given = [name for name in OPERATIONS if getattr(self, name)]
        if (self.path is None) == (not self.cases):
            raise ValueError("give either path with a list of values, or cases")
        if len(given) != (0 if self.cases else 1):
            wanted = "none of" if self.cases else "exactly one of"
            raise ValueError(f"expected {wanted} {', '.join(OPERATIONS)}, got {', '.join(given) or 'none'}")
        names = [case.name for case in self.all_cases]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"the case {repeated[0]!r} stands there twice")
        return self

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths that change together; empty with cases."""
        return (self.path,) if isinstance(self.path, str) else self.path or ()

    @cached_property
    def all_cases(self) -> tuple[Case, ...]:
        """The values as cases, each named after its value."""
        if self.cases:
            return self.cases
        operation = next(name for name in OPERATIONS if getattr(self, name))
        values: tuple[Any, ...] = getattr(self, operation)
        return tuple(
            Case.model_validate({"name": _words(operation, value), operation: dict.fromkeys(self.paths, value)})
            for value in values
        )


def _words(operation: str, value: Any) -> str:
    """Name the case of a value in the short form."""
    # An integer too large for a float is refused when it is set.
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MAX_NUMBER
    text = engineering_text(value) if is_number else str(value)[:200]
    if operation == "multiply":
        return f"x{text}"
    return f"+{text}" if operation == "add" and value >= 0 else text


class SolveSettings(Record):
    """Solve settings of every cell, as the options of ``milpplan solve``.

    A time limit stops each solve at a different moment, so results then depend on the machine.
    """

    backend: Name = "auto"
    gap: Annotated[float, Field(ge=0, lt=1)] = DEFAULT_GAP
    simplest: bool = True
    """False: the fastest plan found, not the simplest plan within the gap (``--fastest``)."""
    time_limit_s: PositiveFloat | None = None
    seed: Annotated[int, Field(ge=0, le=2_147_483_647)] = 1
    witness: bool = True


class Study(Record):
    """A study: the grid, the what-ifs, and what a GPU costs."""

    schema_version: Literal[1] = 1
    name: Name
    grid: Grid
    what_if: Annotated[tuple[WhatIf, ...], Field(max_length=20)] = ()
    combine: Literal["grid", "one_at_a_time"] = "grid"
    """``grid``: every combination of the what-ifs; ``one_at_a_time``: the first case of each, and every other case
    alone."""
    prices: dict[Name, PositiveFloat] = {}
    """Price of a GPU for an hour, by hardware as the grid names it."""
    currency: Annotated[str, Field(min_length=1, max_length=20)] = "USD"
    solve: SolveSettings = SolveSettings()

    @model_validator(mode="after")
    def _names_differ(self) -> Study:
        """Refuse repeated names of axes."""
        _different(tuple(axis.name for axis in self.what_if))
        taken = sorted({axis.name for axis in self.what_if} & set(Grid.model_fields))
        if taken:
            raise ValueError(f"the what-if {taken[0]!r} has the name of an axis of the grid")
        return self


EVERY: Final = "*"
UNCHANGEABLE: Final = ("name", "schema_version")
SHOWN_PATHS: Final = 3

Load = Callable[[str], HardwareSpec]
Location = tuple[Any, Any]
"""A container and the key or index in it."""


def apply_case(hardware: HardwareSpec, case: Case, load: Load, source: str) -> HardwareSpec:
    """Make a case's changes to hardware.

    Args:
        hardware: the hardware, which stays as it is.
        case: the changes.
        load: finds other hardware by name.
        source: names the case in messages.

    Raises:
        UnknownNameError: no hardware description has such a path.
        InvalidInputError: a change is invalid here, or gives an invalid description.
    """
    data: dict[str, Any] = hardware.model_dump(mode="json")
    for path, other in case.replace_from.items():
        _replace(data, path, load(other), source)
    for path, value in case.set.items():
        _set(data, path, value, source)
    for path, factor in case.multiply.items():
        _scale(data, path, factor, 0.0, f"{source}: multiply {path} by {factor:g}")
    for path, term in case.add.items():
        _scale(data, path, 1.0, term, f"{source}: add {term:g} to {path}")
    return validated(HardwareSpec, data, f"{source} on {hardware.name}")


@cache
def known_paths() -> tuple[str, ...]:
    """List every dotted path of a hardware description, sections included."""
    return tuple(_paths(HardwareSpec, ""))


def _paths(record: type[BaseModel], prefix: str) -> Iterator[str]:
    """Yield the dotted paths of a record."""
    for name, field in record.model_fields.items():
        if not prefix and name in UNCHANGEABLE:
            continue
        path = f"{prefix}{name}"
        yield path
        for inner, repeated in _records(field.annotation, False):
            yield from _paths(inner, f"{path}.{EVERY}." if repeated else f"{path}.")


def _records(annotation: Any, repeated: bool) -> Iterator[tuple[type[BaseModel], bool]]:
    """Yield the records inside a field's type, with True for a list of them."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, repeated
        return
    origin = get_origin(annotation)
    if origin in (Annotated, Union, UnionType, tuple):
        for inner in get_args(annotation):
            yield from _records(inner, repeated or origin is tuple)


def _set(data: dict[str, Any], path: str, value: Any, source: str) -> None:
    """Set a value at every location of a path; a table sets the fields that it names."""
    for location_path, (container, key) in _locations(data, path, source):
        if isinstance(value, dict) and isinstance(container[key], dict):
            for name, inner in value.items():
                _set(data, f"{location_path}.{name}", inner, source)
        else:
            container[key] = value


def _replace(data: dict[str, Any], path: str, other: HardwareSpec, source: str) -> None:
    """Take the value of a path from other hardware."""
    locations = _locations(data, path, source)
    if EVERY in path.split("."):
        raise InvalidInputError(
            f"{source}: replace_from has the path {shown(path)}.",
            f"Expected a path without {EVERY}.",
            "Name every section that is to be taken.",
        )
    _, (container, key) = locations[0]
    _, (other_container, other_key) = _locations(
        other.model_dump(mode="json"), path, f"{source} (in {other.name})"
    )[0]
    container[key] = other_container[other_key]


def _scale(data: dict[str, Any], path: str, factor: float, term: float, source: str) -> None:
    """Replace the numbers of a path by value * factor + term."""
    for _, (container, key) in _locations(data, path, source):
        container[key] = _scaled(container[key], factor, term, path, source)


def _scaled(value: Any, factor: float, term: float, path: str, source: str) -> Any:
    """Return value * factor + term, of a number or of every number of a nested list."""
    if isinstance(value, list) and value:
        return [_scaled(inner, factor, term, path, source) for inner in value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        inside = [known_path for known_path in known_paths() if known_path.startswith(f"{path}.")]
        raise InvalidInputError(
            f"{source}: the value is {'a section' if inside else shown(value)}, not a number.",
            "Expected the path of a number, or of a list of numbers.",
            f"Name a number inside: {', '.join(inside[:SHOWN_PATHS])}." if inside else "Use set for it.",
        )
    new = value * factor + term
    if isinstance(value, float):
        return new
    whole = round(new)
    # Bytes may be rounded; other whole numbers may not.
    if whole != new and not path.endswith("_bytes"):
        raise InvalidInputError(
            f"{source}: {value} would become {new:g}.", "Expected a whole number.", "Use set, or another factor."
        )
    return whole


def _locations(data: dict[str, Any], path: str, source: str) -> list[tuple[str, Location]]:
    """Return the locations of a path, each with its path without wildcards.

    Raises:
        UnknownNameError: the path leads nowhere.
    """
    steps = path.split(".")
    locations = [] if steps[0] in UNCHANGEABLE else list(_walk(data, steps, ""))
    if locations:
        return locations
    general = ".".join(EVERY if step.isdigit() else step for step in steps)
    if general in known_paths():
        raise InvalidInputError(
            f"{source}: {path} is not there in {data['name']}.",
            "Expected a section that this hardware has.",
            f"Set the whole section {path.rpartition('.')[0]}, or take it from other hardware with replace_from.",
        )
    close = difflib.get_close_matches(path, known_paths(), n=SHOWN_PATHS, cutoff=0.5)
    same_field = [known_path for known_path in known_paths() if known_path.rpartition(".")[2] == steps[-1]]
    nearest = list(dict.fromkeys([*same_field, *close]))[:SHOWN_PATHS]
    raise UnknownNameError(
        f"{source}: there is no {shown(path)} in a hardware description.",
        f"Nearest: {', '.join(nearest)}." if nearest else "Expected a path such as accelerator.memory_bytes.",
        "Correct the path; `milpplan schema hardware` lists all fields.",
    )


def _walk(data: Any, steps: list[str], prefix: str) -> Iterator[tuple[str, Location]]:
    """Yield the locations of a path with wildcards, each with its path without."""
    step, rest = steps[0], steps[1:]
    for key in _keys(data, step):
        location_path = f"{prefix}{key}"
        if not rest:
            yield location_path, (data, key)
        else:
            yield from _walk(data[key], rest, f"{location_path}.")


def _keys(data: Any, step: str) -> list[Any]:
    """Return the keys of a container that match a step of a path."""
    if isinstance(data, dict):
        return list(data) if step == EVERY else [step] if step in data else []
    if isinstance(data, list):
        every = list(range(len(data)))
        return every if step == EVERY else [int(step)] if step.isdecimal() and int(step) in every else []
    return []


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


def read_study(path: Path) -> Study:
    """Read the study of a TOML or JSON file.

    Raises:
        InvalidInputError: the file is wrong; the message lists the fields.
    """
    text = read_text(path)
    is_json = path.suffix.lower() == ".json" or text.lstrip().startswith("{")
    return study_of((parse_json if is_json else parse_toml)(text, str(path)), str(path))


def study_of(data: dict[str, Any], source: str) -> Study:
    """Build the study of plain data; ``source`` names it in messages.

    Raises:
        InvalidInputError: the data are wrong; the message lists the fields.
    """
    return validated(Study, data, source)
