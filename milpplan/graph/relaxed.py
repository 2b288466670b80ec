"""Multipliers of limits and messages of edges from the linear relaxation: the local polytope with rows of memory.

Only the duals are taken: whatever they are, ``message_passing`` sums a bound from them in integers.

    minimise sum c y + sum E e    dual of  sum_t e[i, j, s, t] - y[i, s] = 0:      message to i, strategy s
                                  dual of  sum load y <= limit, sign turned:     multiplier of the row
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
from scipy import optimize, sparse

from milpplan.graph.instance import HALF, Instance, Pair
from milpplan.optimize.milp.program import FloatArray, IntArray
from milpplan.optimize.milp.solution import run_interruptibly

# Variables of the largest relaxation that is solved.
MAX_RELAXED: Final = 100_000
_BIG: Final = 1e9
# The largest message, in cost: the sum of all finite costs is smaller.
_MESSAGE: Final = 2.0**52


@dataclass(frozen=True, slots=True, eq=False)
class Duals:
    """Duals of the relaxation.

    ``prices`` [rows] are the limits' multipliers in cost per unit of load; ``messages`` belong to every edge's two
    ends, in cost; ``picked`` (positions) is the strategy of every node with the largest value.
    """

    prices: FloatArray
    messages: dict[Pair, tuple[IntArray, IntArray]]
    picked: dict[int, int]


def relaxed_duals(
    instance: Instance, deadline: float, cancelled: Callable[[], bool] | None = None
) -> Duals | None:
    """Solve the relaxation for its duals; None if there is no answer in time."""
    starts, width = _columns_of(instance)
    agree, pairs, costs = _agreement(instance, starts, width)
    total = width + costs.size
    nodes = sparse.csr_matrix(
        (np.ones(width), (np.repeat(np.arange(len(starts)), _sizes(instance)), np.arange(width))),
        shape=(len(starts), total),
    )
    loads, sides, scale = _load_rows(instance, starts, total)
    raw = np.concatenate([*(instance.costs[i] for i in starts), costs]).astype(np.float64)
    unit = float(np.abs(raw[raw < HALF]).max(initial=1.0))
    equations = sparse.vstack([nodes, agree]).tocsr()
    options: dict[str, Any] = {}
    left_s = deadline - time.perf_counter()
    if left_s < _BIG / 2:
        options["time_limit"] = max(left_s, 0.0)
    solving = partial(
        optimize.linprog,
        np.where(raw < HALF, raw / unit, 0.0),
        A_ub=loads,
        b_ub=sides,
        A_eq=equations,
        b_eq=np.concatenate([np.ones(len(starts)), np.zeros(agree.shape[0])]),
        bounds=np.stack([np.zeros(total), np.where(raw < HALF, 1.0, 0.0)], axis=1),
        method="highs",
        options=options,
    )
    # In a thread of its own: SciPy cannot stop a solve, so an interrupted one is abandoned.
    answer = run_interruptibly(solving, lambda: None, grace_s=0.0, cancelled=cancelled)
    if answer.status != 0:
        return None
    prices = np.nan_to_num(np.maximum(0.0, -np.asarray(answer.ineqlin.marginals)) * unit / scale, posinf=0.0)
    # Any messages give a bound as long as their sums do not overflow.
    useful = np.clip(np.nan_to_num(np.asarray(answer.eqlin.marginals)[len(starts) :] * unit), -_MESSAGE, _MESSAGE)
    messages = np.floor(useful).astype(np.int64)
    picked = {i: int(np.argmax(answer.x[at : at + instance.costs[i].size])) for i, at in starts.items()}
    return Duals(prices, {pair: (messages[a], messages[b]) for pair, (a, b) in pairs.items()}, picked)


def _sizes(instance: Instance) -> list[int]:
    """Return the number of strategies of every node, in the order of nodes."""
    return [instance.costs[i].size for i in sorted(instance.costs)]


def _columns_of(instance: Instance) -> tuple[dict[int, int], int]:
    """Return the first column of every node, and the number of columns of all nodes."""
    sizes = _sizes(instance)
    firsts = (np.cumsum(sizes) - sizes).tolist()
    return dict(zip(sorted(instance.costs), firsts, strict=True)), sum(sizes)


def _agreement(
    instance: Instance, starts: dict[int, int], width: int
) -> tuple[sparse.csr_matrix, dict[Pair, tuple[slice, slice]], IntArray]:
    """Build the rows that tie pairs to their ends.

    Returns them, the rows of every edge's ends, and the pairs' costs.
    """
    rows, columns, values = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], [np.zeros(0)]
    costs = [np.zeros(0, np.int64)]
    pairs: dict[Pair, tuple[slice, slice]] = {}
    row, column = 0, width
    for (i, j), matrix in instance.edges.items():
        s, t = np.nonzero(matrix < HALF)
        pair_columns = column + np.arange(s.size)
        costs.append(matrix[s, t])
        column += s.size
        slices = []
        for node, side, size in ((i, s, matrix.shape[0]), (j, t, matrix.shape[1])):
            rows += [row + side, row + np.arange(size)]
            columns += [pair_columns, starts[node] + np.arange(size)]
            values += [np.ones(s.size), -np.ones(size)]
            slices.append(slice(row, row + size))
            row += size
        pairs[i, j] = (slices[0], slices[1])
    entries = np.concatenate(values), (np.concatenate(rows), np.concatenate(columns))
    return sparse.csr_matrix(entries, shape=(row, column)), pairs, np.concatenate(costs)


def _load_rows(
    instance: Instance, starts: dict[int, int], total: int
) -> tuple[sparse.csr_matrix, FloatArray, FloatArray]:
    """Build the rows of the limits. Returns them scaled, their right-hand sides, and the scale of each."""
    rows, columns, values = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for i, loads in instance.loads.items():
        rows.append(np.repeat(instance.rows[i], loads.shape[1]))
        columns.append(np.tile(starts[i] + np.arange(loads.shape[1]), loads.shape[0]))
        values.append(loads.ravel())
    index = np.concatenate(rows)
    largest = np.zeros(instance.limits.size)
    np.maximum.at(largest, index, np.concatenate(values).astype(np.float64))
    scale = np.where(largest > 0, largest, 1.0)
    matrix = sparse.csr_matrix(
        (np.concatenate(values) / scale[index], (index, np.concatenate(columns))), shape=(scale.size, total)
    )
    return matrix, instance.limits / scale, scale
