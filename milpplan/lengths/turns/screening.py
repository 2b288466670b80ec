"""Screening: which sets of strategies may hold a step shorter than a target, all sets at once with free switches.

Bounds of a set (``lagrangian_mixtures``), from cheap to expensive: first *sums*, with one linear bound per
strategy that is highest for the whole workload; then the bounds of one row and of subgradients for sets that stay
open. Strategies may be cut into parts. Choices of parts of the first strategies that reach the target are cut no
further; choices that together hold less or more than the workload are dropped. A set whose bound reaches the
target holds no shorter step, whatever its switches take.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from milpplan.errors import InvalidInputError
from milpplan.lengths.deadline import NEVER, Deadline
from milpplan.lengths.search_parameters import SAFETY
from milpplan.lengths.turns.lagrangian_mixtures import (
    Bounded,
    even_weights,
    lp_bound_ns,
    single_row_bound_ns,
    subgradient_bound_ns,
)
from milpplan.simulation import FloatArray, IntArray

# Maximum number of sets of all sizes.
_MAX_SETS = 20_000_000


@dataclass(frozen=True, slots=True)
class StrategySet:
    """Strategies and a lower bound of their steps in ns, without switches."""

    bound_ns: float
    strategies: tuple[int, ...]


@dataclass(order=True, slots=True)
class Node:
    """An open set of strategies: its bound and its progress through the bounding steps."""

    bound_ns: float
    number: int
    """Rank after screening; breaks ties."""
    screened: StrategySet = field(compare=False)
    order_ns: float = field(compare=False, default=0.0)
    """Time of the cheapest order of the set, as part of the bound."""
    bounding_steps: list[Callable[[Node], None]] = field(compare=False, default_factory=list)
    """Procedures that may still raise the bound, in order."""
    own_memory_ns: float = field(compare=False, default=0.0)
    """Sum of the own-memory bounds of its pipelines that were applied."""

    def raise_to(self, bound_ns: float) -> None:
        """Raise the bound to ``bound_ns`` if that is higher."""
        self.bound_ns = max(self.bound_ns, bound_ns)


@dataclass(frozen=True, slots=True)
class ScreeningResult:
    """Open sets of at least two strategies, the lowest bound first, and the lowest bound of the dropped sets."""

    sets: tuple[StrategySet, ...]
    dropped_ns: float
    """Infinite if none was dropped."""


def screened(
    problem: Bounded, max_strategies: int, target_ns: float, deadline: Deadline = NEVER
) -> ScreeningResult:
    """Return the sets of two and more strategies with a bound below ``target_ns``.

    After the ``deadline``  no set grows beyond two, and the larger sets get a common bound.

    Raises:
        InvalidInputError: there are too many sets.
    """
    num_strategies = len(problem.reduce_ns)
    totals = problem.shares @ problem.counts + problem.constants
    best = totals.argmax(axis=1)
    rows = np.arange(num_strategies)
    work, once = problem.shares[rows, best] * problem.counts, problem.reduce_ns + problem.constants[rows, best]
    # Minimum work and fixed cost over all later strategies.
    min_later_work, min_later_once = (np.minimum.accumulate(strategy[::-1])[::-1] for strategy in (work, once))
    open_sets: list[StrategySet] = []
    dropped, tried = np.inf, 0
    # Sets with their minimum shares and a bound of all their supersets; each grows by a strategy of a higher
    # index.
    grown: list[tuple[tuple[int, ...], FloatArray, float]] = [
        ((strategy,), work[strategy], 0.0) for strategy in range(num_strategies)
    ]
    for size in range(2, min(max_strategies, num_strategies) + 1):
        tried += sum(num_strategies - 1 - strategies[-1] for strategies, _, _ in grown)
        if tried > _MAX_SETS:
            raise InvalidInputError(
                f"{num_strategies} strategies make more than {_MAX_SETS:,} sets of at most {max_strategies}.",
                "Expected fewer.",
                "Lower --max-strategies, or fix fields of the layout.",
            )
        larger = []
        for strategies, min_shares, grown_bound in grown:
            if size > 2 and deadline.passed:
                dropped = min(dropped, grown_bound)
                continue
            candidates = np.arange(strategies[-1] + 1, num_strategies)
            ends = np.minimum(problem.finish_ns[candidates], problem.finish_ns[list(strategies)].min())
            fixed = float(once[list(strategies)].sum()) + ends + once[candidates]
            new_shares = np.minimum(min_shares, work[candidates])
            bounds = new_shares.sum(axis=1) * SAFETY + fixed
            dropped = min(dropped, float(bounds[bounds >= target_ns].min(initial=np.inf)))
            below = np.flatnonzero(bounds < target_ns).tolist()
            open_sets += [StrategySet(float(bounds[row]), (*strategies, int(candidates[row]))) for row in below]
            if size < max_strategies and len(candidates) > 1:
                # Bounds of all sets that join later strategies.
                joined = (
                    np.minimum(new_shares[:-1], min_later_work[candidates[1:]]).sum(axis=1) * SAFETY
                    + min_later_once[candidates[1:]]
                )
                joined += (
                    float(once[list(strategies)].sum()) + once[candidates[:-1]] + float(problem.finish_ns.min())
                )
                dropped = min(dropped, float(joined[joined >= target_ns].min(initial=np.inf)))
                extensible = np.flatnonzero(joined < target_ns).tolist()
                larger += [
                    ((*strategies, int(candidates[row])), new_shares[row], float(joined[row]))
                    for row in extensible
                ]
        grown = larger
    open_sets.sort(key=lambda strategy: strategy.bound_ns)
    result = split(
        problem, {strategy: [strategy] for strategy in range(num_strategies)}, open_sets, target_ns, deadline
    )
    return replace(result, dropped_ns=min(dropped, result.dropped_ns))


def split(
    problem: Bounded,
    parts: Mapping[int, list[int]],
    sets: Sequence[StrategySet],
    target_ns: float,
    deadline: Deadline = NEVER,
) -> ScreeningResult:
    """Bound the sets anew where every strategy is replaced by one of its ``parts``.

    The parts of a strategy cover it, so a set's bound is the minimum over all choices of parts. After the
    ``deadline``  sets keep their bounds.
    """
    open_sets: list[StrategySet] = []
    dropped, last = np.inf, None
    for start in range(0, len(sets), 128):
        batch = sets[start : start + 128]
        if deadline.passed:
            open_sets += sets[start:]
            break
        for size in {len(strategy_set.strategies) for strategy_set in batch}:
            same_size = [strategy_set for strategy_set in batch if len(strategy_set.strategies) == size]
            rows = np.array([strategy_set.strategies for strategy_set in same_size])
            choices = _Choices.of(problem, rows, last)
            last = choices.last
            positions = [
                index for index in range(size) if any(parts[part] != [part] for part in rows[:, index].tolist())
            ]
            for position in positions or [0]:
                choices = choices.cut(position, parts, target_ns)
            for strategy_set, new_bound_ns in zip(same_size, choices.set_bounds.tolist(), strict=True):
                bound = max(strategy_set.bound_ns, new_bound_ns)
                if bound < target_ns:
                    open_sets.append(StrategySet(bound, strategy_set.strategies))
                else:
                    dropped = min(dropped, bound)
    return ScreeningResult(tuple(sorted(open_sets, key=lambda part: (part.bound_ns, part.strategies))), dropped)


def branched(
    problem: Bounded,
    whole: Sequence[int],
    cuts: Sequence[tuple[int, Mapping[int, Sequence[int]]]],
    target_ns: float,
) -> float:
    """Return the bound of one set in ns by cutting its strategies into parts one after another.

    Args:
        problem: linear bounds of all parts.
        whole: the strategies of the set.
        cuts: index of a strategy in the set, and the parts of each of its parts.
        target_ns: choices of parts that reach it are cut no further.
    """
    choices = _Choices.of(problem, np.array([whole]))
    for position, parts in cuts:
        choices = choices.cut(position, parts, target_ns)
    return min(_sharpest(choices.bounds, choices.rows, problem, target_ns), float(choices.closed[0]))


@dataclass(frozen=True, slots=True, eq=False)
class _Choices:
    """Open choices of parts of some sets."""

    problem: Bounded
    last: FloatArray
    """Weights of every part that were good in other sets (``single_row_bound_ns``), [s, 2, T + 1]."""
    rows: IntArray
    """Parts of each choice, [N, q]."""
    sets: IntArray
    """Index of each choice's set, [N]."""
    bounds: FloatArray
    """Lower bounds in ns, [N]."""
    weights: FloatArray
    """Weights of the mixtures (``subgradient_bound_ns``)."""
    closed: FloatArray
    """Lowest bound of the closed choices in ns, by set."""

    @staticmethod
    def of(problem: Bounded, sets: IntArray, last: FloatArray | None = None) -> _Choices:
        """Return the sets [N, q] without cuts and bounds."""
        if last is None:
            last = np.repeat(even_weights(problem)[None], len(problem.reduce_ns), axis=0)
        num_sets, is_longest = len(sets), np.eye(sets.shape[1], dtype=np.int64)
        weights, closed = last[sets[:, None, :], is_longest], np.full(num_sets, np.inf)
        return _Choices(problem, last, sets, np.arange(num_sets), np.zeros(num_sets), weights, closed)

    def cut(self, position: int, parts: Mapping[int, Sequence[int]], target_ns: float) -> _Choices:
        """Replace the strategy at a position by each of its parts; close the choices that reach the target."""
        if not len(self.rows):
            return self
        parts_of_row = [parts[strategy] for strategy in self.rows[:, position].tolist()]
        parents = np.repeat(np.arange(len(parts_of_row)), [len(strategy) for strategy in parts_of_row])
        rows = self.rows[parents]
        rows[:, position] = np.concatenate(parts_of_row)
        can_hold = self.problem.can_hold_workload(rows)
        rows, parents = rows[can_hold], parents[can_hold]
        # First by weights from other sets, then by better ones.
        bounds, closed = single_row_bound_ns(self.problem, rows, self.last), self.closed.copy()
        sets, is_closed = self.sets[parents], bounds >= target_ns
        np.minimum.at(closed, sets[is_closed], bounds[is_closed])
        rows, sets, parents = rows[~is_closed], sets[~is_closed], parents[~is_closed]
        is_longest = np.eye(rows.shape[1], dtype=np.int64)
        weights = self.weights[parents]
        weights[:, :, position] = self.last[rows[:, position, None], is_longest[:, position]]
        # A weight of zero would stay zero.
        weights = 0.95 * weights + 0.05 * even_weights(self.problem)[is_longest]
        bounds, weights = subgradient_bound_ns(self.problem, rows, target_ns, weights)
        self.last[rows[:, None, :], is_longest] = weights
        is_closed = bounds >= target_ns
        np.minimum.at(closed, sets[is_closed], bounds[is_closed])
        return _Choices(
            self.problem,
            self.last,
            rows[~is_closed],
            sets[~is_closed],
            bounds[~is_closed],
            weights[~is_closed],
            closed,
        )

    @property
    def set_bounds(self) -> FloatArray:
        """Lower bound of every set in ns."""
        bounds = self.closed.copy()
        np.minimum.at(bounds, self.sets, self.bounds)
        return bounds


def _sharpest(bounds: FloatArray, sets: IntArray, problem: Bounded, target_ns: float) -> float:
    """Raise the bounds of sets [N, q] by linear programs, the lowest first, until a raised one stays the lowest;
    return it in ns."""
    open_sets = [(bound, row, False) for row, bound in enumerate(bounds.tolist())]
    heapq.heapify(open_sets)
    while open_sets and open_sets[0][0] < target_ns and not open_sets[0][2]:
        bound, row, _ = open_sets[0]
        heapq.heapreplace(open_sets, (max(bound, lp_bound_ns(problem, sets[row])), row, True))
    return open_sets[0][0] if open_sets else np.inf
