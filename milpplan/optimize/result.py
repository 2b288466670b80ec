"""What ``solve`` returns, and the callbacks it calls: records only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from milpplan.optimize.milp.program import Program
from milpplan.optimize.search.prune_reasons import PruneRecord
from milpplan.problem.plan import Plan
from milpplan.problem.problem import Problem, Space
from milpplan.simulation.report import StepReport

Status = Literal["optimal", "feasible", "infeasible", "no_solution_found"]


@dataclass(frozen=True, slots=True)
class Progress:
    """One line of the log: seconds since the start, incumbent and proved bound (seconds of step time for the
    default objective), layouts not yet decided."""

    wall_time_s: float
    incumbent: float | None
    bound: float | None
    open_layouts: int


@dataclass(frozen=True, slots=True)
class SolveOptions:
    """How to solve; what to solve is the problem.

    ``gap``: relative tolerance of the proof. ``time_limit_s``: stop then, with the best plan and its proved gap.
    ``witness``: have a second solver confirm every bound that rests on an integer program. ``any_chunks``: bound
    interleaved chunks of any size as well, where the space has even ones. ``on_program`` is given every integer
    program that a bound rests on, as the statement that nothing lies below the bound: it has no solution.
    ``cancelled``, such as the ``is_set`` of a ``threading.Event``, is asked several times a second, also while a
    solver runs; from when it says yes on, the solve ends as by Ctrl-C, with the best plan so far. ``workers``:
    processes that branch on layouts over interleaved chunks of any size, this one included; None: as many as
    there are usable CPUs, at most ``crew.MOST_WORKERS``. Others are started only where there is more to do than
    their start takes.
    """

    backend: str = "auto"
    gap: float = 1e-4
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
"""``exact``: no bound that decided rests on a solver's word: duals were re-checked in exact integers, closed forms
and item prices are floating point with a margin for rounding; ``tolerance``: some rest on integer programs
(confirmed by a second solver unless ``witness`` is off); ``none``: nothing was proved to the tolerance."""


def proof_strength(status: Status, integer_programs: int) -> Strength:
    """Say what the proof of a result rests on."""
    if status not in ("optimal", "infeasible"):
        return "none"
    return "tolerance" if integer_programs else "exact"


@dataclass(frozen=True, slots=True)
class SolverWork:
    """What the solvers did, and with which versions."""

    backend: str
    versions: str = ""
    relaxations: int = 0
    integer_programs: int = 0
    witnessed: int = 0
    paths: int = 0
    simulations: int = 0
    proof: Strength = "none"


@dataclass(frozen=True, slots=True)
class TargetPrice:
    """What the restriction to a launcher's plans costs: the best plan found in the whole space takes
    ``objective``, and none of it less than ``objective_bound``. The launcher's best takes between
    ``least_fraction`` and ``most_fraction`` more than that of the whole space, proved. ``space`` is the whole one,
    ``plan`` its best, ``status`` says whether that is within the tolerance, ``wall_time_s`` is of its solve."""

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
        """Work out the price of a restriction.

        Args:
            value: objective of the best plan found under the restriction.
            bound: proved bound there.
            best: the whole space, its best plan, that plan's objective and the proved bound.
            tolerance: within which the whole space's is called optimal.
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
class PlanResult:
    """The best plan found and what is proved about it.

    ``objective``, ``objective_bound`` and ``any_chunks_bound`` are in the unit of ``objective_name``; for a fixed
    batch and number of GPUs ``lower_bound_s`` is the same bound as a step time. ``gap`` is (objective - bound) /
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
    """The fastest other plans that the search simulated, one a layout, fastest first; not the next best ones of
    the space: what bounds decided was never simulated."""
    any_chunks_bound: float | None = None
    """Where the space has even interleaved chunks only: a proved bound of the objective, in its unit, over chunks
    of any size as well."""
    forbid: tuple[Mapping[str, object], ...] = ()
    """Layouts that were forbidden: nothing is said about them."""
    details: dict[str, Any] = field(default_factory=dict)
    target_price: TargetPrice | None = None
    """Where the space is restricted to a launcher, and the whole space was solved as well."""

    @property
    def any_chunks_gap(self) -> float | None:
        """Share of the objective that interleaved chunks of any size can gain at most."""
        if self.any_chunks_bound is None or self.objective is None:
            return None
        return max(0.0, 1.0 - self.any_chunks_bound / self.objective)

    @property
    def step_time_s(self) -> float | None:
        """Simulated step time of the plan, in seconds."""
        return None if self.report is None else self.report.step_time_s
