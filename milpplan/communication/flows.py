"""Messages of every virtual stage of a plan: bytes by parallelism, collective, group and phase, and over time.

Over time every message is spread evenly over the work item or transfer that carries it. If weight gradients are
work items of their own, their messages are spread over the item of the input gradients.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from milpplan.communication import messages
from milpplan.communication.messages import Groups, Message, Parallelism, Transport
from milpplan.communication.records import TrafficTimeline
from milpplan.problem.plan import Plan, VirtualStage
from milpplan.problem.problem import Problem
from milpplan.simulation import states
from milpplan.simulation.layers.embedding_and_head import Endpoint, embedding_endpoint, head_endpoint
from milpplan.simulation.layout_columns import FloatArray, IntArray, LayoutColumns
from milpplan.simulation.layout_costs import step_overhead_ns
from milpplan.simulation.pipeline.pipeline_runs import PipelineRun
from milpplan.simulation.pipeline.step_graph import Term
from milpplan.simulation.states import LocalParameters
from milpplan.units import NS_PER_S


class When(IntEnum):
    """Phase of a step in which a message is sent."""

    FORWARD = 0
    """In the forward of every micro-batch."""
    BACKWARD = 1
    """In the backward of every micro-batch."""
    GATHER = 2
    """Once a step, with the parameter gathers."""
    REDUCE = 3
    """Once a step, with the gradient reductions."""


@dataclass(frozen=True, slots=True)
class Flow:
    """Calls of a collective on a family of groups."""

    parallelism: Parallelism
    operation: Transport
    group: Groups
    copies: float | None
    """As in ``Message``."""
    message_bytes: FloatArray
    """[J, When] bytes of message that every group of a virtual stage moves."""


_Key = tuple[Parallelism, Transport, Groups, float | None]


def flows(problem: Problem, plan: Plan) -> list[Flow]:
    """Collect the messages of every virtual stage of a plan, without the transfers between stages."""
    columns = LayoutColumns.of([plan.layout])
    kinds = problem.model.kinds
    layers = [messages.layer_messages(problem, kind, columns) for kind in kinds]
    replays = [messages.replayed_messages(problem, kind, columns) for kind in kinds]
    state_messages = [
        messages.state_messages(problem, columns, states.local_layer_parameters(problem, kind, columns))
        for kind in kinds
    ]
    total: dict[_Key, FloatArray] = defaultdict(lambda: np.zeros((plan.layout.num_virtual_stages, 4)))
    for number, stage in enumerate(plan.virtual_stages):
        counts = zip(*_counts(problem, stage), strict=True)
        for kind, (count, wholly, selectively) in enumerate(counts):
            _add(total, number, layers[kind], (count, count, 0, 0))
            # A full recomputation repeats the forward's messages within the backward.
            _add(
                total,
                number,
                [message._replace(backward=message.forward) for message in layers[kind]],
                (0, wholly, 0, 0),
            )
            _add(total, number, replays[kind], (0, selectively, 0, 0))
            per_micro_batch, per_step = state_messages[kind]
            _add(total, number, per_micro_batch, (count, count, 0, 0))
            _add(total, number, per_step, (0, 0, count, count))
    for number, is_head in ((0, False), (plan.layout.num_virtual_stages - 1, True)):
        _add(total, number, messages.end_messages(problem, is_head, columns), (1, 1, 0, 0))
        _add(total, number, _end_states(problem, columns, is_head), (0, 0, 1, 1))
    return [Flow(*key, value) for key, value in total.items() if value.any()]


def _counts(problem: Problem, stage: VirtualStage) -> tuple[list[int], list[int], list[int]]:
    """Count the layers of each kind of a virtual stage: all, recomputed wholly, and recomputed selectively."""
    layers = np.array(problem.model.layer_kinds[stage.layers[0] : stage.layers[1]], dtype=np.int64)
    size, full = len(problem.model.kinds), stage.recompute.full
    parts = layers, layers[:full], layers[full : full + stage.recompute.selective]
    every, wholly, selectively = (np.bincount(part, minlength=size).tolist() for part in parts)
    return every, wholly, selectively


def _add(total: dict[_Key, FloatArray], stage: int, sent: list[Message], times: tuple[int, ...]) -> None:
    """Add messages of a virtual stage.

    ``times`` multiplies the forward and backward counts of each message, first per micro-batch, then per step.
    """
    for message in sent:
        calls = np.array([message.forward[0], message.backward[0]] * 2) * np.array(times)
        key = message.parallelism, message.operation, message.group, message.copies
        total[key][stage] += calls * message.num_bytes[0]


def _end_states(problem: Problem, columns: LayoutColumns, is_head: bool) -> list[Message]:
    """List the messages of the states of the embedding, or of the head, once a step."""
    end = (head_endpoint if is_head else embedding_endpoint)(problem, columns)
    dense = end.parameters(columns.tp)
    if is_head:
        dense = dense + copied_embedding(problem, columns, embedding_endpoint(problem, columns))
    local = LocalParameters(dense, np.zeros(len(columns)))
    _, per_step = messages.state_messages(problem, columns, local, is_end=True)
    return per_step


def copied_embedding(problem: Problem, columns: LayoutColumns, embedding: Endpoint) -> FloatArray:
    """Count the parameters of the copy of a tied embedding on the last stage of a pipeline, [n]."""
    return np.asarray(messages.tied_bytes(problem, columns, embedding) / states.grad_bytes(problem))


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
