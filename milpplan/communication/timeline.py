"""Bytes over the time of a step: every message spread evenly over the work item or transfer that carries it.

Where weight gradients are work items of their own, their messages are spread over the input gradients' item.
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
    """Bytes by tier (inside, between): ``items`` [J, When, 2] of a virtual stage, a micro-batch or a step;
    ``hops`` [way, J - 1, 2] of one transfer between a virtual stage and the next, activations and gradients;
    ``norm`` [2] of the norm of the gradients."""

    items: FloatArray
    hops: FloatArray
    norm: FloatArray

    @staticmethod
    def nothing(num_stages: int) -> StageTraffic:
        """No bytes yet."""
        return StageTraffic(np.zeros((num_stages, 4, 2)), np.zeros((2, max(num_stages - 1, 0), 2)), np.zeros(2))


def timeline_of(
    problem: Problem, sent: Sequence[tuple[PipelineRun, StageTraffic]], num_bins: int
) -> TrafficTimeline:
    """Bytes of all pipelines in bins of equal length from the start of the step to its end."""
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
    """(start, end, bytes by tier) of everything that a pipeline sends."""
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
    """Bytes in each bin between ``edges`` of intervals that carry theirs evenly; what lies outside the edges
    belongs to the first or the last bin, and an interval without length to the bin of its start."""
    last = len(edges) - 2
    moments = np.clip(np.searchsorted(edges, starts, side="right") - 1, 0, last)
    whole = ends <= starts
    binned = np.bincount(moments[whole], num_bytes[whole], minlength=last + 1).astype(np.float64)
    starts, ends, num_bytes = starts[~whole], ends[~whole], num_bytes[~whole]
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
