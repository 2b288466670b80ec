"""The shortest training step for sequences of many lengths, with a proved lower bound.

 1. *Single strategies*: every strategy by itself, with the whole memory (``single``); those of one stage first.
 2. *Degrees side by side*: several degrees of context parallelism on different GPUs at the same time
    (``side_by_side``).
 3. *Heterogeneous replicas*, if they were asked for (``heterogeneous``), and pipelines that may beat all steps
    found so far.
 4. *Strategies in turn*: sets of strategies whose switches and reductions leave room for a shorter step
    (``turns``). Their switches are priced by the planner of switches.
 5. The remaining time completes the proof for single strategies. With two CPUs a second process does that from the
    start (``single_strategy_process``), and step 3 begins for a moment before step 2.

``tabled`` works on tables that never exceed the exact times (``cost_tables``), so its bounds hold for the exact
times. Every answer is packed and counts with its exact time (``cost_tables``). The bound of the step is the
minimum over all parts of the space.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np

from milpplan.lengths.baselines import Degrees, baseline_steps
from milpplan.lengths.candidates import quantum_problem
from milpplan.lengths.cost_tables import Load
from milpplan.lengths.heterogeneous.count_program import HeterogeneousStep, heterogeneous_groups
from milpplan.lengths.heterogeneous.search import BestHeterogeneousStep, HeterogeneousSearch
from milpplan.lengths.parameters import PARAMETERS
from milpplan.lengths.records import PACKED, BaselineStep, LengthGroup, LengthsResult, SequenceRules, StaticStep
from milpplan.lengths.sequences import check_rules, check_search, check_step
from milpplan.lengths.side_by_side.team_search import VISITS, BestTeams, TeamSearch, team_groups
from milpplan.lengths.side_by_side.teams import TeamStep
from milpplan.lengths.single.single_strategy_process import SingleStrategyProcess, can_help
from milpplan.lengths.single.single_strategy_search import SingleStrategySearch
from milpplan.lengths.strategy_tables import Step, StrategyTables
from milpplan.lengths.turns.turn_search import AnyStep, TurnSearch
from milpplan.lengths.workload import Workload
from milpplan.problem import Problem
from milpplan.units import NS_PER_S


def solve_lengths(
    problem: Problem,
    workload: Workload,
    alignment: int = 128,
    max_strategies: int = 2,
    gap: float = 0.01,
    time_limit_s: float = 60.0,
    backend: str = "auto",
    baselines: bool = False,
    hotspa: Sequence[Degrees] = (),
    rules: SequenceRules = PACKED,
    side_by_side: bool | None = None,
    workers: int | None = None,
    unlike_replicas: bool = False,
) -> LengthsResult:
    """Find the shortest step for the sequences of a workload and prove a lower bound.

    Args:
        problem: model, cluster, formats and space; its sequence length and batch size are ignored.
        workload: lengths and counts of the sequences.
        alignment: every length is padded to a multiple of so many tokens.
        max_strategies: at most so many strategies take turns in a step.
        gap: relative gap at which the search stops.
        time_limit_s: soft limit in seconds.
        backend: solver of the integer programs.
        baselines: whether to apply the published rules of other planners, too, in a third of the time on top.
        hotspa: (dp, tp, pp) of one strategy for each bucket, the longest first: adds HotSPa's rule with them.
        rules: attention mask and packing of the sequences.
        side_by_side: whether the space has several degrees of context parallelism at the same time; None: unless
            sequences are padded.
        workers: number of processes, of which at most two are used; None: the number of CPUs.
        unlike_replicas: whether the space has heterogeneous replicas.

    Raises:
        InfeasibleError: no strategy holds the longest sequence.
        InvalidInputError: the problem, the workload or a number is outside of what this search supports.
    """
    started = time.perf_counter(), time.process_time()
    check_search(max_strategies, gap, time_limit_s, backend)
    check_step(problem, workload, alignment)
    check_rules(problem, rules, baselines, bool(side_by_side), unlike_replicas)
    load = Load(workload.lengths, workload.counts, alignment, rules)
    tables = StrategyTables.of(quantum_problem(problem, alignment), load)
    with_side_by_side = not rules.padded if side_by_side is None else side_by_side
    singles = SingleStrategySearch(tables, gap, backend, started[0] + time_limit_s)
    search = _Search(problem, singles, max_strategies, (with_side_by_side, unlike_replicas))
    interrupted = False
    try:
        search.run(started[0], time_limit_s, workers)
    except KeyboardInterrupt:
        interrupted = True
        # A second interruption returns the step without the missing bounds.
        with suppress(KeyboardInterrupt):
            search.close()
    finally:
        search.end()
    compared: tuple[BaselineStep, ...] = ()
    if baselines and not interrupted:
        compared = baseline_steps(
            tables, search.sets.switches, PARAMETERS.baselines_share * time_limit_s, backend, hotspa
        )
    return _result(search, compared, started, interrupted)


class _Search:
    """State of one solve: the searches of all parts of the space, the incumbent, and the worker process."""

    def __init__(
        self, problem: Problem, statics: SingleStrategySearch, max_strategies: int, parts: tuple[bool, bool]
    ) -> None:
        with_side_by_side, with_heterogeneous = parts
        self.problem, self.singles, self.max_strategies = problem, statics, max_strategies
        self.pool, self.gap = statics.pool, statics.gap
        self.teams: BestTeams | None = None
        self.team_search = TeamSearch(statics.pool, statics.gap) if with_side_by_side else None
        self.heterogeneous_search = (
            HeterogeneousSearch(statics.pool, statics.gap, statics.backend) if with_heterogeneous else None
        )
        self.heterogeneous: BestHeterogeneousStep | None = None
        self.turn_search: TurnSearch | None = None
        self.single_process: SingleStrategyProcess | None = None
        # Seconds spent here on proofs and on packings of single strategies beside the second process.
        self.proved_s, self.packed_s = 0.0, 0.0

    @property
    def sets(self) -> TurnSearch:
        """The search over sets of strategies, which holds the incumbent.

        Raises:
            KeyboardInterrupt: the search was interrupted before any step was found.
        """
        if self.turn_search is None:
            raise KeyboardInterrupt
        return self.turn_search

    @property
    def bound_ns(self) -> float:
        """Lower bound of all steps of the space in ns; 0 until every part of it has a bound."""
        parts = ((self.team_search, self.teams), (self.heterogeneous_search, self.heterogeneous))
        if not self.sets.is_bounded or any(search and result is None for search, result in parts):
            return 0.0
        other_bounds_ns = [result.bound_ns for result in (self.teams, self.heterogeneous) if result is not None]
        return float(min([self.singles.bound_ns, self.sets.bound_ns, *other_bounds_ns]))

    def run(self, begin: float, time_limit_s: float, workers: int | None) -> None:
        """Search all parts of the space until ``time_limit_s`` after ``begin``.

        The time is divided among the parts; a second process proves single strategies if ``workers`` allows it.
        """
        singles, deadline = self.singles, begin + time_limit_s
        self._take(singles.best)
        below_ns = float("inf") if singles.best is None else singles.best.time_ns
        in_turn = self.max_strategies > 1
        if in_turn and can_help(workers) and time_limit_s >= PARAMETERS.process_limit_s and singles.open_pipelines:
            self.single_process = SingleStrategyProcess(singles, below_ns, deadline)
            # The shorter the incumbent, the more the other searches can prune.
            below_ns = self._run_singles(below_ns, PARAMETERS.first_singles_s)
            self._poll()
        if self.team_search is not None:
            teams_end = time.perf_counter() + PARAMETERS.teams_share * time_limit_s
            self.teams = self.team_search.run(below_ns, teams_end)
            self._take(self.teams.step)
            if self.teams.step is not None:
                below_ns = min(below_ns, self.teams.step.time_ns)
        if self.heterogeneous_search is not None:
            self._poll()
            below_ns = self._run_heterogeneous(
                below_ns, time.perf_counter() + PARAMETERS.heterogeneous_share * time_limit_s
            )
        if self.single_process is None:
            self._run_singles(
                below_ns, (PARAMETERS.singles_share if in_turn else PARAMETERS.singles_alone_share) * time_limit_s
            )
        # While single strategies are open, sets cannot close the gap, but better packings can.
        singles_open = singles.bound_ns < self.sets.target_ns
        if self.single_process is not None and not singles_open:
            self.single_process.close()
        pack_end = time.perf_counter() + PARAMETERS.pack_share * time_limit_s
        while singles_open and self._single_is_best and time.perf_counter() < pack_end:
            if not (self._poll() and self._pack(deadline)):
                break
        sets_end = deadline - (
            PARAMETERS.last_share * time_limit_s if singles_open and self.single_process is None else 0.0
        )
        self.sets.run(self.max_strategies, sets_end, self._poll, self._pause_bound())
        while self._poll(few=True) and self.bound_ns < self.sets.target_ns:
            if not self._work_beside_proof(deadline):
                time.sleep(PARAMETERS.wait_s)
            self.sets.tighten(self._poll, self._pause_bound())
        if self.single_process is not None:
            self.sets.tighten(self._poll)
        self._run_heterogeneous(np.inf, deadline)
        self._resume_teams(deadline)
        if time.perf_counter() < deadline and (self.single_process is None or self.single_process.process is None):
            self._take(singles.run(float("inf"), deadline))
        self._resume_teams(deadline)

    def end(self) -> None:
        """End the worker process."""
        if self.single_process is not None:
            self.single_process.close()

    @property
    def worker_cpu_s(self) -> float:
        """CPU seconds of the worker process."""
        return 0.0 if self.single_process is None else self.single_process.cpu_s

    def _resume_teams(self, end: float) -> bool:
        """Resume the search of degrees side by side if it has the lowest bound; return whether it made a visit."""
        search, teams = self.team_search, self.teams
        is_lowest = teams is not None and self.bound_ns == teams.bound_ns < self.sets.target_ns
        if search is None or not is_lowest or time.perf_counter() > end:
            return False
        visits_before = search.num_visits
        self.teams = search.run(self.sets.best.time_ns, end, PARAMETERS.later_visits * VISITS)
        self._take(self.teams.step)
        return search.num_visits > visits_before

    def _run_heterogeneous(self, below_ns: float, end: float) -> float:
        """Search heterogeneous replicas until ``end`` and return the time to beat in ns."""
        if self.heterogeneous_search is not None:
            incumbent_ns = below_ns if self.turn_search is None else min(below_ns, self.turn_search.best.time_ns)
            static = self.singles.best
            self.heterogeneous = self.heterogeneous_search.run(
                incumbent_ns, end, None if static is None else static.home
            )
            self._take(self.heterogeneous.step)
            below_ns = (
                incumbent_ns
                if self.heterogeneous.step is None
                else min(incumbent_ns, self.heterogeneous.step.time_ns)
            )
        return below_ns

    def _resume_heterogeneous(self, end: float) -> bool:
        """Resume the search of heterogeneous replicas if it has the lowest bound; return whether it ran."""
        search, unlike = self.heterogeneous_search, self.heterogeneous
        is_lowest = unlike is not None and self.bound_ns == unlike.bound_ns < self.sets.target_ns
        if search is None or search.done or not is_lowest or time.perf_counter() > end:
            return False
        self._run_heterogeneous(np.inf, end)
        return True

    def _run_singles(self, below_ns: float, seconds: float) -> float:
        """Search single strategies below ``below_ns`` for some seconds and return the time to beat in ns."""
        step = self.singles.run(below_ns, time.perf_counter() + seconds)
        self._take(step)
        return min(below_ns, step.time_ns)

    def _pause_bound(self) -> Callable[[], float]:
        """Return a function that gives the bound in ns at which sets may pause.

        After a time slice that is slightly above the bound of the other searches that are still running.
        """
        end = time.perf_counter() + PARAMETERS.pause_s

        def pause_ns() -> float:
            if time.perf_counter() < end:
                return np.inf
            proving = self.single_process is not None and self.single_process.process is not None
            others_ns = [float(self.singles.bound_ns)] if proving else []
            others_ns += [self.heterogeneous.bound_ns] if self.heterogeneous is not None else []
            return min(others_ns, default=np.inf) * PARAMETERS.pause_ratio

        return pause_ns

    def _work_beside_proof(self, deadline: float) -> bool:
        """Use this process while the second one proves single strategies; return whether there was work.

        It resumes the search with the lowest bound, packs strategies that may be shortest, then alternates between
        proofs and better packings of the best strategy.
        """
        statics = self.singles
        end = min(deadline, time.perf_counter() + PARAMETERS.resume_s)
        if self._resume_heterogeneous(end) or self._resume_teams(end) or self._pack(deadline):
            return True
        began = time.perf_counter()
        if self.proved_s <= self.packed_s and statics.prove(deadline):
            self.proved_s += time.perf_counter() - began
            return True
        if self._polish(deadline):
            self.packed_s += time.perf_counter() - began
            return True
        return statics.prove(deadline)

    @property
    def _single_is_best(self) -> bool:
        """True if the incumbent is a step of one strategy."""
        static = self.singles.best
        return static is not None and static.time_ns <= self.sets.best.time_ns

    def _pack(self, deadline: float) -> bool:
        """Pack a strategy that may beat the incumbent; return whether there was any."""
        tried = self.singles.pack(deadline, self.sets.best.time_ns)
        self._take(self.singles.best)
        return tried

    def _polish(self, deadline: float) -> bool:
        """Improve the packing of the best strategy if its step is the incumbent; return whether it was tried."""
        tried = self._single_is_best and self.singles.polish(deadline)
        self._take(self.singles.best)
        return tried

    def _poll(self, *, few: bool = False) -> bool:
        """Take over what the second process found; return whether it will report again.

        Args:
            few: ask for few slices only, as this process polls often.
        """
        if self.single_process is None:
            return False
        will_report = self.single_process.poll(self.sets.best.time_ns, few=few)
        self._take(self.singles.best)
        return will_report

    def close(self) -> None:
        """Complete the bounds cheaply after an interruption.

        Raises:
            KeyboardInterrupt: no step was found.
        """
        self._take(self.singles.best)
        if self.team_search is not None and self.teams is None:
            # Returns what was found before the interruption.
            self.teams = self.team_search.run(0.0, 0.0)
            self._take(self.teams.step)
        if self.heterogeneous_search is not None:
            self.heterogeneous = self.heterogeneous_search.run(0.0, 0.0)
            self._take(self.heterogeneous.step)
        if not self.sets.is_bounded:
            self.sets.run(self.max_strategies, 0.0)

    def _take(self, step: AnyStep | None) -> None:
        """Keep a step if it is shorter than the incumbent."""
        if step is not None and self.turn_search is None:
            self.turn_search = TurnSearch(self.pool, step, self.gap)
        elif step is not None:
            self.sets.take(step)


def _result(
    search: _Search, baselines: tuple[BaselineStep, ...], started: tuple[float, float], interrupted: bool
) -> LengthsResult:
    """Build the result; ``started`` holds wall clock and CPU seconds at the beginning."""
    pool, best, static = search.pool, search.sets.best, search.singles.best
    if static is None:
        raise KeyboardInterrupt
    bound_ns = min(search.bound_ns, best.time_ns)
    names = [member.candidate.name for member in pool.members]
    home, groups = home_of(best), groups_of(pool, best)
    switches = search.sets.switches.of_step(home, best.order) if isinstance(best, Step) else []
    return LengthsResult(
        problem=search.problem,
        tolerance=search.gap,
        status="optimal" if best.time_ns - bound_ns <= search.gap * best.time_ns else "feasible",
        step_time_s=best.time_ns / NS_PER_S,
        lower_bound_s=bound_ns / NS_PER_S,
        home=names[home],
        groups=groups,
        switches=tuple(switches),
        finish_s=pool.finish_ns(home) / NS_PER_S,
        static=StaticStep(
            names[static.home],
            pool.members[static.home].candidate.plan,
            static.time_ns / NS_PER_S,
            search.singles.bound_ns / NS_PER_S,
        ),
        num_sequences=int(pool.load.counts.sum()),
        num_tokens=int(pool.load.counts @ pool.load.lengths),
        alignment=pool.load.token_quantum,
        max_strategies=search.max_strategies,
        num_candidates=len(pool.members),
        num_sets=search.sets.num_sets,
        cpu_time_s=time.process_time() - started[1] + search.worker_cpu_s,
        wall_time_s=time.perf_counter() - started[0],
        baselines=baselines,
        rules=pool.load.rules,
        side_by_side=None if search.teams is None else search.teams.record(),
        interrupted=interrupted,
        unlike_replicas=None if search.heterogeneous is None else search.heterogeneous.record(),
    )


def home_of(step: AnyStep) -> int:
    """Return the member of the pool that holds the optimizer's states."""
    return step.order[-1] if isinstance(step, TeamStep) else step.home


def groups_of(pool: StrategyTables, step: AnyStep) -> tuple[LengthGroup, ...]:
    """Return the groups of a step in the order in which they run."""
    if isinstance(step, TeamStep):
        return team_groups(step)
    if isinstance(step, HeterogeneousStep):
        return heterogeneous_groups(step)
    return tuple(_group(pool, step, member) for member in step.order)


def _group(pool: StrategyTables, step: Step, member: int) -> LengthGroup:
    """Return the group of one strategy of a step in turn."""
    strategy = pool.members[member]
    quanta = strategy.own_memory_quanta if len(step.order) == 1 else strategy.shared_memory_quanta
    return pool.group(member, step.packed[member], quanta, pool.reduce_ns(member) / NS_PER_S)
