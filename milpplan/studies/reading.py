"""From a study file to a ``Study``; a misspelt field is answered with the one that was meant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from milpplan.problem.reading import parse_json, parse_toml, read_text, validated
from milpplan.studies.records import Study


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
    return validated(Study, data, source)
