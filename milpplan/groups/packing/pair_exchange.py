"""Exchanging up to two sequences of the slowest replica for up to two of another, each replica one micro-batch.

Where lengths are multiples of an alignment, replicas of one kind with the same tokens differ by their quadratic
part only: what shortens the slowest is a pair for a pair (or one) of as many tokens, which no move or swap of
single sequences comes by without a detour of a whole grain. Each round takes the exchange that leaves the longer
of the two replicas shortest, if that is shorter than the slowest was; so the plan never gets longer. No random
numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from milpplan.groups.packing.pack import Packing
from milpplan.groups.strategies import FloatArray, Int64Array

# Exchanges looked at in all rounds together, and pairs of one replica in a round.
_EFFORT = 80_000_000
_MOST_PAIRS = 600


def exchanged(packings: Sequence[Packing]) -> list[Packing]:
    """The packings of a strategy's kinds (``balance.balances``), or shorter ones."""
    search = _Pairs(packings)
    effort = 0
    while effort < _EFFORT:
        looked_at, better = search.round()
        effort += looked_at
        if not better:
            break
    found, first = [], 0
    for packing in packings:
        held = search.held[first : first + len(packing.replicas)]
        first += len(packing.replicas)
        found.append(Packing(packing.kind, tuple(row[None, :] if row.any() else row[None, :][:0] for row in held)))
    return found


class _Pairs:
    """State: sequences of every replica by length ``held`` [R, K], their times and room in tokens [R]."""

    def __init__(self, packings: Sequence[Packing]) -> None:
        kinds = [packing.kind for packing in packings for _ in packing.replicas]
        held = [replica.sum(axis=0) for packing in packings for replica in packing.replicas]
        self.held: Int64Array = np.array(held, np.int64)
        # A length more than there are, for nothing: no time, no tokens.
        self.lengths: Int64Array = np.append(kinds[0].lengths, 0)
        times = [np.where(kind.fits, kind.units * kind.pipeline.parts, np.inf) for kind in kinds]
        self.cost: FloatArray = np.array([np.append(one, 0.0) for one in times])
        empty = [kind.pipeline.micro_batch_units * kind.pipeline.parts for kind in kinds]
        own = np.where(self.held > 0, self.cost[:, :-1], 0.0)
        self.times: FloatArray = (own * self.held).sum(axis=1) + np.array(empty, np.float64)
        most = [min(kind.pipeline.micro_batch_tokens, kind.pipeline.in_flight_tokens or 2**62) for kind in kinds]
        self.room: Int64Array = np.array(most, np.int64) - self.held @ kinds[0].lengths

    def round(self) -> tuple[int, bool]:
        """Make the best exchange of the slowest replica: how many were looked at, whether one was made."""
        slow = int(self.times.argmax())
        mine = self._pairs(slow)
        best: tuple[float, int, Int64Array, Int64Array] | None = None
        looked_at = 0
        for other in range(len(self.times)):
            if other == slow:
                continue
            theirs = self._pairs(other)
            looked_at += len(mine) * len(theirs)
            worst = self._worst(slow, other, mine, theirs)
            at = int(worst.argmin())
            if best is None or worst.flat[at] < best[0]:
                i, j = divmod(at, len(theirs))
                best = (float(worst.flat[at]), other, mine[i], theirs[j])
        if best is None or best[0] >= self.times[slow]:
            return looked_at, False
        self._put(slow, best[1], best[2])
        self._put(best[1], slow, best[3])
        return looked_at, True

    def _pairs(self, replica: int) -> Int64Array:
        """Up to two sequences of a replica, [m, 2] by length, fewer filled up with the length for nothing."""
        nothing = self.held.shape[1]
        lengths = np.append(np.flatnonzero(self.held[replica]), nothing)
        first, second = np.triu_indices(len(lengths))
        pairs = np.stack([lengths[first], lengths[second]], axis=1)
        twins = (pairs[:, 0] == pairs[:, 1]) & (pairs[:, 0] != nothing)
        there = np.append(self.held[replica], 2)[pairs[:, 0]] >= 2
        pairs = pairs[~twins | there]
        return np.asarray(pairs[:: -(-len(pairs) // _MOST_PAIRS)])

    def _worst(self, slow: int, other: int, mine: Int64Array, theirs: Int64Array) -> FloatArray:
        """The longer time of both after every exchange, [mine, theirs]; infinite where tokens do not fit."""
        given, taken = self.cost[slow], self.cost[other]
        here = (self.times[slow] - given[mine].sum(axis=1))[:, None] + given[theirs].sum(axis=1)[None, :]
        there = (self.times[other] - taken[theirs].sum(axis=1))[None, :] + taken[mine].sum(axis=1)[:, None]
        more = self.lengths[theirs].sum(axis=1)[None, :] - self.lengths[mine].sum(axis=1)[:, None]
        worst = np.maximum(here, there)
        worst[(more > self.room[slow]) | (-more > self.room[other])] = np.inf
        return np.asarray(worst)

    def _put(self, source: int, target: int, pair: Int64Array) -> None:
        for k in pair[pair < self.held.shape[1]].tolist():
            self.held[source, k] -= 1
            self.held[target, k] += 1
            self.times[source] -= self.cost[source, k]
            self.times[target] += self.cost[target, k]
            self.room[source] += self.lengths[k]
            self.room[target] -= self.lengths[k]
