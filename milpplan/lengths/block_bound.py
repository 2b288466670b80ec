"""What no step of blocks undercuts, and how the sequences share the degrees where nothing is lost.

Every slot is busy or idle for the time Z of the step before its reduction, so the slots' time of all micro-batches
is at most M Z. A micro-batch of strategy j takes c_j slots for its time, so with A_j = c_j / M times the sum of
the times under j

    Z >= sum_j A_j,    A_j >= sum_k x_jk share_jtk for every linear bound t without a constant,

because the bounds of ``work`` that have none add up over micro-batches, whatever replica these run on, and share
the D_j = M / c_j replicas evenly. So the linear program

    min sum_j A_j    subject to    A_j >= sum_k x_jk share_jtk,    sum_j x_jk = n_k,    x >= 0

is a bound of all steps of blocks, in any order, with any blocks. Any weights lambda_jt >= 0 with
sum_t lambda_jt <= 1 prove

    Z >= sum_k n_k min_j sum_t lambda_jt share_jtk,

which is what is reported: the program only finds good weights. Besides, Z is at least the time of the longest
sequence where that is least.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from milpplan.costs.columns import FloatArray
from milpplan.lengths.blocks import Family
from milpplan.lengths.work import serial_times

# What sums of floats may add.
_SAFETY = 1.0 - 1e-9
# Where a length does not fit, ns.
_NEVER = 1e18


@dataclass(frozen=True, slots=True, eq=False)
class SharedWork:
    """``bound_ns`` of the step, reduction and finish included; ``prices`` [J, n] ns: the time of all slots that a
    sequence takes at least under every member (infinite where it does not fit)."""

    bound_ns: float
    prices: FloatArray


def shared_work(family: Family) -> SharedWork:
    """The bound of a family, and the prices that prove it."""
    import scipy.sparse as sparse
    from scipy.optimize import linprog

    counts = family.pool.load.counts.astype(np.float64)
    tables = [_linear(family, member) for member in family.members]
    number, lengths = len(tables), len(counts)
    rows, bounds = [], []
    for j, table in enumerate(tables):
        # x in sequences over the counts: columns scaled to the whole workload, times to the least of it.
        fits = table[0] < _NEVER
        bounds += [(0.0, 1.0 if one else 0.0) for one in fits]
        block = sparse.lil_matrix((len(table), number * lengths + number))
        block[:, j * lengths : (j + 1) * lengths] = np.where(fits, table, 0.0) * counts
        block[:, number * lengths + j] = -1.0
        rows.append(block)
    scale = 1.0 / max(1.0, float(counts @ np.min([table.max(axis=0) for table in tables], axis=0)))
    matrix = sparse.vstack(rows).tocsr()
    matrix[:, : number * lengths] *= scale
    whole = sparse.hstack([sparse.eye(lengths)] * number + [sparse.csr_matrix((lengths, number))]).tocsr()
    cost = np.concatenate([np.zeros(number * lengths), np.ones(number)])
    answer = linprog(
        cost,
        A_ub=matrix,
        b_ub=np.zeros(matrix.shape[0]),
        A_eq=whole,
        b_eq=np.ones(lengths),
        bounds=[*bounds, *([(0.0, None)] * number)],
        method="highs",
    )
    prices = _prices(tables, -np.asarray(answer.ineqlin.marginals) if answer.status == 0 else None)
    area = float(counts @ prices.min(axis=0)) * _SAFETY
    return SharedWork(max(area, _longest_ns(family)) + family.once_ns, np.where(prices < _NEVER, prices, np.inf))


def _linear(family: Family, member: int) -> FloatArray:
    """The bounds without a constant, [T, n]."""
    found = family.pool.bounds(member, beside=False)
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


def _longest_ns(family: Family) -> float:
    """The longest sequence by itself under the member that runs it in the least time."""
    pool = family.pool
    return min(
        float(serial_times(pool.tables[member], pool.members[member], family.grains(member))[-1])
        for member in family.members
    )
