"""From a study file to a ``Study``; a misspelt field is answered with the one that was meant."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from milpplan.errors import InvalidInputError
from milpplan.specs.reading import parse_json, parse_toml, read_text, shown, validated
from milpplan.studies.records import Case, Grid, SolveSettings, Study, WhatIf

_RECORDS: dict[tuple[str, ...], type[BaseModel]] = {
    (): Study,
    ("grid",): Grid,
    ("what_if",): WhatIf,
    ("what_if", "cases"): Case,
    ("solve",): SolveSettings,
}
"""The record at every place of a study file, numbers of list entries left out."""


def read_study(path: Path) -> Study:
    """The study of a TOML or JSON file.

    Raises:
        InvalidInputError: what is wrong with it, field by field.
    """
    text = read_text(path)
    is_json = path.suffix.lower() == ".json" or text.lstrip().startswith("{")
    return study_of((parse_json if is_json else parse_toml)(text, str(path)), str(path))


def study_of(data: dict[str, Any], source: str) -> Study:
    """The study of plain data; ``source`` names it in messages.

    Raises:
        InvalidInputError: what is wrong with it, field by field.
    """
    try:
        return validated(Study, data, source)
    except InvalidInputError as error:
        meant = _meant(error.__cause__)
        if meant is None:
            raise InvalidInputError(error.seen, _expected(error), _DO) from error
        raise InvalidInputError(error.seen, _expected(error), meant) from error


_DO = "Correct the fields named; `milpplan schema study` describes all of them."


def _place(location: tuple[int | str, ...]) -> tuple[str, ...]:
    return tuple(part for part in location if isinstance(part, str))


def _expected(error: InvalidInputError) -> str:
    """The fields of the record in which the first mistake is."""
    cause = error.__cause__
    if not isinstance(cause, ValidationError):
        return error.expected
    place = _place(cause.errors(include_url=False)[0]["loc"])
    while place not in _RECORDS:
        place = place[:-1]
    inside = f"[{'.'.join(place)}]" if place else "a study"
    return f"Expected the fields of {inside}: {', '.join(_RECORDS[place].model_fields)}."


def _meant(cause: BaseException | None) -> str | None:
    """The known name nearest to the first unknown field, if one is near."""
    if not isinstance(cause, ValidationError):
        return None
    for finding in cause.errors(include_url=False):
        place = _place(finding["loc"])
        if finding["type"] != "extra_forbidden" or place[:-1] not in _RECORDS:
            continue
        close = difflib.get_close_matches(place[-1], _RECORDS[place[:-1]].model_fields, n=1, cutoff=0.5)
        if close:
            return f"Did you mean {close[0]} instead of {shown(place[-1])}?"
        others = [
            ".".join((*where, place[-1])) for where, kind in _RECORDS.items() if place[-1] in kind.model_fields
        ]
        if others:
            return f"Did you mean {others[0]}? {shown(place[-1])} does not belong where it stands."
    return None
