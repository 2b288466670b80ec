"""Capacity of a pipeline's replica within a time, by class of its longest sequence.

The bounds are those of ``configuration_bound`` and ``longest_sequence_branching`` for one replica: windows around
a micro-batch with a sequence of some length or longer, without longer ones than those of its class; for the class
of the shortest, all micro-batches, with large ones separate. If the program of ``search`` assigns nearly as much
to a replica as its capacity, windows are refined. If that gains nothing, dual values are sought by which a replica
does the smallest part of the assignment (``restricted_master``): another measure of the work, with a capacity of
its own.

**Rows.** Every bound of a replica's time by its sequences, ``constant + sum_l w_l x_l <= T``, is a row, divided by
T - constant. So are prices of micro-batch contents of strategies of one stage (``sequence_duals``), and for
pipelines ``sum_l u_l x_l <= h^-1(T)`` with concave bounds h of their work u (``work_bounds.PipelineWorkBound``),
also by class of the longest sequence. No sequence runs where its latency exceeds T.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from milpplan.groups.bounds.long_sequence import halved
from milpplan.groups.bounds.pipeline_bounds import PathBound
from milpplan.lengths.bounds.configuration_bound import ConfigurationBound
from milpplan.lengths.bounds.longest_sequence_branching import begin, copy_in_measure, shorter
from milpplan.lengths.bounds.micro_batch_pricing import PinnedItem
from milpplan.lengths.bounds.restricted_master import ClassWindow, restricted_master_duals
from milpplan.lengths.bounds.window_tree import Duals, WindowNode, WindowTree
from milpplan.lengths.bounds.work_bounds import LinearBounds, PipelineWorkBound, latencies
from milpplan.lengths.heterogeneous.replicas import replica_gpus
from milpplan.lengths.strategy_tables import StrategyTables
from milpplan.simulation.layout_columns import BoolArray, FloatArray


@dataclass(frozen=True, eq=False)
class CapacityRow:
    """Maximum work of a replica: sequences add ``sequence_loads`` [n], and one of the ``bounds`` holds."""

    sequence_loads: FloatArray
    bounds: tuple[PathBound, ...]

    @staticmethod
    def of_loads(work_bound: PipelineWorkBound) -> list[CapacityRow]:
        """Return the rows of all bounds of a pipeline with its own memory."""
        sequence_loads = work_bound.sequence_loads * work_bound.num_replicas
        return [
            CapacityRow(sequence_loads, tuple(count_range.bound for count_range in bound.ranges))
            for bound in work_bound.bounds
        ]

    def max_load(self, time_ns: float) -> float:
        """Return the maximum work within a time."""
        return max((bound.within(time_ns) for bound in self.bounds), default=float("inf"))


@dataclass(frozen=True, eq=False)
class ReplicaClass:
    """Replicas of one member of a pool, perhaps with a range of their longest sequence."""

    pool: StrategyTables
    member: int
    num_gpus: int
    """GPUs of each replica."""
    max_replicas: int
    """Maximum number in a step with others."""
    fixed_cost_ns: int
    """Reduction and finish."""
    linear_bounds: LinearBounds
    """Bounds of one replica."""
    latency_ns: FloatArray
    """Minimum time of a sequence of each length, [n]."""
    longest_range: tuple[int, int] | None = None
    """First length index of their longest sequence, and the index after the last, if they are a class."""
    capacity_rows: tuple[CapacityRow, ...] = ()
    """Capacities of pipelines."""
    prices: tuple[FloatArray, ...] = ()
    """Prices [n] ns: the contents of a replica of one stage are worth at most its time."""

    @staticmethod
    def of(pool: StrategyTables, member: int, *, shared_memory: bool = False) -> ReplicaClass:
        """Build the class with cheap bounds, with its own memory or with memory shared with other strategies in
        turn."""
        candidate, quanta = pool.members[member], pool.max_quanta(member, shared_memory=shared_memory)
        num_replicas, bounds = (
            candidate.candidate.layout.dp,
            pool.linear_bounds(member, shared_memory=shared_memory),
        )
        linear_bounds = LinearBounds(bounds.shares * num_replicas, bounds.constants)
        fixed_cost_ns = pool.reduce_ns(member) + pool.finish_ns(member)
        latency_ns = latencies(pool.tables[member], candidate, quanta)
        return ReplicaClass(
            pool, member, replica_gpus(pool, member), num_replicas - 1, fixed_cost_ns, linear_bounds, latency_ns
        )

    @cached_property
    def fits(self) -> BoolArray:
        """Lengths that fit into a micro-batch, [n]."""
        return np.asarray(np.isfinite(self.linear_bounds.shares[0]) & np.isfinite(self.latency_ns))

    def can_hold(self, time_ns: float) -> BoolArray:
        """Return the lengths that a replica can hold within a time, [n]."""
        possible = self.fits & (self.latency_ns <= time_ns)
        if self.longest_range is not None:
            possible &= np.arange(len(possible)) < self.longest_range[1]
        return possible

    def rows(self, time_ns: float) -> FloatArray:
        """Return ``rows @ x <= 1`` for the sequences of a replica within a time, [i, n].

        Entries of lengths that it cannot hold are meaningless. Without rows it holds nothing.
        """
        capacity_rows = [*self.capacity_rows]
        if self.pool.num_stages(self.member) > 1 and self.pool.has_own_memory_bound(self.member):
            capacity_rows += CapacityRow.of_loads(self.pool.best_own_memory_bound(self.member))
        shares = [*self.linear_bounds.shares, *self.prices, *(row.sequence_loads for row in capacity_rows)]
        limits = [*(time_ns - self.linear_bounds.constants), *([time_ns] * len(self.prices))]
        limits += [row.max_load(time_ns) for row in capacity_rows]
        if min(limits) <= 0.0:
            return np.zeros((0, len(self.latency_ns)))
        kept = [(share, limit) for share, limit in zip(shares, limits, strict=True) if np.isfinite(limit)]
        return np.array([np.where(self.fits, share, 0.0) / limit for share, limit in kept])


# Shares of the longest fitting sequence's work at which classes begin, and the minimum share of a replica's work.
_EDGES, _MUCH = (0.3, 0.55, 0.8), 0.03
# Number of programs of divisible loads for a class.
_EFFORT = 24
# Maximum number of searches of dual values, seconds per search, minimum ratio of a value to the one before, and
# the share of all sequences that is added to an assignment.
_ASKED, _ASK_S, _LEAST_WORTH, _ALL = 4, 1.0, 0.5, 0.03
# Share by which the capacity is to fall below an assignment.
_RISE = 0.02


@dataclass(eq=False)
class _View:
    """Capacity of a class in one measure of the work: trees that cover its replicas, and the windows that gave the
    measure."""

    duals: Duals
    trees: tuple[WindowTree, ...]
    windows: tuple[ClassWindow, ...] = ()

    @property
    def capacity_row(self) -> CapacityRow:
        """Capacity by the bounds so far."""
        bounds = tuple(bound for tree in self.trees for node in tree.nodes for bound in node.bounds)
        return CapacityRow(self.duals.sequence_loads, bounds)

    def loosest(self, time_ns: float) -> tuple[WindowTree, WindowNode]:
        """Return the loosest node within a time, with its tree."""
        pairs = [(tree, tree.loosest(time_ns)) for tree in self.trees]
        return max(pairs, key=lambda pair: pair[1].max_load(time_ns))

    def max_share(self, time_ns: float, held: FloatArray) -> float:
        """Return the maximum work within a time, as a share of ``held`` [n] sequences."""
        return self.loosest(time_ns)[1].max_load(time_ns) / float(self.duals.sequence_loads @ held)

    def with_loads(self, sequence_loads: FloatArray, windows: tuple[ClassWindow, ...]) -> _View:
        """Return the view in another measure [n], with the mixtures of its windows."""
        scale = self.duals.total_load / float(self.duals.counts @ sequence_loads)
        duals = self.duals.with_loads(scale * sequence_loads)
        trees = tuple(copy_in_measure(tree, duals, self.duals) for tree in self.trees)
        started = tuple(replace(window, flow=window.flow * scale) for window in windows)
        for window in started:
            begin(trees, window)
        return _View(duals, trees, started)


class LongestSequenceClass:
    """Replicas whose longest sequence has index ``first`` to ``end`` - 1; the class that begins at 0 includes
    empty replicas."""

    def __init__(self, first: int, end: int, duals: Duals, trees: tuple[WindowTree, ...]) -> None:
        self.first, self.end = first, end
        self._views = [_View(duals, trees)]
        # Number of searches of dual values.
        self._asked = 0

    @property
    def capacity_rows(self) -> tuple[CapacityRow, ...]:
        """Capacities so far, in every measure."""
        return tuple(view.capacity_row for view in self._views)

    def sharpen(self, time_ns: float, held: FloatArray, deadline: float) -> bool:
        """Refine bounds until a replica cannot hold ``held`` [n] sequences, less a margin, within a time, or the
        ``deadline``; return whether there was work."""
        has_worked = False
        while time.perf_counter() < deadline:
            view = min(self._views, key=lambda candidate: candidate.max_share(time_ns, held))
            if view.max_share(time_ns, held) <= 1.0 - _RISE:
                break
            tree, node = view.loosest(time_ns)
            if node.done and not self._ask(view, time_ns, held):
                break
            if not node.done:
                load = float(view.duals.sequence_loads @ held) * (1.0 - _RISE)
                view.duals.refine(tree, node, time_ns, load)
            has_worked = True
        return has_worked

    def _ask(self, view: _View, time_ns: float, held: FloatArray) -> bool:
        """Seek dual values by which a replica does the smallest part of ``held`` [n] within a time, a few times;
        return whether they improve on the view's."""
        tree, node = view.loosest(time_ns)
        if self._asked == _ASKED or node.window is None or node.start is None:
            return False
        self._asked += 1
        mixture, slope, rows = node.start
        configuration = view.duals.configuration(tree, node)
        window = ClassWindow(0, configuration, mixture, 1.0 / slope, rows, tree.columns)
        other_windows = [
            other
            for other in view.windows
            if (other.configuration.window, other.configuration.pinned_item) != (node.window, tree.pinned_item)
        ]
        counts, sequence_loads, end = view.duals.counts, view.duals.sequence_loads, time.perf_counter() + _ASK_S
        wanted = held + _ALL * counts * (float(sequence_loads @ held) / float(sequence_loads @ counts))
        solution = restricted_master_duals(
            (*other_windows, window), np.array([1]), wanted, sequence_loads, time_ns, end
        )
        if solution is None:
            return False
        self._views.append(view.with_loads(np.maximum(solution[0], _LEAST_WORTH * sequence_loads), solution[1]))
        return True


def longest_sequence_classes(
    pool: StrategyTables, member: int, time_ns: float, held: FloatArray
) -> list[LongestSequenceClass]:
    """Return the classes of a pipeline whose replicas hold about ``held`` [n] within about a time."""
    work_bound, pricing = pool.best_own_memory_bound(member), pool.micro_batch_pricing(member)
    sequence_loads = work_bound.sequence_loads * work_bound.num_replicas
    load = float(sequence_loads @ held)
    fits = pricing.items.fits
    end = int(np.flatnonzero(fits)[-1]) + 1 if fits.any() else len(fits)
    min_loads = [part * sequence_loads[end - 1] for part in _EDGES]
    starts = {int(np.searchsorted(sequence_loads[:end], part)) for part in min_loads if part > _MUCH * load}
    classes = []
    for first, last in pairwise([*sorted({0, *(start for start in starts if start < end)}), end]):
        configuration = ConfigurationBound.for_load(work_bound, shorter(pricing, last), load)
        if not first:
            configuration.branch_on_large(time_ns, load)
            classes.append(
                LongestSequenceClass(
                    first, last, configuration.duals, (configuration.ordinary, *configuration.with_large)
                )
            )
            continue
        around = configuration.lines.around_long_sequence(first, load, _EFFORT)
        windows = [configuration.duals.convert_window(window, work_bound.stages.last) for window in around.boxes]
        nodes = [WindowNode(window.window, window.bounds) for window in windows]
        tree = WindowTree(configuration.full_pricing, halved, PinnedItem(first), around.alone, nodes)
        classes.append(LongestSequenceClass(first, last, configuration.duals, (tree,)))
    return classes
