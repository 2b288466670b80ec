"""Messages of every virtual stage of a plan: bytes by parallelism, collective, group and phase."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from milpplan.communication import messages
from milpplan.communication.messages import Groups, Message, Parallelism, Transport
from milpplan.problem.plan import Plan, VirtualStage
from milpplan.problem.problem import Problem
from milpplan.simulation import states
from milpplan.simulation.layers.embedding_and_head import Endpoint, embedding_endpoint, head_endpoint
from milpplan.simulation.layout_columns import FloatArray, LayoutColumns
from milpplan.simulation.states import LocalParameters


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
