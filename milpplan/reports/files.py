"""Atomic writing of files."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Final

from milpplan.errors import InvalidInputError
from milpplan.problem.reading import shown
from milpplan.units import cleaned

TEMPORARY: Final = (".milpplan-", ".tmp")
"""Prefix and suffix of temporary files' names."""
_EXCLUSIVE: Final = (
    os.O_WRONLY
    | os.O_CREAT
    | os.O_EXCL
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_BINARY", 0)
)


def check_writable(path: Path) -> None:
    """Raise ``InvalidInputError`` where a file cannot be written, before time is spent on its contents."""
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
            # Checking permissions is not enough: file systems may be full, read-only or unusual.
            with TemporaryFile(dir=target.parent):
                pass
    except (OSError, ValueError, RuntimeError) as error:
        raise unwritable(path, error if isinstance(error, OSError) else str(error)) from error
    if reason:
        raise unwritable(path, reason)


def make_directory(path: Path, option: str, parents: bool = True) -> None:
    """Make a directory for results, before time is spent on its contents.

    Raises:
        InvalidInputError: it cannot be made or written to.
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
    """Write a file completely or leave the old one: write a temporary file beside it, then rename.

    Text becomes UTF-8, with control characters spelled out. A replaced file keeps its permissions; a symbolic link
    keeps pointing to its file, which is replaced.

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
    """Make the error for a file that cannot be written."""
    if isinstance(reason, OSError):
        reason = reason.strerror or str(reason)
    return InvalidInputError(
        f"{shown(str(path))} cannot be written: {reason}.",
        "Expected a file in a directory that exists and that you may write to, on a disk with room.",
        "Give another path.",
    )


@contextmanager
def _fresh(directory: Path) -> Iterator[tuple[Path, int]]:
    """Create a new file with an unused name, and its descriptor; remove it at the end unless it was renamed.

    Process ids are not unique names: threads share them, and containers on one file system may. An existing file
    or link of that name, even a planted one, is left alone.
    """
    while True:
        path = directory / f"{TEMPORARY[0]}{secrets.token_hex(8)}{TEMPORARY[1]}"
        try:
            # Permissions of a new file: the default ones minus the user's mask.
            descriptor = os.open(path, _EXCLUSIVE, 0o666)
        except FileExistsError:
            continue
        try:
            yield path, descriptor
        finally:
            path.unlink(missing_ok=True)
        return


def write_all(files: Mapping[Path, str]) -> None:
    """Write several texts, each whole; none unless all files can be written.

    Args:
        files: The texts by path.

    Raises:
        InvalidInputError: a file cannot be written.
    """
    for path in files:
        check_writable(path)
    for path, text in files.items():
        write_whole(path, text)
