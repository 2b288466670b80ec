"""The shortest training step for sequences of many lengths, with a proved lower bound.

The space has four parts, each a search with a bound of its own:

 1. *Single strategies*: every strategy by itself, with the whole memory (``single``).
 2. *Degrees side by side*: several degrees of context parallelism on different GPUs at the same time
    (``side_by_side``).
 3. *Heterogeneous replicas*, if they were asked for (``heterogeneous``).
 4. *Strategies in turn*: sets of strategies whose switches and reductions leave room for a shorter step
    (``turns``). Their switches are priced by the planner of switches.

Every part gets a share of the time, then always the part with the lowest bound goes on, because the minimum over
all parts is the bound of the step. The remaining time completes the proof for single strategies.

``tabled`` works on tables that never exceed the exact times (``cost_tables``), so its bounds hold for the exact
times. Every answer is packed and counts with its exact time (``cost_tables``).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from milpplan.lengths.baselines import Degrees, baseline_steps
from milpplan.lengths.candidates import quantum_problem
from milpplan.lengths.cost_tables import Load
from milpplan.lengths.deadline import PASSED, Deadline
from milpplan.lengths.heterogeneous.count_program import HeterogeneousStep, heterogeneous_groups
from milpplan.lengths.heterogeneous.search import BestHeterogeneousStep, HeterogeneousSearch
from milpplan.lengths.records import PACKED, BaselineStep, LengthGroup, LengthsResult, SequenceRules, StaticStep
from milpplan.lengths.search_parameters import PARAMETERS
from milpplan.lengths.sequences import check_rules, check_search, check_step
from milpplan.lengths.side_by_side.team_search import BestTeams, TeamSearch, team_groups
from milpplan.lengths.side_by_side.teams import TeamStep
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
        unlike_replicas: whether the space has heterogeneous replicas.

    Raises:
        InfeasibleError: no strategy holds the longest sequence.
        InvalidInputError: the problem, the workload or a number is outside of what this search supports.
    """
    started = time.perf_counter(), time.process_time()
    deadline = Deadline.after(time_limit_s)
    check_search(max_strategies, gap, time_limit_s, backend)
    check_step(problem, workload, alignment)
    check_rules(problem, rules, baselines, bool(side_by_side), unlike_replicas)
    load = Load(workload.lengths, workload.counts, alignment, rules)
    tables = StrategyTables.of(quantum_problem(problem, alignment), load)
    with_side_by_side = not rules.padded if side_by_side is None else side_by_side
    singles = SingleStrategySearch(tables, gap, deadline)
    search = _Search(problem, singles, backend, max_strategies, (with_side_by_side, unlike_replicas))
    interrupted = False
    try:
        search.run(deadline)
    except KeyboardInterrupt:
        interrupted = True
        # A second interruption returns the step without the missing bounds.
        with suppress(KeyboardInterrupt):
            search.close()
    compared: tuple[BaselineStep, ...] = ()
    if baselines and not interrupted:
        compared = baseline_steps(tables, search.sets.switches, time_limit_s / 3, backend, hotspa)
    return _result(search, compared, started, interrupted)


class _Search:
    """State of one solve: the searches of all parts of the space, and the incumbent."""

    def __init__(
        self,
        problem: Problem,
        statics: SingleStrategySearch,
        backend: str,
        max_strategies: int,
        parts: tuple[bool, bool],
    ) -> None:
        with_side_by_side, with_heterogeneous = parts
        self.problem, self.singles, self.max_strategies = problem, statics, max_strategies
        self.pool, self.gap = statics.pool, statics.gap
        self.teams: BestTeams | None = None
        self.team_search = TeamSearch(statics.pool, statics.gap) if with_side_by_side else None
        self.heterogeneous_search = (
            HeterogeneousSearch(statics.pool, statics.gap, backend) if with_heterogeneous else None
        )
        self.heterogeneous: BestHeterogeneousStep | None = None
        self.turn_search: TurnSearch | None = None

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

    @property
    def is_open(self) -> bool:
        """True while the gap is larger than asked for."""
        return self.bound_ns < self.sets.target_ns

    @property
    def below_ns(self) -> float:
        """Time of the best step, ns; infinite without one."""
        return np.inf if self.turn_search is None else float(self.turn_search.best.time_ns)

    def run(self, deadline: Deadline) -> None:
        """Search all parts of the space until the ``deadline``."""
        self._take(self.singles.best)
        if self.team_search is not None:
            self._run_teams(deadline.share(PARAMETERS.teams_share), PARAMETERS.team_visits)
        if self.heterogeneous_search is not None:
            self._run_heterogeneous(deadline.share(PARAMETERS.heterogeneous_share))
        share = PARAMETERS.singles_share if self.max_strategies > 1 else PARAMETERS.main_share
        self._run_singles(deadline.share(share))
        # Bounds of sets above that of single strategies would not raise the bound of all.
        self.sets.run(self.max_strategies, deadline.share(PARAMETERS.main_share), self.singles.bound_ns)
        while self.is_open and not deadline.passed and self._resume_lowest(deadline.within(PARAMETERS.resume_s)):
            pass
        # Where bounds rise no more, open sets may still hold a shorter step.
        self.sets.tighten(deadline)
        if not deadline.passed:
            self._take(self.singles.run(np.inf, deadline))

    def _resume_lowest(self, deadline: Deadline) -> bool:
        """Resume the part of the space with the lowest bound; return whether its bound, or the step, has
        improved."""
        before, bound_ns = (self.bound_ns, self.below_ns), self.bound_ns
        if bound_ns == self.singles.bound_ns:
            self._run_singles(deadline)
        elif bound_ns == self.sets.bound_ns:
            self.sets.tighten(deadline)
        elif self.teams is not None and bound_ns == self.teams.bound_ns:
            self._run_teams(deadline, 4 * PARAMETERS.team_visits)
        else:
            self._run_heterogeneous(deadline)
        return before != (self.bound_ns, self.below_ns) or deadline.passed

    def _run_singles(self, deadline: Deadline) -> None:
        """Search single strategies."""
        self._take(self.singles.run(self.below_ns, deadline))

    def _run_teams(self, deadline: Deadline, visits: int) -> None:
        """Search degrees side by side, with so many visits of every family."""
        assert self.team_search is not None
        self.teams = self.team_search.run(self.below_ns, deadline, visits)
        self._take(self.teams.step)

    def _run_heterogeneous(self, deadline: Deadline) -> None:
        """Search heterogeneous replicas; those of the best single strategy come first."""
        assert self.heterogeneous_search is not None
        favourite = None if self.singles.best is None else self.singles.best.home
        self.heterogeneous = self.heterogeneous_search.run(self.below_ns, deadline, favourite)
        self._take(self.heterogeneous.step)

    def close(self) -> None:
        """Complete the bounds cheaply after an interruption.

        Raises:
            KeyboardInterrupt: no step was found.
        """
        self._take(self.singles.best)
        if self.team_search is not None and self.teams is None:
            # Returns what was found before the interruption.
            self.teams = self.team_search.run(0.0, PASSED)
            self._take(self.teams.step)
        if self.heterogeneous_search is not None:
            self.heterogeneous = self.heterogeneous_search.run(0.0, PASSED)
            self._take(self.heterogeneous.step)
        if not self.sets.is_bounded:
            self.sets.run(self.max_strategies, PASSED)

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
    home = best.order[-1] if isinstance(best, TeamStep) else best.home
    groups = groups_of(pool, best)
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
        cpu_time_s=time.process_time() - started[1],
        wall_time_s=time.perf_counter() - started[0],
        baselines=baselines,
        rules=pool.load.rules,
        side_by_side=None if search.teams is None else search.teams.record(),
        interrupted=interrupted,
        unlike_replicas=None if search.heterogeneous is None else search.heterogeneous.record(),
    )


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
