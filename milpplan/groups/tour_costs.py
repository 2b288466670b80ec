"""Rows shared by the programs of a set of strategies: group times, the choice of the tour, and the objective."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from milpplan.groups.problem import GroupedProblem, Kind
from milpplan.groups.tours import TourCost, undominated_tours
from milpplan.optimize.milp.program import ProgramBuilder


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
        highest_ns: float = 0.0,
    ) -> TourCostRows:
        """Add Z_s, y_t and the rows ``one_tour``.

        ``highest_ns`` is the largest floor of a group, which may be above all times that the strategies' tables
        allow, since these are rounded below the true times.
        """
        prices = undominated_tours(problem, used)
        longest_hidden = max((hidden for price in prices for hidden in price.hidden_ns), default=0)
        upper_bound = (
            -(-max(longest_hidden, math.ceil(highest_ns), *(serial_ns(kind) for kind in kinds)) // unit_ns) + 1
        )
        names = [problem.strategies[s].name for s in used]
        times = {
            s: builder.add_variable(f"Z[{name}]", 0, upper_bound, False)
            for s, name in zip(used, names, strict=True)
        }
        tours = builder.add_variables([f"tour[{t}]" for t in range(len(prices))], 0, 1)
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
