"""Linear lower bound of all steps of teams, and how sequences share the degrees in its solution.

Every slot is busy or idle for the time Z of the step before its reduction, so the slot time of all micro-batches
is at most M Z. A micro-batch of strategy j takes c_j slots for its time, so with A_j = c_j / M times the sum of
the times under j

    Z >= sum_j A_j,    A_j >= sum_k x_jk share_jtk for every linear bound t without a constant,

because the bounds of ``work_bounds`` without constant add up over micro-batches, whatever replica these run on,
and divide evenly among the D_j = M / c_j replicas. So the linear program

    min sum_j A_j    subject to    A_j >= sum_k x_jk share_jtk,    sum_j x_jk = n_k,    x >= 0

is a bound of all steps of teams, in any order, with any teams. Any weights lambda_jt >= 0 with sum_t lambda_jt <=
1 prove

    Z >= sum_k n_k min_j sum_t lambda_jt share_jtk,

which is the reported bound: the program only finds good weights. Besides, Z is at least the minimum time of the
longest sequence. In steps below a limit no sequence runs where it takes longer by itself. ``sequence_duals``
begins here, and counts the constants of micro-batches, too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from milpplan.groups.bounds import glop
from milpplan.lengths.bounds.work_bounds import latencies
from milpplan.lengths.side_by_side.teams import Family
from milpplan.simulation.layout_columns import FloatArray, IntArray

# Factor that covers the rounding of float sums.
_SAFETY = 1.0 - 1e-9
# Time of a length that does not fit, ns.
_NEVER = 1e18
BUNCHES = 256
"""Maximum number of bunches of lengths in a program."""


@dataclass(frozen=True, slots=True, eq=False)
class SharedWork:
    """Lower bound of the step with reduction and finish."""

    bound_ns: float
    prices: FloatArray
    """Minimum slot time of a sequence over M under every member, [J, n] ns; infinite where it does not fit."""


@dataclass(frozen=True, slots=True, eq=False)
class SharedTables:
    """Data of a family's bound by length."""

    tables: tuple[FloatArray, ...]
    """By member: bounds without a constant, [T, n] ns."""
    latency_ns: FloatArray
    """Minimum time of a sequence under every member, [J, n]."""
    fixed_cost_ns: int
    """Minimum time after all micro-batches."""

    @staticmethod
    def of(family: Family) -> SharedTables:
        """Build the data of a family."""
        pool = family.pool
        latency_ns = [
            latencies(pool.tables[member], pool.members[member], family.max_quanta(member))
            for member in family.members
        ]
        tables = tuple(linear_shares(family, member) for member in family.members)
        return SharedTables(tables, np.array(latency_ns), family.min_fixed_cost_ns)

    def for_lengths(self, lengths: IntArray) -> SharedTables:
        """Return the data restricted to some lengths."""
        return SharedTables(
            tuple(table[:, lengths] for table in self.tables), self.latency_ns[:, lengths], self.fixed_cost_ns
        )

    def shared(self, counts: FloatArray, limit_ns: float = np.inf, bunches: int = BUNCHES) -> SharedWork:
        """Return the bound of ``counts`` [n] sequences in steps below the limit, and the prices that prove it, by
        a program over bunches of lengths."""
        longest = int(np.flatnonzero(counts)[-1])
        longest_ns = float(self.latency_ns[:, longest].min())
        is_too_long = self.latency_ns > limit_ns - self.fixed_cost_ns
        tables = [
            np.where(is_excluded, _NEVER, table)
            for table, is_excluded in zip(self.tables, is_too_long, strict=True)
        ]
        if is_too_long[:, counts > 0].all(axis=0).any():
            return SharedWork(limit_ns, np.full(self.latency_ns.shape, np.inf))
        prices = _prices(tables, _duals(tables, counts, bunches))
        area = float(counts @ prices.min(axis=0)) * _SAFETY
        bound_ns = min(limit_ns, max(area, longest_ns) + self.fixed_cost_ns)
        return SharedWork(bound_ns, np.where(prices < _NEVER, prices, np.inf))


def shared_work(family: Family) -> SharedWork:
    """Return the bound of a family, and the prices that prove it."""
    return SharedTables.of(family).shared(family.pool.load.counts.astype(np.float64))


def _duals(tables: list[FloatArray], counts: FloatArray, max_bunches: int) -> FloatArray | None:
    """Return weights of all bounds by the program, members one after another; None without a solution.

    Its variables are the shares of at most ``max_bunches`` bunches of neighbouring lengths under every member: a
    few hundred find weights as good as thousands of lengths.
    """
    starts = np.unique(np.linspace(0, len(counts), max_bunches, endpoint=False).astype(np.int64))
    works = [np.add.reduceat(table * counts, starts, axis=1) for table in tables]
    fits = np.array([work[0] < _NEVER for work in works])
    num_members, bunches = fits.shape
    scale = max(1.0, float(np.min([work.max(axis=0) for work in works], axis=0).sum()))
    # Shares of bunches by member, then the members' parts of the slot time.
    rows = np.zeros((sum(map(len, tables)), num_members * bunches + num_members))
    ends = np.cumsum([len(table) for table in tables]).tolist()
    for member, (work, end) in enumerate(zip(works, ends, strict=True)):
        own_rows = rows[end - len(work) : end]
        own_rows[:, member * bunches : (member + 1) * bunches] = np.where(fits[member], work / scale, 0.0)
        own_rows[:, num_members * bunches + member] = -1.0
    answer = glop.least(
        np.repeat([0.0, 1.0], [num_members * bunches, num_members]),
        (rows, np.zeros(len(rows))),
        (np.hstack([np.eye(bunches)] * num_members + [np.zeros((bunches, num_members))]), np.ones(bunches)),
        high=np.append(np.where(fits, 1.0, 0.0), np.full(num_members, np.inf)),
    )
    return None if answer is None else -answer.at_most


def linear_shares(family: Family, member: int) -> FloatArray:
    """Return a member's bounds without a constant, [T, n] ns over all slots; a huge value where a length does not
    fit."""
    bounds = family.pool.linear_bounds(member, shared_memory=False)
    return np.asarray(np.minimum(bounds.shares[bounds.constants == 0.0], _NEVER))


def _prices(tables: list[FloatArray], duals: FloatArray | None) -> FloatArray:
    """Return the mixture of every member's bounds in proportion to ``duals``, [J, n]; equal parts without any."""
    mixed, start = [], 0
    for table in tables:
        own = np.zeros(len(table)) if duals is None else np.maximum(0.0, duals[start : start + len(table)])
        start += len(table)
        weights = own / own.sum() if own.sum() > 0 else np.full(len(table), 1.0 / len(table))
        mixed.append(weights @ table)
    return np.array(mixed)
