"""Simulation of many uniform plans at a time, with results equal to those of ``simulator.simulate``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from milpplan.library import lazy_exports

if TYPE_CHECKING:
    from milpplan.simulation.bulk.simulate_many import has_uniform_plan, uniform_plan
else:
    __getattr__ = lazy_exports(__name__, __file__)
