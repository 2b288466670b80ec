"""The linear program that chooses the senders of a switch.

Sets. Lots a with b_a bytes, domains n, ranks r. A block (a, n) is a lot and the k receivers in a domain that lack
it; L are its holders in the domain, O all other holders.

Variables of a block, bytes, >= 0: ``local[s]``, which holder s in L sends to the receivers together;
``remote[s]``, likewise for s in O; ``inside[r]``, which receiver r gets from L. With relays and an empty L also
``imported[r]``, which r gets once for the whole domain and passes on, and ``direct``, which every receiver gets
for itself. T: the time of the busiest port.

Rows. With L: sum local = sum inside, sum remote = k b - sum inside, inside <= b
(``holders_send_what_is_received``). Without L, with relays: sum remote = sum imported + k direct, sum imported +
direct = b (``domain_imports_everything``). Ports: bytes / rate <= T (``ports_are_done``), where a relaying rank
sends (k - 1) imported[r] inside its domain and receives b - direct - imported[r] from its neighbours.

Sums over receivers suffice: any sums of holders and receivers of one block that agree are a transport between
them. Objective: T, then with that T the bytes between domains.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from milpplan.simulation.layout_columns import FloatArray, IntArray
from milpplan.switching.links import IN_BETWEEN, IN_INSIDE, OUT_BETWEEN, OUT_INSIDE, Links
from milpplan.switching.slices import Lots


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
