"""Simulation of a plan: step time, time breakdown and memory, exact in the cost model.

``simulator.simulate`` is the entry. ``layout_costs`` computes the integer constants of a layout from the times of
layers (``layers``) and of the network (``network``); ``stages`` sums them up for a virtual stage; ``pipeline``
finds the longest path through the step. ``bulk`` simulates many uniform plans at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from milpplan.library import lazy_exports

if TYPE_CHECKING:
    from milpplan.simulation.layout_columns import (
        HOSTED,
        LAYER_KEYS,
        OFFLOADS,
        BoolArray,
        FloatArray,
        IntArray,
        LayoutColumns,
        ascending,
        column_value,
        unique_rows,
    )
    from milpplan.simulation.layout_costs import (
        CostTable,
        LayoutCosts,
        capacities_bytes,
        distinct_layers,
        host_capacity_bytes,
        layer_durations_ns,
        step_overhead_ns,
        usable_memory_bytes,
    )
    from milpplan.simulation.mixed_costs import (
        RankCosts,
        ReplicaView,
        cluster_costs,
        costs_of,
        costs_of_replicas,
        joined_plan,
        rank_capacities,
        rank_types,
        view_plans,
    )
    from milpplan.simulation.muon import hidden_matrices, matrix_updates, orthogonalization_s
    from milpplan.simulation.packed_sequences import packed_times, sequence_cores
    from milpplan.simulation.scenario_costs import TimeScale
    from milpplan.simulation.simulator import (
        check_plan_of_model,
        plan_step_ns,
        rank_memory,
        simulate,
        step_times_ns,
        step_times_s,
        step_weight,
    )
    from milpplan.simulation.stages import StageOptions, durations, plan_stages, stage_options
    from milpplan.simulation.states import LocalParameters, least_held_bytes
    from milpplan.simulation.step_report import BREAKDOWN, HIDDEN, StepReport
else:
    __getattr__ = lazy_exports(__name__, __file__)
