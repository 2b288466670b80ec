"""Changes of a hardware description by dotted path: set, multiply, add, or take from another description.

A path names fields as the TOML does (``accelerator.memory_bytes``); an entry of a list has its number
(``scale_out.variants.0.bandwidth_fraction``); ``*`` stands for every field or entry that has what follows
(``scale_up.*.bus_bandwidth_bytes_per_s``: the tables of all collectives).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from functools import cache
from types import UnionType
from typing import Annotated, Any, Final, Union, get_args, get_origin

from pydantic import BaseModel

from milpplan.errors import InvalidInputError, UnknownNameError
from milpplan.problem.hardware import HardwareSpec
from milpplan.problem.reading import shown, validated
from milpplan.studies.records import Case

EVERY: Final = "*"
UNCHANGEABLE: Final = ("name", "schema_version")
SHOWN_PATHS: Final = 3

Load = Callable[[str], HardwareSpec]
Place = tuple[Any, Any]
"""A container and the key or index in it."""


def changed(hardware: HardwareSpec, case: Case, load: Load, source: str) -> HardwareSpec:
    """The hardware with a case's changes made; ``load`` finds other hardware by name, ``source`` names the case in
    messages.

    Raises:
        UnknownNameError: a path that no hardware description has.
        InvalidInputError: a change that makes no sense here, or gives a description that does not.
    """
    data: dict[str, Any] = hardware.model_dump(mode="json")
    for path, other in case.replace_from.items():
        _replace(data, path, load(other), source)
    for path, value in case.set.items():
        _set(data, path, value, source)
    for path, factor in case.multiply.items():
        _map(data, path, factor, 0.0, f"{source}: multiply {path} by {factor:g}")
    for path, term in case.add.items():
        _map(data, path, 1.0, term, f"{source}: add {term:g} to {path}")
    return validated(HardwareSpec, data, f"{source} on {hardware.name}")


@cache
def known_paths() -> tuple[str, ...]:
    """Every dotted path of a hardware description, sections included."""
    return tuple(_paths(HardwareSpec, ""))


def _paths(record: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in record.model_fields.items():
        if not prefix and name in UNCHANGEABLE:
            continue
        path = f"{prefix}{name}"
        yield path
        for inner, repeated in _records(field.annotation, False):
            yield from _paths(inner, f"{path}.{EVERY}." if repeated else f"{path}.")


def _records(annotation: Any, repeated: bool) -> Iterator[tuple[type[BaseModel], bool]]:
    """The records inside a field's type, and whether the field holds a list of them."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, repeated
        return
    origin = get_origin(annotation)
    if origin in (Annotated, Union, UnionType, tuple):
        for inner in get_args(annotation):
            yield from _records(inner, repeated or origin is tuple)


def _set(data: dict[str, Any], path: str, value: Any, source: str) -> None:
    for own, (container, key) in _places(data, path, source):
        if isinstance(value, dict) and isinstance(container[key], dict):
            for name, inner in value.items():
                _set(data, f"{own}.{name}", inner, source)
        else:
            container[key] = value


def _replace(data: dict[str, Any], path: str, other: HardwareSpec, source: str) -> None:
    places = _places(data, path, source)
    if EVERY in path.split("."):
        raise InvalidInputError(
            f"{source}: replace_from has the path {shown(path)}.",
            f"Expected a path without {EVERY}.",
            "Name every section that is to be taken.",
        )
    _, (container, key) = places[0]
    _, (theirs, same_key) = _places(other.model_dump(mode="json"), path, f"{source} (in {other.name})")[0]
    container[key] = theirs[same_key]


def _map(data: dict[str, Any], path: str, factor: float, term: float, source: str) -> None:
    for _, (container, key) in _places(data, path, source):
        container[key] = _mapped(container[key], factor, term, path, source)


def _mapped(value: Any, factor: float, term: float, path: str, source: str) -> Any:
    """value * factor + term, of a number or of every number of a nested list."""
    if isinstance(value, list) and value:
        return [_mapped(inner, factor, term, path, source) for inner in value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        inside = [one for one in known_paths() if one.startswith(f"{path}.")]
        raise InvalidInputError(
            f"{source}: the value is {'a section' if inside else shown(value)}, not a number.",
            "Expected the path of a number, or of a list of numbers.",
            f"Name a number inside: {', '.join(inside[:SHOWN_PATHS])}." if inside else "Use set for it.",
        )
    new = value * factor + term
    if isinstance(value, float):
        return new
    whole = round(new)
    # A byte more or less means nothing; half a GPU does.
    if whole != new and not path.endswith("_bytes"):
        raise InvalidInputError(
            f"{source}: {value} would become {new:g}.", "Expected a whole number.", "Use set, or another factor."
        )
    return whole


def _places(data: dict[str, Any], path: str, source: str) -> list[tuple[str, Place]]:
    """Where a path leads: at least one place, each with its path without wildcards.

    Raises:
        UnknownNameError: nowhere.
    """
    steps = path.split(".")
    found = [] if steps[0] in UNCHANGEABLE else list(_walk(data, steps, ""))
    if found:
        return found
    general = ".".join(EVERY if step.isdigit() else step for step in steps)
    if general in known_paths():
        raise InvalidInputError(
            f"{source}: {path} is not there in {data['name']}.",
            "Expected a section that this hardware has.",
            f"Set the whole section {path.rpartition('.')[0]}, or take it from other hardware with replace_from.",
        )
    close = difflib.get_close_matches(path, known_paths(), n=SHOWN_PATHS, cutoff=0.5)
    last = [one for one in known_paths() if one.rpartition(".")[2] == steps[-1]]
    nearest = list(dict.fromkeys([*last, *close]))[:SHOWN_PATHS]
    raise UnknownNameError(
        f"{source}: there is no {shown(path)} in a hardware description.",
        f"Nearest: {', '.join(nearest)}." if nearest else "Expected a path such as accelerator.memory_bytes.",
        "Correct the path; `milpplan schema hardware` lists all fields.",
    )


def _walk(data: Any, steps: list[str], before: str) -> Iterator[tuple[str, Place]]:
    """The places that a path with wildcards leads to, each with its path without."""
    step, rest = steps[0], steps[1:]
    for key in _keys(data, step):
        own = f"{before}{key}"
        if not rest:
            yield own, (data, key)
        else:
            yield from _walk(data[key], rest, f"{own}.")


def _keys(data: Any, step: str) -> list[Any]:
    """The keys of a container that one step of a path means."""
    if isinstance(data, dict):
        return list(data) if step == EVERY else [step] if step in data else []
    if isinstance(data, list):
        every = list(range(len(data)))
        return every if step == EVERY else [int(step)] if step.isdecimal() and int(step) in every else []
    return []
