"""Bounds of sets of strategies by mixtures of linear bounds of each, with switches free.

Every strategy s has linear bounds of its group's time for whatever it holds (``work``), Z_s >= sum_k x_k share_stk
+ constant_st for all t, so for any weights lambda_st >= 0 with sum_t lambda_st = 1

    sum_s Z_s >= sum_k n_k min over s of (sum_t lambda_st share_stk) + sum_st lambda_st constant_st:

the Lagrangian bound of the linear program over x. Some j in the set runs the longest sequence, so Z_j >= serial_j,
its passage through all stages, is one bound more, and that sequence counts under j. The bound is the least over j.

 - *mixed*: weights are raised in turns where a bound is above the mixture (exponentiated gradients), for many sets
   together; any weights prove their bound, so it does not matter how good they are.
 - *cheap*: weights that were good for each strategy in other sets, for thousands of sets at once.
 - *sharpened*: the duals of the linear program, for one set after another.

All add the reductions of the set and its least finish: one of them is the home.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from milpplan.groups.bounds import glop
from milpplan.lengths.bounds.work_bounds import LinearBounds
from milpplan.simulation.layout_columns import BoolArray, FloatArray, IntArray

# Turns of weights, and after how many of them sets are left out that are closed, and that will not be.
_TURNS, _CHECK, _MARK = 60, 2, 12
# Where a length does not fit, ns.
_NEVER = 1e18
# Sums of shares of the workload that differ by less are the same.
_CLOSE = 1e-6
SAFETY = 1.0 - 1e-9
"""What rounding of sums of floats may add."""


@dataclass(frozen=True, slots=True, eq=False)
class Bounded:
    """Linear bounds of all strategies, ``shares`` [s, T, n] and ``constants`` [s, T]; ``serial`` [s] of the
    longest sequence, ``once`` [s] a reduction, ``finish`` [s] of a step at home there, all ns; ``counts`` [n]
    sequences. ``held`` [s, 2]: the least and the most of the whole workload that each may hold."""

    shares: FloatArray
    constants: FloatArray
    latency_ns: FloatArray
    reduce_ns: FloatArray
    finish_ns: FloatArray
    counts: FloatArray
    load_range: FloatArray

    @staticmethod
    def of(
        bounds: Sequence[LinearBounds],
        serial: FloatArray,
        once: FloatArray,
        finish: FloatArray,
        counts: IntArray,
        held: Sequence[tuple[float, float]] = (),
    ) -> Bounded:
        """Padded to the same number of bounds each; any of them may hold everything where nothing is known."""
        most = max(len(one.constants) for one in bounds)
        rows = [np.arange(most) % len(one.constants) for one in bounds]
        shares = np.stack([one.shares[row] for one, row in zip(bounds, rows, strict=True)])
        constants = np.stack([one.constants[row] for one, row in zip(bounds, rows, strict=True)])
        shares = np.minimum(shares, _NEVER)
        ends = np.array(held or [(0.0, 1.0)] * len(bounds))
        return Bounded(
            shares, constants, np.minimum(serial, _NEVER), once, finish, counts.astype(np.float64), ends
        )

    def can_hold_workload(self, sets: IntArray) -> BoolArray:
        """Where strategies [N, q] together may hold the workload, no more and no less."""
        least, most = self.load_range[sets].sum(axis=1).T
        return np.asarray((least <= 1.0 + _CLOSE) & (most >= 1.0 - _CLOSE))

    def fixed_cost_ns(self, sets: IntArray) -> FloatArray:
        """What steps of sets [N, q] take beside their groups, [N] ns."""
        return np.asarray(self.reduce_ns[sets].sum(axis=1) + self.finish_ns[sets].min(axis=1))

    def holds_longest(self, strategies: IntArray) -> BoolArray:
        """Whether strategies [...] may run the longest sequence."""
        return np.asarray((self.latency_ns[strategies] < _NEVER) & (self.shares[strategies, 0, -1] < _NEVER))

    def terms(self, sets: IntArray, place: int) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Shares [N, q, T, n] and constants [N, q, T + 1] of sets [N, q] where strategy ``place`` of each runs the
        longest sequence, whose passage is the last bound; and how many others there are, [n]."""
        counts = self.counts.copy()
        counts[-1] -= 1.0
        shares, constants = self.shares[sets], self.constants[sets]
        constants = np.concatenate([constants, np.full((*sets.shape, 1), -_NEVER)], axis=2)
        constants[:, place, :-1] += shares[:, place, :, -1]
        constants[:, place, -1] = self.latency_ns[sets[:, place]]
        return shares, constants, counts


def sharpened_ns(problem: Bounded, used: IntArray) -> float:
    """*mixed* of one set [q] with the weights that are the duals of the linear program over x."""
    least = np.inf
    for place in range(len(used)):
        if problem.holds_longest(used[place]):
            shares, constants, counts = problem.terms(used[None], place)
            weights = _solved(shares[0], constants[0], counts)[0][None]
            values = _values(shares, constants, counts, weights)
            least = min(least, float(_mixture(weights, values)[0]))
    return least * SAFETY + float(problem.fixed_cost_ns(used[None])[0])


def best_shares(problem: Bounded, used: IntArray) -> list[IntArray]:
    """Sequences of every length for each strategy of a set [q], [q, n] in whole numbers: where the linear program
    puts them, for each strategy that may run the longest."""
    found = []
    for place in range(len(used)):
        if problem.holds_longest(used[place]):
            shares, constants, counts = problem.terms(used[None], place)
            _, parts = _solved(shares[0], constants[0], counts)
            # Sums over the first strategies are rounded, so that all sequences are shared out.
            held = np.diff(np.rint(np.cumsum(parts, axis=0) * counts), axis=0, prepend=0.0)
            held[place, -1] += 1.0
            found.append(held.astype(np.int64))
    return found


def _solved(shares: FloatArray, constants: FloatArray, counts: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Weights [q, T + 1] of bounds ``shares`` [q, T, n] and ``constants`` [q, T + 1] that prove most of the sum of
    times, and which part of the sequences of every length each strategy has [q, n]; equal ones where the solver
    has no answer."""
    size, number, lengths = shares.shape
    fits = shares[:, 0] < _NEVER
    scale = float(np.abs(constants[constants > -_NEVER]).max() + counts @ shares.min(axis=(0, 1)))
    rows, sides, owner = [], [], []
    for one in range(size):
        for bound in range(number + 1):
            if constants[one, bound] <= -_NEVER:
                continue
            row = np.zeros((size, lengths + 1))
            if bound < number:
                row[one, :-1] = np.where(fits[one], shares[one, bound] * counts, 0.0) / scale
            row[one, -1] = -1.0
            rows.append(row.ravel())
            sides.append(-constants[one, bound] / scale)
            owner.append((one, bound))
    weights = np.zeros((size, number + 1))
    # x in parts of the counts; every length is shared out.
    total = np.tile(np.eye(lengths, lengths + 1), (1, size))
    cost = np.tile(np.eye(1, lengths + 1, lengths)[0], size)
    most = np.where(fits, 1.0, 0.0)
    high = np.pad(most, ((0, 0), (0, 1)), constant_values=np.inf).ravel()
    answer = glop.least(cost, (np.array(rows), np.array(sides)), (total, np.ones(lengths)), high=high)
    places = tuple(np.array(owner).T)
    weights[places] = 1.0 if answer is None else np.maximum(0.0, -answer.at_most)
    sums = weights.sum(axis=1, keepdims=True)
    parts = most / most.sum(axis=0) if answer is None else answer.values.reshape(size, -1)[:, :-1]
    return np.where(sums > 0, weights / np.maximum(sums, 1e-300), np.eye(1, number + 1)[0]), parts


def cheap_ns(problem: Bounded, sets: IntArray, weights: FloatArray) -> FloatArray:
    """Bounds of sets [N, q] by ``weights`` [s, 2, T + 1] of each strategy, where it does not run the longest
    sequence and where it does, [N] ns."""
    used = np.unique(sets)
    shares, fixed = np.zeros((len(weights), 2, len(problem.counts))), np.zeros((len(weights), 2))
    shares[used] = weights[used, :, :-1] @ problem.shares[used]
    whole = problem.constants[used] + problem.shares[used, :, -1]
    fixed[used, 0] = (weights[used, 0, :-1] * problem.constants[used]).sum(axis=1)
    fixed[used, 1] = (weights[used, 1, :-1] * whole).sum(axis=1) + weights[used, 1, -1] * problem.latency_ns[used]
    counts, least = problem.counts.copy(), np.full(len(sets), np.inf)
    counts[-1] -= 1.0
    for place, runs in enumerate(np.eye(sets.shape[1], dtype=np.int64)):
        bounds = shares[sets, runs].min(axis=1) @ counts + fixed[sets, runs].sum(axis=1)
        least = np.where(problem.holds_longest(sets[:, place]), np.minimum(least, bounds), least)
    return np.asarray(least * SAFETY + problem.fixed_cost_ns(sets))


def raised_ns(
    problem: Bounded, sets: IntArray, target_ns: float, weights: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """*Mixed* bounds of sets [N, q], [N] ns, with ``weights`` [N, q, q, T + 1], by the strategy that runs the
    longest sequence, to begin with, and better ones; as soon as one reaches the target it is raised no more."""
    if not len(sets):
        return np.zeros(0), weights
    beyond = problem.fixed_cost_ns(sets)
    places = range(sets.shape[1])
    found = [_raised(problem, sets, place, target_ns - beyond, weights[:, place]) for place in places]
    least = np.min([bounds for bounds, _ in found], axis=0)
    return least * SAFETY + beyond, np.stack([better for _, better in found], axis=1)


def _raised(
    problem: Bounded, sets: IntArray, place: int, target: FloatArray, first: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """The bound of the groups' times where strategy ``place`` of each set runs the longest sequence, [N] ns, and
    the weights of it, which are ``first`` to begin with."""
    holds = problem.holds_longest(sets[:, place])
    found, best = np.where(holds, 0.0, np.inf), first.copy()
    open_, before = np.flatnonzero(holds), found.copy()
    weights = first[open_]
    for turn in range(_TURNS):
        if not len(open_):
            break
        if turn % _CHECK == 1:
            still = found[open_] < target[open_]
            if turn % _MARK == 1 and turn > 1:
                # Twice as fast as it has risen it would not get there, and it rises ever more slowly.
                rose = (found[open_] - before[open_]) * (2 * (_TURNS - turn) / _MARK)
                still &= found[open_] + rose >= target[open_]
                before = found.copy()
            open_, weights = open_[still], weights[still]
            if not len(open_):
                break
        if turn % _CHECK == 1 or turn == 0:
            terms = problem.terms(sets[open_], place)
        values = _values(*terms, weights)
        bounds = _mixture(weights, values)
        better = bounds > found[open_]
        found[open_[better]], best[open_[better]] = bounds[better], weights[better]
        # A step in proportion to what a bound is above its mixture, shorter in every turn.
        top = values.max(axis=2, keepdims=True)
        rate = 8.0 / (1.0 + 0.1 * turn) / np.maximum(1.0, top.sum(axis=1, keepdims=True))
        weights = weights * np.exp(np.maximum(-40.0, rate * (values - top)))
        weights /= weights.sum(axis=2, keepdims=True)
    return found, best


def _values(shares: FloatArray, constants: FloatArray, counts: FloatArray, weights: FloatArray) -> FloatArray:
    """Every bound [N, q, T + 1] of what strategies hold where sequences run under the one whose mixture of bounds,
    by ``weights`` [N, q, T + 1], has the least share of each."""
    mixture = np.einsum("nqt,nqtk->nqk", weights[:, :, :-1], shares)
    held = mixture.argmin(axis=1)[:, None] == np.arange(mixture.shape[1])[:, None]
    values = np.einsum("nqtk,nqk->nqt", shares, held * counts)
    return np.concatenate([values, np.zeros((*values.shape[:2], 1))], axis=2) + constants


def _mixture(weights: FloatArray, values: FloatArray) -> FloatArray:
    """The bound of the sum of the groups' times, [N] ns."""
    return np.asarray(np.where(weights > 0, weights * values, 0.0).sum(axis=(1, 2)))


def even_weights(problem: Bounded) -> FloatArray:
    """Equal weights of all bounds, the last that of the passage of the longest sequence, for who does not run that
    and who does, [2, T + 1]."""
    number = problem.constants.shape[1]
    return np.array([[1.0 / number] * number + [0.0], [1.0 / (number + 1)] * (number + 1)])
