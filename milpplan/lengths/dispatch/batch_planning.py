"""Plan of one batch under the strategies of a step that was solved: times from anywhere, a proved bound.

**Bound.** Every set of the strategies is bounded by the linear programs of ``turns``: a mixture of linear bounds
of each strategy's group, whatever strategy runs the longest sequence, with the least that switches, reductions
and the optimizer add for this set. Programs are solved over bunches of neighbouring lengths, which only changes
their dual values: the bound is computed over all lengths.

**Step.** The programs divide the sequences among the strategies. Divisions are packed (``construction``), lowest
bound first, as long as the set's bound is below the best step. Where few long sequences leave replicas idle, the
program is solved again with the group's time as its minimum, and fills them. The best step's packings are
improved by the local search.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from milpplan.lengths.bounds import LinearBounds
from milpplan.lengths.records import MicroBatches
from milpplan.lengths.search_parameters import PARAMETERS
from milpplan.lengths.tabled import GroupedProblem
from milpplan.lengths.tabled.construction import constructed, longest_ns
from milpplan.lengths.tabled.local_search import Replica, ReplicaTimes, improved_replicas
from milpplan.lengths.tabled.step_plan import best_tour, least_overhead_ns
from milpplan.lengths.turns.lagrangian_mixtures import Bounded, divisions
from milpplan.simulation import IntArray

Replicas = tuple[IntArray, ...]

# Number of bunches of lengths in the linear programs of a batch.
_BUNCHES = 40


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """Strategies by name in the order in which they run, their micro-batches of indices, exact time and bound."""

    order: tuple[str, ...]
    micro_batches: tuple[MicroBatches, ...]
    time_ns: int
    bound_ns: int


@dataclass(frozen=True, slots=True, eq=False)
class BatchStrategy:
    """One strategy with the lengths of a batch."""

    kinds: tuple[tuple[ReplicaTimes, int], ...]
    """Kinds of its replicas: their times, and how many there are."""
    bounds: LinearBounds
    """Lower bounds of its group's time."""
    latency_ns: float
    """Minimum time of its group with the longest sequence; infinite if that does not fit."""


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """Packed sequences of one strategy, replica after replica, and the time of the slowest, ns."""

    replicas: Replicas
    time_ns: float


class BatchSearch:
    """Search for the step of one batch."""

    def __init__(self, problem: GroupedProblem, strategies: Sequence[BatchStrategy], counts: IntArray) -> None:
        """Start a search.

        Args:
            problem: its switches, reductions and homes are the step's.
            strategies: its strategies with the batch's lengths.
            counts: sequences of every length, [n].
        """
        self.problem, self.strategies, self.counts = problem, strategies, counts
        self.bound_ns, self.best_ns = math.inf, math.inf
        self.best: dict[int, _Group] = {}
        self._packed: dict[tuple[int, bytes], _Group | None] = {}
        self._bounded = Bounded.of(
            [strategy.bounds for strategy in strategies],
            np.array([strategy.latency_ns for strategy in strategies]),
            np.zeros(len(strategies)),
            np.zeros(len(strategies)),
            counts,
        )
        self._fits = np.array([np.isfinite(strategy.bounds.shares[0]) for strategy in strategies])
        self._starts = self._bunches()

    def run(self, max_strategies: int) -> dict[int, Replicas]:
        """Return the replicas of every strategy that runs something in the best step; empty if none was found."""
        sets = []
        for size in range(1, min(max_strategies, len(self.strategies)) + 1):
            for used in itertools.combinations(range(len(self.strategies)), size):
                if self._fits[list(used)].any(axis=0).all():
                    overhead_ns = least_overhead_ns(self.problem, used)
                    bounds = self._divisions(used)
                    bound_ns = min((bound_ns for bound_ns, _ in bounds), default=math.inf) + overhead_ns
                    sets.append((bound_ns, used, [division for _, division in bounds]))
        for bound_ns, used, found in sorted(sets, key=lambda entry: (entry[0], entry[1])):
            self.bound_ns = min(self.bound_ns, bound_ns)
            if bound_ns < self.best_ns:
                for division in found:
                    self._take(used, division)
        self._improve()
        return {member: group.replicas for member, group in self.best.items()}

    def _bunches(self) -> IntArray:
        """Return first indices of bunches of about equal work, in each of which a strategy fits all lengths or
        none."""
        share = self._bounded.shares.min(axis=(0, 1)) * self.counts
        sums = np.cumsum(share) / max(1e-9, float(share.sum()))
        cuts = np.searchsorted(sums, np.linspace(0.0, 1.0, _BUNCHES + 1)[1:-1])
        ends = self._fits.sum(axis=1)
        starts = np.unique(np.concatenate([[0, len(self.counts) - 1], cuts, ends]))
        return np.asarray(starts[starts < len(self.counts)], dtype=np.int64)

    def _divisions(self, used: tuple[int, ...]) -> list[tuple[float, IntArray]]:
        """Return bounds of the groups' times of a set in ns, and divisions of the sequences, [q, n]."""
        if len(used) == 1:
            strategy = self.strategies[used[0]]
            bound_ns = max(strategy.bounds.at(self.counts.astype(np.float64)), strategy.latency_ns)
            return [(bound_ns, self.counts[None])]
        return divisions(self._bounded, np.array(used), self._starts)

    def _take(self, used: tuple[int, ...], division: IntArray) -> None:
        """Pack a division of a set, and the one that fills its idle replicas; keep the shortest step."""
        groups = self._groups(used, division)
        self._keep(groups)
        if groups is None or len(groups) < 2:
            return
        # The group that waits the longest for its slowest replica takes more sequences at no cost.
        waits = [
            groups[member].time_ns - self.strategies[member].bounds.at(held) if member in groups else 0.0
            for member, held in zip(used, division.astype(np.float64), strict=True)
        ]
        floors = np.zeros(len(used))
        floors[int(np.argmax(waits))] = groups[used[int(np.argmax(waits))]].time_ns
        for _, filled in divisions(self._bounded, np.array(used), self._starts, floors):
            self._keep(self._groups(used, filled))

    def _groups(self, used: tuple[int, ...], division: IntArray) -> dict[int, _Group] | None:
        """Pack the sequences of every strategy; None if one has no packing."""
        groups = {}
        for member, counts in zip(used, division, strict=True):
            if counts.any():
                key = member, counts.tobytes()
                if key not in self._packed:
                    self._packed[key] = _group(self.strategies[member], counts)
                group = self._packed[key]
                if group is None:
                    return None
                groups[member] = group
        return groups

    def _keep(self, groups: Mapping[int, _Group] | None) -> None:
        """Keep the groups if their step is shorter."""
        if groups is not None:
            times = {member: round(group.time_ns) for member, group in groups.items()}
            time_ns = best_tour(self.problem, tuple(sorted(times)), times).time_ns
            if time_ns < self.best_ns:
                self.best, self.best_ns = dict(groups), time_ns

    def _improve(self) -> None:
        """Shorten the groups of the best step by the local search, with less effort for more sequences."""
        for member, group in self.best.items():
            kinds = self.strategies[member].kinds
            timers = [timer for timer, number in kinds for _ in range(number)]
            stages = max(timer.num_stages for timer in timers)
            size = int(self.counts.sum()) * max(1.0, stages / 4)
            effort = int(PARAMETERS.batch_effort / max(1.0, size / 768) / len(self.best))
            replicas = [Replica.of(timer, rows) for timer, rows in zip(timers, group.replicas, strict=True)]
            better = improved_replicas(replicas, effort, changes=24)
            self.best[member] = _Group(
                tuple(replica.packed for replica in better), max(replica.time_ns for replica in better)
            )


def _group(strategy: BatchStrategy, counts: IntArray) -> _Group | None:
    """Pack sequences on the replicas of a strategy; None if that fails."""
    replicas: list[IntArray] = []
    time_ns = 0.0
    for (timer, number), held in zip(strategy.kinds, _dealt(strategy.kinds, counts), strict=True):
        packing = constructed(timer, number, held)
        if packing is None:
            return None
        replicas += packing
        time_ns = max(time_ns, longest_ns(timer, packing))
    return _Group(tuple(replicas), time_ns)


def _dealt(kinds: Sequence[tuple[ReplicaTimes, int]], counts: IntArray) -> IntArray:
    """Give sequences to kinds of replicas, [j, n]: the longest first, each to the kind that is done first."""
    held = np.zeros((len(kinds), len(counts)), dtype=np.int64)
    if len(kinds) == 1:
        return counts[None]
    work = np.array(
        [
            np.where(timer.quanta <= timer.max_quanta, timer.lines[1].sum(axis=0) / number, np.inf)
            for timer, number in kinds
        ]
    )
    done = np.zeros(len(kinds))
    for length in np.repeat(np.arange(len(counts)), counts)[::-1].tolist():
        kind = int((done + work[:, length]).argmin())
        held[kind, length] += 1
        done[kind] += work[kind, length]
    return held


def indexed(replicas: Replicas, indices: Mapping[int, list[int]]) -> MicroBatches:
    """Return micro-batches [v, n] of every replica as indices of sequences, which are taken from ``indices``: by
    length, the last one first."""
    return tuple(
        tuple(
            tuple(indices[length].pop() for length in np.repeat(np.arange(len(row)), row).tolist())
            for row in replica
        )
        for replica in replicas
    )


def indices_by_length(places: IntArray) -> dict[int, list[int]]:
    """Return the indices of a batch's sequences by the index of their length, ``places`` [n], first ones last."""
    order = np.argsort(places, kind="stable")
    parts = np.split(order, np.cumsum(np.bincount(places))[:-1])
    return {length: part[::-1].tolist() for length, part in enumerate(parts)}
