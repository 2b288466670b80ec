"""The exact simulator: one step of a plan, its time, where the time goes, and memory.

The step time is the longest path over the schedule's graph (``milpplan.simulation.pipeline.step_graph``) with the
durations of the virtual stages (``milpplan.simulation.stages``); memory follows from the fixed order of work on
every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from milpplan.errors import IllegalPlanError
from milpplan.problem.plan import PAIRED_SCHEDULES, SPLIT_SCHEDULES, Layout, Plan
from milpplan.problem.problem import Problem
from milpplan.simulation.layers.parameters import mfu
from milpplan.simulation.layers.terms import EXPOSED, ONCE, PAIRED, WORK, Part, Phase
from milpplan.simulation.layout_columns import IntArray, LayoutColumns
from milpplan.simulation.layout_costs import LayoutCosts, step_overhead_ns
from milpplan.simulation.mixed_costs import RankCosts, costs_of, rank_types
from milpplan.simulation.network import placement
from milpplan.simulation.pipeline import step_graph
from milpplan.simulation.pipeline.schedule import held_bytes, live_profiles
from milpplan.simulation.pipeline.step_graph import StepGraph, Term, Timeline
from milpplan.simulation.pipeline.work_order import num_pairs
from milpplan.simulation.replica_costs import check_replicas, costs_of_replicas, joined_report, view_plans
from milpplan.simulation.report import BREAKDOWN, HIDDEN, StageMemory, StageReport, StepReport
from milpplan.simulation.stages import EMBEDDING, HEAD, StageOptions, durations, plan_stages
from milpplan.simulation.validate_layout import Legality, check_job, check_plan_of_model, check_rules
from milpplan.units import NS_PER_S


def simulate(problem: Problem, plan: Plan) -> StepReport:
    """Simulate one training step of a plan.

    Raises:
        IllegalPlanError: the plan does not cover the model, has not the job's number of GPUs or batch, or its
            schedule does not exist for its degrees.
    """
    check_plan(problem, plan)
    if plan.layout.replica_micro_batches:
        views = costs_of_replicas(problem, plan.layout).views
        parts = zip(views, view_plans(problem, plan), strict=True)
        return joined_report(problem, plan, [_report(view.problem, own, view.costs) for view, (_, own) in parts])
    return _report(problem, plan, costs_of(problem, plan.layout))


def _report(problem: Problem, plan: Plan, costs: RankCosts) -> StepReport:
    layout = plan.layout
    stages = plan_stages(costs, problem.model.layer_kinds, plan)
    timeline = _timeline(layout, costs, stages)
    reports = _stage_reports(problem, plan, costs, stages, timeline)
    step_ns = timeline.step_time_ns
    step_s = step_ns / NS_PER_S
    rate = layout.global_batch_size * problem.job.sequence_length / step_s
    types = [problem.node_types[node_type] for node_type in rank_types(problem, layout)]
    tightest = max(range(layout.pp), key=lambda rank: reports[rank].memory.peak_bytes - types[rank].usable_bytes)
    on_host = max(range(layout.pp), key=lambda rank: reports[rank].memory.host_bytes - types[rank].host_bytes)
    hardware, usable = types[tightest], types[tightest].usable_bytes
    peak, host = reports[tightest].memory.peak_bytes, reports[on_host].memory.host_bytes
    return StepReport(
        step_time_s=step_s,
        step_time_ns=step_ns,
        tokens_per_s=rate,
        mfu=mfu(problem, rate, layout.num_gpus),
        peak_memory_bytes=peak,
        usable_memory_bytes=usable,
        context_bytes=hardware.reserved_bytes,
        fragmentation_bytes=hardware.accelerator.memory_bytes - hardware.reserved_bytes - usable,
        fits=peak <= usable and host <= types[on_host].host_bytes,
        breakdown_s=_mean([report.breakdown_s for report in reports], BREAKDOWN),
        hidden_s=_mean([report.hidden_s for report in reports], HIDDEN),
        stages=tuple(reports),
        host_memory_bytes=host,
        host_capacity_bytes=types[on_host].host_bytes,
    )


def check_plan(problem: Problem, plan: Plan) -> None:
    """Raise ``IllegalPlanError`` where a plan is not one for the problem's job and model, or cannot run at all
    (the space's rules are the planner's)."""
    layout = plan.layout
    check_job(problem.job, layout)
    if layout.replica_micro_batches:
        check_replicas(problem, layout)
        for alone, own in view_plans(problem, plan):
            check_plan(alone, own)
        return
    check_plan_of_model(problem.model, plan)
    check_rules(_job_rules(problem, layout))
    _check_forwards(problem, plan)


def _check_forwards(problem: Problem, plan: Plan) -> None:
    """Inference has no backward to order and nothing to recompute."""
    recomputed = sum(stage.recompute.full + stage.recompute.selective for stage in plan.virtual_stages)
    layout = plan.layout
    pipelined = layout.pp > 1 or layout.schedule in SPLIT_SCHEDULES
    if problem.inference and (recomputed or (pipelined and layout.schedule != "gpipe")):
        raise IllegalPlanError(
            f"The job is inference; the plan has schedule {layout.schedule} and recomputes {recomputed} layers.",
            "Expected schedule gpipe, whose forwards fill and drain the step_graph, and no recomputation.",
            "Change the plan, or make the job one of training.",
        )


def _job_rules(problem: Problem, layout: Layout) -> list[Legality]:
    """Degrees that leave a rank with a fraction of a token, and what the hardware does not have."""
    length = problem.job.sequence_length
    rules = [(length % layout.cp == 0, f"cp={layout.cp}", "cp divides the sequence length")]
    rules += [
        (
            hardware.host_memory is not None or not layout.offloads,
            f"something offloaded, but {hardware.name} has no [host_memory]",
            "offloading needs a second tier of memory",
        )
        for hardware in problem.node_types
    ]
    return rules + _node_rules(problem, layout)


def _node_rules(problem: Problem, layout: Layout) -> list[Legality]:
    """What several node types demand, as (legal, seen, expected)."""
    types, seen = len(problem.node_types), f"node_order={list(layout.node_order)}"
    if types == 1:
        return [(not layout.node_order, seen, "no node_order with one node type")]
    gpus, blocks = problem.node_gpus, placement.stages_are_blocks(LayoutColumns.of([layout]).mapping)
    return [
        (
            sorted(layout.node_order) == list(range(types)),
            seen,
            f"node_order names each of {types} node types once",
        ),
        (
            all(layout.pp * count % sum(gpus) == 0 for count in gpus),
            f"pp={layout.pp} ranks of {layout.num_gpus // layout.pp} GPUs",
            f"the GPUs of every node type ({', '.join(map(str, gpus))}) are whole pipeline ranks",
        ),
        (
            bool(blocks[0]),
            f"rank_order={layout.rank_order}",
            "with several node types the GPUs of a stage are neighbours (pp comes last)",
        ),
    ]


def step_times_ns(layout: Layout, costs: RankCosts, matrices: IntArray) -> IntArray:
    """Step times [B] of a batch of duration matrices [B, Term, J] of one layout."""
    graph = StepGraph.of(layout, costs.transfer_ns, costs.barrier_ns)
    return np.asarray(step_graph.step_time_ns(graph, matrices))


def _timeline(layout: Layout, costs: RankCosts, stages: Sequence[StageOptions]) -> Timeline:
    graph = StepGraph.of(layout, costs.transfer_ns, costs.barrier_ns)
    return step_graph.simulate_times(graph, durations(stages))


def rank_memory(layout: Layout, costs: RankCosts, stages: Sequence[StageOptions]) -> list[StageMemory]:
    """Peak memory of every pipeline rank, on the device and on the host: the most over the backwards of its
    schedule, whose live activations are fixed by the order of work."""
    profiles = live_profiles(layout.schedule, layout.pp, layout.num_micro_batches, layout.vpp)
    reports = []
    for rank, rows in enumerate(profiles):
        held = [stages[j] for j in layout.rank_stages[rank]]
        parts = np.sum([stage.state_bytes for stage in held], axis=0)
        kept = held_bytes(
            np.array([int(stage.kept_bytes[0]) for stage in held], dtype=np.int64),
            np.array([stage.deferred_bytes for stage in held], dtype=np.int64),
            len(rows[0][1]),
        )
        counts = np.array([counts for _, counts in rows], dtype=np.int64)
        alive = counts @ kept
        passing = np.array([int(stage.transient_bytes[0]) for stage in held])[[chunk for chunk, _ in rows]]
        # Of equal peaks the one with most alive.
        fullest = np.lexsort((alive, alive + passing))[-1]
        live, transient = int(alive[fullest]), int(passing[fullest])
        buffers = int(costs.of_rank(rank).buffer_bytes)
        total = int(parts.sum()) + buffers + live + transient
        weights, gradients, optimizer = (int(part) for part in parts)
        on_host = np.array([int(stage.host_kept_bytes[0]) for stage in held], dtype=np.int64)
        host = int((counts[:, : len(held)] @ on_host).max()) + int(sum(stage.host_state_bytes for stage in held))
        reports.append(StageMemory(weights, gradients, optimizer, live, transient, buffers, total, host))
    return reports


def fits_in_memory(problem: Problem, layout: Layout, memory: Sequence[StageMemory]) -> bool:
    """Whether every rank fits its own node type, on the device and on the host."""
    types = [problem.node_types[node_type] for node_type in rank_types(problem, layout)]
    return all(
        rank.peak_bytes <= own.usable_bytes and rank.host_bytes <= own.host_bytes
        for rank, own in zip(memory, types, strict=True)
    )


@dataclass(frozen=True, slots=True)
class _RankTimes:
    """Nanoseconds of one rank's step."""

    breakdown: dict[str, int]
    hidden: dict[str, int]


def _stage_reports(
    problem: Problem, plan: Plan, costs: RankCosts, stages: Sequence[StageOptions], timeline: Timeline
) -> list[StageReport]:
    memory = rank_memory(plan.layout, costs, stages)
    types = [problem.node_types[node_type] for node_type in rank_types(problem, plan.layout)]
    reports = []
    for rank in range(plan.layout.pp):
        times = _rank_times(problem, plan, costs, stages, timeline, rank)
        reports.append(
            StageReport(
                {name: value / NS_PER_S for name, value in times.breakdown.items()},
                {name: value / NS_PER_S for name, value in times.hidden.items()},
                memory[rank],
                types[rank].name,
                types[rank].usable_bytes,
            )
        )
    return reports


def _rank_times(
    problem: Problem,
    plan: Plan,
    costs: RankCosts,
    stages: Sequence[StageOptions],
    timeline: Timeline,
    rank: int,
) -> _RankTimes:
    layout = plan.layout
    own = layout.rank_stages[rank]
    parts, recompute = _parts_ns(problem, plan, costs.of_rank(rank), own)
    micro_batches = layout.num_micro_batches
    terms = np.sum([stages[j].terms[:, 0] for j in own], axis=0)
    ends = timeline.weight_end_ns if timeline.weight_end_ns.size else timeline.backward_end_ns
    last_end = int(max(ends[j, -1] for j in own))
    reduce_exposed = int(timeline.gradients_ready_ns[rank]) - last_end
    gather_exposed = _gather_exposed(layout, costs, timeline, rank, int(terms[Term.GATHER]))
    overhead_ns = step_overhead_ns(problem)
    offload, update = _offload_ns(problem, plan, costs.of_rank(rank), own)
    breakdown = dict.fromkeys(BREAKDOWN, 0) | {
        "compute": micro_batches * int(parts[Part.COMPUTE]) - micro_batches * recompute[Part.COMPUTE],
        "recompute": micro_batches * int(recompute[EXPOSED].sum()),
        "param_gather_exposed": gather_exposed,
        "grad_reduce_exposed": reduce_exposed,
        "launch": micro_batches * int(parts[Part.LAUNCH] - recompute[Part.LAUNCH]),
        "grad_norm": 0 if problem.inference else int(costs.barrier_ns) - overhead_ns,
        "step_overhead": overhead_ns,
        "optimizer": int(terms[Term.OPTIMIZER]) - int(update[0]),
        "offload_exposed": micro_batches * int(offload[0]) + int(update[0]),
    }
    for name, part in (("tp", Part.TP), ("cp", Part.CP), ("ep", Part.EP), ("zero", Part.ZERO)):
        breakdown[f"{name}_exposed"] = micro_batches * int(parts[part] - recompute[part])
    breakdown = {name: int(value) for name, value in breakdown.items()}
    covered = _covered_by_pairs(breakdown, _saved_in_pairs_ns(layout, stages, rank))
    breakdown["bubble"] = timeline.step_time_ns - sum(breakdown.values())
    hidden = {
        "tp_hidden": micro_batches * int(parts[Part.TP_HIDDEN]) + covered["tp"],
        "cp_hidden": micro_batches * int(parts[Part.CP_HIDDEN]) + covered["cp"],
        "ep_hidden": covered["ep"],
        "zero_hidden": micro_batches * int(parts[Part.ZERO_HIDDEN]) + covered["zero"],
        "offload_hidden": micro_batches * int(offload[1]) + int(update[1]),
        "param_gather_hidden": max(0, int(terms[Term.GATHER]) - gather_exposed),
        "grad_reduce_hidden": max(0, int(terms[Term.REDUCE]) - reduce_exposed),
    }
    return _RankTimes(breakdown, hidden)


def _gather_exposed(layout: Layout, costs: RankCosts, timeline: Timeline, rank: int, gather_ns: int) -> int:
    """How long the rank's first forward waits for parameters after its input has arrived."""
    if not layout.overlap_param_gather and rank == 0:
        return gather_ns
    arrival = 0
    if rank:
        arrival = int(timeline.forward_end_ns[rank - 1, 0]) + int(costs.transfer_ns)
        arrival += costs.crossing_ns(rank - 1)
    busy = int(timeline.forward_end_ns[rank, 0] - timeline.forward_start_ns[rank, 0])
    waited = int(timeline.forward_end_ns[rank, 0]) - busy - arrival
    return max(0, min(waited, gather_ns))


def _parts_ns(problem: Problem, plan: Plan, costs: LayoutCosts, own: Sequence[int]) -> tuple[IntArray, IntArray]:
    """Nanoseconds a micro-batch by part, [Part], of the rank's virtual stages: all of it, and the share that
    recomputation adds."""
    kinds = problem.model.layer_kinds
    parts = np.zeros(len(Part), dtype=np.int64)
    recompute = np.zeros(len(Part), dtype=np.int64)
    final = plan.layout.num_virtual_stages - 1
    for j in own:
        stage = plan.virtual_stages[j]
        held = np.array(kinds[stage.layers[0] : stage.layers[1]], dtype=np.int64)
        split = stage.recompute.full, stage.recompute.full + stage.recompute.selective
        parts += costs.parts.layer[held][:, :, ONCE].sum(axis=(0, 2))
        recompute += costs.parts.layer[held[: split[0]], :, Phase.FULL].sum(axis=0)
        recompute += costs.parts.layer[held[split[0] : split[1]], :, Phase.SELECTIVE].sum(axis=0)
        if j == 0:
            parts += costs.parts.embedding.sum(axis=1)
        if j == final:
            parts += costs.parts.head.sum(axis=1)
    return parts + recompute, recompute


def _offload_ns(problem: Problem, plan: Plan, costs: LayoutCosts, own: Sequence[int]) -> tuple[IntArray, IntArray]:
    """Nanoseconds of the host's transfers, (exposed, hidden) each: a micro-batch of the rank's virtual stages, and
    its update."""
    layers, update = np.zeros(2, dtype=np.int64), np.zeros(2, dtype=np.int64)
    final = plan.layout.num_virtual_stages - 1
    for j in own:
        stage = plan.virtual_stages[j]
        held = np.array(problem.model.layer_kinds[stage.layers[0] : stage.layers[1]], dtype=np.int64)
        full, recomputed = stage.recompute.full, stage.recompute.full + stage.recompute.selective
        for mode, part in enumerate((held[recomputed:], held[full:recomputed], held[:full])):
            layers += costs.parts.offload[:, mode, part].sum(axis=(1, 2))
        pieces = [*held.tolist(), *[EMBEDDING] * (j == 0), *[HEAD] * (j == final)]
        update += costs.parts.update[:, pieces].sum(axis=1)
    return layers, update


def _mean(rows: Sequence[dict[str, float]], names: Sequence[str]) -> dict[str, float]:
    return {name: float(np.mean([row[name] for row in rows])) for name in names}


def _saved_in_pairs_ns(layout: Layout, stages: Sequence[StageOptions], rank: int) -> int:
    """What a rank's forwards and backwards in pairs are shorter than alone, all micro-batches together."""
    if layout.schedule not in PAIRED_SCHEDULES:
        return 0
    first, second = (stages[j].terms[:, 0] for j in layout.rank_stages[rank])
    saved = np.stack([terms[list(WORK[:2])] - terms[list(PAIRED)] for terms in (first, second)])
    one, other = num_pairs(layout.pp, layout.num_micro_batches, rank)
    return int(one * (saved[0, 0] + saved[1, 1]) + other * (saved[1, 0] + saved[0, 1]))


def _covered_by_pairs(breakdown: dict[str, int], saved_ns: int) -> dict[str, int]:
    """Take what pairs save off the exposed communication of a rank, that of experts first, then off the waits for
    launches; says what of each kind is covered so."""
    covered = {}
    for name, part in (*((kind, f"{kind}_exposed") for kind in ("ep", "tp", "cp", "zero")), ("launch", "launch")):
        covered[name] = min(saved_ns, breakdown[part])
        breakdown[part] -= covered[name]
        saved_ns -= covered[name]
    assert saved_ns == 0, "pairs save communication and launches only"
    return covered


__all__ = [
    "EMBEDDING",
    "HEAD",
    "check_plan",
    "fits_in_memory",
    "rank_memory",
    "simulate",
    "step_times_ns",
]
