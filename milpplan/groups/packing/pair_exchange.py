"""Exchanges of up to two sequences for up to two, between replicas that run one micro-batch each.

Where lengths are multiples of an alignment, replicas of one kind with equal tokens differ only by their quadratic
part. The slowest is then shortened by a pair for a pair (or one) of as many tokens, which moves and swaps of
single sequences reach only through a detour of a whole alignment step. Each round takes the exchange that leaves
the longer of the two replicas shortest, if that is below the slowest time before; so a plan never gets longer. The
search uses no random numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from milpplan.groups.packing.packing import Packing
from milpplan.groups.strategies import FloatArray, Int64Array

# Maximum exchanges evaluated in all rounds together, and pairs of one replica in a round.
_EFFORT = 80_000_000
_MAX_PAIRS = 600


def exchange_pairs(packings: Sequence[Packing]) -> list[Packing]:
    """Shorten the slowest replica of a strategy's kinds, which run one micro-batch each."""
    search = _Pairs(packings)
    effort = 0
    while effort < _EFFORT:
        evaluated, improved = search.round()
        effort += evaluated
        if not improved:
            break
    result, offset = [], 0
    for packing in packings:
        replica_counts = search.counts[offset : offset + len(packing.replicas)]
        offset += len(packing.replicas)
        result.append(
            Packing(packing.kind, tuple(row[None, :] if row.any() else row[None, :][:0] for row in replica_counts))
        )
    return result


class _Pairs:
    """State: sequences of every replica by length ``counts`` [R, K], the replicas' times and free tokens [R]."""

    def __init__(self, packings: Sequence[Packing]) -> None:
        kinds = [packing.kind for packing in packings for _ in packing.replicas]
        counts = [replica.sum(axis=0) for packing in packings for replica in packing.replicas]
        self.counts: Int64Array = np.array(counts, np.int64)
        # One more length stands for no sequence: no time, no tokens.
        self.lengths: Int64Array = np.append(kinds[0].lengths, 0)
        times = [np.where(kind.fits, kind.units * kind.pipeline.parts, np.inf) for kind in kinds]
        self.cost: FloatArray = np.array([np.append(sequence_times, 0.0) for sequence_times in times])
        empty_times = [kind.pipeline.micro_batch_units * kind.pipeline.parts for kind in kinds]
        present_cost = np.where(self.counts > 0, self.cost[:, :-1], 0.0)
        self.times: FloatArray = (present_cost * self.counts).sum(axis=1) + np.array(empty_times, np.float64)
        capacity = [
            min(kind.pipeline.micro_batch_tokens, kind.pipeline.in_flight_tokens or 2**62) for kind in kinds
        ]
        self.free_tokens: Int64Array = np.array(capacity, np.int64) - self.counts @ kinds[0].lengths

    def round(self) -> tuple[int, bool]:
        """Make the best exchange of the slowest replica.

        Returns:
            The number of exchanges evaluated, and whether one was made.
        """
        slow = int(self.times.argmax())
        given_pairs = self._pairs(slow)
        best: tuple[float, int, Int64Array, Int64Array] | None = None
        evaluated = 0
        for other in range(len(self.times)):
            if other == slow:
                continue
            taken_pairs = self._pairs(other)
            evaluated += len(given_pairs) * len(taken_pairs)
            worst = self._worst(slow, other, given_pairs, taken_pairs)
            index = int(worst.argmin())
            if best is None or worst.flat[index] < best[0]:
                i, j = divmod(index, len(taken_pairs))
                best = (float(worst.flat[index]), other, given_pairs[i], taken_pairs[j])
        if best is None or best[0] >= self.times[slow]:
            return evaluated, False
        self._put(slow, best[1], best[2])
        self._put(best[1], slow, best[3])
        return evaluated, True

    def _pairs(self, replica: int) -> Int64Array:
        """List up to two sequences of a replica, [m, 2] by length; the last length stands for no sequence."""
        nothing = self.counts.shape[1]
        lengths = np.append(np.flatnonzero(self.counts[replica]), nothing)
        first, second = np.triu_indices(len(lengths))
        pairs = np.stack([lengths[first], lengths[second]], axis=1)
        twins = (pairs[:, 0] == pairs[:, 1]) & (pairs[:, 0] != nothing)
        enough_twins = np.append(self.counts[replica], 2)[pairs[:, 0]] >= 2
        pairs = pairs[~twins | enough_twins]
        return np.asarray(pairs[:: -(-len(pairs) // _MAX_PAIRS)])

    def _worst(self, slow: int, other: int, given_pairs: Int64Array, taken_pairs: Int64Array) -> FloatArray:
        """Return the longer time of both replicas after every exchange, [given, taken]; infinite if illegal."""
        slow_cost, other_cost = self.cost[slow], self.cost[other]
        slow_times = (self.times[slow] - slow_cost[given_pairs].sum(axis=1))[:, None] + slow_cost[taken_pairs].sum(
            axis=1
        )[None, :]
        other_times = (self.times[other] - other_cost[taken_pairs].sum(axis=1))[None, :] + other_cost[
            given_pairs
        ].sum(axis=1)[:, None]
        added_tokens = (
            self.lengths[taken_pairs].sum(axis=1)[None, :] - self.lengths[given_pairs].sum(axis=1)[:, None]
        )
        worst = np.maximum(slow_times, other_times)
        worst[(added_tokens > self.free_tokens[slow]) | (-added_tokens > self.free_tokens[other])] = np.inf
        return np.asarray(worst)

    def _put(self, source: int, target: int, pair: Int64Array) -> None:
        """Move the sequences of a pair to another replica."""
        for k in pair[pair < self.counts.shape[1]].tolist():
            self.counts[source, k] -= 1
            self.counts[target, k] += 1
            self.times[source] -= self.cost[source, k]
            self.times[target] += self.cost[target, k]
            self.free_tokens[source] += self.lengths[k]
            self.free_tokens[target] -= self.lengths[k]
