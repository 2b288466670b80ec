"""Contents of a plan's page. A part that cannot be computed gets a reason, and the others are shown.

Among them are layouts that do nearly as well: many tie, and the user may choose among them. Closed-form bounds
of all layouts leave those that may have such a plan. In order of their bounds, the compact relaxation then proves
that a layout has none, or finds one, until the time is over.

**Rule of thumb** of a launcher as code: the plan that a practitioner takes from the published tables.

Source: NVIDIA-NeMo/Megatron-Bridge@0026ec18, docs/parallelisms.md, "Strategy Selection Guide": the tables "Dense
Models by Size", "MoE Models" (total parameters) and "By Sequence Length". The tables give ranges; the practitioner
takes from them the minimum model parallelism with which the model fits. Settings that the tables leave open follow
the project's recipes: sequence parallelism with tp > 1, the distributed optimizer (ZeRO-1) with both overlaps,
micro-batch 1, and interleaving with the smallest chunks of at least two layers (GPT-3 175B: PP8 VP6, Llama-3 405B:
PP8 VP8; of one layer where no other chunks are equal). Recomputation is the minimum that memory requires. Where
the depth does not divide, embedding and loss count as a layer each (Llama-3 405B), else the last stage is short
(DeepSeek-V3: 15 stages of 4 layers and one of 1, as in its PP16 recipe).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np

from milpplan.communication.traffic import traffic
from milpplan.errors import IllegalPlanError, MilpplanError
from milpplan.explain.break_even import break_evens
from milpplan.explain.optima import asked_for
from milpplan.explain.records import BreakEvens, ExportTab, Missing, NearBest, NearPlan, Overview, RuleOfThumb
from milpplan.optimize import SolveOptions, objective_weights, with_job
from milpplan.optimize.context import Deadline
from milpplan.optimize.layout import LayoutSolver
from milpplan.optimize.layout.stage_options import contexts_of
from milpplan.optimize.layout.view_solver import resolve_views
from milpplan.optimize.milp.backends import backend
from milpplan.optimize.search.best_first import Search
from milpplan.optimize.space.enumerate_layouts import layout_space
from milpplan.problem import Layout, MixtureOfExperts, Plan, Problem, Recompute, VirtualStage
from milpplan.simulation import LayoutColumns, StepReport, cluster_costs, simulate
from milpplan.simulation.bulk import has_uniform_plan, uniform_plan
from milpplan.simulation.layers import total_parameters
from milpplan.simulation.pipeline.lanes import step_lanes
from milpplan.units import NS_PER_S
from milpplan.version import __version__

if TYPE_CHECKING:
    from milpplan.launchers.targets import Launcher

Degrees = tuple[int, ...]
MODES = ("none", "selective", "full")
LAYERS_A_CHUNK = 2


@dataclass(frozen=True, slots=True)
class Row:
    """Row of a table: models of up to ``largest`` parameters, and the recommended ranges."""

    largest: float
    tp: Degrees = (1,)
    pp: Degrees = (1,)
    cp: Degrees = (1,)
    ep: Degrees = (1,)


DENSE = (
    Row(1e9),
    Row(10e9, tp=(2, 4)),
    Row(70e9, tp=(4, 8), pp=(2, 4)),
    Row(175e9, tp=(8,), pp=(4, 8)),
    Row(500e9, tp=(8,), pp=(8, 16), cp=(2,)),
)
MOE = (
    Row(20e9, ep=(8,)),
    Row(100e9, tp=(1, 2), pp=(2, 4), ep=(8, 16)),
    Row(500e9, tp=(2, 4), pp=(8, 16), ep=(8, 16, 32)),
    Row(float("inf"), tp=(2,), pp=(16,), ep=(32, 64)),
)
CP_BY_SEQUENCE = ((8192, (1,)), (32768, (2,)), (float("inf"), (4, 8)))
"""Maximum sequence length and the recommended cp. The table's rows share their ends, which count as the
shorter."""


def rule_of_thumb(problem: Problem) -> RuleOfThumb | None:
    """Build the practitioner's plan; None where it does not fit even with more pipeline stages than the table
    says."""
    row = row_of(problem)
    for pp, within_table in _wider_and_wider(row, problem.model.num_layers):
        for recomputed in ("selective", "full"):
            for degrees in _least_first(problem, row, pp):
                priced = _plan(problem, degrees, recomputed)
                if priced is not None:
                    return RuleOfThumb(*priced, within_table)
    return None


def row_of(problem: Problem) -> Row:
    """Return the row for a model's size; the last dense row also covers larger models."""
    table = MOE if _experts(problem) else DENSE
    size = total_parameters(problem.model)
    return next((row for row in table if size <= row.largest), table[-1])


def _experts(problem: Problem) -> int:
    """Return the number of routed experts of the model's layers (0: dense)."""
    return max(
        (kind.mlp.num_experts for kind in problem.model.kinds if isinstance(kind.mlp, MixtureOfExperts)),
        default=0,
    )


def _wider_and_wider(row: Row, layers: int) -> Iterator[tuple[Degrees, bool]]:
    """Iterate over the row's pp, then doubled repeatedly."""
    yield row.pp, True
    pp = 2 * row.pp[-1]
    while pp <= layers:
        yield (pp,), False
        pp *= 2


def _least_first(problem: Problem, row: Row, pps: Degrees) -> list[dict[str, int]]:
    """List legal degrees by model parallelism, then tp, then ep, smallest first."""
    job, experts = problem.job, _experts(problem)
    (gpus,), (batch,) = job.num_gpus_values, job.global_batch_values
    by_sequence = next(cps for longest, cps in CP_BY_SEQUENCE if job.sequence_length <= longest)
    cps = row.cp if max(row.cp) >= max(by_sequence) else by_sequence
    eps = sorted({min(ep, experts) for ep in row.ep}) if experts else (1,)
    legal = []
    for tp, pp, cp, ep in product(row.tp, pps, cps, eps):
        dp, rest = divmod(gpus, tp * pp * cp)
        in_node = tp <= problem.hardware.gpus_per_node
        if dp and not rest and in_node and batch % dp == 0 and (tp * cp * dp) % ep == 0:
            legal.append({"tp": tp, "pp": pp, "cp": cp, "ep": ep, "dp": dp})
    return sorted(legal, key=lambda d: (d["tp"] * d["pp"] * d["cp"], d["tp"], d["ep"]))


def _plan(problem: Problem, degrees: dict[str, int], max_recompute: str) -> tuple[Plan, StepReport] | None:
    """Build the plan of given degrees with the minimum recomputation that fits, up to ``max_recompute``."""
    (batch,) = problem.job.global_batch_values
    split = split_of_layers(problem.model.num_layers, degrees["pp"], batch // degrees["dp"])
    if split is None:
        return None
    vpp = len(split) // degrees["pp"]
    layout = Layout(
        **degrees,
        vpp=vpp,
        global_batch_size=batch,
        sequence_parallel=degrees["tp"] > 1,
        zero_stage=int(degrees["dp"] * degrees["cp"] > 1),
        schedule="interleaved" if vpp > 1 else "1f1b",
        overlap_grad_reduce=degrees["dp"] * degrees["cp"] > 1,
        overlap_param_gather=degrees["dp"] * degrees["cp"] > 1,
    )
    for mode in MODES[: MODES.index(max_recompute) + 1]:
        plan = Plan(layout=layout, virtual_stages=_stages(split, mode))
        try:
            report = simulate(problem, plan)
        except IllegalPlanError:
            # The tables ignore heads, sequences and experts that a degree does not divide.
            return None
        if report.fits_with_margin:
            return plan, report
    return None


def split_of_layers(layers: int, pp: int, micro_batches: int) -> Degrees | None:
    """Choose the layers of every virtual stage: interleaved with the smallest chunks of at least two layers (of
    one where no other chunks are equal), if the micro-batches allow it; else one chunk."""
    if pp > 1 and micro_batches % pp == 0:
        splits = [_even(layers, pp * vpp) for vpp in range(-(-layers // pp), 1, -1)]
        even = [split for split in splits if split is not None]
        coarse = [split for split in even if max(split) >= LAYERS_A_CHUNK]
        for candidates in (coarse, even):
            if candidates:
                return candidates[0]
    each = -(-layers // pp)
    last = layers - each * (pp - 1)
    return _even(layers, pp) or (((each,) * (pp - 1) + (last,)) if last >= 1 else None)


def _even(layers: int, stages: int) -> Degrees | None:
    """Split into equal stages; embedding and loss count as a layer each where only that divides."""
    if layers % stages == 0:
        return (layers // stages,) * stages
    if (layers + 2) % stages == 0 and stages > 1 and (layers + 2) // stages > 1:
        each = (layers + 2) // stages
        return (each - 1, *(each,) * (stages - 2), each - 1)
    return None


def _stages(split: Degrees, mode: str) -> tuple[VirtualStage, ...]:
    first, stages = 0, []
    for count in split:
        recompute = Recompute() if mode == "none" else Recompute.model_validate({mode: count})
        stages.append(VirtualStage(layers=(first, first + count), recompute=recompute))
        first += count
    return tuple(stages)


WITHIN: Final = 0.01
DEFAULT_LIMIT_S: Final = 10.0
SOLVE_GAP: Final = 1e-3
"""Relative tolerance for a layout's best plan; the shown values are rounded."""


def near_best(
    problem: Problem,
    plan: Plan,
    within: float = WITHIN,
    time_limit_s: float = DEFAULT_LIMIT_S,
    forbid: Sequence[Mapping[str, object]] = (),
) -> NearBest:
    """Find the layouts of the problem's space, except the plan's, with a plan at most ``within`` worse than it.

    They use the plan's number of GPUs and its batch.

    Raises:
        IllegalPlanError: the plan cannot run.
    """
    layout = plan.layout
    job = {"num_gpus": layout.num_gpus, "global_batch_size": layout.global_batch_size}
    asked = with_job(asked_for(problem, plan), **job)
    deadline = time.monotonic() + time_limit_s
    # A negative gap keeps plans that are worse by that share.
    search = Search(asked, layout_space(asked, tuple(forbid)), _solver(-within, deadline), time.monotonic())
    prover = _solver(SOLVE_GAP, deadline)
    weights, _ = objective_weights(asked, LayoutColumns.of([plan.layout]))
    own = simulate(asked, plan).step_time_ns * float(weights[0])
    search.best = own, plan
    # A better plan may appear on the way, but the given plan stays the reference.
    cutoff = own * (1.0 + within)
    search.keep_below = float(np.nextafter(cutoff, np.inf))
    search.bound()
    if time.monotonic() < deadline:
        search.open_all()
    own_row = search.explored.space.find(plan.layout)
    found: dict[int, Plan] = {}
    for value, offered in search.offered:
        place = search.explored.space.find(offered.layout)
        if place is not None and place != own_row and value <= cutoff:
            found[place] = offered
    values = search.explored.values()
    rows = np.flatnonzero(values <= cutoff)
    rows = rows[rows != (-1 if own_row is None else own_row)]
    # In this order many layouts share a computation of costs.
    search.queue = rows = rows[np.argsort(values[rows], kind="stable")]
    # Layouts that there was no time for may do as well.
    num_closed = search.explored.closed.closed_below(search.threshold())
    for row in rows.tolist():
        if row not in found and time.monotonic() < deadline:
            limit = min(cutoff / float(search.explored.weights[row]), float(search.explored.limits_ns[row]))
            excluded, other = _settled(asked, search, prover, row, int(limit))
            if excluded:
                continue
            if other is not None:
                found[row] = other
        num_closed += 1
    measured = (_near_plan(asked, other, own) for other in found.values())
    plans = sorted((near for near in measured if near is not None), key=lambda near: near.excess)
    return NearBest(within, tuple(plans), num_closed, len(search.whole))


def _solver(gap: float, deadline: float) -> LayoutSolver:
    options = SolveOptions(gap=gap, witness=False, any_chunks=False)
    return LayoutSolver(options, backend(options.backend), [], deadline)


def _settled(
    problem: Problem, search: Search, prover: LayoutSolver, row: int, limit_ns: int
) -> tuple[bool, Plan | None]:
    """Test whether a layout is decided: either provably without a plan of at most ``limit_ns``, or with such a
    plan."""
    layout = search.explored.space.at(row)
    if problem.space.kind == "uniform":
        return _uniform(problem, search, row, limit_ns)
    settings = contexts_of(problem, layout, cluster_costs(problem, LayoutColumns.of([layout])).at(0))
    bound = int(search.explored.bounds_ns[row])
    if layout.replica_micro_batches:
        resolution = resolve_views(prover, layout, settings, (), limit_ns, bound, effort=0)
    else:
        resolution = prover.resolve(settings[0], limit_ns, bound, effort=0)
    step = resolution.step_time_ns
    if step is not None and step <= limit_ns:
        return False, resolution.plan
    return resolution.bound_ns > limit_ns, None


def _uniform(problem: Problem, search: Search, row: int, limit_ns: int) -> tuple[bool, Plan | None]:
    """Decide a layout of the uniform space, which has one plan per recompute mode, by simulating those whose
    bounds allow it."""
    layout = search.explored.space.at(row)
    best: tuple[int, Plan] | None = None
    if not has_uniform_plan(problem.model, layout.num_virtual_stages):
        return True, None
    for mode, bound_ns in zip(problem.recompute_modes, search.explored.uniform_ns[row], strict=True):
        # A layout without computed bounds has infinite ones, which prove nothing.
        if bound_ns > limit_ns and search.explored.detailed[row]:
            continue
        plan = uniform_plan(problem, layout, mode)
        step = search.evaluate(row, plan)
        if step is not None and step <= limit_ns and (best is None or step < best[0]):
            best = step, plan
    return best is None, None if best is None else best[1]


def _near_plan(problem: Problem, plan: Plan, own: float) -> NearPlan | None:
    report = simulate(problem, plan)
    if not report.fits_with_margin:
        return None
    weights, _ = objective_weights(problem, LayoutColumns.of([plan.layout]))
    excess = report.step_time_ns * float(weights[0]) / own - 1.0
    return NearPlan(plan, report.step_time_ns / NS_PER_S, report.peak_memory_bytes, excess)


Answer = TypeVar("Answer")


def plan_overview(
    problem: Problem,
    plan: Plan,
    *,
    time_limit_s: float = DEFAULT_LIMIT_S,
    within: float = WITHIN,
    forbid: Sequence[Mapping[str, object]] = (),
) -> Overview:
    """Analyse a plan: its step, its traffic, its rivals and its launch files.

    Args:
        problem, plan: the plan to show.
        time_limit_s: of everything; other layouts that do nearly as well get what the rest leaves, and where
            nothing is left only bounds are used.
        within: relative distance up to which such layouts are listed.
        forbid: layouts that count as illegal, as in ``solve``.

    Raises:
        IllegalPlanError: the plan cannot run.
    """
    deadline = time.monotonic() + time_limit_s
    report, lanes = simulate(problem, plan), step_lanes(problem, plan)
    traffic_of_plan = _or_missing(lambda: traffic(problem, plan))
    rule, exports = _rule(problem, plan), _exports(problem, plan)
    left_s = max(0.0, deadline - time.monotonic())
    near = _or_missing(lambda: _near(problem, plan, within, left_s, forbid))
    left_s = max(0.0, deadline - time.monotonic())
    return Overview(
        problem=problem,
        plan=plan,
        report=report,
        lanes=lanes,
        traffic=traffic_of_plan,
        near=near,
        rule=rule,
        exports=exports,
        break_even=_break_even(problem, plan, near, left_s) if report.fits else None,
    )


def _break_even(problem: Problem, plan: Plan, near: NearBest | Missing, limit_s: float) -> BreakEvens | None:
    """Compare the plan with the near plans from doubt to doubt; None where the search was interrupted."""
    kept = () if isinstance(near, Missing) else [other.plan for other in near.plans]
    try:
        return break_evens(asked_for(problem, plan), plan, kept, SOLVE_GAP, Deadline.after(limit_s))
    except (KeyboardInterrupt, MilpplanError):
        return None


def _near(
    problem: Problem, plan: Plan, within: float, time_limit_s: float, forbid: Sequence[Mapping[str, object]]
) -> NearBest | Missing:
    """Find other layouts that do nearly as well, within a time limit because the rest of the page waits for
    them."""
    try:
        return near_best(problem, plan, within, time_limit_s, forbid)
    except KeyboardInterrupt:
        return Missing(
            "The search for other layouts that do nearly as well was interrupted.",
            "It takes as long as --time-limit says.",
            "Make the page again, or with --time-limit 0.",
        )


def _or_missing(question: Callable[[], Answer]) -> Answer | Missing:
    try:
        return question()
    except MilpplanError as error:
        return Missing.of(error)


def _rule(problem: Problem, plan: Plan) -> RuleOfThumb | Missing:
    """Apply the rule of thumb to the plan's own number of GPUs and batch."""
    if problem.inference or problem.other_hardware:
        what = "inference" if problem.inference else "a cluster of several node types"
        return Missing(
            f"The job is {what}.",
            "The published rule of thumb is for training on nodes of one type.",
            "Compare with a plan of your own: milpplan compare A.json B.json.",
        )
    layout = plan.layout
    asked = with_job(problem, num_gpus=layout.num_gpus, global_batch_size=layout.global_batch_size)
    rule = rule_of_thumb(asked)
    if rule is None:
        return Missing(
            "The rule of thumb has no plan that fits here, even with more pipeline stages than its table says.",
            "It needs degrees that divide this number of GPUs and this batch, and memory for its choices.",
            "Compare with a plan of your own: milpplan compare A.json B.json.",
        )
    return rule


def _exports(problem: Problem, plan: Plan) -> tuple[ExportTab, ...]:
    # Imported late: launchers load hundreds of arguments, which mere imports of the library do not need.
    from milpplan.launchers import target_named, target_names

    return tuple(_export(name, target_named(name, "target"), problem, plan) for name in target_names())


def _export(name: str, target: Launcher, problem: Problem, plan: Plan) -> ExportTab:
    from milpplan.launchers.scripts import job_files

    version = target.capability.versions[0]
    title = target.capability.name
    try:
        launch = target.export(problem, plan, version)
        files = target.files(launch, __version__)
        files |= job_files("slurm", launch, __version__, files, problem.hardware.name)
    except MilpplanError as error:
        return ExportTab(name, title, version, {}, refusal=Missing.of(error))
    return ExportTab(name, title, version, files, tuple(launch.notes))
