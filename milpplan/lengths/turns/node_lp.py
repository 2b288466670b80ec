"""The linear program of a node of ``set_branch_and_bound``, row by row, and its proved value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from milpplan.groups.bounds import glop
from milpplan.lengths.bounds.work_bounds import LinearBounds, PipelineWorkBound
from milpplan.lengths.heterogeneous.capacity_rows import ReplicaClass
from milpplan.lengths.heterogeneous.count_program import UsedKind
from milpplan.simulation.layout_columns import FloatArray, IntArray

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
