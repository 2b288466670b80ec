"""The directory of a study: one file for every finished cell, each written whole, and the results made of them."""

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
"""Temporary files of a run that was killed while it wrote one."""


class Store:
    """Outcomes by key in a directory. Use as ``with opened(directory) as store``."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def path(self, key: str) -> Path:
        """The file of a cell."""
        return self.directory / CELLS / f"{key}.json"

    def read(self, key: str) -> Outcome | None:
        """The outcome of a key; None where there is none, or the file is damaged."""
        try:
            outcome = Outcome.model_validate_json(read_text(self.path(key)))
        except (InvalidInputError, ValidationError):
            return None
        return outcome if outcome.key == key else None

    def write(self, outcome: Outcome) -> None:
        """Keep an outcome: after this returns it survives whatever happens to the program."""
        write_whole(self.path(outcome.key), json.dumps(outcome.model_dump(mode="json")) + "\n")


@contextmanager
def opened(directory: Path) -> Iterator[Store]:
    """The store in a directory, which is made where it is missing, and is ours alone until the end.

    Raises:
        InvalidInputError: it cannot be written, or another sweep is at work in it.
    """
    make_directory(directory / CELLS, "--out")
    lock = directory / LOCK
    check_writable(lock)
    try:
        # Nothing is cut off: it may be a link that somebody planted.
        file = lock.open("a", encoding="utf-8")
    except OSError as error:
        raise unwritable(lock, error) from error
    with file:
        _lock(file, directory)
        for leftover in (*directory.glob(LEFTOVERS), *directory.glob(f"*/{LEFTOVERS}")):
            leftover.unlink(missing_ok=True)
        yield Store(directory)


def _lock(file: IO[str], directory: Path) -> None:
    """Held until the file is closed, by whatever end of the program."""
    try:
        import fcntl
    except ImportError:
        # No such locks on this system: two sweeps would solve the same cells, and still write whole files.
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise InvalidInputError(
            f"Another sweep is at work in {shown(str(directory))}.",
            "Expected a directory that no other sweep writes to.",
            "Wait for it to end, or give another directory with --out.",
        ) from error
