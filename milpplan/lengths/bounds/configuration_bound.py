"""Configuration bounds of a pipeline, where its work bounds leave room for a step within some time.

D replicas can do a workload within a time Z only if one replica with the longest sequence and D - 1 others can
together (``bounds.long_sequence``). Of the windows of numbers of micro-batches the loosest is refined:
by the mixture of the divisible loads, by halving, and by the configuration LP where one number,
or one pair around a micro-batch, is left. The search ends as soon as all replicas together do less than the
workload.

**Large micro-batches.** The configuration LP mixes contents: a micro-batch that is full for a twentieth and nearly
empty for the rest has the times of large products and of a short pipeline at once. So replicas branch on their
largest micro-batch. One of more than some number of quanta makes stages wait around it, as the longest sequence
does, and gets windows around it; all other replicas have smaller contents, whose programs are faster, too. The
threshold is the smallest for which divisible loads around such a micro-batch already take too long.

**Trees** over the numbers of micro-batches of a replica: the loosest node is refined. A node begins with the bound
of divisible loads. Then the mixture of that bound is evaluated for whole sequences (``configuration_columns``),
which may raise it; windows of several numbers are halved; where one number is left, or one pair around a
micro-batch, the configuration LP improves the mixture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from milpplan.lengths.bounds import StageLoads, Window, best_mixture, long_bound
from milpplan.lengths.bounds.configuration_columns import (
    Columns,
    ConfigurationLP,
    improved,
)
from milpplan.lengths.bounds.long_sequence import (
    MAX_MICRO_BATCHES,
    LoadBound,
    LongSequenceBound,
    MicroBatchCountRange,
    WindowBound,
    halved,
)
from milpplan.lengths.bounds.micro_batch_pricing import Items, MicroBatchPricing, PinnedItem
from milpplan.lengths.bounds.pipeline_bounds import Mixture, PathBound
from milpplan.lengths.bounds.work_bounds import PipelineWorkBound
from milpplan.lengths.deadline import Deadline
from milpplan.lengths.search_parameters import PARAMETERS
from milpplan.simulation import FloatArray, IntArray


@dataclass(frozen=True, eq=False)
class WindowNode:
    """A window of numbers of micro-batches with its bounds."""

    window: Window | None
    """None: any larger number of micro-batches."""
    bounds: tuple[PathBound, ...]
    """Valid bounds, at least one of which holds."""
    start: tuple[Mixture, float, IntArray] | None = None
    """Mixture, slope and contents of the bound."""
    tried_mixture: Mixture | None = None
    """Mixture of another window that was tried."""
    stale: bool = False
    """True if contents or dual values have changed since ``start``."""
    done: bool = False
    """True if nothing more can be gained."""

    def max_load(self, time_ns: float) -> float:
        """Return the maximum work within a time."""
        return max(bound.within(time_ns) for bound in self.bounds)

    @property
    def reset(self) -> WindowNode:
        """The node for changed contents or dual values."""
        return replace(self, stale=self.start is not None, done=False)

    def better(self, bound: PathBound, time_ns: float) -> WindowNode:
        """Return the node with another bound if that is tighter within a time."""
        return replace(self, bounds=(bound,)) if bound.within(time_ns) < self.max_load(time_ns) else self


@dataclass(eq=False)
class WindowTree:
    """Nodes that cover all numbers of micro-batches of a replica."""

    pricing: MicroBatchPricing
    """Pricing problem of its micro-batches."""
    split_window: Callable[[Window], Sequence[Window]]
    """Gives the halves of a window."""
    pinned_item: PinnedItem | None = None
    """Pinned item, as in ``ConfigurationLP``."""
    min_load: float = 0.0
    """Minimum work of the micro-batch with the pinned item."""
    nodes: list[WindowNode] = field(default_factory=list)
    columns: Columns | None = None
    """Columns of the last LP."""
    # Cache of the loosest node: it is asked for more often than nodes change.
    _worst: tuple[list[WindowNode], float, WindowNode] | None = field(default=None, init=False)

    def loosest(self, time_ns: float) -> WindowNode:
        """Return the node with the maximum work within a time."""
        cached = self._worst
        if cached is None or cached[0] is not self.nodes or cached[1] != time_ns:
            cached = self._worst = self.nodes, time_ns, max(self.nodes, key=lambda node: node.max_load(time_ns))
        return cached[2]

    def replace_node(self, node: WindowNode, others: Sequence[WindowNode]) -> None:
        """Replace a node by others."""
        self.nodes = [kept for kept in self.nodes if kept is not node] + list(others)


@dataclass(frozen=True, eq=False)
class Duals:
    """Measure of a pipeline's work: a dual value for every sequence."""

    stages: StageLoads
    """Times of the stages."""
    rounded_stages: StageLoads
    """Stages with few mixes, for programs of divisible loads."""
    num_stages: int
    counts: IntArray
    """Sequences of the workload, [n]."""
    sequence_loads: FloatArray
    """Dual values of the sequences as work, [n]."""
    last_mixtures: dict[int, tuple[Mixture, float]] = field(default_factory=dict)
    """Mixture and slope of the last LP, by number of micro-batches."""

    @staticmethod
    def of(work_bound: PipelineWorkBound, counts: IntArray) -> Duals:
        """Build the measure of a work bound."""
        rounded, sequence_loads = (
            work_bound.stages.with_kinds(),
            work_bound.sequence_loads * work_bound.num_replicas,
        )
        return Duals(work_bound.stages, rounded, work_bound.num_stages, counts, sequence_loads)

    @property
    def total_load(self) -> float:
        """Work of the whole workload."""
        return float(self.counts @ self.sequence_loads)

    def convert(self, bound: PathBound, earlier_loads: FloatArray) -> PathBound:
        """Convert a bound from the measure ``before`` to this one, valid for parts of the workload.

        A missing sequence had at most the maximum ratio of its value here.
        """
        max_ratio = float((earlier_loads / self.sequence_loads).max())
        excess = float(self.counts @ earlier_loads) - max_ratio * self.total_load
        return PathBound(bound.constant + bound.slope * excess, bound.slope * max_ratio)

    def convert_bound(self, bound: LoadBound, earlier_loads: FloatArray) -> LoadBound:
        """Convert a bound with all its ranges."""
        return LoadBound(
            tuple(
                replace(count_range, bound=self.convert(count_range.bound, earlier_loads))
                for count_range in bound.ranges
            )
        )

    def convert_window(self, window: WindowBound, earlier_loads: FloatArray) -> WindowBound:
        """Convert the bounds of a window."""
        return replace(window, bounds=tuple(self.convert(bound, earlier_loads) for bound in window.bounds))

    def configuration(self, tree: WindowTree, node: WindowNode) -> ConfigurationLP:
        """Return the configuration LP of a tree's node."""
        assert node.window is not None
        arguments = tree.pricing, self.sequence_loads, self.stages.last, self.num_stages
        return ConfigurationLP(*arguments, node.window, tree.pinned_item)

    def refine(self, tree: WindowTree, node: WindowNode, time_ns: float, cutoff_load: float) -> None:
        """Refine a node of a tree, no further than to less than the work ``cutoff_load`` within the time."""
        tree.replace_node(node, self._refined(tree, node, time_ns, cutoff_load))

    def _refined(self, tree: WindowTree, node: WindowNode, time_ns: float, cutoff_load: float) -> list[WindowNode]:
        """Return the refined node, or its halves."""
        window = node.window
        if window is None:
            return [replace(node, done=True)]
        lp = self.configuration(tree, node)
        size = float(tree.pricing.entries * window.number)
        if node.start is None and size <= PARAMETERS.max_window_entries:
            return [self._looked_at(lp, node, time_ns, tree.min_load)]
        if node.stale and node.start is not None:
            mixture, slope, _ = node.start
            return [replace(node, stale=False).better(lp.prove_load_bound(mixture, slope)[0], time_ns)]
        if window.fewest < window.number or any(window.open):
            windows = tree.split_window(window)
            if windows or node.start is None:
                return [WindowNode(half, node.bounds) for half in windows] or [replace(node, done=True)]
        if node.start is None:
            return [replace(node, done=True)]
        return [self._tried(lp, node, time_ns) or self._improved(lp, tree, node, time_ns, cutoff_load)]

    def _tried(self, lp: ConfigurationLP, node: WindowNode, time_ns: float) -> WindowNode | None:
        """Return the node with the mixture of another window of as many micro-batches, which saves most of an LP;
        None if that gains nothing."""
        mixture, slope = self.last_mixtures.get(lp.window.number, (None, 0.0))
        if mixture is None or mixture is node.tried_mixture or node.start is None or mixture is node.start[0]:
            return None
        moved = replace(mixture, window=lp.window)
        bound, rows = lp.prove_load_bound(moved, slope)
        if bound.within(time_ns) >= node.max_load(time_ns):
            return None
        return replace(node, bounds=(bound,), start=(moved, slope, rows), tried_mixture=mixture)

    def _improved(
        self, lp: ConfigurationLP, tree: WindowTree, node: WindowNode, time_ns: float, cutoff_load: float
    ) -> WindowNode:
        """Return the node with the bound of the LP."""
        assert node.start is not None
        mixture, slope, rows = node.start
        arguments = mixture, slope, rows, tree.columns, time_ns, cutoff_load
        bound, mixture, tree.columns = improved(lp, *arguments)
        self.last_mixtures[lp.window.number] = mixture, bound.slope
        # The cutoff may be lower for a longer time.
        solved = replace(node, start=(mixture, bound.slope, rows), done=bound.within(time_ns) > cutoff_load)
        return solved.better(bound, time_ns)

    def _looked_at(self, lp: ConfigurationLP, node: WindowNode, time_ns: float, min_load: float) -> WindowNode:
        """Return the node with the better bound of the divisible loads' mixture: by lines, or by contents."""
        stages = self.stages
        load = max(node.max_load(time_ns), min_load)
        mixture = best_mixture(self.rounded_stages, lp.num_stages, lp.window, load, min_load)
        line = mixture.bound(stages, load, min_load)
        bound, rows = lp.prove_load_bound(mixture, line.slope)
        started = replace(node, start=(mixture, line.slope, rows))
        return started.better(self.convert(line, stages.last), time_ns).better(bound, time_ns)


def halves(window: Window) -> tuple[Window, ...]:
    """Return two ranges of numbers of micro-batches; none if there is one number."""
    first, last = window.fewest, window.number
    middle = (first + last) // 2
    return (Window.of(first, middle), Window.of(middle + 1, last)) if first < last else ()


class ConfigurationBound:
    """Configuration bounds of a pipeline; ``done`` if nothing more can be gained."""

    def __init__(self, work_bound: PipelineWorkBound, pricing: MicroBatchPricing) -> None:
        """Start with the windows of the work bound.

        Args:
            work_bound: work bound; if it covers the whole workload, it has the term of the longest sequence
                (``PipelineWorkBound.with_longest``).
            pricing: pricing problem of the micro-batches.
        """
        self.work_bound, self.done, self.turn = work_bound, False, 0
        # Dual values of the sequences as work.
        self.duals = Duals.of(work_bound, pricing.items.counts)
        self.total, self.num_other_replicas = self.duals.total_load, work_bound.num_replicas - 1
        self.ordinary, self.with_longest = WindowTree(pricing, halves), WindowTree(pricing, halved)
        for count_range in work_bound.bound_near(work_bound.total_load).ranges:
            window = None if count_range.last is None else Window.of(count_range.first, count_range.last)
            self.ordinary.nodes.append(WindowNode(window, (count_range.bound,)))
        if work_bound.long_bounds:
            longest = PinnedItem(len(work_bound.sequence_loads) - 1)
            long_bound = max(work_bound.long_bounds, key=lambda bound: bound.at(work_bound.total_load))
            nodes = [WindowNode(box.window, box.bounds) for box in long_bound.boxes]
            self.with_longest = WindowTree(pricing, halved, longest, long_bound.alone, nodes)
        # Replicas with a micro-batch above a threshold, and the thresholds that remain.
        self.with_large: list[WindowTree] = []
        items, capacity = pricing.items, pricing.base.shape[-1]
        # Above nearly all of the capacity a threshold is of no use.
        longest_quanta = int(np.max(items.sizes[items.fits]))
        sizes = {int(longest_quanta * ratio) for ratio in (1.1, 1.3, 1.5, 2.0, 4.0)}
        self.large_thresholds = sorted(size for size in sizes if size < 0.9 * capacity)
        self.divided = False
        self.best_work_bound = work_bound

    @property
    def bound(self) -> LoadBound:
        """Bound of a replica by its work."""
        ranges = [_range(node) for node in self.ordinary.nodes]
        # The number of micro-batches around a large one does not limit the total number.
        ranges += [
            MicroBatchCountRange(1, None, bound)
            for tree in self.with_large
            for node in tree.nodes
            for bound in node.bounds
        ]
        return LoadBound(tuple(sorted(ranges, key=lambda count_range: count_range.first)))

    @property
    def loads(self) -> PipelineWorkBound:
        """The strongest work bound so far."""
        nodes = [*self.with_longest.nodes, *(node for tree in self.with_large for node in tree.nodes)]
        windows = [WindowBound(node.window, node.bounds, True) for node in nodes if node.window is not None]
        # For parts of the workload the original bounds may be stronger.
        bounds = (self.bound, *self.work_bound.bounds)
        long_bound = LongSequenceBound.of(self.with_longest.min_load, windows)
        long_bounds = (long_bound, *self.work_bound.long_bounds) if self.work_bound.long_bounds else ()
        bound = replace(self.work_bound, bounds=bounds, long_bounds=long_bounds)
        return max(bound, self.best_work_bound, key=lambda bound: bound.workload_bound_ns)

    def run(self, time_ns: float, deadline: Deadline) -> None:
        """Refine the loosest windows until no step fits within a replica's ``time_ns``, nothing more can be
        gained, or the ``deadline``."""
        self.branch_on_large(time_ns, self.work_bound.total_load)
        while not deadline.passed:
            loosest = [self._loosest(time_ns, tree) for tree in (self.with_longest, self.ordinary)]
            max_loads = [index.max_load(time_ns) for _, index in loosest]
            if max_loads[0] + self.num_other_replicas * max_loads[1] <= self.total:
                return
            open_indices = [
                index for index in ((0, 1) if self.num_other_replicas else (0,)) if not loosest[index][1].done
            ]
            if not open_indices:
                if not self.large_thresholds:
                    self.done = True
                    return
                # The next threshold of large micro-batches.
                self.best_work_bound, load = self.loads, self.work_bound.total_load
                threshold = self.large_thresholds.pop()
                around = self._around(threshold, load, time_ns)
                self._separate(threshold, around, (self.ordinary, self.with_longest))
                continue
            # New windows come first, then the two kinds take turns.
            self.turn += 1
            index = min(
                open_indices, key=lambda index: (loosest[index][1].start is not None, (index + self.turn) % 2)
            )
            cutoff_loads = (
                self.total - self.num_other_replicas * max_loads[1],
                (self.total - max_loads[0]) / max(1, self.num_other_replicas),
            )
            self.duals.refine(*loosest[index], time_ns, cutoff_loads[index])

    def _loosest(self, time_ns: float, tree: WindowTree) -> tuple[WindowTree, WindowNode]:
        """Return the loosest node of a tree or of the trees with a large micro-batch, with its tree."""
        pairs = [(other, node) for other in (tree, *self.with_large) for node in other.nodes]
        return max(pairs, key=lambda pair: pair[1].max_load(time_ns))

    def branch_on_large(self, time_ns: float, load: float) -> None:
        """Branch once on large micro-batches, at the smallest threshold above which divisible loads take too long
        for ``load`` within the time."""
        if self.divided:
            return
        self.divided = True
        first, end, bound_above = 0, len(self.large_thresholds), None
        while first < end:
            middle = (first + end) // 2
            around = self._around(self.large_thresholds[middle], load, time_ns)
            if around.at(load) < time_ns:
                first = middle + 1
            else:
                end, bound_above = middle, around
        if bound_above is not None:
            self._separate(self.large_thresholds[end], bound_above, (self.ordinary, self.with_longest))
            self.large_thresholds = self.large_thresholds[:end]

    def _around(self, threshold: int, load: float, time_ns: float) -> LongSequenceBound:
        """Return the bound for a load with a micro-batch of more than ``threshold`` quanta, up to a time."""
        return around_larger(self.lines, self.ordinary.pricing.items, threshold, load, time_ns)

    @property
    def lines(self) -> PipelineWorkBound:
        """Original work bound in the measure of its lines."""
        original, stage_ns = self.work_bound, self.work_bound.stages.last
        bound = replace(self.duals, sequence_loads=stage_ns).convert_bound(
            original.bound_near(original.total_load), original.sequence_loads * original.num_replicas
        )
        return replace(original, bounds=(bound,), sequence_loads=stage_ns / original.num_replicas)

    def _separate(self, threshold: int, around: LongSequenceBound, others: Sequence[WindowTree]) -> None:
        """Separate replicas with a micro-batch of more than ``threshold`` quanta from the trees ``others``."""
        pricing = self.ordinary.pricing
        windows = [self.duals.convert_window(window, self.work_bound.stages.last) for window in around.boxes]
        nodes = [WindowNode(window.window, window.bounds) for window in windows]
        self.with_large.append(WindowTree(pricing, halved, PinnedItem(quanta=threshold + 1), around.alone, nodes))
        for tree in others:
            tree.pricing = pricing.with_max_quanta(threshold)
            tree.nodes = [node.reset for node in tree.nodes]


def around_larger(
    work_bound: PipelineWorkBound, items: Items, quanta: int, load: float, time_ns: float
) -> LongSequenceBound:
    """Return the bound of a replica for a ``load`` with a micro-batch of more than ``quanta`` quanta, by lines, up
    to a time; ``work_bound`` is in the measure of its lines."""
    stages, bound = work_bound.stages, work_bound.bound_near(work_bound.total_load)
    min_load = float((stages.last[items.fits] / items.sizes[items.fits]).min()) * (quanta + 1)
    load, effort = max(load, min_load), PARAMETERS.large_programs
    return long_bound(stages, work_bound.num_stages, bound, min_load, load, time_ns, effort)


def _range(node: WindowNode) -> MicroBatchCountRange:
    """Convert a node to its range of micro-batch counts with its first bound."""
    window = node.window
    first, last = (MAX_MICRO_BATCHES, None) if window is None else (window.fewest, window.number)
    return MicroBatchCountRange(first, last, node.bounds[0])
