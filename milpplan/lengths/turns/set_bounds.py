"""Bounds of sets of strategies that take turns, before any set is opened.

All sets are *screened* (``screening``), first with cheap bounds of their strategies, then with the work of
pipelines in intervals, where a concave function of the work is near its chord (``PipelineWorkBound``). A set that
stays open is *branched*: linear programs bound it for every choice of intervals. Bounds of a pipeline that has the
memory to itself hold beside others, too: with less memory no group is shorter. They are the strongest where it
holds nearly everything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from milpplan.lengths import StrategyTables
from milpplan.lengths.bounds.exclusive_program import ExclusiveProgram
from milpplan.lengths.bounds.work_bounds import LinearBounds, PipelineWorkBound
from milpplan.lengths.deadline import Deadline
from milpplan.lengths.search_parameters import PARAMETERS
from milpplan.lengths.turns.lagrangian_mixtures import Bounded
from milpplan.lengths.turns.screening import ScreeningResult, StrategySet, branched, screened, split
from milpplan.simulation import BoolArray, FloatArray

INTERVALS = np.array([0.0, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 0.9, 0.97, 1.0])
"""Ends of the intervals of a pipeline's work, as shares of the whole workload's."""


class SetBounds:
    """Bounds of sets of ``members`` of the pool; a strategy is given by its index among them."""

    def __init__(self, pool: StrategyTables, members: Sequence[int]) -> None:
        self.pool, self.members = pool, list(members)
        self.linear_bounds = [pool.linear_bounds(member, shared_memory=True) for member in members]
        # Pipelines with work bounds.
        self.bounded: set[int] = set()
        # Share of the workload of one sequence of each length [n], as the first pipeline weighs it.
        self.load_shares: FloatArray | None = None
        # By pipeline and the first length of which it holds all sequences: its program.
        self.programs: dict[tuple[int, int], ExclusiveProgram] = {}

    def screen(self, max_strategies: int, target_ns: float, deadline: Deadline) -> ScreeningResult:
        """Return the sets that may hold a step below ``target_ns``: by cheap bounds, then by the work of their
        pipelines in intervals."""
        end = deadline.share(PARAMETERS.screening_share)
        problem = self.screening_problem(range(len(self.members)), self.linear_bounds)
        result = screened(problem, max_strategies, target_ns, end)
        end = deadline.share(PARAMETERS.refinement_share)
        # The pipelines of sets with the lowest bounds come first.
        for strategy in dict.fromkeys(strategy for open_set in result.sets for strategy in open_set.strategies):
            if self._is_pipeline(strategy) and not end.passed:
                self._bound(strategy)
        end = deadline.share(PARAMETERS.refinement_share)
        divided = self.split_by_intervals(result.sets, target_ns, end)
        return ScreeningResult(divided.sets, min(result.dropped_ns, divided.dropped_ns))

    def split_by_intervals(
        self, sets: Sequence[StrategySet], target_ns: float, deadline: Deadline
    ) -> ScreeningResult:
        """Bound sets anew with the work of their pipelines in intervals, until the ``deadline``."""
        if not sets:
            return ScreeningResult((), np.inf)
        problem, parts, _ = self._divided(range(len(self.members)))
        return split(problem, parts, sets, target_ns, deadline)

    def branch(self, strategies: Sequence[int], target_ns: float) -> float:
        """Return the bound of a set without switches, by linear programs for its pipelines' work in intervals, and
        by which of them holds the longest sequence; no more than ``target_ns`` is sought."""
        for strategy in filter(self._is_pipeline, strategies):
            self._bound(strategy)
            self.pool.best_own_memory_bound(self.members[strategy])
        problem, parts, classes = self._divided(strategies, self._exclusive_rows(strategies))
        divided = [position for position, own in parts.items() if own != [position]]
        cuts = [(position, {position: parts[position]}) for position in divided]
        cuts += [(position, {part: classes[part] for part in parts[position]}) for position in divided]
        return branched(problem, list(range(len(strategies))), cuts, target_ns)

    def refine(self, strategies: Sequence[int]) -> None:
        """Refine the work bounds of a set's pipelines."""
        for strategy in filter(self._is_pipeline, strategies):
            self.pool.refine(self.members[strategy])

    def own_memory_ns(self, strategies: Sequence[int]) -> float:
        """Return the sum of the bounds of a set's pipelines with all sequences and the memory to themselves."""
        members = [self.members[strategy] for strategy in strategies if self._is_pipeline(strategy)]
        known = [member for member in members if self.pool.has_own_memory_bound(member)]
        return sum(self.pool.best_own_memory_bound(member).workload_bound_ns for member in known)

    def _is_pipeline(self, strategy: int) -> bool:
        return self.pool.num_stages(self.members[strategy]) > 1

    def _bound(self, strategy: int) -> None:
        """Compute the work bound of a pipeline."""
        self.bounded.add(strategy)
        self.pool.work_bound(self.members[strategy], shared_memory=True)

    def _divided(
        self, strategies: Sequence[int], exclusive: Mapping[int, LinearBounds] | None = None
    ) -> tuple[Bounded, dict[int, list[int]], dict[int, list[int]]]:
        """Return the screening problem of strategies and of their pipelines in intervals of their work, and the
        indices of the parts of each: a strategy without intervals is its only part.

        The last value has the parts of every interval: groups without and with the longest sequence, where a bound
        of the latter is known. ``exclusive`` are further bounds by strategy, of a set with just these strategies.
        """
        linear_bounds = dict(enumerate(self.linear_bounds))
        for strategy, rows in (exclusive or {}).items():
            linear_bounds[strategy] = linear_bounds[strategy].with_bounds(rows)
        owners, bounds = list(strategies), [linear_bounds[strategy] for strategy in strategies]
        ranges, parts = [(0.0, 1.0)] * len(owners), {index: [index] for index in range(len(owners))}
        classes: dict[int, list[int]] = {}

        def add(strategy: int, rows: LinearBounds, load_range: tuple[float, float]) -> int:
            owners.append(strategy)
            bounds.append(rows)
            ranges.append(load_range)
            return len(owners) - 1

        for index, strategy in enumerate(strategies):
            if strategy not in self.bounded:
                continue
            work_bound = self.pool.work_bound(self.members[strategy], shared_memory=True)
            parts[index] = []
            for low, high in pairwise(INTERVALS.tolist()):
                loads = low * work_bound.total_load, high * work_bound.total_load
                load_range = self._load_range(strategy, work_bound.sequence_loads, *loads)
                rows, *divided = self._chords(strategy, linear_bounds[strategy], low, high)
                part = add(strategy, rows, load_range)
                parts[index].append(part)
                classes[part] = [add(strategy, rows, load_range) for rows in divided] or [part]
        return self.screening_problem(owners, bounds, ranges), parts, classes

    def _chords(self, strategy: int, linear: LinearBounds, low: float, high: float) -> list[LinearBounds]:
        """Return the bounds of a pipeline's groups with between two shares of the work; then, where they are
        known, those of groups without and with the longest sequence."""
        member = self.members[strategy]
        shared, measures = self.pool.work_bound(member, shared_memory=True), [(1.0, 1.0)]
        bounds = [shared]
        if self.pool.has_own_memory_bound(member):
            bounds.append(self.pool.best_own_memory_bound(member))
            measures.append(_ratios(bounds[1], shared, np.isfinite(linear.shares[0])))
        is_divided = np.isfinite(linear.shares[0, -1]) and any(bound.long_bounds for bound in bounds)
        chords = []
        for with_longest in (None, False, True) if is_divided else (None,):
            rows = linear
            for bound, (low_ratio, high_ratio) in zip(bounds, measures, strict=True):
                ends = low * low_ratio, min(1.0, high * high_ratio)
                rows = bound.chords_between(rows, *ends, with_longest=with_longest)
            chords.append(rows)
        return chords

    def first_exclusive(self, strategies: Sequence[int], strategy: int) -> int:
        """Return the index of the first length that none but this strategy of a set holds, as long as it holds the
        longest; the number of lengths if there is none."""
        member, load = self.members[strategy], self.pool.load
        if not np.isfinite(self.pool.latency_bound_ns(member, shared_memory=True)):
            return len(load.lengths)
        others = [self.members[other] for other in strategies if other != strategy]
        max_quanta = max(self.pool.max_quanta(other, shared_memory=True) for other in others)
        return int((load.lengths <= max_quanta * load.token_quantum).sum())

    def _exclusive_rows(self, strategies: Sequence[int]) -> dict[int, LinearBounds]:
        """Return the bounds that programs of exclusive sequences have proved of a set's strategies: those of fewer
        sequences hold, too."""
        rows: dict[int, LinearBounds] = {}
        for (strategy, first), program in self.programs.items():
            if strategy in strategies and first >= self.first_exclusive(strategies, strategy):
                known = rows.get(strategy)
                rows[strategy] = program.bounds if known is None else known.with_bounds(program.bounds)
        return rows

    def prove_exclusive(
        self, strategies: Sequence[int], order_ns: float, target_ns: float, deadline: Deadline
    ) -> bool:
        """Bound the set by programs of its one-replica pipelines' exclusive sequences; return whether more can
        be gained."""
        pool, is_open = self.pool, False
        for strategy in strategies:
            member, first = self.members[strategy], self.first_exclusive(strategies, strategy)
            is_single_replica = pool.members[member].candidate.layout.dp == 1 and pool.num_stages(member) > 1
            # A pipeline that holds everything needs no program of what others take off it.
            if not is_single_replica or not 0 < first < len(pool.load.lengths):
                continue
            other_costs = np.min(
                [self._unit_costs(other, first) for other in strategies if other != strategy], axis=0
            )
            fixed_cost_ns = pool.fixed_cost_ns([self.members[other] for other in strategies])
            # Programs of several sets are much alike, so the last one goes on.
            program = self.programs.get((strategy, first)) or ExclusiveProgram(
                pool.work_bound(member, shared_memory=True),
                pool.micro_batch_pricing(member, shared_memory=True),
                first,
                other_costs,
            )
            self.programs[strategy, first] = program.with_other_costs(other_costs)
            # The rows of the program add up to slightly less in intervals of the work.
            aim_ns = 1.001 * (target_ns - order_ns - fixed_cost_ns)
            is_open |= self.programs[strategy, first].run(aim_ns, deadline)
        return is_open

    def _unit_costs(self, strategy: int, first: int) -> FloatArray:
        """Return the minimum ns per sequence [n] if a strategy of a set holds all lengths before ``first``, with
        all costs allocated; infinite where a length does not fit."""
        counts = np.where(np.arange(len(self.pool.load.lengths)) < first, self.pool.load.counts, 0).astype(float)
        bounds = self.linear_bounds[strategy]
        if self._is_pipeline(strategy):
            work_bound = self.pool.work_bound(self.members[strategy], shared_memory=True)
            share = float(work_bound.sequence_loads @ counts) / work_bound.total_load
            bounds = work_bound.chords_between(bounds, 0.95 * share, share)
        fits = np.isfinite(bounds.shares[0])
        allocated = bounds.shares[:, fits] @ counts[fits]
        # Only a bound with a positive sequence term can allocate its constant.
        best_row = int(np.where(allocated > 0.0, allocated + bounds.constants, -np.inf).argmax())
        return np.asarray(bounds.shares[best_row] * (1.0 + bounds.constants[best_row] / allocated[best_row]))

    def _load_range(
        self, strategy: int, sequence_loads: FloatArray, min_load: float, max_load: float
    ) -> tuple[float, float]:
        """Return the minimum and maximum share of the workload, in the common measure, between two amounts of a
        pipeline's work."""
        if self.load_shares is None:
            self.load_shares = sequence_loads / float(self.pool.load.counts @ sequence_loads)
        fits = np.isfinite(self.linear_bounds[strategy].shares[0])
        return _within(self.load_shares, fits, sequence_loads, min_load, max_load)

    def linear_problem(self, strategies: Sequence[int]) -> Bounded:
        """Return the screening problem of one set with its linear bounds only."""
        return self.screening_problem(strategies, [self.linear_bounds[strategy] for strategy in strategies])

    def screening_problem(
        self,
        strategies: Sequence[int],
        bounds: Sequence[LinearBounds],
        load_range: Sequence[tuple[float, float]] = (),
    ) -> Bounded:
        """Return the screening problem of strategies, or of parts of them, with the range of the workload that
        each may hold."""
        members = [self.members[strategy] for strategy in strategies]
        latency_ns = np.array([self.pool.latency_bound_ns(member, shared_memory=True) for member in members])
        reduce_ns = np.array([float(self.pool.reduce_ns(member)) for member in members])
        finish_ns = np.array([float(self.pool.finish_ns(member)) for member in members])
        return Bounded.of(bounds, latency_ns, reduce_ns, finish_ns, self.pool.load.counts, load_range)


def _ratios(bound: PipelineWorkBound, other: PipelineWorkBound, fits: BoolArray) -> tuple[float, float]:
    """Return the minimum and maximum ratio of a group's share of the work in two measures, at most and at least
    one: both weigh every sequence about equally."""
    ratios = (bound.sequence_loads / other.sequence_loads)[fits] * other.total_load / bound.total_load
    return min(1.0, float(ratios.min())), max(1.0, float(ratios.max()))


def _within(
    measure: FloatArray, fits: BoolArray, sequence_loads: FloatArray, min_load: float, max_load: float
) -> tuple[float, float]:
    """Return the minimum and maximum of a measure [n] over fitting sequences whose work, ``sequence_loads`` [n]
    apiece, lies between two amounts."""
    times = (measure / sequence_loads)[fits]
    return (min_load * float(times.min()), max_load * float(times.max())) if len(times) else (0.0, 0.0)
