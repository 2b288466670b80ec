"""The sequences of a step: lengths read from a file, or drawn from a histogram or a distribution.

A file of lengths holds one whole number of tokens a line; a histogram or a distribution is a JSON object.

    {"bin_edges": [0, 128, 1024], "counts": [50, 40]}                 bins (edge, next edge]
    {"distribution": "lognormal", "mean_log": 6.1, "sigma_log": 1.2}
    {"distribution": "pareto", "shortest": 2000, "tail": 1.1}
    {"distribution": "mixture", "parts": [{"share": 0.95, "distribution": "lognormal", ...}, ...]}

Each object may state its ``source``. ``described`` makes such a record of a distribution, fitted or not, so that
``described(fitted_mixture(lengths)).model_dump_json()`` is a file. ``milpplan schema workload`` prints the schema.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

import numpy as np
from pydantic import Field, RootModel, model_validator

from milpplan.errors import InvalidInputError
from milpplan.lengths.tabled.problem import FloatArray, Int64Array
from milpplan.problem import parse_json, read_text, validated
from milpplan.problem.reading import RecordType, shown
from milpplan.problem.records import Count, PositiveFloat, Record
from milpplan.units import MIB

# Far above the logarithm of any length.
_LOGARITHM: Final = 1e3
_DESCRIBES: Final = "bin_edges and counts, or a distribution: lognormal, pareto or mixture, expected."
LONGEST = 10**9
"""Maximum length in tokens."""

Edge = Annotated[int, Field(ge=0, le=LONGEST)]


class Histogram(Record):
    """Histogram of lengths: counts by bin, above one edge and up to the next; uniform within a bin."""

    bin_edges: Annotated[tuple[Edge, ...], Field(min_length=2)]
    counts: Annotated[tuple[Count, ...], Field(min_length=1)]
    source: str = ""

    @model_validator(mode="after")
    def _bins(self) -> Self:
        """Check that edges rise, and that counts belong to the bins."""
        if len(self.counts) != len(self.bin_edges) - 1:
            raise ValueError(
                f"{len(self.bin_edges)} edges need {len(self.bin_edges) - 1} counts, not {len(self.counts)}"
            )
        if min(np.diff(self.bin_edges)) <= 0:
            raise ValueError("edges do not rise")
        if not any(self.counts):
            raise ValueError("all counts are zero")
        return self

    def draw(self, number: int, random: np.random.Generator) -> Int64Array:
        """Draw whole lengths, [number]."""
        edges, shares = np.array(self.bin_edges, np.int64), np.array(self.counts, np.float64)
        chosen = random.choice(shares.size, size=number, p=shares / shares.sum())
        return np.asarray(random.integers(edges[chosen] + 1, edges[chosen + 1] + 1), np.int64)


class LogNormalRecord(Record):
    """A ``LogNormal`` in a file."""

    distribution: Literal["lognormal"] = "lognormal"
    mean_log: Annotated[float, Field(ge=-_LOGARITHM, le=_LOGARITHM)]
    sigma_log: Annotated[float, Field(ge=0, le=_LOGARITHM)]
    source: str = ""

    def part(self) -> LogNormal:
        """The distribution."""
        return LogNormal(self.mean_log, self.sigma_log)

    def mixture(self) -> Mixture:
        """The distribution alone."""
        return Mixture(((1.0, self.part()),))


class ParetoRecord(Record):
    """A ``Pareto`` in a file."""

    distribution: Literal["pareto"] = "pareto"
    shortest: PositiveFloat
    tail: PositiveFloat
    source: str = ""

    def part(self) -> Pareto:
        """The distribution."""
        return Pareto(self.shortest, self.tail)

    def mixture(self) -> Mixture:
        """The distribution alone."""
        return Mixture(((1.0, self.part()),))


class LogNormalShare(LogNormalRecord):
    """A part of a mixture; shares count relative to each other."""

    share: PositiveFloat


class ParetoShare(ParetoRecord):
    """A part of a mixture; shares count relative to each other."""

    share: PositiveFloat


class MixtureRecord(Record):
    """A ``Mixture`` in a file."""

    distribution: Literal["mixture"] = "mixture"
    parts: Annotated[
        tuple[Annotated[LogNormalShare | ParetoShare, Field(discriminator="distribution")], ...],
        Field(min_length=1),
    ]
    source: str = ""

    def mixture(self) -> Mixture:
        """The distribution."""
        return Mixture(tuple((part.share, part.part()) for part in self.parts))


Distribution = LogNormalRecord | ParetoRecord | MixtureRecord


class WorkloadFile(RootModel[Histogram | Annotated[Distribution, Field(discriminator="distribution")]]):
    """Input of ``--lengths`` beside plain lengths: a histogram or a distribution."""


_DISTRIBUTIONS: Final[dict[str, type[LogNormalRecord] | type[ParetoRecord] | type[MixtureRecord]]] = {
    "lognormal": LogNormalRecord,
    "pareto": ParetoRecord,
    "mixture": MixtureRecord,
}


def read_workload(text: str, source: str) -> Histogram | Mixture:
    """Parse the histogram or distribution of a JSON text; ``source`` names it in messages.

    Raises:
        InvalidInputError: the text is no JSON, or fields are missing, unknown or out of range.
    """
    document: dict[str, Any] = parse_json(text, source)
    if "bin_edges" in document or "counts" in document:
        return _checked(Histogram, document, source)
    name = document.get("distribution")
    record = _DISTRIBUTIONS.get(name) if isinstance(name, str) else None
    if record is None:
        seen = f"names the distribution {shown(name)}" if name is not None else "describes no lengths"
        raise InvalidInputError(f"{source} {seen}.", _DESCRIBES, "`milpplan schema workload` prints the fields.")
    return _checked(record, document, source).mixture()


def _checked(record: type[RecordType], document: dict[str, Any], source: str) -> RecordType:
    """Validate a record; errors point to the schema."""
    try:
        return validated(record, document, source)
    except InvalidInputError as error:
        do = "Correct the fields named; `milpplan schema workload` lists all."
        raise InvalidInputError(error.seen, error.expected, do) from error


def described(mixture: Mixture, source: str = "") -> MixtureRecord:
    """Describe a distribution as a record to write; ``source`` says where it comes from."""
    parts = tuple(
        LogNormalShare(share=share, mean_log=part.mean_log, sigma_log=part.sigma_log)
        if isinstance(part, LogNormal)
        else ParetoShare(share=share, shortest=part.shortest, tail=part.tail)
        for share, part in mixture.parts
    )
    return MixtureRecord(parts=parts, source=source)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """exp(N(mean_log, sigma_log^2)), rounded up to whole tokens."""

    mean_log: float
    sigma_log: float

    def sample(self, number: int, random: np.random.Generator) -> FloatArray:
        """Draw real lengths, [number]."""
        return np.asarray(random.lognormal(self.mean_log, self.sigma_log, number))

    @staticmethod
    def fitted(lengths: Int64Array) -> LogNormal:
        """Fit by maximum likelihood: mean and standard deviation of the logarithms."""
        logs = np.log(_positive(lengths))
        return LogNormal(float(logs.mean()), float(logs.std()))


@dataclass(frozen=True, slots=True)
class Pareto:
    """P(length > x) = (shortest / x)^tail for x >= shortest."""

    shortest: float
    tail: float

    def sample(self, number: int, random: np.random.Generator) -> FloatArray:
        """Draw real lengths, [number]."""
        return np.asarray(self.shortest * (1.0 + random.pareto(self.tail, number)))

    @staticmethod
    def fitted(lengths: Int64Array, shortest: float) -> Pareto:
        """Fit the tail above ``shortest`` by maximum likelihood. Source: Hill (1975)."""
        logs = np.log(_positive(lengths)[lengths > shortest] / shortest)
        if not logs.size:
            raise InvalidInputError(
                f"No length is above {shortest}.",
                "A shortest length below the longest expected.",
                "Lower it, or fit a log-normal.",
            )
        return Pareto(shortest, float(1.0 / logs.mean()))


@dataclass(frozen=True, slots=True)
class Mixture:
    """Mixture: each length comes from one of the parts, chosen with its share."""

    parts: tuple[tuple[float, LogNormal | Pareto], ...]

    def draw(self, number: int, random: np.random.Generator) -> Int64Array:
        """Draw whole lengths of at least 1, [number]."""
        shares = np.array([share for share, _ in self.parts])
        chosen = random.choice(len(self.parts), size=number, p=shares / shares.sum())
        lengths = np.empty(number)
        for index, (_, part) in enumerate(self.parts):
            selected = chosen == index
            lengths[selected] = part.sample(int(selected.sum()), random)
        return np.ceil(np.clip(lengths, 1, LONGEST)).astype(np.int64)


def fitted_mixture(lengths: Int64Array, tail_share: float = 0.05) -> Mixture:
    """Fit a log-normal to all but the longest ``tail_share`` of the lengths, and a Pareto to those."""
    if not 0 < tail_share < 1:
        raise InvalidInputError(
            f"The tail's share is {tail_share}.", "Between 0 and 1 expected.", "Give 0.05, for example."
        )
    edge = float(np.quantile(_positive(lengths), 1 - tail_share))
    body = LogNormal.fitted(lengths[lengths <= edge])
    return Mixture(((1 - tail_share, body), (tail_share, Pareto.fitted(lengths, edge))))


def _positive(lengths: Int64Array) -> Int64Array:
    """Return the lengths, or refuse an empty array and lengths below 1."""
    if lengths.size == 0 or lengths.min() < 1:
        raise InvalidInputError(
            f"{lengths.size} lengths to fit, the shortest {lengths.min(initial=0)}.",
            "At least one, all of at least 1, expected.",
            "Leave out empty sequences.",
        )
    return lengths


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
        32 * MIB,
    )
    if text.lstrip().startswith("{"):
        # No step has more sequences than are drawn for a number of tokens.
        number = 2**14 if num_sequences is None and num_tokens is not None else num_sequences
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
            f"Line {number} of {path} is {line[:40]!r}.",
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


# The dynamic program holds this many squared costs, for all pairs of ends.
MAX_DISTINCT = 4096


def optimal_buckets(lengths: Int64Array, counts: Int64Array, work: FloatArray, num_buckets: int) -> Int64Array:
    """Choose the ends of at most ``num_buckets`` buckets of ascending ``lengths`` [K], for minimum padded work.

    Padded work is sum_k counts_k work_e(k), with e(k) the end of k's bucket and ``work`` [K] (not falling) the
    work of one sequence of each length: tokens, or a time. Ends are lengths that occur, since any other could be
    lowered to one. Dynamic program over ends: B[b, i] = min_j B[b - 1, j] + work_i (n_{j+1} + ... + n_i), in
    O(num_buckets K^2); the form of FlexSP's bucketing (2412.01523), with any work.
    """
    number = lengths.size
    if not num_buckets >= 1 or number == 0 or counts.shape != lengths.shape or work.shape != lengths.shape:
        raise InvalidInputError(
            f"{num_buckets} buckets for {number} lengths, {counts.size} counts, {work.size} works.",
            "At least one bucket, and as many counts and works as lengths, expected.",
            "Correct the number of buckets.",
        )
    if number > MAX_DISTINCT:
        raise InvalidInputError(
            f"There are {number} distinct lengths.",
            f"At most {MAX_DISTINCT} expected.",
            "Align them to more tokens first.",
        )
    if (np.diff(lengths) <= 0).any() or (np.diff(work) < 0).any():
        raise InvalidInputError(
            "Lengths or their works fall.",
            "Ascending lengths with works that do not fall expected.",
            "Sort them.",
        )
    sums = np.concatenate(([0.0], np.cumsum(counts, dtype=np.float64)))
    best = np.full(number + 1, np.inf)
    best[0] = 0.0
    choices = []
    for _ in range(min(num_buckets, number)):
        # costs[i, j]: buckets before j, then one that holds lengths j .. i - 1.
        costs = best[None, :-1] + work[:, None] * (sums[1:, None] - sums[None, :-1])
        costs[np.triu_indices(number, 1)] = np.inf
        choices.append(costs.argmin(axis=1))
        best = np.concatenate(([0.0], costs.min(axis=1)))
    ends = []
    end = number
    for choice in reversed(choices):
        if end == 0:
            break
        ends.append(int(lengths[end - 1]))
        end = int(choice[end - 1])
    return np.array(ends[::-1], np.int64)


def padded(lengths: Int64Array, ends: Int64Array) -> Int64Array:
    """Return the end of every length's bucket; shape of ``lengths``."""
    buckets = np.searchsorted(ends, lengths)
    if (buckets >= ends.size).any():
        raise InvalidInputError(
            f"The longest sequence has {int(lengths.max())} tokens.",
            f"At most {int(ends[-1])}, the last bucket's end, expected.",
            "Add a bucket that ends above it, or cut sequences (--seq-len).",
        )
    return np.asarray(ends[buckets])
