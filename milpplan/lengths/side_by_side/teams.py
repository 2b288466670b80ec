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

**Master.** A micro-batch of degree c takes c of the M slots, which have M Z of time together. So the master
(``bounds.master``) with the shares c / M, those of equal replicas, bounds Z.

**Linear bound** (``SharedWork``) of all steps of teams, and how sequences share the degrees in its solution. Every
slot is busy or idle for the time Z of the step before its reduction, so the slot time of all micro-batches is at
most M Z. A micro-batch of strategy j takes c_j slots for its time, so with A_j = c_j / M times the sum of the
times under j

    Z >= sum_j A_j,    A_j >= sum_k x_jk share_jtk for every linear bound t without a constant,

because the bounds of ``work_bounds`` without constant add up over micro-batches, whatever replica these run on,
and divide evenly among the D_j = M / c_j replicas. So the linear program

    min sum_j A_j    subject to    A_j >= sum_k x_jk share_jtk,    sum_j x_jk = n_k,    x >= 0

is a bound of all steps of teams, in any order, with any teams. Any weights lambda_jt >= 0 with sum_t lambda_jt <=
1 prove

    Z >= sum_k n_k min_j sum_t lambda_jt share_jtk,

which is the reported bound: the program only finds good weights. Besides, Z is at least the minimum time of the
longest sequence. In steps below a limit no sequence runs where it takes longer by itself. The master
begins here, and counts the constants of micro-batches, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from milpplan.errors import IllegalPlanError
from milpplan.lengths import StrategyTables
from milpplan.lengths.bounds import glop
from milpplan.lengths.bounds.master import Contents, can_price, solve_master
from milpplan.lengths.bounds.work_bounds import latencies
from milpplan.lengths.cost_tables import Timer, times_of_several
from milpplan.lengths.deadline import Deadline
from milpplan.lengths.search_parameters import SAFETY, UNFIT_NS
from milpplan.simulation import FloatArray, IntArray


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


@dataclass(frozen=True, slots=True, eq=False)
class SharedWork:
    """Lower bound of the step with reduction and finish."""

    bound_ns: float
    prices: FloatArray
    """Minimum slot time of a sequence over M under every member, [J, n] ns; infinite where it does not fit."""


@dataclass(frozen=True, slots=True, eq=False)
class SharedTables:
    """Data of a family's bound by length."""

    tables: tuple[FloatArray, ...]
    """By member: bounds without a constant, [T, n] ns."""
    latency_ns: FloatArray
    """Minimum time of a sequence under every member, [J, n]."""
    fixed_cost_ns: int
    """Minimum time after all micro-batches."""

    @staticmethod
    def of(family: Family) -> SharedTables:
        """Build the data of a family."""
        pool = family.pool
        latency_ns = [
            latencies(pool.tables[member], pool.members[member], family.max_quanta(member))
            for member in family.members
        ]
        tables = tuple(linear_shares(family, member) for member in family.members)
        return SharedTables(tables, np.array(latency_ns), family.min_fixed_cost_ns)

    def for_lengths(self, lengths: IntArray) -> SharedTables:
        """Return the data restricted to some lengths."""
        return SharedTables(
            tuple(table[:, lengths] for table in self.tables), self.latency_ns[:, lengths], self.fixed_cost_ns
        )

    def shared(self, counts: FloatArray, limit_ns: float = np.inf, bunches: int = 256) -> SharedWork:
        """Return the bound of ``counts`` [n] sequences in steps below the limit, and the prices that prove it, by
        a program over bunches of lengths."""
        longest = int(np.flatnonzero(counts)[-1])
        longest_ns = float(self.latency_ns[:, longest].min())
        is_too_long = self.latency_ns > limit_ns - self.fixed_cost_ns
        tables = [
            np.where(is_excluded, UNFIT_NS, table)
            for table, is_excluded in zip(self.tables, is_too_long, strict=True)
        ]
        if is_too_long[:, counts > 0].all(axis=0).any():
            return SharedWork(limit_ns, np.full(self.latency_ns.shape, np.inf))
        prices = _prices(tables, _duals(tables, counts, bunches))
        area = float(counts @ prices.min(axis=0)) * SAFETY
        bound_ns = min(limit_ns, max(area, longest_ns) + self.fixed_cost_ns)
        return SharedWork(bound_ns, np.where(prices < UNFIT_NS, prices, np.inf))


def shared_work(family: Family) -> SharedWork:
    """Return the bound of a family, and the prices that prove it."""
    return SharedTables.of(family).shared(family.pool.load.counts.astype(np.float64))


def _duals(tables: list[FloatArray], counts: FloatArray, max_bunches: int) -> FloatArray | None:
    """Return weights of all bounds by the program, members one after another; None without a solution.

    Its variables are the shares of at most ``max_bunches`` bunches of neighbouring lengths under every member: a
    few hundred find weights as good as thousands of lengths.
    """
    starts = np.unique(np.linspace(0, len(counts), max_bunches, endpoint=False).astype(np.int64))
    works = [np.add.reduceat(table * counts, starts, axis=1) for table in tables]
    fits = np.array([work[0] < UNFIT_NS for work in works])
    num_members, bunches = fits.shape
    scale = max(1.0, float(np.min([work.max(axis=0) for work in works], axis=0).sum()))
    # Shares of bunches by member, then the members' parts of the slot time.
    rows = np.zeros((sum(map(len, tables)), num_members * bunches + num_members))
    ends = np.cumsum([len(table) for table in tables]).tolist()
    for member, (work, end) in enumerate(zip(works, ends, strict=True)):
        own_rows = rows[end - len(work) : end]
        own_rows[:, member * bunches : (member + 1) * bunches] = np.where(fits[member], work / scale, 0.0)
        own_rows[:, num_members * bunches + member] = -1.0
    answer = glop.least(
        np.repeat([0.0, 1.0], [num_members * bunches, num_members]),
        (rows, np.zeros(len(rows))),
        (np.hstack([np.eye(bunches)] * num_members + [np.zeros((bunches, num_members))]), np.ones(bunches)),
        high=np.append(np.where(fits, 1.0, 0.0), np.full(num_members, np.inf)),
    )
    return None if answer is None else -answer.at_most


def linear_shares(family: Family, member: int) -> FloatArray:
    """Return a member's bounds without a constant, [T, n] ns over all slots; a huge value where a length does not
    fit."""
    bounds = family.pool.linear_bounds(member, shared_memory=False)
    return np.asarray(np.minimum(bounds.shares[bounds.constants == 0.0], UNFIT_NS))


def _prices(tables: list[FloatArray], duals: FloatArray | None) -> FloatArray:
    """Return the mixture of every member's bounds in proportion to ``duals``, [J, n]; equal parts without any."""
    mixed, start = [], 0
    for table in tables:
        own = np.zeros(len(table)) if duals is None else np.maximum(0.0, duals[start : start + len(table)])
        start += len(table)
        weights = own / own.sum() if own.sum() > 0 else np.full(len(table), 1.0 / len(table))
        mixed.append(weights @ table)
    return np.array(mixed)


@dataclass(frozen=True, slots=True, eq=False)
class Priced:
    """Bound and solution of a family's configuration program."""

    bound_ns: float
    """Lower bound of all steps below the limit, with reduction and finish."""
    shares: FloatArray
    """Numbers of each micro-batch in the program's solution, [v]; empty if it was not solved."""
    rows: IntArray
    """The micro-batches, [v, n]."""
    prices: FloatArray
    """Slot time over M, [n] ns: no micro-batch of these steps is worth more than its time."""


def priced(family: Family, shared: SharedWork, limit_ns: float, deadline: Deadline) -> Priced:
    """Bound the steps of ``family`` below the limit by column generation.

    Args:
        family: the strategies.
        shared: its linear bound, with the first prices.
        limit_ns: steps of at least this time do not count.
        deadline: end of the search.
    """
    fixed_cost_ns = family.min_fixed_cost_ns
    problems = [Contents.of(family.pool, member, limit_ns - fixed_cost_ns) for member in family.members]
    counts = family.pool.load.counts.astype(np.float64)
    best = np.where(counts > 0, shared.prices.min(axis=0), 0.0) * SAFETY
    unsolved = Priced(shared.bound_ns, np.zeros(0), np.zeros((0, len(counts)), dtype=np.int64), best)
    if not np.logical_or.reduce([problem.items.fits for problem in problems])[counts > 0].all():
        return replace(unsolved, bound_ns=max(limit_ns, shared.bound_ns))
    if not can_price(problems):
        return unsolved
    solution = solve_master(problems, counts, best, limit_ns - fixed_cost_ns, deadline)
    bound_ns = max(shared.bound_ns, min(limit_ns, solution.value_ns * SAFETY + fixed_cost_ns))
    return Priced(bound_ns, solution.shares, solution.rows, solution.duals * SAFETY)
