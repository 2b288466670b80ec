"""The question and its answer as records: model, hardware, job, space of plans, and plan; and their readers.

``problem.Problem`` is what a user asks, ``plan.Plan`` is what the planner decides. ``reading`` and ``catalog``
load descriptions from files and by name; ``overlay`` holds fitted changes of a hardware description.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from milpplan.library import lazy_exports

if TYPE_CHECKING:
    from milpplan.problem.catalog import (
        hardware_names,
        load_hardware,
        load_model,
        load_overlay,
        load_scenarios,
        model_names,
        preset_text,
        stack_names,
    )
    from milpplan.problem.hardware import (
        MEMORY_MARGIN,
        PRECISIONS,
        QUANTIZATIONS,
        Accelerator,
        BusTable,
        GemmTable,
        HardwareSpec,
        HostMemory,
        NodeGroup,
        Pods,
        Precision,
        PrecisionName,
        Rails,
        SizeCurve,
        Software,
        Uncertainty,
    )
    from milpplan.problem.model import (
        BlockIndexer,
        CompressedAttention,
        DenseMlp,
        GroupedQueryAttention,
        Images,
        Indexer,
        LatentAttention,
        LayerRun,
        LinearRecurrence,
        MixtureOfExperts,
        ModelSpec,
        NoBlock,
        Projector,
        VisionEncoder,
    )
    from milpplan.problem.overlay import (
        COLLECTIVES,
        DOUBTED_CONGESTION,
        FACTORS,
        LEFT_SHARE,
        PRIOR_SIGMA,
        PRIORS,
        UNCERTAIN,
        Constants,
        Factor,
        Overlay,
        Provenance,
        Seconds,
        Switch,
        Tables,
        applied,
        moved,
        uncertainty_of,
        with_constants,
    )
    from milpplan.problem.plan import (
        EXPERT_DISPATCHES,
        INSIDE_MOE,
        MODULE_SETS,
        NO_MODULES,
        OFFLOAD_MODULES,
        OFFLOAD_SETS,
        PAIRED_SCHEDULES,
        RANK_ORDERS,
        RECOMPUTE_MODULES,
        SCHEDULES,
        SPLIT_SCHEDULES,
        TP_OVERLAPS,
        V_SCHEDULES,
        ExpertDispatch,
        Layout,
        OffloadModule,
        Plan,
        RankOrder,
        Recompute,
        RecomputeModule,
        Schedule,
        VirtualStage,
        layout_words,
        module_set,
        order_code,
        order_of,
        rank_stages,
        shares_code,
        shares_of,
    )
    from milpplan.problem.problem import (
        ANY_SPLIT_LAYERS,
        Alignment,
        Job,
        Lora,
        Method,
        Mixing,
        Problem,
        Reference,
        Rollout,
        Space,
    )
    from milpplan.problem.reading import nearest, parse_json, read_bytes, read_text, validated
    from milpplan.problem.records import Range
    from milpplan.problem.scenarios import Scenario, default_scenarios, in_scenario, scenario_of
else:
    __getattr__ = lazy_exports(__name__, __file__)
