"""Which sets of strategies may hold a step shorter than a target: all sets at once, with switches free.

Bounds of a set (``mixed_bounds``) are *sums* of the one bound of every strategy that is highest for the whole
workload, for all sets; then *cheap* and *mixed* for those that these leave open. Where strategies are cut into
parts, choices of the parts of the first ones that reach the target are cut no further, nor are those that together
hold less than the workload, or more. A set whose bound reaches the target holds no shorter step, whatever its
switches take.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from milpplan.errors import InvalidInputError
from milpplan.lengths.turns.lagrangian_mixtures import (
    SAFETY,
    Bounded,
    cheap_ns,
    even_weights,
    raised_ns,
    sharpened_ns,
)
from milpplan.simulation.layout_columns import FloatArray, IntArray

# Sets of all sizes that are tried, and that are cut at once.
_MAX_SETS, _SPLIT = 20_000_000, 128
# Part of weights that is even when they are begun with.
_FRESH = 0.05


@dataclass(frozen=True, slots=True)
class StrategySet:
    """Strategies and the bound of their steps in ns, switches apart."""

    bound_ns: float
    strategies: tuple[int, ...]


@dataclass(order=True, slots=True)
class Node:
    """A set that may hold a shorter step: its bound with everything known, its number, what was screened of it,
    what its cheapest order adds to that, what is left to do, on which intervals of its pipelines (by place) its
    bound rests, what was known of these alone, ns, and which of them hold nearly everything there; ``open``: by
    place, what a sequence adds to a load [n], and the least and the most load of steps that may be shorter than
    the target."""

    bound_ns: float
    number: int
    screened: StrategySet = field(compare=False)
    order_ns: float = field(compare=False, default=0.0)
    bounding_steps: list[Callable[[Node], None]] = field(compare=False, default_factory=list)
    worst_intervals: dict[int, int] = field(compare=False, default_factory=dict)
    own_memory_ns: dict[int, float] = field(compare=False, default_factory=dict)
    nearly_all: list[int] = field(compare=False, default_factory=list)
    open_loads: dict[int, tuple[FloatArray, float, float]] = field(compare=False, default_factory=dict)

    def raise_to(self, bound_ns: float) -> None:
        """Take over a bound if it is higher."""
        self.bound_ns = max(self.bound_ns, bound_ns)


class Helper(Protocol):
    """Another process that looks at some of the sets."""

    @property
    def busy(self) -> bool:
        """Whether it looks at a set that is not closed."""

    def share(self, left: list[Node]) -> None:
        """Give it some of those in a heap, and put back what it is done with."""

    def recall(self) -> None:
        """It need not look at those that it was given any more."""


@dataclass(frozen=True, slots=True)
class ScreeningResult:
    """Sets of at least two strategies that are left, the least bound first, and the least bound of the others in
    ns (infinite where none was dropped)."""

    sets: tuple[StrategySet, ...]
    dropped_ns: float


def screened(problem: Bounded, max_strategies: int, target_ns: float, deadline: float = np.inf) -> ScreeningResult:
    """The sets of two and more strategies with a bound below ``target_ns``. After the ``deadline`` (of
    ``perf_counter``) no set grows beyond two, and what is left of these is bounded together.

    Raises:
        InvalidInputError: there are too many sets to try.
    """
    number = len(problem.reduce_ns)
    totals = problem.shares @ problem.counts + problem.constants
    best = totals.argmax(axis=1)
    rows = np.arange(number)
    work, once = problem.shares[rows, best] * problem.counts, problem.reduce_ns + problem.constants[rows, best]
    # The least work and reductions of those from each on.
    rest, more = (np.minimum.accumulate(one[::-1])[::-1] for one in (work, once))
    left: list[StrategySet] = []
    dropped, tried = np.inf, 0
    # Sets as their least shares, grown by one strategy of a higher number at a time; a bound of what they grow to.
    grown: list[tuple[tuple[int, ...], FloatArray, float]] = [((one,), work[one], 0.0) for one in range(number)]
    for size in range(2, min(max_strategies, number) + 1):
        tried += sum(number - 1 - used[-1] for used, _, _ in grown)
        if tried > _MAX_SETS:
            raise InvalidInputError(
                f"{number} strategies make more than {_MAX_SETS:,} sets of at most {max_strategies}.",
                "Expected fewer.",
                "Lower --max-strategies, or fix fields of the layout.",
            )
        larger = []
        for used, least, whole in grown:
            if size > 2 and time.perf_counter() > deadline:
                dropped = min(dropped, whole)
                continue
            later = np.arange(used[-1] + 1, number)
            ends = np.minimum(problem.finish_ns[later], problem.finish_ns[list(used)].min())
            fixed = float(once[list(used)].sum()) + ends + once[later]
            parts = np.minimum(least, work[later])
            bounds = parts.sum(axis=1) * SAFETY + fixed
            dropped = min(dropped, float(bounds[bounds >= target_ns].min(initial=np.inf)))
            below = np.flatnonzero(bounds < target_ns).tolist()
            left += [StrategySet(float(bounds[row]), (*used, int(later[row]))) for row in below]
            if size < max_strategies and len(later) > 1:
                # Whatever joins these.
                joined = np.minimum(parts[:-1], rest[later[1:]]).sum(axis=1) * SAFETY + more[later[1:]]
                joined += float(once[list(used)].sum()) + once[later[:-1]] + float(problem.finish_ns.min())
                dropped = min(dropped, float(joined[joined >= target_ns].min(initial=np.inf)))
                able = np.flatnonzero(joined < target_ns).tolist()
                larger += [((*used, int(later[row])), parts[row], float(joined[row])) for row in able]
        grown = larger
    left.sort(key=lambda one: one.bound_ns)
    found = split(problem, {one: [one] for one in range(number)}, left, target_ns, deadline)
    return replace(found, dropped_ns=min(dropped, found.dropped_ns))


def split(
    problem: Bounded,
    parts: Mapping[int, list[int]],
    sets: Sequence[StrategySet],
    target_ns: float,
    deadline: float = np.inf,
) -> ScreeningResult:
    """The sets bounded anew where every strategy is one of its ``parts`` of ``problem``, in their order, until the
    ``deadline`` (of ``perf_counter``): others keep their bounds.

    The parts together stand for it: a set's bound is the least over all choices of parts.
    """
    left: list[StrategySet] = []
    dropped, last = np.inf, None
    for start in range(0, len(sets), _SPLIT):
        some = sets[start : start + _SPLIT]
        if time.perf_counter() > deadline:
            left += sets[start:]
            break
        for size in {len(held.strategies) for held in some}:
            mine = [held for held in some if len(held.strategies) == size]
            rows = np.array([held.strategies for held in mine])
            choices = _Choices.of(problem, rows, last)
            last = choices.last
            cut = [place for place in range(size) if any(parts[one] != [one] for one in rows[:, place].tolist())]
            for position in cut or [0]:
                choices = choices.cut(position, parts, target_ns)
            for held, least in zip(mine, choices.least.tolist(), strict=True):
                bound = max(held.bound_ns, least)
                if bound < target_ns:
                    left.append(StrategySet(bound, held.strategies))
                else:
                    dropped = min(dropped, bound)
    return ScreeningResult(tuple(sorted(left, key=lambda one: (one.bound_ns, one.strategies))), dropped)


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
    found = _Choices.of(problem, np.array([whole]))
    for position, parts in cuts:
        found = found.cut(position, parts, target_ns)
    sharpest, row = _sharpest(found.bounds, found.rows, problem, target_ns)
    dropped = float(found.closed[0])
    return (dropped, None, found.rows) if dropped < sharpest else (sharpest, row, found.rows)


@dataclass(frozen=True, slots=True, eq=False)
class _Choices:
    """Choices of parts of some sets that are open, ``rows`` [N, q] of the numbers ``sets`` [N], with their
    ``bounds`` [N] ns and ``weights`` (``raised_ns``); the least bound of those that are ``closed``, by set.
    ``last`` [s, 2, T + 1]: weights of every part that were good elsewhere (``cheap_ns``)."""

    problem: Bounded
    last: FloatArray
    rows: IntArray
    sets: IntArray
    bounds: FloatArray
    weights: FloatArray
    closed: FloatArray

    @staticmethod
    def of(problem: Bounded, sets: IntArray, last: FloatArray | None = None) -> _Choices:
        """Sets [N, q] as they are, of which nothing is known."""
        if last is None:
            last = np.repeat(even_weights(problem)[None], len(problem.reduce_ns), axis=0)
        number, runs = len(sets), np.eye(sets.shape[1], dtype=np.int64)
        weights, closed = last[sets[:, None, :], runs], np.full(number, np.inf)
        return _Choices(problem, last, sets, np.arange(number), np.zeros(number), weights, closed)

    def cut(self, position: int, parts: Mapping[int, Sequence[int]], target_ns: float) -> _Choices:
        """With one of its parts for the strategy at a position; those that reach the target are closed."""
        if not len(self.rows):
            return self
        cut = [parts[one] for one in self.rows[:, position].tolist()]
        before = np.repeat(np.arange(len(cut)), [len(one) for one in cut])
        rows = self.rows[before]
        rows[:, position] = np.concatenate(cut)
        able = self.problem.can_hold_workload(rows)
        rows, before = rows[able], before[able]
        # By weights from elsewhere, then by better ones.
        bounds, closed = cheap_ns(self.problem, rows, self.last), self.closed.copy()
        sets, ends = self.sets[before], bounds >= target_ns
        np.minimum.at(closed, sets[ends], bounds[ends])
        rows, sets, before = rows[~ends], sets[~ends], before[~ends]
        runs = np.eye(rows.shape[1], dtype=np.int64)
        weights = self.weights[before]
        weights[:, :, position] = self.last[rows[:, position, None], runs[:, position]]
        # No weight is gone for ever.
        weights = (1.0 - _FRESH) * weights + _FRESH * even_weights(self.problem)[runs]
        bounds, weights = raised_ns(self.problem, rows, target_ns, weights)
        self.last[rows[:, None, :], runs] = weights
        ends = bounds >= target_ns
        np.minimum.at(closed, sets[ends], bounds[ends])
        return _Choices(self.problem, self.last, rows[~ends], sets[~ends], bounds[~ends], weights[~ends], closed)

    @property
    def least(self) -> FloatArray:
        """The bound of every set, ns."""
        least = self.closed.copy()
        np.minimum.at(least, self.sets, self.bounds)
        return least


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
