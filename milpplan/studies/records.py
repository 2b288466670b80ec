"""Records of a study file: axes of a grid, what-ifs on the hardware, prices, and solve settings.

A cell of the study is one choice from every axis. This module reads no files and builds no problems: names and
dotted paths are looked up in ``milpplan.studies.grid``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, JsonValue, model_validator

from milpplan.optimize.result import DEFAULT_GAP
from milpplan.problem.problem import MAX_BATCH, MAX_GPUS, MAX_SEQUENCE
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
    precision: Annotated[tuple[Literal["bf16", "fp8"], ...], Many] = ("bf16",)
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
