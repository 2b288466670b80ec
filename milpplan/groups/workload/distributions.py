"""Distributions of lengths: log-normal, Pareto, and mixtures of both; drawn from, and fitted to lengths."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from milpplan.errors import InvalidInputError
from milpplan.groups.strategies import FloatArray, Int64Array

LONGEST = 10**9
"""Maximum length in tokens."""


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
