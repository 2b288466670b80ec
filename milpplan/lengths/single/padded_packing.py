"""Micro-batches of sequences of one length each, spread over replicas: packing where sequences are padded.

Heuristic; what it gives is timed exactly (``pool``). Sequences of a length are cut into portions, portions go,
the longest work first, to the replica that would be done first, and each replica then has as few micro-batches
of every length as hold its own, of as equal sizes as whole sequences allow. Large portions keep micro-batches
full, small ones level the replicas: several sizes are tried. With stages the order matters, too: the work of
micro-batches rises, or falls, or falls after the smallest few (as many as there are stages), which fill the
pipeline.
"""

from __future__ import annotations

import heapq

import numpy as np

from milpplan.groups.problem import Kind
from milpplan.simulation.layout_columns import IntArray

Replicas = tuple[IntArray, ...]

# Parts that a full micro-batch is cut into; the last means single sequences.
_PORTIONS = (1, 2, 4, 1 << 62)


def rectangles(kind: Kind, counts: IntArray) -> list[Replicas]:
    """Ways to hold ``counts`` [K] sequences, all of which fit, on the replicas of the kind; each a row of arrays
    [micro-batches, K] of counts."""
    room = _capacity(kind) // kind.lengths
    found = []
    for parts in _PORTIONS:
        held = _spread(kind, counts, np.maximum(1, room // parts))
        rows = [_micro_batches(one, room) for one in held]
        found += [tuple(_ordered(kind, one, way) for one in rows) for way in _ways(kind)]
    return found


def _capacity(kind: Kind) -> int:
    tokens = kind.pipeline.micro_batch_tokens
    return min(tokens, kind.pipeline.in_flight_tokens or tokens)


def _spread(kind: Kind, counts: IntArray, portion: IntArray) -> IntArray:
    """Sequences of every replica, [D, K]; ``portion`` [K] of them at most go together."""
    held = np.zeros((kind.num_replicas, len(counts)), dtype=np.int64)
    own = kind.pipeline.micro_batch_units
    pieces = [
        (int(size * kind.units[k]) + own, k, size)
        for k in range(len(counts))
        for size in _sizes(int(counts[k]), int(portion[k]))
    ]
    done = [(0, replica) for replica in range(kind.num_replicas)]
    for work, k, size in sorted(pieces, reverse=True):
        time, replica = heapq.heappop(done)
        held[replica, k] += size
        heapq.heappush(done, (time + work, replica))
    return held


def _sizes(number: int, most: int) -> list[int]:
    """``number`` in the fewest parts of at most ``most``, as equal as can be."""
    parts = -(-number // most)
    return [number // parts + (place < number % parts) for place in range(parts)]


def _micro_batches(held: IntArray, room: IntArray) -> IntArray:
    """Micro-batches [v, K] of one length each, of at most ``room`` [K] sequences."""
    rows = []
    for k in np.flatnonzero(held).tolist():
        for size in _sizes(int(held[k]), int(room[k])):
            row = np.zeros(len(held), dtype=np.int64)
            row[k] = size
            rows.append(row)
    return np.array(rows, dtype=np.int64).reshape(-1, len(held))


def _ways(kind: Kind) -> tuple[str, ...]:
    return ("falls",) if kind.pipeline.num_stages == 1 else ("rises", "falls", "fills")


def _ordered(kind: Kind, rows: IntArray, way: str) -> IntArray:
    """The micro-batches in the order of their work."""
    order = np.argsort(rows @ kind.units, kind="stable")
    if way == "rises":
        return np.asarray(rows[order])
    first = min(kind.pipeline.num_stages, len(rows) // 2) if way == "fills" else 0
    return np.asarray(rows[np.concatenate([order[:first], order[first:][::-1]])])
