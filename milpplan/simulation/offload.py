"""What lies in the memory of the host, and what streaming it costs.

Weights of a layer are streamed in before its forward and before its backward, the activations that it keeps out
beside its forward and in before its backward, optimizer states in and out around the update, which runs on the
device. Embedding and head keep their weights and activations on the device; their optimizer states are offloaded
like the layers'. Gradients stay. Transfers run beside the layer's own work, on a link of two directions.

Source: Isaev et al. 2023 (Calculon), offloading; Rajbhandari et al. 2021 (ZeRO-Infinity) sections 5 and 6. The
update on the host (Ren et al. 2021, ZeRO-Offload) is not modelled.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from milpplan.errors import InvalidInputError
from milpplan.problem.hardware import HardwareSpec
from milpplan.problem.problem import Problem
from milpplan.simulation.layers.kernels import Numbers, interpolate_curve
from milpplan.simulation.layers.terms import REPLAYS, Phase
from milpplan.simulation.layout_columns import FloatArray, IntArray, LayoutColumns
from milpplan.units import NS_PER_S

if TYPE_CHECKING:
    from milpplan.simulation.layout_costs import LayoutCosts

MODES = 3
"""Of recomputation: none, selective, full."""


def host_transfer_s(hardware: HardwareSpec, num_bytes: Numbers) -> FloatArray:
    """Time to move bytes between accelerator and host, one direction: bytes / (bandwidth * efficiency(bytes)).

    num_bytes: of one transfer, any shape; 0 costs nothing. Returns seconds. Source: latency-bandwidth model, its
    curve in the hardware file.

    Raises:
        InvalidInputError: the hardware file has no memory of the host.
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
    """(exposed, hidden) nanoseconds of ``transfers`` beside ``work``, stacked [2, ...].

    exposed = max(0, transfers - work), hidden = transfers - exposed: copy engines take nothing from the
    processors. Neither memory bandwidth nor a link shared with the network is charged (lower).
    """
    exposed = np.maximum(transfers - work, 0)
    return np.stack([exposed, transfers - exposed])


@dataclass(frozen=True, slots=True)
class Offload:
    """Constants of offloading, K kinds of layer, n layouts, in whole nanoseconds and bytes.

    ``layer_ns`` [2, MODES, K, 2, n]: (exposed, hidden) of a layer's forward and backward under each recompute
    mode; ``update_ns`` [2, K + 2, n] of its update (kinds, embedding, head).

    On the host: ``weights_bytes`` [K, n], ``optimizer_bytes`` [K + 2, n], and ``kept_bytes`` [MODES, K, n] of
    activations a live micro-batch.
    """

    layer_ns: IntArray
    update_ns: IntArray
    weights_bytes: IntArray
    optimizer_bytes: IntArray
    kept_bytes: IntArray


def offload(
    problem: Problem, columns: LayoutColumns, states: IntArray, kept: IntArray, work: IntArray, update: IntArray
) -> Offload:
    """What the layouts offload, and what its transfers take.

    Args:
        states: [3, K + 2, n] bytes of weights, gradients and optimizer before anything is offloaded.
        kept: [MODES, K, n] bytes of a layer's activations.
        work: [MODES, K, 2, n] nanoseconds of a layer's forward and backward, replays included.
        update: [K + 2, n] nanoseconds of the update.
    """
    hardware = problem.hardware
    weights = np.where(columns.offload_weights, states[0, :-2], 0)
    optimizer = np.where(columns.offload_optimizer, states[2], 0)
    held = np.where(columns.offload_activations, kept, 0)
    weights_s, held_s = host_transfer_s(hardware, weights), host_transfer_s(hardware, held)
    # Forward: weights in, activations out, at a time. Backward: both in, one after the other.
    transfers = np.stack([np.maximum(weights_s, held_s), weights_s + held_s], axis=2)
    if problem.inference:
        transfers[:, :, 1] = 0.0
    # Update: states in and out at a time, and out the weights that are not on the device either.
    written = host_transfer_s(hardware, optimizer)
    written[:-2] += 0.0 if problem.inference else weights_s
    return Offload(beside(_ns(transfers), work), beside(_ns(written), update), weights, optimizer, held)


def offloaded(problem: Problem, columns: LayoutColumns, costs: LayoutCosts) -> LayoutCosts:
    """Constants with what the layouts have on the host there, and its transfers in the durations."""
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
    return np.rint(seconds * NS_PER_S).astype(np.int64)
