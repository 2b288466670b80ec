"""Arguments of Megatron-LM: the flags of its parser, and a mapping from flags to given values.

Source of spellings, types, choices and defaults: the file ``megatron_flags.json``, written from
``megatron.training.arguments.add_megatron_arguments`` of NVIDIA/Megatron-LM at d98e8a64 (2026-08-22).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Literal

from milpplan.errors import InvalidInputError
from milpplan.problem.reading import shown

COMMIT = "d98e8a64"
"""Commit of NVIDIA/Megatron-LM that flags and rules are quoted from."""

Kind = Literal["value", "on", "off", "switch"]


@dataclass(frozen=True, slots=True)
class Flag:
    """Argument of Megatron-LM. ``kind``: it takes values, or it is a ``switch`` (with two spellings)."""

    spellings: tuple[str, ...]
    kind: Kind
    type: Literal["int", "float", "str"]
    nargs: str | None
    choices: tuple[str, ...]
    default: str | None

    @property
    def name(self) -> str:
        """Spelling that is written."""
        return self.spellings[0]

    def refusal(self, values: tuple[str, ...]) -> str:
        """Describe errors in the values as the parser would; empty if there are none."""
        if self.kind != "value":
            return "takes no value" if values else ""
        wanted = 1 if self.nargs is None else None if self.nargs in ("+", "*") else int(self.nargs)
        if (wanted is not None and len(values) != wanted) or (self.nargs == "+" and not values):
            return f"takes {'one or more values' if wanted is None else f'{wanted} value(s)'}, got {len(values)}"
        for value in values:
            if not _has_type(value, self.type):
                return f"takes {'a whole number' if self.type == 'int' else 'a number'}, got {value!r}"
            if self.choices and value not in self.choices:
                return f"is one of {', '.join(self.choices)}, got {value!r}"
        return ""


def _has_type(value: str, kind: str) -> bool:
    if kind == "str":
        return True
    try:
        int(value) if kind == "int" else float(value)
    except ValueError:
        return False
    return True


@cache
def megatron_flags() -> dict[str, Flag]:
    """Map every spelling to its flag."""
    text = resources.files("milpplan.launchers").joinpath("megatron_flags.json").read_text(encoding="utf-8")
    table: dict[str, Flag] = {}
    for entry in json.loads(text)["flags"]:
        default = entry.get("default")
        flag = Flag(
            spellings=tuple(entry["flags"]),
            kind=entry["kind"],
            type=entry.get("type", "str"),
            nargs=entry.get("nargs") and str(entry["nargs"]),
            choices=tuple(str(choice) for choice in entry.get("choices", ())),
            default=" ".join(map(str, default)) if isinstance(default, list) else default and str(default),
        )
        table |= dict.fromkeys(flag.spellings, flag)
    return table


Values = tuple[str, ...]


@dataclass(slots=True)
class Arguments:
    """Given flags, by their first spelling, with their values (none for a switch).

    ``looked_at`` collects the flags that have been asked for. Flags that a reader never asked for have not entered
    its result.
    """

    values: Mapping[str, Values]
    looked_at: set[str] = field(default_factory=set)

    def given(self, flag: str) -> bool:
        """Test whether the flag is given."""
        self.looked_at.add(flag)
        return flag in self.values

    def texts(self, flag: str) -> Values:
        """Return the values of a flag, or the default of the launcher's parser."""
        if self.given(flag):
            return self.values[flag]
        default = megatron_flags()[flag].default
        return () if default is None else tuple(default.split())

    def text(self, flag: str) -> str | None:
        """Return the only value, or its default."""
        values = self.texts(flag)
        return values[0] if values else None

    def number(self, flag: str) -> int | None:
        """Return the only value as an integer, or its default."""
        text = self.text(flag)
        return None if text is None else int(text)

    def count(self, flag: str, otherwise: int) -> int:
        """Return the integer of a flag whose parser has no default."""
        number = self.number(flag)
        return otherwise if number is None else number

    def real(self, flag: str) -> float:
        """Return the only value as a float, or its default."""
        return float(self.text(flag) or 0.0)

    def needed(self, flag: str) -> int:
        """Return a positive integer, given or by default.

        Raises:
            InvalidInputError: the value is missing or not a positive integer.
        """
        number = self.number(flag)
        if number is None or number < 1:
            raise InvalidInputError(
                f"{flag} is {'missing' if number is None else number}.",
                "Expected a positive whole number: a plan cannot be told without it.",
                f"Give {flag}.",
            )
        return number

    def stated(self, flag: str) -> int:
        """Return a positive integer that the file must state; the parser's default is not a model's size.

        Raises:
            InvalidInputError: the file does not state it.
        """
        if not self.given(flag):
            raise InvalidInputError(
                f"{flag} is missing.",
                "Expected every size of the model: no default stands in for one.",
                f"Give {flag}.",
            )
        return self.needed(flag)


def checked(pairs: Iterable[tuple[str, Values]], source: str) -> tuple[Arguments, tuple[str, ...]]:
    """Check values as the launcher's parser does, and list the flags that it does not know.

    The last occurrence of a flag counts, as in Python's argparse.

    Raises:
        InvalidInputError: a value that the parser would refuse.
    """
    known, found, unknown = megatron_flags(), {}, []
    for name, values in pairs:
        if name not in known:
            unknown.append(" ".join((name, *values)))
            continue
        flag = known[name]
        wrong = flag.refusal(values)
        if wrong:
            raise InvalidInputError(
                f"{source}: {name} {wrong}.",
                f"Expected what Megatron-LM's parser takes, got {shown(' '.join((name, *values)))}.",
                f"Correct {name}.",
            )
        found[flag.name] = values
    return Arguments(found), tuple(unknown)
