"""How many sequences unlike replicas do at most, as an integer program.

**Variables.** For kinds k of replicas: their number n_k, integer; x_kl >= 0 sequences of length number l on all of
them, integer where one is a tenth of a replica or more (*long*); theta, the share of the other sequences that is
done, up to twice all of them.
**Objective.** The most theta that is left by what replicas hold within their times. Less than all of it, by more
than solvers' tolerance: no such replicas do the workload.

Rows, in the order of the functions that add them:

 - ``gpus_are_filled``: sum_k g_k n_k <= N (a replica without sequences is any).
 - ``some_are_unlike``: over the kinds of one strategy sum n_k < its number of replicas where it is alone (that
   step is bounded elsewhere).
 - ``share_of_sequences``: sum_k x_kl >= theta n_l; n_l of long sequences, of which a share says little.
 - ``replicas_hold``: sum_l a_kil x_kl <= n_k for the rows i of a kind (``unlike_kinds``): what holds for one
   replica holds for sums over n_k.
 - ``leaders_are_held``: sum of x_kl over the lengths of the leaders >= n_k, where kinds are told apart by them.
 - ``some_are_used``: sum n_k >= 1 over kinds of which there is one.

*Whole sequences*: where a length takes the share a_l of a replica, none holds more than 1 / a_l of them. With
u(a) = floor((k + 1) a) / k, or a where (k + 1) a is whole, any sum of shares within 1 has a sum of u within 1
(Fekete and Schepers 2001): rows for k = 1, 2, 3, 4 from every row, shares a little less than they are.

Coefficients are whole multiples of 1 / 10^7, rounded down; CP-SAT, which is trusted with moderate rows only, gets
as many parts of one as these allow, and whole sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from milpplan.errors import SolverError
from milpplan.lengths.heterogeneous.capacity_rows import ReplicaClass
from milpplan.lengths.strategy_tables import StrategyTables
from milpplan.optimize.milp.backends import backend, witnessed
from milpplan.optimize.milp.cpsat import MAX_ROW_MAGNITUDE
from milpplan.optimize.milp.program import ProgramBuilder
from milpplan.optimize.milp.solution import Limits
from milpplan.simulation.layout_columns import BoolArray, FloatArray, IntArray

# Parts of one in the rows.
_ONE = 10**7
# Sequences are whole from this share of a replica on.
_LONG = 0.1
# The most of the workload that is asked for.
_MOST = 2
# Sequences that a replica holds whole: up to so many.
_WHOLE = 4
# A solver's tolerance.
_TOLERANCE = 1e-5
# So that no share is a whole number of parts by rounding.
_LESS = 1.0 - 1e-9


@dataclass(frozen=True, eq=False)
class Shared:
    """The most ``share`` of the sequences that are not long that any step leaves, at most; where the program was
    solved, the kinds in it, how many replicas of each there are, and what these hold together, [n] sequences."""

    share: float
    assignment: tuple[tuple[ReplicaClass, float, FloatArray], ...] = ()

    @property
    def excludes(self) -> bool:
        """Whether no step does all of the workload, whatever the solver's tolerance."""
        return self.share < 1.0 - _TOLERANCE


@dataclass(eq=False)
class UsedKind:
    """A kind in a program: what it ``holds`` [n], its ``rows`` [i, n], and its columns."""

    replica_class: ReplicaClass
    holds: BoolArray
    rows: FloatArray
    count_column: int = -1
    first_column: int = -1

    @property
    def strengthened(self) -> UsedKind:
        """With rows of whole sequences, and without rows that others imply."""
        rows = self.rows[:, self.holds]
        more = [whole_shares(rows, parts) for parts in range(1, _WHOLE + 1)]
        rows = np.concatenate([rows, *(one[one.any(axis=1)] for one in more)])
        return UsedKind(self.replica_class, self.holds, rows[undominated(rows)])

    @property
    def long(self) -> BoolArray:
        """Which of the lengths that it holds are a tenth of a replica or more."""
        return np.asarray(self.rows.max(axis=0) >= _LONG)

    @property
    def columns(self) -> range:
        """Of the sequences of the lengths that it holds."""
        return range(self.first_column, self.first_column + int(self.holds.sum()))


def whole_shares(rows: FloatArray, parts: int) -> FloatArray:
    """u of the module of every share, with k ``parts``."""
    return np.asarray(np.minimum(np.floor((parts + 1) * rows * _LESS) / parts, 1.0))


def undominated(rows: FloatArray) -> BoolArray:
    """Rows that no other one is above or equal to throughout; the first of equal ones."""
    above = (rows[:, None] >= rows[None]).all(axis=2)
    # Of equal ones those before are above.
    above &= ~above.T | np.tri(len(rows), k=-1, dtype=bool).T
    return np.asarray(~above.any(axis=0))


def solved(
    pool: StrategyTables,
    used: list[UsedKind],
    solver: tuple[str, float],
    whole: bool,
    needed: Sequence[Callable[[ReplicaClass], bool]] = (),
) -> Shared:
    """The program of the module, by a backend in so many seconds; numbers of replicas, and of long sequences, are
    ``whole`` or not; of each sort of kinds ``needed`` there is one at least."""
    counts = pool.load.counts
    there = all(any(map(one, (of.replica_class for of in used))) for one in needed)
    if not used or not there or not np.any([one.holds for one in used], axis=0).all():
        return Shared(0.0)
    builder = ProgramBuilder("unlike replicas", shares=True)
    parts = _parts(used, counts) if solver[0] == "cpsat" else _ONE
    share = builder.add_variable("share", 0, _MOST * parts, False)
    for place, one in enumerate(used):
        name = f"{pool.members[one.replica_class.member].candidate.name},{place}"
        one.count_column = builder.add_variable(f"number[{name}]", 0, one.replica_class.max_replicas, whole)
        one.first_column = builder.num_variables
        for length, is_long in zip(np.flatnonzero(one.holds).tolist(), one.long.tolist(), strict=True):
            most = int(counts[length]) if is_long else _MOST * int(counts[length])
            builder.add_variable(f"x[{name},{length}]", 0, most, whole and is_long)
    gpus_are_filled(builder, used, pool.members[0].candidate.layout.num_gpus)
    some_are_unlike(builder, used)
    share_of_sequences(builder, used, counts, share, parts)
    replicas_hold(builder, used, parts)
    leaders_are_held(builder, used)
    for is_one in needed:
        some_are_used(builder, [one for one in used if is_one(one.replica_class)])
    builder.minimize([share], [-1])
    try:
        program, limits = builder.build(), Limits(time_limit_s=max(0.1, solver[1]))
        found = witnessed(program, limits, backend(solver[0]).solve(program, limits))
    except SolverError:
        # An answer that does not stand says nothing.
        return Shared(_MOST)
    if found.status == "infeasible":
        return Shared(0.0)
    largest = float(_MOST) if found.bound is None else -found.bound / parts
    if found.values is None:
        return Shared(largest)
    values = np.asarray(found.values, dtype=np.float64)
    answer = []
    for one in used:
        held, number = np.zeros(len(counts)), float(values[one.count_column])
        held[one.holds] = values[one.columns.start : one.columns.stop]
        if number > 0.0:
            answer.append((one.replica_class, number, held))
    return Shared(largest, tuple(answer))


def _parts(used: Sequence[UsedKind], counts: IntArray) -> int:
    """Parts of one that rows may have so that none is too large."""
    largest = max(float((one.rows @ (_MOST * counts[one.holds])).max()) + one.replica_class.max_replicas for one in used)
    largest = max(largest, 2.0 * _MOST * float(counts.max()) * len(used))
    return max(1, int(0.9 * MAX_ROW_MAGNITUDE / largest))


def gpus_are_filled(builder: ProgramBuilder, used: Sequence[UsedKind], num_gpus: int) -> None:
    """sum_k g_k n_k <= N."""
    sizes = [one.replica_class.num_gpus for one in used]
    builder.add_row("gpus_are_filled", [one.count_column for one in used], sizes, upper=num_gpus)


def some_are_unlike(builder: ProgramBuilder, used: Sequence[UsedKind]) -> None:
    """No step of one strategy alone."""
    for member in sorted({one.replica_class.member for one in used}):
        mine = [one for one in used if one.replica_class.member == member]
        if len(mine) > 1:
            numbers = [one.count_column for one in mine]
            builder.add_row(f"some_are_unlike[{member}]", numbers, [1] * len(mine), upper=mine[0].replica_class.max_replicas)


def share_of_sequences(
    builder: ProgramBuilder, used: Sequence[UsedKind], counts: IntArray, share: int, parts: int
) -> None:
    """sum_k x_kl >= theta n_l, or all of them."""
    columns: list[list[int]] = [[] for _ in counts]
    long = np.zeros(len(counts), dtype=bool)
    for one in used:
        long[one.holds] |= one.long
        for length, column in zip(np.flatnonzero(one.holds).tolist(), one.columns, strict=True):
            columns[length].append(column)
    for length, (mine, count) in enumerate(zip(columns, counts.tolist(), strict=True)):
        name, ones = f"share_of_sequences[{length}]", [1] * len(mine)
        if long[length]:
            builder.add_row(name, mine, ones, count)
        else:
            builder.add_row(name, [*mine, share], [*(parts * one for one in ones), -count], 0)


def replicas_hold(builder: ProgramBuilder, used: Sequence[UsedKind], parts: int) -> None:
    """sum_l a_kil x_kl <= n_k."""
    for place, one in enumerate(used):
        shares = np.floor(np.minimum(one.rows, 1e3) * parts).astype(np.int64)
        names = [f"replicas_hold[{place},{number}]" for number in range(len(shares))]
        replicas = np.full(len(shares), -parts)
        builder.add_rows(names, [one.count_column, *one.columns], np.column_stack([replicas, shares]), upper=0)


def leaders_are_held(builder: ProgramBuilder, used: Sequence[UsedKind]) -> None:
    """Every replica that is told apart by its longest sequence holds one."""
    for place, one in enumerate(used):
        first = 0 if one.replica_class.longest_range is None else one.replica_class.longest_range[0]
        if not first:
            continue
        pairs = zip(np.flatnonzero(one.holds).tolist(), one.columns, strict=True)
        mine = [column for length, column in pairs if length >= first]
        builder.add_row(f"leaders_are_held[{place}]", [*mine, one.count_column], [*([1] * len(mine)), -1], 0)


def some_are_used(builder: ProgramBuilder, used: Sequence[UsedKind]) -> None:
    """sum n_k >= 1."""
    builder.add_row("some_are_used", [one.count_column for one in used], [1] * len(used), 1)
