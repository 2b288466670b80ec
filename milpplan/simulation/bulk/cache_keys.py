"""Which layouts have the same constants: each is computed once for all of them."""

from __future__ import annotations

from milpplan.problem.problem import Problem
from milpplan.simulation.layers.cost_models import has_own_times
from milpplan.simulation.layout_columns import IntArray, LayoutColumns, unique_rows
from milpplan.simulation.network import placement
from milpplan.simulation.network.domains import group_place

LAYER_KEYS = (
    *("tp", "cp", "ep", "etp", "micro_batch_size", "sequence_parallel", "tp_overlap", "gather_again"),
    "split_backward",
)
STATE_KEYS = ("tp", "cp", "ep", "etp", "dp", "zero_stage")
OFFLOADS = ("offload_weights", "offload_activations", "offload_optimizer")
COST_KEYS = (
    *("tp", "cp", "ep", "etp", "dp", "pp", "zero_stage", "micro_batch_size", "sequence_parallel"),
    *("tp_overlap", "pp_scatter_gather", "gather_again", *OFFLOADS, "backward_form", "ends_meet"),
)
"""Fields of a layout that its constants depend on; the others only say how they combine. Where some layouts have
another order of ranks than the first one, ``distinct`` adds what the strides depend on."""


def distinct_layers(problem: Problem, columns: LayoutColumns) -> tuple[IntArray, IntArray]:
    """Representatives and inverse (``unique_rows``) of the layouts whose layers differ.

    Our own times know of the order of ranks only where the groups of a layer are, and where there are none but
    tensor-parallel ones that is how these lie in the domains of each node type. Many strides lie alike.
    """
    others = any((getattr(columns, name) > 1).any() for name in ("cp", "ep", "etp"))
    if others or not columns.rank_order.any() or not has_own_times(problem):
        return distinct(columns, LAYER_KEYS, ("rank_order", "dp", "pp"))
    group = placement.tensor(columns)
    places = [group_place(hardware, group.size, group.stride) for hardware in problem.node_types]
    keys = [
        key for place in places for key in (place.members, place.domains, place.one_rail, *(place.beyond or ()))
    ]
    return unique_rows(*(getattr(columns, name) for name in LAYER_KEYS), *keys)


def distinct(columns: LayoutColumns, names: tuple[str, ...], placed: tuple[str, ...]) -> tuple[IntArray, IntArray]:
    """Representatives and inverse (``unique_rows``) of the layouts that differ in some fields.

    ``placed``: what the strides depend on besides ``names``; with the usual order of ranks, nothing."""
    keys = (*names, *placed) if columns.rank_order.any() else names
    return unique_rows(*(getattr(columns, name) for name in keys))
