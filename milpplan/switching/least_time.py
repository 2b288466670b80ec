"""Optimal senders: routes that minimise the time of the busiest port, with a proved lower bound of this time.

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

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from milpplan.errors import InvalidInputError, SolverError
from milpplan.simulation.layout_columns import FloatArray, IntArray
from milpplan.switching.routes import IN_BETWEEN, IN_INSIDE, OUT_BETWEEN, OUT_INSIDE, Links, Route, Routes
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
