"""Memory of every pipeline rank over a step, by part.

The order of work on a rank is fixed, so memory is a step function of time. A forward allocates at its start the
bytes that its virtual stage keeps for a micro-batch. A backward allocates at its start its temporary bytes, and
frees both at its end. Where the backward is split, it leaves the bytes that its weight gradients need, while its
temporary bytes are still allocated; the weight gradients free them at their end. Weights, gradients, optimizer
states and buffers stay for the whole step. The maximum of a rank is the ``peak_bytes`` of its ``StageMemory``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from milpplan.problem.plan import Layout, Plan
from milpplan.problem.problem import Problem
from milpplan.simulation.layout_columns import FloatArray, IntArray
from milpplan.simulation.pipeline.pipeline_runs import PipelineRun, pipeline_runs
from milpplan.simulation.pipeline.step_graph import Timeline
from milpplan.simulation.pipeline.work_order import Kind, work_order
from milpplan.simulation.simulator import rank_memory
from milpplan.simulation.stages import StageOptions
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


def memory_timeline(problem: Problem, plan: Plan) -> list[tuple[FloatArray, IntArray]]:
    """Simulate the memory of every pipeline rank.

    Returns:
        For each rank, event times in seconds from the start of the step and bytes from then on, each [events].
    """
    return [(rank.time_s, rank.total_bytes) for rank in memory_timelines(problem, plan)]


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


__all__ = ["MemoryTimeline", "memory_timeline", "memory_timelines", "run_memory"]
