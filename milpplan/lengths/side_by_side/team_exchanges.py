"""Making a step of teams shorter by exchanges of sequences between its micro-batches.

Heuristic; answers are simulated exactly (``teams``). Degrees nest, so a seat is done after the sum of all
micro-batches that run on it, and the step is the largest of these ends e_s. What is made smaller is

    sum over seats of exp(e_s / tau)

with tau falling from a hundredth of the step or so, where all time counts, to a fraction of a thousandth, where
only the seats count that end last. Exchanges change few ends by one amount each, so many are compared at once:
for a pair of micro-batches every sequence of one, or none, against every one of the other, or none, at the exact
times of both (``dealing.Timer``). Besides, a micro-batch moves to another team, of any degree, or a new one opens.
The best exchange of the pair is made if it helps. Every micro-batch runs under the strategy of its degree that
recomputes least and holds it. Random numbers are seeded, and rounds are counted.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from milpplan.lengths.side_by_side.teams import Family, Turn
from milpplan.simulation.layout_columns import BoolArray, FloatArray, IntArray

# tau at first and in the end, as a share of the step.
_FIRST, _LAST = 1e-2, 2e-4
# What share of the rounds moves a micro-batch, and opens one; in what share the first one is of the seat that ends
# last, and of another seat.
_MOVES, _OPENS, _SLOWEST, _SEAT = 0.08, 0.07, 0.5, 0.3
# What counts as less.
_LESS = 1e-9
# No potential is larger than exp of this.
_STEEP = 200.0
# Rounds between two looks at the clock.
_LOOK = 64


@dataclass(frozen=True, eq=False)
class Degree:
    """The members of a degree, from the least capacity, with their times: ``rooms`` grains; per member ``base``
    [2 ways, 2 phases, G], ``attention`` and ``once`` [2, 2, n] ns with nothing as the last place of
    ``attention``, which is the last place of ``sizes``, too."""

    size: int
    members: tuple[int, ...]
    rooms: tuple[int, ...]
    base: tuple[FloatArray, ...]
    attention: tuple[FloatArray, ...]
    once: tuple[FloatArray, ...]
    sizes: IntArray

    @staticmethod
    def of(family: Family, degree: int) -> Degree:
        """That of a family."""
        pairs = zip(family.members, family.degrees, strict=True)
        members = sorted((member for member, mine in pairs if mine == degree), key=family.max_quanta)
        timers = [family.timer(member) for member in members]
        return Degree(
            degree,
            tuple(members),
            tuple(map(family.max_quanta, members)),
            tuple(one.base[:, :, 0] for one in timers),
            tuple(np.pad(one.attention[:, :, 0], ((0, 0), (0, 0), (0, 1))) for one in timers),
            tuple(one.once[:, :, 0] for one in timers),
            np.append(timers[0].quanta, 0),
        )

    def member(self, grains: int) -> int:
        """The member that runs so many grains."""
        return self.members[self.place(grains)]

    def place(self, grains: int) -> int:
        """Its place among the members."""
        return bisect_left(self.rooms, grains)


@dataclass(slots=True, eq=False)
class Batch:
    """A micro-batch ``held`` [n] on a team of a degree, and what follows: grains, attention under every member
    [2 ways, 2 phases], time in ns."""

    degree: Degree
    team: int
    held: IntArray
    grains: int = 0
    sums: tuple[FloatArray, ...] = ()
    time_ns: float = 0.0

    def __post_init__(self) -> None:
        degree = self.degree
        self.grains = int(self.held @ degree.sizes[:-1])
        self.sums = tuple(each[:, :, :-1] @ self.held for each in degree.attention)
        self.time_ns = np.inf
        if self.grains <= degree.rooms[-1]:
            place, longest = degree.place(self.grains), self.held.nonzero()[0][-1:]
            ways = degree.base[place][:, :, self.grains - 1] + self.sums[place]
            ways = ways[:, :, None] + degree.once[place][:, :, longest]
            # Of one length, or of none: nothing takes no time.
            self.time_ns = float(ways.max(axis=0).sum())

    def with_(self, goes: int, comes: int) -> Batch:
        """After an exchange; the number of lengths is nothing."""
        held = self.held.copy()
        for place, sign in ((goes, -1), (comes, 1)):
            if place < len(held):
                held[place] += sign
        return Batch(self.degree, self.team, held)

    @property
    def choices(self) -> IntArray:
        """Lengths that are there, and nothing."""
        return np.append(np.flatnonzero(self.held), len(self.held))

    @property
    def seats(self) -> slice:
        """Those of its team."""
        return slice(self.degree.size * self.team, self.degree.size * (self.team + 1))

    def exchanged(self, goes: IntArray, comes: IntArray) -> FloatArray:
        """Times [K, L] with one sequence of ``goes`` [K] less and one of ``comes`` [L] more; infinite where that
        does not fit."""
        degree, number = self.degree, len(self.held)
        grains = self.grains - degree.sizes[goes][:, None] + degree.sizes[comes]
        longest = np.maximum(self._longest_without(goes)[:, None], np.where(comes < number, comes, 0))
        times = np.where(grains == 0, 0.0, np.inf)
        least = 0
        for place, room in enumerate(degree.rooms):
            mine = (grains > least) & (grains <= room)
            least = max(least, room)
            if not mine.any():
                continue
            rows, columns = np.nonzero(mine)
            each = degree.attention[place]
            sums = self.sums[place][:, :, None] - each[:, :, goes[rows]] + each[:, :, comes[columns]]
            ways = degree.base[place][:, :, grains[mine] - 1] + sums + degree.once[place][:, :, longest[mine]]
            times[mine] = ways.max(axis=0).sum(axis=0)
        return times

    def _longest_without(self, goes: IntArray) -> IntArray:
        """The longest that stays, 0 if none does."""
        there = np.flatnonzero(self.held)
        if not len(there):
            return np.zeros_like(goes)
        second = there[-2] if len(there) > 1 else 0
        return np.where((goes == there[-1]) & (self.held[there[-1]] == 1), second, there[-1])


class _Board:
    """All micro-batches, and the ends of the seats [M] ns."""

    def __init__(self, family: Family, turns: Sequence[Turn]) -> None:
        self.family = family
        self.degrees = {degree: Degree.of(family, degree) for degree in family.degree_chain}
        self.batches: list[Batch] = []
        self.ends = np.zeros(family.num_slots)
        for turn in turns:
            degree = self.degrees[family.pool.members[turn.member].candidate.layout.cp]
            for held in turn.packed:
                self.add(Batch(degree, turn.team, held))

    def add(self, batch: Batch) -> None:
        """Nothing, if it is empty."""
        if batch.grains:
            self.batches.append(batch)
            self.ends[batch.seats] += batch.time_ns

    def remove(self, batch: Batch) -> None:
        """One that is there, or empty."""
        if batch.grains:
            self.batches.remove(batch)
            self.ends[batch.seats] -= batch.time_ns

    def chosen(self, random: np.random.Generator) -> Batch:
        """A micro-batch: of the seat that ends last, of another seat, or any."""
        kind = random.random()
        if kind < _SLOWEST + _SEAT:
            seat = int(self.ends.argmax() if kind < _SLOWEST else random.integers(len(self.ends)))
            there = [one for one in self.batches if one.team == seat // one.degree.size]
            if there:
                return there[int(random.integers(len(there)))]
        return self.batches[int(random.integers(len(self.batches)))]

    def moved(self, batch: Batch, tau: float) -> bool:
        """A micro-batch to the team, of any degree, where it adds least."""
        latest, now = self.ends.max(), np.exp((self.ends - self.ends.max()) / tau).sum()
        without = self.ends.copy()
        without[batch.seats] -= batch.time_ns
        best: tuple[float, Batch] | None = None
        for degree in self.degrees.values():
            if batch.grains > degree.rooms[-1]:
                continue
            there = batch if degree is batch.degree else Batch(degree, 0, batch.held)
            before = _power((without - latest) / tau)
            after = _power((without + there.time_ns - latest) / tau)
            sums = (after - before).reshape(-1, degree.size).sum(axis=1)
            team, total = int(sums.argmin()), float(before.sum() + sums.min())
            if best is None or total < best[0]:
                best = total, Batch(degree, team, batch.held)
        if best is None or best[0] >= now * (1.0 - _LESS):
            return False
        self.remove(batch)
        self.add(best[1])
        return True

    def exchanged(self, here: Batch, there: Batch, tau: float) -> bool:
        """The best exchange of at most one sequence of each, if it helps."""
        mine, other = here.choices, there.choices
        changes = here.exchanged(mine, other) - here.time_ns, there.exchanged(other, mine).T - there.time_ns
        masks = np.zeros((2, len(self.ends)), dtype=bool)
        masks[0, here.seats] = masks[1, there.seats] = True
        both = masks[0] & masks[1]
        added = self._added(masks[0] & ~both, changes[0], tau) + self._added(masks[1] & ~both, changes[1], tau)
        added = added + self._added(both, changes[0] + changes[1], tau)
        added[~np.isfinite(changes[0] + changes[1])] = np.inf
        k, other_k = np.unravel_index(int(added.argmin()), added.shape)
        now = _power((self.ends - self.ends.max()) / tau).sum()
        if added[k, other_k] >= -_LESS * now:
            return False
        self.remove(here)
        self.remove(there)
        self.add(here.with_(int(mine[k]), int(other[other_k])))
        self.add(there.with_(int(other[other_k]), int(mine[k])))
        return True

    def _added(self, seats: BoolArray, change: FloatArray, tau: float) -> FloatArray:
        """What the seats' ends add to the potential when all change so."""
        if not seats.any():
            return np.zeros_like(change)
        latest, mine = self.ends.max(), self.ends[seats]
        last = mine.max()
        weight = np.exp((mine - last) / tau).sum()
        return np.asarray(weight * (_power((last - latest + change) / tau) - _power((last - latest) / tau)))

    def turns(self, batches: list[Batch]) -> list[Turn]:
        """Turns, the largest degree first, the strategies of a team one after another."""
        found: dict[tuple[int, int, int], list[IntArray]] = {}
        for one in batches:
            key = -one.degree.size, one.team, one.degree.member(one.grains)
            found.setdefault(key, []).append(one.held)
        return [
            Turn(member, team, np.array(rows)) for (_, team, member), rows in sorted(found.items(), key=_first)
        ]


def _first(pair: tuple[tuple[int, int, int], list[IntArray]]) -> tuple[int, int, int]:
    return pair[0]


def _power(exponents: FloatArray) -> FloatArray:
    return np.asarray(np.exp(np.minimum(exponents, _STEEP)))


def improved(
    family: Family, turns: Sequence[Turn], rounds: int, cutoff_ns: float, deadline: float, seed: int = 1
) -> list[Turn]:
    """The best turns met in so many rounds; stops when all are done within ``enough_ns``, or at the ``deadline``
    (of ``perf_counter``)."""
    random = np.random.default_rng(seed)
    board = _Board(family, turns)
    best, least = list(board.batches), float(board.ends.max())
    for turn in range(rounds):
        if least <= cutoff_ns or (turn % _LOOK == 0 and time.perf_counter() > deadline):
            break
        tau = float(board.ends.max()) * _FIRST * (_LAST / _FIRST) ** (turn / rounds)
        kind, here = random.random(), board.chosen(random)
        if kind < _MOVES:
            changed = board.moved(here, tau)
        elif kind < _MOVES + _OPENS:
            size = int(random.choice(family.degree_chain))
            team = int(random.integers(family.num_slots // size))
            changed = board.exchanged(here, Batch(board.degrees[size], team, np.zeros_like(here.held)), tau)
        else:
            there = board.batches[int(random.integers(len(board.batches)))]
            changed = there is not here and board.exchanged(here, there, tau)
        if changed and board.ends.max() < least:
            best, least = list(board.batches), float(board.ends.max())
    return board.turns(best)
