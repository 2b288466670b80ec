"""Finding a short step of teams: which sequences run under which degree, on which team, in which micro-batches.

Heuristic; what it gives is simulated exactly (``teams``), and what it could gain at most is proved elsewhere
(``team_bound``). Degrees run largest first, so that teams nest: a team of c seats waits for nothing but the
teams of more seats around it, and small teams level what large ones leave uneven.

 1. *Degrees.* Every length goes to the degree where the bound's price of it is least. Prices of degrees are then
    changed a little, at random, many times: what is cheapest by time need not pack well.
 2. *Teams.* From the largest degree to the smallest, the longest work first, each sequence to the team that
    would be done first.
 3. *Micro-batches* of a team: few full ones, or as even ones, for every capacity of the degree's strategies, each
    then under the strategy that takes least; the shortest of these.
 4. *Levelling.* A sequence of a team of the seat that ends last moves to another team, of any degree, as long as
    that makes the step shorter.

Times are those of ``dealing.Timer``, which are exact. Random numbers are seeded and
attempts counted, so that the same sequences get the same step unless time runs out.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from milpplan.costs.columns import FloatArray, IntArray
from milpplan.lengths.tables import Load
from milpplan.lengths.team_bound import SharedWork
from milpplan.lengths.team_exchanges import Batch, Degree, improved
from milpplan.lengths.team_prices import Priced
from milpplan.lengths.teams import Family, TeamStep, Turn, simulated

ATTEMPTS = 24
"""Changes of prices."""
ROUNDS = 3000
"""Exchanges tried."""
# Shares of nearly one are whole; what a micro-batch without a share counts.
_ONE, _EVEN = 1.0 - 1e-6, 0.3
# How large these are, in turns: little matters where sequences are many, and few may go anywhere.
_SPREADS = (0.08, 0.08, 0.3)


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
        times = np.array([self._times(member, rows) for member in members])
        best = times.argmin(axis=0)
        packed = {member: rows[best == place] for place, member in enumerate(members) if (best == place).any()}
        return Filled(packed, float(times.min(axis=0).sum()))

    def _times(self, member: int, rows: IntArray) -> FloatArray:
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


def shortest(
    family: Family,
    shared: SharedWork,
    enough_ns: float,
    deadline: float,
    attempts: int = ATTEMPTS,
    rounds: int = ROUNDS,
) -> TeamStep:
    """The shortest step found before the ``deadline`` (of ``perf_counter``), or the first one after it; one of at
    most ``enough_ns`` will do. Prices are changed at most ``attempts`` times, and the best packing is improved for
    so many ``rounds``."""
    packer = Packer(family, shared)
    random = np.random.default_rng(1)
    starts: list[tuple[float, list[Turn]]] = []
    for attempt in range(attempts):
        if starts and time.perf_counter() > deadline:
            break
        spread = _SPREADS[attempt % len(_SPREADS)] if attempt else 0.0
        starts.append(_spread(packer, np.exp(random.normal(0.0, spread, len(family.chain)))))
    _, turns = min(starts, key=lambda one: one[0])
    return simulated(family, improved(family, turns, rounds, enough_ns - family.once_ns, deadline))


def _spread(packer: Packer, factors: FloatArray) -> tuple[float, list[Turn]]:
    """Steps 1 to 3 with prices of degrees times ``factors``: the last end, and the turns."""
    family = packer.family
    chosen = (packer.prices * factors[:, None]).argmin(axis=0)
    counts, seats = family.pool.load.counts, family.num_seats
    turns, ends = [], np.zeros(seats)
    for row, degree in enumerate(family.chain):
        number = seats // degree
        done = ends[::degree].copy()
        held = np.zeros((number, len(counts)), dtype=np.int64)
        mine = np.repeat(np.arange(len(counts)), np.where(chosen == row, counts, 0))
        for k in mine[np.argsort(-packer.each[row, mine], kind="stable")].tolist():
            team = int(done.argmin())
            held[team, k] += 1
            done[team] += packer.each[row, k]
        for team in range(number):
            filled = packer.filled(degree, held[team])
            turns += [Turn(member, team, rows) for member, rows in sorted(filled.packed.items())]
            ends[degree * team : degree * (team + 1)] += filled.time_ns
    return float(ends.max()), turns


def from_shares(
    family: Family, found: Priced, limit_ns: float, rounds: int, deadline: float, seed: int = 1
) -> TeamStep:
    """A step near the program of ``team_prices``: whole micro-batches near its shares, each under the degree that
    takes least of all seats' time and not the limit, dealt out, then exchanges."""
    degrees = [Degree.of(family, degree) for degree in family.chain]
    batches = []
    for held in _whole(family.pool.load, found):
        ways = [Batch(degree, 0, held) for degree in degrees if held @ degree.sizes[:-1] <= degree.rooms[-1]]
        short = [one for one in ways if one.time_ns < limit_ns - family.once_ns] or ways
        batches.append(min(short, key=lambda one: one.degree.size * one.time_ns))
    turns, ends = [], np.zeros(family.num_seats)
    for one in sorted(batches, key=lambda one: (-one.degree.size, -one.time_ns)):
        size = one.degree.size
        team = int(ends.reshape(-1, size).max(axis=1).argmin())
        ends[size * team : size * (team + 1)] += one.time_ns
        turns.append(Turn(one.degree.member(one.grains), team, one.held[None]))
    return simulated(family, improved(family, turns, rounds, 0.0, deadline, seed))


def _whole(load: Load, priced: Priced) -> list[IntArray]:
    """Micro-batches of all sequences, every one once: whole shares first, then what is left of one after another,
    preferably of large shares and where little is gone."""
    left, found = load.counts.copy(), []
    sizes = load.lengths // load.grain
    rows, parts = priced.rows, priced.shares.copy()
    while left.any():
        now = np.minimum(rows, left)
        most = np.where((now == rows).all(axis=1) & (parts > _ONE), np.inf, (now @ sizes) / (rows @ sizes))
        place = int((most * (_EVEN + np.maximum(0.0, parts))).argmax())
        found.append(now[place])
        left -= now[place]
        parts[place] -= 1.0
    return found
