"""The text of a launcher's file or of a command line from standard input, with --set and --args."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from milpplan.errors import InvalidInputError
from milpplan.problem import read_text
from milpplan.problem.reading import MAX_FILE_BYTES

STANDARD_INPUT: Final = Path("-")


_CONFIGURATIONS: Final = (".yaml", ".yml", ".json", ".toml", ".py")


def launcher_text(
    path: Path, settings: Sequence[str] = (), arguments: str | None = None
) -> tuple[str, str, dict[str, Any]]:
    """Read the text and the name of a launcher's file, and the settings stated for it; ``-`` is standard input.

    Args:
        path: the file.
        settings: ``NAME=VALUE`` of variables of a shell script, which win over what the script assigns, or of
            settings of a configuration file.
        arguments: the arguments that the script is given; None: they are not known.

    Raises:
        InvalidInputError: no such file, not UTF-8 text, more than 16 MiB, nothing on standard input, or settings
            that are no NAME=VALUE or whose variable the script does not have.
    """
    text, name = _text(path)
    if name.lower().endswith(_CONFIGURATIONS):
        if arguments is not None:
            raise InvalidInputError(
                f"--args is given, and {name} is no shell script.",
                "Expected a script whose arguments they are.",
                "Leave --args out; --set NAME=VALUE states a setting of the file.",
            )
        return text, name, dict(map(_setting, settings))
    return _decided(text, name, settings, arguments), name, {}


def batch_settings(names: Mapping[str, str], values: Mapping[str, int | None], launcher: str) -> dict[str, int]:
    """Name the numbers that --micro-batch, --accumulation and --seq-len state as a launcher's settings.

    Args:
        names: the launcher's setting of every option (``Capability.batch_settings``).
        values: of the options; None: not given.
        launcher: its name, for messages.

    Raises:
        InvalidInputError: the launcher's files say such a number themselves.
    """
    stated = {option: value for option, value in values.items() if value is not None}
    strange = next((option for option in stated if option not in names), None)
    if strange is not None:
        raise InvalidInputError(
            f"--{strange} is given, and files of {launcher} say it themselves.",
            "Expected it for a launcher whose files may leave it out.",
            "Leave it out, or say the file's own setting with --set NAME=VALUE.",
        )
    return {names[option]: value for option, value in stated.items()}


def _setting(text: str) -> tuple[str, Any]:
    """Split ``NAME=VALUE``; the value is read as JSON, or as text where it is none."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise InvalidInputError(
            f"--set is {text!r}.", "Expected NAME=VALUE.", "Give a setting of the file and its value."
        )
    try:
        return name.strip(), json.loads(value)
    except ValueError:
        return name.strip(), value


def _decided(text: str, name: str, settings: Sequence[str], arguments: str | None) -> str:
    """Set variables and arguments in the first line of a script, so that line numbers stay."""
    if not settings and arguments is None:
        return text
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
