"""Runs that cannot be stated as a problem and a plan."""

from __future__ import annotations

from milpplan.errors import MilpplanError


class UnstatedError(MilpplanError):
    """Why a measured run cannot be simulated: something it uses or hides has no words in milpplan."""
