"""Degrees side by side during training: one batch after another on the teams of one tensor parallelism.

``TeamDispatcher(problem, tp, longest)`` works out once what sequences of every length up to ``longest`` take under
every degree; ``dispatch(lengths)`` then plans a batch in milliseconds (``team_quick``): which sequence runs on
which GPUs, in which micro-batch and when, with the exact time and the proved bound of ``team_bound``. A second or
two of search (``thorough``) finds a little more, and proves that of ``team_prices``. Nothing is switched between
batches either: the parameters are where they are. A dispatcher holds nothing but what follows from its arguments,
so threads share it and processes get it pickled; the same batch gets the same answer (attempts are counted, not
timed).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from milpplan.errors import InvalidInputError
from milpplan.groups.bounds import glop
from milpplan.lengths.candidates import quantum_problem
from milpplan.lengths.cost_tables import Load
from milpplan.lengths.records import PACKED, SequenceRules, TeamTurn
from milpplan.lengths.sequences import check_longest, check_rules, checked_batch
from milpplan.lengths.side_by_side.team_bound import SharedTables
from milpplan.lengths.side_by_side.team_file import TeamDispatchFile, TeamTurnRecord
from milpplan.lengths.side_by_side.team_quick import lines, quick_step
from milpplan.lengths.side_by_side.team_search import Effort
from milpplan.lengths.side_by_side.team_steps import planned, team_turns
from milpplan.lengths.side_by_side.teams import Family, TeamStep, families
from milpplan.lengths.strategy_tables import MAX_QUANTA, StrategyTables
from milpplan.problem.problem import Problem
from milpplan.simulation.layout_columns import IntArray
from milpplan.units import NS_PER_S

# Bunches of lengths in the program of a quick bound.
_BUNCHES = 32
# Efforts of a search for one batch, and the gap at which that ends: a solve makes more.
_FIRST, _LATER, _GAP = Effort(4, 200, 4), Effort(0, 200, 10), 5e-3


@dataclass(frozen=True, slots=True)
class TeamDispatch:
    """One batch: its padded ``lengths``, ``turns`` in the order of their starts, whose micro-batches hold indices
    of the batch's sequences; the exact step and what no step of these degrees undercuts, in seconds."""

    lengths: tuple[int, ...]
    turns: tuple[TeamTurn, ...]
    step_time_s: float
    lower_bound_s: float

    @property
    def gap(self) -> float:
        """(time - bound) / time."""
        return (self.step_time_s - self.lower_bound_s) / self.step_time_s

    def file(self) -> TeamDispatchFile:
        """The batch as a document (``milpplan schema team-dispatch``) for a loader of any framework."""
        turns = tuple(TeamTurnRecord(**one.to_dict()) for one in self.turns)
        times = {"step_time_s": self.step_time_s, "lower_bound_s": self.lower_bound_s}
        return TeamDispatchFile(lengths=self.lengths, turns=turns, **times)


class TeamDispatcher:
    """Plans batches of sequences of up to ``longest`` tokens, each padded to a multiple of ``alignment``."""

    def __init__(
        self,
        problem: Problem,
        tp: int,
        longest: int,
        alignment: int = 128,
        rules: SequenceRules = PACKED,
        etp: int | None = None,
    ) -> None:
        """``problem`` and ``rules``: as for ``solve_lengths``; ``tp``, ``etp``: the tensor parallelism of all
        degrees, and that of their experts, where there are several.

        Raises:
            InfeasibleError: no strategy holds the longest sequence.
            InvalidInputError: there are no two degrees under this tensor parallelism, or those of several of the
                experts' and none is named; numbers that are none or below one; lengths that the model does not
                know; or rules that the problem or degrees side by side do not know.
        """
        check_rules(problem, rules, baselines=False, side_by_side=True)
        for name, value in (("tp", tp), ("longest", longest), ("alignment", alignment), ("etp", etp)):
            if not ((isinstance(value, (int, np.integer)) and value > 0) or (name, value) == ("etp", None)):
                raise InvalidInputError(
                    f"{name} is {value!r}.", "A whole number of at least 1 expected.", "Correct it."
                )
        check_longest(problem, longest)
        found = families(_pool(problem, tp, longest, alignment, rules))
        known = sorted({_etp(one) for one in found})
        if etp is not None:
            found = [one for one in found if _etp(one) == etp]
        if len(found) > 1:
            raise InvalidInputError(
                f"tp={tp} has experts of tensor parallelism {', '.join(map(str, known))}.",
                "Expected one of them: parameters stay where they are from batch to batch.",
                f"Give the etp of a step that was planned side by side (etp={known[0]}, say).",
            )
        if not found:
            raise InvalidInputError(
                f"tp={tp}{'' if etp is None else f', etp={etp}'} has no two degrees of context parallelism that "
                f"hold the model, one of them with a sequence of {longest:,} tokens, next to each other in the "
                "order of ranks.",
                "Expected a tensor parallelism that has.",
                "Give the tp (and, of experts, the etp) of a step that was planned side by side.",
            )
        load = found[0].pool.load
        self.alignment, self.longest, self.family = alignment, int(load.lengths[-1]), found[0]
        self.lines, self.tables = lines(self.family), SharedTables.of(self.family)
        glop.ready()

    def dispatch(self, lengths: Sequence[int] | IntArray, *, thorough: bool = False) -> TeamDispatch:
        """The batch of sequences of these lengths; ``thorough``: by a search, with a higher bound.

        Raises:
            InvalidInputError: no sequences, or one that is empty or longer than the longest.
        """
        do = "Make the dispatcher for longer sequences, or cut them."
        given = checked_batch(lengths, self.longest, do)
        places = -(-given // self.alignment) - 1
        counts = np.bincount(places, minlength=len(self.family.pool.load.lengths)).astype(np.int64)
        step, bound_ns = self._searched(counts) if thorough else self._quick(counts)
        turns = _indexed(team_turns(step), places, self.alignment)
        padded = tuple(((places + 1) * self.alignment).tolist())
        return TeamDispatch(padded, turns, step.time_ns / NS_PER_S, bound_ns / NS_PER_S)

    def _searched(self, counts: IntArray) -> tuple[TeamStep, float]:
        pool = self.family.pool
        load = replace(pool.load, counts=counts)
        return planned(replace(self.family, pool=replace(pool, load=load)), _FIRST, _LATER, _GAP)

    def _quick(self, counts: IntArray) -> tuple[TeamStep, float]:
        """With nothing but the lengths that there are."""
        pool, held = self.family.pool, np.flatnonzero(counts)
        load = replace(pool.load, lengths=pool.load.lengths[held], counts=counts[held])
        timers = {member: self.family.timer(member).for_lengths(held) for member in self.family.members}
        family = Family(replace(pool, load=load), self.family.members, timers)
        among = {degree: [one.for_lengths(held) for one in found] for degree, found in self.lines.items()}
        step = quick_step(family, among)
        shared = self.tables.for_lengths(held).shared(load.counts.astype(np.float64), step.time_ns, _BUNCHES)
        return step, shared.bound_ns


def _pool(problem: Problem, tp: int, longest: int, alignment: int, rules: SequenceRules) -> StrategyTables:
    """One stage under a tensor parallelism, with every length once. A micro-batch holds what memory does: batches
    have more of one length."""
    space = problem.space.model_copy(update={"tp": (tp,), "pp": (1,), "ep": (1,)})
    grains = np.arange(1, -(-longest // alignment) + 1, dtype=np.int64)
    load = Load(grains * alignment, np.ones_like(grains), alignment, rules)
    of_one = quantum_problem(problem.model_copy(update={"space": space}), alignment)
    return StrategyTables.of(of_one, load, MAX_QUANTA)


def _etp(family: Family) -> int:
    """Tensor parallelism of the experts."""
    return family.pool.members[family.members[0]].candidate.layout.etp


def _indexed(turns: tuple[TeamTurn, ...], places: IntArray, alignment: int) -> tuple[TeamTurn, ...]:
    """The turns with indices of sequences in place of their lengths: of each length, the first ones first."""
    waiting = {int(place): np.flatnonzero(places == place)[::-1].tolist() for place in np.unique(places)}
    return tuple(
        replace(
            turn,
            micro_batches=tuple(
                tuple(waiting[length // alignment - 1].pop() for length in one) for one in turn.micro_batches
            ),
        )
        for turn in turns
    )
