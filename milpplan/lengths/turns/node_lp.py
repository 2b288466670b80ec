"""The linear program of a part of a set's question (``led_sets``), row by row, and its proved value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from milpplan.groups.bounds import glop
from milpplan.lengths.bounds.work_bounds import LinearBounds, PipelineWorkBound
from milpplan.lengths.heterogeneous.capacity_rows import ReplicaClass
from milpplan.lengths.heterogeneous.count_program import UsedKind
from milpplan.simulation.layout_columns import FloatArray, IntArray

# Fewer replicas do not count.
_FEW = 1e-6


class NodeLP:
    """Rows, of which ``values`` at ``columns`` are at most the side of each."""

    def __init__(self, counts: IntArray, room: float, missing: float) -> None:
        """Times in parts of the ``room``; everything is ``missing`` at such a cost."""
        self.counts, self.room = counts.astype(np.float64), room
        self.costs, self.high = [missing], [1.0]
        self.columns: list[IntArray] = []
        self.values: list[FloatArray] = []
        self.sides: list[float] = []
        # Which columns hold sequences of which length.
        self.holders: list[tuple[IntArray, IntArray]] = []

    def _column(self, cost: float, high: Sequence[float] | FloatArray) -> int:
        """More variables from nothing to ``high``; the first of them."""
        first = len(self.costs)
        self.costs += [cost] * len(high)
        self.high += [float(one) for one in high]
        return first

    def _row(self, columns: object, values: object, side: float) -> None:
        """values @ columns <= side."""
        self.columns.append(np.asarray(columns, dtype=np.int64))
        self.values.append(np.broadcast_to(np.asarray(values, dtype=np.float64), len(self.columns[-1])))
        self.sides.append(side)

    def _least(self, columns: IntArray, least: float) -> None:
        """The sum of the columns is so much at least, or part of everything is missing."""
        self._row(np.append(columns, 0), np.append(np.full(len(columns), -1.0), -least), -least)

    def lead(
        self, kinds: Sequence[UsedKind], num_replicas: int, needs: dict[int, int]
    ) -> tuple[IntArray, IntArray]:
        """Classes of replicas of a group, of which there are so many, with what these hold at most; of those led
        by a length or a longer one as many as it ``needs``. What they hold, with the lengths."""
        before = len(self.holders)
        for one in kinds:
            one.number = self._column(0.0, [num_replicas])
            one.first = self._column(0.0, self.counts[one.holds])
            columns, lengths = np.array(one.columns, dtype=np.int64), np.flatnonzero(one.holds)
            self.holders.append((columns, lengths))
            for row in one.rows:
                self._row(np.append(columns, one.number), np.append(row, -1.0), 0.0)
            first = one.kind.leaders[0] if one.kind.leaders else 0
            if first:
                mine = columns[lengths >= first]
                self._row(np.append(mine, one.number), np.append(np.full(len(mine), -1.0), 1.0), 0.0)
        self._row([one.number for one in kinds], 1.0, float(num_replicas))
        for first, number in needs.items():
            longer = [one.number for one in kinds if one.kind.leaders and one.kind.leaders[1] > first]
            self._least(np.array(longer, dtype=np.int64), float(number))
        none = np.zeros(0, dtype=np.int64)
        held = [(none, none), *self.holders[before:]]
        return np.concatenate([one for one, _ in held]), np.concatenate([one for _, one in held])

    def open(self, taken: tuple[IntArray, IntArray], loads: tuple[FloatArray, float, float] | None) -> None:
        """What a strategy holds has a load within what is open, if that is known."""
        if loads is not None:
            (columns, lengths), (each, least, most) = taken, loads
            self._between(columns, each[lengths], least, most)

    def _between(self, columns: IntArray, each: FloatArray, least: float, most: float) -> None:
        """A load, in parts of its most, is between two; where it is less, part of everything is missing."""
        shares = each / most
        self._row(columns, shares, 1.0)
        if least > 0.0:
            self._row(np.append(columns, 0), np.append(-shares, -least / most), -least / most)

    def take(self, bounds: LinearBounds, end: int) -> tuple[int, IntArray, IntArray]:
        """The time of another strategy that holds no sequences of number ``end`` or longer, by its bounds; where
        that is, and what it holds, with the lengths."""
        time_ = self._column(1.0, [1.0])
        lengths = np.flatnonzero(np.isfinite(bounds.shares[0, :end]))
        columns = np.asarray(self._column(0.0, self.counts[lengths]) + np.arange(len(lengths)), dtype=np.int64)
        self.holders.append((columns, lengths))
        for share, constant in zip(bounds.shares, bounds.constants, strict=True):
            least = constant / self.room
            self._row([*columns, time_, 0], [*(share[lengths] / self.room), -1.0, -least], -least)
        return time_, columns, lengths

    def share(self) -> None:
        """Every sequence is somewhere."""
        columns, lengths = (np.concatenate(one) for one in zip(*self.holders, strict=True))
        for length, count in enumerate(self.counts.tolist()):
            self._least(columns[lengths == length], count)

    def hold(self, others: Sequence[tuple[int, IntArray, IntArray]], first: int, passage: float) -> None:
        """The others hold a sequence of number ``first`` or longer, which takes a ``passage``."""
        self._least(np.array([time_ for time_, _, _ in others]), passage / self.room)
        self._least(np.concatenate([columns[lengths >= first] for _, columns, lengths in others]), 1.0)

    def bend(
        self, taken: tuple[int, IntArray, IntArray], loads: PipelineWorkBound, shares: tuple[float, float]
    ) -> None:
        """Another strategy holds between two shares of the load of all."""
        _, columns, lengths = taken
        self._between(columns, loads.sequence_loads[lengths], shares[0] * loads.total_load, shares[1] * loads.total_load)

    def solve(self) -> NodeSolution:
        """With the least sum of the others' times, proved by its prices."""
        sizes = [len(one) for one in self.columns]
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
    """The value of a program in ns, and ``values`` that reach it nearly."""

    value_ns: float
    values: FloatArray
    num_lengths: int

    def held(self, columns: IntArray, lengths: IntArray) -> FloatArray:
        """What is in columns of lengths, by length, [n]."""
        return np.asarray(np.bincount(lengths, self.values[columns], self.num_lengths), dtype=np.float64)

    def parts(self, kinds: Sequence[UsedKind]) -> list[tuple[ReplicaClass, float, FloatArray]]:
        """How many replicas of each kind there are, and what they hold, [n]."""
        numbers = [float(self.values[one.number]) for one in kinds]
        return [
            (one.kind, number, self.held(np.array(one.columns), np.flatnonzero(one.holds)))
            for one, number in zip(kinds, numbers, strict=True)
            if number > _FEW
        ]
