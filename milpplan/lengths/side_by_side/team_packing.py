"""Assignment of sequences to teams: the degree, the team and the micro-batch of each.

A heuristic. Degrees run in descending order, so that teams nest: a team of c slots waits only for the teams of
more slots around it, and small teams level what large ones leave uneven.

 1. *Degrees.* Every length goes to the degree with the minimum price, times a factor of the degree.
 2. *Teams.* From the largest degree to the smallest, the longest work first, each sequence goes to the team that
    would finish first.
 3. *Micro-batches* of a team: few full ones, or even ones, for every capacity of the degree's strategies, each
    then under the fastest strategy; the shortest packing is kept.

Times are those of ``packing_local_search.Timer``, which are exact.
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
    """A family with the tables that packing uses repeatedly."""

    family: Family
    shared: SharedWork

    @cached_property
    def lines(self) -> dict[int, list[AffineTime]]:
        """Lines of ``team_quick``."""
        return lines(self.family)

    def members(self, degree: int) -> list[int]:
        """Return the members of a degree."""
        pairs = zip(self.family.members, self.family.degrees, strict=True)
        return [member for member, own in pairs if own == degree]

    @cached_property
    def prices(self) -> FloatArray:
        """Minimum price of every length under every degree, [degrees, n] ns over all slots."""
        rows = np.array(self.family.degrees)
        return np.array([self.shared.prices[rows == degree].min(axis=0) for degree in self.family.degree_chain])

    @cached_property
    def sequence_ns(self) -> FloatArray:
        """Approximate time of a sequence on a team of every degree, [degrees, n] ns."""
        return np.asarray(self.prices * self.family.num_slots / np.array(self.family.degree_chain)[:, None])

    def pack_teams(self, degree: int, teams: IntArray) -> list[PackedTeam]:
        """Pack teams of a degree that hold ``teams`` [T, n] sequences; all packings are timed in one call."""
        quanta = self.family.pool.load.lengths // self.family.pool.load.token_quantum
        trials = [
            (team, method(quanta, counts, capacities))
            for team, counts in enumerate(teams)
            if counts.any()
            for capacities in self.capacities[degree]
            for method in (_full, _even)
        ]
        best_packings = [PackedTeam({}, np.inf if counts.any() else 0.0) for counts in teams]
        if not trials:
            return best_packings
        members, rows = self.members(degree), np.concatenate([batches for _, batches in trials])
        times = np.array([self.times(member, rows) for member in members])
        # Every micro-batch under the fastest member.
        best, times_ns = times.argmin(axis=0), times.min(axis=0)
        end = 0
        for team, batches in trials:
            begin, end = end, end + len(batches)
            time_ns = float(times_ns[begin:end].sum())
            if time_ns < best_packings[team].time_ns:
                members_of = best[begin:end]
                packed = {members[index]: batches[members_of == index] for index in np.unique(members_of).tolist()}
                best_packings[team] = PackedTeam(packed, time_ns)
        return best_packings

    @cached_property
    def capacities(self) -> dict[int, list[IntArray]]:
        """For every capacity of a degree's members: the capacity of a micro-batch by its longest sequence, [n],
        which is larger only for a sequence that needs it."""
        quanta, rooms_of = self.family.pool.load.lengths // self.family.pool.load.token_quantum, {}
        for degree in self.family.degree_chain:
            capacities = np.unique([self.family.max_quanta(member) for member in self.members(degree)])
            needed = capacities[np.minimum(np.searchsorted(capacities, quanta), len(capacities) - 1)]
            rooms_of[degree] = [np.maximum(needed, capacity) for capacity in capacities]
        return rooms_of

    def times(self, member: int, rows: IntArray) -> FloatArray:
        """Return the time of every micro-batch, [v]; infinite where it does not fit."""
        timer = self.family.timer(member)
        return np.where(rows @ timer.quanta <= timer.max_quanta, timer.phases(rows).sum(axis=(0, 1)), np.inf)


def _full(quanta: IntArray, counts: IntArray, capacities: IntArray) -> IntArray:
    """Pack sequences by first fit, the longest first."""
    items = np.repeat(np.arange(len(counts)), counts)[::-1]
    places: list[int] = []
    left: list[int] = []
    for size, capacity in zip(quanta[items].tolist(), capacities[items].tolist(), strict=True):
        position = next((index for index, space in enumerate(left) if space >= size), len(left))
        if position == len(left):
            left.append(capacity)
        places.append(position)
        left[position] -= size
    return _rows(places, items, len(left), len(counts))


def _even(quanta: IntArray, counts: IntArray, capacities: IntArray) -> IntArray:
    """Pack sequences, the longest first, into as many micro-batches as the tokens need, each into the emptiest
    one."""
    items = np.repeat(np.arange(len(counts)), counts)[::-1]
    capacity = int(capacities[0])
    number = max(1, -(-int(quanta @ counts) // capacity))
    places: list[int] = []
    left = [capacity] * number
    for size, own_capacity in zip(quanta[items].tolist(), capacities[items].tolist(), strict=True):
        position = left.index(max(left))
        if size > capacity and left[position] == capacity:
            left[position] = own_capacity
        if left[position] < size:
            position = len(left)
            left.append(own_capacity)
        places.append(position)
        left[position] -= size
    rows = _rows(places, items, len(left), len(counts))
    return rows[rows.any(axis=1)]


def _rows(places: list[int], items: IntArray, number: int, lengths: int) -> IntArray:
    """Return micro-batches [v, n] from the micro-batch of every item."""
    cells = np.bincount(np.array(places) * lengths + items, minlength=number * lengths)
    return cells.reshape(number, lengths)


def spread(packer: Packer, factors: FloatArray, counts: IntArray, block: slice, ends: FloatArray) -> list[Turn]:
    """Assign ``counts`` [n] sequences to teams inside an aligned ``block`` of slots, by prices of degrees times
    ``factors``.

    ``ends`` [M] holds when the slots become free, in ns, and is updated.
    """
    family, mine = packer.family, ends[block]
    rows = [row for row, degree in enumerate(family.degree_chain) if degree <= len(mine)]
    chosen = np.array(rows)[(packer.prices * factors[:, None])[rows].argmin(axis=0)]
    turns = []
    for row in rows:
        degree = family.degree_chain[row]
        done = mine.reshape(-1, degree).max(axis=1)
        held = np.zeros((len(done), len(counts)), dtype=np.int64)
        items = np.repeat(np.arange(len(counts)), np.where(chosen == row, counts, 0))
        for k in items[np.argsort(-packer.sequence_ns[row, items], kind="stable")].tolist():
            team = int(done.argmin())
            held[team, k] += 1
            done[team] += packer.sequence_ns[row, k]
        for team, filled in enumerate(packer.pack_teams(degree, held)):
            index = block.start // degree + team
            turns += [Turn(member, index, packed) for member, packed in sorted(filled.packed.items())]
            mine[degree * team : degree * (team + 1)] += filled.time_ns
    return turns
