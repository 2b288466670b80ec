"""Steps with several degrees of context parallelism side by side: teams of GPUs, each with its own micro-batches.

**The space.** One tensor parallelism, no stages, no expert parallelism: then every rank holds the same parameters
for every degree of context parallelism, the gradients of all micro-batches add up in place, and one reduction
among all D x C ranks of one tensor-parallel rank, equal for every D and C, ends the step. So *slots* of tp GPUs
form a row, 0 ... M - 1, and a micro-batch runs on an aligned *team* of c slots (c b to c b + c - 1) under the
strategy with cp = c and any recompute setting that holds it. A team starts when all its slots are free; other
slots continue. Nothing moves between two degrees, so there are no switches; all teams finish before the reduction:

    end(turn) = max over its slots of the ends of what ran there before + its time
    step      = max over all turns + reduction + finish

A step of equal replicas is a special case (all micro-batches under one degree), and so are FlexSP's rounds.

**Memory.** States do not depend on the degree; the capacity of a micro-batch is that of its strategy by itself
(``candidates``). Communicator buffers of further degrees are not counted.

Source: FlexSP (2412.01523), whose groups of sequence parallelism of several degrees run beside each other and are
formed anew in every round; here teams need not wait for a round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from milpplan.errors import IllegalPlanError
from milpplan.lengths import StrategyTables
from milpplan.lengths.cost_tables import times_of_several
from milpplan.lengths.single.packing_local_search import Timer
from milpplan.simulation import IntArray


@dataclass(frozen=True, eq=False)
class Family:
    """Strategies (members of the pool) with equal parameters on every rank, of any degree of context
    parallelism."""

    pool: StrategyTables
    members: tuple[int, ...]
    timers: dict[int, Timer] = field(default_factory=dict)
    """Timers by member, made on demand."""

    def timer(self, member: int) -> Timer:
        """Return the times of a member's micro-batches."""
        if member not in self.timers:
            self.timers[member] = Timer.of(self.pool.tables[member], self.max_quanta(member))
        return self.timers[member]

    @cached_property
    def degrees(self) -> tuple[int, ...]:
        """Context parallelism of every member."""
        return tuple(self.pool.members[member].candidate.layout.cp for member in self.members)

    @cached_property
    def degree_chain(self) -> tuple[int, ...]:
        """Degrees, the largest first, each a multiple of the next, such as all powers of two.

        The degree with the largest capacity is among them, so that every sequence fits somewhere.
        """
        pairs = zip(self.members, self.degrees, strict=True)
        _, base = max((self.max_quanta(member), degree) for member, degree in pairs)
        chain = [base]
        for degree in sorted(set(self.degrees)):
            if degree > base and degree % chain[0] == 0:
                chain.insert(0, degree)
        for degree in sorted(set(self.degrees), reverse=True):
            if degree < base and chain[-1] % degree == 0:
                chain.append(degree)
        return tuple(chain)

    @property
    def num_slots(self) -> int:
        """M: GPUs of the cluster over those of a slot."""
        layout = self.pool.members[self.members[0]].candidate.layout
        return layout.num_gpus // layout.tp

    @property
    def gpus_per_slot(self) -> int:
        """GPUs of a slot: tp."""
        return self.pool.members[self.members[0]].candidate.layout.tp

    def slots(self, turn: Turn) -> slice:
        """Return the slots of a turn's team."""
        degree = self.pool.members[turn.member].candidate.layout.cp
        return slice(degree * turn.team, degree * (turn.team + 1))

    def max_quanta(self, member: int) -> int:
        """Return the capacity of a micro-batch in quanta."""
        return self.pool.max_quanta(member, shared_memory=False)

    @property
    def reduce_ns(self) -> int:
        """Reduction of gradients among all slots: equal for all degrees; the maximum if not."""
        return max(map(self.pool.reduce_ns, self.members))

    @property
    def finish_ns(self) -> int:
        """Norm, update and gather: equal for all degrees; the maximum if not."""
        return max(map(self.pool.finish_ns, self.members))

    @property
    def fixed_cost_ns(self) -> int:
        """Time after all micro-batches: reduction and finish."""
        return self.reduce_ns + self.finish_ns

    @property
    def min_fixed_cost_ns(self) -> int:
        """Minimum time after all micro-batches under any degree."""
        return min(map(self.pool.reduce_ns, self.members)) + min(map(self.pool.finish_ns, self.members))


def families(pool: StrategyTables) -> list[Family]:
    """Return all families of at least two degrees, one of which holds the longest sequence.

    Teams are neighbours, so cp is next to tp in the order of ranks.
    """
    by_tp: dict[tuple[int, int], list[int]] = {}
    for member, strategy in enumerate(pool.members):
        layout = strategy.candidate.layout
        if layout.pp == layout.ep == 1 and layout.rank_order == "tp-cp-dp-pp":
            by_tp.setdefault((layout.tp, layout.etp), []).append(member)
    all_families = [Family(pool, tuple(members)) for members in by_tp.values()]
    longest = int(pool.load.lengths[-1])
    return [
        family
        for family in all_families
        if len(set(family.degrees)) > 1
        and max(map(family.max_quanta, family.members)) * pool.load.token_quantum >= longest
    ]


@dataclass(frozen=True, eq=False)
class Turn:
    """Micro-batches ``packed`` [v, n] of one strategy, one after another on team ``team`` of its degree."""

    member: int
    team: int
    packed: IntArray


@dataclass(frozen=True, eq=False)
class TeamStep:
    """Turns in the order in which they start on every slot, when each starts and ends, and the exact time of the
    step with reduction and finish, ns."""

    family: Family
    turns: tuple[Turn, ...]
    starts_ns: tuple[int, ...]
    ends_ns: tuple[int, ...]
    time_ns: int

    @property
    def order(self) -> tuple[int, ...]:
        """Members that run something, in the order of their first turns."""
        return tuple(dict.fromkeys(turn.member for turn in self.turns))


def simulate_turns(family: Family, turns: Sequence[Turn]) -> TeamStep:
    """Return the exact step of the turns, in their order.

    Raises:
        IllegalPlanError: a sequence runs never or twice, a team does not exist, or a micro-batch does not fit.
    """
    _check(family, turns)
    times = turn_times_ns(family, turns)
    free = np.zeros(family.num_slots, dtype=np.int64)
    starts, ends = [], []
    for turn, time_ns in zip(turns, times, strict=True):
        slots = family.slots(turn)
        starts.append(int(free[slots].max()))
        ends.append(starts[-1] + time_ns)
        free[slots] = ends[-1]
    return TeamStep(family, tuple(turns), tuple(starts), tuple(ends), int(free.max()) + family.fixed_cost_ns)


def turn_times_ns(family: Family, turns: Sequence[Turn]) -> list[int]:
    """Return the exact time of every turn: the sum of its micro-batches."""
    pool, times_ns = family.pool, [0] * len(turns)
    if not turns:
        return times_ns
    turns_of = {
        member: [index for index, turn in enumerate(turns) if turn.member == member]
        for member in dict.fromkeys(turn.member for turn in turns)
    }
    parts = [
        (pool.members[member].candidate, np.concatenate([turns[index].packed for index in indices]))
        for member, indices in turns_of.items()
    ]
    stage_times = times_of_several(pool.problem, parts, pool.load.lengths, pool.load.rules.mask)
    for indices, times in zip(turns_of.values(), stage_times, strict=True):
        micro_batch_ns = times.forward[0] + times.backward[0]
        ends = np.cumsum([len(turns[index].packed) for index in indices])[:-1]
        for index, own_ns in zip(indices, np.split(micro_batch_ns, ends), strict=True):
            times_ns[index] = int(own_ns.sum())
    return times_ns


def _check(family: Family, turns: Sequence[Turn]) -> None:
    load = family.pool.load
    counts = sum((turn.packed.sum(axis=0) for turn in turns), np.zeros_like(load.counts))
    if (counts != load.counts).any():
        k = int(np.flatnonzero(counts != load.counts)[0])
        raise IllegalPlanError(
            f"{counts[k]} sequences of {load.lengths[k]:,} tokens run; there are {load.counts[k]}.",
            "Every sequence once expected.",
        )
    for turn in turns:
        name = family.pool.members[turn.member].candidate.name
        slots = family.slots(turn)
        if turn.member not in family.members or turn.team < 0 or slots.stop > family.num_slots:
            raise IllegalPlanError(
                f"Team {turn.team} of {name} ends at slot {slots.stop}.",
                f"Teams of the {family.num_slots} slots of one tensor parallelism expected.",
            )
        tokens, max_tokens = turn.packed @ load.lengths, family.max_quanta(turn.member) * load.token_quantum
        if not len(tokens) or tokens.min() < 1 or tokens.max() > max_tokens:
            raise IllegalPlanError(
                f"A turn of {name} has micro-batches of {tokens.tolist()} tokens.",
                f"At least one expected, of 1 to {max_tokens:,} tokens each.",
            )
