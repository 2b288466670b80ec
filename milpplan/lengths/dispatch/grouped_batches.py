"""Batches under the strategies of a plan on tables, placed in milliseconds, with a proved gap.

``GroupedBatches(plan)`` tabulates the plan's strategies once (``work_envelope``). For every sequence of a batch it
then decides strategy, replica and micro-batch, and the order of the strategies. The optimizer stays where the plan
has it; a strategy may be idle in some step. No call changes what it holds.

The bound is that of ``batch_bound``, over all sets of the plan's strategies and all their orders; the answer is
packed by ``batch_packing`` and simulated exactly.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from milpplan.errors import InfeasibleError, InvalidInputError, SolverError
from milpplan.lengths.bounds import BatchKind, PipelineTable, glop
from milpplan.lengths.dispatch.batch_bound import Batch, DualValues, Node, narrow, relax, root, split, with_duals
from milpplan.lengths.dispatch.batch_packing import (
    Placed,
    PlacedIndices,
    place,
    place_around,
    place_into,
    place_together,
)
from milpplan.lengths.records import MicroBatches
from milpplan.lengths.tabled import (
    Group,
    GroupedPlan,
    GroupedProblem,
    Int64Array,
    Packing,
    SwitchTimes,
    check,
    solve_groups,
    undominated_tours,
)
from milpplan.lengths.tabled.step_plan import TourCost, best_tour
from milpplan.lengths.workload import LONGEST, workload_of

# Relative gap at which the search ends, and its time limit in seconds: any packing will do.
_GAP, _TIME_LIMIT_S = 0.02, 5.0


@dataclass(frozen=True, slots=True, eq=False)
class BatchPlan:
    """Strategy, replica and micro-batch of each sequence [n], the order of the strategies, and the exact time."""

    strategy: Int64Array
    replica: Int64Array
    micro_batch: Int64Array
    order: tuple[int, ...]
    time_ns: int


def solve_batch(problem: GroupedProblem, strategies: Sequence[int], home: int, lengths: Int64Array) -> BatchPlan:
    """Plan sequences of ``lengths`` [n] under some of a problem's strategies, with the home given.

    Raises:
        SolverError: no plan was found, or there is none.
    """
    workload, chosen = workload_of(lengths), list(strategies)
    switches = problem.switches
    batch_problem = GroupedProblem(
        workload.lengths,
        workload.counts,
        tuple(problem.strategies[s] for s in chosen),
        SwitchTimes(
            *(matrix[np.ix_(chosen, chosen)] for matrix in (switches.parameters_ns, switches.gradients_ns))
        ),
        min(problem.max_strategies, len(chosen)),
        homes=(chosen.index(home),),
        finish_ns=tuple(problem.finish_of(s) for s in chosen),
    )
    try:
        plan = solve_groups(batch_problem, "auto", _GAP, _TIME_LIMIT_S, waits=False).plan
    except (SolverError, InfeasibleError) as error:
        raise SolverError(
            f"No packing of {lengths.size} sequences was found within memory.",
            "Every sequence fits somewhere alone, but all together were not placed.",
            "Dispatch fewer sequences a step, or plan with larger micro-batches.",
        ) from error
    return _batch_plan(plan, chosen, lengths)


def _batch_plan(plan: GroupedPlan, chosen: list[int], lengths: Int64Array) -> BatchPlan:
    """Assign the plan's positions to the batch's sequences: of every length, the first sequences first."""
    positions = np.zeros((3, lengths.size), dtype=np.int64)
    unplaced = {length: np.flatnonzero(lengths == length).tolist()[::-1] for length in np.unique(lengths).tolist()}
    for group in plan.groups:
        first_replica = 0
        for packing in group.packings:
            for number, micro_batches in enumerate(packing.replicas):
                for micro_batch, counts in enumerate(micro_batches):
                    for length, count in zip(plan.problem.lengths.tolist(), counts.tolist(), strict=True):
                        for _ in range(count):
                            positions[:, unplaced[length].pop()] = (
                                chosen[group.strategy],
                                first_replica + number,
                                micro_batch,
                            )
            first_replica += packing.kind.num_replicas
    order = tuple(chosen[group.strategy] for group in plan.groups)
    return BatchPlan(positions[0], positions[1], positions[2], order, plan.time_ns)


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """Strategies by name in the order in which they run, their micro-batches of indices, exact time and bound."""

    order: tuple[str, ...]
    micro_batches: tuple[MicroBatches, ...]
    time_ns: int
    bound_ns: int


# Maximum relaxations solved for one answer; _MORE times as many for at most _FEW sequences.
_MAX_RELAXED, _FEW, _MORE = 7, 128, 3
# Maximum number of strategies of a dispatcher.
_MAX_STRATEGIES = 6


@dataclass(frozen=True, slots=True, eq=False)
class PlacedBatch:
    """Plan of one batch: the position of each sequence [n], the order of the strategies, time and bound.

    ``strategy``, ``replica`` and ``micro_batch`` are indices: of the problem's strategies, of the strategy's
    ``replicas``, and of the replica's micro-batches in the order they run.
    """

    problem: GroupedProblem
    lengths: Int64Array
    strategy: Int64Array
    replica: Int64Array
    micro_batch: Int64Array
    home: int
    order: tuple[int, ...]
    time_ns: int
    bound_ns: int

    @property
    def gap(self) -> float:
        """(time - bound) / time."""
        return (self.time_ns - self.bound_ns) / self.time_ns

    def micro_batches(self, strategy: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Return the indices of the sequences of each micro-batch of each replica of a strategy."""
        replicas: list[list[list[int]]] = [[] for _ in self.problem.strategies[strategy].replicas]
        indices = np.flatnonzero(self.strategy == strategy)
        for index in indices[np.lexsort((indices, self.micro_batch[indices]))].tolist():
            replica_batches, number = replicas[int(self.replica[index])], int(self.micro_batch[index])
            while len(replica_batches) <= number:
                replica_batches.append([])
            replica_batches[number].append(index)
        return tuple(tuple(tuple(batch) for batch in replica_batches) for replica_batches in replicas)

    def plan(self) -> GroupedPlan:
        """Convert the batch to a plan of a grouped step, simulated and checked anew."""
        workload = workload_of(self.lengths)
        problem = replace(self.problem, lengths=workload.lengths, counts=workload.counts, homes=(self.home,))
        groups = []
        for strategy in self.order:
            replicas = self.micro_batches(strategy)
            packings, offset = [], 0
            for kind in problem.kinds_of(strategy):
                kind_replicas = replicas[offset : offset + kind.num_replicas]
                packings.append(
                    Packing(kind, tuple(self._counted(workload.lengths, replica) for replica in kind_replicas))
                )
                offset += kind.num_replicas
            groups.append(Group(strategy, tuple(packings)))
        plan = GroupedPlan(problem, self.home, tuple(groups), self.time_ns)
        check(plan)
        return plan

    def _counted(self, lengths: Int64Array, replica: tuple[tuple[int, ...], ...]) -> Int64Array:
        """Count the sequences of each length, [micro-batches, K]."""
        counts = np.zeros((len(replica), lengths.size), np.int64)
        for row, indices in zip(counts, replica, strict=True):
            np.add.at(row, np.searchsorted(lengths, self.lengths[list(indices)]), 1)
        return counts


class GroupedBatches:
    """Batches under the strategies of a plan.

    An idle home only gets sequences of batches that the other strategies do not hold.
    """

    def __init__(self, plan: GroupedPlan) -> None:
        strategies = tuple(sorted({*plan.order, plan.home}))
        if len(strategies) > _MAX_STRATEGIES:
            raise InvalidInputError(
                f"The plan has {len(strategies)} strategies.",
                f"At most {_MAX_STRATEGIES} expected.",
                "Plan again with a lower max_strategies.",
            )
        self.problem = replace(plan.problem, homes=(plan.home,))
        self.home, self.strategies = plan.home, strategies
        self.home_name, self.alignment, self.longest = self.problem.strategies[plan.home].name, 1, LONGEST
        glop.ready()
        planned = {
            packing.kind: sum(int((replica @ packing.kind.units).sum()) for replica in packing.replicas)
            for group in plan.groups
            for packing in group.packings
        }
        self._tables: dict[int, tuple[PipelineTable, ...]] = {}
        for s in strategies:
            offset, tables = 0, []
            for kind in plan.problem.kinds_of(s):
                tables.append(PipelineTable.of(kind, offset, planned.get(kind, 0)))
                offset += kind.num_replicas
            self._tables[s] = tuple(tables)
        max_size = min(len(strategies), self.problem.max_strategies)
        self._own = tuple(sorted(plan.order))
        self._tours: dict[tuple[int, ...], tuple[TourCost, ...]] = {
            used: undominated_tours(self.problem, used)
            for size in range(1, max_size + 1)
            for used in itertools.combinations(strategies, size)
        }

    def place(self, lengths: Sequence[int] | Int64Array) -> PlacedBatch:
        """Place one batch.

        Args:
            lengths: [n] in tokens, one a sequence, in any order.

        Raises:
            InvalidInputError: lengths that are no numbers of tokens.
            InfeasibleError: a sequence fits under none of the strategies.
            SolverError: no packing within memory was found, after some seconds.
        """
        search, tokens = self._search_batch(lengths), np.asarray(lengths).astype(np.int64)
        if search.best is None and self.home not in self._own:
            # The sequences fit one by one, but not together: allow the idle home, too.
            search = self._search_batch(lengths, everywhere=True)
        # With nearly full memory the fast packing may fail.
        plan = search.best or solve_batch(self.problem, self.strategies, self.home, tokens)
        bound = math.floor(min(plan.time_ns, search.bound_ns()))
        columns = (plan.strategy, plan.replica, plan.micro_batch)
        return PlacedBatch(self.problem, tokens, *columns, self.home, plan.order, plan.time_ns, bound)

    def planned(self, lengths: Int64Array, *, thorough: bool = False) -> PlannedBatch:
        """Plan the batch of sequences of ``lengths`` [n]; there is one search only."""
        placed = self.place(lengths)
        return PlannedBatch(
            tuple(self.problem.strategies[strategy].name for strategy in placed.order),
            tuple(map(placed.micro_batches, placed.order)),
            placed.time_ns,
            placed.bound_ns,
        )

    def bound_ns(self, lengths: Sequence[int] | Int64Array, time_ns: int) -> int:
        """Return a lower bound of all plans of a batch, an idle home included, at most ``time_ns``.

        ``time_ns`` is the time of a known plan; bounds above it are not computed.
        """
        return math.floor(min(time_ns, self._search_batch(lengths, time_ns, everywhere=True).bound_ns()))

    def _search_batch(
        self, lengths: Sequence[int] | Int64Array, known_ns: int | None = None, *, everywhere: bool = False
    ) -> _BatchSearch:
        """Search a batch.

        ``known_ns`` is the time of a known plan: the search then only bounds. ``everywhere`` allows an idle home
        also if the other strategies hold every sequence.
        """
        workload = workload_of(lengths)
        index = np.searchsorted(workload.lengths, np.asarray(lengths).astype(np.int64))
        kinds = {
            s: tuple(BatchKind(table, workload.lengths, workload.counts) for table in tables)
            for s, tables in self._tables.items()
        }
        batch = Batch(workload.lengths, workload.counts, kinds)
        self._require_capacity(batch)
        search = _BatchSearch(self.problem, batch, index, known_ns)
        own_fits = np.any([kind.fits for s in self._own for kind in kinds[s]], axis=0).all()
        any_strategy = everywhere or not own_fits
        tours = {used: tour for used, tour in self._tours.items() if any_strategy or set(used) <= set(self._own)}
        search.run(tours, self._own)
        return search

    def packings(self, strategy: int, lengths: Int64Array, spares: Sequence[int]) -> list[Placed]:
        """Pack sequences of ``lengths`` [n] on a strategy of one kind of pipelines.

        Args:
            strategy: index of the strategy.
            lengths: in tokens, [n].
            spares: numbers of micro-batches a replica above the minimum that the tokens need. With several
                numbers, another packing around the longest sequence is tried.

        Returns:
            The packings that were found.
        """
        (table,) = self._tables[strategy]
        distinct, indices, counts = np.unique(lengths, return_inverse=True, return_counts=True)
        kind = BatchKind(table, distinct, counts)
        fewest = -(-int(lengths.sum()) // (kind.num_replicas * table.pipeline.micro_batch_tokens))
        numbers = {min(fewest + spare, lengths.size) for spare in spares}
        placed = (place_into(kind, indices, distinct, number) for number in sorted(numbers))
        around = place_around(kind, indices, distinct, slice(1, 2)) if len(spares) > 1 else []
        return [*around, *(packing for packing in placed if packing is not None)]

    def _require_capacity(self, batch: Batch) -> None:
        """Raise ``InfeasibleError`` if a sequence fits under none of the strategies."""
        fits = np.any([kind.fits for kinds in batch.kinds.values() for kind in kinds], axis=0)
        if not fits.all():
            longest = int(batch.lengths[~fits][-1])
            names = ", ".join(self.problem.strategies[s].name for s in self.strategies)
            most_tokens = max(
                kind.table.pipeline.micro_batch_tokens for kinds in batch.kinds.values() for kind in kinds
            )
            raise InfeasibleError(
                f"A sequence of {longest} tokens fits under none of the plan's strategies ({names}).",
                f"The most that one holds is {most_tokens} tokens.",
                "Cut sequences at that length, or plan anew with the longest lengths that occur.",
            )


class _BatchSearch:
    """Best-first branch and bound for one batch: each node is relaxed once and then split."""

    def __init__(
        self, problem: GroupedProblem, batch: Batch, index: Int64Array, known_ns: int | None = None
    ) -> None:
        """Start a search; ``known_ns`` is the time of a known plan, with which nothing is packed."""
        self.problem = problem
        self.batch = batch
        # The distinct length of each sequence, and the sequences in ascending order of length.
        self.index = index
        self.sorted = np.argsort(index, kind="stable")
        self.best: BatchPlan | None = None
        self.packs, self.known_ns = known_ns is None, math.inf if known_ns is None else known_ns
        self._effort = _MORE if index.size <= _FEW else 1
        self._most_relaxed = _MAX_RELAXED * self._effort
        self._packed: Counter[tuple[int, ...]] = Counter()
        self._queue: list[tuple[float, int, Node]] = []
        self._number = self._num_relaxed = 0
        self._closed_ns = math.inf
        self._duals: DualValues = {}

    def bound_ns(self) -> float:
        """Return the smallest bound of plans that may be faster than the incumbent; infinite without such."""
        return min([self._closed_ns, *(bound for bound, _, _ in self._queue)])

    def run(self, tours: dict[tuple[int, ...], tuple[TourCost, ...]], first: tuple[int, ...]) -> None:
        """Relax and split until the effort is spent or the bound is reached.

        The set ``first`` is relaxed first: its incumbent closes most other sets.
        """
        for used, prices in tours.items():
            node = root(self.batch, used, prices)
            if node is not None and used == first:
                self._relax(node)
            elif node is not None:
                self._push(node)
        if self._effort > 1 and self.packs:
            # The relaxation divides sequences; few sequences may run best under one strategy.
            for _, _, node in [entry for entry in self._queue if len(entry[2].used) == 1]:
                single = relax(self.batch, node)
                if single.relaxed is not None:
                    self._place(single)
        # Without an incumbent, for lack of memory, further sets are tried.
        while self._queue and (self._num_relaxed < self._most_relaxed or math.isinf(self.known_ns)):
            if self.known_ns < math.inf and self._queue[0][0] >= self._closed_ns:
                # A closed node has this bound, so the bound cannot rise further.
                break
            self._examine(heapq.heappop(self._queue)[2])

    def _push(self, node: Node) -> None:
        """Add a node to the queue."""
        self._number += 1
        heapq.heappush(self._queue, (node.bound_ns, self._number, node))

    def _examine(self, node: Node) -> None:
        """Narrow, relax and pack the node, or split it; put the node or its halves back."""
        if self.known_ns < math.inf:
            remaining = narrow(node, self.known_ns)
            if remaining is None:
                # No plan of the node is shorter than the incumbent.
                return
            node = remaining
        if node.relaxed is None:
            # Another set's dual values may give a bound at no cost.
            better = with_duals(self.batch, node, self._duals)
            if better.bound_ns > node.bound_ns:
                self._push(better)
                return
            self._relax(node)
            return
        halves = split(node, self.batch)
        if not halves:
            self._closed_ns = min(self._closed_ns, node.bound_ns)
        for half in halves:
            self._push(half)

    def _relax(self, node: Node) -> None:
        """Relax a node, pack the answer, and put the node back."""
        node = relax(self.batch, node)
        self._num_relaxed += 1
        if node.relaxed is None:
            self._closed_ns = min(self._closed_ns, node.bound_ns)
            return
        self._duals |= node.relaxed.duals
        self._pack(node)
        self._push(node)

    def _pack(self, node: Node) -> None:
        """Pack the answer of a node's relaxation, within the effort."""
        skip = self._packed[node.used] == self._effort
        if node.relaxed is None or not self.packs or (self.known_ns < math.inf and skip):
            return
        self._packed[node.used] += 1
        times = self._place(node)
        if times is None:
            return
        # Few long sequences leave replicas idle while the slowest works: relax again with at least that time.
        group_times = tuple(
            max(low, float(times.get(s, 0))) for s, low in zip(node.used, node.lows_ns, strict=True)
        )
        idle = tuple(
            low if self._is_single_stage(s) else old
            for s, low, old in zip(node.used, group_times, node.lows_ns, strict=True)
        )
        if idle != node.lows_ns:
            again = relax(self.batch, replace(node, lows_ns=idle, highs_ns=tuple(map(max, idle, node.highs_ns))))
            if again.relaxed is not None:
                self._place(again)

    def _is_single_stage(self, strategy: int) -> bool:
        """Tell whether the replicas of a strategy have one stage, so that idle time can be filled."""
        return all(kind.table.pipeline.num_stages == 1 for kind in self.batch.kinds[strategy])

    def _place(self, node: Node) -> dict[int, int] | None:
        """Place the answer of a relaxation, and keep the plan if it is the best. Returns the strategies' times."""
        counts = round_sequences(self.batch, node)
        strategy, replica, micro_batch = (np.zeros_like(self.index) for _ in range(3))
        times: dict[int, int] = {}
        members = self._members(counts)
        for s in node.used:
            placed = self._placed(s, members)
            if placed is None:
                return None
            for kind, (members_of_kind, kind_placed) in zip(self.batch.kinds[s], placed, strict=True):
                strategy[members_of_kind] = s
                replica[members_of_kind] = kind_placed.replica + kind.table.first_replica
                micro_batch[members_of_kind] = kind_placed.micro_batch
                if members_of_kind.size:
                    times[s] = max(times.get(s, 0), kind_placed.time_ns)
        tour = best_tour(self.problem, tuple(sorted(times)), times)
        if tour.time_ns < self.known_ns:
            self.known_ns = tour.time_ns
            self.best = BatchPlan(strategy, replica, micro_batch, tour.order, tour.time_ns)
        return times

    def _placed(self, s: int, members: dict[tuple[int, int], Int64Array]) -> list[PlacedIndices] | None:
        """Place the sequences of every kind of a strategy, kind by kind or, if that fails, together."""
        kinds = self.batch.kinds[s]
        placements: list[PlacedIndices] = []
        for j, kind in enumerate(kinds):
            members_of_kind = members[s, j]
            placed = place(kind, self.index[members_of_kind], self.batch.lengths)
            if placed is not None:
                placements.append((members_of_kind, placed))
        if len(placements) == len(kinds):
            return placements
        if not self._is_single_stage(s):
            return None
        all_members = np.concatenate([members[s, j] for j in range(len(kinds))])
        together = place_together(kinds, self.index[all_members], self.batch.lengths)
        return (
            None
            if together is None
            else [(all_members[members_of_kind], placed) for members_of_kind, placed in together]
        )

    def _members(self, counts: dict[tuple[int, int], Int64Array]) -> dict[tuple[int, int], Int64Array]:
        """Assign sequences to kinds: of each length, the first sequences to the first kind, and so on."""
        first = np.searchsorted(self.index[self.sorted], np.arange(self.batch.lengths.size))
        rank = np.empty_like(self.sorted)
        rank[self.sorted] = np.arange(self.sorted.size) - first[self.index[self.sorted]]
        members = {}
        taken = np.zeros(self.batch.lengths.size, np.int64)
        for key, kind_counts in counts.items():
            belongs = (rank >= taken[self.index]) & (rank < (taken + kind_counts)[self.index])
            members[key] = np.flatnonzero(belongs)
            taken += kind_counts
        return members


def round_sequences(batch: Batch, node: Node) -> dict[tuple[int, int], Int64Array]:
    """Round the relaxation's sequences of a node to whole sequences [K] by strategy and kind.

    From the longest length on, each sequence goes to the kind whose share so far is furthest ahead of its whole
    sequences, among the kinds to which the relaxation gives a part of the length.
    """
    assert node.relaxed is not None
    keys = list(node.relaxed.sequences)
    wanted = np.array([node.relaxed.sequences[key] for key in keys])
    counts = np.floor(wanted + 1e-6).astype(np.int64)
    owed = np.zeros(len(keys))
    missing = batch.counts - counts.sum(axis=0)
    for k in np.flatnonzero(missing)[::-1].tolist():
        parts = wanted[:, k] - counts[:, k]
        owed += parts
        for _ in range(int(missing[k])):
            eligible = np.where(wanted[:, k] > 1e-9, owed, -np.inf)
            key_index = int(eligible.argmax())
            counts[key_index, k] += 1
            owed[key_index] -= 1
    return {key: counts[i] for i, key in enumerate(keys)}
