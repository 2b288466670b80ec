"""Intervals as text: rounded outwards to the digits that they support, so that the printed interval is proved."""

from __future__ import annotations

import math

from milpplan.explain.records import Interval
from milpplan.units import percent_text, signed_percent_text


def range_text(interval: Interval, signed: bool = False) -> str:
    """Write an interval of shares in per cent, with the digits that it supports."""
    low, high = interval.low, interval.high
    width = high - low
    digits = 2 if math.isinf(width) or width < 0.01 else 1
    text = signed_percent_text if signed else percent_text
    if math.isinf(low) and math.isinf(high):
        return "unknown"
    if math.isinf(high):
        return f"at least {text(low, digits)}"
    if math.isinf(low):
        return f"at most {text(high, digits)}"
    # Rounded outwards, so that the printed interval is proved.
    unit = 10.0 ** -(digits + 2)
    ends = text(math.floor(low / unit) * unit, digits), text(math.ceil(high / unit) * unit, digits)
    return joined(*ends)


def joined(low: str, high: str) -> str:
    """Write two amounts as a range, with a common unit once: ``1.2 to 1.3 %``."""
    if low == high:
        return low
    number, _, unit = low.rpartition(" ")
    return f"{number} to {high}" if unit == high.rpartition(" ")[2] else f"{low} to {high}"
