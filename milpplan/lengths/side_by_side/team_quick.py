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

Times are those of ``cost_tables.Timer``, which are exact.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from dataclasses import dataclass, field, replace

import numpy as np

from milpplan.lengths.cost_tables import Timer
from milpplan.lengths.side_by_side.teams import Family, TeamStep, Turn, simulate_turns
from milpplan.simulation import FloatArray, IntArray

# Number of sequences up to which all parts of the step are tried, the parts, the number of parts for more
# sequences, the relative idle time at which the trials end, and the number of estimates of the step.
_FEW, _PARTS, _MANY, _NEAR, _ESTIMATES = 400, (1.0, 1.4, 0.7, 2.0, 0.4), 3, 0.02, 3
# Spread of the random factors on the costs of degrees.
_SPREAD = 0.1
# Number of levelling passes with exact times, and moves in each.
_PASSES, _MOVES = 3, 48
# Minimum and maximum share of the difference between two slots that a move may transfer.
_LEAST, _MOST = 0.05, 0.75


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
                if distance < best and _LEAST * difference < sequence_ns < _MOST * difference:
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
    """Return the turns of the workload, the largest degree first: the best of some parts of the step."""
    counts, ends = family.pool.load.counts, np.zeros(family.num_slots)
    few = int(counts.sum()) <= _FEW
    costs, trials = _Costs.of(family, lines_of, counts, family.num_slots), []
    for part in _PARTS if few else _PARTS[:_MANY]:
        trials.append(_Dealt(family, lines_of, costs.chosen(part), counts, ends))
        if trials[-1].last_ns <= costs.step_ns_without_waits * (1.0 + _NEAR):
            break
    return min(trials, key=lambda trial: trial.last_ns).turns(0)


def dealt_in_block(
    family: Family,
    lines_of: dict[int, list[AffineTime]],
    counts: IntArray,
    block: slice,
    ends: FloatArray,
    random: np.random.Generator,
) -> list[Turn]:
    """Return turns of ``counts`` [n] sequences on teams inside an aligned ``block`` of slots, which become free at
    ``ends`` [M] ns, with random factors on the costs of the degrees: the cheapest need not pack well."""
    factors = np.exp(random.normal(0.0, _SPREAD, len(family.degree_chain)))[:, None]
    costs = _Costs.of(family, lines_of, counts, block.stop - block.start)
    chosen = replace(costs, slot_ns=costs.slot_ns * factors).chosen(np.inf)
    return _Dealt(family, lines_of, chosen, counts, ends[block]).turns(block.start)


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
    def of(family: Family, lines_of: dict[int, list[AffineTime]], counts: IntArray, num_slots: int) -> _Costs:
        """Build the costs of ``counts`` [n] sequences on so many slots, each under the cheapest strategy of the
        degree."""
        load, lines_by_degree = family.pool.load, [lines_of[size] for size in family.degree_chain]
        quanta = load.lengths // load.token_quantum
        costs = np.array([np.min([line.cost(quanta) for line in own], axis=0) for own in lines_by_degree])
        single_ns = np.array([np.min([line.single_ns for line in own], axis=0) for own in lines_by_degree])
        sizes = np.array(family.degree_chain)[:, None]
        # Teams of more slots than there are hold nothing.
        costs, single_ns = (np.where(sizes <= num_slots, values, np.inf) for values in (costs * sizes, single_ns))
        return _Costs(costs, single_ns, counts, num_slots)

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
        for _ in range(_ESTIMATES):
            fits = (self.single_ns <= part * self._step_ns(limited)) | (
                self.single_ns == self.single_ns.min(axis=0)
            )
            limited = np.where(fits, self.slot_ns, np.inf)
        return np.asarray(limited.argmin(axis=0))


class _Dealt:
    """``counts`` [n] sequences under the degree that is ``chosen`` [n] for every length, on slots that become free
    at ``ends`` [m] ns."""

    def __init__(
        self,
        family: Family,
        lines_of: dict[int, list[AffineTime]],
        chosen: IntArray,
        counts: IntArray,
        ends: FloatArray,
    ) -> None:
        load, self.counts = family.pool.load, counts
        self.family, self.number, self.quanta = family, len(load.lengths), load.lengths // load.token_quantum
        self.degrees: list[_Degree] = []
        for row, size in enumerate(family.degree_chain):
            if size > len(ends):
                continue
            own = np.flatnonzero((chosen == row) & (counts > 0))
            degree = _Degree(size, self._cheapest_first(lines_of[size], own), self.quanta.tolist(), len(ends))
            items = own[np.argsort(-degree.lines[-1].sequence_ns[own], kind="stable")]
            free_ns = ends.reshape(-1, size).max(axis=1)
            degree.deal(np.repeat(items, counts[items]).tolist(), free_ns.tolist())
            ends = np.repeat(free_ns + degree.timed(family, self.number), size)
            self.degrees.append(degree)
        self.last_ns = self._levelled(ends)

    def turns(self, first_slot: int) -> list[Turn]:
        """Return what runs where, from some slot on."""
        return [
            Turn(turn.member, turn.team + first_slot // degree.size, turn.packed)
            for degree in self.degrees
            for turn in degree.turns(self.number)
        ]

    def _cheapest_first(self, degree_lines: list[AffineTime], own: IntArray) -> list[AffineTime]:
        """Return the lines of a degree from the capacity of the cheapest one for its sequences on."""
        counts, costs = self.counts[own], [cost.cost(self.quanta)[own] for cost in degree_lines]
        totals = [float(counts @ np.where(np.isfinite(cost), cost, costs[-1])) for cost in costs]
        return degree_lines[int(np.argmin(totals)) :]

    def _levelled(self, ends: FloatArray) -> float:
        """Move sequences of the smallest degree between its teams until they end about together; return the end of
        the last slot, ns."""
        smallest = self.degrees[-1]
        ends_ns = ends.reshape(-1, smallest.size).max(axis=1)
        free_ns = ends_ns - smallest.timed(self.family, self.number)
        for _ in range(_PASSES):
            for _ in range(_MOVES):
                slow, fast = int(ends_ns.argmax()), int(ends_ns.argmin())
                moved = smallest.move(slow, fast, float(ends_ns[slow] - ends_ns[fast]))
                if moved == 0.0:
                    break
                ends_ns[slow] -= moved
                ends_ns[fast] += moved
            ends_ns = free_ns + smallest.timed(self.family, self.number)
        return float(ends_ns.max())
