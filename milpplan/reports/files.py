"""Files written whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Final

from milpplan.errors import InvalidInputError
from milpplan.problem.reading import shown
from milpplan.units import cleaned

TEMPORARY: Final = (".milpplan-", ".tmp")
"""Start and end of the name of a temporary file."""
_EXCLUSIVE: Final = (
    os.O_WRONLY
    | os.O_CREAT
    | os.O_EXCL
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_BINARY", 0)
)


def check_writable(path: Path) -> None:
    """Raise ``InvalidInputError`` where a file cannot be written, before time is spent on what goes in it."""
    reason = ""
    try:
        target = path.resolve()
        if target.is_dir():
            reason = "it is a directory"
        elif target.exists() and not target.is_file():
            reason = "it is not a regular file"
        elif not target.parent.is_dir():
            reason = f"there is no directory {shown(str(target.parent))}"
        elif path == Path("-"):
            reason = "it would be a file of that name (standard output gets the result anyway, --json as JSON)"
        else:
            # Asking for permissions is not enough: file systems may be full, read-only or not of the usual kind.
            with TemporaryFile(dir=target.parent):
                pass
    except (OSError, ValueError, RuntimeError) as error:
        raise unwritable(path, error if isinstance(error, OSError) else str(error)) from error
    if reason:
        raise unwritable(path, reason)


def make_directory(path: Path, option: str, parents: bool = True) -> None:
    """Make a directory of results, before time is spent on what goes in it.

    Raises:
        InvalidInputError: it cannot be made, or nothing can be written in it.
    """
    if path == Path("-"):
        raise unwritable(path, "it would be a directory of that name (leave the option out to print)")
    try:
        path.mkdir(parents=parents, exist_ok=True)
    except OSError as error:
        raise InvalidInputError(
            f"The directory {shown(str(path))} cannot be made: {error.strerror}.",
            "Expected a directory that may be written" + ("." if parents else ", in one that exists."),
            f"Give another one with {option}.",
        ) from error
    check_writable(path / "any")


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file completely or leave what was there: a temporary file beside it, then a rename.

    Text becomes UTF-8, with control characters spelled out. A file that is replaced keeps its permissions; behind
    a symbolic link the file it points to is replaced.

    Raises:
        InvalidInputError: it cannot be written; no part of it remains.
    """
    check_writable(path)
    data = cleaned(content).encode("utf-8") if isinstance(content, str) else content
    try:
        target = path.resolve()
        with _fresh(target.parent) as (temporary, descriptor):
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                if target.exists() and hasattr(os, "fchmod"):
                    os.fchmod(file.fileno(), target.stat().st_mode & 0o777)
                os.fsync(file.fileno())
            os.replace(temporary, target)
    except OSError as error:
        raise unwritable(path, error) from error


def unwritable(path: Path, reason: OSError | str) -> InvalidInputError:
    """Make the error of a file that cannot be written."""
    if isinstance(reason, OSError):
        reason = reason.strerror or str(reason)
    return InvalidInputError(
        f"{shown(str(path))} cannot be written: {reason}.",
        "Expected a file in a directory that exists and that you may write to, on a disk with room.",
        "Give another path.",
    )


@contextmanager
def _fresh(directory: Path) -> Iterator[tuple[Path, int]]:
    """A new file that nobody else has, and its descriptor; removed at the end unless it was renamed.

    Process ids would not do for its name: threads share theirs, and so may containers on one file system. Whatever
    lies at the name already, a link that somebody planted included, is left alone.
    """
    while True:
        path = directory / f"{TEMPORARY[0]}{secrets.token_hex(8)}{TEMPORARY[1]}"
        try:
            # Permissions as those of any new file: these less the user's mask.
            descriptor = os.open(path, _EXCLUSIVE, 0o666)
        except FileExistsError:
            continue
        try:
            yield path, descriptor
        finally:
            path.unlink(missing_ok=True)
        return
