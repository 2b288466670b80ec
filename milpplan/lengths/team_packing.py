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
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from milpplan.costs.columns import FloatArray, IntArray
from milpplan.lengths.team_bound import SharedWork
from milpplan.lengths.teams import Family, TeamStep, Turn, simulated

ATTEMPTS = 24
"""Changes of prices."""
# How large these are, in turns: little matters where sequences are many, and few may go anywhere.
_SPREADS = (0.08, 0.08, 0.3)
# How many of the packings are levelled, and how often at most.
_LEVELLED, _MOVES = 3, 200
# Moves looked at exactly in one round of levelling.
_TRIED = 12
# What counts as shorter, as a share.
_LESS = 1e-6

Place = tuple[int, int]
"""Degree and team."""


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
    def degrees(self) -> tuple[int, ...]:
        """Degrees of which each divides the next larger one, largest first: all powers of two, say. The one that
        holds most is among them, so that every sequence has a place."""
        pairs = zip(self.family.members, self.family.degrees, strict=True)
        _, middle = max((self.family.grains(member), degree) for member, degree in pairs)
        chain = [middle]
        for degree in sorted(set(self.family.degrees)):
            if degree > middle and degree % chain[0] == 0:
                chain.insert(0, degree)
        for degree in sorted(set(self.family.degrees), reverse=True):
            if degree < middle and chain[-1] % degree == 0:
                chain.append(degree)
        return tuple(chain)

    def members(self, degree: int) -> list[int]:
        """Members of a degree."""
        pairs = zip(self.family.members, self.family.degrees, strict=True)
        return [member for member, mine in pairs if mine == degree]

    @cached_property
    def prices(self) -> FloatArray:
        """Least price of every length under every degree, [degrees, n] ns of all seats."""
        rows = np.array(self.family.degrees)
        return np.array([self.shared.prices[rows == degree].min(axis=0) for degree in self.degrees])

    @cached_property
    def each(self) -> FloatArray:
        """Time of a sequence on a team of every degree, about, [degrees, n] ns."""
        return np.asarray(self.prices * self.family.num_seats / np.array(self.degrees)[:, None])

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
        for degree in self.degrees:
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


class _State:
    """Sequences and micro-batches of every team."""

    def __init__(self, packer: Packer, held: dict[Place, IntArray]) -> None:
        self.packer = packer
        self.held = held
        self.filled = {place: packer.filled(place[0], one) for place, one in held.items()}

    def ends(self) -> FloatArray:
        """When every seat is done, [M] ns: teams nest, so it is the sum of those around it."""
        ends = np.zeros(self.packer.family.num_seats)
        for (degree, team), filled in self.filled.items():
            ends[degree * team : degree * (team + 1)] += filled.time_ns
        return ends

    def turns(self) -> list[Turn]:
        """Turns, the largest degree first, the strategies of a team one after another."""
        found = []
        for degree, team in sorted(self.filled, key=lambda place: (-place[0], place[1])):
            packed = self.filled[degree, team].packed
            found += [Turn(member, team, packed[member]) for member in sorted(packed)]
        return found


def shortest(
    family: Family, shared: SharedWork, enough_ns: float, deadline: float, attempts: int = ATTEMPTS
) -> TeamStep:
    """The shortest step found before the ``deadline`` (of ``perf_counter``), or the first one after it; one of at
    most ``enough_ns`` will do. Prices are changed at most ``attempts`` times."""
    packer = Packer(family, shared)
    random = np.random.default_rng(1)
    starts: list[_State] = []
    for attempt in range(attempts):
        if starts and time.perf_counter() > deadline:
            break
        spread = _SPREADS[attempt % len(_SPREADS)] if attempt else 0.0
        factors = np.exp(random.normal(0.0, spread, len(packer.degrees)))
        starts.append(_spread(packer, factors))
    starts.sort(key=lambda state: float(state.ends().max()))
    best: TeamStep | None = None
    for state in starts[:_LEVELLED]:
        _levelled(state, deadline)
        found = simulated(family, state.turns())
        if best is None or found.time_ns < best.time_ns:
            best = found
        if best.time_ns <= enough_ns or time.perf_counter() > deadline:
            break
    assert best is not None
    return best


def _spread(packer: Packer, factors: FloatArray) -> _State:
    """Steps 1 to 3 with prices of degrees times ``factors``."""
    chosen = (packer.prices * factors[:, None]).argmin(axis=0)
    counts, seats = packer.family.pool.load.counts, packer.family.num_seats
    state = _State(packer, {})
    ends = np.zeros(seats)
    for row, degree in enumerate(packer.degrees):
        number = seats // degree
        done = ends[::degree].copy()
        held = np.zeros((number, len(counts)), dtype=np.int64)
        mine = np.repeat(np.arange(len(counts)), np.where(chosen == row, counts, 0))
        for k in mine[np.argsort(-packer.each[row, mine], kind="stable")].tolist():
            team = int(done.argmin())
            held[team, k] += 1
            done[team] += packer.each[row, k]
        for team in range(number):
            state.held[degree, team] = held[team]
            state.filled[degree, team] = packer.filled(degree, held[team])
            ends[degree * team : degree * (team + 1)] += state.filled[degree, team].time_ns
    return state


def _levelled(state: _State, deadline: float) -> None:
    """Step 4."""
    for _ in range(_MOVES):
        if time.perf_counter() > deadline or not _moved(state):
            return


def _moved(state: _State) -> bool:
    """Make the first of the most promising moves that shortens the step."""
    ends = state.ends()
    for _, source, target, k in sorted(_moves(state, ends))[:_TRIED]:
        fewer, more = state.held[source].copy(), state.held[target].copy()
        fewer[k] -= 1
        more[k] += 1
        before = {place: (state.held[place], state.filled[place]) for place in (source, target)}
        for place, held in ((source, fewer), (target, more)):
            state.held[place], state.filled[place] = held, state.packer.filled(place[0], held)
        if _shorter(state.ends(), ends):
            return True
        for place, (held, filled) in before.items():
            state.held[place], state.filled[place] = held, filled
    return False


def _shorter(ends: FloatArray, before: FloatArray) -> bool:
    """Whether the last seat ends earlier, or fewer seats end last."""
    limit = float(before.max()) * (1.0 - _LESS)
    return float(ends.max()) <= float(before.max()) and int((ends > limit).sum()) < int((before > limit).sum())


def _moves(state: _State, ends: FloatArray) -> Iterator[tuple[float, Place, Place, int]]:
    """Moves of one sequence off the seat that ends last: (end of what it changes, about, source, target, k)."""
    packer, last = state.packer, int(ends.argmax())
    for row, degree in enumerate(packer.degrees):
        source = (degree, last // degree)
        for k in np.flatnonzero(state.held[source]).tolist():
            saved = packer.each[row, k]
            less = ends.copy()
            less[degree * source[1] : degree * (source[1] + 1)] -= saved
            for other, size in enumerate(packer.degrees):
                more = packer.each[other, k]
                if not np.isfinite(more):
                    continue
                after = less.reshape(-1, size).max(axis=1) + more
                team = int(after.argmin())
                if (size, team) != source and after[team] < ends[last]:
                    yield max(float(after[team]), float(less[last])), source, (size, team), k
