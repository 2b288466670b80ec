"""Order of the plans of a step: switch costs of all pairs, and the optimal circuit.

A step starts and ends at its home, the plan with the optimizer states. Parameters move on every arc. The home has
no gradients to pass on when the step starts; every other plan passes on the accumulated gradients (``pairwise``),
or sends its own gradients directly to the home (``home``). Source: HotSPa's step (Hetu 01376b1,
python/hetu/engine/trainer.py and hetu/graph/define_and_run_graph.cc), which hands gradients on, with an order and
a home given by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import numpy as np

from milpplan.errors import InvalidInputError
from milpplan.problem.model import ModelSpec
from milpplan.problem.plan import Plan
from milpplan.simulation.layout_columns import FloatArray, IntArray
from milpplan.switching.least_time import receiving_bound_s
from milpplan.switching.ownership import EQUAL_ROWS, ShardRules, What, element_bytes, ownership
from milpplan.switching.planning import chosen_routes, peak_bytes
from milpplan.switching.records import GradientRoute, Senders, SwitchCosts, SwitchOrder
from milpplan.switching.routes import Links, routes_s
from milpplan.switching.slices import check_gpus, lots_between

MAX_PLANS = 16
"""Maximum number of plans of a step; the exact order takes 2^15 sets of plans for each home."""


def switch_costs(
    model: ModelSpec,
    plans: Sequence[Plan],
    links: Links,
    senders: Senders = "exact",
    grad_bytes: int = 4,
    rules: ShardRules = EQUAL_ROWS,
) -> SwitchCosts:
    """Compute the switch costs of all ordered pairs of plans, before rounding to whole rows.

    Raises:
        InvalidInputError: the plans have different numbers of GPUs.
        IllegalPlanError: a plan is not one of the model.
    """
    size = len(plans)
    check_gpus(list(plans))
    seconds, moved_bytes = np.zeros((2, size, size)), np.zeros((2, size, size), dtype=np.int64)
    peaks = np.zeros((size, size), dtype=np.int64)
    whats: tuple[What, What] = ("parameters", "gradients")
    for row, what in enumerate(whats):
        owners = [ownership(model, plan, what, rules) for plan in plans]
        for a, b in ((a, b) for a in range(size) for b in range(size) if a != b):
            moved = lots_between(owners[a], owners[b], element_bytes(what, grad_bytes))
            routes, _ = chosen_routes(moved, links, senders)
            seconds[row, a, b] = routes_s(links, routes, routes.num_bytes, moved.num_gpus)
            moved_bytes[row, a, b] = moved.total_bytes
            if what == "parameters":
                packed = np.bincount(routes.sender, routes.num_bytes, minlength=moved.num_gpus)
                peaks[a, b] = peak_bytes(moved, np.ceil(packed)).max()
    return SwitchCosts(seconds[0], seconds[1], moved_bytes[0], moved_bytes[1], peaks)


def least_switch_s(
    model: ModelSpec, plans: Sequence[Plan], links: Links, grad_bytes: int = 4, rules: ShardRules = EQUAL_ROWS
) -> tuple[FloatArray, FloatArray]:
    """Bound ``switch_costs`` from below without choosing senders.

    Returns:
        Seconds of parameters and of gradients, each [from, to].

    Raises:
        InvalidInputError: the plans have different numbers of GPUs.
        IllegalPlanError: a plan is not one of the model.
    """
    size = len(plans)
    check_gpus(list(plans))
    seconds = np.zeros((2, size, size))
    whats: tuple[What, What] = ("parameters", "gradients")
    for row, what in enumerate(whats):
        owners = [ownership(model, plan, what, rules) for plan in plans]
        for a, b in permutations(range(size), 2):
            moved = lots_between(owners[a], owners[b], element_bytes(what, grad_bytes))
            seconds[row, a, b] = receiving_bound_s(moved, links)
    return seconds[0], seconds[1]


def arc_costs(
    costs: SwitchCosts, home: int, gradients: GradientRoute, compute_s: FloatArray | None = None
) -> tuple[FloatArray, FloatArray]:
    """Compute the exposed seconds of parameters and of gradients on every arc, each [from, to], for one home.

    Args:
        costs: switch costs of all pairs.
        home: index of the home; no gradients leave it.
        gradients: route of the gradients.
        compute_s: [plans] compute of a plan, which hides the gradients on the arc to it (they are needed only when
            its own gradients are added); None: no gradients are hidden.
    """
    gradients_s = (
        costs.gradients_s
        if gradients == "pairwise"
        else np.repeat(costs.gradients_s[:, [home]], len(costs.gradients_s), 1)
    )
    exposed = np.maximum(gradients_s - (0.0 if compute_s is None else compute_s), 0.0)
    exposed[home] = 0.0
    np.fill_diagonal(exposed, 0.0)
    return costs.parameters_s, exposed


def best_order(
    costs: SwitchCosts,
    home: int | None = None,
    gradients: GradientRoute | None = None,
    compute_s: FloatArray | None = None,
) -> SwitchOrder:
    """Find the circuit through all plans with the minimum switch time, exactly.

    Args:
        costs: ``switch_costs``.
        home: index of the plan where the step starts and ends; None: the best home.
        gradients: route of the gradients; None: the better route.
        compute_s: as in ``arc_costs``.

    Raises:
        InvalidInputError: no plans, too many plans, or no such home.
    """
    size = len(costs.parameters_s)
    if not 0 < size <= MAX_PLANS or (home is not None and not 0 <= home < size):
        raise InvalidInputError(
            f"{size} plans with the home {home}.",
            f"Expected 1 to {MAX_PLANS} plans, and the number of one of them as the home.",
            "Take fewer plans, or another home.",
        )
    routes: tuple[GradientRoute, ...] = ("pairwise", "home") if gradients is None else (gradients,)
    homes = range(size) if home is None else (home,)
    orders = [_order(costs, start, route, compute_s) for start in homes for route in routes]
    return min(orders, key=lambda order: order.time_s)


def _order(costs: SwitchCosts, home: int, route: GradientRoute, compute_s: FloatArray | None) -> SwitchOrder:
    """Find the optimal circuit for one home and one route of the gradients."""
    parameters, gradients = arc_costs(costs, home, route, compute_s)
    order = best_circuit(parameters + gradients, home)
    arcs = (np.array(order), np.roll(order, -1))
    parts = float(parameters[arcs].sum()), float(gradients[arcs].sum())
    return SwitchOrder(order, route, sum(parts), *parts)


def best_circuit(cost: FloatArray, start: int) -> tuple[int, ...]:
    """Find the cheapest circuit through all nodes from ``start``; ``cost`` [from, to], the diagonal is not read.

    best[S, j] = min over i in S of best[S without j, i] + cost[i, j], over sets S of the others.
    Source: Held and Karp 1962; Bellman 1962.
    """
    others = [node for node in range(len(cost)) if node != start]
    count = len(others)
    if count == 0:
        return (start,)
    inner = cost[np.ix_(others, others)]
    best = np.full((1 << count, count), np.inf)
    predecessor = np.zeros((1 << count, count), dtype=np.int64)
    best[1 << np.arange(count), np.arange(count)] = cost[start, others]
    for members in range(1, 1 << count):
        outside = np.flatnonzero((members >> np.arange(count)) & 1 == 0)
        if len(outside) == 0:
            continue
        reached = best[members][:, None] + inner[:, outside]
        via, larger = reached.argmin(axis=0), members | (1 << outside)
        best[larger, outside] = reached[via, np.arange(len(outside))]
        predecessor[larger, outside] = via
    return (start, *[others[number] for number in _walked_back(best, predecessor, cost[others, start])])


def _walked_back(best: FloatArray, predecessor: IntArray, closing: FloatArray) -> list[int]:
    """List the nodes of the cheapest circuit in their order."""
    members = len(best) - 1
    last = int((best[members] + closing).argmin())
    nodes = [last]
    while members & (members - 1):
        previous = int(predecessor[members, last])
        members ^= 1 << last
        last = previous
        nodes.append(last)
    return nodes[::-1]
