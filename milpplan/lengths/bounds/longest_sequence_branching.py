"""A pipeline's bound by branching on the longest sequence of every replica.

Whether D replicas can do a workload within a time Z is decided in ``configuration_bound`` by one replica with the
longest sequence and D - 1 others. But every replica has a longest sequence, around which stages wait, and not all
of the others have a short one: longer sequences are elsewhere. So replicas are divided into classes c by the
length of their longest sequence. A replica of class c does no more than V_c(Z), by windows around a micro-batch
with such a sequence and without longer ones. In descending order of their longest sequence replicas 1 to i - 1
hold all sequences that are longer than those of the class of replica i:

    V_c1 + ... + V_c(i-1) >= work of all classes above ci,        V_c1 + ... + V_cD >= work of all,

and they are at least as many as these sequences need. If no assignment of classes
(``ClassAssignments``) satisfies that, Z is too short.

**Dual values.** V_c counts the work that is done most cheaply, in all classes the same sequences. The inequalities
hold for any value of the sequences as work. So the windows that do most in the loosest assignment give a
restricted master problem for the values by which they do the smallest part of the workload
(``restricted_master_duals``), and assignments are checked with these values, too. Windows that then do most join
it.

**Second long sequence.** The LP divides the second long sequence of a replica among all its micro-batches, where
it makes no stage wait. So the window is around the foremost sequence of the class, and branches on whether the
micro-batch with the most fractional second one holds it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import comb
from typing import Any

import numpy as np

from milpplan.lengths.bounds import Window
from milpplan.lengths.bounds.configuration_bound import ConfigurationBound, Duals, WindowNode, WindowTree
from milpplan.lengths.bounds.configuration_columns import ClassWindow, restricted_master_duals
from milpplan.lengths.bounds.long_sequence import WindowBound, halved
from milpplan.lengths.bounds.micro_batch_pricing import MicroBatchPricing, PinnedItem
from milpplan.lengths.bounds.pipeline_bounds import PathBound
from milpplan.simulation import BoolArray, FloatArray, IntArray

# Number of sequences whose divisions are all enumerated, and number of lengths for bin packing bounds.
_EVERY, _THRESHOLDS = 9, 8


@dataclass(frozen=True, eq=False)
class MinReplicas:
    """Long sequences of a pipeline.

    A replica with several of them takes their time on the last stage, plus the first one's forward on the others
    before that, and the last one's backward after it: that is a path of its schedule (if both are in one
    micro-batch, it takes no less). So a set S of sequences that take y_s on the last stage, and shares f and b of
    that forward and backward on the others, takes together at least

        sum of S + min over a, b in S, a not b, of (f y_a + b y_b),

    and no less than any subset: short sequences at both ends do not save the path from one long one to another.
    """

    sizes: FloatArray
    """Times on the last stage in ns, ascending, [m]."""
    shares: tuple[float, float]
    """Shares of the other stages together (forward, backward)."""
    times: FloatArray
    """Minimum time in ns of the k longest on r replicas, [k, r]."""

    @staticmethod
    def of(sizes: FloatArray, shares: tuple[float, float]) -> MinReplicas:
        """Enumerate all divisions of the longest sequences."""
        longest = sizes[::-1][:_EVERY]
        return MinReplicas(sizes, shares, _least_times(longest, shares))

    def min_replicas(self, number: int, time_ns: float) -> int:
        """Return the minimum number of replicas for the ``number`` longest sequences within a time."""
        if number == 0:
            return 0
        longest = min(number, len(self.times) - 1)
        minimum = int(np.searchsorted(-self.times[longest], -time_ns)) + 1
        sizes = self.sizes[len(self.sizes) - number :]
        for threshold in np.unique(sizes)[-_THRESHOLDS:].tolist():
            large, shares = sizes[sizes >= threshold], sum(self.shares)
            is_alone = large + threshold * (1.0 + shares) + (large - threshold) * min(self.shares) > time_ns
            rest = large[~is_alone]
            minimum = max(minimum, int(is_alone.sum()) + fewest_bins(rest, time_ns - threshold * shares))
        return minimum


def _least_times(sizes: FloatArray, shares: tuple[float, float]) -> FloatArray:
    """Return the minimum time of the first k of ``sizes`` [m], descending, on r replicas, [m + 1, m]; descending
    in r."""
    num_sequences = len(sizes)
    sets = np.arange(1 << num_sequences)
    members = (sets[:, None] >> np.arange(num_sequences)) & 1 > 0
    single = _alone(sizes, members, shares)
    # By number of replicas: the minimum over the sets on the replica that holds the first of a set.
    min_times = single
    by_replicas = [min_times]
    for _ in range(num_sequences - 1):
        min_times = _split(single, min_times)
        by_replicas.append(min_times)
    prefixes = [(1 << k) - 1 for k in range(num_sequences + 1)]
    return np.stack(by_replicas, axis=1)[prefixes]


def _alone(sizes: FloatArray, members: BoolArray, shares: tuple[float, float]) -> FloatArray:
    """Return the minimum time of each set of ``members`` [s, m] on one replica, [s]; 0 for one sequence."""
    times = np.zeros(len(members))
    for index, mask in enumerate(members):
        own = sizes[mask]
        # Prefixes of the longest two, three, ...
        around = own[1:] * sum(shares) + (own[:-1] - own[1:]) * min(shares)
        times[index] = (np.cumsum(own)[1:] + around).max(initial=0.0)
    return times


def _split(single: FloatArray, others: FloatArray) -> FloatArray:
    """Return the minimum time of sets on one replica more than ``others`` [s]."""
    min_times = others.copy()
    for whole in range(1, len(single)):
        first = whole & -whole
        rest = part = whole ^ first
        while True:
            subset = first | part
            min_times[whole] = min(min_times[whole], max(single[subset], others[rest ^ part]))
            if part == 0:
                break
            part = (part - 1) & rest
    return min_times


def fewest_bins(sizes: FloatArray, capacity: float) -> int:
    """Return a lower bound of the number of bins of capacity ``capacity`` for ``sizes`` [m].

    For any threshold: sizes above the capacity less the threshold are alone; of those above half of the capacity
    no two are together; the excess of the smaller ones over the capacity that these leave has bins of its own.

    Source: Martello and Toth, Lower bounds and reduction procedures for the bin packing problem (1990).
    """
    if not len(sizes) or np.isinf(capacity):
        return min(1, len(sizes))
    max_bound = 1
    for threshold in [0.0, *np.unique(sizes[sizes <= capacity / 2]).tolist()]:
        is_alone = sizes > capacity - threshold
        large, small = (sizes > capacity / 2) & ~is_alone, (sizes >= threshold) & (sizes <= capacity / 2)
        excess = float(sizes[small].sum()) - (large.sum() * capacity - float(sizes[large].sum()))
        number = int(is_alone.sum() + large.sum())
        max_bound = max(max_bound, number + (int(np.ceil(excess / capacity - 1e-9)) if excess > 0.0 else 0))
    return max_bound


MAX_ASSIGNMENTS = 20_000
"""Limit on the number of assignments, beyond which the check is too slow."""

# Shares of the longest sequence's work at which classes begin: around shorter ones stages wait no longer.
_EDGES = (0.55, 0.7, 0.8, 0.9)
# Number of programs of divisible loads for a class.
_EFFORT = 30
# Number of halvings of the bound's interval, and the factor between the first trial times.
_HALVINGS, _LONGER = 14, 1.01
# Ratio of the smallest failed time to the bound at which the search ends.
_NEAR = 1.002
# Maximum number of branching decisions on a window.
_MOST_TOLD = 12
# Relative slack that keeps float sums on the safe side of a replica's minimum work.
_SAFETY = 1.0 - 1e-6
_NONE = -np.inf
# Window for more than 63 micro-batches on either side of the longest; bounded by the last stage's work only.
_MANY = Window((0, 0), (63, 63), (False, True))
# Seconds per search of dual values, number of searches, and the minimum ratio of a value to the one before.
_ASK_S, _ASKED, _LEAST_WORTH = 4.0, 12, 0.5

Classes = list[tuple[int, int]]
"""First length index of each class, and the index after its last one."""


Coverings = dict[int, tuple[tuple[WindowTree, ...], ...]]
"""By class: collections of trees, each of which covers all replicas of the class."""


@dataclass(eq=False)
class ReplicaClassBound:
    """Maximum work of a replica of each class, in one measure of the sequences."""

    duals: Duals
    """Values of the sequences as work."""
    coverings: Coverings
    """Trees by class."""
    min_loads: FloatArray
    """Minimum work of a replica of the class, [C]: that of its longest sequence."""
    above: FloatArray
    """Work of all sequences that are longer than those of the class, [C]."""
    windows: tuple[ClassWindow, ...] = ()
    """Windows of the restricted master that gave the values."""
    num_visits: Counter[int] = field(default_factory=Counter)
    """Number of refinements by class."""

    @staticmethod
    def of(
        duals: Duals, classes: Classes, coverings: Coverings, windows: tuple[ClassWindow, ...] = ()
    ) -> ReplicaClassBound:
        """Build the bound in a measure of the sequences."""
        sequence_loads, counts = duals.sequence_loads, duals.counts
        min_load = [float(sequence_loads[first:end].min()) * _SAFETY for first, end in classes]
        above = [float(counts[end:] @ sequence_loads[end:]) for _, end in classes]
        return ReplicaClassBound(duals, coverings, np.array(min_load), np.array(above), windows)

    def loosest_nodes(self, index: int, time_ns: float) -> list[tuple[WindowTree, WindowNode]]:
        """Return the loosest node of a class within a time, by every covering, the tightest covering first."""
        pairs = [[(tree, tree.loosest(time_ns)) for tree in covering] for covering in self.coverings[index]]
        loosest = [max(covering, key=lambda pair: pair[1].max_load(time_ns)) for covering in pairs]
        return sorted(loosest, key=lambda pair: pair[1].max_load(time_ns))

    def least_visited(self, assignment: IntArray | FloatArray) -> list[int]:
        """Return the classes of an assignment, first those with more replicas and fewer visits."""
        return sorted(
            np.flatnonzero(assignment).tolist(),
            key=lambda index: float(self.num_visits[index] / assignment[index]),
        )

    def max_load(self, index: int, time_ns: float) -> float:
        """Return the maximum work of a replica of a class within a time; ``-inf`` if there is no such replica."""
        load = self.loosest_nodes(index, time_ns)[0][1].max_load(time_ns)
        return load if load >= self.min_loads[index] else _NONE

    def with_duals(self, duals: Duals, classes: Classes, windows: tuple[ClassWindow, ...]) -> ReplicaClassBound:
        """Return the bound in another measure, with the mixtures of some ``windows``."""
        trees = {
            tree for covering_sets in self.coverings.values() for covering in covering_sets for tree in covering
        }
        copy_of = {tree: copy_in_measure(tree, duals, self.duals) for tree in trees}
        covering_sets = {
            index: tuple(tuple(copy_of[tree] for tree in covering) for covering in old_coverings)
            for index, old_coverings in self.coverings.items()
        }
        for window in windows:
            begin({tree for covering in covering_sets[window.length_class] for tree in covering}, window)
        return ReplicaClassBound.of(duals, classes, covering_sets, windows)


class LongestSequenceBranching:
    """Bounds of a pipeline of several replicas; ``done`` if nothing more can be gained."""

    def __init__(self, configuration_bound: ConfigurationBound, time_ns: float) -> None:
        """Divide the replicas into classes.

        Args:
            configuration_bound: configuration bound, which no longer changes.
            time_ns: approximate time of a replica.
        """
        self.configuration_bound, self.done, self.bound_ns = (
            configuration_bound,
            False,
            configuration_bound.loads.workload_bound_ns,
        )
        # The shortest time that could not be excluded.
        self.failed_ns = np.inf
        last, counts = configuration_bound.work_bound.stages.last, configuration_bound.duals.counts
        # Number of lengths up to the longest fitting one.
        num_fitting = int(np.flatnonzero(configuration_bound.full_pricing.items.fits)[-1]) + 1
        edges = list(_EDGES)
        while (
            ClassAssignments.num_assignments(len(edges) + 2, configuration_bound.num_other_replicas + 1)
            > MAX_ASSIGNMENTS
        ):
            edges.pop()
        starts = {int(np.searchsorted(last[:num_fitting], edge * last[num_fitting - 1])) for edge in edges} | {
            0,
            num_fitting - 1,
        }
        firsts = sorted(starts)
        self.classes: Classes = list(zip(firsts, [*firsts[1:], num_fitting], strict=True))
        coverings = {
            index: self._coverings(first, end, time_ns) for index, (first, end) in enumerate(self.classes)
        }
        # Bounds in the measure of the configuration bound and in others; searches of dual values by time, measure
        # and assignment.
        self.class_bounds = [ReplicaClassBound.of(configuration_bound.duals, self.classes, coverings)]
        self.asked: set[tuple[float, int, bytes]] = set()
        self.assignments = ClassAssignments.of(len(self.classes), configuration_bound.num_other_replicas + 1)
        shares = [
            share * (configuration_bound.work_bound.num_stages - 1)
            for share in configuration_bound.work_bound.stages.shares
        ]
        self.min_replicas = MinReplicas.of(np.repeat(last, counts) * _SAFETY, (shares[0], shares[1]))

    def run(self, time_ns: float, deadline: float) -> None:
        """Refine the loosest classes until ``time_ns`` is excluded, nothing more can be gained, or the
        ``deadline`` (of ``perf_counter``).

        If a time cannot be excluded, shorter ones are tried.
        """
        while time.perf_counter() < deadline and not self.done and self.bound_ns < time_ns:
            goal = time_ns if time_ns < self.failed_ns else (self.bound_ns + self.failed_ns) / 2
            closed = self._is_excluded(goal, deadline)
            if closed is None:
                break
            if not closed:
                self.failed_ns = goal
            self.bound_ns = max(self.bound_ns, goal if closed else self._excluded_ns())
            self.done = self.failed_ns <= self.bound_ns * _NEAR
        self.bound_ns = max(self.bound_ns, self._excluded_ns())

    def _is_excluded(self, time_ns: float, deadline: float) -> bool | None:
        """Refine until a time is excluded (True), nothing more can be gained (False), or the deadline (None)."""
        has_min_replicas = self.assignments.has_min_replicas(self._min_replicas(time_ns))
        while time.perf_counter() < deadline:
            excess = self._excesses(time_ns)
            max_excess = np.where(has_min_replicas, excess.min(axis=0), _NONE)
            loosest = int(max_excess.argmax())
            if max_excess[loosest] < 0.0:
                return True
            if not self._refine(self.assignments.numbers[loosest], excess[:, loosest], time_ns):
                return False
        return None

    def is_feasible(self, time_ns: float) -> bool:
        """Return whether the replicas may do the workload within a time, by what is proved so far."""
        excess = self._excesses(time_ns).min(axis=0)
        return bool((excess[self.assignments.has_min_replicas(self._min_replicas(time_ns))] >= 0.0).any())

    def _excesses(self, time_ns: float) -> FloatArray:
        """Return the excess of assignments over the workload by every measure, [w, m]."""
        excesses = []
        for class_bound in self.class_bounds:
            max_loads = np.array([class_bound.max_load(index, time_ns) for index in range(len(self.classes))])
            excesses.append(
                self.assignments.excess_load(max_loads, class_bound.above, class_bound.duals.total_load)
            )
        return np.array(excesses)

    def _refine(self, assignment: IntArray, excess: FloatArray, time_ns: float) -> bool:
        """Refine the classes of an assignment with these excesses by measure [w]; return whether that was
        possible."""
        # The tightest measure first.
        for measure in np.argsort(excess, kind="stable").tolist():
            if self.refine_class(self.class_bounds[measure], assignment, time_ns, float(excess[measure])):
                return True
        measure = int(excess.argmin())
        key = time_ns, measure, assignment.tobytes()
        # Dual values are sought once at first, and again when branching is exhausted.
        if not self.asked and self._seek_duals(key, assignment):
            return True
        return (
            self._branch_on_pinned(assignment, excess, time_ns)
            or self._seek_duals(key, assignment)
            or self._branch_on_smaller(time_ns)
        )

    def _seek_duals(self, key: tuple[float, int, bytes], assignment: IntArray) -> bool:
        """Seek dual values for the whole workload, a few times, and once for an assignment."""
        if key in self.asked or len(self.asked) >= _ASKED:
            return False
        self.asked.add(key)
        wanted = self.configuration_bound.duals.counts.astype(np.float64)
        return self.add_duals(self.class_bounds[key[1]], assignment, wanted, key[0], _ASK_S)

    def _branch_on_pinned(self, assignment: IntArray, excess: FloatArray, time_ns: float) -> bool:
        """Branch a class of an assignment on whether one more micro-batch holds one of its longest sequences;
        return whether a branch was made."""
        for measure in np.argsort(excess, kind="stable").tolist():
            class_bound = self.class_bounds[measure]
            for index in class_bound.least_visited(assignment):
                for tree, node in class_bound.loosest_nodes(index, time_ns):
                    if node.branch_candidate is not None and len(node.decisions) < _MOST_TOLD:
                        tree.replace_node(node, node.children)
                        return True
        return False

    def refine_class(
        self, class_bound: ReplicaClassBound, assignment: IntArray | FloatArray, time_ns: float, excess: float
    ) -> bool:
        """Refine a class of an assignment whose work is to fall by ``excess``; return whether that was
        possible."""
        for index in class_bound.least_visited(assignment):
            for tree, node in class_bound.loosest_nodes(index, time_ns):
                if not node.done:
                    class_bound.num_visits[index] += 1
                    cutoff_load = max(0.0, node.max_load(time_ns) - excess / float(assignment[index]))
                    class_bound.duals.refine(tree, node, time_ns, cutoff_load)
                    return True
        return False

    def _branch_on_smaller(self, time_ns: float) -> bool:
        """Branch the class of the shortest sequences on its largest micro-batch; return whether a branch was
        made."""
        base, configuration_bound = self.class_bounds[0], self.configuration_bound
        if not configuration_bound.branch_on_smaller(time_ns):
            return False
        base.coverings[0] = ((configuration_bound.ordinary, *configuration_bound.with_large),)
        for class_bound in self.class_bounds[1:]:
            ((ordinary, *with_large),) = class_bound.coverings[0]
            nodes = [node.reset for node in ordinary.nodes]
            ordinary = replace(ordinary, pricing=configuration_bound.ordinary.pricing, nodes=nodes)
            class_bound.coverings[0] = (
                (
                    ordinary,
                    *with_large,
                    copy_in_measure(configuration_bound.with_large[-1], class_bound.duals, base.duals),
                ),
            )
        return True

    def add_duals(
        self,
        base: ReplicaClassBound,
        assignment: IntArray | FloatArray,
        needed: FloatArray,
        time_ns: float,
        seconds: float,
    ) -> bool:
        """Seek dual values by which an assignment does the smallest part of ``needed`` [n] within a time; return
        whether they improve on those of ``base``."""
        duals, windows = base.duals, self.windows(base, assignment, time_ns)
        if windows is None:
            return False
        solution = restricted_master_duals(
            windows, assignment, needed, duals.sequence_loads, time_ns, time.perf_counter() + seconds
        )
        if solution is None:
            return False
        values = np.maximum(solution[0], _LEAST_WORTH * duals.sequence_loads)
        scale = duals.total_load / float(duals.counts @ values)
        started = tuple(replace(window, flow=window.flow * scale) for window in solution[1])
        self.class_bounds.append(base.with_duals(duals.with_loads(scale * values), self.classes, started))
        return True

    def windows(
        self, base: ReplicaClassBound, assignment: IntArray | FloatArray, time_ns: float
    ) -> tuple[ClassWindow, ...] | None:
        """Return the windows of an assignment's classes for the restricted master: those of ``base``, and those
        that do most within a time; None if one has no mixture yet."""
        present = np.flatnonzero(assignment).tolist()
        windows = [window for window in base.windows if window.length_class in present]
        keys = {
            (
                window.length_class,
                window.configuration.window,
                window.configuration.pinned_item,
                window.configuration.decisions,
            )
            for window in windows
        }
        for index in present:
            tree, node = base.loosest_nodes(index, time_ns)[0]
            if node.window is None or node.start is None:
                return None
            mixture, slope, rows = node.start
            if (index, node.window, tree.pinned_item, node.decisions) not in keys:
                configuration = base.duals.configuration(tree, node)
                windows.append(ClassWindow(index, configuration, mixture, 1.0 / slope, rows, tree.columns))
        return tuple(windows)

    def _min_replicas(self, time_ns: float) -> IntArray:
        """Return the minimum number of replicas for the sequences longer than each class."""
        counts = self.configuration_bound.duals.counts
        num_longer = [int(counts[end:].sum()) for _, end in self.classes]
        return np.array([self.min_replicas.min_replicas(number, time_ns) for number in num_longer])

    def _excluded_ns(self) -> float:
        """Return the longest time that is excluded by what is proved so far, by bisection, ns."""
        low = high = self.bound_ns
        while not self.is_feasible(high):
            low, high = high, high * _LONGER
        for _ in range(_HALVINGS if low < high else 0):
            middle = (low + high) / 2
            low, high = (low, middle) if self.is_feasible(middle) else (middle, high)
        return low

    def _started_nodes(self, window: WindowBound) -> list[WindowNode]:
        """Return the nodes of a window, with the mixtures found around the longest sequence."""
        contained = [
            node
            for node in self.configuration_bound.with_longest.nodes
            if node.window and _inside(node.window, window.window)
        ]
        nodes = [replace(node, bounds=window.bounds).reset for node in contained]
        return nodes or [WindowNode(window.window, window.bounds)]

    def _coverings(self, first: int, end: int, time_ns: float) -> tuple[tuple[WindowTree, ...], ...]:
        """Return the coverings of replicas whose longest sequence has index ``first`` to ``end`` - 1.

        One tree covers all; a second covering separates those with a large micro-batch if these do less. The class
        of the shortest sequences has the trees of any replica.
        """
        configuration_bound = self.configuration_bound
        if not first:
            return ((configuration_bound.ordinary, *configuration_bound.with_large),)
        around = configuration_bound.lines.around_long_sequence(
            first, configuration_bound.work_bound.total_load, _EFFORT
        )
        windows = [
            configuration_bound.duals.convert_window(window, configuration_bound.work_bound.stages.last)
            for window in around.boxes
        ]
        nodes = [node for window in windows for node in self._started_nodes(window)]
        tree = WindowTree(
            shorter(configuration_bound.full_pricing, end),
            halved,
            PinnedItem(first, foremost=True),
            around.alone,
            nodes,
        )
        max_large = max(
            (tree.loosest(time_ns).max_load(time_ns) for tree in configuration_bound.with_large), default=np.inf
        )
        if max_large >= tree.loosest(time_ns).max_load(time_ns):
            return ((tree,),)
        return (tree,), (
            replace(tree, pricing=shorter(configuration_bound.ordinary.pricing, end)),
            *configuration_bound.with_large,
        )


def begin(trees: Iterable[WindowTree], window: ClassWindow) -> None:
    """Start the nodes of a window in some trees with its mixture."""
    start = window.mixture, 1.0 / window.flow, window.rows
    for tree in [tree for tree in trees if tree.pinned_item == window.configuration.pinned_item]:
        key = window.configuration.window, window.configuration.decisions
        for node in [node for node in tree.nodes if (node.window, node.decisions) == key]:
            tree.replace_node(node, [replace(node, start=start, stale=True)])


def copy_in_measure(tree: WindowTree, measure: Duals, earlier: Duals) -> WindowTree:
    """Return a tree in another measure than ``before``."""
    # No value has grown by more.
    max_ratio = float((measure.sequence_loads / earlier.sequence_loads).max())
    nodes = [
        replace(
            node,
            window=node.window or _MANY,
            bounds=tuple(PathBound(bound.constant, bound.slope / max_ratio) for bound in node.bounds),
        ).reset
        for node in tree.nodes
    ]
    return replace(tree, nodes=nodes)


def _inside(window: Window, other: Window) -> bool:
    """Return whether all numbers of micro-batches of a window belong to another."""
    pairs = zip((window.ahead, window.behind), (other.ahead, other.behind), window.open, other.open, strict=True)
    return all(
        first >= other_first and (other_open or (last <= other_last and not is_open))
        for (first, last), (other_first, other_last), is_open, other_open in pairs
    )


def shorter(pricing: MicroBatchPricing, end: int) -> MicroBatchPricing:
    """Return the pricing problem without sequences of length index ``end`` or longer."""
    fits = pricing.items.fits & (np.arange(len(pricing.items.fits)) < end)
    return replace(pricing, items=replace(pricing.items, fits=fits))


@dataclass(frozen=True, eq=False)
class ClassAssignments:
    """All assignments of classes to the replicas of a pipeline.

    ``numbers`` [m, C] of replicas by class, at least one of the last; ``before`` [m, C] of longer classes. In
    descending order of their longest sequence the replicas before one hold all sequences longer than those of its
    class. An assignment is excluded if they do less than that, if they are fewer than these sequences need, or if
    all together do less than the workload.
    """

    numbers: IntArray
    before: IntArray

    @staticmethod
    def num_assignments(num_classes: int, num_replicas: int) -> int:
        """Return the number of assignments."""
        return comb(num_replicas + num_classes - 2, num_classes - 1)

    @staticmethod
    def of(num_classes: int, num_replicas: int) -> ClassAssignments:
        """List all assignments of ``num_replicas`` replicas to ``num_classes`` classes."""
        bars = num_replicas + num_classes - 2
        chosen = list(combinations(range(bars), num_classes - 1))
        positions = np.array(chosen, dtype=np.int64).reshape(len(chosen), num_classes - 1)
        ends = np.concatenate(
            [np.full((len(positions), 1), -1), positions, np.full((len(positions), 1), bars)], axis=1
        )
        numbers = np.diff(ends, axis=1) - 1
        numbers[:, -1] += 1
        return ClassAssignments(numbers, _longer(numbers))

    def has_min_replicas(self, fewest: IntArray) -> BoolArray:
        """Return where the replicas of longer classes are at least ``fewest`` [C], [m]."""
        return np.asarray(((self.before >= fewest) | (self.numbers == 0)).all(axis=1))

    def excess_load(self, max_loads: FloatArray, above: FloatArray, total: float) -> FloatArray:
        """Return the excess over ``total`` of replicas that do ``left`` [C] by class, [m].

        ``-inf`` if the replicas before a class do less than ``above`` [C], or a class in use cannot exist.
        """
        # No replicas do nothing, even if the maximum of one is infinite.
        loads = np.zeros(self.numbers.shape)
        np.multiply(self.numbers, np.maximum(max_loads, 0.0), out=loads, where=self.numbers > 0)
        is_possible = ((_longer(loads) >= above) & (max_loads >= 0.0)) | (self.numbers == 0)
        return np.where(is_possible.all(axis=1), loads.sum(axis=1) - total, -np.inf)


def _longer(values: Any) -> Any:
    """Return sums over all later columns."""
    sums = values[:, ::-1].cumsum(axis=1)[:, ::-1]
    return np.concatenate([sums[:, 1:], np.zeros_like(sums[:, :1])], axis=1)
