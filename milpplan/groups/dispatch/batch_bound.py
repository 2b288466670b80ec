"""A proved lower bound of one batch's step under given strategies, and the loads that nearly reach it.

**Relaxation** of a set Q of strategies and one of its tours (``tours.TourPrice``), in a box lo_s <= Z_s <= hi_s:

    min constant + sum_s Z_s   with   W_j = sum_k w_jk x_jk <= G_j(Z_s),   tokens of j <= T_j,   sum_j x_jk = n_k

for all kinds j of each s, x_jk >= 0 only where k fits, with G_j the least concave function on the box that is
nowhere below D_j g_j (``curves``), lo_s at least what the tour hides behind s, and T_j finite only where the
number of micro-batches is bounded. Every plan of Q with its Z in the box satisfies it. Larger Z_s than the time
of all that fits add nothing, and a sequence whose time alone is above hi_s does not run under s.

**Bound.** For all prices p, q >= 0 of work and tokens its value is at least

    constant + sum_k n_k min_j (p_j w_jk + q_j l_k) + sum_s min_Z (Z - sum_j p_j G_j(Z)) - sum_j q_j T_j,

which is computed over all lengths as they are. The prices come from a linear program over a few dozen bunches of
neighbouring lengths: how good they are decides how good the bound is, not whether it holds. A sum of floats may
be off by one part in 10^9, which is taken off.

**Boxes** are split, worst bound first, a fixed number of times, so that the same batch gives the same answer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from milpplan.groups.bounds import glop
from milpplan.groups.bounds.work_envelope import BatchKind
from milpplan.groups.strategies import FloatArray, Int64Array
from milpplan.groups.tours import TourPrice

_BUNCHES = 40
# Slopes of the lines over a curve that the linear program knows, between these shares of the steepest.
_SLOPES = np.array([1.0, 0.99, 0.97, 0.94, 0.9, 0.84, 0.75])
_FLOAT_SLACK = 1e-9
# Price of room that is not there, as a multiple of what room costs on one replica.
_LACK = 100.0
# Boxes are not split for less than this share of the bound.
_LEAST_SPLIT = 1e-4


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Distinct ``lengths`` [K] ascending, ``counts`` [K], and all kinds by strategy."""

    lengths: Int64Array
    counts: Int64Array
    kinds: Mapping[int, tuple[BatchKind, ...]]


# Prices of work and of tokens by strategy and kind.
Prices = dict[tuple[int, int], tuple[float, float]]


@dataclass(frozen=True, slots=True, eq=False)
class Relaxed:
    """An answer of the relaxation: times by strategy, sequences [K] by strategy and kind (real numbers), prices of
    work and tokens by strategy and kind."""

    times_ns: dict[int, float]
    held: dict[tuple[int, int], FloatArray]
    prices: Prices


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """Plans of exactly the strategies ``used`` on one of some tours, with their times in a box."""

    used: tuple[int, ...]
    tours: tuple[TourPrice, ...]
    lows_ns: tuple[float, ...]
    highs_ns: tuple[float, ...]
    bound_ns: float = 0.0
    relaxed: Relaxed | None = None

    @property
    def constant_ns(self) -> int:
        """What every tour costs at least."""
        return min(tour.constant_ns for tour in self.tours)


def root(batch: Batch, used: tuple[int, ...], tours: tuple[TourPrice, ...]) -> Node | None:
    """The node of all plans of a set, with a first bound; None where a sequence fits nowhere."""
    fits = np.array([np.any([kind.fits for kind in batch.kinds[s]], axis=0) for s in used])
    if not fits.any(axis=0).all():
        return None
    lows, highs = [], []
    for place, s in enumerate(used):
        # The longest sequence that fits under no other strategy.
        own = fits[place] & ~np.delete(fits, place, axis=0).any(axis=0)
        alone = np.min([np.where(kind.fits, kind.alone_ns, np.inf) for kind in batch.kinds[s]], axis=0)
        lows.append(float(alone[own].max(initial=0.0)))
        ends = [_longest_ns(batch, kind) for kind in batch.kinds[s]]
        highs.append(max(lows[-1], *ends, *(float(tour.hidden_ns[place]) for tour in tours)))
    node = Node(used, tours, tuple(lows), tuple(highs))
    node = _hiding(node)
    return priced(batch, node, _plain_prices(batch, node))


def _hiding(node: Node) -> Node:
    """The node with times no shorter than what every one of its tours hides."""
    hidden = np.min([tour.hidden_ns for tour in node.tours], axis=0)
    lows = tuple(max(low, float(least)) for low, least in zip(node.lows_ns, hidden, strict=True))
    return replace(node, lows_ns=lows, highs_ns=tuple(np.maximum(lows, node.highs_ns).tolist()))


def priced(batch: Batch, node: Node, prices: Prices) -> Node:
    """The node with the bound of any prices, where that is higher."""
    bound = _dual_bound(batch, node, prices)
    return replace(node, bound_ns=bound) if bound > node.bound_ns else node


def _longest_ns(batch: Batch, kind: BatchKind) -> float:
    """The kind's time if it held all that fits: beyond, more time holds no more."""
    total = float((kind.work * batch.counts)[kind.fits].sum()) / kind.num_replicas
    at = kind.curve.time_at(total)
    if not math.isfinite(at):
        times = (kind.curve.slope * kind.curve.most[:, None] + kind.curve.constant).max(axis=1)
        at = float(times.max())
    return max(at, float(kind.alone_ns[kind.fits].max(initial=0.0)))


def _members(batch: Batch, node: Node) -> list[tuple[int, int, BatchKind]]:
    """(place of the strategy in the node, index of the kind in it, kind)."""
    return [(place, j, kind) for place, s in enumerate(node.used) for j, kind in enumerate(batch.kinds[s])]


def _plain_prices(batch: Batch, node: Node) -> Prices:
    """Prices by which time is divided among the kinds in proportion to their replicas."""
    prices: Prices = {}
    for s in node.used:
        kinds = batch.kinds[s]
        total = sum(kind.num_replicas for kind in kinds)
        prices |= {(s, j): (kind.table.pipeline.parts / total, 0.0) for j, kind in enumerate(kinds)}
    return prices


def _allowed(node: Node, place: int, kind: BatchKind) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    # Times are whole numbers below 2^53: the comparison is exact.
    return np.asarray(kind.fits & (kind.alone_ns <= node.highs_ns[place]))


def _tokens(kind: BatchKind) -> float:
    """Most tokens of all replicas; infinite where they may run any number of micro-batches."""
    pipeline = kind.table.pipeline
    if pipeline.max_micro_batches is None:
        return math.inf
    return float(kind.num_replicas * pipeline.max_micro_batches * pipeline.micro_batch_tokens)


def _points(kind: BatchKind, low: float, high: float) -> tuple[FloatArray, FloatArray]:
    """Corners (Z, W of all replicas) whose upper hull is G of the box."""
    times, works = kind.points
    inside = (times > low) & (times < high)
    ends = [kind.curve.most_within(low), kind.curve.most_within(high)]
    return (
        np.concatenate([times[inside], [low, high]]),
        np.concatenate([works[inside], ends]) * kind.num_replicas,
    )


def _lines(kind: BatchKind, low: float, high: float) -> tuple[FloatArray, FloatArray]:
    """Slopes and heights of lines nowhere below G on the box."""
    times, works = _points(kind, low, high)
    slopes = np.append(_SLOPES * kind.num_replicas / kind.table.pipeline.parts, 0.0)
    return slopes, (works[None, :] - slopes[:, None] * times[None, :]).max(axis=1)


def _dual_bound(batch: Batch, node: Node, prices: Prices) -> float:
    """The *bound* of the module; infinite if some sequence is allowed nowhere in the box. No price: zero."""
    least = np.full(batch.lengths.size, np.inf)
    total = float(node.constant_ns)
    for place, s in enumerate(node.used):
        own = []
        for j, kind in enumerate(batch.kinds[s]):
            price, token_price = prices.get((s, j), (0.0, 0.0))
            cost = price * kind.work + token_price * batch.lengths
            np.minimum(least, np.where(_allowed(node, place, kind), cost, np.inf), out=least)
            if token_price:
                total -= token_price * _tokens(kind)
            own.append((kind, price))
        total += _least_time(own, node.lows_ns[place], node.highs_ns[place])
    total += float(least @ batch.counts)
    return total - _FLOAT_SLACK * abs(total) if math.isfinite(total) else total


def _least_time(own: Sequence[tuple[BatchKind, float]], low: float, high: float) -> float:
    """min_Z (Z - sum_j p_j G_j(Z)) over the box, or what is below it."""
    if len(own) == 1:
        kind, price = own[0]
        times, works = _points(kind, low, high)
        return float((times - price * works).min())
    lines = [_lines(kind, low, high) for kind, _ in own]
    corners = [np.array([low, high])]
    for slopes, heights in lines:
        first, second = np.triu_indices(slopes.size, 1)
        corners.append((heights[second] - heights[first]) / (slopes[first] - slopes[second]))
    times = np.clip(np.concatenate(corners), low, high)
    value = times.copy()
    for (slopes, heights), (_, price) in zip(lines, own, strict=True):
        value -= price * (slopes[:, None] * times[None, :] + heights[:, None]).min(axis=0)
    return float(value.min())


def relaxed(batch: Batch, node: Node) -> Node:
    """The node with the relaxation solved over bunches of lengths, and its bound over all lengths."""
    program = _Program(batch, node)
    answer = glop.least(
        program.cost,
        (np.array(program.rows).reshape(-1, program.cost.size), np.array(program.limits)),
        (program.fixed, program.sides),
        *program.bounds.T,
    )
    if answer is None:
        # Without prices the first bound stays.
        return node
    num_kinds, num_bunches = len(program.members), program.starts.size
    prices: Prices = {}
    for column, (place, j, kind) in enumerate(program.members):
        token_price = 0.0
        if column in program.token_rows:
            marginal = float(answer.at_most[program.token_rows[column]])
            token_price = max(0.0, -marginal) * program.scale / _tokens(kind)
        price = max(0.0, float(answer.equal[num_bunches + column]))
        prices[node.used[place], j] = (price, token_price)
    shares = answer.values[: program.loads_at].reshape(num_kinds, num_bunches)
    widths = np.diff(np.append(program.starts, batch.lengths.size))
    held = {
        (node.used[place], j): np.asarray(np.repeat(shares[column], widths) * batch.counts, np.float64)
        for column, (place, j, _) in enumerate(program.members)
    }
    times = {s: float(answer.values[program.times_at + at]) * program.scale for at, s in enumerate(node.used)}
    return replace(priced(batch, node, prices), relaxed=Relaxed(times, held, prices))


class _Program:
    """The relaxation over bunches. Columns: shares x by kind and bunch, loads W and lacks e by kind, times Z.

    A lack e_j is room that is not there, at a price above all others: the program always has an answer, and the
    prices of a box that holds no plan raise its bound beyond any plan's time.
    """

    def __init__(self, batch: Batch, node: Node) -> None:
        self.members = _members(batch, node)
        self.starts = _bunches(batch, node)
        num_bunches, num_kinds = self.starts.size, len(self.members)
        self.loads_at = num_kinds * num_bunches
        self.lacks_at = self.loads_at + num_kinds
        self.times_at = self.lacks_at + num_kinds
        self.scale = max(1.0, *node.highs_ns)
        num_columns = self.times_at + len(node.used)
        self.cost = np.zeros(num_columns)
        self.cost[self.times_at :] = 1.0
        self.bounds = np.column_stack([np.zeros(num_columns), np.full(num_columns, np.inf)])
        self.bounds[self.times_at :] = np.column_stack([node.lows_ns, node.highs_ns]) / self.scale
        self.fixed = np.zeros((num_bunches + num_kinds, num_columns))
        self.sides = np.concatenate([np.ones(num_bunches), np.zeros(num_kinds)])
        self.rows: list[FloatArray] = []
        self.limits: list[float] = []
        self.token_rows: dict[int, int] = {}
        for j in range(num_kinds):
            self._add_kind(batch, node, j)

    def _add_kind(self, batch: Batch, node: Node, j: int) -> None:
        place, _, kind = self.members[j]
        num_bunches = self.starts.size
        columns = slice(j * num_bunches, (j + 1) * num_bunches)
        self.bounds[columns, 1] = _allowed(node, place, kind)[self.starts]
        self.fixed[np.arange(num_bunches), np.arange(num_bunches) + j * num_bunches] = 1.0
        self.fixed[num_bunches + j, columns] = -np.add.reduceat(kind.work * batch.counts, self.starts) / self.scale
        self.fixed[num_bunches + j, self.loads_at + j] = 1.0
        self.cost[self.lacks_at + j] = _LACK * kind.table.pipeline.parts
        slopes, heights = _lines(kind, node.lows_ns[place], node.highs_ns[place])
        for slope, height in zip(slopes.tolist(), heights.tolist(), strict=True):
            row = self._row(height / self.scale)
            row[self.loads_at + j], row[self.lacks_at + j], row[self.times_at + place] = 1.0, -1.0, -slope
        if math.isfinite(_tokens(kind)):
            self.token_rows[j] = len(self.rows)
            row = self._row(1.0)
            row[columns] = np.add.reduceat(batch.lengths * batch.counts, self.starts) / _tokens(kind)
            row[self.lacks_at + j] = -1.0

    def _row(self, limit: float) -> FloatArray:
        self.rows.append(np.zeros(self.cost.size))
        self.limits.append(limit)
        return self.rows[-1]


def _bunches(batch: Batch, node: Node) -> Int64Array:
    """First indices of bunches of about equal tokens, in each of which every kind allows all lengths or none."""
    tokens = np.cumsum(batch.lengths * batch.counts)
    ends = np.searchsorted(tokens, np.linspace(0, int(tokens[-1]), _BUNCHES + 1)[1:-1])
    # What a kind allows ends at some length.
    edges = [int(_allowed(node, place, kind).sum()) for place, _, kind in _members(batch, node)]
    starts = np.unique(np.concatenate([[0], ends, edges]))
    return np.asarray(starts[starts < batch.lengths.size], np.int64)


def split(node: Node, batch: Batch) -> tuple[Node, ...]:
    """The node's tours one by one, or its box in two; empty if neither helps.

    A box is split where the relaxation is furthest below the times of its loads.
    """
    assert node.relaxed is not None
    if len(node.tours) > 1:
        alone = [_hiding(replace(node, tours=(tour,))) for tour in node.tours]
        # An answer that hides nothing is the answer without hidden gradients too.
        kept = [one if one.lows_ns == node.lows_ns else replace(one, relaxed=None) for one in alone]
        return tuple(priced(batch, one, node.relaxed.prices) for one in kept)
    gaps = []
    for place, s in enumerate(node.used):
        loads = (
            (kind, float((kind.work * node.relaxed.held[s, j]).sum()) / kind.num_replicas)
            for j, kind in enumerate(batch.kinds[s])
        )
        exact = max(kind.curve.time_at(load) for kind, load in loads)
        gaps.append(min(exact, node.highs_ns[place]) - node.relaxed.times_ns[s])
    place = int(np.argmax(gaps))
    if gaps[place] <= _LEAST_SPLIT * node.bound_ns:
        return ()
    low, high = node.lows_ns[place], node.highs_ns[place]
    at = node.relaxed.times_ns[node.used[place]] + gaps[place] / 2
    if not low < at < high:
        return ()
    below = (*node.highs_ns[:place], at, *node.highs_ns[place + 1 :])
    above = (*node.lows_ns[:place], at, *node.lows_ns[place + 1 :])
    halves = (replace(node, highs_ns=below, relaxed=None), replace(node, lows_ns=above, relaxed=None))
    return tuple(priced(batch, half, node.relaxed.prices) for half in halves)


def narrowed(node: Node, best_ns: float) -> Node | None:
    """The node without times that are too long for a plan shorter than ``best_ns``; None if all are."""
    spare = best_ns - node.constant_ns - sum(node.lows_ns)
    if spare <= 0 or node.bound_ns >= best_ns:
        return None
    highs = tuple(min(high, low + spare) for low, high in zip(node.lows_ns, node.highs_ns, strict=True))
    return replace(node, highs_ns=highs)
