"""All ways to run few sequences under pairs of strategies in turn: every assignment, packing, order and home.

Nothing of the search: only exact times of micro-batches, 1F1B, reductions, finishes and prices of switches.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache

import numpy as np

from milpplan.lengths import StrategyTables, Switches, micro_batch_times, pipeline_ns

Counts = tuple[int, ...]
NEVER = 10**18


class AllTurns:
    """The exact optimum of single strategies and of pairs, for a pool of a few sequences."""

    def __init__(self, pool: StrategyTables) -> None:
        self.pool, self.counts = pool, tuple(pool.load.counts.tolist())
        self.group = cache(self._group)
        self.replica = cache(self._replica)
        self.contents = cache(self._contents)

    def single_ns(self, member: int) -> int:
        """The least time of a step of one strategy, which has its memory to itself."""
        pool = self.pool
        group_ns = self.group(
            member, pool.max_quanta(member, shared_memory=False), self.counts, self._replicas(member)
        )
        return group_ns + pool.reduce_ns(member) + pool.finish_ns(member)

    def pair_ns(self, pair: tuple[int, int], switches: Switches) -> int:
        """The least time of a step in which just these two run something, the home one of them."""
        pool, times, best = self.pool, switches.times(pair), NEVER
        finish, reduce = [pool.finish_ns(one) for one in pair], sum(pool.reduce_ns(one) for one in pair)
        for held in _parts(self.counts):
            other = tuple(a - b for a, b in zip(self.counts, held, strict=True))
            if not any(held) or not any(other):
                continue
            groups = [
                self.group(member, pool.max_quanta(member, shared_memory=True), mine, self._replicas(member))
                for member, mine in zip(pair, (held, other), strict=True)
            ]
            for first, home in itertools.product((0, 1), (0, 1)):
                second = 1 - first
                total = reduce + finish[home] + groups[first]
                total += int(times.parameters_ns[home, first]) if home != first else 0
                total += int(times.parameters_ns[first, second])
                total += max(groups[second], int(times.gradients_ns[first, second]))
                total += int(times.gradients_ns[second, home]) if home != second else 0
                best = min(best, total)
        return best

    def _replicas(self, member: int) -> int:
        return min(self.pool.members[member].candidate.layout.dp, sum(self.counts))

    def _group(self, member: int, grains: int, held: Counts, replicas: int) -> int:
        """The slowest of so many replicas that share what is held."""
        if replicas == 1:
            return int(self.replica(member, grains, held))
        best = NEVER
        for mine in _parts(held):
            rest = tuple(a - b for a, b in zip(held, mine, strict=True))
            alone = self.replica(member, grains, mine)
            if alone < best:
                best = min(best, max(alone, self.group(member, grains, rest, replicas - 1)))
        return best

    def _replica(self, member: int, grains: int, held: Counts) -> int:
        """All micro-batches in all orders."""
        rows, forward, backward, transfer = self.contents(member, grains)
        best = NEVER if any(held) else 0
        stack: list[tuple[Counts, tuple[int, ...]]] = [(held, ())]
        while stack:
            left, chosen = stack.pop()
            if not any(left):
                if chosen:
                    where = list(chosen)
                    best = min(best, pipeline_ns(forward[:, where], backward[:, where], transfer[where]))
                continue
            for number, row in enumerate(rows):
                rest = tuple(a - b for a, b in zip(left, row, strict=True))
                if min(rest) >= 0:
                    stack.append((rest, (*chosen, number)))
        return best

    def _contents(self, member: int, grains: int) -> tuple[list[Counts], np.ndarray, np.ndarray, np.ndarray]:
        """All that fits into a micro-batch, and its times on every stage."""
        pool, lengths = self.pool, self.pool.load.lengths
        rows = [
            row for row in _parts(self.counts) if 0 < np.array(row) @ lengths <= grains * pool.load.token_quantum
        ]
        if not rows:
            nothing = np.zeros((1, 0), dtype=np.int64)
            return [], nothing, nothing, nothing[0]
        candidate = pool.members[member].candidate
        times = micro_batch_times(pool.problem, candidate, lengths, np.array(rows), pool.load.rules.mask)
        return rows, times.forward, times.backward, times.transfer


def _parts(counts: Counts) -> Iterator[Counts]:
    """All that may be taken of so many."""
    return itertools.product(*(range(one + 1) for one in counts))
