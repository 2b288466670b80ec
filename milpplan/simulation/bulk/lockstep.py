"""1F1B and the interleaved schedule with many plans in lockstep: one slice of ranks, all plans, at a time.

All plans of a batch have the same schedule, ranks P and chunks v; they differ in durations, transfers and
micro-batches. The recursions are those of ``pipeline``, item by item. A schedule is a ramp, rounds that are all
alike, and a tail; ``repeating`` says how many rounds have to be gone through.

Source: the schedules are those of ``work_order``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from milpplan.simulation.layout_columns import IntArray


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


@dataclass(slots=True)
class OneChunk:
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
    short: IntArray | None = None
    """Micro-batches [n] where all plans have fewer than ranks: then each has its own items in ramp and tail."""

    def __post_init__(self) -> None:
        """The ramp."""
        work = self.work
        self.forward, self.backward = work.forward[work.class_of], work.backward[work.class_of]
        self.ends, self.state = WorkEnds.empty(work), np.zeros((work.num_ranks, len(work)), dtype=np.int64)
        if (work.micro_batches < work.num_ranks).all():
            self.short = work.micro_batches
        for slot in range(work.num_ranks):
            self._ramp(slot)
        for slot in range(work.num_ranks, 2 * work.num_ranks):
            self._slot(slot, self._most)

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

    @property
    def _most(self) -> int | None:
        """Micro-batches of the longest of short plans."""
        return None if self.short is None else int(self.short.max())

    def _run(self, rows: slice, start: IntArray, took: IntArray, place: int, rises: int, rate: int) -> None:
        """Items of some ranks r from their starts on; item (place + rises r) / rate of short plans may not be."""
        if self.short is None:
            np.add(start, took[rows], out=self.state[rows])
            return
        places = place + rises * np.arange(rows.start, rows.stop, rows.step)
        np.copyto(self.state[rows], start + took[rows], where=places[:, None] < rate * self.short)

    def _ramp(self, slot: int) -> None:
        """Forwards alone, in the first P slots."""
        low = 0 if self._most is None else max(0, slot - self._most + 1)
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

    def _slot(self, slot: int, most: int | None) -> None:
        """Backwards on every other rank, forwards between them; ``most``: no plan has more micro-batches."""
        ranks, state, transfer = self.work.num_ranks, self.state, self.work.transfer_ns
        turned = slot - 2 * ranks + 1
        last = ranks if most is None else min(ranks, 2 * most - turned)
        low = max(0, -turned)
        low += (slot + 1 - low) % 2
        back = slice(low, max(low, min(last, ranks - 1)), 2)
        received = np.maximum(state[back.start + 1 : back.stop + 1 : 2] + transfer, state[back])
        begin = max(0, 2 * ranks - slot, 0 if most is None else slot - 2 * most + 1)
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
        ranks, most = self.work.num_ranks, self._most or self.work.num_ranks
        for slot in range(2 * ranks, 2 * most + 2 * ranks - 2):
            self._slot(slot, most)
        self.ends.last_end[:] = self.state
        return self.ends


@dataclass(slots=True)
class Interleaved:
    """Interleaved 1F1B. The state [2 P, n] is the end of every rank's latest forward, then latest backward.

    Phases: forward i of rank r in phase i + r; backward i after the forwards of phase v P - 1 + (P - 1 - r) + i.
    What an item needs of another rank, it did in the phase before: the neighbour, or where a chunk of the first or
    the last rank follows another, the rank at the other end. A round is v P phases; round g ends with phase
    g v P - 1, after which a plan with g P micro-batches has no forward of rank 0 left.
    """

    work: Work
    state: IntArray = field(init=False)
    ends: WorkEnds = field(init=False)
    ahead: IntArray = field(init=False)
    """The class of every rank's forward by phase, [v P, P]."""
    back: IntArray = field(init=False)
    """The same of backwards, from the phase of the first one."""
    buffers: IntArray = field(init=False)
    """Room for starts and durations, [2, P, n]: large arrays are slow to get again and again."""
    phases: int = field(init=False)
    """Phases of a round."""

    def __post_init__(self) -> None:
        """The ramp."""
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

    def _forwards(self, phase: int, items: int | None) -> None:
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
            # Before its first backward a rank waits for its forward before.
            np.maximum(start, forward[low:high], out=start)
        if phase < self.phases:
            rank = phase % P
            if work.origin_ns is not None:
                np.maximum(start[rank], work.origin_ns[phase], out=start[rank])
            self.ends.first_start[phase] = start[rank]
        took = self.buffers[1, low:high]
        work.forward.take(self.ahead[phase % self.phases, low:high], axis=0, out=took, mode="clip")
        np.add(start, took, out=forward[low:high])

    def _backwards(self, phase: int, items: int | None) -> None:
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
            # Without a forward in between a rank waits for its backward before.
            np.maximum(start, backward[low:high], out=start)
        took = self.buffers[1, low:high]
        work.backward.take(self.back[done % self.phases, low:high], axis=0, out=took, mode="clip")
        np.add(start, took, out=backward[low:high])

    def keep(self, work: Work, state: IntArray) -> None:
        """Go on with these plans and their states."""
        self.work, self.state = work, state
        self.buffers = np.empty((2, work.num_ranks, len(work)), dtype=np.int64)

    def step(self, number: int) -> None:
        """Round ``number``, of plans with more micro-batches."""
        # In the second round the first ranks' backwards are still to come; all later ones are alike.
        first = self.phases * min(number - 1, 2)
        for phase in range(first, first + self.phases):
            self._forwards(phase, None)
            self._backwards(phase, None)

    def tail(self) -> WorkEnds:
        """What is left after the last round: as if all plans had two rounds, or those that have one had that."""
        whole, state, short = self.work, self.state, self.rounds == 1
        for rounds, rows in ((1, np.flatnonzero(short)), (2, np.flatnonzero(~short))):
            if len(rows):
                self.keep(whole.take(rows), state[:, rows])
                self.ends.last_end[:, rows] = self._tail(rounds)
        return self.ends

    def _tail(self, rounds: int) -> IntArray:
        """Ends of the last backwards [J, n] of plans with so many rounds."""
        P, vpp, items = self.work.num_ranks, self.work.vpp, self.phases * rounds
        last_end = np.empty((self.phases, len(self.work)), dtype=np.int64)
        for place in range(self.phases + P - 2):
            self._forwards(items + place, items)
            self._backwards(items + place, items)
            # Backwards of the last micro-batch: chunk after chunk, from the last rank to the first.
            rank = (2 * P - 3 - place) % P
            chunk = vpp - 1 - (place + rank - 2 * P + 3) // P
            if 0 <= chunk < vpp:
                last_end[chunk * P + rank] = self.state[P + rank]
        return last_end
