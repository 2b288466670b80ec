"""Sharing sequences among replicas of one stage, where only the sum of a replica's work counts.

Longest first to the replica done first, then exchanges that shorten the slowest. Heuristics: what they give is
timed exactly by ``batch_packing``.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort

import numpy as np

from milpplan.groups.bounds.work_envelope import BatchKind
from milpplan.groups.strategies import FloatArray, Int64Array

# Exchanges made at most.
_EXCHANGES = 40


def capacity(kind: BatchKind) -> int:
    """Most tokens of a micro-batch of one stage."""
    pipeline = kind.table.pipeline
    return min(pipeline.micro_batch_tokens, pipeline.in_flight_tokens or pipeline.micro_batch_tokens)


def by_least_time(kind: BatchKind, units: Int64Array, tokens: Int64Array) -> tuple[list[int], list[int]] | None:
    """Each to the replica done first that has room, into its fullest micro-batch with room or a new one."""
    pipeline = kind.table.pipeline
    most = pipeline.max_micro_batches or units.size
    most_tokens, empty = capacity(kind), pipeline.micro_batch_units
    queue = [(0, replica) for replica in range(kind.num_replicas)]
    # Rooms of each replica's micro-batches, ascending: (tokens left, micro-batch).
    rooms: list[list[tuple[int, int]]] = [[] for _ in queue]
    replicas, places = [], []
    for unit, length in zip(units.tolist(), tokens.tolist(), strict=True):
        passed = []
        while queue:
            load, replica = heapq.heappop(queue)
            mine = rooms[replica]
            if (mine and mine[-1][0] >= length) or len(mine) < most:
                break
            passed.append((load, replica))
        else:
            return None
        fitting = bisect_left(mine, (length, 0))
        if fitting < len(mine):
            room, micro_batch = mine.pop(fitting)
        else:
            room, micro_batch = most_tokens, len(mine)
            load += empty
        insort(mine, (room - length, micro_batch))
        replicas.append(replica)
        places.append(micro_batch)
        for one in (*passed, (load + unit, replica)):
            heapq.heappush(queue, one)
    return replicas, places


def exchange(
    kind: BatchKind, units: Int64Array, tokens: Int64Array, replicas: list[int], places: list[int]
) -> None:
    """Swap or move sequences between the slowest replica and another while that shortens it, in place.

    Only where the micro-batches have room, into one that is there already.
    """
    pipeline = kind.table.pipeline
    where, micro = np.array(replicas), np.array(places)
    held = np.zeros((kind.num_replicas, int(micro.max()) + 1), np.int64)
    np.add.at(held, (where, micro), tokens)
    numbers = (held > 0).sum(axis=1)
    times = np.bincount(where, units, kind.num_replicas) + numbers * pipeline.micro_batch_units
    for _ in range(_EXCHANGES):
        slow = int(times.argmax())
        found = [
            one
            for other in np.argsort(times, kind="stable").tolist()
            if other != slow and (one := _best_swap(kind, units, tokens, where, micro, held, times, slow, other))
        ]
        if not found:
            break
        _, other, mine, theirs, target = min(found)
        change = int(units[mine]) - (int(units[theirs]) if theirs >= 0 else 0)
        moved = int(tokens[mine]) - (int(tokens[theirs]) if theirs >= 0 else 0)
        times[slow] -= change
        times[other] += change
        held[slow, micro[mine]] -= moved
        held[other, target] += moved
        if theirs >= 0:
            where[theirs], micro[theirs] = slow, micro[mine]
        where[mine], micro[mine] = other, target
    replicas[:], places[:] = where.tolist(), micro.tolist()


def _best_swap(
    kind: BatchKind,
    units: Int64Array,
    tokens: Int64Array,
    where: Int64Array,
    micro: Int64Array,
    held: Int64Array,
    times: FloatArray,
    slow: int,
    other: int,
) -> tuple[float, int, int, int, int] | None:
    """(larger time then, other replica, sequence given, sequence taken or -1, micro-batch), if that is shorter."""
    mine, theirs = np.flatnonzero(where == slow), np.flatnonzero(where == other)
    # Swaps with each of theirs, then moves into each of the other's micro-batches.
    open_places = np.flatnonzero(held[other])
    taken = np.concatenate([theirs, np.full(open_places.size, -1)])
    targets = np.concatenate([micro[theirs], open_places])
    back_units = np.concatenate([units[theirs], np.zeros(open_places.size, np.int64)])
    back_tokens = np.concatenate([tokens[theirs], np.zeros(open_places.size, np.int64)])
    change = units[mine][:, None] - back_units[None, :]
    moved = tokens[mine][:, None] - back_tokens[None, :]
    room = capacity(kind)
    fits = (held[other, targets][None, :] + moved <= room) & (held[slow, micro[mine]][:, None] - moved <= room)
    after = np.where(fits, np.maximum(times[slow] - change, times[other] + change), np.inf)
    if not after.size:
        return None
    row, column = np.unravel_index(int(after.argmin()), after.shape)
    least = float(after[row, column])
    if least >= times[slow]:
        return None
    return least, other, int(mine[row]), int(taken[column]), int(targets[column])
