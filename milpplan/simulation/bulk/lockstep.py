"""1F1B and the interleaved schedule for many plans in lockstep: each operation covers a slice of ranks of all
plans.

All plans of a batch have the same schedule, ranks P and chunks v; they differ in durations, transfers and
micro-batches. The recursions are those of ``step_graph``, item by item. A schedule is a ramp, equal rounds, and a
tail; ``repeats`` decides how many rounds are simulated.

Source: the schedules are those of ``schedule``.

**Jump.** After the ramp the schedule repeats: a *round* is a forward and a backward of every rank (1F1B), or those
of P micro-batches in all chunks (interleaved). The items after a round depend only on the ends of the last item of
each kind on every rank, the *state*, by maxima and sums only. So if the states after rounds g and g - q differ by
the same number on all ranks, all ends after g are the ends after g - q plus this number: the state after any later
round is one of the last q states plus a multiple of the number. No assumption is made about when, or whether, this
happens: plans that do not repeat go through all their rounds. After its last round every plan runs the same tail.

Source of maxima and sums that repeat: Baccelli et al. 1992, "Synchronization and Linearity", section 3.7.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from milpplan.problem import Schedule
from milpplan.simulation import IntArray, ascending

_REPEATING: frozenset[Schedule] = frozenset({"gpipe", "1f1b"})
LEAP = 8
"""Minimum number of rounds of a leap; a leap also covers at least as many rounds as states are stored."""
_MAX_STATE = 2**16
"""Maximum size of the state of a part of the plans, small enough for the processor's caches."""


def repeats(schedule: Schedule, vpp: int) -> bool:
    """Check that ``work_ends`` supports the schedule.

    It does not support the interleaved schedule with a single chunk, whose last round may be shorter than the
    others.
    """
    return schedule in _REPEATING or (schedule == "interleaved" and vpp > 1)


def work_ends(schedule: Schedule, work: Work) -> WorkEnds:
    """Find the first starts and the last ends of plans with a schedule that ``repeats`` supports."""
    if work.num_ranks == 1 or schedule == "gpipe":
        return _one_rank(work) if work.num_ranks == 1 else _gpipe(work)
    all_ends, size = WorkEnds.empty(work), max(1, _MAX_STATE // (2 * work.num_ranks))
    for rows in _parts(_kinds_of_tail(schedule, work), work.micro_batches, size):
        part = work.take(rows)
        lockstep = OneChunk(part) if schedule == "1f1b" else Interleaved(part)
        ends = _run(lockstep)
        all_ends.first_start[:, rows], all_ends.last_end[:, rows] = ends.first_start, ends.last_end
    return all_ends


def _kinds_of_tail(schedule: Schedule, work: Work) -> IntArray:
    """Classify the plans by their tail, [n]: 1 if the tail begins before the ramp ends, else 0."""
    short = (schedule == "1f1b") & (work.micro_batches < work.num_ranks)
    return np.where(short, 1, 0)


def _parts(kinds: IntArray, micro_batches: IntArray, size: int) -> Iterator[IntArray]:
    """Split the plans into parts of at most ``size`` rows of the same kind.

    Plans of similar length are in the same part: in short plans fewer ranks work at a time, and all end sooner.
    """
    for kind in ascending(kinds):
        rows = np.flatnonzero(kinds == kind)
        rows = rows[np.argsort(micro_batches[rows], kind="stable")]
        for first in range(0, len(rows), size):
            yield rows[first : first + size]


def _one_rank(work: Work) -> WorkEnds:
    """Find the ends of a single rank, which runs forwards and backwards in turn."""
    start = np.zeros((1, len(work)), dtype=np.int64) if work.origin_ns is None else work.origin_ns
    micro_batch_ns = work.forward[work.class_of] + work.backward[work.class_of]
    return WorkEnds(start, start + work.micro_batches * micro_batch_ns)


def _gpipe(work: Work) -> WorkEnds:
    """Find the ends of GPipe in closed form.

    Forwards are equal jobs in a flow shop: the last job leaves machine r after a pass through all machines and m -
    1 times the slowest machine. The backwards start on the last rank, after its forwards, and no other rank waits
    for its own forwards then.

    end of F(r, m - 1) = max over s <= r of origin_s + sum_{s..r} f + (r - s) c + (m - 1) max_{s..r} f.
    """
    forward, backward = work.forward[work.class_of], work.backward[work.class_of]
    repetitions, transfer, ranks = work.micro_batches - 1, work.transfer_ns, work.num_ranks
    origin = np.zeros_like(forward) if work.origin_ns is None else work.origin_ns
    start = np.empty_like(forward)
    start[0] = origin[0]
    for rank in range(1, ranks):
        start[rank] = np.maximum(start[rank - 1] + forward[rank - 1] + transfer, origin[rank])
    done = np.zeros(len(work), dtype=np.int64)
    passed, slowest = np.zeros_like(done), np.zeros_like(done)
    for rank in range(ranks - 1, -1, -1):
        passed, slowest = passed + forward[rank], np.maximum(slowest, forward[rank])
        done = np.maximum(done, origin[rank] + passed + repetitions * slowest)
        passed = passed + transfer
    back = np.cumsum(backward[::-1] + transfer, axis=0)[::-1] - transfer
    longest = np.maximum.accumulate(backward[::-1], axis=0)[::-1]
    return WorkEnds(start, done + back + repetitions * longest)


class _Lockstep(Protocol):
    """Schedule of many plans, run round by round."""

    work: Work
    state: IntArray

    @property
    def first_round(self) -> int:
        """Last round of the ramp."""

    @property
    def rounds(self) -> IntArray:
        """Round after which the tail begins, [n]."""

    @property
    def lags(self) -> tuple[int, ...]:
        """Numbers of rounds after which states are likely to repeat."""

    @property
    def looks(self) -> int:
        """Number of rounds between two searches for repetition."""

    def keep(self, work: Work, state: IntArray) -> None:
        """Continue with these plans and their states."""

    def step(self, number: int) -> None:
        """Run round ``number``."""

    def tail(self) -> WorkEnds:
        """Run the items after the last round."""


def _run(lockstep: _Lockstep) -> WorkEnds:
    """Run rounds until every plan has ended or repeats, then the tail."""
    all_work, left, number = lockstep.work, lockstep.rounds - lockstep.first_round, lockstep.first_round
    last, rows, states = np.empty_like(lockstep.state), np.arange(len(all_work)), [lockstep.state.copy()]
    while True:
        steps = number - lockstep.first_round
        if (steps and steps % lockstep.looks == 0) or steps == 1:
            _jump(states, left, lockstep.lags, last, rows)
            if steps & (steps - 1) == 0:
                _leap(lockstep, states, left, number)
        has_ended = left == 0
        if has_ended.any():
            last[:, rows[has_ended]] = states[-1][:, has_ended]
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
    lockstep.keep(all_work, last)
    return lockstep.tail()


_ENDED = -(2**40)
"""Number of rounds left that marks a plan whose last state is known."""


def _jump(states: list[IntArray], left: IntArray, lags: tuple[int, ...], last: IntArray, rows: IntArray) -> None:
    """Find the plans that repeat, and write their states after their last rounds into ``last``."""
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
        for lookback in ascending(ago):
            plans = repeats[ago == lookback]
            last[:, rows[plans]] = states[-1 - lookback][:, plans] + times[ago == lookback] * grown[0, plans]
        left[repeats] = _ENDED


def _leap(lockstep: _Lockstep, states: list[IntArray], left: IntArray, number: int) -> None:
    """Advance plans whose ranks each grow by a constant in every round.

    With increments d after the last two rounds, let h(k) be the state one round after x + k d. Maxima of sums are
    convex, so h is convex in k. The last rounds gave h(0) = x + d and h(1) = x + 2 d. If h(n) = x + (n + 1) d,
    then h is a line on all of [0, n]: a convex function that meets its chord inside is the chord. So the state n +
    1 rounds later is x + (n + 1) d. Here x is the state before the last two rounds.
    """
    if lockstep.lags[0] != 1 or len(states) < 3:
        return
    grown, min_leap = states[-1] - states[-2], max(LEAP, len(states))
    even = np.flatnonzero((grown == states[-2] - states[-3]).all(axis=0) & (left > min_leap + 1))
    work, now, ahead = lockstep.work, lockstep.state, left[even] - 1
    while len(even):
        lockstep.keep(work.take(even), states[-1][:, even] + ahead * grown[:, even])
        expected = lockstep.state + grown[:, even]
        lockstep.step(number + 1)
        is_linear = (lockstep.state == expected).all(axis=0)
        plans = even[is_linear]
        leap = (ahead[is_linear] + 1) * grown[:, plans]
        for ago, state in enumerate(states[::-1]):
            state[:, plans] = states[-1][:, plans] - ago * grown[:, plans] if ago else state[:, plans] + leap
        left[plans] -= ahead[is_linear] + 1
        even, ahead = even[~is_linear], ahead[~is_linear] // 2
        even, ahead = even[ahead >= min_leap], ahead[ahead >= min_leap]
    lockstep.keep(work, now)
    now[:] = states[-1]


@dataclass(frozen=True, slots=True)
class Work:
    """Durations of the work items of n plans, in nanoseconds."""

    num_ranks: int
    vpp: int
    class_of: IntArray
    """[J] class of every virtual stage."""
    forward: IntArray
    """[C, n] by class of virtual stage."""
    backward: IntArray
    """[C, n] by class of virtual stage."""
    transfer_ns: IntArray
    """[n]."""
    micro_batches: IntArray
    """[n]."""
    origin_ns: IntArray | None = None
    """[J, n] earliest start of the first forward of a virtual stage; None: 0 everywhere."""

    def __len__(self) -> int:
        return len(self.transfer_ns)

    def take(self, rows: npt.NDArray[np.integer]) -> Work:
        """Select plans."""
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
    """Start of the first forward and end of the last backward of every virtual stage, [J, n]."""

    first_start: IntArray
    last_end: IntArray

    @staticmethod
    def empty(work: Work) -> WorkEnds:
        """Make arrays of zeros to be filled."""
        shape = (len(work.class_of), len(work))
        return WorkEnds(np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64))


@dataclass(slots=True)
class OneChunk:
    """1F1B for many plans. The state [P, n] is the end of every rank's latest item.

    Slots 0 to P - 1: forward i of rank r in slot r + i. From slot P on, a rank runs a forward and a backward in
    turn: backward i in slot 2 P - 1 - r + 2 i and forward i in slot r + 2 i. So neighbours run different kinds in
    a slot, and an item waits for the latest item of its neighbour and of its own rank. A round is two slots; round
    g ends with slot 2 g - 1, after which a plan with g micro-batches has no forward of rank 0 left.
    """

    work: Work
    state: IntArray = field(init=False)
    ends: WorkEnds = field(init=False)
    forward: IntArray = field(init=False)
    backward: IntArray = field(init=False)
    short: IntArray | None = None
    """[n] micro-batches if all plans have fewer micro-batches than ranks, so that ramp and tail have different
    items in each plan; else None."""

    def __post_init__(self) -> None:
        """Run the ramp."""
        work = self.work
        self.forward, self.backward = work.forward[work.class_of], work.backward[work.class_of]
        self.ends, self.state = WorkEnds.empty(work), np.zeros((work.num_ranks, len(work)), dtype=np.int64)
        if (work.micro_batches < work.num_ranks).all():
            self.short = work.micro_batches
        for slot in range(work.num_ranks):
            self._ramp(slot)
        for slot in range(work.num_ranks, 2 * work.num_ranks):
            self._slot(slot, self._max_short)

    @property
    def first_round(self) -> int:
        """Last round of the ramp."""
        return self.work.num_ranks

    @property
    def rounds(self) -> IntArray:
        """Round after which the tail begins, [n]; for short plans the last round of the ramp."""
        return np.maximum(self.work.micro_batches, self.first_round)

    @property
    def lags(self) -> tuple[int, ...]:
        """Numbers of rounds after which states may repeat.

        A single round if one rank limits the rate; else the number of ranks that limit it together: all ranks, or
        those without an end of the model.
        """
        ranks = self.work.num_ranks
        return tuple(sorted({1, *(lag for lag in (ranks - 2, ranks - 1, ranks) if lag > 0)}))

    @property
    def looks(self) -> int:
        """Number of rounds between two searches for repetition."""
        return max(1, self.work.num_ranks // 2)

    @property
    def _max_short(self) -> int | None:
        """Maximum number of micro-batches of short plans."""
        return None if self.short is None else int(self.short.max())

    def _run(self, rows: slice, start: IntArray, duration: IntArray, offset: int, slope: int, rate: int) -> None:
        """Run an item on some ranks r from their starts on.

        The number of the item is (offset + slope r) / rate; short plans may not have it.
        """
        if self.short is None:
            np.add(start, duration[rows], out=self.state[rows])
            return
        numbers = offset + slope * np.arange(rows.start, rows.stop, rows.step)
        np.copyto(self.state[rows], start + duration[rows], where=numbers[:, None] < rate * self.short)

    def _ramp(self, slot: int) -> None:
        """Run the forwards of one of the first P slots."""
        low = 0 if self._max_short is None else max(0, slot - self._max_short + 1)
        state, rows = self.state, slice(max(low, 1), slot + 1, 1)
        arrived = state[rows.start - 1 : slot] + self.work.transfer_ns
        arrived = np.maximum(arrived, state[rows])
        if self.work.origin_ns is not None:
            first = arrived[-1] if slot else state[0]
            np.maximum(first, self.work.origin_ns[slot], out=first)
        self.ends.first_start[slot] = arrived[-1] if slot else state[0]
        if low == 0:
            self._run(slice(0, 1, 1), state[:1], self.forward, slot, -1, 1)
        self._run(rows, arrived, self.forward, slot, -1, 1)

    def _slot(self, slot: int, max_micro_batches: int | None) -> None:
        """Run backwards on every other rank and forwards on the ranks between them.

        ``max_micro_batches``: maximum over the plans; None: the slot has all its items in all plans.
        """
        ranks, state, transfer = self.work.num_ranks, self.state, self.work.transfer_ns
        turned = slot - 2 * ranks + 1
        last = ranks if max_micro_batches is None else min(ranks, 2 * max_micro_batches - turned)
        low = max(0, -turned)
        low += (slot + 1 - low) % 2
        back = slice(low, max(low, min(last, ranks - 1)), 2)
        received = np.maximum(state[back.start + 1 : back.stop + 1 : 2] + transfer, state[back])
        begin = max(0, 2 * ranks - slot, 0 if max_micro_batches is None else slot - 2 * max_micro_batches + 1)
        begin += (slot - begin) % 2
        ahead = slice(begin if begin else 2, max(begin if begin else 2, ranks), 2)
        arrived = np.maximum(state[ahead.start - 1 : ahead.stop - 1 : 2] + transfer, state[ahead])
        self._run(ahead, arrived, self.forward, slot, -1, 2)
        if begin == 0:
            self._run(slice(0, 1, 1), state[:1], self.forward, slot, -1, 2)
        if last == ranks and low < ranks and (ranks - 1 - low) % 2 == 0:
            self._run(slice(ranks - 1, ranks, 1), state[ranks - 1 :], self.backward, turned, 1, 2)
        self._run(back, received, self.backward, turned, 1, 2)

    def keep(self, work: Work, state: IntArray) -> None:
        """Continue with these plans and their states."""
        self.work, self.state = work, state
        self.forward, self.backward = work.forward[work.class_of], work.backward[work.class_of]

    def step(self, number: int) -> None:
        """Run round ``number`` of plans with more micro-batches; all rounds are alike."""
        ranks = self.work.num_ranks
        self._slot(2 * ranks, None)
        self._slot(2 * ranks + 1, None)

    def tail(self) -> WorkEnds:
        """Run the items after the last round, as if all plans had P micro-batches, or fewer if they are short."""
        ranks, micro_batches = self.work.num_ranks, self._max_short or self.work.num_ranks
        for slot in range(2 * ranks, 2 * micro_batches + 2 * ranks - 2):
            self._slot(slot, micro_batches)
        self.ends.last_end[:] = self.state
        return self.ends


@dataclass(slots=True)
class Interleaved:
    """Interleaved 1F1B for many plans. The state [2 P, n] is the end of every rank's latest forward, then
    backward.

    Phases: forward i of rank r in phase i + r; backward i after the forwards of phase v P - 1 + (P - 1 - r) + i.
    An item needs the output of another rank's item in the previous phase. This rank is the neighbour, or the rank
    at the other end where a chunk of the first or the last rank follows another chunk. A round is v P phases;
    round g ends with phase g v P - 1, after which a plan with g P micro-batches has no forward of rank 0 left.
    """

    work: Work
    state: IntArray = field(init=False)
    ends: WorkEnds = field(init=False)
    ahead: IntArray = field(init=False)
    """[v P, P] class of every rank's forward by phase."""
    back: IntArray = field(init=False)
    """[v P, P] class of every rank's backward by phase, from the phase of the first backward."""
    buffers: IntArray = field(init=False)
    """[2, P, n] buffers for starts and durations: repeated allocations of large arrays are slow."""
    phases: int = field(init=False)
    """Phases of a round."""

    def __post_init__(self) -> None:
        """Run the ramp."""
        work, ranks = self.work, np.arange(self.work.num_ranks)
        self.phases = work.num_ranks * work.vpp
        items = (np.arange(self.phases)[:, None] - ranks) % self.phases
        by_chunk = work.class_of.reshape(work.vpp, -1)
        self.ahead = by_chunk[items // work.num_ranks, ranks]
        self.back = by_chunk[work.vpp - 1 - items[:, ::-1] // work.num_ranks, ranks]
        self.ends = WorkEnds.empty(work)
        self.keep(work, np.zeros((2 * work.num_ranks, len(work)), dtype=np.int64))
        for phase in range(self.phases):
            self._forwards(phase, None)
        self._backwards(self.phases - 1, None)

    @property
    def first_round(self) -> int:
        """Last round of the ramp."""
        return 1

    @property
    def rounds(self) -> IntArray:
        """Round after which the tail begins, [n]."""
        return self.work.micro_batches // self.work.num_ranks

    @property
    def lags(self) -> tuple[int, ...]:
        """Numbers of rounds after which states may repeat."""
        return (1, 2)

    @property
    def looks(self) -> int:
        """Number of rounds between two searches for repetition."""
        return 1

    def _forwards(self, phase: int, items: int | None) -> None:
        """Run the forwards of a phase. ``items``: forwards of a rank in all; None: no limit in this phase."""
        work, P = self.work, self.work.num_ranks
        low = 0 if items is None else max(0, phase - items + 1)
        high = min(P, phase + 1)
        if low >= high:
            return
        forward, backward = self.state[:P], self.state[P:]
        start = self.buffers[0, low:high]
        inner = max(low, 1)
        np.add(forward[inner - 1 : high - 1], work.transfer_ns, out=start[inner - low :])
        if low == 0:
            if phase % self.phases >= P:
                np.add(forward[P - 1], work.transfer_ns, out=start[0])
            else:
                start[0] = 0
        np.maximum(start, backward[low:high], out=start)
        if phase < self.phases + P:
            # Before its first backward a rank waits for its previous forward.
            np.maximum(start, forward[low:high], out=start)
        if phase < self.phases:
            rank = phase % P
            if work.origin_ns is not None:
                np.maximum(start[rank], work.origin_ns[phase], out=start[rank])
            self.ends.first_start[phase] = start[rank]
        duration = self.buffers[1, low:high]
        work.forward.take(self.ahead[phase % self.phases, low:high], axis=0, out=duration, mode="clip")
        np.add(start, duration, out=forward[low:high])

    def _backwards(self, phase: int, items: int | None) -> None:
        """Run the backwards of a phase. ``items``: backwards of a rank in all; None: no limit in this phase."""
        work, P = self.work, self.work.num_ranks
        done = phase - self.phases + 1
        low, high = max(0, P - 1 - done), P if items is None else min(P, items + P - 1 - done)
        forward, backward = self.state[:P], self.state[P:]
        start = self.buffers[0, low:high]
        inner = min(high, P - 1)
        np.add(backward[low + 1 : inner + 1], work.transfer_ns, out=start[: inner - low])
        if high == P:
            if done % self.phases >= P:
                np.add(backward[0], work.transfer_ns, out=start[-1])
            else:
                start[-1] = 0
        np.maximum(start, forward[low:high], out=start)
        if items is not None:
            # Without a forward in between a rank waits for its previous backward.
            np.maximum(start, backward[low:high], out=start)
        duration = self.buffers[1, low:high]
        work.backward.take(self.back[done % self.phases, low:high], axis=0, out=duration, mode="clip")
        np.add(start, duration, out=backward[low:high])

    def keep(self, work: Work, state: IntArray) -> None:
        """Continue with these plans and their states."""
        self.work, self.state = work, state
        self.buffers = np.empty((2, work.num_ranks, len(work)), dtype=np.int64)

    def step(self, number: int) -> None:
        """Run round ``number`` of plans with more micro-batches."""
        # In the second round the backwards of the first ranks are still to come; all later rounds are alike.
        first = self.phases * min(number - 1, 2)
        for phase in range(first, first + self.phases):
            self._forwards(phase, None)
            self._backwards(phase, None)

    def tail(self) -> WorkEnds:
        """Run the items after the last round, as if all plans had two rounds, or one round if they are short."""
        all_work, state, short = self.work, self.state, self.rounds == 1
        for rounds, rows in ((1, np.flatnonzero(short)), (2, np.flatnonzero(~short))):
            if len(rows):
                self.keep(all_work.take(rows), state[:, rows])
                self.ends.last_end[:, rows] = self._tail(rounds)
        return self.ends

    def _tail(self, rounds: int) -> IntArray:
        """Find the ends of the last backwards [J, n] of plans with a number of rounds."""
        P, vpp, items = self.work.num_ranks, self.work.vpp, self.phases * rounds
        last_end = np.empty((self.phases, len(self.work)), dtype=np.int64)
        for phase in range(self.phases + P - 2):
            self._forwards(items + phase, items)
            self._backwards(items + phase, items)
            # Backwards of the last micro-batch: chunk after chunk, from the last rank to the first.
            rank = (2 * P - 3 - phase) % P
            chunk = vpp - 1 - (phase + rank - 2 * P + 3) // P
            if 0 <= chunk < vpp:
                last_end[chunk * P + rank] = self.state[P + rank]
        return last_end
