"""A simulated step as lanes: the work of every pipeline rank over time, on each of its streams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from milpplan.problem.plan import Layout, Plan
from milpplan.problem.problem import Problem
from milpplan.simulation.layout_columns import BoolArray, IntArray
from milpplan.simulation.memory_timeline import MemoryTimeline, run_memory
from milpplan.simulation.mixed_costs import RankCosts, rank_types
from milpplan.simulation.pipeline.pipeline_runs import PipelineRun, pipeline_runs
from milpplan.simulation.pipeline.step_graph import Term, Timeline
from milpplan.simulation.pipeline.work_order import Kind, WorkOrder, work_order

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
