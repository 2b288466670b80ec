"""What is asked of a machine that measures itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from milpplan.profiling.records import (
    Attention,
    CollectiveTime,
    Copy,
    Environment,
    Exchange,
    Layers,
    LayersTime,
    Product,
    Timing,
    Traffic,
)


class MeasurementError(Exception):
    """One thing cannot be measured (no room, no such kernel); the others can."""


class Machine(Protocol):
    """A device with its libraries. Every method raises ``MeasurementError`` where it cannot measure."""

    @property
    def num_ranks(self) -> int:
        """Devices that can take part in a collective."""
        ...

    def environment(self) -> Environment:
        """What is measured on, and with what."""
        ...

    def product(self, shape: Product) -> Timing:
        """A matrix product."""
        ...

    def attention(self, shape: Attention) -> tuple[Timing, Timing]:
        """Flash attention forward and backward."""
        ...

    def traffic(self, shape: Traffic) -> Timing:
        """A memory-bound operator."""
        ...

    def copy(self, shape: Copy) -> Timing:
        """A copy between host and device."""
        ...

    def collectives(self, shape: Exchange) -> Iterator[CollectiveTime]:
        """Collectives, one after another; the ranks end when the iterator does."""
        ...

    def layers(self, shape: Layers) -> LayersTime:
        """Layers forward and backward, with their memory."""
        ...
