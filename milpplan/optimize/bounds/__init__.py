"""Lower bounds without a solver: ``closed_form``, ``lagrangian_memory``, ``uniform_plans``, ``split_bounds``,
``cluster_bounds``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from milpplan.library import lazy_exports

if TYPE_CHECKING:
    from milpplan.optimize.bounds.closed_form import SAFETY, compute_bounds, layout_bounds, max_layers_on_ranks
    from milpplan.optimize.bounds.split_bounds import SplitBounds
    from milpplan.optimize.bounds.uniform_plans import uniform_bounds, uniform_compute_bounds, uniform_plan
else:
    __getattr__ = lazy_exports(__name__, __file__)
