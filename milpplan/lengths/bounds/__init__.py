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
    from milpplan.lengths.bounds.count_cuts import (
        CapacityRow,
        Cut,
        IdleTimeBound,
        PipelineCuts,
        best_profile,
        last_stage_cut,
    )
    from milpplan.lengths.bounds.exclusive_program import ExclusiveProgram
    from milpplan.lengths.bounds.long_sequence import (
        best_mixture,
        group_ns,
        load_bound,
        long_bound,
    )
    from milpplan.lengths.bounds.micro_batch_pricing import (
        NOTHING,
        Items,
        KnapsackDP,
        MicroBatchPricing,
        PinnedItem,
    )
    from milpplan.lengths.bounds.pipeline_bounds import StageLoads, Window, chord
    from milpplan.lengths.bounds.work_bounds import LinearBounds, corners, heaviest, latencies
else:
    __getattr__ = lazy_exports(__name__, __file__)
