"""Batches of strategies in turn, on this project's cost model.

``TurnBatches(problem, step)`` takes the strategies and the home of the step (one strategy is a step, too) and
computes once the times and bounds of sequences of every length under each. A batch is planned by
``batch_planning``, timed exactly (``cost_tables``), and ordered best for these times. Memory is that of these
strategies only.

Bounds are the linear ones of ``work_bounds``; a pipeline's concave bound by its work adds its chord between
nothing and the whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from milpplan.errors import InvalidInputError
from milpplan.lengths import MAX_QUANTA, LengthsResult, Load, StrategyTables, Switches, quantum_problem
from milpplan.lengths.bounds import LinearBounds, glop, latencies
from milpplan.lengths.candidates import Candidate, SizedCandidate, candidates, sized
from milpplan.lengths.cost_tables import Tables, Timer
from milpplan.lengths.dispatch.batch_planning import (
    BatchSearch,
    BatchStrategy,
    PlannedBatch,
    indexed,
    indices_by_length,
)
from milpplan.lengths.records import RanStep
from milpplan.lengths.tabled import GroupedProblem
from milpplan.lengths.tabled.problem import MAX_DISTINCT
from milpplan.lengths.tabled.step_plan import best_tour
from milpplan.problem import Problem
from milpplan.simulation import IntArray


class TurnBatches:
    """Planner of batches under the strategies of a result of ``solve_lengths``."""

    def __init__(self, problem: Problem, result: LengthsResult | RanStep) -> None:
        """Prepare the tables.

        Args:
            problem: the problem that was solved.
            result: its result, or ``LengthsFile.ran`` of a file of it.

        Raises:
            InvalidInputError: the result has degrees side by side, heterogeneous replicas or padded micro-batches,
                or its strategies do not belong to the problem.
        """
        if result.beside or result.rules.padded:
            raise InvalidInputError(
                f"The step has {result.beside or 'padded micro-batches'}.",
                "Expected strategies that take turns, packed.",
                "Solve with side_by_side=False, without unlike replicas, and packed.",
            )
        self.alignment, self.home_name = result.alignment, result.home
        quantum_job = quantum_problem(problem, result.alignment)
        self.pool = batch_tables(
            quantum_job, result, sized(quantum_job, chosen_candidates(quantum_job, result), MAX_QUANTA)
        )
        self.names = tuple(strategy.candidate.name for strategy in self.pool.members)
        members = range(len(self.names))
        self.longest = self.alignment * min(MAX_DISTINCT, max(map(self._max_quanta, members)))
        if problem.model.learned_positions:
            self.longest = min(self.longest, problem.model.max_position_embeddings)
        shared = len(members) > 1
        self._timers = [Timer.of(self.pool.tables[member], self._max_quanta(member)) for member in members]
        self._bounds = [self.pool.linear_bounds(member, shared_memory=shared) for member in members]
        self._work = {
            member: self.pool.work_bound(member, shared_memory=shared)
            for member in members
            if self.pool.num_stages(member) > 1
        }
        self._latencies_ns = [
            latencies(self.pool.tables[member], self.pool.members[member], self._max_quanta(member))
            for member in members
        ]
        self._steps = step_problem(self.pool, self.names.index(result.home))
        glop.ready()

    def _max_quanta(self, member: int) -> int:
        return self.pool.max_quanta(member, shared_memory=len(self.pool.members) > 1)

    def planned(self, lengths: IntArray, *, thorough: bool = False) -> PlannedBatch:
        """Plan the batch of sequences of padded ``lengths`` [n]; there is one search only."""
        # A batch has only some of the lengths of the tables.
        present, places, counts = np.unique(lengths // self.alignment - 1, return_inverse=True, return_counts=True)
        strategies = [self._strategy(member, present, counts) for member in range(len(self.names))]
        search = BatchSearch(self._steps, strategies, counts)
        replicas = search.run(len(strategies))
        load = replace(self.pool.load, lengths=self.pool.load.lengths[present], counts=counts)
        parts = [(member, rows, self._max_quanta(member)) for member, rows in replicas.items()]
        packings = replace(self.pool, load=load).time_packings(parts)
        times = {member: packing.time_ns for (member, *_), packing in zip(parts, packings, strict=True)}
        tour = best_tour(self._steps, tuple(sorted(times)), times)
        indices = indices_by_length(places)
        return PlannedBatch(
            tuple(self.names[member] for member in tour.order),
            tuple(indexed(replicas[member], indices) for member in tour.order),
            tour.time_ns,
            math.floor(min(search.bound_ns, tour.time_ns)),
        )

    def _strategy(self, member: int, present: IntArray, counts: IntArray) -> BatchStrategy:
        """Return a strategy with the lengths of a batch: their indices ``present`` [k] and ``counts`` [k]."""
        bounds = self._bounds[member]
        bounds = LinearBounds(bounds.shares[:, present], bounds.constants)
        if member in self._work:
            loads = self._work[member].sequence_loads[present]
            share = float(loads @ counts) / self._work[member].total_load
            bounds = replace(self._work[member], sequence_loads=loads).chords_between(bounds, 0.0, share)
        timer = self._timers[member].for_lengths(present)
        latency_ns = float(self._latencies_ns[member][present[-1]])
        return BatchStrategy(((timer, self.pool.members[member].candidate.layout.dp),), bounds, latency_ns)


def step_problem(pool: StrategyTables, home: int) -> GroupedProblem:
    """Return the step of all members of a pool in turn from a home, for the sequences of its load."""
    members = tuple(range(len(pool.members)))
    present = np.flatnonzero(pool.load.counts)
    switches = Switches(pool)
    switches.price(members)
    return GroupedProblem(
        pool.load.lengths[present],
        pool.load.counts[present],
        tuple(pool.strategy_with_true_reduction(member, shared_memory=len(members) > 1) for member in members),
        switches.times(members),
        len(members),
        homes=(home,),
        finish_ns=tuple(pool.finish_ns(member) for member in members),
    )


def chosen_candidates(quantum_job: Problem, result: LengthsResult | RanStep) -> list[Candidate]:
    """Return the candidates that a result names.

    Raises:
        InvalidInputError: one of its strategies is none of the problem's.
    """
    names = {group.strategy for group in result.groups} | {result.home}
    chosen = [candidate for candidate in candidates(quantum_job) if candidate.name in names]
    if len(chosen) < len(names):
        missing = ", ".join(sorted(names - {candidate.name for candidate in chosen}))
        raise InvalidInputError(
            f"The result's strategy {missing} is none of the problem's.",
            "Expected the problem that was solved.",
            "Give the same model, cluster, formats and space.",
        )
    return chosen


def batch_tables(
    quantum_job: Problem, result: LengthsResult | RanStep, members: Sequence[SizedCandidate]
) -> StrategyTables:
    """Return tables of ``members`` for every length that one of them holds, with the result's sequences."""
    capacity = max(max(member.own_memory_quanta, member.shared_memory_quanta) for member in members)
    lengths = np.arange(1, min(capacity, MAX_DISTINCT) + 1, dtype=np.int64) * result.alignment
    counts = np.zeros_like(lengths)
    for group in result.groups:
        for length, count in group.buckets:
            counts[length // result.alignment - 1] += count
    load = Load(lengths, counts, result.alignment, result.rules)
    tables = [Tables.of(quantum_job, member.candidate, load, member.own_memory_quanta) for member in members]
    return StrategyTables(quantum_job, load, tuple(members), tuple(tables))
