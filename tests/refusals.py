"""What every refusal of bad input has."""

from __future__ import annotations

from milpplan.errors import MilpplanError


def in_three_parts(error: MilpplanError) -> None:
    """It says what was seen, what was expected and what to do."""
    assert error.seen
    assert error.expected
    assert error.do
