"""Memory of every pipeline rank over one step: what is held when, and for which part.

The order of work on a rank is fixed, so memory is a step function of time. A forward that starts takes the bytes
its virtual stage keeps for one micro-batch; a backward that starts takes its temporary bytes and frees both when
it ends. Where the backward is split, it leaves what its weight gradients need, while its temporary bytes are still
there, and the weight gradients free that when they end. Weights, gradients, optimizer states and buffers are there
from the first moment to the last. The maximum of a rank is the ``peak_bytes`` of its ``StageMemory``."""

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
    """Memory over time of every pipeline rank, by part; with replicas of different make of a replica on the first
    node type, then of one on the next.

    Raises:
        IllegalPlanError: the plan cannot run.
    """
    return [memory for run in pipeline_runs(problem, plan) for memory in run_memory(run)]


def run_memory(run: PipelineRun) -> list[MemoryTimeline]:
    """The same of one pipeline."""
    found, layout = [], run.plan.layout
    for rank, memory in enumerate(rank_memory(layout, run.costs, run.stages)):
        parts = (memory.weights_bytes, memory.gradients_bytes, memory.optimizer_bytes, memory.buffers_bytes)
        found.append(_rank_timeline(layout, rank, run.stages, run.timeline, sum(parts)))
    return found


def _rank_timeline(
    layout: Layout, rank: int, stages: Sequence[StageOptions], timeline: Timeline, static_bytes: int
) -> MemoryTimeline:
    """Start of the step, start and end of every work item in the order of the rank, end of the step."""
    order = work_order(layout.schedule, layout.pp, layout.num_micro_batches, layout.vpp, rank)
    stage, micro_batch = np.array(layout.rank_stages[rank])[order.chunk], order.micro_batch
    kept = np.array([int(option.kept_bytes[0]) for option in stages], dtype=np.int64)[stage]
    transient = np.array([int(option.transient_bytes[0]) for option in stages], dtype=np.int64)[stage]
    deferred = np.array([option.deferred_bytes for option in stages], dtype=np.int64)[stage]
    is_forward, is_backward, is_weight = (order.kind == kind for kind in Kind)
    starts, ends = np.empty_like(kept), np.empty_like(kept)
    for own, (start_ns, end_ns) in (
        (is_forward, (timeline.forward_start_ns, timeline.forward_end_ns)),
        (is_backward, (timeline.backward_start_ns, timeline.backward_end_ns)),
        (is_weight, (timeline.weight_start_ns, timeline.weight_end_ns)),
    ):
        starts[own], ends[own] = start_ns[stage[own], micro_batch[own]], end_ns[stage[own], micro_batch[own]]
    none, split = np.zeros_like(kept), bool(is_weight.any())
    left = deferred if split else none
    there = np.where(is_backward, transient, 0)
    # (time, bytes taken, temporary bytes): at an item's start, at its end where what it leaves counts before its
    # temporary bytes are gone, and when they are gone.
    at_end = np.where(is_backward, left - kept, 0) - np.where(is_weight, left, 0)
    moments = [(starts, np.where(is_forward, kept, 0), there), (ends, at_end, none)]
    if split:
        moments = [moments[0], (ends, at_end, there), (ends, none, none)]
    when, taken, running = (np.stack(parts, axis=1).ravel() for parts in zip(*moments, strict=True))
    held = np.cumsum(taken)
    times = np.concatenate([[0], when, [timeline.step_time_ns]])
    # Backwards of no length, where only forwards run, may lie after the end.
    times = np.minimum(times, timeline.step_time_ns)
    return MemoryTimeline(
        times / NS_PER_S,
        static_bytes,
        np.concatenate([[0], held, held[-1:]]),
        np.concatenate([[0], running, [0]]),
    )


__all__ = ["MemoryTimeline", "memory_timeline", "memory_timelines", "run_memory"]
