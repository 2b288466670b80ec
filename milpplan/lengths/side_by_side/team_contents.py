"""What a micro-batch of one strategy may hold at most, at given prices of its sequences.

With prices lambda_k >= 0 of the sequences and x_k <= n_k of them in a micro-batch of strategy j (c_j of the M
seats), the question is by how much

    sum_k lambda_k x_k    exceeds    (c_j / M) time_j(x)        for any x that fits.

**Time.** Per phase it is the larger of *ring exposed* and *ring hidden* (``tables``): values of the grains, what
every sequence's attention adds, and once what the longest adds. The larger is at least any mixture of both, so
each of a few mixtures, for both phases, makes it linear in x for a given number of grains, and never too long.

**Knapsack.** For a mixture, ``knapsack_dp`` says what sequences are worth at most, less their attention, in exactly
G grains with k the longest. The least of that less the values of G and of the longest over all mixtures is what
any such micro-batch is worth at most beyond its time.

**Limit.** In a step shorter than some limit no micro-batch takes the limit: where a sequence alone takes longer,
it is in none, and numbers of grains that take longer are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from milpplan.lengths.bounds.knapsack_dp import NOTHING, Items, KnapsackDP
from milpplan.lengths.side_by_side.teams import Family
from milpplan.simulation.layout_columns import BoolArray, FloatArray, IntArray

# Parts of the way *hidden* in the forward and in the backward.
_MIXTURES = ((0.0, 0.0), (0.5, 0.5), (1.0, 1.0))
# What sums of floats may add.
_MORE = 1.0 + 1e-9


@dataclass(frozen=True, eq=False)
class Contents:
    """Micro-batches of a member: ``base`` [2 phases, 2 ways, G], ``attention`` and ``once`` [2, 2, n] ns, never
    above the exact time; mixtures of these [R, ...]; ``share`` of the seats; which lengths [n] and numbers of
    grains [G] are in steps below the limit."""

    member: int
    share: float
    base: FloatArray
    attention: FloatArray
    once: FloatArray
    mixed: tuple[FloatArray, FloatArray, FloatArray]
    items: Items
    short: BoolArray

    @staticmethod
    def of(family: Family, member: int, degree: int, limit_ns: float) -> Contents:
        """Those of ``member``, of ``degree``, that take at most the limit."""
        pool, most = family.pool, family.max_quanta(member)
        tables, load = pool.tables[member], pool.load
        slopes = np.array(tables.slopes)[:, None]
        kernels = np.array([tables.kernels([0], phase) for phase in (0, 1)])
        base = np.array([tables.values([0], phase, most) for phase in (0, 1)])
        attention, once = (slopes * kernels[:, None, part] for part in (0, 1))
        sizes = load.lengths // load.token_quantum
        # A larger micro-batch may be shorter by a tile.
        least = np.minimum.accumulate(base[..., ::-1], axis=-1)[..., ::-1]
        alone = (least[..., np.minimum(sizes, most) - 1] + attention + once).max(axis=1).sum(axis=0)
        fits = (sizes <= most) & (load.counts > 0) & (alone <= limit_ns * _MORE)
        hidden = np.array(_MIXTURES if degree > 1 else _MIXTURES[-1:])
        weights = np.stack([1.0 - hidden, hidden], axis=-1)
        base_, attention_, once_ = (np.einsum("rpw,pwg->rg", weights, part) for part in (base, attention, once))
        short = base_.max(axis=0) <= limit_ns * _MORE
        mixed = (base_, attention_, once_)
        share = degree / family.num_slots
        return Contents(member, share, base, attention, once, mixed, Items(sizes, load.counts, fits), short)

    @property
    def entries(self) -> int:
        """Numbers in the tables of ``worst``."""
        return self.mixed[0].size * self.items.num_passes(self.mixed[0].shape[1])

    def costs(self, rows: IntArray) -> FloatArray:
        """Time of micro-batches [v, n] at least, as a part of all seats' time, ns [v]."""
        longest = rows.shape[1] - 1 - (rows[:, ::-1] > 0).argmax(axis=1)
        ways = self.base[..., rows @ self.items.sizes - 1] + self.attention @ rows.T + self.once[..., longest]
        return np.asarray(self.share * ways.max(axis=1).sum(axis=0))

    def worst(self, prices: FloatArray, least: float = 0.0) -> tuple[float, list[IntArray]]:
        """By which factor the prices [n] are too high at most, at least 1; and for every length as the longest
        the micro-batch that is worth most beyond its time, if that is more than ``least`` ns."""
        base, attention, once = self.mixed
        table = KnapsackDP(self.items, prices - self.share * attention, base.shape[1])
        times, most, found = self.share * base.max(axis=0), 0.0, []
        for k, held in table.rows():
            worth = held - self.share * (base + once[:, k, None])
            beyond = np.where(self.short, worth.min(axis=0), NOTHING)
            most = max(most, float((beyond / times).max()))
            place = int(beyond.argmax())
            if beyond[place] > least:
                found.append(table.content(k, place + 1, int(worth[:, place].argmin())))
        return 1.0 + most, found
