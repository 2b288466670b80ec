"""The sequences of a step: lengths read from a file, or drawn from a histogram or a distribution.

A file of lengths holds one whole number of tokens a line. A histogram is a JSON object ``{"bin_edges": [...],
"counts": [...]}`` with one edge more than counts, bins (edge, next edge]; a distribution is
``{"distribution": "lognormal", ...}`` or a mixture of these (``distributions``).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from milpplan.errors import InvalidInputError
from milpplan.groups.distributions import distribution_of
from milpplan.groups.strategies import Int64Array

# Longer lines are no numbers of tokens.
_MAX_LENGTH: Final = 10**9
_SHOWN: Final = 40


@dataclass(frozen=True, eq=False)
class Workload:
    """Distinct aligned ``lengths`` [K], ascending, with their ``counts`` [K]."""

    lengths: Int64Array
    counts: Int64Array

    @property
    def num_sequences(self) -> int:
        """Sequences of the step."""
        return int(self.counts.sum())

    @property
    def num_tokens(self) -> int:
        """Tokens of the step, padding to the alignment included."""
        return int(self.counts @ self.lengths)


def workload_of(
    lengths: Sequence[int] | Int64Array, alignment: int = 1, max_length: int | None = None
) -> Workload:
    """Counts of the lengths, in tokens, truncated to ``max_length`` (as trainers do) and padded to multiples of
    ``alignment``.

    Raises:
        InvalidInputError: no lengths, some that are no whole numbers of tokens, or an alignment below 1.
    """
    tokens = np.asarray(lengths)
    if alignment < 1 or (max_length is not None and (max_length < alignment or max_length % alignment)):
        raise InvalidInputError(
            f"The alignment is {alignment} and the maximum length {max_length}.",
            "An alignment of at least 1 and a maximum that is a multiple of it expected.",
        )
    if tokens.size == 0:
        raise InvalidInputError("There are no sequences.", "At least one length expected.")
    whole = tokens.dtype.kind in "iu" and tokens.ndim == 1
    if not whole or int(tokens.min()) < 1 or int(tokens.max()) > _MAX_LENGTH:
        seen = f"from {tokens.min()} to {tokens.max()}" if whole else f"in {tokens.ndim} dimensions"
        raise InvalidInputError(
            f"Lengths are of type {tokens.dtype}, {seen}.",
            f"A row of whole numbers from 1 to {_MAX_LENGTH} expected.",
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
    """The first sequences of a step: so many, or so many tokens (truncated ones; at least one sequence)."""
    if num_sequences is not None and num_tokens is not None:
        raise InvalidInputError(
            f"Both {num_sequences} sequences and {num_tokens} tokens a step are asked for.",
            "One of them expected.",
        )
    if num_sequences is not None:
        if not 1 <= num_sequences <= lengths.size:
            raise InvalidInputError(
                f"{num_sequences} sequences a step are asked for.",
                f"1 to {lengths.size}, which the input holds, expected.",
            )
        return lengths[:num_sequences]
    if num_tokens is None:
        return lengths
    if num_tokens < 1:
        raise InvalidInputError(f"{num_tokens} tokens a step are asked for.", "At least 1 expected.")
    tokens = lengths if max_length is None else np.minimum(lengths, max_length)
    return lengths[: max(1, int(np.searchsorted(np.cumsum(tokens), num_tokens, side="right")))]


def read_lengths(path: Path, num_sequences: int | None = None, seed: int = 1) -> Int64Array:
    """Lengths in tokens, in the order of the file, or ``num_sequences`` drawn from its histogram or distribution.

    Raises:
        InvalidInputError: the file cannot be read, holds no lengths, or a distribution without ``num_sequences``.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"{path} cannot be read: {error}.", "A text file of lengths expected.") from error
    if text.lstrip().startswith("{"):
        return _drawn(path, text, num_sequences, seed)
    return _lines(path, text)


def _lines(path: Path, text: str) -> Int64Array:
    """One length a line; blank lines at the end are passed over. A million lines take about half a second."""
    lines = text.rstrip().splitlines()
    if not lines:
        raise InvalidInputError(f"{path} is empty.", "One length a line expected.")
    try:
        # Only digits: int() would also take "1_000" and spaces.
        if not all(line.isascii() and line.isdigit() and len(line) <= len(str(_MAX_LENGTH)) for line in lines):
            raise ValueError
        values = np.array(lines).astype(np.int64)
    except ValueError:
        number, line = next(
            (i, line)
            for i, line in enumerate(lines, 1)
            if not (line.isascii() and line.isdigit() and len(line) <= len(str(_MAX_LENGTH)))
        )
        raise InvalidInputError(
            f"Line {number} of {path} is {line[:_SHOWN]!r}.",
            f"A whole number of tokens from 1 to {_MAX_LENGTH} expected.",
            "Write one length a line, or a histogram as JSON.",
        ) from None
    if values.min() < 1 or values.max() > _MAX_LENGTH:
        number = int(np.flatnonzero((values < 1) | (values > _MAX_LENGTH))[0]) + 1
        raise InvalidInputError(
            f"Line {number} of {path} is {lines[number - 1]}.", f"1 to {_MAX_LENGTH} tokens expected."
        )
    return np.asarray(values)


def _drawn(path: Path, text: str, num_sequences: int | None, seed: int) -> Int64Array:
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidInputError(
            f"{path} is no JSON: {error}.", "A histogram or a distribution expected."
        ) from error
    if num_sequences is None or num_sequences < 1:
        raise InvalidInputError(
            f"{path} describes a distribution, and it is not said how many sequences a step has."
            if num_sequences is None
            else f"{path} describes a distribution, and {num_sequences} sequences are asked for.",
            "How many to draw, at least 1, expected.",
            "Give --global-batch.",
        )
    random = np.random.default_rng(seed)
    if "bin_edges" in document:
        edges, counts = _histogram(path, document)
        return drawn_from_histogram(edges, counts, num_sequences, random)
    return distribution_of(document, str(path)).draw(num_sequences, random)


def _histogram(path: Path, document: dict[str, Any]) -> tuple[Int64Array, Int64Array]:
    try:
        edges = np.array(document["bin_edges"])
        counts = np.array(document["counts"])
        whole = edges.dtype.kind in "iu" and counts.dtype.kind in "iu"
    except (KeyError, ValueError) as error:
        raise InvalidInputError(f"{path} has no histogram: {error}.", "bin_edges and counts expected.") from error
    if (
        not whole
        or edges.ndim != 1
        or counts.shape != (edges.size - 1,)
        or (np.diff(edges) <= 0).any()
        or edges[0] < 0
        or edges[-1] > _MAX_LENGTH
        or counts.min(initial=0) < 0
        or not counts.any()
    ):
        raise InvalidInputError(
            f"{path} holds {edges.size} edges and {counts.size} counts.",
            "Ascending whole edges from 0 on, and one whole count fewer, not all zero, expected.",
        )
    return edges.astype(np.int64), counts.astype(np.int64)


def drawn_from_histogram(
    edges: Int64Array, counts: Int64Array, num_sequences: int, random: np.random.Generator
) -> Int64Array:
    """Lengths from bins (edge, next edge], uniform inside a bin."""
    chosen = random.choice(counts.size, size=num_sequences, p=counts / counts.sum())
    return np.asarray(random.integers(edges[chosen] + 1, edges[chosen + 1] + 1), np.int64)
