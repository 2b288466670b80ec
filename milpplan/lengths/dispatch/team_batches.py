"""Batches of degrees side by side, on the teams of the tensor parallelism of a solved step.

``TeamBatches(problem, step)`` computes once the times of sequences of every length under every degree of context
parallelism that goes with the step's tensor parallelism. A batch is planned by ``team_quick``, with the exact time
and the bound of ``teams``; a search of a second or two (``thorough``) finds a slightly shorter step, and proves
the bound of the master. Nothing is switched between batches: the parameters stay where they are. Attempts are
counted, not timed, so equal batches get equal answers.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from milpplan.errors import InvalidInputError
from milpplan.lengths import MAX_QUANTA, LengthsResult, quantum_problem
from milpplan.lengths.bounds import glop
from milpplan.lengths.candidates import candidates, sized
from milpplan.lengths.dispatch.batch_planning import PlannedBatch, indexed, indices_by_length
from milpplan.lengths.dispatch.turn_batches import batch_tables, chosen_candidates
from milpplan.lengths.records import MicroBatches, RanStep
from milpplan.lengths.side_by_side.team_quick import lines, quick_step
from milpplan.lengths.side_by_side.team_search import Effort, plan_family
from milpplan.lengths.side_by_side.teams import Family, SharedTables, TeamStep, families
from milpplan.lengths.strategy_tables import undominated
from milpplan.problem import Problem
from milpplan.simulation import IntArray

# Number of bunches of lengths in the program of a quick bound.
_BUNCHES = 32
# Efforts of a search for one batch, which are lower than those of a solve, and the gap at which it ends.
_FIRST, _LATER, _GAP = Effort(4, 200, 4), Effort(0, 200, 10), 5e-3


class TeamBatches:
    """Planner of batches on the degrees of a step side by side."""

    def __init__(self, problem: Problem, result: LengthsResult | RanStep) -> None:
        """Prepare the tables.

        Args:
            problem: the problem that was solved.
            result: its result, or ``LengthsFile.ran`` of a file of it.

        Raises:
            InvalidInputError: the step's strategies do not belong to the problem.
        """
        quantum_job = quantum_problem(problem, result.alignment)
        ran = chosen_candidates(quantum_job, result)[0].layout
        # Parameters stay where they are, so all degrees have the step's shards.
        degrees = [
            candidate
            for candidate in candidates(quantum_job)
            if (candidate.layout.tp, candidate.layout.etp, candidate.layout.rank_order)
            == (ran.tp, ran.etp, ran.rank_order)
            and candidate.layout.pp == candidate.layout.ep == 1
        ]
        pool = batch_tables(quantum_job, result, undominated(sized(quantum_job, degrees, MAX_QUANTA)))
        found = families(pool)
        if len(found) != 1:
            raise InvalidInputError(
                f"The step's tensor parallelism {ran.tp} has {len(found)} families of degrees.",
                "Expected one, of degrees side by side.",
                "Give the problem that was solved.",
            )
        (self.family,) = found
        self.alignment, self.home_name, self.longest = result.alignment, result.home, int(pool.load.lengths[-1])
        if problem.model.learned_positions:
            self.longest = min(self.longest, problem.model.max_position_embeddings)
        self.lines, self.tables = lines(self.family), SharedTables.of(self.family)
        glop.ready()

    def planned(self, lengths: IntArray, *, thorough: bool = False) -> PlannedBatch:
        """Plan the batch of sequences of padded ``lengths`` [n], if ``thorough`` by a search."""
        if thorough:
            places = lengths // self.alignment - 1
            counts = np.bincount(places, minlength=len(self.family.pool.load.lengths)).astype(np.int64)
            step, bound_ns = self._searched(counts)
        else:
            step, places = self.step_of(lengths)
            load = step.family.pool.load
            tables = self.tables.for_lengths(load.lengths // self.alignment - 1)
            bound_ns = tables.shared(load.counts.astype(np.float64), step.time_ns, _BUNCHES).bound_ns
        members = self.family.pool.members
        return PlannedBatch(
            tuple(members[member].candidate.name for member in step.order),
            _micro_batches(step, places),
            step.time_ns,
            math.floor(min(bound_ns, step.time_ns)),
        )

    def step_of(self, lengths: IntArray) -> tuple[TeamStep, IntArray]:
        """Return the quick step of a batch of sequences of padded ``lengths`` [n], and the index of each one's
        length in its tables, [n], which have the lengths of the batch only."""
        present, places = np.unique(lengths // self.alignment - 1, return_inverse=True)
        pool = self.family.pool
        load = replace(pool.load, lengths=pool.load.lengths[present], counts=np.bincount(places).astype(np.int64))
        timers = {member: self.family.timer(member).for_lengths(present) for member in self.family.members}
        lines_of = {
            degree: [line.for_lengths(present) for line in degree_lines]
            for degree, degree_lines in self.lines.items()
        }
        return quick_step(Family(replace(pool, load=load), self.family.members, timers), lines_of), places

    def _searched(self, counts: IntArray) -> tuple[TeamStep, float]:
        pool = self.family.pool
        load = replace(pool.load, counts=counts)
        return plan_family(replace(self.family, pool=replace(pool, load=load)), _FIRST, _LATER, _GAP)


def _micro_batches(step: TeamStep, places: IntArray) -> tuple[MicroBatches, ...]:
    """Return the micro-batches of every team, by strategy in order, as indices of sequences; ``places`` [n] is the
    index of each sequence's length."""
    indices = indices_by_length(places)
    members = step.family.pool.members
    replicas: dict[int, list[tuple[tuple[int, ...], ...]]] = {
        member: [()] * members[member].candidate.layout.dp for member in step.order
    }
    for turn in step.turns:
        replicas[turn.member][turn.team] += indexed((turn.packed,), indices)[0]
    return tuple(tuple(teams) for teams in replicas.values())
