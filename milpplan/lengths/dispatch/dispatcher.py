"""Dispatcher of batches during training, under the strategies of a step that was solved.

``Dispatcher(step)`` takes a plan on tables (``GroupedPlan``), or the result of ``solve_lengths`` (or
``LengthsFile.ran`` of its file) with strategies in turn or degrees side by side, and computes once what batches
share. ``dispatch(lengths)`` then plans a batch in milliseconds: which sequence runs under which strategy, on which
replica, in which micro-batch, and in which order, with the exact time and a proved bound.

The step's coupling decides who plans: ``GroupedBatches`` on tables, ``TurnBatches`` for strategies in turn on
this project's cost model, ``TeamBatches`` for degrees side by side. A dispatcher holds nothing but what follows
from its arguments, so threads share it and processes get it pickled; equal batches get equal answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from milpplan.errors import InvalidInputError
from milpplan.lengths.dispatch import GroupedBatches
from milpplan.lengths.dispatch.batch_planning import PlannedBatch
from milpplan.lengths.dispatch.team_batches import TeamBatches
from milpplan.lengths.dispatch.turn_batches import TurnBatches
from milpplan.lengths.document import DispatchFile, DispatchGroup
from milpplan.lengths.records import LengthsResult, MicroBatches, RanStep
from milpplan.lengths.sequences import checked_batch
from milpplan.lengths.tabled import GroupedPlan
from milpplan.problem import Problem
from milpplan.simulation import IntArray
from milpplan.units import NS_PER_S


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Plan of one batch."""

    lengths: tuple[int, ...]
    """Padded lengths of its sequences."""
    order: tuple[str, ...]
    """Strategies in the order in which they run."""
    micro_batches: tuple[MicroBatches, ...]
    """By strategy: indices of the batch's sequences in every micro-batch of every replica."""
    home: str
    time_ns: int
    bound_ns: int
    """Lower bound of all steps of these strategies."""
    side_by_side: bool = False
    """True if strategies overlap: a replica starts once its own GPUs are free."""

    @property
    def step_time_s(self) -> float:
        """Exact time of the step, seconds."""
        return self.time_ns / NS_PER_S

    @property
    def lower_bound_s(self) -> float:
        """Lower bound of all steps of these strategies, seconds."""
        return self.bound_ns / NS_PER_S

    @property
    def gap(self) -> float:
        """(time - bound) / time."""
        return (self.time_ns - self.bound_ns) / self.time_ns

    def file(self) -> DispatchFile:
        """Return the batch as a document (``milpplan schema dispatch``) for a loader of any framework."""
        groups = [
            DispatchGroup(strategy=name, replicas=replicas)
            for name, replicas in zip(self.order, self.micro_batches, strict=True)
        ]
        return DispatchFile(
            lengths=self.lengths,
            home=self.home,
            groups=tuple(groups),
            time_ns=self.time_ns,
            bound_ns=self.bound_ns,
            side_by_side=self.side_by_side,
        )


class Batches(Protocol):
    """Planner of batches under the strategies of one step."""

    alignment: int
    """Every length is padded to a multiple of so many tokens."""
    longest: int
    """Maximum length in tokens."""
    home_name: str
    """Strategy that holds the optimizer's states."""

    def planned(self, lengths: IntArray, *, thorough: bool) -> PlannedBatch:
        """Plan the batch of sequences of padded ``lengths`` [n]."""


class Dispatcher:
    """Dispatcher of batches of sequences of up to ``longest`` tokens, each padded to a multiple of
    ``alignment``."""

    def __init__(self, step: GroupedPlan | LengthsResult | RanStep, problem: Problem | None = None) -> None:
        """Prepare the tables.

        Args:
            step: the step that was solved.
            problem: the problem that was solved; None: that of the result. A plan on tables needs none.

        Raises:
            InvalidInputError: the step has heterogeneous replicas or padded micro-batches, its strategies do not
                belong to the problem, or its problem is missing.
        """
        self.side_by_side = not isinstance(step, GroupedPlan) and step.beside == "degrees side by side"
        self.num_strategies = len(step.groups)
        self.batches: Batches
        if isinstance(step, GroupedPlan):
            self.batches = GroupedBatches(step)
        else:
            problem = step.problem if problem is None and isinstance(step, LengthsResult) else problem
            if problem is None:
                raise InvalidInputError(
                    "The step of a file has no problem.", "Expected the problem that was solved.", "Give problem=."
                )
            self.batches = TeamBatches(problem, step) if self.side_by_side else TurnBatches(problem, step)

    @property
    def alignment(self) -> int:
        """Number of tokens to a multiple of which every length is padded."""
        return self.batches.alignment

    @property
    def longest(self) -> int:
        """Maximum length in tokens."""
        return self.batches.longest

    def dispatch(self, lengths: Sequence[int] | IntArray, *, thorough: bool = False) -> Dispatch:
        """Plan the batch of sequences of some lengths.

        Args:
            lengths: [n] in tokens, one a sequence, in any order.
            thorough: whether to search for a second or more: small batches of degrees side by side get shorter.

        Raises:
            InvalidInputError: there are no sequences, one is empty or longer than any strategy holds, or
                ``thorough`` is asked for where nothing is side by side.
            SolverError: no packing within memory was found.
        """
        advice = "Cut sequences, or solve anew with the longest lengths that occur."
        checked = checked_batch(lengths, self.longest, advice)
        if thorough and not self.side_by_side:
            raise InvalidInputError(
                "A thorough search was asked for.", "Expected degrees side by side.", "Leave thorough out."
            )
        padded = -(-checked // self.alignment) * self.alignment
        found = self.batches.planned(padded, thorough=thorough)
        return Dispatch(
            tuple(padded.tolist()),
            found.order,
            found.micro_batches,
            self.batches.home_name,
            found.time_ns,
            found.bound_ns,
            self.side_by_side,
        )


@dataclass(slots=True)
class PackedSampler:
    """Packed micro-batches of one data-parallel replica under a step of one strategy, for
    ``torch.utils.data.DataLoader(batch_sampler=...)``.

    Every process makes its own; all of them plan the same steps, each of ``sequences_per_step`` sequences of the
    data, shuffled by seed and epoch. The sequences left over at the end of an epoch are dropped.
    """

    dispatcher: Dispatcher
    lengths: Sequence[int]
    """Length of every sequence of the data, in tokens."""
    sequences_per_step: int
    replica: int
    """Rank of the process among the replicas of the strategy."""
    seed: int = 0
    epoch: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.sequences_per_step <= len(self.lengths):
            raise InvalidInputError(
                f"{self.sequences_per_step:,} sequences a step are asked for.",
                f"Expected 1 to {len(self.lengths):,}, all that the data has.",
                "Correct sequences_per_step.",
            )
        if self.dispatcher.num_strategies > 1:
            raise InvalidInputError(
                f"The step has {self.dispatcher.num_strategies} strategies.",
                "Expected one, whose replicas take their micro-batches from a sampler each.",
                "Solve with --turns-only --max-strategies 1.",
            )

    def __iter__(self) -> Iterator[list[int]]:
        """Iterate over the micro-batches of all steps, each as indices of its sequences."""
        for step in self.steps():
            yield from step

    def steps(self) -> Iterator[tuple[list[int], ...]]:
        """Iterate over the steps of the epoch: the micro-batches of this replica in the order they run, none where
        the others have all sequences.

        Raises:
            InvalidInputError: the strategy has no replica of this rank.
        """
        lengths, number = np.asarray(self.lengths, dtype=np.int64), self.sequences_per_step
        shuffled = np.random.default_rng([self.seed, self.epoch]).permutation(len(lengths))
        for first in range(0, len(shuffled) - number + 1, number):
            chosen = shuffled[first : first + number]
            replicas = self.dispatcher.dispatch(lengths[chosen]).micro_batches[0]
            if not 0 <= self.replica < len(replicas):
                raise InvalidInputError(
                    f"Replica {self.replica} is asked for.",
                    f"Expected 0 to {len(replicas) - 1}, the ranks of the strategy's replicas.",
                    "Give the data-parallel rank of the process.",
                )
            yield tuple(chosen[list(rows)].tolist() for rows in replicas[self.replica])
