"""Steps of context parallelism of several degrees side by side: teams of GPUs, each with its own micro-batches.

**The space.** One tensor parallelism, no stages, no expert parallelism: then every rank holds the same parameters
whatever the degree of context parallelism, the gradients of all micro-batches add up in place, and one reduction
among all D x C ranks of one tensor-parallel rank, the same for every D and C, ends the step. So *seats* of tp GPUs
stand in a row, 0 ... M - 1, and a micro-batch runs on an aligned *team* of c of them (c b to c b + c - 1) under
the strategy with cp = c and any recompute setting that holds it. A team starts when all its seats are free; the
seats of others go on. Nothing moves between two degrees, so nothing is switched; all teams are done before the
reduction:

    end(turn) = max over its seats of the ends of what ran there before + its time
    step      = max over all turns + reduction + finish

A step of equal replicas is one of these (all micro-batches under one degree), and so are FlexSP's rounds.

**Memory.** States do not depend on the degree; a micro-batch holds at most what its strategy holds alone
(``candidates``). Buffers of communicators of further degrees are not counted.

Source: FlexSP (2412.01523), whose groups of sequence parallelism of several degrees run beside each other and are
remade from round to round; here teams need not wait for the round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from milpplan.errors import IllegalPlanError
from milpplan.lengths.replica_time import times_of_several
from milpplan.lengths.single.packing_local_search import Timer
from milpplan.lengths.strategy_tables import StrategyTables
from milpplan.simulation.layout_columns import IntArray


@dataclass(frozen=True, eq=False)
class Family:
    """Strategies (places in the pool) with the same parameters on every rank, of any degree of context
    parallelism."""

    pool: StrategyTables
    members: tuple[int, ...]
    timers: dict[int, Timer] = field(default_factory=dict)

    def timer(self, member: int) -> Timer:
        """Times of a member's micro-batches, made once."""
        if member not in self.timers:
            self.timers[member] = Timer.of(self.pool.tables[member], self.max_quanta(member))
        return self.timers[member]

    @property
    def longest_index(self) -> int:
        """Place of the longest sequence that there is."""
        return int(np.flatnonzero(self.pool.load.counts)[-1])

    @cached_property
    def degrees(self) -> tuple[int, ...]:
        """Context parallelism of every member."""
        return tuple(self.pool.members[member].candidate.layout.cp for member in self.members)

    @cached_property
    def degree_chain(self) -> tuple[int, ...]:
        """Degrees of which each divides the next larger one, largest first: all powers of two, say. The one that
        holds most is among them, so that every sequence has a place."""
        pairs = zip(self.members, self.degrees, strict=True)
        _, middle = max((self.max_quanta(member), degree) for member, degree in pairs)
        chain = [middle]
        for degree in sorted(set(self.degrees)):
            if degree > middle and degree % chain[0] == 0:
                chain.insert(0, degree)
        for degree in sorted(set(self.degrees), reverse=True):
            if degree < middle and chain[-1] % degree == 0:
                chain.append(degree)
        return tuple(chain)

    @property
    def num_slots(self) -> int:
        """M: GPUs of the cluster by those of a seat."""
        layout = self.pool.members[self.members[0]].candidate.layout
        return layout.num_gpus // layout.tp

    @property
    def gpus_per_slot(self) -> int:
        """GPUs of a seat: tp."""
        return self.pool.members[self.members[0]].candidate.layout.tp

    def slots(self, turn: Turn) -> slice:
        """The seats of a turn's team."""
        degree = self.pool.members[turn.member].candidate.layout.cp
        return slice(degree * turn.team, degree * (turn.team + 1))

    def max_quanta(self, member: int) -> int:
        """The most grains of a micro-batch."""
        return self.pool.max_quanta(member, shared_memory=False)

    @property
    def reduce_ns(self) -> int:
        """The reduction of gradients among all seats: the same for all degrees, and the most if it were not."""
        return max(map(self.pool.reduce_ns, self.members))

    @property
    def finish_ns(self) -> int:
        """Norm, update and gather: the same for all degrees, and the most if it were not."""
        return max(map(self.pool.finish_ns, self.members))

    @property
    def fixed_cost_ns(self) -> int:
        """What follows all micro-batches: the reduction and the finish."""
        return self.reduce_ns + self.finish_ns

    @property
    def min_fixed_cost_ns(self) -> int:
        """What follows them at least, under any degree."""
        return min(map(self.pool.reduce_ns, self.members)) + min(map(self.pool.finish_ns, self.members))


def families(pool: StrategyTables) -> list[Family]:
    """All families of at least two degrees, one of which holds the longest sequence; teams are neighbours, so cp
    is next to tp in the order of ranks."""
    found: dict[tuple[int, int], list[int]] = {}
    for member, one in enumerate(pool.members):
        layout = one.candidate.layout
        if layout.pp == layout.ep == 1 and layout.rank_order == "tp-cp-dp-pp":
            found.setdefault((layout.tp, layout.etp), []).append(member)
    made = [Family(pool, tuple(members)) for members in found.values()]
    longest = int(pool.load.lengths[-1])
    return [
        one
        for one in made
        if len(set(one.degrees)) > 1 and max(map(one.max_quanta, one.members)) * pool.load.token_quantum >= longest
    ]


@dataclass(frozen=True, eq=False)
class Turn:
    """Micro-batches ``packed`` [v, n] of one strategy, one after another on team ``team`` of its degree."""

    member: int
    team: int
    packed: IntArray


@dataclass(frozen=True, eq=False)
class TeamStep:
    """Turns in the order in which they start on every seat, when each starts and ends, and the exact time of the
    step, reduction and finish included, ns."""

    family: Family
    turns: tuple[Turn, ...]
    starts_ns: tuple[int, ...]
    ends_ns: tuple[int, ...]
    time_ns: int

    @property
    def order(self) -> tuple[int, ...]:
        """Members that run something, the first one first."""
        return tuple(dict.fromkeys(turn.member for turn in self.turns))


def simulated(family: Family, turns: Sequence[Turn]) -> TeamStep:
    """The exact step of the turns, in their order.

    Raises:
        IllegalPlanError: a sequence runs never or twice, a team does not exist, or a micro-batch does not fit.
    """
    _check(family, turns)
    times = turn_times_ns(family, turns)
    free = np.zeros(family.num_slots, dtype=np.int64)
    starts, ends = [], []
    for turn, taken in zip(turns, times, strict=True):
        part = family.slots(turn)
        starts.append(int(free[part].max()))
        ends.append(starts[-1] + taken)
        free[part] = ends[-1]
    return TeamStep(family, tuple(turns), tuple(starts), tuple(ends), int(free.max()) + family.fixed_cost_ns)


def turn_times_ns(family: Family, turns: Sequence[Turn]) -> list[int]:
    """Exact time of every turn: of all its micro-batches."""
    pool, found = family.pool, [0] * len(turns)
    if not turns:
        return found
    mine = {
        member: [place for place, turn in enumerate(turns) if turn.member == member]
        for member in dict.fromkeys(turn.member for turn in turns)
    }
    parts = [
        (pool.members[member].candidate, np.concatenate([turns[place].packed for place in places]))
        for member, places in mine.items()
    ]
    timed = times_of_several(pool.problem, parts, pool.load.lengths, pool.load.rules.mask)
    for places, times in zip(mine.values(), timed, strict=True):
        each = times.forward[0] + times.backward[0]
        ends = np.cumsum([len(turns[place].packed) for place in places])[:-1]
        for place, part in zip(places, np.split(each, ends), strict=True):
            found[place] = int(part.sum())
    return found


def _check(family: Family, turns: Sequence[Turn]) -> None:
    load = family.pool.load
    held = sum((turn.packed.sum(axis=0) for turn in turns), np.zeros_like(load.counts))
    if (held != load.counts).any():
        k = int(np.flatnonzero(held != load.counts)[0])
        raise IllegalPlanError(
            f"{held[k]} sequences of {load.lengths[k]:,} tokens run; there are {load.counts[k]}.",
            "Every sequence once expected.",
        )
    for turn in turns:
        name = family.pool.members[turn.member].candidate.name
        part = family.slots(turn)
        if turn.member not in family.members or turn.team < 0 or part.stop > family.num_slots:
            raise IllegalPlanError(
                f"Team {turn.team} of {name} ends at seat {part.stop}.",
                f"Teams of the {family.num_slots} seats of one tensor parallelism expected.",
            )
        tokens, most = turn.packed @ load.lengths, family.max_quanta(turn.member) * load.token_quantum
        if not len(tokens) or tokens.min() < 1 or tokens.max() > most:
            raise IllegalPlanError(
                f"A turn of {name} has micro-batches of {tokens.tolist()} tokens.",
                f"At least one expected, of 1 to {most:,} tokens each.",
            )
