"""Edges of every collective on every group of ranks: rings, trees, hierarchies and all-to-alls.

A group's ranks are numbered 0 .. n - 1 in ascending order; ``parts`` are the numbers of consecutive ranks in each
domain. Edges carry shares of the message; their sum equals ``wire_bytes``, which is in closed form.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

import numpy as np

from milpplan.communication.messages import PARALLELISMS, Transport
from milpplan.communication.rank_lists import Places
from milpplan.communication.records import Pairs, pairs_of
from milpplan.errors import InvalidInputError
from milpplan.simulation.layout_columns import FloatArray, IntArray
from milpplan.simulation.network.collectives import PASSES, Operation, all_to_all_bytes, copies_sent, wire_factor

Algorithm = Literal["ring", "tree", "hierarchical"]
ALGORITHMS: tuple[Algorithm, ...] = ("ring", "tree", "hierarchical")


class Edges(NamedTuple):
    """Edges of a collective, arrays [e]."""

    sender: IntArray
    """Number of the sender in the group."""
    receiver: IntArray
    """Number of the receiver in the group."""
    share: FloatArray
    """Share of the message that the edge carries."""


def wire_bytes(
    operation: Transport, num_bytes: float, parts: tuple[int, ...], copies: float | None = None
) -> float:
    """Count the bytes that all ranks of a group send together.

    n * factor * bytes (``collectives.wire_factor``) for every algorithm; all-to-all: the sum of
    ``all_to_all_bytes`` over the ranks, each with the members of its own domain; ``send``: n * bytes around the
    ring. 0 for a single rank.
    """
    size = sum(parts)
    if size == 1:
        return 0.0
    if operation == "send":
        return size * num_bytes
    if operation != "all_to_all" or len(parts) == 1:
        return size * num_bytes * float(wire_factor(operation, np.array(size)))
    members = np.array(parts, dtype=np.int64)
    domains = np.array(len(parts))
    network, links = all_to_all_bytes(np.array(num_bytes), np.array(size), members, domains, copies)
    return float((members * (network + links)).sum())


@lru_cache(maxsize=256)
def edges(
    operation: Transport,
    algorithm: Algorithm,
    parts: tuple[int, ...],
    copies: float | None = None,
) -> Edges:
    """Build the edges of a collective.

    Trees apply to all-reduces only, and hierarchies to groups with equally many members in every domain. All other
    collectives of these algorithms are rings, as in NCCL.
    """
    size = sum(parts)
    if size == 1:
        return Edges(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))
    if operation == "send":
        return _cycle(np.arange(size), 1.0)
    if operation == "all_to_all":
        return _all_to_all(parts, copies)
    if algorithm == "tree" and operation == "all_reduce":
        return _double_tree(parts)
    if algorithm == "hierarchical" and len(set(parts)) == 1:
        return _hierarchy(operation, parts)
    return _rings(operation, parts)


def _joined(parts: list[Edges]) -> Edges:
    """Concatenate edges."""
    return Edges(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def _cycle(order: IntArray, share: float) -> Edges:
    """Connect each rank to the next, and the last rank to the first."""
    return Edges(order, np.roll(order, -1), np.full(len(order), share))


def _domains(parts: tuple[int, ...]) -> list[IntArray]:
    """List the ranks of each domain."""
    return [np.arange(low, high) for low, high in pairwise((0, *accumulate(parts)))]


def _rings(operation: Operation, parts: tuple[int, ...]) -> Edges:
    """Build a ring inside a domain, or several rings across domains.

    Across domains there are as many rings as the smallest part has members, each with its share of the message.
    Ring c enters a domain at member c and leaves it at member c - 1, and the other way round in every second
    domain. So neighbours in different domains have the same position in their domains (NCCL_CROSS_NIC).
    """
    domains, size = _domains(parts), sum(parts)
    count = min(parts) if len(parts) > 1 else 1
    share = float(wire_factor(operation, np.array(size))) / count
    rings = []
    for channel in range(count):
        order = [
            np.roll(domain, -channel) if number % 2 == 0 else np.roll(domain, -channel)[::-1]
            for number, domain in enumerate(domains)
        ]
        rings.append(_cycle(np.concatenate(order), share))
    return _joined(rings)


def _parent(node: int, count: int) -> int:
    """Return the parent of a node in a binary tree with in-order numbers 0 .. count - 1; -1 for the root, 0."""
    if node == 0:
        return -1
    low = node & -node
    up = (node ^ low) | (low << 1)
    return up if up < count else node ^ low


def _double_tree(parts: tuple[int, ...]) -> Edges:
    """Build two binary trees over the domains, each for half of the message, up and down.

    Inside a domain, a chain starts at the member that is a node of the tree. The leaves of each tree are inner
    nodes of the other tree.

    Source: Sanders, Speck and Traeff 2009 (two-tree algorithms); NCCL's tree algorithm.
    """
    domains, count = _domains(parts), len(parts)
    pairs: list[tuple[int, int]] = []
    for tree in range(2):
        chains = [np.roll(domain, -(tree % len(domain))) for domain in domains]
        for number, chain in enumerate(chains):
            pairs += zip(chain[1:].tolist(), chain[:-1].tolist(), strict=True)
            # The second tree numbers the domains backwards, or shifts them by one if their number is odd.
            node = number if tree == 0 else (number - 1) % count if count % 2 else count - 1 - number
            up = _parent(node, count)
            if up >= 0:
                above = up if tree == 0 else (up + 1) % count if count % 2 else count - 1 - up
                pairs.append((int(chain[0]), int(chains[above][0])))
    child, parent = np.array(pairs, dtype=np.int64).T
    half = np.full(2 * len(child), 0.5)
    return Edges(np.concatenate([child, parent]), np.concatenate([parent, child]), half)


def _hierarchy(operation: Operation, parts: tuple[int, ...]) -> Edges:
    """Build a ring inside every domain, and rings across domains of the ranks with the same position.

    The message is scattered inside before it crosses domains, and gathered inside afterwards. Each pass moves
    (k - 1) / k of the message inside and (d - 1) / n across.
    """
    table = np.arange(sum(parts)).reshape(len(parts), -1)
    domains, members = table.shape
    passes = PASSES[operation]
    rings = [_cycle(row, passes * (members - 1) / members) for row in table if members > 1]
    rings += [_cycle(column, passes * (domains - 1) / table.size) for column in table.T if domains > 1]
    return _joined(rings)


def _all_to_all(parts: tuple[int, ...], copies: float | None) -> Edges:
    """Connect every rank to every other rank, with an n-th of its bytes.

    With ``copies`` across domains, a rank sends once to every other domain, to the rank with the sender's position
    in that domain (modulo its members), which passes the copies on.
    """
    size, domains = sum(parts), _domains(parts)
    everyone = np.arange(size)
    sender, receiver = (axis.ravel() for axis in np.meshgrid(everyone, everyone, indexing="ij"))
    if copies is None or len(parts) == 1:
        other = sender != receiver
        return Edges(sender[other], receiver[other], np.full(int(other.sum()), 1 / size))
    copies_share = float(copies_sent(np.array(len(parts)), copies))
    domain_of = np.repeat(np.arange(len(parts)), parts)
    position = everyone - np.array([domains[number][0] for number in domain_of])
    inside = (domain_of[sender] == domain_of[receiver]) & (sender != receiver)
    parts_of_edges = [Edges(sender[inside], receiver[inside], np.full(int(inside.sum()), 1 / size))]
    for number, domain in enumerate(domains):
        outside = everyone[domain_of != number]
        relay = domain[position[outside] % len(domain)]
        parts_of_edges.append(Edges(outside, relay, np.full(len(outside), copies_share * len(domain) / size)))
        relayed = np.bincount(relay - domain[0], minlength=len(domain)) / size
        within = inside & (domain_of[sender] == number)
        parts_of_edges.append(Edges(sender[within], receiver[within], relayed[position[sender[within]]]))
    return _joined(parts_of_edges)


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
