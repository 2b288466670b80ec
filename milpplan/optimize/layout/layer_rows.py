"""Rows on the numbers and the order of layers of virtual stages and ranks. Narrower limits only move their sides.

    stage_holds_layers   layers of a virtual stage                <= max_j
    stage_holds_enough   layers of a virtual stage + unplaced     >= min_j
    rank_holds_layers    layers of all chunks of a rank           <= max_s                            (v > 1)
    rank_holds_enough    layers of all chunks of a rank + unplaced >= min_s                           (v > 1)
    kinds_begin          layers of kind k up to virtual stage j + unplaced_k >= of the first layers   (K > 1)
    kinds_end            layers of kind k from virtual stage j on + unplaced_k >= of the last layers  (K > 1)

With unplaced layers there is always an optimum, and so always a dual that proves a bound. A relaxation ignores the
order of the layers. But the virtual stages up to j hold the model's first layers, at least ``layers_up_to`` of
them, with all layers of a kind among those. Without these rows the three dense layers of DeepSeek-V3, which only
the first four virtual stages can hold, balance its last ranks.
"""

from __future__ import annotations

import numpy as np

from milpplan.optimize.layout.stage_options import LayoutContext
from milpplan.optimize.milp.program import INFINITY, MINUS_INFINITY, Rows
from milpplan.optimize.space.layer_splits import layers_up_to
from milpplan.simulation.layout_columns import IntArray

Sides = tuple[IntArray, IntArray]


def held_rows(context: LayoutContext, layers: IntArray, unplaced: IntArray) -> list[Rows]:
    """Return rows of stages and ranks from ``layers`` [J, columns] of every virtual stage and ``unplaced``
    [columns]."""
    parts = [("stage", layers)]
    if context.layout.vpp > 1:
        parts.append(("rank", layers[context.stage_grid].sum(axis=0)))
    rows = []
    for name, matrix in parts:
        count = range(len(matrix))
        rows.append(Rows.dense([f"{name}_holds_layers[{n}]" for n in count], matrix, MINUS_INFINITY))
        rows.append(Rows.dense([f"{name}_holds_enough[{n}]" for n in count], matrix + unplaced, MINUS_INFINITY))
    return rows


def held_sides(context: LayoutContext) -> Sides:
    """Return lower and upper sides of ``held_rows``."""
    lower, upper = [], []
    for bounds in (context.layer_bounds, context.rank_bounds if context.layout.vpp > 1 else ()):
        low, high = np.array(bounds, dtype=np.int64).reshape(-1, 2).T
        lower += [np.full(len(high), MINUS_INFINITY), low]
        upper += [high, np.full(len(low), INFINITY)]
    return np.concatenate(lower), np.concatenate(upper)


def order_rows(kinds: IntArray, unplaced: IntArray) -> list[Rows]:
    """Return rows on the order of kinds from ``kinds`` [J, K, columns] of every virtual stage and ``unplaced`` [K,
    columns]."""
    J, K, width = kinds.shape
    if K == 1:
        return []
    names = [f"{name}[{j},{k}]" for name in ("kinds_begin", "kinds_end") for j, k in np.ndindex(J, K)]
    matrix = np.stack([kinds.cumsum(axis=0), kinds[::-1].cumsum(axis=0)[::-1]]) + unplaced
    return [Rows.dense(names, matrix.reshape(2 * J * K, width), MINUS_INFINITY)]


def order_sides(context: LayoutContext) -> Sides:
    """Return lower and upper sides of ``order_rows``."""
    model = context.problem.model
    K = len(model.kinds)
    if K == 1:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    is_kind = np.array(model.layer_kinds)[:, None] == np.arange(K)
    before = np.concatenate([np.zeros((1, K), dtype=np.int64), is_kind.cumsum(axis=0)])
    first, last = layers_up_to(context.layer_bounds, model.num_layers)
    lower = np.concatenate([before[first], before[-1] - before[model.num_layers - last]]).reshape(-1)
    return lower, np.full(len(lower), INFINITY)
