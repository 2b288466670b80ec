"""Settings of a configuration file, by ``section.name``.

Each setting is checked against the launcher's schema. It is then priced, known to have no effect on the cost,
ignored on the caller's request, or refused by name.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any, TypeVar

from milpplan.errors import InvalidInputError
from milpplan.problem.reading import shown

Value = TypeVar("Value")
Known = Mapping[str, tuple[Any, ...]]
"""Schema of a launcher: maps a name to its default, followed by its choices (a list) or its type (a text)."""

MAX_DEPTH, MAX_SETTINGS, MAX_WORDS = 16, 100_000, 10_000
"""Maximum nesting of tables, number of settings, and number of words of a command.

YAML aliases and shell variables can expand to far more than any real file holds.
"""
LARGEST = 2**63
"""Largest whole number that a setting may have."""
_SHOWN_NAMES, _COMPARED = 12, 1_000
_NAME = re.compile(r"[^.\[\]\s]+")
_NUMBER = re.compile(r"[-+]?\d{1,300}\.?\d{0,300}[eE][-+]?\d{1,4}")


@dataclass(frozen=True, slots=True)
class Code:
    """Value that only running the file would give."""

    text: str

    def __repr__(self) -> str:
        return self.text


def _whole(value: object, minimum: int) -> bool:
    return type(value) is int and minimum <= value < LARGEST


def _number(value: object) -> bool:
    """Test for a number. YAML 1.1 reads 1e-5 as text, and consumers of a number convert it."""
    if isinstance(value, str):
        return _NUMBER.fullmatch(value) is not None
    return type(value) in (int, float) and math.isfinite(value) and abs(value) < LARGEST  # type: ignore[arg-type]


def _list_of(is_element: Callable[[object], bool], value: object) -> bool:
    return isinstance(value, list) and all(map(is_element, value))


def _text(value: object) -> bool:
    return isinstance(value, str)


_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "count": ("a whole number, not below zero", lambda value: _whole(value, 0)),
    "int": ("a whole number", lambda value: _whole(value, -LARGEST)),
    "number": ("a number", _number),
    "text": ("a text", _text),
    "counts": ("a list of whole numbers", lambda value: _list_of(lambda element: _whole(element, 0), value)),
    "numbers": ("a list of numbers", lambda value: _list_of(_number, value)),
    "texts": ("a list of texts", lambda value: _list_of(_text, value)),
    "parts": ("a list of lists of texts", lambda value: _list_of(lambda element: _list_of(_text, element), value)),
    "auto": ("auto", lambda value: value == "auto"),
    "table": ("a table", lambda value: isinstance(value, Mapping)),
    "null": ("nothing (null)", lambda value: value is None),
    "code": ("a call", lambda value: isinstance(value, Code)),
}
"""Types of values: a description and a test."""


@dataclass(slots=True)
class Settings:
    """Checked values of a file. ``known`` is the schema with every name that the launcher has.

    Methods that return a value of one type raise ``InvalidInputError`` for a value of another type.
    """

    values: Mapping[str, Any]
    known: Known
    looked_at: set[str] = field(default_factory=set)

    def get(self, name: str) -> Any:
        """Return the value, or the framework's default where the file has none."""
        self.looked_at.add(name)
        return self.values[name] if name in self.values else self.known.get(name, (None,))[0]

    def size(self, name: str) -> int:
        """Return a positive integer that the file states; the default of a class is not a size of this run.

        Raises:
            InvalidInputError: the file does not state it, or it is not a positive integer.
        """
        self.looked_at.add(name)
        if self.values.get(name) is None:
            raise InvalidInputError(
                f"The file does not say {name}.",
                "Expected every size of the model and of the batch: no default of a class stands in for one.",
                f"Write {name} into the file.",
            )
        return self.degree(name)

    def number(self, name: str) -> int:
        """Return an integer."""
        return self._typed(name, int, "a whole number")

    def degree(self, name: str) -> int:
        """Return a positive integer."""
        value = self.number(name)
        if value < 1:
            raise self._wrong(name, "a whole number above zero")
        return value

    def switch(self, name: str) -> bool:
        """Return a boolean."""
        return self._typed(name, bool, "true or false")

    def text(self, name: str) -> str:
        """Return a text."""
        return self._typed(name, str, "a text")

    def _typed(self, name: str, kind: type[Value], expected: str) -> Value:
        value = self.get(name)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self._wrong(name, expected)
        return value

    def _wrong(self, name: str, expected: str) -> InvalidInputError:
        return wrong_value(name, self.values.get(name), expected)


def yaml_text(settings: Mapping[str, Any]) -> str:
    """Write settings as YAML; a dot in a name opens a section, and a list has a list in each element."""
    return "".join(f"{line}\n" for line in _yaml_lines(nested(settings), ""))


def _yaml_lines(tree: Mapping[str, Any], indent: str) -> Iterator[str]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield f"{indent}{name}:"
            yield from _yaml_lines(value, f"{indent}  ")
        elif isinstance(value, list):
            yield f"{indent}{name}:"
            yield from (f"{indent}  - [{', '.join(part)}]" for part in value)
        elif isinstance(value, bool):
            yield f"{indent}{name}: {str(value).lower()}"
        else:
            # Accelerate uses the word NO, which YAML reads as false.
            yield f"{indent}{name}: {repr(value) if value in ('NO', 'no') else value}"


def wrong_value(name: str, value: object, expected: str, purpose: str = "") -> InvalidInputError:
    """Make the error about the value of a setting, which is to be corrected for a purpose."""
    return InvalidInputError(f"{name} is {shown(value)}.", f"Expected {expected}.", f"Correct {name}{purpose}.")


@cache
def known_settings(file: str, part: str) -> Known:
    """Load names, defaults and types from a launcher's list of settings (a JSON file beside this module)."""
    text = resources.files("milpplan.launchers").joinpath(file).read_text(encoding="utf-8")
    # Not with the reader of users' files, which turns 1.0 into an integer.
    return {name: tuple(row) for name, row in json.loads(text)[part].items()}


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten a nested table to dotted names.

    ``name[3]`` names a table in a list. Other lists and empty tables stay values. A name that is not plain text is
    quoted, so that it cannot be mistaken for another.

    Raises:
        InvalidInputError: the table nests too deeply or has too many settings.
    """
    settings: dict[str, Any] = {}
    for key, value in table.items():
        name = prefix + (key if isinstance(key, str) and _NAME.fullmatch(key) else shown(key))
        if isinstance(value, Mapping) and value and name.count(".") < MAX_DEPTH:
            settings |= flat(value, f"{name}.")
        elif (
            isinstance(value, list)
            and value
            and all(isinstance(element, Mapping) and element for element in value)
        ):
            for number, element in enumerate(value):
                settings |= flat(element, f"{name}[{number}].")
        else:
            settings[name] = value
        if (isinstance(value, Mapping | list) and name.count(".") >= MAX_DEPTH) or len(settings) > MAX_SETTINGS:
            raise InvalidInputError(
                f"Tables nest more than {MAX_DEPTH} deep, or hold more than {MAX_SETTINGS} settings.",
                "Expected the configuration of a run.",
                "Write it without aliases.",
            )
    return settings


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Build nested tables from settings with dotted names."""
    tables: dict[str, Any] = {}
    for name, value in settings.items():
        *sections, key = name.split(".")
        table = tables
        for section in sections:
            table = table.setdefault(section, {})
        table[key] = value
    return tables


def admitted(
    values: Mapping[str, Any], known: Known, ignored: Collection[str], launcher: str, quiet: Mapping[str, str]
) -> tuple[Settings, tuple[str, ...]]:
    """Check the settings of a file against a schema and drop those that the caller ignores.

    Args:
        values: by dotted name.
        known: every name that the launcher has, with the type of its value.
        ignored: names or sections, with or without leading dashes.
        launcher: its name in messages.
        quiet: patterns of names that have no effect on the cost. Without choices their values may be
            any code.

    Returns:
        The remaining settings, and the ignored ones as text.

    Raises:
        InvalidInputError: a name that the launcher does not have, or a value of a wrong type.
    """
    kept, left_out = without(values, ignored)
    strange = [name for name, value in kept.items() if not _has_place(name, value, known)]
    if strange:
        close = difflib.get_close_matches(strange[0], known, n=1)
        raise InvalidInputError(
            f"{len(strange)} setting(s) are not known here as {launcher}'s, and may change the cost: "
            f"{_listed(strange)}.",
            f"Expected settings that are priced or change nothing{f', such as {close[0]}' if close else ''}.",
            f"Correct them or take them out, or accept not to see what they cost: --ignore {_plain(strange[0])} "
            "(repeatable).",
        )
    for name, value in kept.items():
        row = known.get(_place(name))
        chosen = row is not None and len(row) > 1 and isinstance(row[1], list)
        if isinstance(value, Code) and is_quiet(name, quiet) and not chosen:
            continue
        wanted = "" if row is None or _is_empty_section(name, value, known) else _expected(row, value)
        if wanted:
            raise InvalidInputError(
                f"{_plain(name)} is {shown(value)}.", f"Expected {wanted}.", f"Correct {name}."
            )
    return Settings(kept, known), left_out


def without(values: Mapping[str, Any], ignored: Collection[str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Split settings into those to check and those that the caller ignores, as text.

    Raises:
        InvalidInputError: an ignored name is no setting of the file.
    """
    left_out: dict[str, Any] = {}
    for asked in ignored:
        bare = asked.lstrip("-")
        exact = {name: value for name, value in values.items() if is_in(name, asked)}
        named = exact or {name: value for name, value in values.items() if is_in(_spoken(name), _spoken(bare))}
        if not named:
            close = difflib.get_close_matches(bare, map(_spoken, list(values)[:_COMPARED]), n=1)
            raise InvalidInputError(
                f"--ignore {shown(asked)} is no setting of the file.",
                "Expected section.name of a setting that the file has, or a section.",
                f"Did you mean {close[0]}?" if close else "Check the name.",
            )
        left_out |= named
    kept = {name: value for name, value in values.items() if name not in left_out}
    return kept, tuple(f"{_plain(name)} = {shown(value)}" for name, value in left_out.items())


def _spoken(name: str) -> str:
    """Strip a name of dashes, and of the quotes round a name that is not plain text."""
    return name.lstrip("-").replace("'", "")


def is_in(name: str, section: str) -> bool:
    """Test whether a name is a setting or stands in its section."""
    return name == section or name.startswith(f"{section}.")


def _plain(name: str) -> str:
    """Shorten a name for a message."""
    bare = name.lstrip("-")
    return bare if bare.isprintable() and len(bare) <= 100 else shown(bare)


def _listed(names: list[str]) -> str:
    rest = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return ", ".join(map(_plain, names[:_SHOWN_NAMES])) + rest


def _place(name: str) -> str:
    """Write a setting's name as in its launcher's schema, which has one entry for all tables of a list."""
    return re.sub(r"\[\d+\]", "[]", name)


def _has_place(name: str, value: object, schema: Known) -> bool:
    """Test whether a name is in the schema, is in a table whose names are free, or is an empty section."""
    above = _place(name)
    if above in schema or _is_empty_section(name, value, schema):
        return True
    while "." in above:
        above = above.rpartition(".")[0]
        if above in schema and "table" in kinds_of(schema[above]):
            return True
    return False


def _is_empty_section(name: str, value: object, schema: Known) -> bool:
    section = f"{_place(name)}."
    return isinstance(value, Mapping) and not value and any(choice.startswith(section) for choice in schema)


def kinds_of(row: tuple[Any, ...]) -> tuple[str, ...]:
    """List the types of a value, declared or taken from its default."""
    declared = row[-1]
    if len(row) > 1 and isinstance(declared, str):
        return tuple(declared.split("|"))
    default = row[0]
    if isinstance(default, bool):
        return ("bool",)
    if isinstance(default, int):
        return ("count",) if default >= 0 else ("int",)
    if isinstance(default, float):
        return ("number",)
    return ("texts",) if isinstance(default, list) else ("text",)


def _expected(row: tuple[Any, ...], value: object) -> str:
    """Describe the expected value; empty where the given value is of a correct type."""
    default = row[0]
    if len(row) > 1 and isinstance(row[1], list):
        if any(type(choice) is type(value) and choice == value for choice in [default, *row[1]]):
            return ""
        return f"one of {', '.join(str(choice) for choice in row[1])}"
    kinds = kinds_of(row)
    if (value is None and default is None) or any(_KINDS[kind][1](value) for kind in kinds):
        return ""
    return " or ".join(_KINDS[kind][0] for kind in kinds)


def check_words(words: Sequence[str], source: str) -> None:
    """Refuse a command with more words than any real command has.

    Raises:
        InvalidInputError: the command has more.
    """
    if len(words) > MAX_WORDS:
        raise InvalidInputError(
            f"{source} starts a program with {len(words):,} words.",
            f"Expected at most {MAX_WORDS:,}.",
            "Give the command that starts training.",
        )


def is_quiet(name: str, quiet: Mapping[str, str]) -> bool:
    """Test whether a setting has no effect on the cost. ``quiet``: patterns of names, with reasons."""
    return any(re.fullmatch(pattern, _place(name)) for pattern in quiet)


def check_priced(settings: Settings, quiet: Mapping[str, str]) -> None:
    """Refuse settings that may change the cost and that no reader has looked up.

    Args:
        settings: of a file.
        quiet: patterns of names that have no effect on the cost, with reasons.

    Raises:
        InvalidInputError: there are such settings; the message names all of them.
    """
    left = {
        name: value
        for name, value in settings.values.items()
        if name not in settings.looked_at
        and not is_quiet(name, quiet)
        and not (isinstance(value, Mapping) and not value)
        and not (_place(name) in settings.known and _same(value, settings.known[_place(name)][0]))
    }
    if left:
        said = [f"{_plain(name)} = {shown(value)}" for name, value in left.items()]
        rest = f" and {len(said) - _SHOWN_NAMES} more" if len(said) > _SHOWN_NAMES else ""
        raise InvalidInputError(
            f"{len(left)} setting(s) may change the cost in ways that are not priced: "
            f"{', '.join(said[:_SHOWN_NAMES])}{rest}.",
            "Expected settings that a plan or a model has, or that change neither time nor memory.",
            "Take them out, or accept not to see what they cost: "
            f"--ignore {_plain(next(iter(left)))} (repeatable).",
        )


def _same(value: object, default: object) -> bool:
    """Compare a value with the default, where 1 is not equal to true."""
    return isinstance(value, bool) == isinstance(default, bool) and value == default
