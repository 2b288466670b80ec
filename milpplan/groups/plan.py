"""A plan of a grouped step, its exact simulation, and the check that it runs every sequence within memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from milpplan.errors import IllegalPlanError
from milpplan.groups.problem import GroupedProblem, Int64Array, Kind, pipeline_times_ns
from milpplan.groups.tours import best_tour, tour_time_ns


@dataclass(frozen=True, eq=False)
class Packing:
    """Sequences of every micro-batch of every replica of a kind: arrays [micro-batches, K] of counts."""

    kind: Kind
    replicas: tuple[Int64Array, ...]

    def loads(self, replica: int) -> Int64Array:
        """Return the units of the micro-batches of a replica, empty micro-batch included, [micro-batches]."""
        return np.asarray(self.replicas[replica] @ self.kind.units + self.kind.pipeline.micro_batch_units)

    def times_ns(self) -> Int64Array:
        """Return the exact time of every replica, [replicas]."""
        times = [
            int(pipeline_times_ns(self.kind.pipeline, self.loads(replica)))
            for replica in range(len(self.replicas))
        ]
        return np.array(times, np.int64)

    @property
    def time_ns(self) -> int:
        """Time of the slowest replica, ns."""
        return int(self.times_ns().max(initial=0))


def in_flight_fits(kind: Kind, replica: Int64Array) -> bool:
    """Check that every ``num_stages`` consecutive micro-batches [v, K] fit in the tokens in flight."""
    limit = kind.pipeline.in_flight_tokens
    if limit is None or not len(replica):
        return True
    tokens = np.concatenate(([0], np.cumsum(replica @ kind.lengths)))
    width = min(kind.pipeline.num_stages, len(replica))
    return bool((tokens[width:] - tokens[:-width] <= limit).all())


@dataclass(frozen=True, eq=False)
class Group:
    """The sequences of one strategy: a packing for every kind of its pipelines."""

    strategy: int
    packings: tuple[Packing, ...]

    @property
    def time_ns(self) -> int:
        """Time of the slowest replica of any kind, ns."""
        return max(packing.time_ns for packing in self.packings)

    @property
    def counts(self) -> Int64Array:
        """Sequences of every length, [K]."""
        return np.asarray(sum(replica.sum(axis=0) for packing in self.packings for replica in packing.replicas))


@dataclass(frozen=True, slots=True)
class Event:
    """One action of a step, from ``start_ns`` to ``end_ns``; a gradient switch runs beside the group after it."""

    kind: Literal["parameters", "gradients", "group", "reduce", "finish"]
    strategy: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True, eq=False)
class GroupedPlan:
    """Groups in the order they run, the optimizer's home, and the exact time of the step."""

    problem: GroupedProblem
    home: int
    groups: tuple[Group, ...]
    time_ns: int

    @property
    def order(self) -> tuple[int, ...]:
        """Strategies in the order they run."""
        return tuple(group.strategy for group in self.groups)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the strategies in the order they run."""
        return tuple(self.problem.strategies[strategy].name for strategy in self.order)


def arranged(problem: GroupedProblem, groups: list[Group]) -> GroupedPlan:
    """Arrange the groups in their best order from the best home, and check the plan."""
    group_of = {group.strategy: group for group in groups if group.counts.any()}
    times = {strategy: group.time_ns for strategy, group in group_of.items()}
    tour = best_tour(problem, tuple(sorted(group_of)), times)
    plan = GroupedPlan(problem, tour.home, tuple(group_of[strategy] for strategy in tour.order), tour.time_ns)
    check(plan)
    return plan


def check(plan: GroupedPlan) -> None:
    """Raise ``IllegalPlanError`` if the plan drops or repeats a sequence, breaks memory or states a wrong time."""
    problem = plan.problem
    if len(set(plan.order)) != len(plan.order) or len(plan.order) > problem.max_strategies:
        raise IllegalPlanError(
            f"The plan's order is {plan.order}.", f"At most {problem.max_strategies} distinct strategies expected."
        )
    planned_counts = sum((group.counts for group in plan.groups), np.zeros(problem.lengths.size, np.int64))
    if (planned_counts != problem.counts).any():
        index = int(np.flatnonzero(planned_counts != problem.counts)[0])
        raise IllegalPlanError(
            f"The plan runs {int(planned_counts[index])} sequences of {int(problem.lengths[index])} tokens.",
            f"{int(problem.counts[index])} expected.",
        )
    for group in plan.groups:
        for packing in group.packings:
            _check_packing(problem, packing)
    exact = simulate(plan)[-1].end_ns
    if exact != plan.time_ns:
        raise IllegalPlanError(f"The plan states {plan.time_ns} ns.", f"Its simulation takes {exact} ns.")


def _check_packing(problem: GroupedProblem, packing: Packing) -> None:
    """Raise ``IllegalPlanError`` if a micro-batch or replica breaks its limits."""
    pipeline = packing.kind.pipeline
    for replica in packing.replicas:
        tokens = replica @ problem.lengths
        limit = pipeline.max_micro_batches
        if (tokens > pipeline.micro_batch_tokens).any() or (replica < 0).any() or (tokens == 0).any():
            raise IllegalPlanError(
                f"A micro-batch of {int(tokens.max())} tokens on {pipeline.name}.",
                f"1 to {pipeline.micro_batch_tokens} expected.",
            )
        if not in_flight_fits(packing.kind, replica) or (limit is not None and len(replica) > limit):
            raise IllegalPlanError(
                f"A replica of {pipeline.name} runs {len(replica)} micro-batches of {tokens.tolist()} tokens.",
                f"At most {limit} micro-batches, {pipeline.in_flight_tokens} tokens in flight, expected.",
            )


def simulate(plan: GroupedPlan) -> list[Event]:
    """List all actions of a step, in order of their ends; the last event ends the step."""
    problem, switches = plan.problem, plan.problem.switches
    events: list[Event] = []
    now, previous = 0, plan.home
    for position, group in enumerate(plan.groups):
        strategy = group.strategy
        if previous != strategy:
            end = now + int(switches.parameters_ns[previous, strategy])
            events.append(Event("parameters", strategy, now, end))
            now = end
        group_end = now + group.time_ns
        events.append(Event("group", strategy, now, group_end))
        if previous != strategy and position:
            moved = now + int(switches.gradients_ns[previous, strategy])
            events.append(Event("gradients", strategy, now, moved))
            group_end = max(group_end, moved)
        now = group_end + problem.strategies[strategy].reduce_ns
        events.append(Event("reduce", strategy, group_end, now))
        previous = strategy
    if previous != plan.home:
        end = now + int(switches.gradients_ns[previous, plan.home])
        events.append(Event("gradients", plan.home, now, end))
        now = end
    events.append(Event("finish", plan.home, now, now + problem.finish_of(plan.home)))
    times = {group.strategy: group.time_ns for group in plan.groups}
    assert events[-1].end_ns == tour_time_ns(problem, plan.home, plan.order, times)
    return events
