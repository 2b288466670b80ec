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
from typing import Protocol

import numpy as np

from milpplan.problem.plan import Schedule
from milpplan.simulation.bulk.lockstep import Interleaved, OneChunk, Work, WorkEnds
from milpplan.simulation.layout_columns import IntArray, ascending

_REPEATING: frozenset[Schedule] = frozenset({"gpipe", "1f1b"})
LEAP = 8
"""Least number of rounds that a plan is moved on at once; nor fewer than states are kept of it."""
_MAX_STATE = 2**16
"""Numbers in a state of all plans of a part: small enough for the caches."""


def repeats(schedule: Schedule, vpp: int) -> bool:
    """Whether ``work_ends`` knows the schedule (not the interleaved one with a chunk, whose last round may be
    shorter than the others)."""
    return schedule in _REPEATING or (schedule == "interleaved" and vpp > 1)


def work_ends(schedule: Schedule, work: Work) -> WorkEnds:
    """First starts and last ends of plans with one of the schedules that ``repeats`` names."""
    if work.num_ranks == 1 or schedule == "gpipe":
        return _one_rank(work) if work.num_ranks == 1 else _gpipe(work)
    found, size = WorkEnds.empty(work), max(1, _MAX_STATE // (2 * work.num_ranks))
    for rows in _parts(_kinds_of_tail(schedule, work), work.micro_batches, size):
        part = work.take(rows)
        lockstep = OneChunk(part) if schedule == "1f1b" else Interleaved(part)
        ends = _walked(lockstep)
        found.first_start[:, rows], found.last_end[:, rows] = ends.first_start, ends.last_end
    return found


def _kinds_of_tail(schedule: Schedule, work: Work) -> IntArray:
    """1 [n] where a plan is so short that its tail begins before the ramp ends, else 0: those have one tail."""
    short = (schedule == "1f1b") & (work.micro_batches < work.num_ranks)
    return np.where(short, 1, 0)


def _parts(kinds: IntArray, micro_batches: IntArray, size: int) -> Iterator[IntArray]:
    """Rows of one kind, at most ``size`` of them at a time. Plans of like length go together: the shorter all are,
    the fewer ranks are at work at a time, and the sooner all have ended."""
    for kind in ascending(kinds):
        rows = np.flatnonzero(kinds == kind)
        rows = rows[np.argsort(micro_batches[rows], kind="stable")]
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
            if steps & (steps - 1) == 0:
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
        for back in ascending(ago):
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
