"""Writer of nested tables as YAML that every parser reads alike, with decimal points and quotes where needed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*( [A-Za-z0-9_./-]+)*")
_WORDS = {"true", "false", "null", "yes", "no", "on", "off", "y", "n", "none"}


def yaml_lines(value: Mapping[str, Any] | list[Any], indent: int = 0) -> list[str]:
    """Write the lines of a table, or of a list of tables."""
    lines: list[str] = []
    space = " " * indent
    if isinstance(value, list):
        for element in value:
            inner = yaml_lines(element, indent + 2)
            lines += [f"{space}- {inner[0].strip()}", *inner[1:]]
        return lines
    for name, inner_value in value.items():
        if isinstance(inner_value, Mapping):
            lines += [f"{space}{name}:", *yaml_lines(inner_value, indent + 2)]
        else:
            lines.append(f"{space}{name}: {scalar(inner_value)}")
    return lines


def scalar(value: object) -> str:
    """Write a value on its line. YAML 1.1 reads 1e-08 as text, so an exponent gets a decimal point before it."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, float):
        text = repr(value)
        mantissa, exponent, power = text.partition("e")
        return f"{mantissa}.0e{power}" if exponent and "." not in mantissa else text
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    return json.dumps(value)
