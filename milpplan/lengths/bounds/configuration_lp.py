"""Configuration LP: the maximum work of a replica within a time, with whole sequences in every micro-batch.

For a pipeline with some number of micro-batches (``groups.bounds.micro_batch_ranges``) let every micro-batch m be
a mixture of contents x with shares z_mx, and its times the mixtures of theirs. The maximum work within a time Z is
a linear program:

    max sum z_mx y(x)    subject to    sum_x z_mx = 1,    every path of mean times takes at most Z.

Its dual is a mixture of paths and a slope s, the time of a unit of work. Any such pair proves

    time >= sum_m min_x (weights of m on the mixture . times of x - s y(x)) + s load

for any contents of the micro-batches (``micro_batch_pricing`` solves the minimum over x), so nothing rests on the
solver. The best contents for the program's duals join it as columns, until it gains nothing. The duals are drawn
half way to the best known ones (smoothing), which saves rounds. Optional micro-batches may hold nothing.

It is stronger than the programs over divisible loads (``groups.bounds.last_stage``): no line replaces the times of
products, no ring is both hidden and exposed, and last tiles count in full.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from milpplan.groups.bounds.linear_bounds import PathBound
from milpplan.groups.bounds.micro_batch_ranges import Window
from milpplan.groups.bounds.path_mixtures import Mixture
from milpplan.lengths.bounds.micro_batch_pricing import FREE, HOLDS, WITHOUT, MicroBatchPricing, PinnedItem
from milpplan.simulation.layout_columns import BoolArray, FloatArray, IntArray

Decisions = tuple[tuple[int, bool], ...]
"""Branching decisions: distance of a micro-batch behind the one with the pinned item, and whether it holds such an
item, too."""


@dataclass(frozen=True, slots=True)
class PriceBound:
    """Bound ``time >= constant + prices @ counts`` in ns, for all counts [n] up to the workload's."""

    constant: float
    prices: FloatArray

    def at(self, counts: FloatArray) -> float:
        """Return the bound of ``counts`` [n] sequences in ns."""
        return self.constant + float(self.prices @ counts)


@dataclass(frozen=True, eq=False)
class ConfigurationLP:
    """Configuration LP of a window of numbers of micro-batches."""

    pricing: MicroBatchPricing
    """Pricing problem of the micro-batches."""
    sequence_loads: FloatArray
    """Work that a sequence adds, [n] ns."""
    last_stage_ns: FloatArray
    """Minimum time that a sequence adds to the last stage, [n]."""
    num_stages: int
    window: Window
    pinned_item: PinnedItem | None
    """Item that the micro-batch in the middle of the window holds, if any."""
    decisions: Decisions = ()
    """Branching decisions on other micro-batches."""

    @property
    def pin_states(self) -> IntArray:
        """State of each micro-batch, [v]: it must hold, may hold or must not hold the pinned item."""
        states = np.full(self.window.number, FREE)
        if self.pinned_item is not None:
            index = self.window.ahead[1]
            states[:index] = WITHOUT if self.pinned_item.foremost else FREE
            states[index] = HOLDS
            for behind, is_held in self.decisions:
                states[index + behind] = HOLDS if is_held else WITHOUT
        return states

    @property
    def holds_pinned(self) -> BoolArray:
        """Mask of the micro-batches that must hold the pinned item, [v]."""
        return np.asarray(self.pin_states == HOLDS)

    def allows(self, places: IntArray, rows: IntArray) -> BoolArray:
        """Return which contents [c, n] the micro-batches with index ``places`` [c] may have."""
        pricing, states = self.pricing, self.pin_states[places]
        has_item = (self.pinned_item or PinnedItem()).is_held(rows, pricing.items.sizes)
        fits = rows @ pricing.items.sizes <= pricing.base.shape[-1]
        return np.asarray(fits & np.where(has_item, states != WITHOUT, states != HOLDS))

    def best_contents(self, weights: FloatArray, prices: FloatArray) -> tuple[FloatArray, IntArray]:
        """Return ``MicroBatchPricing.best_contents`` of the window's micro-batches."""
        return self.pricing.best_contents(weights, prices, self.pin_states, self.pinned_item or PinnedItem())

    @property
    def fullest_contents(self) -> IntArray:
        """Contents of the maximum work, as far as each micro-batch may hold them, [v, n]."""
        states, state_index = np.unique(self.pin_states, return_inverse=True)
        contents = self.pricing.best_contents(
            np.zeros((6, len(states))), self.sequence_loads, states, self.pinned_item or PinnedItem()
        )[1]
        return contents[state_index]

    def prove_load_bound(self, mixture: Mixture, slope: float) -> tuple[PathBound, IntArray]:
        """Return the bound that a mixture proves at a slope, and the best contents [v, n]."""
        # Merged micro-batches stand for any number: their work takes at least as long on the last stage.
        fits = self.pricing.items.fits
        min_ratio = float((self.last_stage_ns[fits] / self.sequence_loads[fits]).min())
        slope = min(slope, float(mixture.flows[0, self.window.merged].min(initial=np.inf)) * min_ratio)
        bound, rows = self.prove_price_bound(mixture, slope * self.sequence_loads)
        return PathBound(bound.constant, slope), rows

    def prove_price_bound(self, mixture: Mixture, prices: FloatArray) -> tuple[PriceBound, IntArray]:
        """Return the bound that a mixture proves at ``prices`` [n] of the sequences, and the best contents [v,
        n]."""
        begin, end = self.window.there
        flows, merged = mixture.flows, self.window.merged
        values, rows = self.best_contents(mixture.weights, prices)
        # The micro-batches outside of the range are optional.
        values[:begin] = np.minimum(0.0, values[:begin])
        values[end:] = np.minimum(0.0, values[end:])
        # Merged micro-batches hold every sequence with a positive value, at most all of them.
        excess = np.maximum(0.0, prices - flows[0, merged, None] * self.last_stage_ns)[:, self.pricing.items.fits]
        values[merged] = -excess @ self.pricing.items.counts[self.pricing.items.fits]
        return PriceBound(float(values.sum()), prices), rows
