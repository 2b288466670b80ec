"""The best step of sequences of many lengths, with a proved bound.

 1. The best *static* step: every strategy alone, with its own memory (``statics``); first those of one stage.
 2. *Side by side*: degrees of context parallelism on different GPUs at the same time (``team_steps``).
 3. *Unlike* replicas, where they are asked for (``unlike_search``); *static* pipelines that may be shorter than
    all of these.
 4. *Several* in turn: sets of strategies that switches and reductions do not already make longer than all of these
    (``screening``), their switches priced by the planner of switches, and ``groups`` on what is left.
 5. Where time is left, what makes the static step's own proof complete; with two CPUs another process does that
    beside all others (``static_process``), and 3 comes before 2, for a moment; where no single strategy is in
    question, it looks at some of the sets (``set_process``).

``groups`` works on tables that are never above the exact times (``tables``), so its bound holds for the exact
times. Every answer is packed, and only its exact time counts (``replicas``); the bound of the step is the least of
all of these.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np

from milpplan.groups.workload.workload import Workload
from milpplan.lengths.baselines import Degrees, baseline_steps
from milpplan.lengths.candidates import grain_problem
from milpplan.lengths.cost_tables import Load
from milpplan.lengths.heterogeneous.search import BestHeterogeneousStep, HeterogeneousSearch
from milpplan.lengths.records import PACKED, BaselineStep, LengthsResult, SequenceRules, StaticStep
from milpplan.lengths.sequences import check_rules, check_search, check_step
from milpplan.lengths.side_by_side.team_steps import VISITS, BestTeams, TeamSearch
from milpplan.lengths.single.single_strategy_process import SingleStrategyProcess, can_help
from milpplan.lengths.single.single_strategy_search import SingleStrategySearch
from milpplan.lengths.step_groups import groups_of, home_of
from milpplan.lengths.steps import AnyStep, Step
from milpplan.lengths.strategy_tables import StrategyTables
from milpplan.lengths.turns.set_process import SetProcess
from milpplan.lengths.turns.turn_search import TurnSearch
from milpplan.problem.problem import Problem
from milpplan.units import NS_PER_S

# Shares of the time: for static steps, where others follow, where none do, and in the end; for degrees side by
# side; of the baselines' programs, once more.
_STATIC_SHARE, _ALONE_SHARE, _LAST_SHARE = 0.3, 0.65, 0.25
_TEAMS_SHARE = 0.1
# Of unlike replicas, where they are asked for.
_UNLIKE_SHARE = 0.5
# How many times as often teams are looked at later, if nothing has a lower bound, and seconds at a time.
_TIMES_VISITS, _TEAMS_S = 4, 1.0
# For packing pipelines before sets, beside another process that proves: what is found is what sets have to beat.
_PACK_SHARE = 0.2
_BASELINES_SHARE = 1 / 3
# Seconds of static pipelines here while another process works on them, too; time limits from which there is one;
# and what this process waits at once where it has nothing else to do.
_FIRST_S, _WORTH_S, _WAIT_S = 2.0, 5.0, 0.05
# Seconds of sets whose bound is further than this above that of static steps, and then of these in turn.
_TURN_S, _FURTHER = 0.5, 1.0005
# The other process leaves single strategies where sets are behind these by the first part, and they did not rise
# by the second in so many seconds.
_BEHIND, _ROSE, _STILL_S = 0.005, 0.001, 5.0


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
    """The best step for the sequences of a workload (lengths in multiples of ``alignment``).

    ``problem`` gives model, cluster, formats and space; its sequence length and batch mean nothing here. At most
    ``max_strategies`` take turns; ``time_limit_s`` is soft. ``rules``: how sequences are attended to and put
    together. With ``baselines`` the result has what others' rules make of the same (in a third of the time more);
    with ``hotspa``, (dp, tp, pp) of a strategy for every bucket, the longest first, HotSPa's with these, too.
    ``side_by_side``: whether context parallelism of several degrees on different GPUs at once is in the space
    (``teams``); None: unless sequences are padded. ``unlike_replicas``: whether replicas of different strategies
    at once are (``unlike``). ``workers``: processes, at most two are used; None: as many as there are CPUs.

    Raises:
        InfeasibleError: no strategy holds the longest sequence.
        InvalidInputError: the problem, the workload or the numbers make no sense here.
    """
    started = time.perf_counter(), time.process_time()
    check_search(max_strategies, gap, time_limit_s, backend)
    check_step(problem, workload, alignment)
    check_rules(problem, rules, baselines, bool(side_by_side), unlike_replicas)
    load = Load(workload.lengths, workload.counts, alignment, rules)
    pool = StrategyTables.of(grain_problem(problem, alignment), load)
    beside = not rules.padded if side_by_side is None else side_by_side
    statics = SingleStrategySearch(pool, gap, backend, started[0] + time_limit_s)
    search = _Search(problem, statics, max_strategies, (beside, unlike_replicas))
    interrupted = False
    try:
        search.run(started[0], time_limit_s, workers)
    except KeyboardInterrupt:
        interrupted = True
        # Whoever interrupts this, too, gets the step without what is not proved yet.
        with suppress(KeyboardInterrupt):
            search.close()
    finally:
        search.end()
    compared: tuple[BaselineStep, ...] = ()
    if baselines and not interrupted:
        compared = baseline_steps(pool, search.sets.switches, _BASELINES_SHARE * time_limit_s, backend, hotspa)
    return _result(search, compared, started, interrupted)


class _Search:
    """All that is known of one step, and how more comes to be known. ``ways`` beside strategies in turn: degrees
    side by side, unlike replicas."""

    def __init__(
        self, problem: Problem, statics: SingleStrategySearch, max_strategies: int, ways: tuple[bool, bool]
    ) -> None:
        beside, unlike = ways
        self.problem, self.statics, self.max_strategies = problem, statics, max_strategies
        self.pool, self.gap = statics.pool, statics.gap
        self.teams: BestTeams | None = None
        self.team_search = TeamSearch(statics.pool, statics.gap) if beside else None
        self.unlike_search = HeterogeneousSearch(statics.pool, statics.gap, statics.backend) if unlike else None
        self.unlike: BestHeterogeneousStep | None = None
        self.several: TurnSearch | None = None
        self.other: SingleStrategyProcess | None = None
        self.helper: SetProcess | None = None
        # Whether there may be another process.
        self.two = False
        # What was proved of single strategies when that rose, and when.
        self.rose = 0.0, 0.0
        # Seconds that static steps were proved and packed here beside it.
        self.proved_s, self.packed_s = 0.0, 0.0

    @property
    def sets(self) -> TurnSearch:
        """The sets, and the best step of all; there is one.

        Raises:
            KeyboardInterrupt: there is none, because the search was interrupted.
        """
        if self.several is None:
            raise KeyboardInterrupt
        return self.several

    @property
    def bound_ns(self) -> float:
        """No step of the space takes less; 0 as long as nothing is known of some of them."""
        ways = ((self.team_search, self.teams), (self.unlike_search, self.unlike))
        if not self.sets.is_bounded or any(search and known is None for search, known in ways):
            return 0.0
        others = [one.bound_ns for one in (self.teams, self.unlike) if one is not None]
        return float(min([self.statics.bound_ns, self.sets.bound_ns, *others]))

    def run(self, begin: float, time_limit_s: float, workers: int | None) -> None:
        """Whatever may be shorter, for so long from ``begin``; the time is divided among the ways, and another
        process looks after pipelines where there may be one."""
        statics, deadline = self.statics, begin + time_limit_s
        self._take(statics.best)
        below_ns = float("inf") if statics.best is None else statics.best.time_ns
        several = self.max_strategies > 1
        self.two = several and can_help(workers) and time_limit_s >= _WORTH_S
        if self.two and statics.open_pipelines:
            self.other = SingleStrategyProcess(statics, below_ns, deadline)
            # The sooner there is something to beat, the less of the others is looked at.
            below_ns = self._static(below_ns, _FIRST_S)
            self._hear()
        if self.team_search is not None:
            teams_end = time.perf_counter() + _TEAMS_SHARE * time_limit_s
            self.teams = self.team_search.run(below_ns, teams_end)
            self._take(self.teams.step)
            if self.teams.step is not None:
                below_ns = min(below_ns, self.teams.step.time_ns)
        if self.unlike_search is not None:
            self._hear()
            below_ns = self._unlike(below_ns, time.perf_counter() + _UNLIKE_SHARE * time_limit_s)
        if self.other is None:
            self._static(below_ns, (_STATIC_SHARE if several else _ALONE_SHARE) * time_limit_s)
        # Where static steps are open, sets cannot close the gap: packing is what may.
        open_ = statics.bound_ns < self.sets.target_ns
        if self.other is not None and not open_:
            self.other.close()
        pack_end = time.perf_counter() + _PACK_SHARE * time_limit_s
        while open_ and self._static_is_best and time.perf_counter() < pack_end:
            if not (self._hear() and self._pack(deadline)):
                break
        sets_end = deadline - (_LAST_SHARE * time_limit_s if open_ and self.other is None else 0.0)
        self.sets.run(self.max_strategies, sets_end, self._hear, self._in_turn(), self._helped)
        while self._hear(few=True) and self.bound_ns < self.sets.target_ns:
            if not self._beside_proof(deadline):
                time.sleep(_WAIT_S)
            self.sets.tighten(self._hear, self._in_turn(), self._helped)
        if self.other is not None:
            self.sets.tighten(self._hear, helped=self._helped)
        self._unlike(np.inf, deadline)
        self._teams_again(deadline)
        if time.perf_counter() < deadline and (self.other is None or self.other.process is None):
            self._take(statics.run(float("inf"), deadline))
        self._teams_again(deadline)

    def _helped(self) -> SetProcess | None:
        """Another process for sets, where none looks after single strategies, or need not: these are proved, or
        more than sets are, and little comes to be known of them."""
        if self.helper is None and self.two and self.sets.nodes:
            static_ns, now = self.statics.bound_ns, time.perf_counter()
            if static_ns > self.rose[0] * (1.0 + _ROSE):
                self.rose = static_ns, now
            behind = self.sets.bound_ns < static_ns * (1.0 - _BEHIND) and now > self.rose[1] + _STILL_S
            if self.other is not None and (static_ns >= self.sets.target_ns or (behind and self._packed)):
                self.other.close()
            if self.other is None or self.other.process is None:
                self.helper = SetProcess.of(self.sets)
                self.two = self.helper is not None
        return self.helper

    def end(self) -> None:
        """End the other processes."""
        for one in (self.other, self.helper):
            if one is not None:
                one.close()

    @property
    def helped_s(self) -> float:
        """CPU seconds of the other processes."""
        return sum(one.cpu_s for one in (self.other, self.helper) if one is not None)

    def _teams_again(self, end: float) -> bool:
        """Degrees side by side, if no other steps have a lower bound, until the end; whether anything was done."""
        search, teams = self.team_search, self.teams
        least = teams is not None and self.bound_ns == teams.bound_ns < self.sets.target_ns
        if search is None or not least or time.perf_counter() > end:
            return False
        before = search.num_visits
        self.teams = search.run(self.sets.best.time_ns, end, _TIMES_VISITS * VISITS)
        self._take(self.teams.step)
        return search.num_visits > before

    def _unlike(self, below_ns: float, end: float) -> float:
        """Unlike replicas, as long as there may be a step shorter than the best by more than the gap, until the
        end; what is to beat then, ns."""
        if self.unlike_search is not None:
            known_ns = below_ns if self.several is None else min(below_ns, self.several.best.time_ns)
            static = self.statics.best
            self.unlike = self.unlike_search.run(known_ns, end, None if static is None else static.home)
            self._take(self.unlike.step)
            below_ns = known_ns if self.unlike.step is None else min(known_ns, self.unlike.step.time_ns)
        return below_ns

    def _unlike_again(self, end: float) -> bool:
        """The same, if no other steps have a lower bound; whether anything was done."""
        search, unlike = self.unlike_search, self.unlike
        least = unlike is not None and self.bound_ns == unlike.bound_ns < self.sets.target_ns
        if search is None or search.done or not least or time.perf_counter() > end:
            return False
        self._unlike(np.inf, end)
        return True

    def _static(self, below_ns: float, seconds: float) -> float:
        """Steps of one strategy that may be shorter than ``below_ns``; what is to beat then, ns."""
        step = self.statics.run(below_ns, time.perf_counter() + seconds)
        self._take(step)
        return min(below_ns, step.time_ns)

    def _in_turn(self) -> Callable[[], float]:
        """What is enough of a bound for sets, ns: after a while no more than that of static steps, as long as
        these are proved."""
        end = time.perf_counter() + _TURN_S

        def enough_ns() -> float:
            if time.perf_counter() < end:
                return np.inf
            proving = self.other is not None and self.other.process is not None
            others_ns = [float(self.statics.bound_ns)] if proving else []
            others_ns += [self.unlike.bound_ns] if self.unlike is not None else []
            return min(others_ns, default=np.inf) * _FURTHER

        return enough_ns

    def _beside_proof(self, deadline: float) -> bool:
        """What this process does while the other one proves static steps: looks at degrees side by side where
        these are the least, packs what may be shortest, then proves some of it, too, and packs the best with more
        care in turn; whether there was any."""
        statics = self.statics
        end = min(deadline, time.perf_counter() + _TEAMS_S)
        if self._unlike_again(end) or self._teams_again(end) or self._pack(deadline):
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
    def _packed(self) -> bool:
        """Whether the best single strategy is packed with most care, or need not be."""
        static = self.statics.best
        return static is not None and (not self._static_is_best or self.statics.incumbents.is_finished(static.home))

    @property
    def _static_is_best(self) -> bool:
        static = self.statics.best
        return static is not None and static.time_ns <= self.sets.best.time_ns

    def _pack(self, deadline: float) -> bool:
        """Pack a strategy that may be shorter than the best step; whether there was any."""
        tried = self.statics.pack(deadline, self.sets.best.time_ns)
        self._take(self.statics.best)
        return tried

    def _polish(self, deadline: float) -> bool:
        """Pack the best strategy better, if its step is the best of all; whether that was tried."""
        tried = self._static_is_best and self.statics.polish(deadline)
        self._take(self.statics.best)
        return tried

    def _hear(self, *, few: bool = False) -> bool:
        """What the other process has found, if there is one; whether it will tell more. ``few``: it is heard so
        often that few slices are asked for."""
        if self.other is None:
            return False
        more = self.other.poll(self.sets.best.time_ns, few=few)
        self._take(self.statics.best)
        return more

    def close(self) -> None:
        """Interrupted: bounds that are cheap of whatever has none.

        Raises:
            KeyboardInterrupt: there is no step.
        """
        self._take(self.statics.best)
        if self.team_search is not None and self.teams is None:
            # What was found until then.
            self.teams = self.team_search.run(0.0, 0.0)
            self._take(self.teams.step)
        if self.unlike_search is not None:
            self.unlike = self.unlike_search.run(0.0, 0.0)
            self._take(self.unlike.step)
        if not self.sets.is_bounded:
            self.sets.run(self.max_strategies, 0.0)

    def _take(self, step: AnyStep | None) -> None:
        """A step that was found, if it is the shortest."""
        if step is not None and self.several is None:
            self.several = TurnSearch(self.pool, step, self.gap, self.statics.backend)
        elif step is not None:
            self.sets.take(step)


def _result(
    search: _Search, baselines: tuple[BaselineStep, ...], started: tuple[float, float], interrupted: bool
) -> LengthsResult:
    """Everything that is known; ``started``: wall clock and CPU time at the beginning."""
    pool, best, static = search.pool, search.sets.best, search.statics.best
    if static is None:
        raise KeyboardInterrupt
    bound_ns = min(search.bound_ns, best.time_ns)
    names = [one.candidate.name for one in pool.members]
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
            search.statics.bound_ns / NS_PER_S,
        ),
        num_sequences=int(pool.load.counts.sum()),
        num_tokens=int(pool.load.counts @ pool.load.lengths),
        alignment=pool.load.token_quantum,
        max_strategies=search.max_strategies,
        num_candidates=len(pool.members),
        num_sets=search.sets.num_sets,
        cpu_time_s=time.process_time() - started[1] + search.helped_s,
        wall_time_s=time.perf_counter() - started[0],
        baselines=baselines,
        rules=pool.load.rules,
        side_by_side=None if search.teams is None else search.teams.record(),
        interrupted=interrupted,
        unlike_replicas=None if search.unlike is None else search.unlike.record(),
    )
