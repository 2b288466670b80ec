"""A step of teams in milliseconds, for batches during training.

A heuristic; the results are simulated exactly (``teams``). A micro-batch takes about a constant, and for each of
its sequences an amount that depends on the length (``AffineTime``): a line of its products in the quanta, and its
attention.

 1. Every length goes to the degree with the minimum slot time, its part of the constants included, where it takes
    no longer than the whole step, or some part of it: for few sequences the best of several parts.
 2. From the largest degree to the smallest, the longest first, each sequence goes to the team that would finish
    first, into the fullest micro-batch with enough capacity left, or a new one. Before the next degree the
    micro-batches are timed exactly.
 3. Sequences of the slots that end last move to those that end first, as long as the estimate improves; then all
    are timed again.

**Assignment at prices** (``Packer``, ``spread``). Degrees run in descending order, so that teams nest: a team of c
slots waits only for the teams of more slots around it, and small teams level what large ones leave uneven.

 1. *Degrees.* Every length goes to the degree with the minimum price, times a factor of the degree.
 2. *Teams.* From the largest degree to the smallest, the longest work first, each sequence goes to the team that
    would finish first.
 3. *Micro-batches* of a team: few full ones, or even ones, for every capacity of the degree's strategies, each
    then under the fastest strategy; the shortest packing is kept.

Times are those of ``cost_tables.Timer``, which are exact.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from milpplan.lengths.cost_tables import Timer
from milpplan.lengths.side_by_side.teams import Family, SharedWork, TeamStep, Turn, simulate_turns
from milpplan.simulation import FloatArray, IntArray


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
    return _share_rows(places, items, len(left), len(counts))


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
    rows = _share_rows(places, items, len(left), len(counts))
    return rows[rows.any(axis=1)]


def _share_rows(places: list[int], items: IntArray, number: int, lengths: int) -> IntArray:
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


@dataclass(frozen=True, slots=True, eq=False)
class AffineTime:
    """Approximate linear time of a strategy's micro-batches."""

    member: int
    capacity: int
    """Quanta of a micro-batch."""
    constant_ns: float
    """Time of an empty micro-batch."""
    sequence_ns: FloatArray
    """Time that a sequence adds, [n]; infinite where it does not fit."""
    single_ns: FloatArray
    """Time of a micro-batch with one sequence, [n]; infinite where it does not fit."""

    @staticmethod
    def of(member: int, timer: Timer) -> AffineTime:
        """Fit the line through the times at half the capacity and at all of it."""
        capacity = timer.max_quanta
        half = max(1, capacity // 2)
        bare = timer.base[:, :, 0].sum(axis=1).max(axis=0)
        slope = float(bare[capacity - 1] - bare[half - 1]) / max(1, capacity - half)
        attention = timer.attention[:, :, 0].sum(axis=1).max(axis=0)
        fits = timer.quanta <= capacity
        single_ns = timer.phases(np.eye(len(fits), dtype=np.int64)).sum(axis=(0, 1))
        return AffineTime(
            member,
            capacity,
            max(0.0, float(bare[capacity - 1]) - slope * capacity),
            np.where(fits, slope * timer.quanta + attention, np.inf),
            np.where(fits, single_ns, np.inf),
        )

    def cost(self, quanta: IntArray) -> FloatArray:
        """Return the time of a sequence of every length with its part of a full micro-batch's constant, [n] ns."""
        return self.sequence_ns + self.constant_ns * quanta / self.capacity

    def for_lengths(self, lengths: IntArray) -> AffineTime:
        """Return the line restricted to some lengths."""
        return AffineTime(
            self.member, self.capacity, self.constant_ns, self.sequence_ns[lengths], self.single_ns[lengths]
        )


@dataclass(slots=True, eq=False)
class _Micro:
    """A micro-batch: its line, the capacity left, its lengths."""

    line: AffineTime
    left: int
    held: list[int] = field(default_factory=list)
    time_ns: float = 0.0


class _Degree:
    """The teams of one degree, with their micro-batches."""

    def __init__(self, size: int, lines: list[AffineTime], quanta: list[int], num_slots: int) -> None:
        self.size, self.lines, self.quanta = size, lines, quanta
        self.teams: list[list[_Micro]] = [[] for _ in range(num_slots // size)]

    def deal(self, items: list[int], done: list[float]) -> None:
        """Assign sequences, each to the team that would finish first; ``done`` is when the teams become free."""
        queue = [(end_ns, team) for team, end_ns in enumerate(done)]
        heapq.heapify(queue)
        # Capacity left of each team's micro-batches, ascending.
        capacities_left: list[list[tuple[int, int]]] = [[] for _ in queue]
        for k in items:
            end_ns, team = queue[0]
            own_left, batches, size = capacities_left[team], self.teams[team], self.quanta[k]
            position = bisect_left(own_left, (size, 0))
            if position < len(own_left):
                left, number = own_left.pop(position)
            else:
                line = next(batch for batch in self.lines if np.isfinite(batch.sequence_ns[k]))
                left, number = line.capacity, len(batches)
                batches.append(_Micro(line, 0))
                end_ns += line.constant_ns
            batch = batches[number]
            batch.held.append(k)
            batch.left = left - size
            insort(own_left, (batch.left, number))
            heapq.heapreplace(queue, (end_ns + float(batch.line.sequence_ns[k]), team))

    def timed(self, family: Family, number: int) -> FloatArray:
        """Return the exact time of every team, [T] ns, for ``number`` lengths."""
        for line in self.lines:
            batches = [batch for team in self.teams for batch in team if batch.line is line and batch.held]
            if batches:
                times = family.timer(line.member).phases(_rows(batches, number)).sum(axis=(0, 1))
                for batch, time_ns in zip(batches, times.tolist(), strict=True):
                    batch.time_ns = time_ns
        return np.array([sum(batch.time_ns for batch in team if batch.held) for team in self.teams])

    def turns(self, number: int) -> list[Turn]:
        """Return what runs on every team, strategy by strategy."""
        turns = []
        for team, batches in enumerate(self.teams):
            for line in self.lines:
                own = [batch for batch in batches if batch.line is line and batch.held]
                if own:
                    turns.append(Turn(line.member, team, _rows(own, number)))
        return turns

    def move(self, slow: int, fast: int, difference: float) -> float:
        """Move a sequence of team ``slow`` to a micro-batch of ``fast``, the one nearest to half of the
        difference; return its time, 0 if there is none."""
        best, best_move = np.inf, None
        for here in self.teams[slow]:
            for k in set(here.held):
                sequence_ns = float(here.line.sequence_ns[k])
                distance = abs(sequence_ns - difference / 2)
                if distance < best and 0.05 * difference < sequence_ns < 0.75 * difference:
                    size = self.quanta[k]
                    there = next((batch for batch in self.teams[fast] if batch.held and batch.left >= size), None)
                    if there is not None:
                        best, best_move = distance, (here, there, k)
        if best_move is None:
            return 0.0
        here, there, k = best_move
        here.held.remove(k)
        here.left += self.quanta[k]
        there.held.append(k)
        there.left -= self.quanta[k]
        return float(here.line.sequence_ns[k])


def _rows(micros: list[_Micro], number: int) -> IntArray:
    rows = np.zeros((len(micros), number), dtype=np.int64)
    sizes = [len(batch.held) for batch in micros]
    held = np.array([k for batch in micros for k in batch.held], dtype=np.int64)
    np.add.at(rows, (np.repeat(np.arange(len(micros)), sizes), held), 1)
    return rows


def lines(family: Family) -> dict[int, list[AffineTime]]:
    """Return the lines of every degree of the family's chain, the smallest capacity first."""
    pairs = list(zip(family.members, family.degrees, strict=True))
    return {
        degree: sorted(
            (AffineTime.of(member, family.timer(member)) for member, own in pairs if own == degree),
            key=lambda line: line.capacity,
        )
        for degree in family.degree_chain
    }


def quick_step(family: Family, lines_of: dict[int, list[AffineTime]]) -> TeamStep:
    """Return the step of the workload, by the lines of all degrees."""
    return simulate_turns(family, quick_turns(family, lines_of))


def quick_turns(family: Family, lines_of: dict[int, list[AffineTime]]) -> list[Turn]:
    """Return the turns of the workload, the largest degree first."""
    few = int(family.pool.load.counts.sum()) <= 400
    costs, trials = _Costs.of(family, lines_of), []
    # Of many sequences fewer parts of the step are tried, and none once nearly no slot is idle.
    for part in (1.0, 1.4, 0.7, 2.0, 0.4) if few else (1.0, 1.4, 0.7):
        trials.append(_Dealt(family, lines_of, costs.chosen(part)))
        if trials[-1].last_ns <= costs.step_ns_without_waits * 1.02:
            break
    return min(trials, key=lambda trial: trial.last_ns).turns()


@dataclass(frozen=True, slots=True, eq=False)
class _Costs:
    """Costs of sequences under the degrees of a family's chain."""

    slot_ns: FloatArray
    """Slot time of a sequence of every length, [degrees, n] ns."""
    single_ns: FloatArray
    """Time of a sequence by itself, [degrees, n] ns."""
    counts: IntArray
    num_slots: int

    @staticmethod
    def of(family: Family, lines_of: dict[int, list[AffineTime]]) -> _Costs:
        """Build the costs, each under the cheapest strategy of the degree."""
        load, lines_by_degree = family.pool.load, [lines_of[size] for size in family.degree_chain]
        quanta = load.lengths // load.token_quantum
        costs = np.array([np.min([line.cost(quanta) for line in own], axis=0) for own in lines_by_degree])
        single_ns = np.array([np.min([line.single_ns for line in own], axis=0) for own in lines_by_degree])
        return _Costs(costs * np.array(family.degree_chain)[:, None], single_ns, load.counts, family.num_slots)

    @property
    def step_ns_without_waits(self) -> float:
        """Approximate time of the step if no slot waits."""
        return self._step_ns(self.slot_ns)

    def _step_ns(self, slots: FloatArray) -> float:
        longest = float(self.single_ns.min(axis=0)[self.counts > 0].max())
        return max(longest, float(self.counts @ slots.min(axis=0)) / self.num_slots)

    def chosen(self, part: float) -> IntArray:
        """Return the index of the degree of every length, [n]: the cheapest where it takes no longer than a part
        of the step, or where it is fastest."""
        limited = self.slot_ns
        # The step is estimated anew from the degrees that are left.
        for _ in range(3):
            fits = (self.single_ns <= part * self._step_ns(limited)) | (
                self.single_ns == self.single_ns.min(axis=0)
            )
            limited = np.where(fits, self.slot_ns, np.inf)
        return np.asarray(limited.argmin(axis=0))


class _Dealt:
    """All sequences under the degree that is ``chosen`` [n] for every length."""

    def __init__(self, family: Family, lines_of: dict[int, list[AffineTime]], chosen: IntArray) -> None:
        load, num_slots = family.pool.load, family.num_slots
        self.family, self.number, self.quanta = family, len(load.lengths), load.lengths // load.token_quantum
        ends = np.zeros(num_slots)
        self.degrees: list[_Degree] = []
        for row, size in enumerate(family.degree_chain):
            own = np.flatnonzero((chosen == row) & (load.counts > 0))
            degree = _Degree(size, self._cheapest_first(lines_of[size], own), self.quanta.tolist(), num_slots)
            items = own[np.argsort(-degree.lines[-1].sequence_ns[own], kind="stable")]
            free_ns = ends.reshape(-1, size).max(axis=1)
            degree.deal(np.repeat(items, load.counts[items]).tolist(), free_ns.tolist())
            ends = np.repeat(free_ns + degree.timed(family, self.number), size)
            self.degrees.append(degree)
        self.last_ns = self._levelled(ends)

    def turns(self) -> list[Turn]:
        """Return what runs where."""
        return [turn for degree in self.degrees for turn in degree.turns(self.number)]

    def _cheapest_first(self, degree_lines: list[AffineTime], own: IntArray) -> list[AffineTime]:
        """Return the lines of a degree from the capacity of the cheapest one for its sequences on."""
        counts, costs = self.family.pool.load.counts[own], [cost.cost(self.quanta)[own] for cost in degree_lines]
        totals = [float(counts @ np.where(np.isfinite(cost), cost, costs[-1])) for cost in costs]
        return degree_lines[int(np.argmin(totals)) :]

    def _levelled(self, ends: FloatArray) -> float:
        """Move sequences of the smallest degree between its teams until they end about together; return the end of
        the last slot, ns."""
        smallest = self.degrees[-1]
        ends_ns = ends.reshape(-1, smallest.size).max(axis=1)
        free_ns = ends_ns - smallest.timed(self.family, self.number)
        # Moves are by approximate times, every pass begins with exact ones.
        for _ in range(3):
            for _ in range(48):
                slow, fast = int(ends_ns.argmax()), int(ends_ns.argmin())
                moved = smallest.move(slow, fast, float(ends_ns[slow] - ends_ns[fast]))
                if moved == 0.0:
                    break
                ends_ns[slow] -= moved
                ends_ns[fast] += moved
            ends_ns = free_ns + smallest.timed(self.family, self.number)
        return float(ends_ns.max())
