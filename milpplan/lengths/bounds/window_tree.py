"""Trees over the numbers of micro-batches of a replica: nodes with bounds, and how the loosest node is refined.

A node begins with the bound of divisible loads. Then the mixture of that bound is evaluated for whole sequences
(``configuration_columns``), which may raise it; windows of several numbers are halved; where one number is left,
or one pair around a micro-batch, the configuration LP improves the mixture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from milpplan.groups.bounds.last_stage import LoadBound, best_mixture
from milpplan.groups.bounds.long_sequence import WindowBound
from milpplan.groups.bounds.path_mixtures import Mixture, StageLoads
from milpplan.groups.bounds.pipeline_bounds import PathBound, Window
from milpplan.lengths.bounds.configuration_columns import Columns, ConfigurationLP, Decisions, improved
from milpplan.lengths.bounds.micro_batch_pricing import MicroBatchPricing, PinnedItem
from milpplan.lengths.bounds.work_bounds import PipelineWorkBound
from milpplan.simulation.layout_columns import FloatArray, IntArray

# Maximum number of entries in the tables of a window.
_LARGEST = 4e8
# Number of stage mixes in programs of divisible loads.
_KINDS = 2


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
    decisions: Decisions = ()
    """Branching decisions on micro-batches behind the pinned one."""
    branch_candidate: int | None = None
    """Micro-batch whose pinned item is fractional in the LP."""

    def max_load(self, time_ns: float) -> float:
        """Return the maximum work within a time."""
        return max(bound.within(time_ns) for bound in self.bounds)

    @property
    def reset(self) -> WindowNode:
        """The node for changed contents or dual values."""
        return replace(self, stale=self.start is not None, done=False, branch_candidate=None)

    @property
    def children(self) -> list[WindowNode]:
        """Two children: the fractional micro-batch holds a pinned item, or does not."""
        assert self.branch_candidate is not None
        return [
            replace(self.reset, decisions=(*self.decisions, (self.branch_candidate, is_held)))
            for is_held in (True, False)
        ]

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
            work_bound.stages.with_kinds(_KINDS),
            work_bound.sequence_loads * work_bound.num_replicas,
        )
        return Duals(work_bound.stages, rounded, work_bound.num_stages, counts, sequence_loads)

    @property
    def total_load(self) -> float:
        """Work of the whole workload."""
        return float(self.counts @ self.sequence_loads)

    def with_loads(self, sequence_loads: FloatArray) -> Duals:
        """Return the measure with other dual values."""
        return replace(self, sequence_loads=sequence_loads, last_mixtures={})

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
        return ConfigurationLP(*arguments, node.window, tree.pinned_item, node.decisions)

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
        if node.start is None and size <= _LARGEST:
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
        is_done, branch_candidate = bound.within(time_ns) > cutoff_load, tree.columns.branch_candidate
        solved = replace(node, start=(mixture, bound.slope, rows), done=is_done, branch_candidate=branch_candidate)
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
