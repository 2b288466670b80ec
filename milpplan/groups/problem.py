"""The problem of a grouped step: lengths with their counts, candidate strategies, and switch times."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from milpplan.errors import InfeasibleError, InvalidInputError
from milpplan.groups.strategies import FloatArray, Int64Array, Pipeline, Strategy, SwitchTimes

# Maximum number of distinct lengths in a program.
MAX_DISTINCT = 2048


@dataclass(frozen=True, eq=False)
class GroupedProblem:
    """One step: ``counts`` [K] sequences of the distinct ``lengths`` [K] (ascending), each to be run once.

    ``max_strategies`` bounds the strategies that hold sequences. The optimizer's states live with one of ``homes``
    (indices of strategies; by default all that hold some sequence), whose ``finish_ns`` (optimizer and gathers)
    ends the step; a home need not hold sequences.
    """

    lengths: Int64Array
    counts: Int64Array
    strategies: tuple[Strategy, ...]
    switches: SwitchTimes
    max_strategies: int = 3
    homes: tuple[int, ...] = ()
    finish_ns: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        number = len(self.strategies)
        if not number or self.switches.parameters_ns.shape != (number, number):
            raise InvalidInputError(
                f"{number} strategies and switch times of shape {list(self.switches.parameters_ns.shape)}.",
                "A row and a column of switch times for every strategy expected.",
            )
        if self.lengths.size == 0 or self.lengths.shape != self.counts.shape:
            raise InvalidInputError(
                f"{self.lengths.size} lengths with {self.counts.size} counts.", "At least one of each expected."
            )
        if self.lengths.size > MAX_DISTINCT:
            raise InvalidInputError(
                f"There are {self.lengths.size} distinct lengths.",
                f"At most {MAX_DISTINCT} expected: every one has a variable for every strategy.",
                "Align lengths to more tokens, or use fewer buckets.",
            )
        if (np.diff(self.lengths) <= 0).any() or self.lengths[0] < 1 or self.counts.min() < 1:
            raise InvalidInputError(
                f"Lengths {self.lengths[:3].tolist()} ... with counts {self.counts[:3].tolist()} ...",
                "Ascending distinct lengths of at least 1, each counted at least once, expected.",
            )
        if self.max_strategies < 1 or not all(0 <= home < number for home in self.homes):
            raise InvalidInputError(
                f"max_strategies is {self.max_strategies}, homes are {self.homes}.",
                f"At least 1, and indices of the {number} strategies, expected.",
            )
        if len(self.finish_ns) not in (0, number):
            raise InvalidInputError(f"{len(self.finish_ns)} values of finish_ns for {number} strategies.")
        self._require_capacity()

    def _require_capacity(self) -> None:
        """Raise ``InfeasibleError`` if the longest sequence fits under no strategy."""
        longest = int(self.lengths[-1])
        if not any(strategy.holds(self.lengths[-1:])[0] for strategy in self.strategies):
            most_tokens, name = max(
                (pipeline.micro_batch_tokens, strategy.name)
                for strategy in self.strategies
                for pipeline, _ in strategy.pipelines
            )
            raise InfeasibleError(
                f"A sequence of {longest} tokens fits under no strategy.",
                f"The most that one holds is {most_tokens} tokens ({name}).",
                "Cut sequences at that length, or add a strategy with more tensor or context parallelism.",
            )

    @property
    def num_sequences(self) -> int:
        """Number of sequences of the step."""
        return int(self.counts.sum())

    @property
    def home_choices(self) -> tuple[int, ...]:
        """Strategies that may hold the optimizer's states: ``homes``, or all that hold some sequence.

        A strategy without capacity for the shortest sequence may have none for the model either.
        """
        if self.homes:
            return self.homes
        return tuple(s for s, strategy in enumerate(self.strategies) if strategy.holds(self.lengths).any())

    def finish_of(self, home: int) -> int:
        """Return the time of the optimizer and the gathers of a home, ns."""
        return self.finish_ns[home] if self.finish_ns else 0

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """Kinds of pipelines of all strategies, strategy after strategy."""
        return tuple(
            Kind(index, pipeline, count, self.lengths, self.counts)
            for index, strategy in enumerate(self.strategies)
            for pipeline, count in strategy.pipelines
        )

    def kinds_of(self, strategy: int) -> tuple[Kind, ...]:
        """Return the kinds of one strategy."""
        return tuple(kind for kind in self.kinds if kind.strategy == strategy)


class Kind:
    """One kind of equal pipelines of one strategy, with its tables over the lengths of the problem.

    ``units`` [K] is the work of one sequence, ``fits`` [K] marks lengths within the capacity, and ``cap_units``
    bounds the work of a micro-batch: n_k sequences have sum n_k u_k <= max_k(u_k / l_k) * sum n_k l_k, and tokens
    are bounded. Several micro-batches hold at most the sequences with the most units per token, as many as fit
    into their tokens (``most_units``).
    """

    def __init__(
        self, strategy: int, pipeline: Pipeline, num_replicas: int, lengths: Int64Array, counts: Int64Array
    ) -> None:
        self.strategy = strategy
        self.pipeline = pipeline
        self.num_replicas = num_replicas
        self.lengths = lengths
        self.counts = counts
        self.units: Int64Array = pipeline.units(lengths)
        self.fits: npt.NDArray[np.bool_] = pipeline.holds(lengths)
        self.total_units = int((self.units * counts)[self.fits].sum())
        density = float((self.units / lengths)[self.fits].max(initial=0.0))
        self.cap_units = min(self.total_units, int(np.ceil(density * pipeline.micro_batch_tokens)) + 1)

    def most_units(self, num_micro_batches: int) -> int:
        """Return the maximum work of ``num_micro_batches`` micro-batches; a part of a sequence counts, too."""
        tokens, units = self._densest
        capacity_tokens = min(num_micro_batches * self.pipeline.micro_batch_tokens, int(tokens[-1]))
        densest_units = int(np.ceil(np.interp(capacity_tokens, tokens, units))) + 1
        return min(self.total_units, num_micro_batches * self.cap_units, densest_units)

    @cached_property
    def _densest(self) -> tuple[FloatArray, FloatArray]:
        """Cumulated tokens and units of the fitting sequences, most units per token first, from 0."""
        fitting = np.flatnonzero(self.fits)
        order = fitting[np.argsort(-self.units[fitting] / self.lengths[fitting], kind="stable")]
        sums = (
            np.cumsum(values[order] * self.counts[order], dtype=np.float64)
            for values in (self.lengths, self.units)
        )
        tokens, units = (np.concatenate([[0.0], values]) for values in sums)
        return tokens, units
