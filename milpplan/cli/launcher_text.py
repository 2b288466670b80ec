"""The text of a launcher's file or of a command line from standard input, with --set and --args."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from milpplan.errors import InvalidInputError
from milpplan.problem import read_text
from milpplan.problem.reading import MAX_FILE_BYTES

STANDARD_INPUT: Final = Path("-")


def launcher_text(path: Path, settings: Sequence[str] = (), arguments: str | None = None) -> tuple[str, str]:
    """Read the text and the name of a launcher's file; ``-`` is standard input.

    Args:
        path: the file.
        settings: ``NAME=VALUE`` of variables of a shell script, which win over what the script assigns.
        arguments: the arguments that the script is given; None: they are not known.

    Raises:
        InvalidInputError: no such file, not UTF-8 text, more than 16 MiB, nothing on standard input, or settings
            of a file that is no shell script or does not have the variable.
    """
    text, name = _text(path)
    return _decided(text, name, settings, arguments), name


def _decided(text: str, name: str, settings: Sequence[str], arguments: str | None) -> str:
    """Set variables and arguments in the first line of a script, so that line numbers stay."""
    if not settings and arguments is None:
        return text
    if name.lower().endswith((".yaml", ".yml", ".json", ".toml", ".py")):
        raise InvalidInputError(
            f"--set or --args is given, and {name} is no shell script.",
            "Expected a script whose variables and arguments they say.",
            "Leave them out, or write the value into the file.",
        )
    lines = ""
    if arguments is not None:
        try:
            lines = f"set -- {shlex.join(shlex.split(arguments))}; "
        except ValueError as error:
            raise InvalidInputError(
                f"--args is {arguments!r}: {error}.", "Expected words as a shell reads them.", "Close the quote."
            ) from error
    for setting in settings:
        variable, equals, value = setting.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", variable):
            raise InvalidInputError(
                f"--set is {setting!r}.", "Expected NAME=VALUE.", "Give a variable of the script and its value."
            )
        if not re.search(rf"\b{variable}\b", text) and not re.search(r"^\s*(?:source|\.)\s", text, re.MULTILINE):
            raise InvalidInputError(
                f"--set names {variable}, which is not in {name}.",
                "Expected a variable of the script.",
                "Check its name.",
            )
        lines += f"readonly {variable}={shlex.quote(value)}; "
    return lines + text


def _text(path: Path) -> tuple[str, str]:
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
