"""Dealing sequences out to teams: under which degree each runs, on which team, in which micro-batches.

Heuristic. Degrees run largest first, so that teams nest: a team of c seats waits for nothing but the teams of more
seats around it, and small teams level what large ones leave uneven.

 1. *Degrees.* Every length goes to the degree where its price, times a factor of the degree, is least.
 2. *Teams.* From the largest degree to the smallest, the longest work first, each sequence to the team that
    would be done first.
 3. *Micro-batches* of a team: few full ones, or as even ones, for every capacity of the degree's strategies, each
    then under the strategy that takes least; the shortest of these.

Times are those of ``dealing.Timer``, which are exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from milpplan.costs.columns import FloatArray, IntArray
from milpplan.lengths.team_bound import SharedWork
from milpplan.lengths.team_quick import Line, lines
from milpplan.lengths.teams import Family, Turn


@dataclass(frozen=True, slots=True, eq=False)
class Filled:
    """The micro-batches of one team by member, and their time in ns."""

    packed: dict[int, IntArray]
    time_ns: float


@dataclass(frozen=True, eq=False)
class Packer:
    """A family with what packing asks again and again."""

    family: Family
    shared: SharedWork

    @cached_property
    def lines(self) -> dict[int, list[Line]]:
        """Those of ``team_quick``."""
        return lines(self.family)

    def members(self, degree: int) -> list[int]:
        """Members of a degree."""
        pairs = zip(self.family.members, self.family.degrees, strict=True)
        return [member for member, mine in pairs if mine == degree]

    @cached_property
    def prices(self) -> FloatArray:
        """Least price of every length under every degree, [degrees, n] ns of all seats."""
        rows = np.array(self.family.degrees)
        return np.array([self.shared.prices[rows == degree].min(axis=0) for degree in self.family.chain])

    @cached_property
    def each(self) -> FloatArray:
        """Time of a sequence on a team of every degree, about, [degrees, n] ns."""
        return np.asarray(self.prices * self.family.num_seats / np.array(self.family.chain)[:, None])

    def filled(self, degree: int, held: IntArray) -> Filled:
        """Micro-batches of one team with ``held`` [n] sequences."""
        if not held.any():
            return Filled({}, 0.0)
        grains = self.family.pool.load.lengths // self.family.pool.load.grain
        found = [
            self._cheapest(degree, way(grains, held, room))
            for room in self.rooms[degree]
            for way in (_full, _even)
        ]
        return min(found, key=lambda one: one.time_ns)

    @cached_property
    def rooms(self) -> dict[int, list[IntArray]]:
        """For every capacity of a degree's members: grains of a micro-batch whose longest sequence has each
        length, [n]; so many, or more only for a sequence that is longer."""
        grains, found = self.family.pool.load.lengths // self.family.pool.load.grain, {}
        for degree in self.family.chain:
            capacities = np.unique([self.family.grains(member) for member in self.members(degree)])
            least = capacities[np.minimum(np.searchsorted(capacities, grains), len(capacities) - 1)]
            found[degree] = [np.maximum(least, most) for most in capacities]
        return found

    def _cheapest(self, degree: int, rows: IntArray) -> Filled:
        """Every micro-batch under the member of the degree that takes least."""
        members = self.members(degree)
        times = np.array([self.times(member, rows) for member in members])
        best = times.argmin(axis=0)
        packed = {member: rows[best == place] for place, member in enumerate(members) if (best == place).any()}
        return Filled(packed, float(times.min(axis=0).sum()))

    def times(self, member: int, rows: IntArray) -> FloatArray:
        """Time of every micro-batch, infinite where it does not fit, [v]."""
        timer = self.family.timer(member)
        return np.where(rows @ timer.grains <= timer.most_grains, timer.phases(rows).sum(axis=(0, 1)), np.inf)


def _full(grains: IntArray, held: IntArray, room: IntArray) -> IntArray:
    """Longest first, each into the first micro-batch with room."""
    rows: list[IntArray] = []
    left: list[int] = []
    for k in np.repeat(np.arange(len(held)), held)[::-1].tolist():
        size = int(grains[k])
        place = next((one for one, free in enumerate(left) if free >= size), len(left))
        if place == len(left):
            rows.append(np.zeros(len(held), dtype=np.int64))
            left.append(int(room[k]))
        rows[place][k] += 1
        left[place] -= size
    return np.array(rows)


def _even(grains: IntArray, held: IntArray, room: IntArray) -> IntArray:
    """As many micro-batches as tokens need, the longest sequences first, each to the one with most room."""
    items = np.repeat(np.arange(len(held)), held)[::-1].tolist()
    most = int(room[0])
    number = max(1, -(-int(grains @ held) // most))
    rows = [np.zeros(len(held), dtype=np.int64) for _ in range(number)]
    left = [most] * number
    for k in items:
        size = int(grains[k])
        place = max(range(len(left)), key=left.__getitem__)
        if size > most and left[place] == most:
            left[place] = int(room[k])
        if left[place] < size:
            place = len(left)
            rows.append(np.zeros(len(held), dtype=np.int64))
            left.append(int(room[k]))
        rows[place][k] += 1
        left[place] -= size
    return np.array([row for row in rows if row.any()])


def spread(packer: Packer, factors: FloatArray, counts: IntArray, block: slice, ends: FloatArray) -> list[Turn]:
    """Turns of ``counts`` [n] sequences on teams of an aligned ``block`` of seats, by prices of degrees times
    ``factors``; ``ends`` [M] are those of the seats before, in ns, and become those after."""
    family, mine = packer.family, ends[block]
    rows = [row for row, degree in enumerate(family.chain) if degree <= len(mine)]
    chosen = np.array(rows)[(packer.prices * factors[:, None])[rows].argmin(axis=0)]
    turns = []
    for row in rows:
        degree = family.chain[row]
        done = mine.reshape(-1, degree).max(axis=1)
        held = np.zeros((len(done), len(counts)), dtype=np.int64)
        items = np.repeat(np.arange(len(counts)), np.where(chosen == row, counts, 0))
        for k in items[np.argsort(-packer.each[row, items], kind="stable")].tolist():
            team = int(done.argmin())
            held[team, k] += 1
            done[team] += packer.each[row, k]
        for team in range(len(done)):
            filled = packer.filled(degree, held[team])
            place = block.start // degree + team
            turns += [Turn(member, place, packed) for member, packed in sorted(filled.packed.items())]
            mine[degree * team : degree * (team + 1)] += filled.time_ns
    return turns
