"""Bounds of sets of strategies that take turns, before any set is opened.

All sets are *screened* (``screening``), first with cheap bounds of their strategies, then with the work of
pipelines in intervals. A set that stays open is *branched*: its pipelines are cut into intervals of their work,
then into classes of groups, with all bounds known by then (``IntervalBounds``) and with the sequences that only
one of its strategies holds (``exclusive_sequences``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from milpplan.lengths import StrategyTables
from milpplan.lengths.bounds.exclusive_sequences import ExclusiveProgram
from milpplan.lengths.bounds.work_bounds import LinearBounds, PipelineWorkBound
from milpplan.lengths.deadline import Deadline
from milpplan.lengths.search_parameters import PARAMETERS
from milpplan.lengths.turns.lagrangian_mixtures import Bounded, IntervalBounds, Kind
from milpplan.lengths.turns.screening import Node, ScreeningResult, StrategySet, branched, screened, split
from milpplan.simulation import BoolArray, FloatArray, IntArray


class SetBounds:
    """Bounds of sets of ``members`` of the pool; a strategy is given by its index among them."""

    def __init__(self, pool: StrategyTables, members: Sequence[int]) -> None:
        self.pool, self.members = pool, list(members)
        # By strategy: linear bounds; pipelines with work bounds; strategies in many sets.
        self.linear_bounds: list[LinearBounds] = []
        self.pipelines_with_loads: set[int] = set()
        self.interval_bounds = IntervalBounds(pool, self.members, [])
        # Share of the workload of one sequence of each length [n], as the first pipeline weighs it.
        self.load_shares: FloatArray | None = None
        self.common_strategies: set[int] = set()
        # By strategy: bounds of groups that hold all sequences from some length on; the last program for each
        # length.
        self.programs: dict[int, list[tuple[int, LinearBounds]]] = {}
        self.last_programs: dict[tuple[int, int], ExclusiveProgram] = {}

    def screen(self, max_strategies: int, target_ns: float, deadline: Deadline) -> ScreeningResult:
        """Return the sets that may hold a step below ``target_ns``: by cheap bounds, by work bounds of pipelines,
        then by intervals."""
        pool, members = self.pool, self.members
        self.linear_bounds = [pool.linear_bounds(member, shared_memory=True) for member in members]
        self.interval_bounds = IntervalBounds(pool, members, self.linear_bounds)
        end = deadline.share(PARAMETERS.screening_share)
        result = screened(
            self.screening_problem(list(range(len(members))), self.linear_bounds), max_strategies, target_ns, end
        )
        dropped_ns = result.dropped_ns
        end = deadline.share(PARAMETERS.refinement_share)
        # The pipelines of sets with the lowest bounds come first.
        for strategy in dict.fromkeys(strategy for open_set in result.sets for strategy in open_set.strategies):
            if pool.num_stages(members[strategy]) > 1 and not end.passed:
                self.pipelines_with_loads.add(strategy)
                pool.work_bound(members[strategy], shared_memory=True)
        end = deadline.share(PARAMETERS.refinement_share)
        result = self.split_by_intervals(result.sets, target_ns, end)
        num_sets = Counter(strategy for strategy_set in result.sets for strategy in strategy_set.strategies)
        self.common_strategies = {
            strategy for strategy, count in num_sets.items() if count >= PARAMETERS.common_share * len(result.sets)
        }
        return ScreeningResult(result.sets, min(dropped_ns, result.dropped_ns))

    def split_by_intervals(
        self, sets: Sequence[StrategySet], target_ns: float, deadline: Deadline
    ) -> ScreeningResult:
        """Bound sets anew with their pipelines' work in intervals, own-memory bounds and exclusive sequences,
        until the ``deadline``."""
        if not sets:
            return ScreeningResult((), np.inf)
        # A key is a strategy with its number of exclusive sequences.
        keys: dict[tuple[int, int], int] = {}
        numbered = []
        for strategy_set in sets:
            pairs = zip(strategy_set.strategies, self.num_exclusive(strategy_set.strategies), strict=True)
            numbered.append(
                StrategySet(strategy_set.bound_ns, tuple(keys.setdefault(key, len(keys)) for key in pairs))
            )
        bounds = [
            self._with_longest(strategy, num_exclusive, self.linear_bounds[strategy])
            for strategy, num_exclusive in keys
        ]
        owners, shares, parts = [strategy for strategy, _ in keys], [(0.0, 1.0)] * len(keys), {}
        for key, (strategy, num_exclusive) in enumerate(keys):
            intervals = self.interval_bounds.of(strategy, "alone") if strategy in self.pipelines_with_loads else []
            parts[key] = list(range(len(bounds), len(bounds) + len(intervals))) or [key]
            bounds += [self._with_longest(strategy, num_exclusive, bound) for bound, *_ in intervals]
            owners += [strategy] * len(intervals)
            if intervals:
                sequence_loads, ends = self.interval_bounds.ends(strategy, "alone")
                shares += [self._load_range(strategy, sequence_loads, *pair) for pair in pairwise(ends.tolist())]
        result = split(self.screening_problem(owners, bounds, shares), parts, numbered, target_ns, deadline)
        left = tuple(
            StrategySet(strategy_set.bound_ns, tuple(owners[key] for key in strategy_set.strategies))
            for strategy_set in result.sets
        )
        return ScreeningResult(left, result.dropped_ns)

    def _load_range(
        self, strategy: int, sequence_loads: FloatArray, min_load: float, max_load: float
    ) -> tuple[float, float]:
        """Return the minimum and maximum share of the workload, in the common measure, between two amounts of a
        pipeline's work."""
        if self.load_shares is None:
            self.load_shares = sequence_loads / float(self.pool.load.counts @ sequence_loads)
        return _within(
            self.load_shares,
            np.isfinite(self.linear_bounds[strategy].shares[0]),
            sequence_loads,
            min_load,
            max_load,
        )

    def linear_problem(self, strategies: tuple[int, ...]) -> Bounded:
        """Return the screening problem of one set with its linear bounds only."""
        pairs = zip(strategies, self.num_exclusive(strategies), strict=True)
        return self.screening_problem(
            list(strategies), [self._with_longest(*pair, self.linear_bounds[pair[0]]) for pair in pairs]
        )

    def _with_longest(self, strategy: int, number: int, bounds: LinearBounds) -> LinearBounds:
        """Add the bounds of a strategy that holds the ``number`` longest sequences."""
        return (
            bounds.with_bounds(self.pool.bounds_with_longest(self.members[strategy], number)) if number else bounds
        )

    def _linear(self, strategies: tuple[int, ...], strategy: int, number: int) -> LinearBounds:
        """Return all linear bounds of a strategy of a set that holds the ``number`` longest sequences."""
        return _joined(
            self._with_longest(strategy, number, self.linear_bounds[strategy]),
            self._programs(strategies, strategy),
        )

    def _work_bound(self, member: int) -> PipelineWorkBound:
        """Return the strongest work bound of a pipeline with shared memory."""
        return self.pool.fine_work_bounds.get(member, self.pool.work_bound(member, shared_memory=True))

    def num_exclusive(self, strategies: tuple[int, ...]) -> list[int]:
        """Return the number of sequences that only each strategy of a set can hold."""
        members = [self.members[index] for index in strategies]
        return [
            self.pool.num_exclusive(member, members[:index] + members[index + 1 :])
            for index, member in enumerate(members)
        ]

    def screening_problem(
        self, strategies: list[int], bounds: list[LinearBounds], load_range: Sequence[tuple[float, float]] = ()
    ) -> Bounded:
        """Return the screening problem of strategies, or of parts of them, with the range of the workload that
        each may hold."""
        members = [self.members[strategy] for strategy in strategies]
        latency_ns = np.array([self.pool.latency_bound_ns(member, shared_memory=True) for member in members])
        reduce_ns = np.array([float(self.pool.reduce_ns(member)) for member in members])
        finish_ns = np.array([float(self.pool.finish_ns(member)) for member in members])
        return Bounded.of(bounds, latency_ns, reduce_ns, finish_ns, self.pool.load.counts, load_range)

    def first_exclusive(self, strategies: tuple[int, ...], strategy: int) -> int:
        """Return ``StrategyTables.first_exclusive`` of a strategy of a set."""
        others = [self.members[other] for other in strategies if other != strategy]
        return self.pool.first_exclusive(self.members[strategy], others)

    def _programs(self, strategies: tuple[int, ...], strategy: int) -> list[LinearBounds]:
        """Return the bounds of a strategy of a set from programs of its exclusive sequences."""
        if strategy not in self.programs:
            return []
        first_exclusive = self.first_exclusive(strategies, strategy)
        return [bounds for first, bounds in self.programs[strategy] if first >= first_exclusive]

    def prove_exclusive(self, node: Node, target_ns: float, deadline: Deadline) -> bool:
        """Bound the set's pipelines of one replica by programs of their exclusive sequences; return whether there
        was one."""
        strategies, pool = node.screened.strategies, self.pool
        has_programs = False
        for strategy in strategies:
            member, first = self.members[strategy], self.first_exclusive(strategies, strategy)
            is_single_replica = pool.members[member].candidate.layout.dp == 1 and pool.num_stages(member) > 1
            # A pipeline that holds everything needs no program of what others take off it.
            if not is_single_replica or not 0 < first < len(pool.load.lengths):
                continue
            other_counts = np.where(np.arange(len(pool.load.lengths)) < first, pool.load.counts, 0).astype(
                np.float64
            )
            other_costs = np.min(
                [self._unit_costs(other, other_counts) for other in strategies if other != strategy], axis=0
            )
            fixed_cost_ns = pool.fixed_cost_ns([self.members[other] for other in strategies])
            program = self._program(strategy, first, other_costs)
            program.run(PARAMETERS.exclusive_aim * (target_ns - node.order_ns - fixed_cost_ns), deadline)
            self.programs.setdefault(strategy, []).append((first, program.bounds))
            has_programs = True
        return has_programs

    def _program(self, strategy: int, first: int, other_costs: FloatArray) -> ExclusiveProgram:
        """Return the program of a pipeline that holds all sequences from ``first`` on, given the costs of others.

        The last program is reused, as programs of several sets are much alike.
        """
        member, key = self.members[strategy], (strategy, first)
        if key not in self.last_programs:
            loads, contents = (
                self.pool.work_bound(member, shared_memory=True),
                self.pool.micro_batch_pricing(member, shared_memory=True),
            )
            self.last_programs[key] = ExclusiveProgram(loads, contents, first, other_costs)
        self.last_programs[key] = self.last_programs[key].with_other_costs(other_costs)
        return self.last_programs[key]

    def _unit_costs(self, strategy: int, counts: FloatArray) -> FloatArray:
        """Return the minimum ns per sequence [n] if a strategy of a set holds ``counts`` [n], with all costs
        allocated; infinite where a length does not fit."""
        bounds = self.interval_bounds.bounds_near(strategy, counts)
        fits = np.isfinite(bounds.shares[0])
        allocated = bounds.shares[:, fits] @ counts[fits]
        # Only a bound with a positive sequence term can allocate its constant.
        best_row = int(np.where(allocated > 0.0, allocated + bounds.constants, -np.inf).argmax())
        return np.asarray(bounds.shares[best_row] * (1.0 + bounds.constants[best_row] / allocated[best_row]))

    def branch(self, node: Node, levels: Sequence[Kind], target_ns: float) -> None:
        """Bound the set by cutting its pipelines into intervals of their work, then into classes, at these
        levels."""
        strategies = node.screened.strategies
        interval_bounds = [self.interval_bounds.of(*pair) for pair in zip(strategies, levels, strict=True)]
        numbers = self.num_exclusive(strategies)
        programs = [self._programs(strategies, strategy) for strategy in strategies]
        bounds = [
            self._linear(strategies, strategy, number)
            for strategy, number in zip(strategies, numbers, strict=True)
        ]
        owners, load_ranges = list(strategies), [(0.0, 1.0)] * len(strategies)
        interval_cuts: list[tuple[int, dict[int, list[int]]]] = []
        class_cuts: list[tuple[int, dict[int, list[int]]]] = []
        for position, intervals in enumerate(interval_bounds):
            if not intervals:
                continue
            places = np.cumsum([len(bounds), *(len(levels) for levels in intervals)]).tolist()
            part_bounds = [bound for levels in intervals for bound in levels]
            joined_bounds = [
                self._with_longest(strategies[position], numbers[position], bound) for bound in part_bounds
            ]
            bounds += [_joined(bound, programs[position]) for bound in joined_bounds]
            owners += [owners[position]] * (len(bounds) - len(owners))
            sequence_loads, ends = self.interval_bounds.ends(strategies[position], levels[position])
            for kinds_, pair in zip(intervals, pairwise(ends.tolist()), strict=True):
                load_ranges += [self._load_range(strategies[position], sequence_loads, *pair)] * len(kinds_)
            interval_cuts.append((position, {position: places[:-1]}))
            if len(intervals[0]) > 1:
                class_cuts.append((position, {low: list(range(low + 1, high)) for low, high in pairwise(places)}))
        problem = self.screening_problem(owners, bounds, load_ranges)
        all_cuts = interval_cuts + class_cuts
        bound_ns, worst_choice = branched(
            problem, list(range(len(interval_bounds))), all_cuts, target_ns - node.order_ns
        )
        node.raise_to(bound_ns + node.order_ns)
        node.worst_intervals = (
            {} if worst_choice is None else _intervals(strategies, interval_cuts, worst_choice.tolist())
        )


def _within(
    measure: FloatArray, fits: BoolArray, sequence_loads: FloatArray, min_load: float, max_load: float
) -> tuple[float, float]:
    """Return the minimum and maximum of a measure [n] over fitting sequences whose work, ``sequence_loads`` [n]
    apiece, lies between two amounts."""
    times = (measure / sequence_loads)[fits]
    return (min_load * float(times.min()), max_load * float(times.max())) if len(times) else (0.0, 0.0)


def _joined(bounds: LinearBounds, others: Sequence[LinearBounds]) -> LinearBounds:
    """Return the bounds with further bounds of the same groups."""
    for other in others:
        bounds = bounds.with_bounds(other)
    return bounds


def _intervals(
    strategies: tuple[int, ...],
    interval_cuts: list[tuple[int, dict[int, list[int]]]],
    choice: list[int],
) -> dict[int, int]:
    """Return the interval of each pipeline's work in a choice of parts, by strategy."""
    return {
        strategies[position]: int(_numbers(parts, np.array(choice[position]))) for position, parts in interval_cuts
    }


def _numbers(parts: dict[int, list[int]], chosen: IntArray) -> IntArray:
    """Return the intervals of chosen parts of a pipeline [...]; classes of an interval follow it."""
    ((_, starts),) = parts.items()
    return np.asarray(np.searchsorted(starts, chosen, side="right") - 1)
