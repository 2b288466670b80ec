"""The order of a step's strategies: a tour from the optimizer's home and back (Held and Karp, 1962).

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
from dataclasses import dataclass

from milpplan.groups.problem import GroupedProblem

# Sets of more strategies than this are priced by their cheapest tour, without its hidden gradients.
_MAX_LISTED = 4

_States = dict[tuple[frozenset[int], int], tuple[int, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class Tour:
    """Home, order of the strategies that hold sequences, and the time of the step in ns."""

    home: int
    order: tuple[int, ...]
    time_ns: int


def tour_time_ns(problem: GroupedProblem, home: int, order: tuple[int, ...], group_ns: dict[int, int]) -> int:
    """Time of a step: the formula of the module, ``group_ns`` being the Z of every strategy in ``order``."""
    total = problem.finish_of(home)
    previous = home
    for position, strategy in enumerate(order):
        total += _visit_ns(problem, previous, strategy, group_ns, first=position == 0)
        previous = strategy
    return total + _gradients_ns(problem, previous, home)


def _visit_ns(
    problem: GroupedProblem, before: int, strategy: int, group_ns: dict[int, int] | None, first: bool
) -> int:
    """Switch, group and reduction; with no ``group_ns``, the part that no group can hide."""
    parameters = 0 if before == strategy else int(problem.switches.parameters_ns[before, strategy])
    gradients = 0 if first else _gradients_ns(problem, before, strategy)
    group = 0 if group_ns is None else max(group_ns[strategy], gradients)
    return parameters + group + problem.strategies[strategy].reduce_ns


def _gradients_ns(problem: GroupedProblem, before: int, after: int) -> int:
    return 0 if before == after else int(problem.switches.gradients_ns[before, after])


def best_tour(problem: GroupedProblem, used: tuple[int, ...], group_ns: dict[int, int]) -> Tour:
    """The least time over all homes and orders of ``used``, by dynamic programming over (visited, last)."""
    return min(
        (_best_from(problem, home, used, group_ns) for home in problem.home_choices),
        key=lambda tour: (tour.time_ns, tour.home, tour.order),
    )


def least_overhead_ns(problem: GroupedProblem, used: tuple[int, ...]) -> int:
    """What any step with exactly these strategies costs beyond the sum of its groups' times, at least.

    The best tour with hidden gradients left out: max(Z, G) >= Z, everything else is counted.
    """
    return min(_best_from(problem, home, used, None).time_ns for home in problem.home_choices)


def _best_from(problem: GroupedProblem, home: int, used: tuple[int, ...], group_ns: dict[int, int] | None) -> Tour:
    states: _States = {
        (frozenset((one,)), one): (_visit_ns(problem, home, one, group_ns, first=True), (one,)) for one in used
    }
    for _ in range(len(used) - 1):
        states = _longer(problem, states, used, group_ns)
    time_ns, order = min(
        (time_ns + _gradients_ns(problem, last, home), order) for (_, last), (time_ns, order) in states.items()
    )
    return Tour(home, order, time_ns + problem.finish_of(home))


def _longer(
    problem: GroupedProblem, states: _States, used: tuple[int, ...], group_ns: dict[int, int] | None
) -> _States:
    """The best ways to have visited one strategy more."""
    longer: _States = {}
    for (visited, last), (time_ns, order) in states.items():
        for one in used:
            if one in visited:
                continue
            way = (time_ns + _visit_ns(problem, last, one, group_ns, first=False), (*order, one))
            key = (visited | {one}, one)
            longer[key] = min(way, longer.get(key, way))
    return longer


@dataclass(frozen=True, slots=True)
class TourPrice:
    """What an order adds: ``constant_ns``, and the time that every group takes at least, its hidden gradients."""

    constant_ns: int
    hidden_ns: tuple[int, ...]


def tour_prices(problem: GroupedProblem, used: tuple[int, ...]) -> tuple[TourPrice, ...]:
    """Prices of all tours of ``used`` that no other tour's price is at least as good as; hidden as in ``used``.

    A step of the tour takes ``constant_ns + sum_s max(Z_s, hidden_s)``, so the least over these is exact. Larger
    sets get one price from below: the cheapest tour without what it hides.
    """
    if len(used) > _MAX_LISTED:
        return (TourPrice(least_overhead_ns(problem, used), (0,) * len(used)),)
    nothing = dict.fromkeys(used, 0)
    prices = set()
    for home, order in itertools.product(problem.home_choices, itertools.permutations(used)):
        hidden = {b: _gradients_ns(problem, a, b) for a, b in itertools.pairwise(order)}
        total = tour_time_ns(problem, home, order, nothing) - sum(hidden.values())
        prices.add(TourPrice(total, tuple(hidden.get(one, 0) for one in used)))
    kept: list[TourPrice] = []
    for price in sorted(prices, key=lambda price: (price.constant_ns, price.hidden_ns)):
        if not any(all(a <= b for a, b in zip(other.hidden_ns, price.hidden_ns, strict=True)) for other in kept):
            kept.append(price)
    return tuple(kept)
