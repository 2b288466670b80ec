"""Branch over sets of strategies for the fastest grouped step, best bound first, with a proved lower bound.

Every plan uses exactly one set Q of strategies (those that hold sequences). Each set has up to five bounds, each
more expensive and none lower than the one before; the first bound that reaches the cutoff (the incumbent's time
less the requested gap) closes the set:

 1. *sum*: least_overhead(Q) + sum_k n_k min over s in Q of inflation_s (f + b) u_sk / D_s, for all sets at once;
    or, if that is higher, least_overhead(Q) and the longest sequence alone where it is done first (``alone_ns``).
    Proof. A group's time is at least inflation_s (f + b) W_s / D_s (``count_cuts.PipelineCuts.inflation``),
    and each sequence adds at least its cheapest share. ``sequence_shares`` covers replicas of
    several kinds, and pipelines of one stage, whose first micro-batch is counted separately.
 2. *relaxation*: the linear relaxation of ``assignment_program``, first without profiles, then with them; its dual
    bound is recomputed in exact arithmetic.
 3. *master*: the integer program. A set whose program has no solution below the incumbent is closed too.
 4. *waits*: where one set of a single strategy leaves a gap, its assignment program with the idle time of its
    pipelines around the longest sequences that its answers give them (``count_cuts.IdleTimeBound``).
 5. *exact*: for steps of few sequences, the whole problem of the set as one program (below).

The bound of the problem is the minimum over all sets. The answers of assignment programs are packed, arranged and
simulated; the best of these plans is the answer, and only its exact time counts.

**Exact program**: the whole problem of a set of strategies as one integer program, for steps of few sequences.

**Variables.** q_jrmk >= 0 integer, sequences of length k in micro-batch m of replica r of kind j; z_jrm binary,
that the micro-batch exists; F_prm, B_prm >= 0, the ends of its forward and backward on stage p; Z_s and y_t as in
``plan``. Every replica has as many slots m as it may have micro-batches; slots without a micro-batch come
first.

Rows, in the order of the functions that add them:

 - ``every_sequence_runs``: sum_jrm q_jrmk = n_k.
 - ``micro_batch_exists``: sum_k q_jrmk >= z_jrm; q_jrmk <= n_k z_jrm; z_jrm <= z_jr,m+1.
 - ``micro_batch_fits``: sum_k l_k q_jrmk <= C_j; over P consecutive slots, at most the tokens in flight.
 - ``work_in_order``: the recurrence of ``pipeline_times_ns``, with f sum_k u_k q + f c z for the forward (b for
   the backward) and transfers times z; Z_s >= B_0 of the last slot.
 - ``replicas_alike``: equal replicas in the order of their micro-batches' number.
 - ``one_tour``, ``every_strategy_is_used``.

**Exact**: empty slots take no time and no transfer, and before the first micro-batch they change nothing in the
order of 1F1B. With e empty slots, stage p's first P - p - 1 forwards are e empty forwards and the others; the e
empty backwards that follow alternate with e further forwards; and then the first real backward follows P - p
forwards, as without empty slots. So with ``unit_ns`` = 1 the optimum is the minimum time of all plans; with
larger units it is a lower bound, because every duration is rounded down.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from milpplan.errors import InfeasibleError, InvalidInputError, SolverError
from milpplan.lengths.bounds import IdleTimeBound, PipelineCuts
from milpplan.lengths.deadline import Deadline, spend_measured
from milpplan.lengths.search_parameters import PARAMETERS
from milpplan.lengths.tabled.assignment_program import (
    DEFAULT_FRACTIONS,
    Proof,
    SetRecord,
    assignment_program,
    ranked_sets,
)
from milpplan.lengths.tabled.local_search import first_packings, improved_packings
from milpplan.lengths.tabled.problem import MAX_DISTINCT, GroupedProblem, Int64Array, Kind
from milpplan.lengths.tabled.relocation import pack_kinds, plan_from_packings, relocate
from milpplan.lengths.tabled.step_plan import (
    Group,
    GroupedPlan,
    Packing,
    TourCostRows,
    arranged,
    every_strategy_is_used,
    serial_ns,
    undominated_tours,
)
from milpplan.optimize.milp.backends import AUTO, backend, check_infeasible
from milpplan.optimize.milp.linear_relaxation import Relaxation
from milpplan.optimize.milp.program import MINUS_INFINITY, Program, ProgramBuilder, Rows
from milpplan.optimize.milp.solution import Backend, Limits, Solution


@dataclass(frozen=True, slots=True, eq=False)
class _Replica:
    """Columns of a replica: sequences [slots][K] (-1 where a length does not fit), existence [slots]."""

    kind: Kind
    sequences: list[list[int]]
    exists: range


@dataclass(frozen=True, slots=True, eq=False)
class ExactProgram:
    """Exact program of one set of strategies, with the columns of its decisions."""

    program: Program
    replicas: tuple[_Replica, ...]

    def groups(self, values: Int64Array) -> list[Group]:
        """Decode the groups of an answer."""
        packed: dict[Kind, list[Int64Array]] = {}
        for replica in self.replicas:
            columns = np.array(replica.sequences, np.int64).reshape(-1, replica.kind.units.size)
            counts = np.where(columns >= 0, values[columns], 0)
            packed.setdefault(replica.kind, []).append(counts[counts.any(axis=1)])
        packings_of: dict[int, list[Packing]] = {}
        for kind, replicas in packed.items():
            packings_of.setdefault(kind.strategy, []).append(Packing(kind, tuple(replicas)))
        return [Group(strategy, tuple(packings)) for strategy, packings in packings_of.items()]


def num_slots(kind: Kind) -> int:
    """Return the maximum number of micro-batches of a replica."""
    return min(int(kind.counts[kind.fits].sum()), kind.pipeline.max_micro_batches or 2**31)


def exact_size(problem: GroupedProblem, used: tuple[int, ...]) -> int:
    """Return the number of integer variables of the program."""
    return sum(
        kind.num_replicas * num_slots(kind) * (int(kind.fits.sum()) + 2 * kind.pipeline.num_stages)
        for strategy in used
        for kind in problem.kinds_of(strategy)
    )


def exact_program(problem: GroupedProblem, used: tuple[int, ...], unit_ns: int) -> ExactProgram:
    """Build the program for exactly the strategies ``used``; times in units of ``unit_ns``."""
    builder = ProgramBuilder(f"exact {'+'.join(problem.strategies[s].name for s in used)}")
    kinds = [kind for s in used for kind in problem.kinds_of(s)]
    tour_costs = TourCostRows.add(builder, problem, used, kinds, unit_ns)
    replicas = [_replica(builder, kind, r) for kind in kinds for r in range(kind.num_replicas)]
    for k, (length, count) in enumerate(zip(problem.lengths.tolist(), problem.counts.tolist(), strict=True)):
        columns = [slot[k] for replica in replicas for slot in replica.sequences if slot[k] >= 0]
        builder.add_row(f"every_sequence_runs[{length}]", columns, [1] * len(columns), count, count)
    for replica in replicas:
        micro_batch_exists(builder, replica)
        micro_batch_fits(builder, replica)
        work_in_order(builder, replica, tour_costs.times[replica.kind.strategy], unit_ns)
    replicas_alike(builder, replicas)
    for strategy in used:
        strategy_columns = [
            column
            for replica in replicas
            if replica.kind.strategy == strategy
            for slot in replica.sequences
            for column in slot
            if column >= 0
        ]
        every_strategy_is_used(builder, problem.strategies[strategy].name, strategy_columns)
    tour_costs.minimize(builder)
    return ExactProgram(builder.build(), tuple(replicas))


def _replica(builder: ProgramBuilder, kind: Kind, index: int) -> _Replica:
    """Add the columns of a replica."""
    name = f"{kind.pipeline.name},{index}"
    slots = num_slots(kind)
    sequences = [
        [
            builder.add_variable(f"q[{name},{m},{length}]", 0, count) if fits else -1
            for length, count, fits in zip(
                kind.lengths.tolist(), kind.counts.tolist(), kind.fits.tolist(), strict=True
            )
        ]
        for m in range(slots)
    ]
    return _Replica(kind, sequences, builder.add_variables([f"z[{name},{m}]" for m in range(slots)], 1))


def _columns_of(slot: list[int]) -> list[tuple[int, int]]:
    """List pairs (length's index, column) of a slot."""
    return [(k, column) for k, column in enumerate(slot) if column >= 0]


def micro_batch_exists(builder: ProgramBuilder, replica: _Replica) -> None:
    """A micro-batch exists if and only if it holds sequences; existing micro-batches come last."""
    for m, slot in enumerate(replica.sequences):
        pairs = _columns_of(slot)
        columns = [column for _, column in pairs]
        builder.add_row(f"holds[{m}]", [*columns, replica.exists[m]], [1] * len(columns) + [-1], 0)
        for k, column in pairs:
            builder.add_row(
                f"micro_batch_exists[{m},{k}]", [column, replica.exists[m]], [-1, int(replica.kind.counts[k])], 0
            )
        if m:
            builder.add_row(f"exist_last[{m}]", [replica.exists[m], replica.exists[m - 1]], [1, -1], 0)


def micro_batch_fits(builder: ProgramBuilder, replica: _Replica) -> None:
    """Tokens fit into each micro-batch, and into as many consecutive ones as are in flight."""
    pipeline, lengths = replica.kind.pipeline, replica.kind.lengths
    for m, slot in enumerate(replica.sequences):
        pairs = _columns_of(slot)
        tokens = [int(lengths[k]) for k, _ in pairs]
        columns = [column for _, column in pairs]
        builder.add_row(f"micro_batch_fits[{m}]", columns, tokens, upper=pipeline.micro_batch_tokens)
    if pipeline.in_flight_tokens is None:
        return
    width = min(pipeline.num_stages, len(replica.sequences))
    for m in range(len(replica.sequences) - width + 1):
        pairs = [pair for slot in replica.sequences[m : m + width] for pair in _columns_of(slot)]
        builder.add_row(
            f"in_flight_fits[{m}]",
            [column for _, column in pairs],
            [int(lengths[k]) for k, _ in pairs],
            upper=pipeline.in_flight_tokens,
        )


def work_in_order(builder: ProgramBuilder, replica: _Replica, time: int, unit_ns: int) -> None:
    """Work follows the recurrence of ``pipeline_times_ns`` over all slots."""
    kind, pipeline = replica.kind, replica.kind.pipeline
    num_stages, slots = pipeline.num_stages, len(replica.sequences)
    horizon = -(-serial_ns(kind) // unit_ns) + 1
    forward: dict[tuple[int, int], int] = {}
    backward: dict[tuple[int, int], int] = {}
    last: list[int | None] = [None] * num_stages

    def work(ends: dict[tuple[int, int], int], parts: int, stage: int, m: int, needed: int | None) -> None:
        end = builder.add_variable(f"end[{stage},{m}]", 0, horizon, False)
        ends[stage, m] = end
        pairs = _columns_of(replica.sequences[m])
        spent = [-(int(kind.units[k]) * parts // unit_ns) for k, _ in pairs]
        empty = -(pipeline.micro_batch_units * parts // unit_ns)
        columns = [end, *(column for _, column in pairs), replica.exists[m]]
        for predecessor, lag in ((last[stage], 0), (needed, pipeline.transfer_ns // unit_ns)):
            if predecessor is not None:
                builder.add_row("work_in_order", [*columns, predecessor], [1, *spent, empty - lag, -1], 0)
        if last[stage] is None and needed is None:
            builder.add_row("work_in_order", columns, [1, *spent, empty], 0)
        last[stage] = end

    for turn in range(slots + num_stages):
        for stage in range(num_stages):
            backward_of = turn - num_stages + stage
            if 0 <= backward_of < slots:
                work(backward, pipeline.backward_parts, stage, backward_of, backward.get((stage + 1, backward_of)))
            if turn < slots:
                work(forward, pipeline.forward_parts, stage, turn, forward.get((stage - 1, turn)))
    if slots:
        builder.add_row("group_waits", [time, backward[0, slots - 1]], [1, -1], 0)


def replicas_alike(builder: ProgramBuilder, replicas: list[_Replica]) -> None:
    """The first of two equal replicas has at least as many micro-batches as the second."""
    for first, second in itertools.pairwise(replicas):
        if first.kind is second.kind:
            slots = len(first.exists)
            builder.add_row("replicas_alike", [*first.exists, *second.exists], [1] * slots + [-1] * slots, 0)


NO_PLAN_NS = 2**62
"""The bound of a set without any plan."""


@dataclass(frozen=True, eq=False)
class GroupedResult:
    """Result of a search: the best plan, the proved bound, and the bounds of all sets of strategies."""

    plan: GroupedPlan
    bound_ns: int
    sets: tuple[SetRecord, ...]
    cpu_time_s: float

    @property
    def gap(self) -> float:
        """(time - bound) / time."""
        return (self.plan.time_ns - self.bound_ns) / self.plan.time_ns


def check_held(problem: GroupedProblem, sets: Sequence[SetRecord]) -> None:
    """Refuse a step that no set of strategies holds.

    Raises:
        InfeasibleError: every set is proved to hold no plan.
    """
    # Bounds are rounded to whole units, so they may be a little below NO_PLAN_NS.
    if min(record.bound_ns for record in sets) >= NO_PLAN_NS // 2:
        raise InfeasibleError(
            f"No set of {len(problem.strategies)} strategies holds the {problem.num_sequences} sequences.",
            "Proved by their programs: some do not fit beside the others.",
            "Give larger micro-batches or more in flight, or fewer sequences.",
        )


def _resolution(backend_name: str) -> tuple[int, int]:
    """Return the units of the incumbent's time in which programs state times, and their fractions: fewer for
    backends with narrow numbers."""
    return (2**12, 2**8) if backend_name in ("cpsat", "cbc") else (2**20, DEFAULT_FRACTIONS)


def solve_groups(
    problem: GroupedProblem,
    backend_name: str = "auto",
    relative_gap: float = 0.0,
    time_limit_s: float = 60.0,
    *,
    waits: bool = True,
) -> GroupedResult:
    """Solve a grouped step to ``relative_gap``, or until no set can be improved.

    Every set of strategies is examined once, so a gap may stay open before the time is over. Programs that a
    backend refuses (CP-SAT is trusted with moderate rows only) go to HiGHS, or CBC.

    Args:
        problem: the step.
        backend_name: solver of the programs.
        relative_gap: relative gap at which the search ends.
        time_limit_s: limit of wall-clock time (soft).
        waits: False leaves out the bound *waits*, which only helps sets of a single strategy.

    Raises:
        InvalidInputError: there are too many distinct lengths, or more sets of strategies than can be listed.
        InfeasibleError: no set holds the sequences within memory.
        SolverError: no plan was found in time.
    """
    if problem.lengths.size > MAX_DISTINCT:
        raise InvalidInputError(
            f"There are {problem.lengths.size} distinct lengths.",
            f"At most {MAX_DISTINCT} expected: every one has a variable for every strategy.",
            "Align lengths to more tokens, or use fewer buckets.",
        )
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


class _Search:
    """Branch over sets: the sets with their bounds, and the incumbent."""

    def __init__(
        self,
        problem: GroupedProblem,
        solver: Backend,
        relative_gap: float,
        time_limit_s: float,
    ) -> None:
        self.problem = problem
        self.solver = solver
        self.relative_gap = relative_gap
        self.cpu_start = time.process_time()
        self.deadline = Deadline.after(time_limit_s)
        self.cuts = {kind: PipelineCuts(kind) for kind in problem.kinds}
        self.best: GroupedPlan | None = None
        self.sets = ranked_sets(problem, self.cuts)

    def target_ns(self) -> float:
        """Return the cutoff: a set with a bound of at least this is closed."""
        return self.known_ns * (1.0 - self.relative_gap)

    @property
    def known_ns(self) -> float:
        """Time of the shortest known step, ns."""
        return math.inf if self.best is None else self.best.time_ns

    def bound_ns(self) -> int:
        """Return the smallest bound of all sets, at most the incumbent's time."""
        assert self.best is not None
        return min(self.best.time_ns, *(record.bound_ns for record in self.sets))

    def run(self, waits: bool) -> None:
        """Examine the sets once each, in the order of their bounds; then improve bound and plan."""
        self._start()
        for record in self.sets:
            if record.bound_ns >= self.target_ns():
                # Sets are in the order of their bounds.
                break
            if self.best is not None and self.deadline.passed:
                break
            self.examine(record)
        if waits:
            self._prove_idle_time()
        self._improve_plan()

    def _start(self) -> None:
        """Plan the most promising sets of one micro-batch a replica, before any program is solved."""
        # Of more sequences the short ones balance replicas.
        for record in self.sets[:8] if self.problem.num_sequences <= 96 else ():
            if self.best is not None and self.deadline.passed:
                break
            kinds = self.problem.kinds_of(record.used[0])
            is_single = all(kind.pipeline.num_stages == kind.pipeline.max_micro_batches == 1 for kind in kinds)
            first = first_packings(kinds) if len(record.used) == 1 and is_single else None
            if first is not None:
                packings = improved_packings(first, PARAMETERS.group_effort)
                self._keep(arranged(self.problem, [Group(record.used[0], tuple(packings))]))

    def examine(self, record: SetRecord) -> None:
        """Bound and solve a set: relaxation, assignment program, and for small steps the exact program."""
        unit_ns = self._unit_ns(self._guess_ns(record))
        fractions = _resolution(self.solver.name)[1]
        for profiles in (False, True):
            program = assignment_program(self.problem, record.used, self.cuts, unit_ns, fractions, profiles)
            relaxation = Relaxation(program.program)
            # Without an answer there are no duals for a bound, so the integer program decides.
            with spend_measured():
                self._raise_bound(record, relaxation.proved_bound(relaxation.solve()), unit_ns, "relaxation")
            if record.bound_ns >= self.target_ns():
                return
        values = self._solve_program(record, program.program, unit_ns, "master")
        if values is not None:
            self._pack_answer(program.loads(values), program.kinds)
        small = exact_size(self.problem, record.used) <= PARAMETERS.max_exact_variables
        if record.bound_ns < self.target_ns() and small:
            self._solve_exactly(record)

    def _prove_idle_time(self) -> None:
        """Add idle time around long sequences, while the set with the smallest bound gains from it."""
        learned: dict[Kind, IdleTimeBound] = {}
        while self.best is not None and not self.deadline.passed:
            record = min(self.sets, key=lambda candidate: candidate.bound_ns)
            pipelines = [kind for kind in self.problem.kinds_of(record.used[0]) if kind.pipeline.num_stages > 1]
            if record.bound_ns >= self.target_ns() or len(record.used) > 1 or not pipelines:
                return
            new_kinds = [kind for kind in pipelines if kind not in learned]
            learned |= {kind: IdleTimeBound(kind, self.cuts[kind]) for kind in new_kinds}
            idle_times = {kind: learned[kind] for kind in pipelines}
            if new_kinds:
                self._learn_from_best(record, idle_times)
            old_values = record.bound_ns, self.best.time_ns
            try:
                has_learned, loads = self._learn(record, idle_times)
                if loads is not None:
                    self._keep(self._plan_of(loads))
            except SolverError:
                # A backend that refuses rows of this size leaves what is proved already.
                return
            progress = record.bound_ns - old_values[0] + old_values[1] - self.best.time_ns > 2e-4 * old_values[1]
            if not has_learned and not progress:
                return

    def _learn_from_best(self, record: SetRecord, idle_times: dict[Kind, IdleTimeBound]) -> None:
        """Learn idle time around the longest sequences that the incumbent gives to kinds of the set."""
        assert self.best is not None
        packings = [packing for group in self.best.groups for packing in group.packings]
        for packing in packings:
            longest = [
                int(np.flatnonzero(replica.any(axis=0))[-1]) for replica in packing.replicas if replica.any()
            ]
            if packing.kind in idle_times and longest:
                idle_times[packing.kind].learn(max(longest), *self._interval(record, 1))

    def _guess_ns(self, record: SetRecord) -> int:
        """Estimate the time of a step."""
        return record.bound_ns if math.isinf(self.known_ns) else int(self.known_ns)

    def _unit_ns(self, guess_ns: int) -> int:
        """Return the unit of time in programs, ns."""
        return max(1, guess_ns // _resolution(self.solver.name)[0])

    def _interval(self, record: SetRecord, unit_ns: int) -> tuple[float, float]:
        """Return an interval of the group times of plans below the incumbent and above the bound, ns."""
        assert self.best is not None
        constants = [price.constant_ns for price in undominated_tours(self.problem, record.used)]
        return record.bound_ns - max(constants), self.best.time_ns - min(constants) + 2 * unit_ns

    def _learn(
        self, record: SetRecord, idle_times: dict[Kind, IdleTimeBound]
    ) -> tuple[bool, dict[Kind, Int64Array] | None]:
        """Solve a set's assignment program with the learned idle time, and learn from its answer.

        Returns:
            True if a length was learned, and the sequences by kind (None: no answer).
        """
        assert self.best is not None
        unit_ns = self._unit_ns(self.best.time_ns)
        fractions = _resolution(self.solver.name)[1]
        low, high = self._interval(record, unit_ns)
        capacity_rows = {kind: idle_time.capacity_row(low, high) for kind, idle_time in idle_times.items()}
        program = assignment_program(self.problem, record.used, self.cuts, unit_ns, fractions, waits=capacity_rows)
        values = self._solve_program(record, program.program, unit_ns, "waits")
        if values is None:
            return False, None
        loads = dict(zip(program.kinds, program.loads(values).values(), strict=True))
        longest = {kind: np.flatnonzero(loads[kind]) for kind in idle_times if record.bound_ns < self.target_ns()}
        learned = [
            idle_times[kind].learn(int(lengths[-1]), low, high)
            for kind, lengths in longest.items()
            if lengths.size
        ]
        return any(learned), loads

    def _raise_bound(self, record: SetRecord, units: int | None, unit_ns: int, by: Proof) -> None:
        """Adopt a bound proved in units if it is higher."""
        if units is not None and units * unit_ns > record.bound_ns:
            record.bound_ns, record.by = units * unit_ns, by

    def _solve_program(self, record: SetRecord, program: Program, unit_ns: int, by: Proof) -> Int64Array | None:
        """Solve a program below the incumbent. Raises the bound of the record, and returns the values."""
        remaining_s = max(1.0, self.deadline.left_s)
        share = 64 if by == "waits" else 8
        limit_s = max(1.0, PARAMETERS.program_share * remaining_s)
        limits = Limits(time_limit_s=limit_s, relative_gap=self.relative_gap / share)
        # Plans between the cutoff and the incumbent gain nothing, and their absence is hard to prove.
        limit_ns = math.ceil(self.target_ns()) if by == "exact" and self.best is not None else None
        # CP-SAT rounds groups' times up to whole units, by up to one unit each.
        spare = len(record.used) if unit_ns > 1 and by != "exact" else 0
        below = self._below_best(program, unit_ns, limit_ns, spare)
        solution = check_infeasible(below, limits, self._solve_or_other(below, limits))
        if solution.status == "infeasible":
            # No plan is below the incumbent; without an incumbent, the set cannot hold the sequences.
            nothing_below = limit_ns or (NO_PLAN_NS if math.isinf(self.known_ns) else math.floor(self.known_ns))
            self._raise_bound(record, nothing_below, 1, by)
            return None
        if solution.bound is not None:
            # A floating-point solver's bound is wrong by far less than a unit, if a unit is more than one ns, and
            # may be slightly above a whole number.
            slack = spare if solution.backend == "cpsat" else int(unit_ns > 1)
            self._raise_bound(record, math.ceil(solution.bound - 1e-4) - slack, unit_ns, by)
        if solution.values is None:
            return None
        return np.rint(solution.values.astype(np.float64)).astype(np.int64)

    def _solve_or_other(self, program: Program, limits: Limits) -> Solution:
        """Solve with the backend, or with the automatic choice where the backend fails or its answer is wrong."""
        with spend_measured():
            try:
                return self.solver.solve(program, limits)
            except SolverError:
                return backend(AUTO).solve(program, limits)

    def _below_best(self, program: Program, unit_ns: int, limit_ns: int | None, spare: int) -> Program:
        """Bound the objective by the incumbent, or by ``limit_ns``, and ``spare`` units more."""
        if math.isinf(self.known_ns):
            return program
        columns = np.flatnonzero(program.objective)
        row = Rows.dense(
            ("below_the_best_plan",),
            program.objective[columns],
            MINUS_INFINITY,
            -(-(limit_ns or math.ceil(self.known_ns)) // unit_ns) + spare - program.offset,
            columns,
        )
        return program.with_rows(row)

    def _solve_exactly(self, record: SetRecord) -> None:
        """Solve the exact program of a set."""
        unit_ns = self._unit_ns(self._guess_ns(record))
        exact = exact_program(self.problem, record.used, unit_ns)
        values = self._solve_program(record, exact.program, unit_ns, "exact")
        if values is not None:
            self._keep(arranged(self.problem, exact.groups(values)))

    def _pack_answer(self, loads: dict[int, Int64Array], kinds: tuple[Kind, ...]) -> None:
        """Pack the answer of an assignment program, relocate into idle time once, and keep better plans."""
        plan = self._plan_of({kind: loads[j] for j, kind in enumerate(kinds)})
        if plan is not None:
            self._keep(plan)
            self._keep(relocate(plan, self._plan_of))

    def _keep(self, plan: GroupedPlan | None) -> bool:
        """Keep the plan if it is faster than the incumbent. Returns True if it was kept."""
        if plan is None or (self.best is not None and plan.time_ns >= self.best.time_ns):
            return False
        self.best = plan
        return True

    def _improve_plan(self) -> None:
        """Improve the incumbent by a longer local search; relocate sequences into its idle time until it stays."""
        if self.best is not None and self.bound_ns() < self.target_ns():
            groups = [
                Group(group.strategy, tuple(improved_packings(group.packings, PARAMETERS.longer_local_effort)))
                for group in self.best.groups
            ]
            self._keep(arranged(self.problem, groups))
        while self.best is not None and not self.deadline.passed:
            if self.bound_ns() >= self.target_ns() or not self._keep(relocate(self.best, self._plan_of)):
                return

    def _plan_of(self, counts: dict[Kind, Int64Array]) -> GroupedPlan | None:
        """Pack the sequences of every kind and arrange the plan; None if a kind has no packing."""
        packings = pack_kinds(counts)
        return None if packings is None else plan_from_packings(self.problem, packings)
