"""When the work items of many plans end, in lockstep, and without repeating what repeats: exact, in nanoseconds.

For GPipe, 1F1B and the interleaved schedule. All plans of a batch have the same schedule, ranks P and chunks v;
they differ in durations, transfers and micro-batches. The recursions are those of ``pipeline``, item by item, but
all ranks that can work at the same place of the schedule are one slice, and all plans go through it together.

Jump. After the ramp the schedule repeats: a *round* is one forward and one backward of every rank (1F1B), or those
of P micro-batches in all chunks (interleaved). What comes after a round depends on the ends of the last item of
each kind on every rank alone, the *state*, by maxima and sums only. So if the states after rounds g and g - q
differ by one and the same number on all ranks, everything after g is what came after g - q plus that number: the
state after any later round is one of the last q plus a multiple of it. Nothing is assumed about when, or whether,
this happens: plans that do not repeat go through all their rounds. After its last round every plan runs the same
tail.

Source: the schedules are those of ``work_order``. Maxima and sums that repeat: Baccelli et al. 1992,
"Synchronization and Linearity", section 3.7.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from milpplan.costs.columns import IntArray
from milpplan.specs.plan import Schedule

_REPEATING: frozenset[Schedule] = frozenset({"gpipe", "1f1b"})
LEAP = 8
"""Least number of rounds that a plan is moved on at once; nor fewer than states are kept of it."""
_MAX_STATE = 2**14
"""Numbers in a state of all plans of a part: small enough for the caches."""


def repeats(schedule: Schedule, vpp: int) -> bool:
    """Whether ``work_ends`` knows the schedule (not the interleaved one with a chunk, whose last round may be
    shorter than the others)."""
    return schedule in _REPEATING or (schedule == "interleaved" and vpp > 1)


@dataclass(frozen=True, slots=True)
class Work:
    """What the items of n plans take, in nanoseconds: ``forward``, ``backward`` [C, n] of C classes of virtual
    stages, ``class_of`` [J] those of the virtual stages, ``transfer_ns`` and ``micro_batches`` [n]. ``origin_ns``
    [J, n]: no first forward of a virtual stage starts sooner; None: 0 everywhere."""

    num_ranks: int
    vpp: int
    class_of: IntArray
    forward: IntArray
    backward: IntArray
    transfer_ns: IntArray
    micro_batches: IntArray
    origin_ns: IntArray | None = None

    def __len__(self) -> int:
        return len(self.transfer_ns)

    def take(self, rows: npt.NDArray[np.integer]) -> Work:
        """The chosen plans."""
        origin = None if self.origin_ns is None else self.origin_ns[:, rows]
        return replace(
            self,
            forward=self.forward[:, rows],
            backward=self.backward[:, rows],
            transfer_ns=self.transfer_ns[rows],
            micro_batches=self.micro_batches[rows],
            origin_ns=origin,
        )


@dataclass(frozen=True, slots=True)
class WorkEnds:
    """Of every virtual stage: the start of its first forward and the end of its last backward, [J, n]."""

    first_start: IntArray
    last_end: IntArray

    @staticmethod
    def empty(work: Work) -> WorkEnds:
        """To be filled."""
        shape = (len(work.class_of), len(work))
        return WorkEnds(np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64))


def work_ends(schedule: Schedule, work: Work) -> WorkEnds:
    """First starts and last ends of plans with one of the schedules that ``repeats`` names."""
    if work.num_ranks == 1 or schedule == "gpipe":
        return _one_rank(work) if work.num_ranks == 1 else _gpipe(work)
    found, size = WorkEnds.empty(work), max(1, _MAX_STATE // (2 * work.num_ranks))
    for rows in _parts(_kinds_of_tail(schedule, work), size):
        part = work.take(rows)
        lockstep = _OneChunk(part) if schedule == "1f1b" else _Interleaved(part)
        ends = _walked(lockstep)
        found.first_start[:, rows], found.last_end[:, rows] = ends.first_start, ends.last_end
    return found


def _kinds_of_tail(schedule: Schedule, work: Work) -> IntArray:
    """Plans with the same number [n] here have the same tail; 0: that of long runs. Short ones are apart: there
    the tail begins before the ramp ends."""
    micro_batches, ranks = work.micro_batches, work.num_ranks
    short = micro_batches < ranks if schedule == "1f1b" else micro_batches == ranks
    return np.where(short, micro_batches, 0)


def _parts(kinds: IntArray, size: int) -> Iterator[IntArray]:
    """Rows of one kind, at most ``size`` of them at a time."""
    for kind in np.unique(kinds):
        rows = np.flatnonzero(kinds == kind)
        for first in range(0, len(rows), size):
            yield rows[first : first + size]


def _one_rank(work: Work) -> WorkEnds:
    """A rank alone runs forwards and backwards in turn."""
    start = np.zeros((1, len(work)), dtype=np.int64) if work.origin_ns is None else work.origin_ns
    each = work.forward[work.class_of] + work.backward[work.class_of]
    return WorkEnds(start, start + work.micro_batches * each)


def _gpipe(work: Work) -> WorkEnds:
    """Equal jobs in a row of machines: the last one leaves machine r after one pass through all of them and
    m - 1 times the slowest. The backwards start on the last rank, when it has done all forwards, and no other
    rank waits for its own forwards then.

    end of F(r, m - 1) = max over s <= r of origin_s + sum_{s..r} f + (r - s) c + (m - 1) max_{s..r} f.
    """
    forward, backward = work.forward[work.class_of], work.backward[work.class_of]
    again, transfer, ranks = work.micro_batches - 1, work.transfer_ns, work.num_ranks
    origin = np.zeros_like(forward) if work.origin_ns is None else work.origin_ns
    start = np.empty_like(forward)
    start[0] = origin[0]
    for rank in range(1, ranks):
        start[rank] = np.maximum(start[rank - 1] + forward[rank - 1] + transfer, origin[rank])
    done = np.zeros(len(work), dtype=np.int64)
    passed, slowest = np.zeros_like(done), np.zeros_like(done)
    for rank in range(ranks - 1, -1, -1):
        passed, slowest = passed + forward[rank], np.maximum(slowest, forward[rank])
        done = np.maximum(done, origin[rank] + passed + again * slowest)
        passed = passed + transfer
    back = np.cumsum(backward[::-1] + transfer, axis=0)[::-1] - transfer
    longest = np.maximum.accumulate(backward[::-1], axis=0)[::-1]
    return WorkEnds(start, done + back + again * longest)


class _Lockstep(Protocol):
    """A schedule of many plans, round by round."""

    work: Work
    state: IntArray

    @property
    def first_round(self) -> int:
        """The round that is done at first."""

    @property
    def rounds(self) -> IntArray:
        """The round after which the tail begins, [n]."""

    @property
    def lags(self) -> tuple[int, ...]:
        """Numbers of rounds after which states are likely to repeat."""

    @property
    def looks(self) -> int:
        """Rounds from one look for repetition to the next."""

    def keep(self, work: Work, state: IntArray) -> None:
        """Go on with these plans and their states."""

    def step(self, number: int) -> None:
        """Round ``number``."""

    def tail(self) -> WorkEnds:
        """What is left after the last round."""


def _walked(lockstep: _Lockstep) -> WorkEnds:
    """Rounds until every plan has ended or repeats, then the tail."""
    whole, left, number = lockstep.work, lockstep.rounds - lockstep.first_round, lockstep.first_round
    last, rows, states = np.empty_like(lockstep.state), np.arange(len(whole)), [lockstep.state.copy()]
    while True:
        steps = number - lockstep.first_round
        if (steps and steps % lockstep.looks == 0) or steps == 1:
            _jump(states, left, lockstep.lags, last, rows)
            _leap(lockstep, states, left, number)
        over = left == 0
        if over.any():
            last[:, rows[over]] = states[-1][:, over]
        is_open = left > 0
        if not is_open.any():
            break
        if 2 * is_open.sum() < len(left):
            rows, left = rows[is_open], left[is_open]
            states = [state[:, is_open] for state in states]
            lockstep.keep(lockstep.work.take(np.flatnonzero(is_open)), states[-1].copy())
        number += 1
        lockstep.step(number)
        left -= 1
        states = [*states[-lockstep.lags[-1] :], lockstep.state.copy()]
    lockstep.keep(whole, last)
    return lockstep.tail()


_ENDED = -(2**40)
"""Rounds that are left to a plan whose last state is known."""


def _jump(states: list[IntArray], left: IntArray, lags: tuple[int, ...], last: IntArray, rows: IntArray) -> None:
    """Put the states after their last rounds of plans that repeat into ``last``."""
    for lag in lags:
        if lag >= len(states):
            break
        grown = states[-1] - states[-1 - lag]
        repeats = np.flatnonzero((grown == grown[0]).all(axis=0) & (left > 0))
        if not len(repeats):
            continue
        times, rest = np.divmod(left[repeats], lag)
        ago = np.where(rest > 0, lag - rest, 0)
        times += rest > 0
        for back in np.unique(ago):
            own = repeats[ago == back]
            last[:, rows[own]] = states[-1 - back][:, own] + times[ago == back] * grown[0, own]
        left[repeats] = _ENDED


def _leap(lockstep: _Lockstep, states: list[IntArray], left: IntArray, number: int) -> None:
    """Move plans that run evenly on: every rank by a number of its own in each round.

    With increments d after the last two rounds, let h(k) be the state one round after x + k d. Maxima of sums
    are convex, so h is convex in k; h(0) = x + d and h(1) = x + 2 d were seen, and if h(n) = x + (n + 1) d, then h
    is a line on all of [0, n]: a convex function that meets its chord inside is the chord. So the state n + 1
    rounds later is x + (n + 1) d. Here x is the state before the last two rounds.
    """
    if lockstep.lags[0] != 1 or len(states) < 3:
        return
    grown, least = states[-1] - states[-2], max(LEAP, len(states))
    even = np.flatnonzero((grown == states[-2] - states[-3]).all(axis=0) & (left > least + 1))
    work, now, ahead = lockstep.work, lockstep.state, left[even] - 1
    while len(even):
        lockstep.keep(work.take(even), states[-1][:, even] + ahead * grown[:, even])
        expected = lockstep.state + grown[:, even]
        lockstep.step(number + 1)
        right = (lockstep.state == expected).all(axis=0)
        own = even[right]
        moved = (ahead[right] + 1) * grown[:, own]
        for ago, state in enumerate(states[::-1]):
            state[:, own] = states[-1][:, own] - ago * grown[:, own] if ago else state[:, own] + moved
        left[own] -= ahead[right] + 1
        even, ahead = even[~right], ahead[~right] // 2
        even, ahead = even[ahead >= least], ahead[ahead >= least]
    lockstep.keep(work, now)
    now[:] = states[-1]


@dataclass(slots=True)
class _OneChunk:
    """1F1B. The state [P, n] is the end of every rank's latest item.

    Slots 0 to P - 1: forward i of rank r in slot r + i. From slot P on a rank is at work in every other slot of
    each kind: backward i in slot 2 P - 1 - r + 2 i and forward i in slot r + 2 i. So neighbours run different
    kinds in a slot, and what an item needs is the latest item of its neighbour and of its own rank. A round is two
    slots; round g ends with slot 2 g - 1, after which a plan with g micro-batches has no forward of rank 0 left.
    """

    work: Work
    state: IntArray = field(init=False)
    ends: WorkEnds = field(init=False)
    forward: IntArray = field(init=False)
    backward: IntArray = field(init=False)

    def __post_init__(self) -> None:
        """The ramp."""
        work = self.work
        self.forward, self.backward = work.forward[work.class_of], work.backward[work.class_of]
        self.ends, self.state = WorkEnds.empty(work), np.zeros((work.num_ranks, len(work)), dtype=np.int64)
        short = int(work.micro_batches[0]) if (work.micro_batches < work.num_ranks).all() else None
        for slot in range(work.num_ranks):
            self._ramp(slot, short)
        for slot in range(work.num_ranks, 2 * work.num_ranks):
            self._slot(slot, short)

    @property
    def first_round(self) -> int:
        """The round that the ramp ends with."""
        return self.work.num_ranks

    @property
    def rounds(self) -> IntArray:
        """The round after which the tail begins, [n]; that of the ramp where a plan is short."""
        return np.maximum(self.work.micro_batches, self.first_round)

    @property
    def lags(self) -> tuple[int, ...]:
        """Rounds after which states may repeat: one where a rank limits, or as many as the ranks that limit
        together, which are all or those without an end of the model."""
        ranks = self.work.num_ranks
        return tuple(sorted({1, *(lag for lag in (ranks - 2, ranks - 1, ranks) if lag > 0)}))

    @property
    def looks(self) -> int:
        """Rounds from one look for repetition to the next."""
        return max(1, self.work.num_ranks // 2)

    def _ramp(self, slot: int, short: int | None) -> None:
        low = 0 if short is None else max(0, slot - short + 1)
        state, rows = self.state, slice(max(low, 1), slot + 1)
        arrived = state[rows.start - 1 : slot] + self.work.transfer_ns
        arrived = np.maximum(arrived, state[rows])
        if self.work.origin_ns is not None:
            first = arrived[-1] if slot else state[0]
            np.maximum(first, self.work.origin_ns[slot], out=first)
        self.ends.first_start[slot] = arrived[-1] if slot else state[0]
        if low == 0:
            state[0] += self.forward[0]
        np.add(arrived, self.forward[rows], out=state[rows])

    def _slot(self, slot: int, short: int | None) -> None:
        """Backwards on every other rank, forwards between them; ``short``: so many micro-batches there are."""
        ranks, state, transfer = self.work.num_ranks, self.state, self.work.transfer_ns
        last = ranks if short is None else min(ranks, 2 * short + 2 * ranks - 1 - slot)
        low = max(0, 2 * ranks - 1 - slot)
        low += (slot + 1 - low) % 2
        back, above = slice(low, min(last, ranks - 1), 2), slice(low + 1, min(last, ranks - 1) + 1, 2)
        received = np.maximum(state[above] + transfer, state[back]) if back.start < back.stop else None
        begin = max(0, 2 * ranks - slot, 0 if short is None else slot - 2 * short + 1)
        begin += (slot - begin) % 2
        inner = begin if begin else 2
        ahead, below = slice(inner, ranks, 2), slice(inner - 1, ranks - 1, 2)
        if inner < ranks:
            arrived = np.maximum(state[below] + transfer, state[ahead])
            np.add(arrived, self.forward[ahead], out=state[ahead])
        if begin == 0:
            state[0] += self.forward[0]
        if last == ranks and low < ranks and (ranks - 1 - low) % 2 == 0:
            state[ranks - 1] += self.backward[ranks - 1]
        if received is not None:
            np.add(received, self.backward[back], out=state[back])

    def keep(self, work: Work, state: IntArray) -> None:
        """Go on with these plans and their states."""
        self.work, self.state = work, state
        self.forward, self.backward = work.forward[work.class_of], work.backward[work.class_of]

    def step(self, number: int) -> None:
        """Round ``number``, of plans with more micro-batches: they are all alike."""
        ranks = self.work.num_ranks
        self._slot(2 * ranks, None)
        self._slot(2 * ranks + 1, None)

    def tail(self) -> WorkEnds:
        """What is left after the last round: as if all plans had P micro-batches, or as few as they have."""
        ranks = self.work.num_ranks
        short = min(ranks, int(self.work.micro_batches.min()))
        for slot in range(2 * ranks, 2 * short + 2 * ranks - 2):
            self._slot(slot, short)
        self.ends.last_end[:] = self.state
        return self.ends


@dataclass(slots=True)
class _Interleaved:
    """Interleaved 1F1B. The state [2 P, n] is the end of every rank's latest forward, then latest backward.

    Phases: forward i of rank r in phase i + r; backward i after the forwards of phase v P - 1 + (P - 1 - r) + i.
    What an item needs of another rank, it did in the phase before: the neighbour, or where a chunk of the first or
    the last rank follows another, the rank at the other end. A round is v P phases; round g ends with phase
    g v P - 1, after which a plan with g P micro-batches has no forward of rank 0 left.
    """

    work: Work
    state: IntArray = field(init=False)
    ends: WorkEnds = field(init=False)

    def __post_init__(self) -> None:
        """The ramp."""
        work = self.work
        self.ends = WorkEnds.empty(work)
        self.state = np.zeros((2 * work.num_ranks, len(work)), dtype=np.int64)
        for phase in range(self._round):
            self._forwards(phase, None)
        self._backwards(self._round - 1, None)

    @property
    def first_round(self) -> int:
        """The round that the ramp ends with."""
        return 1

    @property
    def rounds(self) -> IntArray:
        """The round after which the tail begins, [n]."""
        return self.work.micro_batches // self.work.num_ranks

    @property
    def lags(self) -> tuple[int, ...]:
        """Rounds after which states may repeat: a round has as many items as limit together."""
        return (1, 2)

    @property
    def looks(self) -> int:
        """Rounds from one look for repetition to the next."""
        return 1

    @property
    def _round(self) -> int:
        return self.work.num_ranks * self.work.vpp

    def _stages(self, items: IntArray, ranks: IntArray, *, back: bool) -> IntArray:
        """Virtual stages of items."""
        chunk = items % self._round // self.work.num_ranks
        return (self.work.vpp - 1 - chunk if back else chunk) * self.work.num_ranks + ranks

    def _forwards(self, phase: int, items: int | None) -> None:
        work, P = self.work, self.work.num_ranks
        low = 0 if items is None else max(0, phase - items + 1)
        high = min(P, phase + 1)
        if low >= high:
            return
        forward, backward = self.state[:P], self.state[P:]
        start = np.empty((high - low, len(work)), dtype=np.int64)
        inner = max(low, 1)
        np.add(forward[inner - 1 : high - 1], work.transfer_ns, out=start[inner - low :])
        if low == 0:
            start[0] = forward[P - 1] + work.transfer_ns if phase % self._round >= P else 0
        np.maximum(start, backward[low:high], out=start)
        if phase < self._round + P:
            # Before its first backward a rank waits for its forward before.
            np.maximum(start, forward[low:high], out=start)
        if phase < self._round:
            rank = phase % P
            if work.origin_ns is not None:
                np.maximum(start[rank], work.origin_ns[phase], out=start[rank])
            self.ends.first_start[phase] = start[rank]
        ranks = np.arange(low, high)
        took = work.forward.take(work.class_of[self._stages(phase - ranks, ranks, back=False)], axis=0)
        np.add(start, took, out=forward[low:high])

    def _backwards(self, phase: int, items: int | None) -> None:
        work, P = self.work, self.work.num_ranks
        done = phase - self._round + 1
        low, high = max(0, P - 1 - done), P if items is None else min(P, items + P - 1 - done)
        forward, backward = self.state[:P], self.state[P:]
        start = np.empty((high - low, len(work)), dtype=np.int64)
        inner = min(high, P - 1)
        np.add(backward[low + 1 : inner + 1], work.transfer_ns, out=start[: inner - low])
        if high == P:
            start[-1] = backward[0] + work.transfer_ns if done % self._round >= P else 0
        np.maximum(start, forward[low:high], out=start)
        if items is not None:
            # Without a forward in between a rank waits for its backward before.
            np.maximum(start, backward[low:high], out=start)
        ranks = np.arange(low, high)
        stages = self._stages(done - (P - 1 - ranks), ranks, back=True)
        np.add(start, work.backward.take(work.class_of[stages], axis=0), out=backward[low:high])

    def keep(self, work: Work, state: IntArray) -> None:
        """Go on with these plans and their states."""
        self.work, self.state = work, state

    def step(self, number: int) -> None:
        """Round ``number``, of plans with more micro-batches."""
        # In the second round the first ranks' backwards are still to come; all later ones are alike.
        first = self._round * min(number - 1, 2)
        for phase in range(first, first + self._round):
            self._forwards(phase, None)
            self._backwards(phase, None)

    def tail(self) -> WorkEnds:
        """What is left after the last round: as if all plans had two rounds, or one."""
        P, vpp = self.work.num_ranks, self.work.vpp
        items = self._round * min(2, int(self.rounds.min()))
        for place in range(self._round + P - 2):
            self._forwards(items + place, items)
            self._backwards(items + place, items)
            # Backwards of the last micro-batch: chunk after chunk, from the last rank to the first.
            rank = (2 * P - 3 - place) % P
            chunk = vpp - 1 - (place + rank - 2 * P + 3) // P
            if 0 <= chunk < vpp:
                self.ends.last_end[chunk * P + rank] = self.state[P + rank]
        return self.ends
