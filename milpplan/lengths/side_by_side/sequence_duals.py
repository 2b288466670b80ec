"""Dual values of sequences from a configuration program, which bound all steps of teams.

All slots together have M Z of time, and a micro-batch x of strategy j takes c_j of them for time_j(x). So with
y_jx micro-batches of each kind the step takes at least the configuration program

    Z >= min sum y_jx (c_j / M) time_j(x)    subject to    sum y_jx x_k >= n_k,    y >= 0,

and prices lambda_k >= 0 prove sum_k n_k lambda_k of it as soon as no micro-batch is worth more than its time,
sum_k lambda_k x_k <= (c_j / M) time_j(x). The pricing problem gives the factor by which any
prices are too high at most; divided by it, they prove the rest (Farley 1990). So nothing rests on the solver of
the restricted master, which only finds good prices: the columns with the most negative reduced cost join it, until
it gains nothing. Prices are drawn half way to the best known ones (in-out smoothing: Wentges 1997), which saves
most of the rounds.

Only steps below a ``limit`` count: either Z is at least the limit, or no micro-batch of the step takes as long. So
a sequence that takes too long under a small degree does not run there.

Unlike the linear bounds of ``SharedWork`` this counts the constants of micro-batches in full, however little they
hold.

Source: the configuration program of Gilmore and Gomory (1961), for bins of several kinds.

**Linear bound** (``SharedWork``) of all steps of teams, and how sequences share the degrees in its solution. Every
slot is busy or idle for the time Z of the step before its reduction, so the slot time of all micro-batches is at
most M Z. A micro-batch of strategy j takes c_j slots for its time, so with A_j = c_j / M times the sum of the
times under j

    Z >= sum_j A_j,    A_j >= sum_k x_jk share_jtk for every linear bound t without a constant,

because the bounds of ``work_bounds`` without constant add up over micro-batches, whatever replica these run on,
and divide evenly among the D_j = M / c_j replicas. So the linear program

    min sum_j A_j    subject to    A_j >= sum_k x_jk share_jtk,    sum_j x_jk = n_k,    x >= 0

is a bound of all steps of teams, in any order, with any teams. Any weights lambda_jt >= 0 with sum_t lambda_jt <=
1 prove

    Z >= sum_k n_k min_j sum_t lambda_jt share_jtk,

which is the reported bound: the program only finds good weights. Besides, Z is at least the minimum time of the
longest sequence. In steps below a limit no sequence runs where it takes longer by itself. ``sequence_duals``
begins here, and counts the constants of micro-batches, too.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import numpy as np

from milpplan.lengths import StrategyTables
from milpplan.lengths.bounds import glop
from milpplan.lengths.bounds import glop as linear
from milpplan.lengths.bounds.micro_batch_pricing import NOTHING, Items, KnapsackDP
from milpplan.lengths.bounds.work_bounds import latencies
from milpplan.lengths.side_by_side.teams import Family
from milpplan.simulation import BoolArray, FloatArray, IntArray

# Factor that covers the rounding of float sums.
_SAFETY = 1.0 - 1e-9
# Time of a length that does not fit, ns.
_NEVER = 1e18
BUNCHES = 256
"""Maximum number of bunches of lengths in a program."""


@dataclass(frozen=True, slots=True, eq=False)
class SharedWork:
    """Lower bound of the step with reduction and finish."""

    bound_ns: float
    prices: FloatArray
    """Minimum slot time of a sequence over M under every member, [J, n] ns; infinite where it does not fit."""


@dataclass(frozen=True, slots=True, eq=False)
class SharedTables:
    """Data of a family's bound by length."""

    tables: tuple[FloatArray, ...]
    """By member: bounds without a constant, [T, n] ns."""
    latency_ns: FloatArray
    """Minimum time of a sequence under every member, [J, n]."""
    fixed_cost_ns: int
    """Minimum time after all micro-batches."""

    @staticmethod
    def of(family: Family) -> SharedTables:
        """Build the data of a family."""
        pool = family.pool
        latency_ns = [
            latencies(pool.tables[member], pool.members[member], family.max_quanta(member))
            for member in family.members
        ]
        tables = tuple(linear_shares(family, member) for member in family.members)
        return SharedTables(tables, np.array(latency_ns), family.min_fixed_cost_ns)

    def for_lengths(self, lengths: IntArray) -> SharedTables:
        """Return the data restricted to some lengths."""
        return SharedTables(
            tuple(table[:, lengths] for table in self.tables), self.latency_ns[:, lengths], self.fixed_cost_ns
        )

    def shared(self, counts: FloatArray, limit_ns: float = np.inf, bunches: int = BUNCHES) -> SharedWork:
        """Return the bound of ``counts`` [n] sequences in steps below the limit, and the prices that prove it, by
        a program over bunches of lengths."""
        longest = int(np.flatnonzero(counts)[-1])
        longest_ns = float(self.latency_ns[:, longest].min())
        is_too_long = self.latency_ns > limit_ns - self.fixed_cost_ns
        tables = [
            np.where(is_excluded, _NEVER, table)
            for table, is_excluded in zip(self.tables, is_too_long, strict=True)
        ]
        if is_too_long[:, counts > 0].all(axis=0).any():
            return SharedWork(limit_ns, np.full(self.latency_ns.shape, np.inf))
        prices = _prices(tables, _duals(tables, counts, bunches))
        area = float(counts @ prices.min(axis=0)) * _SAFETY
        bound_ns = min(limit_ns, max(area, longest_ns) + self.fixed_cost_ns)
        return SharedWork(bound_ns, np.where(prices < _NEVER, prices, np.inf))


def shared_work(family: Family) -> SharedWork:
    """Return the bound of a family, and the prices that prove it."""
    return SharedTables.of(family).shared(family.pool.load.counts.astype(np.float64))


def _duals(tables: list[FloatArray], counts: FloatArray, max_bunches: int) -> FloatArray | None:
    """Return weights of all bounds by the program, members one after another; None without a solution.

    Its variables are the shares of at most ``max_bunches`` bunches of neighbouring lengths under every member: a
    few hundred find weights as good as thousands of lengths.
    """
    starts = np.unique(np.linspace(0, len(counts), max_bunches, endpoint=False).astype(np.int64))
    works = [np.add.reduceat(table * counts, starts, axis=1) for table in tables]
    fits = np.array([work[0] < _NEVER for work in works])
    num_members, bunches = fits.shape
    scale = max(1.0, float(np.min([work.max(axis=0) for work in works], axis=0).sum()))
    # Shares of bunches by member, then the members' parts of the slot time.
    rows = np.zeros((sum(map(len, tables)), num_members * bunches + num_members))
    ends = np.cumsum([len(table) for table in tables]).tolist()
    for member, (work, end) in enumerate(zip(works, ends, strict=True)):
        own_rows = rows[end - len(work) : end]
        own_rows[:, member * bunches : (member + 1) * bunches] = np.where(fits[member], work / scale, 0.0)
        own_rows[:, num_members * bunches + member] = -1.0
    answer = glop.least(
        np.repeat([0.0, 1.0], [num_members * bunches, num_members]),
        (rows, np.zeros(len(rows))),
        (np.hstack([np.eye(bunches)] * num_members + [np.zeros((bunches, num_members))]), np.ones(bunches)),
        high=np.append(np.where(fits, 1.0, 0.0), np.full(num_members, np.inf)),
    )
    return None if answer is None else -answer.at_most


def linear_shares(family: Family, member: int) -> FloatArray:
    """Return a member's bounds without a constant, [T, n] ns over all slots; a huge value where a length does not
    fit."""
    bounds = family.pool.linear_bounds(member, shared_memory=False)
    return np.asarray(np.minimum(bounds.shares[bounds.constants == 0.0], _NEVER))


def _prices(tables: list[FloatArray], duals: FloatArray | None) -> FloatArray:
    """Return the mixture of every member's bounds in proportion to ``duals``, [J, n]; equal parts without any."""
    mixed, start = [], 0
    for table in tables:
        own = np.zeros(len(table)) if duals is None else np.maximum(0.0, duals[start : start + len(table)])
        start += len(table)
        weights = own / own.sum() if own.sum() > 0 else np.full(len(table), 1.0 / len(table))
        mixed.append(weights @ table)
    return np.array(mixed)


# Weights of *hidden* in the forward and in the backward.
_MIXTURES = ((0.0, 0.0), (0.5, 0.5), (1.0, 1.0))
# Factor that covers the rounding of float sums.
_MORE = 1.0 + 1e-9


@dataclass(frozen=True, eq=False)
class Contents:
    """Micro-batches of a member, with times that never exceed the exact ones, in ns.

    With prices lambda_k >= 0 of the sequences and x_k <= n_k of them in a micro-batch of strategy j (c_j of the M
    slots), the question is by how much

        sum_k lambda_k x_k    exceeds    (c_j / M) time_j(x)        for any x that fits.

    **Time.** Per phase it is the larger of *ring exposed* and *ring hidden* (``cost_tables``): a value of the
    quanta, the attention of every sequence, and once the last tiles of the longest. The larger is at least any
    mixture of both, so each of a few mixtures, for both phases, makes it linear in x for a given number of quanta,
    and never too long.

    **Knapsack.** For a mixture ``KnapsackDP`` gives the maximum value of sequences, less their attention, in
    exactly G quanta with k the longest. The minimum over all mixtures of that, less the times of G and of the
    longest, is the maximum negative reduced cost of any such micro-batch.

    **Limit.** In a step below some limit no micro-batch takes the limit: a sequence that takes longer by itself is
    in none, and numbers of quanta that take longer are left out.
    """

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


# Maximum number of rounds, and the relative gap between program and bound at which they end.
_ROUNDS, _NEAR = 80, 2e-4
# Maximum number of table entries of one strategy, and of all in all rounds.
_LARGEST, _ENTRIES = 6e7, 6e9
# Weight of the best known prices in the smoothing.
_BACK = 0.5
# Number of columns from which the program is pruned, and number that is kept.
_MOST, _KEPT = 1500, 900
# Minimum negative reduced cost of a column, as a share of the program.
_WORTH = 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class Priced:
    """Bound and solution of a family's configuration program."""

    bound_ns: float
    """Lower bound of all steps below the limit, with reduction and finish."""
    shares: FloatArray
    """Numbers of each micro-batch in the program's solution, [v]; empty if it was not solved."""
    rows: IntArray
    """The micro-batches, [v, n]."""
    prices: FloatArray
    """Slot time over M, [n] ns: no micro-batch of these steps is worth more than its time."""


@dataclass(slots=True, eq=False)
class _Program:
    """Restricted master: micro-batches ``rows`` with ``costs`` in slot time over M, for ``counts`` [n]; ns."""

    counts: FloatArray
    rows: IntArray
    costs: FloatArray
    always: int
    """Number of first columns that stay, so that every sequence is covered."""
    shares: FloatArray = field(default_factory=lambda: np.zeros(0))
    prices: FloatArray = field(default_factory=lambda: np.zeros(0))

    def solve(self) -> float:
        """Solve it into ``shares`` and ``prices``; return its value, infinite without a solution."""
        scale = float(self.costs.max())
        present = self.counts > 0
        coverage = -self.rows.T[present].astype(np.float64)
        answer = linear.least(self.costs / scale, (coverage, -self.counts[present]))
        if answer is None:
            return float("inf")
        self.shares, self.prices = answer.values, np.zeros(len(present))
        self.prices[present] = -answer.at_most * scale
        return answer.value * scale

    def join(self, rows: list[IntArray], costs: FloatArray) -> None:
        """Add columns; if there are too many, those with the lowest reduced cost stay."""
        kept = np.arange(len(self.rows))
        if len(kept) > self.always + _MOST:
            removable = kept[self.always :]
            reduced_costs = self.costs[removable] - self.rows[removable] @ self.prices
            kept = np.append(
                kept[: self.always], removable[np.sort(np.argsort(reduced_costs, kind="stable")[:_KEPT])]
            )
        self.rows = np.concatenate([self.rows[kept], *([rows] if rows else [])])
        self.costs = np.concatenate([self.costs[kept], costs])


def priced(
    family: Family, shared: SharedWork, limit_ns: float, deadline: float, wanted: FloatArray | None = None
) -> Priced:
    """Bound the steps of ``family`` below the limit by column generation.

    Args:
        family: the strategies.
        shared: its linear bound, with the first prices.
        limit_ns: steps of at least this time do not count.
        deadline: of ``perf_counter``.
        wanted: sequences for which the prices are highest, [n]; no step is bounded then.
    """
    fixed_cost_ns = family.min_fixed_cost_ns
    pricing_problems = [
        Contents.of(family, member, degree, limit_ns - fixed_cost_ns)
        for member, degree in zip(family.members, family.degrees, strict=True)
    ]
    counts = family.pool.load.counts.astype(np.float64) if wanted is None else wanted
    best = prices = np.where(counts > 0, shared.prices.min(axis=0), 0.0) * _SAFETY
    unsolved = Priced(shared.bound_ns, np.zeros(0), np.zeros((0, len(counts)), dtype=np.int64), best)
    if not np.logical_or.reduce([problem.items.fits for problem in pricing_problems])[counts > 0].all():
        return replace(unsolved, bound_ns=max(limit_ns, shared.bound_ns))
    num_entries = [problem.entries for problem in pricing_problems]
    if max(num_entries) > _LARGEST:
        return unsolved
    linear_bounds = [linear_shares(family, member) for member in family.members]
    program = _alone(pricing_problems, counts)
    proved_ns, value, result = float(counts @ best), np.inf, unsolved
    for _ in range(min(_ROUNDS, int(_ENTRIES / sum(num_entries)))):
        factor, rows, costs = _beyond(pricing_problems, linear_bounds, prices, deadline)
        if float(counts @ prices) / factor > proved_ns:
            best, proved_ns = prices / factor, float(counts @ prices) / factor
        if len(costs) or not len(result.rows):
            program.join(rows, costs)
            value = program.solve()
            if not np.isfinite(value):
                break
            is_used = program.shares > 0
            result = replace(unsolved, shares=program.shares[is_used], rows=program.rows[is_used])
        cutoff_ns = np.inf if wanted is not None else limit_ns - fixed_cost_ns
        if proved_ns >= value * (1.0 - _NEAR) or proved_ns >= cutoff_ns or time.perf_counter() > deadline:
            break
        prices = _BACK * best + (1.0 - _BACK) * np.maximum(0.0, program.prices)
    bound_ns = max(shared.bound_ns, min(limit_ns, proved_ns * _SAFETY + fixed_cost_ns))
    return replace(result, bound_ns=bound_ns, prices=best * _SAFETY)


def single_strategy_bound_ns(pool: StrategyTables, member: int, limit_ns: float, deadline: float) -> float:
    """Return a lower bound of the step of one strategy of one stage, up to the limit, ns: its replicas are teams
    of one degree."""
    family = Family(pool, (member,))
    return priced(family, shared_work(family), limit_ns, deadline).bound_ns


def replica_prices(
    pool: StrategyTables, member: int, wanted: FloatArray, limit_ns: float, deadline: float
) -> FloatArray:
    """Return prices of sequences under a strategy of one stage, [n] ns, that are highest for ``wanted`` [n].

    Nothing that a replica holds within the limit, a time of its group only, is worth more than its time.
    """
    family = Family(pool, (member,))
    # The fixed cost is the caller's: in turn with others the optimizer may live elsewhere.
    step_ns = limit_ns + family.min_fixed_cost_ns
    result = priced(family, SharedTables.of(family).shared(wanted), step_ns, deadline, wanted)
    return result.prices * pool.members[member].candidate.layout.dp


def _alone(pricing_problems: list[Contents], counts: FloatArray) -> _Program:
    """Return the program with every sequence in its own micro-batch under the cheapest member."""
    single = np.eye(len(counts), dtype=np.int64)
    costs = np.full((len(pricing_problems), len(counts)), np.inf)
    for problem, row in zip(pricing_problems, costs, strict=True):
        if problem.items.fits.any():
            row[problem.items.fits] = problem.costs(single[problem.items.fits])
    present = counts > 0
    return _Program(counts, single[present], costs.min(axis=0)[present], int(present.sum()))


def _beyond(
    pricing_problems: list[Contents], linear_bounds: list[FloatArray], prices: FloatArray, deadline: float
) -> tuple[float, list[IntArray], FloatArray]:
    """Solve the pricing problems of all members.

    Members with a ``linear`` bound that is nowhere below the prices are skipped.

    Returns:
        The maximum factor by which prices are too high, infinite after the deadline, and the columns to add with
            their costs.
    """
    max_factor, rows, costs = 1.0, [], [np.zeros(0)]
    for problem, shares in zip(pricing_problems, linear_bounds, strict=True):
        if ((prices <= shares * _SAFETY) | ~problem.items.fits).all(axis=1).any():
            continue
        if time.perf_counter() > deadline:
            return float("inf"), [], np.zeros(0)
        factor, columns = problem.price_columns(prices, _WORTH * float(problem.items.counts @ prices))
        max_factor = max(max_factor, factor)
        if columns:
            rows += columns
            costs.append(problem.costs(np.array(columns)))
    return max_factor, rows, np.concatenate(costs)
