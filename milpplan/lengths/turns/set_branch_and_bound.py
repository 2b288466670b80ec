"""Branch and bound for one set of strategies, with inequalities of their replicas (``replica_inequalities``).

**Nodes.** The group of one strategy, the *leader*, takes between z_0 and z_1, and the longest sequence that the
others hold together is one of lengths number m_0 to m_1 - 1, or they hold nothing. So the leader holds all longer
sequences, each of its replicas has z_1, and

    step >= z_0 + min sum of the others' times + fixed cost,

as a linear program over what every class of replicas and every other strategy holds (x), numbers of replicas n_c,
and the times Z_s of the others:

    sum_c x_cl + sum_s x_sl >= n_l,        rows of a class @ x_c <= n_c,       x_c of the class's lengths >= n_c,
    sum_c n_c <= D,        n_c of all classes from one on >= as many as these sequences need,
    Z_s >= its linear bounds,        sum_s Z_s >= the latency of a sequence of length m_0.

Pipelines among the others have the chord of their bound up to what they do in the time that a step below the
target leaves them, or between two shares of the whole work. Part of the workload may be left out at a high cost,
so that every program has a solution. The value is computed from its dual values with every variable between its
bounds, so nothing rests on the solver.

The bounds of the leader count in full, those of the others little. So the leader is the strategy that takes half
of the target or more, whichever that is; or all take less.

**Branch and bound.** The node with the lowest value is next. It is cut in two if that may raise it enough: in the
leader's time, in the lengths that others hold, or in their work. Else inequalities are derived that cut off the
program's assignment to the leader.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from milpplan.lengths.bounds.work_bounds import LinearBounds, PipelineWorkBound
from milpplan.lengths.heterogeneous.capacity_rows import ReplicaClass
from milpplan.lengths.turns.node_lp import NodeLP
from milpplan.lengths.turns.replica_inequalities import ReplicaInequalities
from milpplan.simulation.layout_columns import FloatArray, IntArray

# Inequalities are derived if times in a node differ by at most the first share of the target; nodes are cut no
# further than the second.
_COARSE, _NARROW = 6e-3, 1e-3
# Relative gain of a derivation that counts; fruitless derivations before a node is cut.
_GAIN, _FAILED = 1e-6, 2
# Seconds of one derivation.
_LEARN_S = 1.0
# Cost of leaving out the whole workload, in targets.
_MISSING = 10.0
# Factor that keeps the lower end of a range of shares below the upper end; minimum distance of a cut from the
# ends.
_BELOW, _CLOSE = 1.0 - 1e-9, 0.005
# Factor that covers the rounding of float sums.
_SAFETY = 1.0 - 1e-7


@dataclass(frozen=True, eq=False)
class Participant:
    """A strategy of a set."""

    bounds: LinearBounds
    """Linear bounds of its groups."""
    latency_ns: FloatArray
    """Minimum time of a sequence of each length, [n]."""
    inequalities: Callable[[], ReplicaInequalities]
    """Gives the inequalities of its replicas."""
    work_bounds: tuple[PipelineWorkBound, ...] = ()
    """Work bounds, for pipelines."""
    open_loads: tuple[FloatArray, float, float] | None = None
    """Work that a sequence adds [n], and the minimum and maximum work of steps that may beat the target."""

    def bounds_between(self, time_ns: float, shares: tuple[float, float]) -> LinearBounds:
        """Return bounds of groups within ``time_ns`` that hold between two shares of the whole workload's work."""
        bounds, fits = self.bounds, np.isfinite(self.bounds.shares[0])
        for work_bound in self.work_bounds:
            # All measures weigh every sequence about equally.
            ratios = (
                (work_bound.sequence_loads / self.work_bounds[0].sequence_loads)[fits]
                * self.work_bounds[0].total_load
                / work_bound.total_load
            )
            max_loads = [
                max(count_range.bound.within(time_ns) for count_range in bound.ranges)
                for bound in work_bound.bounds
            ]
            high = min(1.0, shares[1] * float(ratios.max()), min(max_loads) / work_bound.total_load)
            if high > 0.0:
                # If they cannot do the minimum share, the program leaves something out.
                bounds = work_bound.chords_between(
                    bounds, min(shares[0] * float(ratios.min()), high * _BELOW), high
                )
        return bounds

    def share(self, counts: FloatArray) -> float:
        """Return the share of the whole workload's work."""
        return float(self.work_bounds[0].sequence_loads @ counts) / self.work_bounds[0].total_load

    def least_ns(self, counts: FloatArray) -> float:
        """Return the minimum time of ``counts`` [n] sequences."""
        return max(
            [
                self.bounds.at(counts),
                *(work_bound.at(float(work_bound.sequence_loads @ counts)) for work_bound in self.work_bounds),
            ]
        )


@dataclass(order=True)
class SetNode:
    """A node: its value in ns with the fixed cost, and its restrictions."""

    value_ns: float
    leader: int = field(compare=False)
    """Index of the leader."""
    low: float = field(compare=False)
    """Minimum time of the leader."""
    high: float = field(compare=False)
    """Maximum time of the leader."""
    max_other_ns: float = field(compare=False)
    """Maximum time of each other strategy."""
    first: int = field(compare=False)
    """First length index of the longest sequence that others hold; -1: or they hold nothing."""
    end: int = field(compare=False)
    """Length index after the last."""
    shares: tuple[float, float] = field(compare=False, default=(0.0, 1.0))
    """Range of the only other pipeline's share of the whole work."""
    replicas: list[tuple[ReplicaClass, float, FloatArray]] = field(compare=False, default_factory=list)
    """Solution: class, number of replicas, and what they hold together [n]."""
    bend: tuple[float, float] = field(compare=False, default=(0.0, 0.0))
    """Share at which the chord is too low, and by how much in ns."""
    failed: int = field(compare=False, default=0)
    """Fruitless derivations in a row."""
    done: bool = field(compare=False, default=False)
    """True if nothing more can be gained."""


class SetBranchAndBound:
    """Branch and bound over one set of ``participants``."""

    def __init__(self, participants: Sequence[Participant], fixed_cost_ns: float, target_ns: float) -> None:
        self.participants, self.fixed_cost_ns, self.target_ns = participants, fixed_cost_ns, target_ns
        # By leader: the minimum latency under any other strategy of a sequence of each length or longer, [n].
        self.passages = []
        for leader in range(len(participants)):
            latency_ns = np.min(
                [participant.latency_ns for index, participant in enumerate(participants) if index != leader],
                axis=0,
            )
            self.passages.append(np.minimum.accumulate(latency_ns[::-1])[::-1])
        all_ns = target_ns - fixed_cost_ns
        nodes = [self._root(leader, (all_ns / 2, all_ns), all_ns / 2) for leader in range(len(participants))]
        nodes.append(self._root(0, (0.0, all_ns / 2), all_ns / 2))
        self.nodes = [self._solved(participant) for participant in nodes]
        heapq.heapify(self.nodes)

    @property
    def bound_ns(self) -> float:
        """Lower bound of all steps of the set, at most the target."""
        return min(self.target_ns, self.nodes[0].value_ns)

    def splits(self) -> list[IntArray]:
        """Return how open nodes of a pair of strategies divide the sequences, [q, n] each.

        They are the nodes of lowest value with the shortest, middle and longest times of the leader; empty for
        more strategies.
        """
        open_ = sorted((node for node in self.nodes if node.value_ns < self.target_ns and node.replicas), key=_low)
        if len(self.participants) != 2:
            return []
        thirds = [open_[len(open_) * third // 3 : len(open_) * (third + 1) // 3] for third in range(3)]
        return [self._split(min(node)) for node in thirds if node]

    def _split(self, node: SetNode) -> IntArray:
        """Return the division of a node in whole numbers."""
        counts = self.participants[node.leader].inequalities().pool.load.counts
        rounded = np.minimum(
            np.rint(np.sum([held for _, _, held in node.replicas], axis=0)).astype(np.int64), counts
        )
        return np.array([counts - rounded, rounded] if node.leader else [rounded, counts - rounded])

    def run(self, deadline: float, *, learns: bool = True) -> bool:
        """Cut nodes and derive inequalities; return False if nothing more can be gained.

        Stops at the target or at the ``deadline`` (of ``perf_counter``). Without ``learns`` nodes are only cut, as
        long as that may suffice.
        """
        while self.nodes[0].value_ns < self.target_ns and time.perf_counter() < deadline:
            lowest = self.nodes[0]
            if lowest.done:
                return False
            width = max(lowest.high - lowest.low, self._spread(lowest), lowest.bend[1])
            narrow = width <= _COARSE * self.target_ns and lowest.failed < _FAILED
            if narrow and lowest.value_ns + width < self.target_ns:
                if not learns:
                    return True
                is_cut_off = self._derive(lowest, deadline)
                solved = self._solved(lowest)
                has_gained = is_cut_off and solved.value_ns > lowest.value_ns * (1.0 + _GAIN)
                solved.failed = 0 if has_gained else lowest.failed + 1 if is_cut_off else _FAILED
                heapq.heapreplace(self.nodes, solved)
            elif width > _NARROW * self.target_ns:
                first, second = map(self._solved, self._cut(lowest))
                heapq.heapreplace(self.nodes, first)
                heapq.heappush(self.nodes, second)
            else:
                lowest.done = True
        return True

    def _root(self, leader: int, times: tuple[float, float], max_other_ns: float) -> SetNode:
        """Return the root node for a leader and the times of the groups."""
        others = [participant for index, participant in enumerate(self.participants) if index != leader]
        fits = np.any([np.isfinite(participant.bounds.shares[0]) for participant in others], axis=0)
        end = int(np.flatnonzero(fits)[-1]) + 1 if fits.any() else 0
        return SetNode(0.0, leader, *times, max_other_ns, -1, end)

    def _derive(self, node: SetNode, deadline: float) -> bool:
        """Derive inequalities of the leader at a node's solution; return whether it is cut off."""
        end = min(deadline, time.perf_counter() + _LEARN_S)
        return self.participants[node.leader].inequalities().learn(node.high, node.replicas, end)

    def _latency_ns(self, node: SetNode, length: int) -> float:
        """Return the minimum latency under the others of a sequence of length index ``length`` or longer."""
        return float(self.passages[node.leader][length]) if length >= 0 else 0.0

    def _spread(self, node: SetNode) -> float:
        """Return by how much the latency of what others hold may exceed the time that they take."""
        taken = max(self._latency_ns(node, node.first), node.value_ns - node.low - self.fixed_cost_ns)
        last = min(self.target_ns, self._latency_ns(node, node.end - 1))
        return last - taken if node.end - node.first > 1 else 0.0

    def _cut(self, node: SetNode) -> list[SetNode]:
        """Return two halves of a node."""
        node = replace(node, replicas=[], failed=0)
        if node.bend[1] > max(node.high - node.low, self._spread(node)):
            ends = (node.shares[0], node.bend[0]), (node.bend[0], node.shares[1])
            return [replace(node, shares=share_range, bend=(0.0, 0.0)) for share_range in ends]
        if self._spread(node) < node.high - node.low:
            middle = (node.low + node.high) / 2
            return [replace(node, high=middle), replace(node, low=middle)]
        half = (self._latency_ns(node, node.first) + min(self.target_ns, self._latency_ns(node, node.end - 1))) / 2
        middle_length = int(
            np.clip(np.searchsorted(self.passages[node.leader], half), node.first + 1, node.end - 1)
        )
        return [replace(node, end=middle_length), replace(node, first=middle_length)]

    def _solved(self, node: SetNode) -> SetNode:
        """Solve a node's program and return the node with its value, at most the target."""
        other_ns = min(node.max_other_ns, self.target_ns - self.fixed_cost_ns - node.low)
        if self._latency_ns(node, node.first) >= other_ns:
            return replace(node, value_ns=max(node.value_ns, self.target_ns))
        group = self.participants[node.leader].inequalities()
        counts, classes = group.pool.load.counts, group.replica_classes(node.high)
        # The leader holds all sequences from the node's end on.
        ranges = [used.replica_class.longest_range for used in classes]
        firsts = {longest[0] for longest in ranges if longest} | {node.end}
        needs = {
            first: group.min_replicas(first, node.high) for first in firsts if node.end <= first < len(counts)
        }
        if max(needs.values(), default=0) > group.num_replicas:
            return replace(node, value_ns=max(node.value_ns, self.target_ns))
        program = NodeLP(counts, other_ns, _MISSING * self.target_ns / other_ns)
        program.open(program.lead(classes, group.num_replicas, needs), self.participants[node.leader].open_loads)
        others = [other for index, other in enumerate(self.participants) if index != node.leader]
        takes = [program.take(other.bounds_between(other_ns, node.shares), node.end) for other in others]
        for taken, other in zip(takes, others, strict=True):
            program.open(taken[1:], other.open_loads)
        program.share()
        if node.first >= 0:
            program.hold(takes, node.first, self._latency_ns(node, node.first))
        # The division among several others is unknown.
        bends = len(others) == 1 and bool(others[0].work_bounds)
        if bends:
            program.bend(takes[0], others[0].work_bounds[0], node.shares)
        answer = program.solve()
        value_ns = max(
            node.value_ns, min(self.target_ns, node.low + self.fixed_cost_ns + answer.value_ns * _SAFETY)
        )
        bend = self._bend(others[0], answer.held(*takes[0][1:]), node, value_ns) if bends else (0.0, 0.0)
        return replace(node, value_ns=value_ns, replicas=answer.parts(classes), bend=bend)

    def _bend(self, other: Participant, counts: FloatArray, node: SetNode, value_ns: float) -> tuple[float, float]:
        """Return the share that another pipeline holds, and by how much its time exceeds the program's."""
        share = other.share(counts)
        low, high = node.shares
        if not low + _CLOSE < share < high - _CLOSE:
            return 0.0, 0.0
        return share, other.least_ns(counts) - (value_ns - node.low - self.fixed_cost_ns)


def _low(node: SetNode) -> float:
    """Return the minimum time of the leader."""
    return node.low
