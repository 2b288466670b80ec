"""Switches between two layouts: which tensor blocks move between which ranks, and the minimum time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from milpplan.library import lazy_exports

if TYPE_CHECKING:
    from milpplan.switching.records import SENDERS, Senders
else:
    __getattr__ = lazy_exports(__name__, __file__)
