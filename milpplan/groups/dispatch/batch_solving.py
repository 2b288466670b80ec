"""A batch that the fast heuristics cannot pack, solved as a grouped step in seconds; for nearly full memory."""

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

# Relative gap at which the search ends, and its time limit in seconds: any packing will do.
_GAP, _TIME_LIMIT_S = 0.02, 5.0


@dataclass(frozen=True, slots=True, eq=False)
class BatchPlan:
    """Strategy, replica and micro-batch of each sequence [n], the order of the strategies, and the exact time."""

    strategy: Int64Array
    replica: Int64Array
    micro_batch: Int64Array
    order: tuple[int, ...]
    time_ns: int


def solve_batch(problem: GroupedProblem, strategies: Sequence[int], home: int, lengths: Int64Array) -> BatchPlan:
    """Plan sequences of ``lengths`` [n] under some of a problem's strategies, with the home given.

    Raises:
        SolverError: no plan was found, or there is none.
    """
    workload, chosen = workload_of(lengths), list(strategies)
    switches = problem.switches
    batch_problem = GroupedProblem(
        workload.lengths,
        workload.counts,
        tuple(problem.strategies[s] for s in chosen),
        SwitchTimes(
            *(matrix[np.ix_(chosen, chosen)] for matrix in (switches.parameters_ns, switches.gradients_ns))
        ),
        min(problem.max_strategies, len(chosen)),
        homes=(chosen.index(home),),
        finish_ns=tuple(problem.finish_of(s) for s in chosen),
    )
    try:
        plan = solve_groups(batch_problem, "auto", _GAP, _TIME_LIMIT_S, waits=False).plan
    except (SolverError, InfeasibleError) as error:
        raise SolverError(
            f"No packing of {lengths.size} sequences was found within memory.",
            "Every sequence fits somewhere alone, but all together were not placed.",
            "Dispatch fewer sequences a step, or plan with larger micro-batches.",
        ) from error
    return _batch_plan(plan, chosen, lengths)


def _batch_plan(plan: GroupedPlan, chosen: list[int], lengths: Int64Array) -> BatchPlan:
    """Assign the plan's positions to the batch's sequences: of every length, the first sequences first."""
    positions = np.zeros((3, lengths.size), dtype=np.int64)
    unplaced = {length: np.flatnonzero(lengths == length).tolist()[::-1] for length in np.unique(lengths).tolist()}
    for group in plan.groups:
        first_replica = 0
        for packing in group.packings:
            for number, micro_batches in enumerate(packing.replicas):
                for micro_batch, counts in enumerate(micro_batches):
                    for length, count in zip(plan.problem.lengths.tolist(), counts.tolist(), strict=True):
                        for _ in range(count):
                            positions[:, unplaced[length].pop()] = (
                                chosen[group.strategy],
                                first_replica + number,
                                micro_batch,
                            )
            first_replica += packing.kind.num_replicas
    order = tuple(chosen[group.strategy] for group in plan.groups)
    return BatchPlan(positions[0], positions[1], positions[2], order, plan.time_ns)
