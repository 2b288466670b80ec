"""What no step of teams undercuts, and how the sequences share the degrees where nothing is lost.

Every seat is busy or idle for the time Z of the step before its reduction, so the seats' time of all micro-batches
is at most M Z. A micro-batch of strategy j takes c_j seats for its time, so with A_j = c_j / M times the sum of
the times under j

    Z >= sum_j A_j,    A_j >= sum_k x_jk share_jtk for every linear bound t without a constant,

because the bounds of ``work`` that have none add up over micro-batches, whatever replica these run on, and share
the D_j = M / c_j replicas evenly. So the linear program

    min sum_j A_j    subject to    A_j >= sum_k x_jk share_jtk,    sum_j x_jk = n_k,    x >= 0

is a bound of all steps of teams, in any order, with any teams. Any weights lambda_jt >= 0 with
sum_t lambda_jt <= 1 prove

    Z >= sum_k n_k min_j sum_t lambda_jt share_jtk,

which is what is reported: the program only finds good weights. Besides, Z is at least the time of the longest
sequence where that is least. In steps shorter than a limit no sequence runs where it takes longer by itself.
``team_prices`` begins here, and counts the constants of micro-batches, too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from milpplan.groups.bounds import glop
from milpplan.lengths.bounds.work_bounds import latencies
from milpplan.lengths.side_by_side.teams import Family
from milpplan.simulation.layout_columns import FloatArray, IntArray

# What sums of floats may add.
_SAFETY = 1.0 - 1e-9
# Where a length does not fit, ns.
_NEVER = 1e18
BUNCHES = 256
"""Most bunches of lengths in a program."""


@dataclass(frozen=True, slots=True, eq=False)
class SharedWork:
    """``bound_ns`` of the step, reduction and finish included; ``prices`` [J, n] ns: the time of all seats that a
    sequence takes at least under every member (infinite where it does not fit)."""

    bound_ns: float
    prices: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class SharedTables:
    """What the bound of a family needs to know of every length: by member the bounds without a constant [T, n] and
    what a sequence takes ``alone`` [J, n], ns; what follows all micro-batches at least."""

    tables: tuple[FloatArray, ...]
    latency_ns: FloatArray
    fixed_cost_ns: int

    @staticmethod
    def of(family: Family) -> SharedTables:
        """Those of a family."""
        pool = family.pool
        alone = [
            latencies(pool.tables[member], pool.members[member], family.max_quanta(member))
            for member in family.members
        ]
        tables = tuple(linear_shares(family, member) for member in family.members)
        return SharedTables(tables, np.array(alone), family.min_fixed_cost_ns)

    def for_lengths(self, held: IntArray) -> SharedTables:
        """Those of some lengths."""
        return SharedTables(tuple(one[:, held] for one in self.tables), self.latency_ns[:, held], self.fixed_cost_ns)

    def shared(self, counts: FloatArray, limit_ns: float = np.inf, bunches: int = BUNCHES) -> SharedWork:
        """The bound of so many sequences of every length [n] in steps shorter than the limit, and the prices that
        prove it, by a program over so many bunches of lengths."""
        longest = int(np.flatnonzero(counts)[-1])
        least_ns = float(self.latency_ns[:, longest].min())
        long = self.latency_ns > limit_ns - self.fixed_cost_ns
        tables = [np.where(never, _NEVER, one) for one, never in zip(self.tables, long, strict=True)]
        if long[:, counts > 0].all(axis=0).any():
            return SharedWork(limit_ns, np.full(self.latency_ns.shape, np.inf))
        prices = _prices(tables, _duals(tables, counts, bunches))
        area = float(counts @ prices.min(axis=0)) * _SAFETY
        bound_ns = min(limit_ns, max(area, least_ns) + self.fixed_cost_ns)
        return SharedWork(bound_ns, np.where(prices < _NEVER, prices, np.inf))


def shared_work(family: Family) -> SharedWork:
    """The bound of a family, and the prices that prove it."""
    return SharedTables.of(family).shared(family.pool.load.counts.astype(np.float64))


def _duals(tables: list[FloatArray], counts: FloatArray, most: int) -> FloatArray | None:
    """Weights of all bounds by the program, members one after another; None if it has no answer.

    Its variables are the shares of at ``most`` so many bunches of neighbouring lengths under every member: a few
    hundred find weights as good as thousands of lengths.
    """
    starts = np.unique(np.linspace(0, len(counts), most, endpoint=False).astype(np.int64))
    works = [np.add.reduceat(table * counts, starts, axis=1) for table in tables]
    fits = np.array([work[0] < _NEVER for work in works])
    number, bunches = fits.shape
    scale = max(1.0, float(np.min([work.max(axis=0) for work in works], axis=0).sum()))
    # Shares of bunches by member, then the members' parts of the seats' time.
    rows = np.zeros((sum(map(len, tables)), number * bunches + number))
    ends = np.cumsum([len(table) for table in tables]).tolist()
    for member, (work, end) in enumerate(zip(works, ends, strict=True)):
        mine = rows[end - len(work) : end]
        mine[:, member * bunches : (member + 1) * bunches] = np.where(fits[member], work / scale, 0.0)
        mine[:, number * bunches + member] = -1.0
    answer = glop.least(
        np.repeat([0.0, 1.0], [number * bunches, number]),
        (rows, np.zeros(len(rows))),
        (np.hstack([np.eye(bunches)] * number + [np.zeros((bunches, number))]), np.ones(bunches)),
        high=np.append(np.where(fits, 1.0, 0.0), np.full(number, np.inf)),
    )
    return None if answer is None else -answer.at_most


def linear_shares(family: Family, member: int) -> FloatArray:
    """A member's bounds without a constant, [T, n] ns of all seats; very much where a length does not fit."""
    found = family.pool.linear_bounds(member, shared_memory=False)
    return np.asarray(np.minimum(found.shares[found.constants == 0.0], _NEVER))


def _prices(tables: list[FloatArray], duals: FloatArray | None) -> FloatArray:
    """The mixture of every member's bounds in proportion to ``duals``, [J, n]; equal parts without any."""
    mixed, start = [], 0
    for table in tables:
        mine = np.zeros(len(table)) if duals is None else np.maximum(0.0, duals[start : start + len(table)])
        start += len(table)
        weights = mine / mine.sum() if mine.sum() > 0 else np.full(len(table), 1.0 / len(table))
        mixed.append(weights @ table)
    return np.array(mixed)
