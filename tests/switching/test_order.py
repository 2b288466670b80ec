"""The order of plans: the best circuit against all permutations, and costs of pairs against single switches."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from milpplan import Links, SwitchCosts, best_order, plan_switch, switch_costs
from milpplan.errors import InvalidInputError
from milpplan.switching.planning import MAX_PLANS, arc_costs, best_circuit, least_switch_s
from tests.small import small_model
from tests.switching.cases import plan_of


def random_costs(rng: np.random.Generator, size: int) -> SwitchCosts:
    """Seconds without any order between them; many are zero, as contained shards make them."""
    seconds = rng.integers(0, 9, (2, size, size)) * rng.integers(0, 2, (2, size, size)) / 8
    none = np.zeros((size, size), dtype=np.int64)
    return SwitchCosts(seconds[0], seconds[1], none, none, none)


def brute_force(costs: SwitchCosts, homes: list[int], routes: list[str], compute: np.ndarray | None) -> float:
    """The least sum over all orders, homes and ways of the gradients, written out arc by arc."""
    best, size = np.inf, len(costs.parameters_s)
    hidden = np.zeros(size) if compute is None else compute
    for order in permutations(range(size)):
        if order[0] not in homes:
            continue
        for route in routes:
            total = 0.0
            for place, a in enumerate(order):
                b = order[(place + 1) % size]
                total += costs.parameters_s[a, b] if size > 1 else 0.0
                goal = b if route == "pairwise" else order[0]
                total += max(costs.gradients_s[a, goal] - hidden[b], 0.0) if place else 0.0
            best = min(best, total)
    return best


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6])
def test_best_order_is_the_best_of_all(size: int) -> None:
    """Given and free homes, both ways of the gradients, with work to hide behind and without; 20 random cases."""
    rng = np.random.default_rng(size)
    for _ in range(20 if size < 6 else 3):
        costs = random_costs(rng, size)
        np.fill_diagonal(costs.parameters_s, 0.0)
        compute = rng.integers(0, 9, size) / 8 if rng.integers(2) else None
        for home in (None, int(rng.integers(size))):
            homes = list(range(size)) if home is None else [home]
            for route in (None, "pairwise", "home"):
                routes = ["pairwise", "home"] if route is None else [route]
                found = best_order(costs, home, route, compute)  # type: ignore[arg-type]
                assert found.time_s == pytest.approx(brute_force(costs, homes, routes, compute), abs=1e-12)
                assert sorted(found.order) == list(range(size))
                assert found.order[0] in homes
                assert found.gradients in routes
                assert found.time_s == pytest.approx(found.parameters_s + found.gradients_s)


def test_large_circuits_are_exact_too() -> None:
    """Twelve nodes on a hidden ring with cheap arcs in one direction: only that circuit costs 12."""
    rng = np.random.default_rng(7)
    ring = rng.permutation(12)
    cost = np.full((12, 12), 5.0)
    cost[ring, np.roll(ring, -1)] = 1.0
    order = best_circuit(cost, int(ring[0]))
    assert list(order) == ring.tolist()


def test_costs_are_those_of_single_switches() -> None:
    """Bytes exactly, seconds to the rounding of rows; nothing on the diagonal; arcs differ by direction."""
    model, links = small_model(4), Links(2, 2e11, 2.5e10)
    found = [
        plan_of(model, None, tp=4),
        plan_of(model, None, dp=4, zero_stage=1),
        plan_of(model, None, pp=2, dp=2),
    ]
    costs = switch_costs(model, found, links)
    for a, b in permutations(range(3), 2):
        for what, seconds, sizes in (
            ("parameters", costs.parameters_s, costs.parameters_bytes),
            ("gradients", costs.gradients_s, costs.gradients_bytes),
        ):
            switch = plan_switch(model, found[a], found[b], links, what)  # type: ignore[arg-type]
            assert sizes[a, b] == switch.total_bytes
            assert seconds[a, b] == pytest.approx(switch.time_s, rel=1e-4)
            if what == "parameters":
                assert costs.peak_bytes[a, b] >= switch.peak_bytes.max() * (1 - 1e-6)
    # What receivers take in at least, relays or not.
    relayed = switch_costs(model, found, links, "relay")
    for one, least_s in enumerate(least_switch_s(model, found, links)):
        for exact in (costs, relayed):
            assert (least_s <= (exact.parameters_s, exact.gradients_s)[one] * (1 + 1e-9)).all()
        assert least_s.sum() >= 0.5 * (relayed.parameters_s, relayed.gradients_s)[one].sum()
    assert (np.diag(costs.parameters_s) == 0).all()
    # Replicas hold every shard of the others: nothing has to move back.
    assert costs.parameters_bytes[1, 0] == 0 < costs.parameters_bytes[0, 1]


def test_gradients_hide_behind_the_next_group() -> None:
    """What the next group's work covers does not count; the home sends none."""
    costs = random_costs(np.random.default_rng(3), 4)
    compute = np.array([0.0, 0.5, 10.0, 0.0])
    _, exposed = arc_costs(costs, 1, "pairwise", compute)
    assert (exposed[1] == 0).all()
    assert (exposed[:, 2] == 0).all()
    assert exposed[0, 3] == costs.gradients_s[0, 3]
    _, home = arc_costs(costs, 1, "home", None)
    assert home[0, 2] == costs.gradients_s[0, 1]


@pytest.mark.parametrize(("size", "home"), [(0, None), (MAX_PLANS + 1, None), (3, 3), (3, -1)])
def test_impossible_orders_are_refused(size: int, home: int | None) -> None:
    """No plans, too many, and homes that are none of them."""
    zeros = np.zeros((size, size))
    none = zeros.astype(np.int64)
    with pytest.raises(InvalidInputError, match="home"):
        best_order(SwitchCosts(zeros, zeros, none, none, none), home)
