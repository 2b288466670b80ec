"""What the micro-batches of a pipeline may hold at most, at given prices of sequences and weights of stages.

On a mixture of paths (``unequal``) micro-batch m weighs some w_m0 of its time on the last stage, forward and
backward, and w_m1 and w_m2 of its forward and backward on the others, at least; and of its *tolls*, w_m3 of its
transfers between stages, w_m4 and w_m5 of what the first stage takes more forward and backward. With prices
lambda_k of the sequences the question is how little

    w_m0 last(x) + w_m1 forward(x) + w_m2 backward(x) + sum_t w_m,3+t toll_t(x) - sum_k lambda_k x_k

may be for any x that fits. Lines in the tokens are not needed for that, nor even shares of last tiles: as in
``team_contents`` every time is the larger of *ring exposed* and *ring hidden*, which is at least any mixture of
both, and for each of a few mixtures ``knapsacks`` finds the least over all x of so many grains: for those that
decide, which of most micro-batches are one or two.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np

from milpplan.lengths.bounds.knapsack_dp import NOTHING, Items, KnapsackDP
from milpplan.lengths.bounds.stage_lines import tolls
from milpplan.lengths.cost_tables import Tables
from milpplan.simulation.layout_columns import BoolArray, FloatArray, IntArray

# Parts of the way *hidden* in the forward and in the backward: equal ones alone lose up to 2 %.
_PARTS = (0.0, 0.5, 1.0)
# Where what is said of a micro-batch is this part of its time from what one is worth, no more is looked at.
_NEAR = 5e-5


@dataclass(frozen=True, slots=True)
class PinnedItem:
    """What a micro-batch has at least: a sequence of length number ``first`` or longer, and so many ``grains``.
    ``foremost``: those ahead of it have not."""

    first: int = 0
    quanta: int = 1
    foremost: bool = False

    def is_held(self, rows: IntArray, sizes: IntArray) -> BoolArray:
        """Which contents [c, n] of sequences of so many grains have it."""
        return np.asarray(rows[:, self.first :].any(axis=1) & (rows @ sizes >= self.quanta))


HOLDS, FREE, WITHOUT = 1, 0, -1
"""A micro-batch holds a core for sure, may hold one, or holds none."""


@dataclass(frozen=True, eq=False)
class MicroBatchPricing:
    """Times never above the exact ones: ``base`` [2 (last stage, others), 2 phases, 2 ways, G], ``attention`` and
    ``once`` [2, 2, 2, n] ns; ``mixed`` are mixtures of the ways, [R, 2, 2, ...]; ``tolls`` [3, G] ns."""

    base: FloatArray
    attention: FloatArray
    once: FloatArray
    mixed: tuple[FloatArray, FloatArray, FloatArray]
    items: Items
    transfer_terms: FloatArray
    # The mixture that was mostly the least last time, with which ``least`` begins: it mostly is again.
    last_best_mixture: list[int] = field(default_factory=lambda: [0])

    @staticmethod
    def of(tables: Tables, num_stages: int, max_quanta: int) -> MicroBatchPricing:
        """Those of a pipeline of several stages, of up to so many grains."""
        load, parts = tables.load, ([num_stages - 1], list(range(num_stages - 1)))
        slopes = np.array(tables.slopes)[:, None]
        kernels = np.array([[tables.kernels(stages, phase) for phase in (0, 1)] for stages in parts])
        base = np.array([[tables.values(stages, phase, max_quanta) for phase in (0, 1)] for stages in parts])
        attention, once = (slopes * kernels[:, :, None, part] for part in (0, 1))
        sizes = load.lengths // load.token_quantum
        hidden = np.array(list(product(_PARTS, _PARTS)) if tables.candidate.layout.cp > 1 else [(1.0, 1.0)])
        weights = np.stack([1.0 - hidden, hidden], axis=-1)
        mixed = [np.einsum("rpw,spwg->rspg", weights, part) for part in (base, attention, once)]
        items = Items(sizes, load.counts, (sizes <= max_quanta) & (load.counts > 0))
        return MicroBatchPricing(
            base, attention, once, (mixed[0], mixed[1], mixed[2]), items, tolls(tables, max_quanta)
        )

    def with_max_quanta(self, max_quanta: int) -> MicroBatchPricing:
        """Those of up to fewer grains."""
        items = replace(self.items, fits=self.items.fits & (self.items.sizes <= max_quanta))
        base, mixed = self.base[..., :max_quanta], (self.mixed[0][..., :max_quanta], *self.mixed[1:])
        return replace(
            self, base=base, mixed=mixed, items=items, transfer_terms=self.transfer_terms[:, :max_quanta]
        )

    def with_loose_quanta(self, kinds: IntArray) -> MicroBatchPricing:
        """Those of grains of loose kinds in the place of the first sequences, ``kinds`` [first] of these: with the
        least of what sequences of a kind take by the grain, and of last tiles."""
        first, number, sizes = len(kinds), int(kinds.max(initial=-1)) + 1, self.items.sizes

        def least(values: FloatArray, each: IntArray) -> FloatArray:
            parts = [(values[..., :first] / each)[..., kinds == kind].min(axis=-1) for kind in range(number)]
            return np.concatenate([*(part[..., None] for part in parts), values[..., first:]], axis=-1)

        ones = np.ones(number, dtype=np.int64)
        grains = np.bincount(kinds, self.items.counts[:first] * sizes[:first], number).astype(np.int64)
        items = Items(
            np.append(ones, sizes[first:]),
            np.append(grains, self.items.counts[first:]),
            np.append(ones > 0, self.items.fits[first:]),
            number,
        )
        attention, once = least(self.attention, sizes[:first]), least(self.once, np.ones(first, dtype=np.int64))
        mixed = least(self.mixed[1], sizes[:first]), least(self.mixed[2], np.ones(first, dtype=np.int64))
        return replace(self, attention=attention, once=once, mixed=(self.mixed[0], *mixed), items=items)

    @property
    def entries(self) -> int:
        """Numbers in the tables of one micro-batch of ``least``."""
        room = int(self.base.shape[-1])
        return len(self.mixed[0]) * room * self.items.num_passes(room)

    def times(self, rows: IntArray) -> FloatArray:
        """Least times of micro-batches [v, n] on the last stage, forward and backward on the others, and their
        tolls, [v, 6] ns; nothing of one that holds nothing."""
        longest = rows.shape[1] - 1 - (rows[:, ::-1] > 0).argmax(axis=1)
        grains = np.maximum(1, rows @ self.items.sizes)
        ways = self.base[..., grains - 1] + self.attention @ rows.T + self.once[..., longest]
        ways = ways.max(axis=2)
        found = np.stack([ways[0].sum(axis=0), *ways[1], *self.transfer_terms[:, grains - 1]], axis=1)
        found[~rows.any(axis=1)] = 0.0
        return np.asarray(found)

    def best_contents(
        self, weights: FloatArray, prices: FloatArray, kinds: IntArray, core: PinnedItem
    ) -> tuple[FloatArray, IntArray]:
        """The least over what every micro-batch may hold of its time by ``weights`` [6, v] less ``prices`` [n],
        [v] ns, and that [v, n]; ``kinds`` [v] say which hold a ``core``. Of one that can hold nothing -``NOTHING``
        ns, more than any time, and nothing."""
        found = _ReducedCosts.of(self, weights, prices, kinds, core)
        every = np.arange(weights.shape[1])
        left, turns = every, np.full(len(every), self.last_best_mixture[0])
        values, rows = np.zeros(len(every)), np.zeros((len(every), len(prices)), dtype=np.int64)
        said = np.zeros(len(every), dtype=np.int64)
        while len(left):
            values[left], rows[left], said[left], lines = found.evaluate(left, turns)
            times_ns = (self.times(rows[left]) * weights[:, left].T).sum(axis=1)
            # What no other mixture makes less is the least of all mixtures.
            new = np.where(found.evaluated[left], np.inf, lines)
            least = np.maximum(new.min(axis=1), rows[left] @ prices - times_ns)
            open_, turns = least < values[left] - _NEAR * times_ns, new.argmin(axis=1)
            left, turns = left[open_], turns[open_]
        self.last_best_mixture[0] = int(np.bincount(said).argmax())
        return -values, rows


@dataclass(frozen=True, eq=False)
class _ReducedCosts:
    """What micro-batches are worth at most beyond their times, ``most`` [v, k, G] by the longest of the lengths
    that fit and grains: the least of the mixtures of ways that were looked at. Few of them are of any use to one,
    so they are looked at one after another: the one next that makes what is worth most worth least.

    ``base`` [v, R, G], ``attention`` and ``once`` [v, R, n] are the parts of the times by mixture; ``seen`` [v, R]
    which were looked at."""

    pricing: MicroBatchPricing
    prices: FloatArray
    base: FloatArray
    attention: FloatArray
    once: FloatArray
    max_values: FloatArray
    evaluated: BoolArray
    tables: list[tuple[KnapsackDP, IntArray, IntArray]]

    @staticmethod
    def of(
        contents: MicroBatchPricing, weights: FloatArray, prices: FloatArray, kinds: IntArray, core: PinnedItem
    ) -> _ReducedCosts:
        """Before any mixture."""
        parts = np.stack([weights[[0, 0]], weights[1:3]])
        base, attention, once = (np.einsum("rspx,spv->vrx", part, parts) for part in contents.mixed)
        base += (weights[3:].T @ contents.transfer_terms)[:, None]
        fitting = np.flatnonzero(contents.items.fits)
        most, held = np.full((len(kinds), len(fitting), base.shape[-1]), np.inf), kinds == HOLDS
        most[held, :, : core.quanta - 1] = -np.inf
        most[np.ix_(held, fitting < core.first)] = -np.inf
        with_core = fitting >= core.first, np.arange(base.shape[-1]) >= core.quanta - 1
        most[np.ix_(kinds == WITHOUT, *with_core)] = -np.inf
        return _ReducedCosts(contents, prices, base, attention, once, most, np.zeros(base.shape[:2], dtype=bool), [])

    def evaluate(self, some: IntArray, turns: IntArray) -> tuple[FloatArray, IntArray, IntArray, FloatArray]:
        """Look at a mixture each for ``some`` [s] of the micro-batches: what these are worth at most then, [s],
        the contents of which that is said [s, n], by which mixture [s], and what each says of those, [s, R]."""
        base, once = self.base[some, turns], self.once[some, turns]
        room = base.shape[-1]
        table = KnapsackDP(self.pricing.items, self.prices - self.attention[some, turns], room)
        most = self.max_values[some]
        for place, (k, held) in enumerate(table.rows()):
            worth = held - base
            worth -= once[:, k, None]
            np.minimum(most[:, place], worth, out=most[:, place])
        self.max_values[some], self.evaluated[some, turns] = most, True
        self.tables.append((table, some, turns))
        every, where = np.arange(len(some)), most.reshape(len(some), -1).argmax(axis=1)
        longest, grains = np.flatnonzero(self.pricing.items.fits)[where // room], where % room
        # Where nothing is in exactly so many grains, or nothing may be held at all, values are about NOTHING.
        values = np.maximum(NOTHING, most.reshape(len(some), -1)[every, where])
        there = (values > NOTHING / 2).tolist()
        given = zip(some.tolist(), longest.tolist(), grains.tolist(), there, strict=True)
        told = [self._content(*one) if is_there else self._none for *one, is_there in given]
        rows, said = np.array([row for _, row in told]), np.array([turn for turn, _ in told])
        each = self.prices - self.attention[some]
        beyond = self.base[some][every, :, grains] + self.once[some][every, :, longest]
        return values, rows, said, (each @ rows[:, :, None])[:, :, 0] - beyond

    @property
    def _none(self) -> tuple[int, IntArray]:
        """Nothing, by any mixture."""
        return int(self.tables[-1][2][0]), np.zeros_like(self.pricing.items.counts)

    def _content(self, micro_batch: int, longest: int, grains: int) -> tuple[int, IntArray]:
        """The mixture that says least, and what is worth so much by it."""
        ways = []
        for number, (table, some, turns) in enumerate(self.tables):
            for row in np.flatnonzero(some == micro_batch).tolist():
                turn = int(turns[row])
                beyond = self.base[micro_batch, turn, grains] + self.once[micro_batch, turn, longest]
                ways.append((float(table.steps[longest][1][row, grains + 1] - beyond), number, row, turn))
        _, number, row, turn = min(ways)
        return turn, self.tables[number][0].content(longest, grains + 1, row)
