"""From a plan to the lanes of its step: the timeline of the simulator, rank by rank and stream by stream."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from milpplan.problem.plan import Layout, Plan
from milpplan.problem.problem import Problem
from milpplan.simulation.layout_columns import BoolArray, IntArray
from milpplan.simulation.memory_timeline import run_memory
from milpplan.simulation.mixed_costs import RankCosts, rank_types
from milpplan.simulation.pipeline.lanes import SLICE_KINDS, Lane, LaneName, RankLanes, SliceKind, StepLanes
from milpplan.simulation.pipeline.pipeline_runs import PipelineRun, pipeline_runs
from milpplan.simulation.pipeline.step_graph import Term, Timeline
from milpplan.simulation.pipeline.work_order import Kind, WorkOrder, work_order

_Part = tuple[IntArray, IntArray, IntArray, IntArray, IntArray]
"""start, end, kind, virtual stage, micro-batch."""


def step_lanes(problem: Problem, plan: Plan) -> StepLanes:
    """What every pipeline rank does when in one step of a plan; with replicas of different make those of a replica
    on the first node type, then those of one on the next.

    Raises:
        IllegalPlanError: the plan cannot run.
    """
    runs = pipeline_runs(problem, plan)
    ranks: list[RankLanes] = []
    for run in runs:
        ranks += _rank_lanes(problem, run, len(ranks))
    return StepLanes(runs[0].timeline.step_time_ns, tuple(ranks))


def _rank_lanes(problem: Problem, run: PipelineRun, first: int) -> list[RankLanes]:
    """The ranks of one pipeline, numbered from ``first``."""
    layout, pp, node_type = run.plan.layout, run.plan.layout.pp, run.node_type
    types = rank_types(problem, layout) if node_type is None else (node_type,) * pp
    gpus = layout.num_gpus if node_type is None else problem.node_gpus[node_type]
    ranks = []
    for rank, memory in enumerate(run_memory(run)):
        own, hardware = layout.rank_stages[rank], problem.node_types[types[rank]]
        lanes = _lanes(layout, rank, run.costs, run.terms, run.timeline)
        ranks.append(
            RankLanes(
                first + rank,
                f"stage {rank}" + ("" if node_type is None else f" on {hardware.name}"),
                str(rank) if node_type is None else f"{node_type}:{rank}",
                gpus // pp,
                own,
                tuple(run.plan.virtual_stages[j].num_layers for j in own),
                tuple(lane for lane in lanes if len(lane)),
                memory,
                hardware.usable_bytes,
            )
        )
    return ranks


def _lanes(layout: Layout, rank: int, costs: RankCosts, terms: IntArray, timeline: Timeline) -> list[Lane]:
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
    """Start and end of every work item of a rank, in its order."""
    start, end = np.empty(len(stage), dtype=np.int64), np.empty(len(stage), dtype=np.int64)
    times = (
        (timeline.forward_start_ns, timeline.forward_end_ns),
        (timeline.backward_start_ns, timeline.backward_end_ns),
        (timeline.weight_start_ns, timeline.weight_end_ns),
    )
    for kind, (starts, ends) in zip(Kind, times, strict=True):
        mine = order.kind == kind
        start[mine], end[mine] = (values[stage[mine], order.micro_batch[mine]] for values in (starts, ends))
    return start, end


def _work(order: WorkOrder, stage: IntArray, start: IntArray, end: IntArray) -> _Part:
    # Where only forwards run the backwards have no length.
    shown = end > start
    # The numbers of ``Kind`` are the first places of SLICE_KINDS.
    kinds = order.kind.astype(np.int64)
    return start[shown], end[shown], kinds[shown], stage[shown], order.micro_batch[shown].astype(np.int64)


def _tail(rank: int, own: IntArray, terms: IntArray, timeline: Timeline) -> _Part:
    """What all ranks do together once every rank's gradients are there, and the update."""
    ready = int(timeline.gradients_ready_ns.max())
    edges = np.array([ready, timeline.optimizer_start_ns, timeline.finish_ns[rank]], dtype=np.int64)
    kinds = np.array([SLICE_KINDS.index("norm"), SLICE_KINDS.index("optimizer")])
    nothing = np.full(2, -1)
    shown = edges[1:] > edges[:-1]
    return edges[:-1][shown], edges[1:][shown], kinds[shown], nothing[shown], nothing[shown]


def _collective(kind: SliceKind, end: IntArray, took: IntArray, own: IntArray) -> _Part:
    shown = took > 0
    number = np.full(len(own), SLICE_KINDS.index(kind))
    return (end - took)[shown], end[shown], number[shown], own[shown], np.full(len(own), -1)[shown]


def _sends(layout: Layout, costs: RankCosts, order: WorkOrder, stage: IntArray, end: IntArray) -> list[Lane]:
    """Activations to the rank of the next virtual stage and gradients to that of the one before, from when the
    output of an item is there: items that run as one put out when the last of them is done."""
    rank_of = np.array(layout.stage_ranks)
    transfer = int(costs.transfer_ns)
    crossing = np.array([costs.crossing_ns(j) for j in range(layout.num_virtual_stages)], dtype=np.int64)
    there = end[np.arange(len(end)) + order.left]
    found: list[Lane] = []
    ways: tuple[tuple[LaneName, SliceKind, Kind, int], ...] = (
        ("to next stage", "activations", Kind.FORWARD, 1),
        ("to previous stage", "gradients", Kind.BACKWARD, -1),
    )
    for name, kind, sends, way in ways:
        to = stage + way
        inside: BoolArray = (order.kind == sends) & (to >= 0) & (to < layout.num_virtual_stages)
        # Where a V turns, both virtual stages are on one rank and nothing is sent.
        inside &= rank_of[np.clip(to, 0, len(rank_of) - 1)] != rank_of[stage]
        took = transfer + crossing[np.where(way > 0, stage, stage - 1)[inside]]
        start, from_stage = there[inside], stage[inside]
        number = np.full(len(start), SLICE_KINDS.index(kind))
        micro_batch = order.micro_batch[inside].astype(np.int64)
        moved = took > 0
        parts = (start, start + took, number, from_stage, micro_batch)
        start, until, number, from_stage, micro_batch = (part[moved] for part in parts)
        found.append(_lane(name, (start, until, number, from_stage, micro_batch)))
    return found


def _lane(name: LaneName, *parts: _Part) -> Lane:
    """All slices by their start."""
    columns: Sequence[IntArray] = [np.concatenate(column) for column in zip(*parts, strict=True)]
    order = np.argsort(columns[0], kind="stable")
    return Lane(name, *(column[order] for column in columns))
