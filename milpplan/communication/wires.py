"""Who sends how much to whom in one collective: the edges of rings, trees, hierarchies and all-to-alls.

A group's ranks are numbered 0 .. n - 1 in ascending order; ``parts`` are the numbers of consecutive ones that
share a domain. Edges carry shares of the message; their sum is what ``wire_bytes`` says in closed form.
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
    """Sender and receiver, numbers in the group, and the share of the message between them; arrays [e]."""

    sender: IntArray
    receiver: IntArray
    share: FloatArray


def wire_bytes(
    operation: Transport, num_bytes: float, parts: tuple[int, ...], copies: float | None = None
) -> float:
    """Bytes that all ranks of a group send together.

    n * factor * bytes (``collectives.wire_factor``) whatever the algorithm; all-to-all as ``all_to_all_bytes``, of
    every rank with the members of its own domain; ``send``: n * bytes around the ring. Nothing for one rank.
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
    """The edges of one collective. Trees serve all-reduces only, and hierarchies groups with as many members in
    every domain; the other collectives of these algorithms are rings, as in NCCL."""
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


def _joined(found: list[Edges]) -> Edges:
    return Edges(*(np.concatenate(columns) for columns in zip(*found, strict=True)))


def _cycle(order: IntArray, share: float) -> Edges:
    """From each rank to the next, and from the last to the first."""
    return Edges(order, np.roll(order, -1), np.full(len(order), share))


def _domains(parts: tuple[int, ...]) -> list[IntArray]:
    """Numbers of the ranks in each domain."""
    return [np.arange(low, high) for low, high in pairwise((0, *accumulate(parts)))]


def _rings(operation: Operation, parts: tuple[int, ...]) -> Edges:
    """One ring inside a domain. Across domains as many as the smallest part has members, each with its share of
    the message: ring c enters a domain at member c and leaves it at member c - 1, and the other way round in every
    second domain, so that neighbours in different domains have the same place there (NCCL_CROSS_NIC)."""
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
    """Parent of a node of a binary tree whose in-order numbers are 0 .. count - 1; -1 for the root, 0."""
    if node == 0:
        return -1
    low = node & -node
    up = (node ^ low) | (low << 1)
    return up if up < count else node ^ low


def _double_tree(parts: tuple[int, ...]) -> Edges:
    """Two binary trees over the domains, each for half of the message, up and down; inside a domain a chain from
    the member that stands in the tree. The leaves of one tree are inner nodes of the other.

    Source: Sanders, Speck and Traeff 2009 (two-tree algorithms); NCCL's tree algorithm.
    """
    domains, count = _domains(parts), len(parts)
    pairs: list[tuple[int, int]] = []
    for tree in range(2):
        chains = [np.roll(domain, -(tree % len(domain))) for domain in domains]
        for number, chain in enumerate(chains):
            pairs += zip(chain[1:].tolist(), chain[:-1].tolist(), strict=True)
            # The second tree numbers the domains backwards, or one further where their number is odd.
            place = number if tree == 0 else (number - 1) % count if count % 2 else count - 1 - number
            up = _parent(place, count)
            if up >= 0:
                above = up if tree == 0 else (up + 1) % count if count % 2 else count - 1 - up
                pairs.append((int(chain[0]), int(chains[above][0])))
    child, parent = np.array(pairs, dtype=np.int64).T
    half = np.full(2 * len(child), 0.5)
    return Edges(np.concatenate([child, parent]), np.concatenate([parent, child]), half)


def _hierarchy(operation: Operation, parts: tuple[int, ...]) -> Edges:
    """Rings inside every domain, and one of all ranks with the same place: scattered inside before, gathered
    inside after what crosses, (k - 1) / k and (d - 1) / n of the message for each pass."""
    table = np.arange(sum(parts)).reshape(len(parts), -1)
    domains, members = table.shape
    passes = PASSES[operation]
    found = [_cycle(row, passes * (members - 1) / members) for row in table if members > 1]
    found += [_cycle(column, passes * (domains - 1) / table.size) for column in table.T if domains > 1]
    return _joined(found)


def _all_to_all(parts: tuple[int, ...], copies: float | None) -> Edges:
    """Every rank to every other, an n-th of what it sends. With ``copies`` across domains: once to the rank with
    the sender's place in every other domain (modulo its members), which passes them on."""
    size, domains = sum(parts), _domains(parts)
    everyone = np.arange(size)
    sender, receiver = (axis.ravel() for axis in np.meshgrid(everyone, everyone, indexing="ij"))
    if copies is None or len(parts) == 1:
        other = sender != receiver
        return Edges(sender[other], receiver[other], np.full(int(other.sum()), 1 / size))
    spread = float(copies_sent(np.array(len(parts)), copies))
    home = np.repeat(np.arange(len(parts)), parts)
    place = everyone - np.array([domains[number][0] for number in home])
    inside = (home[sender] == home[receiver]) & (sender != receiver)
    found = [Edges(sender[inside], receiver[inside], np.full(int(inside.sum()), 1 / size))]
    for number, domain in enumerate(domains):
        away = everyone[home != number]
        relay = domain[place[away] % len(domain)]
        found.append(Edges(away, relay, np.full(len(away), spread * len(domain) / size)))
        handed = np.bincount(relay - domain[0], minlength=len(domain)) / size
        within = inside & (home[sender] == number)
        found.append(Edges(sender[within], receiver[within], handed[place[sender[within]]]))
    return _joined(found)
