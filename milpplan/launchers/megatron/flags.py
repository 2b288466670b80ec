"""Megatron-LM's list of arguments: spellings, types, choices and defaults, from its parser.

Source: the file ``megatron_flags.json``, written from ``megatron.training.arguments.add_megatron_arguments`` of
NVIDIA/Megatron-LM at d98e8a64 (2026-08-22).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Literal

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
