"""Runs that cannot be stated as a problem and a plan."""

from __future__ import annotations

from milpplan.errors import MilpplanError


class UnstatedError(MilpplanError):
    """Error for a measured run that cannot be simulated: milpplan cannot express something that it uses or
    hides."""
