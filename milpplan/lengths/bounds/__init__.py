"""Lower bounds of one strategy's group and upper bounds of its work: paths of 1F1B pipelines, linear bounds,
configuration LPs, and branching on long sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from milpplan.library import lazy_exports

if TYPE_CHECKING:
    from milpplan.lengths.bounds.idle_time import CapacityRow, IdleTimeBound
    from milpplan.lengths.bounds.long_sequence import around, best_mixture, group_ns, load_bound, long_bound
    from milpplan.lengths.bounds.pipeline_bounds import (
        PipelineCuts,
        StageLoads,
        Window,
        best_profile,
        chord,
        last_stage_cut,
    )
    from milpplan.lengths.bounds.work_envelope import BatchKind, PipelineTable
else:
    __getattr__ = lazy_exports(__name__, __file__)
