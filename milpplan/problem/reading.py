"""Readers of files and texts to validated records; every mistake becomes an ``InvalidInputError``.

Validation is strict: a string is not a number, and true is not 1. The only exception is that a float with
an integral value (``80e9``) is an integer.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import reprlib
import stat
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from milpplan.errors import InvalidInputError
from milpplan.units import MIB

RecordType = TypeVar("RecordType", bound=BaseModel)

MAX_FILE_BYTES = 16 * MIB
_EXACT_FLOAT_INTEGER = 2**53
_SHOWN_ERRORS = 4
_NAMED_ERRORS = 40
_SHOWN_CHARACTERS = 60
_LEAST_ALIKE = 0.5
_NAME_PART = re.compile(r"\d+|[a-z]+")
_SHORT = reprlib.Repr()
_SHORT.maxlevel = 3
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = _SHORT.maxset = _SHORT.maxfrozenset = _SHORT.maxdeque = 30
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 4 * _SHOWN_CHARACTERS
"""Lists in lists may repeat one another: written out whole, a file of a hundred lines has billions of elements."""
MAX_TOML_CHARACTERS = 2 * MIB
"""A table of a long dotted key takes more than a hundred bytes a character."""
_LONG_KEY = re.compile(r"""(?<![\w-])(?:(?:[\w-]+|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*){64}""")


def shown(value: object) -> str:
    """Write a value in an error message: its repr, shortened."""
    try:
        text = _SHORT.repr(value)
    except (ValueError, RecursionError):
        return "a value too large to print"
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."


def read_text(path: Path, expected: str = "", do: str = "", max_bytes: int = MAX_FILE_BYTES) -> str:
    """Read the UTF-8 text of a regular file.

    Args:
        path: the file.
        expected: what is expected in it, for the message.
        do: what to give instead, for the message.
        max_bytes: most of it that is taken.

    Raises:
        InvalidInputError: it is missing, no regular file, too large, or no UTF-8 text.
    """
    content = read_bytes(path, expected, do, max_bytes)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise unreadable(path, "it is not UTF-8 text", expected, do) from error


def read_bytes(path: Path, expected: str = "", do: str = "", max_bytes: int = MAX_FILE_BYTES) -> bytes:
    """Read a regular file, as ``read_text`` does: every input file comes through here.

    A pipe may never end, and a device may never begin: neither is waited for.

    Raises:
        InvalidInputError: it is missing, no regular file, or too large.
    """
    do = do or "Give the path of a .toml or .json file."
    expected = expected or "Expected a file."
    try:
        if path.is_dir():
            inside = path / "config.json"
            hint = f"Give a file in it, such as {inside}." if inside.is_file() else do
            raise InvalidInputError(f"{path} is a directory.", expected, hint)
        if not path.is_file():
            seen = "is not a regular file" if path.exists() else "does not exist"
            raise InvalidInputError(f"{path} {seen}.", expected, do)
        # It may have become a pipe since: opening one waits for who writes to it, unless asked not to.
        with open(path, "rb", opener=_at_once) as file:
            status = os.fstat(file.fileno())
            content = file.read(max_bytes + 1) if stat.S_ISREG(status.st_mode) else b""
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise unreadable(path, reason, expected, do) from error
    if len(content) > max_bytes:
        raise InvalidInputError(
            f"{path} has {max(status.st_size, len(content)):,} bytes.",
            f"Expected a description of at most {max_bytes:,} bytes.",
            "Give the configuration, not the weights." if max_bytes == MAX_FILE_BYTES else do,
        )
    return content


def _at_once(name: str, flags: int) -> int:
    return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))


def unreadable(path: Path, reason: str, expected: str, do: str) -> InvalidInputError:
    """Make the error of a file that is there and cannot be read."""
    return InvalidInputError(
        f"{path} cannot be read: {reason}.", expected or "Expected a text file.", do or "Give another file."
    )


def whole_or_float(text: str) -> int | float:
    """Convert a number's text, to an integer if its value is integral, such as ``80e9``."""
    value = float(text)
    return int(value) if abs(value) <= _EXACT_FLOAT_INTEGER and value.is_integer() else value


def parse_toml(text: str, source: str) -> dict[str, Any]:
    """Parse the table of a TOML text; ``source`` names it in messages.

    Keys have at most 64 parts, because the parser's memory grows with the square of the parts.
    """
    if len(text) > MAX_TOML_CHARACTERS or _LONG_KEY.search(text):
        long = len(text) > MAX_TOML_CHARACTERS
        raise InvalidInputError(
            f"{source} has {f'{len(text):,} characters' if long else 'a key of more than 64 parts'}.",
            f"Expected TOML of at most {MAX_TOML_CHARACTERS:,} characters, and keys of at most 64 parts.",
            "Write tables in place of long keys; give large tables as JSON.",
        )
    try:
        return tomllib.loads(text, parse_float=whole_or_float)
    except (ValueError, RecursionError) as error:
        raise unparsable(source, "TOML", error) from error


def parse_json(text: str, source: str) -> dict[str, Any]:
    """Parse the object of a JSON text; ``source`` names it in messages.

    Raises:
        InvalidInputError: it is not an object, or has a key twice (readers disagree on which value counts).
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        unique_pairs = dict(pairs)
        if len(unique_pairs) < len(pairs):
            twice, seen = "", set[str]()
            for name, _ in pairs:
                twice = name if name in seen else twice
                seen.add(name)
            raise InvalidInputError(
                f"{source} gives the key {shown(twice)} twice.",
                "Expected each key of an object once.",
                "Delete one of the two.",
            )
        return unique_pairs

    try:
        data = json.loads(text, parse_float=whole_or_float, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise unparsable(source, "JSON", error) from error
    if not isinstance(data, dict):
        raise InvalidInputError(
            f"{source} holds {shown(data)}.",
            "Expected a JSON object at its top.",
            "Wrap the fields in { }.",
        )
    return data


def unparsable(source: str, language: str, error: Exception) -> InvalidInputError:
    """Make the error of a text that is not in its language; a script starts the file that is."""
    is_script = source.lower().endswith((".sh", ".sbatch", ".slurm"))
    remedy = "Give the configuration that this script starts." if is_script else "Correct the place named."
    reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
    return InvalidInputError(
        f"{source} is not valid {language}: {reason}.",
        f"Expected {language}.",
        remedy,
    )


def validated(record: type[RecordType], data: object, source: str) -> RecordType:
    """Validate ``data`` strictly as a ``record``; the error names every wrong field with its value."""
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
    """Write pydantic's findings in plain words: field, mistake, value; of many findings only the fields."""
    errors: list[dict[str, Any]] = [dict(finding) for finding in error.errors(include_url=False)]
    findings = "; ".join(_finding(finding) for finding in errors[:_SHOWN_ERRORS])
    others = [_field(finding["loc"]) for finding in errors[_SHOWN_ERRORS:]]
    rest = ""
    if others:
        named = ", ".join(others[:_NAMED_ERRORS]) + (", ..." if len(others) > _NAMED_ERRORS else "")
        rest = f"; and {len(others)} more: {named}"
    place = errors[0]["loc"][:-1] if errors else ()
    kinds = _records_at(record, place)
    fields = list(dict.fromkeys(name for kind in kinds for name in kind.model_fields))
    inside = f" of {_field(place)}" if place else ""
    return InvalidInputError(
        f"{source}: {findings}{rest}.",
        f"Expected the fields{inside or f' of {record.__name__}'}: {', '.join(fields)}.",
        f"{_meant(record, errors)}Correct the fields named; `milpplan schema` lists all, `milpplan show NAME` "
        "prints an example.",
    )


def plain_reason(finding: Mapping[str, Any]) -> str:
    """Describe the mistake of a value in plain words."""
    if finding["type"] in _REASONS:
        return _REASONS[finding["type"]]
    if finding["type"] in ("literal_error", "enum"):
        return f"expected {finding['ctx']['expected']}"
    message = str(finding["msg"]).removeprefix("Value error, ")
    return message.replace("Input should be ", "expected a value ", 1)


_REASONS = {
    "missing": "is missing",
    "extra_forbidden": "is not known",
    "int_type": "expected a whole number",
    "int_parsing": "expected a whole number",
    "int_parsing_size": "expected a number of fewer digits",
    "int_from_float": "expected a whole number",
    "float_type": "expected a number",
    "float_parsing": "expected a number",
    "finite_number": "expected a finite number",
    "bool_type": "expected true or false",
    "bool_parsing": "expected true or false",
    "string_type": "expected a text",
    "list_type": "expected a list",
    "tuple_type": "expected a list",
    "dict_type": "expected a table of fields",
    "model_type": "expected a table of fields",
    "model_attributes_type": "expected a table of fields",
    "union_tag_not_found": "expected a table with a type",
}


def _field(place: Sequence[int | str]) -> str:
    """Write a place as ``measured.step_time_s`` or ``flags[0]``."""
    field = ""
    for part in place:
        field += f"[{part}]" if isinstance(part, int) else f".{part}" if field else str(part)
    return field


def _finding(error: Mapping[str, Any]) -> str:
    """Describe a finding: the field, its mistake, and its value."""
    field = _field(error["loc"])
    given = error["input"]
    # A finding about records that are put together names its fields itself.
    joined = isinstance(given, Mapping) and any(isinstance(value, BaseModel) for value in given.values())
    seen = "" if error["type"] == "missing" or joined else f" (got {shown(given)})"
    colon = " " if error["type"] in ("missing", "extra_forbidden") else ": "
    return f"{field + colon if field else ''}{plain_reason(error)}{seen}"


def _meant(record: type[BaseModel], errors: Sequence[Mapping[str, Any]]) -> str:
    """Suggest the field or the word that the user probably meant by the first unknown name."""
    for finding in errors:
        if finding["type"] == "literal_error" and isinstance(finding["input"], str):
            close = nearest(finding["input"], re.findall(r"'([^']*)'", finding["ctx"]["expected"]))
            if close:
                return f"Did you mean {close[0]} instead of {shown(finding['input'])}? "
        if finding["type"] != "extra_forbidden":
            continue
        *place, name = finding["loc"]
        elsewhere = next((path for path, kind in _inside(record) if str(name) in kind.model_fields), None)
        if elsewhere is not None:
            right = ".".join((*elsewhere, str(name)))
            return f"Did you mean {right}? {shown(name)} does not belong where it stands. "
        close = nearest(str(name), [field for kind in _records_at(record, place) for field in kind.model_fields])
        if close:
            return f"Did you mean {close[0]} instead of {shown(name)}? "
    return ""


def _records_at(record: type[BaseModel], place: Sequence[int | str]) -> list[type[BaseModel]]:
    """Find the records that may stand at a place inside a record."""
    kinds = [record]
    for part in place:
        # Indices of list entries and tags of unions are not fields.
        inner = [
            nested for kind in kinds if part in kind.model_fields for nested in _record_types(kind, str(part))
        ]
        tagged = [kind for kind in kinds if _tag(kind) == part]
        kinds = inner or tagged or kinds
    return kinds


def _tag(kind: type[BaseModel]) -> object:
    """Return the tag of a record in a union, its default ``type``."""
    return kind.model_fields["type"].default if "type" in kind.model_fields else None


def _record_types(kind: type[BaseModel], field: str) -> list[type[BaseModel]]:
    """Find the records in a field's annotation."""
    records: list[type[BaseModel]] = []
    left: list[Any] = [kind.model_fields[field].annotation]
    while left:
        annotation = left.pop(0)
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            records.append(annotation)
        left.extend(get_args(annotation))
    return records


def _inside(record: type[BaseModel]) -> Iterator[tuple[tuple[str, ...], type[BaseModel]]]:
    """Walk over all records inside a record, each once, with their places."""
    left: list[tuple[tuple[str, ...], type[BaseModel]]] = [((), record)]
    seen = set()
    while left:
        path, kind = left.pop(0)
        if kind in seen:
            continue
        seen.add(kind)
        yield path, kind
        left.extend(((*path, name), inner) for name in kind.model_fields for inner in _record_types(kind, name))


def nearest(name: str, known: Iterable[str], most: int = 1) -> list[str]:
    """Find the known names that are most similar to a name.

    An organisation before a slash and punctuation do not count, and a name whose numbers (versions and sizes) are
    those of the known one goes before a name that has others: ``meta-llama/Llama-3.1-8B`` is like llama3-8b, not
    like llama-33b.

    Args:
        name: the name that the user gave.
        known: existing names.
        most: maximum number of names to return.

    Returns:
        The most similar names, the best first; empty if no name is similar.
    """
    name_parts = _name_parts(name)
    scores = []
    for candidate in known:
        parts = _name_parts(candidate)
        likeness = difflib.SequenceMatcher(None, "".join(name_parts), "".join(parts)).ratio()
        plain = difflib.SequenceMatcher(None, name.lower(), candidate.lower()).ratio()
        sizes = [[part for part in words if part[0].isdigit()] for words in (name_parts, parts)]
        shared = len(set(sizes[0]) & set(sizes[1]))
        # The first number is most often the version. Names without numbers are compared by their letters alone.
        agreement = shared / max(map(len, sizes)) + (sizes[0][0] == sizes[1][0]) if all(sizes) else 0.0
        score = max(likeness, plain) + agreement + ("".join(name_parts) in "".join(parts))
        if max(likeness, plain) >= _LEAST_ALIKE:
            scores.append((-score, candidate))
    return [candidate for _, candidate in sorted(scores)[:most]]


def _name_parts(name: str) -> list[str]:
    """Split a name into words and numbers in lower case, without the organisation."""
    return _NAME_PART.findall(name.lower().rpartition("/")[2])
