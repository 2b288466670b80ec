"""Moving sequences between the groups of a plan, or kinds of replicas: idle ones take work from another.

A master counts work, not sequences: a group of few long ones leaves replicas idle while the longest runs. What is
moved there is free. Only plans that come out shorter in the exact simulation count.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import numpy as np

from milpplan.groups.bounds.pipeline_bounds import PipelineCuts
from milpplan.groups.plan import GroupedPlan
from milpplan.groups.problem import Kind
from milpplan.groups.strategies import Int64Array

Packer = Callable[[dict[Kind, Int64Array]], GroupedPlan | None]

# Shares of the idle time that are filled.
_SHARES = (0.95, 0.7, 0.4)


def filled(plan: GroupedPlan, cuts: Mapping[Kind, PipelineCuts], packed: Packer) -> GroupedPlan | None:
    """The best plan with idle time filled from another group; None if none was packed."""
    counts = {packing.kind: _counts(packing.replicas) for group in plan.groups for packing in group.packings}
    idle = {
        packing.kind: float((group.time_ns - packing.times_ns()).sum())
        for group in plan.groups
        for packing in group.packings
    }
    best: GroupedPlan | None = None
    for taker, giver in itertools.permutations(counts, 2):
        for share in _SHARES:
            moved = _chosen(taker, giver, counts[giver], share * idle[taker])
            if not moved.any():
                continue
            found = packed({**counts, taker: counts[taker] + moved, giver: counts[giver] - moved})
            if found is not None and (best is None or found.time_ns < best.time_ns):
                best = found
    return best


def _counts(replicas: tuple[Int64Array, ...]) -> Int64Array:
    return np.asarray(sum(replica.sum(axis=0) for replica in replicas))


def _chosen(taker: Kind, giver: Kind, counts: Int64Array, idle_ns: float) -> Int64Array:
    """Sequences of the giver that fit into the idle time: most saved for their cost first, then longest."""
    parts = taker.pipeline.parts
    gain = giver.units * giver.pipeline.parts / (giver.num_replicas * np.maximum(1, taker.units * parts))
    moved = np.zeros_like(counts)
    for k in sorted(np.flatnonzero(counts * taker.fits).tolist(), key=lambda k: (-gain[k], -k)):
        cost = int(taker.units[k]) * parts
        take = min(int(counts[k]), int(idle_ns // cost)) if cost else int(counts[k])
        moved[k] = take
        idle_ns -= take * cost
    return moved
