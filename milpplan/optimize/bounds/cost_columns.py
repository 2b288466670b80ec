"""Cost constants of many layouts as the bounds need them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from milpplan.simulation.layers.terms import Phase
from milpplan.simulation.layout_columns import FloatArray, IntArray
from milpplan.simulation.layout_costs import LayoutCosts
from milpplan.simulation.stages import EMBEDDING, HEAD

OPTIONAL = ("saved", "late")
"""Fields of ``CostColumns`` that are None where no layout needs them."""


@dataclass(frozen=True, slots=True)
class CostColumns:
    """Parts of ``LayoutCosts`` as floats with the layout on the last axis; K kinds, M recompute modes in the
    space's order.

    Nanoseconds: ``forward``, ``backward`` (minimum over modes), ``weight`` (separate weight gradients) and
    ``optimizer`` [K, r] a layer; ``extra`` [M, K, r] of its recomputation; ``late`` [M, K, r] excess of its
    forward over the minimum (None where nothing is offloaded); ``embedding`` and ``head`` [3, r] a micro-batch;
    ``end_optimizer`` [2, r]; ``transfer`` [r]; ``tail`` [r], the embedding's gather and reduction and the barrier;
    ``end_reduce`` [r], the reduction in ``tail``.

    Bytes: ``states`` [K, r] and ``kept`` [M, K, r] a layer (kept a live micro-batch); ``deferred`` [K, r] a
    micro-batch that waits for weight gradients, ``head_deferred`` [r] of the head; ``buffers`` [r]; ``end_states``
    [2, r] with the head's workspace, ``end_kept`` [2, r] a live micro-batch (embedding, head).

    ``saved`` [2, K, r]: nanoseconds by which a layer's forward and its backward are shorter in a pair; None where
    no layout has pairs.
    """

    forward: FloatArray
    backward: FloatArray
    weight: FloatArray
    extra: FloatArray
    optimizer: FloatArray
    embedding: FloatArray
    head: FloatArray
    end_optimizer: FloatArray
    transfer: FloatArray
    tail: FloatArray
    end_reduce: FloatArray
    states: FloatArray
    kept: FloatArray
    deferred: FloatArray
    head_deferred: FloatArray
    buffers: FloatArray
    end_states: FloatArray
    end_kept: FloatArray
    saved: FloatArray | None
    late: FloatArray | None

    @staticmethod
    def of(costs: LayoutCosts, modes: tuple[str, ...]) -> CostColumns:
        """Sum the constants of many layouts."""
        duration, states = costs.duration_ns, costs.state_bytes.sum(axis=0)
        zero = np.zeros_like(costs.kept_bytes)
        extra = {"none": zero, "selective": duration[:, Phase.SELECTIVE], "full": duration[:, Phase.FULL]}
        dropped = {"none": zero, "selective": costs.dropped_selective_bytes, "full": costs.dropped_full_bytes}
        ends = states[[EMBEDDING, HEAD]]
        ends[1] += costs.head_workspace_bytes
        min_passes = costs.least_ns
        added = np.stack([extra[mode] for mode in modes]) - (min_passes[1] - duration[:, Phase.BACKWARD])
        values: dict[str, IntArray] = {
            "forward": min_passes[0],
            "backward": min_passes[1],
            "weight": duration[:, Phase.WEIGHT],
            "extra": added,
            "optimizer": costs.optimizer_ns[:EMBEDDING],
            "embedding": costs.embedding_ns,
            "head": costs.head_ns,
            "end_optimizer": costs.optimizer_ns[[EMBEDDING, HEAD]],
            "transfer": costs.transfer_ns,
            "tail": costs.barrier_ns + costs.reduce_ns[EMBEDDING] + costs.gather_ns[EMBEDDING],
            "end_reduce": costs.reduce_ns[EMBEDDING],
            "states": states[:EMBEDDING],
            "kept": np.stack([costs.kept_bytes - dropped[mode] for mode in modes]),
            "deferred": costs.deferred_bytes,
            "head_deferred": costs.head_deferred_bytes,
            "buffers": costs.buffer_bytes,
            "end_states": ends,
            "end_kept": np.stack([costs.embedding_kept_bytes, costs.head_kept_bytes]),
        }
        saved = _saved_in_pairs(costs) if costs.runs_pairs else None
        late = _late_forwards(costs, modes) if costs.offloads else None
        floats = {name: value.astype(np.float64) for name, value in values.items()}
        return CostColumns(**floats, saved=saved, late=late)

    @staticmethod
    def of_layers(layers: FloatArray) -> CostColumns:
        """Return columns with the given forwards, backwards and weight gradients of layers, [K, Phase, r] ns; all
        else is zero."""
        none = np.zeros_like(layers[:, 0])
        values = dict.fromkeys((field.name for field in fields(CostColumns)), none[0])
        values |= dict.fromkeys(("optimizer", "states", "deferred"), none)
        values |= dict.fromkeys(("extra", "kept"), none[None])
        values |= dict.fromkeys(("embedding", "head"), np.zeros((3, none.shape[1])))
        values |= dict.fromkeys(("end_optimizer", "end_states", "end_kept"), np.zeros((2, none.shape[1])))
        values |= {"forward": layers[:, Phase.FORWARD], "backward": layers[:, Phase.BACKWARD]}
        return CostColumns(**values | {"weight": layers[:, Phase.WEIGHT], "saved": None, "late": None})

    def take(self, rows: IntArray) -> CostColumns:
        """Return the chosen layouts."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        taken: dict[str, Any] = {
            name: None if value is None else value.take(rows, axis=-1) for name, value in values.items()
        }
        return CostColumns(**taken)


def _late_forwards(costs: LayoutCosts, modes: tuple[str, ...]) -> FloatArray:
    """Return ``CostColumns.late``."""
    alone = costs.duration_ns[:, Phase.FORWARD]
    replayed = {"selective": costs.replayed_forward_ns[0], "full": costs.replayed_forward_ns[1]}
    return np.stack([alone + replayed.get(mode, 0) - costs.least_ns[0] for mode in modes]).astype(np.float64)


def _saved_in_pairs(costs: LayoutCosts) -> FloatArray:
    """Return ``CostColumns.saved``, zero for layouts without pairs."""
    alone = np.stack([costs.duration_ns[:, Phase.FORWARD], costs.duration_ns[:, Phase.BACKWARD]])
    paired = np.moveaxis(costs.paired_ns, 1, 0)
    return np.where(paired.any(axis=(0, 1)), alone - paired, 0).astype(np.float64)
