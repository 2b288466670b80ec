"""File of raw measurements, written atomically and read strictly."""

from __future__ import annotations

from pathlib import Path

from milpplan.problem.reading import parse_json, read_text, validated
from milpplan.profiling.records import Measurements
from milpplan.reports.files import write_whole


def write_raw(path: Path, measurements: Measurements) -> None:
    """Write the file.

    Raises:
        InvalidInputError: it cannot be written; nothing of it remains.
    """
    write_whole(path, measurements.model_dump_json(indent=1) + "\n")


def read_raw(path: Path) -> Measurements:
    """Read the measurements of a file.

    Raises:
        InvalidInputError: it cannot be read, or holds something else.
    """
    return validated(Measurements, parse_json(read_text(path), str(path)), str(path))
