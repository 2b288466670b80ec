"""``solve_robust``: find the plan with the least worst-case regret over scenarios, and prove both of its bounds.

A scenario s is the problem with other cost constants. With step_s(x) the step of plan x in s, and best_s the
shortest step of all plans there,

    regret(x) = max_s step_s(x) / best_s - 1.

Every scenario is solved first: U_s is the step of the best plan found, L_s a proved lower bound. A plan that all
these proofs call optimal is the answer, since no regret is below 0. Otherwise one search minimises
max_s step_s(x) / U_s over the declared space (``simulation.scenario_costs``). With its proved lower bound V and
the plan x found:

    no plan's regret is below     rho = V - 1               because best_s <= U_s
    the regret of x is at most    r = max_s step_s(x) / L_s - 1      because best_s >= L_s

Steps stand for objectives where the batch or the number of accelerators may vary.

Source: regret over interval data, Kouvelis and Yu, Robust Discrete Optimization and Its Applications, 1997, ch. 1.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from milpplan.errors import InvalidInputError
from milpplan.optimize.context import LEAST_S, Deadline, SolveContext, objective_weights, printed_unit, undisturbed
from milpplan.optimize.layout.stage_options import fitting_step_ns
from milpplan.optimize.milp.backends import backend, witnesses
from milpplan.optimize.milp.program import Program
from milpplan.optimize.records import (
    ROBUST_GAP,
    PlanResult,
    Regret,
    ScenarioRegret,
    SolveOptions,
    Status,
    solver_work,
    untested_terms,
)
from milpplan.optimize.search.best_first import Search
from milpplan.optimize.search.branch_phase import num_workers
from milpplan.optimize.search.simplest import searched_gap, simplest, simplicity
from milpplan.optimize.solve import NO_MEMORY, check_options, decide_layouts, solve, solve_from, uniform_plans
from milpplan.optimize.space.enumerate_layouts import layout_space
from milpplan.parallel import can_start, run_tasks
from milpplan.problem import Plan, Problem, Scenario, default_scenarios, in_scenario
from milpplan.problem.scenarios import NOMINAL
from milpplan.simulation import LayoutColumns, costs_of, simulate
from milpplan.simulation.scenario_costs import Scenarios
from milpplan.units import NS_PER_S

FIRST_SHARE: Final = 0.9
"""Share of the time limit for the solves of all scenarios; the rest is for the search over all of them."""
ALONE_S: Final = 2.0
"""Duration of the nominal solve below which one process solves the other scenarios as well."""
STARTS: Final = 6
"""Number of plans of a scenario's pool from which the other solves start."""


def solve_robust(
    problem: Problem,
    scenarios: Sequence[Scenario] | None = None,
    options: SolveOptions | None = None,
    **changes: Any,
) -> PlanResult:
    """Find the plan with the least worst-case regret, and prove how little any plan can promise.

    Args:
        problem: model, hardware, job and space; the nominal scenario.
        scenarios: further scenarios; None: the default ones.
        options: how to solve; ``changes`` replace single fields. ``gap``: tolerance of every proof.

    Returns:
        The result of the nominal problem with the robust plan: step, bound and gap are nominal, ``regret`` holds
        the scenarios and both proved bounds. ``status`` is ``optimal`` where all proofs are within the gap.

    Raises:
        InvalidInputError: options that make no sense, or a problem without a step to compare.
    """
    chosen = replace(options or SolveOptions(gap=ROBUST_GAP), any_chunks=False, **changes)
    check_options(chosen)
    _check(problem)
    named = {entry.name: entry for entry in (default_scenarios(problem) if scenarios is None else scenarios)}
    problems = {NOMINAL: problem} | {name: in_scenario(problem, entry) for name, entry in named.items()}
    return _RobustSolve(named, problems, chosen, time.monotonic(), Deadline.after(chosen.time_limit_s)).run()


def _check(problem: Problem) -> None:
    """Refuse problems without a regret.

    Raises:
        InvalidInputError: the objective or the space has no regret.
    """
    job = problem.job
    refused = {
        f"the objective {job.objective}": job.objective == "num_gpus",
        "a deadline": job.deadline_s is not None,
        "replicas on different node types (mixing replicas)": "replicas" in problem.space.mixing
        and bool(problem.other_hardware),
    }
    for words, is_refused in refused.items():
        if is_refused:
            raise InvalidInputError(
                f"A robust plan is asked for with {words}.",
                "Expected the objective step_time_per_token or gpu_hours, no deadline, and replicas alike.",
                "Leave one of the two out.",
            )


@dataclass(frozen=True, slots=True)
class ScenarioTask:
    """Message to a worker: a scenario to solve, and the plans to start from."""

    name: str
    problem: Problem
    starts: tuple[Plan, ...]


@dataclass(frozen=True, slots=True)
class ScenarioAnswer:
    """Result of a scenario, without the record of its layouts, and the programs that its bound rests on."""

    name: str
    result: PlanResult
    programs: tuple[Program, ...]


@dataclass(frozen=True, slots=True)
class ScenarioInit:
    """First message to a worker. ``options`` hold no functions; ``wants_programs``: answers hold programs."""

    options: SolveOptions
    wants_programs: bool

    def worker(self, gone: threading.Event) -> ScenarioWorker:
        """Return the worker that answers the following messages; ``gone`` is set once the parent has gone."""
        return ScenarioWorker(replace(self.options, cancelled=gone.is_set), self.wants_programs)


@dataclass(frozen=True, slots=True)
class ScenarioWorker:
    """Solves scenarios in a worker process."""

    options: SolveOptions
    wants_programs: bool

    def reply(self, task: ScenarioTask) -> ScenarioAnswer:
        """Solve a scenario."""
        programs: list[Program] = []
        options = replace(self.options, on_program=programs.append if self.wants_programs else None)
        result = solve_from(task.problem, options, task.starts)
        return ScenarioAnswer(task.name, replace(result, layouts=None), tuple(programs))


def _unanswered(task: ScenarioTask, how: str) -> None:
    """Return no answer for the task of a worker that died: this process solves the scenario."""


@dataclass(slots=True)
class _RobustSolve:
    """One run of ``solve_robust``. ``problems``: by the scenario's name, the nominal one first."""

    scenarios: dict[str, Scenario]
    problems: dict[str, Problem]
    options: SolveOptions
    started: float
    deadline: Deadline
    results: dict[str, PlanResult] = field(default_factory=dict)

    @property
    def plans(self) -> list[Plan]:
        """Plans of the solution pools of all scenarios solved so far, in their order."""
        solved = [self.results[name] for name in self.problems if name in self.results]
        pools = [plan for result in solved for plan in (result.plan, *result.runners_up[:STARTS])]
        return list(dict.fromkeys(plan for plan in pools if plan is not None))

    def run(self) -> PlanResult:
        """Solve every scenario, then search for the plan with the least regret."""
        message = ""
        try:
            nominal = self.problems[NOMINAL]
            num_turns = 1 + -(-(len(self.problems) - 1) // self._at_once)
            first = solve(nominal, self._options(num_turns))
            self.results[NOMINAL] = first
            message = first.message if first.plan is None else first.message or self._solve_others()
        except KeyboardInterrupt:
            if NOMINAL not in self.results:
                raise
            message = self._stopped()
        if self.results[NOMINAL].plan is None:
            return self.results[NOMINAL]
        if len(self.results) < len(self.problems):
            with undisturbed():
                return replace(self._unsearched(), message=message)
        certain = self._without_regret()
        return self._minimise_regret() if certain is None else self._result_of(certain, "optimal", 0.0)

    def _without_regret(self) -> Plan | None:
        """Return the simplest known plan that every scenario's proof calls optimal: no search can do better."""
        rest = 1.0 - self.options.gap * (1 + 1e-9)
        limits = {name: self._bound(name) / rest for name in self.problems}
        proved = [
            plan for plan in self.plans if all(self._value(name, plan) <= limit for name, limit in limits.items())
        ]
        untested = untested_terms(self.problems[NOMINAL])
        return min(proved, key=lambda plan: simplicity(plan, untested), default=None)

    def _stopped(self) -> str:
        """Return the message of a solve that is stopped now: none at the time limit."""
        return "" if self.deadline.passed else "Interrupted."

    def _options(self, num_turns: int) -> SolveOptions:
        """Return the options of a scenario's solve, if as many solves one after the other share the time left."""
        limit_s = self.deadline.left_s()
        if limit_s is not None:
            spent = time.monotonic() - self.started
            limit_s = max(LEAST_S, FIRST_SHARE * (spent + limit_s) - spent) / num_turns
        return replace(self.options, simplest=False, time_limit_s=limit_s)

    def _solve_others(self) -> str:
        """Solve the other scenarios from the plans of the nominal one, several at once where that takes long.

        Returns:
            The message of a solve that was stopped; empty if none was.
        """
        starts = tuple(self.plans)
        names = [name for name in self.problems if name != NOMINAL]
        if self._at_once > 1 and self.results[NOMINAL].wall_time_s > ALONE_S:
            self._solve_at_once(names, starts)
        left = [name for name in names if name not in self.results]
        for number, name in enumerate(left):
            if any(result.message for result in self.results.values()):
                break
            options = self._options(len(left) - number)
            self.results[name] = solve_from(self.problems[name], options, starts)
        return next((result.message for result in self.results.values() if result.message), "")

    @property
    def _at_once(self) -> int:
        """Number of scenarios that worker processes may solve at a time."""
        return max(1, min(num_workers(self.options), len(self.problems) - 1)) if can_start() else 1

    def _solve_at_once(self, names: Sequence[str], starts: tuple[Plan, ...]) -> None:
        """Solve scenarios in worker processes; those of a worker that dies are left out."""
        asked = self.options
        options = replace(
            self._options(-(-len(names) // self._at_once)),
            workers=1,
            callback=None,
            cancelled=None,
            on_program=None,
        )
        tasks = [ScenarioTask(name, self.problems[name], starts) for name in names]
        init = ScenarioInit(options, asked.on_program is not None)
        with closing(run_tasks(tasks, self._at_once, init, _unanswered, asked.cancelled)) as answers:
            for answer in answers:
                if answer is not None:
                    self.results[answer.name] = answer.result
                    for program in answer.programs:
                        assert asked.on_program is not None
                        asked.on_program(program)

    def _minimise_regret(self) -> PlanResult:
        """Search for the plan with the least regret, from the plans of all scenarios."""
        nominal, options = self.problems[NOMINAL], self.options
        chooses = options.simplest and options.gap > 0
        searched = replace(options, gap=searched_gap(options.gap)) if chooses else options
        context = SolveContext(searched, backend(options.backend), witnesses(options), self.deadline.until)
        search, chosen, message, unit = None, None, "", 1.0
        try:
            best = [self._best(name) for name in self.problems]
            unit = min(best)
            scenarios = Scenarios.of(list(self.problems.values()), best)
            first = scenarios.problems[0]
            starts = tuple(self.plans)
            if first.space.kind == "free":
                starts += tuple(uniform_plans(first, context, starts, scenarios))
            space = layout_space(first, options.forbid)
            search = Search(first, space, context, self.started, starts, scenarios=scenarios)
            search.bound()
            decide_layouts(search)
            if chooses:
                chosen = simplest(search, options.gap, untested_terms(nominal))
        except KeyboardInterrupt:
            message = self._stopped()
        except MemoryError:
            message = NO_MEMORY
        with undisturbed() as signals:
            entry = chosen or (None if search is None else search.best)
            # A search may end before it has evaluated the plans that it starts from.
            result = self._unsearched() if search is None or entry is None else self._result(search, entry, unit)
        return replace(result, message=message or ("Interrupted." if signals else ""))

    def _result(self, search: Search, entry: tuple[float, Plan], unit: float) -> PlanResult:
        """Build the result of the search, whether it was finished or stopped.

        Args:
            search: the search.
            entry: scaled objective and plan of the result.
            unit: objective of the best plan found in the first scenario, whose scale is 1.
        """
        (value, plan), bound = entry, min(search.global_bound(), search.best_value)
        proved = all(result.status == "optimal" for result in self.results.values())
        closed = value - bound <= self.options.gap * value * (1 + 1e-9)
        status: Status = "optimal" if proved and closed else "feasible"
        details = self.results[NOMINAL].details | {"least_memory_bytes": search.explored.least_memory()}
        return replace(
            self._result_of(plan, status, (bound - self._rounding(plan)) / unit - 1.0),
            layouts=search.prune_record(),
            log=tuple(search.log),
            work=solver_work(search.context, status),
            details=details,
        )

    def _unsearched(self) -> PlanResult:
        """Build the result of a solve that ended before its last search: the known plan that loses the least."""
        best = {name: self._best(name) for name in self.problems}
        plan = min(self.plans, key=lambda known: max(self._value(name, known) / best[name] for name in best))
        return replace(self._result_of(plan, "feasible", None), layouts=None)

    def _result_of(self, plan: Plan, status: Status, at_least: float | None) -> PlanResult:
        """Build the nominal result with a robust plan.

        Args:
            plan: the plan.
            status: of the robust solve.
            at_least: proved lower bound of the regret of every plan; None: nothing is proved.
        """
        nominal, problem = self.results[NOMINAL], self.problems[NOMINAL]
        objective = self._value(NOMINAL, plan) * printed_unit(problem)[0]
        lower = nominal.objective_bound
        return replace(
            nominal,
            status=status,
            plan=plan,
            report=simulate(problem, plan),
            objective=objective,
            gap=None if lower is None else max(0.0, 1.0 - lower / objective),
            wall_time_s=time.monotonic() - self.started,
            runners_up=(),
            fastest=None,
            regret=self._regret(plan, at_least),
        )

    def _rounding(self, plan: Plan) -> float:
        """Return the largest objective of a nanosecond, the rounding of a scaled step, over all layouts."""
        job, (weight, _) = self.problems[NOMINAL].job, self._weight(plan)
        batches, gpus = job.global_batch_values, job.num_gpus_values
        return weight * max(batches) / min(batches) * max(gpus) / min(gpus)

    def _weight(self, plan: Plan) -> tuple[float, float]:
        weights, limits = objective_weights(self.problems[NOMINAL], LayoutColumns.of([plan.layout]))
        return float(weights[0]), float(limits[0])

    def _value(self, name: str, plan: Plan) -> float:
        """Return the objective of a plan in a scenario; infinite where it does not fit."""
        problem = self.problems[name]
        step_ns = fitting_step_ns(problem, plan, costs_of(problem, plan.layout))
        return np.inf if step_ns is None else step_ns * self._weight(plan)[0]

    def _bound(self, name: str) -> float:
        """Return the bound proved on the objective of all plans in a scenario; 0 where nothing is proved."""
        proved = self.results[name].objective_bound
        return 0.0 if proved is None else proved / printed_unit(self.problems[name])[0]

    def _best(self, name: str) -> float:
        """Return the best objective of all known plans in a scenario."""
        return self._value(name, self._best_plan(name))

    def _best_plan(self, name: str) -> Plan:
        """Return the best of all known plans in a scenario."""
        return min(self.plans, key=lambda plan: self._value(name, plan))

    def _regret(self, plan: Plan, at_least: float | None) -> Regret:
        """Compare a plan with the best plans found and the bounds proved in all scenarios, if they were solved.

        Args:
            plan: the plan.
            at_least: proved lower bound of the regret of every plan; None: nothing is proved.
        """
        weight, _ = self._weight(plan)
        to_s = 1.0 / weight / NS_PER_S
        first = self.results[NOMINAL].plan
        scenarios = []
        for name in self.problems:
            bound = self._bound(name) if name in self.results else 0.0
            value, best = self._value(name, plan), self._best(name)
            lost = 0.0 if first is None else self._value(name, first) / best - 1.0
            scenarios.append(
                ScenarioRegret(
                    name=name,
                    scenario=self.scenarios.get(name),
                    step_time_s=value * to_s,
                    best_plan=self._best_plan(name),
                    best_s=best * to_s,
                    lower_bound_s=min(bound, best) * to_s if bound else None,
                    nominal_lost_fraction=lost,
                )
            )
        return Regret(tuple(scenarios), None if at_least is None else max(0.0, at_least))
