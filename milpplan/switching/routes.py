"""Routes of the parts of lots from senders to receivers, and their times.

A part of a lot is an interval of its bytes. A route is direct (its sender held the part before the switch) or a
relay (its sender received the part in this switch and passes it on in its domain).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from milpplan.simulation.layout_columns import BoolArray, FloatArray, IntArray
from milpplan.switching.links import Links
from milpplan.switching.slices import Lots

WAVES = 16
"""Number of equal parts of a switch with relays, so that a part is passed on while the next part arrives."""

Route = tuple[int, int, int, float, float, bool]
"""Lot, sender, receiver, first byte, last byte + 1, True for relays."""


@dataclass(frozen=True, slots=True)
class Routes:
    """Routes as arrays [routes]; ``start`` and ``stop`` are bytes within the lot, not rounded to whole rows."""

    lot: IntArray
    sender: IntArray
    receiver: IntArray
    start: FloatArray
    stop: FloatArray
    relay: BoolArray

    @staticmethod
    def of(routes: Sequence[Route]) -> Routes:
        """Build columns of the routes that are not empty."""
        kept = [route for route in routes if route[4] > route[3]]
        lot, sender, receiver, start, stop, relay = zip(*kept, strict=True) if kept else ((),) * 6
        integers = [np.array(column, dtype=np.int64) for column in (lot, sender, receiver)]
        ends = [np.array(column, dtype=np.float64) for column in (start, stop)]
        relays = np.array(relay, dtype=np.bool_)
        return Routes(integers[0], integers[1], integers[2], ends[0], ends[1], relays)

    @property
    def num_bytes(self) -> FloatArray:
        """Bytes of each route."""
        return np.asarray(self.stop - self.start)


def routes_s(links: Links, routes: Routes, num_bytes: FloatArray | IntArray, num_gpus: int) -> float:
    """Time a switch until its last byte has arrived, in seconds.

    Direct messages start together: the time is that of the busiest port plus a latency. A switch with relays is
    sent in ``WAVES`` equal parts, and a part is passed on while the next part arrives: (A + (w - 1) C + B) / w for
    w waves, with A and B the busiest port of direct messages and of relays and C that of both together, and a
    latency per wave. An upper bound within the port model: real messages need not wait for whole waves. Source:
    the port model that HotSPa's planner balances (Hetu 9e47240, hetu/graph/switch_exec_graph.cc).
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
    """Split ``amount`` so that the maximum of loads + amounts is minimal (water-filling)."""
    order = np.argsort(loads, kind="stable")
    ranked = loads[order]
    heights = (amount + np.cumsum(ranked)) / np.arange(1, len(ranked) + 1)
    filled = int(np.flatnonzero(heights > ranked)[-1]) if amount > 0 else 0
    result = np.zeros_like(loads)
    result[order] = np.maximum(heights[filled] - ranked, 0.0)
    return result


def nearest_routes(lots: Lots, links: Links) -> Routes:
    """Choose the nearest holders as senders, and level the bytes that they send.

    Holders in the receiver's domain come before other holders, as in HotSPa, whose planner moves whole slices of
    tensors. Lots with few holders come first, because they have no choice.
    """
    domains, routes = links.domains(lots.num_gpus), list[Route]()
    sent = np.zeros((2, lots.num_gpus))
    num_holders = lots.holders.sum(axis=1)
    for lot in np.lexsort((-lots.num_bytes, num_holders)).tolist():
        holders, size = np.flatnonzero(lots.holders[lot]), float(lots.num_bytes[lot])
        receivers = np.flatnonzero(lots.receivers[lot])
        for domain in np.unique(domains[receivers]).tolist():
            local = holders[domains[holders] == domain]
            row, senders = (0, local) if len(local) else (1, holders)
            for receiver in receivers[domains[receivers] == domain].tolist():
                routes += _levelled(lot, senders, receiver, size, sent[row])
    return Routes.of(routes)


def _levelled(lot: int, senders: IntArray, receiver: int, size: float, sent: FloatArray) -> Iterator[Route]:
    """Yield the routes of a lot to a receiver that level the bytes of the senders, and add them to ``sent``."""
    if len(senders) == 1:
        sent[senders[0]] += size
        yield lot, int(senders[0]), receiver, 0.0, size, False
        return
    amounts = _level(sent[senders], size)
    sent[senders] += amounts
    start = 0.0
    last = int(np.flatnonzero(amounts)[-1])
    for index in np.flatnonzero(amounts).tolist():
        stop = size if index == last else start + float(amounts[index])
        yield lot, int(senders[index]), receiver, start, stop, False
        start = stop
