"""The sequences of a step: lengths read from a file, or drawn from a histogram or a distribution.

A file of lengths holds one whole number of tokens a line; a histogram or a distribution is a JSON object
(``workload_file``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from milpplan.errors import InvalidInputError
from milpplan.groups.strategies import Int64Array
from milpplan.groups.workload.distributions import LONGEST
from milpplan.groups.workload.workload_file import read_workload
from milpplan.problem.reading import read_text
from milpplan.units import MIB

_SHOWN: Final = 40
# Room for about five million lines.
_MAX_BYTES: Final = 32 * MIB
# Sequences drawn for a number of tokens; no step has more.
_MAX_DRAWN: Final = 2**14
_LINES: Final = "Write one length a line, or a histogram as JSON."


@dataclass(frozen=True, eq=False)
class Workload:
    """Distinct aligned ``lengths`` [K], ascending, with their ``counts`` [K]."""

    lengths: Int64Array
    counts: Int64Array

    @property
    def num_sequences(self) -> int:
        """Number of sequences of the step."""
        return int(self.counts.sum())

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the step, padding to the alignment included."""
        return int(self.counts @ self.lengths)


def workload_of(
    lengths: Sequence[int] | Int64Array, alignment: int = 1, max_length: int | None = None
) -> Workload:
    """Count the lengths, truncated to ``max_length`` (as trainers do) and padded to multiples of ``alignment``.

    All are in tokens.

    Raises:
        InvalidInputError: there are no lengths, a length is no whole number of tokens, or the alignment is below
        1.
    """
    try:
        tokens = np.asarray(lengths)
    except ValueError:
        # Rows of different lengths are no array.
        tokens = np.array(None)
    whole = isinstance(alignment, (int, np.integer)) and isinstance(max_length, (int, np.integer, type(None)))
    if (
        not whole
        or alignment < 1
        or (max_length is not None and (max_length < alignment or max_length % alignment))
    ):
        raise InvalidInputError(
            f"The alignment is {alignment} and the maximum length {max_length}.",
            "A whole alignment of at least 1 and a maximum that is a multiple of it expected.",
            "Correct --align or --seq-len.",
        )
    if tokens.size == 0:
        raise InvalidInputError(
            "There are no sequences.", "At least one length expected.", "Give lengths in tokens."
        )
    whole = tokens.dtype.kind in "iu" and tokens.ndim == 1
    if not whole or int(tokens.min()) < 1 or int(tokens.max()) > LONGEST:
        seen = f"from {tokens.min()} to {tokens.max()}" if whole else f"in {tokens.ndim} dimensions"
        raise InvalidInputError(
            f"Lengths are of type {tokens.dtype}, {seen}.",
            f"A row of whole numbers from 1 to {LONGEST} expected.",
            "Give lengths in tokens, one a sequence.",
        )
    kept = tokens.astype(np.int64) if max_length is None else np.minimum(tokens, max_length).astype(np.int64)
    distinct, counts = np.unique(-(-kept // alignment) * alignment, return_counts=True)
    return Workload(distinct.astype(np.int64), counts.astype(np.int64))


def step_of(
    lengths: Int64Array,
    num_sequences: int | None = None,
    num_tokens: int | None = None,
    max_length: int | None = None,
) -> Int64Array:
    """Take the first sequences of a step by number or by tokens (after truncation; at least one sequence).

    Raises:
        InvalidInputError: both numbers are given, a number is not positive, or the input holds too few.
    """
    if num_sequences is not None and num_tokens is not None:
        raise InvalidInputError(
            f"Both {num_sequences} sequences and {num_tokens} tokens a step are asked for.",
            "One of them expected.",
            "Leave out --global-batch or --tokens-per-step.",
        )
    if num_sequences is not None:
        if not 1 <= num_sequences <= lengths.size:
            raise InvalidInputError(
                f"{num_sequences} sequences a step are asked for.",
                f"1 to {lengths.size}, which the input holds, expected.",
                "Ask for fewer, or give a histogram, from which any number is drawn.",
            )
        return lengths[:num_sequences]
    if num_tokens is None:
        return lengths
    if num_tokens < 1:
        raise InvalidInputError(
            f"{num_tokens} tokens a step are asked for.", "At least 1 expected.", "Correct --tokens-per-step."
        )
    tokens = np.cumsum(lengths if max_length is None else np.minimum(lengths, max_length))
    if num_tokens > tokens[-1]:
        raise InvalidInputError(
            f"{num_tokens:,} tokens a step are asked for.",
            f"At most {int(tokens[-1]):,}, which the input holds, expected.",
            "Ask for fewer, or give a histogram, from which any number is drawn.",
        )
    return lengths[: max(1, int(np.searchsorted(tokens, num_tokens, side="right")))]


def read_lengths(
    path: Path, num_sequences: int | None = None, seed: int = 1, num_tokens: int | None = None
) -> Int64Array:
    """Read lengths in the order of the file, or draw them from its histogram or distribution.

    Drawn are ``num_sequences``, or more than enough for ``num_tokens`` (``step_of`` takes the first of them).

    Raises:
        InvalidInputError: the file cannot be read, holds no lengths, or holds a distribution without a number of
            sequences or tokens.
    """
    text = read_text(
        path,
        "The lengths of one step, or a few million to choose from, expected.",
        "Give a file of lengths, one a line, or a histogram as JSON.",
        _MAX_BYTES,
    )
    if text.lstrip().startswith("{"):
        number = _MAX_DRAWN if num_sequences is None and num_tokens is not None else num_sequences
        return _drawn(path, text, number, seed)
    return _lines(path, text)


def _lines(path: Path, text: str) -> Int64Array:
    """Parse one length a line; blank lines at the end are ignored."""
    lines = text.rstrip().splitlines()
    if not lines:
        raise InvalidInputError(f"{path} is empty.", "At least one length expected.", _LINES)
    try:
        # Digits only, because int() would also accept "1_000" and spaces.
        if not all(line.isascii() and line.isdigit() and len(line) <= len(str(LONGEST)) for line in lines):
            raise ValueError
        values = np.array(lines).astype(np.int64)
    except ValueError:
        number, line = next(
            (i, line)
            for i, line in enumerate(lines, 1)
            if not (line.isascii() and line.isdigit() and len(line) <= len(str(LONGEST)))
        )
        raise InvalidInputError(
            f"Line {number} of {path} is {line[:_SHOWN]!r}.",
            f"A whole number of tokens from 1 to {LONGEST} expected.",
            _LINES,
        ) from None
    if values.min() < 1 or values.max() > LONGEST:
        number = int(np.flatnonzero((values < 1) | (values > LONGEST))[0]) + 1
        raise InvalidInputError(
            f"Line {number} of {path} is {lines[number - 1]}.",
            f"1 to {LONGEST} tokens expected.",
            "Leave out empty sequences; lengths are in tokens.",
        )
    return np.asarray(values)


def _drawn(path: Path, text: str, num_sequences: int | None, seed: int) -> Int64Array:
    """Draw lengths from the distribution in a text."""
    described = read_workload(text, str(path))
    if num_sequences is None or num_sequences < 1:
        asked = "it is not said how many sequences" if num_sequences is None else f"{num_sequences} sequences"
        raise InvalidInputError(
            f"{path} describes a distribution, and {asked} a step has.",
            "How many to draw, at least 1, expected.",
            "Give --global-batch or --tokens-per-step.",
        )
    return described.draw(num_sequences, np.random.default_rng(seed))
