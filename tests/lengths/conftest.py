"""Searches of these tests read a clock that counts."""

from tests.counted_clock import counted_clock, real_clock

__all__ = ["counted_clock", "real_clock"]
