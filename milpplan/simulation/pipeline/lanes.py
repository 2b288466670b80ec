"""A simulated step as lanes: the work of every pipeline rank over time, on each of its streams.

**Pipelines** of a plan and their timelines: a single pipeline if all replicas are alike, else one for each node
type.

Heterogeneous replicas share their reductions, the norm and the update. A reduction starts when the last replica is
ready and the previous reduction of its rank is done. The time of such an event is its maximum over the views
(``mixed_costs``), because a maximum passes through sums and maxima.

**Memory** of every pipeline rank over a step, by part. The order of work on a rank is fixed, so memory is a step
function of time. A forward allocates at its start the bytes that its virtual stage keeps for a micro-batch. A
backward allocates at its start its temporary bytes, and frees both at its end. Where the backward is split, it
leaves the bytes that its weight gradients need, while its temporary bytes are still allocated; the weight
gradients free them at their end. Weights, gradients, optimizer states and buffers stay for the whole step. The
maximum of a rank is the ``peak_bytes`` of its ``StageMemory``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from milpplan.problem import Layout, Plan, Problem
from milpplan.simulation import (
    BoolArray,
    FloatArray,
    IntArray,
    RankCosts,
    StageOptions,
    costs_of,
    costs_of_replicas,
    durations,
    plan_stages,
    rank_memory,
    rank_types,
    view_plans,
)
from milpplan.simulation.pipeline.step_graph import StepGraph, Term, Timeline, simulate_times
from milpplan.simulation.pipeline.work_orders import Kind, WorkOrder, work_order
from milpplan.simulation.simulator import check_plan
from milpplan.units import NS_PER_S


@dataclass(frozen=True, slots=True)
class MemoryTimeline:
    """Memory of a rank over time: arrays of shape [events]. A value holds from its time to the next time."""

    time_s: FloatArray
    """Times of the events, not descending; simultaneous events are in the order in which they happen."""
    static_bytes: int
    """Weights, gradients, optimizer states and buffers, constant."""
    activations_bytes: IntArray
    """Activations that are kept for later backwards."""
    transient_bytes: IntArray
    """Temporary bytes of the running backward."""

    @property
    def total_bytes(self) -> IntArray:
        """Sum of all parts, [events]."""
        return np.asarray(self.static_bytes + self.activations_bytes + self.transient_bytes)


def memory_timelines(problem: Problem, plan: Plan) -> list[MemoryTimeline]:
    """Simulate the memory of every pipeline rank, by part.

    With heterogeneous replicas, the ranks of a replica on the first node type come first, then those on the next.

    Raises:
        IllegalPlanError: the plan cannot run.
    """
    return [memory for run in pipeline_runs(problem, plan) for memory in run_memory(run)]


def run_memory(run: PipelineRun) -> list[MemoryTimeline]:
    """Compute the memory of every rank of one pipeline over time."""
    timelines, layout = [], run.plan.layout
    for rank, memory in enumerate(rank_memory(layout, run.costs, run.stages)):
        parts = (memory.weights_bytes, memory.gradients_bytes, memory.optimizer_bytes, memory.buffers_bytes)
        timelines.append(_rank_timeline(layout, rank, run.stages, run.timeline, sum(parts)))
    return timelines


def _rank_timeline(
    layout: Layout, rank: int, stages: Sequence[StageOptions], timeline: Timeline, static_bytes: int
) -> MemoryTimeline:
    """Compute the memory of a rank over time.

    Its events are the start of the step, start and end of every work item in the order of the rank, and the end of
    the step.
    """
    order = work_order(layout.schedule, layout.pp, layout.num_micro_batches, layout.vpp, rank)
    stage, micro_batch = np.array(layout.rank_stages[rank])[order.chunk], order.micro_batch
    kept = np.array([int(option.kept_bytes[0]) for option in stages], dtype=np.int64)[stage]
    transient = np.array([int(option.transient_bytes[0]) for option in stages], dtype=np.int64)[stage]
    deferred = np.array([option.deferred_bytes for option in stages], dtype=np.int64)[stage]
    is_forward, is_backward, is_weight = (order.kind == kind for kind in Kind)
    starts, ends = np.empty_like(kept), np.empty_like(kept)
    for chosen, (start_ns, end_ns) in (
        (is_forward, (timeline.forward_start_ns, timeline.forward_end_ns)),
        (is_backward, (timeline.backward_start_ns, timeline.backward_end_ns)),
        (is_weight, (timeline.weight_start_ns, timeline.weight_end_ns)),
    ):
        rows = stage[chosen], micro_batch[chosen]
        starts[chosen], ends[chosen] = start_ns[rows], end_ns[rows]
    zeros, split = np.zeros_like(kept), bool(is_weight.any())
    waiting = deferred if split else zeros
    temporary = np.where(is_backward, transient, 0)
    # Events are (time, change of the activations, temporary bytes): the start of an item, its end, and with split
    # backwards a second event at its end, because the deferred bytes count before the temporary bytes are freed.
    at_end = np.where(is_backward, waiting - kept, 0) - np.where(is_weight, waiting, 0)
    events = [(starts, np.where(is_forward, kept, 0), temporary), (ends, at_end, zeros)]
    if split:
        events = [events[0], (ends, at_end, temporary), (ends, zeros, zeros)]
    event_ns, changes, running = (np.stack(columns, axis=1).ravel() for columns in zip(*events, strict=True))
    activations = np.cumsum(changes)
    times = np.concatenate([[0], event_ns, [timeline.step_time_ns]])
    # The backwards of inference have length 0 and may lie after the end of the step.
    times = np.minimum(times, timeline.step_time_ns)
    return MemoryTimeline(
        times / NS_PER_S,
        static_bytes,
        np.concatenate([[0], activations, activations[-1:]]),
        np.concatenate([[0], running, [0]]),
    )


__all__ = ["MemoryTimeline", "memory_timelines", "run_memory"]


SHARED_MOMENTS = ("gather_end_ns", "reduce_end_ns", "gradients_ready_ns")
"""Fields of ``Timeline`` that heterogeneous replicas share."""


@dataclass(frozen=True, slots=True, eq=False)
class PipelineRun:
    """One pipeline of a plan with its timeline."""

    node_type: int | None
    """Node type of the pipeline; None: all node types."""
    problem: Problem
    """Problem as this pipeline sees it (``ReplicaView``)."""
    plan: Plan
    """Plan as this pipeline sees it."""
    costs: RankCosts
    stages: tuple[StageOptions, ...]
    terms: IntArray
    """Durations [Term, J] in nanoseconds."""
    timeline: Timeline


def pipeline_runs(problem: Problem, plan: Plan) -> tuple[PipelineRun, ...]:
    """Simulate the different pipelines of a step: a single pipeline, or one for each node type.

    Raises:
        IllegalPlanError: the plan cannot run.
    """
    check_plan(problem, plan)
    if not plan.layout.replica_micro_batches:
        return (_run(None, problem, plan, costs_of(problem, plan.layout)),)
    views = zip(costs_of_replicas(problem, plan.layout).views, view_plans(problem, plan), strict=True)
    return _synchronised(
        [_run(number, view.problem, view_plan, view.costs) for number, (view, (_, view_plan)) in enumerate(views)]
    )


def _run(node_type: int | None, problem: Problem, plan: Plan, costs: RankCosts) -> PipelineRun:
    """Simulate one pipeline by itself."""
    stages = tuple(plan_stages(costs, problem.model.layer_kinds, plan))
    graph = StepGraph.of(plan.layout, costs.transfer_ns, costs.barrier_ns)
    terms = durations(stages)
    return PipelineRun(node_type, problem, plan, costs, stages, terms, simulate_times(graph, terms))


def _synchronised(runs: list[PipelineRun]) -> tuple[PipelineRun, ...]:
    """Move the events that the runs share to the time of the last run."""
    timelines = [run.timeline for run in runs]
    shared = {name: np.maximum.reduce([getattr(line, name) for line in timelines]) for name in SHARED_MOMENTS}
    start, step = (
        max(getattr(line, name) for line in timelines) for name in ("optimizer_start_ns", "step_time_ns")
    )
    synchronised = []
    for run in runs:
        rank_stages = np.array([list(stages) for stages in run.plan.layout.rank_stages])
        finish = start + run.terms[Term.OPTIMIZER][rank_stages].sum(axis=1)
        moments = shared | {"optimizer_start_ns": start, "step_time_ns": step, "finish_ns": finish}
        synchronised.append(replace(run, timeline=replace(run.timeline, **moments)))
    return tuple(synchronised)


LaneName = Literal["compute", "parameter gather", "gradient reduction", "to next stage", "to previous stage"]
LANES: tuple[LaneName, ...] = get_args(LaneName)
SliceKind = Literal[
    "forward", "backward", "weight gradients", "gather", "reduction", "activations", "gradients", "norm",
    "optimizer",
]  # fmt: skip
SLICE_KINDS: tuple[SliceKind, ...] = get_args(SliceKind)
"""``backward`` stands for the input gradients alone where the schedule splits the backward. ``norm`` is the
barrier of all ranks before the update: the global gradient norm and the overhead of a step."""


@dataclass(frozen=True, slots=True, eq=False)
class Lane:
    """Slices of one stream in the order in which they start: arrays [n]."""

    name: LaneName
    start_ns: IntArray
    end_ns: IntArray
    kind: IntArray
    """Index in ``SLICE_KINDS``."""
    stage: IntArray
    """Virtual stage, -1 for slices without a stage."""
    micro_batch: IntArray
    """Micro-batch, -1 for slices without a micro-batch."""

    def __len__(self) -> int:
        return len(self.start_ns)


@dataclass(frozen=True, slots=True, eq=False)
class RankLanes:
    """One pipeline rank: its lanes, and its memory over time."""

    rank: int
    """Index of the rank among the stages of a report."""
    name: str
    label: str
    """Number of the stage. Heterogeneous replicas put the number of the node type in front: ``1:0``."""
    num_gpus: int
    """GPUs that run this rank in all replicas, or in the replicas on one node type."""
    virtual_stages: tuple[int, ...]
    num_layers: tuple[int, ...]
    """Layers of every virtual stage of the rank."""
    lanes: tuple[Lane, ...]
    """Lanes that have slices."""
    memory: MemoryTimeline
    usable_memory_bytes: int

    def lane(self, name: LaneName) -> Lane | None:
        """Return the lane of a name; None if it has no slices."""
        return next((lane for lane in self.lanes if lane.name == name), None)


@dataclass(frozen=True, slots=True, eq=False)
class StepLanes:
    """One step of a plan: all ranks of one pipeline, or of one pipeline on each node type.

    The other replicas do the same work at the same time.
    """

    step_time_ns: int
    ranks: tuple[RankLanes, ...]

    @property
    def num_slices(self) -> int:
        """Number of slices on all lanes."""
        return sum(len(lane) for rank in self.ranks for lane in rank.lanes)


_Part = tuple[IntArray, IntArray, IntArray, IntArray, IntArray]
"""Columns of a lane's slices: start, end, kind, virtual stage, micro-batch."""


def step_lanes(problem: Problem, plan: Plan) -> StepLanes:
    """Simulate a step of a plan and list the work of every pipeline rank over time.

    With heterogeneous replicas, the ranks of a replica on the first node type come first, then those on the next.

    Raises:
        IllegalPlanError: the plan cannot run.
    """
    runs = pipeline_runs(problem, plan)
    ranks: list[RankLanes] = []
    for run in runs:
        ranks += _rank_lanes(problem, run, len(ranks))
    return StepLanes(runs[0].timeline.step_time_ns, tuple(ranks))


def _rank_lanes(problem: Problem, run: PipelineRun, first: int) -> list[RankLanes]:
    """List the ranks of one pipeline, numbered from ``first``."""
    layout, pp, node_type = run.plan.layout, run.plan.layout.pp, run.node_type
    types = rank_types(problem, layout) if node_type is None else (node_type,) * pp
    gpus = layout.num_gpus if node_type is None else problem.node_gpus[node_type]
    ranks = []
    for rank, memory in enumerate(run_memory(run)):
        stages, hardware = layout.rank_stages[rank], problem.node_types[types[rank]]
        lanes = _lanes(layout, rank, run.costs, run.terms, run.timeline)
        ranks.append(
            RankLanes(
                first + rank,
                f"stage {rank}" + ("" if node_type is None else f" on {hardware.name}"),
                str(rank) if node_type is None else f"{node_type}:{rank}",
                gpus // pp,
                stages,
                tuple(run.plan.virtual_stages[j].num_layers for j in stages),
                tuple(lane for lane in lanes if len(lane)),
                memory,
                hardware.usable_bytes,
            )
        )
    return ranks


def _lanes(layout: Layout, rank: int, costs: RankCosts, terms: IntArray, timeline: Timeline) -> list[Lane]:
    """Build all lanes of a rank; a lane may have no slices."""
    order = work_order(layout.schedule, layout.pp, layout.num_micro_batches, layout.vpp, rank)
    stage = np.array(layout.rank_stages[rank])[order.chunk]
    start, end = _item_times(order, stage, timeline)
    own = np.array(layout.rank_stages[rank])
    gather, reduce = timeline.gather_end_ns[own], timeline.reduce_end_ns[own]
    return [
        _lane("compute", _work(order, stage, start, end), _tail(rank, own, terms, timeline)),
        _lane("parameter gather", _collective("gather", gather, terms[Term.GATHER, own], own)),
        _lane("gradient reduction", _collective("reduction", reduce, terms[Term.REDUCE, own], own)),
        *_sends(layout, costs, order, stage, end),
    ]


def _item_times(order: WorkOrder, stage: IntArray, timeline: Timeline) -> tuple[IntArray, IntArray]:
    """Look up the start and the end of every work item of a rank, in its order."""
    start, end = np.empty(len(stage), dtype=np.int64), np.empty(len(stage), dtype=np.int64)
    times = (
        (timeline.forward_start_ns, timeline.forward_end_ns),
        (timeline.backward_start_ns, timeline.backward_end_ns),
        (timeline.weight_start_ns, timeline.weight_end_ns),
    )
    for kind, (starts, ends) in zip(Kind, times, strict=True):
        chosen = order.kind == kind
        start[chosen], end[chosen] = (
            values[stage[chosen], order.micro_batch[chosen]] for values in (starts, ends)
        )
    return start, end


def _work(order: WorkOrder, stage: IntArray, start: IntArray, end: IntArray) -> _Part:
    """List the slices of the work items."""
    # The backwards of an inference job have length 0 and no slice.
    shown = end > start
    # The numbers of ``Kind`` are the first indices of SLICE_KINDS.
    kinds = order.kind.astype(np.int64)
    return start[shown], end[shown], kinds[shown], stage[shown], order.micro_batch[shown].astype(np.int64)


def _tail(rank: int, own: IntArray, terms: IntArray, timeline: Timeline) -> _Part:
    """List the slices of the barrier, once the gradients of all ranks are ready, and of the update."""
    ready = int(timeline.gradients_ready_ns.max())
    edges = np.array([ready, timeline.optimizer_start_ns, timeline.finish_ns[rank]], dtype=np.int64)
    kinds = np.array([SLICE_KINDS.index("norm"), SLICE_KINDS.index("optimizer")])
    no_stage = np.full(2, -1)
    shown = edges[1:] > edges[:-1]
    return edges[:-1][shown], edges[1:][shown], kinds[shown], no_stage[shown], no_stage[shown]


def _collective(kind: SliceKind, end: IntArray, duration: IntArray, stages: IntArray) -> _Part:
    """List the slices of a rank's gathers or reductions."""
    shown = duration > 0
    number = np.full(len(stages), SLICE_KINDS.index(kind))
    return (end - duration)[shown], end[shown], number[shown], stages[shown], np.full(len(stages), -1)[shown]


def _sends(layout: Layout, costs: RankCosts, order: WorkOrder, stage: IntArray, end: IntArray) -> list[Lane]:
    """Build the lanes of sends: activations to the next virtual stage, gradients to the previous stage.

    A send starts when the output of its item is ready; the outputs of a group are ready when its last item is
    done.
    """
    rank_of = np.array(layout.stage_ranks)
    transfer = int(costs.transfer_ns)
    crossing = np.array([costs.crossing_ns(j) for j in range(layout.num_virtual_stages)], dtype=np.int64)
    output_ready = end[np.arange(len(end)) + order.left]
    lanes: list[Lane] = []
    directions: tuple[tuple[LaneName, SliceKind, Kind, int], ...] = (
        ("to next stage", "activations", Kind.FORWARD, 1),
        ("to previous stage", "gradients", Kind.BACKWARD, -1),
    )
    for name, kind, sends, direction in directions:
        receiver = stage + direction
        is_sent: BoolArray = (order.kind == sends) & (receiver >= 0) & (receiver < layout.num_virtual_stages)
        # Where a V turns, both virtual stages are on the same rank and there is no message.
        is_sent &= rank_of[np.clip(receiver, 0, len(rank_of) - 1)] != rank_of[stage]
        duration = transfer + crossing[np.where(direction > 0, stage, stage - 1)[is_sent]]
        start, sender = output_ready[is_sent], stage[is_sent]
        number = np.full(len(start), SLICE_KINDS.index(kind))
        micro_batch = order.micro_batch[is_sent].astype(np.int64)
        shown = duration > 0
        columns = (start, start + duration, number, sender, micro_batch)
        start, stop, number, sender, micro_batch = (column[shown] for column in columns)
        lanes.append(_lane(name, (start, stop, number, sender, micro_batch)))
    return lanes


def _lane(name: LaneName, *parts: _Part) -> Lane:
    """Build a lane from parts, with the slices in the order of their starts."""
    columns: Sequence[IntArray] = [np.concatenate(column) for column in zip(*parts, strict=True)]
    order = np.argsort(columns[0], kind="stable")
    return Lane(name, *(column[order] for column in columns))
