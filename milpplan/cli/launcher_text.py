"""The text of a launcher's file, or of a command line from standard input."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from milpplan.errors import InvalidInputError
from milpplan.specs.reading import MAX_FILE_BYTES, read_text

STANDARD_INPUT: Final = Path("-")


def launcher_text(path: Path) -> tuple[str, str]:
    """(text, name) of a launcher's file; ``-`` is standard input.

    Raises:
        InvalidInputError: no such file, not UTF-8 text, more than 16 MiB, or nothing on standard input.
    """
    if path != STANDARD_INPUT:
        return read_text(path), str(path)
    name = "standard input"
    try:
        raw = sys.stdin.buffer.read(MAX_FILE_BYTES + 1)
        text = raw.decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise InvalidInputError(
            f"{name} cannot be read: {error}.", "Expected a launcher's text.", "Give a file instead."
        ) from error
    if len(raw) > MAX_FILE_BYTES or not text.strip():
        seen = "is empty" if not text.strip() else f"has more than {MAX_FILE_BYTES:,} bytes"
        raise InvalidInputError(
            f"{name} {seen}.", "Expected a command line, or the text of a launcher's file.", "Pipe it in."
        )
    return text, name
