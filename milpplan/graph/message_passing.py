"""A lower bound on any graph, and on graphs with memory limits, by passing messages in integers.

Costs are moved between nodes and edges without changing the cost of any choice: with a message a_e for each end
of an edge,

    cost(x) = sum_i (c_i + p_i + sum_e a_e)(x_i) + sum_e (E_e - a_e - b_e)(x_i, x_j) - p(x),

so the sum of all minima is a lower bound, whatever the messages. Loads are priced: p_i <= sum_r price_r load_r
with the limits' multipliers as prices, and no choice that meets the limits pays more than price * limit. All sums
are integers, and nothing is rounded up.

These sums also bound the cost of every choice with a given strategy (``marginals``): a strategy whose bound is at
or above the incumbent's cost can be left out.

Source: V. Kolmogorov, IEEE PAMI 28 (2006), sequential tree-reweighted message passing; for the multiplier of one
limit G. Handler and I. Zang, Networks 10 (1980).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from milpplan.graph.instance import Instance, Pair, clipped
from milpplan.optimize.milp.program import FloatArray, IntArray

# In 64 bits, sums of all priced loads stay below 2^54, products of prices and loads of a node below 2^61.
_PRICE_BITS: Final = 54
_PRODUCT_BITS: Final = 61


@dataclass(slots=True, eq=False)
class _Arc:
    """An edge as seen from one end: its matrix is [own strategies, the neighbour's]; ``side`` numbers the end."""

    matrix: IntArray
    edge: int
    side: int
    other: int


class MessagePassing:
    """Messages of one instance, kept while passes are run and multipliers change."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        around = instance.neighbours()
        self.order, self.exact = _leaves_first(around)
        index = {node: number for number, node in enumerate(self.order)}
        self._arcs: dict[int, list[_Arc]] = {i: [] for i in instance.costs}
        self._messages: list[list[IntArray]] = []
        self._edge_minimum: list[int] = []
        for edge, ((i, j), matrix) in enumerate(instance.edges.items()):
            self._arcs[i].append(_Arc(matrix, edge, 0, j))
            self._arcs[j].append(_Arc(np.ascontiguousarray(matrix.T), edge, 1, i))
            self._messages.append([np.zeros(n, np.int64) for n in matrix.shape])
            self._edge_minimum.append(int(matrix.min()))
        self._later = {i: [a for a in arcs if index[a.other] > index[i]] for i, arcs in self._arcs.items()}
        self._earlier = {i: [a for a in arcs if index[a.other] < index[i]] for i, arcs in self._arcs.items()}
        self._priced = dict(instance.costs)
        self._paid = 0
        self._node_minimum = {i: int(c.min()) for i, c in instance.costs.items()}
        self.marginals = {i: np.full(c.size, -(2**62), np.int64) for i, c in instance.costs.items()}

    def set_prices(self, prices: FloatArray) -> None:
        """Charge the multipliers ``prices`` [rows], in cost units per unit of load."""
        paid = [float((prices[self.instance.rows[i]] @ load).max()) for i, load in self.instance.loads.items()]
        dearest = float(prices.max(initial=0.0))
        excess = math.frexp(max(math.fsum(paid), dearest))[1] - _PRICE_BITS
        if excess > 0:
            prices = np.ldexp(prices, -excess)
        # As many binary digits behind the point as the products of one node allow.
        top = math.ldexp(max([dearest, *paid]), -max(excess, 0))
        bits = min(_PRODUCT_BITS - math.frexp(top)[1], 60) if top else 0
        whole = np.floor(np.ldexp(prices, bits)).astype(np.int64)
        limits = self.instance.limits
        self._paid = sum(int(w) * int(m) for w, m in zip(whole, limits, strict=True)) >> bits
        for i, load in self.instance.loads.items():
            self._priced[i] = self.instance.costs[i] + ((whole[self.instance.rows[i]] @ load) >> bits)
            self._node_minimum[i] = int(self._theta(i).min())

    def set_messages(self, messages: Mapping[Pair, tuple[IntArray, IntArray]]) -> None:
        """Replace the messages of all edges: per edge, the message to its first end and to its second."""
        for edge, (pair, matrix) in enumerate(self.instance.edges.items()):
            first, second = messages[pair]
            self._messages[edge] = [first, second]
            self._edge_minimum[edge] = int((matrix - first[:, None] - second[None, :]).min())
        self._node_minimum = {i: int(self._theta(i).min()) for i in self.instance.costs}

    def priced(self) -> tuple[Instance, int]:
        """Move the priced loads into the costs.

        Returns:
            The instance without limits, and the amount that the limits give back to every choice.
        """
        return replace(self.instance, costs=dict(self._priced), rows={}, loads={}), self._paid

    def bound(self) -> int:
        """Return the lower bound at the present messages and multipliers."""
        return self.instance.offset + sum(self._node_minimum.values()) + sum(self._edge_minimum) - self._paid

    def run(self) -> tuple[int, dict[int, int]]:
        """Run one pass forwards and one backwards.

        Returns:
            The best bound seen, and the choice (positions) picked on the way back. On a forest both are exact for
            the present multipliers.
        """
        total = best = self.bound()
        unused: dict[int, int] = {}
        for node in self.order:
            total = self._visit(node, self._later[node], len(self._earlier[node]), total, unused)
            best = max(best, total)
        picked: dict[int, int] = {}
        for node in reversed(self.order):
            total = self._visit(node, self._earlier[node], len(self._later[node]), total, picked)
            best = max(best, total)
        return best, picked

    def _theta(self, node: int) -> IntArray:
        """Return the node's priced costs plus the messages to it."""
        total = self._priced[node]
        for arc in self._arcs[node]:
            total = total + self._messages[arc.edge][arc.side]
        return total

    def _visit(
        self, node: int, outgoing: list[_Arc], num_incoming: int, total: int, picked: dict[int, int]
    ) -> int:
        """Collect what the node's edges can give, record the marginals, pick a strategy, and pass the rest on."""
        messages = self._messages
        old_sum = self._node_minimum[node]
        theta = ahead = self._priced[node]
        for arc in self._arcs[node]:
            message = (arc.matrix - messages[arc.edge][1 - arc.side]).min(axis=1)
            messages[arc.edge][arc.side] = message
            old_sum += self._edge_minimum[arc.edge]
            self._edge_minimum[arc.edge] = 0
            theta = theta + message
            # A strategy forbidden by many neighbours must not overflow.
            ahead = clipped(ahead + (arc.matrix[:, picked[arc.other]] if arc.other in picked else message))
        minimum = int(theta.min())
        total += minimum - old_sum
        np.maximum(self.marginals[node], theta + (total - minimum), out=self.marginals[node])
        if outgoing is self._earlier[node]:
            picked[node] = int(ahead.argmin())
        parts = max(1, len(outgoing) if self.exact else max(len(outgoing), num_incoming))
        share = (theta - minimum) // parts
        for arc in outgoing:
            # The minimum at the node stays, and the share that goes is at least 0: the bound does not move.
            messages[arc.edge][arc.side] = messages[arc.edge][arc.side] - share
        self._node_minimum[node] = minimum
        return total


def _leaves_first(around: dict[int, set[int]]) -> tuple[list[int], bool]:
    """Order the nodes so that on a forest every node has at most one later neighbour; else sort them.

    Returns:
        The order, and whether the graph is a forest.
    """
    seen: list[int] = []
    parent: dict[int, int] = {}
    for start in sorted(around):
        if start in parent:
            continue
        parent[start] = -1
        queue = [start]
        for node in queue:
            for other in sorted(around[node] - {parent[node]}):
                if other in parent:
                    return sorted(around), False
                parent[other] = node
                queue.append(other)
        seen += queue
    return seen[::-1], True
