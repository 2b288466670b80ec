"""The best grouped step and a proved lower bound: over all sets of strategies, best bound first.

Every plan uses exactly one set Q of strategies (those that hold sequences). For each set four bounds, each dearer
than the last and none below it; the first that reaches the best plan known (less the gap asked for) closes it:

 1. *sum*: least_overhead(Q) + sum_k n_k min over s in Q of inflation_s (f + b) u_sk / D_s, for all sets at once;
    or, if that is more, least_overhead(Q) and the longest sequence alone where it is done first (``alone_ns``).
    Proof. A group's time is at least inflation_s (f + b) W_s / D_s (``cuts.KindCuts.inflation``), and each
    sequence adds at least its cheapest share. ``sequence_shares`` says how for replicas of several kinds, and
    for pipelines of one stage, whose first micro-batch is counted apart.
 2. *relaxation*: the linear relaxation of ``master``, first without profiles, then with them; its dual bound
    recomputed in exact arithmetic.
 3. *master*: the integer program. A set whose program has no solution below the best plan is closed too.
 4. *exact*: for steps of few sequences, the whole problem of the set as one program (``exact``).

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
from milpplan.groups.balance import balanced, balances, first_packings
from milpplan.groups.cuts import KindCuts, last_stage_cut
from milpplan.groups.exact import exact_program, exact_size
from milpplan.groups.exchange import filled
from milpplan.groups.local_search import improve
from milpplan.groups.master import DEFAULT_FRACTIONS, master_program
from milpplan.groups.packing import Packing, pack
from milpplan.groups.pair_exchange import exchanged
from milpplan.groups.plan import Group, GroupedPlan, arranged
from milpplan.groups.problem import GroupedProblem, Kind
from milpplan.groups.profile import SCALE_BITS
from milpplan.groups.strategies import FloatArray, Int64Array
from milpplan.groups.tours import least_overhead_ns
from milpplan.optimize.backends import backend
from milpplan.optimize.program import MINUS_INFINITY, Program, Rows
from milpplan.optimize.relaxation import Relaxation
from milpplan.optimize.solution import Backend, Limits

Proof = Literal["sum", "relaxation", "master", "exact"]

_MAX_SETS = 300_000
# One master may take this share of the time that is left.
_SHARE = 0.34
# Programs state times in this many units of the best time known, where the backend bears it.
_UNITS = {"cpsat": 2**12, "cbc": 2**12}
_FRACTIONS = {"cpsat": 2**8, "cbc": 2**8}
# CBC has called feasible masters infeasible; nothing in its answer shows it, so another solver is asked too.
_WITNESS = {"cbc": "highs"}
_DEFAULT_UNITS = 2**20
# Floating-point solvers' whole bounds may come back this far from whole.
_BOUND_TOLERANCE = 1e-4
# Steps with exact programs of at most so many variables are solved exactly.
_MAX_EXACT = 512
# Exchanges between different kinds of replicas of a group.
_ROUNDS = 150
# Sets that are balanced before programs are solved, in so many rounds each; the best ones for longer.
_STARTS = 8
_STARTS_MORE = 3
# Of more sequences than this, the small ones level replicas.
_START_SEQUENCES = 96
_START_ROUNDS = 1_000


@dataclass(slots=True)
class SetRecord:
    """One set of strategies: its proved bound, and what proved it."""

    used: tuple[int, ...]
    bound_ns: int
    by: Proof = "sum"


@dataclass(frozen=True, eq=False)
class GroupedResult:
    """The best plan found, the proved bound, and what is known about every set of strategies."""

    plan: GroupedPlan
    bound_ns: int
    sets: tuple[SetRecord, ...]
    cpu_time_s: float

    def num_open(self, relative_gap: float = 0.0) -> int:
        """Sets that may still hold a plan shorter by more than ``relative_gap``."""
        return sum(record.bound_ns < self.plan.time_ns * (1.0 - relative_gap) for record in self.sets)

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
    return GroupedResult(
        search.best, search.bound_ns(), tuple(search.sets), time.process_time() - search.cpu_start
    )


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
        self._start()
        for record in self.sets:
            if record.bound_ns >= self.target_ns():
                # Sets are in the order of their bounds.
                break
            if self.best is not None and time.perf_counter() >= self.deadline:
                break
            self._examine(record)
        self._polish()

    def _start(self) -> None:
        """Plans of the most promising sets that only need balancing, before any program is solved."""
        started: list[Group] = []
        for record in self.sets[:_STARTS] if self.problem.num_sequences <= _START_SEQUENCES else ():
            if started and time.perf_counter() >= self.deadline:
                break
            kinds = self.problem.kinds_of(record.used[0])
            first = first_packings(kinds) if len(record.used) == 1 and balances(kinds) else None
            if first is not None:
                rough = balanced(first, _START_ROUNDS, self._enough_ns(record.used))
                started.append(Group(record.used[0], tuple(exchanged(rough))))
        started.sort(key=lambda group: group.time_ns)
        for group in started[:_STARTS_MORE]:
            late = self.best is not None and time.perf_counter() >= self.deadline
            more = balanced(group.packings, 0 if late else 4 * _START_ROUNDS, self._enough_ns((group.strategy,)))
            self._keep(arranged(self.problem, [Group(group.strategy, tuple(exchanged(more)))]))

    def _enough_ns(self, used: tuple[int, ...]) -> float:
        """Time of a group with which a step of this set alone is within the gap of every bound."""
        return self.sets[0].bound_ns / (1.0 - self.relative_gap) - least_overhead_ns(self.problem, used)

    def _examine(self, record: SetRecord) -> None:
        """Relaxation, master, and where that leaves a gap and the step is small, the exact program."""
        guess = record.bound_ns if self.best is None else self.best.time_ns
        unit_ns = max(1, guess // _UNITS.get(self.solver.name, _DEFAULT_UNITS))
        fractions = _FRACTIONS.get(self.solver.name, DEFAULT_FRACTIONS)
        for profiles in (False, True):
            master = master_program(self.problem, record.used, self.cuts, unit_ns, fractions, profiles)
            relaxation = Relaxation(master.program)
            # Without an answer there are no duals to prove anything with: the integer program decides.
            self._raise(record, relaxation.proved_bound(relaxation.solve()), unit_ns, "relaxation")
            if record.bound_ns >= self.target_ns():
                return
        values = self._solved(record, master.program, unit_ns, "master")
        if values is not None:
            self._try(master.loads(values), master.kinds)
        small = exact_size(self.problem, record.used) <= _MAX_EXACT
        if record.bound_ns < self.target_ns() and small:
            self._solve_exactly(record)

    def _raise(self, record: SetRecord, units: int | None, unit_ns: int, by: Proof) -> None:
        """Take over a bound proved in units if it is higher."""
        if units is not None and units * unit_ns > record.bound_ns:
            record.bound_ns, record.by = units * unit_ns, by

    def _solved(self, record: SetRecord, program: Program, unit_ns: int, by: Proof) -> Int64Array | None:
        """Solve below the best plan; the bound goes to the record, the decisions come back."""
        left = max(1.0, self.deadline - time.perf_counter())
        limits = Limits(time_limit_s=max(1.0, _SHARE * left), relative_gap=self.relative_gap / 8)
        # Nothing is gained from plans between the target and the best, and their absence is hard to prove.
        most_ns = math.ceil(self.target_ns()) if by == "exact" and self.best is not None else None
        below = self._below_best(program, unit_ns, most_ns)
        solution = self.solver.solve(below, limits)
        if solution.status == "infeasible" and self.solver.name in _WITNESS:
            solution = backend(_WITNESS[self.solver.name]).solve(below, limits)
        if solution.status == "infeasible":
            # Nothing below the best plan; without one, the set cannot hold the sequences at all.
            nothing_below = most_ns or (2**62 if self.best is None else self.best.time_ns)
            self._raise(record, -(-nothing_below // unit_ns), unit_ns, by)
            return None
        if solution.bound is not None:
            # What a solver proves with tolerances holds to far less than a unit, where a unit is more than one ns.
            slack = 1 if unit_ns > 1 and self.solver.name != "cpsat" else 0
            self._raise(record, math.ceil(solution.bound - _BOUND_TOLERANCE) - slack, unit_ns, by)
        if solution.values is None:
            return None
        return np.rint(solution.values.astype(np.float64)).astype(np.int64)

    def _below_best(self, program: Program, unit_ns: int, most_ns: int | None) -> Program:
        """The program with its objective bounded by the best plan, or by ``most_ns``."""
        if self.best is None:
            return program
        columns = np.flatnonzero(program.objective)
        row = Rows.dense(
            ("below_the_best_plan",),
            program.objective[columns],
            MINUS_INFINITY,
            -(-(most_ns or self.best.time_ns) // unit_ns) - program.offset,
            columns,
        )
        return program.with_rows(row)

    def _solve_exactly(self, record: SetRecord) -> None:
        guess = record.bound_ns if self.best is None else self.best.time_ns
        unit_ns = max(1, guess // _UNITS.get(self.solver.name, _DEFAULT_UNITS))
        exact = exact_program(self.problem, record.used, unit_ns)
        values = self._solved(record, exact.program, unit_ns, "exact")
        if values is not None:
            self._keep(arranged(self.problem, exact.groups(values)))

    def _try(self, loads: dict[int, Int64Array], kinds: tuple[Kind, ...]) -> None:
        """Pack what a master decided, let idle replicas take work once, and keep the plan if it is the best."""
        plan = self._packed({kind: loads[j] for j, kind in enumerate(kinds)})
        if plan is not None:
            self._keep(plan)
            self._keep(filled(plan, self.cuts, self._packed))

    def _keep(self, plan: GroupedPlan | None) -> bool:
        """Whether the plan is the best so far."""
        if plan is None or (self.best is not None and plan.time_ns >= self.best.time_ns):
            return False
        self.best = plan
        return True

    def _polish(self) -> None:
        """Let idle replicas of the best plan take work until nothing gets shorter; level single micro-batches."""
        if self.best is not None:
            groups = [self._leveled(group) for group in self.best.groups]
            self._keep(arranged(self.problem, groups))
        while self.best is not None and time.perf_counter() < self.deadline:
            if self.bound_ns() >= self.target_ns() or not self._keep(filled(self.best, self.cuts, self._packed)):
                return

    def _leveled(self, group: Group) -> Group:
        """The group with pairs of sequences exchanged, where its replicas run one micro-batch."""
        if not balances([packing.kind for packing in group.packings]):
            return group
        return Group(group.strategy, tuple(exchanged(group.packings)))

    def _packed(self, counts: dict[Kind, Int64Array]) -> GroupedPlan | None:
        packings = {kind: pack(kind, self.cuts[kind], counts[kind]) for kind in counts}
        groups: dict[int, list[Packing]] = {}
        for kind, packing in packings.items():
            if packing is None:
                return None
            groups.setdefault(kind.strategy, []).append(packing)
        for strategy, found in groups.items():
            if len(found) > 1:
                groups[strategy] = improve(found, _ROUNDS)
            if balances([packing.kind for packing in found]):
                groups[strategy] = balanced(groups[strategy], _START_ROUNDS)
        return arranged(self.problem, [Group(strategy, tuple(found)) for strategy, found in groups.items()])


def ranked_sets(problem: GroupedProblem, cuts: dict[Kind, KindCuts]) -> list[SetRecord]:
    """All sets of at most ``max_strategies`` strategies that hold every length, by their *sum* bound."""
    shares, constants = sequence_shares(problem, cuts)
    useful = [s for s in range(len(problem.strategies)) if np.isfinite(shares[s]).any()]
    most = min(problem.max_strategies, len(useful))
    number = sum(math.comb(len(useful), size) for size in range(1, most + 1))
    if number > _MAX_SETS:
        raise InvalidInputError(
            f"{len(useful)} strategies make {number} sets of at most {most}.",
            f"At most {_MAX_SETS} sets expected.",
            "Offer fewer strategies, or lower max_strategies.",
        )
    alone = np.array([alone_ns(problem, s) for s in range(len(problem.strategies))])
    records = []
    for size in range(1, most + 1):
        for used in itertools.combinations(useful, size):
            least = shares[list(used)].min(axis=0)
            if np.isfinite(least).all():
                total = math.floor(float(problem.counts @ least) * (1.0 - 1e-9)) + int(constants[list(used)].sum())
                longest = int(alone[list(used)].min(axis=0).max())
                records.append(SetRecord(used, max(total, longest) + least_overhead_ns(problem, used)))
    return sorted(records, key=lambda record: (record.bound_ns, record.used))


def alone_ns(problem: GroupedProblem, strategy: int) -> FloatArray:
    """Time of each length in a micro-batch of its own on the strategy's best replica, ns, [K]; infinite if none.

    It passes all stages forward and back, so no group that holds it takes less.
    """
    times = []
    for kind in problem.kinds_of(strategy):
        pipeline = kind.pipeline
        lag = 2 * (pipeline.num_stages - 1) * pipeline.transfer_ns
        passed = (kind.units + pipeline.micro_batch_units) * (pipeline.num_stages * pipeline.parts) + lag
        times.append(np.where(kind.fits, passed, np.inf))
    return np.asarray(np.min(times, axis=0))


def sequence_shares(problem: GroupedProblem, cuts: dict[Kind, KindCuts]) -> tuple[FloatArray, Int64Array]:
    """What a sequence, and a group before its sequences, add to the group's time at least, ns.

    Shapes [strategies, K], infinite where none fits, and [strategies]. For kinds j side by side and any weights
    w_j >= 0 with sum 1, two forms, of which a strategy takes the second if all its pipelines have one stage:

     - Z >= r_j (f + b) W_j / D_j for each j (r_j the inflation), so Z >= sum_j w_j r_j (f + b) W_j / D_j.
     - Z >= (f + b) W_j / D_j + e_j for each kind that is used (e_j the least that one micro-batch adds). Weighted
       over these, Z sum_used w_j >= sum_used w_j ((f + b) W_j / D_j + e_j), so Z >= sum_j w_j (f + b) W_j / D_j +
       min_j e_j, because an unused kind has W_j = 0 and the weights used add up to at most 1.

    A sequence then adds at least its least term over j. Weights are in proportion to the kinds' speeds.
    """
    shares = np.full((len(problem.strategies), problem.lengths.size), np.inf)
    constants = np.zeros(len(problem.strategies), np.int64)
    for s in range(len(problem.strategies)):
        kinds = [kind for kind in problem.kinds_of(s) if kind.fits.any()]
        if not kinds:
            continue
        single = all(kind.pipeline.num_stages == 1 for kind in kinds)
        times = [_unit_times(kind, 1.0 if single else cuts[kind].inflation) for kind in kinds]
        common = np.logical_and.reduce([kind.fits for kind in kinds])
        speeds = np.array([1.0 / max(1e-9, float((one * problem.counts)[common].sum())) for one in times])
        weights = speeds / speeds.sum()
        shares[s] = np.min([one * weight for one, weight in zip(times, weights, strict=True)], axis=0)
        if single:
            constants[s] = min(last_stage_cut(kind, 1).constant >> SCALE_BITS for kind in kinds)
    return shares, constants


def _unit_times(kind: Kind, inflation: float) -> FloatArray:
    """Time of one sequence of each length if all replicas share it, ns, [K]; infinite where it does not fit."""
    times = kind.units * (inflation * kind.pipeline.parts / kind.num_replicas)
    return np.where(kind.fits, times, np.inf)
