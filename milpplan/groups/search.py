"""The best grouped step and a proved lower bound: over all sets of strategies, best bound first.

Every plan uses exactly one set Q of strategies (those that hold sequences). For each set three bounds, each dearer
than the last and none below it; the first that reaches the best plan known (less the gap asked for) closes it:

 1. *sum*: least_overhead(Q) + sum_k n_k min over s in Q of inflation_s (f + b) u_sk / D_s, for all sets at once.
    Proof. A group's time is at least inflation_s (f + b) W_s / D_s (``cuts.KindCuts.inflation``; with replicas of
    several kinds, the work is spread over all of them in proportion to their best speeds), and each sequence
    adds at least its cheapest share.
 2. *relaxation*: the linear relaxation of ``master``, its dual bound recomputed in exact arithmetic.
 3. *master*: the integer program. A set whose program has no solution below the best plan is closed too.

The bound of the problem is the least over all sets. The masters' answers are packed, arranged and simulated: the
best of these plans is the answer, and only its exact time counts.
"""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import dataclass
from typing import Literal

import numpy as np

from milpplan.errors import InvalidInputError, SolverError
from milpplan.groups.cuts import KindCuts
from milpplan.groups.exchange import filled
from milpplan.groups.master import Master, master_program
from milpplan.groups.packing import pack
from milpplan.groups.plan import Group, GroupedPlan, arranged
from milpplan.groups.problem import GroupedProblem, Kind
from milpplan.groups.strategies import FloatArray, Int64Array
from milpplan.groups.tours import least_overhead_ns
from milpplan.optimize.backends import backend
from milpplan.optimize.relaxation import Relaxation
from milpplan.optimize.solution import Backend, Limits

Closed = Literal["open", "sum", "relaxation", "master"]

_MAX_SETS = 300_000
# One master may take this share of the time that is left.
_SHARE = 0.34
# Programs state times in this many units of the best time known, where the backend bears it.
_UNITS = {"cpsat": 2**12}
_FRACTIONS = {"cpsat": 2**8}
_DEFAULT_UNITS = 2**20


@dataclass(slots=True)
class SetRecord:
    """One set of strategies: its proved bound, and what proved it (``open`` if the time ran out before)."""

    used: tuple[int, ...]
    bound_ns: int
    by: Closed = "open"


@dataclass(frozen=True, eq=False)
class GroupedResult:
    """The best plan found, the proved bound, and what is known about every set of strategies."""

    plan: GroupedPlan
    bound_ns: int
    sets: tuple[SetRecord, ...]
    cpu_time_s: float

    @property
    def gap(self) -> float:
        """(time - bound) / time."""
        return (self.plan.time_ns - self.bound_ns) / self.plan.time_ns


def solve_groups(
    problem: GroupedProblem, backend_name: str = "auto", relative_gap: float = 0.0, time_limit_s: float = 60.0
) -> GroupedResult:
    """Solve to ``relative_gap`` or until ``time_limit_s`` of wall clock (soft).

    Raises ``InvalidInputError`` where there are more sets of strategies than can be listed, and ``SolverError``
    where no plan was found in time.
    """
    search = _Search(problem, backend(backend_name), relative_gap, time_limit_s)
    search.run()
    if search.best is None:
        raise SolverError(
            f"No plan was packed within {time_limit_s} s.",
            "At least one set of strategies that holds every sequence was tried.",
            "Allow more time, or larger micro-batches.",
        )
    return GroupedResult(search.best, search.bound_ns(), tuple(search.sets), time.process_time() - search.cpu_start)


class _Search:
    """State of one run: the sets with their bounds, the best plan."""

    def __init__(self, problem: GroupedProblem, solver: Backend, relative_gap: float, time_limit_s: float) -> None:
        self.problem = problem
        self.solver = solver
        self.relative_gap = relative_gap
        self.cpu_start = time.process_time()
        self.deadline = time.perf_counter() + time_limit_s
        self.cuts = {kind: KindCuts(kind) for kind in problem.kinds}
        self.best: GroupedPlan | None = None
        self.sets = ranked_sets(problem, self.cuts)

    def target_ns(self) -> float:
        """A set with a bound of at least this is closed."""
        return math.inf if self.best is None else self.best.time_ns * (1.0 - self.relative_gap)

    def bound_ns(self) -> int:
        """Least bound of all sets, at most the best plan."""
        assert self.best is not None
        return min(self.best.time_ns, *(record.bound_ns for record in self.sets))

    def run(self) -> None:
        """Sets in the order of their bounds, once each."""
        for record in self.sets:
            if record.bound_ns >= self.target_ns():
                record.by = "sum"
                continue
            if self.best is not None and time.perf_counter() >= self.deadline:
                return
            self._examine(record)
        for record in self.sets:
            if record.by == "open" and record.bound_ns >= self.target_ns():
                record.by = "master"

    def _examine(self, record: SetRecord) -> None:
        problem, used = self.problem, record.used
        overhead = least_overhead_ns(problem, used)
        upper = None if self.best is None else max(0, self.best.time_ns - overhead)
        guess = upper or max(1, record.bound_ns)
        unit_ns = max(1, guess // _UNITS.get(self.solver.name, _DEFAULT_UNITS))
        fractions = _FRACTIONS.get(self.solver.name, 2**14)
        master = master_program(problem, used, self.cuts, unit_ns, fractions, upper)
        relaxation = Relaxation(master.program)
        # Without an answer there are no duals to prove anything with: the integer program decides.
        proved = relaxation.proved_bound(relaxation.solve())
        if proved is not None:
            self._raise(record, proved * unit_ns, overhead, "relaxation")
        if record.bound_ns < self.target_ns():
            self._solve_master(record, master, overhead)

    def _raise(self, record: SetRecord, group_ns: int | None, overhead: int, by: Closed) -> None:
        """A proved bound of the groups' times; None stands for "nothing below the best plan"."""
        if group_ns is None:
            assert self.best is not None
            bound = self.best.time_ns
        else:
            bound = group_ns + overhead
        record.bound_ns = max(record.bound_ns, bound)
        if record.bound_ns >= self.target_ns():
            record.by = by

    def _solve_master(self, record: SetRecord, master: Master, overhead: int) -> None:
        left = max(1.0, self.deadline - time.perf_counter())
        limits = Limits(time_limit_s=max(1.0, _SHARE * left), relative_gap=self.relative_gap / 8)
        solution = self.solver.solve(master.program, limits)
        if solution.status == "infeasible":
            if self.best is not None:
                self._raise(record, None, overhead, "master")
            else:
                # No plan at all: this set cannot hold every sequence.
                record.bound_ns, record.by = 2**62, "master"
            return
        if solution.bound is not None:
            # A floating-point solver proves its bound to its tolerance; a unit is far more than that.
            self._raise(record, (math.floor(solution.bound) - 1) * master.unit_ns, overhead, "master")
        if solution.values is not None:
            self._try(master.loads(np.rint(solution.values).astype(np.int64)), master.kinds)

    def _try(self, loads: dict[int, Int64Array], kinds: tuple[Kind, ...]) -> None:
        """Pack what the master decided; keep the plan if it is the best, then let idle replicas take work."""
        plan = self._packed({kind: loads[j] for j, kind in enumerate(kinds)})
        while plan is not None and (self.best is None or plan.time_ns < self.best.time_ns):
            self.best = plan
            plan = filled(plan, self.cuts, self._packed)

    def _packed(self, counts: dict[Kind, Int64Array]) -> GroupedPlan | None:
        packings = {kind: pack(kind, self.cuts[kind], counts[kind]) for kind in counts}
        groups: dict[int, list[object]] = {}
        if any(packing is None for packing in packings.values()):
            return None
        for kind, packing in packings.items():
            groups.setdefault(kind.strategy, []).append(packing)
        return arranged(self.problem, [Group(s, tuple(found)) for s, found in groups.items()])  # type: ignore[arg-type]


def ranked_sets(problem: GroupedProblem, cuts: dict[Kind, KindCuts]) -> list[SetRecord]:
    """All sets of at most ``max_strategies`` strategies that hold every length, by their *sum* bound."""
    shares = sequence_shares(problem, cuts)
    useful = [s for s in range(len(problem.strategies)) if np.isfinite(shares[s]).any()]
    most = min(problem.max_strategies, len(useful))
    number = sum(math.comb(len(useful), size) for size in range(1, most + 1))
    if number > _MAX_SETS:
        raise InvalidInputError(
            f"{len(useful)} strategies make {number} sets of at most {most}.",
            f"At most {_MAX_SETS} sets expected.",
            "Offer fewer strategies, or lower max_strategies.",
        )
    records = []
    for size in range(1, most + 1):
        for used in itertools.combinations(useful, size):
            least = shares[list(used)].min(axis=0)
            if np.isfinite(least).all():
                total = math.floor(float(problem.counts @ least) * (1.0 - 1e-9))
                records.append(SetRecord(used, total + least_overhead_ns(problem, used)))
    return sorted(records, key=lambda record: (record.bound_ns, record.used))


def sequence_shares(problem: GroupedProblem, cuts: dict[Kind, KindCuts]) -> FloatArray:
    """What one sequence adds to its group's time at least, ns; shape [strategies, K], infinite where none fits.

    With kinds j side by side, Z D_j >= r_j W_j for each. Weights w_j >= 0 with sum 1 give
    Z >= sum_j w_j r_j W_j / D_j, so a sequence adds at least the least over j of w_j r_j u_jk / D_j, whatever the
    weights. They are chosen in proportion to the kinds' speeds on the mean sequence.
    """
    shares = np.full((len(problem.strategies), problem.lengths.size), np.inf)
    for s in range(len(problem.strategies)):
        kinds = [kind for kind in problem.kinds_of(s) if kind.fits.any()]
        times = [
            np.where(kind.fits, kind.units * cuts[kind].inflation * kind.pipeline.parts / kind.num_replicas, np.inf)
            for kind in kinds
        ]
        if not kinds:
            continue
        common = np.logical_and.reduce([kind.fits for kind in kinds])
        speeds = np.array([1.0 / max(1e-9, float((one * problem.counts)[common].sum())) for one in times])
        if not common.any():
            speeds = np.ones(len(kinds))
        shares[s] = np.min([one * w for one, w in zip(times, speeds / speeds.sum(), strict=True)], axis=0)
    return shares
