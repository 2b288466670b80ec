"""Fast packing of one batch: sequences to replicas and micro-batches, one at a time, the longest first.

The constructions of ``packing`` with heaps in place of searches, and best loads from
``work_envelope.PipelineTable``: a few milliseconds for thousands of sequences.

**Replicas of one stage** share sequences by the sum of their work alone: the longest sequence first to the replica
done first, then exchanges that shorten the slowest.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from milpplan.lengths.bounds import BatchKind, around
from milpplan.lengths.tabled import (
    FloatArray,
    Int64Array,
    pipeline_times_ns,
)

# Maximum number of exchanges.
_EXCHANGES = 40


def capacity(kind: BatchKind) -> int:
    """Return the token capacity of a micro-batch of one stage."""
    pipeline = kind.table.pipeline
    return min(pipeline.micro_batch_tokens, pipeline.in_flight_tokens or pipeline.micro_batch_tokens)


def by_least_time(kind: BatchKind, units: Int64Array, tokens: Int64Array) -> tuple[list[int], list[int]] | None:
    """Put each sequence on the replica with capacity that is done first, into its fullest fitting micro-batch or a
    new one.

    Returns:
        Replicas and micro-batches of the sequences; None if one does not fit.
    """
    pipeline = kind.table.pipeline
    max_micro_batches = pipeline.max_micro_batches or units.size
    capacity_tokens, empty = capacity(kind), pipeline.micro_batch_units
    queue = [(0, replica) for replica in range(kind.num_replicas)]
    # Free tokens of each replica's micro-batches, ascending: (free tokens, micro-batch).
    free_tokens: list[list[tuple[int, int]]] = [[] for _ in queue]
    replicas, micro_batches = [], []
    for unit, length in zip(units.tolist(), tokens.tolist(), strict=True):
        full_replicas = []
        while queue:
            load, replica = heapq.heappop(queue)
            own_free = free_tokens[replica]
            if (own_free and own_free[-1][0] >= length) or len(own_free) < max_micro_batches:
                break
            full_replicas.append((load, replica))
        else:
            return None
        fitting = bisect_left(own_free, (length, 0))
        if fitting < len(own_free):
            free, micro_batch = own_free.pop(fitting)
        else:
            free, micro_batch = capacity_tokens, len(own_free)
            load += empty
        insort(own_free, (free - length, micro_batch))
        replicas.append(replica)
        micro_batches.append(micro_batch)
        for entry in (*full_replicas, (load + unit, replica)):
            heapq.heappush(queue, entry)
    return replicas, micro_batches


def exchange(
    kind: BatchKind, units: Int64Array, tokens: Int64Array, replicas: list[int], micro_batches: list[int]
) -> None:
    """Swap or move sequences between the slowest replica and another while that shortens the slowest, in place.

    Sequences only go into existing micro-batches with capacity.
    """
    pipeline = kind.table.pipeline
    replica_of, micro_batch_of = np.array(replicas), np.array(micro_batches)
    token_sums = np.zeros((kind.num_replicas, int(micro_batch_of.max()) + 1), np.int64)
    np.add.at(token_sums, (replica_of, micro_batch_of), tokens)
    numbers = (token_sums > 0).sum(axis=1)
    times = np.bincount(replica_of, units, kind.num_replicas) + numbers * pipeline.micro_batch_units
    for _ in range(_EXCHANGES):
        slow = int(times.argmax())
        swaps = [
            swap
            for other in np.argsort(times, kind="stable").tolist()
            if other != slow
            and (
                swap := _best_swap(kind, units, tokens, replica_of, micro_batch_of, token_sums, times, slow, other)
            )
        ]
        if not swaps:
            break
        _, other, given, taken, target = min(swaps)
        change = int(units[given]) - (int(units[taken]) if taken >= 0 else 0)
        moved = int(tokens[given]) - (int(tokens[taken]) if taken >= 0 else 0)
        times[slow] -= change
        times[other] += change
        token_sums[slow, micro_batch_of[given]] -= moved
        token_sums[other, target] += moved
        if taken >= 0:
            replica_of[taken], micro_batch_of[taken] = slow, micro_batch_of[given]
        replica_of[given], micro_batch_of[given] = other, target
    replicas[:], micro_batches[:] = replica_of.tolist(), micro_batch_of.tolist()


def _best_swap(
    kind: BatchKind,
    units: Int64Array,
    tokens: Int64Array,
    replica_of: Int64Array,
    micro_batch_of: Int64Array,
    token_sums: Int64Array,
    times: FloatArray,
    slow: int,
    other: int,
) -> tuple[float, int, int, int, int] | None:
    """Find the best swap or move between two replicas.

    Returns:
        (larger time after it, other replica, sequence given, sequence taken or -1, micro-batch); None if no swap
        is faster.
    """
    slow_items, other_items = np.flatnonzero(replica_of == slow), np.flatnonzero(replica_of == other)
    # Swaps with each of theirs, then moves into each of the other's micro-batches.
    open_micro_batches = np.flatnonzero(token_sums[other])
    taken = np.concatenate([other_items, np.full(open_micro_batches.size, -1)])
    targets = np.concatenate([micro_batch_of[other_items], open_micro_batches])
    returned_units = np.concatenate([units[other_items], np.zeros(open_micro_batches.size, np.int64)])
    returned_tokens = np.concatenate([tokens[other_items], np.zeros(open_micro_batches.size, np.int64)])
    change = units[slow_items][:, None] - returned_units[None, :]
    moved = tokens[slow_items][:, None] - returned_tokens[None, :]
    capacity_tokens = capacity(kind)
    fits = (token_sums[other, targets][None, :] + moved <= capacity_tokens) & (
        token_sums[slow, micro_batch_of[slow_items]][:, None] - moved <= capacity_tokens
    )
    times_after = np.where(fits, np.maximum(times[slow] - change, times[other] + change), np.inf)
    if not times_after.size:
        return None
    row, column = np.unravel_index(int(times_after.argmin()), times_after.shape)
    best_time = float(times_after[row, column])
    if best_time >= times[slow]:
        return None
    return best_time, other, int(slow_items[row]), int(taken[column]), int(targets[column])


# Numbers of micro-batches tried, most promising first; one number with more than _MANY sequences.
_TRIES = 2
_MANY = 1024
# Numbers of micro-batches simulated with real loads: the best by the bounds, and as many from the minimum on.
_SIMULATED = 5
# Maximum share of a micro-batch's tokens in real loads.
_FULL = 0.96
# Replicas of one stage with at most this many sequences each, on average, exchange sequences.
_FEW = 48
# Numbers of micro-batches with a capacity below this multiple of the tokens are tried last.
_LOOSE = 1.02


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """Replica and micro-batch of each sequence [n] of one kind, and the replicas' times [D]."""

    replica: Int64Array
    micro_batch: Int64Array
    times_ns: Int64Array

    @property
    def time_ns(self) -> int:
        """Time of the slowest replica, ns."""
        return int(self.times_ns.max(initial=0))


# Indices of the sequences of a kind, and their placement.
PlacedIndices = tuple[Int64Array, Placed]


def place(kind: BatchKind, length_indices: Int64Array, lengths: Int64Array) -> Placed | None:
    """Place sequences of the lengths ``lengths[length_indices]`` [n] on the replicas of a kind.

    Returns:
        The placement; None if no packing was found.
    """
    if not length_indices.size:
        return Placed(length_indices, length_indices, np.zeros(kind.num_replicas, np.int64))
    units, tokens = kind.units[length_indices], lengths[length_indices]
    order = np.lexsort((np.arange(length_indices.size), -tokens))
    if kind.table.pipeline.num_stages == 1:
        assignment = by_least_time(kind, units[order], tokens[order])
        if assignment is None:
            return None
        if length_indices.size <= _FEW * kind.num_replicas:
            exchange(kind, units[order], tokens[order], *assignment)
        return _timed(kind, units, order, *assignment)
    placements = place_around(kind, length_indices, lengths, slice(1))
    tries = _TRIES if length_indices.size <= _MANY else 1
    for shares in _promising(kind, units, tokens):
        filled = _by_shares(kind, units[order], tokens[order], shares)
        placed = None if filled is None else _timed(kind, units, order, *filled)
        if placed is not None and _in_flight_fits(kind, tokens, placed):
            placements.append(placed)
            tries -= 1
        if not tries:
            break
    return min(placements, key=lambda placed: placed.time_ns, default=None)


def place_into(kind: BatchKind, length_indices: Int64Array, lengths: Int64Array, number: int) -> Placed | None:
    """Place sequences in at most ``number`` micro-batches a replica; None if they do not fit."""
    load = float(kind.units[length_indices].sum()) / kind.num_replicas
    return _place_by(kind, length_indices, lengths, kind.table.shape(number, load))


def place_around(
    kind: BatchKind, length_indices: Int64Array, lengths: Int64Array, selected: slice
) -> list[Placed]:
    """Place sequences around the longest, where the best loads without it are all below it.

    ``selected`` is a slice of two shapes of loads, most likely first.
    """
    units = kind.units[length_indices]
    # The work of all sequences may be 0.
    share = float(units.max()) * kind.num_replicas / max(1.0, float(units.sum()))
    max_micro_batches = min(units.size, kind.table.pipeline.max_micro_batches or units.size)
    shapes = [shape for shape in around(kind.table.peaks, share) if shape.size <= max_micro_batches]
    placements = (_place_by(kind, length_indices, lengths, shape) for shape in shapes[selected])
    return [placed for placed in placements if placed is not None]


def _place_by(
    kind: BatchKind, length_indices: Int64Array, lengths: Int64Array, shares: FloatArray
) -> Placed | None:
    """Place sequences in micro-batches of these shares of a replica's load, as far as tokens allow."""
    units, tokens = kind.units[length_indices], lengths[length_indices]
    order = np.lexsort((np.arange(length_indices.size), -tokens))
    tokens_per_replica = float(tokens.sum()) / kind.num_replicas
    cap = max(_FULL * kind.table.pipeline.micro_batch_tokens / tokens_per_replica, 1.0 / shares.size)
    filled = _by_shares(kind, units[order], tokens[order], _capped(shares, min(1.0, cap)))
    placed = None if filled is None else _timed(kind, units, order, *filled)
    return placed if placed is not None and _in_flight_fits(kind, tokens, placed) else None


def place_together(
    kinds: Sequence[BatchKind], length_indices: Int64Array, lengths: Int64Array
) -> list[PlacedIndices] | None:
    """Place sequences on replicas of one stage of several kinds at once, if each kind alone has no packing.

    Longest first, each to the replica with capacity that is done first.

    Returns:
        The sequences of every kind with their placement; None if one does not fit.
    """
    replicas = [(j, r) for j, kind in enumerate(kinds) for r in range(kind.num_replicas)]
    units = np.array([kinds[j].units for j, _ in replicas])
    empty = np.array([kinds[j].table.pipeline.micro_batch_units for j, _ in replicas])
    parts = np.array([kinds[j].table.pipeline.parts for j, _ in replicas])
    capacities = np.array([capacity(kinds[j]) for j, _ in replicas])
    max_micro_batches = np.array(
        [kinds[j].table.pipeline.max_micro_batches or length_indices.size for j, _ in replicas]
    )
    loads, free_tokens, numbers = (np.zeros(len(replicas), np.int64) for _ in range(3))
    order = np.lexsort((np.arange(length_indices.size), -lengths[length_indices]))
    chosen, micro_batches = np.empty_like(order), np.empty_like(order)
    for index in order.tolist():
        k, length = int(length_indices[index]), int(lengths[length_indices[index]])
        fits = free_tokens >= length
        opens = (numbers < max_micro_batches) & (capacities >= length)
        end_times = np.where(fits | opens, (loads + units[:, k] + np.where(fits, 0, empty)) * parts, np.inf)
        chosen_replica = int(end_times.argmin())
        if not np.isfinite(end_times[chosen_replica]):
            return None
        if not fits[chosen_replica]:
            # The last micro-batch is closed, since sequences come in falling length.
            loads[chosen_replica] += empty[chosen_replica]
            free_tokens[chosen_replica] = capacities[chosen_replica]
            numbers[chosen_replica] += 1
        loads[chosen_replica] += units[chosen_replica, k]
        free_tokens[chosen_replica] -= length
        chosen[index], micro_batches[index] = chosen_replica, numbers[chosen_replica] - 1
    kind_of = np.array([j for j, _ in replicas])[chosen]
    replica_in_kind = np.array([r for _, r in replicas])[chosen]
    placements: list[PlacedIndices] = []
    for j, kind in enumerate(kinds):
        members = np.flatnonzero(kind_of == j)
        if members.size:
            arguments = (
                kind.units[length_indices[members]],
                np.arange(members.size),
                replica_in_kind[members].tolist(),
                micro_batches[members].tolist(),
            )
            placements.append((members, _timed(kind, *arguments)))
        else:
            placements.append((members, Placed(members, members, np.zeros(kind.num_replicas, np.int64))))
    return placements


def _timed(
    kind: BatchKind, units: Int64Array, order: Int64Array, replicas: list[int], micro_batches: list[int]
) -> Placed:
    """Build the placement in the order of the sequences, without empty micro-batches, with exact times."""
    replica, micro_batch = np.empty_like(order), np.empty_like(order)
    replica[order], micro_batch[order] = replicas, micro_batches
    shape = (kind.num_replicas, int(micro_batch.max()) + 1)
    flat = replica * shape[1] + micro_batch
    used = np.bincount(flat, minlength=shape[0] * shape[1]).reshape(shape) > 0
    # Empty micro-batches do not run.
    micro_batch = (np.cumsum(used, axis=1) - 1)[replica, micro_batch]
    loads = np.zeros(shape, np.int64)
    np.add.at(loads, (replica, micro_batch), units)
    numbers = used.sum(axis=1)
    pipeline = kind.table.pipeline
    times = np.zeros(shape[0], np.int64)
    for number in np.unique(numbers[numbers > 0]).tolist():
        rows = numbers == number
        times[rows] = pipeline_times_ns(pipeline, loads[rows, :number] + pipeline.micro_batch_units)
    return Placed(replica, micro_batch, times)


def _promising(kind: BatchKind, units: Int64Array, tokens: Int64Array) -> list[FloatArray]:
    """Return best loads of a replica [v] as shares of the total, most promising number of micro-batches first.

    Where tokens and not units fill micro-batches, more of them allow uneven loads: simulation of real loads within
    the tokens shows the best number. Larger numbers follow, for batches that are hard to pack.
    """
    pipeline = kind.table.pipeline
    load = float(units.sum()) / kind.num_replicas
    tokens_each = float(tokens.sum()) / kind.num_replicas
    fewest = max(1, math.ceil(tokens_each / pipeline.micro_batch_tokens))
    largest = min(units.size, pipeline.max_micro_batches or units.size)
    if fewest > largest:
        return []
    times = {number: kind.time_with(number, load) for number in kind.table.slots if fewest <= number <= largest}
    candidates = sorted(times, key=lambda number: (times[number], number))[:_SIMULATED]
    candidates += [number for number in range(fewest, fewest + _SIMULATED) if number <= largest]
    numbers = sorted(set(candidates))
    # Real loads stay within the tokens, slightly below the capacity.
    caps = pipeline.micro_batch_tokens / tokens_each
    shapes = [kind.table.shape(number, load) for number in numbers]
    capped = [_capped(shape, min(1.0, max(_FULL * caps, 1.0 / shape.size))) for shape in shapes]
    loads = np.zeros((len(capped), numbers[-1]))
    for row, shares in zip(loads, capped, strict=True):
        # Empty micro-batches in front only add transfers.
        row[-shares.size :] = shares * load + pipeline.micro_batch_units
    simulated = pipeline_times_ns(pipeline, np.rint(loads).astype(np.int64))
    # A number of micro-batches that tokens fill completely is hard to pack.
    tight = [caps * number < _LOOSE for number in numbers]
    ranked = [capped[i] for i in sorted(range(len(capped)), key=lambda i: (tight[i], int(simulated[i])))]
    larger = [min(largest, number) for number in (numbers[-1] + 1, 2 * numbers[-1], largest)]
    return [*ranked, *(np.full(number, 1.0 / number) for number in larger)]


def _capped(shares: FloatArray, cap: float) -> FloatArray:
    """Cap shares [v], and give the excess to the others in proportion."""
    for _ in range(shares.size):
        over = shares > cap * (1 + 1e-9)
        if not over.any():
            break
        shares = np.minimum(shares, cap)
        free = shares < cap
        shares[free] *= max(0.0, 1.0 - cap * int((~free).sum())) / max(1e-12, float(shares[free].sum()))
    return shares


def _by_shares(
    kind: BatchKind, units: Int64Array, tokens: Int64Array, shares: FloatArray
) -> tuple[list[int], list[int]] | None:
    """Put each sequence into the micro-batch furthest below its best load that has capacity for the tokens."""
    total = int(units.sum())
    longest = shares.max() * total / kind.num_replicas
    num_long = int((units > longest).sum())
    # Units fall with the tokens, so the long sequences come first.
    long_placed = _place_long(kind, units[:num_long], shares)
    targets, capacities = _targets(kind, shares, long_placed, units, tokens)
    if targets is None:
        return None
    replicas = [replica for replica, _ in long_placed]
    micro_batches = [micro_batch for _, micro_batch in long_placed]
    # Micro-batches are numbered by replica, then by index in the replica.
    queue = [(-target, number) for number, target in enumerate(targets.ravel().tolist())]
    heapq.heapify(queue)
    free_tokens = capacities.ravel().tolist()
    # Micro-batches without capacity for a sequence of this length are parked until shorter ones come.
    parked: list[tuple[int, float, int]] = []
    numbers: list[int] = []
    for unit, length in zip(units[num_long:].tolist(), tokens[num_long:].tolist(), strict=True):
        while parked and -parked[0][0] >= length:
            heapq.heappush(queue, heapq.heappop(parked)[1:])
        while queue and free_tokens[queue[0][1]] < length:
            missing, number = heapq.heappop(queue)
            heapq.heappush(parked, (-free_tokens[number], missing, number))
        if not queue:
            return None
        missing, number = queue[0]
        free_tokens[number] -= length
        heapq.heapreplace(queue, (missing + unit, number))
        numbers.append(number)
    replicas += [number // shares.size for number in numbers]
    micro_batches += [number % shares.size for number in numbers]
    return replicas, micro_batches


def _place_long(kind: BatchKind, units: Int64Array, shares: FloatArray) -> list[tuple[int, int]]:
    """Place sequences that are longer than any micro-batch's best load.

    Each goes to the replica with the smallest load, into its micro-batch of the highest best load.

    Returns:
        (replica, micro-batch) by sequence.
    """
    order = np.argsort(-shares, kind="stable").tolist()
    queue = [(0, replica) for replica in range(kind.num_replicas)]
    counts = [0] * kind.num_replicas
    placed = []
    for unit in units.tolist():
        load, replica = queue[0]
        heapq.heapreplace(queue, (load + unit, replica))
        placed.append((replica, order[counts[replica] % shares.size]))
        counts[replica] += 1
    return placed


def _targets(
    kind: BatchKind, shares: FloatArray, long_placed: list[tuple[int, int]], units: Int64Array, tokens: Int64Array
) -> tuple[FloatArray | None, Int64Array]:
    """Compute the missing units and the free tokens of every micro-batch, [D, v].

    Returns:
        Both; no units if the long sequences do not fit.
    """
    shape = (kind.num_replicas, shares.size)
    pipeline = kind.table.pipeline
    long_units, long_tokens = np.zeros(shape), np.zeros(shape, np.int64)
    for (replica, micro_batch), unit, length in zip(long_placed, units.tolist(), tokens.tolist(), strict=False):
        long_units[replica, micro_batch] += unit
        long_tokens[replica, micro_batch] += length
    capacities = pipeline.micro_batch_tokens - long_tokens
    if pipeline.in_flight_tokens is not None:
        capacities = np.minimum(
            capacities, _in_flight_capacities(pipeline.in_flight_tokens, pipeline.num_stages, long_tokens)
        )
    if (capacities < 0).any():
        return None, capacities
    loads = _levelled(long_units.sum(axis=1), float(units[len(long_placed) :].sum()))
    free = np.where(long_units > 0, 0.0, shares[None, :])
    total = free.sum(axis=1, keepdims=True)
    missing = (loads - long_units.sum(axis=1))[:, None]
    targets = np.divide(free * missing, total, out=np.zeros(shape), where=total > 0)
    return targets, capacities


def _levelled(present: FloatArray, added: float) -> FloatArray:
    """Return loads [D] after ``added`` is poured onto the smallest loads ``present``."""
    ascending = np.sort(present)
    numbers = np.arange(1, present.size + 1)
    levels = (np.cumsum(ascending) + added) / numbers
    # The replicas below the level rise to it; the level is below the load of the next replica.
    count = int(np.flatnonzero(np.append(levels[:-1] <= ascending[1:], True))[0])
    return np.asarray(np.maximum(present, levels[count]))


def _in_flight_capacities(limit: int, num_stages: int, long_tokens: Int64Array) -> Int64Array:
    """Return the tokens [D, v] that fit beside the long sequences: an even part of each window's remainder."""
    number = long_tokens.shape[1]
    width = min(num_stages, number)
    starts = np.arange(number - width + 1)
    capacities = np.full(long_tokens.shape, limit, np.int64)
    for start in starts.tolist():
        window = slice(start, start + width)
        num_open = (long_tokens[:, window] == 0).sum(axis=1)
        remainder = limit - long_tokens[:, window].sum(axis=1)
        even_part = np.where(remainder < 0, remainder, remainder // np.maximum(1, num_open))
        capacities[:, window] = np.minimum(capacities[:, window], even_part[:, None])
    # A micro-batch with a long sequence takes no other.
    return np.where(long_tokens > 0, np.minimum(capacities, 0), capacities)


def _in_flight_fits(kind: BatchKind, tokens: Int64Array, placed: Placed) -> bool:
    """Check that every ``num_stages`` consecutive micro-batches fit in the tokens in flight."""
    limit = kind.table.pipeline.in_flight_tokens
    if limit is None:
        return True
    shape = (kind.num_replicas, int(placed.micro_batch.max()) + 1)
    token_sums = np.zeros(shape, np.int64)
    np.add.at(token_sums, (placed.replica, placed.micro_batch), tokens)
    sums = np.concatenate([np.zeros((shape[0], 1), np.int64), np.cumsum(token_sums, axis=1)], axis=1)
    width = min(kind.table.pipeline.num_stages, shape[1])
    return bool((sums[:, width:] - sums[:, :-width] <= limit).all())
