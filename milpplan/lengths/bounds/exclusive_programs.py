"""What a pipeline of one replica takes at least with the longest sequences in it for sure: programs of whole ones.

What fits under no other strategy of a set runs under the one that holds it. ``forced_pipelines`` puts the longest
few of such sequences into places in every way; here are all of them, in configuration programs (``filling``) of
windows around the longest. The dual of such a program is a mixture of paths, and a price for every sequence, which
prove

    time >= sum_m min_x (weights of m on the mixture . times of x - prices . x) + prices . held

for whatever is held. Those that are there for sure may have any price. The others may be elsewhere, where they are
of some worth: with prices of no more than that, the bound of all of them together is one of this group and of what
it leaves to others. They are *loose*: by grains of a few kinds, each with the least attention of its sequences.

All numbers of micro-batches around the longest are covered by windows, each with prices of its own. For n_k others
of which a window has the price p_k, and another one a higher price q_k, p_k x_k >= q_k x_k - (q_k - p_k) n_k: so
the highest prices hold for all windows, with the least bound of all n.
"""

from __future__ import annotations

import time
from copy import copy
from dataclasses import dataclass, replace

import numpy as np

from milpplan.groups.bounds.last_stage import best_mixture
from milpplan.groups.bounds.long_sequence import halved
from milpplan.groups.bounds.micro_batch_ranges import Window
from milpplan.lengths.bounds.configuration_columns import Columns, Start, optimise_prices
from milpplan.lengths.bounds.configuration_lp import ConfigurationLP, PriceBound
from milpplan.lengths.bounds.micro_batch_pricing import MicroBatchPricing, PinnedItem
from milpplan.lengths.bounds.work_bounds import LinearBounds, PipelineWorkBound
from milpplan.simulation.layout_columns import FloatArray

# From so many micro-batches on, ahead or behind, windows are open.
_OPEN = 8
# Kinds of loose sequences end at these parts of the longest.
_KINDS = (0.1, 0.2, 0.4, 0.7, 1.0)
# Mixes of stages in the programs of real loads that these begin with.
_MIXES = 2
# What sums of floats may add.
_SAFETY = 1.0 - 1e-9


@dataclass(frozen=True, eq=False)
class _Piece:
    """A window, what is known of it, and with what a program of it begins; whether it had one, and the contents of
    the last one, perhaps of other worths."""

    configuration: ConfigurationLP
    bound: PriceBound
    start: Start
    solved: bool = False
    columns: Columns | None = None


class ExclusiveProgram:
    """Bounds of groups that hold all sequences from length number ``first`` on, where others are of ``worths`` [n]
    elsewhere, ns."""

    def __init__(
        self, loads: PipelineWorkBound, contents: MicroBatchPricing, first: int, worths: FloatArray
    ) -> None:
        """``loads`` and ``contents`` are those of a pipeline of one replica beside other strategies, which holds
        the longest sequence of all."""
        self.work_bound, self.items, self.first = loads, contents.items, first
        sizes = contents.items.sizes
        ends = np.array(_KINDS) * int(sizes[:first].max(initial=1))
        self.kinds = np.unique(np.searchsorted(ends, sizes[:first]), return_inverse=True)[1]
        number = int(self.kinds.max(initial=-1)) + 1
        each = loads.stages.last[:first] / sizes[:first]
        of_kinds = [self.kinds == one for one in range(number)]
        self.pricing = contents.with_loose_quanta(self.kinds)
        self.needed = self.pricing.items.counts.astype(np.float64)
        self.last = np.append([each[one].min() for one in of_kinds], loads.stages.last[first:])
        self.columns: Columns | None = None
        self.other_costs, self.max_prices = self._worth(worths)
        self.nodes = [self._piece(window) for window in _windows()]

    def _worth(self, worths: FloatArray) -> tuple[FloatArray, FloatArray]:
        """What others are worth elsewhere, and a grain of every kind at most; those that are held may have any
        price."""
        worths = worths[: self.first]
        each = worths / self.items.sizes[: self.first]
        dearest = [each[self.kinds == one].max() for one in range(self.pricing.items.num_loose)]
        return worths, np.append(dearest, np.full(len(self.needed) - len(dearest), np.inf))

    def with_other_costs(self, worths: FloatArray) -> ExclusiveProgram:
        """The same where others are of these ``worths``. What is proved holds there, too: lower prices leave a
        window no less. Programs begin with what the last ones gave."""
        if np.array_equal(worths[: self.first], self.other_costs):
            return self
        found = copy(self)
        found.other_costs, found.max_prices = self._worth(worths)
        found.nodes = [replace(one, solved=False) for one in self.nodes]
        return found

    @property
    def bound_ns(self) -> float:
        """What a group takes at least where all that it does not hold costs its worth."""
        return min(self._value(one.bound) for one in self.nodes)

    @property
    def bounds(self) -> LinearBounds:
        """By what else a group holds."""
        shares = np.max([self._shares(one.bound) for one in self.nodes], axis=0)
        # A lower price is the highest one for all there is, and less by a constant.
        constant = self.bound_ns - float(shares @ self.items.counts[: self.first])
        shares = np.append(shares, np.zeros(len(self.items.sizes) - self.first))
        return LinearBounds(shares[None] * _SAFETY, np.array([constant - abs(constant) * (1.0 - _SAFETY)]))

    def _shares(self, bound: PriceBound) -> FloatArray:
        """What others take at least by a bound, but no more than they are worth, ns."""
        return np.minimum(bound.prices[self.kinds] * self.items.sizes[: self.first], self.other_costs)

    def _value(self, bound: PriceBound) -> float:
        """What it says where all that a group does not hold costs its worth, ns."""
        loose = self.pricing.items.num_loose
        held = float(bound.prices[loose:] @ self.needed[loose:])
        return bound.constant + held + float(self._shares(bound) @ self.items.counts[: self.first])

    def run(self, cutoff_ns: float, deadline: float) -> bool:
        """Look at windows that give least, until all give so much, or the ``deadline``; whether there is more to
        look at."""
        while time.perf_counter() < deadline:
            worst = min(self.nodes, key=lambda one: self._value(one.bound))
            if self._value(worst.bound) >= cutoff_ns:
                return False
            parts = halved(worst.configuration.window) if worst.solved else (worst.configuration.window,)
            if not parts:
                return False
            self.nodes.remove(worst)
            if worst.solved:
                self.nodes += [replace(self._piece(window), bound=worst.bound) for window in parts]
            else:
                self.nodes.append(self._solved(worst, cutoff_ns, deadline))
        return True

    def _solved(self, piece: _Piece, cutoff_ns: float, deadline: float) -> _Piece:
        """With the bound of a program."""
        found = optimise_prices(
            piece.configuration,
            self.needed,
            self.max_prices,
            replace(piece.start, prices=np.minimum(piece.start.prices, self.max_prices)),
            piece.columns or self.columns,
            float(self.last @ self.needed),
            self._value,
            cutoff_ns,
            deadline,
            near=piece.columns is not None,
        )
        if found is None:
            return replace(piece, solved=True)
        bound, start, self.columns = found
        better = max(bound, piece.bound, key=self._value)
        return replace(piece, bound=better, start=start, solved=True, columns=self.columns)

    def _piece(self, window: Window) -> _Piece:
        """A window with what real loads tell."""
        loads, load = self.work_bound, float(self.last @ self.needed)
        filling = ConfigurationLP(
            self.pricing, self.last, self.last, loads.num_stages, window, PinnedItem(len(self.last) - 1)
        )
        stages = loads.stages.with_kinds(_MIXES)
        mixture = best_mixture(stages, loads.num_stages, window, load, float(self.last[-1]))
        prices = np.minimum(self.last, self.max_prices)
        bound, rows = filling.prove_price_bound(mixture, prices)
        return _Piece(filling, bound, Start(mixture, prices, rows))


def _windows() -> list[Window]:
    """Windows that cover all numbers."""
    inside, beyond = ((0, _OPEN - 1), False), ((_OPEN, _OPEN), True)
    sides = (inside, beyond)
    return [Window(one[0], other[0], (one[1], other[1])) for one in sides for other in sides]
