"""A step of teams in milliseconds: for batches in training, where nobody waits for a search.

Heuristic; what it gives is simulated exactly (``teams``). A micro-batch takes about a constant, and for each of
its sequences an amount that its length says (``AffineTime``): a line of its products at many grains, and its
attention.

 1. Every length goes to the degree where it takes least of the seats' time, its part of the constants included,
    and no longer than the whole step, or some part of it: where sequences are few, the best of several parts.
 2. From the largest degree to the smallest, the longest first, each sequence goes to the team that would be done
    first, into the fullest micro-batch with room for it, or a new one. Before the next degree the micro-batches
    are timed exactly.
 3. Sequences of the seats that end last move to those that end first, as long as that is known to help; then all
    are timed again.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from dataclasses import dataclass, field

import numpy as np

from milpplan.lengths.side_by_side.teams import Family, TeamStep, Turn, simulated
from milpplan.lengths.single.packing_local_search import Timer
from milpplan.simulation.layout_columns import FloatArray, IntArray

# A sequence runs under degrees where it takes no longer than some part of the step: parts that are tried for so
# few sequences, and for more, until seats wait for no more than a part of the step; how often that is estimated.
_FEW, _PARTS, _MANY, _NEAR, _ESTIMATES = 400, (1.0, 1.4, 0.7, 2.0, 0.4), 3, 0.02, 3
# How often seats are levelled and timed anew, and moves of each time.
_PASSES, _MOVES = 3, 48
# Of the time that two seats differ by, the least and the most that a move may take over.
_LEAST, _MOST = 0.05, 0.75


@dataclass(frozen=True, slots=True, eq=False)
class AffineTime:
    """A strategy about linear: ``empty`` ns of a micro-batch, ``each`` [n] ns of a sequence, ``alone`` [n] ns of
    one that has a micro-batch to itself; infinite where it does not fit into ``room`` grains."""

    member: int
    capacity: int
    constant_ns: float
    sequence_ns: FloatArray
    single_ns: FloatArray

    @staticmethod
    def of(member: int, timer: Timer) -> AffineTime:
        """Through the times at half the room and at all of it."""
        room = timer.max_quanta
        half = max(1, room // 2)
        bare = timer.base[:, :, 0].sum(axis=1).max(axis=0)
        slope = float(bare[room - 1] - bare[half - 1]) / max(1, room - half)
        attention = timer.attention[:, :, 0].sum(axis=1).max(axis=0)
        fits = timer.quanta <= room
        alone = timer.phases(np.eye(len(fits), dtype=np.int64)).sum(axis=(0, 1))
        return AffineTime(
            member,
            room,
            max(0.0, float(bare[room - 1]) - slope * room),
            np.where(fits, slope * timer.quanta + attention, np.inf),
            np.where(fits, alone, np.inf),
        )

    def cost(self, grains: IntArray) -> FloatArray:
        """Time of a sequence of every length with its part of a full micro-batch's constant, [n] ns."""
        return self.sequence_ns + self.constant_ns * grains / self.capacity

    def for_lengths(self, held: IntArray) -> AffineTime:
        """That of some lengths."""
        return AffineTime(self.member, self.capacity, self.constant_ns, self.sequence_ns[held], self.single_ns[held])


@dataclass(slots=True, eq=False)
class _Micro:
    """A micro-batch: its line, what room is left, its lengths."""

    line: AffineTime
    left: int
    held: list[int] = field(default_factory=list)
    time_ns: float = 0.0


class _Degree:
    """The teams of one degree, with their micro-batches."""

    def __init__(self, size: int, lines: list[AffineTime], grains: list[int], num_seats: int) -> None:
        self.size, self.lines, self.grains = size, lines, grains
        self.teams: list[list[_Micro]] = [[] for _ in range(num_seats // size)]

    def deal(self, items: list[int], done: list[float]) -> None:
        """Sequences, each to the team that would be done first; what teams take before is ``done``."""
        queue = [(ns, team) for team, ns in enumerate(done)]
        heapq.heapify(queue)
        # Rooms of each team's micro-batches, ascending.
        rooms: list[list[tuple[int, int]]] = [[] for _ in queue]
        for k in items:
            ns, team = queue[0]
            mine, micros, size = rooms[team], self.teams[team], self.grains[k]
            place = bisect_left(mine, (size, 0))
            if place < len(mine):
                left, number = mine.pop(place)
            else:
                line = next(one for one in self.lines if np.isfinite(one.sequence_ns[k]))
                left, number = line.capacity, len(micros)
                micros.append(_Micro(line, 0))
                ns += line.constant_ns
            one = micros[number]
            one.held.append(k)
            one.left = left - size
            insort(mine, (one.left, number))
            heapq.heapreplace(queue, (ns + float(one.line.sequence_ns[k]), team))

    def timed(self, family: Family, number: int) -> FloatArray:
        """Exact time of every team, [T] ns, for so many lengths."""
        for line in self.lines:
            micros = [one for team in self.teams for one in team if one.line is line and one.held]
            if micros:
                times = family.timer(line.member).phases(_rows(micros, number)).sum(axis=(0, 1))
                for one, time_ns in zip(micros, times.tolist(), strict=True):
                    one.time_ns = time_ns
        return np.array([sum(one.time_ns for one in team if one.held) for team in self.teams])

    def turns(self, number: int) -> list[Turn]:
        """What runs on every team, strategy by strategy."""
        found = []
        for team, micros in enumerate(self.teams):
            for line in self.lines:
                mine = [one for one in micros if one.line is line and one.held]
                if mine:
                    found.append(Turn(line.member, team, _rows(mine, number)))
        return found

    def move(self, slow: int, fast: int, difference: float) -> float:
        """A sequence of team ``slow`` to a micro-batch of ``fast`` that has room, the one that takes about half of
        the difference; what it takes, 0 where there is none."""
        best, found = np.inf, None
        for here in self.teams[slow]:
            for k in set(here.held):
                each = float(here.line.sequence_ns[k])
                off = abs(each - difference / 2)
                if off < best and _LEAST * difference < each < _MOST * difference:
                    size = self.grains[k]
                    there = next((one for one in self.teams[fast] if one.held and one.left >= size), None)
                    if there is not None:
                        best, found = off, (here, there, k)
        if found is None:
            return 0.0
        here, there, k = found
        here.held.remove(k)
        here.left += self.grains[k]
        there.held.append(k)
        there.left -= self.grains[k]
        return float(here.line.sequence_ns[k])


def _rows(micros: list[_Micro], number: int) -> IntArray:
    rows = np.zeros((len(micros), number), dtype=np.int64)
    sizes = [len(one.held) for one in micros]
    held = np.array([k for one in micros for k in one.held], dtype=np.int64)
    np.add.at(rows, (np.repeat(np.arange(len(micros)), sizes), held), 1)
    return rows


def lines(family: Family) -> dict[int, list[AffineTime]]:
    """Those of every degree of the family's chain, the least room first."""
    pairs = list(zip(family.members, family.degrees, strict=True))
    return {
        degree: sorted(
            (AffineTime.of(member, family.timer(member)) for member, mine in pairs if mine == degree),
            key=lambda one: one.capacity,
        )
        for degree in family.degree_chain
    }


def quick_step(family: Family, known: dict[int, list[AffineTime]]) -> TeamStep:
    """The step of the sequences that there are, by the lines of all degrees."""
    return simulated(family, quick_turns(family, known))


def quick_turns(family: Family, known: dict[int, list[AffineTime]]) -> list[Turn]:
    """Its turns, the largest degree first."""
    few = int(family.pool.load.counts.sum()) <= _FEW
    costs, ways = _Costs.of(family, known), []
    for part in _PARTS if few else _PARTS[:_MANY]:
        ways.append(_Dealt(family, known, costs.chosen(part)))
        if ways[-1].last_ns <= costs.least_ns * (1.0 + _NEAR):
            break
    return min(ways, key=lambda one: one.last_ns).turns()


@dataclass(frozen=True, slots=True, eq=False)
class _Costs:
    """What a sequence of every length takes under the degrees of a family's chain, of all ``seats``' time, and
    ``alone``, [degrees, n] ns; ``counts`` [n] of them."""

    seats: FloatArray
    alone: FloatArray
    counts: IntArray
    num_seats: int

    @staticmethod
    def of(family: Family, known: dict[int, list[AffineTime]]) -> _Costs:
        """Each under the strategy of the degree that takes least."""
        load, ways = family.pool.load, [known[size] for size in family.degree_chain]
        grains = load.lengths // load.token_quantum
        each = np.array([np.min([one.cost(grains) for one in mine], axis=0) for mine in ways])
        alone = np.array([np.min([one.single_ns for one in mine], axis=0) for mine in ways])
        return _Costs(each * np.array(family.degree_chain)[:, None], alone, load.counts, family.num_slots)

    @property
    def least_ns(self) -> float:
        """About what the step takes where no seat waits."""
        return self._step_ns(self.seats)

    def _step_ns(self, seats: FloatArray) -> float:
        longest = float(self.alone.min(axis=0)[self.counts > 0].max())
        return max(longest, float(self.counts @ seats.min(axis=0)) / self.num_seats)

    def chosen(self, part: float) -> IntArray:
        """The degree of every length, [n], as a place in the chain: the cheapest of those where it takes no longer
        than a part of the step, or least of all."""
        limited = self.seats
        for _ in range(_ESTIMATES):
            fits = (self.alone <= part * self._step_ns(limited)) | (self.alone == self.alone.min(axis=0))
            limited = np.where(fits, self.seats, np.inf)
        return np.asarray(limited.argmin(axis=0))


class _Dealt:
    """All sequences under the degree that is ``chosen`` [n] for every length."""

    def __init__(self, family: Family, known: dict[int, list[AffineTime]], chosen: IntArray) -> None:
        load, seats = family.pool.load, family.num_slots
        self.family, self.number, self.grains = family, len(load.lengths), load.lengths // load.token_quantum
        ends = np.zeros(seats)
        self.degrees: list[_Degree] = []
        for row, size in enumerate(family.degree_chain):
            mine = np.flatnonzero((chosen == row) & (load.counts > 0))
            one = _Degree(size, self._cheapest_first(known[size], mine), self.grains.tolist(), seats)
            items = mine[np.argsort(-one.lines[-1].sequence_ns[mine], kind="stable")]
            before = ends.reshape(-1, size).max(axis=1)
            one.deal(np.repeat(items, load.counts[items]).tolist(), before.tolist())
            ends = np.repeat(before + one.timed(family, self.number), size)
            self.degrees.append(one)
        self.last_ns = self._levelled(ends)

    def turns(self) -> list[Turn]:
        """What runs where."""
        return [turn for one in self.degrees for turn in one.turns(self.number)]

    def _cheapest_first(self, found: list[AffineTime], mine: IntArray) -> list[AffineTime]:
        """Lines of a degree without those of less room than the one that takes least for its sequences."""
        counts, costs = self.family.pool.load.counts[mine], [one.cost(self.grains)[mine] for one in found]
        totals = [float(counts @ np.where(np.isfinite(one), one, costs[-1])) for one in costs]
        return found[int(np.argmin(totals)) :]

    def _levelled(self, ends: FloatArray) -> float:
        """Move sequences of the smallest degree between its teams until they are done about together; when the
        last seat is done, ns."""
        last = self.degrees[-1]
        done = ends.reshape(-1, last.size).max(axis=1)
        beneath = done - last.timed(self.family, self.number)
        for _ in range(_PASSES):
            for _ in range(_MOVES):
                slow, fast = int(done.argmax()), int(done.argmin())
                moved = last.move(slow, fast, float(done[slow] - done[fast]))
                if moved == 0.0:
                    break
                done[slow] -= moved
                done[fast] += moved
            done = beneath + last.timed(self.family, self.number)
        return float(done.max())
