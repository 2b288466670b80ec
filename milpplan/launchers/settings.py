"""Settings of a configuration file, by ``section.name``: what was looked at, and what may cost time unseen."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from milpplan.errors import InvalidInputError
from milpplan.specs.reading import shown


@dataclass(slots=True)
class Settings:
    """Values that a file gives. ``known``: every name with its default, and its choices where it has some."""

    values: Mapping[str, Any]
    known: Mapping[str, tuple[Any, ...]]
    looked_at: set[str] = field(default_factory=set)

    def get(self, name: str) -> Any:
        """The value; the framework's default where the file has none."""
        self.looked_at.add(name)
        return self.values[name] if name in self.values else self.known.get(name, (None,))[0]

    def number(self, name: str) -> int:
        """A whole number.

        Raises:
            InvalidInputError: it is none.
        """
        found = self.get(name)
        if type(found) is not int:
            raise self._wrong(name, "a whole number")
        return found

    def degree(self, name: str) -> int:
        """A whole number above zero.

        Raises:
            InvalidInputError: it is none.
        """
        found = self.number(name)
        if found < 1:
            raise self._wrong(name, "a whole number above zero")
        return found

    def switch(self, name: str) -> bool:
        """True or false.

        Raises:
            InvalidInputError: neither.
        """
        found = self.get(name)
        if type(found) is not bool:
            raise self._wrong(name, "true or false")
        return found

    def text(self, name: str) -> str:
        """A word, one of its choices where it has some.

        Raises:
            InvalidInputError: another.
        """
        found = self.get(name)
        choices = self.known.get(name, (None,))[1:]
        if not isinstance(found, str) or (choices and found not in choices[0]):
            raise self._wrong(name, f"one of {', '.join(map(str, choices[0]))}" if choices else "a text")
        return found

    def _wrong(self, name: str, expected: str) -> InvalidInputError:
        return InvalidInputError(
            f"{name} is {shown(self.values.get(name))}.", f"Expected {expected}.", f"Correct {name}."
        )

    def _known_as(self, name: str) -> str | None:
        """The name under which the framework knows a setting: its own, or that of a table that it is in."""
        while name and name not in self.known:
            name = name.rpartition(".")[0]
        return name or None

    def unknown(self, quiet: re.Pattern[str]) -> tuple[str, ...]:
        """Names that the framework does not have, but for those known to change nothing."""
        return tuple(
            name
            for name in self.values
            if self._known_as(name) is None and name not in self.looked_at and not quiet.fullmatch(name)
        )

    def unpriced(self, quiet: re.Pattern[str]) -> tuple[str, ...]:
        """Settings that nobody looked at, that may change the cost and are not at their defaults."""
        return tuple(
            f"{name} = {shown(value)}"
            for name, value in self.values.items()
            if self._known_as(name)
            and name not in self.looked_at
            and not quiet.fullmatch(name)
            and (name not in self.known or value != self.known[name][0])
        )


MAX_DEPTH, MAX_SETTINGS = 16, 100_000
"""Of tables in tables, and of settings: aliases of YAML may stand for more than any file has."""


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested table by dotted names; lists stay values.

    Raises:
        InvalidInputError: it nests or repeats without end.
    """
    found: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, Mapping) and prefix.count(".") < MAX_DEPTH:
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
        if isinstance(value, Mapping) and (prefix.count(".") >= MAX_DEPTH or len(found) > MAX_SETTINGS):
            raise InvalidInputError(
                f"Tables nest more than {MAX_DEPTH} deep, or hold more than {MAX_SETTINGS} settings.",
                "Expected the configuration of a run.",
                "Write it without aliases.",
            )
    return found


def without(values: Mapping[str, Any], ignored: Collection[str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The settings that the caller wants to see, and the others as text."""
    names = {name.lstrip("-") for name in ignored}
    missing = sorted(names - set(values))
    if missing:
        raise InvalidInputError(
            f"--ignore {shown(missing[0])} is no setting of the file.",
            "Expected section.name of a setting that the file has.",
            "Check the name.",
        )
    kept = {name: value for name, value in values.items() if name not in names}
    return kept, tuple(f"{name} = {shown(values[name])}" for name in values if name in names)


def check_priced(settings: Settings, quiet: re.Pattern[str]) -> None:
    """Nothing that may change the cost is left unseen.

    Raises:
        InvalidInputError: something is; all of it is named.
    """
    left = settings.unpriced(quiet)
    if left:
        shown_names = ", ".join(left[:12]) + (f" and {len(left) - 12} more" if len(left) > 12 else "")
        raise InvalidInputError(
            f"{len(left)} setting(s) may change the cost in ways that are not priced: {shown_names}.",
            "Expected settings that a plan or a model has, or that change neither time nor memory.",
            f"Take them out, or accept not to see what they cost: --ignore {left[0].split()[0]} (repeatable).",
        )
