"""Files written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryFile

from milpplan.errors import InvalidInputError
from milpplan.specs.reading import shown


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
        raise _unwritable(path, getattr(error, "strerror", None) or str(error)) from error
    if reason:
        raise _unwritable(path, reason)


def make_directory(path: Path, option: str, parents: bool = True) -> None:
    """Make a directory of results, before time is spent on what goes in it.

    Raises:
        InvalidInputError: it cannot be made, or nothing can be written in it.
    """
    if path == Path("-"):
        raise _unwritable(path, "it would be a directory of that name (leave the option out to print)")
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
    """Write a file completely or leave what was there: a temporary file beside it, then a rename. Text becomes
    UTF-8.

    Raises:
        InvalidInputError: it cannot be written; no part of it remains.
    """
    check_writable(path)
    target = path.resolve()
    temporary = target.with_name(f".milpplan-{os.getpid()}.tmp")
    try:
        try:
            with temporary.open("wb") as file:
                file.write(content.encode("utf-8") if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise _unwritable(path, str(error)) from error


def _unwritable(path: Path, reason: str) -> InvalidInputError:
    return InvalidInputError(
        f"{shown(str(path))} cannot be written: {reason}.",
        "Expected a file in a directory that exists and that you may write to.",
        "Give another path.",
    )
