"""Reading of study files; a misspelt field is answered with the nearest field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from milpplan.problem.reading import parse_json, parse_toml, read_text, validated
from milpplan.studies.records import Study


def read_study(path: Path) -> Study:
    """Read the study of a TOML or JSON file.

    Raises:
        InvalidInputError: the file is wrong; the message lists the fields.
    """
    text = read_text(path)
    is_json = path.suffix.lower() == ".json" or text.lstrip().startswith("{")
    return study_of((parse_json if is_json else parse_toml)(text, str(path)), str(path))


def study_of(data: dict[str, Any], source: str) -> Study:
    """Build the study of plain data; ``source`` names it in messages.

    Raises:
        InvalidInputError: the data are wrong; the message lists the fields.
    """
    return validated(Study, data, source)
