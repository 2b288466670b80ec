"""From a file or a text to a validated record; whatever is wrong with it becomes an ``InvalidInputError``.

Validation is strict: a string is not a number and a yes is not a one. The only leeway is that a float with
a whole value (``80e9``) serves as an integer.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from milpplan.errors import InvalidInputError
from milpplan.units import MIB

RecordType = TypeVar("RecordType", bound=BaseModel)

MAX_FILE_BYTES = 16 * MIB
_EXACT_FLOAT_INTEGER = 2**53
_SHOWN_ERRORS = 4
_NAMED_ERRORS = 40
_SHOWN_CHARACTERS = 60


def shown(value: object) -> str:
    """A value in an error message: its repr, shortened."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return "a value too large to print"
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."


def read_text(path: Path) -> str:
    """The UTF-8 text of a regular file of at most 16 MiB."""
    do = "Give the path of a .toml or .json file."
    try:
        if path.is_dir():
            inside = path / "config.json"
            hint = f"Give a file in it, such as {inside}." if inside.is_file() else do
            raise InvalidInputError(f"{path} is a directory.", "Expected a file.", hint)
        if not path.is_file():
            raise InvalidInputError(f"{path} does not exist or is not a regular file.", "Expected a file.", do)
        if path.stat().st_size > MAX_FILE_BYTES:
            raise InvalidInputError(
                f"{path} has {path.stat().st_size:,} bytes.",
                f"Expected a description of at most {MAX_FILE_BYTES:,} bytes.",
                "Give the configuration, not the weights.",
            )
        return path.read_bytes().decode("utf-8-sig")
    except (OSError, ValueError) as error:
        reason = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else str(error)
        raise InvalidInputError(f"{path} cannot be read: {reason}.", "Expected a text file.", do) from error


def whole_or_float(text: str) -> int | float:
    """A number's text as an integer where its value is whole, such as ``80e9``."""
    value = float(text)
    return int(value) if abs(value) <= _EXACT_FLOAT_INTEGER and value.is_integer() else value


def parse_toml(text: str, source: str) -> dict[str, Any]:
    """The table of a TOML text; ``source`` names it in messages."""
    try:
        return tomllib.loads(text, parse_float=whole_or_float)
    except (ValueError, RecursionError) as error:
        raise _unparsable(source, "TOML", error) from error


def parse_json(text: str, source: str) -> dict[str, Any]:
    """The object of a JSON text; ``source`` names it in messages.

    Raises:
        InvalidInputError: it is none, or a key is given twice: readers disagree which of the two counts.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice, seen = "", set[str]()
            for name, _ in pairs:
                twice = name if name in seen else twice
                seen.add(name)
            raise InvalidInputError(
                f"{source} gives the key {shown(twice)} twice.",
                "Expected each key of an object once.",
                "Delete one of the two.",
            )
        return found

    try:
        data = json.loads(text, parse_float=whole_or_float, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise _unparsable(source, "JSON", error) from error
    if not isinstance(data, dict):
        raise InvalidInputError(
            f"{source} holds {shown(data)}.",
            "Expected a JSON object at its top.",
            "Wrap the fields in { }.",
        )
    return data


def _unparsable(source: str, language: str, error: Exception) -> InvalidInputError:
    reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
    return InvalidInputError(
        f"{source} is not valid {language}: {reason}.",
        f"Expected {language}.",
        "Correct the place named.",
    )


def validated(record: type[RecordType], data: object, source: str) -> RecordType:
    """``data`` as a ``record``, strictly; every wrong field is named with the value seen."""
    try:
        return record.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        raise invalid_fields(record, error, source) from error
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInputError(
            f"{source} holds a value that is no text, number, list or table: {shown(str(error))}.",
            f"Expected the fields of {record.__name__}.",
            "Leave out dates, and numbers of thousands of digits.",
        ) from error


def invalid_fields(record: type[BaseModel], error: ValidationError, source: str) -> InvalidInputError:
    """pydantic's findings in one sentence: field, what is wrong, value seen; of many the fields alone."""
    found = [dict(one) for one in error.errors(include_url=False, include_context=False)]
    findings = "; ".join(_finding(one) for one in found[:_SHOWN_ERRORS])
    others = [_field(one) for one in found[_SHOWN_ERRORS:]]
    more = ""
    if others:
        named = ", ".join(others[:_NAMED_ERRORS]) + (", ..." if len(others) > _NAMED_ERRORS else "")
        more = f"; and {len(others)} more: {named}"
    return InvalidInputError(
        f"{source}: {findings}{more}.",
        f"Expected the fields of {record.__name__}: {', '.join(record.model_fields)}.",
        "Correct the fields named; `milpplan schema` lists all, `milpplan show NAME` prints an example.",
    )


def _field(error: dict[str, Any]) -> str:
    """Where a finding is, as ``measured.step_time_s`` or ``flags[0]``."""
    field = ""
    for part in error["loc"]:
        field += f"[{part}]" if isinstance(part, int) else f".{part}" if field else str(part)
    return field


def _finding(error: dict[str, Any]) -> str:
    field = _field(error)
    seen = "" if error["type"] == "missing" else f" (got {shown(error['input'])})"
    return f"{field + ': ' if field else ''}{error['msg']}{seen}"
