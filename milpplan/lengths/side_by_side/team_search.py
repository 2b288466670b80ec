"""Heuristic search for a short step of teams.

The results are simulated exactly (``teams``), where the bounds come from, too.

 1. *Start*: a quick step (``team_quick``), or sequences assigned by the prices of the linear bound
    (``team_quick``), perturbed at random many times, as the cheapest degrees by time need not pack well; or
    whole micro-batches near the solution of the master.
 2. *Exchanges* of single sequences.
 3. *Ruin and recreate*: the sequences of the teams inside a block of slots, most often one around the slot that
    ends last, are assigned anew at perturbed prices, with exchanges after; the shorter step is kept. Exchanges of
    single sequences cannot merge two micro-batches, or turn two teams into a larger one.

Random numbers are seeded and attempts counted, so that equal sequences get equal steps unless time runs out.

**Exchanges.** Degrees nest, so a slot ends after the sum of all micro-batches that run on it, and the step is the
maximum of these ends e_s. The objective is

    sum over slots of exp(e_s / tau)

with tau falling from about a hundredth of the step, where all time counts, to a fraction of a thousandth, where
only the slots that end last count. Exchanges change few ends by one amount each, so many are compared at once: for
a pair of micro-batches every sequence of one, or none, against every one of the other, or none, at the exact times
of both (``cost_tables.Timer``). Besides, a micro-batch moves to another team, of any degree, or a new one
opens. The best exchange of the pair is made if it improves. Every micro-batch runs under the strategy of its
degree that recomputes least and holds it. Random numbers are seeded, and rounds are counted.

``TeamSearch`` has the best step of teams over all families, with its proof and its records.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from milpplan.lengths import Load, StrategyTables
from milpplan.lengths.deadline import NEVER, Deadline, spend
from milpplan.lengths.records import LengthGroup, SideBySide, TeamTurn
from milpplan.lengths.search_parameters import PARAMETERS, SAFETY, SOLVER_TOLERANCE, TOLERANCE
from milpplan.lengths.side_by_side.team_quick import Packer, quick_turns, spread
from milpplan.lengths.side_by_side.teams import (
    Family,
    Priced,
    TeamStep,
    Turn,
    families,
    priced,
    shared_work,
    simulate_turns,
)
from milpplan.simulation import BoolArray, FloatArray, IntArray
from milpplan.units import NS_PER_S


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
        if draw < 0.8:
            slot = int(self.ends.argmax() if draw < 0.5 else random.integers(len(self.ends)))
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
        if best is None or best[0] >= now * SAFETY:
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
        if changes_of_potential[row, column] >= -TOLERANCE * potential:
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
    return np.asarray(np.exp(np.minimum(exponents, 200.0)))


def improved(
    family: Family, turns: Sequence[Turn], rounds: int, cutoff_ns: float, deadline: Deadline, seed: int = 1
) -> list[Turn]:
    """Return the best turns met in some rounds; stop at ``cutoff_ns`` or at the ``deadline``."""
    random = np.random.default_rng(seed)
    board = _Board(family, turns)
    first, last = PARAMETERS.team_tau
    best, best_ns = list(board.batches), float(board.ends.max())
    for round_index in range(rounds):
        if best_ns <= cutoff_ns or (round_index % 64 == 0 and deadline.passed):
            break
        spend(2.2e-4)
        tau = float(board.ends.max()) * first * (last / first) ** (round_index / rounds)
        draw, here = random.random(), board.chosen(random)
        # Most rounds exchange sequences, some move a micro-batch or open one.
        if draw < 0.08:
            changed = board.moved(here, tau)
        elif draw < 0.15:
            size = int(random.choice(family.degree_chain))
            team = int(random.integers(family.num_slots // size))
            changed = board.exchanged(here, Batch(board.degrees[size], team, np.zeros_like(here.held)), tau)
        else:
            there = board.batches[int(random.integers(len(board.batches)))]
            changed = there is not here and board.exchanged(here, there, tau)
        if changed and board.ends.max() < best_ns:
            best, best_ns = list(board.batches), float(board.ends.max())
    return board.turns(best)


@dataclass(frozen=True, slots=True)
class Effort:
    """Counted effort of a search."""

    attempts: int
    """Random starts."""
    rounds: int
    """Rounds of exchanges after the start."""
    again: int
    """Repetitions of ruin and recreate."""
    fewer: int = 50
    """Rounds of exchanges after each repetition."""


def shortest(packer: Packer, effort: Effort, cutoff_ns: float, deadline: Deadline) -> TeamStep:
    """Return the shortest step found before the ``deadline``, or the first one after it;
    stop at ``cutoff_ns``."""
    family = packer.family
    random = np.random.default_rng(1)
    quick = quick_turns(family, packer.lines)
    starts = [(float(_ends(packer, quick).max()), quick)]
    for attempt in range(effort.attempts):
        if deadline.passed:
            break
        size = _spread_of(attempt) if attempt else 0.0
        spend(3e-3)
        ends = np.zeros(family.num_slots)
        factors = np.exp(random.normal(0.0, size, len(family.degree_chain)))
        turns = spread(packer, factors, family.pool.load.counts, slice(0, family.num_slots), ends)
        starts.append((float(ends.max()), turns))
    _, turns = min(starts, key=lambda start: start[0])
    return improve_turns(packer, turns, effort, cutoff_ns, deadline)


def dealt(packer: Packer, priced: Priced, limit_ns: float) -> list[Turn]:
    """Return turns near the solution of the master.

    Whole micro-batches near its shares each take the degree with the minimum of slot time below the limit; they
    are assigned in order of degree and time, the largest first.
    """
    family = packer.family
    degrees = [Degree.of(family, degree) for degree in family.degree_chain]
    batches = []
    for counts in _whole(family.pool.load, priced):
        options = [
            Batch(degree, 0, counts) for degree in degrees if counts @ degree.sizes[:-1] <= degree.capacities[-1]
        ]
        below_limit = [batch for batch in options if batch.time_ns < limit_ns - family.fixed_cost_ns] or options
        batches.append(min(below_limit, key=lambda batch: batch.degree.size * batch.time_ns))
    turns, ends = [], np.zeros(family.num_slots)
    for batch in sorted(batches, key=lambda batch: (-batch.degree.size, -batch.time_ns)):
        size = batch.degree.size
        team = int(ends.reshape(-1, size).max(axis=1).argmin())
        ends[size * team : size * (team + 1)] += batch.time_ns
        turns.append(Turn(batch.degree.member(batch.quanta), team, batch.held[None]))
    return turns


def _whole(load: Load, priced: Priced) -> list[IntArray]:
    """Return micro-batches that hold every sequence once: whole shares first, then the remaining sequences,
    preferably of large shares that are nearly complete."""
    remaining, batches = load.counts.copy(), []
    sizes = load.lengths // load.token_quantum
    rows, shares = priced.rows, priced.shares.copy()
    while remaining.any():
        available = np.minimum(rows, remaining)
        is_whole = (available == rows).all(axis=1) & (shares > 1.0 - SOLVER_TOLERANCE)
        scores = np.where(is_whole, np.inf, (available @ sizes) / (rows @ sizes))
        # A micro-batch without a share counts a little.
        best = int((scores * (0.3 + np.maximum(0.0, shares))).argmax())
        batches.append(available[best])
        remaining -= available[best]
        shares[best] -= 1.0
    return batches


def improve_turns(
    packer: Packer, turns: list[Turn], effort: Effort, cutoff_ns: float, deadline: Deadline, seed: int = 1
) -> TeamStep:
    """Improve nested ``turns`` by steps 2 and 3."""
    family = packer.family
    random = np.random.default_rng(seed)
    short_ns = cutoff_ns - family.fixed_cost_ns
    current = improved(family, turns, effort.rounds, short_ns, deadline, seed)
    end_ns = float(_ends(packer, current).max())
    best, best_ns = current, end_ns
    for repetition in range(effort.again):
        if best_ns <= short_ns or deadline.passed:
            break
        candidate = improved(
            family, _dealt_anew(packer, current, random, repetition), effort.fewer, short_ns, deadline, repetition
        )
        candidate_ns = float(_ends(packer, candidate).max())
        # The step may become slightly longer on the way.
        if candidate_ns <= best_ns * (1.0 + 5e-4):
            current = candidate
        if candidate_ns < best_ns:
            best, best_ns = candidate, candidate_ns
    return simulate_turns(family, best)


def _spread_of(number: int) -> float:
    """Return the spread of the random price factors: mostly small, for many sequences, and large for few."""
    return 0.3 if number % 3 == 2 else 0.08


def _dealt_anew(packer: Packer, turns: list[Turn], random: np.random.Generator, repetition: int) -> list[Turn]:
    """Return the turns with those of the teams inside a block of slots assigned anew."""
    family = packer.family
    ends = _ends(packer, turns)
    slot = int(ends.argmax() if random.random() < 0.7 else random.integers(family.num_slots))
    size = int(random.choice([degree for degree in family.degree_chain if degree > 1]))
    block = slice(slot // size * size, slot // size * size + size)
    inside_block = [
        block.start <= family.slots(own).start and family.slots(own).stop <= block.stop for own in turns
    ]
    outside = [own for own, is_inside in zip(turns, inside_block, strict=True) if not is_inside]
    counts = sum(
        (own.packed.sum(axis=0) for own, is_inside in zip(turns, inside_block, strict=True) if is_inside),
        np.zeros_like(family.pool.load.counts),
    )
    factors = np.exp(random.normal(0.0, _spread_of(repetition), len(family.degree_chain)))
    return outside + spread(packer, factors, counts, block, _ends(packer, outside))


def _ends(packer: Packer, turns: list[Turn]) -> FloatArray:
    """Return the end of every slot, [M] ns: teams nest, so it is the sum of what runs on it."""
    ends = np.zeros(packer.family.num_slots)
    for turn in turns:
        ends[packer.family.slots(turn)] += packer.times(turn.member, turn.packed).sum()
    return ends


# Effort of the first and of later searches.
_FIRST_EFFORT, _LATER_EFFORT = Effort(24, 500, 10), Effort(0, 1000, 60)


@dataclass(frozen=True, slots=True, eq=False)
class BestTeams:
    """Result of a search: the shortest ``step`` of teams below the given time, None if none was found."""

    step: TeamStep | None
    bound_ns: float
    """Lower bound of all steps of the ``num_families`` families; infinite without a family."""
    num_families: int

    def record(self) -> SideBySide:
        """Return the record, in seconds, with the turns of the step."""
        step = self.step
        return SideBySide(
            None if step is None else step.time_ns / NS_PER_S,
            self.bound_ns / NS_PER_S if np.isfinite(self.bound_ns) else None,
            self.num_families,
            () if step is None else team_turns(step),
        )


@dataclass(slots=True, eq=False)
class _Open:
    """State of a family in the search."""

    packer: Packer
    bound_ns: float
    """Lower bound of its steps."""
    visits: int = 0
    """Number of packings and proofs."""
    step: TeamStep | None = None
    """Shortest step found."""

    @staticmethod
    def of(family: Family) -> _Open:
        """Start with the linear bound."""
        shared = shared_work(family)
        return _Open(Packer(family, shared), shared.bound_ns)

    def is_open(self, below_ns: float, gap: float, max_visits: int) -> bool:
        """Return whether the family may improve on ``below_ns`` within a number of visits."""
        open_gap = gap * PARAMETERS.team_gap_share * (1 if self.visits < 2 else 2)
        return self.visits < max_visits and self.bound_ns < below_ns * (1.0 - open_gap)


class TeamSearch:
    """Search over all families of a pool; ``best`` is the shortest step below the given time."""

    def __init__(self, pool: StrategyTables, gap: float) -> None:
        self.gap = gap
        self.best: TeamStep | None = None
        self.families = [_Open.of(family) for family in families(pool)]

    def run(self, below_ns: float, deadline: Deadline, visits: int = PARAMETERS.team_visits) -> BestTeams:
        """Find the best step of all families below ``below_ns``.

        The family with the lowest bound is packed first, then proved, packed from that proof, packed again, proved
        below its step, and so on, until no bound leaves most of the gap, every family had its visits, or the
        ``deadline``.
        """
        families = self.families
        while True:
            open_families = [family for family in families if family.is_open(below_ns, self.gap, visits)]
            if not open_families or (any(family.visits for family in families) and deadline.passed):
                break
            family = min(open_families, key=lambda family: family.bound_ns)
            _visit(family, below_ns, self.gap, deadline)
            if family.step is not None and family.step.time_ns < below_ns:
                self.best, below_ns = family.step, family.step.time_ns
        return BestTeams(
            self.best, min((family.bound_ns for family in families), default=float("inf")), len(families)
        )


def plan_family(family: Family, first: Effort, later: Effort, gap: float) -> tuple[TeamStep, float]:
    """Return a step of one family and the bound of all its steps in ns, by counted effort.

    The step is improved until it is within the ``gap``, once, or twice if it is far from the bound.
    """
    state = _Open.of(family)
    step = shortest(state.packer, first, state.bound_ns / (1.0 - gap), NEVER)
    for attempt in range(2):
        limit_ns = (step.time_ns + state.bound_ns) / 2 if attempt else step.time_ns
        proof = priced(family, state.packer.shared, limit_ns, NEVER)
        state.bound_ns = max(state.bound_ns, proof.bound_ns)
        if len(proof.rows) and state.bound_ns < step.time_ns * (1.0 - gap):
            turns = dealt(state.packer, proof, limit_ns)
            reworked_step = improve_turns(state.packer, turns, later, state.bound_ns / (1.0 - gap), NEVER)
            step = min(step, reworked_step, key=_time_ns)
        if state.bound_ns >= step.time_ns * (1.0 - 0.04):
            break
    return step, min(state.bound_ns, step.time_ns)


def _visit(state: _Open, below_ns: float, gap: float, deadline: Deadline) -> None:
    """Search a shorter step of the family, or prove a higher bound and build a step from its solution."""
    state.visits += 1
    closed = 1.0 - gap * PARAMETERS.team_gap_share
    if state.visits == 1:
        state.step = shortest(state.packer, _FIRST_EFFORT, state.bound_ns / closed, deadline)
        return
    if state.visits % 2 == 0:
        # First all steps below the best one, then the shorter half of the open range.
        limit_ns = below_ns if state.visits == 2 else (below_ns + state.bound_ns) / 2
        proof = priced(state.packer.family, state.packer.shared, limit_ns, deadline)
        state.bound_ns = max(state.bound_ns, proof.bound_ns)
        if state.bound_ns >= limit_ns or not len(proof.rows):
            return
        turns = dealt(state.packer, proof, limit_ns)
    else:
        assert state.step is not None
        turns = list(state.step.turns)
    step = improve_turns(state.packer, turns, _LATER_EFFORT, state.bound_ns / closed, deadline, state.visits)
    state.step = step if state.step is None else min(state.step, step, key=_time_ns)


def _time_ns(step: TeamStep) -> int:
    return step.time_ns


def team_turns(step: TeamStep) -> tuple[TeamTurn, ...]:
    """Return every turn with its GPUs, in the order in which they start."""
    family = step.family
    records = []
    for turn, start_ns, end_ns in zip(step.turns, step.starts_ns, step.ends_ns, strict=True):
        slots = family.slots(turn)
        records.append(
            TeamTurn(
                strategy=family.pool.members[turn.member].candidate.name,
                first_gpu=slots.start * family.gpus_per_slot,
                num_gpus=(slots.stop - slots.start) * family.gpus_per_slot,
                start_s=start_ns / NS_PER_S,
                end_s=end_ns / NS_PER_S,
                micro_batches=family.pool.micro_batches([turn.packed])[0],
            )
        )
    return tuple(sorted(records, key=lambda record: (record.start_s, record.first_gpu)))


def team_groups(step: TeamStep) -> tuple[LengthGroup, ...]:
    """Return the groups of the strategies; the replicas of a group are the teams of its degree.

    Groups overlap: ``time_s`` is from the first start to the last end of a group's turns. The reduction belongs to
    the last group.
    """
    return tuple(_group(step, member) for member in step.order)


def _group(step: TeamStep, member: int) -> LengthGroup:
    pool = step.family.pool
    candidate = pool.members[member].candidate
    indices = [index for index, turn in enumerate(step.turns) if turn.member == member]
    counts = sum((step.turns[index].packed.sum(axis=0) for index in indices), np.zeros_like(pool.load.counts))
    teams: list[tuple[tuple[int, ...], ...]] = [()] * candidate.layout.dp
    for index in indices:
        turn = step.turns[index]
        teams[turn.team] += pool.micro_batches([turn.packed])[0]
    span_ns = max(step.ends_ns[index] for index in indices) - min(step.starts_ns[index] for index in indices)
    return LengthGroup(
        strategy=candidate.name,
        plan=candidate.plan,
        buckets=tuple(
            (int(length), int(count)) for length, count in zip(pool.load.lengths, counts, strict=True) if count
        ),
        micro_batches=tuple(teams),
        micro_batch_tokens=step.family.max_quanta(member) * pool.load.token_quantum,
        time_s=span_ns / NS_PER_S,
        reduce_s=step.family.reduce_ns / NS_PER_S if member == step.order[-1] else 0.0,
    )
