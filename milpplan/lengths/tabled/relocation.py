"""Balancing between the groups of a plan on tables, and plans from packings.

**Relocation** (``relocate``). An assignment program counts work, not sequences: a group of few long sequences
leaves replicas idle while the longest runs. Sequences moved there cost no time. Only plans that are faster in
exact simulation count.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import numpy as np

from milpplan.lengths.search_parameters import PARAMETERS
from milpplan.lengths.tabled import (
    Group,
    GroupedPlan,
    GroupedProblem,
    Int64Array,
    Kind,
    Packing,
    arranged,
)
from milpplan.lengths.tabled.construction import constructed
from milpplan.lengths.tabled.local_search import KindTimes, improved_packings


def pack_kinds(counts: Mapping[Kind, Int64Array]) -> dict[Kind, Packing] | None:
    """Pack every kind's sequences by construction; None if a kind has no packing."""
    packings = {}
    for kind, own in counts.items():
        replicas = constructed(KindTimes(kind), kind.num_replicas, own)
        if replicas is None:
            return None
        packings[kind] = Packing(kind, tuple(replicas))
    return packings


def plan_from_packings(problem: GroupedProblem, packings: Mapping[Kind, Packing]) -> GroupedPlan:
    """Arrange all packings as a plan, improved by the local search over the kinds of every group."""
    groups: dict[int, list[Packing]] = {}
    for kind, packing in packings.items():
        groups.setdefault(kind.strategy, []).append(packing)
    return arranged(
        problem,
        [
            Group(strategy, tuple(improved_packings(own, PARAMETERS.group_effort)))
            for strategy, own in groups.items()
        ],
    )


Packer = Callable[[dict[Kind, Int64Array]], GroupedPlan | None]

# Shares of the idle time that are filled, one plan each.
_SHARES = (0.95, 0.7, 0.4)


def relocate(plan: GroupedPlan, pack_all: Packer) -> GroupedPlan | None:
    """Return the best plan with idle time filled from another group; None if no such plan was packed."""
    counts = {packing.kind: _counts(packing.replicas) for group in plan.groups for packing in group.packings}
    idle = {
        packing.kind: float((group.time_ns - packing.times_ns()).sum())
        for group in plan.groups
        for packing in group.packings
    }
    best: GroupedPlan | None = None
    for taker, giver in itertools.permutations(counts, 2):
        for share in _SHARES:
            moved = _sequences_to_move(taker, giver, counts[giver], share * idle[taker])
            if not moved.any():
                continue
            candidate = pack_all({**counts, taker: counts[taker] + moved, giver: counts[giver] - moved})
            if candidate is not None and (best is None or candidate.time_ns < best.time_ns):
                best = candidate
    return best


def _counts(replicas: tuple[Int64Array, ...]) -> Int64Array:
    """Sum the sequences of all replicas, [K]."""
    return np.asarray(sum(replica.sum(axis=0) for replica in replicas))


def _sequences_to_move(taker: Kind, giver: Kind, counts: Int64Array, idle_ns: float) -> Int64Array:
    """Choose sequences of the giver that fit into the idle time: largest saving per cost first, then longest."""
    parts = taker.pipeline.parts
    gain = giver.units * giver.pipeline.parts / (giver.num_replicas * np.maximum(1, taker.units * parts))
    moved = np.zeros_like(counts)
    for k in sorted(np.flatnonzero(counts * taker.fits).tolist(), key=lambda k: (-gain[k], -k)):
        cost = int(taker.units[k]) * parts
        number = min(int(counts[k]), int(idle_ns // cost)) if cost else int(counts[k])
        moved[k] = number
        idle_ns -= number * cost
    return moved
