"""Both choices by both models: Calculon's true optimum, milpplan's proved one, and what a wider space adds."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from benchmarks.calculon_complete import Solved, solved
from benchmarks.calculon_full import ORDERS, opened
from benchmarks.calculon_side import (
    Checkout,
    Tree,
    execution_of,
    files_of,
    mode_of,
    search_problem,
    without_memory_limit,
)
from benchmarks.calculon_space import NETWORKS
from benchmarks.tables import layout_text
from milpplan import Layout, Plan, PlanResult, Problem, Space, simulate
from milpplan.problem.calculon.translation import calculon_run
from milpplan.problem.plan import SCHEDULES
from milpplan.units import GIB

OPTIMA = Path(__file__).parent / "data" / "calculon_optima.json"
WIDER_S = 40.0


@dataclass(frozen=True, slots=True)
class Priced:
    """A plan by both models: seconds, and GiB of the fullest rank on the device and on the host by milpplan; by
    Calculon the step on its best networks, and whether it fits. None: it cannot say it."""

    choice: str
    ours_s: float
    device_gib: float
    host_gib: float
    fits_ours: bool
    theirs_s: float | None
    fits_theirs: bool


@dataclass(frozen=True, slots=True)
class Crossed:
    """Both choices of one problem, and the wider space."""

    name: str
    ours: Priced
    theirs: Priced
    wider: Solved
    wider_choice: str


def optimum(model_name: str, procs: int, batch: int, system_name: str) -> Tree | None:
    """The execution that a complete search found best."""
    for one in json.loads(OPTIMA.read_text(encoding="utf-8"))["optima"]:
        if (one["model"], one["num_procs"], one["max_batch_size"], one["system"]) == (
            model_name,
            procs,
            batch,
            system_name,
        ):
            found: Tree = one
            return found
    return None


def crossed(
    checkout: Checkout, name: str, model: Tree, system: Tree, problem: Problem, result: PlanResult, execution: Tree
) -> Crossed | None:
    """Both choices; None where milpplan has none."""
    if result.plan is None:
        return None
    mode = mode_of(result.plan)
    assert mode is not None
    theirs = calculon_run(files_of(model, execution, system))[1]
    own = None
    if problem.model.num_layers % result.plan.layout.num_virtual_stages == 0:
        own = execution_of(problem, result.plan.layout, mode, system)
    return Crossed(
        name,
        _priced(checkout, model, system, problem, result.plan, own, free=True),
        _priced(checkout, model, system, problem, theirs, execution, free=False),
        *wider(model, system, problem, result),
    )


def _priced(
    checkout: Checkout,
    model: Tree,
    system: Tree,
    problem: Problem,
    plan: Plan,
    execution: Tree | None,
    *,
    free: bool,
) -> Priced:
    """``free``: on the networks that Calculon estimates to be best; else on those of the execution."""
    report = simulate(problem, plan)
    limited, unlimited = (
        _least(checkout, model, one, execution, free) for one in (system, without_memory_limit(system))
    )
    return Priced(
        choice=described(plan),
        ours_s=report.step_time_s,
        device_gib=report.peak_memory_bytes / GIB,
        host_gib=report.host_memory_bytes / GIB,
        fits_ours=report.fits,
        theirs_s=limited if limited is not None else unlimited,
        fits_theirs=limited is not None,
    )


def _least(checkout: Checkout, model: Tree, system: Tree, execution: Tree | None, free: bool) -> float | None:
    """Calculon's step of an execution; None where it refuses it."""
    if execution is None:
        return None
    application, built, steps = checkout.llm.Application(model), checkout.system(system), []
    count = len(system["networks"])
    degrees = ("tensor_par", "pipeline_par", "data_par")
    choices: list[Tree] = [{}]
    for network, degree in zip(NETWORKS, degrees, strict=True) if free else ():
        values = range(count) if execution[degree] > 1 else (0,)
        choices = [chosen | {network: value} for chosen in choices for value in values]
    for chosen in choices:
        stats = checkout.estimate(application, execution | chosen, built)
        if stats is not None:
            steps.append(stats["total_time"])
    return min(steps, default=None)


def described(plan: Plan) -> str:
    """Degrees, and the switches that are on."""
    layout: Layout = plan.layout
    switches = [layout.tp_overlap] if layout.tp_overlap != "none" else []
    switches += ["SP"] if layout.sequence_parallel else []
    switches += ["scatter"] if layout.pp_scatter_gather else []
    switches += ["inputs kept gathered"] if layout.sequence_parallel and not layout.gather_again else []
    switches += [layout.schedule] if layout.schedule not in ("1f1b", "interleaved") else []
    letters = [name[8:9].upper() for name in ("offload_weights", "offload_activations", "offload_optimizer")]
    on = (layout.offload_weights, layout.offload_activations, layout.offload_optimizer)
    moved = "".join(letter for letter, is_on in zip(letters, on, strict=True) if is_on)
    switches += [f"offload {moved}"] if moved else []
    return ", ".join([layout_text(plan), *switches])


def wider(model: Tree, system: Tree, problem: Problem, result: PlanResult) -> tuple[Solved, str]:
    """What context parallelism, ZeRO 2 and 3 and schedules that split the backward add to all switches, started
    from the plan without them."""
    space = Space(**{"kind": "uniform", "schedule": SCHEDULES} | opened() | {"rank_order": ORDERS})
    job = problem.job
    procs, batch = max(job.num_gpus_values), max(job.global_batch_values)
    found, best = solved(search_problem(model, system, procs, batch, space), WIDER_S, warm_start=result.plan)
    return found, "-" if best.plan is None else described(best.plan)
