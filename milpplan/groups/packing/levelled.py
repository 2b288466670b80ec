"""What every kind of replicas holds, as a plan: packed by itself, levelled between the kinds of a group."""

from __future__ import annotations

from collections.abc import Mapping

from milpplan.groups.bounds.pipeline_bounds import PipelineCuts
from milpplan.groups.packing.around_longest import pack_around
from milpplan.groups.packing.local_search import improve
from milpplan.groups.packing.pack import Packing, pack
from milpplan.groups.packing.pair_exchange import exchanged
from milpplan.groups.packing.tabu_search import balanced, balances
from milpplan.groups.plan import Group, GroupedPlan, arranged
from milpplan.groups.problem import GroupedProblem, Kind
from milpplan.groups.strategies import Int64Array

# Exchanges between different kinds of replicas of a group, and those that level replicas of one micro-batch.
_ROUNDS, _BALANCED_ROUNDS = 150, 1_000


def packed(
    counts: Mapping[Kind, Int64Array], cuts: Mapping[Kind, PipelineCuts], *, around: bool = False
) -> dict[Kind, Packing] | None:
    """Every kind's sequences packed, ``around`` the longest where that is possible; None if one's are not."""
    packings = {}
    for kind in counts:
        found = pack_around(kind, cuts[kind], counts[kind]) if around else None
        if found is None:
            found = pack(kind, cuts[kind], counts[kind])
        if found is None:
            return None
        packings[kind] = found
    return packings


def joined(problem: GroupedProblem, packings: Mapping[Kind, Packing]) -> GroupedPlan:
    """The plan of all kinds' packings, levelled between the kinds of a group."""
    groups: dict[int, list[Packing]] = {}
    for kind, packing in packings.items():
        groups.setdefault(kind.strategy, []).append(packing)
    for strategy, side_by_side in groups.items():
        if len(side_by_side) > 1:
            groups[strategy] = improve(side_by_side, _ROUNDS)
        if balances([packing.kind for packing in side_by_side]):
            groups[strategy] = balanced(groups[strategy], _BALANCED_ROUNDS)
    return arranged(problem, [Group(strategy, tuple(one)) for strategy, one in groups.items()])


def leveled(group: Group) -> Group:
    """The group with pairs of sequences exchanged, where its replicas run one micro-batch."""
    if not balances([packing.kind for packing in group.packings]):
        return group
    return Group(group.strategy, tuple(exchanged(group.packings)))
