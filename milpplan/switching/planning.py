"""Planning of a switch between two plans: lots to move, senders, time and memory.

A planned switch can be carried out on arrays, every rank's tensors step by step: on NumPy arrays and on other
arrays with the same indexing, shapes and assignment.

**Order** of the plans of a step: switch costs of all pairs, and the optimal circuit.

A step starts and ends at its home, the plan with the optimizer states. Parameters move on every arc. The home has
no gradients to pass on when the step starts; every other plan passes on the accumulated gradients (``pairwise``),
or sends its own gradients directly to the home (``home``). Source: HotSPa's step (Hetu 01376b1,
python/hetu/engine/trainer.py and hetu/graph/define_and_run_graph.cc), which hands gradients on, with an order and
a home given by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np

from milpplan.errors import InvalidInputError, UnknownNameError
from milpplan.problem import ModelSpec, Plan
from milpplan.simulation import FloatArray, IntArray, check_plan_of_model
from milpplan.switching.ownership import (
    EMBEDDING,
    EQUAL_ROWS,
    HEAD,
    Box,
    Lots,
    Ownership,
    ShardRules,
    Tensor,
    What,
    check_gpus,
    element_bytes,
    lots,
    lots_between,
    ownership,
)
from milpplan.switching.records import SENDERS, GradientRoute, Senders, SwitchCosts, SwitchOrder, SwitchPlan
from milpplan.switching.routes import (
    Deliveries,
    Links,
    Routes,
    deliveries_of,
    least_time_routes,
    may_relay,
    nearest_routes,
    receiving_bound_s,
    routes_s,
)


def chosen_routes(moved: Lots, links: Links, senders: Senders) -> tuple[Routes, float]:
    """Choose routes by the rule ``senders``. Relays are used only if they are faster than optimal direct senders.

    Returns:
        Routes, and a proved lower bound of the time of the busiest port in seconds (0 for the nearest senders).

    Raises:
        UnknownNameError: no such rule.
    """
    if senders == "nearest":
        return nearest_routes(moved, links), 0.0
    if senders not in SENDERS:
        raise UnknownNameError(
            f"There are no senders {senders!r}.", f"Expected one of {', '.join(SENDERS)}.", "Choose one of them."
        )
    direct, bound_s = least_time_routes(moved, links)
    if senders == "exact" or not may_relay(moved, links):
        return direct, bound_s
    relayed, relay_bound_s = least_time_routes(moved, links, relay=True)
    times = [routes_s(links, routes, routes.num_bytes, moved.num_gpus) for routes in (relayed, direct)]
    return (relayed if times[0] < times[1] else direct), relay_bound_s


def plan_switch(
    model: ModelSpec,
    source: Plan,
    target: Plan,
    links: Links,
    what: What = "parameters",
    senders: Senders = "exact",
    grad_bytes: int = 4,
    rules: ShardRules = EQUAL_ROWS,
) -> SwitchPlan:
    """Plan the deliveries that change the ownership of ``source`` into the ownership of ``target``.

    Every rank receives the slices that it lacks, once, and nothing else.

    Args:
        model: model of both plans.
        source, target: plans before and after the switch, on the same GPUs.
        links: links of the GPUs.
        what: state to switch.
        senders: rule that chooses the senders.
        grad_bytes: bytes of a reduced gradient.
        rules: rules of the framework for shards.

    Raises:
        InvalidInputError: the plans have different numbers of GPUs, too many GPUs for optimal senders, or several
            node types.
        IllegalPlanError: a plan does not suit the model, or cannot run, as in ``simulate``.
    """
    _check_one_type(source, target)
    for plan in (source, target):
        check_plan_of_model(model, plan)
    moved = lots(model, source, target, what, grad_bytes, rules)
    routes, bound_s = chosen_routes(moved, links, senders)
    deliveries = deliveries_of(moved, routes)
    sent, received = _by_tier(deliveries, links, moved.num_gpus)
    assert (received.sum(axis=1) == moved.new_bytes - moved.kept_bytes).all(), (
        "a rank gets more or less than it lacks"
    )
    ports = links.port_s(deliveries.sender, deliveries.receiver, deliveries.num_bytes, moved.num_gpus)
    return SwitchPlan(
        what=what,
        senders=senders,
        num_gpus=moved.num_gpus,
        gpus_per_domain=links.gpus_per_domain,
        tensors=moved.tensors,
        deliveries=deliveries,
        sent_bytes=sent,
        received_bytes=received,
        old_bytes=moved.old_bytes,
        new_bytes=moved.new_bytes,
        kept_bytes=moved.kept_bytes,
        peak_bytes=peak_bytes(moved, deliveries.packed_bytes(moved.num_gpus)),
        time_s=deliveries_s(deliveries, links, moved.num_gpus),
        tier_s=(float(ports[:2].max()), float(ports[2:].max())),
        lower_bound_s=bound_s,
        first_layers_s=_first_layers_s(moved, target, deliveries, links),
    )


def _check_one_type(*plans: Plan) -> None:
    """Refuse plans whose ranks are on several node types: ``Links`` describes a single type."""
    mixed = [plan.layout for plan in plans if plan.layout.node_order or plan.layout.replica_micro_batches]
    if mixed:
        name = "node_order" if mixed[0].node_order else "replica_micro_batches"
        raise InvalidInputError(
            f"A plan is on several node types ({name}={list(getattr(mixed[0], name))}).",
            "Expected plans on one node type: the links of several are not in a switch.",
            "Switch between plans of a cluster of one type.",
        )


def peak_bytes(moved: Lots, packed: IntArray | FloatArray) -> IntArray:
    """Compute the peak memory of each rank, in bytes [ranks]: max(old + packed + received, received + kept + new).

    First all slices are packed and sent. Then the old tensors are freed, except the kept slices, and the new
    tensors are filled from the buffers. An upper bound if a framework frees tensor by tensor. Source: order of the
    allocations in Hetu 9e47240, hetu/graph/switch_exec_graph.cc.
    """
    received = moved.new_bytes - moved.kept_bytes
    before = moved.old_bytes + np.asarray(packed).astype(np.int64) + received
    return np.asarray(np.maximum(before, received + moved.kept_bytes + moved.new_bytes))


def deliveries_s(deliveries: Deliveries, links: Links, num_gpus: int) -> float:
    """Time deliveries as ``routes_s`` does, with whole rows, in seconds."""
    zeros = np.zeros(len(deliveries))
    lot = np.zeros(len(deliveries), dtype=np.int64)
    routes = Routes(lot, deliveries.sender, deliveries.receiver, zeros, zeros, deliveries.relay)
    return routes_s(links, routes, deliveries.num_bytes, num_gpus)


def _by_tier(deliveries: Deliveries, links: Links, num_gpus: int) -> tuple[IntArray, IntArray]:
    """Sum the bytes that every rank sends and receives, [ranks, tier] each."""
    inside = links.same_domain(deliveries.sender, deliveries.receiver)
    sent, received = (np.zeros((num_gpus, 2), dtype=np.int64) for _ in range(2))
    tier = np.where(inside, 0, 1)
    np.add.at(sent, (deliveries.sender, tier), deliveries.num_bytes)
    np.add.at(received, (deliveries.receiver, tier), deliveries.num_bytes)
    return sent, received


def _first_layers_s(moved: Lots, target: Plan, deliveries: Deliveries, links: Links) -> float:
    """Time the deliveries for the first layers of all virtual stages, in seconds.

    The embedding is included, and the head if the last stage has no layers.
    """
    places = np.array([tensor.place for tensor in moved.tensors])
    final = len(target.virtual_stages) - 1
    wanted = [EMBEDDING]
    for number, stage in enumerate(target.virtual_stages):
        wanted += [stage.layers[0]] if stage.num_layers else [HEAD] * (number == final)
    chosen = np.isin(places[deliveries.boxes[:, 0]], np.array(wanted))
    names = ("boxes", "sender", "receiver", "relay", "num_bytes")
    part = replace(deliveries, **{name: getattr(deliveries, name)[chosen] for name in names})
    return deliveries_s(part, links, moved.num_gpus)


Piece = tuple[Box, Any]
"""A box of a tensor and its array."""
Held = dict[int, list[Piece]]
"""Arrays of a rank: the pieces of each tensor, by the tensor's number."""
Boxes = list[tuple[int, Box]]
"""Boxes of a rank, each with the number of its tensor."""


def boxes_of_ranks(owner: Ownership, tensors: tuple[Tensor, ...], num_gpus: int) -> list[Boxes]:
    """List the boxes that every rank holds."""
    boxes: list[Boxes] = [[] for _ in range(num_gpus)]
    for number, tensor in enumerate(tensors):
        for rank, top, bottom, left, right in owner.boxes(tensor).tolist():
            boxes[rank].append((number, (top, bottom, left, right)))
    return boxes


def held_of(boxes: Boxes, array: Callable[[int, Box], Any]) -> Held:
    """Make the pieces of a rank; ``array`` makes a piece from the number of its tensor and its box."""
    held: Held = {}
    for number, box in boxes:
        held.setdefault(number, []).append((box, array(number, box)))
    return held


def view(held: Held, piece: IntArray) -> Any:
    """Return the part of a rank's arrays that a slice (number of the tensor, box) names.

    Raises:
        KeyError: the rank does not hold it.
    """
    number, top, bottom, left, right = piece.tolist()
    for box, array in held.get(number, []):
        if box[0] <= top and bottom <= box[1] and box[2] <= left and right <= box[3]:
            return array[top - box[0] : bottom - box[0], left - box[2] : right - box[2]]
    raise KeyError(f"tensor {number}, rows {top} to {bottom}, columns {left} to {right}")


def keep(old: Held, new: Held) -> None:
    """Copy the data that a rank holds before and after the switch from its old arrays to its new arrays."""
    pairs = ((before, after) for number in new for before in old.get(number, []) for after in new[number])
    for (before, source), (after, array) in pairs:
        top, bottom = max(after[0], before[0]), min(after[1], before[1])
        left, right = max(after[2], before[2]), min(after[3], before[3])
        if top < bottom and left < right:
            part = source[top - before[0] : bottom - before[0], left - before[2] : right - before[2]]
            array[top - after[0] : bottom - after[0], left - after[2] : right - after[2]] = part


def move(switch: SwitchPlan, old: list[Held], new: list[Held]) -> None:
    """Carry out a switch in one process.

    The new arrays of a rank are filled only from its own old arrays and from the deliveries. Relays read the new
    arrays of their senders.
    """
    for before, after in zip(old, new, strict=True):
        keep(before, after)
    deliveries = switch.deliveries
    for number in np.argsort(deliveries.relay, kind="stable").tolist():
        piece, sender = deliveries.boxes[number], int(deliveries.sender[number])
        source = new[sender] if deliveries.relay[number] else old[sender]
        view(new[int(deliveries.receiver[number])], piece)[...] = view(source, piece)


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
