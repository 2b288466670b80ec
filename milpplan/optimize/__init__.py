"""Optimiser: read ``solve``, ``records`` and ``context``, then the folders ``search``, ``layout``, ``bounds``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from milpplan.library import lazy_exports

if TYPE_CHECKING:
    from milpplan.optimize.certify import SecondProofs, other_backend
    from milpplan.optimize.context import Budget, Counters, SolveContext, objective_weights, on_gpus
    from milpplan.optimize.fewest import FewestSearch
    from milpplan.optimize.infeasibility import Effort, explain, refusing_rules, with_job, with_space
    from milpplan.optimize.records import (
        DEFAULT_GAP,
        Certification,
        ClaimedResult,
        PlanResult,
        Progress,
        SolveOptions,
        Status,
        untested_terms,
    )
    from milpplan.optimize.robust import solve_robust
    from milpplan.optimize.solve import fixed, target_price
else:
    __getattr__ = lazy_exports(__name__, __file__)
