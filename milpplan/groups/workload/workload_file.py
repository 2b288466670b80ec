"""Files that describe the lengths of sequences: a histogram, or a distribution. JSON, read strictly.

    {"bin_edges": [0, 128, 1024], "counts": [50, 40]}                 bins (edge, next edge]
    {"distribution": "lognormal", "mean_log": 6.1, "sigma_log": 1.2}
    {"distribution": "pareto", "shortest": 2000, "tail": 1.1}
    {"distribution": "mixture", "parts": [{"share": 0.95, "distribution": "lognormal", ...}, ...]}

Each may state its ``source``. ``described`` makes such a record of a distribution, fitted or not, so that
``described(fitted_mixture(lengths)).model_dump_json()`` is a file. ``milpplan schema workload`` prints the schema.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, Self

import numpy as np
from pydantic import Field, RootModel, model_validator

from milpplan.errors import InvalidInputError
from milpplan.groups.strategies import Int64Array
from milpplan.groups.workload.distributions import LONGEST, LogNormal, Mixture, Pareto
from milpplan.problem.reading import RecordType, parse_json, shown, validated
from milpplan.problem.records import Count, PositiveFloat, Record

# Far above the logarithm of any length.
_LOGARITHM: Final = 1e3
_DESCRIBES: Final = "bin_edges and counts, or a distribution: lognormal, pareto or mixture, expected."
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
    """``distributions.LogNormal``."""

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
    """``distributions.Pareto``."""

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
    """``distributions.Mixture``."""

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
