"""What every virtual stage of a plan sends, by parallelism, collective and group: bytes of message by phase."""

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
    """Every forward and every backward of a micro-batch; once a step with the parameters, with the gradients."""

    FORWARD = 0
    BACKWARD = 1
    GATHER = 2
    REDUCE = 3


@dataclass(frozen=True, slots=True)
class Flow:
    """One collective of one family of groups: ``message_bytes`` [J, When] that every group of a virtual stage
    moves."""

    parallelism: Parallelism
    operation: Transport
    group: Groups
    copies: float | None
    message_bytes: FloatArray


_Key = tuple[Parallelism, Transport, Groups, float | None]


def flows(problem: Problem, plan: Plan) -> list[Flow]:
    """Messages of every virtual stage of a plan, without those between stages."""
    columns = LayoutColumns.of([plan.layout])
    kinds = problem.model.kinds
    layers = [messages.layer_messages(problem, kind, columns) for kind in kinds]
    replays = [messages.replayed_messages(problem, kind, columns) for kind in kinds]
    held = [
        messages.state_messages(problem, columns, states.local_layer_parameters(problem, kind, columns))
        for kind in kinds
    ]
    total: dict[_Key, FloatArray] = defaultdict(lambda: np.zeros((plan.layout.num_virtual_stages, 4)))
    for number, stage in enumerate(plan.virtual_stages):
        counts = zip(*_counts(problem, stage), strict=True)
        for kind, (count, again, selectively) in enumerate(counts):
            _add(total, number, layers[kind], (count, count, 0, 0))
            # A full recomputation repeats the forward's messages within the backward.
            _add(
                total,
                number,
                [message._replace(backward=message.forward) for message in layers[kind]],
                (0, again, 0, 0),
            )
            _add(total, number, replays[kind], (0, selectively, 0, 0))
            often, once = held[kind]
            _add(total, number, often, (count, count, 0, 0))
            _add(total, number, once, (0, 0, count, count))
    for number, is_head in ((0, False), (plan.layout.num_virtual_stages - 1, True)):
        _add(total, number, messages.end_messages(problem, is_head, columns), (1, 1, 0, 0))
        _add(total, number, _end_states(problem, columns, is_head), (0, 0, 1, 1))
    return [Flow(*key, value) for key, value in total.items() if value.any()]


def _counts(problem: Problem, stage: VirtualStage) -> tuple[list[int], list[int], list[int]]:
    """Layers of each kind that a virtual stage holds, that it recomputes wholly, and selectively (after these)."""
    held = np.array(problem.model.layer_kinds[stage.layers[0] : stage.layers[1]], dtype=np.int64)
    size, wholly = len(problem.model.kinds), stage.recompute.full
    parts = held, held[:wholly], held[wholly : wholly + stage.recompute.selective]
    every, replayed, selectively = (np.bincount(part, minlength=size).tolist() for part in parts)
    return every, replayed, selectively


def _add(total: dict[_Key, FloatArray], stage: int, found: list[Message], times: tuple[int, ...]) -> None:
    """``times`` each message's forward and backward counts, first those of a micro-batch, then those of a step."""
    for message in found:
        calls = np.array([message.forward[0], message.backward[0]] * 2) * np.array(times)
        key = message.parallelism, message.operation, message.group, message.copies
        total[key][stage] += calls * message.num_bytes[0]


def _end_states(problem: Problem, columns: LayoutColumns, is_head: bool) -> list[Message]:
    """What the weights of the embedding, or of the head, need once a step."""
    end = (head_endpoint if is_head else embedding_endpoint)(problem, columns)
    own = end.parameters(columns.tp)
    if is_head:
        own = own + copied_embedding(problem, columns, embedding_endpoint(problem, columns))
    _, once = messages.state_messages(problem, columns, LocalParameters(own, np.zeros(len(columns))), is_end=True)
    return once


def copied_embedding(problem: Problem, columns: LayoutColumns, embedding: Endpoint) -> FloatArray:
    """Parameters of the copy of a tied embedding that the last stage of a pipeline holds, [n]."""
    return np.asarray(messages.tied_bytes(problem, columns, embedding) / states.grad_bytes(problem))
