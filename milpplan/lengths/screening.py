"""Which sets of strategies may hold a step shorter than a target: all sets at once, with switches free.

Every strategy s has linear bounds of its group's time for whatever it holds (``work``), Z_s >= sum_k x_k share_stk
+ constant_st for all t, so for any weights lambda_st >= 0 with sum_t lambda_st = 1

    sum_s Z_s >= sum_k n_k min over s of (sum_t lambda_st share_stk) + sum_st lambda_st constant_st:

the Lagrangian bound of the linear program over x. Three bounds of a set, switches apart:

 - *sum*: for every strategy the one bound that is highest for the whole workload. For all sets.
 - *mixed*: better weights, for the sets that *sum* leaves open. Some j in the set runs the longest
   sequence, so Z_j >= serial_j, its passage through all stages, is one bound more, and that sequence counts under
   j. The bound is the least over j. Weights are raised in turns where a bound is above the mixture (exponentiated
   gradients), for many sets together; any weights prove their bound, so it does not matter how good they are.
 - *sharpened*: the duals of the linear program, for one set (or choice of its parts) after another.

All add the reductions of the set and its least finish: one of them is the home. A set whose bound reaches the
target holds no shorter step, whatever its switches take.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from milpplan.costs.columns import BoolArray, FloatArray, IntArray
from milpplan.errors import InvalidInputError
from milpplan.groups import linear
from milpplan.lengths.work import WorkBounds

# Sets of all sizes that are tried, and of one turn of weights.
_MAX_SETS = 20_000_000
_CHUNK, _SPLIT = 256, 24
_TURNS, _CHECK = 60, 6
# Where a length does not fit, ns.
_NEVER = 1e18
# What rounding of sums of floats may add.
_SAFETY = 1.0 - 1e-9


@dataclass(frozen=True, slots=True)
class OpenSet:
    """Strategies and the bound of their steps in ns, switches apart."""

    bound_ns: float
    used: tuple[int, ...]


@dataclass(order=True, slots=True)
class Left:
    """A set that may hold a shorter step: its bound with everything known, its number, what was screened of it,
    what its cheapest order adds to that, what is left to do, on which intervals of its pipelines (by place) its
    bound rests, what was known of these alone, ns, and which of them hold nearly everything there; ``open``: by
    place, what a sequence adds to a load [n], and the least and the most load of steps that may be shorter than
    the target."""

    bound_ns: float
    number: int
    screened: OpenSet = field(compare=False)
    order_ns: float = field(compare=False, default=0.0)
    ways: list[Callable[[Left], None]] = field(compare=False, default_factory=list)
    worst: dict[int, int] = field(compare=False, default_factory=dict)
    alone: dict[int, float] = field(compare=False, default_factory=dict)
    nearly_all: list[int] = field(compare=False, default_factory=list)
    open: dict[int, tuple[FloatArray, float, float]] = field(compare=False, default_factory=dict)

    def raise_to(self, bound_ns: float) -> None:
        """Take over a bound if it is higher."""
        self.bound_ns = max(self.bound_ns, bound_ns)


class Helper(Protocol):
    """Another process that looks at some of the sets."""

    @property
    def busy(self) -> bool:
        """Whether it looks at a set that is not closed."""

    def share(self, left: list[Left]) -> None:
        """Give it some of those in a heap, and put back what it is done with."""

    def drop(self) -> None:
        """It need not look at those that it was given any more."""


@dataclass(frozen=True, slots=True)
class Screened:
    """Sets of at least two strategies that are left, the least bound first, and the least bound of the others in
    ns (infinite where none was dropped)."""

    left: tuple[OpenSet, ...]
    dropped_ns: float


@dataclass(frozen=True, slots=True, eq=False)
class Bounded:
    """Linear bounds of all strategies, ``shares`` [s, T, n] and ``constants`` [s, T]; ``serial`` [s] of the
    longest sequence, ``once`` [s] a reduction, ``finish`` [s] of a step at home there, all ns; ``counts`` [n]
    sequences."""

    shares: FloatArray
    constants: FloatArray
    serial: FloatArray
    once: FloatArray
    finish: FloatArray
    counts: FloatArray

    @staticmethod
    def of(
        bounds: Sequence[WorkBounds], serial: FloatArray, once: FloatArray, finish: FloatArray, counts: IntArray
    ) -> Bounded:
        """Padded to the same number of bounds each."""
        most = max(len(one.constants) for one in bounds)
        rows = [np.arange(most) % len(one.constants) for one in bounds]
        shares = np.stack([one.shares[row] for one, row in zip(bounds, rows, strict=True)])
        constants = np.stack([one.constants[row] for one, row in zip(bounds, rows, strict=True)])
        shares = np.minimum(shares, _NEVER)
        return Bounded(shares, constants, np.minimum(serial, _NEVER), once, finish, counts.astype(np.float64))

    def holds_longest(self, strategies: IntArray) -> BoolArray:
        """Whether strategies [...] may run the longest sequence."""
        return np.asarray((self.serial[strategies] < _NEVER) & (self.shares[strategies, 0, -1] < _NEVER))

    def terms(self, sets: IntArray, place: int) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Shares [N, q, T, n] and constants [N, q, T + 1] of sets [N, q] where strategy ``place`` of each runs the
        longest sequence, whose passage is the last bound; and how many others there are, [n]."""
        counts = self.counts.copy()
        counts[-1] -= 1.0
        shares, constants = self.shares[sets], self.constants[sets]
        constants = np.concatenate([constants, np.full((*sets.shape, 1), -_NEVER)], axis=2)
        constants[:, place, :-1] += shares[:, place, :, -1]
        constants[:, place, -1] = self.serial[sets[:, place]]
        return shares, constants, counts


def screened(problem: Bounded, max_strategies: int, target_ns: float) -> Screened:
    """The sets of two and more strategies with a bound below ``target_ns``.

    Raises:
        InvalidInputError: there are too many sets to try.
    """
    number = len(problem.once)
    totals = problem.shares @ problem.counts + problem.constants
    best = totals.argmax(axis=1)
    rows = np.arange(number)
    work, once = problem.shares[rows, best] * problem.counts, problem.once + problem.constants[rows, best]
    left: list[tuple[int, ...]] = []
    dropped, tried = np.inf, 0
    # Sets as their least shares, grown by one strategy of a higher number at a time.
    grown: list[tuple[tuple[int, ...], FloatArray]] = [((one,), work[one]) for one in range(number)]
    for size in range(2, min(max_strategies, number) + 1):
        tried += sum(number - 1 - used[-1] for used, _ in grown)
        if tried > _MAX_SETS:
            raise InvalidInputError(
                f"{number} strategies make more than {_MAX_SETS:,} sets of at most {max_strategies}.",
                "Expected fewer.",
                "Lower --max-strategies, or fix fields of the layout.",
            )
        larger = []
        for used, least in grown:
            later = np.arange(used[-1] + 1, number)
            ends = np.minimum(problem.finish[later], problem.finish[list(used)].min())
            fixed = float(once[list(used)].sum()) + ends
            bounds = np.minimum(least, work[later]).sum(axis=1) * _SAFETY + fixed + once[later]
            dropped = min(dropped, float(bounds[bounds >= target_ns].min(initial=np.inf)))
            left += [(*used, int(one)) for one in later[bounds < target_ns]]
            if size < max_strategies:
                larger += [((*used, int(one)), np.minimum(least, work[one])) for one in later]
        grown = larger
    found: list[OpenSet] = []
    for size in range(2, max_strategies + 1):
        sets = np.array([used for used in left if len(used) == size], dtype=np.int64).reshape(-1, size)
        for start in range(0, len(sets), _CHUNK):
            part = sets[start : start + _CHUNK]
            bounds = mixed_ns(problem, part, target_ns)
            dropped = min(dropped, float(bounds[bounds >= target_ns].min(initial=np.inf)))
            below = np.flatnonzero(bounds < target_ns)
            found += [OpenSet(float(bounds[row]), tuple(part[row].tolist())) for row in below]
    return Screened(tuple(sorted(found, key=lambda one: (one.bound_ns, one.used))), dropped)


def split(
    problem: Bounded, parts: Mapping[int, Sequence[int]], sets: Sequence[OpenSet], target_ns: float
) -> Screened:
    """The sets bounded anew where every strategy is one of its ``parts`` of ``problem``.

    The parts together stand for it: a set's bound is the least over all choices of parts.
    """
    left: list[OpenSet] = []
    dropped = np.inf
    for start in range(0, len(sets), _SPLIT):
        some = sets[start : start + _SPLIT]
        chosen = [np.array(list(itertools.product(*(parts[one] for one in held.used)))) for held in some]
        bounds: dict[int, FloatArray] = {}
        for size in {len(held.used) for held in some}:
            mine = [place for place, held in enumerate(some) if len(held.used) == size]
            found = mixed_ns(problem, np.concatenate([chosen[place] for place in mine]), target_ns)
            ends = np.cumsum([len(chosen[place]) for place in mine])[:-1]
            bounds |= dict(zip(mine, np.split(found, ends), strict=True))
        for place, held in enumerate(some):
            bound = max(held.bound_ns, float(bounds[place].min()))
            if bound < target_ns:
                left.append(OpenSet(bound, held.used))
            else:
                dropped = min(dropped, bound)
    return Screened(tuple(sorted(left, key=lambda one: (one.bound_ns, one.used))), dropped)


def branched(
    problem: Bounded,
    whole: Sequence[int],
    cuts: Sequence[tuple[int, Mapping[int, Sequence[int]]]],
    target_ns: float,
) -> tuple[float, IntArray | None, IntArray]:
    """The bound of one set whose strategies are cut into parts one after another, ns, the choice of parts [q] that
    it rests on, none where that was cut no further, and all choices that do not reach the target, [N, q].

    ``cuts``: which strategy of the set, and what each part of it falls into. Choices of parts that reach the
    target are cut no further.
    """
    rows, bounds, dropped = np.array([whole]), np.array([0.0]), np.inf
    for position, parts in cuts:
        cut = [(row, part) for row in rows.tolist() for part in parts[row[position]]]
        rows = np.array([row for row, _ in cut])
        rows[:, position] = [part for _, part in cut]
        bounds = mixed_ns(problem, rows, target_ns)
        closed = bounds >= target_ns
        dropped = min(dropped, float(bounds[closed].min(initial=np.inf)))
        rows, bounds = rows[~closed], bounds[~closed]
        if not len(rows):
            break
    sharpest, row = _sharpest(bounds, rows, problem, target_ns)
    return (dropped, None, rows) if dropped < sharpest else (sharpest, row, rows)


def _sharpest(
    bounds: FloatArray, sets: IntArray, problem: Bounded, target_ns: float
) -> tuple[float, IntArray | None]:
    """The least bound of sets [N, q] with the weights of linear programs, the least first, and whose that is;
    those after one that stays below all others are not raised."""
    left = [(bound, row, False) for row, bound in enumerate(bounds.tolist())]
    heapq.heapify(left)
    while left and left[0][0] < target_ns and not left[0][2]:
        bound, row, _ = left[0]
        heapq.heapreplace(left, (max(bound, sharpened_ns(problem, sets[row])), row, True))
    return (left[0][0], sets[left[0][1]]) if left else (np.inf, None)


def sharpened_ns(problem: Bounded, used: IntArray) -> float:
    """*mixed* of one set [q] with the weights that are the duals of the linear program over x."""
    once = float(problem.once[used].sum() + problem.finish[used].min())
    least = np.inf
    for place in range(len(used)):
        if problem.holds_longest(used[place]):
            shares, constants, counts = problem.terms(used[None], place)
            weights = _duals(shares[0], constants[0], counts)[None]
            values = _values(shares, constants, counts, weights)
            least = min(least, float(_mixture(weights, values)[0]))
    return least * _SAFETY + once


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


def _duals(shares: FloatArray, constants: FloatArray, counts: FloatArray) -> FloatArray:
    """Weights [q, T + 1] of bounds ``shares`` [q, T, n] and ``constants`` [q, T + 1] that prove most of the sum of
    times; equal ones where the solver has no answer."""
    return _solved(shares, constants, counts)[0]


def _solved(shares: FloatArray, constants: FloatArray, counts: FloatArray) -> tuple[FloatArray, FloatArray]:
    """The weights of ``_duals``, and which part of the sequences of every length each strategy has [q, n]: equal
    ones where the solver has no answer."""
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
    answer = linear.least(cost, (np.array(rows), np.array(sides)), (total, np.ones(lengths)), high=high)
    places = tuple(np.array(owner).T)
    weights[places] = 1.0 if answer is None else np.maximum(0.0, -answer.at_most)
    sums = weights.sum(axis=1, keepdims=True)
    parts = most / most.sum(axis=0) if answer is None else answer.values.reshape(size, -1)[:, :-1]
    return np.where(sums > 0, weights / np.maximum(sums, 1e-300), np.eye(1, number + 1)[0]), parts


def mixed_ns(problem: Bounded, sets: IntArray, target_ns: float) -> FloatArray:
    """*mixed* of sets [N, q], [N] ns; as soon as one reaches the target it is raised no more."""
    least = np.full(len(sets), np.inf)
    beyond = problem.once[sets].sum(axis=1) + problem.finish[sets].min(axis=1)
    for place in range(sets.shape[1]):
        least = np.minimum(least, _raised(problem, sets, place, target_ns - beyond))
    return np.asarray(least * _SAFETY + beyond)


def _raised(problem: Bounded, sets: IntArray, place: int, target: FloatArray) -> FloatArray:
    """The bound of the groups' times where strategy ``place`` of each set runs the longest sequence, [N] ns."""
    holds = problem.holds_longest(sets[:, place])
    found = np.where(holds, 0.0, np.inf)
    open_ = np.flatnonzero(holds)
    weights = _first_weights(problem, sets[open_])
    for turn in range(_TURNS):
        if not len(open_):
            break
        if turn % _CHECK == 1:
            still = found[open_] < target[open_]
            open_, weights = open_[still], weights[still]
            if not len(open_):
                break
        if turn % _CHECK == 1 or turn == 0:
            terms = problem.terms(sets[open_], place)
        values = _values(*terms, weights)
        found[open_] = np.maximum(found[open_], _mixture(weights, values))
        # A step in proportion to what a bound is above its mixture, shorter in every turn.
        top = values.max(axis=2, keepdims=True)
        rate = 8.0 / (1.0 + 0.1 * turn) / np.maximum(1.0, top.sum(axis=1, keepdims=True))
        weights = weights * np.exp(np.maximum(-40.0, rate * (values - top)))
        weights /= weights.sum(axis=2, keepdims=True)
    return found


def _values(shares: FloatArray, constants: FloatArray, counts: FloatArray, weights: FloatArray) -> FloatArray:
    """Every bound [N, q, T + 1] of what strategies hold where sequences run under the one whose mixture of bounds,
    by ``weights`` [N, q, T + 1], has the least share of each."""
    mixture = np.einsum("nqt,nqtk->nqk", weights[:, :, :-1], shares)
    held = mixture <= mixture.min(axis=1, keepdims=True)
    held &= np.cumsum(held, axis=1) == 1
    values = np.einsum("nqtk,nqk->nqt", shares, held * counts)
    return np.concatenate([values, np.zeros((*values.shape[:2], 1))], axis=2) + constants


def _mixture(weights: FloatArray, values: FloatArray) -> FloatArray:
    """The bound of the sum of the groups' times, [N] ns."""
    return np.asarray(np.where(weights > 0, weights * values, 0.0).sum(axis=(1, 2)))


def _first_weights(problem: Bounded, sets: IntArray) -> FloatArray:
    """Equal weights of all bounds of every strategy of the sets, with the passage of the longest sequence,
    [N, q, T + 1]; no weight is ever zero but for passages that do not count."""
    return np.full((*sets.shape, problem.constants.shape[1] + 1), 1.0 / (problem.constants.shape[1] + 1))
