"""What a switch between two plans is: records only. Bytes, seconds, arrays of NumPy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from milpplan.simulation.layout_columns import FloatArray, IntArray
from milpplan.switching.deliveries import Deliveries
from milpplan.switching.ownership import What
from milpplan.switching.tensors import Tensor

Senders = Literal["nearest", "exact", "relay"]
SENDERS: tuple[Senders, ...] = ("nearest", "exact", "relay")
"""Nearest and least loaded holders; the best direct senders, proved; with relays inside domains, proved."""


@dataclass(frozen=True, slots=True)
class SwitchPlan:
    """A switch of one kind of state from a plan to another on the same GPUs.

    ``sent_bytes`` and ``received_bytes`` [ranks, tier] with the tiers inside a domain and between domains;
    ``old_bytes``, ``new_bytes``, ``kept_bytes``, ``peak_bytes`` [ranks]. ``time_s``: all of it; ``tier_s``: the
    busiest port of each tier; ``lower_bound_s``: proved for the busiest port of any senders of this kind, 0 where
    the nearest are taken; ``first_layers_s``: only what the first layers of all virtual stages lack, which has to
    be there before the first forward.
    """

    what: What
    senders: Senders
    num_gpus: int
    gpus_per_domain: int
    tensors: tuple[Tensor, ...]
    deliveries: Deliveries
    sent_bytes: IntArray
    received_bytes: IntArray
    old_bytes: IntArray
    new_bytes: IntArray
    kept_bytes: IntArray
    peak_bytes: IntArray
    time_s: float
    tier_s: tuple[float, float]
    lower_bound_s: float
    first_layers_s: float

    @property
    def total_bytes(self) -> int:
        """Bytes sent."""
        return int(self.sent_bytes.sum())

    @property
    def num_messages(self) -> int:
        """Fused messages."""
        return self.deliveries.num_messages

    def messages(self) -> tuple[IntArray, IntArray]:
        """(sender, receiver) of every fused message [messages, 2] and its bytes."""
        starts = self.deliveries.message_starts()
        pairs = np.column_stack([self.deliveries.sender[starts], self.deliveries.receiver[starts]])
        sums = np.add.reduceat(self.deliveries.num_bytes, starts) if len(starts) else np.zeros(0, np.int64)
        return pairs, np.asarray(sums)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; messages as columns, without the slices (``deliveries`` has them)."""
        pairs, sizes = self.messages()
        return {
            "what": self.what,
            "senders": self.senders,
            "bytes": self.total_bytes,
            "inside_bytes": int(self.sent_bytes[:, 0].sum()),
            "between_bytes": int(self.sent_bytes[:, 1].sum()),
            "time_s": self.time_s,
            "lower_bound_s": self.lower_bound_s,
            "inside_s": self.tier_s[0],
            "between_s": self.tier_s[1],
            "first_layers_s": self.first_layers_s,
            "num_messages": len(pairs),
            "num_slices": len(self.deliveries),
            "old_bytes": self.old_bytes.tolist(),
            "new_bytes": self.new_bytes.tolist(),
            "kept_bytes": self.kept_bytes.tolist(),
            "peak_bytes": self.peak_bytes.tolist(),
            "sent_bytes": self.sent_bytes.tolist(),
            "received_bytes": self.received_bytes.tolist(),
            "messages": {
                "sender": pairs[:, 0].tolist(),
                "receiver": pairs[:, 1].tolist(),
                "bytes": sizes.tolist(),
                # Of two messages of one pair, which starts when its sender has received the slices.
                "relay": self.deliveries.relay[self.deliveries.message_starts()].tolist(),
            },
        }


@dataclass(frozen=True, slots=True)
class SwitchCosts:
    """Switches between all ordered pairs of n plans, [from, to]; zero on the diagonal.

    Seconds and bytes for parameters and for reduced gradients, and the most bytes that a rank needs at once while
    it switches parameters (``peak_bytes``).
    """

    parameters_s: FloatArray
    gradients_s: FloatArray
    parameters_bytes: IntArray
    gradients_bytes: IntArray
    peak_bytes: IntArray


GradientRoute = Literal["pairwise", "home"]


@dataclass(frozen=True, slots=True)
class SwitchOrder:
    """The best circuit: plans by number, the home first. ``time_s`` is the sum of its parts; ``gradients``:
    handed on from plan to plan, or sent straight home."""

    order: tuple[int, ...]
    gradients: GradientRoute
    time_s: float
    parameters_s: float
    gradients_s: float
