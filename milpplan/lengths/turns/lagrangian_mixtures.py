"""Bounds of sets of strategies by mixtures of linear bounds of each strategy, with free switches.

Every strategy s has linear bounds of its group's time for any sequences (``work_bounds``), Z_s >= sum_k x_k
share_stk + constant_st for all t, so for any weights lambda_st >= 0 with sum_t lambda_st = 1

    sum_s Z_s >= sum_k n_k min over s of (sum_t lambda_st share_stk) + sum_st lambda_st constant_st:

the Lagrangian bound of the linear program over x. Some strategy j of the set runs the longest sequence, so Z_j >=
latency_j, its passage through all stages, is one bound more, and that sequence counts under j. The bound is the
minimum over j.

 - *Subgradient*: weights are raised in turns where a bound exceeds the mixture (exponentiated gradients), for many
   sets together. Any weights prove their bound, so their quality does not affect correctness.
 - *Single row*: weights that were good for each strategy in other sets, for thousands of sets at once.
 - *Linear program*: the dual values of the program over x, for one set after another.

All bounds add the reductions of the set and its minimum finish: one of the strategies is the home.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from milpplan.lengths.bounds import glop
from milpplan.lengths.bounds.work_bounds import LinearBounds
from milpplan.lengths.deadline import spend
from milpplan.lengths.search_parameters import PARAMETERS, SAFETY, SOLVER_TOLERANCE, UNFIT_NS
from milpplan.simulation import BoolArray, FloatArray, IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Bounded:
    """Linear bounds of all strategies, for screening."""

    shares: FloatArray
    """Time per sequence, [s, T, n] ns."""
    constants: FloatArray
    """Constants of the bounds, [s, T] ns."""
    latency_ns: FloatArray
    """Minimum time of a group with the longest sequence, [s]."""
    reduce_ns: FloatArray
    """Reduction, [s]."""
    finish_ns: FloatArray
    """Finish of a step whose home is the strategy, [s]."""
    counts: FloatArray
    """Number of sequences of every length, [n]."""
    load_range: FloatArray
    """Minimum and maximum share of the whole workload that each may hold, [s, 2]."""

    @staticmethod
    def of(
        bounds: Sequence[LinearBounds],
        latency_ns: FloatArray,
        reduce_ns: FloatArray,
        finish_ns: FloatArray,
        counts: IntArray,
        load_range: Sequence[tuple[float, float]] = (),
    ) -> Bounded:
        """Build the problem, with bounds repeated to the same number for each strategy; unknown ranges are (0,
        1)."""
        num_bounds = max(len(linear.constants) for linear in bounds)
        rows = [np.arange(num_bounds) % len(linear.constants) for linear in bounds]
        shares = np.stack([linear.shares[row] for linear, row in zip(bounds, rows, strict=True)])
        constants = np.stack([linear.constants[row] for linear, row in zip(bounds, rows, strict=True)])
        shares = np.minimum(shares, UNFIT_NS)
        ranges = np.array(load_range or [(0.0, 1.0)] * len(bounds))
        return Bounded(
            shares,
            constants,
            np.minimum(latency_ns, UNFIT_NS),
            reduce_ns,
            finish_ns,
            counts.astype(np.float64),
            ranges,
        )

    def can_hold_workload(self, sets: IntArray) -> BoolArray:
        """Return where strategies [N, q] can together hold the workload, no more and no less."""
        min_total, max_total = self.load_range[sets].sum(axis=1).T
        return np.asarray((min_total <= 1.0 + SOLVER_TOLERANCE) & (max_total >= 1.0 - SOLVER_TOLERANCE))

    def fixed_cost_ns(self, sets: IntArray) -> FloatArray:
        """Return the time of steps of sets [N, q] beside their groups, [N] ns."""
        return np.asarray(self.reduce_ns[sets].sum(axis=1) + self.finish_ns[sets].min(axis=1))

    def holds_longest(self, strategies: IntArray) -> BoolArray:
        """Return whether strategies [...] may run the longest sequence."""
        return np.asarray((self.latency_ns[strategies] < UNFIT_NS) & (self.shares[strategies, 0, -1] < UNFIT_NS))

    def terms(self, sets: IntArray, index: int) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return the bounds of sets [N, q] if strategy ``index`` of each runs the longest sequence.

        Returns:
            Shares [N, q, T, n], constants [N, q, T + 1] with the latency of the longest sequence as the last
                bound, and the number of all other sequences, [n].
        """
        counts = self.counts.copy()
        counts[-1] -= 1.0
        shares, constants = self.shares[sets], self.constants[sets]
        constants = np.concatenate([constants, np.full((*sets.shape, 1), -UNFIT_NS)], axis=2)
        constants[:, index, :-1] += shares[:, index, :, -1]
        constants[:, index, -1] = self.latency_ns[sets[:, index]]
        return shares, constants, counts


def lp_bound_ns(problem: Bounded, strategies: IntArray) -> float:
    """Return the bound of one set [q] in ns with the dual values of the linear program over x as weights."""
    bounds = [bound_ns for bound_ns, _ in divisions(problem, strategies)]
    return min(bounds, default=np.inf) * SAFETY + float(problem.fixed_cost_ns(strategies[None])[0])


def divisions(
    problem: Bounded,
    strategies: IntArray,
    starts: IntArray | None = None,
    floors_ns: FloatArray | None = None,
) -> list[tuple[float, IntArray]]:
    """Solve the linear program over x of one set, for each strategy that may run the longest sequence.

    Args:
        problem: linear bounds of all strategies.
        strategies: the set, [q].
        starts: first indices of bunches of neighbouring lengths, the last of one length, which the program treats
            alike; None: every length by itself. The bounds are of the lengths themselves.
        floors_ns: minimum times of the groups, [q], which then are in the bounds; None: none.

    Returns:
        Bounds of the groups' times in ns, and the sequences of every strategy, [q, n] in whole numbers.
    """
    found = []
    for index in range(len(strategies)):
        if not problem.holds_longest(strategies[index]):
            continue
        shares, constants, counts = problem.terms(strategies[None], index)
        if floors_ns is not None:
            constants[0, :, -1] = np.maximum(constants[0, :, -1], floors_ns)
        if starts is None:
            weights, parts = _solved(shares[0], constants[0], counts)
        else:
            sums = np.maximum(1e-9, counts)
            bunched = np.add.reduceat(shares[0] * sums, starts, axis=-1) / np.add.reduceat(sums, starts)
            weights, parts = _solved(bunched, constants[0], np.add.reduceat(counts, starts))
            parts = np.repeat(parts, np.diff(np.append(starts, len(counts))), axis=1)
        values = _values(shares, constants, counts, weights[None])
        division = _whole(parts, counts.astype(np.int64))
        division[index, -1] += 1
        found.append((float(_mixture(weights[None], values)[0]), division))
    return found


def _whole(parts: FloatArray, counts: IntArray) -> IntArray:
    """Divide ``counts`` [n] sequences in whole numbers by ``parts`` [q, n] of every length.

    Sums over the lengths are rounded, one strategy after another: neighbouring lengths make up for each other.
    """
    division, left = np.zeros(parts.shape, dtype=np.int64), counts
    later = np.cumsum(parts[::-1], axis=0)[::-1]
    for strategy in range(len(parts) - 1):
        share = np.divide(parts[strategy], later[strategy], out=np.zeros(len(counts)), where=later[strategy] > 0)
        taken = np.diff(np.rint(np.cumsum(np.minimum(share, 1.0) * left)), prepend=0.0).astype(np.int64)
        division[strategy], left = taken, left - taken
    division[-1] = left
    return division


def _solved(shares: FloatArray, constants: FloatArray, counts: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Solve the linear program over x.

    Args:
        shares: times per sequence, [q, T, n].
        constants: constants of the bounds, [q, T + 1].
        counts: sequences of every length, [n].

    Returns:
        Weights [q, T + 1] from the dual values, and the share of every length that each strategy gets, [q, n];
            equal shares if the solver has no answer.
    """
    size, num_bounds, lengths = shares.shape
    fits = shares[:, 0] < UNFIT_NS
    scale = float(np.abs(constants[constants > -UNFIT_NS]).max() + counts @ shares.min(axis=(0, 1)))
    rows, sides, owner = [], [], []
    for strategy in range(size):
        for bound in range(num_bounds + 1):
            if constants[strategy, bound] <= -UNFIT_NS:
                continue
            row = np.zeros((size, lengths + 1))
            if bound < num_bounds:
                row[strategy, :-1] = np.where(fits[strategy], shares[strategy, bound] * counts, 0.0) / scale
            row[strategy, -1] = -1.0
            rows.append(row.ravel())
            sides.append(-constants[strategy, bound] / scale)
            owner.append((strategy, bound))
    weights = np.zeros((size, num_bounds + 1))
    # x is a share of the counts; the shares of a length add up to one.
    total = np.tile(np.eye(lengths, lengths + 1), (1, size))
    cost = np.tile(np.eye(1, lengths + 1, lengths)[0], size)
    max_share = np.where(fits, 1.0, 0.0)
    high = np.pad(max_share, ((0, 0), (0, 1)), constant_values=np.inf).ravel()
    answer = glop.least(cost, (np.array(rows), np.array(sides)), (total, np.ones(lengths)), high=high)
    indices = tuple(np.array(owner).T)
    weights[indices] = 1.0 if answer is None else np.maximum(0.0, -answer.at_most)
    sums = weights.sum(axis=1, keepdims=True)
    parts = max_share / max_share.sum(axis=0) if answer is None else answer.values.reshape(size, -1)[:, :-1]
    return np.where(sums > 0, weights / np.maximum(sums, 1e-300), np.eye(1, num_bounds + 1)[0]), parts


def single_row_bound_ns(problem: Bounded, sets: IntArray, weights: FloatArray) -> FloatArray:
    """Return bounds of sets [N, q] in ns, [N], by given weights of every strategy.

    Args:
        problem: linear bounds of all strategies.
        sets: strategies of the sets, [N, q].
        weights: for each strategy without and with the longest sequence, [s, 2, T + 1].
    """
    strategies = np.unique(sets)
    shares, fixed = np.zeros((len(weights), 2, len(problem.counts))), np.zeros((len(weights), 2))
    shares[strategies] = weights[strategies, :, :-1] @ problem.shares[strategies]
    with_longest = problem.constants[strategies] + problem.shares[strategies, :, -1]
    fixed[strategies, 0] = (weights[strategies, 0, :-1] * problem.constants[strategies]).sum(axis=1)
    fixed[strategies, 1] = (weights[strategies, 1, :-1] * with_longest).sum(axis=1) + weights[
        strategies, 1, -1
    ] * problem.latency_ns[strategies]
    counts, min_bounds = problem.counts.copy(), np.full(len(sets), np.inf)
    counts[-1] -= 1.0
    for index, is_longest in enumerate(np.eye(sets.shape[1], dtype=np.int64)):
        bounds = shares[sets, is_longest].min(axis=1) @ counts + fixed[sets, is_longest].sum(axis=1)
        min_bounds = np.where(problem.holds_longest(sets[:, index]), np.minimum(min_bounds, bounds), min_bounds)
    return np.asarray(min_bounds * SAFETY + problem.fixed_cost_ns(sets))


def subgradient_bound_ns(
    problem: Bounded, sets: IntArray, target_ns: float, weights: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Return bounds of sets [N, q] with weights improved by subgradients until they reach the target.

    Args:
        problem: linear bounds of all strategies.
        sets: strategies of the sets, [N, q].
        target_ns: cutoff.
        weights: initial weights, by the strategy that runs the longest sequence, [N, q, q, T + 1].

    Returns:
        Bounds in ns, [N], and the improved weights.
    """
    if not len(sets):
        return np.zeros(0), weights
    fixed_ns = problem.fixed_cost_ns(sets)
    indices = range(sets.shape[1])
    results = [_raised(problem, sets, index, target_ns - fixed_ns, weights[:, index]) for index in indices]
    min_bounds = np.min([bounds for bounds, _ in results], axis=0)
    return min_bounds * SAFETY + fixed_ns, np.stack([improved for _, improved in results], axis=1)


def _raised(
    problem: Bounded, sets: IntArray, index: int, target: FloatArray, first: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Improve the weights for sets in which strategy ``index`` runs the longest sequence, from the weights
    ``first``.

    Returns:
        Bounds of the groups' times in ns, [N], and their weights.
    """
    holds = problem.holds_longest(sets[:, index])
    bounds_ns, best = np.where(holds, 0.0, np.inf), first.copy()
    open_, earlier_ns = np.flatnonzero(holds), bounds_ns.copy()
    weights = first[open_]
    for turn in range(PARAMETERS.weight_updates):
        if not len(open_):
            break
        if turn % 2 == 1:
            is_open = bounds_ns[open_] < target[open_]
            if turn % 12 == 1 and turn > 1:
                # A set is hopeless if twice its rise in twelve updates would not suffice: the rise slows down.
                left = 2 * (PARAMETERS.weight_updates - turn) / 12
                rose = (bounds_ns[open_] - earlier_ns[open_]) * left
                is_open &= bounds_ns[open_] + rose >= target[open_]
                earlier_ns = bounds_ns.copy()
            open_, weights = open_[is_open], weights[is_open]
            if not len(open_):
                break
        if turn % 2 == 1 or turn == 0:
            terms = problem.terms(sets[open_], index)
        spend(1e-4 + 2e-6 * len(open_))
        values = _values(*terms, weights)
        bounds = _mixture(weights, values)
        better = bounds > bounds_ns[open_]
        bounds_ns[open_[better]], best[open_[better]] = bounds[better], weights[better]
        # The step is proportional to the excess of a bound over its mixture, and shrinks.
        top = values.max(axis=2, keepdims=True)
        rate = 8.0 / (1.0 + 0.1 * turn) / np.maximum(1.0, top.sum(axis=1, keepdims=True))
        weights = weights * np.exp(np.maximum(-40.0, rate * (values - top)))
        weights /= weights.sum(axis=2, keepdims=True)
    return bounds_ns, best


def _values(shares: FloatArray, constants: FloatArray, counts: FloatArray, weights: FloatArray) -> FloatArray:
    """Return every bound [N, q, T + 1] at the solution of the Lagrangian: each sequence runs under the strategy
    whose mixture, by ``weights`` [N, q, T + 1], has the minimum share."""
    mixture = np.einsum("nqt,nqtk->nqk", weights[:, :, :-1], shares)
    is_chosen = mixture.argmin(axis=1)[:, None] == np.arange(mixture.shape[1])[:, None]
    values = np.einsum("nqtk,nqk->nqt", shares, is_chosen * counts)
    return np.concatenate([values, np.zeros((*values.shape[:2], 1))], axis=2) + constants


def _mixture(weights: FloatArray, values: FloatArray) -> FloatArray:
    """Return the bound of the sum of the groups' times, [N] ns."""
    return np.asarray(np.where(weights > 0, weights * values, 0.0).sum(axis=(1, 2)))


def even_weights(problem: Bounded) -> FloatArray:
    """Return equal weights of all bounds for strategies without and with the longest sequence, [2, T + 1]; the
    last bound is its latency."""
    num_bounds = problem.constants.shape[1]
    return np.array([[1.0 / num_bounds] * num_bounds + [0.0], [1.0 / (num_bounds + 1)] * (num_bounds + 1)])
