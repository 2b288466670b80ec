"""Batches of strategies in turn, on this project's cost model.

``TurnBatches(problem, step)`` takes the strategies and the home of the step (one strategy is a step, too) and
computes once the times of sequences of every length under each.

Two planners on tables (``grouped_batches``) do the work. The bound comes from one whose tables never exceed the
exact times (``cost_tables.strategy_of``), or, if a pipeline is the only strategy, from the linear bounds of its
work and the latency of the longest sequence (``bounds.work_bounds``). The sequences are placed by one whose
pipelines resemble the real ones (``cost_tables.typical_pipeline``), or by the former if no strategy has stages. On
pipelines some numbers of micro-batches are tried, and the packing is improved a little
(``tabled.local_search``). The result is timed exactly (``cost_tables``), and the order is the best one for these
times. Memory is that of these strategies only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from milpplan.errors import InvalidInputError
from milpplan.lengths import MAX_QUANTA, LengthsResult, Load, Packed, StrategyTables, Switches, quantum_problem
from milpplan.lengths.bounds import LinearBounds, latencies
from milpplan.lengths.candidates import Candidate, SizedCandidate, candidates, sized
from milpplan.lengths.cost_tables import Tables, Timer, typical_pipeline
from milpplan.lengths.dispatch import GroupedBatches, PlacedBatch, PlannedBatch
from milpplan.lengths.document import Degrees
from milpplan.lengths.records import MicroBatches, RanStep
from milpplan.lengths.tabled import (
    Group,
    GroupedPlan,
    GroupedProblem,
    Kind,
    Packing,
    Strategy,
    arranged,
)
from milpplan.lengths.tabled.local_search import improved
from milpplan.lengths.tabled.problem import MAX_DISTINCT
from milpplan.lengths.tabled.step_plan import best_tour
from milpplan.problem import Problem
from milpplan.simulation import IntArray

# Effort of the local search on pipelines; it falls from some number of sequences on, as placing them takes longer;
# changes per round.
_EFFORT, _FEW, _CHANGES = 5_500, 768, 24
# Numbers of micro-batches beyond the minimum that are tried.
_SPARES = (1, 2, 4, 8)
# Number of stages beyond which sequences and spare micro-batches count proportionally more, as their ramps are
# longer.
_STAGES = 4


class TurnBatches:
    """Planner of batches under the strategies of a result of ``solve_lengths``.

    ``plan`` is the result as a plan of ``tabled``, with the times by which sequences are placed (the exact ones
    are the result's), and ``layouts`` its degrees, as ``hotspa_export`` takes them.
    """

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
        self.pool = _pool(problem, result)
        self.names = tuple(strategy.candidate.name for strategy in self.pool.members)
        self.longest = min(self._tokens(), MAX_DISTINCT * self.alignment)
        if problem.model.learned_positions:
            self.longest = min(self.longest, problem.model.max_position_embeddings)
        members = range(len(self.names))
        has_pipelines = any(self.pool.num_stages(member) > 1 for member in members)
        self._bounding: GroupedBatches | LinearBounds
        if has_pipelines and len(members) == 1:
            self._bounding = self.pool.linear_bounds(0, shared_memory=False)
            self._latencies_ns = latencies(self.pool.tables[0], self.pool.members[0], self._max_quanta(0))
        else:
            strategies = [
                self.pool.strategy_with_true_reduction(member, shared_memory=len(members) > 1)
                for member in members
            ]
            self.plan = self._plan(result, strategies)
            self._bounding = self._placing = GroupedBatches(self.plan)
        if has_pipelines:
            self.plan = self._plan(result, [self._typical(member) for member in members])
            self._placing = GroupedBatches(self.plan)
        self._timers = {
            member: Timer.of(self.pool.tables[member], self._max_quanta(member))
            for member in members
            if self.pool.num_stages(member) > 1
        }
        self.layouts = {
            strategy.candidate.name: Degrees(
                **{name: getattr(strategy.candidate.layout, name) for name in Degrees.model_fields}
            )
            for strategy in self.pool.members
        }

    def _max_quanta(self, member: int) -> int:
        return self.pool.max_quanta(member, shared_memory=len(self.pool.members) > 1)

    def _tokens(self) -> int:
        """Return the maximum capacity of a micro-batch under any strategy, in tokens."""
        return self.alignment * max(self._max_quanta(member) for member in range(len(self.pool.members)))

    def _typical(self, member: int) -> Strategy:
        """Return a strategy with typical times, for packing."""
        strategy = self.pool.members[member]
        if strategy.candidate.layout.pp == 1:
            return self.pool.strategy(member, shared_memory=len(self.pool.members) > 1)
        pipeline = typical_pipeline(self.pool.tables[member], strategy, self._max_quanta(member))
        return Strategy.of(
            pipeline, strategy.candidate.layout.dp, self.pool.reduce_ns(member), strategy.candidate.name
        )

    def _plan(self, result: LengthsResult | RanStep, strategies: list[Strategy]) -> GroupedPlan:
        """Return the result as a plan of ``tabled`` under some strategies, from which a planner on tables learns
        its loads."""
        load, members = self.pool.load, tuple(range(len(strategies)))
        present = np.flatnonzero(load.counts)
        switches = Switches(self.pool)
        switches.price(members)
        problem = GroupedProblem(
            load.lengths[present],
            load.counts[present],
            tuple(strategies),
            switches.times(members),
            len(members),
            homes=(self.names.index(result.home),),
            finish_ns=tuple(self.pool.finish_ns(member) for member in members),
        )
        groups = []
        for group in result.groups:
            member = self.names.index(group.strategy)
            (kind,) = problem.kinds_of(member)
            replicas = tuple(_counted(kind, replica) for replica in group.micro_batches)
            groups.append(Group(member, (Packing(kind, replicas),)))
        return arranged(problem, groups)

    def planned(self, lengths: IntArray, *, thorough: bool = False) -> PlannedBatch:
        """Plan the batch of sequences of padded ``lengths`` [n]; there is one search only.

        Raises:
            SolverError: no packing within memory was found.
        """
        placed = self._placing.place(lengths)
        # A batch has only some of the lengths of the tables.
        present = np.unique(lengths) // self.alignment - 1
        load = replace(
            self.pool.load, lengths=self.pool.load.lengths[present], counts=self.pool.load.counts[present]
        )
        batch = _Held(
            replace(self.pool, load=load), present, np.searchsorted(present, lengths // self.alignment - 1)
        )
        packings = [
            (member, self._group(batch, placed, member), self._max_quanta(member)) for member in placed.order
        ]
        packed = dict(zip(placed.order, batch.pool.time_packings(packings), strict=True))
        times = {member: packing.time_ns for member, packing in packed.items()}
        tour = best_tour(self._placing.problem, tuple(sorted(times)), times)
        return PlannedBatch(
            tuple(self.names[member] for member in tour.order),
            tuple(self._indices(batch, placed, member, packed[member]) for member in tour.order),
            tour.time_ns,
            min(self._bound_ns(placed, tour.time_ns), tour.time_ns),
        )

    def _bound_ns(self, placed: PlacedBatch, time_ns: int) -> int:
        """Return a lower bound for the placed batch, given a step of ``time_ns``."""
        if self._bounding is self._placing:
            return placed.bound_ns
        if isinstance(self._bounding, GroupedBatches):
            return self._bounding.bound_ns(placed.lengths, time_ns)
        counts = np.bincount(placed.lengths // self.alignment - 1, minlength=len(self.pool.load.lengths))
        latency_ns = float(self._latencies_ns[np.flatnonzero(counts)[-1]])
        group_ns = max(self._bounding.at(counts.astype(np.float64)), latency_ns)
        return math.floor(group_ns) + self.pool.reduce_ns(0) + self.pool.finish_ns(0)

    def _group(self, batch: _Held, placed: PlacedBatch, member: int) -> tuple[IntArray, ...]:
        """Return the replicas [v, k] of one strategy.

        On pipelines the best of some numbers of micro-batches is taken and improved, as few micro-batches make
        every stage wait.
        """
        if self.pool.num_stages(member) == 1:
            width = len(batch.lengths)
            rows = [
                [np.bincount(batch.places[list(indices)], minlength=width) for indices in replica]
                for replica in placed.micro_batches(member)
            ]
            return tuple(np.array(indices).reshape(-1, width) for indices in rows)
        timer = self._timers[member].for_lengths(batch.lengths)
        effort = _EFFORT * _FEW // max(_FEW, self._work(placed, member)) // len(placed.order)
        return tuple(improved(timer, self._best_numbers(batch, placed, member, timer), effort, _CHANGES))

    def _indices(self, batch: _Held, placed: PlacedBatch, member: int, packed: Packed) -> MicroBatches:
        """Return the micro-batches as indices of the batch's sequences."""
        if self.pool.num_stages(member) == 1:
            return placed.micro_batches(member)
        own = np.flatnonzero(placed.strategy == member)
        return _indexed(packed, own, batch.places[own])

    def _work(self, placed: PlacedBatch, member: int) -> int:
        """Return the number of sequences, weighted by the time of packing them on a pipeline."""
        return len(placed.lengths) * max(_STAGES, self.pool.num_stages(member)) // _STAGES

    def _best_numbers(self, batch: _Held, placed: PlacedBatch, member: int, timer: Timer) -> list[IntArray]:
        """Return the shortest packing of a pipeline's sequences among some numbers of micro-batches, by replica
        [v, n].

        The placing dispatcher's pipelines are lines, which lack the extra time of small micro-batches.
        """
        own = np.flatnonzero(placed.strategy == member)
        num_replicas = self.pool.members[member].candidate.layout.dp
        stages = max(_STAGES, self.pool.num_stages(member))
        spares = [spare * stages // _STAGES for spare in _SPARES]
        assignments = [(placed.replica[own], placed.micro_batch[own])]
        packings = self._placing.packings(member, placed.lengths[own], spares)
        assignments += [(spare.replica, spare.micro_batch) for spare in packings]
        best, shortest_ns = np.zeros((num_replicas, 0, len(batch.lengths)), dtype=np.int64), math.inf
        for replica, micro_batch in assignments:
            shape = num_replicas, int(micro_batch.max()) + 1, len(batch.lengths)
            cells = np.ravel_multi_index((replica, micro_batch, batch.places[own]), shape)
            counts = np.bincount(cells, minlength=math.prod(shape)).reshape(shape)
            longest = timer.longest_ns(counts)
            if longest < shortest_ns:
                best, shortest_ns = counts, longest
        return [spare[spare.any(axis=1)] for spare in best]


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """A batch with its lengths only."""

    pool: StrategyTables
    """Strategies with the batch's lengths."""
    lengths: IntArray
    """Indices of its lengths among the tables', [k]."""
    places: IntArray
    """Index of each sequence's length among ``lengths``, [n]."""


def _pool(problem: Problem, result: LengthsResult | RanStep) -> StrategyTables:
    """Return the result's strategies, with tables for every length that one of them holds."""
    quantum_job = quantum_problem(problem, result.alignment)
    chosen = chosen_candidates(quantum_job, result)
    return batch_tables(quantum_job, result, sized(quantum_job, chosen, MAX_QUANTA))


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


def _counted(kind: Kind, replica: tuple[tuple[int, ...], ...]) -> IntArray:
    """Return micro-batches as counts [v, n] of the kind's lengths."""
    width = len(kind.lengths)
    rows = [np.bincount(np.searchsorted(kind.lengths, micro_batch), minlength=width) for micro_batch in replica]
    return np.array(rows, dtype=np.int64).reshape(-1, width)


def _indexed(packed: Packed, indices: IntArray, length_indices: IntArray) -> MicroBatches:
    """Return micro-batches as indices of sequences; of equal lengths the first sequences come first.

    ``length_indices`` gives the index of each sequence's length.
    """
    left = {int(length): indices[length_indices == length][::-1].tolist() for length in np.unique(length_indices)}
    return tuple(
        tuple(
            tuple(left[length].pop() for length in np.repeat(np.arange(len(row)), row).tolist()) for row in replica
        )
        for replica in packed.replicas
    )
