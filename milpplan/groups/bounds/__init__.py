"""Lower bounds of a pipeline's time for sequences of different lengths, and upper bounds of its work."""

from __future__ import annotations

from typing import TYPE_CHECKING

from milpplan.library import lazy_exports

if TYPE_CHECKING:
    from milpplan.groups.bounds.idle_time import CapacityRow, IdleTimeBound
    from milpplan.groups.bounds.long_sequence import around, best_mixture, group_ns, load_bound, long_bound
    from milpplan.groups.bounds.pipeline_bounds import (
        PipelineCuts,
        StageLoads,
        Window,
        best_profile,
        chord,
        last_stage_cut,
    )
    from milpplan.groups.bounds.work_envelope import BatchKind, PipelineTable
else:
    __getattr__ = lazy_exports(__name__, __file__)
