"""What no step of unlike replicas undercuts, and how the sequences share the replicas where nothing is lost.

**Variables.** For kinds k of replicas: their number n_k, integer; x_kl >= 0 sequences of length number l on all of
them, integer where one is a tenth of a replica or more (*long*); theta, the share of the other sequences that is
done, up to twice all of them.
**Objective.** The most theta that a step of some time S leaves. Less than all of it, by more than solvers'
tolerance: every step takes longer.

Rows, in the order of the functions that add them:

 - ``gpus_are_filled``: sum_k g_k n_k <= N (a replica without sequences is any).
 - ``some_are_unlike``: over the kinds of one strategy sum n_k < its number of replicas where it is alone (that
   step is bounded elsewhere).
 - ``share_of_sequences``: sum_k x_kl >= theta n_l; n_l of long sequences, of which a share says little.
 - ``replicas_hold``: sum_l a_kil x_kl <= n_k for the rows i of ``ReplicaKind.rows``.
 - ``leaders_are_held``: sum of x_kl over the lengths of the leaders >= n_k, where kinds are told apart by them.

**Rows of a kind.** What is done by one replica within the time T = S - reduction - finish: whatever is proved of
the time of a replica by the sequences that it holds, ``constant + sum_l w_l x_l <= T``, divided by T - constant;
prices of what micro-batches hold under strategies of one stage (``team_prices``); and of pipelines
``sum_l u_l x_l <= h^-1(T)`` with concave bounds h of their load u (``work.Loads``, ``unlike_pipelines``), of
replicas told apart by their longest sequence, too. Sums over n_k replicas have the same rows times n_k. No
sequence runs where its passage alone takes longer than T.

*Whole sequences*: where a length takes the share a_l of a replica, none holds more than 1 / a_l of them. With
u(a) = floor((k + 1) a) / k, or a where (k + 1) a is whole, any sum of shares within 1 has a sum of u within 1
(Fekete and Schepers 2001): rows for k = 1, 2, 3, 4 from every row, shares a little less than they are.

Coefficients are whole multiples of 1 / 10^7, rounded down; CP-SAT, which is trusted with moderate rows only, gets
as many parts of one as these allow, and whole sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from milpplan.costs.columns import BoolArray, FloatArray, IntArray
from milpplan.errors import SolverError
from milpplan.lengths.pool import Pool
from milpplan.lengths.unlike import replica_gpus, unlike_members
from milpplan.lengths.unlike_pipelines import Room
from milpplan.lengths.work import WorkBounds, serial_times
from milpplan.optimize.backends import backend
from milpplan.optimize.cpsat import MAX_ROW_MAGNITUDE
from milpplan.optimize.program import ProgramBuilder
from milpplan.optimize.solution import Limits

# Parts of one in the rows.
_ONE = 10**7
# Sequences are whole from this share of a replica on.
_LONG = 0.1
# The most of the workload that is asked for.
_MOST = 2
# Sequences that a replica holds whole: up to so many.
_WHOLE = 4
# What sums of floats may add, and a solver's tolerance.
_SAFETY = 1.0 - 1e-6
_TOLERANCE = 1e-5
# So that no share is a whole number of parts by rounding.
_LESS = 1.0 - 1e-9


@dataclass(frozen=True, eq=False)
class ReplicaKind:
    """Replicas of one member of a pool: ``num_gpus`` of each, at most ``most`` of them in a step with others;
    ``once_ns``, what follows; ``works``, bounds of one replica; ``serial`` [n] ns, what a sequence takes at least.
    ``leaders``: from which length to which (exclusive) their longest sequence is, where that is told apart.
    ``rooms``: what is known of pipelines; ``prices`` [n] ns: what a replica of one stage holds is worth no more
    than its time."""

    pool: Pool
    member: int
    num_gpus: int
    most: int
    once_ns: int
    works: WorkBounds
    serial: FloatArray
    leaders: tuple[int, int] | None = None
    rooms: tuple[Room, ...] = ()
    prices: tuple[FloatArray, ...] = ()

    @staticmethod
    def of(pool: Pool, member: int) -> ReplicaKind:
        """With what is cheap to prove."""
        one, grains = pool.members[member], pool.grains(member, beside=False)
        number, bounds = one.candidate.layout.dp, pool.bounds(member, beside=False)
        works = WorkBounds(bounds.shares * number, bounds.constants)
        once_ns = pool.reduce_ns(member) + pool.finish_ns(member)
        serial = serial_times(pool.tables[member], one, grains)
        return ReplicaKind(pool, member, replica_gpus(pool, member), number - 1, once_ns, works, serial)

    @cached_property
    def fits(self) -> BoolArray:
        """Lengths that a micro-batch holds, [n]."""
        return np.asarray(np.isfinite(self.works.shares[0]) & np.isfinite(self.serial))

    def held(self, step_ns: float) -> BoolArray:
        """Lengths that it holds in steps of so long, [n]."""
        found = self.fits & (self.serial <= step_ns - self.once_ns)
        if self.leaders is not None:
            found &= np.arange(len(found)) < self.leaders[1]
        return found

    def rows(self, step_ns: float) -> FloatArray:
        """``rows @ x <= 1`` for whatever a replica holds in a step of so long, [i, n]; shares of lengths that it
        does not hold mean nothing. No rows where it holds nothing."""
        time_ns = step_ns - self.once_ns
        known = [*self.rooms]
        if self.pool.num_stages(self.member) > 1 and self.pool.knows_alone(self.member):
            known += Room.of_loads(self.pool.alone(self.member))
        shares = [*self.works.shares, *self.prices, *(room.each for room in known)]
        limits = [*(time_ns - self.works.constants), *([time_ns] * len(self.prices))]
        limits += [room.within(time_ns) for room in known]
        if min(limits) <= 0.0:
            return np.zeros((0, len(self.serial)))
        kept = [(share, limit) for share, limit in zip(shares, limits, strict=True) if np.isfinite(limit)]
        return np.array([np.where(self.fits, share, 0.0) / limit for share, limit in kept])


@dataclass(frozen=True, eq=False)
class Shared:
    """The most ``share`` of the sequences that are not long that any step leaves, at most; where the program was
    solved, the kinds in it, how many replicas of each there are, and what these hold together, [n] sequences."""

    share: float
    parts: tuple[tuple[ReplicaKind, float, FloatArray], ...] = ()

    @property
    def excludes(self) -> bool:
        """Whether no step does all of the workload, whatever the solver's tolerance."""
        return self.share < 1.0 - _TOLERANCE


@dataclass(eq=False)
class UnlikeBound:
    """All kinds of replicas of a pool."""

    pool: Pool
    backend: str
    kinds: list[ReplicaKind]

    @staticmethod
    def of(pool: Pool, backend: str) -> UnlikeBound:
        """One kind for every member."""
        return UnlikeBound(pool, backend, [ReplicaKind.of(pool, member) for member in unlike_members(pool)])

    def within(self, step_ns: float, seconds: float, *, whole: bool = True, some: int | None = None) -> Shared:
        """What steps of so long leave, by a program that ends after so many seconds; numbers of replicas, and of
        long sequences, are ``whole`` or not. Only steps with ``some`` replicas of a member, if it is given."""
        step_ns /= _SAFETY
        used = [_Used(kind, kind.held(step_ns), kind.rows(step_ns)) for kind in self.kinds]
        used = [one.sharpened for one in used if one.holds.any() and len(one.rows)]
        there = some is None or any(one.kind.member == some for one in used)
        if not used or not there or not np.any([one.holds for one in used], axis=0).all():
            return Shared(0.0)
        return _solved(self.pool, used, (self.backend, seconds), whole, some)


@dataclass(eq=False)
class _Used:
    """A kind in a program: what it ``holds`` [n], its ``rows`` [i, n], and its columns."""

    kind: ReplicaKind
    holds: BoolArray
    rows: FloatArray
    number: int = -1
    first: int = -1

    @property
    def sharpened(self) -> _Used:
        """With rows of whole sequences, and without rows that others imply."""
        rows = self.rows[:, self.holds]
        more = [whole_shares(row, parts) for row in rows for parts in range(1, _WHOLE + 1)]
        rows = np.array([*rows, *(one for one in more if one.any())])
        return _Used(self.kind, self.holds, rows[_undominated(rows)])

    @property
    def long(self) -> BoolArray:
        """Which of the lengths that it holds are a tenth of a replica or more."""
        return np.asarray(self.rows.max(axis=0) >= _LONG)

    @property
    def columns(self) -> range:
        """Of the sequences of the lengths that it holds."""
        return range(self.first, self.first + int(self.holds.sum()))


def whole_shares(row: FloatArray, parts: int) -> FloatArray:
    """u of the module of every share, with k ``parts``."""
    return np.asarray(np.minimum(np.floor((parts + 1) * row * _LESS) / parts, 1.0))


def _undominated(rows: FloatArray) -> list[int]:
    """Rows that no other one is above or equal to throughout; the first of equal ones."""
    kept = []
    for place, row in enumerate(rows):
        above = (rows >= row).all(axis=1)
        equal = (rows == row).all(axis=1)
        above[place] = False
        if not (above & ~equal).any() and not equal[:place].any():
            kept.append(place)
    return kept


def _solved(pool: Pool, used: list[_Used], solver: tuple[str, float], whole: bool, some: int | None) -> Shared:
    """The program of the module."""
    builder, counts = ProgramBuilder("unlike replicas", shares=True), pool.load.counts
    parts = _parts(used, counts) if solver[0] == "cpsat" else _ONE
    share = builder.add_variable("share", 0, _MOST * parts, False)
    for place, one in enumerate(used):
        name = f"{pool.members[one.kind.member].candidate.name},{place}"
        one.number = builder.add_variable(f"number[{name}]", 0, one.kind.most, whole)
        one.first = builder.num_variables
        for length, is_long in zip(np.flatnonzero(one.holds).tolist(), one.long.tolist(), strict=True):
            most = int(counts[length]) if is_long else _MOST * int(counts[length])
            builder.add_variable(f"x[{name},{length}]", 0, most, whole and is_long)
    gpus_are_filled(builder, used, pool.members[0].candidate.layout.num_gpus)
    some_are_unlike(builder, used)
    share_of_sequences(builder, used, counts, share, parts)
    replicas_hold(builder, used, parts)
    leaders_are_held(builder, used)
    if some is not None:
        mine = [one.number for one in used if one.kind.member == some]
        builder.add_row("some", mine, [1] * len(mine), 1)
    builder.minimize([share], [-1])
    try:
        found = backend(solver[0]).solve(builder.build(), Limits(time_limit_s=max(0.1, solver[1])))
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
        held, number = np.zeros(len(counts)), float(values[one.number])
        held[one.holds] = values[one.columns.start : one.columns.stop]
        if number > 0.0:
            answer.append((one.kind, number, held))
    return Shared(largest, tuple(answer))


def _parts(used: Sequence[_Used], counts: IntArray) -> int:
    """Parts of one that rows may have so that none is too large."""
    largest = max(float((one.rows @ (_MOST * counts[one.holds])).max()) + one.kind.most for one in used)
    largest = max(largest, 2.0 * _MOST * float(counts.max()) * len(used))
    return max(1, int(0.9 * MAX_ROW_MAGNITUDE / largest))


def gpus_are_filled(builder: ProgramBuilder, used: Sequence[_Used], num_gpus: int) -> None:
    """sum_k g_k n_k <= N."""
    sizes = [one.kind.num_gpus for one in used]
    builder.add_row("gpus_are_filled", [one.number for one in used], sizes, upper=num_gpus)


def some_are_unlike(builder: ProgramBuilder, used: Sequence[_Used]) -> None:
    """No step of one strategy alone."""
    for member in sorted({one.kind.member for one in used}):
        mine = [one for one in used if one.kind.member == member]
        if len(mine) > 1:
            numbers = [one.number for one in mine]
            builder.add_row(f"some_are_unlike[{member}]", numbers, [1] * len(mine), upper=mine[0].kind.most)


def share_of_sequences(
    builder: ProgramBuilder, used: Sequence[_Used], counts: IntArray, share: int, parts: int
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


def replicas_hold(builder: ProgramBuilder, used: Sequence[_Used], parts: int) -> None:
    """sum_l a_kil x_kl <= n_k."""
    for place, one in enumerate(used):
        columns = [*one.columns, one.number]
        for number, row in enumerate(one.rows):
            shares = np.floor(np.minimum(row, 1e3) * parts).astype(np.int64).tolist()
            builder.add_row(f"replicas_hold[{place},{number}]", columns, [*shares, -parts], upper=0)


def leaders_are_held(builder: ProgramBuilder, used: Sequence[_Used]) -> None:
    """Every replica that is told apart by its longest sequence holds one."""
    for place, one in enumerate(used):
        first = 0 if one.kind.leaders is None else one.kind.leaders[0]
        if not first:
            continue
        pairs = zip(np.flatnonzero(one.holds).tolist(), one.columns, strict=True)
        mine = [column for length, column in pairs if length >= first]
        builder.add_row(f"leaders_are_held[{place}]", [*mine, one.number], [*([1] * len(mine)), -1], 0)
