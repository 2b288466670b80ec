"""The memory rows of an answer, and the explanation of an infeasible graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from milpplan.graph.elimination import complete_order, solve_exactly
from milpplan.graph.instance import Instance, Stated
from milpplan.graph.reduction import prune
from milpplan.graph.result import MemoryRow
from milpplan.optimize.milp.program import FloatArray

if TYPE_CHECKING:
    from milpplan.graph.strategy_graph import StrategyGraph


def memory_rows(graph: StrategyGraph, choice: npt.NDArray[np.int64] | None) -> tuple[MemoryRow, ...]:
    """List every memory limit with the use of the choice and the smallest possible use."""
    used = None if choice is None else graph.memory_of(choice)
    limits = graph.limits()
    if not limits.size:
        return ()
    smallest = graph.summed_memory(np.stack([_smallest_memory(graph, i) for i in range(graph.num_nodes)]))
    return tuple(
        MemoryRow(s, d, float(limits[d]), None if used is None else float(used[s, d]), float(smallest[s, d]))
        for s, d in np.ndindex(smallest.shape)
    )


def _smallest_memory(graph: StrategyGraph, node: int) -> FloatArray:
    """Return the smallest memory of the node's allowed strategies, per device."""
    allowed = np.isfinite(np.asarray(graph.node_costs[node]))
    memory = graph.memory_vector(node)
    smallest: FloatArray = memory[allowed].min(axis=0) if allowed.any() else np.full(memory.shape[1], np.inf)
    return smallest


def infeasibility(graph: StrategyGraph, stated: Stated) -> str:
    """Explain why no choice exists: forbidden pairs alone, one limit alone, or several together."""
    bare = stated.instance.copy()
    bare.rows, bare.loads, bare.peaks = {}, {}, []
    if not prune(bare, dominance=False):
        return "No choice is allowed even without memory limits: the forbidden strategies and pairs leave none."
    order = complete_order(bare)
    if order is not None and solve_exactly(bare, order) is None:
        return "No choice is allowed even without memory limits: the forbidden strategies and pairs leave none."
    worst, exact = _least_of_rows(stated, bare)
    if worst is None:
        alone = "; each limit alone can be met" if exact and stated.loads_exact else ""
        return f"Forbidden pairs and memory limits together leave no choice{alone}."
    row, smallest = worst
    index, device = stated.row_of[row]
    limit = float(graph.limits()[device])
    needed = smallest * stated.load_units[device]
    return (
        f"The least memory that any allowed choice takes of alive set {index} on device {device} is "
        f"{needed:.6g}; the limit is {limit:.6g}. Raise the limit to at least that, or allow cheaper strategies."
    )


def _least_of_rows(stated: Stated, bare: Instance) -> tuple[tuple[int, int] | None, bool]:
    """Find the row that no choice meets even alone, with the largest relative excess.

    Returns:
        The row's number and its smallest load (None: every row can be met alone), and whether all smallest loads
        are exact or only lower bounds.
    """
    worst: tuple[float, int, int] | None = None
    all_exact = True
    for row, limit in enumerate(stated.instance.limits.tolist()):
        smallest, exact = _least_load(stated, bare, row)
        all_exact &= exact
        excess = (smallest - limit) / max(limit, 1)
        if smallest > limit and (worst is None or excess > worst[0]):
            worst = (excess, row, smallest)
    return None if worst is None else (worst[1], worst[2]), all_exact


def _least_load(stated: Stated, bare: Instance, row: int) -> tuple[int, bool]:
    """Minimise the load of one row over the allowed pairs.

    Returns:
        The smallest load, and whether it is exact (elimination worked) or a lower bound (node by node).
    """
    loads = {}
    for i, kept in bare.kept.items():
        rows = stated.instance.rows.get(i, np.zeros(0, np.int64))
        positions = np.flatnonzero(rows == row)
        loads[i] = (
            stated.instance.loads[i][positions[0]][kept] if positions.size else np.zeros(kept.size, np.int64)
        )
    row_instance = bare.copy()
    row_instance.costs = loads
    row_instance.edges = {pair: np.where(m >= 2**57, m, 0) for pair, m in bare.edges.items()}
    row_instance.edges = {pair: m for pair, m in row_instance.edges.items() if m.any()}
    row_instance.offset = 0
    order = complete_order(row_instance)
    solved = solve_exactly(row_instance, order) if order is not None else None
    return (sum(int(c.min()) for c in loads.values()), False) if solved is None else (solved[0], True)
