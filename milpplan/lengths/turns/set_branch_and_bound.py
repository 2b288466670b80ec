"""Branch and bound for one set of strategies, with inequalities of their replicas.

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

from milpplan.groups.bounds import glop
from milpplan.lengths import StrategyTables
from milpplan.lengths.bounds.configuration_bound import ConfigurationBound
from milpplan.lengths.bounds.longest_sequence_branching import LongestSequenceBranching, ReplicaClassBound
from milpplan.lengths.bounds.work_bounds import LinearBounds, PipelineWorkBound
from milpplan.lengths.heterogeneous.count_program import CapacityRow, ReplicaClass, UsedKind
from milpplan.lengths.side_by_side.sequence_duals import replica_prices
from milpplan.simulation import FloatArray, IntArray

# An assignment is cut off if some dual vector limits the replicas to less than this share of it.
_CUT = 1.0 - 1e-3
# Windows are refined until the limit is below the assignment by this share.
_FURTHER = 0.01
# Share of all sequences that is added to an assignment before its dual values are sought; seconds per search,
# maximum number of searches, and the relative difference of times from which an equal assignment is new.
_ALL, _ASK_S, _ASKED, _OTHER = 0.02, 1.5, 24, 0.01
# Number of replicas of a class that is ignored.
_NEGLIGIBLE = 0.02
# Maximum number of dual vectors of a strategy of one stage.
_PRICES = 4


@dataclass(frozen=True, eq=False)
class _ClassCapacity(CapacityRow):
    """Limit on the work of a replica of one class, by one dual vector."""

    class_bound: ReplicaClassBound
    class_index: int

    def max_load(self, time_ns: float) -> float:
        return self.class_bound.max_load(self.class_index, time_ns)


class ReplicaInequalities:
    """Inequalities of a strategy's groups with shared memory, in steps of at most ``time_ns``.

    The bound of a pipeline with all sequences (``longest_sequence_branching``) says little of a pipeline that
    leaves some to others. So here are limits on what its replicas hold within a time, by class of their longest
    sequence, as rows of a program (``CapacityRow``): each dual vector of the sequences gives one row per class.
    Replicas with a longer longest sequence than those of a class hold all longer sequences of the group, and are
    at least as many as these sequences need (``MinReplicas``), if it is known which the group holds.

    If a program assigns more to the replicas than they can hold but no row shows it, the windows of the classes in
    use are refined. If that no longer helps, all are asked together for dual values that make the assignment most
    infeasible (``restricted_master_duals``): rows that cut it off. The inequalities hold for every set with this
    pipeline.
    """

    def __init__(self, pool: StrategyTables, member: int, time_ns: float) -> None:
        self.pool, self.member, self.time_ns = pool, member, time_ns
        self.num_replicas = pool.members[member].candidate.layout.dp
        self.kind = ReplicaClass.of(pool, member, shared_memory=True)
        # For pipelines, once bounds of all replicas together do not suffice.
        self.branching: LongestSequenceBranching | None = None
        self._asked: list[tuple[bytes, float]] = []

    def replica_classes(self, time_ns: float) -> list[UsedKind]:
        """Return every class of replicas that holds something within a time, with its inequalities."""
        classes = [self.kind]
        if self.branching is not None:
            classes = []
            for index, lengths in enumerate(self.branching.classes):
                rooms = tuple(
                    _ClassCapacity(bound.duals.sequence_loads, (), bound, index)
                    for bound in self.branching.class_bounds
                )
                classes.append(replace(self.kind, longest_range=lengths, capacity_rows=rooms))
        used = []
        for replica_class in classes:
            holds = replica_class.can_hold(time_ns)
            if holds.any() and len(rows := replica_class.rows(time_ns)):
                used.append(UsedKind(replica_class, holds, rows).strengthened)
        return used

    def min_replicas(self, first: int, time_ns: float) -> int:
        """Return the minimum number of replicas for all sequences of length index ``first`` and longer."""
        if self.branching is None:
            return 0
        num_sequences = int(self.pool.load.counts[first:].sum())
        return self.branching.min_replicas.min_replicas(num_sequences, time_ns)

    def learn(self, time_ns: float, parts: list[tuple[ReplicaClass, float, FloatArray]], deadline: float) -> bool:
        """Derive inequalities that cut off an assignment; return whether it is cut off now.

        Args:
            time_ns: time of the replicas.
            parts: class, number of its replicas and the sequences [n] that they hold together.
            deadline: of ``perf_counter``.
        """
        if self.pool.num_stages(self.member) == 1:
            return self._price(parts)
        if self.branching is None:
            self.branching = self._led()
            return True
        branching = self.branching
        if any(replica_class.longest_range is None for replica_class, _, _ in parts):
            # The program is older than the branching.
            return True
        assignment = np.zeros(len(branching.classes))
        counts = np.zeros(len(self.pool.load.counts))
        for replica_class, number, held in parts:
            index = branching.classes.index(replica_class.longest_range or (0, 0))
            assignment[index] = number if number > _NEGLIGIBLE else 0.0
            counts += held
        if not assignment.any():
            return False
        while time.perf_counter() < deadline:
            shares = [
                self._share(class_bound, assignment, counts, time_ns) for class_bound in branching.class_bounds
            ]
            best = int(np.argmin(shares))
            tightest, share = branching.class_bounds[best], shares[best]
            if share <= 1.0 - _FURTHER:
                return True
            if branching.refine_class(
                tightest,
                assignment,
                time_ns,
                (share - 1.0 + _FURTHER) * float(tightest.duals.sequence_loads @ counts),
            ):
                continue
            key = np.rint(assignment).tobytes()
            differences = [
                abs(class_bound / time_ns - 1.0) for earlier, class_bound in self._asked if earlier == key
            ]
            if len(self._asked) < _ASKED and share > _CUT and min(differences, default=1.0) > _OTHER:
                self._asked.append((key, time_ns))
                wanted = counts + _ALL * self.pool.load.counts
                if branching.add_duals(tightest, assignment, wanted, time_ns, _ASK_S):
                    return self._share(branching.class_bounds[-1], assignment, counts, time_ns) <= _CUT
            return share <= _CUT
        return False

    def _led(self) -> LongestSequenceBranching:
        """Return the branching on the longest sequence of each replica."""
        pricing = self.pool.micro_batch_pricing(self.member, shared_memory=True)
        if pricing.items.fits[-1]:
            work_bound = self.pool.work_bound_with_longest(self.member, np.inf)
        else:
            work_bound = replace(self.pool.best_own_memory_bound(self.member), classes=())
        configuration_bound = ConfigurationBound(work_bound, pricing)
        configuration_bound.branch_on_large(self.time_ns, work_bound.total_load)
        return LongestSequenceBranching(configuration_bound, self.time_ns)

    def _price(self, parts: list[tuple[ReplicaClass, float, FloatArray]]) -> bool:
        """Add dual values that are highest for what replicas of one stage hold, a few times."""
        if not parts or len(self.kind.prices) == _PRICES:
            return False
        wanted = parts[0][2] + _ALL * self.pool.load.counts
        fitting = np.where(self.kind.can_hold(self.time_ns), wanted, 0.0)
        prices = replica_prices(self.pool, self.member, fitting, self.time_ns, np.inf)
        self.kind = replace(self.kind, prices=(*self.kind.prices, prices))
        return True

    def _share(
        self, class_bound: ReplicaClassBound, assignment: FloatArray, held: FloatArray, time_ns: float
    ) -> float:
        """Return the maximum work of an assignment's replicas, as a share of what they hold together."""
        indices = np.flatnonzero(assignment).tolist()
        max_load = sum(
            float(assignment[index]) * max(0.0, class_bound.max_load(index, time_ns)) for index in indices
        )
        return max_load / float(class_bound.duals.sequence_loads @ held)


# Number of replicas that is ignored.
_FEW = 1e-6


class NodeLP:
    """Program over what replica classes and other strategies hold: rows ``values`` @ ``columns`` <= side."""

    def __init__(self, counts: IntArray, room: float, missing: float) -> None:
        """Start without rows.

        Args:
            counts: sequences of every length, [n].
            room: unit of times, in ns.
            missing: cost of leaving out the whole workload.
        """
        self.counts, self.room = counts.astype(np.float64), room
        self.costs, self.high = [missing], [1.0]
        self.columns: list[IntArray] = []
        self.values: list[FloatArray] = []
        self.sides: list[float] = []
        # Columns that hold sequences, and their lengths.
        self.holders: list[tuple[IntArray, IntArray]] = []

    def _column(self, cost: float, high: Sequence[float] | FloatArray) -> int:
        """Add variables between 0 and ``high``; return the index of the first."""
        first = len(self.costs)
        self.costs += [cost] * len(high)
        self.high += [float(bound) for bound in high]
        return first

    def _row(self, columns: object, values: object, side: float) -> None:
        """Add the row values @ columns <= side."""
        self.columns.append(np.asarray(columns, dtype=np.int64))
        self.values.append(np.broadcast_to(np.asarray(values, dtype=np.float64), len(self.columns[-1])))
        self.sides.append(side)

    def _least(self, columns: IntArray, minimum: float) -> None:
        """Add a minimum of the sum of the columns, unless part of the workload is left out."""
        self._row(np.append(columns, 0), np.append(np.full(len(columns), -1.0), -minimum), -minimum)

    def lead(
        self, classes: Sequence[UsedKind], num_replicas: int, needs: dict[int, int]
    ) -> tuple[IntArray, IntArray]:
        """Add the replica classes of a group with their inequalities.

        Args:
            classes: classes with their rows.
            num_replicas: total number of replicas.
            needs: minimum number of replicas whose longest sequence has some length or more, by that length's
                index.

        Returns:
            Columns of what the replicas hold, and their lengths.
        """
        first_holder = len(self.holders)
        for used in classes:
            used.count_column = self._column(0.0, [num_replicas])
            used.first_column = self._column(0.0, self.counts[used.holds])
            columns, lengths = np.array(used.columns, dtype=np.int64), np.flatnonzero(used.holds)
            self.holders.append((columns, lengths))
            for row in used.rows:
                self._row(np.append(columns, used.count_column), np.append(row, -1.0), 0.0)
            first = used.replica_class.longest_range[0] if used.replica_class.longest_range else 0
            if first:
                long_columns = columns[lengths >= first]
                self._row(
                    np.append(long_columns, used.count_column),
                    np.append(np.full(len(long_columns), -1.0), 1.0),
                    0.0,
                )
        self._row([used.count_column for used in classes], 1.0, float(num_replicas))
        for first, needed in needs.items():
            longer = [
                used.count_column
                for used in classes
                if used.replica_class.longest_range and used.replica_class.longest_range[1] > first
            ]
            self._least(np.array(longer, dtype=np.int64), float(needed))
        empty = np.zeros(0, dtype=np.int64)
        holders = [(empty, empty), *self.holders[first_holder:]]
        return np.concatenate([used for used, _ in holders]), np.concatenate([used for _, used in holders])

    def open(self, held: tuple[IntArray, IntArray], open_loads: tuple[FloatArray, float, float] | None) -> None:
        """Restrict a strategy's work to its open range, if there is one."""
        if open_loads is not None:
            (columns, lengths), (sequence_loads, min_load, max_load) = held, open_loads
            self._between(columns, sequence_loads[lengths], min_load, max_load)

    def _between(self, columns: IntArray, loads: FloatArray, min_load: float, max_load: float) -> None:
        """Restrict a work to a range, as shares of the maximum; below the minimum part of the workload is left
        out."""
        shares = loads / max_load
        self._row(columns, shares, 1.0)
        if min_load > 0.0:
            self._row(np.append(columns, 0), np.append(-shares, -min_load / max_load), -min_load / max_load)

    def take(self, bounds: LinearBounds, end: int) -> tuple[int, IntArray, IntArray]:
        """Add another strategy that holds no sequences of length index ``end`` or longer, by its bounds.

        Returns:
            Column of its time, columns of what it holds, and their lengths.
        """
        time_column = self._column(1.0, [1.0])
        lengths = np.flatnonzero(np.isfinite(bounds.shares[0, :end]))
        columns = np.asarray(self._column(0.0, self.counts[lengths]) + np.arange(len(lengths)), dtype=np.int64)
        self.holders.append((columns, lengths))
        for share, constant in zip(bounds.shares, bounds.constants, strict=True):
            constant_share = constant / self.room
            self._row(
                [*columns, time_column, 0], [*(share[lengths] / self.room), -1.0, -constant_share], -constant_share
            )
        return time_column, columns, lengths

    def share(self) -> None:
        """Add the rows by which every sequence is assigned."""
        columns, lengths = (np.concatenate(parts) for parts in zip(*self.holders, strict=True))
        for length, count in enumerate(self.counts.tolist()):
            self._least(columns[lengths == length], count)

    def hold(self, others: Sequence[tuple[int, IntArray, IntArray]], first: int, latency_ns: float) -> None:
        """Require that the others hold a sequence of length index ``first`` or longer, with its latency
        ``latency_ns``."""
        self._least(np.array([time_column for time_column, _, _ in others]), latency_ns / self.room)
        self._least(np.concatenate([columns[lengths >= first] for _, columns, lengths in others]), 1.0)

    def bend(
        self, held: tuple[int, IntArray, IntArray], work_bound: PipelineWorkBound, shares: tuple[float, float]
    ) -> None:
        """Restrict another strategy to between two shares of the whole workload's work."""
        _, columns, lengths = held
        self._between(
            columns,
            work_bound.sequence_loads[lengths],
            shares[0] * work_bound.total_load,
            shares[1] * work_bound.total_load,
        )

    def solve(self) -> NodeSolution:
        """Minimise the sum of the others' times; the value is proved by the dual values."""
        sizes = [len(row_columns) for row_columns in self.columns]
        rows = np.repeat(np.arange(len(sizes)), sizes)
        columns, values = np.concatenate(self.columns), np.concatenate(self.values)
        cost, high, sides = np.array(self.costs), np.array(self.high), np.array(self.sides)
        answer = glop.least(cost, (glop.Entries(rows, columns, values), sides), high=high)
        if answer is None:
            return NodeSolution(0.0, np.zeros(len(cost)), len(self.counts))
        weights = np.maximum(0.0, -answer.at_most)
        reduced = cost + np.bincount(columns, weights[rows] * values, len(cost))
        value = float(np.minimum(0.0, reduced) @ high - weights @ sides)
        return NodeSolution(max(0.0, value) * self.room, answer.values, len(self.counts))


@dataclass(frozen=True, eq=False)
class NodeSolution:
    """Proved value of a program in ns, and near-optimal ``values`` of its variables."""

    value_ns: float
    values: FloatArray
    num_lengths: int

    def held(self, columns: IntArray, lengths: IntArray) -> FloatArray:
        """Return the values of columns by their lengths, [n]."""
        return np.asarray(np.bincount(lengths, self.values[columns], self.num_lengths), dtype=np.float64)

    def parts(self, classes: Sequence[UsedKind]) -> list[tuple[ReplicaClass, float, FloatArray]]:
        """Return the number of replicas of each class and what they hold together, [n]."""
        numbers = [float(self.values[used.count_column]) for used in classes]
        return [
            (used.replica_class, number, self.held(np.array(used.columns), np.flatnonzero(used.holds)))
            for used, number in zip(classes, numbers, strict=True)
            if number > _FEW
        ]


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
