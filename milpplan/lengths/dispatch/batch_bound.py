"""A proved lower bound of one batch's step under given strategies, and loads that nearly reach it.

**Relaxation** of a set Q of strategies and one of its tours (``TourCost``), in a box lo_s <= Z_s <= hi_s:

    min constant + sum_s Z_s   with   W_j = sum_k w_jk x_jk <= G_j(Z_s),   tokens of j <= T_j,   sum_j x_jk = n_k

for all kinds j of each s, x_jk >= 0 only where k fits, with G_j the smallest concave function on the box that is
nowhere below D_j g_j (``work_envelope``), lo_s at least the gradient switch that the tour hides behind s, and T_j
finite only where the number of micro-batches is bounded. Every plan of Q with its Z in the box satisfies it.
Larger Z_s than the time of all sequences that fit add nothing, and a sequence whose time alone is above hi_s does
not run under s.

**Bound.** For all dual values p, q >= 0 of work and tokens the optimum is at least

    constant + sum_k n_k min_j (p_j w_jk + q_j l_k) + sum_s min_Z (Z - sum_j p_j G_j(Z)) - sum_j q_j T_j,

which is computed over all lengths exactly. The dual values come from a linear program over a few dozen buckets of
neighbouring lengths: their quality decides the quality of the bound, not its validity. A sum of floats may be off
by one part in 10^9, which is subtracted.

**Boxes** are split, smallest bound first, a fixed number of times, so that equal batches give equal answers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from milpplan.lengths.bounds import BatchKind, glop
from milpplan.lengths.tabled import (
    FloatArray,
    Int64Array,
)
from milpplan.lengths.tabled.step_plan import TourCost

_NUM_BUCKETS = 40
# Slopes of the lines over an envelope in the linear program, as shares of the steepest slope.
_SLOPES = np.array([1.0, 0.99, 0.97, 0.94, 0.9, 0.84, 0.75])
_FLOAT_SLACK = 1e-9
# Cost of missing capacity, as a multiple of the cost of capacity on one replica.
_SHORTFALL_COST = 100.0
# Boxes are not split for a gap below this share of the bound.
_MIN_SPLIT = 1e-4


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Distinct ``lengths`` [K] ascending, ``counts`` [K], and all kinds by strategy."""

    lengths: Int64Array
    counts: Int64Array
    kinds: Mapping[int, tuple[BatchKind, ...]]


# Dual values of work and of tokens by strategy and kind.
DualValues = dict[tuple[int, int], tuple[float, float]]


@dataclass(frozen=True, slots=True, eq=False)
class Relaxed:
    """An answer of the relaxation.

    ``times_ns`` by strategy; ``sequences`` [K] by strategy and kind, real numbers; ``duals`` of work and tokens by
    strategy and kind.
    """

    times_ns: dict[int, float]
    sequences: dict[tuple[int, int], FloatArray]
    duals: DualValues


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """Plans of exactly the strategies ``used`` on one of some tours, with their group times in a box."""

    used: tuple[int, ...]
    tours: tuple[TourCost, ...]
    lows_ns: tuple[float, ...]
    highs_ns: tuple[float, ...]
    bound_ns: float = 0.0
    relaxed: Relaxed | None = None

    @property
    def constant_ns(self) -> int:
        """Minimum constant of the tours, ns."""
        return min(tour.constant_ns for tour in self.tours)


def root(batch: Batch, used: tuple[int, ...], tours: tuple[TourCost, ...]) -> Node | None:
    """Build the node of all plans of a set, with a first bound; None if a sequence fits nowhere."""
    fits = np.array([np.any([kind.fits for kind in batch.kinds[s]], axis=0) for s in used])
    if not fits.any(axis=0).all():
        return None
    lows, highs = [], []
    for position, s in enumerate(used):
        # A group takes at least the time of the longest sequence that fits under no other strategy.
        exclusive = fits[position] & ~np.delete(fits, position, axis=0).any(axis=0)
        times_alone = np.min([np.where(kind.fits, kind.alone_ns, np.inf) for kind in batch.kinds[s]], axis=0)
        lows.append(float(times_alone[exclusive].max(initial=0.0)))
        ends = [_longest_ns(batch, kind) for kind in batch.kinds[s]]
        highs.append(max(lows[-1], *ends, *(float(tour.hidden_ns[position]) for tour in tours)))
    node = Node(used, tours, tuple(lows), tuple(highs))
    node = _hiding(node)
    return with_duals(batch, node, _plain_duals(batch, node))


def _hiding(node: Node) -> Node:
    """Raise the lower ends of the box to the gradient switch that every tour hides."""
    hidden = np.min([tour.hidden_ns for tour in node.tours], axis=0)
    lows = tuple(max(low, float(minimum)) for low, minimum in zip(node.lows_ns, hidden, strict=True))
    return replace(node, lows_ns=lows, highs_ns=tuple(np.maximum(lows, node.highs_ns).tolist()))


def with_duals(batch: Batch, node: Node, duals: DualValues) -> Node:
    """Raise the bound of the node by dual values, where theirs is higher."""
    bound = _dual_bound(batch, node, duals)
    return replace(node, bound_ns=bound) if bound > node.bound_ns else node


def _longest_ns(batch: Batch, kind: BatchKind) -> float:
    """Return the time of the kind with all sequences that fit; more time holds no more work."""
    total = float((kind.work * batch.counts)[kind.fits].sum()) / kind.num_replicas
    time_ns = kind.envelope.time_at(total)
    if not math.isfinite(time_ns):
        times = (kind.envelope.slope * kind.envelope.max_work[:, None] + kind.envelope.constant).max(axis=1)
        time_ns = float(times.max())
    return max(time_ns, float(kind.alone_ns[kind.fits].max(initial=0.0)))


def _members(batch: Batch, node: Node) -> list[tuple[int, int, BatchKind]]:
    """List (position of the strategy in the node, index of the kind in it, kind)."""
    return [(position, j, kind) for position, s in enumerate(node.used) for j, kind in enumerate(batch.kinds[s])]


def _plain_duals(batch: Batch, node: Node) -> DualValues:
    """Return dual values that divide time among the kinds in proportion to their replicas."""
    duals: DualValues = {}
    for s in node.used:
        kinds = batch.kinds[s]
        total = sum(kind.num_replicas for kind in kinds)
        duals |= {(s, j): (kind.table.pipeline.parts / total, 0.0) for j, kind in enumerate(kinds)}
    return duals


def _allowed(node: Node, position: int, kind: BatchKind) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Mark the lengths that fit, and whose time alone is in the box."""
    # Times are whole numbers below 2^53, so the comparison is exact.
    return np.asarray(kind.fits & (kind.alone_ns <= node.highs_ns[position]))


def _tokens(kind: BatchKind) -> float:
    """Return the maximum number of tokens of all replicas; infinite if micro-batches are not bounded."""
    pipeline = kind.table.pipeline
    if pipeline.max_micro_batches is None:
        return math.inf
    return float(kind.num_replicas * pipeline.max_micro_batches * pipeline.micro_batch_tokens)


def _points(kind: BatchKind, low: float, high: float) -> tuple[FloatArray, FloatArray]:
    """Return corners (Z, W of all replicas) whose upper hull is G of the box."""
    times, works = kind.points
    inside = (times > low) & (times < high)
    ends = [kind.envelope.max_work_within(low), kind.envelope.max_work_within(high)]
    return (
        np.concatenate([times[inside], [low, high]]),
        np.concatenate([works[inside], ends]) * kind.num_replicas,
    )


def _lines(kind: BatchKind, low: float, high: float) -> tuple[FloatArray, FloatArray]:
    """Return slopes and heights of lines nowhere below G on the box."""
    times, works = _points(kind, low, high)
    slopes = np.append(_SLOPES * kind.num_replicas / kind.table.pipeline.parts, 0.0)
    return slopes, (works[None, :] - slopes[:, None] * times[None, :]).max(axis=1)


def _dual_bound(batch: Batch, node: Node, duals: DualValues) -> float:
    """Compute the *bound* of the module; infinite if a sequence is allowed nowhere in the box.

    Missing dual values are 0.
    """
    cheapest = np.full(batch.lengths.size, np.inf)
    total = float(node.constant_ns)
    for position, s in enumerate(node.used):
        kind_duals = []
        for j, kind in enumerate(batch.kinds[s]):
            work_dual, token_dual = duals.get((s, j), (0.0, 0.0))
            cost = work_dual * kind.work + token_dual * batch.lengths
            np.minimum(cheapest, np.where(_allowed(node, position, kind), cost, np.inf), out=cheapest)
            if token_dual:
                total -= token_dual * _tokens(kind)
            kind_duals.append((kind, work_dual))
        total += _minimum_over_time(kind_duals, node.lows_ns[position], node.highs_ns[position])
    total += float(cheapest @ batch.counts)
    return total - _FLOAT_SLACK * abs(total) if math.isfinite(total) else total


def _minimum_over_time(kind_duals: Sequence[tuple[BatchKind, float]], low: float, high: float) -> float:
    """Return min_Z (Z - sum_j p_j G_j(Z)) over the box, or a lower bound of it."""
    if len(kind_duals) == 1:
        kind, work_dual = kind_duals[0]
        times, works = _points(kind, low, high)
        return float((times - work_dual * works).min())
    lines = [_lines(kind, low, high) for kind, _ in kind_duals]
    corners = [np.array([low, high])]
    for slopes, heights in lines:
        first, second = np.triu_indices(slopes.size, 1)
        corners.append((heights[second] - heights[first]) / (slopes[first] - slopes[second]))
    times = np.clip(np.concatenate(corners), low, high)
    value = times.copy()
    for (slopes, heights), (_, work_dual) in zip(lines, kind_duals, strict=True):
        value -= work_dual * (slopes[:, None] * times[None, :] + heights[:, None]).min(axis=0)
    return float(value.min())


def relax(batch: Batch, node: Node) -> Node:
    """Solve the relaxation over buckets of lengths, and bound the node over all lengths."""
    program = _Program(batch, node)
    answer = glop.least(
        program.cost,
        (np.array(program.rows).reshape(-1, program.cost.size), np.array(program.limits)),
        (program.fixed, program.sides),
        *program.bounds.T,
    )
    if answer is None:
        # Without dual values the first bound stays.
        return node
    num_kinds, num_buckets = len(program.members), program.starts.size
    duals: DualValues = {}
    for column, (position, j, kind) in enumerate(program.members):
        token_dual = 0.0
        if column in program.token_rows:
            marginal = float(answer.at_most[program.token_rows[column]])
            token_dual = max(0.0, -marginal) * program.scale / _tokens(kind)
        work_dual = max(0.0, float(answer.equal[num_buckets + column]))
        duals[node.used[position], j] = (work_dual, token_dual)
    shares = answer.values[: program.loads_at].reshape(num_kinds, num_buckets)
    widths = np.diff(np.append(program.starts, batch.lengths.size))
    sequences = {
        (node.used[position], j): np.asarray(np.repeat(shares[column], widths) * batch.counts, np.float64)
        for column, (position, j, _) in enumerate(program.members)
    }
    times = {
        s: float(answer.values[program.times_at + position]) * program.scale
        for position, s in enumerate(node.used)
    }
    return replace(with_duals(batch, node, duals), relaxed=Relaxed(times, sequences, duals))


class _Program:
    """The relaxation over buckets. Columns: shares x by kind and bucket, loads W and shortfalls e by kind, times
    Z.

    A shortfall e_j is missing capacity, at a cost above all others: the program always has an answer, and the dual
    values of a box without plans raise its bound beyond any plan's time.
    """

    def __init__(self, batch: Batch, node: Node) -> None:
        self.members = _members(batch, node)
        self.starts = _buckets(batch, node)
        num_buckets, num_kinds = self.starts.size, len(self.members)
        self.loads_at = num_kinds * num_buckets
        self.shortfalls_at = self.loads_at + num_kinds
        self.times_at = self.shortfalls_at + num_kinds
        self.scale = max(1.0, *node.highs_ns)
        num_columns = self.times_at + len(node.used)
        self.cost = np.zeros(num_columns)
        self.cost[self.times_at :] = 1.0
        self.bounds = np.column_stack([np.zeros(num_columns), np.full(num_columns, np.inf)])
        self.bounds[self.times_at :] = np.column_stack([node.lows_ns, node.highs_ns]) / self.scale
        self.fixed = np.zeros((num_buckets + num_kinds, num_columns))
        self.sides = np.concatenate([np.ones(num_buckets), np.zeros(num_kinds)])
        self.rows: list[FloatArray] = []
        self.limits: list[float] = []
        self.token_rows: dict[int, int] = {}
        for j in range(num_kinds):
            self._add_kind(batch, node, j)

    def _add_kind(self, batch: Batch, node: Node, j: int) -> None:
        """Add the columns and rows of a kind."""
        position, _, kind = self.members[j]
        num_buckets = self.starts.size
        columns = slice(j * num_buckets, (j + 1) * num_buckets)
        self.bounds[columns, 1] = _allowed(node, position, kind)[self.starts]
        self.fixed[np.arange(num_buckets), np.arange(num_buckets) + j * num_buckets] = 1.0
        self.fixed[num_buckets + j, columns] = -np.add.reduceat(kind.work * batch.counts, self.starts) / self.scale
        self.fixed[num_buckets + j, self.loads_at + j] = 1.0
        self.cost[self.shortfalls_at + j] = _SHORTFALL_COST * kind.table.pipeline.parts
        slopes, heights = _lines(kind, node.lows_ns[position], node.highs_ns[position])
        for slope, height in zip(slopes.tolist(), heights.tolist(), strict=True):
            row = self._row(height / self.scale)
            row[self.loads_at + j], row[self.shortfalls_at + j], row[self.times_at + position] = 1.0, -1.0, -slope
        if math.isfinite(_tokens(kind)):
            self.token_rows[j] = len(self.rows)
            row = self._row(1.0)
            row[columns] = np.add.reduceat(batch.lengths * batch.counts, self.starts) / _tokens(kind)
            row[self.shortfalls_at + j] = -1.0

    def _row(self, limit: float) -> FloatArray:
        """Add an empty row and return it."""
        self.rows.append(np.zeros(self.cost.size))
        self.limits.append(limit)
        return self.rows[-1]


def _buckets(batch: Batch, node: Node) -> Int64Array:
    """Return first indices of buckets of about equal tokens; in each, every kind allows all lengths or none."""
    tokens = np.cumsum(batch.lengths * batch.counts)
    ends = np.searchsorted(tokens, np.linspace(0, int(tokens[-1]), _NUM_BUCKETS + 1)[1:-1])
    # The allowed lengths of a kind end at some length.
    edges = [int(_allowed(node, position, kind).sum()) for position, _, kind in _members(batch, node)]
    starts = np.unique(np.concatenate([[0], ends, edges]))
    return np.asarray(starts[starts < batch.lengths.size], np.int64)


def split(node: Node, batch: Batch) -> tuple[Node, ...]:
    """Split the node into its tours, or its box in two; returns nothing if neither helps.

    A box is split where the relaxation is furthest below the times of its loads.
    """
    assert node.relaxed is not None
    if len(node.tours) > 1:
        single_tours = [_hiding(replace(node, tours=(tour,))) for tour in node.tours]
        # Where a tour hides nothing, the answer without hidden gradients stays valid.
        nodes = [
            single if single.lows_ns == node.lows_ns else replace(single, relaxed=None) for single in single_tours
        ]
        return tuple(with_duals(batch, single, node.relaxed.duals) for single in nodes)
    gaps = []
    for position, s in enumerate(node.used):
        loads = (
            (kind, float((kind.work * node.relaxed.sequences[s, j]).sum()) / kind.num_replicas)
            for j, kind in enumerate(batch.kinds[s])
        )
        exact = max(kind.envelope.time_at(load) for kind, load in loads)
        gaps.append(min(exact, node.highs_ns[position]) - node.relaxed.times_ns[s])
    position = int(np.argmax(gaps))
    if gaps[position] <= _MIN_SPLIT * node.bound_ns:
        return ()
    low, high = node.lows_ns[position], node.highs_ns[position]
    middle = node.relaxed.times_ns[node.used[position]] + gaps[position] / 2
    if not low < middle < high:
        return ()
    below = (*node.highs_ns[:position], middle, *node.highs_ns[position + 1 :])
    above = (*node.lows_ns[:position], middle, *node.lows_ns[position + 1 :])
    halves = (replace(node, highs_ns=below, relaxed=None), replace(node, lows_ns=above, relaxed=None))
    return tuple(with_duals(batch, half, node.relaxed.duals) for half in halves)


def narrow(node: Node, best_ns: float) -> Node | None:
    """Remove times from the box that are too long for a plan shorter than ``best_ns``.

    Returns:
        The node; None if no plan in it is shorter.
    """
    slack = best_ns - node.constant_ns - sum(node.lows_ns)
    if slack <= 0 or node.bound_ns >= best_ns:
        return None
    highs = tuple(min(high, low + slack) for low, high in zip(node.lows_ns, node.highs_ns, strict=True))
    return replace(node, highs_ns=highs)
