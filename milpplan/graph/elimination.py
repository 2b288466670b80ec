"""Exact elimination of nodes (dynamic programming along any order), while tables stay small.

A node is minimised out of the sum of its costs and of all tables that it is in; the result is a table over its
neighbours. Chains and trees need vectors only, rings and series-parallel graphs matrices, a graph of treewidth w
tables of w dimensions.

Source: bucket elimination; R. Dechter, Artificial Intelligence 113 (1999).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Final

import numpy as np

from milpplan.graph.instance import FORBIDDEN, HALF, Instance, clipped
from milpplan.optimize.milp.program import IntArray

# Maximum number of entries of one table, and of all tables together.
MAX_TABLE: Final = 2**22
MAX_WORK: Final = 2**29
Scope = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """One eliminated node: the costs and tables from which its choice follows, its neighbours' given."""

    node: int
    kept: IntArray
    costs: IntArray
    tables: tuple[tuple[Scope, IntArray], ...]
    kept_of: dict[int, IntArray]

    def choose(self, choice: dict[int, int]) -> int:
        """Return the best original strategy for the neighbours' choice."""
        total = self.costs
        for scope, table in self.tables:
            index: list[int | slice] = [slice(None)]
            index += [int(np.searchsorted(self.kept_of[i], choice[i])) for i in scope]
            total = clipped(total + table[tuple(index)])
        return int(self.kept[int(total.argmin())])


def undo(steps: list[Step], choice: dict[int, int]) -> dict[int, int]:
    """Extend a choice by all eliminated nodes."""
    full = dict(choice)
    for step in reversed(steps):
        full[step.node] = step.choose(full)
    return full


def complete_order(instance: Instance) -> list[int] | None:
    """Return an order by minimum degree that eliminates every node with small tables; None if there is none."""
    return _order(instance, set(instance.costs), None)


def cheap_order(instance: Instance) -> list[int]:
    """List nodes without a load whose elimination leaves at most matrices between pairs."""
    free = {i for i in instance.costs if i not in instance.loads}
    return _order(instance, free, 2) or []


def _order(instance: Instance, nodes: set[int], max_degree: int | None) -> list[int] | None:
    """Order nodes by minimum degree while tables stay small.

    Returns:
        The order. With ``max_degree`` it ends at the first larger degree or table; without, a large table gives
        None.
    """
    around = instance.neighbours()
    size = {i: c.size for i, c in instance.costs.items()}
    heap = [(len(around[i]), i) for i in sorted(nodes)]
    heapq.heapify(heap)
    order: list[int] = []
    gone: set[int] = set()
    work = 0
    while heap:
        degree, node = heapq.heappop(heap)
        if node in gone or degree != len(around[node]):
            continue
        if max_degree is not None and degree > max_degree:
            break
        table = size[node]
        for other in around[node]:
            table *= size[other]
        work += table
        if table > MAX_TABLE or work > MAX_WORK:
            return None if max_degree is None else order
        order.append(node)
        gone.add(node)
        for other in around[node]:
            around[other] |= around[node]
            around[other] -= {other, node}
        for other in around[node]:
            if other in nodes:
                heapq.heappush(heap, (len(around[other]), other))
    return order


def eliminate(instance: Instance, order: list[int]) -> tuple[Instance, list[Step]] | None:
    """Eliminate the nodes of ``order``.

    Tables over more than two nodes must be eliminated in turn.

    Returns:
        The instance without these nodes, of the same optimum, and the steps back; None if a node has no allowed
        strategy.
    """
    reduced = instance.copy()
    tables: dict[Scope, IntArray] = dict(reduced.edges)  # type: ignore[arg-type]
    scopes: dict[int, set[Scope]] = {i: set() for i in reduced.costs}
    for scope in tables:
        for i in scope:
            scopes[i].add(scope)
    steps = []
    for node in order:
        node_tables = [(scope, tables.pop(scope)) for scope in sorted(scopes.pop(node))]
        oriented = [_first(scope, table, node) for scope, table in node_tables]
        others = sorted({i for scope, _ in oriented for i in scope})
        kept_of = {i: reduced.kept[i] for i in others}
        steps.append(Step(node, reduced.kept.pop(node), reduced.costs.pop(node), tuple(oriented), kept_of))
        for scope, _ in node_tables:
            for i in scope:
                if i != node:
                    scopes[i].discard(scope)
        minimum = _minimum(steps[-1], others, reduced)
        smallest = int(minimum.min())
        if smallest >= HALF:
            return None
        reduced.offset += smallest
        minimum = np.where(minimum >= HALF, FORBIDDEN, minimum - smallest)
        if len(others) == 1:
            reduced.costs[others[0]] = clipped(reduced.costs[others[0]] + minimum)
        elif others:
            scope = tuple(others)
            tables[scope] = clipped(tables[scope] + minimum) if scope in tables else minimum
            for i in others:
                scopes[i].add(scope)
    reduced.edges = {(s[0], s[1]): t for s, t in tables.items()}
    return reduced, steps


def _first(scope: Scope, table: IntArray, node: int) -> tuple[Scope, IntArray]:
    """Move the node's axis to the front. Returns the scope of the other axes, and the table."""
    axis = scope.index(node)
    return scope[:axis] + scope[axis + 1 :], np.moveaxis(table, axis, 0)


def _minimum(step: Step, others: list[int], instance: Instance) -> IntArray:
    """Minimise over the node's strategies, for every choice of the others."""
    shape = [instance.costs[i].size for i in others]
    total = step.costs.reshape(-1, *([1] * len(others)))
    for scope, table in step.tables:
        sizes = [n if i in scope else 1 for i, n in zip(others, shape, strict=True)]
        total = clipped(total + table.reshape(table.shape[0], *sizes))
    minimum: IntArray = total.min(axis=0)
    return np.broadcast_to(minimum, shape)


def solve_exactly(instance: Instance, order: list[int]) -> tuple[int, dict[int, int]] | None:
    """Return the optimum without memory limits and a choice that attains it; None if no choice is allowed."""
    eliminated = eliminate(instance, order)
    if eliminated is None:
        return None
    rest, steps = eliminated
    return rest.offset, undo(steps, {})
