"""Tabu search that balances replicas of different kinds which run one micro-batch each.

Few long sequences on unlike replicas (FlexSP's groups) leave a local search that only accepts shorter plans stuck.
Here a plan shorter than a target T is sought: the excess ``sum_r max(0, time_r - T)`` is to become zero. Each
round makes the move of one sequence off a replica above T (the slowest, if they hold many), or its swap with
another replica's, that adds least to the excess and keeps tokens within memory, even if the excess rises; the
reverse move is tabu for some rounds (Glover 1986). Reached targets are lowered. Equal plans give equal answers:
rounds are counted, and random numbers have a fixed seed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from milpplan.groups.plan import Packing
from milpplan.groups.problem import Kind
from milpplan.groups.strategies import FloatArray, Int64Array

# Relative distance of the target below the best plan.
_STEP = 2e-4
# Rounds that a reverse move is tabu: this number, and up to twice that at random.
_TABU_ROUNDS = 8
# Maximum moves and swaps evaluated in all rounds together.
_EFFORT = 12_000_000
# With more sequences above the target than this, only those of the slowest replica move.
_MANY = 48
_MAX_ROUNDS = 3_000


def has_single_micro_batches(kinds: Sequence[Kind]) -> bool:
    """Tell whether the kinds have one stage and one micro-batch a replica, as this search needs."""
    pipelines = [kind.pipeline for kind in kinds]
    return all(pipeline.num_stages == 1 and pipeline.max_micro_batches == 1 for pipeline in pipelines)


def first_packings(kinds: Sequence[Kind]) -> list[Packing] | None:
    """Put each sequence, longest first, on the replica with capacity that finishes it first.

    Returns:
        The kinds' packings; None if a sequence fits on no replica.
    """
    replicas = [(j, r) for j, kind in enumerate(kinds) for r in range(kind.num_replicas)]
    cost = np.array(
        [np.where(kinds[j].fits, kinds[j].units * kinds[j].pipeline.parts, np.inf) for j, _ in replicas]
    )
    times = np.array([kinds[j].pipeline.micro_batch_units * kinds[j].pipeline.parts for j, _ in replicas], float)
    free_tokens = np.array([_capacity(kinds[j]) for j, _ in replicas])
    counts = [np.zeros((kind.num_replicas, kind.units.size), np.int64) for kind in kinds]
    lengths, numbers = kinds[0].lengths, kinds[0].counts
    for k in np.repeat(np.arange(lengths.size), numbers)[::-1].tolist():
        end_times = np.where(free_tokens >= lengths[k], times + cost[:, k], np.inf)
        replica = int(end_times.argmin())
        if not np.isfinite(end_times[replica]):
            return None
        times[replica] = end_times[replica]
        free_tokens[replica] -= lengths[k]
        j, r = replicas[replica]
        counts[j][r, k] += 1
    return [_packing(kind, kind_counts) for kind, kind_counts in zip(kinds, counts, strict=True)]


def _packing(kind: Kind, counts: Int64Array) -> Packing:
    """Make a packing of one micro-batch for every replica that holds a sequence; ``counts`` [D, K]."""
    return Packing(kind, tuple(row[None, :] if row.any() else row[None, :][:0] for row in counts))


def _capacity(kind: Kind) -> int:
    """Return the token capacity of a replica's micro-batch."""
    tokens = kind.pipeline.micro_batch_tokens
    return min(tokens, kind.pipeline.in_flight_tokens or tokens)


def balance(packings: Sequence[Packing], rounds: int = _MAX_ROUNDS, cutoff_ns: float = 0.0) -> list[Packing]:
    """Shorten the packings of a strategy's kinds by tabu search.

    Args:
        packings: the packings of the kinds, one micro-batch a replica.
        rounds: maximum number of moves.
        cutoff_ns: the search ends at a plan of at most this time.

    Returns:
        Shorter packings, or the given ones.
    """
    search = _Search(packings)
    best = search.run(rounds, cutoff_ns)
    if best is None:
        return list(packings)
    result, offset = [], 0
    for packing in packings:
        number = packing.kind.num_replicas
        counts = np.zeros((number, packing.kind.units.size), np.int64)
        of_kind = (best >= offset) & (best < offset + number)
        np.add.at(counts, (best[of_kind] - offset, search.lengths_of[of_kind]), 1)
        result.append(_packing(packing.kind, counts))
        offset += number
    return result


class _Search:
    """State: the replica of each sequence [n], times and free tokens of the replicas [R]."""

    def __init__(self, packings: Sequence[Packing]) -> None:
        kinds = [packing.kind for packing in packings for _ in packing.replicas]
        replica_counts = [replica.sum(axis=0) for packing in packings for replica in packing.replicas]
        self.lengths_of: Int64Array = np.concatenate(
            [np.repeat(np.arange(counts.size), counts) for counts in replica_counts]
        ).astype(np.int64)
        self.replica_of = np.repeat(
            np.arange(len(replica_counts)), [int(counts.sum()) for counts in replica_counts]
        )
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
        items = np.arange(self.replica_of.size)
        self.free_tokens = np.array(capacity) - np.bincount(self.replica_of, self.tokens_of, len(kinds))
        empty = np.array([kind.pipeline.micro_batch_units * kind.pipeline.parts for kind in kinds], np.float64)
        # An idle replica counts its empty micro-batch too, so no time is too short.
        self.times: FloatArray = (
            np.bincount(self.replica_of, self.cost[items, self.replica_of], len(kinds)) + empty
        )
        self.tabu_until = np.zeros(self.cost.shape, np.int64)
        self.random = np.random.default_rng(1)

    def run(self, rounds: int, cutoff_ns: float) -> Int64Array | None:
        """Return the best replicas of the sequences [n]; None if no plan is shorter."""
        best: Int64Array | None = None
        best_ns = float(self.times.max())
        effort = 0
        for turn in range(rounds):
            if self.times.max() < best_ns:
                best_ns, best = float(self.times.max()), self.replica_of.copy()
            if effort > _EFFORT or best_ns <= cutoff_ns:
                break
            effort += self._turn(best_ns * (1.0 - _STEP), turn)
        return best

    def _turn(self, target: float, turn: int) -> int:
        """Make the best move or swap. Returns the number evaluated."""
        over = np.flatnonzero(self.times[self.replica_of] > target)
        if over.size > _MANY:
            over = np.flatnonzero(self.replica_of == self.times.argmax())
        excess = np.maximum(0.0, self.times - target)
        moves = self._moves(over, excess, target, turn)
        swaps = self._swaps(over, excess, target, turn)
        size = moves.size + swaps.size
        move, swap = moves.min(initial=np.inf), swaps.min(initial=np.inf)
        if not np.isfinite(min(move, swap)):
            # Every move is tabu in this round.
            return size
        if move <= swap:
            i, to = np.unravel_index(int(moves.argmin()), moves.shape)
            self._put(int(over[i]), int(to), turn)
        else:
            i, j = np.unravel_index(int(swaps.argmin()), swaps.shape)
            first_replica, second_replica = int(self.replica_of[over[i]]), int(self.replica_of[j])
            self._put(int(over[i]), second_replica, turn)
            self._put(int(j), first_replica, turn)
        return size

    def _moves(self, over: Int64Array, excess: FloatArray, target: float, turn: int) -> FloatArray:
        """Return the change of the excess by each move [over, R]; infinite for illegal moves."""
        source = self.replica_of[over]
        cost = self.cost[over]
        own_cost = cost[np.arange(over.size), source]
        decrease = np.maximum(0.0, self.times[source] - own_cost - target) - excess[source]
        increase = np.maximum(0.0, self.times + cost - target) - excess
        added = decrease[:, None] + increase
        illegal = (self.tokens_of[over][:, None] > self.free_tokens) | (self.tabu_until[over] > turn)
        illegal[np.arange(over.size), source] = True
        return np.where(illegal, np.inf, added)

    def _swaps(self, over: Int64Array, excess: FloatArray, target: float, turn: int) -> FloatArray:
        """Return the change of the excess by each swap [over, n]; infinite for illegal swaps."""
        source, partner = self.replica_of[over], self.replica_of
        items = np.arange(partner.size)
        own_cost, other_cost = self.cost[over, source], self.cost[items, partner]
        # Times of j on i's replica, and of i on j's.
        back, forth = self.cost[:, source].T, self.cost[over][:, partner]
        decrease = (
            np.maximum(0.0, (self.times[source] - own_cost - target)[:, None] + back) - excess[source][:, None]
        )
        increase = (
            np.maximum(0.0, (self.times[partner] - other_cost - target)[None, :] + forth)
            - excess[partner][None, :]
        )
        moved = self.tokens_of[over][:, None] - self.tokens_of[None, :]
        illegal = (moved > self.free_tokens[partner][None, :]) | (-moved > self.free_tokens[source][:, None])
        illegal |= source[:, None] == partner[None, :]
        illegal |= (self.tabu_until[over][:, partner] > turn) | (turn < self.tabu_until[:, source].T)
        # Swaps of equal lengths change nothing.
        illegal |= moved == 0
        return np.where(illegal | ~np.isfinite(decrease + increase), np.inf, decrease + increase)

    def _put(self, item: int, replica: int, turn: int) -> None:
        """Move a sequence to another replica, and make the reverse move tabu."""
        source = int(self.replica_of[item])
        self.times[source] -= self.cost[item, source]
        self.times[replica] += self.cost[item, replica]
        self.free_tokens[source] += self.tokens_of[item]
        self.free_tokens[replica] -= self.tokens_of[item]
        self.replica_of[item] = replica
        self.tabu_until[item, source] = turn + _TABU_ROUNDS + int(self.random.integers(_TABU_ROUNDS))
