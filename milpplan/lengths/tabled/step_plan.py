"""A plan of a grouped step, its exact simulation, and the check that it runs every sequence within memory.

**Tours**: the order of a step's strategies is a tour from the optimizer's home and back (Held and Karp, 1962).

A step with the home h and the order s_1, ..., s_n of the strategies that hold sequences takes

    sum_i [ P(s_{i-1}, s_i) + max(Z_i, G(s_{i-1}, s_i)) + R_i ]  +  G(s_n, h)  +  finish_h,    s_0 = h,

with Z_i the time of the group's pipelines, R_i its reduction, P the parameters' switch before the group and G
the accumulated gradients', hidden behind the next group. Nothing is accumulated before s_1, so its G is left out;
P(s, s) = G(s, s) = 0. The home may be anywhere in the order, or hold no sequences. At the end the gradients go
home, with nothing to hide behind, but no parameters: the optimizer makes new ones there.

Source: HotSPa (SOSP 2024) as in Hetu's trainer: ALLOC in the home, the groups, UPDATE in the home; parameters
wait for the switch, gradients are added after the next group. HotSPa's home holds the longest sequences and runs
last (s_n = h); here that is one order among all.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from milpplan.errors import IllegalPlanError
from milpplan.lengths.tabled.problem import GroupedProblem, Int64Array, Kind, pipeline_times_ns
from milpplan.optimize.milp.program import ProgramBuilder

_States = dict[tuple[frozenset[int], int], tuple[int, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class Tour:
    """Home, order of the strategies that hold sequences, and the time of the step in ns."""

    home: int
    order: tuple[int, ...]
    time_ns: int


def tour_time_ns(problem: GroupedProblem, home: int, order: tuple[int, ...], group_ns: dict[int, int]) -> int:
    """Return the time of a step by the formula of the module; ``group_ns`` are the Z of ``order``."""
    total = problem.finish_of(home)
    previous = home
    for position, strategy in enumerate(order):
        total += _visit_ns(problem, previous, strategy, group_ns, first=position == 0)
        previous = strategy
    return total + _gradients_ns(problem, previous, home)


def _visit_ns(
    problem: GroupedProblem, previous: int, strategy: int, group_ns: dict[int, int] | None, first: bool
) -> int:
    """Return the time of switch, group and reduction; without ``group_ns``, the part that no group can hide."""
    parameters = 0 if previous == strategy else int(problem.switches.parameters_ns[previous, strategy])
    gradients = 0 if first else _gradients_ns(problem, previous, strategy)
    group = 0 if group_ns is None else max(group_ns[strategy], gradients)
    return parameters + group + problem.strategies[strategy].reduce_ns


def _gradients_ns(problem: GroupedProblem, source: int, target: int) -> int:
    """Return the time of the gradients' switch, ns."""
    return 0 if source == target else int(problem.switches.gradients_ns[source, target])


def best_tour(problem: GroupedProblem, used: tuple[int, ...], group_ns: dict[int, int]) -> Tour:
    """Return the fastest tour over all homes and orders of ``used``, by dynamic programming."""
    return min(
        (_best_from(problem, home, used, group_ns) for home in problem.home_choices),
        key=lambda tour: (tour.time_ns, tour.home, tour.order),
    )


def least_overhead_ns(problem: GroupedProblem, used: tuple[int, ...]) -> int:
    """Return a lower bound of a step's time beyond the sum of its groups' times, for exactly these strategies.

    It is the best tour with hidden gradients left out: max(Z, G) >= Z, everything else is counted.
    """
    return min(_best_from(problem, home, used, None).time_ns for home in problem.home_choices)


def _best_from(problem: GroupedProblem, home: int, used: tuple[int, ...], group_ns: dict[int, int] | None) -> Tour:
    """Return the fastest tour from one home."""
    states: _States = {
        (frozenset((strategy,)), strategy): (_visit_ns(problem, home, strategy, group_ns, first=True), (strategy,))
        for strategy in used
    }
    for _ in range(len(used) - 1):
        states = _extended(problem, states, used, group_ns)
    time_ns, order = min(
        (time_ns + _gradients_ns(problem, last, home), order) for (_, last), (time_ns, order) in states.items()
    )
    return Tour(home, order, time_ns + problem.finish_of(home))


def _extended(
    problem: GroupedProblem, states: _States, used: tuple[int, ...], group_ns: dict[int, int] | None
) -> _States:
    """Extend the best partial tours by one strategy."""
    longer: _States = {}
    for (visited, last), (time_ns, order) in states.items():
        for strategy in used:
            if strategy in visited:
                continue
            partial_tour = (
                time_ns + _visit_ns(problem, last, strategy, group_ns, first=False),
                (*order, strategy),
            )
            key = (visited | {strategy}, strategy)
            longer[key] = min(partial_tour, longer.get(key, partial_tour))
    return longer


@dataclass(frozen=True, slots=True)
class TourCost:
    """Cost of a tour: ``constant_ns``, and the minimum time of every group that hides gradients behind it."""

    constant_ns: int
    hidden_ns: tuple[int, ...]


def undominated_tours(problem: GroupedProblem, used: tuple[int, ...]) -> tuple[TourCost, ...]:
    """Return the costs of all tours of ``used`` that no other tour dominates; ``hidden_ns`` in the order of
    ``used``.

    A step of the tour takes ``constant_ns + sum_s max(Z_s, hidden_s)``, so the minimum over these costs is exact.
    Sets of more than four strategies get one cost from below: the cheapest tour without its hidden gradients.
    """
    if len(used) > 4:
        return (TourCost(least_overhead_ns(problem, used), (0,) * len(used)),)
    nothing = dict.fromkeys(used, 0)
    prices = set()
    for home, order in itertools.product(problem.home_choices, itertools.permutations(used)):
        hidden = {
            strategy: _gradients_ns(problem, previous, strategy)
            for previous, strategy in itertools.pairwise(order)
        }
        total = tour_time_ns(problem, home, order, nothing) - sum(hidden.values())
        prices.add(TourCost(total, tuple(hidden.get(strategy, 0) for strategy in used)))
    kept: list[TourCost] = []
    for price in sorted(prices, key=lambda price: (price.constant_ns, price.hidden_ns)):
        if not any(all(a <= b for a, b in zip(other.hidden_ns, price.hidden_ns, strict=True)) for other in kept):
            kept.append(price)
    return tuple(kept)


@dataclass(frozen=True, slots=True)
class TourCostRows:
    """Columns of the group times by strategy and of the tours, with the tours' constants in units."""

    times: dict[int, int]
    tours: range
    constants: tuple[int, ...]

    @staticmethod
    def add(
        builder: ProgramBuilder,
        problem: GroupedProblem,
        used: tuple[int, ...],
        kinds: Sequence[Kind],
        unit_ns: int,
    ) -> TourCostRows:
        """Add Z_s, y_t and the rows ``one_tour``."""
        prices = undominated_tours(problem, used)
        longest_hidden = max((hidden for price in prices for hidden in price.hidden_ns), default=0)
        upper_bound = -(-max(longest_hidden, *(serial_ns(kind) for kind in kinds)) // unit_ns) + 1
        names = [problem.strategies[s].name for s in used]
        times = {
            s: builder.add_variable(f"Z[{name}]", 0, upper_bound, False)
            for s, name in zip(used, names, strict=True)
        }
        tours = builder.add_variables([f"tour[{t}]" for t in range(len(prices))], 1)
        one_tour(builder, tours, times, prices, unit_ns)
        return TourCostRows(times, tours, tuple(price.constant_ns // unit_ns for price in prices))

    def minimize(self, builder: ProgramBuilder) -> None:
        """Set the objective: the time of the step."""
        builder.minimize([*self.times.values(), *self.tours], [1] * len(self.times) + list(self.constants))


def one_tour(
    builder: ProgramBuilder, tours: range, times: dict[int, int], prices: tuple[TourCost, ...], unit_ns: int
) -> None:
    """sum_t y_t = 1; Z_s >= sum_t hidden_ts y_t."""
    builder.add_row("one_tour", tours, [1] * len(tours), 1, 1)
    for position, (strategy, column) in enumerate(times.items()):
        hidden = [-(price.hidden_ns[position] // unit_ns) for price in prices]
        if any(hidden):
            builder.add_row(f"gradients_hide[{strategy}]", [column, *tours], [1, *hidden], 0)


def every_strategy_is_used(builder: ProgramBuilder, name: str, sequences: Sequence[int]) -> None:
    """sum of the strategy's sequences >= 1."""
    builder.add_row(f"every_strategy_is_used[{name}]", sequences, [1] * len(sequences), 1)


def serial_ns(kind: Kind) -> int:
    """Return the time of all fitting sequences on one replica, one micro-batch each, without overlap.

    No packing takes longer.
    """
    pipeline = kind.pipeline
    number = int(kind.counts[kind.fits].sum())
    work = pipeline.parts * (kind.total_units + number * pipeline.micro_batch_units)
    return pipeline.num_stages * (work + 2 * pipeline.transfer_ns * number)


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

    @cached_property
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

    @cached_property
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
