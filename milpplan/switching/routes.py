"""Routes of the parts of lots from senders to receivers, their times, and their deliveries slice by slice.

A part of a lot is an interval of its bytes. A route is direct (its sender held the part before the switch) or a
relay (its sender received the part in this switch and passes it on in its domain).
Deliveries are routes rounded to whole rows of tensors.

The links of the ranks give the times of messages.

**Optimal senders** (``least_time_routes``): routes that minimise the time of the busiest port, with a proved lower
bound of this time.

**Sets.** Lots a with b_a bytes, domains n, ranks r. A block (a, n) is a lot and the k receivers in a domain that
lack it; L are its holders in the domain, O all other holders.

**Variables** of a block, bytes, >= 0: ``local[s]``, which holder s in L sends to the receivers together;
``remote[s]``, likewise for s in O; ``inside[r]``, which receiver r gets from L. With relays and an empty L also
``imported[r]``, which r gets once for the whole domain and passes on, and ``direct``, which every receiver gets
for itself. T: the time of the busiest port.

**Rows** (``_holders_send_what_is_received``, ``_ports_are_done``). With L: sum local = sum inside, sum remote = k
b - sum inside, inside <= b. Without L, with relays: sum remote = sum imported + k direct, sum imported + direct =
b. Ports: bytes / rate <= T, where a relaying rank sends (k - 1) imported[r] inside its domain and receives b -
direct - imported[r] from its neighbours.

Sums over receivers suffice: any sums of holders and receivers of one block that agree are a transport between
them. Objective: T, then with that T the bytes between domains.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from milpplan.communication.records import gpus_per_domain
from milpplan.errors import InvalidInputError, SolverError
from milpplan.problem import HardwareSpec
from milpplan.simulation import BoolArray, FloatArray, IntArray
from milpplan.switching.ownership import Lots

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


@dataclass(frozen=True, slots=True)
class Block:
    """A lot and its receivers in a domain."""

    lot: int
    size: float
    """Bytes of the lot."""
    receivers: IntArray
    local: IntArray
    """Holders in the domain."""
    remote: IntArray
    """Holders outside the domain."""
    relays: bool
    """True if the receivers may pass on the bytes that one of them imports."""
    first: int
    """Index of its first variable; the order is local, remote, inside, imported, direct."""

    @property
    def num_inside(self) -> int:
        """Number of variables ``inside``, which exist only where receivers have a choice."""
        return len(self.receivers) if len(self.local) and len(self.remote) else 0

    @property
    def num_imported(self) -> int:
        """Number of variables ``imported``."""
        return len(self.receivers) if self.relays else 0

    @property
    def num_variables(self) -> int:
        """Number of variables of the block."""
        return len(self.local) + len(self.remote) + self.num_inside + self.num_imported + self.relays

    def variables(self) -> tuple[range, range, range, range, range]:
        """Return the indices of its variables: local, remote, inside, imported, direct."""
        local = range(self.first, self.first + len(self.local))
        remote = range(local.stop, local.stop + len(self.remote))
        inside = range(remote.stop, remote.stop + self.num_inside)
        imported = range(inside.stop, inside.stop + self.num_imported)
        return local, remote, inside, imported, range(imported.stop, imported.stop + self.relays)


def blocks(lots: Lots, links: Links, relay: bool) -> list[Block]:
    """Build all blocks; variable 0 is T."""
    domains, all_blocks, first = links.domains(lots.num_gpus), list[Block](), 1
    for lot in range(len(lots)):
        holders, receivers = np.flatnonzero(lots.holders[lot]), np.flatnonzero(lots.receivers[lot])
        for domain in np.unique(domains[receivers]).tolist():
            here = receivers[domains[receivers] == domain]
            near = domains[holders] == domain
            relays = relay and not near.any() and len(here) > 1
            size = float(lots.num_bytes[lot])
            all_blocks.append(Block(lot, size, here, holders[near], holders[~near], relays, first))
            first += all_blocks[-1].num_variables
    return all_blocks


def may_relay(lots: Lots, links: Links) -> bool:
    """Check that two or more ranks of a domain without holder lack some lot, so that relays are possible."""
    first_ranks = np.arange(0, lots.num_gpus, links.gpus_per_domain)
    lacking = np.add.reduceat(lots.receivers, first_ranks, axis=1, dtype=np.int64)
    held = np.logical_or.reduceat(lots.holders, first_ranks, axis=1)
    return bool(((lacking > 1) & ~held).any())


def most_variables(lots: Lots, links: Links) -> int:
    """Bound the number of variables of the program from above.

    There is a variable for each holder and each domain that lacks the lot, and two for each receiver.
    """
    first_ranks = np.arange(0, lots.num_gpus, links.gpus_per_domain)
    lacking = np.logical_or.reduceat(lots.receivers, first_ranks, axis=1).sum(axis=1)
    return int((lots.holders.sum(axis=1) * lacking).sum() + 2 * lots.receivers.sum())


Entry = tuple[int, int, float]
"""Nonzero of the matrix: row, variable, coefficient."""


@dataclass(frozen=True, slots=True)
class SenderProgram:
    """Rows of the program, in seconds and bytes."""

    num_variables: int
    balance: list[Entry]
    """Left-hand side of the balance rows."""
    amounts: list[float]
    """Right-hand side of the balance rows."""
    ports: list[Entry]
    """Seconds of the ports, rows [4 * ranks]."""
    fixed: FloatArray
    """Seconds of the ports that do not depend on the variables, [4 * ranks]."""
    upper: FloatArray
    """Upper bounds of the variables."""
    between: FloatArray
    """Bytes that cross domains per byte of a variable."""


def sender_program(all_blocks: list[Block], links: Links, num_gpus: int) -> SenderProgram:
    """Build the program of all blocks; the rate of a port between domains is that of a rail."""
    num_variables = 1 + sum(block.num_variables for block in all_blocks)
    program = SenderProgram(
        num_variables,
        [],
        [],
        [],
        np.zeros(4 * num_gpus),
        np.full(num_variables, np.inf),
        np.zeros(num_variables),
    )
    for block in all_blocks:
        _holders_send_what_is_received(program, block)
        program.ports.extend(_ports_are_done(program.fixed, block, num_gpus))
        _, remote, inside, _, _ = block.variables()
        program.upper[inside.start : inside.stop] = block.size
        program.between[remote.start : remote.stop] = 1.0
    seconds = np.repeat([1 / links.inside_bytes_per_s, 1 / links.between_bytes_per_s], 2 * num_gpus)
    program.ports[:] = [(row, variable, value * seconds[row]) for row, variable, value in program.ports]
    program.fixed[:] *= seconds
    return program


def _row(program: SenderProgram, entries: list[tuple[range, float]], amount: float) -> None:
    """Add a balance row."""
    number = len(program.amounts)
    program.balance.extend((number, v, value) for variables, value in entries for v in variables)
    program.amounts.append(amount)


def _holders_send_what_is_received(program: SenderProgram, block: Block) -> None:
    """Add the balance rows; ``domain_imports_everything`` where receivers relay."""
    local, remote, inside, imported, direct = block.variables()
    count, size = len(block.receivers), block.size
    if block.relays:
        _row(program, [(remote, 1.0), (imported, -1.0), (direct, -float(count))], 0.0)
        _row(program, [(imported, 1.0), (direct, 1.0)], size)
    elif len(inside):
        _row(program, [(local, 1.0), (inside, -1.0)], 0.0)
        _row(program, [(remote, 1.0), (inside, 1.0)], count * size)
    else:
        _row(program, [(local if len(local) else remote, 1.0)], count * size)


def _ports_are_done(fixed: FloatArray, block: Block, num_gpus: int) -> Iterator[Entry]:
    """Yield the bytes that variables add to the ports; add the constant bytes to ``fixed``."""
    local, remote, inside, imported, direct = block.variables()
    out_inside, in_inside, out_between, in_between = (
        port * num_gpus for port in (OUT_INSIDE, IN_INSIDE, OUT_BETWEEN, IN_BETWEEN)
    )
    yield from ((out_inside + s, v, 1.0) for s, v in zip(block.local.tolist(), local, strict=True))
    yield from ((out_between + s, v, 1.0) for s, v in zip(block.remote.tolist(), remote, strict=True))
    if block.relays:
        fixed[in_inside + block.receivers] += block.size
        others = float(len(block.receivers) - 1)
        for receiver, variable in zip(block.receivers.tolist(), imported, strict=True):
            yield in_between + receiver, variable, 1.0
            yield in_between + receiver, direct[0], 1.0
            yield out_inside + receiver, variable, others
            yield in_inside + receiver, variable, -1.0
            yield in_inside + receiver, direct[0], -1.0
    elif len(inside):
        fixed[in_between + block.receivers] += block.size
        for receiver, variable in zip(block.receivers.tolist(), inside, strict=True):
            yield in_inside + receiver, variable, 1.0
            yield in_between + receiver, variable, -1.0
    else:
        fixed[(in_inside if len(local) else in_between) + block.receivers] += block.size


MAX_VARIABLES = 400_000
"""Maximum size of a program (a minute or two). Nearest holders need no program."""
SLACK = 1e-9
"""Relative increase of the minimum time that the second objective, fewer bytes between domains, may use."""


def least_time_routes(lots: Lots, links: Links, relay: bool = False) -> tuple[Routes, float]:
    """Find routes that minimise the time of the busiest port.

    Args:
        lots: lots to move.
        links: rates of the ports.
        relay: receivers may pass on in their domain the bytes that one of them imports. The bound then covers the
            ports' sums over direct messages and relays (in the limit of many waves), else direct messages.

    Returns:
        Routes, and a proved lower bound of the time in seconds.

    Raises:
        InvalidInputError: the program is too large.
        SolverError: the solver failed.
    """
    if len(lots) == 0:
        return Routes.of([]), 0.0
    size = most_variables(lots, links)
    if size > MAX_VARIABLES:
        raise InvalidInputError(
            f"The best senders are a linear program of {size:,} variables.",
            f"Expected at most {MAX_VARIABLES:,}.",
            "Take the nearest senders, or fewer GPUs.",
        )
    all_blocks = blocks(lots, links, relay)
    program = sender_program(all_blocks, links, lots.num_gpus)
    amounts, duals = _solved(program, float(lots.num_bytes.max()), _receiving_s(lots, links))
    bound_s = priced_bound_s(all_blocks, links, lots.num_gpus, duals)
    return Routes.of(list(_routes(all_blocks, amounts))), bound_s


def receiving_bound_s(lots: Lots, links: Links) -> float:
    """Bound the time of all routes from below in seconds, with relays or without.

    The bound takes a fraction of the time of a program and mostly equals the bound of the program. Every rank
    receives the bytes that it lacks over both of its ports, and the bytes without holder in a domain arrive at
    least once over the network ports of all of its ranks.
    """
    if len(lots) == 0:
        return 0.0
    first_ranks = np.arange(0, lots.num_gpus, links.gpus_per_domain)
    held = np.logical_or.reduceat(lots.holders, first_ranks, axis=1)
    lacking = np.logical_or.reduceat(lots.receivers, first_ranks, axis=1)
    received = (lots.num_bytes @ lots.receivers).max() / (links.inside_bytes_per_s + links.between_bytes_per_s)
    imported = (lots.num_bytes @ (lacking & ~held)).max() / (links.gpus_per_domain * links.between_bytes_per_s)
    return float(max(received, imported))


def _receiving_s(lots: Lots, links: Links) -> float:
    """Time the busiest receiver if holders in its own domain send whenever possible: the scale of the program."""
    first_ranks = np.arange(0, lots.num_gpus, links.gpus_per_domain)
    near = np.logical_or.reduceat(lots.holders, first_ranks, axis=1)[:, links.domains(lots.num_gpus)]
    inside, between = (lots.num_bytes @ (lots.receivers & mask) for mask in (near, ~near))
    return float(max(inside.max() / links.inside_bytes_per_s, between.max() / links.between_bytes_per_s))


def _matrix(entries: list[Entry], num_rows: int, num_columns: int) -> Any:
    """Build a sparse matrix by rows."""
    from scipy.sparse import coo_array

    rows, columns, values = np.array(entries, dtype=np.float64).T if entries else np.zeros((3, 0))
    indices = rows.astype(np.int64), columns.astype(np.int64)
    return coo_array((values, indices), shape=(num_rows, num_columns)).tocsr()


def _solved(program: SenderProgram, unit: float, time_s: float) -> tuple[FloatArray, FloatArray]:
    """Solve the program. ``unit`` bytes and ``time_s`` scale it to numbers near 1.

    Returns:
        Bytes of every variable, and dual values of the port rows, which add up to 1.
    """
    # The import takes a second, which every use of the package would pay.
    from scipy.optimize import linprog

    num_ports, size = len(program.fixed), program.num_variables
    balance = _matrix(program.balance, len(program.amounts), size)
    rows = [*((row, v, value * unit / time_s) for row, v, value in program.ports)]
    rows += [(row, 0, -1.0) for row in range(num_ports)]
    ports = _matrix(rows, num_ports, size)
    # An idle port can never be the busiest.
    used = np.diff(ports.indptr) > 1
    used |= program.fixed > 0
    ports, fixed = ports[used], program.fixed[used] / time_s
    upper = program.upper / unit
    right = np.array(program.amounts) / unit

    def run(objective: FloatArray, limit: float) -> tuple[FloatArray, FloatArray]:
        """Minimise an objective with T at most ``limit``; return the solution and the marginals of the ports."""
        upper[0] = limit
        limits = np.column_stack([np.zeros(size), upper])
        answer = linprog(objective, ports, -fixed, balance, right, limits, method="highs")
        if answer.status != 0:
            raise SolverError(
                f"HiGHS did not solve the program of the senders: {answer.message}",
                "Expected a program with a solution.",
                "Report this as a bug, with the two plans; nearest senders work without the program.",
            )
        return answer.x, answer.ineqlin.marginals

    first, marginals = run(np.eye(1, size)[0], np.inf)
    duals = np.zeros(num_ports)
    duals[used] = np.maximum(-marginals, 0.0)
    chosen, _ = run(program.between, float(first[0]) * (1 + SLACK))
    return np.maximum(chosen, 0.0) * unit, duals / duals.sum()


def priced_bound_s(all_blocks: list[Block], links: Links, num_gpus: int, duals: FloatArray) -> float:
    """Bound the time of the busiest port from below by Lagrangian duality, in seconds.

    The busiest port is busy for at least the mean over all ports weighted by duals >= 0 [4 * ranks] that add up to
    1. The mean has its minimum where each part takes its cheapest route. The bound holds for any duals, whatever
    the solver returned.
    """
    inside, between = 1 / links.inside_bytes_per_s, 1 / links.between_bytes_per_s
    price = np.maximum(duals, 0.0).reshape(4, num_gpus) * np.array([inside, inside, between, between])[:, None]
    total = 0.0
    for block in all_blocks:
        ranks = block.receivers
        near = price[OUT_INSIDE, block.local].min(initial=np.inf) + price[IN_INSIDE, ranks]
        far = price[OUT_BETWEEN, block.remote].min(initial=np.inf) + price[IN_BETWEEN, ranks]
        direct = float(np.minimum(near, far).sum())
        if block.relays:
            passing = price[IN_BETWEEN, ranks] + (len(ranks) - 1) * price[OUT_INSIDE, ranks]
            passing = passing + price[IN_INSIDE, ranks].sum() - price[IN_INSIDE, ranks]
            direct = min(direct, float(price[OUT_BETWEEN, block.remote].min() + passing.min()))
        total += block.size * direct
    return total / max(float(duals.sum()), np.finfo(np.float64).tiny)


Demand = tuple[int, float, float]
"""Receiver, and first byte and last byte + 1 of the part of a lot that it needs."""


def _routes(all_blocks: list[Block], amounts: FloatArray) -> Iterator[Route]:
    """Convert the bytes of the variables into routes."""
    for block in all_blocks:
        parts = block.variables()
        local, remote, inside, imported, direct = (amounts[part.start : part.stop] for part in parts)
        ranks, size = block.receivers.tolist(), block.size
        if block.relays:
            yield from _relayed(block, remote, imported, float(direct[0]))
            continue
        border = np.minimum(inside, size) if len(inside) else np.full(len(ranks), size if len(local) else 0.0)
        near = [(rank, 0.0, float(stop)) for rank, stop in zip(ranks, border, strict=True)]
        far = [(rank, float(start), size) for rank, start in zip(ranks, border, strict=True)]
        yield from _dealt(block.lot, block.local, local, near)
        yield from _dealt(block.lot, block.remote, remote, far)


def _relayed(block: Block, remote: FloatArray, imported: FloatArray, direct: float) -> Iterator[Route]:
    """Send the first ``direct`` bytes to all receivers; each importer gets a part of the rest and relays it."""
    ranks = block.receivers.tolist()
    direct = min(direct, block.size)
    weights = imported / imported.sum() if imported.sum() > 0 else np.full(len(ranks), 1 / len(ranks))
    ends = direct + np.cumsum(weights) * (block.size - direct)
    ends[-1] = block.size
    starts = [direct, *ends[:-1].tolist()]
    parts = list(zip(ranks, starts, ends.tolist(), strict=True))
    yield from _dealt(block.lot, block.remote, remote, [(rank, 0.0, direct) for rank in ranks] + parts)
    for importer, start, stop in parts:
        yield from ((block.lot, importer, rank, start, stop, True) for rank in ranks if rank != importer)


def _dealt(lot: int, senders: IntArray, amounts: FloatArray, demands: list[Demand]) -> Iterator[Route]:
    """Assign senders to demands, both in their order; the last sender absorbs rounding errors."""
    wanted = sum(stop - start for _, start, stop in demands)
    total = float(amounts.sum())
    if wanted <= 0 or len(senders) == 0:
        return
    left = (amounts * (wanted / total) if total > 0 else np.full(len(senders), wanted / len(senders))).tolist()
    current = 0
    for receiver, first, stop in demands:
        start = first
        while start < stop:
            last = current == len(senders) - 1
            end = stop if last or left[current] >= stop - start else start + left[current]
            if end > start:
                yield lot, int(senders[current]), receiver, start, end, False
            left[current] -= end - start
            start = end
            if start < stop:
                current += 1
