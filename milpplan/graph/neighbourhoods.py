"""A better choice than single changes find: a connected part of the graph solved exactly, all else as it is.

Parts overlap by half and cover the graph; they are gone through again while that gains.

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
# Parts are solved to this share of their own cost: enough to gain, and no time goes into their proofs.
PART_GAP: Final = 1e-3


def improved_parts(
    instance: Instance,
    positions: dict[int, int],
    backend: Backend,
    limits: Limits,
    deadline: float,
    offer: Callable[[dict[int, int]], bool],
) -> dict[int, int]:
    """Positions that no part betters by more than ``PART_GAP``, or the best when time is over. Every better one is
    offered; one that is refused is not kept. ``limits`` says more than the time and the gap of a part."""
    at = dict(positions)
    parts = _parts(instance)
    for _ in range(MAX_PASSES):
        gained = False
        for part in parts:
            left = deadline - time.perf_counter()
            if left <= 0:
                return at
            limits = replace(limits, time_limit_s=left if left < 1e8 else None, relative_gap=PART_GAP)
            better = _solved(instance, at, part, backend, limits)
            if better is not None and offer(at | better):
                at |= better
                gained = True
        if not gained:
            return at
    return at


def _parts(instance: Instance) -> list[list[int]]:
    """Runs of nodes in an order that keeps neighbours together, each beginning in the middle of the one before."""
    order = _breadth_first(instance)
    half = max(1, PART // 2)
    return [order[at : at + PART] for at in range(0, max(1, len(order) - half), half)]


def _breadth_first(instance: Instance) -> list[int]:
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
    instance: Instance, at: dict[int, int], part: list[int], backend: Backend, limits: Limits
) -> dict[int, int] | None:
    """Cheaper positions of a part; None if there are none or the backend has no answer."""
    small = part_of(instance, at, part)
    own = _cost(small, {i: at[i] for i in part})
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
    found = {i: int(kept.kept[i][s]) for i, s in program.positions(solution).items()}
    return found if _cost(small, found) < own else None


def part_of(instance: Instance, at: dict[int, int], part: list[int]) -> Instance:
    """The problem of some nodes while all others stay at their positions. Its strategies are positions."""
    free = set(part)
    costs = {i: instance.costs[i] for i in part}
    edges = {}
    for (i, j), matrix in instance.edges.items():
        if i in free and j in free:
            edges[i, j] = matrix
        elif i in free:
            costs[i] = clipped(costs[i] + matrix[:, at[j]])
        elif j in free:
            costs[j] = clipped(costs[j] + matrix[at[i]])
    limits = instance.limits.copy()
    touched: set[int] = set()
    for i, loads in instance.loads.items():
        if i in free:
            touched.update(instance.rows[i].tolist())
        else:
            limits[instance.rows[i]] -= loads[:, at[i]]
    place = {row: k for k, row in enumerate(sorted(touched))}
    rows = {i: _numbered(instance.rows[i], place) for i in part if i in instance.rows}
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


def _numbered(rows: IntArray, place: dict[int, int]) -> IntArray:
    return np.array([place[row] for row in rows.tolist()], np.int64)


def _cost(instance: Instance, at: dict[int, int]) -> int:
    """Cost of positions of a part that has all its strategies; at least ``HALF`` if forbidden."""
    total = sum(int(instance.costs[i][s]) for i, s in at.items())
    return min(total + sum(int(m[at[i], at[j]]) for (i, j), m in instance.edges.items()), 2 * HALF)
