"""A batch that nothing quick packs, as a grouped step of its own: seconds, where memory is nearly full."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from milpplan.errors import InfeasibleError, SolverError
from milpplan.groups.plan import GroupedPlan
from milpplan.groups.problem import GroupedProblem
from milpplan.groups.search import solve_groups
from milpplan.groups.strategies import Int64Array, SwitchTimes
from milpplan.groups.workload.workload import workload_of

# The gap at which the search ends, and seconds that it takes at most: what is wanted is a packing.
_GAP, _MOST_S = 0.02, 5.0


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """Places of the sequences [n], the order of the strategies, and the exact time."""

    strategy: Int64Array
    replica: Int64Array
    micro_batch: Int64Array
    order: tuple[int, ...]
    time_ns: int


def solved(problem: GroupedProblem, strategies: Sequence[int], home: int, lengths: Int64Array) -> Found:
    """A plan of sequences of ``lengths`` [n] under some of a problem's strategies, with the home given.

    Raises:
        SolverError: none was found, or there is none.
    """
    workload, chosen = workload_of(lengths), list(strategies)
    switches = problem.switches
    part = GroupedProblem(
        workload.lengths,
        workload.counts,
        tuple(problem.strategies[s] for s in chosen),
        SwitchTimes(*(one[np.ix_(chosen, chosen)] for one in (switches.parameters_ns, switches.gradients_ns))),
        min(problem.max_strategies, len(chosen)),
        homes=(chosen.index(home),),
        finish_ns=tuple(problem.finish_of(s) for s in chosen),
    )
    try:
        plan = solve_groups(part, "auto", _GAP, _MOST_S, waits=False).plan
    except (SolverError, InfeasibleError) as error:
        raise SolverError(
            f"No packing of {lengths.size} sequences was found within memory.",
            "Every sequence fits somewhere alone, but all together were not placed.",
            "Dispatch fewer sequences a step, or plan with larger micro-batches.",
        ) from error
    return _found(plan, chosen, lengths)


def _found(plan: GroupedPlan, chosen: list[int], lengths: Int64Array) -> Found:
    """Places of the batch's sequences: of every length, the first ones first."""
    places = np.zeros((3, lengths.size), dtype=np.int64)
    waiting = {length: np.flatnonzero(lengths == length).tolist()[::-1] for length in np.unique(lengths).tolist()}
    for group in plan.groups:
        first = 0
        for packing in group.packings:
            for number, held in enumerate(packing.replicas):
                for row, counts in enumerate(held):
                    for length, count in zip(plan.problem.lengths.tolist(), counts.tolist(), strict=True):
                        for _ in range(count):
                            places[:, waiting[length].pop()] = (chosen[group.strategy], first + number, row)
            first += packing.kind.num_replicas
    order = tuple(chosen[group.strategy] for group in plan.groups)
    return Found(places[0], places[1], places[2], order, plan.time_ns)
