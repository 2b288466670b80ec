"""Configuration programs of a pipeline of one replica that must hold the longest sequences, each of them whole.

Sequences that fit under only one strategy of a set run under it. Bounds of divisible loads fill the micro-batches
between them, while a real pipeline waits around each.

**Program** (``ExclusiveProgram``). All of these sequences are in configuration LPs (``configuration_columns``) of
windows around the longest. The dual of such a program is a mixture of paths and a price for every sequence, which
prove

    time >= sum_m min_x (weights of m on the mixture . times of x - prices . x) + prices . held

for any sequences that are held. Exclusive sequences may have any price. The others may be elsewhere, at some cost:
with prices of at most that, the bound of all of them together is one of this group and of what it leaves to
others. They are *loose*: by quanta of a few kinds, each with the minimum attention of its sequences.

Windows cover all numbers of micro-batches around the longest, each with its own prices. For n_k others for which a
window has the price p_k, and another one a higher price q_k, p_k x_k >= q_k x_k - (q_k - p_k) n_k: so the highest
prices hold for all windows, with the lowest bound of all n.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace

import numpy as np

from milpplan.lengths.bounds import Window, best_mixture
from milpplan.lengths.bounds.configuration_columns import (
    Columns,
    ConfigurationLP,
    PriceBound,
    Start,
    optimise_prices,
)
from milpplan.lengths.bounds.long_sequence import halved
from milpplan.lengths.bounds.micro_batch_pricing import MicroBatchPricing, PinnedItem
from milpplan.lengths.bounds.work_bounds import LinearBounds, PipelineWorkBound
from milpplan.lengths.deadline import Deadline
from milpplan.lengths.search_parameters import SAFETY
from milpplan.simulation import FloatArray


@dataclass(frozen=True, eq=False)
class _Node:
    """A window with its bound, the start of its program, and the columns of its last one."""

    configuration: ConfigurationLP
    bound: PriceBound
    start: Start
    solved: bool = False
    """True if its program was solved."""
    columns: Columns | None = None
    """Columns, perhaps for other prices."""


class ExclusiveProgram:
    """Bounds of groups that hold all sequences from length index ``first`` on, while others cost ``other_costs``
    [n] elsewhere, ns."""

    def __init__(
        self, work_bound: PipelineWorkBound, pricing: MicroBatchPricing, first: int, other_costs: FloatArray
    ) -> None:
        """Start with windows of divisible loads.

        Args:
            work_bound: work bound of a pipeline of one replica with shared memory, which holds the longest
                sequence.
            pricing: pricing problem of its micro-batches.
            first: first exclusive length index.
            other_costs: costs elsewhere, [n] ns.
        """
        self.work_bound, self.items, self.first = work_bound, pricing.items, first
        sizes = pricing.items.sizes
        # Upper ends of the kinds of loose sequences.
        ends = np.array((0.1, 0.2, 0.4, 0.7, 1.0)) * int(sizes[:first].max(initial=1))
        self.kinds = np.unique(np.searchsorted(ends, sizes[:first]), return_inverse=True)[1]
        num_kinds = int(self.kinds.max(initial=-1)) + 1
        ns_per_quantum = work_bound.stages.last[:first] / sizes[:first]
        is_of_kind = [self.kinds == kind for kind in range(num_kinds)]
        self.pricing = pricing.with_loose_quanta(self.kinds)
        self.needed = self.pricing.items.counts.astype(np.float64)
        self.last = np.append([ns_per_quantum[kind].min() for kind in is_of_kind], work_bound.stages.last[first:])
        self.columns: Columns | None = None
        self.other_costs, self.max_prices = self._worth(other_costs)
        self.nodes = [self._piece(window) for window in _windows()]

    def _worth(self, other_costs: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return the costs of others elsewhere, and the maximum prices per quantum of every kind; exclusive
        sequences may have any price."""
        other_costs = other_costs[: self.first]
        cost_per_quantum = other_costs / self.items.sizes[: self.first]
        max_prices = [cost_per_quantum[self.kinds == kind].max() for kind in range(self.pricing.items.num_loose)]
        return other_costs, np.append(max_prices, np.full(len(self.needed) - len(max_prices), np.inf))

    def with_other_costs(self, other_costs: FloatArray) -> ExclusiveProgram:
        """Return the program for other costs elsewhere.

        Its bounds stay valid, as lower prices leave a window no less. Programs begin with the last solutions.
        """
        if np.array_equal(other_costs[: self.first], self.other_costs):
            return self
        program = copy(self)
        program.other_costs, program.max_prices = self._worth(other_costs)
        program.nodes = [replace(node, solved=False) for node in self.nodes]
        return program

    @property
    def bound_ns(self) -> float:
        """Minimum time of a group if everything that it does not hold costs its price elsewhere."""
        return min(self._value(node.bound) for node in self.nodes)

    @property
    def bounds(self) -> LinearBounds:
        """Linear bound by the other sequences that a group holds."""
        shares = np.max([self._shares(node.bound) for node in self.nodes], axis=0)
        # A lower price is the highest one less a constant for all sequences.
        constant = self.bound_ns - float(shares @ self.items.counts[: self.first])
        shares = np.append(shares, np.zeros(len(self.items.sizes) - self.first))
        return LinearBounds(shares[None] * SAFETY, np.array([constant - abs(constant) * (1.0 - SAFETY)]))

    def _shares(self, bound: PriceBound) -> FloatArray:
        """Return the minimum times of others by a bound, at most their costs elsewhere, ns."""
        return np.minimum(bound.prices[self.kinds] * self.items.sizes[: self.first], self.other_costs)

    def _value(self, bound: PriceBound) -> float:
        """Return the value of a bound if everything that a group does not hold costs its price elsewhere, ns."""
        num_loose = self.pricing.items.num_loose
        exclusive_ns = float(bound.prices[num_loose:] @ self.needed[num_loose:])
        return bound.constant + exclusive_ns + float(self._shares(bound) @ self.items.counts[: self.first])

    def run(self, cutoff_ns: float, deadline: Deadline) -> bool:
        """Refine the windows of the lowest value until all reach the cutoff, or the ``deadline``; return whether
        more can be gained."""
        while not deadline.passed:
            lowest = min(self.nodes, key=lambda node: self._value(node.bound))
            if self._value(lowest.bound) >= cutoff_ns:
                return False
            windows = halved(lowest.configuration.window) if lowest.solved else (lowest.configuration.window,)
            if not windows:
                return False
            self.nodes.remove(lowest)
            if lowest.solved:
                self.nodes += [replace(self._piece(window), bound=lowest.bound) for window in windows]
            else:
                self.nodes.append(self._solved(lowest, cutoff_ns, deadline))
        return True

    def _solved(self, node: _Node, cutoff_ns: float, deadline: Deadline) -> _Node:
        """Return the node with the bound of its program."""
        solution = optimise_prices(
            node.configuration,
            self.needed,
            self.max_prices,
            replace(node.start, prices=np.minimum(node.start.prices, self.max_prices)),
            node.columns or self.columns,
            float(self.last @ self.needed),
            self._value,
            cutoff_ns,
            deadline,
            near=node.columns is not None,
        )
        if solution is None:
            return replace(node, solved=True)
        bound, start, self.columns = solution
        best_bound = max(bound, node.bound, key=self._value)
        return replace(node, bound=best_bound, start=start, solved=True, columns=self.columns)

    def _piece(self, window: Window) -> _Node:
        """Return a window with the bound of divisible loads."""
        work_bound, load = self.work_bound, float(self.last @ self.needed)
        configuration = ConfigurationLP(
            self.pricing, self.last, self.last, work_bound.num_stages, window, PinnedItem(len(self.last) - 1)
        )
        stages = work_bound.stages.with_kinds()
        mixture = best_mixture(stages, work_bound.num_stages, window, load, float(self.last[-1]))
        prices = np.minimum(self.last, self.max_prices)
        bound, rows = configuration.prove_price_bound(mixture, prices)
        return _Node(configuration, bound, Start(mixture, prices, rows))


def _windows() -> list[Window]:
    """Return windows that cover all numbers: on each side up to seven micro-batches, or more."""
    inside, beyond = ((0, 7), False), ((8, 8), True)
    sides = (inside, beyond)
    return [Window(ahead[0], behind[0], (ahead[1], behind[1])) for ahead in sides for behind in sides]
