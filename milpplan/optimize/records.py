"""Records that ``solve`` takes and returns, that its callbacks receive, and that ``certify`` returns.

``searched_result`` fills the answer from a search.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

import numpy as np

from milpplan.errors import InvalidInputError, SolverError
from milpplan.optimize.context import has_one_step_time, objective_per_second, objective_weights, printed_unit
from milpplan.optimize.milp.program import Program
from milpplan.optimize.search.closed_layouts import PruneRecord
from milpplan.problem import Plan, Problem, Scenario, Space
from milpplan.simulation import LayoutColumns, StepReport, simulate, usable_memory_bytes

if TYPE_CHECKING:
    from milpplan.optimize.context import SolveContext
    from milpplan.optimize.search.best_first import Search

Status = Literal["optimal", "feasible", "infeasible", "no_solution_found"]

DEFAULT_GAP: Final = 1e-3
"""Default tolerance of proofs: far below the error of the cost model, which is several per cent."""
ROBUST_GAP: Final = 2e-3
"""Default tolerance of robust plans: the bounds of the regret are then about twice as far apart at most."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Line of the log.

    ``wall_time_s``: since the start. ``incumbent`` and ``bound``: seconds of step time for the default objective.
    ``open_layouts``: layouts that are not decided yet; None where a first plan comes before the layouts are
    listed, and so without a bound.
    """

    wall_time_s: float
    incumbent: float | None
    bound: float | None
    open_layouts: int | None


@dataclass(frozen=True, slots=True)
class SolveOptions:
    """Options of a solve.

    ``gap``: relative tolerance of the proof. ``simplest``: of the plans within the tolerance, the result has the
    simplest that was found (``search.simplest``) and keeps the fastest beside it; else it has the fastest. With a
    gap of 0 it always has the fastest. ``time_limit_s``: the solve stops then, with the best plan and its proved
    gap. ``workers``: processes that decide layouts of the free space, this process included; None: the usable
    CPUs, at most ``branch_phase.MOST_WORKERS``. Other processes are started only where the work outlasts their
    start. Their number does not change the answer, except with interleaved chunks of any size. ``witness``: have a
    second solver confirm every bound that rests on an integer program. ``any_chunks``: bound interleaved chunks of
    any size as well, where the space has even chunks. ``on_program``: receives every integer program that a bound
    rests on, stated as "no solution lies below the bound": the program is infeasible. ``cancelled``: asked several
    times a second, also while a solver runs, e.g. ``threading.Event.is_set``. Once it returns True the solve ends
    as by Ctrl-C, with the best plan so far.
    """

    backend: str = "auto"
    gap: float = DEFAULT_GAP
    simplest: bool = True
    time_limit_s: float | None = None
    seed: int = 1
    workers: int | None = None
    witness: bool = True
    any_chunks: bool = True
    warm_start: Plan | None = None
    forbid: tuple[Mapping[str, object], ...] = ()
    callback: Callable[[Progress], None] | None = None
    on_program: Callable[[Program], None] | None = None
    cancelled: Callable[[], bool] | None = None


Strength = Literal["exact", "tolerance", "none"]
"""Basis of a proof.

``exact``: no deciding bound rests on a solver's word. Duals were re-checked in exact integers; closed forms and
reduced costs of menu items are floating point with a margin for rounding. ``tolerance``: some bounds rest on
integer programs, confirmed by a second solver unless ``witness`` is off. ``none``: nothing was proved to the
tolerance.
"""


def proof_strength(status: Status, integer_programs: int) -> Strength:
    """Return the basis of a result's proof."""
    if status not in ("optimal", "infeasible"):
        return "none"
    return "tolerance" if integer_programs else "exact"


class WorkCounts(Protocol):
    """Counts of the solvers' work: counters of a search, or the counts in a result file."""

    @property
    def relaxations(self) -> int:
        """Solved relaxations."""

    @property
    def integer_programs(self) -> int:
        """Solved integer programs."""

    @property
    def witnessed(self) -> int:
        """Bounds that a second solver confirmed."""

    @property
    def paths(self) -> int:
        """Critical paths that became rows."""

    @property
    def simulations(self) -> int:
        """Simulated plans."""


@dataclass(frozen=True, slots=True)
class SolverWork:
    """Counts of the solvers' work, with the solvers' versions."""

    backend: str
    versions: str = ""
    relaxations: int = 0
    integer_programs: int = 0
    witnessed: int = 0
    paths: int = 0
    simulations: int = 0
    proof: Strength = "none"

    @staticmethod
    def of(counts: WorkCounts, backend: str, versions: str, status: Status) -> SolverWork:
        """Make the record of a solve that ended with ``status``."""
        return SolverWork(
            backend=backend,
            versions=versions,
            relaxations=counts.relaxations,
            integer_programs=counts.integer_programs,
            witnessed=counts.witnessed,
            paths=counts.paths,
            simulations=counts.simulations,
            proof=proof_strength(status, counts.integer_programs),
        )


@dataclass(frozen=True, slots=True)
class TargetPrice:
    """Cost of a restriction of the space: to a launcher's plans, or by a margin of memory.

    ``objective`` and ``objective_bound``: the best plan found in the whole space, and the proved bound there.
    ``least_fraction`` and ``most_fraction``: proved interval of how much longer the restricted space's best plan
    takes than the best plan of the whole space, as a fraction. ``status``: ``optimal`` where the whole space's
    bound is within the tolerance. ``wall_time_s``: of the whole space's solve. ``space`` and ``plan``: the whole
    space and its best plan.
    """

    objective: float
    objective_bound: float
    least_fraction: float
    most_fraction: float
    status: Status
    wall_time_s: float
    space: Space
    plan: Plan

    @staticmethod
    def between(
        value: float, bound: float, best: tuple[Space, Plan, float, float], tolerance: float, wall_time_s: float
    ) -> TargetPrice:
        """Compute the price of a restriction from two intervals.

        Args:
            value: objective of the best plan found under the restriction.
            bound: proved bound under the restriction.
            best: the whole space, its best plan, that plan's objective and the proved bound.
            tolerance: relative gap up to which the whole space's solution is called optimal.
            wall_time_s: of the whole space's solve.
        """
        space, plan, objective, objective_bound = best
        within = objective - objective_bound <= tolerance * (1 + 1e-9) * objective
        return TargetPrice(
            objective=objective,
            objective_bound=objective_bound,
            least_fraction=max(0.0, bound / objective - 1.0),
            most_fraction=max(0.0, value / objective_bound - 1.0),
            status="optimal" if within else "feasible",
            wall_time_s=wall_time_s,
            space=space,
            plan=plan,
        )


@dataclass(frozen=True, slots=True)
class FastestPlan:
    """Fastest plan found, where a simpler plan within the tolerance is the result.

    ``saved_fraction``: share of the result's objective that the plan saves; where the number of GPUs is minimised,
    share of its step.
    """

    plan: Plan
    step_time_s: float
    saved_fraction: float


@dataclass(frozen=True, slots=True)
class ScenarioRegret:
    """A robust plan in one scenario, in seconds of its step.

    ``scenario``: None for the nominal one. ``best_s``: step of ``best_plan``, the best plan found there.
    ``lower_bound_s``: proved for all plans; None where nothing is proved. With other batches or numbers of
    accelerators, both stand for a step of equal objective on the plan's. ``nominal_lost_fraction``: loss of the
    best nominal plan to the best plan found here.
    """

    name: str
    scenario: Scenario | None
    step_time_s: float
    best_plan: Plan
    best_s: float
    lower_bound_s: float | None
    nominal_lost_fraction: float

    @property
    def regret_at_most(self) -> float | None:
        """Proved upper bound of the loss to the best of all plans."""
        return None if self.lower_bound_s is None else max(0.0, self.step_time_s / self.lower_bound_s - 1.0)


@dataclass(frozen=True, slots=True)
class Regret:
    """Worst-case regret of a plan over scenarios (``optimize.robust``), as a fraction.

    ``at_least``: proved lower bound of the worst-case regret of every plan; None where nothing is proved.
    """

    scenarios: tuple[ScenarioRegret, ...]
    at_least: float | None

    @property
    def at_most(self) -> float | None:
        """Proved upper bound of the plan's worst-case regret; None where a scenario has no proved bound."""
        bounds = [scenario.regret_at_most for scenario in self.scenarios]
        proved = [bound for bound in bounds if bound is not None]
        return max(proved) if len(proved) == len(bounds) else None

    @property
    def nominal(self) -> float:
        """Largest loss of the best nominal plan to the best plan found in a scenario."""
        return max(scenario.nominal_lost_fraction for scenario in self.scenarios)


@dataclass(frozen=True, slots=True, repr=False)
class PlanResult:
    """Best plan found, with the bound proved on its objective.

    ``objective``, ``objective_bound`` and ``any_chunks_bound`` are in the unit of ``objective_name``. For a fixed
    batch and number of GPUs ``lower_bound_s`` is the bound as a step time. ``gap`` is (objective - bound) /
    objective.
    """

    status: Status
    problem: Problem
    plan: Plan | None
    report: StepReport | None
    objective_name: str
    objective: float | None
    objective_bound: float | None
    lower_bound_s: float | None
    gap: float | None
    rejected: dict[str, int]
    enumerated: int
    layouts: PruneRecord | None
    log: tuple[Progress, ...]
    work: SolverWork
    wall_time_s: float
    message: str = ""
    runners_up: tuple[Plan, ...] = ()
    """Other plans that the search simulated and that are no better: the best of each layout, best first. They are
    not the next best plans of the space, because pruned layouts were never simulated."""
    any_chunks_bound: float | None = None
    """Proved bound of the objective over interleaved chunks of any size; only where the space has even chunks."""
    forbid: tuple[Mapping[str, object], ...] = ()
    """Layouts that were forbidden: the result says nothing about them."""
    details: dict[str, Any] = field(default_factory=dict)
    target_price: TargetPrice | None = None
    """Cost of the restriction to a launcher, where the whole space was solved as well."""
    margin_price: TargetPrice | None = None
    """Cost of the margin of memory, where the space without it was solved as well."""
    fastest: FastestPlan | None = None
    """Fastest plan found; None where it is ``plan``."""
    regret: Regret | None = None
    """Regret over scenarios, where the plan is robust: ``status`` is about it, and ``layouts`` has scaled steps.
    """

    @property
    def any_chunks_gap(self) -> float | None:
        """Largest share of the objective that interleaved chunks of any size can gain."""
        if self.any_chunks_bound is None or self.objective is None:
            return None
        return max(0.0, 1.0 - self.any_chunks_bound / self.objective)

    @property
    def step_time_s(self) -> float | None:
        """Simulated step time of the plan, in seconds."""
        return None if self.report is None else self.report.step_time_s

    def __repr__(self) -> str:
        """Write status, times and layout in at most three lines."""
        problem, count = (
            self.problem,
            self.problem.job.num_gpus if self.plan is None else self.plan.layout.num_gpus,
        )
        cluster = f"{count} x {problem.hardware.name}"
        lines = [f"PlanResult: {self.status}, {problem.model.name} on {cluster}, space {problem.space.kind}"]
        if self.step_time_s is not None and self.gap is not None:
            lines.append(f"  {self.step_time_s:.6g} s a step, gap {self.gap:.2g} under the cost model")
        if self.plan is not None:
            lines.append(f"  {self.plan.layout.main_fields}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain dictionaries, lists, numbers and texts: the document of `milpplan solve --json`."""
        return dict(answer_function("to_dict")(self))

    def to_dataframe(self) -> Any:
        """Convert the plan's pipeline ranks to a pandas ``DataFrame``, one row a rank (seconds, bytes).

        Raises:
            InvalidInputError: there is no plan, or pandas is not installed.
        """
        return answer_function("to_dataframe")(self)

    def export(self, launcher: str, path: str | Path, version: str | None = None) -> list[Path]:
        """Write the files that start the plan with a launcher into the directory ``path``.

        Args:
            launcher: a name as of `milpplan export --to`, such as "megatron".
            path: the directory.
            version: of the launcher; None: the newest known.

        Returns:
            The files; the first is enough to start the run.

        Raises:
            UnknownNameError: there is no such launcher or version.
            IllegalPlanError: the launcher cannot run the plan.
            InvalidInputError: there is no plan, or the files cannot be written.
        """
        return list(answer_function("export")(self, launcher, path, version))

    def write_report(self, path: str | Path, time_limit_s: float = 10.0) -> Path:
        """Write one HTML page about the plan, which needs no network.

        Args:
            path: the file.
            time_limit_s: seconds to look for other layouts that do nearly as well.

        Returns:
            The file.

        Raises:
            InvalidInputError: there is no plan, jinja2 is not installed, or the file cannot be written.
        """
        return Path(answer_function("write_report")(self, path, time_limit_s))


def unsearched_result(
    problem: Problem, context: SolveContext, best: tuple[float, Plan, StepReport] | None, started: float
) -> PlanResult:
    """Build the result of a solve that ended before the space was listed: the best start plan, without a bound.

    Args:
        problem: the problem.
        context: context of the solve.
        best: objective, plan and simulated step of the best start plan.
        started: ``time.monotonic`` at the start.
    """
    scale, name = printed_unit(problem)
    return PlanResult(
        status="no_solution_found" if best is None else "feasible",
        problem=problem,
        plan=None if best is None else best[1],
        report=None if best is None else best[2],
        objective_name=name,
        objective=None if best is None else best[0] * scale,
        objective_bound=None,
        lower_bound_s=None,
        gap=None,
        rejected={},
        enumerated=0,
        layouts=None,
        log=(),
        work=solver_work(context, "feasible"),
        forbid=context.options.forbid,
        wall_time_s=time.monotonic() - started,
        details={"usable_memory_bytes": usable_memory_bytes(problem), "least_memory_bytes": None},
    )


def solver_work(context: SolveContext, status: Status) -> SolverWork:
    """Summarise the work of the solvers."""
    counters = context.counters
    versions = context.backend.version() if counters.integer_programs else ""
    return SolverWork.of(counters, context.options.backend, versions, status)


def searched_result(
    problem: Problem, options: SolveOptions, search: Search, started: float, chosen: tuple[float, Plan] | None
) -> PlanResult:
    """Build the result of a search, whether it was finished or stopped.

    Args:
        problem: the problem.
        options: options of the solve.
        search: the search.
        started: ``time.monotonic`` at the start.
        chosen: objective and plan of the result; None: those of the incumbent.
    """
    value, plan = chosen or search.best or (None, None)
    bound = min(search.global_bound(), search.best_value)
    report = None if plan is None else simulate(problem, plan)
    # Before the layouts have bounds nothing is proved.
    gap = None if value is None or bound <= 0 else max(0.0, (value - bound) / value)
    status = _status(search, options, gap)
    if report is not None and value is not None:
        _cross_check(problem, search, report.step_time_ns, plan, value)
    scale, name = printed_unit(problem)
    single = has_one_step_time(problem)
    has_bound = 0 < bound < np.inf
    return PlanResult(
        status=status,
        problem=problem,
        plan=plan,
        report=report,
        objective_name=name,
        objective=None if value is None else value * scale,
        objective_bound=bound * scale if has_bound else None,
        lower_bound_s=bound / objective_per_second(problem) if has_bound and single else None,
        gap=gap,
        rejected=dict(search.whole.rejected),
        enumerated=search.whole.enumerated,
        layouts=search.prune_record(),
        log=tuple(search.log),
        work=solver_work(search.context, status),
        wall_time_s=time.monotonic() - started,
        runners_up=tuple(other for known, other in search.offered if other != plan and known >= (value or 0.0)),
        forbid=options.forbid,
        details={
            "usable_memory_bytes": report.usable_memory_bytes if report else usable_memory_bytes(problem),
            "least_memory_bytes": search.explored.least_memory(),
            "unavailable": tuple(f"{seen} {do}" for seen, do in search.context.unavailable.items()),
            # Layouts that the capacity of the search kept in their groups.
            "num_unexplored": search.explored.closed.closed_below(search.threshold()),
        },
        fastest=_fastest(problem, search, value),
    )


def _fastest(problem: Problem, search: Search, value: float | None) -> FastestPlan | None:
    """Return the incumbent where it is better than the result's plan, which has the objective ``value``."""
    if search.best is None or value is None or search.best_value >= value:
        return None
    plan = search.best[1]
    return FastestPlan(plan, simulate(problem, plan).step_time_s, 1.0 - search.best_value / value)


def _status(search: Search, options: SolveOptions, gap: float | None) -> Status:
    """Return the status that the search's incumbent, bound and gap justify."""
    if gap is not None:
        return "optimal" if gap <= options.gap * (1 + 1e-9) else "feasible"
    if search.best is not None:
        return "feasible"
    return "infeasible" if not np.isfinite(search.global_bound()) else "no_solution_found"


def _cross_check(problem: Problem, search: Search, step_time_ns: int, plan: Plan | None, value: float) -> None:
    """Raise ``SolverError`` where the search and the simulator disagree on the value of the plan."""
    assert plan is not None
    assert search.whole.find(plan.layout) is not None
    weight = float(objective_weights(problem, LayoutColumns.of([plan.layout]))[0][0])
    if abs(step_time_ns * weight - value) > 1e-9 * value:
        raise SolverError(
            f"The search valued the plan at {value}, the simulator at {step_time_ns * weight}.",
            "They must be the same.",
            "This is a bug: please report the problem file.",
        )


@dataclass(frozen=True, slots=True)
class ProgramAnswer:
    """Answer of the program over blocks.

    ``optimum_ns`` and ``step_time_ns`` are step times, times largest batch / batch where the batch may vary: the
    program's optimum, and the simulated step of the plan; ``searched_ns``: that of the fastest plan of the search.
    ``unit_ns``: unit of the program. ``proved``: the last program was solved to its optimum, and bound and
    simulator met. ``agrees``: the optimum lies between the search's bound and its plan, up to ``slack_ns``, the
    rounding of a row. ``rounds``: programs solved; ``solver_s``: seconds of the solver; ``wall_time_s``: of all.
    """

    program: Program
    backend: str
    num_blocks: int
    num_open: int
    num_cases: int
    plan: Plan
    optimum_ns: float
    step_time_ns: float
    searched_ns: float
    unit_ns: int
    slack_ns: int
    proved: bool
    agrees: bool
    rounds: int
    solver_s: float
    wall_time_s: float


def answer_function(name: str, module: str = "milpplan.answers") -> Callable[..., Any]:
    """Import a function that needs the folders above this one when it is called."""
    function: Callable[..., Any] = getattr(import_module(module), name)
    return function


def untested_terms(problem: Problem) -> Callable[[Plan], int]:
    """Return the function that counts the terms of a plan that no measured run on its hardware exercises."""
    return partial(answer_function("num_unexercised", "milpplan.validation.evidence"), problem)


Verdict = Literal["certified", "refuted", "unproved"]


@dataclass(frozen=True, slots=True)
class ClaimedResult:
    """Claim of a result, apart from its problem.

    ``step_time_s``, ``value`` and ``bound``: step and objective of the plan, and the objective's bound; None where
    there is no plan, or nothing proved. ``lower_bound_s``: where the fewest GPUs are sought, a separate claim that
    no step on this number of GPUs is shorter. ``strength``: basis of the proof.
    """

    status: Status
    plan: Plan | None
    step_time_s: float | None
    value: float | None
    bound: float | None
    tolerance: float
    backend: str
    legal: int
    layouts_sha256: str
    forbid: tuple[Mapping[str, object], ...] = ()
    any_chunks_bound: float | None = None
    lower_bound_s: float | None = None
    strength: Strength = "none"

    @staticmethod
    def of(result: PlanResult, options: SolveOptions) -> ClaimedResult:
        """Extract the claim of a result that was solved with ``options``.

        Raises:
            InvalidInputError: it claims nothing: no plan, no bound and no proof that there is none.
        """
        unproved = result.status == "feasible" and result.objective_bound is None
        if result.layouts is None or result.status == "no_solution_found" or unproved:
            bound = ", without a bound" if unproved else ""
            raise InvalidInputError(
                f"The result claims nothing (status {result.status}{bound}).",
                "Expected one with a plan and a bound, or one that is proved infeasible.",
                "Solve the problem with more time.",
            )
        return ClaimedResult(
            status=result.status,
            plan=result.plan,
            step_time_s=result.step_time_s,
            value=result.objective,
            bound=result.objective_bound,
            tolerance=options.gap,
            backend=options.backend,
            legal=len(result.layouts.space),
            layouts_sha256=result.layouts.space.sha256(),
            forbid=options.forbid,
            any_chunks_bound=result.any_chunks_bound,
            lower_bound_s=result.lower_bound_s,
            strength=result.work.proof,
        )

    @property
    def gap(self) -> float | None:
        """(value - bound) / value."""
        if self.value is None or self.bound is None:
            return None
        return max(0.0, (self.value - self.bound) / self.value)


@dataclass(frozen=True, slots=True)
class Check:
    """Outcome of one repeated computation: whether it confirms the claim, and the value seen."""

    name: str
    passed: bool
    seen: str


@dataclass(frozen=True, slots=True)
class Certification:
    """All checks, and the result of the second proof (None where an earlier check failed).

    ``verdict``: ``certified``; ``refuted``: a check contradicts the claim; ``unproved``: the second proof did not
    reach the claimed bound in its time.
    """

    checks: tuple[Check, ...]
    backend: str
    again: PlanResult | None
    verdict: Verdict
