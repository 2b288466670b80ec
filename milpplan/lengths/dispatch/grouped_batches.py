"""Batches under the strategies of a plan on tables.

The optimizer stays where the plan has it; a strategy may be idle in some step. The linear bounds of a strategy's
group with Z its time, W the work of its sequences in ns of a stage, T their tokens, D replicas of P stages, C
the capacity of a micro-batch, c its constant and l a transfer, follow from the *last stage* and the *inflation*
of ``count_cuts``:

    Z >= (W + c T / C) / D + (P - 1) (c + 2 l)      the last stage runs at least T / C micro-batches, after a ramp,
    Z >= W / D + c + (P - 1) (c + 2 l)              and at least one,
    Z >= r W / D                                    with the inflation r.

Replicas of several kinds j share the work: with any weights w_j >= 0 of sum 1 and the kinds' bounds Z >= a_j +
e_j, Z >= min over j of w_j a_j for each sequence, plus min e_j (the weights of the kinds that run something add
up to at most 1). One bound has weights in proportion to the kinds' speeds; others leave out the kinds that hold
only short sequences.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from milpplan.errors import InfeasibleError, InvalidInputError, SolverError
from milpplan.lengths.bounds import LinearBounds, PipelineCuts
from milpplan.lengths.dispatch.batch_planning import (
    BatchSearch,
    BatchStrategy,
    PlannedBatch,
    Replicas,
    indexed,
    indices_by_length,
)
from milpplan.lengths.search_parameters import SAFETY
from milpplan.lengths.tabled import (
    Group,
    GroupedPlan,
    GroupedProblem,
    Kind,
    Packing,
    SwitchTimes,
    arranged,
    solve_groups,
)
from milpplan.lengths.tabled.assignment_program import alone_ns
from milpplan.lengths.tabled.local_search import KindTimes
from milpplan.simulation import FloatArray, IntArray

# Relative gap at which the search for a batch that fits only just ends, and its time limit in seconds.
_GAP, _TIME_LIMIT_S = 0.02, 5.0
# Maximum number of strategies, all sets of which are bounded.
_MAX_STRATEGIES = 6


class GroupedBatches:
    """Planner of batches under the strategies of a plan, its home included."""

    alignment = 1

    def __init__(self, plan: GroupedPlan) -> None:
        """Prepare the tables.

        Raises:
            InvalidInputError: the plan has too many strategies.
        """
        members = tuple(sorted({*plan.order, plan.home}))
        if len(members) > _MAX_STRATEGIES:
            raise InvalidInputError(
                f"The plan has {len(members)} strategies.",
                f"At most {_MAX_STRATEGIES} expected.",
                "Plan again with a lower max_strategies.",
            )
        problem, rows = plan.problem, np.ix_(members, members)
        switches = problem.switches
        self.problem = replace(
            problem,
            strategies=tuple(problem.strategies[member] for member in members),
            switches=SwitchTimes(switches.parameters_ns[rows], switches.gradients_ns[rows]),
            max_strategies=min(problem.max_strategies, len(members)),
            homes=(members.index(plan.home),),
            finish_ns=tuple(problem.finish_of(member) for member in members),
        )
        self.home_name = problem.strategies[plan.home].name
        pipelines = [pipeline for strategy in self.problem.strategies for pipeline in strategy.replicas]
        self.longest = max(
            min(pipeline.micro_batch_tokens, pipeline.in_flight_tokens or pipeline.micro_batch_tokens)
            for pipeline in pipelines
        )

    def planned(self, lengths: IntArray, *, thorough: bool = False) -> PlannedBatch:
        """Plan the batch of sequences of ``lengths`` [n]; there is one search only.

        Raises:
            SolverError: no packing within memory was found, after some seconds.
        """
        distinct, places, counts = np.unique(lengths, return_inverse=True, return_counts=True)
        problem = replace(self.problem, lengths=distinct, counts=counts)
        strategies = [_batch_strategy(problem, member) for member in range(len(problem.strategies))]
        search = BatchSearch(problem, strategies, counts)
        replicas = search.run(problem.max_strategies)
        # With nearly full memory the fast packing may fail.
        plan = arranged(problem, _groups(problem, replicas)) if replicas else _solved(problem)
        indices = indices_by_length(places)
        return PlannedBatch(
            plan.names,
            tuple(
                indexed(tuple(rows for packing in group.packings for rows in packing.replicas), indices)
                for group in plan.groups
            ),
            plan.time_ns,
            math.floor(min(plan.time_ns, search.bound_ns)),
        )


def _groups(problem: GroupedProblem, replicas: dict[int, Replicas]) -> list[Group]:
    """Return the groups of replicas, kind after kind."""
    groups = []
    for member, rows in replicas.items():
        remaining = iter(rows)
        packings = [
            Packing(kind, tuple(next(remaining) for _ in range(kind.num_replicas)))
            for kind in problem.kinds_of(member)
        ]
        groups.append(Group(member, tuple(packings)))
    return groups


def _solved(problem: GroupedProblem) -> GroupedPlan:
    """Solve a batch that the fast packing does not place.

    Raises:
        SolverError: no plan was found, or there is none.
    """
    try:
        return solve_groups(problem, "auto", _GAP, _TIME_LIMIT_S, waits=False).plan
    except (SolverError, InfeasibleError) as error:
        raise SolverError(
            f"No packing of {problem.num_sequences} sequences was found within memory.",
            "Every sequence fits somewhere alone, but all together were not placed.",
            "Dispatch fewer sequences a step, or plan with larger micro-batches.",
        ) from error


def _batch_strategy(problem: GroupedProblem, member: int) -> BatchStrategy:
    """Return one strategy with the lengths of a batch."""
    kinds = problem.kinds_of(member)
    return BatchStrategy(
        tuple((KindTimes(kind), kind.num_replicas) for kind in kinds),
        group_bounds(kinds),
        float(alone_ns(problem, member)[-1]),
    )


def group_bounds(kinds: Sequence[Kind]) -> LinearBounds:
    """Return the linear bounds of the module for a group of these kinds."""
    fitting = [kind for kind in kinds if kind.fits.any()]
    if not fitting:
        return LinearBounds(np.full((1, len(kinds[0].lengths)), np.inf), np.zeros(1))
    of_kinds = [_kind_bounds(kind) for kind in fitting]
    shares, constants = [], []
    for longest in sorted({int(np.flatnonzero(kind.fits)[-1]) for kind in fitting}):
        holds = np.array([bool(kind.fits[longest]) for kind in fitting])
        common = np.logical_and.reduce([kind.fits for kind, held in zip(fitting, holds, strict=True) if held])
        for row in range(len(of_kinds[0].constants)):
            times = np.array([bounds.shares[row] for bounds in of_kinds])
            totals = np.where(holds, (np.where(common, times, 0.0) * kinds[0].counts).sum(axis=1), np.inf)
            speeds = 1.0 / np.maximum(1e-9, totals)
            weights = (speeds / speeds.sum())[:, None]
            is_held = np.isfinite(times)
            shares.append(np.where(is_held, np.where(is_held, times, 0.0) * weights, np.inf).min(axis=0))
            constants.append(min(float(bounds.constants[row]) for bounds in of_kinds))
    return LinearBounds(np.array(shares) * SAFETY, np.array(constants) * SAFETY)


def _kind_bounds(kind: Kind) -> LinearBounds:
    """Return the linear bounds of the module for one kind."""
    pipeline = kind.pipeline
    empty_ns = float(pipeline.parts * pipeline.micro_batch_units)
    ramp_ns = (pipeline.num_stages - 1) * (empty_ns + 2 * pipeline.transfer_ns)
    work: FloatArray = np.where(kind.fits, kind.units * float(pipeline.parts), np.inf) / kind.num_replicas
    per_token = empty_ns / (pipeline.micro_batch_tokens * kind.num_replicas)
    return LinearBounds(
        np.array([work + per_token * kind.lengths, work, work * PipelineCuts(kind).inflation]),
        np.array([ramp_ns, ramp_ns + empty_ns, 0.0]),
    )
