"""The best grouped step and a proved lower bound: over all sets of strategies, best bound first.

Every plan uses exactly one set Q of strategies (those that hold sequences). For each set five bounds, each dearer
than the last and none below it; the first that reaches the best plan known (less the gap asked for) closes it:

 1. *sum*: least_overhead(Q) + sum_k n_k min over s in Q of inflation_s (f + b) u_sk / D_s, for all sets at once;
    or, if that is more, least_overhead(Q) and the longest sequence alone where it is done first (``alone_ns``).
    Proof. A group's time is at least inflation_s (f + b) W_s / D_s (``cuts.KindCuts.inflation``), and each
    sequence adds at least its cheapest share. ``sets.sequence_shares`` says how for replicas of several kinds, and
    for pipelines of one stage, whose first micro-batch is counted apart.
 2. *relaxation*: the linear relaxation of ``master``, first without profiles, then with them; its dual bound
    recomputed in exact arithmetic.
 3. *master*: the integer program. A set whose program has no solution below the best plan is closed too.
 4. *waits*: where one set of a single strategy is what leaves a gap, its master with the waits of its pipelines
    around long sequences (``waiting``), learned for the longest ones that its answers give a kind of replicas.
 5. *exact*: for steps of few sequences, the whole problem of the set as one program (``exact``).

The bound of the problem is the least over all sets. The masters' answers are packed, arranged and simulated: the
best of these plans is the answer, and only its exact time counts.
"""

from __future__ import annotations

import math
import time

import numpy as np

from milpplan.errors import SolverError
from milpplan.groups.assignment_program import DEFAULT_FRACTIONS, Floors, master_program
from milpplan.groups.bounds.idle_time import IdleTimeBound
from milpplan.groups.bounds.pipeline_bounds import PipelineCuts
from milpplan.groups.exact import exact_program, exact_size
from milpplan.groups.packing.levelled import joined, leveled, packed
from milpplan.groups.packing.pair_exchange import exchanged
from milpplan.groups.packing.relocate import filled
from milpplan.groups.packing.tabu_search import balanced, balances, first_packings
from milpplan.groups.plan import Group, GroupedPlan, arranged
from milpplan.groups.problem import GroupedProblem, Kind
from milpplan.groups.result import NO_PLAN_NS, GroupedResult, check_held
from milpplan.groups.screen_subsets import Proof, SetRecord, ranked_sets
from milpplan.groups.strategies import Int64Array
from milpplan.groups.tours import least_overhead_ns, tour_prices
from milpplan.optimize.milp.backends import AUTO, backend, witnessed
from milpplan.optimize.milp.linear_relaxation import Relaxation
from milpplan.optimize.milp.program import MINUS_INFINITY, Program, Rows
from milpplan.optimize.milp.solution import Backend, Limits, Solution

# One master may take this share of the time that is left.
_SHARE = 0.34
# Programs state times in this many units of the best time known, where the backend bears it.
_UNITS = {"cpsat": 2**12, "cbc": 2**12}
_FRACTIONS = {"cpsat": 2**8, "cbc": 2**8}
_DEFAULT_UNITS = 2**20
# Floating-point solvers' whole bounds may come back this far from whole.
_BOUND_TOLERANCE = 1e-4
# Steps with exact programs of at most so many variables are solved exactly.
_MAX_EXACT = 512
# A bound or plan is nearer by at least this share where another master with waits is worth it.
_PROGRESS = 2e-4
# Masters that follow what packings took, and how often they do for a set, after what is learned.
_SHARED = 3
_SHARES = 2
# Sets that are balanced before programs are solved, in so many rounds each; the best ones for longer.
_STARTS = 8
_STARTS_MORE = 3
# Of more sequences than this, the small ones level replicas.
_START_SEQUENCES = 96
_START_ROUNDS = 1_000


def solve_groups(
    problem: GroupedProblem,
    backend_name: str = "auto",
    relative_gap: float = 0.0,
    time_limit_s: float = 60.0,
    *,
    waits: bool = True,
) -> GroupedResult:
    """Solve to ``relative_gap``, until nothing more is to be had, or until ``time_limit_s`` of wall clock (soft):
    every set of strategies is looked at once, so a gap may stay open before the time is over. Without ``waits``
    leave out that proof, for sets of several strategies, which it does not help. Programs that a backend refuses
    (CP-SAT is trusted with moderate rows only) go to HiGHS, or CBC.

    Raises ``InvalidInputError`` where there are more sets of strategies than can be listed, ``InfeasibleError``
    where no set holds the sequences within memory, and ``SolverError`` where no plan was found in time.
    """
    search = _Search(problem, backend(backend_name), relative_gap, time_limit_s)
    search.run(waits)
    if search.best is None:
        check_held(problem, search.sets)
        raise SolverError(
            f"No plan was packed within {time_limit_s} s.",
            "At least one set of strategies that holds every sequence was tried.",
            "Allow more time, or larger micro-batches.",
        )
    return GroupedResult(
        search.best, search.bound_ns(), tuple(search.sets), time.process_time() - search.cpu_start
    )


def solve_set(
    problem: GroupedProblem,
    used: tuple[int, ...],
    below_ns: float,
    backend_name: str = "auto",
    relative_gap: float = 0.0,
    time_limit_s: float = 60.0,
    floors: Floors | None = None,
) -> tuple[GroupedPlan | None, int]:
    """The best plan found, if there was any, which may leave out some of these strategies, and a bound of all that
    use just these, ns: proved until none of them is shorter than that or than ``below_ns`` by more than
    ``relative_gap``, with what is known of the strategies' groups, ``floors``.

    Raises ``InvalidInputError`` where there are more sets of strategies than can be listed.
    """
    search = _Search(problem, backend(backend_name), relative_gap, time_limit_s, below_ns, floors)
    record = next(one for one in search.sets if one.used == used)
    if record.bound_ns < search.target_ns():
        search.examine(record)
    return search.best, record.bound_ns


class _Search:
    """State of one run: the sets with their bounds and the best plan. ``below_ns``: a step that is known from
    elsewhere; ``floors``: what is known of strategies' groups."""

    def __init__(
        self,
        problem: GroupedProblem,
        solver: Backend,
        relative_gap: float,
        time_limit_s: float,
        below_ns: float = math.inf,
        floors: Floors | None = None,
    ) -> None:
        self.problem = problem
        self.solver = solver
        self.relative_gap = relative_gap
        self.below_ns = below_ns
        self.floors = floors
        self.cpu_start = time.process_time()
        self.deadline = time.perf_counter() + time_limit_s
        self.cuts = {kind: PipelineCuts(kind) for kind in problem.kinds}
        self.best: GroupedPlan | None = None
        self.sets = ranked_sets(problem, self.cuts)

    def target_ns(self) -> float:
        """A set with a bound of at least this is closed."""
        return self.known_ns * (1.0 - self.relative_gap)

    @property
    def known_ns(self) -> float:
        """The shortest step known."""
        return self.below_ns if self.best is None else min(self.below_ns, self.best.time_ns)

    def bound_ns(self) -> int:
        """Least bound of all sets, at most the best plan."""
        assert self.best is not None
        return min(self.best.time_ns, *(record.bound_ns for record in self.sets))

    def run(self, waits: bool) -> None:
        """Sets in the order of their bounds, once each."""
        self._start()
        for record in self.sets:
            if record.bound_ns >= self.target_ns():
                # Sets are in the order of their bounds.
                break
            if self.best is not None and time.perf_counter() >= self.deadline:
                break
            self.examine(record)
        if waits:
            self._wait()
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

    def examine(self, record: SetRecord) -> None:
        """Relaxation, master, and where that leaves a gap and the step is small, the exact program."""
        unit_ns = self._unit_ns(self._guess_ns(record))
        fractions = _FRACTIONS.get(self.solver.name, DEFAULT_FRACTIONS)
        for profiles in (False, True):
            master = master_program(
                self.problem, record.used, self.cuts, unit_ns, fractions, profiles, floors=self.floors
            )
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

    def _wait(self) -> None:
        """Waits around long sequences, while the set with the least bound is one of them that learns any."""
        learned: dict[Kind, IdleTimeBound] = {}
        shared = dict.fromkeys((one.used for one in self.sets), 0)
        while self.best is not None and time.perf_counter() < self.deadline:
            record = min(self.sets, key=lambda one: one.bound_ns)
            pipelines = [kind for kind in self.problem.kinds_of(record.used[0]) if kind.pipeline.num_stages > 1]
            if record.bound_ns >= self.target_ns() or len(record.used) > 1 or not pipelines:
                return
            first = [kind for kind in pipelines if kind not in learned]
            learned |= {kind: IdleTimeBound(kind, self.cuts[kind]) for kind in first}
            waits = {kind: learned[kind] for kind in pipelines}
            if first:
                self._learn_from_best(record, waits)
            before = record.bound_ns, self.best.time_ns
            try:
                new, loads = self._learn(record, waits)
                if not new and loads is not None and shared[record.used] < _SHARES:
                    shared[record.used] += 1
                    self._share(record, loads, waits)
            except SolverError:
                # A backend that refuses rows of this size leaves what is proved already.
                return
            nearer = record.bound_ns - before[0] + before[1] - self.best.time_ns > _PROGRESS * before[1]
            if not new and not nearer:
                return

    def _learn_from_best(self, record: SetRecord, waits: dict[Kind, IdleTimeBound]) -> None:
        """Learn of the longest sequences that the best plan gives to kinds of the set."""
        assert self.best is not None
        packings = [packing for group in self.best.groups for packing in group.packings]
        for packing in packings:
            longest = [int(np.flatnonzero(one.any(axis=0))[-1]) for one in packing.replicas if one.any()]
            if packing.kind in waits and longest:
                waits[packing.kind].learn(max(longest), *self._interval(record, 1))

    def _guess_ns(self, record: SetRecord) -> int:
        """About what a step takes."""
        return record.bound_ns if math.isinf(self.known_ns) else int(self.known_ns)

    def _unit_ns(self, guess_ns: int) -> int:
        return max(1, guess_ns // _UNITS.get(self.solver.name, _DEFAULT_UNITS))

    def _interval(self, record: SetRecord, unit_ns: int) -> tuple[float, float]:
        """Times of the group of all plans that are shorter than the best and none below the bound, ns."""
        assert self.best is not None
        constants = [price.constant_ns for price in tour_prices(self.problem, record.used)]
        return record.bound_ns - max(constants), self.best.time_ns - min(constants) + 2 * unit_ns

    def _learn(
        self, record: SetRecord, waits: dict[Kind, IdleTimeBound]
    ) -> tuple[bool, dict[Kind, Int64Array] | None]:
        """Solve a set's master with what is known, and learn of the longest sequences in its answer: whether that
        is anything new, and the answer."""
        assert self.best is not None
        unit_ns = self._unit_ns(self.best.time_ns)
        fractions = _FRACTIONS.get(self.solver.name, DEFAULT_FRACTIONS)
        low, high = self._interval(record, unit_ns)
        rooms = {kind: one.room(low, high) for kind, one in waits.items()}
        master = master_program(self.problem, record.used, self.cuts, unit_ns, fractions, waits=rooms)
        values = self._solved(record, master.program, unit_ns, "waits")
        if values is None:
            return False, None
        loads = dict(zip(master.kinds, master.loads(values).values(), strict=True))
        longest = {kind: np.flatnonzero(loads[kind]) for kind in waits if record.bound_ns < self.target_ns()}
        news = [waits[kind].learn(int(held[-1]), low, high) for kind, held in longest.items() if held.size]
        return any(news), loads

    def _share(self, record: SetRecord, loads: dict[Kind, Int64Array], waits: dict[Kind, IdleTimeBound]) -> None:
        """Pack a master's answer, and those of masters that know by how much each kind came out later than its
        bound."""
        assert self.best is not None
        unit_ns = self._unit_ns(self.best.time_ns)
        interval = self._interval(record, unit_ns)
        for _ in range(_SHARED):
            packings = packed(loads, self.cuts, around=True)
            if packings is None:
                return
            self._keep(joined(self.problem, packings))
            rooms = {
                kind: one.room(*interval).after(packings[kind].time_ns, loads[kind], kind)
                for kind, one in waits.items()
            }
            master = master_program(self.problem, record.used, self.cuts, unit_ns, waits=rooms)
            limits = Limits(time_limit_s=1.0, relative_gap=self.relative_gap / 64)
            values = self._answer(master.program, limits).values
            if values is None or time.perf_counter() >= self.deadline:
                return
            decided = master.loads(np.rint(values.astype(np.float64)).astype(np.int64))
            loads = dict(zip(master.kinds, decided.values(), strict=True))

    def _raise(self, record: SetRecord, units: int | None, unit_ns: int, by: Proof) -> None:
        """Take over a bound proved in units if it is higher."""
        if units is not None and units * unit_ns > record.bound_ns:
            record.bound_ns, record.by = units * unit_ns, by

    def _solved(self, record: SetRecord, program: Program, unit_ns: int, by: Proof) -> Int64Array | None:
        """Solve below the best plan; the bound goes to the record, the decisions come back."""
        left = max(1.0, self.deadline - time.perf_counter())
        share = 64 if by == "waits" else 8
        limits = Limits(time_limit_s=max(1.0, _SHARE * left), relative_gap=self.relative_gap / share)
        # Nothing is gained from plans between the target and the best, and their absence is hard to prove.
        most_ns = math.ceil(self.target_ns()) if by == "exact" and self.best is not None else None
        # CP-SAT has groups' times in whole units, above what masters say of them by up to one each.
        spare = len(record.used) if unit_ns > 1 and by != "exact" else 0
        below = self._below_best(program, unit_ns, most_ns, spare)
        solution = witnessed(below, limits, self._answer(below, limits))
        if solution.status == "infeasible":
            # Nothing below the best plan; without one, the set cannot hold the sequences at all.
            nothing_below = most_ns or (NO_PLAN_NS if math.isinf(self.known_ns) else math.floor(self.known_ns))
            self._raise(record, nothing_below, 1, by)
            return None
        if solution.bound is not None:
            # What a solver proves with tolerances holds to far less than a unit, where a unit is more than one ns.
            slack = spare if solution.backend == "cpsat" else int(unit_ns > 1)
            self._raise(record, math.ceil(solution.bound - _BOUND_TOLERANCE) - slack, unit_ns, by)
        if solution.values is None:
            return None
        return np.rint(solution.values.astype(np.float64)).astype(np.int64)

    def _answer(self, program: Program, limits: Limits) -> Solution:
        """The backend's, or where it refuses the program or its answer does not stand, the best other one's."""
        try:
            return self.solver.solve(program, limits)
        except SolverError:
            return backend(AUTO).solve(program, limits)

    def _below_best(self, program: Program, unit_ns: int, most_ns: int | None, spare: int) -> Program:
        """The program with its objective bounded by the best plan, or by ``most_ns``, and so many units more."""
        if math.isinf(self.known_ns):
            return program
        columns = np.flatnonzero(program.objective)
        row = Rows.dense(
            ("below_the_best_plan",),
            program.objective[columns],
            MINUS_INFINITY,
            -(-(most_ns or math.ceil(self.known_ns)) // unit_ns) + spare - program.offset,
            columns,
        )
        return program.with_rows(row)

    def _solve_exactly(self, record: SetRecord) -> None:
        unit_ns = self._unit_ns(self._guess_ns(record))
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
            groups = [leveled(group) for group in self.best.groups]
            self._keep(arranged(self.problem, groups))
        while self.best is not None and time.perf_counter() < self.deadline:
            if self.bound_ns() >= self.target_ns() or not self._keep(filled(self.best, self.cuts, self._packed)):
                return

    def _packed(self, counts: dict[Kind, Int64Array]) -> GroupedPlan | None:
        packings = packed(counts, self.cuts)
        return None if packings is None else joined(self.problem, packings)
