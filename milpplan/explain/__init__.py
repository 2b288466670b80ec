"""Explanations of a plan: its limits, alternatives, the value of changes, and the cheapest way to better plans."""

from __future__ import annotations

from typing import TYPE_CHECKING

from milpplan.library import lazy_exports

if TYPE_CHECKING:
    from milpplan.explain.break_even import break_evens
    from milpplan.explain.hardware_choice import Candidate, Choice, Fewest, choose, fewest_gpus, run_totals
    from milpplan.explain.optima import Budget, Yardstick, saved_share
    from milpplan.explain.records import Explanation, Interval, Missing, NearBest, Optimum, WishAnswer, Worth
    from milpplan.explain.why_not import WISHABLE
else:
    __getattr__ = lazy_exports(__name__, __file__)
