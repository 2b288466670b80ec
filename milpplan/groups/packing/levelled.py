"""Packing of every kind of replicas, and balancing between the kinds of a group."""

from __future__ import annotations

from collections.abc import Mapping

from milpplan.groups.bounds.pipeline_bounds import PipelineCuts
from milpplan.groups.packing.around_longest import pack_around
from milpplan.groups.packing.local_search import improve
from milpplan.groups.packing.pack import pack
from milpplan.groups.packing.packing import Packing
from milpplan.groups.packing.pair_exchange import exchange_pairs
from milpplan.groups.packing.tabu_search import balance, has_single_micro_batches
from milpplan.groups.plan import Group, GroupedPlan, arranged
from milpplan.groups.problem import GroupedProblem, Kind
from milpplan.groups.strategies import Int64Array

# Maximum rounds of moves between the kinds of a group, and of balancing replicas of one micro-batch.
_ROUNDS, _BALANCED_ROUNDS = 150, 1_000


def pack_kinds(
    counts: Mapping[Kind, Int64Array], cuts: Mapping[Kind, PipelineCuts], *, around: bool = False
) -> dict[Kind, Packing] | None:
    """Pack every kind's sequences, ``around`` the longest where that is possible.

    Returns:
        The packings; None if a kind has no packing.
    """
    packings = {}
    for kind in counts:
        packing = pack_around(kind, cuts[kind], counts[kind]) if around else None
        if packing is None:
            packing = pack(kind, cuts[kind], counts[kind])
        if packing is None:
            return None
        packings[kind] = packing
    return packings


def plan_from_packings(problem: GroupedProblem, packings: Mapping[Kind, Packing]) -> GroupedPlan:
    """Arrange all packings as a plan, balanced between the kinds of a group."""
    groups: dict[int, list[Packing]] = {}
    for kind, packing in packings.items():
        groups.setdefault(kind.strategy, []).append(packing)
    for strategy, side_by_side in groups.items():
        if len(side_by_side) > 1:
            groups[strategy] = improve(side_by_side, _ROUNDS)
        if has_single_micro_batches([packing.kind for packing in side_by_side]):
            groups[strategy] = balance(groups[strategy], _BALANCED_ROUNDS)
    return arranged(
        problem, [Group(strategy, tuple(group_packings)) for strategy, group_packings in groups.items()]
    )


def exchange_in_group(group: Group) -> Group:
    """Exchange pairs of sequences in a group whose replicas run one micro-batch each."""
    if not has_single_micro_batches([packing.kind for packing in group.packings]):
        return group
    return Group(group.strategy, tuple(exchange_pairs(group.packings)))
