"""Horizon: an upper bound of the step of every plan of a layout, used as a cutoff that excludes none of them."""

from __future__ import annotations

import numpy as np

from milpplan.optimize.layout.stage_options import LayoutContext
from milpplan.simulation.layers.terms import ONCE, Phase
from milpplan.simulation.layout_costs import LayoutCosts


def longest_step_ns(context: LayoutContext) -> int:
    """Return an upper bound of the layout's step: everything one after another, every layer fully recomputed, on
    the slowest node type."""
    layout = context.layout
    ranks = {context.costs.type_of(rank): context.costs.of_rank(rank) for rank in range(layout.pp)}
    crossings = sum(context.costs.crossing_ns(stage) for stage in range(context.num_stages))
    transfers = 2 * (context.num_stages * int(context.costs.transfer_ns) + crossings)
    longest_ns = max(_serial_ns(context, costs, transfers) for costs in ranks.values())
    # Twice as a margin; differences between ranks add up to at most the sum over the types.
    return 2 * longest_ns * len(ranks)


def _serial_ns(context: LayoutContext, costs: LayoutCosts, transfers_ns: int) -> int:
    """Return the time of everything one after another on one node type."""
    duration = costs.duration_ns
    counts = np.bincount(np.array(context.problem.model.layer_kinds), minlength=len(duration))
    extra = np.maximum(np.maximum(duration[:, Phase.FULL], duration[:, Phase.SELECTIVE]), 0)
    work = int((duration[:, ONCE].sum(axis=1) + extra) @ counts)
    work += int(costs.embedding_ns.sum() + costs.head_ns.sum()) + transfers_ns
    weights = np.append(counts, [1, 1])
    once = int((costs.gather_ns + costs.reduce_ns + costs.optimizer_ns) @ weights)
    return context.layout.num_micro_batches * work + once + int(context.costs.barrier_ns)
