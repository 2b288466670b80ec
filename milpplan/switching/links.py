"""Links of the ranks, and times of messages on them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from milpplan.communication.rank_lists import gpus_per_domain
from milpplan.errors import InvalidInputError
from milpplan.problem.hardware import HardwareSpec
from milpplan.simulation.layout_columns import BoolArray, FloatArray, IntArray

OUT_INSIDE, IN_INSIDE, OUT_BETWEEN, IN_BETWEEN = range(4)
"""Ports of a rank: the links inside its domain and its share of the network. Both directions run at the same
time."""


@dataclass(frozen=True, slots=True)
class Links:
    """Rates of a rank's ports in one direction, and latencies of a message. Domains hold consecutive ranks."""

    gpus_per_domain: int
    inside_bytes_per_s: float
    between_bytes_per_s: float
    inside_latency_s: float = 0.0
    between_latency_s: float = 0.0
    other_rail_fraction: float = 1.0
    """Share of the rate for messages between different positions in two domains."""
    other_rail_latency_s: float = 0.0
    """Latency added to these messages."""

    def __post_init__(self) -> None:
        for name in ("gpus_per_domain", "inside_bytes_per_s", "between_bytes_per_s", "other_rail_fraction"):
            if not 0 < getattr(self, name) < float("inf"):
                raise InvalidInputError(
                    f"{name} = {getattr(self, name)}.", "Expected a positive number.", "Correct the links."
                )

    @staticmethod
    def of(hardware: HardwareSpec, num_gpus: int) -> Links:
        """Take the links from a hardware description, as ``collectives.p2p_s`` does."""
        up, out = hardware.scale_up, hardware.scale_out
        if hardware.pods is not None:
            raise InvalidInputError(
                f"{hardware.name} has pods, a third tier of network.",
                "Expected domains and one network between them.",
                "Leave `pods` out of the hardware file, with the slower of the two networks in `scale_out`.",
            )
        rails = out.rails
        return Links(
            gpus_per_domain(hardware, num_gpus),
            up.bandwidth_bytes_per_s * up.p2p_efficiency,
            out.rate_bytes_per_s,
            up.p2p_latency_s,
            out.p2p_latency_s,
            1.0 if rails is None else rails.bandwidth_fraction,
            0.0 if rails is None else rails.latency_s,
        )

    def domains(self, num_gpus: int) -> IntArray:
        """List the domain of every rank."""
        return np.asarray(np.arange(num_gpus) // self.gpus_per_domain)

    def same_domain(self, a: IntArray, b: IntArray) -> BoolArray:
        """Check that pairs of ranks share a domain."""
        return np.asarray(a // self.gpus_per_domain == b // self.gpus_per_domain)

    def seconds(self, sender: IntArray, receiver: IntArray, num_bytes: FloatArray | IntArray) -> FloatArray:
        """Time for which a message occupies the ports at its two ends: bytes / rate, without latency, in seconds.

        Arrays that broadcast. Source: see ``collectives.p2p_s``.
        """
        other = (sender - receiver) % self.gpus_per_domain != 0
        between = self.between_bytes_per_s * np.where(other, self.other_rail_fraction, 1.0)
        rate = np.where(self.same_domain(sender, receiver), self.inside_bytes_per_s, between)
        return np.asarray(num_bytes / rate)

    def port_s(
        self, sender: IntArray, receiver: IntArray, num_bytes: FloatArray | IntArray, num_gpus: int
    ) -> FloatArray:
        """Sum the time of the messages of every port, in seconds [ports, ranks]."""
        seconds = self.seconds(sender, receiver, num_bytes)
        inside = self.same_domain(sender, receiver)
        port_seconds = np.zeros((4, num_gpus))
        for ranks, chosen, port in (
            (sender, inside, OUT_INSIDE),
            (receiver, inside, IN_INSIDE),
            (sender, ~inside, OUT_BETWEEN),
            (receiver, ~inside, IN_BETWEEN),
        ):
            port_seconds[port] = np.bincount(ranks[chosen], seconds[chosen], minlength=num_gpus)
        return port_seconds

    def latency_s(self, sender: IntArray, receiver: IntArray) -> float:
        """Return the latency of messages that start together, a maximum over them; 0 without messages."""
        if len(sender) == 0:
            return 0.0
        inside = self.same_domain(sender, receiver)
        other = (sender - receiver) % self.gpus_per_domain != 0
        between = self.between_latency_s + np.where(other, self.other_rail_latency_s, 0.0)
        return float(np.where(inside, self.inside_latency_s, between).max())
