"""Dispatch at training time: one batch under strategies already chosen, in milliseconds, with a proved gap.

``Dispatcher(plan)`` learns once what the plan's strategies can do (``curves``); ``dispatch(lengths)`` then decides
which sequences of a batch run under which of them, on which replica, in which micro-batch and in which order. The
optimizer stays where the plan has it; a strategy may hold nothing in some step. A dispatcher holds nothing but the
plan and what follows from it, and no call changes it: threads may share it, processes may get it pickled, and the
same batch gets the same answer.

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

from milpplan.errors import InfeasibleError, InvalidInputError
from milpplan.groups.bounds import glop
from milpplan.groups.bounds.work_envelope import BatchKind, PipelineTable
from milpplan.groups.dispatch.batch_bound import Batch, Node, Prices, narrowed, priced, relaxed, root, split
from milpplan.groups.dispatch.batch_packing import (
    Placed,
    Together,
    place,
    place_around,
    place_into,
    place_together,
)
from milpplan.groups.dispatch.batch_solving import Found, solved
from milpplan.groups.packing.pack import Packing
from milpplan.groups.plan import Group, GroupedPlan, check
from milpplan.groups.problem import GroupedProblem
from milpplan.groups.strategies import Int64Array
from milpplan.groups.tours import TourPrice, best_tour, tour_prices
from milpplan.groups.workload.workload import workload_of

# Relaxations solved, and sets packed, for one answer; so many times more for batches of few sequences.
_MAX_RELAXED, _MAX_RELAXED_MANY = 7, 3
_MAX_PACKED = 3
_FEW = 128
# Of more sequences than this, another set is packed only where it could save this share.
_MANY = 1024
_WORTH = 0.03
_MORE = 3
# Sets of strategies that one dispatcher weighs.
_MAX_STRATEGIES = 6


@dataclass(frozen=True, slots=True, eq=False)
class Dispatch:
    """One batch: where each of its sequences [n] runs, in which order the strategies run, and how good that is.

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
        """Indices of the sequences of each micro-batch of each replica of a strategy."""
        replicas: list[list[list[int]]] = [[] for _ in self.problem.strategies[strategy].replicas]
        mine = np.flatnonzero(self.strategy == strategy)
        for index in mine[np.lexsort((mine, self.micro_batch[mine]))].tolist():
            held, number = replicas[int(self.replica[index])], int(self.micro_batch[index])
            while len(held) <= number:
                held.append([])
            held[number].append(index)
        return tuple(tuple(tuple(one) for one in held) for held in replicas)

    def plan(self) -> GroupedPlan:
        """The same as a plan of a grouped step, simulated and checked anew."""
        workload = workload_of(self.lengths)
        problem = replace(self.problem, lengths=workload.lengths, counts=workload.counts, homes=(self.home,))
        groups = []
        for strategy in self.order:
            replicas = self.micro_batches(strategy)
            packings, first = [], 0
            for kind in problem.kinds_of(strategy):
                mine = replicas[first : first + kind.num_replicas]
                packings.append(Packing(kind, tuple(self._counted(workload.lengths, one) for one in mine)))
                first += kind.num_replicas
            groups.append(Group(strategy, tuple(packings)))
        plan = GroupedPlan(problem, self.home, tuple(groups), self.time_ns)
        check(plan)
        return plan

    def _counted(self, lengths: Int64Array, replica: tuple[tuple[int, ...], ...]) -> Int64Array:
        """Sequences of each length [micro-batches, K]."""
        counts = np.zeros((len(replica), lengths.size), np.int64)
        for row, indices in zip(counts, replica, strict=True):
            np.add.at(row, np.searchsorted(lengths, self.lengths[list(indices)]), 1)
        return counts


class Dispatcher:
    """Dispatches batches under the strategies that a plan runs; an idle home gets something only of batches that
    the others do not hold."""

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
        glop.ready()
        planned = {
            packing.kind: sum(int((one @ packing.kind.units).sum()) for one in packing.replicas)
            for group in plan.groups
            for packing in group.packings
        }
        self._tables: dict[int, tuple[PipelineTable, ...]] = {}
        for s in strategies:
            first, tables = 0, []
            for kind in plan.problem.kinds_of(s):
                tables.append(PipelineTable.of(kind, first, planned.get(kind, 0)))
                first += kind.num_replicas
            self._tables[s] = tuple(tables)
        most = min(len(strategies), self.problem.max_strategies)
        self._own = tuple(sorted(plan.order))  # What the plan runs.
        self._tours: dict[tuple[int, ...], tuple[TourPrice, ...]] = {
            used: tour_prices(self.problem, used)
            for size in range(1, most + 1)
            for used in itertools.combinations(strategies, size)
        }

    def dispatch(self, lengths: Sequence[int] | Int64Array) -> Dispatch:
        """The plan of one batch: ``lengths`` [n] in tokens, one a sequence, in any order.

        Raises ``InvalidInputError`` for lengths that are none, ``InfeasibleError`` for a sequence that fits under
        none of the strategies, and ``SolverError`` where no packing within memory was found, which takes seconds.
        """
        search, tokens = self._searched(lengths), np.asarray(lengths).astype(np.int64)
        if search.best is None and self.home not in self._own:
            # Held one by one, but not together: an idle home is in the space, and in the bound.
            search = self._searched(lengths, everywhere=True)
        # Where memory is nearly full what is quick may place nothing.
        found = search.best or solved(self.problem, self.strategies, self.home, tokens)
        bound = math.floor(min(found.time_ns, search.bound_ns()))
        columns = (found.strategy, found.replica, found.micro_batch)
        return Dispatch(self.problem, tokens, *columns, self.home, found.order, found.time_ns, bound)

    def bound_ns(self, lengths: Sequence[int] | Int64Array, time_ns: int) -> int:
        """What no plan of a batch takes less than, an idle home included, as far as that is below the time of one
        that is known."""
        return math.floor(min(time_ns, self._searched(lengths, time_ns, everywhere=True).bound_ns()))

    def _searched(
        self, lengths: Sequence[int] | Int64Array, known_ns: int | None = None, *, everywhere: bool = False
    ) -> _BatchSearch:
        """The search of a batch; where the time of a plan is known, for its bound only. ``everywhere``: under an
        idle home, too, though the others hold every sequence."""
        workload = workload_of(lengths)
        index = np.searchsorted(workload.lengths, np.asarray(lengths).astype(np.int64))
        kinds = {
            s: tuple(BatchKind(table, workload.lengths, workload.counts) for table in tables)
            for s, tables in self._tables.items()
        }
        batch = Batch(workload.lengths, workload.counts, kinds)
        self._require_room(batch)
        search = _BatchSearch(self.problem, batch, index, known_ns)
        held = np.any([kind.fits for s in self._own for kind in kinds[s]], axis=0).all()
        wide = everywhere or not held
        tours = {used: tour for used, tour in self._tours.items() if wide or set(used) <= set(self._own)}
        search.run(tours, self._own)
        return search

    def packings(self, strategy: int, lengths: Int64Array, spares: Sequence[int]) -> list[Placed]:
        """Packings of sequences of ``lengths`` [n] on a strategy of one kind of pipelines, beside that of a
        batch: in numbers of micro-batches a replica that are so many above the least that their tokens need, and
        if these are several, around the longest sequence in another way; those that were found."""
        (table,) = self._tables[strategy]
        distinct, at, counts = np.unique(lengths, return_inverse=True, return_counts=True)
        kind = BatchKind(table, distinct, counts)
        least = -(-int(lengths.sum()) // (kind.num_replicas * table.pipeline.micro_batch_tokens))
        numbers = {min(least + spare, lengths.size) for spare in spares}
        placed = (place_into(kind, at, distinct, number) for number in sorted(numbers))
        other = place_around(kind, at, distinct, slice(1, 2)) if len(spares) > 1 else []
        return [*other, *(one for one in placed if one is not None)]

    def _require_room(self, batch: Batch) -> None:
        fits = np.any([kind.fits for kinds in batch.kinds.values() for kind in kinds], axis=0)
        if not fits.all():
            longest = int(batch.lengths[~fits][-1])
            names = ", ".join(self.problem.strategies[s].name for s in self.strategies)
            most = max(kind.table.pipeline.micro_batch_tokens for kinds in batch.kinds.values() for kind in kinds)
            raise InfeasibleError(
                f"A sequence of {longest} tokens fits under none of the plan's strategies ({names}).",
                f"The most that one holds is {most} tokens.",
                "Cut sequences at that length, or plan anew with the longest lengths that occur.",
            )


class _BatchSearch:
    """One batch: nodes by their bounds, the worst first, each relaxed once and then split."""

    def __init__(
        self, problem: GroupedProblem, batch: Batch, index: Int64Array, known_ns: int | None = None
    ) -> None:
        """``known_ns``: the time of a plan, where nothing needs to be packed."""
        self.problem = problem
        self.batch = batch
        # The distinct length of each sequence, and the sequences by length, long ones last.
        self.index = index
        self.sorted = np.argsort(index, kind="stable")
        self.best: Found | None = None
        self.packs, self.known_ns = known_ns is None, math.inf if known_ns is None else known_ns
        self._effort = _MORE if index.size <= _FEW else 1
        # Of many sequences the first relaxations prove as much as all, and each takes milliseconds.
        self._most_relaxed = _MAX_RELAXED_MANY if index.size > _MANY else _MAX_RELAXED * self._effort
        self._packed: Counter[tuple[int, ...]] = Counter()
        self._queue: list[tuple[float, int, Node]] = []
        self._number = self._num_relaxed = 0
        self._closed_ns = math.inf
        self._prices: Prices = {}

    def bound_ns(self) -> float:
        """Least bound of all plans that may be shorter than the best; infinite if none may be."""
        return min([self._closed_ns, *(bound for bound, _, _ in self._queue)])

    def run(self, tours: dict[tuple[int, ...], tuple[TourPrice, ...]], first: tuple[int, ...]) -> None:
        """Relax and split until the effort is spent or nothing shorter can be left. The strategies that are looked
        at ``first`` leave little to others whose bounds are only loose."""
        for used, prices in tours.items():
            node = root(self.batch, used, prices)
            if node is not None and used == first:
                self._relax(node)
            elif node is not None:
                self._push(node)
        if self._effort > 1 and self.packs:
            # The relaxation shares single sequences out; few of them may do best under one strategy.
            for _, _, node in [entry for entry in self._queue if len(entry[2].used) == 1]:
                alone = relaxed(self.batch, node)
                if alone.relaxed is not None:
                    self._place(alone)
        # Where memory forbids all that was tried, the next sets are.
        while self._queue and (self._num_relaxed < self._most_relaxed or math.isinf(self.known_ns)):
            if self.known_ns < math.inf and self._queue[0][0] >= self._closed_ns:
                # What is closed with this bound holds all bounds down.
                break
            self._examine(heapq.heappop(self._queue)[2])

    def _push(self, node: Node) -> None:
        self._number += 1
        heapq.heappush(self._queue, (node.bound_ns, self._number, node))

    def _examine(self, node: Node) -> None:
        """Narrow, relax, pack what the relaxation holds, and put the node or its halves back."""
        if self.known_ns < math.inf:
            left = narrowed(node, self.known_ns)
            if left is None:
                # Nothing in it is shorter than the best plan.
                return
            node = left
        if node.relaxed is None:
            # Another set's prices may do, and cost nothing.
            better = priced(self.batch, node, self._prices)
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
        """Relax a node and pack what the relaxation holds."""
        node = relaxed(self.batch, node)
        self._num_relaxed += 1
        if node.relaxed is None:
            self._closed_ns = min(self._closed_ns, node.bound_ns)
            return
        self._prices |= node.relaxed.prices
        self._pack(node)
        self._push(node)

    def _pack(self, node: Node) -> None:
        """Place the sequences as the relaxation has them, arrange the groups, and keep the plan if it is best."""
        tried = self._packed[node.used]
        enough = len(self._packed) > _MAX_PACKED * self._effort or tried == self._effort
        if self.index.size > _MANY:
            # Packing is most of the work for many sequences: not for so little.
            enough |= node.bound_ns > self.known_ns * (1.0 - _WORTH)
        if node.relaxed is None or not self.packs or (self.known_ns < math.inf and enough):
            return
        self._packed[node.used] += 1
        times = self._place(node)
        if times is None:
            return
        # Few long sequences leave replicas idle while the slowest works: once more, with that time given.
        lows = tuple(max(low, float(times.get(s, 0))) for s, low in zip(node.used, node.lows_ns, strict=True))
        idle = tuple(
            low if self._lumpy(s) else old for s, low, old in zip(node.used, lows, node.lows_ns, strict=True)
        )
        if idle != node.lows_ns:
            again = relaxed(self.batch, replace(node, lows_ns=idle, highs_ns=tuple(map(max, idle, node.highs_ns))))
            if again.relaxed is not None:
                self._place(again)

    def _lumpy(self, strategy: int) -> bool:
        """Whether the replicas of a strategy have one stage: what they wait for can be filled."""
        return all(kind.table.pipeline.num_stages == 1 for kind in self.batch.kinds[strategy])

    def _place(self, node: Node) -> dict[int, int] | None:
        """Place what a relaxation holds, and keep it if it is the best; times of the strategies."""
        counts = whole(self.batch, node)
        strategy, replica, micro_batch = (np.zeros_like(self.index) for _ in range(3))
        times: dict[int, int] = {}
        members = self._members(counts)
        for s in node.used:
            placed = self._placed(s, members)
            if placed is None:
                return None
            for kind, (mine, at) in zip(self.batch.kinds[s], placed, strict=True):
                strategy[mine] = s
                replica[mine] = at.replica + kind.table.first_replica
                micro_batch[mine] = at.micro_batch
                if mine.size:
                    times[s] = max(times.get(s, 0), at.time_ns)
        tour = best_tour(self.problem, tuple(sorted(times)), times)
        if tour.time_ns < self.known_ns:
            self.known_ns = tour.time_ns
            self.best = Found(strategy, replica, micro_batch, tour.order, tour.time_ns)
        return times

    def _placed(self, s: int, members: dict[tuple[int, int], Int64Array]) -> list[Together] | None:
        """Sequences of every kind of a strategy and their places, kind by kind or, where that fails, together."""
        kinds = self.batch.kinds[s]
        found: list[Together] = []
        for j, kind in enumerate(kinds):
            mine = members[s, j]
            placed = place(kind, self.index[mine], self.batch.lengths)
            if placed is not None:
                found.append((mine, placed))
        if len(found) == len(kinds):
            return found
        if not self._lumpy(s):
            return None
        everything = np.concatenate([members[s, j] for j in range(len(kinds))])
        together = place_together(kinds, self.index[everything], self.batch.lengths)
        return None if together is None else [(everything[mine], placed) for mine, placed in together]

    def _members(self, counts: dict[tuple[int, int], Int64Array]) -> dict[tuple[int, int], Int64Array]:
        """Sequences of every kind: of each length, the first so many to the first kind, and so on."""
        first = np.searchsorted(self.index[self.sorted], np.arange(self.batch.lengths.size))
        rank = np.empty_like(self.sorted)
        rank[self.sorted] = np.arange(self.sorted.size) - first[self.index[self.sorted]]
        members = {}
        taken = np.zeros(self.batch.lengths.size, np.int64)
        for key, held in counts.items():
            mine = (rank >= taken[self.index]) & (rank < (taken + held)[self.index])
            members[key] = np.flatnonzero(mine)
            taken += held
        return members


def whole(batch: Batch, node: Node) -> dict[tuple[int, int], Int64Array]:
    """Whole sequences [K] by strategy and kind, next to what the node's relaxation holds.

    Lengths are gone through from the longest: each sequence goes to the kind whose share so far is furthest ahead
    of what it has got, among those that the relaxation gives a part of the length.
    """
    assert node.relaxed is not None
    keys = list(node.relaxed.held)
    wanted = np.array([node.relaxed.held[key] for key in keys])
    counts = np.floor(wanted + 1e-6).astype(np.int64)
    owed = np.zeros(len(keys))
    rest = batch.counts - counts.sum(axis=0)
    for k in np.flatnonzero(rest)[::-1].tolist():
        parts = wanted[:, k] - counts[:, k]
        owed += parts
        for _ in range(int(rest[k])):
            eligible = np.where(wanted[:, k] > 1e-9, owed, -np.inf)
            at = int(eligible.argmax())
            counts[at, k] += 1
            owed[at] -= 1
    return {key: counts[i] for i, key in enumerate(keys)}
