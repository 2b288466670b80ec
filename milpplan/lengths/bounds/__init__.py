"""Lower bounds of one strategy's group and upper bounds of its work: paths of 1F1B pipelines, linear bounds,
configuration LPs, and branching on long sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from milpplan.library import lazy_exports

if TYPE_CHECKING:
    from milpplan.lengths.bounds.configuration_bound import ConfigurationBound
    from milpplan.lengths.bounds.configuration_columns import (
        ConfigurationLP,
        Start,
        improved,
        optimise_prices,
    )
    from milpplan.lengths.bounds.exclusive_sequences import (
        ExclusiveProgram,
        exclusive_bounds,
        longest,
        max_exclusive,
    )
    from milpplan.lengths.bounds.idle_time import CapacityRow, IdleTimeBound
    from milpplan.lengths.bounds.long_sequence import (
        around,
        best_mixture,
        group_ns,
        load_bound,
        long_bound,
        peaks,
    )
    from milpplan.lengths.bounds.micro_batch_pricing import (
        NOTHING,
        Items,
        KnapsackDP,
        MicroBatchPricing,
        PinnedItem,
    )
    from milpplan.lengths.bounds.pipeline_bounds import (
        PipelineCuts,
        StageLoads,
        Window,
        best_profile,
        chord,
        last_stage_cut,
    )
    from milpplan.lengths.bounds.work_bounds import LinearBounds, corners, heaviest, latencies
    from milpplan.lengths.bounds.work_envelope import BatchKind, PipelineTable
else:
    __getattr__ = lazy_exports(__name__, __file__)
