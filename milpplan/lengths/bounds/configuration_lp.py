"""What the micro-batches of a window do at most within a time, whole sequences in each: the configuration program.

Of a pipeline with some number of micro-batches (``windows``) let every micro-batch m be a mixture of contents x
with shares z_mx, and its times the mixtures of theirs. The largest load within a time Z is a linear program:

    max sum z_mx y(x)    subject to    sum_x z_mx = 1,    every path of mean times takes at most Z.

Its dual is a mixture of paths and a slope s, the time of a unit of load. Any such pair proves

    time >= sum_m min_x (weights of m on the mixture . times of x - s y(x)) + s load

for whatever the micro-batches hold (``stage_contents`` says what the least of each is), so nothing rests on the
solver. Contents that are least for what the program proposes join it, until it gains nothing; mixtures are drawn
half way to the best known one, which spares rounds. Micro-batches that may not be there may hold nothing.

What makes this higher than the programs over real loads (``unequal``): no line stands for the times of products,
none of the ring is both hidden and exposed, and last tiles count in full.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from milpplan.groups.bounds.linear_bounds import PathBound
from milpplan.groups.bounds.micro_batch_ranges import Window
from milpplan.groups.bounds.path_mixtures import Mixture
from milpplan.lengths.bounds.micro_batch_pricing import FREE, HOLDS, WITHOUT, MicroBatchPricing, PinnedItem
from milpplan.simulation.layout_columns import BoolArray, FloatArray, IntArray

Told = tuple[tuple[int, bool], ...]
"""Of micro-batches behind the one that a window is around: how far, and whether it holds a core, too."""


@dataclass(frozen=True, slots=True)
class PriceBound:
    """``time >= constant + prices @ counts`` for all counts [n] of up to all there is, ns."""

    constant: float
    prices: FloatArray

    def at(self, counts: FloatArray) -> float:
        """The bound of so many sequences of every length, ns."""
        return self.constant + float(self.prices @ counts)


@dataclass(frozen=True, eq=False)
class ConfigurationLP:
    """A window of pipelines with ``contents``; ``each`` [n] is what a sequence adds to the load, ns, and ``last``
    [n] to the last stage, at least. ``core``: what the micro-batch that the window is around holds, if known, and
    what is ``told`` of others."""

    pricing: MicroBatchPricing
    sequence_loads: FloatArray
    last_stage_ns: FloatArray
    num_stages: int
    window: Window
    pinned_item: PinnedItem | None
    decisions: Told = ()

    @property
    def pin_states(self) -> IntArray:
        """Which micro-batches hold a ``core``, or do not, for sure, [v]."""
        found = np.full(self.window.number, FREE)
        if self.pinned_item is not None:
            place = self.window.ahead[1]
            found[:place] = WITHOUT if self.pinned_item.foremost else FREE
            found[place] = HOLDS
            for behind, holds in self.decisions:
                found[place + behind] = HOLDS if holds else WITHOUT
        return found

    @property
    def holds_pinned(self) -> BoolArray:
        """Which micro-batches hold a ``core`` for sure, [v]."""
        return np.asarray(self.pin_states == HOLDS)

    def allows(self, places: IntArray, rows: IntArray) -> BoolArray:
        """Which contents [c, n] micro-batches at ``places`` [c] may have."""
        contents, kinds = self.pricing, self.pin_states[places]
        held = (self.pinned_item or PinnedItem()).is_held(rows, contents.items.sizes)
        small = rows @ contents.items.sizes <= contents.base.shape[-1]
        return np.asarray(small & np.where(held, kinds != WITHOUT, kinds != HOLDS))

    def best_contents(self, weights: FloatArray, prices: FloatArray) -> tuple[FloatArray, IntArray]:
        """``MicroBatchPricing.least`` of the window's micro-batches."""
        return self.pricing.best_contents(weights, prices, self.pin_states, self.pinned_item or PinnedItem())

    @property
    def fullest_contents(self) -> IntArray:
        """The contents of the largest load, with the core and without, [v, n]."""
        kinds, where = np.unique(self.pin_states, return_inverse=True)
        found = self.pricing.best_contents(np.zeros((6, len(kinds))), self.sequence_loads, kinds, self.pinned_item or PinnedItem())[1]
        return found[where]

    def prove_load_bound(self, mixture: Mixture, slope: float) -> tuple[PathBound, IntArray]:
        """What a mixture proves at this slope, and the contents [v, n] of which that is the least."""
        # Of those that stand for any number every unit of load takes as much on the last stage, and no less.
        fits = self.pricing.items.fits
        least = float((self.last_stage_ns[fits] / self.sequence_loads[fits]).min())
        slope = min(slope, float(mixture.flows[0, self.window.merged].min(initial=np.inf)) * least)
        found, rows = self.prove_price_bound(mixture, slope * self.sequence_loads)
        return PathBound(found.constant, slope), rows

    def prove_price_bound(self, mixture: Mixture, prices: FloatArray) -> tuple[PriceBound, IntArray]:
        """What a mixture proves at these prices [n] of sequences, and the contents [v, n] of which that is the
        least."""
        begin, end = self.window.there
        flows, merged = mixture.flows, self.window.merged
        values, rows = self.best_contents(mixture.weights, prices)
        # The others may not be there.
        values[:begin] = np.minimum(0.0, values[:begin])
        values[end:] = np.minimum(0.0, values[end:])
        # Those that stand for any number hold whatever pays, at most all there is.
        dearer = np.maximum(0.0, prices - flows[0, merged, None] * self.last_stage_ns)[:, self.pricing.items.fits]
        values[merged] = -dearer @ self.pricing.items.counts[self.pricing.items.fits]
        return PriceBound(float(values.sum()), prices), rows
