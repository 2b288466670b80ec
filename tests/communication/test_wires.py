"""Edges of collectives: sums, who receives what, and what crosses domains."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milpplan.communication.wires import ALGORITHMS, Algorithm, edges, wire_bytes
from milpplan.simulation.network import all_to_all_bytes

PARTS = [(8,), (1, 1), (4, 4), (2, 2, 2), (8, 8, 8, 8), (2, 4), (3, 3, 3, 3, 3), (1, 3, 2), (16,) * 5, (1,)]
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
any_parts = st.lists(st.integers(1, 9), min_size=1, max_size=7).map(tuple)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@settings(max_examples=60)
@given(any_parts, st.sampled_from(OPERATIONS), st.sampled_from([None, 1.0, 8.0]))
def test_edges_sum_to_the_wire_bytes(
    algorithm: Algorithm, parts: tuple[int, ...], operation: str, copies: float | None
) -> None:
    """For any group over any domains the edges carry what the closed form says; nobody sends to itself."""
    found = edges(operation, algorithm, parts, copies)
    assert found.share.sum() == pytest.approx(wire_bytes(operation, 1.0, parts, copies), rel=1e-12)
    assert (found.sender != found.receiver).all()
    assert (found.share >= 0).all()


def balance(parts: tuple[int, ...], operation: str, algorithm: Algorithm) -> np.ndarray:
    """Bytes received less bytes sent of every rank."""
    found = edges(operation, algorithm, parts)
    size = sum(parts)
    received = np.bincount(found.receiver, found.share, minlength=size)
    return received - np.bincount(found.sender, found.share, minlength=size)


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_rank_receives_what_it_sends(parts: tuple[int, ...], algorithm: Algorithm) -> None:
    """Reductions and gathers are symmetric: as much comes in at every rank as goes out."""
    for operation in ("all_reduce", "all_gather", "reduce_scatter"):
        assert balance(parts, operation, algorithm) == pytest.approx(0, abs=1e-12)


def test_what_a_ring_sends_over_each_link() -> None:
    """Eight ranks in one domain: each sends 2 * 7/8 of the message to the next one. Over four domains of eight,
    each of eight rings has 2 * 31/32 / 8 on each of its 32 links, and every rank one link to another domain, to
    the rank with its place."""
    inside = edges("all_reduce", "ring", (8,))
    assert inside.share.tolist() == [1.75] * 8
    assert inside.receiver.tolist() == [1, 2, 3, 4, 5, 6, 7, 0]
    across = edges("all_reduce", "ring", (8,) * 4)
    assert set(across.share.tolist()) == {2 * 31 / 32 / 8}
    leaves = across.sender // 8 != across.receiver // 8
    assert sorted(across.sender[leaves].tolist()) == list(range(32))
    assert (across.sender[leaves] % 8 == across.receiver[leaves] % 8).all()


def test_a_hierarchy_crosses_with_a_part_of_each_rank() -> None:
    """Four domains of eight: what a domain sends to others is 2 * 3/4 of the message, less than the ring's
    2 * 31/32, and inside each rank sends 2 * 7/8."""
    for algorithm, out in (("hierarchical", 2 * 3 / 4), ("ring", 2 * 31 / 32)):
        found = edges("all_reduce", algorithm, (8,) * 4)
        leaves = (found.sender // 8 == 0) & (found.receiver // 8 != 0)
        assert found.share[leaves].sum() == pytest.approx(out)


@pytest.mark.parametrize("domains", [1, 2, 3, 4, 5, 8, 13, 64])
def test_trees_are_two_spanning_trees_of_logarithmic_depth(domains: int) -> None:
    """Each of the two trees joins all domains without a cycle, no node has more than two children, the depth is
    logarithmic, and no domain is an inner node of both (but where their number is odd, one)."""
    parts = (1,) * domains
    if domains == 1:
        assert len(edges("all_reduce", "tree", parts).share) == 0
        return
    found = edges("all_reduce", "tree", parts)
    half = len(found.sender) // 2
    ups = list(zip(found.sender[:half].tolist(), found.receiver[:half].tolist(), strict=True))
    inner: list[set[int]] = []
    for tree in (ups[: domains - 1], ups[domains - 1 :]):
        parent = dict(tree)
        children: dict[int, int] = defaultdict(int)
        assert len(parent) == domains - 1
        for node in range(domains):
            depth = 0
            while node in parent:
                node, depth = parent[node], depth + 1
                assert depth <= domains.bit_length() + 1
        for up in parent.values():
            children[up] += 1
        assert max(children.values()) <= 2
        inner.append(set(children))
    assert len(inner[0] & inner[1]) <= 1 + domains % 2


@pytest.mark.parametrize("copies", [None, 8.0])
@pytest.mark.parametrize(("members", "domains"), [(8, 4), (2, 16), (1, 5), (8, 2)])
def test_all_to_all_is_what_its_time_is_made_of(members: int, domains: int, copies: float | None) -> None:
    """Edges between domains and inside are the bytes that ``all_to_all_s`` divides by the rates."""
    found = edges("all_to_all", "ring", (members,) * domains, copies)
    size = members * domains
    between = found.sender // members != found.receiver // members
    args = np.array(size), np.array(members), np.array(domains)
    network, links = all_to_all_bytes(np.array(1.0), *args, copies)
    assert found.share[between].sum() == pytest.approx(size * float(network))
    assert found.share[~between].sum() == pytest.approx(size * float(links))
    if copies is not None:
        assert (found.sender[between] % members == found.receiver[between] % members).all()
