"""Sharing of sequences among replicas of one stage, where only the sum of a replica's work counts.

Longest sequence first to the replica done first, then exchanges that shorten the slowest. Heuristics: plans are
timed exactly by ``batch_packing``.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort

import numpy as np

from milpplan.groups.bounds.work_envelope import BatchKind
from milpplan.groups.strategies import FloatArray, Int64Array

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
