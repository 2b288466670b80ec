"""Pricing problem of a pipeline's micro-batches: the best contents at given prices of sequences and weights of
stages.

On a mixture of paths (``bounds.pipeline_bounds``) micro-batch m weighs w_m0 of its time on the last stage,
forward and backward, and w_m1 and w_m2 of its forward and backward on the others, at least; and of its *transfer
terms*, w_m3 of its transfers between stages, w_m4 and w_m5 of the first stage's extra forward and backward time.
With prices lambda_k of the sequences the pricing problem is the minimum of

    w_m0 last(x) + w_m1 forward(x) + w_m2 backward(x) + sum_t w_m,3+t transfer_term_t(x) - sum_k lambda_k x_k

over all x that fit. It needs neither lines in the tokens nor even shares of last tiles: as in ``master``
every time is the larger of *ring exposed* and *ring hidden*, which is at least any mixture of both, and for each
of a few mixtures the knapsack DP finds the minimum over all x of every number of quanta. Only mixtures that matter
are evaluated: one or two for most micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np

from milpplan.lengths.bounds.work_bounds import tolls
from milpplan.lengths.cost_tables import Tables
from milpplan.lengths.deadline import spend
from milpplan.lengths.search_parameters import PARAMETERS
from milpplan.simulation import BoolArray, FloatArray, IntArray

NOTHING = -1e30
"""Value of impossible contents."""


@dataclass(frozen=True, eq=False)
class Items:
    """Sequences of ascending ``sizes`` in quanta, ``counts`` of each, and whether each ``fits``; [n]."""

    sizes: IntArray
    counts: IntArray
    fits: BoolArray
    num_loose: int = 0
    """Number of loose items, which come first."""

    def num_passes(self, capacity: int) -> int:
        """Return the number of passes over tables of so many quanta."""
        max_counts = np.minimum(self.counts, capacity // self.sizes)[self.fits]
        max_counts[: self.num_loose] = 1
        return int((2 + np.ceil(np.log2(np.maximum(1, max_counts)))).sum())


@dataclass(eq=False)
class KnapsackDP:
    """The dynamic program for ``values`` [R, n] in up to ``capacity`` quanta, with its trace.

    For values of the sequences (one row for every vector of values) the maximum value of sequences up to length k,
    with at least one of k and at most as many of each as there are, in exactly G quanta is a dynamic program over
    the lengths, ascending, so that k is the longest:

        E_k[G] = value_k + max of F_{k-1}[G - g_k] and with up to n_k - 1 more of k,     F_k = max(F_{k-1}, E_k)

    with parts 1, 2, 4, ... of the further ones. *Loose* items have one quantum each, in any number.
    """

    items: Items
    values: FloatArray
    capacity: int
    # By length: F of the shorter ones, and E.
    steps: dict[int, tuple[FloatArray, FloatArray]] = field(default_factory=dict)

    def rows(self) -> Iterator[tuple[int, FloatArray]]:
        """Yield (k, E_k of 1 to ``capacity`` quanta [R, capacity]), the shortest first."""
        capacity, fitting = self.capacity, np.flatnonzero(self.items.fits).tolist()
        spend(4.5e-9 * len(self.values) * capacity * self.items.num_passes(capacity))
        shape = (len(self.values), capacity + 1)
        best, spare = np.full(shape, NOTHING), np.empty(shape)
        best[:, 0] = 0.0
        for k in fitting:
            with_k = np.empty(shape)
            if k < self.items.num_loose:
                self._fill(best, k, with_k)
            else:
                self._add(best, k, with_k, spare)
            self.steps[k] = best, with_k
            yield k, with_k[:, 1:]
            best = np.maximum(best, with_k)

    def _add(self, best: FloatArray, k: int, with_k: FloatArray, spare: FloatArray) -> None:
        """Compute E_k from F_{k-1} into ``with_k``, without new arrays, which would dominate the time."""
        capacity, size, value = self.capacity, int(self.items.sizes[k]), self.values[:, k, None]
        with_k[:, :size] = NOTHING
        np.add(best[:, : capacity + 1 - size], value, out=with_k[:, size:])
        for part in _parts(min(int(self.items.counts[k]), capacity // size) - 1):
            shift = part * size
            shifted = spare[:, shift:]
            np.add(with_k[:, : capacity + 1 - shift], part * value, out=shifted)
            np.maximum(with_k[:, shift:], shifted, out=with_k[:, shift:])

    def _fill(self, best: FloatArray, k: int, with_k: FloatArray) -> None:
        """Compute E_k of a loose item."""
        values = self.values[:, k, None] * np.arange(self.capacity + 1)
        with_k[:, 0] = NOTHING
        np.add(np.maximum.accumulate(best - values, axis=1)[:, :-1], values[:, 1:], out=with_k[:, 1:])

    def content(self, k: int, quanta: int, row: int) -> IntArray:
        """Return the sequences [n] of an entry: so many quanta, k the longest, values of ``row``."""
        spend(2.3e-5)
        content = np.zeros_like(self.items.counts)
        while True:
            shorter, size, value = self.steps[k][0][row], int(self.items.sizes[k]), self.values[row, k]
            max_number = (
                quanta // size if k < self.items.num_loose else min(quanta // size, int(self.items.counts[k]))
            )
            number = np.arange(1, max_number + 1)
            content[k] = 1 + int((shorter[quanta - number * size] + number * value).argmax())
            quanta -= int(content[k]) * size
            if quanta == 0:
                return content
            entry = shorter[quanta]
            k = next(
                length
                for length in reversed(self.steps)
                if length < k and self.steps[length][1][row, quanta] == entry
            )


def _parts(number: int) -> list[int]:
    """Return 1, 2, 4, ... and a rest, whose sums are all numbers up to ``number``."""
    parts, part = [], 1
    while number > 0:
        parts.append(min(part, number))
        number -= part
        part *= 2
    return parts


@dataclass(frozen=True, slots=True)
class PinnedItem:
    """Requirement on a micro-batch: a sequence of length index ``first`` or longer, and at least ``quanta``."""

    first: int = 0
    quanta: int = 1

    def is_held(self, rows: IntArray, sizes: IntArray) -> BoolArray:
        """Return which contents [c, n] of sequences of some ``sizes`` satisfy it."""
        return np.asarray(rows[:, self.first :].any(axis=1) & (rows @ sizes >= self.quanta))


@dataclass(frozen=True, eq=False)
class MicroBatchPricing:
    """Times that never exceed the exact ones, in ns."""

    base: FloatArray
    """[2 (last stage, others), 2 phases, 2 (ring exposed, hidden), G]."""
    attention: FloatArray
    """Attention of a sequence, [2, 2, 2, n]."""
    once: FloatArray
    """Last tiles of the longest sequence, [2, 2, 2, n]."""
    mixed: tuple[FloatArray, FloatArray, FloatArray]
    """Base, attention and last tiles by mixture, [R, 2, 2, ...]."""
    items: Items
    """Sequences of the workload."""
    transfer_terms: FloatArray
    """[3, G]."""
    # Mixture that was best for most micro-batches last time, with which ``best_contents`` begins.
    last_best_mixture: list[int] = field(default_factory=lambda: [0])

    @staticmethod
    def of(tables: Tables, num_stages: int, max_quanta: int) -> MicroBatchPricing:
        """Build the pricing problem of a pipeline's micro-batches."""
        load, stage_groups = tables.load, ([num_stages - 1], list(range(num_stages - 1)))
        slopes = np.array(tables.slopes)[:, None]
        kernels = np.array([[tables.kernels(stages, phase) for phase in (0, 1)] for stages in stage_groups])
        base = np.array(
            [[tables.values(stages, phase, max_quanta) for phase in (0, 1)] for stages in stage_groups]
        )
        attention, once = (slopes * kernels[:, :, None, part] for part in (0, 1))
        sizes = load.lengths // load.token_quantum
        # Weights of *hidden* in the forward and in the backward; equal ones in both lose a few percent.
        parts = (0.0, 0.5, 1.0) if tables.candidate.layout.cp > 1 else (1.0,)
        hidden = np.array(list(product(parts, parts)))
        weights = np.stack([1.0 - hidden, hidden], axis=-1)
        mixed = [np.einsum("rpw,spwg->rspg", weights, part) for part in (base, attention, once)]
        items = Items(sizes, load.counts, (sizes <= max_quanta) & (load.counts > 0))
        return MicroBatchPricing(
            base, attention, once, (mixed[0], mixed[1], mixed[2]), items, tolls(tables, max_quanta)
        )

    def with_max_quanta(self, max_quanta: int) -> MicroBatchPricing:
        """Return the problem with a smaller capacity."""
        items = replace(self.items, fits=self.items.fits & (self.items.sizes <= max_quanta))
        base, mixed = self.base[..., :max_quanta], (self.mixed[0][..., :max_quanta], *self.mixed[1:])
        return replace(
            self, base=base, mixed=mixed, items=items, transfer_terms=self.transfer_terms[:, :max_quanta]
        )

    def with_loose_quanta(self, kinds: IntArray) -> MicroBatchPricing:
        """Return the problem with loose quanta of some kinds in the place of the first sequences, whose kinds are
        ``kinds`` [first].

        A kind has the minimum time per quantum of its sequences, and the minimum of their last tiles.
        """
        first, num_kinds, sizes = len(kinds), int(kinds.max(initial=-1)) + 1, self.items.sizes

        def minima(values: FloatArray, divisors: IntArray) -> FloatArray:
            parts = [
                (values[..., :first] / divisors)[..., kinds == kind].min(axis=-1) for kind in range(num_kinds)
            ]
            return np.concatenate([*(part[..., None] for part in parts), values[..., first:]], axis=-1)

        ones = np.ones(num_kinds, dtype=np.int64)
        num_quanta = np.bincount(kinds, self.items.counts[:first] * sizes[:first], num_kinds).astype(np.int64)
        items = Items(
            np.append(ones, sizes[first:]),
            np.append(num_quanta, self.items.counts[first:]),
            np.append(ones > 0, self.items.fits[first:]),
            num_kinds,
        )
        attention, once = minima(self.attention, sizes[:first]), minima(self.once, np.ones(first, dtype=np.int64))
        mixed = minima(self.mixed[1], sizes[:first]), minima(self.mixed[2], np.ones(first, dtype=np.int64))
        return replace(self, attention=attention, once=once, mixed=(self.mixed[0], *mixed), items=items)

    @property
    def entries(self) -> int:
        """Number of table entries of one micro-batch in ``best_contents``."""
        capacity = int(self.base.shape[-1])
        return len(self.mixed[0]) * capacity * self.items.num_passes(capacity)

    def times(self, rows: IntArray) -> FloatArray:
        """Return the minimum times of micro-batches [v, n] on the last stage, forward and backward on the others,
        and their transfer terms, [v, 6] ns; 0 if empty."""
        longest = rows.shape[1] - 1 - (rows[:, ::-1] > 0).argmax(axis=1)
        quanta = np.maximum(1, rows @ self.items.sizes)
        options = self.base[..., quanta - 1] + self.attention @ rows.T + self.once[..., longest]
        options = options.max(axis=2)
        times = np.stack([options[0].sum(axis=0), *options[1], *self.transfer_terms[:, quanta - 1]], axis=1)
        times[~rows.any(axis=1)] = 0.0
        return np.asarray(times)

    def best_contents(
        self, weights: FloatArray, prices: FloatArray, holds_pinned: BoolArray, pinned_item: PinnedItem
    ) -> tuple[FloatArray, IntArray]:
        """Solve the pricing problem of every micro-batch.

        Args:
            weights: weights of its times, [6, v].
            prices: prices of the sequences, [n] ns.
            holds_pinned: whether each must hold the pinned item, [v].
            pinned_item: the pinned item.

        Returns:
            Minimum reduced cost, [v] ns, and its contents, [v, n]; -``NOTHING`` and empty if nothing may be held.
        """
        reduced_costs = _ReducedCosts.of(self, weights, prices, holds_pinned, pinned_item)
        indices = np.arange(weights.shape[1])
        open_indices, mixtures = indices, np.full(len(indices), self.last_best_mixture[0])
        values, rows = np.zeros(len(indices)), np.zeros((len(indices), len(prices)), dtype=np.int64)
        proving_mixtures = np.zeros(len(indices), dtype=np.int64)
        while len(open_indices):
            values[open_indices], rows[open_indices], proving_mixtures[open_indices], costs_by_mixture = (
                reduced_costs.evaluate(open_indices, mixtures)
            )
            times_ns = (self.times(rows[open_indices]) * weights[:, open_indices].T).sum(axis=1)
            # If no other mixture lowers the value, it is the minimum over all mixtures.
            unseen = np.where(reduced_costs.evaluated[open_indices], np.inf, costs_by_mixture)
            min_values = np.maximum(unseen.min(axis=1), rows[open_indices] @ prices - times_ns)
            is_open = min_values < values[open_indices] - PARAMETERS.content_gap * times_ns
            mixtures = unseen.argmin(axis=1)
            open_indices, mixtures = open_indices[is_open], mixtures[is_open]
        self.last_best_mixture[0] = int(np.bincount(proving_mixtures).argmax())
        return -values, rows


@dataclass(frozen=True, eq=False)
class _ReducedCosts:
    """Maximum value of micro-batches beyond their times, as the minimum over the mixtures evaluated so far.

    Few mixtures matter to a micro-batch, so they are evaluated one after another: next is the one that lowers the
    value of the best contents most.
    """

    pricing: MicroBatchPricing
    prices: FloatArray
    base: FloatArray
    """[v, R, G]."""
    attention: FloatArray
    """[v, R, n]."""
    once: FloatArray
    """[v, R, n]."""
    max_values: FloatArray
    """Values by the longest fitting length and quanta, [v, k, G]."""
    evaluated: BoolArray
    """True if a mixture was evaluated, [v, R]."""
    tables: list[tuple[KnapsackDP, IntArray, IntArray]]

    @staticmethod
    def of(
        pricing: MicroBatchPricing,
        weights: FloatArray,
        prices: FloatArray,
        holds_pinned: BoolArray,
        pinned_item: PinnedItem,
    ) -> _ReducedCosts:
        """Build the values before any mixture."""
        parts = np.stack([weights[[0, 0]], weights[1:3]])
        base, attention, once = (np.einsum("rspx,spv->vrx", part, parts) for part in pricing.mixed)
        base += (weights[3:].T @ pricing.transfer_terms)[:, None]
        fitting = np.flatnonzero(pricing.items.fits)
        max_values = np.full((len(holds_pinned), len(fitting), base.shape[-1]), np.inf)
        max_values[holds_pinned, :, : pinned_item.quanta - 1] = -np.inf
        max_values[np.ix_(holds_pinned, fitting < pinned_item.first)] = -np.inf
        return _ReducedCosts(
            pricing, prices, base, attention, once, max_values, np.zeros(base.shape[:2], dtype=bool), []
        )

    def evaluate(self, some: IntArray, mixtures: IntArray) -> tuple[FloatArray, IntArray, IntArray, FloatArray]:
        """Evaluate one mixture for each of ``some`` [s] micro-batches.

        Returns:
            Maximum values then, [s]; their contents, [s, n]; the mixtures that prove them, [s]; and the values of
                these contents by every mixture, [s, R].
        """
        spend(4e-4)
        base, once = self.base[some, mixtures], self.once[some, mixtures]
        capacity = base.shape[-1]
        table = KnapsackDP(self.pricing.items, self.prices - self.attention[some, mixtures], capacity)
        max_values = self.max_values[some]
        for index, (k, values_of_k) in enumerate(table.rows()):
            value = values_of_k - base
            value -= once[:, k, None]
            np.minimum(max_values[:, index], value, out=max_values[:, index])
        self.max_values[some], self.evaluated[some, mixtures] = max_values, True
        self.tables.append((table, some, mixtures))
        indices, where = np.arange(len(some)), max_values.reshape(len(some), -1).argmax(axis=1)
        longest, quanta = np.flatnonzero(self.pricing.items.fits)[where // capacity], where % capacity
        # If nothing has exactly so many quanta, or nothing may be held, values are about NOTHING.
        values = np.maximum(NOTHING, max_values.reshape(len(some), -1)[indices, where])
        is_possible = (values > NOTHING / 2).tolist()
        entries = zip(some.tolist(), longest.tolist(), quanta.tolist(), is_possible, strict=True)
        solutions = [self._content(*entry) if is_real else self._none for *entry, is_real in entries]
        rows, proving_mixtures = np.array([row for _, row in solutions]), np.array([turn for turn, _ in solutions])
        net_prices = self.prices - self.attention[some]
        times = self.base[some][indices, :, quanta] + self.once[some][indices, :, longest]
        return values, rows, proving_mixtures, (net_prices @ rows[:, :, None])[:, :, 0] - times

    @property
    def _none(self) -> tuple[int, IntArray]:
        """Empty contents, by any mixture."""
        return int(self.tables[-1][2][0]), np.zeros_like(self.pricing.items.counts)

    def _content(self, micro_batch: int, longest: int, quanta: int) -> tuple[int, IntArray]:
        """Return the mixture with the lowest value, and contents of that value."""
        candidates = []
        for index, (table, micro_batches, mixtures) in enumerate(self.tables):
            for row in np.flatnonzero(micro_batches == micro_batch).tolist():
                mixture = int(mixtures[row])
                time_ns = self.base[micro_batch, mixture, quanta] + self.once[micro_batch, mixture, longest]
                candidates.append((float(table.steps[longest][1][row, quanta + 1] - time_ns), index, row, mixture))
        _, index, row, mixture = min(candidates)
        return mixture, self.tables[index][0].content(longest, quanta + 1, row)
