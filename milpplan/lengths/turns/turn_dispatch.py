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
from dataclasses import dataclass, replace

import numpy as np

from milpplan.errors import InvalidInputError
from milpplan.groups.dispatch.dispatcher import Dispatch, Dispatcher
from milpplan.groups.document import Degrees, DispatchFile, DispatchGroup
from milpplan.groups.packing.pack import Packing
from milpplan.groups.plan import Group, GroupedPlan, arranged
from milpplan.groups.problem import MAX_DISTINCT, GroupedProblem, Kind
from milpplan.groups.strategies import Strategy
from milpplan.groups.tours import best_tour
from milpplan.lengths.candidates import candidates, quantum_problem, sized
from milpplan.lengths.cost_tables import Load, Tables, typical_pipeline
from milpplan.lengths.records import LengthsResult, MicroBatches, RanStep
from milpplan.lengths.sequences import checked_batch
from milpplan.lengths.single.packing_local_search import Timer, improved
from milpplan.lengths.strategy_tables import MAX_QUANTA, Packed, StrategyTables
from milpplan.lengths.switches import Switches
from milpplan.lengths.turns.dispatch_bound import PipelineBound
from milpplan.problem.problem import Problem
from milpplan.simulation.layout_columns import IntArray
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
            proved = [
                self.pool.strategy_with_true_reduction(member, shared_memory=len(members) > 1) for member in members
            ]
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
        return self.pool.max_quanta(member, shared_memory=len(self.pool.members) > 1)

    def _tokens(self) -> int:
        """Most tokens of a micro-batch under any strategy."""
        return self.alignment * max(self._most_grains(member) for member in range(len(self.pool.members)))

    def _typical(self, member: int) -> Strategy:
        """A strategy that takes about what it takes, for packing."""
        one = self.pool.members[member]
        if one.candidate.layout.pp == 1:
            return self.pool.strategy(member, shared_memory=len(self.pool.members) > 1)
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
        # Of all lengths that may come a batch has some.
        held = np.unique(padded) // self.alignment - 1
        load = replace(self.pool.load, lengths=self.pool.load.lengths[held], counts=self.pool.load.counts[held])
        known = _Held(replace(self.pool, load=load), held, np.searchsorted(held, padded // self.alignment - 1))
        parts = [(one, self._group(known, placed, one), self._most_grains(one)) for one in placed.order]
        packed = dict(zip(placed.order, known.pool.time_packings(parts), strict=True))
        times = {member: one.time_ns for member, one in packed.items()}
        tour = best_tour(self._placing.problem, tuple(sorted(times)), times)
        return TurnDispatch(
            tuple(padded.tolist()),
            tuple(self.names[member] for member in tour.order),
            tuple(self._indices(known, placed, member, packed[member]) for member in tour.order),
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

    def _group(self, known: _Held, placed: Dispatch, member: int) -> tuple[IntArray, ...]:
        """What is placed under one strategy, by replica [v, k]; on pipelines, where few micro-batches make every
        stage wait, in the best of some numbers of them, and with some sequences moved."""
        if self.pool.num_stages(member) == 1:
            width = len(known.lengths)
            rows = [
                [np.bincount(known.places[list(one)], minlength=width) for one in replica]
                for replica in placed.micro_batches(member)
            ]
            return tuple(np.array(one).reshape(-1, width) for one in rows)
        timer = self._timers[member].for_lengths(known.lengths)
        effort = _EFFORT * _FEW // max(_FEW, self._work(placed, member)) // len(placed.order)
        return tuple(improved(timer, self._best_numbers(known, placed, member, timer), effort, _CHANGES))

    def _indices(self, known: _Held, placed: Dispatch, member: int, packed: Packed) -> MicroBatches:
        """Its micro-batches as indices of the batch's sequences."""
        if self.pool.num_stages(member) == 1:
            return placed.micro_batches(member)
        mine = np.flatnonzero(placed.strategy == member)
        return _indexed(packed, mine, known.places[mine])

    def _work(self, placed: Dispatch, member: int) -> int:
        """Sequences of a batch, as packing them takes time on a pipeline."""
        return len(placed.lengths) * max(_STAGES, self.pool.num_stages(member)) // _STAGES

    def _best_numbers(self, known: _Held, placed: Dispatch, member: int, timer: Timer) -> list[IntArray]:
        """The shortest packing of the sequences of a pipeline in some numbers of micro-batches, by replica [v, n].

        The placing dispatcher's pipelines are lines: what small micro-batches take beyond these it does not know.
        """
        mine = np.flatnonzero(placed.strategy == member)
        num_replicas = self.pool.members[member].candidate.layout.dp
        work = self._work(placed, member) * len(placed.order)
        some = _SPARES if work <= _FEW else _SPARES_MANY if work <= _MOST else _SPARES_MOST
        stages = max(_STAGES, self.pool.num_stages(member))
        spares = [one * stages // _STAGES for one in some]
        ways = [(placed.replica[mine], placed.micro_batch[mine])]
        packings = self._placing.packings(member, placed.lengths[mine], spares)
        ways += [(one.replica, one.micro_batch) for one in packings]
        best, least = np.zeros((num_replicas, 0, len(known.lengths)), dtype=np.int64), math.inf
        for replica, micro_batch in ways:
            shape = num_replicas, int(micro_batch.max()) + 1, len(known.lengths)
            cells = np.ravel_multi_index((replica, micro_batch, known.places[mine]), shape)
            counts = np.bincount(cells, minlength=math.prod(shape)).reshape(shape)
            longest = timer.longest_ns(counts)
            if longest < least:
                best, least = counts, longest
        return [one[one.any(axis=1)] for one in best]


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """A batch: the ``pool`` with nothing but its ``lengths`` [k], places among all that may come, and where each
    of its sequences is among these, [n]."""

    pool: StrategyTables
    lengths: IntArray
    places: IntArray


def _pool(problem: Problem, result: LengthsResult | RanStep) -> StrategyTables:
    """The result's strategies, with tables for every length that one of them holds."""
    one = quantum_problem(problem, result.alignment)
    names = {group.strategy for group in result.groups} | {result.home}
    chosen = [candidate for candidate in candidates(one) if candidate.name in names]
    if len(chosen) < len(names):
        missing = ", ".join(sorted(names - {candidate.name for candidate in chosen}))
        raise InvalidInputError(
            f"The result's strategy {missing} is none of the problem's.",
            "Expected the problem that was solved.",
            "Give the same model, cluster, formats and space.",
        )
    members = tuple(sized(one, chosen, MAX_QUANTA))
    most = max(max(member.own_memory_quanta, member.shared_memory_quanta) for member in members)
    lengths = np.arange(1, min(most, MAX_DISTINCT) + 1, dtype=np.int64) * result.alignment
    counts = np.zeros_like(lengths)
    for group in result.groups:
        for length, count in group.buckets:
            counts[length // result.alignment - 1] += count
    load = Load(lengths, counts, result.alignment, result.rules)
    tables = tuple(Tables.of(one, member.candidate, load, member.own_memory_quanta) for member in members)
    return StrategyTables(one, load, members, tables)


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
