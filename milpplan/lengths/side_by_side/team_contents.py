"""Pricing problem of a micro-batch of one strategy, at given prices of its sequences.

With prices lambda_k >= 0 of the sequences and x_k <= n_k of them in a micro-batch of strategy j (c_j of the M
slots), the question is by how much

    sum_k lambda_k x_k    exceeds    (c_j / M) time_j(x)        for any x that fits.

**Time.** Per phase it is the larger of *ring exposed* and *ring hidden* (``cost_tables``): a value of the quanta,
the attention of every sequence, and once the last tiles of the longest. The larger is at least any mixture of
both, so each of a few mixtures, for both phases, makes it linear in x for a given number of quanta, and never too
long.

**Knapsack.** For a mixture ``knapsack_dp`` gives the maximum value of sequences, less their attention, in exactly
G quanta with k the longest. The minimum over all mixtures of that, less the times of G and of the longest, is the
maximum negative reduced cost of any such micro-batch.

**Limit.** In a step below some limit no micro-batch takes the limit: a sequence that takes longer by itself is in
none, and numbers of quanta that take longer are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from milpplan.lengths.bounds.knapsack_dp import NOTHING, Items, KnapsackDP
from milpplan.lengths.side_by_side.teams import Family
from milpplan.simulation.layout_columns import BoolArray, FloatArray, IntArray

# Weights of *hidden* in the forward and in the backward.
_MIXTURES = ((0.0, 0.0), (0.5, 0.5), (1.0, 1.0))
# Factor that covers the rounding of float sums.
_MORE = 1.0 + 1e-9


@dataclass(frozen=True, eq=False)
class Contents:
    """Micro-batches of a member, with times that never exceed the exact ones, in ns."""

    member: int
    share: float
    """Slots of a micro-batch over all slots."""
    base: FloatArray
    """[2 phases, 2 (ring exposed, hidden), G]."""
    attention: FloatArray
    """Attention of a sequence, [2, 2, n]."""
    once: FloatArray
    """Last tiles of the longest sequence, [2, 2, n]."""
    mixed: tuple[FloatArray, FloatArray, FloatArray]
    """Base, attention and last tiles by mixture, [R, ...]."""
    items: Items
    """Sequences, which fit if they take less than the limit by themselves."""
    short: BoolArray
    """Numbers of quanta that take less than the limit, [G]."""

    @staticmethod
    def of(family: Family, member: int, degree: int, limit_ns: float) -> Contents:
        """Build the pricing problem of ``member``, of ``degree``, for times up to the limit."""
        pool, capacity = family.pool, family.max_quanta(member)
        tables, load = pool.tables[member], pool.load
        slopes = np.array(tables.slopes)[:, None]
        kernels = np.array([tables.kernels([0], phase) for phase in (0, 1)])
        base = np.array([tables.values([0], phase, capacity) for phase in (0, 1)])
        attention, once = (slopes * kernels[:, None, kind] for kind in (0, 1))
        sizes = load.lengths // load.token_quantum
        # A larger micro-batch may be faster by a tile.
        suffix_minimum = np.minimum.accumulate(base[..., ::-1], axis=-1)[..., ::-1]
        single_ns = (
            (suffix_minimum[..., np.minimum(sizes, capacity) - 1] + attention + once).max(axis=1).sum(axis=0)
        )
        fits = (sizes <= capacity) & (load.counts > 0) & (single_ns <= limit_ns * _MORE)
        hidden = np.array(_MIXTURES if degree > 1 else _MIXTURES[-1:])
        weights = np.stack([1.0 - hidden, hidden], axis=-1)
        base_, attention_, once_ = (np.einsum("rpw,pwg->rg", weights, kind) for kind in (base, attention, once))
        short = base_.max(axis=0) <= limit_ns * _MORE
        mixed = (base_, attention_, once_)
        share = degree / family.num_slots
        return Contents(member, share, base, attention, once, mixed, Items(sizes, load.counts, fits), short)

    @property
    def entries(self) -> int:
        """Number of table entries of ``price_columns``."""
        return self.mixed[0].size * self.items.num_passes(self.mixed[0].shape[1])

    def costs(self, rows: IntArray) -> FloatArray:
        """Return the minimum slot time of micro-batches [v, n] over all slots, [v] ns."""
        longest = rows.shape[1] - 1 - (rows[:, ::-1] > 0).argmax(axis=1)
        options = self.base[..., rows @ self.items.sizes - 1] + self.attention @ rows.T + self.once[..., longest]
        return np.asarray(self.share * options.max(axis=1).sum(axis=0))

    def price_columns(self, prices: FloatArray, min_excess_ns: float = 0.0) -> tuple[float, list[IntArray]]:
        """Return the maximum factor by which the prices [n] are too high, at least 1, and the best micro-batch for
        every longest length.

        Only micro-batches with a negative reduced cost beyond ``min_excess_ns`` are returned.
        """
        base, attention, once = self.mixed
        table = KnapsackDP(self.items, prices - self.share * attention, base.shape[1])
        times, max_excess, columns = self.share * base.max(axis=0), 0.0, []
        for k, values in table.rows():
            net_values = values - self.share * (base + once[:, k, None])
            excess = np.where(self.short, net_values.min(axis=0), NOTHING)
            max_excess = max(max_excess, float((excess / times).max()))
            best = int(excess.argmax())
            if excess[best] > min_excess_ns:
                columns.append(table.content(k, best + 1, int(net_values[:, best].argmin())))
        return 1.0 + max_excess, columns
