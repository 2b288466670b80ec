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

Windows are around the foremost sequence of the class.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import comb
from typing import Any

import numpy as np

from milpplan.lengths.bounds import Window
from milpplan.lengths.bounds.configuration_bound import ConfigurationBound, Duals, WindowNode, WindowTree
from milpplan.lengths.bounds.long_sequence import WindowBound, halved
from milpplan.lengths.bounds.micro_batch_pricing import MicroBatchPricing, PinnedItem
from milpplan.lengths.deadline import Deadline
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
# Relative slack that keeps float sums on the safe side of a replica's minimum work.
_SAFETY = 1.0 - 1e-6
_NONE = -np.inf

Classes = list[tuple[int, int]]
"""First length index of each class, and the index after its last one."""


Coverings = dict[int, tuple[tuple[WindowTree, ...], ...]]
"""By class: collections of trees, each of which covers all replicas of the class."""


@dataclass(eq=False)
class ReplicaClassBound:
    """Maximum work of a replica of each class."""

    duals: Duals
    """Values of the sequences as work."""
    coverings: Coverings
    """Trees by class."""
    min_loads: FloatArray
    """Minimum work of a replica of the class, [C]: that of its longest sequence."""
    above: FloatArray
    """Work of all sequences that are longer than those of the class, [C]."""
    num_visits: Counter[int] = field(default_factory=Counter)
    """Number of refinements by class."""

    @staticmethod
    def of(duals: Duals, classes: Classes, coverings: Coverings) -> ReplicaClassBound:
        """Build the bound from trees that cover the classes."""
        sequence_loads, counts = duals.sequence_loads, duals.counts
        min_load = [float(sequence_loads[first:end].min()) * _SAFETY for first, end in classes]
        above = [float(counts[end:] @ sequence_loads[end:]) for _, end in classes]
        return ReplicaClassBound(duals, coverings, np.array(min_load), np.array(above))

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
        self.class_bound = ReplicaClassBound.of(configuration_bound.duals, self.classes, coverings)
        self.assignments = ClassAssignments.of(len(self.classes), configuration_bound.num_other_replicas + 1)
        shares = [
            share * (configuration_bound.work_bound.num_stages - 1)
            for share in configuration_bound.work_bound.stages.shares
        ]
        self.min_replicas = MinReplicas.of(np.repeat(last, counts) * _SAFETY, (shares[0], shares[1]))

    def run(self, time_ns: float, deadline: Deadline) -> None:
        """Refine the loosest classes until ``time_ns`` is excluded, nothing more can be gained, or the
        ``deadline``.

        If a time cannot be excluded, shorter ones are tried.
        """
        while not deadline.passed and not self.done and self.bound_ns < time_ns:
            goal = time_ns if time_ns < self.failed_ns else (self.bound_ns + self.failed_ns) / 2
            closed = self._is_excluded(goal, deadline)
            if closed is None:
                break
            if not closed:
                self.failed_ns = goal
            self.bound_ns = max(self.bound_ns, goal if closed else self._excluded_ns())
            self.done = self.failed_ns <= self.bound_ns * _NEAR
        self.bound_ns = max(self.bound_ns, self._excluded_ns())

    def _is_excluded(self, time_ns: float, deadline: Deadline) -> bool | None:
        """Refine until a time is excluded (True), nothing more can be gained (False), or the deadline (None)."""
        has_min_replicas = self.assignments.has_min_replicas(self._min_replicas(time_ns))
        while not deadline.passed:
            excess = np.where(has_min_replicas, self._excess(time_ns), _NONE)
            loosest = int(excess.argmax())
            if excess[loosest] < 0.0:
                return True
            if not self._refine(self.assignments.numbers[loosest], time_ns, float(excess[loosest])):
                return False
        return None

    def is_feasible(self, time_ns: float) -> bool:
        """Return whether the replicas may do the workload within a time, by what is proved so far."""
        excess = self._excess(time_ns)
        return bool((excess[self.assignments.has_min_replicas(self._min_replicas(time_ns))] >= 0.0).any())

    def _excess(self, time_ns: float) -> FloatArray:
        """Return the excess of assignments over the workload, [m]."""
        bound = self.class_bound
        max_loads = np.array([bound.max_load(index, time_ns) for index in range(len(self.classes))])
        return self.assignments.excess_load(max_loads, bound.above, bound.duals.total_load)

    def _refine(self, assignment: IntArray, time_ns: float, excess: float) -> bool:
        """Refine a class of an assignment whose work is to fall by ``excess``; return whether that was
        possible."""
        bound = self.class_bound
        for index in bound.least_visited(assignment):
            for tree, node in bound.loosest_nodes(index, time_ns):
                if not node.done:
                    bound.num_visits[index] += 1
                    cutoff_load = max(0.0, node.max_load(time_ns) - excess / float(assignment[index]))
                    bound.duals.refine(tree, node, time_ns, cutoff_load)
                    return True
        return False

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
