"""Records of a switch between two plans: bytes, seconds, NumPy arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from milpplan.simulation import FloatArray, IntArray
from milpplan.switching.ownership import Tensor, What
from milpplan.switching.routes import Deliveries

Senders = Literal["nearest", "exact", "relay"]
SENDERS: tuple[Senders, ...] = ("nearest", "exact", "relay")
"""Rules that choose senders: the nearest holders with the minimum load; optimal direct senders with a proved
bound; optimal senders with relays inside domains and a proved bound."""


@dataclass(frozen=True, slots=True)
class SwitchPlan:
    """Switch of a state from one plan to another on the same GPUs."""

    what: What
    senders: Senders
    num_gpus: int
    gpus_per_domain: int
    tensors: tuple[Tensor, ...]
    deliveries: Deliveries
    sent_bytes: IntArray
    """[ranks, tier], with the tiers inside a domain and between domains."""
    received_bytes: IntArray
    """[ranks, tier]."""
    old_bytes: IntArray
    """[ranks] before the switch."""
    new_bytes: IntArray
    """[ranks] after the switch."""
    kept_bytes: IntArray
    """[ranks] both before and after the switch."""
    peak_bytes: IntArray
    """[ranks] peak during the switch."""
    time_s: float
    """Time of the whole switch."""
    tier_s: tuple[float, float]
    """Time of the busiest port of each tier."""
    lower_bound_s: float
    """Proved lower bound of the time of the busiest port for any senders of this kind; 0 for the nearest
    senders."""
    first_layers_s: float
    """Time of the deliveries for the first layers of all virtual stages, which the first forward needs."""

    @property
    def total_bytes(self) -> int:
        """Sent bytes of all ranks."""
        return int(self.sent_bytes.sum())

    @property
    def num_messages(self) -> int:
        """Number of fused messages."""
        return self.deliveries.num_messages

    def messages(self) -> tuple[IntArray, IntArray]:
        """List (sender, receiver) of every fused message, [messages, 2], and its bytes."""
        starts = self.deliveries.message_starts()
        pairs = np.column_stack([self.deliveries.sender[starts], self.deliveries.receiver[starts]])
        sums = np.add.reduceat(self.deliveries.num_bytes, starts) if len(starts) else np.zeros(0, np.int64)
        return pairs, np.asarray(sums)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON, with messages as columns and without slices (``deliveries`` has them)."""
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
                # A relay starts when its sender has received the slices; a pair may have a message of each sort.
                "relay": self.deliveries.relay[self.deliveries.message_starts()].tolist(),
            },
        }


@dataclass(frozen=True, slots=True)
class SwitchCosts:
    """Costs of the switches between all ordered pairs of n plans, [from, to]; 0 on the diagonal.

    ``peak_bytes`` is the maximum peak of a rank while it switches parameters.
    """

    parameters_s: FloatArray
    gradients_s: FloatArray
    parameters_bytes: IntArray
    gradients_bytes: IntArray
    peak_bytes: IntArray


GradientRoute = Literal["pairwise", "home"]
"""Route of gradients: passed on from plan to plan, or sent directly to the home."""


@dataclass(frozen=True, slots=True)
class SwitchOrder:
    """Optimal circuit of plans."""

    order: tuple[int, ...]
    """Indices of the plans, the home first."""
    gradients: GradientRoute
    time_s: float
    """Sum of the times of parameters and gradients."""
    parameters_s: float
    gradients_s: float
