"""Local search in a group: moves and swaps that shorten the slowest replica, each simulated exactly.

**Exchanges of pairs** (``exchange_pairs``), between replicas that run one micro-batch each. Where lengths are
multiples of an alignment, replicas of one kind with equal tokens differ only by their quadratic part. The slowest
is then shortened by a pair for a pair (or one) of as many tokens, which moves and swaps of single sequences reach
only through a detour of a whole alignment step. Each round takes the exchange that leaves the longer of the two
replicas shortest, if that is below the slowest time before; so a plan never gets longer. The search uses no random
numbers.

**Tabu search** (``balance``), for replicas of different kinds which run one micro-batch each. Few long sequences
on unlike replicas (FlexSP's groups) leave a local search that only accepts shorter plans stuck. Here a plan
shorter than a target T is sought: the excess ``sum_r max(0, time_r - T)`` is to become zero. Each round makes the
move of one sequence off a replica above T (the slowest, if they hold many), or its swap with another replica's,
that adds least to the excess and keeps tokens within memory, even if the excess rises; the reverse move is tabu
for some rounds (Glover 1986). Reached targets are lowered. Equal plans give equal answers: rounds are counted, and
random numbers have a fixed seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from milpplan.lengths.deadline import NEVER, Deadline
from milpplan.lengths.tabled import (
    FloatArray,
    Int64Array,
    Kind,
    Packing,
    pipeline_times_ns,
)
from milpplan.lengths.tabled.step_plan import in_flight_fits

# Maximum candidates of a pair of replicas, and the number of fastest other replicas tried in one round.
_BATCH = 3_000
_OTHERS = 4


@dataclass(slots=True)
class _Replica:
    """Sequences of every micro-batch [micro-batches, K] of one replica, and its time."""

    kind: Kind
    packed: Int64Array
    time_ns: int = 0

    def loads(self) -> Int64Array:
        """Return the units of every micro-batch, the empty micro-batch included."""
        return np.asarray(self.packed @ self.kind.units + self.kind.pipeline.micro_batch_units)

    def put(self, packed: Int64Array) -> None:
        """Replace the micro-batches, without empty ones."""
        self.packed = packed[packed.any(axis=1)]
        self.time_ns = int(pipeline_times_ns(self.kind.pipeline, self.loads()))


def improve(packings: Sequence[Packing], rounds: int, deadline: Deadline = NEVER) -> list[Packing]:
    """Shorten the slowest replica of a group, one best exchange a round.

    Args:
        packings: the packings of the group's kinds.
        rounds: maximum number of exchanges.
        deadline: no round starts after it.
    """
    replicas = [_Replica(packing.kind, packed) for packing in packings for packed in packing.replicas]
    for replica in replicas:
        replica.put(replica.packed)
    for _ in range(rounds):
        if deadline.passed:
            break
        slow = max(replicas, key=lambda replica: replica.time_ns)
        others = [replica for replica in replicas if replica is not slow]
        others.sort(key=lambda replica: replica.time_ns)
        best: tuple[int, _Replica, Int64Array, Int64Array] | None = None
        for other in (slow, *others[:_OTHERS]):
            exchange = _best_exchange(slow, other)
            if exchange is not None and (best is None or exchange[0] < best[0]):
                best = (exchange[0], other, *exchange[1:])
        if best is None:
            break
        _, other, slow_packed, other_packed = best
        slow.put(slow_packed)
        if other is not slow:
            other.put(other_packed)
    kinds = [packing.kind for packing in packings]
    return [Packing(kind, tuple(replica.packed for replica in replicas if replica.kind is kind)) for kind in kinds]


def _best_exchange(slow: _Replica, other: _Replica) -> tuple[int, Int64Array, Int64Array] | None:
    """Return the exchange with the smallest maximum of both times, if it is below the slow replica's time."""
    slow_packed, other_packed = slow.packed, other.packed
    if not len(other_packed):
        other_packed = np.zeros((1, slow_packed.shape[1]), np.int64)
    candidates = _candidates(slow, other.kind, slow_packed, other_packed, slow is other)
    if not len(candidates):
        return None
    micro_batch, k, target, returned = candidates.T
    rows = np.arange(len(candidates))
    loads_here = np.tile(slow.loads(), (len(candidates), 1))
    loads_here[rows, micro_batch] += _change(slow.kind, k, returned)
    if slow is other:
        loads_here[rows, target] -= _change(slow.kind, k, returned)
        times = pipeline_times_ns(slow.kind.pipeline, loads_here)
    else:
        loads_before = other_packed @ other.kind.units + other.kind.pipeline.micro_batch_units
        loads_there = np.tile(loads_before, (len(candidates), 1))
        loads_there[rows, target] -= _change(other.kind, k, returned)
        times = np.maximum(
            pipeline_times_ns(slow.kind.pipeline, loads_here), pipeline_times_ns(other.kind.pipeline, loads_there)
        )
    for index in np.argsort(times, kind="stable")[:20].tolist():
        if times[index] >= slow.time_ns:
            return None
        first, second = _applied(slow_packed, other_packed, slow is other, candidates[index])
        if in_flight_fits(slow.kind, first) and in_flight_fits(other.kind, second):
            return int(times[index]), first, second
    return None


def _change(kind: Kind, k: Int64Array, returned: Int64Array) -> Int64Array:
    """Return the units that a micro-batch gains by giving away k and receiving ``returned`` (index K: nothing)."""
    units = np.append(kind.units, 0)
    return np.asarray(units[returned] - units[k])


def _candidates(
    slow: _Replica, other: Kind, slow_packed: Int64Array, other_packed: Int64Array, same: bool
) -> Int64Array:
    """List exchanges that keep tokens within the capacities.

    Returns:
        Rows (micro-batch, k given, micro-batch of the other, k received or K for none).
    """
    kind, num_lengths = slow.kind, slow_packed.shape[1]
    lengths = np.append(kind.lengths, 0)
    capacity_here = kind.pipeline.micro_batch_tokens - slow_packed @ kind.lengths
    capacity_there = other.pipeline.micro_batch_tokens - other_packed @ kind.lengths
    give = np.argwhere(slow_packed > 0)
    take = np.argwhere(other_packed > 0)
    take = np.concatenate(
        [take, np.column_stack([np.arange(len(other_packed)), np.full(len(other_packed), num_lengths)])]
    )
    give_index = np.repeat(np.arange(len(give)), len(take))
    take_index = np.tile(np.arange(len(take)), len(give))
    rows = np.column_stack([give[give_index], take[take_index]])
    extra = lengths[rows[:, 1]] - lengths[rows[:, 3]]
    change = _change(kind, rows[:, 1], rows[:, 3])
    fits = (capacity_here[rows[:, 0]] + extra >= 0) & (capacity_there[rows[:, 2]] >= extra)
    # Another replica must take work off the slow one; inside one, work must move at all.
    useful = (change != 0) & (rows[:, 0] != rows[:, 2]) if same else change < 0
    kept = np.flatnonzero(fits & useful)
    return np.asarray(rows[kept[:: max(1, -(-len(kept) // _BATCH))]])


def _applied(
    slow_packed: Int64Array, other_packed: Int64Array, same: bool, candidate: Int64Array
) -> tuple[Int64Array, Int64Array]:
    """Apply an exchange. Returns the micro-batches of both replicas, without empty ones."""
    micro_batch, k, target, returned = candidate.tolist()
    first = slow_packed.copy()
    second = first if same else other_packed.copy()
    first[micro_batch, k] -= 1
    second[target, k] += 1
    if returned < first.shape[1]:
        second[target, returned] -= 1
        first[micro_batch, returned] += 1
    return first[first.any(axis=1)], second[second.any(axis=1)]


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


# Relative distance of the target below the best plan.
_STEP = 2e-4
# Rounds that a reverse move is tabu: this number, and up to twice that at random.
_TABU_ROUNDS = 8
# Maximum moves and swaps evaluated in all rounds together.
_TABU_EFFORT = 12_000_000
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
            if effort > _TABU_EFFORT or best_ns <= cutoff_ns:
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
