"""The strategies of one workload: their cost tables and bounds for ``tabled``, and packings at exact times.

**Padded sequences.** Micro-batches hold sequences of one length. The sequences of a length are cut into portions,
which go to the replica that would finish first, the largest work first. Each replica then has as few micro-batches
of every length as hold its own sequences, of sizes as equal as possible. Large portions keep micro-batches full,
small ones level the replicas, so several sizes are tried. For pipelines the order matters, too: the work of
micro-batches rises, falls, or falls after the smallest few (as many as there are stages), which fill the pipeline.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum

import numpy as np

from milpplan.errors import IllegalPlanError, InfeasibleError, InvalidInputError
from milpplan.lengths.bounds.micro_batch_pricing import MicroBatchPricing
from milpplan.lengths.bounds.work_bounds import LinearBounds, PipelineWorkBound, latencies, work_bounds
from milpplan.lengths.candidates import SizedCandidate, candidates, sized
from milpplan.lengths.cost_tables import (
    Load,
    Tables,
    Timer,
    finish_ns,
    once_ns,
    replicas_of_several,
    strategy_of,
    tables_of,
    typical_pipeline,
)
from milpplan.lengths.deadline import NEVER, Deadline
from milpplan.lengths.records import LengthGroup, MicroBatches
from milpplan.lengths.search_parameters import PARAMETERS
from milpplan.lengths.tabled import (
    Kind,
    Strategy,
)
from milpplan.lengths.tabled.construction import constructed
from milpplan.lengths.tabled.local_search import improved
from milpplan.problem import Layout, Problem
from milpplan.simulation import IntArray
from milpplan.simulation.layers import Term
from milpplan.units import NS_PER_S

Replicas = tuple[IntArray, ...]


def pack_padded(kind: Kind, counts: IntArray) -> list[Replicas]:
    """Return packings of ``counts`` [K] fitting sequences on the replicas of the kind, as tuples of arrays
    [micro-batches, K]."""
    max_sequences = _capacity(kind) // kind.lengths
    packings = []
    # Micro-batches are full, halves or quarters, or hold single sequences.
    for parts in (1, 2, 4, 1 << 62):
        spread = _spread(kind, counts, np.maximum(1, max_sequences // parts))
        rows = [_micro_batches(replica_counts, max_sequences) for replica_counts in spread]
        packings += [
            tuple(_ordered(kind, replica_counts, order) for replica_counts in rows) for order in _ways(kind)
        ]
    return packings


def _capacity(kind: Kind) -> int:
    tokens = kind.pipeline.micro_batch_tokens
    return min(tokens, kind.pipeline.in_flight_tokens or tokens)


def _spread(kind: Kind, counts: IntArray, portion: IntArray) -> IntArray:
    """Return the sequences of every replica, [D, K], in portions of at most ``portion`` [K]."""
    spread = np.zeros((kind.num_replicas, len(counts)), dtype=np.int64)
    constant_units = kind.pipeline.micro_batch_units
    pieces = [
        (int(size * kind.units[k]) + constant_units, k, size)
        for k in range(len(counts))
        for size in _sizes(int(counts[k]), int(portion[k]))
    ]
    done = [(0, replica) for replica in range(kind.num_replicas)]
    for work, k, size in sorted(pieces, reverse=True):
        time, replica = heapq.heappop(done)
        spread[replica, k] += size
        heapq.heappush(done, (time + work, replica))
    return spread


def _sizes(number: int, max_size: int) -> list[int]:
    """Split ``number`` into the fewest parts of at most ``max_size``, as equal as possible."""
    parts = -(-number // max_size)
    return [number // parts + (index < number % parts) for index in range(parts)]


def _micro_batches(held: IntArray, max_sequences: IntArray) -> IntArray:
    """Return micro-batches [v, K] of one length each, of at most ``max_sequences`` [K] sequences."""
    rows = []
    for k in np.flatnonzero(held).tolist():
        for size in _sizes(int(held[k]), int(max_sequences[k])):
            row = np.zeros(len(held), dtype=np.int64)
            row[k] = size
            rows.append(row)
    return np.array(rows, dtype=np.int64).reshape(-1, len(held))


def _ways(kind: Kind) -> tuple[str, ...]:
    return ("falls",) if kind.pipeline.num_stages == 1 else ("rises", "falls", "fills")


def _ordered(kind: Kind, rows: IntArray, order_name: str) -> IntArray:
    """Return the micro-batches in the order of their work."""
    order = np.argsort(rows @ kind.units, kind="stable")
    if order_name == "rises":
        return np.asarray(rows[order])
    first = min(kind.pipeline.num_stages, len(rows) // 2) if order_name == "fills" else 0
    return np.asarray(rows[np.concatenate([order[:first], order[first:][::-1]])])


# Upper limit of a micro-batch's token quanta in the tables.
MAX_QUANTA = 4096


class Effort(IntEnum):
    """Work of the local search on a packing: in the search, for important packings, and for the best one."""

    LITTLE = 60_000
    MORE = 250_000
    MOST = 750_000


WorkBoundKey = tuple[int, bool, bool]
"""Key of a work bound: member, whether other strategies share the memory, and whether its programs are exact."""


@dataclass(frozen=True, eq=False)
class Packed:
    """Sequences of one strategy on its replicas [v, n] and their exact time in ns, without the reduction."""

    replicas: tuple[IntArray, ...]
    time_ns: int

    @property
    def counts(self) -> IntArray:
        """Number of sequences of every length, [n]."""
        return np.asarray(sum(replica.sum(axis=0) for replica in self.replicas))


@dataclass(frozen=True, eq=False)
class Step:
    """Step of strategies in turn at its exact time: the pool's members with their sequences, in order, and the
    home."""

    home: int
    order: tuple[int, ...]
    packed: dict[int, Packed]
    time_ns: int


def cutoff_ns(time_ns: float, gap: float) -> float:
    """Return the smallest whole number of ns that proves a step of ``time_ns`` to a relative ``gap``.

    Rounding up keeps float products from accepting a gap that is larger than asked for.
    """
    return float(np.ceil(time_ns * (1.0 - gap)))


@dataclass(frozen=True, eq=False)
class StrategyTables:
    """Tables, bounds and packings of all strategies that hold some sequence; ``problem`` has one token quantum per
    sequence.

    ``shared_memory`` tells whether other strategies of the step share the GPUs' memory.
    """

    problem: Problem
    load: Load
    members: tuple[SizedCandidate, ...]
    tables: tuple[Tables, ...]
    strategy_cache: dict[tuple[int, int], Strategy] = field(default_factory=dict)
    """By member and capacity."""
    linear_bounds_cache: dict[tuple[int, int], LinearBounds] = field(default_factory=dict)
    """By member and capacity."""
    work_bound_cache: dict[WorkBoundKey, PipelineWorkBound] = field(default_factory=dict)
    refined: set[int] = field(default_factory=set)
    """Pipelines whose bounds were refined."""
    latency_cache: dict[tuple[int, int], float] = field(default_factory=dict)
    timer_cache: dict[tuple[int, int], Timer] = field(default_factory=dict)
    """Latency of the longest sequence in ns, by member and capacity."""

    @staticmethod
    def of(problem: Problem, load: Load, max_quanta: int | None = None) -> StrategyTables:
        """Build the tables of all candidates that no other candidate dominates.

        Args:
            problem: problem of one token quantum per sequence.
            load: the workload.
            max_quanta: upper limit of a micro-batch in quanta; None: the size of the workload.

        Raises:
            InfeasibleError: the longest sequence fits under no strategy.
            InvalidInputError: the longest sequence has more quanta than the tables.
        """
        max_quanta = min(load.num_quanta, MAX_QUANTA) if max_quanta is None else max_quanta
        sized_candidates = sized(problem, candidates(problem), max_quanta)
        kept = undominated(sized_candidates)
        if not any(candidate.own_memory_quanta * load.token_quantum >= load.lengths[-1] for candidate in kept):
            largest = max(kept, key=lambda candidate: candidate.own_memory_quanta)
            longest, quantum = int(load.lengths[-1]), load.token_quantum
            capacity = largest.own_memory_quanta * quantum
            if largest.own_memory_quanta == MAX_QUANTA:
                raise InvalidInputError(
                    f"A sequence of {longest:,} tokens is {longest // quantum:,} times the {quantum} tokens "
                    "that every sequence is padded to.",
                    f"At most {MAX_QUANTA:,} times expected: micro-batches are tabled up to there.",
                    f"Pad to more (--align {quantum * -(-longest // capacity)}), or cut sequences (--seq-len).",
                )
            raise InfeasibleError(
                f"A sequence of {longest:,} tokens fits under no strategy.",
                f"The most that one holds is {capacity:,} tokens ({largest.candidate.name}).",
                "Cut sequences at that length (--seq-len), or use more GPUs.",
            )
        sizes = [candidate.own_memory_quanta for candidate in kept]
        tables = tables_of(problem, [candidate.candidate for candidate in kept], load, sizes)
        return StrategyTables(problem, load, tuple(kept), tuple(tables))

    def max_quanta(self, member: int, *, shared_memory: bool) -> int:
        """Return the capacity of a micro-batch in token quanta."""
        candidate = self.members[member]
        return candidate.shared_memory_quanta if shared_memory else candidate.own_memory_quanta

    def strategy(self, member: int, *, shared_memory: bool) -> Strategy:
        """Return the strategy for ``tabled``, as one of several or as the only one of its step."""
        key = (member, self.max_quanta(member, shared_memory=shared_memory))
        if key not in self.strategy_cache:
            self.strategy_cache[key] = strategy_of(self.tables[member], self.members[member], key[1])
        return self.strategy_cache[key]

    def strategy_with_true_reduction(self, member: int, *, shared_memory: bool) -> Strategy:
        """Return ``strategy`` with its true reduction time.

        Tables of pipelines may count the ramp of the first and the last micro-batch with the reduction. Other
        bounds of the group count it, too, and no order of the step hides it.
        """
        strategy = self.strategy(member, shared_memory=shared_memory)
        return replace(strategy, reduce_ns=self.reduce_ns(member))

    def linear_bounds(self, member: int, *, shared_memory: bool) -> LinearBounds:
        """Return linear lower bounds of a group's time, valid for any sequences."""
        key = (member, self.max_quanta(member, shared_memory=shared_memory))
        if key not in self.linear_bounds_cache:
            self.linear_bounds_cache[key] = work_bounds(self.tables[member], self.members[member], key[1])
        return self.linear_bounds_cache[key]

    def work_bound(self, member: int, *, shared_memory: bool, exact: bool = False) -> PipelineWorkBound:
        """Return the bound of a pipeline by its work; expensive if ``exact``."""
        # Lines and classes differ even if the capacity does not.
        key = (member, shared_memory, exact)
        if key not in self.work_bound_cache:
            share, capacity = (
                PARAMETERS.shared_memory_share if shared_memory else 1.0,
                self.max_quanta(member, shared_memory=shared_memory),
            )
            self.work_bound_cache[key] = PipelineWorkBound.of(
                self.tables[member], self.members[member], capacity, share, exact=exact
            )
        return self.work_bound_cache[key]

    def work_bound_with_longest(self, member: int, cutoff_ns: float) -> PipelineWorkBound:
        """Return the strongest own-memory bound with the term of the longest sequence, up to ``cutoff_ns``."""
        exact = (member, False, True) in self.work_bound_cache
        bound = self.work_bound(member, shared_memory=False, exact=exact)
        if not bound.long_bounds:
            bound = bound.with_longest(cutoff_ns)
            self.work_bound_cache[member, False, exact] = bound
        return bound

    def refine(self, member: int) -> None:
        """Refine the bounds of a pipeline for sets in which it holds a part, with the term of the longest sequence
        where it may hold it."""
        if member in self.refined:
            return
        self.refined.add(member)
        holds_longest = bool(np.isfinite(self.latency_bound_ns(member, shared_memory=True)))
        shared = self.work_bound(member, shared_memory=True)
        self.work_bound_cache[member, True, False] = shared.refined(holds_longest=holds_longest)
        if holds_longest:
            self.work_bound_with_longest(member, np.inf)

    def best_own_memory_bound(self, member: int) -> PipelineWorkBound:
        """Return the strongest bound known of a pipeline that has the memory to itself."""
        strongest = self.work_bound_cache.get((member, False, True))
        return self.work_bound(member, shared_memory=False) if strongest is None else strongest

    def has_own_memory_bound(self, member: int) -> bool:
        """Return whether a work bound is known of a pipeline that has the memory to itself."""
        return any((member, False, exact) in self.work_bound_cache for exact in (False, True))

    def micro_batch_pricing(self, member: int, *, shared_memory: bool = False) -> MicroBatchPricing:
        """Return the pricing problem of the pipeline's micro-batches."""
        return MicroBatchPricing.of(
            self.tables[member], self.num_stages(member), self.max_quanta(member, shared_memory=shared_memory)
        )

    def store_bound(self, member: int, bound: PipelineWorkBound) -> None:
        """Store a stronger own-memory bound of a pipeline."""
        self.work_bound_cache[member, False, True] = bound

    def latency_bound_ns(self, member: int, *, shared_memory: bool) -> float:
        """Return the minimum time of a group with the longest sequence in ns; infinite if it does not fit."""
        key = (member, self.max_quanta(member, shared_memory=shared_memory))
        if key not in self.latency_cache:
            self.latency_cache[key] = float(latencies(self.tables[member], self.members[member], key[1])[-1])
        return self.latency_cache[key]

    def step_bound_ns(self, member: int) -> float:
        """Return a lower bound in ns of the step that runs all sequences under one strategy.

        It is the maximum of the linear bounds, the latency of the longest sequence and the known work bounds, plus
        reduction and finish. Infinite if a sequence does not fit.
        """
        if self.max_quanta(member, shared_memory=False) * self.load.token_quantum < self.load.lengths[-1]:
            return float("inf")
        bounds_ns = [self.linear_bounds(member, shared_memory=False).at(self.load.counts.astype(np.float64))]
        bounds_ns.append(self.latency_bound_ns(member, shared_memory=False))
        work_bounds = [self.work_bound_cache.get((member, False, exact)) for exact in (False, True)]
        bounds_ns += [bound.workload_bound_ns for bound in work_bounds if bound is not None]
        return max(bounds_ns) + self.reduce_ns(member) + self.finish_ns(member)

    def num_stages(self, member: int) -> int:
        """Return the number of pipeline stages."""
        return self.members[member].candidate.layout.pp

    def finish_ns(self, member: int) -> int:
        """Return the time that ends a step at this home."""
        return finish_ns(self.members[member])

    def fixed_cost_ns(self, members: Sequence[int]) -> int:
        """Return the fixed cost of a step of several strategies without switches: all reductions and the minimum
        finish."""
        return sum(map(self.reduce_ns, members)) + min(map(self.finish_ns, members))

    def reduce_ns(self, member: int) -> int:
        """Return the time of the gradient reduction."""
        return once_ns(self.members[member], Term.REDUCE)

    def pack(
        self,
        member: int,
        counts: IntArray,
        max_quanta: int,
        deadline: Deadline = NEVER,
        num_replicas: int | None = None,
    ) -> Packed | None:
        """Pack ``counts`` [n] sequences on the strategy's replicas, at exact times.

        Args:
            member: index of the strategy.
            counts: sequences of every length, [n].
            max_quanta: capacity of a micro-batch in quanta.
            deadline: after it the first packing found is returned, slightly improved.
            num_replicas: number of replicas; None: all of the strategy.

        Returns:
            The packing; None if none was found.
        """
        chosen = np.flatnonzero(counts)
        replicas = num_replicas or self.members[member].candidate.layout.dp
        if self.load.rules.padded:
            return self._padded(member, chosen, counts[chosen], max_quanta, replicas)
        timer = self.timer(member, max_quanta).for_lengths(chosen)
        packing = constructed(timer, replicas, counts[chosen])
        if packing is None:
            return None
        return self._improved(member, self._whole(chosen, packing), max_quanta, Effort.LITTLE, deadline)

    def timer(self, member: int, max_quanta: int) -> Timer:
        """Return the times of the strategy's micro-batches of up to ``max_quanta`` quanta."""
        key = (member, max_quanta)
        if key not in self.timer_cache:
            self.timer_cache[key] = Timer.of(self.tables[member], max_quanta)
        return self.timer_cache[key]

    def _padded(
        self, member: int, chosen: IntArray, counts: IntArray, max_quanta: int, num_replicas: int
    ) -> Packed | None:
        """Pack ``counts`` sequences of the ``chosen`` lengths, each micro-batch with one length; None if one does
        not fit."""
        candidate, tables = self.members[member], self.tables[member]
        if candidate.candidate.layout.pp == 1:
            pipeline = strategy_of(tables, candidate, max_quanta).pipelines[0][0]
        else:
            pipeline = typical_pipeline(tables, candidate, max_quanta)
        kind = Kind(0, pipeline, num_replicas, self.load.lengths[chosen], counts)
        if not kind.fits.all():
            return None
        return min(
            (
                self.time_packing(member, self._whole(chosen, packing), max_quanta)
                for packing in pack_padded(kind, counts)
            ),
            key=_time_ns,
        )

    def polish(
        self,
        member: int,
        packed: Packed,
        max_quanta: int,
        effort: Effort = Effort.MORE,
        deadline: Deadline = NEVER,
    ) -> Packed:
        """Improve a packing by local search with some effort, until the ``deadline``; return the shorter one."""
        if self.load.rules.padded:
            return packed
        improved_packing = self._improved(member, packed.replicas, max_quanta, effort, deadline)
        return min(packed, improved_packing, key=_time_ns)

    def _improved(
        self,
        member: int,
        replicas: tuple[IntArray, ...],
        max_quanta: int,
        effort: Effort,
        deadline: Deadline = NEVER,
    ) -> Packed:
        """Run the local search on the exact times of some replicas."""
        packing = improved(self.timer(member, max_quanta), list(replicas), effort, deadline=deadline)
        return self.time_packing(member, tuple(packing), max_quanta)

    def _whole(self, chosen: IntArray, replicas: Sequence[IntArray]) -> tuple[IntArray, ...]:
        """Expand replicas over the ``chosen`` lengths to replicas over all lengths."""
        whole = []
        for replica in replicas:
            row = np.zeros((len(replica), len(self.load.counts)), dtype=np.int64)
            row[:, chosen] = replica
            whole.append(row)
        return tuple(whole)

    def group(self, member: int, packed: Packed, max_quanta: int, reduce_s: float) -> LengthGroup:
        """Return the record of a group."""
        pairs = zip(self.load.lengths.tolist(), packed.counts.tolist(), strict=True)
        return LengthGroup(
            strategy=self.members[member].candidate.name,
            plan=self.members[member].candidate.plan,
            buckets=tuple((length, count) for length, count in pairs if count),
            micro_batches=self.micro_batches(packed.replicas),
            micro_batch_tokens=max_quanta * self.load.token_quantum,
            time_s=packed.time_ns / NS_PER_S,
            reduce_s=reduce_s,
        )

    def micro_batches(self, replicas: Sequence[IntArray]) -> MicroBatches:
        """Return the lengths of the sequences of every micro-batch of replicas [v, n]."""
        lengths = self.load.lengths
        return tuple(tuple(tuple(np.repeat(lengths, row).tolist()) for row in replica) for replica in replicas)

    def time_packing(self, member: int, replicas: tuple[IntArray, ...], max_quanta: int) -> Packed:
        """Return replicas with their exact time.

        Raises:
            IllegalPlanError: a micro-batch is empty or exceeds the capacity.
        """
        return self.time_packings([(member, replicas, max_quanta)])[0]

    def time_packings(self, parts: Sequence[tuple[int, tuple[IntArray, ...], int]]) -> list[Packed]:
        """Return ``time_packing`` of several members in one pass of the cost model."""
        pairs = [(self.members[member].candidate, replicas) for member, replicas, _ in parts]
        for (candidate, replicas), (*_, max_quanta) in zip(pairs, parts, strict=True):
            for replica in replicas:
                tokens = replica @ self.load.lengths
                if len(tokens) and (tokens.max() > max_quanta * self.load.token_quantum or tokens.min() <= 0):
                    raise IllegalPlanError(
                        f"A micro-batch of {candidate.name} holds {int(tokens.max())} tokens.",
                        f"At most {max_quanta * self.load.token_quantum} expected.",
                    )
        times = replicas_of_several(self.problem, pairs, self.load.lengths, self.load.rules.mask)
        return [
            Packed(replicas, int(replica_times.max()))
            for (_, replicas), replica_times in zip(pairs, times, strict=True)
        ]


def _time_ns(packed: Packed) -> int:
    return packed.time_ns


def undominated(members: Sequence[SizedCandidate]) -> list[SizedCandidate]:
    """Return the candidates that no other one of their layout dominates."""
    by_layout: dict[Layout, list[SizedCandidate]] = {}
    for member in members:
        by_layout.setdefault(member.candidate.layout, []).append(member)
    return [
        member
        for member in members
        if not any(_dominates(rival, member) for rival in by_layout[member.candidate.layout])
    ]


def _dominates(rival: SizedCandidate, candidate: SizedCandidate) -> bool:
    """Return whether ``rival`` recomputes less than ``candidate`` in the same layout and has at least its
    capacity.

    Then every packing of ``candidate`` is a packing of ``rival``, no slower, with the same states, reduction and
    switches.
    """
    holds_as_much = (
        rival.own_memory_quanta >= candidate.own_memory_quanta
        and rival.shared_memory_quanta >= candidate.shared_memory_quanta
    )
    order, a, b = ("none", "selective", "full"), rival.candidate, candidate.candidate
    return holds_as_much and a.layout == b.layout and order.index(a.recompute) < order.index(b.recompute)
