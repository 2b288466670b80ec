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

from milpplan.graph.instance import HALF, Instance, Pair, clipped
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


class Multipliers:
    """Multipliers of an instance's memory limits, moved after every pass.

    With one limit, the next multiplier is where the lines of two choices cross: one that breaks the limit and one
    that meets it (exact on forests, in finitely many steps). With several limits, Polyak's subgradient steps.

    Source: G. Handler and I. Zang, Networks 10 (1980); B. Polyak, USSR Comput. Math. 9 (1969).
    """

    def __init__(self, num_rows: int) -> None:
        self.values: FloatArray = np.zeros(num_rows)
        self._above: tuple[int, int] | None = None
        self._below: tuple[int, int] | None = None
        self._shrink = 1.0
        self._best: int | None = None

    def update(self, instance: Instance, picked: dict[int, int], exact: bool, upper: int, bound: int) -> bool:
        """Move the multipliers after a pass.

        Args:
            instance: the instance whose limits are priced.
            picked: position of every node's strategy in the choice that the pass met.
            exact: ``picked`` is the cheapest choice at the present multipliers.
            upper: cost of the incumbent, ``HALF`` where there is none.
            bound: lower bound at the present multipliers.

        Returns:
            False where the multipliers stay as they are.
        """
        if self.values.size == 0:
            return False
        load = np.zeros(self.values.size, np.int64)
        for i, loads in instance.loads.items():
            load[instance.rows[i]] += loads[:, picked[i]]
        if self.values.size == 1:
            return self._crossing(instance, picked, int(load[0]), exact)
        return self._step(load, instance.limits, upper, bound)

    def _crossing(self, instance: Instance, picked: dict[int, int], load: int, exact: bool) -> bool:
        """Move the multiplier of one limit to where the lines of two choices cross."""
        cost = instance.cost({i: int(instance.kept[i][s]) for i, s in picked.items()})
        if cost >= HALF:
            return False
        if load > int(instance.limits[0]):
            self._above = (cost, load)
        else:
            self._below = (cost, load)
        if self._above is None:
            return False
        if self._below is None:
            smallest_load = sum(int(loads[0].min()) for loads in instance.loads.values())
            # No choice that fits is known yet: raise the multiplier by the range of costs over the excess.
            spread = sum(int(c.max() - c.min()) for c in instance.costs.values()) + 1
            step = spread / max(1, load - smallest_load)
            self.values = np.array([max(4.0 * self.values[0], step)])
            return bool(self.values[0] < 1e30)
        (high, heavy), (low, light) = self._above, self._below
        multiplier = max(0.0, (low - high) / max(1, heavy - light))
        unchanged = bool(np.isclose(multiplier, self.values[0], rtol=1e-12, atol=0.0))
        self.values = np.array([multiplier])
        return not unchanged or not exact

    def _step(self, load: IntArray, limits: IntArray, upper: int, bound: int) -> bool:
        """Take a subgradient step of Polyak's length."""
        excess = (load - limits).astype(np.float64)
        excess = np.where((excess < 0) & (self.values <= 0), 0.0, excess)
        scale = np.maximum(limits.astype(np.float64), 1.0)
        relative = excess / scale
        length = float(relative @ relative)
        if length == 0.0:
            return False
        if self._best is not None and bound <= self._best:
            self._shrink = max(self._shrink * 0.9, 0.05)
        self._best = bound if self._best is None else max(self._best, bound)
        aim = float(upper - bound) if upper < HALF else 0.05 * abs(float(bound)) + 1.0
        step = self._shrink * max(aim, 1.0) / length
        self.values = np.maximum(0.0, self.values + step * relative / scale)
        return True
