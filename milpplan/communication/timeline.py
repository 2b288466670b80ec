"""Bytes over the time of a step: every message is spread evenly over the work item or transfer that carries it.

If weight gradients are work items of their own, their messages are spread over the item of the input gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from milpplan.communication.flows import When
from milpplan.communication.records import TrafficTimeline
from milpplan.problem.problem import Problem
from milpplan.simulation.layout_columns import FloatArray, IntArray
from milpplan.simulation.layout_costs import step_overhead_ns
from milpplan.simulation.pipeline.pipeline_runs import PipelineRun
from milpplan.simulation.pipeline.step_graph import Term
from milpplan.units import NS_PER_S

DEFAULT_BINS = 200


@dataclass(frozen=True, slots=True)
class StageTraffic:
    """Bytes of the messages of a pipeline; the last axis is the tier (inside, between)."""

    items: FloatArray
    """[J, When, 2] messages of a virtual stage, per micro-batch or per step."""
    hops: FloatArray
    """[2, J - 1, 2] a transfer between a virtual stage and the next: activations, gradients."""
    norm: FloatArray
    """[2] the norm of the gradients."""

    @staticmethod
    def nothing(num_stages: int) -> StageTraffic:
        """Start with no bytes."""
        return StageTraffic(np.zeros((num_stages, 4, 2)), np.zeros((2, max(num_stages - 1, 0), 2)), np.zeros(2))


def timeline_of(
    problem: Problem, sent: Sequence[tuple[PipelineRun, StageTraffic]], num_bins: int
) -> TrafficTimeline:
    """Count the bytes of all pipelines in bins of equal length from the start of the step to its end."""
    intervals = [part for run, traffic in sent for part in _intervals(problem, run, traffic)]
    starts = np.concatenate([start.ravel() for start, _, _ in intervals])
    ends = np.concatenate([end.ravel() for _, end, _ in intervals])
    sizes = np.concatenate(
        [np.broadcast_to(size, (*start.shape, 2)).reshape(-1, 2) for start, _, size in intervals]
    )
    edges = np.linspace(0, sent[0][0].timeline.step_time_ns, num_bins + 1)
    inside, between = (spread(starts, ends, sizes[:, tier], edges) for tier in range(2))
    return TrafficTimeline(edges / NS_PER_S, inside, between)


def _intervals(
    problem: Problem, run: PipelineRun, sent: StageTraffic
) -> list[tuple[IntArray, IntArray, FloatArray]]:
    """List (start, end, bytes by tier) of all messages of a pipeline."""
    timeline, terms = run.timeline, run.terms
    overhead = step_overhead_ns(problem)
    norm_end = np.array([timeline.optimizer_start_ns - overhead])
    borders = np.array([run.costs.crossing_ns(stage) for stage in range(sent.hops.shape[1])], dtype=np.int64)
    transfer = (int(run.costs.transfer_ns) + borders)[:, None]
    return [
        (timeline.forward_start_ns, timeline.forward_end_ns, sent.items[:, None, When.FORWARD]),
        (timeline.backward_start_ns, timeline.backward_end_ns, sent.items[:, None, When.BACKWARD]),
        (timeline.gather_end_ns - terms[Term.GATHER], timeline.gather_end_ns, sent.items[:, When.GATHER]),
        (timeline.reduce_end_ns - terms[Term.REDUCE], timeline.reduce_end_ns, sent.items[:, When.REDUCE]),
        (timeline.forward_end_ns[:-1], timeline.forward_end_ns[:-1] + transfer, sent.hops[0, :, None]),
        (timeline.backward_end_ns[1:], timeline.backward_end_ns[1:] + transfer, sent.hops[1, :, None]),
        (norm_end - (int(run.costs.barrier_ns) - overhead), norm_end, sent.norm[None]),
    ]


def spread(starts: IntArray, ends: IntArray, num_bytes: FloatArray, edges: FloatArray) -> FloatArray:
    """Count the bytes in each bin between ``edges``; every interval carries its bytes evenly.

    Bytes outside the edges belong to the first or the last bin. An interval of length 0 belongs to the bin of its
    start.
    """
    last = len(edges) - 2
    bins = np.clip(np.searchsorted(edges, starts, side="right") - 1, 0, last)
    is_instant = ends <= starts
    binned = np.bincount(bins[is_instant], num_bytes[is_instant], minlength=last + 1).astype(np.float64)
    starts, ends, num_bytes = starts[~is_instant], ends[~is_instant], num_bytes[~is_instant]
    if not len(starts):
        return binned
    times = np.concatenate([starts, ends]).astype(np.float64)
    rates = num_bytes / (ends - starts)
    order = np.argsort(times, kind="stable")
    times, changes = times[order], np.concatenate([rates, -rates])[order]
    passed = np.concatenate([[0.0], np.cumsum(np.cumsum(changes)[:-1] * np.diff(times))])
    at_edges = np.interp(edges, times, passed)
    at_edges[0], at_edges[-1] = 0.0, num_bytes.sum()
    return np.asarray(binned + np.maximum(np.diff(at_edges), 0.0))
