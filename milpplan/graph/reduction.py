"""Reductions of an instance that keep its optimum.

A strategy goes if it is forbidden, if an edge allows no partner, or if another of the same node is never worse:
with costs c, edge matrices E, loads m, strategy b replaces a where (dead-end elimination)

    c[b] + sum_e max_t (E_e[b, t] - E_e[a, t]) <= c[a]  and  m[b] <= m[a] in every row.

Source: R. F. Goldstein, Biophysical Journal 66 (1994), the criterion for side chains of proteins; the condition
on loads is ours.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from milpplan.graph.instance import FORBIDDEN, HALF, Instance, clipped
from milpplan.optimize.milp.program import BoolArray, IntArray


def prune(instance: Instance, dominance: bool = True) -> bool:
    """Remove strategies that can never be better, until nothing changes. Returns False if a node loses all."""
    changed: set[int] | None = None
    while True:
        masks = _forbidden(instance, changed)
        if not masks and dominance and not instance.peaks:
            masks = _dominated(instance, changed)
        if not masks:
            return True
        for node, mask in masks.items():
            instance.keep(node, mask)
        if any(instance.costs[node].size == 0 for node in masks):
            return False
        instance.keep_in_edges(masks)
        around = instance.neighbours()
        changed = set(masks).union(*(around[node] for node in masks))


def _forbidden(instance: Instance, among: Iterable[int] | None) -> dict[int, BoolArray]:
    """Mark strategies that are forbidden, without a partner, or too large for a limit whatever the others take.

    Returns:
        Masks of the strategies that stay, for nodes that lose some.
    """
    nodes = set(instance.costs) if among is None else set(among)
    alive = {i: instance.costs[i] < HALF for i in nodes}
    capacity = instance.limits.copy()
    for i, loads in instance.loads.items():
        capacity[instance.rows[i]] -= loads.min(axis=1)
    for i in nodes & instance.loads.keys():
        above = instance.loads[i] - instance.loads[i].min(axis=1, keepdims=True)
        alive[i] = alive[i] & (above <= capacity[instance.rows[i]][:, None]).all(axis=0)
    for (i, j), matrix in instance.edges.items():
        if i not in nodes and j not in nodes:
            continue
        free = matrix < HALF
        if free.all():
            continue
        if i in nodes:
            alive[i] = alive[i] & free.any(axis=1)
        if j in nodes:
            alive[j] = alive[j] & free.any(axis=0)
    return {i: mask for i, mask in alive.items() if not mask.all()}


def _dominated(instance: Instance, among: Iterable[int] | None) -> dict[int, BoolArray]:
    """Mark strategies that another strategy of the node replaces; masks as in ``_forbidden``."""
    nodes = sorted(instance.costs) if among is None else sorted(among)
    worst = {i: _differences(instance, i) for i in nodes if instance.costs[i].size > 1}
    for (i, j), matrix in instance.edges.items():
        # Clipped, because sums of forbidden costs would overflow at a node with many neighbours.
        if i in worst:
            worst[i] = clipped(worst[i] + _worst(matrix))
        if j in worst:
            worst[j] = clipped(worst[j] + _worst(matrix.T))
    # A dominator that is itself left out in the same round is dominated by one that stays: the order is total.
    masks = {i: _undominated(table <= 0) for i, table in worst.items()}
    # Neighbours may lose strategies in one round: each criterion holds for any partner, whichever stays.
    return {i: mask for i, mask in masks.items() if not mask.all()}


def _differences(instance: Instance, node: int) -> IntArray:
    """Return ``c[b] - c[a]`` for pairs [b, a]; forbidden where b loads more in some row."""
    costs = instance.costs[node]
    table = costs[:, None] - costs[None, :]
    if node in instance.loads:
        loads = instance.ranks.get(node, instance.loads[node])
        heavier = (loads[:, :, None] > loads[:, None, :]).any(axis=0)
        table = np.where(heavier, FORBIDDEN, table)
    return table


def _worst(matrix: IntArray) -> IntArray:
    """Return ``max over partners of E[b] - E[a]`` for pairs [b, a]; partners forbidden to a do not count."""
    difference = matrix[:, None, :] - matrix[None, :, :]
    difference = np.where(matrix[None, :, :] >= HALF, -FORBIDDEN, difference)
    worst: IntArray = difference.max(axis=2)
    # Gains come from finite costs, so they never pay for a forbidden pair.
    return np.clip(worst, -(2**52), FORBIDDEN)


def _undominated(beats: BoolArray) -> BoolArray:
    """Mark the strategies that stay, where [b, a] says that b replaces a; among equals the first stays."""
    np.fill_diagonal(beats, False)
    size = beats.shape[0]
    earlier = np.arange(size)[:, None] < np.arange(size)[None, :]
    strictly = beats & (~beats.T | earlier)
    stays: BoolArray = np.logical_not(strictly.any(axis=0))
    return stays
