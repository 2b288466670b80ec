"""Fields of a layout that its constants depend on, so that equal constants are computed once."""

from __future__ import annotations

from milpplan.problem import Problem
from milpplan.simulation import IntArray, LayoutColumns, unique_rows
from milpplan.simulation.layers.cost_models import has_own_times
from milpplan.simulation.network import group_place, placement

LAYER_KEYS = (
    *("tp", "cp", "ep", "etp", "micro_batch_size", "sequence_parallel", "tp_overlap", "gather_again"),
    *("ulysses", "split_backward", "recompute_vision"),
)
STATE_KEYS = ("tp", "cp", "ep", "etp", "dp", "zero_stage", "dp_replicate")
OFFLOADS = ("offload_weights", "offload_activations", "offload_optimizer")
COST_KEYS = (
    *(*STATE_KEYS, "pp", "micro_batch_size", "sequence_parallel"),
    *("tp_overlap", "pp_scatter_gather", "gather_again", "recompute_vision", "ulysses", *OFFLOADS),
    *("backward_form", "ends_meet"),
)
"""Fields of a layout that its constants depend on; the other fields only combine the constants. If some layouts
have another order of ranks than the first order, ``distinct`` adds the fields that the strides depend on."""


def distinct_layers(problem: Problem, columns: LayoutColumns) -> tuple[IntArray, IntArray]:
    """Find representatives and inverse (``unique_rows``) of the layouts with distinct layers.

    In milpplan's own cost model, the times of a layer depend on the order of ranks only through the positions of
    its groups in the network. If all groups but the tensor-parallel groups have a single rank, the key is the
    position of these groups on each node type, which is the same for many strides.
    """
    has_other_groups = any((getattr(columns, name) > 1).any() for name in ("cp", "ep", "etp"))
    if has_other_groups or not columns.rank_order.any() or not has_own_times(problem):
        return distinct(columns, LAYER_KEYS, ("rank_order", "dp", "pp"))
    group = placement.tensor(columns)
    positions = [group_place(hardware, group.size, group.stride) for hardware in problem.node_types]
    keys = [
        key
        for position in positions
        for key in (position.members, position.domains, position.one_rail, *(position.beyond or ()))
    ]
    return unique_rows(*(getattr(columns, name) for name in LAYER_KEYS), *keys)


def distinct(columns: LayoutColumns, names: tuple[str, ...], placed: tuple[str, ...]) -> tuple[IntArray, IntArray]:
    """Find representatives and inverse (``unique_rows``) of the layouts that differ in some fields.

    Args:
        columns: layouts.
        names: fields that count in every case.
        placed: fields that only the strides depend on; they count if some layout has an unusual order of ranks.
    """
    keys = (*names, *placed) if columns.rank_order.any() else names
    return unique_rows(*(getattr(columns, name) for name in keys))
