"""Large neighbourhood search: a connected part of the graph is solved exactly while all other nodes stay.

Parts overlap by half and cover the graph; passes over all parts are repeated while one gains.

Source: large neighbourhood search; P. Shaw, CP 1998.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import numpy as np

from milpplan.errors import SolverError
from milpplan.graph.instance import HALF, Instance, clipped
from milpplan.graph.integer_program import GraphProgram, size_of
from milpplan.graph.reduction import prune
from milpplan.optimize.milp.program import IntArray
from milpplan.optimize.milp.solution import Backend, Limits

# Nodes of a part, and variables of its program.
PART: Final = 20
MAX_PART_VARIABLES: Final = 4000
MAX_PASSES: Final = 2
# Relative gap of a part's program: enough to gain, without time spent on proofs.
PART_GAP: Final = 1e-3


def improved_parts(
    instance: Instance,
    positions: dict[int, int],
    backend: Backend,
    limits: Limits,
    deadline: float,
    offer: Callable[[dict[int, int]], bool],
) -> dict[int, int]:
    """Improve a choice part by part.

    Args:
        instance: the instance.
        positions: the choice to start from.
        backend: solver of the parts.
        limits: limits of the backend; its time and gap are set here.
        deadline: end of the search, on the clock of ``perf_counter``.
        offer: receives every cheaper choice, and tells whether it is kept.

    Returns:
        Positions that no part improves by more than ``PART_GAP``, or the best at the deadline.
    """
    current = dict(positions)
    parts = _parts(instance)
    for _ in range(MAX_PASSES):
        gained = False
        for part in parts:
            left_s = deadline - time.perf_counter()
            if left_s <= 0:
                return current
            limits = replace(limits, time_limit_s=left_s if left_s < 1e8 else None, relative_gap=PART_GAP)
            better = _solved(instance, current, part, backend, limits)
            if better is not None and offer(current | better):
                current |= better
                gained = True
        if not gained:
            return current
    return current


def _parts(instance: Instance) -> list[list[int]]:
    """Cut a breadth-first order, which keeps neighbours together, into runs that overlap by half."""
    order = _breadth_first(instance)
    half = max(1, PART // 2)
    return [order[first : first + PART] for first in range(0, max(1, len(order) - half), half)]


def _breadth_first(instance: Instance) -> list[int]:
    """Order the nodes breadth first, component by component."""
    around = instance.neighbours()
    seen: dict[int, None] = {}
    for start in sorted(around):
        queue = [start] if start not in seen else []
        seen.setdefault(start)
        for node in queue:
            new = [other for other in sorted(around[node]) if other not in seen]
            seen.update(dict.fromkeys(new))
            queue += new
    return list(seen)


def _solved(
    instance: Instance, positions: dict[int, int], part: list[int], backend: Backend, limits: Limits
) -> dict[int, int] | None:
    """Solve a part. Returns cheaper positions, None if there are none or the backend gives no answer."""
    small = part_of(instance, positions, part)
    current_cost = _cost(small, {i: positions[i] for i in part})
    kept = small.copy()
    if not prune(kept) or size_of(kept) > MAX_PART_VARIABLES:
        return None
    program = GraphProgram(kept)
    try:
        solution = backend.solve(program.state(None), limits)
    except (SolverError, ImportError, OSError):
        return None
    if solution.values is None:
        return None
    better = {i: int(kept.kept[i][s]) for i, s in program.positions(solution).items()}
    return better if _cost(small, better) < current_cost else None


def part_of(instance: Instance, positions: dict[int, int], part: list[int]) -> Instance:
    """Restrict the instance to some nodes, all others fixed at their positions. Strategies are positions."""
    free = set(part)
    costs = {i: instance.costs[i] for i in part}
    edges = {}
    for (i, j), matrix in instance.edges.items():
        if i in free and j in free:
            edges[i, j] = matrix
        elif i in free:
            costs[i] = clipped(costs[i] + matrix[:, positions[j]])
        elif j in free:
            costs[j] = clipped(costs[j] + matrix[positions[i]])
    limits = instance.limits.copy()
    touched: set[int] = set()
    for i, loads in instance.loads.items():
        if i in free:
            touched.update(instance.rows[i].tolist())
        else:
            limits[instance.rows[i]] -= loads[:, positions[i]]
    new_row = {row: k for k, row in enumerate(sorted(touched))}
    rows = {i: _numbered(instance.rows[i], new_row) for i in part if i in instance.rows}
    return replace(
        instance,
        kept={i: np.arange(costs[i].size, dtype=np.int64) for i in part},
        costs=costs,
        edges=edges,
        rows=rows,
        loads={i: instance.loads[i] for i in rows},
        limits=limits[sorted(touched)],
        ranks={i: instance.ranks[i] for i in rows if i in instance.ranks},
        offset=0,
    )


def _numbered(rows: IntArray, new_row: dict[int, int]) -> IntArray:
    """Return the new numbers of rows."""
    return np.array([new_row[row] for row in rows.tolist()], np.int64)


def _cost(instance: Instance, positions: dict[int, int]) -> int:
    """Return the cost of positions of a part that has all its strategies; at least ``HALF`` if forbidden."""
    total = sum(int(instance.costs[i][s]) for i, s in positions.items())
    return min(total + sum(int(m[positions[i], positions[j]]) for (i, j), m in instance.edges.items()), 2 * HALF)
