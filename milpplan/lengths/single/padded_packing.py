"""Packing of padded sequences: micro-batches of sequences of one length, spread over replicas.

A heuristic; the results are timed exactly (``strategy_tables``). The sequences of a length are cut into portions,
which go to the replica that would finish first, the largest work first. Each replica then has as few micro-batches
of every length as hold its own sequences, of sizes as equal as possible. Large portions keep micro-batches full,
small ones level the replicas, so several sizes are tried. For pipelines the order matters, too: the work of
micro-batches rises, falls, or falls after the smallest few (as many as there are stages), which fill the pipeline.
"""

from __future__ import annotations

import heapq

import numpy as np

from milpplan.groups.problem import Kind
from milpplan.simulation.layout_columns import IntArray

Replicas = tuple[IntArray, ...]

# Number of portions of a full micro-batch; the last value means single sequences.
_PORTIONS = (1, 2, 4, 1 << 62)


def pack_padded(kind: Kind, counts: IntArray) -> list[Replicas]:
    """Return packings of ``counts`` [K] fitting sequences on the replicas of the kind, as tuples of arrays
    [micro-batches, K]."""
    max_sequences = _capacity(kind) // kind.lengths
    packings = []
    for parts in _PORTIONS:
        spread = _spread(kind, counts, np.maximum(1, max_sequences // parts))
        rows = [_micro_batches(replica_counts, max_sequences) for replica_counts in spread]
        packings += [
            tuple(_ordered(kind, replica_counts, order) for replica_counts in rows) for order in _ways(kind)
        ]
    return packings


def _capacity(kind: Kind) -> int:
    tokens = kind.pipeline.micro_batch_tokens
    return min(tokens, kind.pipeline.in_flight_tokens or tokens)


def _spread(kind: Kind, counts: IntArray, portion: IntArray) -> IntArray:
    """Return the sequences of every replica, [D, K], in portions of at most ``portion`` [K]."""
    spread = np.zeros((kind.num_replicas, len(counts)), dtype=np.int64)
    constant_units = kind.pipeline.micro_batch_units
    pieces = [
        (int(size * kind.units[k]) + constant_units, k, size)
        for k in range(len(counts))
        for size in _sizes(int(counts[k]), int(portion[k]))
    ]
    done = [(0, replica) for replica in range(kind.num_replicas)]
    for work, k, size in sorted(pieces, reverse=True):
        time, replica = heapq.heappop(done)
        spread[replica, k] += size
        heapq.heappush(done, (time + work, replica))
    return spread


def _sizes(number: int, max_size: int) -> list[int]:
    """Split ``number`` into the fewest parts of at most ``max_size``, as equal as possible."""
    parts = -(-number // max_size)
    return [number // parts + (index < number % parts) for index in range(parts)]


def _micro_batches(held: IntArray, max_sequences: IntArray) -> IntArray:
    """Return micro-batches [v, K] of one length each, of at most ``max_sequences`` [K] sequences."""
    rows = []
    for k in np.flatnonzero(held).tolist():
        for size in _sizes(int(held[k]), int(max_sequences[k])):
            row = np.zeros(len(held), dtype=np.int64)
            row[k] = size
            rows.append(row)
    return np.array(rows, dtype=np.int64).reshape(-1, len(held))


def _ways(kind: Kind) -> tuple[str, ...]:
    return ("falls",) if kind.pipeline.num_stages == 1 else ("rises", "falls", "fills")


def _ordered(kind: Kind, rows: IntArray, order_name: str) -> IntArray:
    """Return the micro-batches in the order of their work."""
    order = np.argsort(rows @ kind.units, kind="stable")
    if order_name == "rises":
        return np.asarray(rows[order])
    first = min(kind.pipeline.num_stages, len(rows) // 2) if order_name == "fills" else 0
    return np.asarray(rows[np.concatenate([order[:first], order[first:][::-1]])])
