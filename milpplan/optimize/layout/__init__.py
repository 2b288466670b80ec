"""Solution of one layout: ``layout_solver``, ``stage_options``, ``compact_relaxation``, ``cutting_planes``,
``rounding``, ``layout_program``; ``view_solver`` for heterogeneous replicas and scenarios; ``layer_branching`` and
``rank_relaxation`` for interleaved schedules with uneven splits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from milpplan.library import lazy_exports

if TYPE_CHECKING:
    from milpplan.optimize.layout.compact_relaxation import (
        RESOLUTION,
        CompactRelaxation,
        ceiling_paths,
        fullest_stage_bound,
        fullest_stage_branching,
        num_inner,
    )
    from milpplan.optimize.layout.cutting_planes import LayoutState, rounds_on
    from milpplan.optimize.layout.layout_program import LayoutProgram, nearby_choice
    from milpplan.optimize.layout.layout_solver import LayoutOutcome, LayoutSolver, max_stage_layers, mixture_bound
    from milpplan.optimize.layout.rank_relaxation import EventTimeRelaxation, RankRelaxation, rank_choices
    from milpplan.optimize.layout.rounding import analytic_paths, chunk_paths, fitted_plan
    from milpplan.optimize.layout.stage_options import LayoutContext, stage_menu
else:
    __getattr__ = lazy_exports(__name__, __file__)
