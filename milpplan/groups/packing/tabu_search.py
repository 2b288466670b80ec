"""Balancing replicas of different kinds that run one micro-batch each: a tabu search over moves and swaps.

Few long sequences on unlike replicas (FlexSP's groups) leave a local search that only accepts shorter plans stuck.
Here a plan shorter than a target T is sought: the excess ``sum_r max(0, time_r - T)`` is to become zero. Each
round makes the move of one sequence off a replica above T (the slowest, if they hold many), or its swap with one
elsewhere, that adds least to the excess and keeps tokens within memory, even if the excess rises; the way back is
barred for some rounds (Glover 1986). Reached targets are lowered. The same plan gives the same answer: rounds are
counted, random numbers seeded.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from milpplan.groups.packing.pack import Packing
from milpplan.groups.problem import Kind
from milpplan.groups.strategies import FloatArray, Int64Array

# Targets are this share below the best plan.
_STEP = 2e-4
# Rounds that a sequence may not go back: this many, and up to as many more.
_BARRED = 8
# Swaps looked at in all rounds together.
_EFFORT = 12_000_000
# Of more sequences above the target than this, only those of the slowest replica move.
_MANY = 48
_MAX_ROUNDS = 3_000


def balances(kinds: Sequence[Kind]) -> bool:
    """Whether the search is for these kinds: one stage, one micro-batch a replica."""
    pipelines = [kind.pipeline for kind in kinds]
    return all(one.num_stages == 1 and one.max_micro_batches == 1 for one in pipelines)


def first_packings(kinds: Sequence[Kind]) -> list[Packing] | None:
    """All sequences, longest first, each to the replica done first with it that has room; None if one has none."""
    replicas = [(j, r) for j, kind in enumerate(kinds) for r in range(kind.num_replicas)]
    cost = np.array(
        [np.where(kinds[j].fits, kinds[j].units * kinds[j].pipeline.parts, np.inf) for j, _ in replicas]
    )
    times = np.array([kinds[j].pipeline.micro_batch_units * kinds[j].pipeline.parts for j, _ in replicas], float)
    room = np.array([_capacity(kinds[j]) for j, _ in replicas])
    counts = [np.zeros((kind.num_replicas, kind.units.size), np.int64) for kind in kinds]
    lengths, numbers = kinds[0].lengths, kinds[0].counts
    for k in np.repeat(np.arange(lengths.size), numbers)[::-1].tolist():
        after = np.where(room >= lengths[k], times + cost[:, k], np.inf)
        here = int(after.argmin())
        if not np.isfinite(after[here]):
            return None
        times[here] = after[here]
        room[here] -= lengths[k]
        j, r = replicas[here]
        counts[j][r, k] += 1
    return [_packing(kind, held) for kind, held in zip(kinds, counts, strict=True)]


def _packing(kind: Kind, counts: Int64Array) -> Packing:
    """One micro-batch for every replica that holds something, [D, K]."""
    return Packing(kind, tuple(row[None, :] if row.any() else row[None, :][:0] for row in counts))


def _capacity(kind: Kind) -> int:
    tokens = kind.pipeline.micro_batch_tokens
    return min(tokens, kind.pipeline.in_flight_tokens or tokens)


def balanced(packings: Sequence[Packing], rounds: int = _MAX_ROUNDS, enough_ns: float = 0.0) -> list[Packing]:
    """The packings of a strategy's kinds, or shorter ones found in at most so many rounds; one of at most
    ``enough_ns`` will do."""
    search = _Search(packings)
    best = search.run(rounds, enough_ns)
    if best is None:
        return list(packings)
    found, first = [], 0
    for packing in packings:
        number = packing.kind.num_replicas
        counts = np.zeros((number, packing.kind.units.size), np.int64)
        mine = (best >= first) & (best < first + number)
        np.add.at(counts, (best[mine] - first, search.lengths_of[mine]), 1)
        found.append(_packing(packing.kind, counts))
        first += number
    return found


class _Search:
    """State: the replica of each sequence [n], times and tokens of the replicas [R]."""

    def __init__(self, packings: Sequence[Packing]) -> None:
        kinds = [packing.kind for packing in packings for _ in packing.replicas]
        held = [replica.sum(axis=0) for packing in packings for replica in packing.replicas]
        self.lengths_of: Int64Array = np.concatenate(
            [np.repeat(np.arange(counts.size), counts) for counts in held]
        ).astype(np.int64)
        self.where = np.repeat(np.arange(len(held)), [int(counts.sum()) for counts in held])
        self.tokens_of = kinds[0].lengths[self.lengths_of]
        # Time of each sequence on each replica [n, R], infinite where it does not fit.
        self.cost: FloatArray = np.stack(
            [
                np.where(kind.fits, kind.units * kind.pipeline.parts, np.inf)[self.lengths_of].astype(np.float64)
                for kind in kinds
            ],
            axis=1,
        )
        capacity = [_capacity(kind) for kind in kinds]
        items = np.arange(self.where.size)
        self.room = np.array(capacity) - np.bincount(self.where, self.tokens_of, len(kinds))
        empty = np.array([kind.pipeline.micro_batch_units * kind.pipeline.parts for kind in kinds], np.float64)
        # An idle replica counts its empty micro-batch too: never too short.
        self.times: FloatArray = np.bincount(self.where, self.cost[items, self.where], len(kinds)) + empty
        self.barred = np.zeros(self.cost.shape, np.int64)
        self.random = np.random.default_rng(1)

    def run(self, rounds: int, enough_ns: float) -> Int64Array | None:
        """The best places found [n], None if none is shorter."""
        best: Int64Array | None = None
        best_ns = float(self.times.max())
        effort = 0
        for turn in range(rounds):
            if self.times.max() < best_ns:
                best_ns, best = float(self.times.max()), self.where.copy()
            if effort > _EFFORT or best_ns <= enough_ns:
                break
            effort += self._turn(best_ns * (1.0 - _STEP), turn)
        return best

    def _turn(self, target: float, turn: int) -> int:
        """The best move or swap; how many were looked at."""
        over = np.flatnonzero(self.times[self.where] > target)
        if over.size > _MANY:
            over = np.flatnonzero(self.where == self.times.argmax())
        excess = np.maximum(0.0, self.times - target)
        moves = self._moves(over, excess, target, turn)
        swaps = self._swaps(over, excess, target, turn)
        size = moves.size + swaps.size
        move, swap = moves.min(initial=np.inf), swaps.min(initial=np.inf)
        if not np.isfinite(min(move, swap)):
            # All is barred: wait.
            return size
        if move <= swap:
            i, to = np.unravel_index(int(moves.argmin()), moves.shape)
            self._put(int(over[i]), int(to), turn)
        else:
            i, j = np.unravel_index(int(swaps.argmin()), swaps.shape)
            here, there = int(self.where[over[i]]), int(self.where[j])
            self._put(int(over[i]), there, turn)
            self._put(int(j), here, turn)
        return size

    def _moves(self, over: Int64Array, excess: FloatArray, target: float, turn: int) -> FloatArray:
        """What each move adds to the excess [over, R]; infinite where it may not be."""
        here = self.where[over]
        cost = self.cost[over]
        own = cost[np.arange(over.size), here]
        less = np.maximum(0.0, self.times[here] - own - target) - excess[here]
        more = np.maximum(0.0, self.times + cost - target) - excess
        added = less[:, None] + more
        illegal = (self.tokens_of[over][:, None] > self.room) | (self.barred[over] > turn)
        illegal[np.arange(over.size), here] = True
        return np.where(illegal, np.inf, added)

    def _swaps(self, over: Int64Array, excess: FloatArray, target: float, turn: int) -> FloatArray:
        """What each swap adds to the excess [over, n]; infinite where it may not be."""
        here, there = self.where[over], self.where
        items = np.arange(there.size)
        own, theirs = self.cost[over, here], self.cost[items, there]
        # Of j on i's replica, and of i on j's.
        back, forth = self.cost[:, here].T, self.cost[over][:, there]
        less = np.maximum(0.0, (self.times[here] - own - target)[:, None] + back) - excess[here][:, None]
        more = np.maximum(0.0, (self.times[there] - theirs - target)[None, :] + forth) - excess[there][None, :]
        moved = self.tokens_of[over][:, None] - self.tokens_of[None, :]
        illegal = (moved > self.room[there][None, :]) | (-moved > self.room[here][:, None])
        illegal |= here[:, None] == there[None, :]
        illegal |= (self.barred[over][:, there] > turn) | (turn < self.barred[:, here].T)
        # Twins change nothing.
        illegal |= moved == 0
        return np.where(illegal | ~np.isfinite(less + more), np.inf, less + more)

    def _put(self, item: int, to: int, turn: int) -> None:
        here = int(self.where[item])
        self.times[here] -= self.cost[item, here]
        self.times[to] += self.cost[item, to]
        self.room[here] += self.tokens_of[item]
        self.room[to] -= self.tokens_of[item]
        self.where[item] = to
        self.barred[item, here] = turn + _BARRED + int(self.random.integers(_BARRED))
