"""The master problem of strategies of one stage, whose columns are the contents of micro-batches.

**Restricted master.** A micro-batch x of strategy j counts with the share c_j of its time. All steps take at least

    min sum_jx y_jx c_j time_j(x)    subject to    sum_jx y_jx x_k >= n_k,    y >= 0.

The couplings differ in the shares only:

 - *One strategy*, or *replicas* of one strategy beside others: its D_j replicas share the work, c_j = 1 / D_j.
 - *Degrees side by side* (``side_by_side``): a team takes c of the M slots, c_j = c / M = 1 / D_j.

**Lagrangian bound.** Dual values lambda_k >= 0 prove sum_k n_k lambda_k as soon as no micro-batch has a negative
reduced cost, sum_k lambda_k x_k <= c_j time_j(x). The pricing problem gives the factor by which any values are too
high at most; divided by it, they prove the rest (Farley 1990). So nothing rests on the solver of the restricted
master, which only finds good values: the columns with the most negative reduced cost join it, until it gains
nothing. Values are drawn half way to the best known ones (in-out smoothing: Wentges 1997), which saves most of the
rounds.

**Limit.** Only steps below a limit count: no micro-batch of them takes as long. So a sequence that takes too long
under a strategy does not run there.

Source: the configuration program of Gilmore and Gomory (1961), for bins of several kinds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from milpplan.lengths.bounds import glop
from milpplan.lengths.bounds.micro_batch_pricing import NOTHING, Items, KnapsackDP
from milpplan.lengths.deadline import NEVER, Deadline
from milpplan.lengths.search_parameters import PARAMETERS, ROUNDED_UP, SAFETY, TOLERANCE, UNFIT_NS
from milpplan.lengths.strategy_tables import StrategyTables
from milpplan.simulation import BoolArray, FloatArray, IntArray


@dataclass(frozen=True, eq=False)
class Contents:
    """Micro-batches of a member, with times that never exceed the exact ones, in ns.

    With dual values lambda_k >= 0 and x_k <= n_k sequences in a micro-batch, the question is by how much

        sum_k lambda_k x_k    exceeds    c_j time_j(x)        for any x that fits.

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
    """Factor c_j on the time of a micro-batch."""
    linear: FloatArray
    """Linear bounds of the time that a sequence adds, [T, n]; a huge value where it does not fit."""
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
    def of(pool: StrategyTables, member: int, limit_ns: float = np.inf) -> Contents:
        """Build the pricing problem of ``member`` for times up to the limit, with the share of equal replicas."""
        capacity = pool.max_quanta(member, shared_memory=False)
        num_replicas = pool.members[member].candidate.layout.dp
        bounds = pool.linear_bounds(member, shared_memory=False)
        linear = np.minimum(bounds.shares[bounds.constants == 0.0] * num_replicas, UNFIT_NS)
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
        fits = (sizes <= capacity) & (load.counts > 0) & (single_ns <= limit_ns * ROUNDED_UP)
        # Weights of *hidden* in the forward and in the backward.
        parts = (0.0, 0.5, 1.0) if pool.members[member].candidate.layout.cp > 1 else (1.0,)
        hidden = np.array([(part, part) for part in parts])
        weights = np.stack([1.0 - hidden, hidden], axis=-1)
        base_, attention_, once_ = (np.einsum("rpw,pwg->rg", weights, kind) for kind in (base, attention, once))
        short = base_.max(axis=0) <= limit_ns * ROUNDED_UP
        mixed = (base_, attention_, once_)
        items = Items(sizes, load.counts, fits)
        return Contents(member, 1.0 / num_replicas, linear, base, attention, once, mixed, items, short)

    def first_duals(self, counts: FloatArray) -> FloatArray:
        """Return the dual values [n] of the linear bound that is highest for ``counts`` [n] sequences."""
        best = int((np.where(self.linear < UNFIT_NS, self.linear, 0.0) @ counts).argmax())
        return np.asarray(self.share * SAFETY * self.linear[best])

    @property
    def entries(self) -> int:
        """Number of table entries of ``price_columns``."""
        return self.mixed[0].size * self.items.num_passes(self.mixed[0].shape[1])

    def costs(self, rows: IntArray) -> FloatArray:
        """Return the minimum cost of micro-batches [v, n], c_j times their time, [v] ns."""
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


@dataclass(slots=True, eq=False)
class RestrictedMaster:
    """Restricted master: micro-batches ``rows`` with ``costs`` for ``counts`` [n]; ns."""

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
        answer = glop.least(self.costs / scale, (coverage, -self.counts[present]))
        if answer is None:
            return float("inf")
        self.shares, self.prices = answer.values, np.zeros(len(present))
        self.prices[present] = -answer.at_most * scale
        return answer.value * scale

    def join(self, rows: list[IntArray], costs: FloatArray) -> None:
        """Add columns; if there are too many, those with the lowest reduced cost stay."""
        kept = np.arange(len(self.rows))
        if len(kept) > self.always + PARAMETERS.max_columns:
            removable = kept[self.always :]
            reduced_costs = self.costs[removable] - self.rows[removable] @ self.prices
            kept = np.append(
                kept[: self.always],
                removable[np.sort(np.argsort(reduced_costs, kind="stable")[: PARAMETERS.kept_columns])],
            )
        self.rows = np.concatenate([self.rows[kept], *([rows] if rows else [])])
        self.costs = np.concatenate([self.costs[kept], costs])


@dataclass(frozen=True, slots=True, eq=False)
class MasterSolution:
    """Dual values and the last solution of a restricted master."""

    value_ns: float
    """Proved value: counts times ``duals``."""
    duals: FloatArray
    """No micro-batch has a negative reduced cost at these values, [n] ns."""
    shares: FloatArray
    """Numbers of each micro-batch in the solution, [v]; empty if it was not solved."""
    rows: IntArray
    """The micro-batches, [v, n]."""


def can_price(problems: Sequence[Contents]) -> bool:
    """Return whether the tables of the pricing problems are small enough."""
    return max(problem.entries for problem in problems) <= PARAMETERS.max_pricing_entries


def solve_master(
    problems: Sequence[Contents],
    counts: FloatArray,
    first_duals: FloatArray | None = None,
    cutoff_ns: float = np.inf,
    deadline: Deadline = NEVER,
) -> MasterSolution:
    """Find good dual values by column generation.

    Args:
        problems: pricing problems, whose tables are small enough (``can_price``).
        counts: sequences to cover, [n]; each fits somewhere.
        first_duals: dual values that are proved, [n] ns; None: those of linear bounds.
        cutoff_ns: proved value that ends the search.
        deadline: end of the search.
    """
    if first_duals is None:
        first_duals = np.min([problem.first_duals(counts) for problem in problems], axis=0)
    best = duals = np.where(counts > 0, first_duals, 0.0)
    proved_ns, value = float(counts @ best), np.inf
    program, solution = _single_sequences(problems, counts), (np.zeros(0), np.zeros((0, len(counts)), np.int64))
    num_entries = sum(problem.entries for problem in problems)
    for _ in range(min(PARAMETERS.master_rounds, int(PARAMETERS.max_master_entries / num_entries))):
        factor, rows, costs = _price_all(problems, duals, deadline)
        if float(counts @ duals) / factor > proved_ns:
            best, proved_ns = duals / factor, float(counts @ duals) / factor
        if len(costs) or not len(solution[1]):
            program.join(rows, costs)
            value = program.solve()
            if not np.isfinite(value):
                break
            is_used = program.shares > 0
            solution = program.shares[is_used], program.rows[is_used]
        if proved_ns >= value * (1.0 - PARAMETERS.master_gap) or proved_ns >= cutoff_ns or deadline.passed:
            break
        duals = PARAMETERS.smoothing * best + (1.0 - PARAMETERS.smoothing) * np.maximum(0.0, program.prices)
    return MasterSolution(proved_ns, best, *solution)


def single_strategy_bound_ns(pool: StrategyTables, member: int, limit_ns: float, deadline: Deadline) -> float:
    """Return a lower bound of the step of one strategy of one stage, up to the limit, ns."""
    fixed_cost_ns, counts = pool.reduce_ns(member) + pool.finish_ns(member), pool.load.counts.astype(np.float64)
    contents = Contents.of(pool, member, limit_ns - fixed_cost_ns)
    linear_ns = float(counts @ contents.first_duals(counts))
    bound_ns = max(linear_ns, pool.latency_bound_ns(member, shared_memory=False)) + fixed_cost_ns
    if not contents.items.fits[counts > 0].all():
        return max(limit_ns, bound_ns)
    if not can_price([contents]):
        return bound_ns
    solution = solve_master([contents], counts, cutoff_ns=limit_ns - fixed_cost_ns, deadline=deadline)
    return max(bound_ns, min(limit_ns, solution.value_ns * SAFETY + fixed_cost_ns))


def replica_duals(pool: StrategyTables, member: int, counts: FloatArray, limit_ns: float) -> FloatArray:
    """Return dual values of sequences in replicas of a strategy of one stage, [n] ns.

    No contents of a replica within the limit, a time of its group only, have a higher value than their time.

    Args:
        pool: the strategies.
        member: index of the strategy.
        counts: sequences for which the values are highest, [n].
        limit_ns: maximum time of a replica.
    """
    contents = replace(Contents.of(pool, member, limit_ns), share=1.0)
    if not contents.items.fits[counts > 0].all() or not can_price([contents]):
        return np.where(counts > 0, contents.first_duals(counts), 0.0)
    return solve_master([contents], counts).duals * SAFETY


def _single_sequences(pricing_problems: Sequence[Contents], counts: FloatArray) -> RestrictedMaster:
    """Return the program with every sequence in its own micro-batch under the cheapest member."""
    single = np.eye(len(counts), dtype=np.int64)
    costs = np.full((len(pricing_problems), len(counts)), np.inf)
    for problem, row in zip(pricing_problems, costs, strict=True):
        if problem.items.fits.any():
            row[problem.items.fits] = problem.costs(single[problem.items.fits])
    present = counts > 0
    return RestrictedMaster(counts, single[present], costs.min(axis=0)[present], int(present.sum()))


def _price_all(
    pricing_problems: Sequence[Contents], prices: FloatArray, deadline: Deadline
) -> tuple[float, list[IntArray], FloatArray]:
    """Solve the pricing problems of all members.

    Members with a linear bound that is nowhere below the prices are skipped.

    Returns:
        The maximum factor by which prices are too high, infinite after the deadline, and the columns to add with
            their costs.
    """
    max_factor, rows, costs = 1.0, [], [np.zeros(0)]
    for problem in pricing_problems:
        if ((prices <= problem.share * SAFETY * problem.linear) | ~problem.items.fits).all(axis=1).any():
            continue
        if deadline.passed:
            return float("inf"), [], np.zeros(0)
        factor, columns = problem.price_columns(prices, TOLERANCE * float(problem.items.counts @ prices))
        max_factor = max(max_factor, factor)
        if columns:
            rows += columns
            costs.append(problem.costs(np.array(columns)))
    return max_factor, rows, np.concatenate(costs)
