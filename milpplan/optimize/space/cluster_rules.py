"""Rules of clusters with several node types: each pipeline rank is on one type; orders of the types."""

from __future__ import annotations

from itertools import permutations

import numpy as np

from milpplan.optimize.space.execution_rules import Rule
from milpplan.problem.plan import order_code
from milpplan.problem.problem import Problem
from milpplan.simulation.layout_columns import BoolArray, IntArray
from milpplan.simulation.network import placement


def _whole_ranks(node_gpus: tuple[int, ...], pp: IntArray) -> BoolArray:
    """Require that all tp x cp x dp accelerators of a pipeline rank are of one type: each type has a whole number
    of ranks."""
    total = sum(node_gpus)
    return np.asarray(np.logical_and.reduce([pp * gpus % total == 0 for gpus in node_gpus]))


CLUSTER_RULES: dict[str, Rule] = {
    "node_types_hold_whole_ranks": lambda p, c: _whole_ranks(p.node_gpus, c["pp"]),
}
"""Rules of clusters of several node types."""

CLUSTER_ORDER_RULES: dict[str, Rule] = {
    "node_types_need_stages_of_neighbours": lambda p, c: placement.stages_are_blocks(c),
}
"""Rules on the order of ranks in such clusters: a stage whose accelerators are interleaved with another stage's
would be on several types."""


def cluster_rules(problem: Problem) -> dict[str, Rule]:
    """Return these rules where there are several node types; rules on the order only where some order of the space
    may break them."""
    if not problem.other_hardware:
        return {}
    outermost = all(order.endswith("pp") for order in problem.space.rank_order)
    return CLUSTER_RULES if outermost else CLUSTER_RULES | CLUSTER_ORDER_RULES


def node_orders(problem: Problem) -> IntArray:
    """Return codes of the orders of node types along the pipeline that the space admits."""
    types = len(problem.node_types)
    orders = permutations(range(types)) if problem.space.node_order is None else problem.space.node_order
    return np.array(sorted({order_code(tuple(order)) for order in orders}) if types > 1 else [0], dtype=np.int64)
