"""Edges of every collective on every group of ranks, and the bytes that they carry."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from milpplan.communication.messages import PARALLELISMS, Transport
from milpplan.communication.places import Places
from milpplan.communication.records import Pairs, pairs_of
from milpplan.communication.wires import Algorithm, edges, wire_bytes
from milpplan.errors import InvalidInputError
from milpplan.simulation.layout_columns import FloatArray, IntArray

MAX_PAIRS = 50_000_000
"""Maximum number of edges that are written out (a few GiB)."""


@dataclass(frozen=True, slots=True)
class Wiring:
    """Edges of a collective on all groups of a family, for a message of one byte; arrays [edges]."""

    key: IntArray
    """Pair of GPUs, as ``Wires.key`` encodes it."""
    share: FloatArray
    stage: IntArray
    """Pipeline rank; for transfers, index of the pair of ranks."""
    wire_bytes: FloatArray
    """[pp] bytes of all groups of a pipeline rank in closed form."""


@dataclass(slots=True)
class Wires:
    """Cache of wirings, and the bytes that the parallelisms send over them.

    ``groups`` holds the ranks of every group [pp, groups of a stage, ranks] by name, as each node type shards
    them.
    """

    places: Places
    algorithm: Algorithm
    groups: tuple[dict[str, IntArray], ...]
    cache: dict[tuple[Transport, str, float | None, int | None], Wiring] = field(default_factory=dict)
    sent: dict[str, list[tuple[IntArray, FloatArray]]] = field(default_factory=lambda: defaultdict(list))
    closed: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    edges: int = 0

    def wiring(
        self, operation: Transport, group: str, copies: float | None = None, node_type: int | None = None
    ) -> Wiring:
        """Return the edges of a collective on a family of groups; ``node_type`` selects groups on one type."""
        key = operation, group, copies, node_type
        if key not in self.cache:
            self.cache[key] = self._made(operation, self.groups[node_type or 0][group], copies, node_type)
        return self.cache[key]

    def _made(self, operation: Transport, groups: IntArray, copies: float | None, node_type: int | None) -> Wiring:
        """Build a wiring; groups that are cut by domains in the same way share their edges."""
        stages, number, size = groups.shape
        rows, rank = groups.reshape(-1, size), np.repeat(np.arange(stages), number)
        if node_type is not None:
            on_type = self.places.node_type[rows[:, 0]] == node_type
            rows, rank = rows[on_type], rank[on_type]
        wire = np.zeros(len(rows))
        keys, shares, stage = [np.zeros(0, np.int64)], [np.zeros(0)], [np.zeros(0, np.int64)]
        cuts = np.diff(self.places.domain[rows], axis=1) != 0
        patterns, inverse = np.unique(cuts, axis=0, return_inverse=True)
        for index, pattern in enumerate(patterns):
            ends = [0, *(np.flatnonzero(pattern) + 1).tolist(), size]
            parts = tuple(np.diff(ends).tolist())
            chosen = np.flatnonzero(inverse.reshape(-1) == index)
            channels = min(parts) if len(parts) > 1 else 1
            self._count(len(chosen) * size * (size if operation == "all_to_all" else channels))
            group_edges = edges(operation, self.algorithm, parts, copies)
            keys.append(
                self.key(rows[chosen][:, group_edges.sender], rows[chosen][:, group_edges.receiver]).ravel()
            )
            shares.append(np.tile(group_edges.share, len(chosen)))
            stage.append(np.repeat(rank[chosen], len(group_edges.share)))
            wire[chosen] = wire_bytes(operation, 1.0, parts, copies)
        per_stage = np.bincount(rank, wire, minlength=stages).astype(np.float64)
        return Wiring(np.concatenate(keys), np.concatenate(shares), np.concatenate(stage), per_stage)

    def key(self, sender: IntArray, receiver: IntArray) -> IntArray:
        """Encode pairs of GPUs as integers."""
        return np.asarray(sender * self.places.num_gpus + receiver)

    def _count(self, max_edges: int) -> None:
        """Refuse more edges than memory holds, before they are made."""
        self.edges += max_edges
        if self.edges > MAX_PAIRS:
            raise InvalidInputError(
                f"The traffic has more than {MAX_PAIRS:,} pairs of GPUs.",
                "Expected a plan whose GPUs send to fewer others.",
                "Use a plan on fewer GPUs: the pattern is the same, and repeats.",
            )

    def send(self, parallelism: str, wiring: Wiring, num_bytes: FloatArray) -> None:
        """Add messages of ``num_bytes`` [pp] to a parallelism."""
        self.sent[parallelism].append((wiring.key, wiring.share * num_bytes[wiring.stage]))
        self.closed[parallelism] += float((wiring.wire_bytes * num_bytes).sum())

    def tiers(self, wiring: Wiring) -> FloatArray:
        """Count the bytes by pipeline rank and tier [pp, 2] for a message of one byte."""
        between = self.places.between(*np.divmod(wiring.key, self.places.num_gpus))
        size = len(wiring.wire_bytes)
        counted = np.bincount(wiring.stage * 2 + between, wiring.share, minlength=2 * size)
        return np.asarray(counted.reshape(size, 2), dtype=np.float64)

    def pairs(self) -> dict[str, Pairs]:
        """Sum the sent bytes by pair of GPUs, by parallelism."""
        pairs: dict[str, Pairs] = {}
        for name in PARALLELISMS:
            parts = self.sent.get(name, [])
            key = np.concatenate([np.zeros(0, np.int64), *(part[0] for part in parts)])
            num_bytes = np.concatenate([np.zeros(0), *(part[1] for part in parts)])
            pairs[name] = pairs_of(key[num_bytes > 0], num_bytes[num_bytes > 0], self.places.num_gpus)
        return pairs
