"""The directory of a study: one file for every finished cell, each written whole, and the result files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

from pydantic import ValidationError

from milpplan.errors import InvalidInputError
from milpplan.problem.reading import read_text, shown
from milpplan.reports.files import TEMPORARY, check_writable, make_directory, unwritable, write_whole
from milpplan.studies.outcomes import Outcome

CELLS: Final = "cells"
PLANS: Final = "plans"
LOCK: Final = ".lock"
LEFTOVERS: Final = "*".join(TEMPORARY)
"""Pattern of temporary files of a run that was killed while writing."""


class Store:
    """Outcomes by key in a directory. Use as ``with opened(directory) as store``."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def path(self, key: str) -> Path:
        """Return the file of a cell."""
        return self.directory / CELLS / f"{key}.json"

    def read(self, key: str) -> Outcome | None:
        """Read the outcome of a key; None if there is none, or the file is damaged."""
        try:
            outcome = Outcome.model_validate_json(read_text(self.path(key)))
        except (InvalidInputError, ValidationError):
            return None
        return outcome if outcome.key == key else None

    def write(self, outcome: Outcome) -> None:
        """Write an outcome, so that it survives the end of the program."""
        write_whole(self.path(outcome.key), json.dumps(outcome.model_dump(mode="json")) + "\n")


@contextmanager
def opened(directory: Path) -> Iterator[Store]:
    """Open the store in a directory, created if it is missing, and lock it until the end.

    Raises:
        InvalidInputError: the directory cannot be written, or another sweep uses it.
    """
    make_directory(directory / CELLS, "--out")
    lock = directory / LOCK
    check_writable(lock)
    try:
        # Opened for appending, since the path may be a link to another file.
        file = lock.open("a", encoding="utf-8")
    except OSError as error:
        raise unwritable(lock, error) from error
    with file:
        _lock(file, directory)
        for leftover in (*directory.glob(LEFTOVERS), *directory.glob(f"*/{LEFTOVERS}")):
            leftover.unlink(missing_ok=True)
        yield Store(directory)


def _lock(file: IO[str], directory: Path) -> None:
    """Lock the directory until the file is closed, however the program ends."""
    try:
        import fcntl
    except ImportError:
        # Without such locks two sweeps may solve equal cells, but still write whole files.
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise InvalidInputError(
            f"Another sweep is at work in {shown(str(directory))}.",
            "Expected a directory that no other sweep writes to.",
            "Wait for it to end, or give another directory with --out.",
        ) from error
