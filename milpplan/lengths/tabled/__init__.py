"""Steps of several strategies on tables of times from anywhere, packed and ordered, with a proof.

``milpplan.lengths`` makes such tables of its cost model (``cost_tables``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from milpplan.library import lazy_exports

if TYPE_CHECKING:
    from milpplan.lengths.tabled.construction import constructed, longest_ns, shapes
    from milpplan.lengths.tabled.local_search import (
        KindTimes,
        Replica,
        first_packings,
        improved,
        improved_packings,
        improved_replicas,
    )
    from milpplan.lengths.tabled.problem import (
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
    from milpplan.lengths.tabled.search import solve_groups
    from milpplan.lengths.tabled.step_plan import (
        Group,
        GroupedPlan,
        Packing,
        arranged,
        check,
        tour_time_ns,
        undominated_tours,
    )
else:
    __getattr__ = lazy_exports(__name__, __file__)
