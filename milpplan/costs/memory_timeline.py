"""Memory of every pipeline rank over one step: what is held when, and for which part.

The order of work on a rank is fixed, so memory is a step function of time. A forward that starts takes the
bytes its virtual stage keeps for one micro-batch; a backward that starts takes its temporary bytes and frees
both when it ends. Weights, gradients, optimizer states and buffers are there from the first moment to the
last. The maximum of a rank is the ``peak_bytes`` of its ``StageMemory``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from milpplan.costs.columns import FloatArray, IntArray, LayoutColumns
from milpplan.costs.layout_costs import layout_costs
from milpplan.costs.pipeline import Timeline
from milpplan.costs.schedule import work_order
from milpplan.costs.simulator import plan_timeline, rank_memory
from milpplan.costs.stages import StageOptions, plan_stages
from milpplan.specs.plan import Layout, Plan
from milpplan.specs.problem import Problem
from milpplan.units import NS_PER_S


@dataclass(frozen=True, slots=True)
class MemoryTimeline:
    """Memory of one rank: arrays of shape [events], times not descending (equal where several things happen
    at once, in the order in which they happen). A value holds from its time to the next one.

    ``static_bytes``: weights, gradients, optimizer states and buffers, constant. ``activations_bytes``: kept
    for backwards to come. ``transient_bytes``: temporary bytes of the running backward."""

    time_s: FloatArray
    static_bytes: int
    activations_bytes: IntArray
    transient_bytes: IntArray

    @property
    def total_bytes(self) -> IntArray:
        """All parts together, [events]."""
        return np.asarray(self.static_bytes + self.activations_bytes + self.transient_bytes)


def memory_timeline(problem: Problem, plan: Plan) -> list[tuple[FloatArray, IntArray]]:
    """(seconds from the start of the step, bytes from then on) of every pipeline rank, each [events]."""
    return [(rank.time_s, rank.total_bytes) for rank in memory_timelines(problem, plan)]


def memory_timelines(problem: Problem, plan: Plan) -> list[MemoryTimeline]:
    """Memory over time of every pipeline rank, by part.

    Raises:
        IllegalPlanError: the plan cannot run.
    """
    timeline = plan_timeline(problem, plan)
    costs = layout_costs(problem, LayoutColumns.of([plan.layout])).at(0)
    stages = plan_stages(costs, problem.model.layer_kinds, plan)
    found = []
    for rank, memory in enumerate(rank_memory(plan.layout, costs, stages)):
        parts = (memory.weights_bytes, memory.gradients_bytes, memory.optimizer_bytes, memory.buffers_bytes)
        found.append(_rank_timeline(plan.layout, rank, stages, timeline, sum(parts)))
    return found


def _rank_timeline(
    layout: Layout, rank: int, stages: Sequence[StageOptions], timeline: Timeline, static_bytes: int
) -> MemoryTimeline:
    """Start of the step, start and end of every work item in the order of the rank, end of the step."""
    order = work_order(layout.schedule, layout.pp, layout.num_micro_batches, layout.vpp, rank)
    stage, micro_batch, backward = order.chunk * layout.pp + rank, order.micro_batch, order.is_backward
    kept = np.array([int(option.kept_bytes[0]) for option in stages], dtype=np.int64)[stage]
    transient = np.array([int(option.transient_bytes[0]) for option in stages], dtype=np.int64)[stage]
    starts = np.where(
        backward,
        timeline.backward_start_ns[stage, micro_batch],
        timeline.forward_start_ns[stage, micro_batch],
    )
    ends = np.where(
        backward, timeline.backward_end_ns[stage, micro_batch], timeline.forward_end_ns[stage, micro_batch]
    )
    held = np.cumsum(np.stack([np.where(backward, 0, kept), np.where(backward, -kept, 0)], axis=1).ravel())
    running = np.stack([np.where(backward, transient, 0), np.zeros_like(transient)], axis=1).ravel()
    times = np.concatenate([[0], np.stack([starts, ends], axis=1).ravel(), [timeline.step_time_ns]])
    # Backwards of no length, where only forwards run, may lie after the end.
    times = np.minimum(times, timeline.step_time_ns)
    return MemoryTimeline(
        times / NS_PER_S,
        static_bytes,
        np.concatenate([[0], held, held[-1:]]),
        np.concatenate([[0], running, [0]]),
    )


__all__ = ["MemoryTimeline", "memory_timeline", "memory_timelines"]
