"""Judgement of an existing plan: its proved gap to the best plans and the changes that close it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from milpplan.library import lazy_exports

if TYPE_CHECKING:
    from milpplan.explain.judge.gap import Solves, candidates, widened
else:
    __getattr__ = lazy_exports(__name__, __file__)
