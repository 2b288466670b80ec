"""All constants of a layout, in integer nanoseconds and bytes: what simulator, bounds and program share.

Within one layout every duration and every byte count of a virtual stage is a sum of these constants over the
layers it holds; ``milpplan.simulation.stages`` adds them up.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from milpplan.problem.problem import Problem
from milpplan.simulation import offload as offloading
from milpplan.simulation import states
from milpplan.simulation.bulk.cache_keys import COST_KEYS, OFFLOADS, STATE_KEYS, distinct, distinct_layers
from milpplan.simulation.layers.activations import head_deferred_bytes, layer_activations, layer_deferred_bytes
from milpplan.simulation.layers.embedding_and_head import Endpoint, embedding_endpoint, head_endpoint
from milpplan.simulation.layers.layer_time import BF16_BYTES, layer_seconds
from milpplan.simulation.layers.paired_layers import paired_ns
from milpplan.simulation.layers.terms import EXPOSED, ONCE, REPLAYS, Part, Phase
from milpplan.simulation.layout_columns import FloatArray, IntArray, LayoutColumns
from milpplan.simulation.network import collectives, placement
from milpplan.simulation.network.stage_transfers import (
    crossing_transfer_s,
    ends_reduce_s,
    far_step_s,
    gradient_norm_s,
    transfer_s,
)
from milpplan.simulation.states import LocalParameters
from milpplan.units import NS_PER_S

LARGEST = 2.0**53
"""Nanoseconds (a hundred days) or bytes that stand for anything larger, so that sums stay far from 64 bits."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Where the times go, in nanoseconds: ``layer`` [K, Part, Phase, l] without sharding, ``embedding`` and
    ``head`` [Part, 3, l], of the l distinct layers; ``place`` [n] says which is a layout's. ``zero`` [K, 2, 3, n]:
    what sharding adds to a layout's layers, exposed and hidden, in the phases ``ONCE``. ``offload``
    [2, MODES, K, 2, n] and ``update`` [2, K + 2, n]: what offloading adds, exposed and hidden, to a layer's
    forward and backward under each recompute mode, and to an update.
    """

    layer: IntArray
    embedding: IntArray
    head: IntArray
    zero: IntArray
    offload: IntArray
    update: IntArray
    place: IntArray

    def at(self, row: int) -> Parts:
        """One layout, without the last axis, its sharding in its layers."""
        place, zero = self.place[row], self.zero[..., row]
        layer = self.layer[..., place].copy()
        for number, part in enumerate((Part.ZERO, Part.ZERO_HIDDEN)):
            layer[:, part, ONCE] += zero[:, number]
        own = (self.embedding[..., place], self.head[..., place], zero)
        return Parts(layer, *own, self.offload[..., row], self.update[..., row], place)


@dataclass(frozen=True, slots=True)
class LayoutCosts:
    """Integer constants; the last axis is the layout. K kinds of layer.

    Times in nanoseconds: ``duration_ns`` [K, Phase, n] of a layer, ``embedding_ns`` and ``head_ns`` [3, n]
    (forward, backward, weight gradients that run by themselves), all of them sums over the exposed ``parts``;
    ``reduce_ns``, ``gather_ns``, ``optimizer_ns`` [K + 2, n] (kinds, embedding, head), ``transfer_ns``,
    ``barrier_ns`` [n]. With offloading a layer's replay may take less than its transfers, so that ``duration_ns``
    of SELECTIVE and FULL may be negative, and ``replayed_forward_ns`` [2, K, n] is what recomputing selectively
    and wholly changes of the forward (never more than 0). ``edge_ns`` [3, K, n]: the phases ``ONCE`` without
    transfers of the host. ``paired_ns`` [K, 2, n]: a layer's forward and backward in a pair.

    Bytes: ``state_bytes`` [3, K + 2, n] (weights, gradients, optimizer); ``kept_bytes``,
    ``dropped_selective_bytes``, ``dropped_full_bytes`` [K, n] a live micro-batch; ``embedding_kept_bytes``,
    ``head_kept_bytes`` [n] likewise; ``deferred_bytes`` [K, n] and ``head_deferred_bytes`` [n] a micro-batch that
    waits for its weight gradients; ``workspace_bytes`` [K, n] and ``head_workspace_bytes`` [n]; ``buffer_bytes``
    [n] once a GPU. All of this on the device. On the host: ``host_state_bytes`` [K + 2, n], ``host_kept_bytes``
    [MODES, K, n] a live micro-batch under each recompute mode; of these a device also holds those of the layer at
    work and of the next one, ``streamed_bytes`` [K, n] (weights) and ``update_bytes`` [K + 2, n] (optimizer
    states). ``split_backward`` [n]: 1 where weight gradients run apart from the backward, else 0.
    """

    parts: Parts
    duration_ns: IntArray
    edge_ns: IntArray
    paired_ns: IntArray
    replayed_forward_ns: IntArray
    embedding_ns: IntArray
    head_ns: IntArray
    reduce_ns: IntArray
    gather_ns: IntArray
    optimizer_ns: IntArray
    transfer_ns: IntArray
    barrier_ns: IntArray
    state_bytes: IntArray
    kept_bytes: IntArray
    dropped_selective_bytes: IntArray
    dropped_full_bytes: IntArray
    embedding_kept_bytes: IntArray
    head_kept_bytes: IntArray
    deferred_bytes: IntArray
    head_deferred_bytes: IntArray
    workspace_bytes: IntArray
    head_workspace_bytes: IntArray
    buffer_bytes: IntArray
    host_state_bytes: IntArray
    host_kept_bytes: IntArray
    streamed_bytes: IntArray
    update_bytes: IntArray
    split_backward: IntArray

    @property
    def least_ns(self) -> IntArray:
        """Least forward and backward of a layer over the recompute modes, [2, K, n]: those of one that recomputes
        nothing, unless something is offloaded."""
        forward, backward = self.duration_ns[:, Phase.FORWARD], self.duration_ns[:, Phase.BACKWARD]
        if not self.offloads:
            return np.stack([forward, backward])
        change = np.minimum(self.duration_ns[:, REPLAYS].min(axis=1), 0)
        return np.stack([forward + np.minimum(self.replayed_forward_ns.min(axis=0), 0), backward + change])

    @property
    def runs_pairs(self) -> bool:
        """Whether some layout runs forwards beside whole backwards."""
        return bool(self.paired_ns.any())

    @property
    def offloads(self) -> bool:
        """Whether anything lies on the host in some layout."""
        return bool(self.host_state_bytes.any() or self.host_kept_bytes.any())

    def of_rank(self, rank: int) -> LayoutCosts:
        """Constants of a pipeline rank: the same for all, where there is one node type."""
        return self

    def type_of(self, rank: int) -> int:
        """Node type of a pipeline rank."""
        return 0

    def crossing_ns(self, stage: int) -> int:
        """What a transfer between a virtual stage and the next takes beyond ``transfer_ns``."""
        return 0

    def at(self, row: int) -> LayoutCosts:
        """One layout, without the layout axis."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        parts = values.pop("parts").at(row)
        return LayoutCosts(parts, **{name: value[..., row] for name, value in values.items()})


@dataclass(frozen=True, slots=True)
class CostTable:
    """Constants of many layouts: ``distinct`` holds every combination once, ``place`` [n] says which is whose."""

    distinct: LayoutCosts
    place: IntArray

    def take(self, rows: npt.NDArray[np.integer]) -> CostTable:
        """The chosen layouts."""
        return CostTable(self.distinct, self.place[rows])

    @property
    def best(self) -> CostTable:
        """Constants that no rank undercuts: these, where all are of one node type (else ``MixedTable.best``)."""
        return self

    def at(self, row: int) -> LayoutCosts:
        """One layout, without the layout axis."""
        return self.distinct.at(int(self.place[row]))


def usable_memory_bytes(problem: Problem) -> int:
    """Bytes of device memory that a plan may fill, of the node type that has most."""
    return max(hardware.usable_bytes for hardware in problem.node_types)


def host_capacity_bytes(problem: Problem) -> int:
    """Bytes of the host's memory that an accelerator may fill, of the node type that has most."""
    return max(hardware.host_bytes for hardware in problem.node_types)


def layer_durations_ns(problem: Problem, columns: LayoutColumns) -> IntArray:
    """Durations of one layer of each kind without sharded states, [K, Phase, n]: at most what ``layout_costs``
    says, which adds what ZeRO 2 and 3 do beside the layer."""
    seconds = np.stack([layer_seconds(problem, kind, columns) for kind in problem.model.kinds])
    return np.asarray(_ns(seconds)[:, EXPOSED].sum(axis=1))


def least_layer_ns(problem: Problem, columns: LayoutColumns) -> IntArray:
    """Nanoseconds of a layer's kernels alone, [K, Phase, n]: no more than ``layer_durations_ns`` says, wherever
    the groups of ranks lie. For our own times: another cost model may not tell kernels from communication."""
    seconds = np.stack([layer_seconds(problem, kind, columns)[Part.COMPUTE] for kind in problem.model.kinds])
    return np.asarray(np.floor(np.minimum(seconds * NS_PER_S, LARGEST)), dtype=np.int64)


def layout_costs(problem: Problem, columns: LayoutColumns) -> CostTable:
    """Constants of every layout, computed once for each distinct combination of the keys that matter."""
    rows, place = distinct(columns, COST_KEYS, ("rank_order",))
    part = columns.take(rows)
    costs = _constants(problem, part)
    return CostTable(offloading.offloaded(problem, part, costs) if part.any_of(*OFFLOADS) else costs, place)


def _constants(problem: Problem, columns: LayoutColumns) -> LayoutCosts:
    layer_rows, layer_inverse = distinct_layers(problem, columns)
    state_rows, state_inverse = distinct(columns, STATE_KEYS, ("rank_order", "pp"))
    layer_part = columns.take(layer_rows)
    state_part = columns.take(state_rows)
    kinds = problem.model.kinds
    parameters = [states.local_layer_parameters(problem, kind, state_part) for kind in kinds]
    embedding = embedding_endpoint(problem, layer_part)
    head = head_endpoint(problem, layer_part)
    seconds = np.stack([layer_seconds(problem, kind, layer_part) for kind in kinds])
    compute = seconds[:, EXPOSED, ONCE].sum(axis=1)[..., layer_inverse]
    reduce, gather, zero = _sharding(problem, state_part, parameters, state_inverse, columns, compute)
    activations = [layer_activations(problem, kind, layer_part) for kind in kinds]
    deferred = np.stack([layer_deferred_bytes(problem, kind, layer_part) for kind in kinds])

    def kept(name: str) -> IntArray:
        return _bytes(np.stack([getattr(item, name) for item in activations]))[:, layer_inverse]

    transfers = _transfer_ns(problem, columns)
    ends = _endpoint_states(problem, columns, embedding, head)
    optimizer = np.stack([states.optimizer_s(problem, state_part, local) for local in parameters])
    sizes = np.stack([states.state_bytes(problem, state_part, local) for local in parameters], axis=1)
    K, modes, shape = len(kinds), offloading.MODES, (len(columns),)
    ends_ns, none = (_ns(embedding.phases), _ns(head.phases)), np.int64(0)
    unmoved = (np.broadcast_to(none, (2, modes, K, 2, *shape)), np.broadcast_to(none, (2, K + 2, *shape)))
    parts = Parts(_ns(seconds), *ends_ns, _ns(zero), *unmoved, layer_inverse)
    duration = parts.layer[:, EXPOSED].sum(axis=1)[..., layer_inverse]
    duration[:, ONCE] += parts.zero[:, 0]
    return LayoutCosts(
        parts=parts,
        duration_ns=duration,
        edge_ns=np.moveaxis(duration[:, ONCE], 1, 0),
        paired_ns=paired_ns(problem, layer_part, parts.layer, parts.zero, columns, parts.place),
        replayed_forward_ns=np.broadcast_to(none, (modes - 1, K, *shape)),
        embedding_ns=parts.embedding[EXPOSED].sum(axis=0)[:, layer_inverse],
        head_ns=parts.head[EXPOSED].sum(axis=0)[:, layer_inverse],
        reduce_ns=_ns(np.concatenate([reduce, ends.reduce])),
        gather_ns=_ns(np.concatenate([gather, ends.gather])),
        optimizer_ns=_ns(np.concatenate([optimizer[:, state_inverse], ends.optimizer])),
        transfer_ns=transfers,
        barrier_ns=_barrier_ns(problem, columns, transfers),
        state_bytes=_bytes(np.concatenate([sizes[..., state_inverse], ends.state], axis=1)),
        kept_bytes=kept("kept"),
        dropped_selective_bytes=kept("dropped_selective"),
        dropped_full_bytes=kept("dropped_full"),
        embedding_kept_bytes=_bytes(embedding.kept_bytes)[layer_inverse],
        head_kept_bytes=_bytes(head.kept_bytes)[layer_inverse],
        deferred_bytes=_bytes(deferred)[:, layer_inverse],
        head_deferred_bytes=_bytes(head_deferred_bytes(problem, layer_part))[layer_inverse],
        workspace_bytes=kept("workspace"),
        head_workspace_bytes=_bytes(head.workspace_bytes)[layer_inverse],
        buffer_bytes=_bytes(_buffers(problem, state_part, parameters))[state_inverse],
        host_state_bytes=np.broadcast_to(none, (K + 2, *shape)),
        host_kept_bytes=np.broadcast_to(none, (modes, K, *shape)),
        streamed_bytes=np.broadcast_to(none, (K, *shape)),
        update_bytes=np.broadcast_to(none, (K + 2, *shape)),
        split_backward=columns.split_backward.astype(np.int64),
    )


def _buffers(problem: Problem, part: LayoutColumns, parameters: list[LocalParameters]) -> FloatArray:
    """Bytes that a GPU holds once for all its layers, [n]: the most that a kind of layer needs."""
    needed = [
        states.unsharded_buffer_bytes(problem, part, local)
        + states.dummy_gradient_bytes(problem, kind, part, local)
        for kind, local in zip(problem.model.kinds, parameters, strict=True)
    ]
    return np.asarray(np.max(needed, axis=0))


@dataclass(frozen=True, slots=True)
class _EndpointStates:
    """State costs of the embedding and the head, stacked: arrays [2, n]; ``state`` [3, 2, n]."""

    reduce: FloatArray
    gather: FloatArray
    optimizer: FloatArray
    state: FloatArray


def _endpoint_states(
    problem: Problem, columns: LayoutColumns, embedding: Endpoint, head: Endpoint
) -> _EndpointStates:
    """A tied head on another stage than the embedding keeps its own copy, and the two gradients are summed by
    an all-reduce between the first and the last stage (Megatron-LM
    core/distributed/finalize_model_grads.py). On the same rank both are one matrix."""
    rows, inverse = distinct(columns, (*STATE_KEYS, "pp", "ends_meet"), ("rank_order",))
    part = columns.take(rows)
    # The root unit of a sharded model stays gathered (PyTorch FSDP2, reshard_after_forward of the root).
    part = replace(part, zero_stage=np.minimum(part.zero_stage, 1))
    zero = np.zeros(len(part))
    tied, forwards = problem.model.tie_word_embeddings, problem.inference
    shared = np.where(tied & (part.pp > 1) & ~part.ends_meet, embedding.matrix_parameters(part.tp), 0.0)
    locals_ = (
        LocalParameters(embedding.parameters(part.tp), zero),
        LocalParameters(head.parameters(part.tp) + shared, zero),
    )
    stride = placement.pipeline(part).stride * (part.pp - 1)
    pair = np.where(shared > 0, 2, 1)
    tie = ends_reduce_s(problem, states.grad_bytes(problem) * shared, pair, stride)
    gathered = (part.zero_stage >= 1) & (not forwards)
    tie = np.zeros_like(tie) if forwards else tie
    reduce = [states.reduce_s(problem, part, local) + tie for local in locals_]
    gather = [np.where(gathered, states.gather_s(problem, part, local), 0.0) for local in locals_]
    update = [states.optimizer_s(problem, part, local) for local in locals_]
    sizes = [states.state_bytes(problem, part, local, BF16_BYTES) for local in locals_]
    seconds = [np.stack(of_ends)[:, inverse] for of_ends in (reduce, gather, update)]
    return _EndpointStates(seconds[0], seconds[1], seconds[2], np.stack(sizes, axis=1)[..., inverse])


def _sharding(
    problem: Problem,
    part: LayoutColumns,
    parameters: list[LocalParameters],
    inverse: IntArray,
    columns: LayoutColumns,
    compute: FloatArray,
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Seconds of gradient and parameter communication of the layers: reductions and gathers once a step [K, n],
    and what is added to every micro-batch (``Parts.zero``).

    Stages 0 and 1 reduce once a step, stage 1 and 2 gather once a step. Stage 2 reduces and stage 3 gathers and
    reduces in every micro-batch, beside the layer's ``compute`` [K, 3, n]: reductions beside the weight gradients
    where these run by themselves, else beside the backward.
    """
    reduce = np.stack([states.reduce_s(problem, part, local) for local in parameters])[:, inverse]
    gather = np.stack([states.gather_s(problem, part, local) for local in parameters])[:, inverse]
    stage = columns.zero_stage
    zero = np.zeros((len(parameters), 2, len(ONCE), len(columns)))
    rows = np.flatnonzero(stage >= 2)
    forward = np.where(stage[rows] == 3, gather[:, rows], 0.0)
    replicas = placement.replicas(columns.take(rows))
    share = collectives.processor_fraction(problem.hardware, *replicas)
    late = columns.split_backward[rows]
    backward = np.zeros_like(forward) if problem.inference else np.where(late, 0.0, reduce[:, rows]) + forward
    busy_in = [forward, backward, np.where(late, reduce[:, rows], 0.0)]
    for phase, busy in enumerate(busy_in if late.any() else busy_in[:2]):
        exposed, hidden = collectives.overlap_s(busy, compute[:, phase, rows], share)
        zero[:, 0, phase, rows], zero[:, 1, phase, rows] = exposed, hidden
    once = np.where(stage >= 2, 0.0, reduce)
    gathers = ((stage == 1) | (stage == 2)) & (not problem.inference)
    return once, np.where(gathers, gather, 0.0), zero


def _transfer_ns(problem: Problem, columns: LayoutColumns) -> IntArray:
    """Between stages, in distinct rows (``transfer_s``)."""
    keys = ("tp", "cp", "dp", "pp", "micro_batch_size", "sequence_parallel", "pp_scatter_gather")
    rows, inverse = distinct(columns, keys, ("rank_order",))
    return _ns(transfer_s(problem, columns.take(rows)))[inverse]


def crossing_transfer_ns(problem: Problem, columns: LayoutColumns) -> IntArray:
    """Between stages on two node types, [n] (``crossing_transfer_s``)."""
    return _ns(crossing_transfer_s(problem, columns))


def step_overhead_ns(problem: Problem) -> int:
    """What the framework does once a step beside nothing else; the longest of the node types."""
    return int(_ns(np.array(max(hardware.software.step_overhead_s for hardware in problem.node_types))))


def _barrier_ns(problem: Problem, columns: LayoutColumns, transfers: IntArray) -> IntArray:
    """What follows the last reduction: the global gradient norm, what groups across domains take once a step, and
    the framework's overhead of a step.

    Forwards alone run through the graph of GPipe with backwards of no length: its last one is on rank 0 exactly
    P - 1 transfers after the last forward on rank P - 1, so that these are taken off again.
    """
    if problem.inference:
        return np.asarray(step_overhead_ns(problem) - (columns.pp - 1) * transfers)
    gpus, inverse = np.unique(columns.num_gpus, return_inverse=True)
    norm = gradient_norm_s(problem, gpus)[inverse] + far_step_s(problem, columns)
    return _ns(norm) + step_overhead_ns(problem)


def _ns(seconds: FloatArray) -> IntArray:
    """Whole nanoseconds."""
    return np.rint(np.minimum(np.asarray(seconds) * NS_PER_S, LARGEST)).astype(np.int64)


def _bytes(values: FloatArray) -> IntArray:
    """Whole bytes, rounded up; capped like nanoseconds."""
    return np.ceil(np.minimum(np.asarray(values) - 1e-6, LARGEST)).astype(np.int64)
