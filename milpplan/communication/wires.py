"""Edges of a collective between the ranks of a group: rings, trees, hierarchies and all-to-alls.

A group's ranks are numbered 0 .. n - 1 in ascending order; ``parts`` are the numbers of consecutive ranks in each
domain. Edges carry shares of the message; their sum equals ``wire_bytes``, which is in closed form.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

import numpy as np

from milpplan.communication.messages import Transport
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
