"""Local search on a step of teams: exchanges of sequences between its micro-batches.

A heuristic; the results are simulated exactly (``teams``). Degrees nest, so a slot ends after the sum of all
micro-batches that run on it, and the step is the maximum of these ends e_s. The objective is

    sum over slots of exp(e_s / tau)

with tau falling from about a hundredth of the step, where all time counts, to a fraction of a thousandth, where
only the slots that end last count. Exchanges change few ends by one amount each, so many are compared at once: for
a pair of micro-batches every sequence of one, or none, against every one of the other, or none, at the exact times
of both (``packing_local_search.Timer``). Besides, a micro-batch moves to another team, of any degree, or a new one
opens. The best exchange of the pair is made if it improves. Every micro-batch runs under the strategy of its
degree that recomputes least and holds it. Random numbers are seeded, and rounds are counted.
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
# Shares of the rounds that move a micro-batch and that open one; shares in which the first micro-batch is of the
# slot that ends last, and of another slot.
_MOVES, _OPENS, _SLOWEST, _SEAT = 0.08, 0.07, 0.5, 0.3
# Relative change that counts as an improvement.
_LESS = 1e-9
# Maximum exponent.
_STEEP = 200.0
# Number of rounds between two checks of the deadline.
_LOOK = 64


@dataclass(frozen=True, eq=False)
class Degree:
    """The members of a degree in the order of their capacity, with their times."""

    size: int
    members: tuple[int, ...]
    capacities: tuple[int, ...]
    """Capacities in quanta."""
    base: tuple[FloatArray, ...]
    """By member: times without attention, [2 (ring exposed, hidden), 2 phases, G] ns."""
    attention: tuple[FloatArray, ...]
    """By member: attention of a sequence, [2, 2, n + 1] ns; 0 at the last index, which means no sequence."""
    once: tuple[FloatArray, ...]
    """By member: last tiles of the longest sequence, [2, 2, n] ns."""
    sizes: IntArray
    """Quanta of a sequence, [n + 1]; 0 at the last index."""

    @staticmethod
    def of(family: Family, degree: int) -> Degree:
        """Build the tables of a family's degree."""
        pairs = zip(family.members, family.degrees, strict=True)
        members = sorted((member for member, own in pairs if own == degree), key=family.max_quanta)
        timers = [family.timer(member) for member in members]
        return Degree(
            degree,
            tuple(members),
            tuple(map(family.max_quanta, members)),
            tuple(timer.base[:, :, 0] for timer in timers),
            tuple(np.pad(timer.attention[:, :, 0], ((0, 0), (0, 0), (0, 1))) for timer in timers),
            tuple(timer.once[:, :, 0] for timer in timers),
            np.append(timers[0].quanta, 0),
        )

    def member(self, quanta: int) -> int:
        """Return the member that runs so many quanta."""
        return self.members[self.index(quanta)]

    def index(self, quanta: int) -> int:
        """Return the index of that member."""
        return bisect_left(self.capacities, quanta)


@dataclass(slots=True, eq=False)
class Batch:
    """A micro-batch ``held`` [n] on a team of a degree."""

    degree: Degree
    team: int
    held: IntArray
    quanta: int = 0
    sums: tuple[FloatArray, ...] = ()
    """Attention under every member, [2, 2] ns."""
    time_ns: float = 0.0

    def __post_init__(self) -> None:
        degree = self.degree
        self.quanta = int(self.held @ degree.sizes[:-1])
        self.sums = tuple(each[:, :, :-1] @ self.held for each in degree.attention)
        self.time_ns = np.inf
        if self.quanta <= degree.capacities[-1]:
            index, longest = degree.index(self.quanta), self.held.nonzero()[0][-1:]
            options = degree.base[index][:, :, self.quanta - 1] + self.sums[index]
            options = options[:, :, None] + degree.once[index][:, :, longest]
            # With one longest length, or none: an empty micro-batch takes no time.
            self.time_ns = float(options.max(axis=0).sum())

    def after_exchange(self, removed: int, added: int) -> Batch:
        """Return the micro-batch after an exchange; the number of lengths means no sequence."""
        held = self.held.copy()
        for length, sign in ((removed, -1), (added, 1)):
            if length < len(held):
                held[length] += sign
        return Batch(self.degree, self.team, held)

    @property
    def choices(self) -> IntArray:
        """Lengths that it holds, and none."""
        return np.append(np.flatnonzero(self.held), len(self.held))

    @property
    def slots(self) -> slice:
        """Slots of its team."""
        return slice(self.degree.size * self.team, self.degree.size * (self.team + 1))

    def exchanged(self, removed: IntArray, added: IntArray) -> FloatArray:
        """Return times [K, L] with one sequence of ``removed`` [K] less and one of ``added`` [L] more; infinite
        where that does not fit."""
        degree, number = self.degree, len(self.held)
        quanta = self.quanta - degree.sizes[removed][:, None] + degree.sizes[added]
        longest = np.maximum(self._longest_without(removed)[:, None], np.where(added < number, added, 0))
        times = np.where(quanta == 0, 0.0, np.inf)
        previous = 0
        for index, capacity in enumerate(degree.capacities):
            in_range = (quanta > previous) & (quanta <= capacity)
            previous = max(previous, capacity)
            if not in_range.any():
                continue
            rows, columns = np.nonzero(in_range)
            attention = degree.attention[index]
            sums = self.sums[index][:, :, None] - attention[:, :, removed[rows]] + attention[:, :, added[columns]]
            options = (
                degree.base[index][:, :, quanta[in_range] - 1] + sums + degree.once[index][:, :, longest[in_range]]
            )
            times[in_range] = options.max(axis=0).sum(axis=0)
        return times

    def _longest_without(self, removed: IntArray) -> IntArray:
        """Return the longest length that stays, 0 if none does."""
        present = np.flatnonzero(self.held)
        if not len(present):
            return np.zeros_like(removed)
        second = present[-2] if len(present) > 1 else 0
        return np.where((removed == present[-1]) & (self.held[present[-1]] == 1), second, present[-1])


class _Board:
    """All micro-batches, and the ends of the slots [M] ns."""

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
        """Add a micro-batch unless it is empty."""
        if batch.quanta:
            self.batches.append(batch)
            self.ends[batch.slots] += batch.time_ns

    def remove(self, batch: Batch) -> None:
        """Remove a micro-batch unless it is empty."""
        if batch.quanta:
            self.batches.remove(batch)
            self.ends[batch.slots] -= batch.time_ns

    def chosen(self, random: np.random.Generator) -> Batch:
        """Return a random micro-batch: of the slot that ends last, of another slot, or any."""
        draw = random.random()
        if draw < _SLOWEST + _SEAT:
            slot = int(self.ends.argmax() if draw < _SLOWEST else random.integers(len(self.ends)))
            batches = [batch for batch in self.batches if batch.team == slot // batch.degree.size]
            if batches:
                return batches[int(random.integers(len(batches)))]
        return self.batches[int(random.integers(len(self.batches)))]

    def moved(self, batch: Batch, tau: float) -> bool:
        """Move a micro-batch to the best team of any degree; return whether that improves."""
        latest, now = self.ends.max(), np.exp((self.ends - self.ends.max()) / tau).sum()
        without = self.ends.copy()
        without[batch.slots] -= batch.time_ns
        best: tuple[float, Batch] | None = None
        for degree in self.degrees.values():
            if batch.quanta > degree.capacities[-1]:
                continue
            copy = batch if degree is batch.degree else Batch(degree, 0, batch.held)
            before = _power((without - latest) / tau)
            after = _power((without + copy.time_ns - latest) / tau)
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
        """Make the best exchange of at most one sequence of each, if it improves; return whether it did."""
        removed, added_choices = here.choices, there.choices
        changes = (
            here.exchanged(removed, added_choices) - here.time_ns,
            there.exchanged(added_choices, removed).T - there.time_ns,
        )
        masks = np.zeros((2, len(self.ends)), dtype=bool)
        masks[0, here.slots] = masks[1, there.slots] = True
        shared = masks[0] & masks[1]
        changes_of_potential = self._added(masks[0] & ~shared, changes[0], tau) + self._added(
            masks[1] & ~shared, changes[1], tau
        )
        changes_of_potential = changes_of_potential + self._added(shared, changes[0] + changes[1], tau)
        changes_of_potential[~np.isfinite(changes[0] + changes[1])] = np.inf
        row, column = np.unravel_index(int(changes_of_potential.argmin()), changes_of_potential.shape)
        potential = _power((self.ends - self.ends.max()) / tau).sum()
        if changes_of_potential[row, column] >= -_LESS * potential:
            return False
        self.remove(here)
        self.remove(there)
        self.add(here.after_exchange(int(removed[row]), int(added_choices[column])))
        self.add(there.after_exchange(int(added_choices[column]), int(removed[row])))
        return True

    def _added(self, slots: BoolArray, change: FloatArray, tau: float) -> FloatArray:
        """Return the change of the potential if the ends of some slots all change by an amount."""
        if not slots.any():
            return np.zeros_like(change)
        latest, own_ends = self.ends.max(), self.ends[slots]
        last = own_ends.max()
        weight = np.exp((own_ends - last) / tau).sum()
        return np.asarray(weight * (_power((last - latest + change) / tau) - _power((last - latest) / tau)))

    def turns(self, batches: list[Batch]) -> list[Turn]:
        """Return the turns, the largest degree first, the strategies of a team one after another."""
        rows_of: dict[tuple[int, int, int], list[IntArray]] = {}
        for batch in batches:
            key = -batch.degree.size, batch.team, batch.degree.member(batch.quanta)
            rows_of.setdefault(key, []).append(batch.held)
        return [
            Turn(member, team, np.array(rows)) for (_, team, member), rows in sorted(rows_of.items(), key=_first)
        ]


def _first(pair: tuple[tuple[int, int, int], list[IntArray]]) -> tuple[int, int, int]:
    return pair[0]


def _power(exponents: FloatArray) -> FloatArray:
    return np.asarray(np.exp(np.minimum(exponents, _STEEP)))


def improved(
    family: Family, turns: Sequence[Turn], rounds: int, cutoff_ns: float, deadline: float, seed: int = 1
) -> list[Turn]:
    """Return the best turns met in some rounds; stop at ``cutoff_ns`` or at the ``deadline`` (of
    ``perf_counter``)."""
    random = np.random.default_rng(seed)
    board = _Board(family, turns)
    best, best_ns = list(board.batches), float(board.ends.max())
    for round_index in range(rounds):
        if best_ns <= cutoff_ns or (round_index % _LOOK == 0 and time.perf_counter() > deadline):
            break
        tau = float(board.ends.max()) * _FIRST * (_LAST / _FIRST) ** (round_index / rounds)
        draw, here = random.random(), board.chosen(random)
        if draw < _MOVES:
            changed = board.moved(here, tau)
        elif draw < _MOVES + _OPENS:
            size = int(random.choice(family.degree_chain))
            team = int(random.integers(family.num_slots // size))
            changed = board.exchanged(here, Batch(board.degrees[size], team, np.zeros_like(here.held)), tau)
        else:
            there = board.batches[int(random.integers(len(board.batches)))]
            changed = there is not here and board.exchanged(here, there, tau)
        if changed and board.ends.max() < best_ns:
            best, best_ns = list(board.batches), float(board.ends.max())
    return board.turns(best)
