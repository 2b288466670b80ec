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

from milpplan.lengths.side_by_side.team_bound import SharedWork
from milpplan.lengths.side_by_side.team_quick import AffineTime, lines
from milpplan.lengths.side_by_side.teams import Family, Turn
from milpplan.simulation.layout_columns import FloatArray, IntArray


@dataclass(frozen=True, slots=True, eq=False)
class PackedTeam:
    """The micro-batches of one team by member, and their time in ns."""

    packed: dict[int, IntArray]
    time_ns: float


@dataclass(frozen=True, eq=False)
class Packer:
    """A family with what packing asks again and again."""

    family: Family
    shared: SharedWork

    @cached_property
    def lines(self) -> dict[int, list[AffineTime]]:
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
        return np.array([self.shared.prices[rows == degree].min(axis=0) for degree in self.family.degree_chain])

    @cached_property
    def each(self) -> FloatArray:
        """Time of a sequence on a team of every degree, about, [degrees, n] ns."""
        return np.asarray(self.prices * self.family.num_slots / np.array(self.family.degree_chain)[:, None])

    def filled(self, degree: int, teams: IntArray) -> list[PackedTeam]:
        """Micro-batches of teams of a degree with so many sequences [T, n]: their times are asked for all at
        once."""
        grains = self.family.pool.load.lengths // self.family.pool.load.token_quantum
        ways = [
            (team, way(grains, held, room))
            for team, held in enumerate(teams)
            if held.any()
            for room in self.rooms[degree]
            for way in (_full, _even)
        ]
        found = [PackedTeam({}, np.inf if held.any() else 0.0) for held in teams]
        if not ways:
            return found
        members, rows = self.members(degree), np.concatenate([one for _, one in ways])
        times = np.array([self.times(member, rows) for member in members])
        # Every micro-batch under the member that takes least.
        best, least = times.argmin(axis=0), times.min(axis=0)
        end = 0
        for team, one in ways:
            begin, end = end, end + len(one)
            time_ns = float(least[begin:end].sum())
            if time_ns < found[team].time_ns:
                mine = best[begin:end]
                packed = {members[place]: one[mine == place] for place in np.unique(mine).tolist()}
                found[team] = PackedTeam(packed, time_ns)
        return found

    @cached_property
    def rooms(self) -> dict[int, list[IntArray]]:
        """For every capacity of a degree's members: grains of a micro-batch whose longest sequence has each
        length, [n]; so many, or more only for a sequence that is longer."""
        grains, found = self.family.pool.load.lengths // self.family.pool.load.token_quantum, {}
        for degree in self.family.degree_chain:
            capacities = np.unique([self.family.max_quanta(member) for member in self.members(degree)])
            least = capacities[np.minimum(np.searchsorted(capacities, grains), len(capacities) - 1)]
            found[degree] = [np.maximum(least, most) for most in capacities]
        return found

    def times(self, member: int, rows: IntArray) -> FloatArray:
        """Time of every micro-batch, infinite where it does not fit, [v]."""
        timer = self.family.timer(member)
        return np.where(rows @ timer.quanta <= timer.max_quanta, timer.phases(rows).sum(axis=(0, 1)), np.inf)


def _full(grains: IntArray, held: IntArray, room: IntArray) -> IntArray:
    """Longest first, each into the first micro-batch with room."""
    items = np.repeat(np.arange(len(held)), held)[::-1]
    places: list[int] = []
    left: list[int] = []
    for size, most in zip(grains[items].tolist(), room[items].tolist(), strict=True):
        place = next((one for one, free in enumerate(left) if free >= size), len(left))
        if place == len(left):
            left.append(most)
        places.append(place)
        left[place] -= size
    return _rows(places, items, len(left), len(held))


def _even(grains: IntArray, held: IntArray, room: IntArray) -> IntArray:
    """As many micro-batches as tokens need, the longest sequences first, each to the one with most room."""
    items = np.repeat(np.arange(len(held)), held)[::-1]
    most = int(room[0])
    number = max(1, -(-int(grains @ held) // most))
    places: list[int] = []
    left = [most] * number
    for size, alone in zip(grains[items].tolist(), room[items].tolist(), strict=True):
        place = left.index(max(left))
        if size > most and left[place] == most:
            left[place] = alone
        if left[place] < size:
            place = len(left)
            left.append(alone)
        places.append(place)
        left[place] -= size
    rows = _rows(places, items, len(left), len(held))
    return rows[rows.any(axis=1)]


def _rows(places: list[int], items: IntArray, number: int, lengths: int) -> IntArray:
    """So many micro-batches [v, n], of which every item is at its place."""
    cells = np.bincount(np.array(places) * lengths + items, minlength=number * lengths)
    return cells.reshape(number, lengths)


def spread(packer: Packer, factors: FloatArray, counts: IntArray, block: slice, ends: FloatArray) -> list[Turn]:
    """Turns of ``counts`` [n] sequences on teams of an aligned ``block`` of seats, by prices of degrees times
    ``factors``; ``ends`` [M] are those of the seats before, in ns, and become those after."""
    family, mine = packer.family, ends[block]
    rows = [row for row, degree in enumerate(family.degree_chain) if degree <= len(mine)]
    chosen = np.array(rows)[(packer.prices * factors[:, None])[rows].argmin(axis=0)]
    turns = []
    for row in rows:
        degree = family.degree_chain[row]
        done = mine.reshape(-1, degree).max(axis=1)
        held = np.zeros((len(done), len(counts)), dtype=np.int64)
        items = np.repeat(np.arange(len(counts)), np.where(chosen == row, counts, 0))
        for k in items[np.argsort(-packer.each[row, items], kind="stable")].tolist():
            team = int(done.argmin())
            held[team, k] += 1
            done[team] += packer.each[row, k]
        for team, filled in enumerate(packer.filled(degree, held)):
            place = block.start // degree + team
            turns += [Turn(member, place, packed) for member, packed in sorted(filled.packed.items())]
            mine[degree * team : degree * (team + 1)] += filled.time_ns
    return turns
