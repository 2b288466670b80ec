"""Exact elimination of nodes (dynamic programming along any order), while tables stay small.

A node is minimised out of the sum of its costs and of all tables that it is in; what is left is a table over its
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

# Entries of the largest table that is looked at, and of all together.
MAX_TABLE: Final = 2**22
MAX_WORK: Final = 2**29
Scope = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """One eliminated node: what its choice was minimised over, to be looked up once the others are chosen."""

    node: int
    kept: IntArray
    costs: IntArray
    tables: tuple[tuple[Scope, IntArray], ...]
    kept_of: dict[int, IntArray]

    def choose(self, choice: dict[int, int]) -> int:
        """The best original strategy, the neighbours' given."""
        total = self.costs
        for scope, table in self.tables:
            index: list[int | slice] = [slice(None)]
            index += [int(np.searchsorted(self.kept_of[i], choice[i])) for i in scope]
            total = clipped(total + table[tuple(index)])
        return int(self.kept[int(total.argmin())])


def undo(steps: list[Step], choice: dict[int, int]) -> dict[int, int]:
    """The choice with all eliminated nodes."""
    full = dict(choice)
    for step in reversed(steps):
        full[step.node] = step.choose(full)
    return full


def complete_order(instance: Instance) -> list[int] | None:
    """An order that eliminates everything with small tables, by least degree; None if there is none."""
    return _order(instance, set(instance.costs), None)


def cheap_order(instance: Instance) -> list[int]:
    """Nodes without a load whose elimination leaves at most matrices between pairs."""
    free = {i for i in instance.costs if i not in instance.loads}
    return _order(instance, free, 2) or []


def _order(instance: Instance, nodes: set[int], max_degree: int | None) -> list[int] | None:
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
    """The instance without the nodes of ``order`` (their optimum is in it), and the steps back; None if a node
    is left without an allowed strategy. Tables over more than two nodes must be eliminated in turn."""
    made = instance.copy()
    tables: dict[Scope, IntArray] = dict(made.edges)  # type: ignore[arg-type]
    scopes: dict[int, set[Scope]] = {i: set() for i in made.costs}
    for scope in tables:
        for i in scope:
            scopes[i].add(scope)
    steps = []
    for node in order:
        found = [(scope, tables.pop(scope)) for scope in sorted(scopes.pop(node))]
        first = [_first(scope, table, node) for scope, table in found]
        others = sorted({i for scope, _ in first for i in scope})
        kept_of = {i: made.kept[i] for i in others}
        steps.append(Step(node, made.kept.pop(node), made.costs.pop(node), tuple(first), kept_of))
        for scope, _ in found:
            for i in scope:
                if i != node:
                    scopes[i].discard(scope)
        least = _minimum(steps[-1], others, made)
        floor = int(least.min())
        if floor >= HALF:
            return None
        made.offset += floor
        least = np.where(least >= HALF, FORBIDDEN, least - floor)
        if len(others) == 1:
            made.costs[others[0]] = clipped(made.costs[others[0]] + least)
        elif others:
            scope = tuple(others)
            tables[scope] = clipped(tables[scope] + least) if scope in tables else least
            for i in others:
                scopes[i].add(scope)
    made.edges = {(s[0], s[1]): t for s, t in tables.items()}
    return made, steps


def _first(scope: Scope, table: IntArray, node: int) -> tuple[Scope, IntArray]:
    """The table with the node's axis first, and the scope of the others."""
    axis = scope.index(node)
    return scope[:axis] + scope[axis + 1 :], np.moveaxis(table, axis, 0)


def _minimum(step: Step, others: list[int], instance: Instance) -> IntArray:
    """``min`` over the node's strategies, for every choice of the others."""
    shape = [instance.costs[i].size for i in others]
    total = step.costs.reshape(-1, *([1] * len(others)))
    for scope, table in step.tables:
        sizes = [n if i in scope else 1 for i, n in zip(others, shape, strict=True)]
        total = clipped(total + table.reshape(table.shape[0], *sizes))
    least: IntArray = total.min(axis=0)
    return np.broadcast_to(least, shape)


def solve_exactly(instance: Instance, order: list[int]) -> tuple[int, dict[int, int]] | None:
    """Optimum without memory limits and one choice that has it; None if nothing is allowed."""
    done = eliminate(instance, order)
    if done is None:
        return None
    rest, steps = done
    return rest.offset, undo(steps, {})
