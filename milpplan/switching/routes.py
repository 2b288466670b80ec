"""Routes of the parts of lots from senders to receivers, their times, and their deliveries slice by slice.

A part of a lot is an interval of its bytes. A route is direct (its sender held the part before the switch) or a
relay (its sender received the part in this switch and passes it on in its domain).
Deliveries are routes rounded to whole rows of tensors.

The links of the ranks give the times of messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from milpplan.communication.rank_lists import gpus_per_domain
from milpplan.errors import InvalidInputError
from milpplan.problem.hardware import HardwareSpec
from milpplan.simulation.layout_columns import BoolArray, FloatArray, IntArray
from milpplan.switching.slices import Lots

OUT_INSIDE, IN_INSIDE, OUT_BETWEEN, IN_BETWEEN = range(4)
"""Ports of a rank: the links inside its domain and its share of the network. Both directions run at the same
time."""


@dataclass(frozen=True, slots=True)
class Links:
    """Rates of a rank's ports in one direction, and latencies of a message. Domains hold consecutive ranks."""

    gpus_per_domain: int
    inside_bytes_per_s: float
    between_bytes_per_s: float
    inside_latency_s: float = 0.0
    between_latency_s: float = 0.0
    other_rail_fraction: float = 1.0
    """Share of the rate for messages between different positions in two domains."""
    other_rail_latency_s: float = 0.0
    """Latency added to these messages."""

    def __post_init__(self) -> None:
        for name in ("gpus_per_domain", "inside_bytes_per_s", "between_bytes_per_s", "other_rail_fraction"):
            if not 0 < getattr(self, name) < float("inf"):
                raise InvalidInputError(
                    f"{name} = {getattr(self, name)}.", "Expected a positive number.", "Correct the links."
                )

    @staticmethod
    def of(hardware: HardwareSpec, num_gpus: int) -> Links:
        """Take the links from a hardware description, as ``collectives.p2p_s`` does."""
        up, out = hardware.scale_up, hardware.scale_out
        if hardware.pods is not None:
            raise InvalidInputError(
                f"{hardware.name} has pods, a third tier of network.",
                "Expected domains and one network between them.",
                "Leave `pods` out of the hardware file, with the slower of the two networks in `scale_out`.",
            )
        rails = out.rails
        return Links(
            gpus_per_domain(hardware, num_gpus),
            up.bandwidth_bytes_per_s * up.p2p_efficiency,
            out.rate_bytes_per_s,
            up.p2p_latency_s,
            out.p2p_latency_s,
            1.0 if rails is None else rails.bandwidth_fraction,
            0.0 if rails is None else rails.latency_s,
        )

    def domains(self, num_gpus: int) -> IntArray:
        """List the domain of every rank."""
        return np.asarray(np.arange(num_gpus) // self.gpus_per_domain)

    def same_domain(self, a: IntArray, b: IntArray) -> BoolArray:
        """Check that pairs of ranks share a domain."""
        return np.asarray(a // self.gpus_per_domain == b // self.gpus_per_domain)

    def seconds(self, sender: IntArray, receiver: IntArray, num_bytes: FloatArray | IntArray) -> FloatArray:
        """Time for which a message occupies the ports at its two ends: bytes / rate, without latency, in seconds.

        Arrays that broadcast. Source: see ``collectives.p2p_s``.
        """
        other = (sender - receiver) % self.gpus_per_domain != 0
        between = self.between_bytes_per_s * np.where(other, self.other_rail_fraction, 1.0)
        rate = np.where(self.same_domain(sender, receiver), self.inside_bytes_per_s, between)
        return np.asarray(num_bytes / rate)

    def port_s(
        self, sender: IntArray, receiver: IntArray, num_bytes: FloatArray | IntArray, num_gpus: int
    ) -> FloatArray:
        """Sum the time of the messages of every port, in seconds [ports, ranks]."""
        seconds = self.seconds(sender, receiver, num_bytes)
        inside = self.same_domain(sender, receiver)
        port_seconds = np.zeros((4, num_gpus))
        for ranks, chosen, port in (
            (sender, inside, OUT_INSIDE),
            (receiver, inside, IN_INSIDE),
            (sender, ~inside, OUT_BETWEEN),
            (receiver, ~inside, IN_BETWEEN),
        ):
            port_seconds[port] = np.bincount(ranks[chosen], seconds[chosen], minlength=num_gpus)
        return port_seconds

    def latency_s(self, sender: IntArray, receiver: IntArray) -> float:
        """Return the latency of messages that start together, a maximum over them; 0 without messages."""
        if len(sender) == 0:
            return 0.0
        inside = self.same_domain(sender, receiver)
        other = (sender - receiver) % self.gpus_per_domain != 0
        between = self.between_latency_s + np.where(other, self.other_rail_latency_s, 0.0)
        return float(np.where(inside, self.inside_latency_s, between).max())


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


@dataclass(frozen=True, slots=True)
class Deliveries:
    """Slices that move between ranks: arrays [deliveries], ordered by round and message."""

    boxes: IntArray
    """[deliveries, 5] number of the tensor, and box of the slice."""
    sender: IntArray
    receiver: IntArray
    relay: BoolArray
    """True for relays, which start when the sender has received the slice."""
    num_bytes: IntArray

    def __len__(self) -> int:
        return len(self.sender)

    def message_starts(self) -> IntArray:
        """Find the first delivery of every fused message, which has all slices of a sender, receiver and round."""
        keys = np.stack([self.relay, self.sender, self.receiver])
        return np.flatnonzero(np.any(np.diff(keys, axis=1, prepend=-1) != 0, axis=0))

    @property
    def num_messages(self) -> int:
        """Number of fused messages."""
        return len(self.message_starts())

    def packed_bytes(self, num_gpus: int) -> IntArray:
        """Size the send buffers of each rank, in bytes [ranks].

        Messages with the same slices share a buffer, as in Hetu 9e47240 (hetu/graph/switch_exec_graph.cc).
        """
        starts, seen = self.message_starts(), set[tuple[int, bytes]]()
        packed = np.zeros(num_gpus, dtype=np.int64)
        for start, stop in pairwise([*starts.tolist(), len(self)]):
            key = (int(self.sender[start]), self.boxes[start:stop].tobytes())
            if key not in seen:
                seen.add(key)
                packed[key[0]] += self.num_bytes[start:stop].sum()
        return packed


def deliveries_of(lots: Lots, routes: Routes) -> Deliveries:
    """Round every route to whole rows: its ends move to the nearest row, by at most half a row of its last slice.

    Ends that two routes share move together, so no row is lost or sent twice.
    """
    all_boxes, columns = list[IntArray](), list[IntArray]()
    lot, slices = -1, np.zeros((0, 5), np.int64)
    for number in np.argsort(routes.lot, kind="stable").tolist():
        if routes.lot[number] != lot:
            lot = int(routes.lot[number])
            slices = lots.slices(lot)
        boxes = _rows_between(slices, float(routes.start[number]), float(routes.stop[number]), lots.element_bytes)
        all_boxes.append(boxes)
        ends = routes.sender[number], routes.receiver[number], int(routes.relay[number])
        columns.append(np.tile(np.array(ends, dtype=np.int64), (len(boxes), 1)))
    boxes = np.concatenate([np.zeros((0, 5), np.int64), *all_boxes])
    sender, receiver, relay = np.concatenate([np.zeros((0, 3), np.int64), *columns]).T
    order = np.lexsort((boxes[:, 3], boxes[:, 1], boxes[:, 0], receiver, sender, relay))
    size = (boxes[:, 2] - boxes[:, 1]) * (boxes[:, 4] - boxes[:, 3]) * lots.element_bytes
    return Deliveries(boxes[order], sender[order], receiver[order], relay[order] > 0, size[order])


def _rows_between(slices: IntArray, start: float, stop: float, element_bytes: int) -> IntArray:
    """Cut the slices of the bytes from ``start`` to ``stop`` of a lot whose slices are consecutive."""
    rows = slices[:, 2] - slices[:, 1]
    row_bytes = (slices[:, 4] - slices[:, 3]) * element_bytes
    ends, row_ends = np.cumsum(rows * row_bytes), np.cumsum(rows)
    low, high = (_row_at(position, ends, row_ends, rows, row_bytes) for position in (start, stop))
    touched = (row_ends > low) & (row_ends - rows < high)
    first = row_ends[touched] - rows[touched]
    boxes = slices[touched].copy()
    boxes[:, 2] = boxes[:, 1] + np.minimum(high - first, rows[touched])
    boxes[:, 1] += np.maximum(low - first, 0)
    # Both ends may have moved to the same row.
    return np.asarray(boxes[boxes[:, 2] > boxes[:, 1]])


def _row_at(position: float, ends: IntArray, row_ends: IntArray, rows: IntArray, row_bytes: IntArray) -> int:
    """Count the rows of a lot before a position in bytes, rounded."""
    index = min(int(np.searchsorted(ends, position, side="right")), len(ends) - 1)
    offset = position - float(ends[index] - rows[index] * row_bytes[index])
    rows_before = int(row_ends[index] - rows[index])
    return rows_before + min(round(offset / float(row_bytes[index])), int(rows[index]))


def layer_mask(boxes: IntArray, places: IntArray, wanted: IntArray) -> BoolArray:
    """Select the deliveries of tensors at the wanted places (layers or ends); ``places`` [tensors]."""
    return np.isin(places[boxes[:, 0]], wanted)
