"""The best order of strategies that take turns, and what it adds to their groups' times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from milpplan.groups.problem import GroupedProblem
from milpplan.groups.strategies import SwitchTimes
from milpplan.groups.tours import best_tour, least_overhead_ns
from milpplan.lengths.steps import Step
from milpplan.lengths.strategy_tables import Packed, StrategyTables
from milpplan.lengths.switches import Switches
from milpplan.simulation.layout_columns import IntArray


@dataclass(frozen=True, eq=False)
class Orders:
    """Of strategies of a pool, with the ``switches`` that were priced."""

    pool: StrategyTables
    switches: Switches

    def problem(self, members: list[int], times: SwitchTimes) -> GroupedProblem:
        """That of ``groups`` for some strategies, all of which may take turns, with their true reductions."""
        return GroupedProblem(
            self.pool.load.lengths,
            self.pool.load.counts,
            tuple(self.pool.strategy_with_true_reduction(member, shared_memory=True) for member in members),
            times,
            max_strategies=len(members),
            finish_ns=tuple(self.pool.finish_ns(member) for member in members),
        )

    def least_ns(self, members: list[int], times: SwitchTimes) -> int:
        """What the cheapest order of all of them adds to their reductions and the least finish, ns."""
        whole_ns = least_overhead_ns(self.problem(members, times), tuple(range(len(members))))
        return whole_ns - self.pool.fixed_cost_ns(members)

    def best(self, members: list[int], packed: Mapping[int, Packed]) -> Step:
        """Groups in their best order; the home is one of the ``members`` that runs something: sets are bounded
        with all of their members at work."""
        running = [member for member in members if member in packed]
        times = {place: packed[member].time_ns for place, member in enumerate(running)}
        tour = best_tour(self.problem(running, self.switches.times(running)), tuple(times), times)
        return Step(running[tour.home], tuple(running[one] for one in tour.order), dict(packed), tour.time_ns)

    def arranged(
        self, members: list[int], counts: Mapping[int, IntArray], deadline: float = float("inf")
    ) -> Step | None:
        """The groups packed and timed exactly, in the best order, with little care after the ``deadline``; none
        where one was not packed."""
        packed = {}
        for member, held in counts.items():
            found = self.pool.pack(member, held, self.pool.members[member].shared_memory_quanta, deadline)
            if found is None:
                return None
            packed[member] = found
        return self.best(members, packed)
