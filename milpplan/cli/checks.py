"""Checks of single words of the command line; every mistake is an ``InvalidInputError``."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from milpplan.errors import InvalidInputError, UnknownNameError
from milpplan.problem import Range
from milpplan.problem.reading import RecordType, invalid_fields, shown
from milpplan.reports.files import check_writable

MAX_KINDS: Final = 16
"""Maximum of kinds of hardware to choose from."""
OR_A_RANGE: Final = ", or a range such as 64:512 or 64:512:64"


def whole(text: str, option: str, maximum: int, or_else: str = "") -> int:
    """Read a positive integer of at most ``most``; ``or_else`` says what else the option takes."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if not 1 <= value <= maximum:
        raise InvalidInputError(
            f"{option} is {shown(text)}.",
            f"Expected a whole number from 1 to {maximum:,}{or_else}.",
            f"Correct {option}.",
        )
    return value


def count_or_range(text: str, option: str, limit: int) -> int | Range:
    """Read ``N``, ``LO:HI`` or ``LO:HI:STEP``."""
    parts = text.split(":")
    if len(parts) == 1:
        return whole(text, option, limit, OR_A_RANGE)
    if len(parts) > 3:
        raise InvalidInputError(
            f"{option} is {shown(text)}.", "Expected N, LO:HI or LO:HI:STEP.", f"Correct {option}."
        )
    minimum, maximum, step = (whole(part, option, limit, OR_A_RANGE) for part in [*parts, "1"][:3])
    return record(Range, f"{option} {text}", minimum=minimum, maximum=maximum, step=step)


def positive(value: float | None, option: str, what: str) -> None:
    """Refuse an option's number that is not positive and finite."""
    if value is not None and not 0 < value < math.inf:
        raise InvalidInputError(f"{option} is {value}.", f"Expected a positive {what}.", f"Correct {option}.")


def record(kind: type[RecordType], source: str, /, **values: Any) -> RecordType:
    """Validate a record; an error says that the values are those of ``source``."""
    try:
        return kind(**values)
    except ValidationError as error:
        raise invalid_fields(kind, error, source) from error


def choice(text: str, option: str, known: Iterable[str]) -> str:
    """Check that a text is a known word, and suggest the closest where it is not."""
    names = tuple(known)
    if text in names:
        return text
    close = difflib.get_close_matches(text.lower(), names, n=1, cutoff=0.5)
    raise UnknownNameError(
        f"{option} {shown(text)} does not exist.",
        f"Expected one of {', '.join(names)}.",
        f"Did you mean {close[0]}?" if close else "Give one of these names.",
    )


def names_of(hardware: str | None) -> list[str]:
    """Read the kinds of hardware of a command line: words with commas between them."""
    names = [name.strip() for name in (hardware or "").split(",")]
    if len(names) > 1 and (len(set(names)) < len(names) or "" in names or len(names) > MAX_KINDS):
        raise InvalidInputError(
            f"HARDWARE is {shown(hardware)}.",
            f"Expected one description, or two to {MAX_KINDS} different ones with commas between them.",
            "Correct HARDWARE.",
        )
    return names


def missing(what: str, expected: str) -> InvalidInputError:
    """Build the error for arguments and options that are missing, where Calculon's files would do as well."""
    return InvalidInputError(
        f"{what} is missing." if " and " not in what else f"{what} are missing.",
        f"Expected {expected}, or --calculon with three files.",
        "Add it; --help lists the arguments and options.",
    )


def program_file(path: Path | None, option: str) -> Path:
    """Return the name of a file for an integer program.

    Raises:
        InvalidInputError: none was given, it ends in neither .mps nor .lp, or it cannot be written.
    """
    if path is None or path.suffix not in (".mps", ".lp"):
        raise InvalidInputError(
            f"{option} is missing." if path is None else f"{option} is {shown(str(path))}.",
            "Expected the name of a file that ends in .mps or .lp.",
            f"Give one, such as {option} plan.mps.",
        )
    check_writable(path)
    return path
