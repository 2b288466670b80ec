"""Training steps for sequences of many lengths, planned on this project's cost model
or on tables of times from anywhere (``tabled``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from milpplan.library import lazy_exports

if TYPE_CHECKING:
    from milpplan.lengths.candidates import quantum_problem
    from milpplan.lengths.cost_tables import (
        Load,
        Timer,
        finish_ns,
        line_below,
        micro_batch_times,
        pipeline_ns,
        replicas_ns,
        replicas_of_several,
    )
    from milpplan.lengths.document import (
        Degrees,
        DispatchFile,
        GroupedPlanFile,
        plan_file,
        read_dispatch,
        read_plan,
        restored_plan,
    )
    from milpplan.lengths.hotspa_export import check_model
    from milpplan.lengths.records import LengthsResult, SequenceRules
    from milpplan.lengths.sequences import MAX_SEQUENCES, bucketed, check_rules, least_padding
    from milpplan.lengths.strategy_tables import (
        MAX_QUANTA,
        Packed,
        Step,
        StrategyTables,
        cutoff_ns,
        pack_padded,
    )
    from milpplan.lengths.turns.switches import Switches
    from milpplan.lengths.workload import (
        LogNormal,
        Mixture,
        Pareto,
        Workload,
        described,
        fitted_mixture,
        optimal_buckets,
        padded,
        read_lengths,
        step_of,
        workload_of,
    )
else:
    __getattr__ = lazy_exports(__name__, __file__)
