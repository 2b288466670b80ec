"""Prices of sequences that prove what no step of teams undercuts, and micro-batches from which that is nearly so.

All seats together have M Z of time, and a micro-batch x of strategy j takes c_j of them for time_j(x). So with
y_jx micro-batches of each kind the step takes at least the configuration program

    Z >= min sum y_jx (c_j / M) time_j(x)    subject to    sum y_jx x_k >= n_k,    y >= 0,

and prices lambda_k >= 0 prove sum_k n_k lambda_k of it as soon as no micro-batch is worth more than its time,
sum_k lambda_k x_k <= (c_j / M) time_j(x). ``team_contents`` says how far any prices are from that: divided by the
largest factor by which they are too high, they prove what is left (Farley 1990). So nothing rests on the solver of
the program, which only finds good prices, one set of micro-batches after another: those that are worth most
beyond their time at its prices join it, until it gains nothing. Prices are drawn half way to the best known ones
(in-out smoothing: Wentges 1997), which spares most of the rounds.

Only steps that are shorter than a ``limit`` count: Z >= the limit, or no micro-batch of the step takes as long. A
sequence that takes too long under small degrees is in none of these.

Unlike the linear bounds of ``team_bound`` this counts the constants of micro-batches in full, however little they
hold.

Source: the configuration program of Gilmore and Gomory (1961), for bins of several kinds.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import numpy as np

from milpplan.groups.bounds import glop as linear
from milpplan.lengths.side_by_side.team_bound import SharedTables, SharedWork, linear_shares, shared_work
from milpplan.lengths.side_by_side.team_contents import Contents
from milpplan.lengths.side_by_side.teams import Family
from milpplan.lengths.strategy_tables import StrategyTables
from milpplan.simulation.layout_columns import FloatArray, IntArray

# Rounds of prices at most, and how near the program and what is proved come, as a share.
_ROUNDS, _NEAR = 80, 2e-4
# Numbers in the tables of one strategy, beyond which nothing is priced, and of all in all rounds.
_LARGEST, _ENTRIES = 6e7, 6e9
# How far prices go back to the best known ones.
_BACK = 0.5
# Micro-batches in a program: of more only the nearest to their prices are kept.
_MOST, _KEPT = 1500, 900
# What a micro-batch is worth at least beyond its time to join, as a share of the program.
_WORTH = 1e-9
# What sums of floats may add.
_SAFETY = 1.0 - 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class Priced:
    """``bound_ns`` of all steps of a family that are shorter than the limit, reduction and finish included;
    ``shares`` [v] of micro-batches ``rows`` [v, n] from which that is nearly so: none where the program was not
    solved. ``prices`` [n] ns, a part of all seats' time: no micro-batch of these steps is worth more than its
    time."""

    bound_ns: float
    shares: FloatArray
    rows: IntArray
    prices: FloatArray


@dataclass(slots=True, eq=False)
class _Program:
    """Micro-batches ``rows`` with ``costs``, as a part of all seats' time, for ``counts`` [n]; ns. The first
    ``always`` stay, so that every sequence has one."""

    counts: FloatArray
    rows: IntArray
    costs: FloatArray
    always: int
    shares: FloatArray = field(default_factory=lambda: np.zeros(0))
    prices: FloatArray = field(default_factory=lambda: np.zeros(0))

    def solve(self) -> float:
        """Its value, which leaves ``shares`` and ``prices``; infinite where it has none."""
        scale = float(self.costs.max())
        there = self.counts > 0
        held = -self.rows.T[there].astype(np.float64)
        answer = linear.least(self.costs / scale, (held, -self.counts[there]))
        if answer is None:
            return float("inf")
        self.shares, self.prices = answer.values, np.zeros(len(there))
        self.prices[there] = -answer.at_most * scale
        return answer.value * scale

    def join(self, rows: list[IntArray], costs: FloatArray) -> None:
        """More micro-batches; of too many those nearest to the prices stay."""
        kept = np.arange(len(self.rows))
        if len(kept) > self.always + _MOST:
            others = kept[self.always :]
            beyond = self.costs[others] - self.rows[others] @ self.prices
            kept = np.append(kept[: self.always], others[np.sort(np.argsort(beyond, kind="stable")[:_KEPT])])
        self.rows = np.concatenate([self.rows[kept], *([rows] if rows else [])])
        self.costs = np.concatenate([self.costs[kept], costs])


def priced(
    family: Family, shared: SharedWork, limit_ns: float, deadline: float, wanted: FloatArray | None = None
) -> Priced:
    """The bound of steps of ``family`` shorter than the limit, from ``shared``'s, and micro-batches that come near
    it; stops at the ``deadline`` (of ``perf_counter``), or where every such step is proved to be longer. With
    ``wanted`` [n] prices are those that are highest for so many sequences, and no step is bounded."""
    once_ns = family.min_fixed_cost_ns
    all_contents = [
        Contents.of(family, member, degree, limit_ns - once_ns)
        for member, degree in zip(family.members, family.degrees, strict=True)
    ]
    counts = family.pool.load.counts.astype(np.float64) if wanted is None else wanted
    best = prices = np.where(counts > 0, shared.prices.min(axis=0), 0.0) * _SAFETY
    nothing = Priced(shared.bound_ns, np.zeros(0), np.zeros((0, len(counts)), dtype=np.int64), best)
    if not np.logical_or.reduce([one.items.fits for one in all_contents])[counts > 0].all():
        return replace(nothing, bound_ns=max(limit_ns, shared.bound_ns))
    entries = [one.entries for one in all_contents]
    if max(entries) > _LARGEST:
        return nothing
    linear = [linear_shares(family, member) for member in family.members]
    program = _alone(all_contents, counts)
    proved, value, last = float(counts @ best), np.inf, nothing
    for _ in range(min(_ROUNDS, int(_ENTRIES / sum(entries)))):
        factor, rows, costs = _beyond(all_contents, linear, prices, deadline)
        if float(counts @ prices) / factor > proved:
            best, proved = prices / factor, float(counts @ prices) / factor
        if len(costs) or not len(last.rows):
            program.join(rows, costs)
            value = program.solve()
            if not np.isfinite(value):
                break
            used = program.shares > 0
            last = replace(nothing, shares=program.shares[used], rows=program.rows[used])
        cutoff_ns = np.inf if wanted is not None else limit_ns - once_ns
        if proved >= value * (1.0 - _NEAR) or proved >= cutoff_ns or time.perf_counter() > deadline:
            break
        prices = _BACK * best + (1.0 - _BACK) * np.maximum(0.0, program.prices)
    bound_ns = max(shared.bound_ns, min(limit_ns, proved * _SAFETY + once_ns))
    return replace(last, bound_ns=bound_ns, prices=best * _SAFETY)


def single_strategy_bound_ns(pool: StrategyTables, member: int, limit_ns: float, deadline: float) -> float:
    """What a step of one strategy of one stage takes at least, up to the limit, ns: its replicas are teams of one
    degree. Stops at the ``deadline`` (of ``perf_counter``)."""
    family = Family(pool, (member,))
    return priced(family, shared_work(family), limit_ns, deadline).bound_ns


def replica_prices(
    pool: StrategyTables, member: int, wanted: FloatArray, limit_ns: float, deadline: float
) -> FloatArray:
    """Prices of sequences under a strategy of one stage, [n] ns: nothing that a replica holds within the limit, a
    time of its group alone, is worth more than its time; highest for so many sequences as are ``wanted`` [n]."""
    family = Family(pool, (member,))
    # What follows is the caller's to say: in turn with others the optimizer may live elsewhere.
    step_ns = limit_ns + family.min_fixed_cost_ns
    found = priced(family, SharedTables.of(family).shared(wanted), step_ns, deadline, wanted)
    return found.prices * pool.members[member].candidate.layout.dp


def _alone(all_contents: list[Contents], counts: FloatArray) -> _Program:
    """With every sequence by itself under the member where it costs least."""
    each = np.eye(len(counts), dtype=np.int64)
    costs = np.full((len(all_contents), len(counts)), np.inf)
    for one, row in zip(all_contents, costs, strict=True):
        if one.items.fits.any():
            row[one.items.fits] = one.costs(each[one.items.fits])
    there = counts > 0
    return _Program(counts, each[there], costs.min(axis=0)[there], int(there.sum()))


def _beyond(
    all_contents: list[Contents], linear: list[FloatArray], prices: FloatArray, deadline: float
) -> tuple[float, list[IntArray], FloatArray]:
    """The largest factor by which prices are too high, and micro-batches that are worth more than their time with
    their costs. Nothing is worth more under a member of which a ``linear`` bound is nowhere below the prices.
    After the deadline nothing is known: the factor is infinite."""
    most, rows, costs = 1.0, [], [np.zeros(0)]
    for contents, shares in zip(all_contents, linear, strict=True):
        if ((prices <= shares * _SAFETY) | ~contents.items.fits).all(axis=1).any():
            continue
        if time.perf_counter() > deadline:
            return float("inf"), [], np.zeros(0)
        factor, found = contents.worst(prices, _WORTH * float(contents.items.counts @ prices))
        most = max(most, factor)
        if found:
            rows += found
            costs.append(contents.costs(np.array(found)))
    return most, rows, np.concatenate(costs)
