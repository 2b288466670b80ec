"""Offloading to host memory: bytes on the host, and times to stream them.

Weights of a layer are streamed in before its forward and before its backward. Its kept activations are streamed
out beside its forward and in before its backward. Optimizer states are streamed in and out around the update,
which runs on the device. Embedding and head keep their weights and activations on the device; their optimizer
states are offloaded like those of the layers. Gradients stay on the device. Transfers run beside the layer's own
work, on a link with two directions.

Source: Isaev et al. 2023 (Calculon), offloading; Rajbhandari et al. 2021 (ZeRO-Infinity) sections 5 and 6. The
update on the host (Ren et al. 2021, ZeRO-Offload) is not modelled.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from milpplan.errors import InvalidInputError
from milpplan.problem import HardwareSpec, Problem
from milpplan.simulation.layers import Phase, interpolate_curve
from milpplan.simulation.layers.kernels import Numbers
from milpplan.simulation.layers.terms import REPLAYS
from milpplan.simulation.layout_columns import FloatArray, IntArray, LayoutColumns
from milpplan.units import NS_PER_S

if TYPE_CHECKING:
    from milpplan.simulation.layout_costs import LayoutCosts

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
    """Compute the bytes that layouts offload, and the times of their transfers.

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
    weights_s, activations_s = host_transfer_s(hardware, weights), host_transfer_s(hardware, activations)
    # Forward: weights in and activations out at the same time. Backward: first the weights in, then the
    # activations.
    transfers = np.stack([np.maximum(weights_s, activations_s), weights_s + activations_s], axis=2)
    if problem.inference:
        transfers[:, :, 1] = 0.0
    # Update: states in and out at the same time, and then the offloaded weights out.
    written = host_transfer_s(hardware, optimizer)
    written[:-2] += 0.0 if problem.inference else weights_s
    return Offload(beside(_ns(transfers), work), beside(_ns(written), update), weights, optimizer, activations)


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
    stays = ~columns.offload_activations
    host = moved.optimizer_bytes.copy()
    host[kinds] += moved.weights_bytes
    return replace(
        costs,
        parts=replace(costs.parts, offload=moved.layer_ns, update=moved.update_ns),
        duration_ns=duration,
        replayed_forward_ns=exposed[1:, :, 0] - exposed[0, :, 0],
        optimizer_ns=costs.optimizer_ns + moved.update_ns[0],
        state_bytes=device,
        kept_bytes=costs.kept_bytes * stays,
        dropped_selective_bytes=costs.dropped_selective_bytes * stays,
        dropped_full_bytes=costs.dropped_full_bytes * stays,
        host_state_bytes=host,
        host_kept_bytes=moved.kept_bytes,
        streamed_bytes=moved.weights_bytes,
        update_bytes=moved.optimizer_bytes,
    )


def _ns(seconds: FloatArray) -> IntArray:
    """Round seconds to whole nanoseconds."""
    return np.rint(seconds * NS_PER_S).astype(np.int64)
