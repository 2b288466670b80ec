"""Who sends which part of a lot to whom, and how long that takes.

A part of a lot is an interval of its bytes. A route is direct (its sender held the part before the switch) or a
relay (its sender has just received it, and passes it on in its domain).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from milpplan.simulation.layout_columns import BoolArray, FloatArray, IntArray
from milpplan.switching.links import Links
from milpplan.switching.slices import Lots

WAVES = 16
"""Equal parts in which relayed switches are sent, so that a part is passed on while the next one arrives."""

Route = tuple[int, int, int, float, float, bool]
"""Lot, sender, receiver, first byte, last byte + 1, whether it is a relay."""


@dataclass(frozen=True, slots=True)
class Routes:
    """Arrays [routes]; ``start`` and ``stop`` are bytes within the lot, not yet rounded to whole rows."""

    lot: IntArray
    sender: IntArray
    receiver: IntArray
    start: FloatArray
    stop: FloatArray
    relay: BoolArray

    @staticmethod
    def of(found: Sequence[Route]) -> Routes:
        """Columns of the routes that carry anything."""
        kept = [route for route in found if route[4] > route[3]]
        lot, sender, receiver, start, stop, relay = zip(*kept, strict=True) if kept else ((),) * 6
        whole = [np.array(column, dtype=np.int64) for column in (lot, sender, receiver)]
        ends = [np.array(column, dtype=np.float64) for column in (start, stop)]
        return Routes(whole[0], whole[1], whole[2], ends[0], ends[1], np.array(relay, dtype=np.bool_))

    @property
    def num_bytes(self) -> FloatArray:
        """Bytes of each route."""
        return np.asarray(self.stop - self.start)


def routes_s(links: Links, routes: Routes, num_bytes: FloatArray | IntArray, num_gpus: int) -> float:
    """Seconds until the last byte of a switch has arrived.

    Direct messages start together: the busiest port, and one latency. With relays the switch is sent in
    ``WAVES`` equal parts, and a part is passed on while the next one arrives: (A + (w - 1) C + B) / w for w waves,
    with A and B the busiest port of direct messages and of relays and C that of both together, and a latency a
    wave. Upper bound within the model of ports: real messages need not wait for whole waves.
    Source: the port model that HotSPa's planner balances (Hetu 9e47240, hetu/graph/switch_exec_graph.cc).
    """
    parts = []
    for chosen in (~routes.relay, routes.relay):
        sender, receiver = routes.sender[chosen], routes.receiver[chosen]
        ports = links.port_s(sender, receiver, num_bytes[chosen], num_gpus)
        parts.append((ports, links.latency_s(sender, receiver)))
    (direct, latency), (relayed, relay_latency) = parts
    if not routes.relay.any():
        return float(direct.max(initial=0.0)) + latency
    both = float((direct + relayed).max())
    first, last = float(direct.max()), float(relayed.max())
    return (first + (WAVES - 1) * both + last) / WAVES + WAVES * latency + relay_latency


def _level(loads: FloatArray, amount: float) -> FloatArray:
    """Amounts that add up to ``amount`` and make the largest of loads + amounts least (water-filling)."""
    order = np.argsort(loads, kind="stable")
    ranked = loads[order]
    heights = (amount + np.cumsum(ranked)) / np.arange(1, len(ranked) + 1)
    filled = int(np.flatnonzero(heights > ranked)[-1]) if amount > 0 else 0
    result = np.zeros_like(loads)
    result[order] = np.maximum(heights[filled] - ranked, 0.0)
    return result


def nearest_routes(lots: Lots, links: Links) -> Routes:
    """The nearest holders send, the least loaded ones most: a lot's parts level what they have sent so far.

    Holders in the receiver's domain before others, as HotSPa chooses; its planner takes whole slices of tensors.
    Lots with few holders come first, for they have no choice.
    """
    domains, found = links.domains(lots.num_gpus), list[Route]()
    sent = np.zeros((2, lots.num_gpus))
    num_holders = lots.holders.sum(axis=1)
    for lot in np.lexsort((-lots.num_bytes, num_holders)).tolist():
        holders, size = np.flatnonzero(lots.holders[lot]), float(lots.num_bytes[lot])
        receivers = np.flatnonzero(lots.receivers[lot])
        for domain in np.unique(domains[receivers]).tolist():
            local = holders[domains[holders] == domain]
            row, senders = (0, local) if len(local) else (1, holders)
            for receiver in receivers[domains[receivers] == domain].tolist():
                found += _levelled(lot, senders, receiver, size, sent[row])
    return Routes.of(found)


def _levelled(lot: int, senders: IntArray, receiver: int, size: float, sent: FloatArray) -> Iterator[Route]:
    """Routes of one receiver's lot, which level what the senders have ``sent`` and are added to it."""
    if len(senders) == 1:
        sent[senders[0]] += size
        yield lot, int(senders[0]), receiver, 0.0, size, False
        return
    amounts = _level(sent[senders], size)
    sent[senders] += amounts
    start = 0.0
    last = int(np.flatnonzero(amounts)[-1])
    for place in np.flatnonzero(amounts).tolist():
        stop = size if place == last else start + float(amounts[place])
        yield lot, int(senders[place]), receiver, start, stop, False
        start = stop
