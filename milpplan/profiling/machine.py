"""Interface of a machine that measures itself."""

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
    """Error for a single measurement that fails (memory, or a missing kernel); others may succeed."""


class Machine(Protocol):
    """Device with its libraries. Every method raises ``MeasurementError`` where it cannot measure."""

    @property
    def num_ranks(self) -> int:
        """Number of devices that can take part in a collective."""
        ...

    def environment(self) -> Environment:
        """Describe device and libraries."""
        ...

    def product(self, shape: Product) -> Timing:
        """Time a matrix product."""
        ...

    def attention(self, shape: Attention) -> tuple[Timing, Timing]:
        """Time flash attention, forward and backward."""
        ...

    def traffic(self, shape: Traffic) -> Timing:
        """Time a memory-bound operator."""
        ...

    def copy(self, shape: Copy) -> Timing:
        """Time a copy between host and device."""
        ...

    def collectives(self, shape: Exchange) -> Iterator[CollectiveTime]:
        """Time collectives one after another; the ranks end when the iterator does."""
        ...

    def layers(self, shape: Layers) -> LayersTime:
        """Time layers forward and backward, and measure their memory."""
        ...
