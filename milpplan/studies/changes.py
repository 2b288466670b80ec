"""Changes of a hardware description by dotted path: set, multiply, add, or take from another description.

A path names fields as the TOML does (``accelerator.memory_bytes``); an entry of a list has its number
(``scale_out.variants.0.bandwidth_fraction``); ``*`` stands for every field or entry that has the rest of the path
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
