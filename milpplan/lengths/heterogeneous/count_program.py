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
 - ``replicas_hold``: sum_l a_kil x_kl <= n_k for the rows i of a class (``pipeline_capacity``): a row of one
   replica holds for sums over n_k.
 - ``leaders_are_held``: sum of x_kl over the lengths of the longest sequence >= n_k, for classes by the longest
   sequence.
 - ``some_are_used``: sum n_k >= 1 over classes of which some replica is required.

*Whole sequences*: if a sequence of a length takes the share a_l of a replica, none holds more than 1 / a_l of
them. With u(a) = floor((k + 1) a) / k, or a where (k + 1) a is whole, any sum of shares within 1 has a sum of u
within 1 (Fekete and Schepers 2001): rows for k = 1, 2, 3, 4 from every row, with shares rounded down slightly.

Coefficients are whole multiples of 1 / 10^7, rounded down. CP-SAT, which is trusted with moderate rows only, gets
the finest resolution that these allow, and whole sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from milpplan.errors import SolverError
from milpplan.lengths.heterogeneous.pipeline_capacity import ReplicaClass
from milpplan.lengths.strategy_tables import StrategyTables
from milpplan.optimize.milp.backends import backend, check_infeasible
from milpplan.optimize.milp.cpsat import MAX_ROW_MAGNITUDE
from milpplan.optimize.milp.program import ProgramBuilder
from milpplan.optimize.milp.solution import Limits
from milpplan.simulation.layout_columns import BoolArray, FloatArray, IntArray

# Resolution of the rows' coefficients.
_ONE = 10**7
# Share of a replica from which sequences are whole.
_LONG = 0.1
# Maximum theta.
_MOST = 2
# Maximum k of the rows of whole sequences.
_WHOLE = 4
# Tolerance of solvers.
_TOLERANCE = 1e-5
# Factor that keeps rounding from making a share whole.
_LESS = 1.0 - 1e-9


@dataclass(frozen=True, eq=False)
class Shared:
    """Upper bound of the ``share`` of the sequences that steps can do."""

    share: float
    assignment: tuple[tuple[ReplicaClass, float, FloatArray], ...] = ()
    """Solution: classes, numbers of replicas, and what these hold together, [n]."""

    @property
    def excludes(self) -> bool:
        """True if no step does the whole workload, given the solver's tolerance."""
        return self.share < 1.0 - _TOLERANCE


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
        whole_rows = [whole_shares(rows, parts) for parts in range(1, _WHOLE + 1)]
        rows = np.concatenate([rows, *(row_set[row_set.any(axis=1)] for row_set in whole_rows)])
        return UsedKind(self.replica_class, self.holds, rows[undominated(rows)])

    @property
    def long(self) -> BoolArray:
        """Mask of the lengths that are a tenth of a replica or more."""
        return np.asarray(self.rows.max(axis=0) >= _LONG)

    @property
    def columns(self) -> range:
        """Columns of the lengths that it holds."""
        return range(self.first_column, self.first_column + int(self.holds.sum()))


def whole_shares(rows: FloatArray, parts: int) -> FloatArray:
    """Return u of the module for every share, with k ``parts``."""
    return np.asarray(np.minimum(np.floor((parts + 1) * rows * _LESS) / parts, 1.0))


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
    parts = _parts(used, counts) if solver[0] == "cpsat" else _ONE
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
    leaders_are_held(builder, used)
    for condition in needed:
        some_are_used(builder, [kind for kind in used if condition(kind.replica_class)])
    builder.minimize([share], [-1])
    try:
        program, limits = builder.build(), Limits(time_limit_s=max(0.1, solver[1]))
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


def leaders_are_held(builder: ProgramBuilder, used: Sequence[UsedKind]) -> None:
    """Require that every replica of a class holds one of its longest sequences."""
    for index, kind in enumerate(used):
        first = 0 if kind.replica_class.longest_range is None else kind.replica_class.longest_range[0]
        if not first:
            continue
        pairs = zip(np.flatnonzero(kind.holds).tolist(), kind.columns, strict=True)
        longest = [column for length, column in pairs if length >= first]
        builder.add_row(
            f"leaders_are_held[{index}]", [*longest, kind.count_column], [*([1] * len(longest)), -1], 0
        )


def some_are_used(builder: ProgramBuilder, used: Sequence[UsedKind]) -> None:
    """Add sum n_k >= 1."""
    builder.add_row("some_are_used", [kind.count_column for kind in used], [1] * len(used), 1)
