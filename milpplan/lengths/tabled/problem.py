"""The problem of a grouped step: lengths with their counts, candidate strategies, and switch times.

**Strategies** and their costs: pipelines of equal stages, the time of one sequence on a stage, and memory in
tokens.

All times are whole nanoseconds. The time of a length on one stage is ``parts * units``: ``units`` [K] is an
integer table over the K distinct lengths of the workload, of which ``forward_parts`` are forward and
``backward_parts`` backward, so that forwards and backwards stay in one exact ratio.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from milpplan.errors import InfeasibleError, InvalidInputError

Int64Array = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

# Backward passes take twice the forward's operations (two products for each one).
FORWARD_PARTS = 1
BACKWARD_PARTS = 2


@dataclass(frozen=True)
class Pipeline:
    """A pipeline of ``num_stages`` equal stages, of which a strategy holds one or several copies.

    ``linear_ns`` b, ``quadratic_ns`` a and ``micro_batch_ns`` c are the time of one sequence of s tokens on one
    stage, forward and backward together, ``a s^2 + b s``, and of a micro-batch beyond its sequences.
    ``micro_batch_tokens`` bounds the tokens of a micro-batch, ``in_flight_tokens`` (if given) those of any
    ``num_stages`` consecutive micro-batches, which the first stage holds at once under 1F1B.
    ``max_micro_batches`` bounds the micro-batches of a step (1 where nothing accumulates). ``transfer_ns`` is
    the time between two stages.
    """

    name: str
    num_stages: int
    quadratic_ns: float
    linear_ns: float
    micro_batch_ns: float
    micro_batch_tokens: int
    in_flight_tokens: int | None = None
    max_micro_batches: int | None = None
    transfer_ns: int = 0
    forward_parts: int = FORWARD_PARTS
    backward_parts: int = BACKWARD_PARTS
    num_gpus: int = 1

    def __post_init__(self) -> None:
        times = (self.quadratic_ns, self.linear_ns, self.micro_batch_ns, self.transfer_ns)
        if not all(np.isfinite(time) and time >= 0 for time in times):
            raise InvalidInputError(
                f"Pipeline {self.name} has times {times} ns.", "Finite times of at least zero expected."
            )
        counts = (self.num_stages, self.forward_parts, self.num_gpus, self.max_micro_batches or 1)
        if min(counts) < 1 or self.backward_parts < 0:
            raise InvalidInputError(
                f"Pipeline {self.name} has {self.num_stages} stages, {self.num_gpus} GPUs, "
                f"{self.forward_parts}:{self.backward_parts} parts.",
                "At least one of each expected.",
            )

    @property
    def parts(self) -> int:
        """Nanoseconds of a unit: its forward and its backward."""
        return self.forward_parts + self.backward_parts

    @property
    def micro_batch_units(self) -> int:
        """Units of an empty micro-batch."""
        return round(self.micro_batch_ns / self.parts)

    def units(self, lengths: Int64Array) -> Int64Array:
        """Return the units of one sequence of each length on a stage, rounded; shape of ``lengths``.

        a s^2 + b s in parts. Source: the regressions of Hydraulis (PKU-DAIR/Hetu, examples/hydraulis), whose
        form every cost model of transformers has: attention is quadratic in the length, all else linear.
        """
        tokens = np.asarray(lengths, np.float64)
        time_ns = self.quadratic_ns * tokens * tokens + self.linear_ns * tokens
        return np.rint(time_ns / self.parts).astype(np.int64)

    def holds(self, lengths: Int64Array) -> npt.NDArray[np.bool_]:
        """Mark the lengths that fit into a micro-batch alone."""
        limit = self.micro_batch_tokens
        if self.in_flight_tokens is not None:
            limit = min(limit, self.in_flight_tokens)
        return np.asarray(lengths) <= limit


@dataclass(frozen=True)
class TabledPipeline(Pipeline):
    """A pipeline whose units come from a table: ``table`` of the ascending ``table_lengths``."""

    table_lengths: tuple[int, ...] = ()
    table: tuple[int, ...] = ()

    def units(self, lengths: Int64Array) -> Int64Array:
        """Look up the units of lengths; shape of ``lengths``.

        Raises:
            InvalidInputError: a length that is not in the table.
        """
        tabled = np.array(self.table_lengths, np.int64)
        indices = np.minimum(np.searchsorted(tabled, lengths), tabled.size - 1)
        if (tabled[indices] != lengths).any():
            raise InvalidInputError(
                f"Pipeline {self.name} has no time for {int(lengths[tabled[indices] != lengths][0])} tokens.",
                f"Lengths of its table expected: {tabled.size} from {tabled[0]} to {tabled[-1]}.",
                "Align lengths as the table's are.",
            )
        return np.asarray(np.array(self.table, np.int64)[indices])


@dataclass(frozen=True)
class Strategy:
    """Pipelines side by side on all GPUs: replicas of one kind, or of several (heterogeneous).

    ``reduce_ns``: gradients reduced once after the strategy's micro-batches, in every step that uses it.
    """

    name: str
    pipelines: tuple[tuple[Pipeline, int], ...]
    reduce_ns: int = 0

    def __post_init__(self) -> None:
        if not self.pipelines or min(count for _, count in self.pipelines) < 1 or self.reduce_ns < 0:
            raise InvalidInputError(
                f"Strategy {self.name} has {[count for _, count in self.pipelines]} pipelines and a reduction of "
                f"{self.reduce_ns} ns.",
                "At least one pipeline of each kind and no negative time expected.",
            )

    @staticmethod
    def of(pipeline: Pipeline, num_replicas: int, reduce_ns: int = 0, name: str = "") -> Strategy:
        """Make a strategy of ``num_replicas`` equal pipelines."""
        return Strategy(name or f"{num_replicas} x {pipeline.name}", ((pipeline, num_replicas),), reduce_ns)

    @cached_property
    def replicas(self) -> tuple[Pipeline, ...]:
        """Every replica's pipeline, kind after kind."""
        return tuple(pipeline for pipeline, count in self.pipelines for _ in range(count))

    def holds(self, lengths: Int64Array) -> npt.NDArray[np.bool_]:
        """Mark the lengths that fit into some replica."""
        return np.asarray(np.any([pipeline.holds(lengths) for pipeline, _ in self.pipelines], axis=0), np.bool_)


@dataclass(frozen=True, eq=False)
class SwitchTimes:
    """Switch times between strategies, indexed [from, to], in ns.

    Parameters move before the next group starts, gradients while it runs.
    """

    parameters_ns: Int64Array
    gradients_ns: Int64Array

    def __post_init__(self) -> None:
        square = self.parameters_ns.shape
        if len(square) != 2 or square[0] != square[1] or self.gradients_ns.shape != square:
            raise InvalidInputError(
                f"Switch times have shapes {list(square)} and {list(self.gradients_ns.shape)}.",
                "Two square matrices with a row and a column a strategy expected.",
            )
        if min(self.parameters_ns.min(initial=0), self.gradients_ns.min(initial=0)) < 0:
            raise InvalidInputError("A switch takes less than zero time.", "Times of at least zero expected.")

    @staticmethod
    def free(num_strategies: int) -> SwitchTimes:
        """Make switches that cost nothing."""
        zero = np.zeros((num_strategies, num_strategies), np.int64)
        return SwitchTimes(zero, zero)


# A time before the start, so that work that depends on it does not wait.
_NEVER = -(2**62)


def pipeline_times_ns(pipeline: Pipeline, units: Int64Array) -> Int64Array:
    """Compute the times of pipelines with the micro-batch loads ``units`` [..., v], empty micro-batch included.

    All pipelines of the leading dimensions are swept together; without micro-batches the time is 0.

    Stage p of P runs min(P - p - 1, v) forwards first, then a forward and a backward in turn. So with F[p, m] and
    B[p, m] the ends of micro-batch m's work on stage p, f_m and b_m its durations and l the transfer,

        F[p, m] = f_m + max(F[p-1, m] + l, previous)     previous = F[p, m-1] while m < P - p, else B[p, m-P+p]
        B[p, m] = b_m + max(B[p+1, m] + l, previous)     previous = F[p, m+P-p-1] if that exists, else B[p, m-1]

    and the time is B[0, v-1]. Source: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training" (2021),
    PipeDream-flush; the order of ``milpplan.simulation.pipeline.work_orders`` (tested against it).
    """
    loads = np.asarray(units, np.int64)
    num_stages, num_micro_batches = pipeline.num_stages, loads.shape[-1]
    if num_micro_batches == 0:
        return np.zeros(loads.shape[:-1], np.int64)
    if num_stages == 1:
        return np.asarray(loads.sum(axis=-1) * pipeline.parts)
    forward, backward = loads * pipeline.forward_parts, loads * pipeline.backward_parts
    # ends[p] is the end of the last work item of stage p; kept forwards [p] and backwards [p] of the last turn.
    shape = loads.shape[:-1]
    ends = [np.zeros(shape, np.int64) for _ in range(num_stages)]
    backward_ends: list[Int64Array] = [np.full(shape, _NEVER)] * (num_stages + 1)
    transfer_ns = pipeline.transfer_ns
    for turn in range(num_micro_batches + num_stages):
        arrival = np.full(shape, _NEVER)
        for stage in range(num_stages):
            backward_of = turn - num_stages + stage
            if 0 <= backward_of < num_micro_batches:
                # The backward of ``done`` on the next stage ended in the turn before.
                start = np.maximum(ends[stage], backward_ends[stage + 1] + transfer_ns)
                ends[stage] = start + backward[..., backward_of]
                backward_ends[stage] = ends[stage]
            if turn < num_micro_batches:
                ends[stage] = np.maximum(ends[stage], arrival + transfer_ns) + forward[..., turn]
                arrival = ends[stage]
    return ends[0]


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
