"""Maximum work of heterogeneous replicas, as an integer program over their numbers.

**Variables.** For classes k of replicas: their number n_k, integer; x_kl >= 0 sequences of length number l on all
of them, integer if one is a tenth of a replica or more (*long*); theta, the share of the other sequences that is
done, up to twice all of them. **Objective.** Maximise theta. If it is below one by more than the solvers'
tolerance, no such replicas do the workload.

Rows, in the order of the functions that add them:

 - ``gpus_are_filled``: sum_k g_k n_k <= N (a replica without sequences is any).
 - ``some_are_unlike``: over the classes of one strategy sum n_k < its number of replicas by itself (that step is
   bounded elsewhere).
 - ``share_of_sequences``: sum_k x_kl >= theta n_l; n_l of long sequences, of which a share says little.
 - ``replicas_hold``: sum_l a_kil x_kl <= n_k for the rows i of a class: a row of one
   replica holds for sums over n_k.
 - ``some_are_used``: sum n_k >= 1 over classes of which some replica is required.

*Whole sequences*: if a sequence of a length takes the share a_l of a replica, none holds more than 1 / a_l of
them. With u(a) = floor((k + 1) a) / k, or a where (k + 1) a is whole, any sum of shares within 1 has a sum of u
within 1 (Fekete and Schepers 2001): rows for k = 1, 2, 3, 4 from every row, with shares rounded down slightly.

Coefficients are whole multiples of 1 / 10^7, rounded down. CP-SAT, which is trusted with moderate rows only, gets
the finest resolution that these allow, and whole sequences.

**Rows.** Every bound of a replica's time by its sequences, ``constant + sum_l w_l x_l <= T``, is a row, divided by
T - constant. So are prices of micro-batch contents of strategies of one stage (``master``), and for
pipelines ``sum_l u_l x_l <= h^-1(T)`` with concave bounds h of their work u (``work_bounds.PipelineWorkBound``).
No sequence runs where its latency exceeds T.

**The space.** Steps are pipelines of different tensor, context and pipeline parallelism at the same time. Replicas
of any strategies of the pool share the GPUs, until all GPUs have one; a replica may stay without sequences. Expert
parallelism spans replicas, so it is left out, and so are orders of ranks but the default one. All replicas hold
the whole model and see sequences of their own, so they meet only after the last backward of all, in one reduction:

    step = max over replicas of their times + reduction + finish

A step of one strategy is a special case, and not searched again here.

**States and reduction.** Each replica of g of the N GPUs keeps the share g / N of the optimizer's states of every
parameter, divided among its ranks that hold it. So every GPU has 1 / N of all, as in a step of its strategy by
itself, and memory is that of ``candidates``. A rank of a replica sends away all gradients but those of its own
share, and receives as much in parameters, as in a reduction among equal replicas. So once a step, reduction and
finish take as long as for the slowest of the strategies in use.

**Placement.** Replicas with larger groups (tp cp) come first. If each of these sizes divides the next larger one,
every tensor- and context-parallel group starts at a multiple of its size, so it spans the same links as in a step
of its strategy by itself. Stages of one replica are next to each other, so transfers between stages take at most
as long as in that step, where stages are farthest apart.

Source: Hydraulis (2412.07894), whose micro-batches go to pipelines of different parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from milpplan.errors import SolverError
from milpplan.lengths import Packed, StrategyTables, replicas_ns
from milpplan.lengths.bounds.pipeline_bounds import PathBound
from milpplan.lengths.bounds.work_bounds import LinearBounds, PipelineWorkBound, latencies
from milpplan.lengths.deadline import spend_measured
from milpplan.lengths.records import LengthGroup, TeamTurn
from milpplan.lengths.search_parameters import SAFETY
from milpplan.optimize.milp.backends import backend, check_infeasible
from milpplan.optimize.milp.cpsat import MAX_ROW_MAGNITUDE
from milpplan.optimize.milp.program import ProgramBuilder
from milpplan.optimize.milp.solution import Limits
from milpplan.simulation import BoolArray, FloatArray, IntArray
from milpplan.units import NS_PER_S


@dataclass(frozen=True, eq=False)
class HeterogeneousStep:
    """A step at its exact time: replicas of members of the pool with their sequences."""

    pool: StrategyTables
    packed: dict[int, Packed]
    time_ns: int

    @staticmethod
    def of(pool: StrategyTables, packed: Mapping[int, Packed]) -> HeterogeneousStep:
        """Build the step with its time."""
        time_ns = max(packing.time_ns for packing in packed.values())
        return HeterogeneousStep(pool, dict(packed), time_ns + reduce_ns(pool, packed) + finish_ns(pool, packed))

    @property
    def order(self) -> tuple[int, ...]:
        """Members in the order of their GPUs: the largest groups first."""
        return tuple(sorted(self.packed, key=lambda member: (-close(self.pool, member), member)))

    @property
    def home(self) -> int:
        """The strategy with the slowest finish."""
        return max(self.packed, key=self.pool.finish_ns)

    def first_gpus(self, member: int) -> list[int]:
        """Return the first GPU of each replica of a member, with sequences or without."""
        start = 0
        for owner in self.order:
            size, number = replica_gpus(self.pool, owner), len(self.packed[owner].replicas)
            if owner == member:
                return [start + size * index for index in range(number)]
            start += size * number
        raise KeyError(member)


def heterogeneous_members(pool: StrategyTables) -> list[int]:
    """Return the strategies whose replicas may run beside others."""
    layouts = [candidate.candidate.layout for candidate in pool.members]
    allowed = [
        candidate.ep == candidate.etp == 1 and candidate.dp > 1 and candidate.rank_order == "tp-cp-dp-pp"
        for candidate in layouts
    ]
    return [member for member, is_allowed in enumerate(allowed) if is_allowed]


def replica_gpus(pool: StrategyTables, member: int) -> int:
    """Return the number of GPUs of one replica."""
    layout = pool.members[member].candidate.layout
    return layout.num_gpus // layout.dp


def close(pool: StrategyTables, member: int) -> int:
    """Return the number of ranks of a stage."""
    layout = pool.members[member].candidate.layout
    return layout.tp * layout.cp


def have_places(pool: StrategyTables, numbers: Mapping[int, int]) -> bool:
    """Return whether ``numbers`` of replicas fill all GPUs with every group at a multiple of its size."""
    sizes = sorted({close(pool, member) for member in numbers})
    used = sum(number * replica_gpus(pool, member) for member, number in numbers.items())
    nested = all(larger % smaller == 0 for smaller, larger in pairwise(sizes))
    return nested and used == pool.members[0].candidate.layout.num_gpus


def reduce_ns(pool: StrategyTables, members: Mapping[int, object]) -> int:
    """Return the time of the reduction among replicas of these members."""
    return max(map(pool.reduce_ns, members))


def finish_ns(pool: StrategyTables, members: Mapping[int, object]) -> int:
    """Return the time of norm, update and gather."""
    return max(map(pool.finish_ns, members))


def heterogeneous_turns(step: HeterogeneousStep) -> tuple[TeamTurn, ...]:
    """Return what every replica with sequences runs, in the order of their GPUs."""
    pool, turns = step.pool, []
    for member in step.order:
        candidate, replicas = pool.members[member].candidate, step.packed[member].replicas
        times = replicas_ns(pool.problem, candidate, pool.load.lengths, replicas, pool.load.rules.mask).tolist()
        lengths_of = pool.micro_batches(replicas)
        for first, time_ns, micro_batches in zip(step.first_gpus(member), times, lengths_of, strict=True):
            if micro_batches:
                size = replica_gpus(pool, member)
                turns.append(TeamTurn(candidate.name, first, size, 0.0, time_ns / NS_PER_S, micro_batches))
    return tuple(turns)


def heterogeneous_groups(step: HeterogeneousStep) -> tuple[LengthGroup, ...]:
    """Return the groups of the strategies with sequences; the reduction belongs to the last one."""
    pool, running = step.pool, [member for member in step.order if step.packed[member].time_ns]
    last_s = reduce_ns(pool, step.packed) / NS_PER_S
    quanta = {member: pool.max_quanta(member, shared_memory=False) for member in running}
    return tuple(
        pool.group(member, step.packed[member], quanta[member], last_s if member == running[-1] else 0.0)
        for member in running
    )


@dataclass(frozen=True, eq=False)
class CapacityRow:
    """Maximum work of a replica: sequences add ``sequence_loads`` [n], and one of the ``bounds`` holds."""

    sequence_loads: FloatArray
    bounds: tuple[PathBound, ...]

    @staticmethod
    def of_loads(work_bound: PipelineWorkBound) -> list[CapacityRow]:
        """Return the rows of all bounds of a pipeline with its own memory."""
        sequence_loads = work_bound.sequence_loads * work_bound.num_replicas
        return [
            CapacityRow(sequence_loads, tuple(count_range.bound for count_range in bound.ranges))
            for bound in work_bound.bounds
        ]

    def max_load(self, time_ns: float) -> float:
        """Return the maximum work within a time."""
        return max((bound.within(time_ns) for bound in self.bounds), default=float("inf"))


@dataclass(frozen=True, eq=False)
class ReplicaClass:
    """Replicas of one member of a pool."""

    pool: StrategyTables
    member: int
    num_gpus: int
    """GPUs of each replica."""
    max_replicas: int
    """Maximum number in a step with others."""
    fixed_cost_ns: int
    """Reduction and finish."""
    linear_bounds: LinearBounds
    """Bounds of one replica."""
    latency_ns: FloatArray
    """Minimum time of a sequence of each length, [n]."""
    prices: tuple[FloatArray, ...] = ()
    """Prices [n] ns: the contents of a replica of one stage are worth at most its time."""

    @staticmethod
    def of(pool: StrategyTables, member: int) -> ReplicaClass:
        """Build the class with cheap bounds."""
        candidate, quanta = pool.members[member], pool.max_quanta(member, shared_memory=False)
        num_replicas, bounds = (
            candidate.candidate.layout.dp,
            pool.linear_bounds(member, shared_memory=False),
        )
        linear_bounds = LinearBounds(bounds.shares * num_replicas, bounds.constants)
        fixed_cost_ns = pool.reduce_ns(member) + pool.finish_ns(member)
        latency_ns = latencies(pool.tables[member], candidate, quanta)
        return ReplicaClass(
            pool, member, replica_gpus(pool, member), num_replicas - 1, fixed_cost_ns, linear_bounds, latency_ns
        )

    @cached_property
    def fits(self) -> BoolArray:
        """Lengths that fit into a micro-batch, [n]."""
        return np.asarray(np.isfinite(self.linear_bounds.shares[0]) & np.isfinite(self.latency_ns))

    def can_hold(self, time_ns: float) -> BoolArray:
        """Return the lengths that a replica can hold within a time, [n]."""
        return np.asarray(self.fits & (self.latency_ns <= time_ns))

    def rows(self, time_ns: float) -> FloatArray:
        """Return ``rows @ x <= 1`` for the sequences of a replica within a time, [i, n].

        Entries of lengths that it cannot hold are meaningless. Without rows it holds nothing.
        """
        capacity_rows: list[CapacityRow] = []
        if self.pool.num_stages(self.member) > 1 and self.pool.has_own_memory_bound(self.member):
            capacity_rows = CapacityRow.of_loads(self.pool.best_own_memory_bound(self.member))
        shares = [*self.linear_bounds.shares, *self.prices, *(row.sequence_loads for row in capacity_rows)]
        limits = [*(time_ns - self.linear_bounds.constants), *([time_ns] * len(self.prices))]
        limits += [row.max_load(time_ns) for row in capacity_rows]
        if min(limits) <= 0.0:
            return np.zeros((0, len(self.latency_ns)))
        kept = [(share, limit) for share, limit in zip(shares, limits, strict=True) if np.isfinite(limit)]
        return np.array([np.where(self.fits, share, 0.0) / limit for share, limit in kept])


# Maximum theta.
_MOST = 2


@dataclass(frozen=True, eq=False)
class Shared:
    """Upper bound of the ``share`` of the sequences that steps can do."""

    share: float
    assignment: tuple[tuple[ReplicaClass, float, FloatArray], ...] = ()
    """Solution: classes, numbers of replicas, and what these hold together, [n]."""

    @property
    def excludes(self) -> bool:
        """True if no step does the whole workload, given the solver's tolerance."""
        return self.share < 1.0 - 1e-5


@dataclass(eq=False)
class UsedKind:
    """A class in a program: lengths that it ``holds`` [n], its ``rows`` [i, n], and its columns."""

    replica_class: ReplicaClass
    holds: BoolArray
    rows: FloatArray
    count_column: int = -1
    first_column: int = -1

    @property
    def strengthened(self) -> UsedKind:
        """The class with rows of whole sequences, without dominated rows."""
        rows = self.rows[:, self.holds]
        whole_rows = [whole_shares(rows, parts) for parts in (1, 2, 3, 4)]
        rows = np.concatenate([rows, *(row_set[row_set.any(axis=1)] for row_set in whole_rows)])
        return UsedKind(self.replica_class, self.holds, rows[undominated(rows)])

    @property
    def long(self) -> BoolArray:
        """Mask of the lengths that are a tenth of a replica or more."""
        return np.asarray(self.rows.max(axis=0) >= 0.1)

    @property
    def columns(self) -> range:
        """Columns of the lengths that it holds."""
        return range(self.first_column, self.first_column + int(self.holds.sum()))


def whole_shares(rows: FloatArray, parts: int) -> FloatArray:
    """Return u of the module for every share, with k ``parts``."""
    # Rounding must not make a share whole.
    return np.asarray(np.minimum(np.floor((parts + 1) * rows * SAFETY) / parts, 1.0))


def undominated(rows: FloatArray) -> BoolArray:
    """Return the rows that no other row dominates; the first of equal ones."""
    above = (rows[:, None] >= rows[None]).all(axis=2)
    # Of equal rows the earlier ones dominate.
    above &= ~above.T | np.tri(len(rows), k=-1, dtype=bool).T
    return np.asarray(~above.any(axis=0))


def solved(
    pool: StrategyTables,
    used: list[UsedKind],
    solver: tuple[str, float],
    whole: bool,
    needed: Sequence[Callable[[ReplicaClass], bool]] = (),
) -> Shared:
    """Solve the program of the module.

    Args:
        pool: the strategies.
        used: the classes.
        solver: backend, and its time limit in seconds.
        whole: whether numbers of replicas and of long sequences are integers.
        needed: conditions on classes; for each some replica must satisfy it.
    """
    counts = pool.load.counts
    is_possible = all(any(map(condition, (kind.replica_class for kind in used))) for condition in needed)
    if not used or not is_possible or not np.any([kind.holds for kind in used], axis=0).all():
        return Shared(0.0)
    builder = ProgramBuilder("unlike replicas", shares=True)
    parts = _parts(used, counts) if solver[0] == "cpsat" else 10**7
    share = builder.add_variable("share", 0, _MOST * parts, False)
    for index, kind in enumerate(used):
        name = f"{pool.members[kind.replica_class.member].candidate.name},{index}"
        kind.count_column = builder.add_variable(f"number[{name}]", 0, kind.replica_class.max_replicas, whole)
        kind.first_column = builder.num_variables
        for length, is_long in zip(np.flatnonzero(kind.holds).tolist(), kind.long.tolist(), strict=True):
            max_count = int(counts[length]) if is_long else _MOST * int(counts[length])
            builder.add_variable(f"x[{name},{length}]", 0, max_count, whole and is_long)
    gpus_are_filled(builder, used, pool.members[0].candidate.layout.num_gpus)
    some_are_unlike(builder, used)
    share_of_sequences(builder, used, counts, share, parts)
    replicas_hold(builder, used, parts)
    for condition in needed:
        some_are_used(builder, [kind for kind in used if condition(kind.replica_class)])
    builder.minimize([share], [-1])
    try:
        program, limits = builder.build(), Limits(time_limit_s=max(0.1, solver[1]))
        with spend_measured():
            solution = check_infeasible(program, limits, backend(solver[0]).solve(program, limits))
    except SolverError:
        # An answer that fails the checks proves nothing.
        return Shared(_MOST)
    if solution.status == "infeasible":
        return Shared(0.0)
    largest = float(_MOST) if solution.bound is None else -solution.bound / parts
    if solution.values is None:
        return Shared(largest)
    values = np.asarray(solution.values, dtype=np.float64)
    answer = []
    for kind in used:
        held, number = np.zeros(len(counts)), float(values[kind.count_column])
        held[kind.holds] = values[kind.columns.start : kind.columns.stop]
        if number > 0.0:
            answer.append((kind.replica_class, number, held))
    return Shared(largest, tuple(answer))


def _parts(used: Sequence[UsedKind], counts: IntArray) -> int:
    """Return the finest resolution for which no row is too large."""
    largest = max(
        float((kind.rows @ (_MOST * counts[kind.holds])).max()) + kind.replica_class.max_replicas for kind in used
    )
    largest = max(largest, 2.0 * _MOST * float(counts.max()) * len(used))
    return max(1, int(0.9 * MAX_ROW_MAGNITUDE / largest))


def gpus_are_filled(builder: ProgramBuilder, used: Sequence[UsedKind], num_gpus: int) -> None:
    """Add sum_k g_k n_k <= N."""
    sizes = [kind.replica_class.num_gpus for kind in used]
    builder.add_row("gpus_are_filled", [kind.count_column for kind in used], sizes, upper=num_gpus)


def some_are_unlike(builder: ProgramBuilder, used: Sequence[UsedKind]) -> None:
    """Exclude steps of a single strategy."""
    for member in sorted({kind.replica_class.member for kind in used}):
        own = [kind for kind in used if kind.replica_class.member == member]
        if len(own) > 1:
            numbers = [kind.count_column for kind in own]
            builder.add_row(
                f"some_are_unlike[{member}]", numbers, [1] * len(own), upper=own[0].replica_class.max_replicas
            )


def share_of_sequences(
    builder: ProgramBuilder, used: Sequence[UsedKind], counts: IntArray, share: int, parts: int
) -> None:
    """Add sum_k x_kl >= theta n_l, or n_l for long sequences."""
    columns: list[list[int]] = [[] for _ in counts]
    long = np.zeros(len(counts), dtype=bool)
    for kind in used:
        long[kind.holds] |= kind.long
        for length, column in zip(np.flatnonzero(kind.holds).tolist(), kind.columns, strict=True):
            columns[length].append(column)
    for length, (own, count) in enumerate(zip(columns, counts.tolist(), strict=True)):
        name, ones = f"share_of_sequences[{length}]", [1] * len(own)
        if long[length]:
            builder.add_row(name, own, ones, count)
        else:
            builder.add_row(name, [*own, share], [*(parts * one for one in ones), -count], 0)


def replicas_hold(builder: ProgramBuilder, used: Sequence[UsedKind], parts: int) -> None:
    """Add sum_l a_kil x_kl <= n_k."""
    for index, kind in enumerate(used):
        shares = np.floor(np.minimum(kind.rows, 1e3) * parts).astype(np.int64)
        names = [f"replicas_hold[{index},{number}]" for number in range(len(shares))]
        replicas = np.full(len(shares), -parts)
        builder.add_rows(names, [kind.count_column, *kind.columns], np.column_stack([replicas, shares]), upper=0)


def some_are_used(builder: ProgramBuilder, used: Sequence[UsedKind]) -> None:
    """Add sum n_k >= 1."""
    builder.add_row("some_are_used", [kind.count_column for kind in used], [1] * len(used), 1)
