"""Dispatcher for degrees side by side during training: batch after batch on the teams of one tensor parallelism.

``TeamDispatcher(problem, tp, longest)`` computes once the times of sequences of every length up to ``longest``
under every degree. ``dispatch(lengths)`` then plans a batch in milliseconds (``team_quick``): which sequence runs
on which GPUs, in which micro-batch and when, with the exact time and the proved bound of ``teams``. A
search of a second or two (``thorough``) finds a slightly shorter step, and proves the bound of the master.
Nothing is switched between batches: the parameters stay where they are. A dispatcher holds nothing but what
follows from its arguments, so threads share it and processes get it pickled; equal batches get equal answers
(attempts are counted, not timed).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from milpplan.errors import InvalidInputError
from milpplan.lengths import MAX_QUANTA, Load, SequenceRules, StrategyTables, check_rules, quantum_problem
from milpplan.lengths.bounds import glop
from milpplan.lengths.document import TeamDispatchFile, TeamTurnRecord
from milpplan.lengths.records import PACKED, TeamTurn
from milpplan.lengths.sequences import check_longest, checked_batch
from milpplan.lengths.side_by_side.team_quick import lines, quick_step
from milpplan.lengths.side_by_side.team_search import Effort, plan_family, team_turns
from milpplan.lengths.side_by_side.teams import Family, SharedTables, TeamStep, families
from milpplan.problem import Problem
from milpplan.simulation import IntArray
from milpplan.units import NS_PER_S

# Number of bunches of lengths in the program of a quick bound.
_BUNCHES = 32
# Efforts of a search for one batch, which are lower than those of a solve, and the gap at which it ends.
_FIRST, _LATER, _GAP = Effort(4, 200, 4), Effort(0, 200, 10), 5e-3


@dataclass(frozen=True, slots=True)
class TeamDispatch:
    """Plan of one batch."""

    lengths: tuple[int, ...]
    """Padded lengths of its sequences."""
    turns: tuple[TeamTurn, ...]
    """Turns in the order of their starts, whose micro-batches hold indices of the batch's sequences."""
    step_time_s: float
    """Exact time of the step."""
    lower_bound_s: float
    """Lower bound of all steps of these degrees."""

    @property
    def gap(self) -> float:
        """(time - bound) / time."""
        return (self.step_time_s - self.lower_bound_s) / self.step_time_s

    def file(self) -> TeamDispatchFile:
        """Return the batch as a document (``milpplan schema team-dispatch``) for a loader of any framework."""
        turns = tuple(TeamTurnRecord(**turn.to_dict()) for turn in self.turns)
        times = {"step_time_s": self.step_time_s, "lower_bound_s": self.lower_bound_s}
        return TeamDispatchFile(lengths=self.lengths, turns=turns, **times)


class TeamDispatcher:
    """Planner of batches of sequences of up to ``longest`` tokens, each padded to a multiple of ``alignment``."""

    def __init__(
        self,
        problem: Problem,
        tp: int,
        longest: int,
        alignment: int = 128,
        rules: SequenceRules = PACKED,
        etp: int | None = None,
    ) -> None:
        """Prepare the tables.

        Args:
            problem: as for ``solve_lengths``.
            tp: tensor parallelism of all degrees.
            longest: maximum length in tokens.
            alignment: every length is padded to a multiple of so many tokens.
            rules: as for ``solve_lengths``.
            etp: tensor parallelism of the experts, if there are several.

        Raises:
            InfeasibleError: no strategy holds the longest sequence.
            InvalidInputError: there are no two degrees under this tensor parallelism, or several tensor
                parallelisms of the experts and none is given; a number is below one; the model does not know these
                lengths; or the problem or degrees side by side do not support the rules.
        """
        check_rules(problem, rules, baselines=False, side_by_side=True)
        for name, value in (("tp", tp), ("longest", longest), ("alignment", alignment), ("etp", etp)):
            if not ((isinstance(value, (int, np.integer)) and value > 0) or (name, value) == ("etp", None)):
                raise InvalidInputError(
                    f"{name} is {value!r}.", "A whole number of at least 1 expected.", "Correct it."
                )
        check_longest(problem, longest)
        candidates = families(_pool(problem, tp, longest, alignment, rules))
        known_etps = sorted({_etp(family) for family in candidates})
        if etp is not None:
            candidates = [family for family in candidates if _etp(family) == etp]
        if len(candidates) > 1:
            raise InvalidInputError(
                f"tp={tp} has experts of tensor parallelism {', '.join(map(str, known_etps))}.",
                "Expected one of them: parameters stay where they are from batch to batch.",
                f"Give the etp of a step that was planned side by side (etp={known_etps[0]}, say).",
            )
        if not candidates:
            raise InvalidInputError(
                f"tp={tp}{'' if etp is None else f', etp={etp}'} has no two degrees of context parallelism that "
                f"hold the model, one of them with a sequence of {longest:,} tokens, next to each other in the "
                "order of ranks.",
                "Expected a tensor parallelism that has.",
                "Give the tp (and, of experts, the etp) of a step that was planned side by side.",
            )
        load = candidates[0].pool.load
        self.alignment, self.longest, self.family = alignment, int(load.lengths[-1]), candidates[0]
        self.lines, self.tables = lines(self.family), SharedTables.of(self.family)
        glop.ready()

    def dispatch(self, lengths: Sequence[int] | IntArray, *, thorough: bool = False) -> TeamDispatch:
        """Plan the batch of sequences of some lengths; ``thorough``: by a search, with a higher bound.

        Raises:
            InvalidInputError: there are no sequences, or one is empty or longer than the longest.
        """
        advice = "Make the dispatcher for longer sequences, or cut them."
        checked = checked_batch(lengths, self.longest, advice)
        length_indices = -(-checked // self.alignment) - 1
        counts = np.bincount(length_indices, minlength=len(self.family.pool.load.lengths)).astype(np.int64)
        step, bound_ns = self._searched(counts) if thorough else self._quick(counts)
        turns = _indexed(team_turns(step), length_indices, self.alignment)
        padded = tuple(((length_indices + 1) * self.alignment).tolist())
        return TeamDispatch(padded, turns, step.time_ns / NS_PER_S, bound_ns / NS_PER_S)

    def _searched(self, counts: IntArray) -> tuple[TeamStep, float]:
        pool = self.family.pool
        load = replace(pool.load, counts=counts)
        return plan_family(replace(self.family, pool=replace(pool, load=load)), _FIRST, _LATER, _GAP)

    def _quick(self, counts: IntArray) -> tuple[TeamStep, float]:
        """Plan the batch with tables of its lengths only."""
        pool, present = self.family.pool, np.flatnonzero(counts)
        load = replace(pool.load, lengths=pool.load.lengths[present], counts=counts[present])
        timers = {member: self.family.timer(member).for_lengths(present) for member in self.family.members}
        family = Family(replace(pool, load=load), self.family.members, timers)
        lines_of = {
            degree: [line.for_lengths(present) for line in degree_lines]
            for degree, degree_lines in self.lines.items()
        }
        step = quick_step(family, lines_of)
        shared = self.tables.for_lengths(present).shared(load.counts.astype(np.float64), step.time_ns, _BUNCHES)
        return step, shared.bound_ns


def _pool(problem: Problem, tp: int, longest: int, alignment: int, rules: SequenceRules) -> StrategyTables:
    """Return the strategies of one stage under a tensor parallelism, with every length once.

    The capacity is that of the memory, as batches have several sequences of one length.
    """
    space = problem.space.model_copy(update={"tp": (tp,), "pp": (1,), "ep": (1,)})
    quanta = np.arange(1, -(-longest // alignment) + 1, dtype=np.int64)
    load = Load(quanta * alignment, np.ones_like(quanta), alignment, rules)
    quantum_job = quantum_problem(problem.model_copy(update={"space": space}), alignment)
    return StrategyTables.of(quantum_job, load, MAX_QUANTA)


def _etp(family: Family) -> int:
    """Return the tensor parallelism of the experts."""
    return family.pool.members[family.members[0]].candidate.layout.etp


def _indexed(turns: tuple[TeamTurn, ...], length_indices: IntArray, alignment: int) -> tuple[TeamTurn, ...]:
    """Return the turns with indices of sequences in place of their lengths; of equal lengths the first sequences
    come first."""
    left = {
        int(length): np.flatnonzero(length_indices == length)[::-1].tolist()
        for length in np.unique(length_indices)
    }
    return tuple(
        replace(
            turn,
            micro_batches=tuple(
                tuple(left[length // alignment - 1].pop() for length in micro_batch)
                for micro_batch in turn.micro_batches
            ),
        )
        for turn in turns
    )
