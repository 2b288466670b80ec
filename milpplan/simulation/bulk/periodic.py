"""Exact ends of the work items of many plans in lockstep, without simulating periodic rounds.

For GPipe, 1F1B and the interleaved schedule. All plans of a batch have the same schedule, ranks P and chunks v;
they differ in durations, transfers and micro-batches. The recursions are those of ``step_graph``, item by item,
but all ranks that work at the same time form a slice, and all plans go through the schedule together.

Jump. After the ramp the schedule repeats: a *round* is a forward and a backward of every rank (1F1B), or those of
P micro-batches in all chunks (interleaved). The items after a round depend only on the ends of the last item of
each kind on every rank, the *state*, by maxima and sums only. So if the states after rounds g and g - q differ by
the same number on all ranks, all ends after g are the ends after g - q plus this number: the state after any later
round is one of the last q states plus a multiple of the number. No assumption is made about when, or whether, this
happens: plans that do not repeat go through all their rounds. After its last round every plan runs the same tail.

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
