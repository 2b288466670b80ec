"""Constants of a layout in integer nanoseconds and bytes, shared by simulator, bounds and integer program.

Within one layout, every duration and every byte count of a virtual stage is a sum of these constants over the
layers of the stage. ``milpplan.simulation.stages`` adds them up.

Axes of the arrays: K layer kinds (``ModelSpec.kinds``), K + 2 pieces (the kinds, then embedding and head), n
layouts, l distinct layers among these layouts. An encoder of images belongs to the embedding.

**Offloading** to host memory: bytes on the host, and times to stream them. Weights of a layer are streamed in
before its forward and before its backward. Its kept activations are streamed out beside its forward and in before
its backward. Optimizer states are streamed in and out around the update, which runs on the device. Embedding and
head keep their weights and activations on the device; their optimizer states are offloaded like those of the
layers. Gradients stay on the device. Transfers run beside the layer's own work, on a link with two directions.

Source: Isaev et al. 2023 (Calculon), offloading; Rajbhandari et al. 2021 (ZeRO-Infinity) sections 5 and 6. The
update on the host (Ren et al. 2021, ZeRO-Offload) is not modelled.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from milpplan.errors import InvalidInputError
from milpplan.problem import HardwareSpec, Problem
from milpplan.simulation import states
from milpplan.simulation.layers import (
    EXPOSED,
    ONCE,
    Part,
    Phase,
    copied_embedding,
    embedding_endpoint,
    head_deferred_bytes,
    head_endpoint,
    hosted_module_bytes,
    interpolate_curve,
    layer_activations,
    layer_deferred_bytes,
    layer_seconds,
)
from milpplan.simulation.layers.embedding_and_head import Endpoint
from milpplan.simulation.layers.kernels import BF16_BYTES, Numbers
from milpplan.simulation.layers.layer_time import has_own_times
from milpplan.simulation.layers.paired_layers import paired_ns
from milpplan.simulation.layers.shard import REPLAYS
from milpplan.simulation.layout_columns import (
    COST_KEYS,
    HOSTED,
    LAYER_KEYS,
    STATE_KEYS,
    FloatArray,
    IntArray,
    LayoutColumns,
    distinct,
    unique_rows,
)
from milpplan.simulation.network import collectives, group_place, placement, transfer_s
from milpplan.simulation.network.collectives import (
    crossing_transfer_s,
    ends_reduce_s,
    far_step_s,
    gradient_norm_s,
)
from milpplan.simulation.states import LocalParameters
from milpplan.units import NS_PER_S

MODES = 3
"""Number of recompute modes: none, selective, full."""


def host_transfer_s(hardware: HardwareSpec, num_bytes: Numbers) -> FloatArray:
    """Time a transfer between accelerator and host in one direction: bytes / (bandwidth * efficiency(bytes)).

    num_bytes: bytes of a transfer, any shape; 0 costs nothing. Returns seconds. Source: latency-bandwidth model
    with the curve of the hardware file.

    Raises:
        InvalidInputError: the hardware file has no host memory.
    """
    host = hardware.host_memory
    if host is None:
        raise InvalidInputError(
            f"{hardware.name} has no [host_memory].",
            "Offloading needs the capacity, bandwidth and efficiency of the host's memory.",
            "Add [host_memory] to the hardware file, or offload nothing.",
        )
    moved = np.asarray(num_bytes, dtype=np.float64)
    rate = host.bandwidth_bytes_per_s * interpolate_curve(host.efficiency, moved)
    return np.where(moved == 0, 0.0, moved / rate)


def beside(transfers: IntArray, work: IntArray) -> IntArray:
    """Split ``transfers`` beside ``work`` into (exposed, hidden) nanoseconds, stacked [2, ...].

    exposed = max(0, transfers - work), hidden = transfers - exposed: copy engines do not slow the processors down.
    Memory bandwidth, and links shared with the network, are not charged: a lower bound.
    """
    exposed = np.maximum(transfers - work, 0)
    return np.stack([exposed, transfers - exposed])


@dataclass(frozen=True, slots=True)
class Offload:
    """Constants of offloading for K layer kinds and n layouts, in whole nanoseconds and bytes."""

    layer_ns: IntArray
    """[2, MODES, K, 2, n] (exposed, hidden) transfers of a layer's forward and backward under each recompute
    mode."""
    update_ns: IntArray
    """[2, K + 2, n] (exposed, hidden) transfers of an update (kinds, embedding, head)."""
    weights_bytes: IntArray
    """[K, n] weights on the host."""
    optimizer_bytes: IntArray
    """[K + 2, n] optimizer states on the host."""
    kept_bytes: IntArray
    """[MODES, K, n] activations on the host per live micro-batch."""


def offload(
    problem: Problem, columns: LayoutColumns, states: IntArray, kept: IntArray, work: IntArray, update: IntArray
) -> Offload:
    """Compute the bytes that layouts offload, and the times of their transfers; one layout needs no last axis.

    Args:
        states: [3, K + 2, n] bytes of weights, gradients and optimizer before anything is offloaded.
        kept: [MODES, K, n] bytes of a layer's activations.
        work: [MODES, K, 2, n] nanoseconds of a layer's forward and backward, replays included.
        update: [K + 2, n] nanoseconds of the update.
    """
    hardware = problem.hardware
    weights = np.where(columns.offload_weights, states[0, :-2], 0)
    optimizer = np.where(columns.offload_optimizer, states[2], 0)
    activations = np.where(columns.offload_activations, kept, 0)
    if columns.any_of("offload_modules"):
        named = [hosted_module_bytes(problem, kind, columns) for kind in problem.model.kinds]
        activations = activations + _bytes(np.stack(named, axis=1)).reshape(kept.shape)
    weights_s, activations_s = host_transfer_s(hardware, weights), host_transfer_s(hardware, activations)
    # Forward: weights in and activations out at the same time. Backward: first the weights in, then the
    # activations.
    transfers = np.stack([np.maximum(weights_s, activations_s), weights_s + activations_s], axis=2)
    if problem.inference:
        transfers[:, :, 1] = 0.0
    # Update: states in and out at the same time, and then the offloaded weights out.
    written = host_transfer_s(hardware, optimizer)
    written[:-2] += 0.0 if problem.inference else weights_s
    return Offload(
        beside(whole_ns(transfers), work), beside(whole_ns(written), update), weights, optimizer, activations
    )


def offloaded(problem: Problem, columns: LayoutColumns, costs: LayoutCosts) -> LayoutCosts:
    """Move the offloaded bytes of the constants to the host, and add the transfers to the durations."""
    duration, kinds = costs.duration_ns, slice(None, -2)
    kept = np.stack([costs.kept_bytes] * MODES)
    kept[1:] -= np.stack([costs.dropped_selective_bytes, costs.dropped_full_bytes])
    work = np.stack([duration[:, : Phase.BACKWARD + 1]] * MODES)
    work[1:, :, Phase.BACKWARD] += np.moveaxis(duration[:, REPLAYS], 1, 0)
    moved = offload(problem, columns, costs.state_bytes, kept, work, costs.optimizer_ns)
    exposed, duration = moved.layer_ns[0], duration.copy()
    duration[:, : Phase.BACKWARD + 1] += exposed[0]
    duration[:, REPLAYS] += np.moveaxis(exposed[1:, :, 1] - exposed[0, :, 1], 0, 1)
    device = costs.state_bytes.copy()
    device[0, kinds] -= moved.weights_bytes
    device[2] -= moved.optimizer_bytes
    stays = kept - moved.kept_bytes
    host = moved.optimizer_bytes.copy()
    host[kinds] += moved.weights_bytes
    return replace(
        costs,
        parts=replace(costs.parts, offload=moved.layer_ns, update=moved.update_ns),
        duration_ns=duration,
        replayed_forward_ns=exposed[1:, :, 0] - exposed[0, :, 0],
        optimizer_ns=costs.optimizer_ns + moved.update_ns[0],
        state_bytes=device,
        kept_bytes=stays[0],
        dropped_selective_bytes=stays[0] - stays[1],
        dropped_full_bytes=stays[0] - stays[2],
        host_state_bytes=host,
        host_kept_bytes=moved.kept_bytes,
        streamed_bytes=moved.weights_bytes,
        update_bytes=moved.optimizer_bytes,
    )


def whole_ns(seconds: FloatArray) -> IntArray:
    """Round seconds to whole nanoseconds."""
    return np.rint(seconds * NS_PER_S).astype(np.int64)


LARGEST = 2.0**53
"""Cap of every constant (in nanoseconds a hundred days), so that sums stay far below 64 bits."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Breakdown of the times of a layout into parts, in nanoseconds per micro-batch."""

    layer: IntArray
    """[K, Part, Phase, l] a distinct layer, without the communication of sharded states."""
    embedding: IntArray
    """[Part, 3, l] the embedding in the phases ``ONCE``."""
    head: IntArray
    """[Part, 3, l] the head in the phases ``ONCE``."""
    zero: IntArray
    """[K, 2, 3, n] (exposed, hidden) communication that ZeRO 2 and 3 add to a layer in the phases ``ONCE``."""
    offload: IntArray
    """[2, MODES, K, 2, n] (exposed, hidden) transfers that offloading adds to a layer's forward and backward
    under each recompute mode."""
    update: IntArray
    """[2, K + 2, n] (exposed, hidden) transfers that offloading adds to an optimizer update."""
    place: IntArray
    """[n] index of each layout's distinct layer."""

    def at(self, row: int) -> Parts:
        """Select one layout: drop the last axis and add the sharding to its layers."""
        index, zero = self.place[row], self.zero[..., row]
        layer = self.layer[..., index].copy()
        for number, part in enumerate((Part.ZERO, Part.ZERO_HIDDEN)):
            layer[:, part, ONCE] += zero[:, number]
        endpoints = (self.embedding[..., index], self.head[..., index])
        return Parts(layer, *endpoints, zero, self.offload[..., row], self.update[..., row], index)


@dataclass(frozen=True, slots=True)
class LayoutCosts:
    """Integer constants of many layouts, or of a single layout without the last axis (``at``).

    Bytes are bytes of device memory unless the name says host.
    """

    parts: Parts
    duration_ns: IntArray
    """[K, Phase, n] a layer; the sum over its exposed parts. SELECTIVE and FULL may be negative with offloading,
    because the replay of a layer may take less time than the transfers that it saves."""
    edge_ns: IntArray
    """[3, K, n] a layer in the phases ``ONCE``, without transfers of the host."""
    paired_ns: IntArray
    """[K, 2, n] a layer's forward and backward in a pair; 0 where the schedule has no pairs."""
    replayed_forward_ns: IntArray
    """[2, K, n] change of a layer's forward when it is recomputed (selectively, wholly); at most 0."""
    embedding_ns: IntArray
    """[3, n] the embedding in the phases ``ONCE``."""
    head_ns: IntArray
    """[3, n] the head in the phases ``ONCE``."""
    reduce_ns: IntArray
    """[K + 2, n] gradient reduction of a piece, once a step."""
    gather_ns: IntArray
    """[K + 2, n] parameter gather of a piece, once a step."""
    exposed_fractions: FloatArray
    """[2, n] part of a gather and of a reduction once a step that compute beside it cannot hide."""
    optimizer_ns: IntArray
    """[K + 2, n] optimizer update of a piece."""
    transfer_ns: IntArray
    """[n] transfer of a micro-batch between neighbouring stages."""
    barrier_ns: IntArray
    """[n] gradient norm and overhead between the last reduction and the update, and ``whole_matrix_ns``."""
    whole_matrix_ns: IntArray
    """[n] update of the most loaded rank beyond the mean (``states.beyond_the_mean``); 0 with Adam."""
    state_bytes: IntArray
    """[3, K + 2, n] (weights, gradients, optimizer states) of a piece."""
    kept_bytes: IntArray
    """[K, n] activations of a layer per live micro-batch, without recomputation."""
    dropped_selective_bytes: IntArray
    """[K, n] part of ``kept_bytes`` that selective recomputation drops."""
    dropped_full_bytes: IntArray
    """[K, n] part of ``kept_bytes`` that full recomputation drops."""
    embedding_kept_bytes: IntArray
    """[n] activations of the embedding per live micro-batch."""
    embedding_workspace_bytes: IntArray
    """[n] temporary bytes of the embedding's backward."""
    head_kept_bytes: IntArray
    """[n] activations of the head per live micro-batch."""
    deferred_bytes: IntArray
    """[K, n] bytes of a layer per micro-batch that waits for its weight gradients."""
    head_deferred_bytes: IntArray
    """[n] bytes of the head per micro-batch that waits for its weight gradients."""
    workspace_bytes: IntArray
    """[K, n] temporary bytes of a layer's backward."""
    head_workspace_bytes: IntArray
    """[n] temporary bytes of the head's backward."""
    buffer_bytes: IntArray
    """[n] buffers that a GPU holds once."""
    host_state_bytes: IntArray
    """[K + 2, n] states of a piece on the host."""
    host_kept_bytes: IntArray
    """[MODES, K, n] activations of a layer on the host, per live micro-batch, under each recompute mode."""
    streamed_bytes: IntArray
    """[K, n] weights of an offloaded layer; the device holds them for the layer at work and the next layer."""
    update_bytes: IntArray
    """[K + 2, n] offloaded optimizer states; the device holds them for the piece at work and the next piece."""
    split_backward: IntArray
    """[n] 1 where weight gradients run apart from the backward, else 0."""

    @property
    def least_ns(self) -> IntArray:
        """Minimum forward and backward of a layer over the recompute modes, [2, K, n].

        Without offloading, these are the times of a layer that recomputes nothing.
        """
        forward, backward = self.duration_ns[:, Phase.FORWARD], self.duration_ns[:, Phase.BACKWARD]
        if not self.offloads:
            return np.stack([forward, backward])
        change = np.minimum(self.duration_ns[:, REPLAYS].min(axis=1), 0)
        return np.stack([forward + np.minimum(self.replayed_forward_ns.min(axis=0), 0), backward + change])

    @property
    def runs_pairs(self) -> bool:
        """True if some layout runs forwards beside whole backwards."""
        return bool(self.paired_ns.any())

    @property
    def offloads(self) -> bool:
        """True if some layout holds states or activations on the host."""
        return bool(self.host_state_bytes.any() or self.host_kept_bytes.any())

    def of_rank(self, rank: int) -> LayoutCosts:
        """Return the constants of a pipeline rank. With a single node type all ranks share them."""
        return self

    def type_of(self, rank: int) -> int:
        """Return the node type of a pipeline rank."""
        return 0

    def crossing_ns(self, stage: int) -> int:
        """Return the time beyond ``transfer_ns`` of a transfer from a virtual stage to the next."""
        return 0

    def at(self, row: int) -> LayoutCosts:
        """Select one layout and drop the layout axis."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        parts = values.pop("parts").at(row)
        return LayoutCosts(parts, **{name: value[..., row] for name, value in values.items()})


@dataclass(frozen=True, slots=True)
class CostTable:
    """Constants of many layouts, each distinct combination stored once."""

    distinct: LayoutCosts
    place: IntArray
    """[n] index in ``distinct`` of each layout."""

    def take(self, rows: npt.NDArray[np.integer]) -> CostTable:
        """Select layouts."""
        return CostTable(self.distinct, self.place[rows])

    @property
    def best(self) -> CostTable:
        """Constants that no rank undercuts. With a single node type, these constants (see ``MixedTable.best``)."""
        return self

    def at(self, row: int) -> LayoutCosts:
        """Select one layout and drop the layout axis."""
        return self.distinct.at(int(self.place[row]))


def capacities_bytes(problem: Problem) -> tuple[int, ...]:
    """Return the bytes of device memory that plans of the problem's space may fill, for every node type."""
    margin = problem.space.memory_margin_fraction
    return tuple(hardware.capacity_bytes(margin) for hardware in problem.node_types)


def usable_memory_bytes(problem: Problem) -> int:
    """Return the maximum of ``capacities_bytes`` over the node types."""
    return max(capacities_bytes(problem))


def host_capacity_bytes(problem: Problem) -> int:
    """Return the bytes of host memory that an accelerator may fill, a maximum over the node types."""
    return max(hardware.host_bytes for hardware in problem.node_types)


def layer_durations_ns(problem: Problem, columns: LayoutColumns) -> IntArray:
    """Time one layer of each kind without sharded states, in nanoseconds [K, Phase, n].

    A lower bound of ``LayoutCosts.duration_ns``, which adds what ZeRO 2 and 3 send beside the layer.
    """
    seconds = np.empty((len(problem.model.kinds), EXPOSED.stop - EXPOSED.start, len(Phase), len(columns)))
    for row, kind in enumerate(problem.model.kinds):
        seconds[row] = layer_seconds(problem, kind, columns)[EXPOSED]
    return np.asarray(_ns(seconds).sum(axis=1))


def least_layer_ns(problem: Problem, columns: LayoutColumns) -> IntArray:
    """Time the kernels of one layer of each kind without communication, in nanoseconds [K, Phase, n].

    A lower bound of ``layer_durations_ns`` for every placement of the ranks. Valid only for milpplan's own cost
    model: a plug-in need not separate kernels from communication.
    """
    seconds = np.stack([layer_seconds(problem, kind, columns)[Part.COMPUTE] for kind in problem.model.kinds])
    return np.asarray(np.floor(np.minimum(seconds * NS_PER_S, LARGEST)), dtype=np.int64)


def layout_costs(problem: Problem, columns: LayoutColumns) -> CostTable:
    """Compute the constants of many layouts, once for each distinct combination of the fields they depend on.

    Args:
        problem: model, cluster and job; ``problem.hardware`` is the hardware of all ranks here.
        columns: n layouts.

    Returns:
        Constants, nanoseconds and bytes, that all n layouts refer to.
    """
    keys = COST_KEYS if problem.job.images is None else (*COST_KEYS, "global_batch_size")
    rows, index = distinct(columns, keys, ("rank_order",))
    part = columns.take(rows)
    costs = _constants(problem, part)
    return CostTable(offloaded(problem, part, costs) if part.any_of(*HOSTED) else costs, index)


def _constants(problem: Problem, columns: LayoutColumns) -> LayoutCosts:
    """Compute the constants of layouts as if nothing were offloaded."""
    layer_rows, layer_inverse = distinct_layers(problem, columns)
    state_rows, state_inverse = distinct(columns, STATE_KEYS, ("rank_order", "pp"))
    layer_part = columns.take(layer_rows)
    state_part = columns.take(state_rows)
    kinds = problem.model.kinds
    parameters = [states.local_layer_parameters(problem, kind, state_part) for kind in kinds]
    embedding = embedding_endpoint(problem, layer_part)
    head = head_endpoint(problem, layer_part)
    seconds = np.empty((len(kinds), len(Part), len(Phase), len(layer_part)))
    for row, kind in enumerate(kinds):
        seconds[row] = layer_seconds(problem, kind, layer_part)
    compute = seconds[:, EXPOSED, ONCE].sum(axis=1)[..., layer_inverse]
    reduce, gather, zero = _sharding(problem, state_part, parameters, state_inverse, columns, compute)
    activations = [layer_activations(problem, kind, layer_part) for kind in kinds]
    deferred = np.stack([layer_deferred_bytes(problem, kind, layer_part) for kind in kinds])

    def activation_bytes(name: str) -> IntArray:
        return _bytes(np.stack([getattr(item, name) for item in activations]))[:, layer_inverse]

    transfers = _transfer_ns(problem, columns)
    layers = parameters
    if problem.job.mtp_layers and problem.job.optimizer == "muon":
        layers = [*layers, states.local_mtp_parameters(problem, state_part)]
    whole_s, whole_bytes = np.max([states.beyond_the_mean(state_part, local) for local in layers], axis=0)
    whole_matrix = _ns(whole_s)[state_inverse]
    endpoints = _endpoint_states(problem, columns, embedding, head)
    optimizer = np.stack([states.optimizer_s(problem, state_part, local) for local in parameters])
    sizes = np.stack([states.state_bytes(problem, state_part, local) for local in parameters], axis=1)
    K, modes, shape = len(kinds), MODES, (len(columns),)
    endpoints_ns, zeros = (_ns(embedding.phases), _ns(head.phases)), np.int64(0)
    no_offload = (np.broadcast_to(zeros, (2, modes, K, 2, *shape)), np.broadcast_to(zeros, (2, K + 2, *shape)))
    parts = Parts(_ns(seconds), *endpoints_ns, _ns(zero), *no_offload, layer_inverse)
    duration = parts.layer[:, EXPOSED].sum(axis=1)[..., layer_inverse]
    duration[:, ONCE] += parts.zero[:, 0]
    software = problem.hardware.software
    hidden = software.hidden_gather_fraction, software.hidden_reduce_fraction
    return LayoutCosts(
        parts=parts,
        duration_ns=duration,
        edge_ns=np.moveaxis(duration[:, ONCE], 1, 0),
        paired_ns=(
            paired_ns(problem, layer_part, parts.layer, parts.zero, columns, parts.place)
            if columns.runs_pairs.any()
            else np.broadcast_to(np.int64(0), (K, 2, *shape))
        ),
        replayed_forward_ns=np.broadcast_to(zeros, (modes - 1, K, *shape)),
        embedding_ns=parts.embedding[EXPOSED].sum(axis=0)[:, layer_inverse],
        head_ns=parts.head[EXPOSED].sum(axis=0)[:, layer_inverse],
        reduce_ns=_ns(np.concatenate([reduce, endpoints.reduce])),
        gather_ns=_ns(np.concatenate([gather, endpoints.gather])),
        exposed_fractions=np.broadcast_to(1.0 - np.array(hidden)[:, None], (2, *shape)),
        optimizer_ns=_ns(np.concatenate([optimizer[:, state_inverse], endpoints.optimizer])),
        transfer_ns=transfers,
        barrier_ns=_barrier_ns(problem, columns, transfers) + whole_matrix,
        whole_matrix_ns=whole_matrix,
        state_bytes=_bytes(np.concatenate([sizes[..., state_inverse], endpoints.state], axis=1)),
        kept_bytes=activation_bytes("kept"),
        dropped_selective_bytes=activation_bytes("dropped_selective"),
        dropped_full_bytes=activation_bytes("dropped_full"),
        embedding_kept_bytes=_bytes(embedding.kept_bytes)[layer_inverse],
        embedding_workspace_bytes=_bytes(embedding.workspace_bytes)[layer_inverse],
        head_kept_bytes=_bytes(head.kept_bytes)[layer_inverse],
        deferred_bytes=_bytes(deferred)[:, layer_inverse],
        head_deferred_bytes=_bytes(head_deferred_bytes(problem, layer_part))[layer_inverse],
        workspace_bytes=activation_bytes("workspace"),
        head_workspace_bytes=_bytes(head.workspace_bytes)[layer_inverse],
        buffer_bytes=_bytes(_buffers(problem, state_part, parameters) + whole_bytes)[state_inverse],
        host_state_bytes=np.broadcast_to(zeros, (K + 2, *shape)),
        host_kept_bytes=np.broadcast_to(zeros, (modes, K, *shape)),
        streamed_bytes=np.broadcast_to(zeros, (K, *shape)),
        update_bytes=np.broadcast_to(zeros, (K + 2, *shape)),
        split_backward=columns.split_backward.astype(np.int64),
    )


def _buffers(problem: Problem, part: LayoutColumns, parameters: list[LocalParameters]) -> FloatArray:
    """Size the buffers that a GPU holds once for all its layers, in bytes [n]: a maximum over the kinds, and the
    memory of an engine that generates sequences."""
    needed = [
        states.unsharded_buffer_bytes(problem, part, local)
        + states.dummy_gradient_bytes(problem, kind, part, local)
        for kind, local in zip(problem.model.kinds, parameters, strict=True)
    ]
    held = 0 if problem.job.rollout is None else problem.job.rollout.held_bytes
    return np.asarray(np.max(needed, axis=0) + held)


@dataclass(frozen=True, slots=True)
class _EndpointStates:
    """Costs of the states of embedding and head: seconds [2, n], and bytes ``state`` [3, 2, n]."""

    reduce: FloatArray
    gather: FloatArray
    optimizer: FloatArray
    state: FloatArray


def _endpoint_states(
    problem: Problem, columns: LayoutColumns, embedding: Endpoint, head: Endpoint
) -> _EndpointStates:
    """Compute the costs of the states of embedding and head.

    A tied head on another rank than the embedding keeps its own copy of the matrix, and an all-reduce between the
    first and the last stage sums the two gradients. On the same rank both share a single matrix. So it is with the
    embedding of multi-token prediction, whose layers belong to the head.
    Source: Megatron-LM core/distributed/finalize_model_grads.py.
    """
    rows, inverse = distinct(columns, (*STATE_KEYS, "pp", "ends_meet"), ("rank_order",))
    sharded = columns.take(rows)
    # The root unit of a sharded model stays gathered (PyTorch FSDP2, reshard_after_forward of the root).
    part = replace(sharded, zero_stage=np.minimum(sharded.zero_stage, 1))
    forwards, shared = problem.inference, copied_embedding(problem, part)
    locals_ = (
        LocalParameters.end(problem, embedding, part.tp),
        LocalParameters.end(problem, head, part.tp, shared),
    )
    stride = placement.pipeline(part).stride * (part.pp - 1)
    pair = np.where(shared > 0, 2, 1)
    summed = states.grad_bytes(problem) * shared * problem.job.trains("head")
    tie = ends_reduce_s(problem, summed, pair, stride)
    gathered = (part.zero_stage >= 1) & (not forwards)
    tie = np.zeros_like(tie) if forwards else tie
    reduce = [states.reduce_s(problem, part, local) + tie for local in locals_]
    gather = [np.where(gathered, states.gather_s(problem, sharded, local, is_end=True), 0.0) for local in locals_]
    update = [states.optimizer_s(problem, part, local) for local in locals_]
    sizes = [states.state_bytes(problem, part, local, BF16_BYTES) for local in locals_]
    if count := problem.job.mtp_layers:
        mtp = states.local_mtp_parameters(problem, part)
        reduce[1] = reduce[1] + count * states.reduce_s(problem, part, mtp)
        gather[1] = gather[1] + count * np.where(gathered, states.gather_s(problem, part, mtp), 0.0)
        update[1] = update[1] + count * states.optimizer_s(problem, part, mtp)
        sizes[1] = sizes[1] + count * states.state_bytes(problem, part, mtp)
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
    """Time the gradient and parameter communication of the layers.

    ZeRO stages 0 and 1 reduce once a step; stages 1 and 2 gather once a step. In every micro-batch, stage 2
    reduces, and stage 3 gathers and reduces, beside the layer's compute. The backward gathers nothing where
    weights are kept after the forward. Reductions run beside the weight
    gradients where these are work items of their own, else beside the backward.

    Args:
        part: the layouts with distinct states; ``parameters`` and ``inverse`` refer to them.
        parameters: local parameters of a layer of each kind.
        inverse: [n] index in ``part`` of each layout.
        columns: n layouts.
        compute: seconds of a layer to hide communication beside, [K, 3, n] in the phases ``ONCE``.

    Returns:
        Seconds: reductions once a step [K, n], gathers once a step [K, n], and communication in every micro-batch
        [K, 2, 3, n] as in ``Parts.zero``.
    """
    reduce = np.stack([states.reduce_s(problem, part, local) for local in parameters])[:, inverse]
    gather = np.stack([states.gather_s(problem, part, local) for local in parameters])[:, inverse]
    stage = columns.zero_stage
    zero = np.zeros((len(parameters), 2, len(ONCE), len(columns)))
    rows = np.flatnonzero(stage >= 2)
    again = np.where(stage[rows] == 3, gather[:, rows], 0.0)
    forward = again * (1 + problem.job.further_forwards)
    replicas = placement.replicas(columns.take(rows))
    share = collectives.processor_fraction(problem.hardware, *replicas)
    split, none = columns.split_backward[rows], np.zeros_like(forward)
    again = none if problem.inference else np.where(columns.keep_weights[rows], 0.0, again)
    by_phase = [(forward, none), (again, np.where(split, 0.0, reduce[:, rows]))]
    by_phase += [(none, np.where(split, reduce[:, rows], 0.0))] * bool(split.any())
    for phase, (gathered, reduced) in enumerate(by_phase):
        hidden = collectives.hidden_fraction(problem.hardware, gathered, reduced)
        parts = collectives.overlap_s(gathered + reduced, compute[:, phase, rows], share, hidden)
        zero[:, 0, phase, rows], zero[:, 1, phase, rows] = parts
    once = np.where(stage >= 2, 0.0, reduce)
    gathers = ((stage == 1) | (stage == 2)) & (not problem.inference)
    return once, np.where(gathers, gather, 0.0), zero


def _transfer_ns(problem: Problem, columns: LayoutColumns) -> IntArray:
    """Time a transfer between neighbouring stages, in nanoseconds [n] (``transfer_s``)."""
    keys = ("tp", "cp", "dp", "pp", "micro_batch_size", "sequence_parallel", "pp_scatter_gather")
    rows, inverse = distinct(columns, keys, ("rank_order",))
    return _ns(transfer_s(problem, columns.take(rows)))[inverse]


def crossing_transfer_ns(problem: Problem, columns: LayoutColumns) -> IntArray:
    """Time a transfer between stages on two node types, in nanoseconds [n] (``crossing_transfer_s``)."""
    return _ns(crossing_transfer_s(problem, columns))


def step_overhead_ns(problem: Problem) -> int:
    """Return the framework's overhead of a step that nothing hides, a maximum over the node types, and the time
    of rollouts on the same GPUs."""
    overheads = (hardware.software.step_overhead_s for hardware in problem.node_types)
    return int(_ns(np.array(max(overheads) + problem.job.rollout_s)))


def _barrier_ns(problem: Problem, columns: LayoutColumns, transfers: IntArray) -> IntArray:
    """Time the barrier after the last reduction, in nanoseconds [n].

    It holds the global gradient norm, the overhead per step of tensor-parallel groups across domains, and the
    framework's overhead of a step.

    An inference job runs through the graph of GPipe with backwards of length 0. The last backward, on rank 0, ends
    exactly P - 1 transfers after the last forward on rank P - 1, so these transfers are subtracted.
    """
    if problem.inference:
        return np.asarray(step_overhead_ns(problem) - (columns.pp - 1) * transfers)
    gpus, inverse = np.unique(columns.num_gpus, return_inverse=True)
    norm = gradient_norm_s(problem, gpus)[inverse] + far_step_s(problem, columns)
    norm = norm + states.single_calls_s(problem, columns)
    return _ns(norm) + step_overhead_ns(problem)


def _ns(seconds: FloatArray) -> IntArray:
    """Round seconds to whole nanoseconds, at most ``LARGEST``."""
    return np.rint(np.minimum(np.asarray(seconds) * NS_PER_S, LARGEST)).astype(np.int64)


def _bytes(values: FloatArray) -> IntArray:
    """Round up to whole bytes, at most ``LARGEST``. The small slack absorbs rounding errors of floats."""
    return np.ceil(np.minimum(np.asarray(values) - 1e-6, LARGEST)).astype(np.int64)


def distinct_layers(problem: Problem, columns: LayoutColumns) -> tuple[IntArray, IntArray]:
    """Find representatives and inverse (``unique_rows``) of the layouts with distinct layers.

    In milpplan's own cost model, the times of a layer depend on the order of ranks only through the positions of
    its groups in the network. These are the key, because they are the same for many strides. A distribution of
    images adds the sequences of a replica and the number of replicas.
    """
    keys = LAYER_KEYS if problem.job.images is None else (*LAYER_KEYS, "global_batch_size", "dp")
    if not columns.rank_order.any() or not has_own_times(problem):
        return distinct(columns, keys, ("rank_order", "dp", "pp"))
    return unique_rows(*(getattr(columns, name) for name in keys), *layer_positions(problem, columns))


def layer_positions(problem: Problem, columns: LayoutColumns) -> list[IntArray]:
    """Return numbers that tell apart the positions of the groups that exchange data inside a layer, [n] each.

    A ring sends between neighbours, so that the stride of the context-parallel groups counts, not their position
    alone. Groups of a single rank have no position.
    """
    context = placement.context(columns)
    keys = [np.where(context.size > 1, context.stride, 0)]
    for group in (placement.tensor(columns), placement.expert(columns), placement.expert_tensor(columns)):
        alone = group.size == 1
        for hardware in problem.node_types:
            position = group_place(hardware, group.size, group.stride)
            numbers = (position.members, position.domains, position.one_rail, *(position.beyond or ()))
            keys += [np.where(alone, 0, number) for number in numbers]
    return keys
