"""Strategies in turn during training: one batch after another under the strategies of a step already solved.

``TurnDispatcher(problem, result)`` takes the strategies and the home of ``solve_lengths``'s result (one strategy
is a step, too) and works out once what sequences of every length take under each. ``dispatch(lengths)`` then plans
a batch in milliseconds: which sequence runs under which strategy, on which replica, in which micro-batch, and in
which order the strategies run, with the exact time of this project's cost model and a proved bound.

Two dispatchers of ``groups`` do the work. The bound is that of one whose tables are never above the exact times
(``tables.strategy_of``), or where a pipeline is the only strategy, that of mixtures learned for it
(``dispatch_bound``); the sequences are placed by one whose pipelines are like the real ones
(``tables.typical_pipeline``), or by the same, where no strategy has stages. On pipelines some numbers of
micro-batches are tried, and the packing is improved a little (``dealing``). What is placed is timed exactly
(``replicas``), and the order is the best one for these times. Memory is that of these strategies alone.

A dispatcher holds nothing but what follows from its arguments, so threads share it and processes get it pickled;
the same batch gets the same answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from milpplan.costs.columns import IntArray
from milpplan.errors import InvalidInputError
from milpplan.groups.dispatcher import Dispatch, Dispatcher
from milpplan.groups.document import Degrees, DispatchFile, DispatchGroup
from milpplan.groups.packing import Packing
from milpplan.groups.plan import Group, GroupedPlan, arranged
from milpplan.groups.problem import MAX_DISTINCT, GroupedProblem, Kind
from milpplan.groups.strategies import Strategy
from milpplan.groups.tours import best_tour
from milpplan.lengths.candidates import candidates, grain_problem, sized
from milpplan.lengths.dealing import Replica, Timer, improved
from milpplan.lengths.dispatch_bound import PipelineBound
from milpplan.lengths.pool import MAX_GRAINS, Packed, Pool
from milpplan.lengths.records import LengthsResult, MicroBatches, RanStep
from milpplan.lengths.sequences import checked_batch
from milpplan.lengths.switches import Switches
from milpplan.lengths.tables import Load, Tables, typical_pipeline
from milpplan.specs.problem import Problem
from milpplan.units import NS_PER_S

# Work of improving the packing of pipelines: some 15 ms; of more sequences less, as placing them takes longer.
# Changes in a round.
_EFFORT, _FEW, _CHANGES = 5_500, 768, 24
# Micro-batches of a replica beyond the least, of which the best number is sought; of more sequences, and of most.
_SPARES, _SPARES_MANY, _SPARES_MOST = (1, 2, 3, 4, 6, 8, 12), (4, 6, 9), (6,)
# On pipelines of more stages than this, sequences and spare micro-batches count as so many more (rises and falls
# of the loads are longer); and from how many sequences on they are most.
_STAGES, _MOST = 4, 2_048


@dataclass(frozen=True, slots=True)
class TurnDispatch:
    """One batch: its padded ``lengths``, strategies in the ``order`` in which they run, and for each the indices
    of the batch's sequences in every micro-batch of every replica; ns of the step, and what no step of these
    strategies undercuts."""

    lengths: tuple[int, ...]
    order: tuple[str, ...]
    micro_batches: tuple[MicroBatches, ...]
    home: str
    time_ns: int
    bound_ns: int

    @property
    def step_time_s(self) -> float:
        """Exact time of the step, seconds."""
        return self.time_ns / NS_PER_S

    @property
    def lower_bound_s(self) -> float:
        """No step of these strategies takes less, seconds."""
        return self.bound_ns / NS_PER_S

    @property
    def gap(self) -> float:
        """(time - bound) / time."""
        return (self.time_ns - self.bound_ns) / self.time_ns

    def file(self) -> DispatchFile:
        """The batch as a document (``milpplan schema dispatch``) for a loader of any framework."""
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
        )


class TurnDispatcher:
    """Plans batches under the strategies of a result of ``solve_lengths``. See the module.

    ``plan`` is the result as a plan of ``groups``, whose times are those that sequences are placed by (the exact
    ones are the result's), and ``layouts`` its degrees: what ``groups.hetu`` takes.
    """

    def __init__(self, problem: Problem, result: LengthsResult | RanStep) -> None:
        """``problem``: the one that was solved; ``result``: or ``LengthsFile.ran`` of a file of it.

        Raises:
            InvalidInputError: the result's degrees or unlike replicas are side by side, its micro-batches are
                padded, or its strategies are none of the problem's.
        """
        if result.beside or result.rules.padded:
            raise InvalidInputError(
                f"The step has {result.beside or 'padded micro-batches'}.",
                "Expected strategies that take turns, packed.",
                "Use TeamDispatcher for degrees side by side, or solve with side_by_side=False, without unlike "
                "replicas, and packed.",
            )
        self.alignment = result.alignment
        self.pool = _pool(problem, result)
        self.names = tuple(one.candidate.name for one in self.pool.members)
        self.longest = min(self._tokens(), MAX_DISTINCT * self.alignment)
        if problem.model.learned_positions:
            self.longest = min(self.longest, problem.model.max_position_embeddings)
        members = range(len(self.names))
        piped = any(self.pool.num_stages(member) > 1 for member in members)
        self._bounding: Dispatcher | PipelineBound
        if piped and len(members) == 1:
            self._bounding = PipelineBound.of(self.pool.tables[0], self.pool.members[0], self._most_grains(0))
        else:
            proved = [self.pool.rampless(member, beside=len(members) > 1) for member in members]
            self.plan = self._plan(result, proved)
            self._bounding = self._placing = Dispatcher(self.plan)
        if piped:
            self.plan = self._plan(result, [self._typical(one) for one in members])
            self._placing = Dispatcher(self.plan)
        self._timers = {
            member: Timer.of(self.pool.tables[member], self._most_grains(member))
            for member in members
            if self.pool.num_stages(member) > 1
        }
        self.layouts = {
            one.candidate.name: Degrees(
                **{name: getattr(one.candidate.layout, name) for name in Degrees.model_fields}
            )
            for one in self.pool.members
        }

    def _most_grains(self, member: int) -> int:
        return self.pool.grains(member, beside=len(self.pool.members) > 1)

    def _tokens(self) -> int:
        """Most tokens of a micro-batch under any strategy."""
        return self.alignment * max(self._most_grains(member) for member in range(len(self.pool.members)))

    def _typical(self, member: int) -> Strategy:
        """A strategy that takes about what it takes, for packing."""
        one = self.pool.members[member]
        if one.candidate.layout.pp == 1:
            return self.pool.strategy(member, beside=len(self.pool.members) > 1)
        pipeline = typical_pipeline(self.pool.tables[member], one, self._most_grains(member))
        return Strategy.of(pipeline, one.candidate.layout.dp, self.pool.reduce_ns(member), one.candidate.name)

    def _plan(self, result: LengthsResult | RanStep, strategies: list[Strategy]) -> GroupedPlan:
        """The result as a plan of ``groups`` under such strategies: what a dispatcher learns its loads from."""
        load, members = self.pool.load, tuple(range(len(strategies)))
        held = np.flatnonzero(load.counts)
        switches = Switches(self.pool)
        switches.price(members)
        problem = GroupedProblem(
            load.lengths[held],
            load.counts[held],
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

    def dispatch(self, lengths: Sequence[int] | IntArray) -> TurnDispatch:
        """The batch of sequences of these lengths, each padded to a multiple of the alignment.

        Raises:
            InvalidInputError: no sequences, or one that is empty or longer than any strategy holds.
            SolverError: no packing within memory was found.
        """
        do = "Cut sequences, or solve anew with the longest lengths that occur."
        given = checked_batch(lengths, self.longest, do)
        padded = -(-given // self.alignment) * self.alignment
        placed = self._placing.dispatch(padded)
        groups = {member: self._group(placed, member) for member in placed.order}
        times = {member: packed.time_ns for member, (packed, _) in groups.items()}
        tour = best_tour(self._placing.problem, tuple(sorted(times)), times)
        return TurnDispatch(
            tuple(padded.tolist()),
            tuple(self.names[member] for member in tour.order),
            tuple(groups[member][1] for member in tour.order),
            self.names[self.plan.home],
            tour.time_ns,
            min(self._bound_ns(placed, tour.time_ns), tour.time_ns),
        )

    def _bound_ns(self, placed: Dispatch, time_ns: int) -> int:
        """What no step of the strategies undercuts for the batch that is placed, in a step of so long."""
        if self._bounding is self._placing:
            return placed.bound_ns
        if isinstance(self._bounding, Dispatcher):
            return self._bounding.bound_ns(placed.lengths, time_ns)
        lengths, counts = np.unique(placed.lengths, return_counts=True)
        group_ns = math.floor(self._bounding.group_ns(lengths, counts))
        return group_ns + self.pool.reduce_ns(0) + self.pool.finish_ns(0)

    def _group(self, placed: Dispatch, member: int) -> tuple[Packed, MicroBatches]:
        """What is placed under one strategy, at its exact time; on pipelines, where few micro-batches make every
        stage wait, in the best of some numbers of them, and with some sequences moved."""
        most_grains, width = self._most_grains(member), len(self.pool.load.lengths)
        places = placed.lengths // self.alignment - 1
        if self.pool.num_stages(member) == 1:
            held = placed.micro_batches(member)
            replicas = tuple(
                np.array([np.bincount(places[list(one)], minlength=width) for one in replica]).reshape(-1, width)
                for replica in held
            )
            return self.pool.timed(member, replicas, most_grains), held
        mine = np.flatnonzero(placed.strategy == member)
        effort = _EFFORT * _FEW // max(_FEW, self._work(placed, member)) // len(placed.order)
        best = improved(self._timers[member], self._best_numbers(placed, member, mine), effort, _CHANGES)
        packed = self.pool.timed(member, tuple(best), most_grains)
        return packed, _indexed(packed, mine, places[mine])

    def _work(self, placed: Dispatch, member: int) -> int:
        """Sequences of a batch, as packing them takes time on a pipeline."""
        return len(placed.lengths) * max(_STAGES, self.pool.num_stages(member)) // _STAGES

    def _best_numbers(self, placed: Dispatch, member: int, mine: IntArray) -> list[IntArray]:
        """The shortest packing of the sequences ``mine`` [n] in some numbers of micro-batches, by replica [v, n].

        The placing dispatcher's pipelines are lines: what small micro-batches take beyond these it does not know.
        """
        timer, lengths = self._timers[member], placed.lengths[mine]
        num_replicas, width = self.pool.members[member].candidate.layout.dp, len(self.pool.load.lengths)
        work = self._work(placed, member)
        some = _SPARES if work <= _FEW else _SPARES_MANY if work <= _MOST else _SPARES_MOST
        stages = max(_STAGES, self.pool.num_stages(member))
        spares = [one * stages // _STAGES for one in some]
        ways = [(placed.replica[mine], placed.micro_batch[mine])]
        ways += [(one.replica, one.micro_batch) for one in self._placing.packings(member, lengths, spares)]
        best, least = [np.zeros((0, width), dtype=np.int64)], math.inf
        for replica, micro_batch in ways:
            counts = np.zeros((num_replicas, int(micro_batch.max()) + 1, width), dtype=np.int64)
            np.add.at(counts, (replica, micro_batch, lengths // self.alignment - 1), 1)
            replicas = [Replica.of(timer, one) for one in counts]
            longest = max(one.time_ns for one in replicas)
            if longest < least:
                best, least = [one.packed for one in replicas], longest
        return best


def _pool(problem: Problem, result: LengthsResult | RanStep) -> Pool:
    """The result's strategies, with tables for every length that one of them holds."""
    one = grain_problem(problem, result.alignment)
    names = {group.strategy for group in result.groups} | {result.home}
    chosen = [candidate for candidate in candidates(one) if candidate.name in names]
    if len(chosen) < len(names):
        missing = ", ".join(sorted(names - {candidate.name for candidate in chosen}))
        raise InvalidInputError(
            f"The result's strategy {missing} is none of the problem's.",
            "Expected the problem that was solved.",
            "Give the same model, cluster, formats and space.",
        )
    members = tuple(sized(one, chosen, MAX_GRAINS))
    most = max(max(member.alone_grains, member.beside_grains) for member in members)
    lengths = np.arange(1, min(most, MAX_DISTINCT) + 1, dtype=np.int64) * result.alignment
    counts = np.zeros_like(lengths)
    for group in result.groups:
        for length, count in group.buckets:
            counts[length // result.alignment - 1] += count
    load = Load(lengths, counts, result.alignment, result.rules)
    tables = tuple(Tables.of(one, member.candidate, load, member.alone_grains) for member in members)
    return Pool(one, load, members, tables)


def _counted(kind: Kind, replica: tuple[tuple[int, ...], ...]) -> IntArray:
    """Lengths of the sequences of micro-batches as counts [v, n] of the kind's lengths."""
    width = len(kind.lengths)
    rows = [np.bincount(np.searchsorted(kind.lengths, one), minlength=width) for one in replica]
    return np.array(rows, dtype=np.int64).reshape(-1, width)


def _indexed(packed: Packed, indices: IntArray, places: IntArray) -> MicroBatches:
    """Micro-batches as indices of sequences, of which each has a length's place: of a length, the first ones
    first."""
    waiting = {int(place): indices[places == place][::-1].tolist() for place in np.unique(places)}
    return tuple(
        tuple(
            tuple(waiting[place].pop() for place in np.repeat(np.arange(len(row)), row).tolist())
            for row in replica
        )
        for replica in packed.replicas
    )
