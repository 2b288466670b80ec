"""The bound of a set by what replicas of its strategies hold at most (``led_groups``).

**Parts of the question.** The group of one strategy, the *led* one, takes between z_0 and z_1, and of what the
others of the set hold together the longest is one of lengths number m_0 to m_1 - 1, or nothing. So the led group
holds all longer sequences, each of its replicas has z_1, and

    step >= z_0 + least sum of the others' times + what is paid once,

as a linear program over what every class of replicas and every other strategy holds (x), numbers of replicas n_c,
and the times Z_s of the others:

    sum_c x_cl + sum_s x_sl >= n_l,        rows of a class @ x_c <= n_c,       x_c of leaders' lengths >= n_c,
    sum_c n_c <= D,        n_c of all classes from one on >= as many as these sequences need,
    Z_s >= its linear bounds,        sum_s Z_s >= the passage of a sequence of length m_0.

Pipelines among the others have the chord of their bound up to what they do in the time that a step shorter than
the target leaves them, or between two shares of the load of all. Part of all may be missing, which costs more than
it is worth, so that every program has an answer. The value is computed from its prices, with every variable
between its ends: nothing rests on the solver.

What is known of the led group counts in full, of the others little. So the led one is that which takes half of the
target or more, whichever that is; or all take less.

**Branch and bound.** The part with the least value is next: cut in two where that may raise it enough, in times,
in the lengths that others hold, or in their load, else more is learned of the led group where the program has it.
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

# More is learned where times in a part differ by no more than the first share of the target; parts are cut no
# further than the second.
_COARSE, _NARROW = 6e-3, 1e-3
# What is gained counts from this part on; so often nothing is gained before a part is cut.
_GAIN, _FAILED = 1e-6, 2
# Seconds of learning at once.
_LEARN_S = 1.0
# What everything costs if it is missing, in targets.
_MISSING = 10.0
# An interval of shares ends so little above its beginning at least; ends that are nearer say nothing.
_BELOW, _CLOSE = 1.0 - 1e-9, 0.005
# What sums of floats may add.
_SAFETY = 1.0 - 1e-7


@dataclass(frozen=True, eq=False)
class Participant:
    """A strategy of a set: ``bounds`` of its groups, what a sequence takes at least, ``serial`` [n] ns, what its
    replicas hold at most, ``led``, and ``loads`` of pipelines. ``open``: what a sequence adds to a load [n], and
    the least and the most load of steps that are not known to be longer than the target."""

    bounds: LinearBounds
    latency_ns: FloatArray
    inequalities: Callable[[], ReplicaInequalities]
    work_bounds: tuple[PipelineWorkBound, ...] = ()
    open_loads: tuple[FloatArray, float, float] | None = None

    def bounds_between(self, room_ns: float, shares: tuple[float, float]) -> LinearBounds:
        """Bounds of groups that take no longer, with between two shares of the load of the whole workload."""
        found, fits = self.bounds, np.isfinite(self.bounds.shares[0])
        for loads in self.work_bounds:
            # All count about the same of every sequence.
            times = (loads.sequence_loads / self.work_bounds[0].sequence_loads)[fits] * self.work_bounds[0].total_load / loads.total_load
            most = [max(one.bound.within(room_ns) for one in bound.ranges) for bound in loads.bounds]
            high = min(1.0, shares[1] * float(times.max()), min(most) / loads.total_load)
            if high > 0.0:
                # Where they cannot do the least share, the program has no answer without anything missing.
                found = loads.chords_between(found, min(shares[0] * float(times.min()), high * _BELOW), high)
        return found

    def share(self, held: FloatArray) -> float:
        """Of the load of the whole workload."""
        return float(self.work_bounds[0].sequence_loads @ held) / self.work_bounds[0].total_load

    def least_ns(self, held: FloatArray) -> float:
        """What so many sequences [n] take at least."""
        return max([self.bounds.at(held), *(one.at(float(one.sequence_loads @ held)) for one in self.work_bounds)])


@dataclass(order=True)
class SetNode:
    """A part of the question: its value with everything that is paid once; the number of the ``led`` strategy,
    which takes ``low`` to ``high``, each other one ``most``; lengths ``first`` to ``end`` - 1 of the longest that
    others hold (first -1: or nothing), ``shares`` of the load of all that the one other pipeline holds. What its
    program has: kinds of replicas, and at which share a chord is how much too low (``bend``). How often more was
    learned and nothing gained, and whether nothing more is to be had."""

    value_ns: float
    leader: int = field(compare=False)
    low: float = field(compare=False)
    high: float = field(compare=False)
    max_other_ns: float = field(compare=False)
    first: int = field(compare=False)
    end: int = field(compare=False)
    shares: tuple[float, float] = field(compare=False, default=(0.0, 1.0))
    replicas: list[tuple[ReplicaClass, float, FloatArray]] = field(compare=False, default_factory=list)
    bend: tuple[float, float] = field(compare=False, default=(0.0, 0.0))
    failed: int = field(compare=False, default=0)
    done: bool = field(compare=False, default=False)


class SetBranchAndBound:
    """The bound of one set of ``takers``: ``once_ns`` is what is paid once."""

    def __init__(self, takers: Sequence[Participant], once_ns: float, target_ns: float) -> None:
        self.participants, self.fixed_cost_ns, self.target_ns = takers, once_ns, target_ns
        # By who is led: the passage of a sequence or a longer one under any other, [n].
        self.passages = []
        for led in range(len(takers)):
            serial = np.min([one.latency_ns for place, one in enumerate(takers) if place != led], axis=0)
            self.passages.append(np.minimum.accumulate(serial[::-1])[::-1])
        all_ns = target_ns - once_ns
        parts = [self._whole(led, (all_ns / 2, all_ns), all_ns / 2) for led in range(len(takers))]
        parts.append(self._whole(0, (0.0, all_ns / 2), all_ns / 2))
        self.nodes = [self._valued(one) for one in parts]
        heapq.heapify(self.nodes)

    @property
    def bound_ns(self) -> float:
        """No step of the set takes less, or it is no shorter than the target."""
        return min(self.target_ns, self.nodes[0].value_ns)

    def splits(self) -> list[IntArray]:
        """What every strategy of a pair holds, [q, n], where programs of parts that are open have it: of those
        with the shortest, middle and longest times of the led group each the least. None of more strategies."""
        open_ = sorted((one for one in self.nodes if one.value_ns < self.target_ns and one.replicas), key=_low)
        if len(self.participants) != 2:
            return []
        thirds = [open_[len(open_) * place // 3 : len(open_) * (place + 1) // 3] for place in range(3)]
        return [self._split(min(one)) for one in thirds if one]

    def _split(self, part: SetNode) -> IntArray:
        """In whole numbers."""
        counts = self.participants[part.leader].inequalities().pool.load.counts
        held = np.minimum(np.rint(np.sum([mine for _, _, mine in part.replicas], axis=0)).astype(np.int64), counts)
        return np.array([counts - held, held] if part.leader else [held, counts - held])

    def run(self, deadline: float, *, learns: bool = True) -> bool:
        """Cut and learn until the target is reached, nothing more is to be had (False), or the ``deadline`` (of
        ``perf_counter``). ``learns``: or only cut, where that may be enough."""
        while self.nodes[0].value_ns < self.target_ns and time.perf_counter() < deadline:
            least = self.nodes[0]
            if least.done:
                return False
            width = max(least.high - least.low, self._spread(least), least.bend[1])
            narrow = width <= _COARSE * self.target_ns and least.failed < _FAILED
            if narrow and least.value_ns + width < self.target_ns:
                if not learns:
                    return True
                learned = self._learned(least, deadline)
                new = self._valued(least)
                gained = learned and new.value_ns > least.value_ns * (1.0 + _GAIN)
                new.failed = 0 if gained else least.failed + 1 if learned else _FAILED
                heapq.heapreplace(self.nodes, new)
            elif width > _NARROW * self.target_ns:
                first, second = map(self._valued, self._cut(least))
                heapq.heapreplace(self.nodes, first)
                heapq.heappush(self.nodes, second)
            else:
                least.done = True
        return True

    def _whole(self, led: int, times: tuple[float, float], most: float) -> SetNode:
        """Whatever others hold."""
        others = [one for place, one in enumerate(self.participants) if place != led]
        fits = np.any([np.isfinite(one.bounds.shares[0]) for one in others], axis=0)
        end = int(np.flatnonzero(fits)[-1]) + 1 if fits.any() else 0
        return SetNode(0.0, led, *times, most, -1, end)

    def _learned(self, part: SetNode, deadline: float) -> bool:
        """Know more of the led group of a part, where its program has it; whether that was possible."""
        end = min(deadline, time.perf_counter() + _LEARN_S)
        return self.participants[part.leader].inequalities().learn(part.high, part.replicas, end)

    def _passage(self, part: SetNode, number: int) -> float:
        """Of a sequence of a length or a longer one under the others."""
        return float(self.passages[part.leader][number]) if number >= 0 else 0.0

    def _spread(self, part: SetNode) -> float:
        """How much longer the passage of what others hold may be than what they take."""
        taken = max(self._passage(part, part.first), part.value_ns - part.low - self.fixed_cost_ns)
        last = min(self.target_ns, self._passage(part, part.end - 1))
        return last - taken if part.end - part.first > 1 else 0.0

    def _cut(self, part: SetNode) -> list[SetNode]:
        """Two halves."""
        part = replace(part, replicas=[], failed=0)
        if part.bend[1] > max(part.high - part.low, self._spread(part)):
            ends = (part.shares[0], part.bend[0]), (part.bend[0], part.shares[1])
            return [replace(part, shares=one, bend=(0.0, 0.0)) for one in ends]
        if self._spread(part) < part.high - part.low:
            middle = (part.low + part.high) / 2
            return [replace(part, high=middle), replace(part, low=middle)]
        half = (self._passage(part, part.first) + min(self.target_ns, self._passage(part, part.end - 1))) / 2
        number = int(np.clip(np.searchsorted(self.passages[part.leader], half), part.first + 1, part.end - 1))
        return [replace(part, end=number), replace(part, first=number)]

    def _valued(self, part: SetNode) -> SetNode:
        """With the value of its program, as far as it counts."""
        room = min(part.max_other_ns, self.target_ns - self.fixed_cost_ns - part.low)
        if self._passage(part, part.first) >= room:
            return replace(part, value_ns=max(part.value_ns, self.target_ns))
        group = self.participants[part.leader].inequalities()
        counts, kinds = group.pool.load.counts, group.replica_classes(part.high)
        # The longest that others hold is shorter than those of the end.
        firsts = {one.kind.leaders[0] for one in kinds if one.kind.leaders} | {part.end}
        needs = {first: group.min_replicas(first, part.high) for first in firsts if part.end <= first < len(counts)}
        if max(needs.values(), default=0) > group.num_replicas:
            return replace(part, value_ns=max(part.value_ns, self.target_ns))
        program = NodeLP(counts, room, _MISSING * self.target_ns / room)
        program.open(program.lead(kinds, group.num_replicas, needs), self.participants[part.leader].open_loads)
        others = [one for place, one in enumerate(self.participants) if place != part.leader]
        takes = [program.take(one.bounds_between(room, part.shares), part.end) for one in others]
        for taken, one in zip(takes, others, strict=True):
            program.open(taken[1:], one.open_loads)
        program.share()
        if part.first >= 0:
            program.hold(takes, part.first, self._passage(part, part.first))
        # Of several others nobody knows which has how much.
        bends = len(others) == 1 and bool(others[0].work_bounds)
        if bends:
            program.bend(takes[0], others[0].work_bounds[0], part.shares)
        answer = program.solve()
        value_ns = max(part.value_ns, min(self.target_ns, part.low + self.fixed_cost_ns + answer.value_ns * _SAFETY))
        bend = self._bend(others[0], answer.held(*takes[0][1:]), part, value_ns) if bends else (0.0, 0.0)
        return replace(part, value_ns=value_ns, replicas=answer.parts(kinds), bend=bend)

    def _bend(self, other: Participant, held: FloatArray, part: SetNode, value_ns: float) -> tuple[float, float]:
        """At which share another pipeline holds so much, and how much more it takes than a program has."""
        share = other.share(held)
        low, high = part.shares
        if not low + _CLOSE < share < high - _CLOSE:
            return 0.0, 0.0
        return share, other.least_ns(held) - (value_ns - part.low - self.fixed_cost_ns)


def _low(part: SetNode) -> float:
    """The least time of the led group."""
    return part.low
