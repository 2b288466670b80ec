"""The exact simulator: step time, time breakdown and memory of a plan.

The step time is the longest path through the schedule's graph (``milpplan.simulation.pipeline.step_graph``). The
durations on that graph are those of the virtual stages (``milpplan.simulation.stages``). Memory follows from the
order of work on every rank, which the schedule fixes.

A plan must fit its problem: the job's number of GPUs and sequences, and degrees that suit the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from milpplan.errors import IllegalPlanError
from milpplan.problem import (
    INSIDE_MOE,
    NO_MODULES,
    PAIRED_SCHEDULES,
    SPLIT_SCHEDULES,
    Job,
    Layout,
    MixtureOfExperts,
    ModelSpec,
    Plan,
    Problem,
    Range,
)
from milpplan.simulation.layers import EXPOSED, ONCE, Part, Phase, mfu
from milpplan.simulation.layers.shard import PAIRED, WORK
from milpplan.simulation.layout_columns import IntArray, LayoutColumns
from milpplan.simulation.layout_costs import LayoutCosts, step_overhead_ns
from milpplan.simulation.mixed_costs import (
    RankCosts,
    ReplicaCosts,
    check_replicas,
    cluster_costs,
    costs_of,
    costs_of_replicas,
    joined_report,
    rank_capacities,
    rank_types,
    view_plans,
)
from milpplan.simulation.network import placement
from milpplan.simulation.pipeline import step_graph
from milpplan.simulation.pipeline.step_graph import StepGraph, Term, Timeline
from milpplan.simulation.pipeline.work_orders import check_schedule, held_bytes, live_profiles, num_pairs
from milpplan.simulation.stages import EMBEDDING, HEAD, StageOptions, durations, plan_stages
from milpplan.simulation.step_report import BREAKDOWN, HIDDEN, StageMemory, StageReport, StepReport
from milpplan.units import NS_PER_S

Legality = tuple[bool, str, str]
"""Rule of a layout: True if the layout keeps it, the values seen, and the expectation."""


def check_rules(rules: Iterable[Legality]) -> None:
    """Check rules.

    Raises:
        IllegalPlanError: a rule is broken; the message names the first such rule.
    """
    for legal, seen, expected in rules:
        if not legal:
            raise IllegalPlanError(f"The layout has {seen}.", f"Expected: {expected}.", "Change the layout.")


def check_job(job: Job, layout: Layout) -> None:
    """Compare a layout with the numbers, or ranges of numbers, of a job.

    Raises:
        IllegalPlanError: the layout has another number of GPUs, or another global batch (sequences).
    """
    quantities = (
        ("GPUs", "job.num_gpus", layout.num_gpus, job.num_gpus),
        ("sequences a step", "job.global_batch_size", layout.global_batch_size, job.global_batch_size),
    )
    for name, field, value, values in quantities:
        if not _admitted(values, value):
            raise IllegalPlanError(
                f"The plan has {value:,} {name}.",
                f"The problem asks for {_text(values)} ({field}).",
                f"Change the degrees and the batch of the plan, or {field} of the problem.",
            )


def _admitted(values: int | Range, value: int) -> bool:
    """Check that a job admits a value."""
    if isinstance(values, int):
        return value == values
    return value in range(values.minimum, values.maximum + 1, values.step)


def _text(values: int | Range) -> str:
    """Write a number or a range for a message."""
    if isinstance(values, int):
        return f"{values:,}"
    steps = f" in steps of {values.step:,}" if values.step > 1 else ""
    return f"{values.minimum:,} to {values.maximum:,}{steps}"


def check_plan_of_model(model: ModelSpec, plan: Plan) -> None:
    """Check that a plan suits a model; job and hardware do not matter.

    Raises:
        IllegalPlanError: the plan does not cover the model, or its degrees do not suit it.
    """
    layout = plan.layout
    if plan.virtual_stages[-1].layers[1] != model.num_layers:
        raise IllegalPlanError(
            f"The plan holds {plan.virtual_stages[-1].layers[1]} layers.",
            f"{model.name} has {model.num_layers}.",
            "Make the virtual stages cover every layer once.",
        )
    share = layout.dp * layout.micro_batch_size
    if layout.global_batch_size % share:
        raise IllegalPlanError(
            f"global_batch_size={layout.global_batch_size} is not a multiple of dp={layout.dp} x "
            f"micro_batch_size={layout.micro_batch_size}.",
            "Every replica runs a whole number of micro-batches.",
            "Change one of the three.",
        )
    if model.taking_layers:
        _check_selections(model, plan)
    check_rules(_model_rules(model, layout))
    try:
        check_schedule(layout.schedule, layout.pp, layout.num_micro_batches, layout.vpp)
    except ValueError as error:
        raise IllegalPlanError(
            f"The schedule cannot run: {error}.", "", "Change the schedule, pp, vpp or the batch."
        ) from error


def _check_selections(model: ModelSpec, plan: Plan) -> None:
    """Check that no virtual stage starts with a layer that takes the keys of the layer before."""
    stages = [stage.layers for stage in plan.virtual_stages]
    if split := [first for first, end in stages if first < end and first in model.taking_layers]:
        others = sorted(set(range(model.num_layers)) - model.taking_layers)
        raise IllegalPlanError(
            f"A virtual stage starts with layer {split[0]}, which takes the keys of the layer before it.",
            "Selections do not cross stages (Megatron-LM: Cross-PP top-k sharing is not supported).",
            f"Start stages with one of {', '.join(map(str, others))}.",
        )


def _model_rules(model: ModelSpec, layout: Layout) -> list[Legality]:
    """List the rules of a model: whole heads and whole experts on every rank."""
    experts = [kind.mlp for kind in model.kinds if isinstance(kind.mlp, MixtureOfExperts)]
    ranks = layout.tp * layout.cp * layout.dp
    expert_ranks = f"ep={layout.ep} x etp={layout.etp}"
    rules = [
        (heads % layout.tp == 0, f"tp={layout.tp}", "tp divides the attention heads (1 with compressed keys)")
        for kind in model.kinds
        for heads in kind.head_counts
    ]
    rules += [
        (
            layout.cp == 1 or heads % (layout.tp * layout.cp) == 0,
            f"tp={layout.tp} x cp={layout.cp}",
            "tp x cp divides the heads that a linear recurrence exchanges (cp is 1 with gates of low rank)",
        )
        for kind in model.kinds
        for heads in kind.exchanged_heads
    ]
    rules += [
        (
            bool(experts) or layout.ep * layout.etp == 1,
            expert_ranks,
            "ep and etp are 1 in a model without experts",
        ),
        (ranks % (layout.ep * layout.etp) == 0, expert_ranks, "ep x etp divides tp x cp x dp"),
        (
            layout.dp % layout.dp_replicate == 0 and layout.expert_dp % layout.dp_replicate == 0,
            f"dp_replicate={layout.dp_replicate} with dp={layout.dp} and {layout.expert_dp} replicas of experts",
            "dp_replicate divides dp and the replicas of every expert",
        ),
        (
            layout.dp_replicate == 1 or (layout.zero_stage > 0 and layout.dp_replicate < layout.dp),
            f"dp_replicate={layout.dp_replicate} with dp={layout.dp} and ZeRO {layout.zero_stage}",
            "hybrid sharding has ZeRO 1 or more, and groups of at least two replicas (else it is ZeRO 0)",
        ),
        (
            not experts or bool(placement.stages_agree(LayoutColumns.of([layout]).mapping)[0]),
            f"rank_order={layout.rank_order} with {expert_ranks}",
            "every stage has the same ranks for experts and for the rest",
        ),
        (
            layout.schedule not in SPLIT_SCHEDULES or not layout.offloads,
            f"something offloaded with schedule {layout.schedule}",
            "offloading goes with schedules that do not split the backward",
        ),
    ]
    return rules + [
        (moe.num_experts % layout.ep == 0, f"ep={layout.ep}", "ep divides the experts") for moe in experts
    ]


def simulate(problem: Problem, plan: Plan) -> StepReport:
    """Simulate one step of a plan.

    With heterogeneous replicas the step is simulated once for each node type, and the reports are joined.

    Args:
        problem: model, cluster and job.
        plan: layout and virtual stages; need not be in the problem's space.

    Returns:
        Times in seconds, memory in bytes, for the whole step and for every pipeline rank.

    Raises:
        IllegalPlanError: the plan does not cover the model, has another number of GPUs or another batch than the
            job, or its schedule does not exist for its degrees.
    """
    check_plan(problem, plan)
    if plan.layout.replica_micro_batches:
        views = costs_of_replicas(problem, plan.layout).views
        pairs = zip(views, view_plans(problem, plan), strict=True)
        reports = [_report(view.problem, view_plan, view.costs) for view, (_, view_plan) in pairs]
        return joined_report(problem, plan, reports)
    return _report(problem, plan, costs_of(problem, plan.layout))


def _report(problem: Problem, plan: Plan, costs: RankCosts) -> StepReport:
    """Simulate a plan whose replicas are all alike; the plan has been checked."""
    layout = plan.layout
    stages = plan_stages(costs, problem.model.layer_kinds, plan)
    timeline = _timeline(layout, costs, stages)
    reports = _stage_reports(problem, plan, costs, stages, timeline)
    step_ns = timeline.step_time_ns
    step_s = step_ns / NS_PER_S
    tokens_per_s = layout.global_batch_size * problem.job.sequence_length / step_s
    types = [problem.node_types[node_type] for node_type in rank_types(problem, layout)]
    tightest = max(range(layout.pp), key=lambda rank: reports[rank].memory.peak_bytes - types[rank].usable_bytes)
    tightest_host = max(
        range(layout.pp), key=lambda rank: reports[rank].memory.host_bytes - types[rank].host_bytes
    )
    hardware, usable = types[tightest], types[tightest].usable_bytes
    peak, host = reports[tightest].memory.peak_bytes, reports[tightest_host].memory.host_bytes
    return StepReport(
        step_time_s=step_s,
        step_time_ns=step_ns,
        tokens_per_s=tokens_per_s,
        mfu=mfu(problem, tokens_per_s, layout.num_gpus),
        peak_memory_bytes=peak,
        usable_memory_bytes=usable,
        context_bytes=hardware.reserved_bytes,
        fragmentation_bytes=hardware.accelerator.memory_bytes - hardware.reserved_bytes - usable,
        fits=peak <= usable and host <= types[tightest_host].host_bytes,
        breakdown_s=_mean([report.breakdown_s for report in reports], BREAKDOWN),
        hidden_s=_mean([report.hidden_s for report in reports], HIDDEN),
        stages=tuple(reports),
        host_memory_bytes=host,
        host_capacity_bytes=types[tightest_host].host_bytes,
    )


def check_plan(problem: Problem, plan: Plan) -> None:
    """Check that a plan is a plan for the problem's job and model, and that it can run.

    The rules of the problem's space are not checked here; they belong to the planner.

    Raises:
        IllegalPlanError: a rule is broken.
    """
    layout = plan.layout
    check_job(problem.job, layout)
    if layout.replica_micro_batches:
        check_replicas(problem, layout)
        for view_problem, view_plan in view_plans(problem, plan):
            check_plan(view_problem, view_plan)
        return
    check_plan_of_model(problem.model, plan)
    check_rules(_job_rules(problem, layout))
    _check_forwards(problem, plan)


def _check_forwards(problem: Problem, plan: Plan) -> None:
    """Reject plans of an inference job that order backwards or recompute layers: there is no backward."""
    recomputed = sum(stage.recompute.full + stage.recompute.selective for stage in plan.virtual_stages)
    layout = plan.layout
    if problem.inference and (recomputed or (layout.pp > 1 and layout.schedule != "gpipe")):
        raise IllegalPlanError(
            f"The job is inference; the plan has schedule {layout.schedule} and recomputes {recomputed} layers.",
            "Expected schedule gpipe, whose forwards fill and drain the pipeline, and no recomputation.",
            "Change the plan, or make the job one of training.",
        )


def _job_rules(problem: Problem, layout: Layout) -> list[Legality]:
    """List the rules on degrees and on the hardware: whole tokens on every rank, a host memory to offload to."""
    length = problem.job.sequence_length
    heads, ulysses = problem.model.common_heads, layout.ulysses
    together = problem.job.sequences_together
    keeps = not (problem.inference or problem.job.further_forwards or layout.offload_weights)
    boundary = problem.model.boundary_tokens if problem.model.has_indexers else 1
    rules = [
        (length % layout.cp == 0, f"cp={layout.cp}", "cp divides the sequence length"),
        (
            layout.cp == 1 or length >= layout.cp * boundary,
            f"cp={layout.cp}",
            f"at least {boundary} tokens a rank",
        ),
        (
            layout.micro_batch_size % together == 0,
            f"micro_batch_size={layout.micro_batch_size}",
            f"the {together} sequences of a pair share a micro-batch",
        ),
        (
            not (problem.job.reference_copies and layout.offload_weights),
            "offload_weights beside a frozen reference",
            "the reference's weights stay on the device, and so do the policy's",
        ),
        (
            layout.expert_dispatch != "allgather" or layout.etp == 1,
            f"expert_dispatch=allgather with etp={layout.etp}",
            "whole experts (etp=1) where all ranks gather all tokens",
        ),
        (
            not layout.keep_weights or (layout.zero_stage == 3 and layout.pp == 1 and keeps),
            f"keep_weights=true with ZeRO {layout.zero_stage} and pp={layout.pp}",
            "ZeRO 3 without a pipeline, training with one forward a micro-batch, and weights on the device",
        ),
        (
            problem.job.optimizer == "adam" or layout.zero_stage <= 1,
            f"ZeRO {layout.zero_stage}, and the job optimizer {problem.job.optimizer}",
            "ZeRO 0 or 1, which leave every matrix whole on some rank",
        ),
        (
            problem.prices_modules(layout.recompute_modules)
            and (layout.gather_again or layout.recompute_modules == NO_MODULES),
            f"recompute_modules={layout.recompute_modules}, gather_again={layout.gather_again}",
            "gather_again=true, moe without modules inside it, and modules of the model: "
            + (", ".join(problem.recompute_modules) or "none here"),
        ),
        (
            ulysses == 1 or (layout.cp % ulysses == 0 and heads % (layout.tp * ulysses) == 0),
            f"ulysses={ulysses} with cp={layout.cp} and tp={layout.tp}",
            f"ulysses divides cp, and tp x ulysses the heads of queries, keys and values (multiples of {heads})",
        ),
    ]
    if layout.offload_modules != NO_MODULES:
        inside = not {*layout.offload_modules.split("+")}.isdisjoint(INSIDE_MOE)
        inside &= "moe" in layout.recompute_modules.split("+")
        rules.append(
            (
                problem.prices_offload(layout.offload_modules) and not (layout.offload_activations or inside),
                f"offload_modules={layout.offload_modules}, offload_activations={layout.offload_activations}, "
                f"recompute_modules={layout.recompute_modules}",
                "offload_activations=false, attn_proj beside core_attn, none inside a recomputed moe, and modules "
                "of the model: " + (", ".join(problem.offload_modules) or "none here"),
            )
        )
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
    """List the rules of a cluster of several node types, as (legal, seen, expected)."""
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
    """Simulate the step times of many plans of one layout.

    Args:
        layout: layout that all plans share.
        costs: constants of the layout.
        matrices: durations of the plans' virtual stages, nanoseconds [B, Term, J].

    Returns:
        Step times in nanoseconds, [B].
    """
    graph = StepGraph.of(layout, costs.transfer_ns, costs.barrier_ns)
    return np.asarray(step_graph.step_time_ns(graph, matrices))


def plan_step_ns(problem: Problem, plan: Plan, costs: RankCosts | ReplicaCosts) -> int:
    """Simulate the step time of a plan from its layout's constants, in nanoseconds; the plan is not checked."""
    if isinstance(costs, ReplicaCosts):
        views = enumerate(costs.views)
        return max(plan_step_ns(v.problem, plan.of_replicas(t, v.layout), v.costs) for t, v in views)
    stages = plan_stages(costs, problem.model.layer_kinds, plan)
    return int(step_times_ns(plan.layout, costs, durations(stages)))


def step_weight(problem: Problem, plan: Plan, best: Plan) -> float:
    """Return what a second of one plan's step counts for one of another: by sequences, and by GPUs where GPU-hours
    are the objective."""
    weight = best.layout.global_batch_size / plan.layout.global_batch_size
    if problem.job.objective == "gpu_hours":
        weight *= plan.layout.num_gpus / best.layout.num_gpus
    return weight


def step_times_s(problem: Problem, plans: Sequence[Plan]) -> list[float]:
    """Simulate the step times of plans, without their reports; the constants of all layouts are computed together.

    Args:
        problem: model, cluster and job.
        plans: plans of the problem's job; they need not be in the problem's space.

    Returns:
        Step times in seconds, each equal to that of ``simulate``.

    Raises:
        IllegalPlanError: as in ``simulate``.
    """
    for plan in plans:
        check_plan(problem, plan)
    costs = cluster_costs(problem, LayoutColumns.of([plan.layout for plan in plans]))
    return [plan_step_ns(problem, plan, costs.at(row)) / NS_PER_S for row, plan in enumerate(plans)]


def _timeline(layout: Layout, costs: RankCosts, stages: Sequence[StageOptions]) -> Timeline:
    graph = StepGraph.of(layout, costs.transfer_ns, costs.barrier_ns)
    return step_graph.simulate_times(graph, durations(stages))


def rank_memory(layout: Layout, costs: RankCosts, stages: Sequence[StageOptions]) -> list[StageMemory]:
    """Find the peak memory of every pipeline rank, on the device and on the host.

    The peak is a maximum over the backwards of the rank. The order of work fixes which activations are alive at
    each of them (``live_profiles``).
    """
    profiles = live_profiles(layout.schedule, layout.pp, layout.num_micro_batches, layout.vpp)
    reports = []
    for rank, profile in enumerate(profiles):
        chunks = [stages[j] for j in layout.rank_stages[rank]]
        state_bytes = np.sum([stage.state_bytes for stage in chunks], axis=0)
        kept = held_bytes(
            np.array([int(stage.kept_bytes[0]) for stage in chunks], dtype=np.int64),
            np.array([stage.deferred_bytes for stage in chunks], dtype=np.int64),
            len(profile[0][1]),
        )
        counts = np.array([counts for _, counts in profile], dtype=np.int64)
        alive = counts @ kept
        temporary = np.array([int(stage.transient_bytes[0]) for stage in chunks])[[chunk for chunk, _ in profile]]
        # Among equal peaks, report the moment with the most live activations.
        peak = np.lexsort((alive, alive + temporary))[-1]
        live, transient = int(alive[peak]), int(temporary[peak])
        buffers = int(costs.of_rank(rank).buffer_bytes)
        total = int(state_bytes.sum()) + buffers + live + transient
        weights, gradients, optimizer = (int(part) for part in state_bytes)
        host_kept = np.array([int(stage.host_kept_bytes[0]) for stage in chunks], dtype=np.int64)
        host = int((counts[:, : len(chunks)] @ host_kept).max())
        host += int(sum(stage.host_state_bytes for stage in chunks))
        reports.append(StageMemory(weights, gradients, optimizer, live, transient, buffers, total, host))
    return reports


def fits_in_memory(problem: Problem, layout: Layout, memory: Sequence[StageMemory]) -> bool:
    """Check that every rank leaves the margin of the problem's space, and fits the host of its node type."""
    hosts = [problem.node_types[node_type].host_bytes for node_type in rank_types(problem, layout)]
    return all(
        rank.peak_bytes <= capacity and rank.host_bytes <= host
        for rank, capacity, host in zip(memory, rank_capacities(problem, layout), hosts, strict=True)
    )


@dataclass(frozen=True, slots=True)
class _RankTimes:
    """Time breakdown of one rank's step, in nanoseconds by name (``BREAKDOWN``, ``HIDDEN``)."""

    breakdown: dict[str, int]
    hidden: dict[str, int]


def _stage_reports(
    problem: Problem, plan: Plan, costs: RankCosts, stages: Sequence[StageOptions], timeline: Timeline
) -> list[StageReport]:
    """Report every pipeline rank: its time breakdown and its memory."""
    memory = rank_memory(plan.layout, costs, stages)
    types = [problem.node_types[node_type] for node_type in rank_types(problem, plan.layout)]
    capacities = rank_capacities(problem, plan.layout)
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
                capacities[rank],
                types[rank].capacity_bytes(),
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
    """Break the step of one pipeline rank down into named parts; the bubble is the remainder."""
    layout = plan.layout
    own = layout.rank_stages[rank]
    parts, recompute = _parts_ns(problem, plan, costs.of_rank(rank), own)
    micro_batches = layout.num_micro_batches
    terms = np.sum([stages[j].terms[:, 0] for j in own], axis=0)
    ends = timeline.weight_end_ns if timeline.weight_end_ns.size else timeline.backward_end_ns
    last_end = int(max(ends[j, -1] for j in own))
    reduce_exposed = int(timeline.gradients_ready_ns[rank]) - last_end
    gather_exposed = _gather_exposed(layout, costs, timeline, rank, int(terms[Term.GATHER]))
    overhead_ns, whole_matrix = step_overhead_ns(problem), int(costs.of_rank(rank).whole_matrix_ns)
    offload, update = _offload_ns(problem, plan, costs.of_rank(rank), own)
    breakdown = dict.fromkeys(BREAKDOWN, 0) | {
        "compute": micro_batches * int(parts[Part.COMPUTE]) - micro_batches * recompute[Part.COMPUTE],
        "recompute": micro_batches * int(recompute[EXPOSED].sum()),
        "param_gather_exposed": gather_exposed,
        "grad_reduce_exposed": reduce_exposed,
        "launch": micro_batches * int(parts[Part.LAUNCH] - recompute[Part.LAUNCH]),
        "grad_norm": 0 if problem.inference else int(costs.barrier_ns) - overhead_ns - whole_matrix,
        "step_overhead": overhead_ns,
        "optimizer": int(terms[Term.OPTIMIZER]) - int(update[0]) + whole_matrix,
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
    """Measure how long the rank's first forward waits for parameters after its input has arrived, in ns."""
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
    """Sum the times of a rank's virtual stages by part.

    Returns:
        Nanoseconds per micro-batch, [Part]: with recomputation, and of recomputation alone.
    """
    kinds = problem.model.layer_kinds
    parts = np.zeros(len(Part), dtype=np.int64)
    recompute = np.zeros(len(Part), dtype=np.int64)
    final = plan.layout.num_virtual_stages - 1
    for j in own:
        stage = plan.virtual_stages[j]
        layers = np.array(kinds[stage.layers[0] : stage.layers[1]], dtype=np.int64)
        split = stage.recompute.full, stage.recompute.full + stage.recompute.selective
        parts += costs.parts.layer[layers][:, :, ONCE].sum(axis=(0, 2))
        recompute += costs.parts.layer[layers[: split[0]], :, Phase.FULL].sum(axis=0)
        recompute += costs.parts.layer[layers[split[0] : split[1]], :, Phase.SELECTIVE].sum(axis=0)
        if j == 0:
            parts += costs.parts.embedding.sum(axis=1)
        if j == final:
            parts += costs.parts.head.sum(axis=1)
    return parts + recompute, recompute


def _offload_ns(problem: Problem, plan: Plan, costs: LayoutCosts, own: Sequence[int]) -> tuple[IntArray, IntArray]:
    """Sum the times of a rank's transfers to and from the host.

    Returns:
        Nanoseconds, each as [exposed, hidden]: per micro-batch, and of the optimizer's update.
    """
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
    """Average named values over the ranks."""
    return {name: float(np.mean([row[name] for row in rows])) for name in names}


def _saved_in_pairs_ns(layout: Layout, stages: Sequence[StageOptions], rank: int) -> int:
    """Sum what a rank saves because its forwards and backwards run in pairs, over all micro-batches, in ns."""
    if layout.schedule not in PAIRED_SCHEDULES:
        return 0
    first, second = (stages[j].terms[:, 0] for j in layout.rank_stages[rank])
    saved = np.stack([terms[list(WORK[:2])] - terms[list(PAIRED)] for terms in (first, second)])
    first_forward, second_forward = num_pairs(layout.pp, layout.num_micro_batches, rank)
    return int(first_forward * (saved[0, 0] + saved[1, 1]) + second_forward * (saved[1, 0] + saved[0, 1]))


def _covered_by_pairs(breakdown: dict[str, int], saved_ns: int) -> dict[str, int]:
    """Subtract what pairs save from the exposed communication in ``breakdown``, which is changed in place.

    Expert communication comes first, then the other kinds, and last the waits for kernel launches.

    Returns:
        Nanoseconds that pairs hide of each kind.
    """
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
    "plan_step_ns",
    "rank_memory",
    "simulate",
    "step_times_ns",
    "step_times_s",
]
