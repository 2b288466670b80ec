"""Steps of several parallel strategies: which sequences run under which strategy, packed and ordered, with a
proof.

Times come from tables (``problem``); ``milpplan.lengths`` takes them from the cost model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from milpplan.library import lazy_exports

if TYPE_CHECKING:
    from milpplan.groups.document import (
        Degrees,
        DispatchFile,
        GroupedPlanFile,
        dispatch_file,
        plan_file,
        read_dispatch,
        read_plan,
        restored_plan,
    )
    from milpplan.groups.plan import Group, GroupedPlan, Packing, arranged, check, undominated_tours
    from milpplan.groups.problem import (
        FloatArray,
        GroupedProblem,
        Int64Array,
        Kind,
        Pipeline,
        Strategy,
        SwitchTimes,
        TabledPipeline,
        pipeline_times_ns,
    )
    from milpplan.groups.search import solve_groups, solve_set
    from milpplan.groups.workload import Workload, optimal_buckets, padded, read_lengths, step_of, workload_of
else:
    __getattr__ = lazy_exports(__name__, __file__)
